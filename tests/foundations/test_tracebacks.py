"""Errors that leave memfit: their tracebacks hold the user's frames alone, and end at the user's line."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import CaptureError, InfeasibleError, UsageError, WorkloadError
from memfit.foundations import format_bytes, is_memfits, public
from memfit.foundations.frames import VARIABLE
from memfit.workload import Workload


def parts(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(model(batch), torch.ones(5, 7)).mean()  # of another shape: PyTorch raises


def own(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    raise ValueError("of my own")


def none(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch)


def mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


def workload(loss_fn: Callable[..., Any] = mean) -> Workload:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return Workload(model, torch.ones(8, 4), loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))


def step(loss_fn: Callable[..., Any]) -> Any:
    return memfit.Step(workload(loss_fn))(torch.ones(8, 4))


def loop() -> None:
    made = workload()
    with memfit.fit(made.model, made.optimizer, budget="64B", tell=lambda text: None):
        for _ in range(3):
            mean(made.model, made.batch).backward()
            made.optimizer.step()
            made.optimizer.zero_grad()


def raised(kind: type[BaseException], call: Callable[[], Any]) -> BaseException:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


def files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def functions(error: BaseException) -> list[str]:
    """Return the functions of this module in a traceback, from the call on; lambdas are calls."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
    return [frame.name for frame in frames if frame.name not in ("raised", "<lambda>")]


CASES: dict[str, tuple[type[BaseException], Callable[[], Any], list[str]]] = {
    "an argument": (UsageError, lambda: memfit.plan(nn.Linear(1, 1), budget="1MiB"), []),  # type: ignore[arg-type]
    "a constructor": (WorkloadError, lambda: memfit.Loop(zero_grad="never"), []),  # type: ignore[arg-type]
    "a capture": (WorkloadError, lambda: memfit.estimate(workload(none)), []),
    "a budget": (InfeasibleError, lambda: memfit.plan(workload(), budget="64B"), []),
    "a workload's name": (UsageError, lambda: memfit.load_workload("nowhere:workload"), []),
    "a step": (WorkloadError, lambda: step(none), ["step"]),
    "a loop": (InfeasibleError, loop, ["loop", "loop", "mean"]),
    "the user's own, in a step": (ValueError, lambda: step(own), ["step", "own"]),
    "the user's own, that the user's loop raises": (ZeroDivisionError, lambda: in_a_loop(), ["in_a_loop"]),
}


def in_a_loop() -> None:
    made = workload()
    with memfit.fit(made.model, made.optimizer, budget="1GiB", tell=lambda text: None):
        1 / 0  # noqa: B018


@pytest.mark.parametrize("case", CASES)
def test_only_frames_of_the_users_are_left(case: str) -> None:
    kind, call, expected = CASES[case]
    error = raised(kind, call)
    assert not any(map(is_memfits, files(error)))
    assert functions(error) == expected
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)


def test_what_pytorch_raises_in_the_users_code_shows_where() -> None:
    error = raised(RuntimeError, lambda: step(parts))
    assert functions(error)[:2] == ["step", "parts"] and not any(map(is_memfits, files(error)))


def test_a_cause_of_the_users_is_shown_by_its_own_frames() -> None:
    error = raised(CaptureError, lambda: memfit.estimate(workload(own)))
    assert functions(error) == []
    cause = error.__cause__
    assert isinstance(cause, ValueError) and functions(cause) == ["own"]
    assert not any(map(is_memfits, files(cause)))


def test_memfits_own_faults_are_shown_whole() -> None:
    error = raised(TypeError, lambda: public(format_bytes)("many"))  # type: ignore[arg-type]
    assert files(error)[-1].endswith("units.py")


def test_the_environment_has_tracebacks_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "full")
    assert any(map(is_memfits, files(raised(WorkloadError, lambda: step(none)))))


def test_python_prints_no_frame_of_memfits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import memfit\n\nmemfit.estimate(None)\n")
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    lines = found.stderr.splitlines()
    assert lines[0].startswith("Traceback") and f'"{script}", line 3' in lines[1]
    assert [line.strip() for line in lines if "File" in line] == [lines[1].strip()]
    assert lines[-1].startswith("memfit.errors.UsageError: workload is None")
