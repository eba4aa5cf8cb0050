"""Bytes and seconds, read from people and written for them."""

from __future__ import annotations

import math
import re

from memfit.errors import BudgetError

_UNIT_BYTES = {
    "": 1,
    "B": 1,
    **{f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")},
    **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")},
}
_CANONICAL = {unit.lower(): unit for unit in _UNIT_BYTES}
_BUDGET = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*|%)\s*")


def parse_budget(budget: int | float | str, device_bytes: int | None, argument: str = "budget") -> int:
    """Return the bytes that a budget says.

    Args:
        budget: Bytes, or a string with a unit ("24GiB", "22 GB", "512 MiB"), or a share of the
            device ("90%").
        device_bytes: The device's usable memory, of which a share is taken; None where shares make no sense.
        argument: What errors call it.

    Raises:
        BudgetError: The budget says no positive number of bytes.
    """
    share = "" if device_bytes is None else ", or as a share of the device ('90%')"
    hint = f"give {argument}= as bytes, or as a string with a unit ('1.5GiB', '22 GB'){share}"
    if isinstance(budget, bool) or not isinstance(budget, int | float | str):
        raise BudgetError(f"{argument}={budget!r} is a {type(budget).__name__}: {hint}")
    if isinstance(budget, str):
        match = _BUDGET.fullmatch(budget)
        unit = match[2] if match else "?"
        if match is None or (unit.lower() not in _CANONICAL if unit != "%" else device_bytes is None):
            raise BudgetError(f"{argument}={budget!r} can't be read: {hint}")
        scale = (device_bytes or 0) / 100 if unit == "%" else _UNIT_BYTES[_CANONICAL[unit.lower()]]
        if unit == "%" and float(match[1]) > 100:
            raise BudgetError(f"{argument}={budget!r} is more than the device has: a share is at most 100%")
        value = float(match[1]) * scale
    elif isinstance(budget, int) and budget.bit_length() > 63:
        raise BudgetError(f"{argument}= is an integer of {budget.bit_length()} bits: {hint}")
    else:
        value = float(budget)
    if not math.isfinite(value) or value < 1:
        raise BudgetError(f"{argument}={budget!r} is {value:g} bytes: {hint}")
    return int(value)


def format_bytes(n: float) -> str:
    """Return bytes as people read them, in binary units ("713.2 MiB")."""
    sign, n = ("-" if n < 0 else ""), abs(n)
    if n < 1024:
        return f"{sign}{n:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        n /= 1024
        if n < 1024:
            return f"{sign}{n:.1f} {unit}"
    return f"{sign}{n / 1024:.2f} TiB"


def format_seconds(t: float) -> str:
    """Return seconds as people read them ("12.3 ms")."""
    if t < 1e-3:
        return f"{t * 1e6:.1f} µs"
    if t < 1:
        return f"{t * 1e3:.1f} ms"
    return f"{t:.2f} s" if t < 120 else f"{t / 60:.1f} min"
