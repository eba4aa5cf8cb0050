"""What to do next: said where a run calls for it, with its own numbers, and not where it doesn't."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memfit.foundations import parse_budget
from memfit.ir import Event, Levers, Plan, RunRecord, Views
from memfit.report import Report, plan_page
from tests.report.conftest import GIB, MIB

COMMAND = ["train", "--plan", "my plan.json", "gpt.py:workload", "--out", "runs/a", "--steps", "300", "--overwrite"]
FALLING = [{"step": i, "loss": 2.0 - i / 300} for i in range(1, 301)]
SKIPPING = [{"step": i, "loss": 1.0, "skipped": i < 30, "loss_scale": 256.0} for i in range(1, 301)]


@pytest.fixture
def quiet(plan: Plan, views: Views, run: RunRecord) -> Report:
    """A run that calls for nothing: the plan is the fastest of its class, measured, and its loss is flat."""
    fastest = replace(plan, frontier=plan.frontier[4:6])
    calm = replace(run, data_share=0.01, events=[])
    return Report(fastest, views, calm, [{"step": i, "loss": 1.0, "skipped": False} for i in range(1, 301)])


def changed(report: Report, *, run: dict[str, Any] | None = None, **fields: Any) -> Report:
    """Return a report whose run has other values, and whose other fields are others."""
    assert report.run is not None
    return dataclasses.replace(report, run=replace(report.run, **(run or {})), **fields)


def said(report: Report, **changes: Any) -> tuple[str, str]:
    """Return the reason and the command of the only step."""
    (step,) = changed(report, **changes).next_steps()
    return step.why, step.command


def test_a_run_that_calls_for_nothing_is_told_nothing(quiet: Report) -> None:
    assert quiet.next_steps() == []
    page = plan_page(quiet)
    assert "Next steps" not in page and 'href="#next"' not in page


def test_a_failed_run_goes_on_from_its_newest_checkpoint(quiet: Report, tmp_path: Path) -> None:
    failed: dict[str, Any] = {"status": "failed", "error": "CUDA error", "steps": 207, "command": COMMAND}
    why, command = said(quiet, run=failed, folder=tmp_path)
    assert "after step 207. It has no checkpoint" in why and command == ""
    for name in ("50", "150", "100", "300.damaged"):
        (tmp_path / f"checkpoint-{name}").mkdir()
    wanted = "memfit train --plan 'my plan.json' gpt.py:workload --out runs/a --steps 300 --resume"
    why, command = said(quiet, run=failed, folder=tmp_path)
    assert "The run failed after step 207. Its newest checkpoint is from step 150." in why and command == wanted
    _, command = said(quiet, run=failed | {"command": []}, folder=tmp_path)
    assert command == f"memfit.train(plan, workload, out={str(tmp_path)!r}, steps=..., resume=True)"
    why, command = said(quiet, run=failed | {"status": "running"}, folder=tmp_path)
    assert "If it no longer runs" in why and command == wanted
    page = plan_page(changed(quiet, run=failed, folder=tmp_path))
    assert page.index("Next steps") > page.index(">The plan<") and wanted.replace("'", "&#39;") in page


@pytest.mark.parametrize(
    ("changes", "why", "command"),
    [
        (
            {"run": {"measured_peak_bytes": 7 * GIB}},
            "measured peak of 7.0 GiB is 1.0 GiB over the budget",
            "budget='5.2GiB'",
        ),
        (
            {"run": {"data_share": 0.31, "command": COMMAND}},
            "waited for data 31 % of the time. Make batches while steps run: DataLoader(num_workers=...) or"
            " --prefetch-batches=2.",
            "",
        ),
        ({"metrics": SKIPPING}, "29 of 300 steps had no update", "initial=256"),
        ({"run": {"step_seconds": 0.6}}, "3.0 times as long as predicted", "memfit.verify"),
        (
            {"run": {"command": COMMAND}, "metrics": FALLING},
            "still falling at the end, by 8.7 %",
            "memfit train --plan 'my plan.json' gpt.py:workload --out runs/a --steps 450 --resume",
        ),
    ],
)
def test_what_a_run_calls_for_comes_with_its_command(
    quiet: Report, changes: dict[str, Any], why: str, command: str
) -> None:
    found = said(quiet, **changes)
    assert why in found[0] and command in found[1] and bool(command) == bool(found[1])


def test_retries_and_lost_steps_lead_to_the_next_leaner_plan(quiet: Report) -> None:
    ours = quiet.plan.predicted
    upper = quiet.plan.frontier[1].peak_bytes * ours.peak_upper_bytes / ours.peak_bytes
    why, command = said(quiet, run={"allocation_retries": 1200, "command": COMMAND})
    assert "no room 1,200 times" in why
    assert command.startswith("memfit plan gpt.py:workload --device rtx-3090 --budget ")
    budget = command.split("--budget ")[1].split()[0]
    assert upper <= parse_budget(budget, None) <= upper + 0.1 * GIB
    why, command = said(quiet, run={"events": [Event(41, "out of memory", "x")]})
    assert "1 time, last after step 41" in why and f"budget='{budget}'" in command


def test_a_plan_that_may_not_fit_has_a_budget_that_surely_does(quiet: Report) -> None:
    wide = replace(quiet.plan.predicted, peak_upper_bytes=int(6.5 * GIB))
    why, command = said(quiet, plan=replace(quiet.plan, predicted=wide))
    assert "may need up to 6.5 GiB, 512.0 MiB over the budget" in why and "6.5GiB" in command


@pytest.mark.parametrize("budget_bytes", [1, 1000, 1025, 123_456, 5 * MIB + 1, int(1.97 * GIB), 80 * GIB])
def test_budgets_are_rounded_up_and_read_back(quiet: Report, budget_bytes: int) -> None:
    tight = replace(quiet.plan, predicted=replace(quiet.plan.predicted, peak_upper_bytes=budget_bytes), budget_bytes=0)
    unmeasured: dict[str, Any] = {"views": replace(quiet.views, comparison=None), "run": {"measured_peak_bytes": None}}
    why, command = said(quiet, plan=tight, **unmeasured)
    assert "surely fits" in why
    assert budget_bytes <= parse_budget(command.split("budget='")[1].split("'")[0], None) <= 1.11 * budget_bytes + 1


def test_more_memory_or_a_freer_class_buys_a_faster_plan(quiet: Report, plan: Plan) -> None:
    memory, freer = (
        next(step for step in changed(quiet, plan=plan).next_steps() if part in step.why)
        for part in ("more memory", "class reduced")
    )
    upper = plan.frontier[3].peak_bytes * plan.predicted.peak_upper_bytes / plan.predicted.peak_bytes
    assert "9.2 % less time" in memory.why and "the run left 1.0 GiB of the budget free" in memory.why
    assert upper <= parse_budget(memory.command.split("budget='")[1].split("'")[0], None) <= upper + 0.1 * GIB
    assert "(bf16-mixed, 5 regions)" in freer.why and "103.0 ms, 49 % faster than this plan" in freer.why
    assert "numerics='reduced'" in freer.command


def test_room_for_a_larger_batch_is_counted_from_what_grows_with_it(quiet: Report) -> None:
    held = {"parameters": 1 * GIB, "activations": 3 * GIB, "inputs": 1 * GIB}
    ours = replace(quiet.plan.predicted, peak_bytes=5 * GIB, peak_upper_bytes=5 * GIB, by_category=held)
    whole = replace(quiet.plan, predicted=ours, levers=Levers(microbatch_size=16), budget_bytes=7 * GIB)
    why, _ = said(quiet, plan=whole)
    assert "2.0 GiB of the budget are free. A batch of about 24 fits in place of 16" in why
    assert "one more sample needs 256.0 MiB" in why
    assert changed(quiet, plan=replace(whole, budget_bytes=5 * GIB + MIB)).next_steps() == []


def test_a_run_that_waits_goes_on_with_prefetched_batches(quiet: Report, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-100").mkdir()
    for command, end in (
        (COMMAND, "--steps 300 --prefetch-batches=2 --resume"),
        ([], "resume=True, prefetch_batches=2)"),
    ):
        running = {"status": "running", "data_share": 0.31, "command": command}
        assert changed(quiet, run=running, folder=tmp_path).next_steps()[1].command.endswith(end)


def test_a_plan_that_nothing_has_measured_is_to_be_verified(quiet: Report, tmp_path: Path) -> None:
    alone, here = replace(quiet.views, comparison=None), replace(quiet.plan, device="cpu")
    _, command = said(quiet, views=alone, plan=here, run={"command": COMMAND}, folder=tmp_path)
    assert command == f"memfit verify gpt.py:workload --plan {tmp_path}/plan.json"
    assert said(quiet, views=alone, plan=here)[1] == "memfit.verify(plan, workload)"
    assert changed(quiet, views=alone).next_steps() == []  # of a card that may not be here
