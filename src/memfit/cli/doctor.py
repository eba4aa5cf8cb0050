"""What Jittor lacks on this machine, as a table, and its first compilation with a bar."""

from __future__ import annotations

import dataclasses
import time

from rich.markup import escape
from rich.table import Table

from memfit import doctor
from memfit.cli.output import out, print_json, stages


def examine(prepare: bool, as_json: bool) -> None:
    """Show what Jittor needs, and compile it where that was not done.

    Raises:
        MissingExtraError: It is to be prepared, but is not installed.
        UsageError: It is to be prepared, but something that it needs is missing.
    """
    seconds = _prepare() if prepare else 0.0
    checks = doctor.checks()
    if as_json:
        print_json({"checks": [dataclasses.asdict(c) for c in checks], "prepare_seconds": seconds})
        return
    table = Table(box=None, pad_edge=False)
    for column in ("", "needs", "found", "what to do"):
        table.add_column(column)
    for check in checks:
        table.add_row("ok" if check.ok else "no" if check.needed else "--", check.name, escape(check.found), escape(check.remedy))
    out.print(table)


def _prepare() -> float:
    started = time.monotonic()
    with stages() as progress:
        doctor.prepare(progress)
    return time.monotonic() - started
