"""The pace of a machine while steps run, and what is said of one that is busy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.cost import Pace, Paced, at_rest, busy_notes, undisturbed, undisturbed_ratios


def paced(kept: float | None, *now: float) -> Pace:
    times = iter(now)
    return Pace(None if kept is None else ("a call", kept), lambda text, about_seconds: next(times))


@pytest.mark.parametrize(
    ("kept", "now", "slowdown"),
    [
        (2e-3, [2e-3, 2e-3, 9e-3], 1.0),  # another program was in the way once
        (2e-3, [3e-3, 4e-3, 4e-3], 2.0),
        (2e-3, [3e-3, 2e-3], 1.25),
        (2e-3, [], 1.0),
        (None, [1.0], 1.0),  # nothing was timed before
    ],
)
def test_each_reading_and_the_pace_are_multiples_of_the_kept_time(
    kept: float | None, now: list[float], slowdown: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))  # where nothing is kept
    pace = paced(kept, *now)
    assert [pace.read() for _ in now] == [each / kept if kept else 1.0 for each in now]
    assert pace.slowdown == slowdown


@given(st.lists(st.floats(0.8, 3.0)), st.integers(0, 5))
def test_what_was_measured_at_rest_counts_or_else_at_about_the_least_slow_pace(
    slowdowns: list[float], least: int
) -> None:
    found = at_rest([(slowdown, slowdown) for slowdown in slowdowns], least)
    assert found == sorted(slowdowns)[: len(found)] and len(found) >= min(least, len(slowdowns))
    assert set(found) >= {slowdown for slowdown in slowdowns if slowdown <= 1.5}
    slowest = max([1.0, *sorted(slowdowns)[:least]])
    assert all(slowdown <= 1.5 * slowest for slowdown in found)
    assert all(slowdown > 1.5 * slowest for slowdown in sorted(slowdowns)[len(found) :])


def test_worked_numbers_of_rounds_at_rest() -> None:
    paced_rounds = [(1.0, "a"), (1.6, "b"), (1.4, "c"), (2.5, "d")]
    assert at_rest(paced_rounds, 1) == ["a", "c"] and at_rest(paced_rounds, 3) == ["a", "c", "b"]
    slower = [1.7, 1.6, 3.1, 1.6, 1.55, 2.2, 1.7]  # a machine that got slower: all rounds of its pace count
    assert at_rest([(slowdown, slowdown) for slowdown in slower], 3) == [1.55, 1.6, 1.6, 1.7, 1.7, 2.2]


shares = st.floats(0.1, 1.0)


def times(turns: list[Paced], least: int = 3) -> list[float]:
    return [turn.seconds for turn in undisturbed(turns, least)]


@given(st.lists(shares, min_size=1), shares, st.integers(1, 5))
def test_what_others_took_is_taken_off_up_to_their_least(of_turns: list[float], share: float, least: int) -> None:
    found = times([Paced(1.0 / each, attended_share=each) for each in of_turns], least)  # a second of computing each
    assert found == pytest.approx([1.0 / max(of_turns)] * len(found))
    assert times([Paced(seconds, attended_share=share) for seconds in of_turns], least) == pytest.approx(of_turns)


@given(st.lists(shares, min_size=1), st.integers(1, 5))
def test_turns_of_the_largest_shares_count_and_enough_of_them(of_turns: list[float], least: int) -> None:
    found = undisturbed([Paced(1.0, attended_share=each) for each in of_turns], least)
    assert len(found) >= min(least, len(of_turns))
    kept = sorted((turn.attended_share for turn in found), reverse=True)
    left = sorted(of_turns, reverse=True)
    assert kept == left[: len(kept)] and all(each < 0.9 * max(of_turns) for each in left[len(kept) :])


def test_worked_numbers_of_undisturbed_times() -> None:
    turns = [Paced(1.0, 1.0, 0.5), Paced(1.6, 1.0, 0.4), Paced(1.1, 1.0, 0.45)]
    assert times(turns, 3) == pytest.approx([1.0, 1.28, 0.99]) and times(turns, 2) == pytest.approx([1.0, 0.99])
    assert times([]) == [] and times([Paced(1.0, 1.0, 0.0), Paced(1.1, 1.0, 0.0)]) == [1.0, 1.1]


def test_ratios_are_of_turns_in_which_others_took_little() -> None:
    """Beside two programs the thread of an LSTM's small operators computes longer in turns of the worse kind."""
    good, bad = [(0.64, 0.55), (0.79, 0.55)], [(1.15, 0.37), (2.05, 0.34)]
    kinds = [(good, bad), (bad, good), (good, good), (bad, bad)] * 5
    own = [Paced(seconds, 4.0, share) for kind, _ in kinds for seconds, share in kind[:1]]
    other = [Paced(seconds, 4.0, share) for _, kind in kinds for seconds, share in kind[1:]]
    assert undisturbed_ratios(other, own, 5) == pytest.approx([0.79 / 0.64] * 10)


def test_ratios_are_of_turns_at_the_own_pace_of_rounds_that_both_have_a_time_of() -> None:
    own = [Paced(2.0), Paced(5.0, 1.9), Paced(2.0), Paced(0.0), Paced(2.0)]
    other = [Paced(1.0)] * 5
    assert undisturbed_ratios(own, other, 3) == [2.0] * 3 and undisturbed_ratios(own[:2], other[:2], 2) == [2.0, 5.0]

    assert undisturbed_ratios([Paced(0.0), Paced(1.8)], [Paced(1.0), Paced(2.0), Paced(9.0)], 3) == [0.9]
    assert undisturbed_ratios([Paced(0.0), Paced(1.0)], [Paced(1.0), Paced(0.0)], 3) == []


@pytest.mark.parametrize(
    ("attended", "slowdown", "said"),
    [
        (1.0, 1.0, []),
        (0.95, 1.1, []),
        (0.5, 1.0, ["a processor for 50% of the time"]),
        (1.0, 1.7, ["about 70% too long"]),
        (0.5, 1.7, ["a processor for 50% of the time", "or its host, while they ran"]),
    ],
)
def test_a_busy_machine_is_said_to_be_one(attended: float, slowdown: float, said: list[str]) -> None:
    notes = busy_notes("they ran", attended, slowdown)
    assert len(notes) == len(said) and all(text in note for text, note in zip(said, notes, strict=True))
