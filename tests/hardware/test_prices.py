"""The user's prices: each with its date, and none of memfit's own."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from memfit.errors import UsageError
from memfit.hardware.catalogue import read_prices

GOOD = '[prices]\na100-80gb = {per_hour = 1.5, currency = "USD", date = 2026-11-01}\n'


def test_prices_are_read_by_the_cards_name(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(GOOD + '"RTX 3090" = {per_hour = 1, currency = "EUR", date = 2026-01-02}\n')
    found = read_prices(path)
    assert list(found) == ["a100-80gb", "rtx-3090"]
    assert found["a100-80gb"].per_hour == 1.5 and found["a100-80gb"].date == datetime.date(2026, 11, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[prices]\nh100 = {per_hour = 2, currency = "USD"}', "missing required field `date`"),
        ('[prices]\nh100 = {per_hour = 2, currency = "USD", date = "today"}', "date"),
        ('[prices]\nh100 = {per_hour = 0, currency = "USD", date = 2026-01-01}', "above 0"),
        ('[prices]\nh100 = {per_hour = nan, currency = "USD", date = 2026-01-01}', "above 0"),
        ('[prices]\nh100 = {per_hour = 2, currency = " ", date = 2026-01-01}', "currency"),
        ('[prices]\nh100 = {per_hour = 2, currency = "USD", date = 2026-01-01, spot = true}', "spot"),
        ("[prices]\nh100 = 2", "price of h100"),
        ('[prices]\nh1000 = {per_hour = 2, currency = "USD", date = 2026-01-01}', "not in the catalogue"),
        ("h100 = 2", r"one table, \[prices\]"),
        ("[prices", "can't read"),
    ],
)
def test_what_is_no_dated_price_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_prices(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml"):
        read_prices(tmp_path / "nowhere.toml")
