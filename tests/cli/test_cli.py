"""The command line: every verb, its JSON, its exit status, and an error without a traceback for every bad input."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from memfit import hardware, ir
from memfit.errors import UsageError
from memfit.foundations import __version__
from memfit.ir import Levers, Plan, RunRecord, Views
from memfit.recipes import byte_lm
from tests.cli.conftest import BUDGET, LEAN, Shell


def test_estimate(memfit: Shell) -> None:
    found = memfit.document("estimate", LEAN)
    assert found["peak_bytes"] == sum(found["by_category"].values())
    assert "activations" in memfit.text("estimate", LEAN)
    output = memfit.text("estimate", LEAN, "--parallel", "cp=2")
    assert "cp=2 on paper" in output and "not applied or measured" in " ".join(output.split())


@pytest.mark.ci
def test_ladder_is_printed_and_written(memfit: Shell, tmp_path: Path) -> None:
    page, record = tmp_path / "ladder.html", tmp_path / "ladder.json"
    options = ("--numerics", "exact", "--seconds", "0.02", "--html", str(page), "--output", str(record))
    output = memfit.text("tools", "ladder", LEAN, *options)
    for name in ("plain", "lean norms and activations", "full checkpointing", "offload"):
        assert name in output and name in page.read_text()
    found = json.loads(record.read_text())
    assert found["schema"] == "memfit.ladder/1"
    assert found["rungs"][0]["peak_bytes"] == found["budget_bytes"]
    assert "--overwrite" in memfit.refused("tools", "ladder", LEAN, "--html", str(page))


def test_plan_is_written_and_never_overwritten_unasked(memfit: Shell, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    command = ("plan", LEAN, "--budget", BUDGET, "--precision", "32-true", "--points", "1", "-o", str(path))
    assert memfit.document(*command) == json.loads(path.read_text())
    path.write_text("mine")
    assert "--overwrite" in memfit.refused(*command) and path.read_text() == "mine"
    assert memfit(*command, "--overwrite")[0] == 0
    assert json.loads(path.read_text())["schema"] == "memfit.plan/1"


@pytest.mark.parametrize(
    ("flags", "measure"), [((), "auto"), (("--measure",), True), (("--no-measure",), False)], ids=str
)
def test_plan_measures_when_told_to(
    memfit: Shell, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], measure: object
) -> None:
    asked = []

    def plan(workload: object, **options: Any) -> None:
        asked.append(options["measure"])
        raise UsageError("that was all")

    monkeypatch.setattr("memfit.pipeline.plan", plan)
    assert memfit("plan", LEAN, "--budget", BUDGET, *flags)[0] == 2
    assert asked == [measure]


@pytest.mark.ci
@pytest.mark.slow
def test_a_run_that_is_started_twice_is_refused_the_second_time(memfit: Shell, plan_file: Path, tmp_path: Path) -> None:
    """Whichever way; and it goes on once the first is gone, without a word of it."""
    run = tmp_path / "run"
    train = ["train", LEAN, "--plan", str(plan_file), "--out", str(run)]
    command = [sys.executable, "-m", "memfit", *train, "--steps", "100000", "--checkpoint-every", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        while not list(run.glob("checkpoint-[1-9]*")):
            assert first.poll() is None
            time.sleep(0.1)
        for option in ([], ["--overwrite"], ["--resume"]):
            errors = memfit.refused(*train, "--steps", "2", *option)
            assert f"in use by a run of process {first.pid} on host" in errors
        assert f"process {first.pid}" in memfit.refused("demo", "--out", str(run), "--overwrite")
        assert memfit("report", str(run))[0] == 0  # of a run that goes on
        assert first.poll() is None
        first.terminate()
        assert first.wait() == 75
    finally:
        first.kill()
        first.wait()
    done = json.loads((run / "run.json").read_text())["steps"]
    assert memfit(*train, "--steps", str(done + 1), "--resume")[0] == 0
    assert not (run / "run.lock").exists()


def test_verify(memfit: Shell, plan_file: Path, tmp_path: Path) -> None:
    found = memfit.document("verify", LEAN, "--plan", str(plan_file), "--steps", "2")
    assert found["holds"] is True
    compared = found["comparison"]
    assert len(compared["plain_losses"]) == len(compared["planned_losses"]) == 2
    assert compared["planned_peak_bytes"] < compared["plain_peak_bytes"]
    edited = json.loads(plan_file.read_text())
    edited["predicted"]["peak_bytes"] //= 2
    (tmp_path / "edited.json").write_text(json.dumps(edited))
    status, output, errors = memfit("verify", LEAN, "--plan", str(tmp_path / "edited.json"), "--steps", "0")
    assert status == 4 and "Traceback" not in errors
    assert "Verification failed" in output and "Plain and planned step" not in output


@pytest.mark.ci
def test_train_plans_for_a_budget(memfit: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train = ("train", LEAN, "--out", str(run), "--steps", "1")
    plan = ("--plan", str(tmp_path / "plan.json"))
    assert "--budget is missing" in memfit.refused(*train)
    assert "give one of --plan and --budget" in memfit.refused(*train, "--budget", "2x", *plan)
    for options in (("--compile", "yes"), ("--device", "cpu"), ("--numerics", "exact"), ("--precision", "bf16-mixed")):
        assert f"{options[0]} is for the plan that --budget makes" in memfit.refused(*train, *plan, *options)
    assert "--device t4 is not on this machine" in memfit.refused(*train, "--budget", "2x", "--device", "t4")
    given = ("--device", "cpu", "--numerics", "reduced", "--precision", "bf16-mixed")
    assert memfit(*train, "--budget", "2x", *given)[0] == 0
    made = Plan.load(run / "plan.json")
    assert (made.device, made.allowed, made.levers.precision) == ("cpu", "reduced", "bf16-mixed")


def test_train_report_and_resume(memfit: Shell, plan_file: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    train = ("train", LEAN, "--plan", str(plan_file), "--out", run)
    record = memfit.document(*train, "--steps", "4", "--compare", "2")
    assert (record["steps"], record["status"]) == (4, "finished")
    assert record["measured_peak_bytes"] <= 2.2 * 2**20
    assert len(Path(run, "metrics.jsonl").read_text().splitlines()) >= 4
    assert "overwrite" in memfit.refused(*train, "--steps", "6")
    assert memfit.document(*train, "--steps", "6", "--resume")["steps"] == 6
    assert 50_000 < Path(memfit.document("report", run)["report"]).stat().st_size < 500_000


def test_a_run_that_is_preempted_says_so_by_its_status_and_goes_on(
    memfit: Shell, plan_file: Path, tmp_path: Path
) -> None:
    """75 is EX_TEMPFAIL; the same command with --resume ends the run."""
    run = str(tmp_path / "run")
    options = ("--plan", str(plan_file), "--out", run, "--steps", "5")
    status, _, errors = memfit("train", "tests.workloads:preempted", *options)
    assert status == 75 and f"continues from {run}/checkpoint-3" in errors and "Traceback" not in errors
    assert memfit.document("train", LEAN, *options, "--resume", "--prefetch-batches", "2")["steps"] == 5


def test_devices(memfit: Shell) -> None:
    found = memfit.document("devices")
    assert found["machine"][0]["name"] == "cpu"
    assert {"h100", "rtx-3090"} <= {device["name"] for device in found["catalogue"]}
    output = memfit.text("devices")
    assert "cpu" in output and "rtx-3090" in output


def test_one_device(memfit: Shell) -> None:
    found = memfit.document("devices", "T4")
    assert (found["name"], found["precisions"]) == ("t4", ["32-true", "16-mixed"])
    assert found["sources"]["matrix_flops"] and found["advice"]
    output = memfit.text("devices", "t4")
    assert "65 TFLOP/s" in output and "datasheet" in output and "Use 16-mixed" in output
    assert memfit("devices", "cpu")[0] == 0


def test_devices_are_measured(memfit: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.hardware import measurement

    monkeypatch.setattr(measurement, "_SECONDS", 0.01)
    monkeypatch.setattr(measurement, "_MATRIX_SIZES", (256,))
    monkeypatch.setattr(measurement, "_cpu_cache_bytes", lambda: 2**20)  # arrays of eight times that are measured
    path = tmp_path / "devices.toml"
    found = memfit.document("tools", "probe-devices", "--output", str(path))
    assert found["written"] == str(path)
    monkeypatch.setenv("MEMFIT_DEVICES", str(path))
    assert memfit.document("devices", "cpu")["matrix_flops"] == found["devices"][0]["matrix_flops"]


@pytest.mark.parametrize(
    "verb", ["estimate", "plan", "tools probe-range", "verify", "train", "report", "devices", "demo"]
)
def test_help(memfit: Shell, verb: str) -> None:
    output = memfit.text(*verb.split(), "--help")
    assert verb == "demo" or "--json" in output


@pytest.mark.ci
@pytest.mark.skipif(hardware.shim.why_not() is not None, reason="fake CUDA can't be had here")
def test_the_document_of_a_fleet_has_the_answers_and_the_page_is_written(tmp_path: Path) -> None:
    page = tmp_path / "fleet.html"
    command = ["fleet", LEAN, "--steps", "10", "--device", "l4", "--ranks", "2, 1-2", "--html", str(page), "--json"]
    run = subprocess.run([sys.executable, "-m", "memfit", *command], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["schema"] == "memfit.fleet/1"
    assert found["answers"]["fewest"]["device"] == "l4"
    assert found["answers"]["front"][0]["ranks"] == 1
    assert [row["ranks"] for row in found["rows"]] == [1, 2]
    assert "memfit fleet" in page.read_text()


def test_precision_auto_is_what_suits_the_device(memfit: Shell, captures: list[Levers]) -> None:
    names = ("auto", "bf16-mixed", "32-true")
    found = [memfit.document("estimate", LEAN, "--precision", name) for name in names]
    peaks = [each["by_category"]["activations"] for each in found]
    assert peaks[0] == peaks[1] < peaks[2]
    assert "cpu, bf16-mixed" in memfit.text("estimate", LEAN, "--precision", "auto")
    options = ("--budget", BUDGET, "--points", "1", "--json")
    captures.clear()
    assert memfit("plan", LEAN, *options, "--precision", "auto")[0] == 0
    assert {levers.precision for levers in captures} == {"32-true", "bf16-mixed"}


def test_probe_range(memfit: Shell) -> None:
    found = memfit.document("tools", "probe-range", LEAN, "--microbatch-size", "2")
    assert found["precision"] == "16-mixed" and found["initial_scale"] > 1
    output = memfit.text("tools", "probe-range", LEAN, "--batches", "2")
    assert "16-mixed works" in output and "blocks.0" in output


def test_train_under_a_limit(memfit: Shell, plan_file: Path, tmp_path: Path) -> None:
    """The same plan fails under half of its peak, and is put under lower ones where it may be."""
    train = ("train", LEAN, "--plan", str(plan_file), "--steps", "2", "--limit")
    peak_bytes = json.loads(plan_file.read_text())["predicted"]["peak_bytes"]
    run = str(tmp_path / "run")
    assert memfit(*train, "1GiB", "--out", run, "--adaptive", "--json")[0] == 0
    status, _, errors = memfit(*train, str(peak_bytes // 2), "--out", str(tmp_path / "other"), "--no-recover")
    assert status == 6 and f"--limit {peak_bytes // 2}" in errors


def test_no_plan_fits_gives_status_3(memfit: Shell) -> None:
    status, output, errors = memfit("plan", LEAN, "--budget", "1MiB", "--points", "1", "--json")
    found = json.loads(output)["error"]
    assert status == 3 and found["type"] == "InfeasibleError"
    assert found["lowest_peak_bytes"] > found["budget_bytes"] == 2**20
    assert found["where"] in errors and "raise --budget to" in errors


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("plan", LEAN, "--budget", BUDGET), "-o"),
        (("estimate", LEAN, "--device", "h100"), "--snapshot"),
        (("estimate", LEAN), "--chrome-trace"),
        (("tools", "ladder", LEAN), "--output"),
        (("tools", "ladder", LEAN), "--html"),
        (("report", "run"), "-o"),
        (("tools", "probe-devices"), "--output"),
    ],
)
@pytest.mark.parametrize("place", ["file/in/the/way", "folder", "/proc/no/place"])
def test_outputs_that_can_not_be_written_are_refused_before_the_work(
    arguments: tuple[str, ...], option: str, place: str, memfit: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memfit import hardware, pipeline
    from memfit.hardware import measurement

    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("the work began")

    for module, names in (
        (pipeline, ("load_workload", "write_report")),
        (hardware, ("find_device",)),
        (measurement, ("probe_all",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, work)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    errors = memfit.refused(*arguments, option, str(tmp_path / place))
    assert str(tmp_path / place) in errors.replace("\n", "")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_loss_that_is_not_finite_gives_status_5(memfit: Shell, tmp_path: Path) -> None:
    plan, name = str(tmp_path / "plan.json"), "tests.workloads:not_finite"
    assert memfit("plan", name, "--budget", "1GiB", "--points", "1", "-o", plan)[0] == 0
    status, _, errors = memfit("train", name, "--plan", plan, "--steps", "2", "--out", str(tmp_path / "run"))
    assert status == 5 and "inf" in errors and "Traceback" not in errors


def test_an_error_shows_the_user_s_frames_or_all(memfit: Shell, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def inner():\n    return {}['missing']\n\n\ndef workload():\n    return inner()\n"
    )
    name = f"{tmp_path}/mine.py:workload"
    errors = memfit.refused("estimate", name)
    assert "mine.py:2 in inner" in errors and "workload_files.py" not in errors
    status, _, errors = memfit("estimate", name, "--traceback")
    assert status == 2 and "workload_files.py" in errors and "KeyError: 'missing'" in errors
    status, output, _ = memfit("estimate", name, "--json")
    assert "mine.py:6 in workload" in json.loads(output)["error"]["frames"]


def test_version(memfit: Shell) -> None:
    assert memfit("--version") == (0, f"memfit {__version__}\n", "")


@pytest.mark.parametrize("line", [f"estimate {LEAN} -q", f"plan {LEAN} --budget {BUDGET} --points 1 --quiet"])
def test_quiet_prints_the_verdict_alone(memfit: Shell, line: str) -> None:
    status, output, errors = memfit(*line.split())
    assert (status, errors) == (0, "") and len(output.splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    [f"{verb} slow.py:workload" for verb in ("estimate", "plan --budget 1GiB", "tools probe-range")]
    + ["train slow.py:workload --budget 1GiB --steps 2 --out run"],
)
def test_an_interrupt_says_that_nothing_is_left(
    memfit: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text("def workload():\n    raise KeyboardInterrupt\n")

    status, _, errors = memfit(*line.split())
    assert status == 130
    assert errors.splitlines()[-1] == "interrupted; nothing was written; run the same command again"


def test_an_interrupt_says_where_a_training_goes_on(
    memfit: Shell, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tracker.py").write_text("def log(record):\n    raise KeyboardInterrupt\n")
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    status, _, errors = memfit(
        "train", LEAN, "--plan", str(plan_file), "--steps", "3", "--out", str(run), "--log", "tracker.py:log"
    )
    assert status == 130 and "Traceback" not in errors
    assert errors.splitlines()[-1].startswith(f"interrupted; --resume continues from {run}")


@pytest.mark.ci  # `make demo` itself; each of its parts has tests of its own
@pytest.mark.slow
def test_demo_trains_under_a_budget_that_the_plain_step_does_not_meet(
    memfit: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.recipes.byte_lm", functools.partial(byte_lm, n_layer=2, d_model=128, batch_size=4))
    shown = memfit.text("demo", "--out", str(tmp_path / "demo"), "--steps", "4", "--budget", "24MiB")
    for part in ("predicted without running it", "Frontier", "Budget", "Peak, measured", "report.html"):
        assert part in shown
    plan = ir.codec.read(tmp_path / "demo" / "plan.json", Plan)
    record = ir.codec.read(tmp_path / "demo" / "run.json", RunRecord)
    comparison = ir.codec.read(tmp_path / "demo" / "views.json", Views).comparison
    assert comparison is not None
    assert plan.plain.peak_bytes > plan.budget_bytes == 24 * 2**20
    assert comparison.plain_peak_bytes > plan.budget_bytes >= comparison.planned_peak_bytes
    assert record.measured_peak_bytes is not None
    assert record.measured_peak_bytes <= plan.budget_bytes
    assert record.last_loss is not None
    assert record.first_loss is not None
    assert record.last_loss < record.first_loss
