"""`memfit.fleet`: cards, how many of them and with which plan, that train a workload in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from memfit import planner
from memfit.capture import without_collector
from memfit.cost import STEP_ERROR
from memfit.errors import InfeasibleError, UsageError
from memfit.foundations import Progress, __version__, format_seconds, parse_hours, read_budget, silent
from memfit.hardware import find_device, known_devices, read_prices
from memfit.ir import NUMERICS, CardPrice, Device, Fleet, FleetRow, Mode, Numerics, Precision, allows
from memfit.levers import check_as_given, check_workload, microbatch_sizes
from memfit.pipeline.verbs import checked, verb
from memfit.planner import FleetRequest, FleetSearch, joined, search
from memfit.ranks import SEARCHED
from memfit.report import of_text, stages, with_bars
from memfit.workload import Workload, fingerprint, samples_of


@checked
@with_bars(stages)
@verb
def fleet(
    workload: Workload,
    *,
    budget: int | str = "90%",
    steps: int,
    within: float | str | None = None,
    devices: Sequence[str] | None = None,
    world_sizes: Sequence[int] = range(1, 65),
    sharding: Mode | Literal["auto"] = "auto",
    numerics: Numerics = "reduced",
    precisions: Sequence[Precision] | None = None,
    prices: Mapping[str, CardPrice] | str | Path | None = None,
    each: bool = False,
    progress: Progress = silent,
) -> Fleet:
    """Return cards and numbers of ranks that train a workload, with the fastest plan found for each.

    No card need be here. The workload's batch is the global one, of which every rank runs its part, so that the number
    of cards never changes the training. Searched are microbatch sizes, activation checkpointing and shardings, in one
    precision; `memfit.plan` with the card and the number of ranks that are chosen searches the other levers too.

    Args:
        workload: The user's workload; nothing of it is changed.
        budget: What a card may hold: bytes, a string with a unit ("70GiB"), or a share of each card's memory ("90%").
        steps: Optimizer updates of the whole training (> 0).
        within: What it may take ("24h", "3d", "90min"), or hours; None for any time.
        devices: Names of cards; None for all of the catalogue.
        world_sizes: Numbers of ranks to try (≥ 1); those above the batch's samples are left out.
        sharding: How ranks share the step: "ddp", "zero2", "zero3", or "auto" for the best of them.
        numerics: How far the numbers may change: "reduced" has each card compared in the mixed precision that it is
            made for, with a note on what the fastest gives in fp32; "reordered" keeps fp32.
        precisions: Precisions to search; None for the mixed one that each card is made for, where `numerics` allows it.
        prices: The user's prices by card, or a TOML file of them (`memfit.hardware.catalogue`); None for no costs.
        each: Whether to solve for numbers of ranks too that can't be faster than fewer are.
        progress: Called with (stage, done, total); by default bars in a notebook, and nothing elsewhere.

    Raises:
        UsageError: An argument is not what it should be.
        InfeasibleError: Nothing fits on any card.
        CaptureError: The step can't be captured.
    """
    check_as_given(workload)
    of_card = read_budget(budget, of_plain=False)
    _check(steps, world_sizes, sharding, numerics)
    if set(precisions or ()) - {"32-true"} and not allows(numerics, "reduced"):
        raise UsageError(
            f"precisions={list(precisions or ())} are not allowed by numerics={numerics!r}: allow numerics='reduced'"
        )
    within_hours = None if within is None else parse_hours(within, "within")
    found_prices = dict(prices) if isinstance(prices, Mapping) else read_prices(prices) if prices is not None else {}
    options = FleetRequest(
        devices=_cards(devices),
        budget=of_card,
        steps=steps,
        world_sizes=sorted(set(world_sizes)),
        modes=SEARCHED if sharding == "auto" else (sharding,),
        numerics=numerics,
        precisions=precisions,
        prices=found_prices,
        each=each,
    )
    result = _searched(workload, options, progress)
    rows, misfits = result.rows, result.misfits
    if not rows:
        freer = "" if allows(numerics, "reduced") else " allow numerics='reduced',"
        nearest = min(misfits, key=lambda each: each.held_bytes / each.budget_bytes)
        raise InfeasibleError(
            f"Does not fit any of {len(misfits)} cards: the nearest, {nearest.ranks} × {nearest.device}, needs"
            f" {of_text(nearest.held_bytes, nearest.budget_bytes)} of the budget= on each. What to do:"
            f" try more ranks by world_sizes=,{freer} give a larger budget=, or make the model smaller",
            budget_bytes=nearest.budget_bytes,
            lowest_peak_bytes=nearest.held_bytes,
            where=nearest.device,
            proven=False,
        )
    by_name = {card.name: card for card in options.devices}
    order = list(by_name)
    notes = [*result.notes, *_notes(options, rows)]
    fastest = min(rows, key=lambda row: (row.hours, row.ranks))
    if precisions is None and fastest.levers.precision != "32-true":  # what they give as the model is written
        cards = [by_name[fastest.device]]
        as_written = replace(options, devices=cards, world_sizes=[fastest.ranks], precisions=["32-true"])
        in_fp32, row = _searched(workload, as_written, progress).rows, f"{fastest.ranks} × {fastest.device}"
        note = f"in {fastest.levers.precision}, which numerics='reduced' allows; in 32-true"
        if in_fp32:
            seconds = in_fp32[0].step_seconds
            notes.append(
                f"{note} {row} need {format_seconds(seconds)} a step, {seconds / fastest.step_seconds - 1:.0%} more:"
                " numerics='reordered' compares in 32-true"
            )
        else:
            notes.append(f"{note} nothing fits {row}")
    return Fleet(
        memfit_version=__version__,
        torch_version=str(torch.__version__),
        workload=workload.name,
        fingerprint=fingerprint(workload),
        batch_size=samples_of(workload),
        budget=of_card.said,
        steps=steps,
        within_hours=within_hours,
        allowed=numerics,
        step_error=result.step_error or STEP_ERROR,
        rows=sorted(rows, key=lambda row: (order.index(row.device), row.ranks)),
        misfits=misfits,
        prices={name: price for name, price in found_prices.items() if name in by_name},
        notes=notes,
    )


def _searched(workload: Workload, options: FleetRequest, progress: Progress) -> FleetSearch:
    """Search here, or in processes where a GPU's program can be captured."""
    if any(planner.is_elsewhere(card) for card in options.devices):
        calls = [{"options": part} for part in options.in_two()]
        sizes = microbatch_sizes(samples_of(workload))
        return joined(planner.call_elsewhere(_searched, workload, calls, progress, sizes=sizes))
    for device in options.devices:
        check_workload(workload, device)
    with without_collector():  # which would go through millions of objects, none of which is garbage
        return search(workload, options, progress)


def _check(steps: int, world_sizes: Sequence[int], sharding: str, numerics: Numerics) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"steps={steps!r} is not a whole number above 0: give the updates of the whole training")
    sizes = list(world_sizes)
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise UsageError(f"world_sizes={world_sizes!r} are not whole numbers above 0: give numbers of ranks")
    if sharding not in ("auto", *SEARCHED):
        raise UsageError(f"sharding={sharding!r} is unknown: use one of auto, {', '.join(SEARCHED)}")
    if numerics not in NUMERICS:
        raise UsageError(f"numerics={numerics!r} is unknown: use one of {', '.join(NUMERICS)}")
    if numerics == "exact" and max(sizes) > 1:
        raise UsageError(
            "numerics='exact' does not allow several ranks: they add up gradients in another order. Allow"
            " numerics='reordered', or give world_sizes=[1]"
        )


def _cards(names: Sequence[str] | None) -> list[Device]:
    if names is None:
        return [device for device in known_devices().values() if device.kind == "cuda"]
    if isinstance(names, str) or not names:
        raise UsageError(f"devices={names!r} is no list of names: give some, or None for all of the catalogue")
    cards = {device.name: device for device in map(find_device, names)}
    if len({device.kind for device in cards.values()}) > 1:
        raise UsageError(f"devices={list(names)} are of several kinds: compare GPUs with GPUs")
    return list(cards.values())


def _notes(options: FleetRequest, rows: Sequence[FleetRow]) -> list[str]:
    """Return what was assumed of cards, links and prices."""
    cards, prices = options.devices, options.prices
    found = [
        f"times are modelled, and links run at their vendors' rates: expect an error of {STEP_ERROR:.0%}, and"
        " time a few steps before you rent many cards"
    ]
    if any(row.nodes > 1 for row in rows):
        found.append("cards of several nodes are linked as in their vendor's own servers (`memfit devices NAME`)")
    slow = [card.name for card in cards if not card.peer_bytes_per_second and any(r.ranks > 1 for r in rows)]
    if slow:
        found.append(f"cards without links of their own use PCI Express: {', '.join(slow)}")
    alone = [card.name for card in cards if not card.node_bytes_per_second and card.kind == "cuda"]
    if any(row.nodes > 1 and row.device in alone for row in rows):
        found.append(
            "links between nodes are assumed as fast as PCIe for cards without a network of their own: real ones are"
            " slower"
        )
    unpriced = [card.name for card in cards if prices and card.name not in prices]
    if unpriced:
        found.append(f"no price for {', '.join(unpriced)}")
    for currency in sorted({price.currency for price in prices.values()})[1:]:
        found.append(f"prices are in several currencies ({currency} among them): costs are not compared")
        break
    return found
