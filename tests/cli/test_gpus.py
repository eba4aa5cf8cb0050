"""Estimates and plans for GPUs that are not here, on the command line: a process with fake CUDA of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

ROOT = Path(__file__).parent.parent.parent
TINY, LEAN = "tests.workloads:tiny", "tests.workloads:lean"
LARGE, WIDE = "tests.workloads:large", "tests.workloads:wide"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run(("-m", "memfit", *arguments), cwd=ROOT)


def answer(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_estimate_and_what_it_writes(tmp_path: Path) -> None:
    snapshot, timeline = tmp_path / "step.pickle", tmp_path / "step.json"
    command = ("estimate", TINY, "--device", "RTX 3090", "--precision", "bf16-mixed")
    written = ("--snapshot", str(snapshot), "--chrome-trace", str(timeline))
    found = answer(*command, *written)
    assert found["peak_bytes"] == sum(found["by_category"].values())
    assert found["peak_bytes"] <= found["peak_reserved_bytes"] < found["peak_upper_bytes"] < found["device_bytes"]
    assert found["throughput"]["tokens_per_second"] > 0 and not found["throughput"]["measured"]
    assert found["notes"] == ["attention on rtx-3090: 2 calls use the flash kernel"]
    page = tmp_path / "step.html"
    viewer = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(snapshot), "-o", str(page)]
    shown = subprocess.run(viewer, capture_output=True, text=True, check=False)
    assert shown.returncode == 0 and page.stat().st_size > 10_000, shown.stderr
    assert {event["ph"] for event in json.loads(timeline.read_text())["traceEvents"]} >= {"X", "C"}
    again = run(*command, *written)
    assert again.returncode == 2 and "--snapshot" in again.stderr and "--overwrite" in again.stderr


@pytest.mark.ci
@pytest.mark.slow
def test_a_model_larger_than_this_machine_and_its_shards() -> None:
    whole = answer("estimate", LARGE, "--device", "a100-80gb", "--precision", "bf16-mixed")
    assert whole["by_category"]["parameters"] == pytest.approx(7.89e9 * 4, rel=0.01)
    assert whole["peak_upper_bytes"] > whole["device_bytes"]
    shares = ("--world-size", "8", "--sharding", "zero3")
    sharded = answer("estimate", f"{LARGE}_of_8", "--device", "a100-80gb", "--precision", "bf16-mixed", *shares)
    assert sharded["peak_bytes"] < 0.7 * whole["peak_bytes"]
    state = [found["by_category"]["optimizer state"] for found in (sharded, whole)]
    assert state[0] == pytest.approx(state[1] / 8, rel=0.01)


@pytest.mark.slow
@pytest.mark.ci
def test_a_plan_for_a_gpu_is_not_run_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = run(
        "plan", LEAN, "--device", "t4", "--budget", "32MiB", "--numerics", "reduced", "--points", "2", "-o", str(path)
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(path.read_text())
    assert plan["device"] == "t4" and plan["predicted"]["peak_upper_bytes"] <= 32 * 2**20
    assert "bf16-mixed" not in {point["levers"]["precision"] for point in plan["frontier"]}  # Turing has no bfloat16
    refused = run("verify", LEAN, "--plan", str(path))
    assert refused.returncode == 2 and "device='t4'" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.ci
def test_cards_are_compared_in_the_precision_that_one_would_train_in_there() -> None:
    """With what the model's own dtype would give, of a model whose products take most of its step."""
    of_card = {card: answer("estimate", WIDE, "--device", card) for card in ("a100-80gb", "rtx-3090")}
    chosen = {card: (found["precision"], found["step_seconds"]) for card, found in of_card.items()}
    assert chosen["a100-80gb"][0] == chosen["rtx-3090"][0] == "bf16-mixed"
    assert chosen["a100-80gb"][1] < chosen["rtx-3090"][1]
    plain = {card: found["as_written"]["step_seconds"] for card, found in of_card.items()}
    assert all(plain[card] > chosen[card][1] for card in plain)
    assert plain["a100-80gb"] > plain["rtx-3090"]  # for want of plain units
    asked = answer("estimate", WIDE, "--device", "t4", "--precision", "auto")
    assert "as_written" not in asked
