"""Settings of the update of parameters, by their values."""

from __future__ import annotations

from typing import Any

from memfit.levers import LEVERS, UpdateLever

FIELDS = {lever.value: lever.field for lever in LEVERS if isinstance(lever, UpdateLever)}
"""The field of `Levers` that each value is of."""


def update_settings(*values: str) -> dict[str, Any]:
    """Return the fields of `Levers` that some values set; "as-is" sets none."""
    return {FIELDS[value]: value for value in values if value != "as-is"}
