"""Corrections of modelled times, from calls whose times are made up."""

from __future__ import annotations

import pytest

from benchmarks.corrections import LEAST_CALLS, Compared, device_with_rates, factors_of, left_out
from memfit.errors import UsageError

KIND = ("matrix products", "float32")


def call(seconds: float, modelled: float, *, kind: tuple[str, str] = KIND, floor: float = 1e-6) -> Compared:
    return Compared(kind, seconds, 2, modelled, floor)


SLOWER = [call(1.5e-3 * size, 1e-3 * size) for size in range(1, 8)]


def test_the_factor_is_the_middle_of_measured_over_modelled_seconds() -> None:
    odd = [call(1e-3, 1e-4), call(1e-5, 1e-4)]
    assert factors_of([*SLOWER, *odd]) == {KIND: pytest.approx(1.5)}


def test_longer_calls_weigh_more() -> None:
    short = [call(1e-5, 1e-5) for _ in range(6)]
    assert factors_of([*short, *SLOWER])[KIND] == pytest.approx(1.5)


def test_launches_say_nothing_of_kernels_and_few_calls_nothing_of_a_class() -> None:
    launched = [call(1.2e-6, 1e-8) for _ in range(100)]
    other = [call(1e-3, 1e-3, kind=("copies", "float32")) for _ in range(LEAST_CALLS - 1)]
    assert list(factors_of([*SLOWER, *launched, *other])) == [KIND]
    assert factors_of(launched) == {}


def test_a_model_is_predicted_from_the_others() -> None:
    own = [call(1.5e-3, 1e-3), call(1e-6, 1e-9)]
    found = left_out("one", "32-true", own, SLOWER)
    assert found["error"] == pytest.approx(0, abs=1e-9)
    assert found["estimated_error"] == pytest.approx(1.001 / 1.501 - 1)
    assert found["measured_seconds"] == pytest.approx(2 * 1.501e-3)


def test_a_device_without_rates_is_refused() -> None:
    with pytest.raises(UsageError, match="bandwidth_bytes_per_second"):
        device_with_rates("cpu")
