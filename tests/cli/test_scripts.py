"""Scripts of several kinds, as their libraries' tutorials have them, by `memfit run`: the same, within the budget."""

from __future__ import annotations

import importlib.util
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import run_script, started

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Case:
    """A script.

    Attributes:
        needs: The package that it is for.
        budget: The share of its plain peak that it is run in.
        saw: What memfit says of its step.
        resume: The script's own argument for it.
    """

    needs: str
    budget: float
    saw: str
    resume: str = "--resume"


CASES = {
    "language_model": Case(
        "torch", 0.5, "2 calls of Model, 2 backward passes, 1 update by AdamW, gradients clipped", "--resume=True"
    ),
    "hf_trainer": Case(
        "transformers", 0.5, "1 call of GPT2LMHeadModel, 1 backward pass, 1 update by AdamW, gradients clipped"
    ),
    "lightning_module": Case(
        "lightning", 0.5, "1 call of Classifier, 1 backward pass, 1 update by AdamW, gradients clipped"
    ),
    "monai_segresnet": Case(
        "monai", 0.5, "1 call of SegResNet, 1 backward pass, 1 update by Adam, gradients not clipped"
    ),
    "gan": Case("torch", 0.65, "1 call of Generator, 3 backward passes, 2 updates by Adam, gradients not clipped"),
}
BESIDE = 0.005
"""What a script holds beside its step, of its peak: its data, which no plan makes smaller. Both peaks have it."""


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_script_trains_the_same_within_the_budget_and_resumes_its_own_checkpoint(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed")
    plain, plain_bytes = measured(name, "plain", tmp_path)
    fitted, fitted_bytes = measured(name, f"{case.budget}x", tmp_path)
    assert lines(fitted.stdout) == lines(plain.stdout) and len(lines(plain.stdout)) >= 4
    assert case.saw in fitted.stderr
    assert f"{case.budget}x of the plain step's peak" in fitted.stderr and "fits" in fitted.stderr
    assert fitted_bytes <= (case.budget + BESIDE) * plain_bytes
    assert weights(tmp_path / f"{case.budget}x") == weights(tmp_path / "plain")
    resumed = run_script(
        tmp_path, "--budget", f"{case.budget}x", str(SCRIPTS / f"{name}.py"), f"--out={case.budget}x", case.resume
    )
    assert resumed.returncode == 0, resumed.stderr
    left = lines(resumed.stdout)
    assert left and len(left) < len(lines(plain.stdout)) and left == lines(plain.stdout)[-len(left) :]
    assert weights(tmp_path / f"{case.budget}x") == weights(tmp_path / "plain")


def measured(name: str, budget: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], int]:
    """Run a script as it is ("plain") or in a budget, its checkpoints in a folder of that name; return its peak too."""
    report = folder / f"{budget}.bytes"
    done = started(
        folder, "-m", "tests.cli.metered", str(report), budget, str(SCRIPTS / f"{name}.py"), f"--out={budget}"
    )
    assert done.returncode == 0, done.stderr
    return done, int(report.read_text())


def lines(printed: str) -> list[str]:
    """Return what a script says of its losses, with all their digits."""
    words = ("step", "validated", "evaluated", "dice", "sample")
    return [line for line in printed.splitlines() if line.startswith(words)]


def weights(folder: Path) -> dict[str, list[float]]:
    """Return the weights that a script ended with."""
    kept = torch.load(folder / "last.pt")
    tensors = {"": kept} if all(isinstance(value, torch.Tensor) for value in kept.values()) else kept
    return {
        f"{part}.{name}": tensor.flatten().tolist() for part, state in tensors.items() for name, tensor in state.items()
    }
