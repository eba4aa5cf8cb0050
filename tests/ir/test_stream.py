"""The two clocks of host and device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.ir.stream import stream_seconds

kernels = st.lists(st.floats(0, 1e-3), max_size=40)
dispatches = st.floats(0, 1e-4)


def test_short_kernels_are_bound_by_the_host() -> None:
    assert stream_seconds([1e-6] * 100, 5e-6) == pytest.approx(100 * 5e-6 + 1e-6)


def test_long_kernels_are_bound_by_the_device() -> None:
    assert stream_seconds([1e-3] * 100, 5e-6) == pytest.approx(100 * 1e-3 + 5e-6)


def test_a_long_kernel_hides_the_dispatch_of_short_ones() -> None:
    """What adding up max(kernel, dispatch) leaves out: 100 short kernels cost their own time behind a long one."""
    steps = [1e-3] + [1e-6] * 100
    assert stream_seconds(steps, 5e-6) == pytest.approx(5e-6 + 1e-3 + 100e-6)
    assert sum(max(k, 5e-6) for k in steps) == pytest.approx(1e-3 + 500e-6)


def test_nothing_takes_no_time() -> None:
    assert stream_seconds([], 5e-6) == 0.0


@given(kernels, dispatches)
def test_no_faster_than_host_or_device_and_no_slower_than_the_sum(steps: list[float], dispatch: float) -> None:
    seconds = stream_seconds(steps, dispatch)
    assert seconds >= max(sum(steps), len(steps) * dispatch) - 1e-9
    assert seconds <= sum(max(k, dispatch) for k in steps) + dispatch + 1e-9


@given(kernels, dispatches)
def test_it_is_the_longest_path(steps: list[float], dispatch: float) -> None:
    """Oracle: some operator waits for the host, and all after it for the device."""
    paths = [(i + 1) * dispatch + sum(steps[i:]) for i in range(len(steps))]
    assert stream_seconds(steps, dispatch) == pytest.approx(max(paths, default=0.0))
