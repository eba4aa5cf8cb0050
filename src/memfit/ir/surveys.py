"""The records of surveys: each lever's effect on this machine, and the cards that train a workload."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import msgspec

from memfit.ir.codec import Shown
from memfit.ir.levers import Levers, LeverUse, Numerics

Outcome = Literal["kept", "does not pay", "proposed", "not available"]


class Rung(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lever on top of the levers kept before it.

    Attributes:
        outcome: "kept" where it pays; a "proposed" lever changes the model, and is compared with the plain step.
        why: The reason why it was not measured; else a description.
        levers: The levers of the step; None where it was not measured, or is another model's.
        peak_bytes: Measured peak allocated, at the workload's batch.
        step_seconds: Measured time of one update at the workload's batch: the median of the plain step, times the
            ratios of the rungs kept since.
        peak_ratio: Its peak relative to that of the rung kept before.
        step_ratio: Its time relative to that of the rung kept before, of interleaved steps.
        largest_batch: Predicted number of samples that fit the budget; None where microbatches take any number.
        samples_per_second: Throughput at `largest_batch`, predicted from the measured step; at the workload's batch
            where that is None. 0 where no sample fits.
    """

    name: str
    outcome: Outcome
    why: str = ""
    levers: Levers | None = None
    numerics: Numerics | None = None
    peak_bytes: int | None = None
    step_seconds: float | None = None
    peak_ratio: float | None = None
    step_ratio: float | None = None
    predicted_peak_bytes: int | None = None
    largest_batch: int | None = None
    samples_per_second: float | None = None

    @property
    def is_measured(self) -> bool:
        """Whether the step ran."""
        return self.peak_bytes is not None


class Ladder(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rungs in the order of measurement, the plain step first.

    Attributes:
        is_budget_given: Whether the user gave it; otherwise it is the plain step's measured peak.
        threads: Number of PyTorch's threads during the measurements.
    """

    schema: str = "memfit.ladder/1"
    memfit_version: str
    torch_version: str
    workload: str
    fingerprint: str
    device: str
    threads: int
    batch_size: int
    budget_bytes: int
    is_budget_given: bool
    allowed: Numerics
    rungs: list[Rung]

    @property
    def top(self) -> Rung:
        """The last rung that was kept, with the levers of all that pay."""
        return next(rung for rung in reversed(self.rungs) if rung.outcome == "kept")


_Item = TypeVar("_Item")


def pareto(items: Iterable[_Item], size: Callable[[_Item], float], value: Callable[[_Item], float]) -> list[_Item]:
    """Return the items than which no other is as small in size and in value, from the smallest size on."""
    found: list[_Item] = []
    least = math.inf
    for item in sorted(items, key=lambda item: (size(item), value(item))):
        if not found or value(item) < least:
            found.append(item)
            least = value(item)
    return found


class CardPrice(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of one card, as the user's file has it.

    Attributes:
        currency: As it is shown ("USD").
        date: The day on which it was so.
    """

    per_hour: float
    currency: str
    date: datetime.date


class FleetRow(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some cards of a kind, with the fastest plan that was found for them.

    Attributes:
        ranks: Cards (> 0), of which each runs one rank.
        nodes: Nodes that they fill (> 0).
        budget_bytes: What a card may hold.
        peak_bytes: Peak allocated on the card that holds most.
        held_bytes: Upper end of what its allocator reserves, which is held against the budget.
        step_seconds: One optimizer update at the global batch.
        cost: Of all cards for these hours; None without a price.
        currency: Of the cost; "" without one.
    """

    device: str
    ranks: int
    nodes: int
    levers: Levers
    uses: tuple[LeverUse, ...]
    numerics: Numerics
    budget_bytes: int
    peak_bytes: int
    held_bytes: int
    step_seconds: float
    hours: float
    cost: float | None = None
    currency: str = ""


class Misfit(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A card on which nothing fits.

    Attributes:
        ranks: Cards with which the least was held.
        held_bytes: The least that was found for them, with its error bar.
        budget_bytes: What a card may hold.
    """

    device: str
    ranks: int
    held_bytes: int
    budget_bytes: int


class Fleet(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `memfit.fleet` found.

    Attributes:
        batch_size: Samples of the global batch, which ranks share.
        budget: What a card may hold, as it was given.
        within_hours: What it may take; None for any time.
        step_error: Relative half-width of the interval around the times.
        rows: The fleets, by card, then by ranks.
    """

    schema: str = "memfit.fleet/1"
    memfit_version: str
    torch_version: str
    workload: str
    fingerprint: str
    batch_size: int
    budget: str
    steps: int
    within_hours: float | None
    allowed: Numerics
    step_error: float
    rows: list[FleetRow]
    misfits: list[Misfit] = []
    prices: dict[str, CardPrice] = {}
    notes: list[str] = []

    @property
    def in_time(self) -> list[FleetRow]:
        """The rows that are done in time: all without a limit."""
        return [row for row in self.rows if self.within_hours is None or row.hours <= self.within_hours]

    @property
    def fewest(self) -> FleetRow | None:
        """The fewest cards that are done in time, of those the fastest; None where none are."""
        return min(self.in_time, key=lambda row: (row.ranks, row.hours), default=None)

    @property
    def cheapest(self) -> FleetRow | None:
        """The cheapest row with a price that is done in time; None where there is none, or in several currencies."""
        return min(_priced(self.in_time), key=lambda row: (row.cost or 0.0, row.hours), default=None)

    @property
    def fastest(self) -> FleetRow | None:
        """The fastest row, in time or not; None where nothing fits."""
        return min(self.rows, key=lambda row: (row.hours, row.ranks), default=None)

    @property
    def front(self) -> list[FleetRow]:
        """The rows than which no other has as few cards in as few hours, from the fewest cards to the most."""
        return pareto(self.rows, lambda row: row.ranks, lambda row: row.hours)

    @property
    def front_by_cost(self) -> list[FleetRow]:
        """The rows with a price than which no other costs as little in as few hours, the cheapest first."""
        return pareto(_priced(self.rows), lambda row: row.cost or 0.0, lambda row: row.hours)

    def answers(self) -> dict[str, object]:
        """Return the answers as plain values, for JSON: of each row the fields that identify it in `rows`."""
        names = ("device", "ranks", "nodes", "step_seconds", "hours", "cost", "currency")

        def plain(row: FleetRow | None) -> dict[str, object] | None:
            return None if row is None else {name: msgspec.to_builtins(getattr(row, name)) for name in names}

        return {
            "fewest": plain(self.fewest),
            "cheapest": plain(self.cheapest),
            "fastest": plain(self.fastest),
            "front": [plain(row) for row in self.front],
            "front_by_cost": [plain(row) for row in self.front_by_cost],
        }


def _priced(rows: list[FleetRow]) -> list[FleetRow]:
    """Return the rows with a price; none where these are in several currencies."""
    priced = [row for row in rows if row.cost is not None]
    return priced if len({row.currency for row in priced}) <= 1 else []
