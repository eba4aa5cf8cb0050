"""The linear model against the simulation, and activities that are tightened."""

from __future__ import annotations

import itertools
import random

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.ir import CostTable, OpCost, Precision, Regions, Trace, simulate
from memfit.solver import ALWAYS, Activity, Option, Problem, Tightening, build, options, refusals
from tests.covering import each
from tests.models import BUILDERS, COSTS, plain_trace


def with_workspaces(trace: Trace, seed: int = 0) -> CostTable:
    """Return costs with random seconds and workspaces for the operators of a trace."""
    rng = random.Random(seed)
    ops = {s: OpCost(rng.uniform(0, 1e-4), rng.choice([0, 0, 64, 4096, 40000]), True) for s in trace.signatures}
    return msgspec.structs.replace(COSTS, ops=ops)


def feasible(problem: Problem, rng: random.Random) -> npt.NDArray[np.int64]:
    """Return a random choice of options without conflicts."""
    x = np.zeros(len(problem.options), np.int64)
    for j in rng.sample(range(len(x)), len(x)):
        x[j] = rng.random() < 0.5
        if any(sum(x[m] for m in members) > 1 for members in problem.conflicts):
            x[j] = 0
    return x


def disagreements(problem: Problem, trace: Trace, costs: CostTable, seeds: int) -> list[tuple[int, float]]:
    """Return by how much the problem's peak and seconds differ from the simulated ones, where they do."""
    found = []
    rng = random.Random(0)
    for _ in range(seeds):
        x = feasible(problem, rng)
        timeline = simulate(trace, costs, problem.regions(x))
        bytes_off = int(problem.row_peaks(x).max()) - timeline.peak_bytes
        seconds_off = problem.seconds(x) / timeline.step_seconds - 1
        if bytes_off or abs(seconds_off) > 1e-9:
            found.append((bytes_off, seconds_off))
    return found


@pytest.mark.parametrize(("name", "precision", "microbatches"), each(BUILDERS, ["32-true", "bf16-mixed"], [1, 2]))
def test_the_problem_is_the_simulation(name: str, precision: Precision, microbatches: int) -> None:
    trace = plain_trace(name, precision, microbatches, large=True)
    costs = with_workspaces(trace)
    regions = Regions(trace)
    problem = build(regions, costs, options(regions, costs))
    assert len(problem.options) >= 2
    assert not disagreements(problem, trace, costs, seeds=15)


@pytest.mark.parametrize(("name", "microbatches"), each(BUILDERS, [1, 2]))
def test_the_problem_is_the_simulation_where_activations_wait_in_host_memory(name: str, microbatches: int) -> None:
    trace = plain_trace(name, "32-true", microbatches, large=True)
    costs = msgspec.structs.replace(with_workspaces(trace), link_bytes_per_second=1e9)
    regions = Regions(trace)
    found = [o for o in options(regions, costs, offload=True) if o.regions[0].offload or o.is_whole]
    assert any(o.transfers for o in found) and any(o.regions[0].prefetch for o in found)
    assert disagreements(build(regions, costs, found, 2**60), trace, costs, seeds=20) == []


def test_the_comparison_notices_one_byte() -> None:
    trace = plain_trace("convnet", large=True)
    regions = Regions(trace)
    problem = build(regions, COSTS, options(regions, COSTS))
    problem.base[:] += 1
    assert [off for off, _ in disagreements(problem, trace, COSTS, seeds=2)] == [1, 1]


def overlap(one: Option, other: Option) -> bool:
    return any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in one.modules for b in other.modules)


@pytest.mark.parametrize("name", ["unet", "transformer"])
def test_options_that_share_modules_are_in_conflict(name: str) -> None:
    regions = Regions(plain_trace(name, large=True))
    problem = build(regions, COSTS, options(regions, COSTS))
    for members in problem.conflicts:
        for a, b in itertools.combinations(members, 2):
            assert overlap(problem.options[a], problem.options[b])
    pairs = {frozenset(pair) for members in problem.conflicts for pair in itertools.combinations(members, 2)}
    found = list(enumerate(problem.options))
    overlapping = {
        frozenset((a, b)) for (a, one), (b, other) in itertools.combinations(found, 2) if overlap(one, other)
    }
    assert overlapping == pairs


def test_runs_and_nested_regions_are_among_the_options() -> None:
    regions = Regions(plain_trace("transformer", large=True))
    found = {tuple(r.modules for r in o.regions) for o in options(regions, COSTS) if not o.regions[0].keep}
    assert {(("blocks.0",),), (("blocks.0", "blocks.1"),)} <= found
    assert (("blocks.0", "blocks.1"), ("blocks.0",), ("blocks.1",)) in found
    assert not any(o.regions[0].keep for o in options(regions, COSTS) if len(o.regions) > 1)


def test_options_keep_only_what_can_be_kept() -> None:
    for name in BUILDERS:
        trace = plain_trace(name, large=True)
        mutated = {m for op in trace.ops for m in op.mutates}
        for option in options(Regions(trace), COSTS):
            for kept in option.kept.values():
                for op in kept:
                    assert trace.births[op] and not trace.ops[op].random and not trace.ops[op].mutates
                    assert not mutated.intersection(trace.births[op])


@pytest.mark.parametrize("stated", ["bf16-mixed", "32-true"], ids=["memfit's autocast", "a loop's own"])
def test_casts_under_autocast_are_not_kept(stated: Precision) -> None:
    trace = msgspec.structs.replace(plain_trace("twice", "bf16-mixed", large=True), precision=stated)
    keeps = [key for option in options(Regions(trace), COSTS) for region in option.regions for key in region.keep]
    assert keeps and not any("_to_copy" in key for key in keeps)


def test_excluded_regions_have_no_options() -> None:
    regions = Regions(plain_trace("twice", large=True))
    every = {fqn for o in options(regions, COSTS) for fqn in o.modules}
    assert "shared" in every
    assert {fqn for o in options(regions, COSTS, {"shared"}) for fqn in o.modules} == every - {"shared"}


def test_modules_that_write_to_their_input_are_refused() -> None:
    refused = refusals(Regions(plain_trace("convnet")))
    assert list(refused) == ["stem.2"]
    assert "aten.relu_.default" in refused["stem.2"]
    assert "stem.2" not in {fqn for o in options(Regions(plain_trace("convnet")), COSTS) for fqn in o.modules}


MOST_OPTIONS = 6


def alive(activities: frozenset[Activity], x: npt.NDArray[np.float64]) -> float:
    """Return the largest activity, 0 without any."""
    sums = [(lost, sum(float(x[j]) for j in members)) for lost, members in activities]
    return max([0.0, *(1 - chosen if lost else chosen for lost, chosen in sums)])


def mistakes(tightened: frozenset[Activity], before: frozenset[Activity], conflicts: list[frozenset[int]]) -> int:
    """Return for how many choices without conflicts the joined activities say something else."""
    choices = [np.array([i >> j & 1 for j in range(MOST_OPTIONS)], float) for i in range(2**MOST_OPTIONS)]
    legal = [x for x in choices if all(sum(x[j] for j in members) <= 1 for members in conflicts)]
    return sum(alive(tightened, x) != alive(before, x) for x in legal)


@st.composite
def cases(draw: st.DrawFn) -> tuple[frozenset[Activity], list[frozenset[int]]]:
    """Activities as a storage has them: each lies within a set of options that exclude each other."""
    options = st.integers(0, MOST_OPTIONS - 1)
    conflicts = draw(st.lists(st.frozensets(options, min_size=2), min_size=1, max_size=4))
    activities = set()
    for _ in range(draw(st.integers(1, 6))):
        clique = draw(st.sampled_from(conflicts))
        members = draw(st.frozensets(st.sampled_from(sorted(clique)), min_size=1))
        activities.add((draw(st.booleans()), members))
    return frozenset(activities), conflicts


@given(cases(), st.lists(st.floats(0, 1), min_size=MOST_OPTIONS, max_size=MOST_OPTIONS))
@settings(max_examples=300, deadline=None)
def test_choices_stay_and_fractions_get_dearer(
    case: tuple[frozenset[Activity], list[frozenset[int]]], fractions: list[float]
) -> None:
    activities, conflicts = case
    tightened = Tightening(conflicts)(activities)
    assert mistakes(tightened, activities, conflicts) == 0
    x = np.array(fractions)
    x /= max(1.0, *(sum(x[j] for j in members) for members in conflicts))
    assert alive(tightened, x) >= alive(activities, x) - 1e-9


def test_the_check_sees_a_wrong_one() -> None:
    conflicts = [frozenset({0, 1})]
    assert mistakes(frozenset({(True, frozenset({0}))}), frozenset({(True, frozenset({0, 1}))}), conflicts) > 0


def test_what_is_needed_or_saved_either_way_is_always_alive() -> None:
    """Saved unless 0 or 1 is chosen, an argument of 0 and of 1: halves of them do not make it go."""
    activities = {(True, frozenset({0, 1})), (False, frozenset({0})), (False, frozenset({1}))}
    assert Tightening([frozenset({0, 1})])(activities) == {ALWAYS}


@pytest.mark.parametrize("saved_in", [frozenset({0, 1, 2}), frozenset({0, 1})])
def test_only_options_that_lose_it_everywhere_count(saved_in: frozenset[int]) -> None:
    """Two saves: one lost in 0, 1 and perhaps 2, the other in 1 and 2; all exclude each other."""
    activities = {(True, saved_in), (True, frozenset({1, 2}))}
    assert Tightening([frozenset({0, 1, 2})])(activities) == {(True, saved_in & {1, 2})}
