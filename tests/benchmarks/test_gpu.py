"""What is run on a card: commands that go on where they stopped, whose results are put together."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import gpu
from benchmarks.common import slug
from benchmarks.gpu import GO_ON, MEASURED, Command, commands, put_together
from memfit import ir
from memfit.cost import CardMeasurements
from memfit.errors import UsageError
from memfit.hardware import find_device
from tests.benchmarks.cards import CORRECTIONS, PREDICTIONS

WRITES = "import json, sys; open(sys.argv[1], 'w').write(sys.argv[2]); open(sys.argv[3], 'a').write('x')"
CASE = {
    "kind": "plain",
    "peak_upper_bytes": 12,
    "predicted_peak_bytes": 10,
    "measured_peak_bytes": 10,
    "rivals": {},
    "equal_steps": 20,
}
RESULT = {"command": "one", "cases": [CASE], "summary": {"models_bitwise_equal": 1, "steps": 3}, "date": "today"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command with three small commands for its own, each of which notes that it ran."""

    def small(device: str, quick: bool) -> Any:
        for name in ("exactness-a", "exactness-b"):
            line = (sys.executable, "-c", WRITES, "{file}", json.dumps(RESULT), str(tmp_path / f"{name}.ran"))
            yield Command("exactness", name, line)
        yield Command("tests", "tests", (sys.executable, "-c", "raise SystemExit(3)"), "")

    monkeypatch.setattr(gpu, "commands", small)

    def main(*arguments: str) -> int:
        words = ["gpu", "--device", "cpu", "--out", str(tmp_path / "out"), "--results", str(tmp_path), *arguments]
        monkeypatch.setattr(sys, "argv", words)
        return gpu.main()

    return main


def test_it_goes_on_where_it_stopped_and_runs_nothing_twice(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--minutes", "0", "--parts", "exactness") == GO_ON
    assert not list(tmp_path.glob("*.ran"))
    assert run("--parts", "exactness") == 0
    assert run("--parts", "exactness") == 0
    assert [path.read_text() for path in sorted(tmp_path.glob("*.ran"))] == ["x", "x"]
    (written,) = tmp_path.glob("exactness-*.json")
    result = json.loads(written.read_text())
    assert result["summary"] == {"models": 2, "models_bitwise_equal": 2, "steps": 20} and len(result["cases"]) == 2
    assert run("--parts", "exactness", "--again") == 0
    assert (tmp_path / "exactness-a.ran").read_text() == "xx"


def test_a_command_that_fails_is_told_by_the_status(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--parts", "tests", "exactness") == 1
    assert (tmp_path / "out" / "tests.done").read_text() == "3"


def done(folder: Path, part: str, results: dict[str, Any], statuses: dict[str, int] | None = None) -> list[Command]:
    """Return commands that have run, with what each wrote and how it ended."""
    made = []
    for name, result in results.items():
        (folder / f"{name}.done").write_text(str((statuses or {}).get(name, 0)))
        if result is not None:
            (folder / f"{name}.json").write_text(json.dumps(result))
        made.append(Command(part, name, ()))
    return made


def test_a_part_without_a_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no command of prediction wrote a result: see the logs"):
        put_together("prediction", done(tmp_path, "prediction", {"missing": None}, {"missing": 1}), tmp_path)


def test_predictions_are_summed_up_as_their_benchmark_does(tmp_path: Path) -> None:
    results = {
        name: {**RESULT, "cases": [{**CASE, "predicted_peak_bytes": predicted}]}
        for name, predicted in {"a": 10, "b": 11}.items()
    }
    summary = put_together("prediction", done(tmp_path, "prediction", results), tmp_path)["summary"]
    assert summary["cases"] == 2 and summary["largest_abs_error"] == pytest.approx(0.1)


def test_what_failed_is_in_the_result_with_why(tmp_path: Path) -> None:
    made = done(tmp_path, "prediction", {"a": RESULT, "b": None, "c": None}, {"b": 124, "c": 3})
    assert put_together("prediction", made, tmp_path)["failed_commands"] == {
        "b": f"no end within {gpu._LONGEST_SECONDS} s",
        "c": "exit status 3",
    }


def test_tests_are_counted_by_how_they_ended(tmp_path: Path) -> None:
    logs = {"a": "== 3 passed, 1 skipped in 2s ==", "b": "1 failed, 2 passed in 1s", "c": "Segmentation fault"}
    for name, log in logs.items():
        (tmp_path / f"{name}.log").write_text(log)
    made = done(tmp_path, "tests", dict.fromkeys(logs), {"b": 1, "c": 139})
    assert put_together("tests", made, tmp_path)["summary"] == {"passed": 5, "skipped": 1, "failed": 2}


def test_what_a_command_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process left behind would keep the card's memory."""
    monkeypatch.setattr(gpu, "_LONGEST_SECONDS", 2)
    child = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', WAIT]).pid, flush=True); exec(WAIT)"
    code = f"WAIT = 'import time; time.sleep(60)'; {child}"
    gpu._run(Command("tests", "slow", (sys.executable, "-c", code), ""), tmp_path, os.environ)
    assert (tmp_path / "slow.done").read_text() == "124"
    left = int((tmp_path / "slow.log").read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


def test_what_failed_is_run_once_more_where_that_is_asked_for(run: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "exactness-a.done").write_text("1")
    assert run("--parts", "exactness") == 1 and not (tmp_path / "exactness-a.ran").exists()
    assert run("--parts", "exactness", "--retry") == 0 and (tmp_path / "exactness-a.ran").read_text() == "x"


def test_every_part_that_is_measured_has_commands() -> None:
    for quick in (True, False):
        found = list(commands("cuda", quick))
        assert {command.part for command in found} == set(MEASURED)
        assert len({command.name for command in found}) == len(found)


def test_what_follows_from_other_results_is_written_beside_them(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = gpu.CARDS.read_bytes(), gpu.card_page.PAGE.exists()
    assert run("--parts", "fit") == 1
    assert "prediction-" in capsys.readouterr().err  # what is missing
    name = slug(find_device("cpu").description)
    for part, result in {"prediction": PREDICTIONS, "corrections": CORRECTIONS}.items():
        (tmp_path / f"{part}-{name}.json").write_text(json.dumps(result))
    assert run("--parts", "fit", "pages") == 0
    assert (gpu.CARDS.read_bytes(), gpu.card_page.PAGE.exists()) == before
    cards = ir.codec.read(tmp_path / gpu.CARDS.name, CardMeasurements).cards
    assert cards["nvidia-9.0"].peak_error == pytest.approx(0.02)
    assert "## A card" in (tmp_path / "gpu.md").read_text()
