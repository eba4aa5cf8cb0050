"""Bytes, seconds and progress as people see them, and the parsing of budgets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from memfit.errors import BudgetError, UsageError

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, how much of it is done, and of how much."""

StageProgress = Callable[[int, int], None]
"""Called with how much of one stage is done, and of how much."""

_UNIT_BYTES = {
    "": 1,
    "B": 1,
    **{f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")},
    **{f"{p}{i}": 1024 ** (n + 1) for n, p in enumerate("KMGT") for i in ("", "i")},
    **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")},
}
_CANONICAL = {unit.lower(): unit for unit in _UNIT_BYTES}
_FEWEST_BARE_BYTES = 1000
"""Fewer without a unit are asked about: "24" is meant as 24GiB."""
_BUDGET = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*|%)\s*")


@dataclass(frozen=True)
class Budget:
    """A memory budget: bytes or a share.

    Attributes:
        amount: Bytes (≥ 1), or a share (> 0).
        of: Base of a share: "device" for its usable memory, "plain" for the plain step's peak; "" for bytes.
        said: The text that was given ("50%").
        argument: Name of the argument, for errors.
    """

    amount: float
    of: Literal["", "device", "plain"]
    said: str
    argument: str

    def nbytes(self, *, device_bytes: int | None = None, plain_bytes: int | None = None) -> int:
        """Return the budget in bytes: a share is one of the device's usable memory, or of the plain step's peak."""
        whole = {"": 1, "device": device_bytes, "plain": plain_bytes}[self.of]
        if whole is None:
            raise BudgetError(f"{self.argument}={self.said!r} is a share of an amount that is unknown here: give bytes")
        if self.amount * whole < 1:
            raise BudgetError(f"{self.argument}={self.said!r} of {whole} is less than a byte: give more")
        return int(self.amount * whole)

    def share_text(self, device: str, device_bytes: int | None, plain_bytes: int) -> str:
        """Return a share with its base ("50% of the 21.9 GiB that cpu has for a step"); "" for bytes."""
        if self.of == "device":
            return f"{self.said} of the {format_bytes(device_bytes or 0)} that {device} has for a step"
        return f"{self.said} of the plain step's peak of {format_bytes(plain_bytes)}" if self.of == "plain" else ""


def read_budget(
    budget: int | float | str, argument: str = "budget", *, of_device: bool = True, of_plain: bool = True
) -> Budget:
    """Parse a budget.

    Args:
        budget: Bytes, or a string with a unit ("24GiB", "22 GB", "512M"), or a share of the device ("90%") or of the
            plain step's peak ("0.5x"). "G" is "GiB" (2^30 bytes), as in Docker and Slurm; "GB" is 10^9 bytes.
        of_device, of_plain: Whether shares of the device, and of the plain step's peak, are allowed.

    Raises:
        BudgetError: It can't be parsed, is not above 0, is below 1000 without a unit, or is a share not allowed.
    """
    shares = ["the device ('90%')"] * of_device + ["the plain step's peak ('0.5x')"] * of_plain
    hint = f"give {argument}= as bytes, or as a string with a unit ('24GiB', '24G', '22 GB')"
    hint += f", or as a share of {' or of '.join(shares)}" if shares else ""
    if isinstance(budget, bool) or not isinstance(budget, int | float | str):
        given = budget if budget is None or isinstance(budget, bool) else f"a {type(budget).__name__}"
        raise BudgetError(f"{argument} is {given}: {hint}")
    if isinstance(budget, float) and 0 < budget <= 1 and of_device:
        raise BudgetError(f"{argument} is {budget}, which is not a number of bytes: write {argument}='{budget:.0%}'")
    if isinstance(budget, int) and budget.bit_length() > 63:
        raise BudgetError(f"{argument}= is an integer of {budget.bit_length()} bits: {hint}")
    said, unit = str(budget).strip(), ""
    if isinstance(budget, str):
        match = _BUDGET.fullmatch(budget)
        amount, unit = (float(match[1]), match[2].lower()) if match else (0.0, "?")
        if unit == "%" and of_device:
            if amount > 100:
                raise BudgetError(f"{argument}={budget!r} is more than the device has: a share is at most 100%")
            found = Budget(amount / 100, "device", said, argument)
        elif unit == "x" and of_plain:
            found = Budget(amount, "plain", said, argument)
        elif unit in _CANONICAL:
            found = Budget(amount * _UNIT_BYTES[_CANONICAL[unit]], "", said, argument)
        else:
            raise BudgetError(f"{argument}={budget!r} can't be read: {hint}")
    else:
        found = Budget(float(budget), "", said, argument)
    if not math.isfinite(found.amount) or found.amount < (0 if found.of else 1) or not found.amount:
        raise BudgetError(f"{argument}={said!r} is {found.amount:g} bytes: {hint}")
    if not unit and found.amount < _FEWEST_BARE_BYTES:  # another unit is meant
        raise BudgetError(
            f"{argument}={said!r} is {said} bytes: type {argument}='{said}GiB' for {said} GiB, or"
            f" {argument}='{said}B' for bytes"
        )
    return found


def parse_budget(budget: int | float | str, device_bytes: int | None, argument: str = "budget") -> int:
    """Return the bytes of a budget that is no share of a plain step, nor of a device without `device_bytes`."""
    parsed = read_budget(budget, argument, of_device=device_bytes is not None, of_plain=False)
    return parsed.nbytes(device_bytes=device_bytes)


def format_bytes(n: float) -> str:
    """Return bytes as text in binary units ("713.2 MiB")."""
    sign, n = ("-" if n < 0 else ""), abs(n)
    if n < 1024:
        return f"{sign}{n:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        n /= 1024
        if n < 1024:
            return f"{sign}{n:.1f} {unit}"
    return f"{sign}{n / 1024:.2f} TiB"


_HOURS = {"s": 1 / 3600, "min": 1 / 60, "h": 1.0, "d": 24.0}
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|min|h|d)\s*")


def parse_hours(duration: float | str, argument: str) -> float:
    """Return a duration in hours (> 0), from hours or from a string with a unit ("24h", "3d", "90min")."""
    match = _DURATION.fullmatch(duration) if isinstance(duration, str) else None
    hours = float(match[1]) * _HOURS[match[2]] if match else duration
    if isinstance(hours, str | bool) or not isinstance(hours, int | float) or not 0 < hours < math.inf:
        raise UsageError(
            f"{argument}={duration!r} is no duration above 0: give it with a unit ('24h', '3d', '90min', '30s')"
        )
    return float(hours)


def format_hours(hours: float) -> str:
    """Return hours as text, in the unit that reads well ("45 min", "12.3 h", "4.1 d")."""
    if hours < 1:
        return f"{hours * 60:.1f} min" if hours * 60 >= 1 else f"{hours * 3600:.1f} s"
    return f"{hours:.1f} h" if hours < 72 else f"{hours / 24:.1f} d"


def format_seconds(t: float) -> str:
    """Return seconds as text ("12.3 ms")."""
    if t < 1e-3:
        return f"{t * 1e6:.1f} µs"
    if t < 1:
        return f"{t * 1e3:.1f} ms"
    return f"{t:.2f} s" if t < 120 else f"{t / 60:.1f} min"


def silent(stage: str, done: int, total: int) -> None:
    """Report no progress."""
