"""How long memfit takes, and what it holds, for models far larger than this machine: whole commands, start included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Case, main

ROOT = Path(__file__).parent.parent
MODEL = "examples/large_gpt.py:gpt_{}"
COMMANDS: dict[str, tuple[str, ...]] = {
    "estimate 1 B, A100": ("estimate", MODEL.format("1b"), "--device", "a100-80gb", "--precision", "bf16-mixed"),
    "estimate 7 B, A100": ("estimate", MODEL.format("7b"), "--device", "a100-80gb", "--precision", "bf16-mixed"),
    "estimate 7 B, 8 x A100, ZeRO-3": (
        *("estimate", MODEL.format("7b_of_8"), "--device", "a100-80gb", "--precision", "bf16-mixed"),
        *("--world-size", "8", "--sharding", "zero3"),
    ),
    "estimate 175 B, 1024 x H100, ZeRO-3": (
        *("estimate", MODEL.format("175b"), "--device", "h100", "--precision", "bf16-mixed"),
        *("--world-size", "1024", "--sharding", "zero3"),
    ),
    "plan 1 B, A100, 40 GiB": (
        *("plan", MODEL.format("1b"), "--device", "a100-80gb", "--budget", "40GiB"),
        *("--numerics", "reduced"),
    ),
    "plan LoRA of 8 B, 8,192 tokens, RTX 4090": (
        *("plan", "examples/llama_lora.py:llama_8b", "--device", "rtx-4090", "--budget", "100%", "--points", "1"),
    ),
}
QUICK = ("estimate 1 B, A100", "estimate 7 B, A100")


def run(quick: bool) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each command, and the longest and the largest."""
    cases = [_case(name, COMMANDS[name]) for name in (QUICK if quick else COMMANDS)]
    estimates = [case for case in cases if case["case"].startswith("estimate")]
    summary = {
        "estimate_seconds": max(case["seconds"] for case in estimates),
        "estimate_resident_bytes": max(case["resident_bytes"] for case in estimates),
        "plan_seconds": max((case["seconds"] for case in cases if case not in estimates), default=None),
    }
    return cases, summary


def _case(name: str, arguments: tuple[str, ...]) -> Case:
    """Run a command and wait for it: the process that was started is the one that predicts."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "memfit", *arguments, "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - started
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}: {output.decode()}")
    found = json.loads(output)
    prediction = found.get("predicted", found)
    case = {
        "case": name,
        "command": f"memfit {' '.join(arguments)}",
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "resident_bytes": used.ru_maxrss * 1024,
        "peak_bytes": prediction["peak_bytes"],
        "peak_reserved_bytes": prediction["peak_reserved_bytes"],
        "step_seconds": prediction["step_seconds"],
    }
    print(f"{name:<38}{seconds:6.1f} s{case['resident_bytes'] / 2**20:8.0f} MiB resident", file=sys.stderr, flush=True)
    return case


if __name__ == "__main__":
    main("large", run, __doc__)
