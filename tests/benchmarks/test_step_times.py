"""The figures of ratios between plans, and the processes that make a machine busy."""

from __future__ import annotations

import random
import statistics
from typing import Any, cast

import pytest

from benchmarks import step_times
from memfit.ir import Levers
from memfit.workload import Workload

PLAIN, FIRST, CHOSEN, OTHER = (Levers(microbatch_size=size) for size in (8, 4, 2, 1))
CELL = step_times.Cell(PLAIN, FIRST, CHOSEN, (FIRST, CHOSEN, OTHER))


def ratio(predicted: float, measured: float) -> dict[str, Any]:
    return {"kind": "ratio", "predicted_ratio": predicted, "measured_ratio": measured}


def test_errors_are_of_the_ratio_and_choices_of_the_fastest() -> None:
    rows = [
        ratio(1.0, 1.0),
        ratio(0.96, 1.2),
        ratio(1.26, 1.2),
        *(
            {"kind": "choice", "ratio_to_best": r, "ratio_error": e}
            for r, e in ((1, 0), (1.02, 0), (1.1, 0.02), (1.1, 0.03), (1.1, None))
        ),
    ]
    assert step_times.summary_of(rows) == {
        "cells": 3,
        "ratio_median_abs_error": pytest.approx(0.05),
        "ratio_within_10_percent": pytest.approx(2 / 3),
        "choices": 5,
        "measured_choice_within_2_percent": 0.4,
        "measured_choice_told_to_be_slower": 0.2,
    }


def test_nothing_measured_is_no_figure() -> None:
    assert step_times.summary_of([])["ratio_median_abs_error"] is None


def test_the_error_of_a_median_is_that_of_many_medians() -> None:
    draws = random.Random(0)
    samples = [[draws.gauss(1.0, 0.1) for _ in range(25)] for _ in range(2000)]
    spread = statistics.pstdev(statistics.median(sample) for sample in samples)
    found = statistics.fmean(step_times.error_of_median(sample) for sample in samples)
    assert found == pytest.approx(spread, rel=0.1) and step_times.error_of_median([1.0] * 4) == 0.0


def test_times_of_two_kinds_leave_a_median_unknown() -> None:
    assert step_times.error_of_median([1.0, 1.01, 1.6, 1.62, 1.65]) > 0.2


def test_others_compute_until_the_cells_are_done() -> None:
    with step_times._computing(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.returncode for process in processes)


def rounds_of(spread: float, **seconds: float) -> list[step_times.Round]:
    """Return twenty rounds of steps of some seconds, which each are off by a share of them at most."""
    draws, levers = random.Random(0), {"plain": PLAIN, "first": FIRST, "chosen": CHOSEN, "other": OTHER}

    def took(seconds: float) -> step_times.Took:
        return step_times.Took(seconds * (1 + draws.uniform(-spread, spread)))

    return [(1.0, {levers[name]: took(each) for name, each in seconds.items()}) for _ in range(20)]


def test_steps_run_on_until_the_others_are_told_from_the_chosen_one() -> None:
    few = rounds_of(0.0, plain=1.0, first=1.0, chosen=1.0, other=1.0)[:4]
    assert CELL.unknown(few) == {PLAIN, FIRST, CHOSEN, OTHER}
    assert CELL.unknown(rounds_of(0.01, plain=1.0, first=1.0, chosen=1.0, other=1.0)) == set()
    assert CELL.unknown(rounds_of(0.01, plain=1.0, first=1.0, chosen=1.0, other=0.9)) == set()
    assert CELL.unknown(rounds_of(0.02, plain=1.0, first=1.0, chosen=1.0, other=0.985)) == {CHOSEN, OTHER}
    assert CELL.unknown(rounds_of(0.15, plain=1.0, first=1.3, chosen=1.0, other=1.3)) == {PLAIN, FIRST}
    assert CELL.unknown(rounds_of(0.15, plain=1.0, first=1.0, chosen=1.0, other=1.3)) == {PLAIN, FIRST, CHOSEN}


def test_ratios_are_of_rounds_in_which_both_took_part_at_the_own_pace() -> None:
    rounds = rounds_of(0.0, plain=2.0, first=1.0) + rounds_of(0.0, plain=9.0)
    rounds += [(1.9, {PLAIN: step_times.Took(5.0), FIRST: step_times.Took(1.0)})]
    assert step_times.ratios_of(rounds, PLAIN, FIRST) == [2.0] * 20
    assert step_times.ratios_of(rounds[-1:], PLAIN, FIRST) == [5.0]


def test_ratios_are_of_undisturbed_times() -> None:
    """The first plan takes half as long as the plain step, and both half as long again where others share more."""
    plain = {share: step_times.Took(0.54 / share, share) for share in (0.36, 0.54)}
    first = {share: step_times.Took(took.seconds / 2, share) for share, took in plain.items()}
    shares = [(0.36, 0.54), (0.54, 0.36), (0.36, 0.36)]
    rounds = [(2.0, {PLAIN: plain[one], FIRST: first[other]}) for one, other in shares]
    assert step_times.ratios_of(rounds, PLAIN, FIRST) == pytest.approx([2.0] * 3)


def test_every_step_runs_until_all_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Levers] = []

    def timed(workload: object, levers: Levers, about_seconds: float) -> step_times.Took:
        ran.append(levers)
        return step_times.Took(about_seconds)

    monkeypatch.setattr(step_times, "_timed", timed)
    seconds = {PLAIN: 1.0, FIRST: 1.0, CHOSEN: 1.0, OTHER: 1.0}
    needed = iter([{*seconds}, {CHOSEN, OTHER}, set[Levers]()])
    rounds = step_times._rounds(cast("Workload", None), seconds, lambda rounds: next(needed))
    assert [{*taken} for _, taken in rounds] == [{*seconds}, {CHOSEN, OTHER}]
    assert sorted(ran[:4], key=lambda levers: -levers.microbatch_size) == [PLAIN, FIRST, CHOSEN, OTHER]
