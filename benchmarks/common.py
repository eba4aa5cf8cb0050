"""What the benchmarks share: arguments, result files, and the measured truth."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memfit import ir
from memfit.capture import real_copy
from memfit.foundations import __version__
from memfit.hardware import allocated, devices, find_device, host_name
from memfit.ir import Levers
from memfit.levers import applied
from memfit.workload import Workload

Case = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """A step that ran.

    Attributes:
        peak_bytes: Peak allocated.
        peak_reserved_bytes: What the allocator took from a GPU; None elsewhere.
        step_seconds: Median of single steps; None where they were not timed.
    """

    peak_bytes: int
    peak_reserved_bytes: int | None = None
    step_seconds: float | None = None


def main(
    name: str,
    run: Callable[..., tuple[list[Case], dict[str, Any]]],
    doc: str | None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    package: str = "benchmarks",
) -> None:
    """Run a benchmark from the command line and write its result file where asked.

    Args:
        name: Of the benchmark.
        run: Called with whether to be quick, and with the options by name; returns cases and their summary.
        doc: For `--help`.
        options: Further options of the command, with the arguments of `ArgumentParser.add_argument`.
        package: Where it is.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {package}.{name}", description=doc)
    parser.add_argument("--quick", action="store_true", help="fewer cases, about two minutes on two cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"e.g. benchmarks/results/{name}-{host_name()}.json")
    added = [parser.add_argument(flag, **settings).dest for flag, settings in (options or {}).items()]
    arguments = parser.parse_args()
    cases, summary = run(arguments.quick, **{name: getattr(arguments, name) for name in added})
    print(json.dumps(summary, indent=2))
    if arguments.json is not None:
        command = _command(f"{package}.{name}", sys.argv[1:])
        write_result(arguments.json, result_of(command, cases, summary, getattr(arguments, "device", "cpu")))


def result_of(command: str, cases: Sequence[Case], summary: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Return a result as its file has it.

    Args:
        command: What made it.
        device: Where the steps ran.
    """
    return {
        "command": command,
        "machine": {
            "name": host_name(),
            "description": devices()[0].description,
            "threads": torch.get_num_threads(),
            "accelerator": None if device == "cpu" else find_device(device).description,
        },
        "versions": {"memfit": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cases": list(cases),
        "summary": dict(summary),
    }


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result file, and say so."""
    ir.codec.write_atomic(path, json.dumps(result, indent=1).encode() + b"\n")
    print(f"written to {path}", file=sys.stderr)


def slug(text: str) -> str:
    """Return a text in small letters and digits, with "-" between its words."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _command(module: str, given: Sequence[str]) -> str:
    """Return the command as it was given, but for its files."""
    options = list(given)
    for written in ("--json", "--keep", "--rows"):
        if written in options:
            at = options.index(written)
            del options[at : at + 2]
        options = [option for option in options if not option.startswith(f"{written}=")]
    return shlex.join(["python", "-m", module, *options])


def whole_run_peak_bytes(workload: Workload, levers: Levers, steps: int = 2) -> int:
    """Return the peak that the allocator reported over a whole run, the making of its copy of the workload included."""
    with allocated() as meter:
        copied = real_copy(workload)
        with applied(levers, copied) as step:
            for _ in range(steps):
                step(copied.batch)
        del copied, step
    return meter.peak_bytes
