"""The search, on traces and costs that were captured once and kept: what it chooses fits, and nothing faster does.

The traces are of `tests.workloads.tiny`, with the costs of `tests.fixed_costs`; nothing here asks PyTorch.
"""

from __future__ import annotations

import functools
import gzip
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit import ir
from memfit.errors import InfeasibleError
from memfit.ir import (
    Candidate,
    CostTable,
    Levers,
    LeverUse,
    Numerics,
    Precision,
    Prediction,
    Region,
    Regions,
    Trace,
    simulate,
)
from memfit.planner import candidate_search as search
from memfit.planner.candidate_search import (
    Advice,
    Confirmed,
    Limits,
    faster_of,
    fastest_that_fits,
    held_against,
    leanest_that_fits,
    with_plan,
)
from memfit.solver import SIMPLER_WITHIN, Choice, Combination, build, frontier, options

FOLDER = Path(__file__).parent / "traces"
SECONDS = 0.5
CLASSES: dict[tuple[Precision, int], Numerics] = {
    ("32-true", 4): "exact",
    ("32-true", 2): "reordered",
    ("bf16-mixed", 4): "reduced",
}


@functools.cache
def saved_trace(precision: Precision, size: int) -> Trace:
    content = gzip.decompress((FOLDER / f"tiny-{precision}-{size}.json.gz").read_bytes())
    return ir.codec.decode(content, Trace, source="saved")


@functools.cache
def saved_costs() -> CostTable:
    return ir.codec.decode(gzip.decompress((FOLDER / "costs.json.gz").read_bytes()), CostTable, source="saved")


@functools.cache
def combinations() -> list[Combination]:
    made = []
    for (precision, size), numerics in CLASSES.items():
        regions, use = Regions(saved_trace(precision, size)), LeverUse(name="", setting="", brief="", numerics=numerics)
        problem = build(regions, saved_costs(), options(regions, saved_costs()))
        levers = Levers(precision=precision, microbatch_size=size)
        made.append(Combination(levers, problem, lambda _, use=use: (use,)))  # type: ignore[misc]
    return made


class Applied(NamedTuple):
    """Predicts applied steps, which take more than the solver knew: of regions, by a factor.

    Attributes:
        factor: For steps with regions (≥ 1).
        error: The share that is held against the budget on top.
    """

    factor: float = 1.0
    error: float = 0.01

    def __call__(self, candidate: Candidate) -> Prediction:
        levers = candidate.levers
        trace = saved_trace(levers.precision, levers.microbatch_size)
        timeline = simulate(trace, saved_costs(), levers.regions)
        peak = int(timeline.peak_bytes * (self.factor if levers.regions else 1.0))
        return Prediction(
            peak_bytes=peak,
            peak_upper_bytes=int(peak * (1 + self.error)),
            step_seconds=timeline.step_seconds,
            by_category={},
            where="somewhere",
        )


def limits(budget_bytes: int, numerics: Numerics = "changed") -> Limits:
    return Limits(budget_bytes, 0.01, numerics)


def plain_bytes() -> int:
    return simulate(saved_trace("32-true", 4), saved_costs()).peak_bytes


def chosen(share: float, numerics: Numerics = "changed", factor: float = 1.0) -> Confirmed | None:
    """Return the fastest plan within a share of the plain peak."""
    within = limits(int(share * plain_bytes()), numerics)
    return fastest_that_fits(within.allow(combinations()), within, Applied(factor), SECONDS)[0]


@settings(max_examples=8, deadline=None)
@given(st.floats(0.3, 1.3), st.sampled_from(["exact", "reordered", "reduced"]), st.sampled_from([1.0, 1.05]))
def test_what_is_chosen_fits_is_allowed_and_is_no_faster_than_its_bound(
    share: float, numerics: Numerics, factor: float
) -> None:
    best = chosen(share, numerics, factor)
    if best is None:
        return
    assert best.prediction.peak_upper_bytes <= int(share * plain_bytes())
    assert limits(0, numerics).allow([c for c in combinations() if c.levers == _bare(best.point)])
    assert best.point.bound_seconds <= best.prediction.step_seconds * (1 + 1e-9)
    assert best.prediction == Applied(factor)(best.point)


def _bare(point: Candidate) -> Levers:
    return Levers(precision=point.levers.precision, microbatch_size=point.levers.microbatch_size)


@pytest.mark.parametrize("numerics", ["exact", "reordered", "reduced"])
def test_time_never_grows_with_the_budget_nor_with_the_class(numerics: Numerics) -> None:
    seconds = [
        best.prediction.step_seconds if (best := chosen(share, numerics)) else float("inf")
        for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.1)
    ]
    for tighter, roomier in zip(seconds, seconds[1:], strict=False):
        assert roomier <= tighter * (1 + 2 * SIMPLER_WITHIN)  # the simpler of two that are about as fast is taken
    assert seconds[-1] <= seconds[0] and seconds[-1] < float("inf")


def test_a_step_that_takes_more_than_the_solver_knew_is_solved_for_again() -> None:
    shares = [0.6, 0.7, 0.8]
    targets = [(chosen(share, "exact"), chosen(share, "exact", factor=1.08)) for share in shares]
    assert any(best and best.point.levers.regions for best, _ in targets)
    for best, wider in targets:
        if best is not None and wider is not None and wider.point.levers.regions:
            assert wider.point.peak_bytes <= best.point.peak_bytes  # as the solver has them
            assert wider.prediction.step_seconds >= best.prediction.step_seconds * (1 - 1e-9)


@pytest.mark.parametrize("numerics", ["exact", "reordered"])
def test_the_budget_that_an_error_names_is_one_that_fits(numerics: Numerics) -> None:
    def leanest(budget_bytes: int) -> Confirmed:
        return leanest_that_fits(
            combinations(), limits(budget_bytes, numerics), Applied(1.03), SECONDS, advice=Advice("batch")
        )

    with pytest.raises(InfeasibleError, match="raise budget= to .* make batch smaller") as error:
        leanest(1000)
    needed = error.value.lowest_peak_bytes
    assert needed is not None and leanest(needed).prediction.peak_upper_bytes <= needed
    with pytest.raises(InfeasibleError):
        leanest(needed - 1000)


@pytest.mark.parametrize(("error", "size"), [(1.0, 2), (1.05, 2), (1.5, 4)])
def test_the_leanest_plan_is_that_of_the_smallest_budget_and_not_of_the_lowest_peak(error: float, size: int) -> None:
    """Where the leaner of two combinations has the wider error bar."""
    whole, cut = (c for c in combinations() if c.levers.precision == "32-true")
    near = [Combination(c.levers, c.problem, c.uses_of) for c in (whole, cut)]

    def confirm(candidate: Candidate) -> Prediction:
        prediction = Applied()(candidate)
        is_cut = candidate.levers.microbatch_size == 2
        return replace(prediction, peak_upper_bytes=int((error if is_cut else 1.01) * prediction.peak_bytes))

    def leanest(budget_bytes: int) -> Confirmed:
        within = limits(budget_bytes, "reordered")
        with mock.patch.object(search, "_WIDEST", 2.0):  # whole microbatches are leaner by far
            return leanest_that_fits(near, within, confirm, SECONDS, advice=Advice("batch"))

    with pytest.raises(InfeasibleError) as raised:
        leanest(1000)
    needed = raised.value.lowest_peak_bytes
    assert needed is not None
    found = leanest(needed)
    assert found.point.levers.microbatch_size == size and found.prediction.peak_upper_bytes <= needed


def test_advice_names_a_freer_class_only_where_a_plan_of_it_fits() -> None:
    whole, cut = (c for c in combinations() if c.levers.precision == "32-true")
    lowest = [c.solver.leanest(SECONDS).peak_bytes for c in (whole, cut)]
    between = sum(lowest) // 2
    assert lowest[1] < between < lowest[0]
    for budget_bytes, is_named in ((between, True), (1000, False)):
        with pytest.raises(InfeasibleError) as error:
            leanest_that_fits(
                [whole, cut],
                limits(budget_bytes, "exact"),
                Applied(),
                SECONDS,
                advice=Advice("batch"),
            )
        assert ("numerics='reduced'" in str(error.value)) == is_named


def test_only_combinations_that_may_be_leaner_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Levers] = []
    lowest = Combination.lowest

    def noted(combination: Combination, seconds: float) -> Choice:
        searched.append(combination.levers)
        return lowest(combination, seconds)

    whole, cut = (c for c in combinations() if c.levers.precision == "32-true")
    assert whole.solver.peak_floor_bytes > cut.solver.leanest(SECONDS).peak_bytes
    monkeypatch.setattr(Combination, "lowest", noted)
    with pytest.raises(InfeasibleError) as error:
        leanest_that_fits([whole, cut], limits(1000, "reordered"), Applied(), SECONDS, advice=Advice("batch"))
    assert set(searched) == {cut.levers}
    needed = error.value.lowest_peak_bytes
    assert needed is not None and needed >= cut.solver.peak_floor_bytes


def test_a_known_plan_stays_where_others_are_hardly_faster() -> None:
    within = limits(2 * plain_bytes(), "exact")
    known, spent = fastest_that_fits(within.allow(combinations()), within, Applied(), SECONDS)
    assert known is not None and known.point.levers.regions == () and spent >= 0
    asked: list[Candidate] = []

    def confirm(candidate: Candidate) -> Prediction:
        asked.append(candidate)
        return Applied()(candidate)

    again, _ = fastest_that_fits(within.allow(combinations()), within, confirm, SECONDS, known)
    assert again is not None and again.prediction is known.prediction and asked == []


def test_of_two_plans_the_faster_one_has_the_bound_of_both() -> None:
    slow, fast = (chosen(share, "exact") for share in (0.6, 1.1))
    assert slow is not None and fast is not None and slow.prediction.step_seconds > fast.prediction.step_seconds
    for pair in ((slow, fast), (fast, slow)):
        best = faster_of(*pair)
        assert best.prediction is fast.prediction
        assert best.point.bound_seconds == min(slow.point.bound_seconds, fast.point.bound_seconds)


@pytest.mark.parametrize(("speed", "larger", "is_taken"), [(0.5, 1, True), (0.999, 1, False), (0.999, -1, True)])
def test_rows_that_seem_faster_than_the_plan_are_captured(speed: float, larger: int, is_taken: bool) -> None:
    best = chosen(0.7, "exact")
    assert best is not None
    peak_bytes = best.prediction.peak_bytes + larger
    levers = Levers(microbatch_size=4, regions=(Region(("blocks.0",)),))
    row = Candidate(
        levers=levers,
        numerics="exact",
        budget_bytes=0,
        peak_bytes=peak_bytes,
        step_seconds=speed * best.prediction.step_seconds,
        status="feasible",
        bound_seconds=0.0,
    )
    slow = best.prediction.step_seconds * 2

    def as_it_seemed(candidate: Candidate) -> Prediction:
        return replace(slower(candidate), step_seconds=candidate.step_seconds)

    def slower(candidate: Candidate) -> Prediction:
        return Prediction(
            peak_bytes=peak_bytes, peak_upper_bytes=peak_bytes, step_seconds=slow, by_category={}, where=""
        )

    within = limits(int(0.7 * plain_bytes()), "exact")
    taken, points = held_against([row], best, within, as_it_seemed)
    assert (taken.point.levers == levers) == is_taken
    assert [p.is_captured for p in points if p.levers == levers] == [is_taken]
    kept, points = held_against([row], best, within, slower)
    assert kept == best
    assert [p.step_seconds for p in points if p.levers == levers] == [slow if is_taken else row.step_seconds]


class Row(NamedTuple):
    """A row of a frontier, and what its captured step takes."""

    numerics: Numerics
    seconds: int
    peak: int
    captured_seconds: int
    captured_peak: int
    error: float


rows_of_frontiers = st.lists(
    st.builds(
        Row,
        st.sampled_from(("exact", "reordered", "reduced")),
        *(st.integers(90, 110),) * 4,
        st.sampled_from((0.0, 0.02, 0.2)),
    ),
    min_size=1,
    max_size=12,
)


@given(rows_of_frontiers, st.sampled_from(("exact", "reordered", "reduced")), st.integers(95, 120))
def test_no_row_beside_the_plan_dominates_it(rows: list[Row], allowed: Numerics, budget: int) -> None:
    """Whatever captures tell of the rows, also once another plan is taken, as by measured times."""
    found = {Levers(microbatch_size=index + 1): row for index, row in enumerate(rows)}

    def point(levers: Levers, row: Row) -> Candidate:
        return Candidate(
            levers=levers,
            numerics=row.numerics,
            budget_bytes=0,
            peak_bytes=row.peak,
            step_seconds=row.seconds,
            status="feasible",
            bound_seconds=0.0,
        )

    def confirm(candidate: Candidate) -> Prediction:
        row = found[candidate.levers]
        upper = int(row.captured_peak * (1 + row.error))
        seconds = float(row.captured_seconds)
        return Prediction(
            peak_bytes=row.captured_peak, peak_upper_bytes=upper, step_seconds=seconds, by_category={}, where=""
        )

    points = [point(levers, row) for levers, row in found.items()]
    within = Limits(budget, 0.0, allowed)
    fitting = [
        p for p in points if within.fit(confirm(p)) and CLASS_ORDER.index(p.numerics) <= CLASS_ORDER.index(allowed)
    ]
    assume(fitting)
    chosen_plan, printed = held_against(points, Confirmed(fitting[0], confirm(fitting[0])), within, confirm)
    assert within.fit(chosen_plan.prediction)
    assert_undominated(chosen_plan.as_captured(), printed)
    measured = Confirmed(fitting[-1], confirm(fitting[-1]))
    assert_undominated(measured.as_captured(), with_plan(printed, measured, within))


CLASS_ORDER = ("exact", "reordered", "reduced", "changed")


def assert_undominated(plan: Candidate, printed: list[Candidate]) -> None:
    assert plan.levers in [row.levers for row in printed]
    for row in printed:
        as_strict = CLASS_ORDER.index(row.numerics) <= CLASS_ORDER.index(plan.numerics)
        no_worse = as_strict and row.step_seconds <= plan.step_seconds and row.peak_bytes <= plan.peak_bytes
        assert not no_worse or (row.numerics, row.step_seconds, row.peak_bytes) == (
            plan.numerics,
            plan.step_seconds,
            plan.peak_bytes,
        )


def test_the_frontier_s_points_are_what_their_regions_simulate_to() -> None:
    for point in frontier(combinations(), 3, time_limit_seconds=SECONDS):
        prediction = Applied()(point)
        assert (point.peak_bytes, point.step_seconds) == (prediction.peak_bytes, pytest.approx(prediction.step_seconds))


@given(st.integers(1, 2**45), st.floats(0.0, 0.5))
def test_a_budget_of_just_its_upper_end_is_enough_for_a_peak(peak_bytes: int, peak_error: float) -> None:
    """The upper end that a plan states is a budget that it fits: rounding takes no byte of it."""
    upper_bytes = int(peak_bytes * (1 + peak_error))
    most = Limits(upper_bytes, peak_error, "exact").peak_bytes
    assert most >= peak_bytes and int(most * (1 + peak_error)) <= upper_bytes
