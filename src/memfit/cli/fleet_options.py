"""The options of `memfit fleet`, checked before a model is built."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from memfit.errors import UsageError
from memfit.hardware.catalogue import known_devices, read_prices
from memfit.hardware.host import find_device
from memfit.units import parse_hours

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST = 65_536


def rank_numbers(text: str) -> list[int]:
    """Return the numbers of ranks that a text names ("1-64", "1,2,4,8").

    Raises:
        UsageError: It names none.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else 0
        if not 1 <= first <= last <= _MOST:
            raise UsageError(f"--ranks {text} can't be read: give a range (1-64), or numbers (1,2,4,8)")
        found.update(range(first, last + 1))
    return sorted(found)


def check_cards(names: Sequence[str] | None, prices: Path | None, within: str | None) -> list[str]:
    """Return the names of the cards to look at; raise `UsageError` where they, the prices or the time can't be read."""
    if prices is not None:
        read_prices(prices)
    if within is not None:
        parse_hours(within, "--within")
    if names:
        return [find_device(name).name for name in names]
    return [device.name for device in known_devices().values() if device.kind == "cuda"]
