from __future__ import annotations

import time

import pytest

from benchmarks.overhead import compare


@pytest.mark.ci
def test_both_steps_do_the_same_and_are_timed() -> None:
    for name in ("tiny", "tiny_without_checkpointing"):
        found = compare(name, 2, time.process_time)
        assert found["largest_difference"] < 1e-5
        assert 0.2 < found["ratio"] < 5
