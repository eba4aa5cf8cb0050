"""A fleet: cards and numbers of ranks that train a workload, with their plans, times and costs."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

import msgspec

from memfit.ir.display import Shown
from memfit.ir.plan import Levers, LeverUse, Numerics


class CardPrice(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of one card, as the user's file has it.

    Attributes:
        per_hour: Of one card for an hour (> 0).
        currency: As it is shown ("USD").
        date: The day on which it was so.
    """

    per_hour: float
    currency: str
    date: datetime.date


class FleetRow(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some cards of a kind, with the fastest plan that was found for them.

    Attributes:
        device: The card's name.
        ranks: Cards (> 0), of which each runs one rank.
        nodes: Nodes that they fill (> 0).
        levers: The plan's.
        uses: The levers that are used, in words.
        numerics: The freest class of its levers.
        budget_bytes: What a card may hold.
        peak_bytes: Peak allocated on the card that holds most.
        held_bytes: Upper end of what its allocator reserves, which is held against the budget.
        step_seconds: One optimizer update at the global batch.
        hours: Of all steps.
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
        device: The card's name.
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
        schema: Version of the format.
        memfit_version: That made it.
        torch_version: That made it.
        workload: Name of the workload.
        fingerprint: Of its step.
        batch_size: Samples of the global batch, which ranks share.
        budget: What a card may hold, as it was given.
        steps: Steps of the training.
        within_hours: What it may take; None for any time.
        allowed: The numerics class that the user allowed.
        step_error: Relative half-width of the interval around the times.
        rows: The fleets, by card, then by ranks.
        misfits: Cards on which nothing fits.
        prices: The user's prices, by card.
        notes: What was assumed.
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
        priced = [row for row in self.in_time if row.cost is not None]
        if len({row.currency for row in priced}) > 1:
            return None
        return min(priced, key=lambda row: (row.cost or 0.0, row.hours), default=None)

    @property
    def fastest(self) -> FleetRow | None:
        """The fastest row, in time or not; None where nothing fits."""
        return min(self.rows, key=lambda row: (row.hours, row.ranks), default=None)

    @property
    def front(self) -> list[FleetRow]:
        """The rows than which no other has as few cards in as few hours, from the fewest cards to the most."""
        return pareto(self.rows, lambda row: float(row.ranks))

    @property
    def front_by_cost(self) -> list[FleetRow]:
        """The rows with a price than which no other costs as little in as few hours, the cheapest first."""
        priced = [row for row in self.rows if row.cost is not None]
        if len({row.currency for row in priced}) > 1:
            return []
        return pareto(priced, lambda row: row.cost or 0.0)

    def answers(self) -> dict[str, object]:
        """Return the answers as plain values, for JSON."""
        return {
            "fewest": _plain(self.fewest),
            "cheapest": _plain(self.cheapest),
            "fastest": _plain(self.fastest),
            "front": [_plain(row) for row in self.front],
            "front_by_cost": [_plain(row) for row in self.front_by_cost],
        }


def pareto(rows: Sequence[FleetRow], size: Callable[[FleetRow], float]) -> list[FleetRow]:
    """Return the rows than which no other has as small a size in as few hours, the smallest first."""
    found: list[FleetRow] = []
    for row in sorted(rows, key=lambda row: (size(row), row.hours)):
        if not found or row.hours < found[-1].hours:
            found.append(row)
    return found


def _plain(row: FleetRow | None) -> dict[str, object] | None:
    """Return what tells a row from others: the row itself stands among `rows`."""
    if row is None:
        return None
    names = ("device", "ranks", "nodes", "step_seconds", "hours", "cost", "currency")
    return {name: msgspec.to_builtins(getattr(row, name)) for name in names}
