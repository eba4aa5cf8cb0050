"""Bytes and seconds, read and written."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memfit.errors import BudgetError, UsageError
from memfit.foundations import format_bytes, format_seconds, parse_budget, read_budget

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS |= {f"{prefix}{i}": 1024 ** (n + 1) for n, prefix in enumerate("KMGT") for i in ("", "i")}
DEVICE = 64 * 2**30


@given(st.integers(1, 9999), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]), st.booleans())
def test_units_multiply_whatever_their_case(value: int, unit: str, space: str, lower: bool) -> None:
    text = f"{value}{space}{unit.lower() if lower else unit}"
    nbytes = value * UNITS[unit]
    assert parse_budget(text, DEVICE) == nbytes
    if nbytes >= 1000:
        assert parse_budget(nbytes, DEVICE) == parse_budget(str(nbytes), DEVICE) == nbytes


@pytest.mark.parametrize("budget", [24, 24.0, "24", "1.5", 999])
def test_few_bytes_without_a_unit_are_asked_about(budget: int | float | str) -> None:
    with pytest.raises(BudgetError, match=f"budget='{budget}' is {budget} bytes: type budget='{budget}GiB'"):
        parse_budget(budget, DEVICE)


def test_fractions_are_cut_to_whole_bytes() -> None:
    assert parse_budget("1.5GiB", DEVICE) == 3 * 2**29
    assert parse_budget("0.5 KiB", DEVICE) == 512
    assert parse_budget(2048.9, DEVICE) == 2048
    assert parse_budget("1.5gib", DEVICE) == 3 * 2**29 and parse_budget("37%", DEVICE) == int(37 * DEVICE / 100)


@given(st.floats(1, 1e15), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
@settings(max_examples=200)
def test_what_is_written_can_be_read(value: float, unit: str) -> None:
    nbytes = min(value * UNITS[unit], 2.0**50)
    assert re.fullmatch(r"\d{1,4}(\.\d{1,2})? ([KMGT]i)?B", format_bytes(nbytes))
    assert parse_budget(format_bytes(nbytes), DEVICE) == pytest.approx(nbytes, rel=0.06, abs=1)


NONSENSE = [
    *("", " ", "lots", "GiB", "12 parsecs", "1,5GiB", "1.5.2GiB", "-1GiB", "+1GiB", "1e9", "0", "0GiB", "0%", "101%"),
    *("nan", "inf", "NaN GiB", "1 GiB extra", "0.5", "0.0001KiB", "0x10", "١GiB", "9" * 400),
    *(0, -1, 0.5, float("nan"), float("inf"), -float("inf"), True, False, None, [1], b"1GiB", 1j, 10**400),
]


@pytest.mark.parametrize("budget", NONSENSE, ids=lambda b: repr(b)[:20])
def test_nonsense_is_a_budget_error_that_says_what_to_give(budget: object) -> None:
    with pytest.raises(BudgetError, match="budget=") as caught:
        parse_budget(budget, DEVICE)  # type: ignore[arg-type]
    assert isinstance(caught.value, UsageError)
    assert caught.value.exit_status == 2


@given(st.one_of(st.text(max_size=12), st.floats(), st.integers(), st.none(), st.booleans()))
@example("1GİB")
@settings(max_examples=300)
def test_anything_gives_positive_bytes_or_a_budget_error(budget: object) -> None:
    try:
        assert parse_budget(budget, DEVICE) >= 1  # type: ignore[arg-type]
    except BudgetError:
        pass


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (713.2 * 2**20, "713.2 MiB"),
        (-3 * 2**30, "-3.0 GiB"),
        (2**40, "1.00 TiB"),
        (2048 * 2**40, "2048.00 TiB"),
    ],
)
def test_bytes_are_written_in_binary_units(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 µs"), (2e-5, "20.0 µs"), (0.0123, "12.3 ms"), (1.5, "1.50 s"), (180, "3.0 min")]
)
def test_seconds_are_written_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.integers(1, 400), st.integers(2**10, 2**45))
@settings(max_examples=60)
def test_a_share_of_the_plain_peak_is_of_that_peak(percent: int, plain_bytes: int) -> None:
    found = read_budget(f"{percent / 100}x")
    assert found.of == "plain"
    assert found.nbytes(plain_bytes=plain_bytes) == int(float(f"{percent / 100}") * plain_bytes)
    assert "of the plain step's peak of" in found.share_text("cpu", DEVICE, plain_bytes)


@pytest.mark.parametrize(
    ("budget", "options", "words"),
    [
        ("0.5x", {"of_plain": False}, "can't be read"),
        ("50%", {"of_device": False}, "can't be read"),
        ("0x", {}, "is 0 bytes"),
        ("-1x", {}, "can't be read"),
    ],
)
def test_shares_that_make_no_sense_are_refused(budget: str, options: dict[str, bool], words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        read_budget(budget, **options)


def test_a_share_of_what_is_not_known_is_refused_and_one_of_no_byte() -> None:
    with pytest.raises(BudgetError, match="share of an amount that is unknown"):
        read_budget("0.5x").nbytes(device_bytes=DEVICE)
    with pytest.raises(BudgetError, match="of 10 is less than a byte"):
        read_budget("0.01x").nbytes(plain_bytes=10)
    assert read_budget("1GiB").share_text("cpu", DEVICE, 1) == ""
