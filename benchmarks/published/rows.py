"""The published rows: `rows.toml` as records."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from memfit.ir import Precision

TOML = Path(__file__).with_name("rows.toml")
UNITS = {
    **{"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9},
    **{"s": 1.0, "ms": 1e-3},
}
FIGURES = ("allocated", "after", "reserved", "process", "step")
"""What a row may have measured: see `Row`."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published measurement, with all that is needed to rebuild its step.

    Attributes:
        id: Name of the row.
        grade: "A" where the step can be rebuilt from code at a named commit, "A-" with one harmless unknown, "B" with
            small assumptions.
        build: The function that returns the workload: "module:function" in `benchmarks.published`.
        options: Its arguments.
        device: Name in the catalogue.
        what: The step in words.
        precision: Of the step.
        environment: "packages" for those that need the environment of `make packages`.
        allocated: Peak allocated in bytes.
        after: Bytes allocated after the step.
        reserved: Peak reserved in bytes.
        process: Whole device or process in bytes, the context included.
        idle: Bytes of `process` outside of the allocator that the source measured before the model was there, or with
            the smallest ones; None where it does not say.
        loads_all: Whether the process loads all kernels of its libraries at once: as `idle` shows, or since its CUDA is
            older than 11.7.
        driver: Bytes that the source's meter shows on an idle card: the driver's own.
        step: Seconds of a step.
        timed: Arguments that differ in the source's timing of the step.
        fits: Whether the step ran on the card; None where that is not of interest.
        assumed: What was assumed for this row.
        without: Categories of bytes at the peak that the source's figure of `allocated` does not count.
    """

    id: str
    grade: Literal["A", "A-", "B"]
    build: str
    device: str
    what: str = ""
    options: dict[str, Any] = {}
    precision: Precision = "32-true"
    environment: Literal["", "packages"] = ""
    allocated: int | None = None
    after: int | None = None
    reserved: int | None = None
    process: int | None = None
    idle: int | None = None
    loads_all: bool = False
    driver: int = 0
    step: float | None = None
    timed: dict[str, Any] = {}
    fits: bool | None = None
    assumed: str = ""
    without: tuple[str, ...] = ()


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where rows come from.

    Attributes:
        title: Its name.
        url: Where it is.
        at: Its files and commits.
        assumed: What was assumed for all rows.
        rows: Its rows.
        left_out: Rows that are not rebuilt, with the reason.
    """

    title: str
    url: str
    at: str
    assumed: str
    rows: list[Row]
    left_out: dict[str, str] = {}


def sources() -> dict[str, Source]:
    """Return the sources by name, a row of lists written out as one row for each of their values."""
    tables = tomllib.loads(TOML.read_text())
    for name, table in tables.items():
        groups = table.pop("rows", [])
        shared = table.pop("shared", {})
        rows = [row for group in groups for row in _written_out({**shared, **group})]
        tables[name] = msgspec.convert({**table, "rows": rows}, Source)
    return tables


def every_row() -> dict[str, Row]:
    """Return all rows by id."""
    return {row.id: row for source in sources().values() for row in source.rows}


def _written_out(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a group: those of `over`'s values in step, whose figures stand in the same order."""
    over = group.pop("over", {})
    count = len(next(iter(over.values()))) if over else 1
    figures = {name: _quantities(group.pop(name), count) for name in (*FIGURES, "idle", "driver") if name in group}
    fits = group.pop("fits", None)
    rows = []
    for i in range(count):
        given = {name: values[i] for name, values in over.items()}
        row = {**group, "options": {**group.get("options", {}), **given}}
        row.update({name: values[i] for name, values in figures.items() if values[i] is not None})
        if fits is not None:
            row["fits"] = fits[i] if isinstance(fits, list) else fits
        if over:
            row["id"] = f"{group['id']}/" + ",".join(
                f"{value:g}" if _is_number(value) else str(value) for value in given.values()
            )
        rows.append(row)
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _quantities(text: str, count: int) -> list[float | int | None]:
    """Return the values of "1280.126 / 2560.126 MiB" in bytes or seconds; None where it has "-"."""
    values, unit = text.rsplit(" ", 1)
    scale = UNITS[unit]
    parts = [part.strip() for part in values.split("/")]
    if len(parts) == 1:
        parts *= count
    if len(parts) != count:
        raise ValueError(f"{text!r} has {len(parts)} values, and its group {count} rows")
    found = [None if part == "-" else float(part) * scale for part in parts]
    return [value if value is None or isinstance(scale, float) else round(value) for value in found]


def grouped(rows: list[Row]) -> list[list[Row]]:
    """Return the runs of rows that follow one another and differ in their options alone."""
    return [list(run) for _, run in itertools.groupby(rows, key=lambda row: (row.build, row.device))]
