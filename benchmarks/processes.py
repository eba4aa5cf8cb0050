"""Processes of their own for the workloads of a benchmark: what one of them does leaves the others alone."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common import Case


@dataclass(frozen=True)
class Output:
    """What a process printed.

    Attributes:
        rows: Its lines of JSON.
        end: How it ended, in words.
        notices: Its standard error.
    """

    rows: list[Case]
    end: str
    notices: str


def output_of(command: Sequence[str], timeout_seconds: float, environment: Mapping[str, str] | None = None) -> Output:
    """Return what a command prints before it ends, or is ended at its time limit.

    Args:
        environment: Variables to set beside those of this process.
    """
    variables = {**os.environ, **(environment or {})}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_seconds, check=False, env=variables
        )
        output, end, notices = result.stdout, f"exit status {result.returncode}", result.stderr
    except subprocess.TimeoutExpired as e:
        output, end, notices = _text(e.stdout), f"no end within {timeout_seconds:g} s", _text(e.stderr)
    complete = output[: output.rfind("\n") + 1]  # a row may be cut short
    return Output([json.loads(line) for line in complete.splitlines()], end, notices)


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
