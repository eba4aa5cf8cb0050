"""The search, on traces and costs that were captured once and kept: what it chooses fits, and nothing faster does.

The traces are of `tests.workloads.tiny`, with the costs of `tests.fixed_costs`; nothing here asks PyTorch. Of plans
that the prediction can't tell apart, the one that is taken is as fast as any, by what was measured and predicted.
"""

from __future__ import annotations

import functools
import gzip
import math
import random
from collections import Counter
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
    NUMERICS,
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
    allows,
    simulate,
)
from memfit.planner import candidate_search as search
from memfit.planner.candidate_search import (
    MARGIN,
    MOST,
    RATIO_ERROR,
    Advice,
    Confirmed,
    Limits,
    MeasuredPlan,
    faster_of,
    fastest_measured,
    fastest_that_fits,
    held_against,
    leanest_that_fits,
    near_ties,
    weighed,
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
            leanest_that_fits([whole, cut], limits(budget_bytes, "exact"), Applied(), SECONDS, advice=Advice("batch"))
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
    fitting = [p for p in points if within.fit(confirm(p)) and NUMERICS.index(p.numerics) <= NUMERICS.index(allowed)]
    assume(fitting)
    chosen_plan, printed = held_against(points, Confirmed(fitting[0], confirm(fitting[0])), within, confirm)
    assert within.fit(chosen_plan.prediction)
    assert_undominated(chosen_plan.as_captured(), printed)
    measured = Confirmed(fitting[-1], confirm(fitting[-1]))
    assert_undominated(measured.as_captured(), with_plan(printed, measured, within))


def assert_undominated(plan: Candidate, printed: list[Candidate]) -> None:
    assert plan.levers in [row.levers for row in printed]
    for row in printed:
        as_strict = NUMERICS.index(row.numerics) <= NUMERICS.index(plan.numerics)
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


seconds = st.floats(1e-4, 1e3)
records = st.builds(MeasuredPlan, seconds, seconds, st.sampled_from(NUMERICS), st.integers(0, 4))
several = st.lists(records, min_size=1, max_size=6)
near_each_other = st.lists(
    st.builds(MeasuredPlan, st.floats(1.0, 1.01), seconds, st.sampled_from(NUMERICS), st.integers(0, 4)),
    min_size=2,
    max_size=6,
)


@given(several | near_each_other)
def test_what_is_taken_is_within_the_margin_of_the_fastest(measured: list[MeasuredPlan]) -> None:
    taken = measured[fastest_measured(measured)]
    assert taken.measured_seconds <= (1 + MARGIN) * min(one.measured_seconds for one in measured)


@given(near_each_other)
def test_of_plans_about_as_fast_none_is_stricter_or_as_strict_with_fewer_levers(measured: list[MeasuredPlan]) -> None:
    index = fastest_measured(measured)
    least = min(one.measured_seconds for one in measured)
    near = [one for one in measured if one.measured_seconds <= (1 + MARGIN) * least]

    def freeness(one: MeasuredPlan) -> tuple[int, int]:
        return NUMERICS.index(one.numerics), one.levers

    assert freeness(measured[index]) == min(map(freeness, near))
    alike = [one for one in near if freeness(one) == freeness(measured[index])]
    assert measured[index].measured_seconds == min(one.measured_seconds for one in alike)


@given(near_each_other, st.integers(-6, 6), st.randoms(use_true_random=False))
def test_neither_the_unit_nor_the_order_of_the_others_matters(
    measured: list[MeasuredPlan], power: int, draws: random.Random
) -> None:
    taken = measured[fastest_measured(measured)]
    scaled = [one._replace(measured_seconds=2.0**power * one.measured_seconds) for one in measured]
    assert measured[fastest_measured(scaled)] == taken
    mixed = [measured[0], *draws.sample(measured[1:], len(measured) - 1)]
    assert mixed[fastest_measured(mixed)] == taken


@pytest.mark.parametrize(
    ("measured_seconds", "taken"), [((1.0, 0.99, 0.90), 2), ((1.0, 0.99), 1), ((1.0, 0.5, 0.505), 1), ((1.0,), 0)]
)
def test_worked_numbers(measured_seconds: tuple[float, ...], taken: int) -> None:
    assert fastest_measured([MeasuredPlan(each, 1.0) for each in measured_seconds]) == taken


def test_a_freer_class_must_be_faster_by_more_than_the_margin() -> None:
    slow, free, strict = MeasuredPlan(1.0, 1.0), MeasuredPlan(0.80, 1.0, "reduced"), MeasuredPlan(0.803, 1.0, "exact")
    assert fastest_measured([slow, free, strict]) == 2
    assert fastest_measured([slow, free, strict._replace(measured_seconds=0.9)]) == 1


@given(several)
def test_measured_times_that_are_sure_stay_as_they_are(measured: list[MeasuredPlan]) -> None:
    assert [one.measured_seconds for one in weighed(measured, 0.0)] == pytest.approx(
        [one.measured_seconds for one in measured]
    )


@given(several, st.floats(0.0, 1.0))
def test_weighed_ratios_are_between_the_measured_and_the_predicted_ones(
    measured: list[MeasuredPlan], error: float
) -> None:
    found = weighed(measured, error)
    assert found[0] == measured[0]
    for one, before in zip(found, measured, strict=True):
        by_measuring = before.measured_seconds / measured[0].measured_seconds
        ends = sorted([by_measuring, before.predicted_seconds / measured[0].predicted_seconds])
        assert (1 - 1e-9) * ends[0] <= one.measured_seconds / measured[0].measured_seconds <= (1 + 1e-9) * ends[1]
        assert one._replace(measured_seconds=0.0) == before._replace(measured_seconds=0.0)


def test_equal_errors_weigh_alike() -> None:
    _, found = weighed([MeasuredPlan(1.0, 1.0), MeasuredPlan(0.9, 1.2)], RATIO_ERROR)
    assert found.measured_seconds == pytest.approx((0.9 * 1.2) ** 0.5)


@pytest.mark.parametrize("noise", [0.02, 0.04])
def test_weighing_takes_a_fast_plan_more_often_than_either_time_alone(noise: float) -> None:
    """Plans that predictions and few rounds know with an error each, drawn many times."""
    draws = random.Random(0)
    took = Counter[str]()
    for _ in range(1000):
        true = [draws.uniform(1.0, 1.1) for _ in range(4)]
        predicted = [seconds * math.exp(draws.gauss(0.0, RATIO_ERROR / 2**0.5)) for seconds in true]
        seen = [seconds * math.exp(draws.gauss(0.0, noise / 2**0.5)) for seconds in true]
        measured = [MeasuredPlan(*times) for times in zip(seen, predicted, strict=True)]
        fast = [seconds <= 1.02 * min(true) for seconds in true]
        took["measured"] += fast[fastest_measured(measured)]
        took["predicted"] += fast[predicted.index(min(predicted))]
        took["both"] += fast[fastest_measured(weighed(measured, noise))]
    assert took["both"] > max(took["measured"], took["predicted"])


# Contenders


def named(combination: Combination) -> Combination:
    """Return a combination whose levers go by names, so that there are kinds of them."""

    def uses(levers: object) -> tuple[LeverUse, ...]:
        precision, size, regions = (getattr(levers, name) for name in ("precision", "microbatch_size", "regions"))
        names = {"precision": precision != "32-true", "microbatches": size < 4, "checkpointing": bool(regions)}
        used = [name for name, is_used in names.items() if is_used]
        classes = {name: "exact" if name == "checkpointing" else combination.numerics for name in used}
        return tuple(LeverUse(name=name, setting="", brief=name, numerics=classes[name]) for name in used)

    return Combination(combination.levers, combination.problem, uses)


def found(share: float, numerics: Numerics, step_error: float) -> tuple[Confirmed, list[Confirmed]] | None:
    best = chosen(share, numerics)
    if best is None:
        return None
    every = [named(combination) for combination in combinations()]
    within = limits(int(share * plain_bytes()), numerics)
    return best, near_ties(every, within, best, Applied(), step_error=step_error)


@settings(max_examples=8, deadline=None)
@given(st.floats(0.3, 1.3), st.sampled_from(["exact", "reordered", "reduced"]), st.sampled_from([0.0, 0.2, 3.0]))
def test_near_ties_fit_are_allowed_and_no_slower_than_the_error(
    share: float, numerics: Numerics, step_error: float
) -> None:
    pair = found(share, numerics, step_error)
    if pair is None:
        return
    best, plans = pair
    assert plans[0] == best and len(plans) <= MOST
    assert len({plan.point.levers for plan in plans}) == len(plans)
    for plan in plans[1:]:
        assert plan.prediction.peak_upper_bytes <= int(share * plain_bytes())
        assert plan.prediction.step_seconds <= (1 + step_error) * best.prediction.step_seconds
        assert allows(numerics, plan.point.numerics)
        assert plan.prediction == Applied()(plan.point)


def test_a_larger_error_leaves_more_to_be_run_and_the_plain_step_is_the_first_of_them() -> None:
    few, more = found(1.3, "reduced", 0.0), found(1.3, "reduced", 3.0)
    assert few is not None and more is not None and len(few[1]) < len(more[1])
    assert not all(plan.point.uses for plan in more[1][:2])


def test_what_can_not_be_applied_or_does_not_fit_once_captured_is_left_out() -> None:
    best = chosen(1.3, "reduced")
    assert best is not None
    every = [named(combination) for combination in combinations()]
    within = limits(int(1.3 * plain_bytes()), "reduced")

    def too_large(point: Candidate) -> Prediction:
        return replace(Applied()(point), peak_upper_bytes=within.budget_bytes + 1)

    for confirm in (lambda _: None, too_large):
        assert near_ties(every, within, best, confirm, step_error=3.0) == [best]


@pytest.mark.parametrize("over", [1.05, 1.3])
def test_a_plan_with_a_wider_error_bar_is_solved_again_for_a_lower_peak(over: float) -> None:
    best = chosen(0.6, "reduced")
    assert best is not None
    within = limits(int(0.6 * plain_bytes()), "reduced")
    every = [named(combination) for combination in combinations()]
    asked: list[Candidate] = []

    def wide(point: Candidate) -> Prediction:
        asked.append(point)
        prediction = Applied()(point)
        return replace(prediction, peak_upper_bytes=int(over * prediction.peak_bytes))

    _, *others = near_ties(every, within, best, wide, step_error=30.0)
    assert others and all(plan.prediction.peak_upper_bytes <= within.budget_bytes for plan in others)
    sizes = {(plan.point.levers.precision, plan.point.levers.microbatch_size) for plan in others}
    assert len(asked) > len(others) == len(sizes)  # of each combination one, and some were asked for again


def test_kinds_come_before_more_of_a_kind() -> None:
    pair = found(0.6, "reduced", 30.0)
    assert pair is not None
    kinds = [frozenset(use.name for use in plan.point.uses) for plan in pair[1][1:]]
    first = list(dict.fromkeys(kinds))
    assert kinds[: len(first)] == first


@pytest.mark.parametrize("other", ["32-true 4", "bf16-mixed 4"])
def test_a_plan_that_runs_in_another_way_is_the_first_of_the_others(other: str) -> None:
    """Also where the plain step fits, and where steps that run alike are predicted to be faster."""
    best = chosen(0.8, "reduced")
    assert best is not None

    def way(levers: Levers) -> bool:
        return f"{levers.precision} {levers.microbatch_size}" == other

    within = limits(int(1.3 * plain_bytes()), "reduced")
    every = [named(combination) for combination in combinations()]
    _, *others = near_ties(every, within, best, Applied(), step_error=30.0, way=way)
    ways = [way(plan.point.levers) for plan in others]
    assert ways[0] != way(best.point.levers) and len(set(ways)) == 2
