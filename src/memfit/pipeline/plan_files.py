"""Plans as files."""

from __future__ import annotations

from pathlib import Path

from memfit.ir import codec
from memfit.ir.plan import Plan


def load_plan(path: str | Path) -> Plan:
    """Return the plan that a file holds.

    Raises:
        PlanError: It can't be read, or is not a plan.
    """
    return codec.read(path, Plan)


def save_plan(plan: Plan, path: str | Path) -> Path:
    """Write a plan to a file: the whole of it, or nothing.

    Raises:
        OutputError: The file can't be written.
    """
    return codec.write_atomic(path, codec.encode(plan))
