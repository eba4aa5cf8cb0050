"""The user's prices of cards: a TOML file, every entry with its date. memfit has none of its own."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from memfit.errors import UsageError
from memfit.hardware.catalogue import look_up
from memfit.ir.fleet import Price

_EXAMPLE = 'a100-80gb = {per_hour = 1.23, currency = "USD", date = 2026-01-31}'


def read_prices(path: str | Path) -> dict[str, Price]:
    """Return the prices in a file, by the card's name in the catalogue.

    Raises:
        UsageError: The file can't be read, or an entry has no card of the catalogue, no price above 0, no currency or
            no date.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise UsageError(f"can't read the prices in {path}: {e}") from e
    entries = tables.get("prices")
    if not isinstance(entries, dict) or set(tables) != {"prices"}:
        raise UsageError(f"{path} needs one table, [prices], with an entry a card: {_EXAMPLE}")
    found: dict[str, Price] = {}
    for name, entry in entries.items():
        found[look_up(name).name] = _price(name, entry, str(path))
    return found


def _price(name: str, entry: Any, source: str) -> Price:
    try:
        price = msgspec.convert(entry, Price)
    except msgspec.ValidationError as e:
        raise UsageError(f"{source}, price of {name}: {e}. An entry has per_hour, currency and date: {_EXAMPLE}") from e
    if not (math.isfinite(price.per_hour) and price.per_hour > 0) or not price.currency.strip():
        raise UsageError(
            f"{source}, price of {name}: per_hour is {price.per_hour} and currency {price.currency!r}: give a price"
            f" above 0 in a currency: {_EXAMPLE}"
        )
    return price
