"""What the figures of the benchmark on ranks say of rows that went wrong, and its wrong answers seen as such."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.distributed import budgets, choices, figures, interruptions, peaks, throughput
from benchmarks.distributed.__main__ import PARTS
from benchmarks.distributed.ranks import of_all_ranks, on_ranks


def test_a_rank_above_its_budget_in_any_step_is_counted() -> None:
    row: dict[str, Any] = {"part": "budgets", "budget_bytes": 100, "measured_peak_bytes": [[90, 100], [99, 98]]}
    bad = {**row, "measured_peak_bytes": [[90, 100], [99, 101]]}
    refused = {"part": "infeasible", "budget_bytes": 50, "is_refused": True, "brute_force_peak_upper_bytes": 51}
    summary = budgets.summarised([row, bad, refused, {**refused, "brute_force_peak_upper_bytes": 50}])
    assert summary == {"plans": 2, "budget_violations": 1, "wrongly_infeasible": 1}


def test_errors_are_of_the_rank_that_holds_most() -> None:
    row = {"part": "peaks", "error": -0.01, "measured_peak_bytes": [90, 101], "peak_upper_bytes": 100}
    summary = peaks.summarised([row, {**row, "error": 0.0, "measured_peak_bytes": [100, 90]}])
    assert (summary["peak_largest_abs_error"], summary["above_upper_end"]) == (0.01, 1)


def test_what_did_not_survive_is_counted() -> None:
    killed = {"part": "kills", "kills": 10, "survived": 0, "hangs": 1}
    failed = {"part": "out of memory", "places": 4, "survived": 3, "hangs": 0}
    summary = interruptions.summarised([killed, failed])
    assert (summary["kills"], summary["kills_survived"], summary["hangs"]) == (10, 0, 1)
    assert (summary["out_of_memory"], summary["out_of_memory_survived"]) == (4, 3)


def test_the_choice_counts_as_best_only_where_nothing_else_fits() -> None:
    rows = [{"part": "choices", "ratio": ratio} for ratio in (None, 0.9, 1.05, 1.2)]
    assert choices.summarised(rows) == {"choice_within_5_percent": 0.75, "choice_worst_ratio": 1.2}


def test_parts_that_did_not_run_have_no_figures() -> None:
    for part in (peaks, budgets, interruptions, throughput, choices):
        assert not any(part.summarised([]).values())
    assert {"budgets", "kills", "out of memory", "choices", "peers", "searches"} <= PARTS.keys()


def test_every_sharding_is_tried() -> None:
    tried = list(budgets.all_levers(4))
    assert len(tried) == len(set(tried))
    assert {levers.sharding.mode for levers in tried if levers.sharding} == {"ddp", "zero2", "zero3"}
    assert {levers.microbatch_size for levers in tried} == {4, 2, 1}
    assert {bool(levers.regions) for levers in tried} == {True, False}


def test_tables_tell_what_went_wrong() -> None:
    machine = {"description": "a machine", "threads": 1}
    plan = {
        "part": "budgets",
        "model": "tied",
        "world_size": 2,
        "budget_bytes": 100,
        "measured_peak_bytes": [[103, 90]],
    }
    choice = {"part": "choices", "model": "tied", "budget_bytes": 100, "memfit": ["ddp of 4"], "memfit_seconds": 0.012}
    tracked = {"part": "predictions", "engine": "kept", "memfit_peak_bytes": 100, "measured_by_memfit_bytes": 100}
    tracked |= {"fsdp_mem_tracker_peak_bytes": 80, "measured_by_hand_bytes": 100}
    peer = {"part": "peers", "peer": "by hand, ddp", "measured_peak_bytes": [90, 100], "seconds": 0.03}
    searched = {"part": "searches", "case": "worlds", "model": "1 B", "rows": 64, "seconds": 44.2}
    cases = [plan, {**choice, "best_seconds": 0.01, "ratio": 1.2}, tracked, peer]
    cases.append({**searched, "processor_seconds": 45.6})
    result = {"cases": cases, "machine": machine, "command": "it", "versions": {"torch": "2.13"}, "date": "today"}
    assert "| tied | 2 | 1 | 100 B to 100 B | 1 | -3 B |" in figures.budgets_table(result)
    assert "| ddp of 4 | 12.0 ms | 10.0 ms | 1.200 |" in figures.choices_table(result)
    assert "| GPT, 1 B | 64 | 44 | 46 |" in figures.searches_table(result)
    assert "| by hand, ddp | 100 B | 30.0 ms |" in figures.peers_table(result)
    assert "| FSDPMemTracker | kept | 80 B | 100 B | -20.00% |" in figures.peers_table(result)


@pytest.mark.ci
def test_the_replay_on_paper_holds_what_the_engine_does() -> None:
    """Units without gradients too: what is gathered ahead for their backward passes is let go of at the end."""
    for row in peaks.replays_of("frozen", [4], only=["resharded", "kept"]):
        assert abs(row["difference_bytes"]) <= 512, row


def waiting() -> Iterator[int]:
    yield dist.get_rank()
    if dist.get_rank() == 1:
        dist.barrier()
    yield sum(of_all_ranks(1))


@pytest.mark.ci
def test_ranks_that_wait_for_one_another_are_a_hang() -> None:
    found = on_ranks(2, waiting, longest_seconds=3.0)
    assert next(found) == 0
    with pytest.raises(TimeoutError, match="nothing came of 2 ranks for 3 s"):
        list(found)
