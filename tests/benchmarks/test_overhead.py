from __future__ import annotations

import time

import pytest

from benchmarks.overhead import KEEPS, compare, compare_keeping


@pytest.mark.ci
def test_both_steps_do_the_same_and_are_timed() -> None:
    for name in ("tiny", "tiny_without_checkpointing"):
        found = compare(name, 2, time.process_time)
        assert found["largest_difference"] < 1e-5
        assert 0.2 < found["ratio"] < 5


@pytest.mark.ci
def test_what_blocks_keep_is_timed_beside_the_plain_step() -> None:
    found = compare_keeping(2, time.process_time)
    assert [case["case"] for case in found] == list(KEEPS)
    assert all(0.2 < case[f"{way}_ratio"] < 20 for case in found for way in ("by_hand", "memfit"))
