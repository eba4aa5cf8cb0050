"""Scripts by `memfit run`, each step measured from outside: the figures on rows made up, and the scripts themselves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.field import cases
from benchmarks.field.cases import SCRIPTS, TABLE, Script, measured
from benchmarks.field.figures import line, summarised
from tests import warm
from tests.covering import some

FEW = ("gan_in_turn", "batch_warmup", "losses_kept", "bad_batch_skipped")
"""Of four kinds; `python -m benchmarks.field` runs all, and says how near each prediction is."""


def row(**changed: Any) -> Any:
    return {
        "script": "a",
        "kind": "a kind",
        "status": 0,
        "as_asked": True,
        "steps": 5,
        "budget_bytes": 100,
        "plain_peak_bytes": 150,
        "peaks": [90, 95],
        "over_budget": 0,
        "said": False,
        "same_parameters": True,
        "same_lines": True,
        "error": 0.001,
    } | changed


@pytest.mark.parametrize(
    ("changed", "figures", "told"),
    [
        ({}, {}, "predicted +0.10%"),
        ({"as_asked": False, "status": 2}, {"as_asked": 1}, "NOT AS ASKED (status 2)"),
        ({"over_budget": 2}, {"over_budget_silent": 1}, "OVER BUDGET in 2 of 5 steps, SILENT"),
        ({"over_budget": 2, "said": True}, {"over_budget_said": 1}, "steps, said"),
        ({"same_parameters": False}, {"same_parameters": 1}, "NOT THE SAME"),
        ({"same_lines": False}, {"same_parameters": 1}, "NOT THE SAME"),
        ({"error": -0.02}, {"predicted_within_1_percent": 0.5}, "predicted -2.00%"),
    ],
)
def test_what_is_wrong_with_a_row_is_counted_and_told(
    changed: dict[str, Any], figures: dict[str, Any], told: str
) -> None:
    right = {
        "scripts": 2,
        "as_asked": 2,
        "steps": 10,
        "over_budget_silent": 0,
        "over_budget_said": 0,
        "same_parameters": 2,
        "predicted": 2,
        "predicted_within_1_percent": 1.0,
    }
    assert summarised([row(), row(**changed)]) == right | figures
    assert told in line(row(**changed))


def test_every_script_is_in_the_table_and_knows_nothing_of_memfit() -> None:
    paths = {path.stem: path.read_text() for path in SCRIPTS.glob("*.py")}
    assert paths.keys() - {"networks"} == TABLE.keys() and len(TABLE) >= 25
    assert not [name for name, text in paths.items() if "memfit" in text.replace("memfit's own word", "")]


@pytest.fixture
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the scripts run in forks of a process that has PyTorch imported."""

    def run(command: list[str], cwd: Path, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        own = {"PYTHONPATH": os.pathsep.join((env["PYTHONPATH"], env.get("PYTHONPATH", "")))}
        return warm.run(command[1:], cwd=cwd, env=env | own)

    monkeypatch.setattr(cases, "start", run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", some(FEW, ("losses_kept",))
)  # the benchmark runs all, and says how near each prediction is
@pytest.mark.usefixtures("warm_processes")
def test_no_step_of_a_script_is_over_its_budget_in_silence(name: str) -> None:
    found = measured(name)
    assert found["as_asked"], found
    assert found["said"] or not found["over_budget"], found
    assert found["same_parameters"] and found["same_lines"], found


@pytest.mark.usefixtures("warm_processes")
def test_a_script_that_passes_its_budget_without_a_word_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget is passed where memfit does not look: in an update that is none of PyTorch's optimizers' business."""
    (tmp_path / "careless.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(512, 512)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(3):\n"
        "    model(torch.randn(64, 512)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "torch.ones(2**22)\n"
        "torch.save({'model': model.state_dict()}, 'last.pt')\n"
    )
    monkeypatch.setattr(cases, "SCRIPTS", tmp_path)
    monkeypatch.setitem(TABLE, "careless", Script("careless", 1.5, of_first=True))
    found = measured("careless")
    assert found["over_budget"] == 1 and found["peaks"][-1] > 2**24
    assert not found["said"] and "SILENT" in line(found)
    assert summarised([found])["over_budget_silent"] == 1 and found["same_parameters"]
