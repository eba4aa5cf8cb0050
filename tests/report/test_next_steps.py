"""What to do next: said where a run calls for it, with its own numbers, and not where it doesn't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from memfit.foundations import parse_budget
from memfit.ir import Event, Levers, Plan, RunRecord, Views
from memfit.report.html import render
from memfit.report.next_steps import NextStep, Report, budget_argument, next_steps

MIB, GIB = 1024**2, 1024**3
replace = msgspec.structs.replace
COMMAND = ["train", "--plan", "my plan.json", "gpt.py:workload", "--out", "runs/a", "--steps", "300", "--overwrite"]


@pytest.fixture
def quiet(plan: Plan, views: Views, run: RunRecord) -> Report:
    """A run that calls for nothing: the plan is the fastest of its class, measured, and its loss is flat."""
    fastest = replace(plan, frontier=plan.frontier[4:6])
    calm = replace(run, data_share=0.01, events=[])
    return Report(fastest, views, calm, [{"step": i, "loss": 1.0, "skipped": False} for i in range(1, 301)])


def said(report: Report, **changes: Any) -> list[NextStep]:
    fields = {name: getattr(report, name) for name in ("plan", "views", "run", "metrics", "folder")}
    return next_steps(Report(**{**fields, **changes}))


def test_a_run_that_calls_for_nothing_is_told_nothing(quiet: Report) -> None:
    assert next_steps(quiet) == []
    page = render(quiet.plan, quiet.views, quiet.run, list(quiet.metrics))
    assert "Next steps" not in page and 'href="#next"' not in page


def test_a_failed_run_goes_on_from_its_newest_checkpoint(quiet: Report, tmp_path: Path) -> None:
    assert quiet.run is not None
    failed = replace(quiet.run, status="failed", error="CUDA error", steps=207, command=COMMAND)
    (none,) = said(quiet, run=failed, folder=tmp_path)
    assert "after step 207. It has no checkpoint" in none.why and none.command == ""
    for step in (50, 150, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-300.damaged").mkdir()
    (step,) = said(quiet, run=failed, folder=tmp_path)
    assert "The run failed after step 207. Its newest checkpoint is from step 150." in step.why
    wanted = "memfit train --plan 'my plan.json' gpt.py:workload --out runs/a --steps 300 --resume"
    assert step.command == wanted
    (step,) = said(quiet, run=replace(failed, command=[]), folder=tmp_path)
    assert step.command == f"memfit.train(plan, workload, out={str(tmp_path)!r}, steps=..., resume=True)"
    (step,) = said(quiet, run=replace(failed, status="running"), folder=tmp_path)
    assert "If it no longer runs" in step.why and step.command == wanted
    page = render(quiet.plan, quiet.views, failed, [], tmp_path)
    assert page.index("Next steps") > page.index(">The plan<") and wanted.replace("'", "&#39;") in page


def test_retries_and_lost_steps_lead_to_the_next_leaner_plan(quiet: Report) -> None:
    assert quiet.run is not None
    upper = quiet.plan.frontier[1].peak_bytes * quiet.plan.predicted.peak_upper_bytes
    wanted = budget_argument(-(-upper // quiet.plan.predicted.peak_bytes))
    (step,) = said(quiet, run=replace(quiet.run, allocation_retries=1200, command=COMMAND))
    assert "no room 1,200 times" in step.why
    assert step.command.startswith(f"memfit plan gpt.py:workload --device rtx-3090 --budget {wanted} ")
    (step,) = said(quiet, run=replace(quiet.run, events=[Event(41, "out of memory", "x")]))
    assert "1 time, last after step 41" in step.why and f"budget='{wanted}'" in step.command


def test_a_peak_over_the_budget(quiet: Report) -> None:
    assert quiet.run is not None
    over = replace(quiet.run, measured_peak_bytes=7 * GIB)
    (step,) = said(quiet, run=over)
    assert "measured peak of 7.0 GiB is 1.0 GiB over the budget" in step.why and "5.2GiB" in step.command
    wide = replace(quiet.plan.predicted, peak_upper_bytes=int(6.5 * GIB))
    (step,) = said(quiet, plan=replace(quiet.plan, predicted=wide))
    assert "may need up to 6.5 GiB, 512.0 MiB over the budget" in step.why and "6.5GiB" in step.command


def test_more_memory_buys_a_faster_plan(quiet: Report, plan: Plan) -> None:
    (step,) = [step for step in said(quiet, plan=plan) if "more memory" in step.why]
    point = plan.frontier[3]
    upper = point.peak_bytes * plan.predicted.peak_upper_bytes / plan.predicted.peak_bytes
    assert "9.2 % less time" in step.why and "the run left 1.0 GiB of the budget free" in step.why
    asked = step.command.split("budget='")[1].split("'")[0]
    assert upper <= parse_budget(asked, None) <= upper + 0.1 * GIB


def test_room_for_a_larger_batch_is_counted_from_what_grows_with_it(quiet: Report) -> None:
    held = {"parameters": 1 * GIB, "activations": 3 * GIB, "inputs": 1 * GIB}
    ours = replace(quiet.plan.predicted, peak_bytes=5 * GIB, peak_upper_bytes=5 * GIB, by_category=held)
    whole = replace(quiet.plan, predicted=ours, levers=Levers(microbatch_size=16), budget_bytes=7 * GIB)
    (step,) = said(quiet, plan=whole)
    assert "2.0 GiB of the budget are free. A batch of about 24 fits in place of 16" in step.why
    assert "one more sample needs 256.0 MiB" in step.why
    assert said(quiet, plan=replace(whole, budget_bytes=5 * GIB + MIB)) == []


def test_a_freer_class_that_buys_time_is_offered(quiet: Report, plan: Plan) -> None:
    (step,) = [step for step in said(quiet, plan=plan) if "class reduced" in step.why]
    assert (
        "(bf16-mixed, 5 regions)" in step.why
        and "103.0 ms, 49 % faster than this plan" in step.why
        and "numerics='reduced'" in step.command
    )


def test_waiting_skipped_and_slow_steps(quiet: Report, tmp_path: Path) -> None:
    assert quiet.run is not None
    (tmp_path / "checkpoint-100").mkdir()
    (step,) = said(quiet, run=replace(quiet.run, data_share=0.31, command=COMMAND))
    assert "31 % of the time" in step.why and "or --prefetch-batches=2." in step.why and step.command == ""
    running = replace(quiet.run, status="running", data_share=0.31)
    _, step = said(quiet, run=replace(running, command=COMMAND), folder=tmp_path)
    assert step.command.endswith("--steps 300 --prefetch-batches=2 --resume")
    _, step = said(quiet, run=running, folder=tmp_path)
    assert step.command.endswith("resume=True, prefetch_batches=2)")
    lines = [{"step": i, "loss": 1.0, "skipped": i < 30, "loss_scale": 256.0} for i in range(1, 301)]
    (step,) = said(quiet, metrics=lines)
    assert "29 of 300 steps had no update" in step.why and "initial=256" in step.command
    (step,) = said(quiet, run=replace(quiet.run, step_seconds=0.6))
    assert "3.0 times as long as predicted" in step.why and "memfit.verify" in step.command


def test_a_loss_that_still_falls_and_a_plan_that_nothing_has_measured(quiet: Report, tmp_path: Path) -> None:
    assert quiet.run is not None
    falling = [{"step": i, "loss": 2.0 - i / 300} for i in range(1, 301)]
    (step,) = said(quiet, run=replace(quiet.run, command=COMMAND), metrics=falling)
    assert "still falling at the end, by 8.7 %" in step.why and "--steps 450 --resume" in step.command
    assert "--steps 300" not in step.command and "--overwrite" not in step.command
    alone = replace(quiet.views, comparison=None)
    here = replace(quiet.plan, device="cpu")
    (step,) = said(quiet, views=alone, plan=here, run=replace(quiet.run, command=COMMAND), folder=tmp_path)
    assert step.command == f"memfit verify gpt.py:workload --plan {tmp_path}/plan.json"
    (step,) = said(quiet, views=alone, plan=here)
    assert step.command == "memfit.verify(plan, workload)"
    assert said(quiet, views=alone) == []  # of a card that may not be here


@pytest.mark.parametrize("budget_bytes", [1, 1000, 1025, 123_456, 5 * MIB + 1, int(1.97 * GIB), 80 * GIB])
def test_budgets_are_rounded_up_and_read_back(budget_bytes: int) -> None:
    assert budget_bytes <= parse_budget(budget_argument(budget_bytes), None) <= 1.11 * budget_bytes + 1
