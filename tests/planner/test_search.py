"""The search, on traces and costs that were captured once and kept: what it chooses fits, and nothing faster does.

The traces are of `tests.workloads.tiny`, with the costs of `tests.fixed_costs`; nothing here asks PyTorch.
"""

from __future__ import annotations

import functools
import gzip
from pathlib import Path
from typing import Any, NamedTuple

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
from memfit.planner import (
    Advice,
    Confirmed,
    Limits,
    fastest_that_fits,
    held_against,
    leanest_that_fits,
    near_ties,
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
    """Predicts applied steps, which take more than the solver knew: of regions, by a factor."""

    factor: float = 1.0  # for steps with regions (≥ 1)
    error: float = 0.01  # the share that is held against the budget on top

    def __call__(self, candidate: Candidate) -> Prediction:
        levers = candidate.levers
        timeline = simulate(saved_trace(levers.precision, levers.microbatch_size), saved_costs(), levers.regions)
        peak = int(timeline.peak_bytes * (self.factor if levers.regions else 1.0))
        return predicted(peak, timeline.step_seconds, self.error)


def predicted(peak_bytes: int, seconds: float, error: float = 0.0) -> Prediction:
    upper = int(peak_bytes * (1 + error))
    return Prediction(peak_bytes=peak_bytes, peak_upper_bytes=upper, step_seconds=seconds, by_category={}, where="")


def point(levers: Levers, peak_bytes: int, seconds: float, numerics: Numerics = "exact") -> Candidate:
    return Candidate(
        levers=levers,
        numerics=numerics,
        budget_bytes=0,
        peak_bytes=peak_bytes,
        step_seconds=seconds,
        status="feasible",
        bound_seconds=0.0,
    )


def limits(budget_bytes: int, numerics: Numerics = "changed") -> Limits:
    return Limits(budget_bytes, 0.01, numerics)


def plain_bytes() -> int:
    return simulate(saved_trace("32-true", 4), saved_costs()).peak_bytes


def chosen(share: float, numerics: Numerics = "changed", factor: float = 1.0) -> Confirmed | None:
    """Return the fastest plan within a share of the plain peak."""
    within = limits(int(share * plain_bytes()), numerics)
    return fastest_that_fits(within.allow(combinations()), within, Applied(factor), SECONDS)[0]


def fitting(share: float, numerics: Numerics) -> Confirmed:
    best = chosen(share, numerics)
    assert best is not None
    return best


@settings(max_examples=8, deadline=None)
@given(st.floats(0.3, 1.3), st.sampled_from(["exact", "reordered", "reduced"]), st.sampled_from([1.0, 1.05]))
def test_what_is_chosen_fits_is_allowed_and_is_no_faster_than_its_bound(
    share: float, numerics: Numerics, factor: float
) -> None:
    if (best := chosen(share, numerics, factor)) is None:
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


def pair() -> list[Combination]:
    """Return the combinations of the whole batch and of microbatches, with solvers of their own."""
    return [Combination(c.levers, c.problem, c.uses_of) for c in combinations() if c.levers.precision == "32-true"]


@pytest.mark.parametrize(("error", "size"), [(0.0, 2), (0.05, 2), (0.5, 4)])
def test_the_leanest_plan_is_that_of_the_smallest_budget_and_not_of_the_lowest_peak(error: float, size: int) -> None:
    """Where the leaner of two combinations has the wider error bar."""
    whole, cut = pair()
    # Whole batches, as lean as the microbatches: others that need more by far are not looked at.
    near = [Combination(whole.levers, cut.problem, whole.uses_of), cut]

    def confirm(candidate: Candidate) -> Prediction:
        peak_bytes = int(candidate.peak_bytes * (1.0 if candidate.levers.microbatch_size == 2 else 1.06))
        return predicted(peak_bytes, 1.0, error if candidate.levers.microbatch_size == 2 else 0.01)

    def leanest(budget_bytes: int) -> Confirmed:
        within = limits(budget_bytes, "reordered")
        return leanest_that_fits(near, within, confirm, SECONDS, advice=Advice("batch"))

    with pytest.raises(InfeasibleError) as raised:
        leanest(1000)
    needed = raised.value.lowest_peak_bytes
    assert needed is not None
    found = leanest(needed)
    assert found.point.levers.microbatch_size == size and found.prediction.peak_upper_bytes <= needed


def test_advice_names_a_freer_class_only_where_a_plan_of_it_fits() -> None:
    lowest = [c.solver.leanest(SECONDS).peak_bytes for c in pair()]
    between = sum(lowest) // 2
    assert lowest[1] < between < lowest[0]
    for budget_bytes, is_named in ((between, True), (1000, False)):
        with pytest.raises(InfeasibleError) as error:
            leanest_that_fits(pair(), limits(budget_bytes, "exact"), Applied(), SECONDS, advice=Advice("batch"))
        assert ("numerics='reduced'" in str(error.value)) == is_named


def test_only_combinations_that_may_be_leaner_are_searched() -> None:
    searched: list[Levers] = []

    class Noted(Combination):
        def lowest(self, time_limit_seconds: float) -> Choice:
            searched.append(self.levers)
            return super().lowest(time_limit_seconds)

    whole, cut = (Noted(c.levers, c.problem, c.uses_of) for c in pair())
    assert whole.solver.peak_floor_bytes > cut.solver.leanest(SECONDS).peak_bytes
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


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_what_is_too_large_on_paper_is_not_captured(share: float) -> None:
    within, factor = limits(int(share * plain_bytes()), "exact"), 1.1
    asked: list[Candidate] = []

    def confirm(candidate: Candidate) -> Prediction:
        asked.append(candidate)
        return Applied(factor)(candidate)

    def on_paper(levers: Levers) -> int:
        return Applied(factor)(point(levers, 0, 0.0)).peak_upper_bytes

    searched = within.allow(combinations())
    anew, _ = fastest_that_fits(searched, within, confirm, SECONDS)
    captures = len(asked)
    asked.clear()
    best, _ = fastest_that_fits(searched, within, confirm, SECONDS, None, on_paper)
    assert captures > 1 == len(asked)
    assert anew is not None and best is not None and within.fit(best.prediction)
    assert best.prediction.step_seconds <= anew.prediction.step_seconds * 1.01


def test_what_hardly_passes_the_budget_on_paper_is_captured() -> None:
    within = limits(int(0.8 * plain_bytes()), "exact")
    known, _ = fastest_that_fits(within.allow(combinations()), within, Applied(), SECONDS)

    def on_paper(levers: Levers) -> int:
        return within.budget_bytes + 1

    best, _ = fastest_that_fits(within.allow(combinations()), within, Applied(), SECONDS, None, on_paper)
    assert known is not None and best is not None and best.point.levers == known.point.levers


def test_of_two_plans_the_faster_one_has_the_bound_of_both() -> None:
    slow, fast = (fitting(share, "exact") for share in (0.6, 1.1))
    assert slow.prediction.step_seconds > fast.prediction.step_seconds
    for known, share in ((slow, 1.1), (fast, 0.6)):
        within = limits(int(share * plain_bytes()), "exact")
        best, _ = fastest_that_fits(within.allow(combinations()), within, Applied(), SECONDS, known)
        assert best is not None and best.prediction == fast.prediction
        assert best.point.bound_seconds == min(slow.point.bound_seconds, fast.point.bound_seconds)


@pytest.mark.parametrize(("speed", "larger", "is_taken"), [(0.5, 1, True), (0.999, 1, False), (0.999, -1, True)])
def test_rows_that_seem_faster_than_the_plan_are_captured(speed: float, larger: int, is_taken: bool) -> None:
    best = fitting(0.7, "exact")
    peak_bytes, slow = best.prediction.peak_bytes + larger, best.prediction.step_seconds * 2
    levers = Levers(microbatch_size=4, regions=(Region(("blocks.0",)),))
    row = point(levers, peak_bytes, speed * best.prediction.step_seconds)
    within = limits(int(0.7 * plain_bytes()), "exact")
    as_it_seemed = predicted(peak_bytes, row.step_seconds)
    taken, points = held_against([row], best, within, lambda _: as_it_seemed)
    assert (taken.point.levers == levers) == is_taken
    assert [p.is_captured for p in points if p.levers == levers] == [is_taken]
    kept, points = held_against([row], best, within, lambda _: predicted(peak_bytes, slow))
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

    def confirm(candidate: Candidate) -> Prediction:
        row = found[candidate.levers]
        return predicted(row.captured_peak, float(row.captured_seconds), row.error)

    points = [point(levers, row.peak, row.seconds, row.numerics) for levers, row in found.items()]
    within = Limits(budget, 0.0, allowed)
    within_budget = [
        p for p in points if within.fit(confirm(p)) and NUMERICS.index(p.numerics) <= NUMERICS.index(allowed)
    ]
    assume(within_budget)
    chosen_plan, printed = held_against(points, Confirmed(within_budget[0], confirm(within_budget[0])), within, confirm)
    assert within.fit(chosen_plan.prediction)
    assert_undominated(chosen_plan.as_captured(), printed)
    measured = Confirmed(within_budget[-1], confirm(within_budget[-1]))
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


def near(
    best: Confirmed, share: float, numerics: Numerics = "reduced", step_error: float = 30.0, **options: Any
) -> Any:
    """Return the plans near to the best one within a share of the plain peak."""
    every, within = [named(combination) for combination in combinations()], limits(int(share * plain_bytes()), numerics)
    confirm = options.pop("confirm", Applied())
    return near_ties(every, within, best, confirm, step_error=step_error, **options)


@settings(max_examples=8, deadline=None)
@given(st.floats(0.3, 1.3), st.sampled_from(["exact", "reordered", "reduced"]), st.sampled_from([0.0, 0.2, 3.0]))
def test_near_ties_fit_are_allowed_and_no_slower_than_the_error(
    share: float, numerics: Numerics, step_error: float
) -> None:
    if (best := chosen(share, numerics)) is None:
        return
    plans = near(best, share, numerics, step_error)
    assert plans[0] == best and len(plans) <= 4
    assert len({plan.point.levers for plan in plans}) == len(plans)
    for plan in plans[1:]:
        assert plan.prediction.peak_upper_bytes <= int(share * plain_bytes())
        assert plan.prediction.step_seconds <= (1 + step_error) * best.prediction.step_seconds
        assert allows(numerics, plan.point.numerics)
        assert plan.prediction == Applied()(plan.point)


def test_a_larger_error_leaves_more_to_be_run_and_the_plain_step_is_the_first_of_them() -> None:
    best = fitting(1.3, "reduced")
    few, more = near(best, 1.3, step_error=0.0), near(best, 1.3, step_error=3.0)
    assert len(few) < len(more) and not all(plan.point.uses for plan in more[:2])


def test_what_can_not_be_applied_or_does_not_fit_once_captured_is_left_out() -> None:
    best = fitting(1.3, "reduced")
    for confirm in (lambda _: None, lambda _: predicted(int(1.3 * plain_bytes()) + 1, 0.0)):
        assert near(best, 1.3, step_error=3.0, confirm=confirm) == [best]


@pytest.mark.parametrize("over", [1.05, 1.3])
def test_a_plan_with_a_wider_error_bar_is_solved_again_for_a_lower_peak(over: float) -> None:
    best = fitting(0.6, "reduced")
    asked: list[Candidate] = []

    def wide(point: Candidate) -> Prediction:
        asked.append(point)
        prediction = Applied()(point)
        return replace(prediction, peak_upper_bytes=int(over * prediction.peak_bytes))

    _, *others = near(best, 0.6, confirm=wide)
    assert others and all(plan.prediction.peak_upper_bytes <= int(0.6 * plain_bytes()) for plan in others)
    sizes = {(plan.point.levers.precision, plan.point.levers.microbatch_size) for plan in others}
    assert len(asked) > len(others) == len(sizes)  # of each combination one, and some were asked for again


def test_kinds_come_before_more_of_a_kind() -> None:
    best = fitting(0.6, "reduced")
    kinds = [frozenset(use.name for use in plan.point.uses) for plan in near(best, 0.6)[1:]]
    first = list(dict.fromkeys(kinds))
    assert kinds[: len(first)] == first


@pytest.mark.parametrize("other", ["32-true 4", "bf16-mixed 4"])
def test_a_plan_that_runs_in_another_way_is_the_first_of_the_others(other: str) -> None:
    """Also where the plain step fits, and where steps that run alike are predicted to be faster."""
    best = fitting(0.8, "reduced")

    def way(levers: Levers) -> bool:
        return f"{levers.precision} {levers.microbatch_size}" == other

    ways = [way(plan.point.levers) for plan in near(best, 1.3, way=way)[1:]]
    assert ways[0] != way(best.point.levers) and len(set(ways)) == 2
