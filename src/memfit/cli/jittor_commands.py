"""Commands for Jittor: checks of its requirements, its first compilation with a bar, and plans."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from memfit.cli.output import out, print_json, stages
from memfit.errors import UsageError
from memfit.frameworks import jittor
from memfit.ir import Numerics, Plan, Precision


def examine(prepare: bool, as_json: bool) -> None:
    """Show Jittor's requirements, and compile it if necessary.

    Raises:
        MissingExtraError: `prepare` is True, and Jittor is not installed.
        UsageError: `prepare` is True, and a requirement is missing.
    """
    seconds = _prepare() if prepare else 0.0
    checks = jittor.doctor.checks()
    if as_json:
        print_json({"checks": [dataclasses.asdict(c) for c in checks], "prepare_seconds": seconds})
        return
    table = Table("", "needs", "found", "what to do", box=None, pad_edge=False)
    for check in checks:
        mark = "ok" if check.ok else "no" if check.needed else "--"
        table.add_row(mark, check.name, escape(check.found), escape(check.remedy))
    out.print(table)


def _prepare() -> float:
    started = time.monotonic()
    with stages() as progress:
        jittor.doctor.prepare(progress)
    return time.monotonic() - started


def plan_in_jittor(
    name: str, budget: str, device: str | None, numerics: Numerics, precisions: Sequence[Precision] | None, points: int
) -> Plan:
    """Return the plan for a workload in Jittor.

    Raises:
        UsageError: `device` is not the one that Jittor uses.
    """
    if device not in (None, "cpu"):
        raise UsageError(
            f"--device {device} can't be given with --framework jittor, since Jittor uses its own device: leave it out"
        )
    _prepare()
    from memfit import jittor

    workload = jittor.load_workload(name)
    with stages() as progress:
        return jittor.plan(
            workload,
            budget=budget,
            numerics=numerics,
            precisions=precisions or ("32-true",),
            points=points,
            progress=progress,
        )
