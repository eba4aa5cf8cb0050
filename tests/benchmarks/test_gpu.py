"""What is run on a card: commands that go on where they stopped, whose results are put together."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu import GO_ON, PARTS, Command, commands, put_together
from memfit.errors import UsageError

WRITES = "import json, sys; open(sys.argv[1], 'w').write(sys.argv[2]); open(sys.argv[3], 'a').write('x')"
CASE = {"kind": "plain", "peak_upper_bytes": 12, "predicted_peak_bytes": 10, "measured_peak_bytes": 10, "rivals": {}}
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
    assert result["summary"] == {"models": 2, "models_bitwise_equal": 2, "steps": 3} and len(result["cases"]) == 2
    assert run("--parts", "exactness", "--again") == 0
    assert (tmp_path / "exactness-a.ran").read_text() == "xx"


def test_a_command_that_fails_is_told_by_the_status(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--parts", "tests", "exactness") == 1
    assert (tmp_path / "out" / "tests.done").read_text() == "3"


def test_a_part_without_a_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no command of prediction wrote a result: see the logs"):
        put_together("prediction", [tmp_path / "missing.json"])


def test_predictions_are_summed_up_as_their_benchmark_does(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, predicted in zip(paths, (10, 11), strict=True):
        case = {**CASE, "predicted_peak_bytes": predicted}
        path.write_text(json.dumps({**RESULT, "cases": [case]}))
    summary = put_together("prediction", paths)["summary"]
    assert summary["cases"] == 2 and summary["largest_abs_error"] == pytest.approx(0.1)


def test_every_part_has_commands() -> None:
    for quick in (True, False):
        found = list(commands("cuda", quick))
        assert {command.part for command in found} == set(PARTS)
        assert len({command.name for command in found}) == len(found)
