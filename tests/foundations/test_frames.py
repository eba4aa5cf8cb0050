"""Whose frames an error shows: the user's, and neither memfit's nor PyTorch's nor Python's; tracebacks end there."""

from __future__ import annotations

import functools
import runpy
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
from memfit import estimate
from memfit._torch import EagerMode
from memfit.errors import CaptureError, InfeasibleError, UsageError, WorkloadError
from memfit.foundations import format_bytes, frames_text, is_memfits, memfits_place, public, users_frames, users_place
from memfit.workload import Workload, rebuild

CODE = """
import contextlib
import functools

import torch


def inner(depth):
    if depth:
        return inner(depth - 1)
    return {}["missing"]


def shapes():
    return torch.nn.functional.linear(torch.zeros(2, 3), torch.zeros(4, 5))


def through_python():
    with contextlib.nullcontext():
        return functools.reduce(lambda a, b: inner(0), [1, 2])
"""


@pytest.fixture
def mine(tmp_path: Path) -> dict[str, object]:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return runpy.run_path(str(path))


def error_of(call: object, *arguments: object) -> BaseException:
    with pytest.raises((KeyError, RuntimeError)) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value


def names(error: BaseException) -> list[str]:
    return [frame.name for frame in users_frames(error) if frame.filename.endswith("mine.py")]


def test_frames_of_pytorch_and_of_python_are_left_out(mine: dict[str, object]) -> None:
    for name, expected in (("shapes", ["shapes"]), ("through_python", ["through_python", "<lambda>", "inner"])):
        error = error_of(mine[name])
        assert names(error) == expected
        assert not any("/torch/" in f.filename or "contextlib" in f.filename for f in users_frames(error))


def test_what_memfit_raises_of_an_error_shows_that_error_s_frames(mine: dict[str, object]) -> None:
    error = error_of(mine["inner"], 0)
    for kind in (WorkloadError, CaptureError):
        about = kind("mine.py raised KeyError")
        about.__cause__ = error
        assert names(about) == ["inner"]
    assert ':11: return {}["missing"]' in users_place(error)
    assert users_frames(WorkloadError("of no code")) == [] and frames_text(WorkloadError("of no code")) == ""


def test_of_many_frames_those_in_the_middle_are_left_out_and_paths_within_the_current_folder_are_short(
    mine: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = frames_text(error_of(mine["inner"], 30))
    assert "more" in text and text.count("mine.py") <= 8
    assert text.splitlines()[-1].strip() == 'return {}["missing"]'
    monkeypatch.chdir(tmp_path)
    assert "\n  mine.py:11 in inner\n" in "\n" + frames_text(error_of(mine["inner"], 0))


def test_frames_of_another_process_come_as_text() -> None:
    error = CaptureError("there")
    error.frames = "  there.py:1 in it\n    x"
    assert frames_text(error) == error.frames
    assert frames_text(functools.reduce(lambda a, b: a, [error, torch])) == error.frames


def test_what_memfit_raises_between_a_step_and_pytorch_has_its_line() -> None:
    def signed(call: object) -> BaseException:
        with pytest.raises((KeyError, TypeError, RuntimeError)) as caught:
            call()  # type: ignore[operator]
        return caught.value

    theirs = signed(lambda: rebuild('{"op":"aten.mm.default","args":[{"t":["float32",[2],["x"]]}]}', "cpu"))
    assert memfits_place(theirs).startswith("memfit/workload/signatures.py:")
    error = CaptureError("captured")
    error.__cause__ = theirs
    assert memfits_place(error) == memfits_place(theirs)


def test_what_the_users_code_or_pytorch_raises_is_not_memfits(mine: dict[str, object]) -> None:
    class Through(EagerMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def step() -> None:
        with Through():
            torch.mm(torch.zeros(2, 3), torch.zeros(2, 3))

    model = torch.nn.Linear(2, 2)
    workload = Workload(model, torch.zeros(1, 2), torch.add, torch.optim.SGD(model.parameters(), 0.1))
    for error in (error_of(mine["inner"], 0), error_of(mine["shapes"]), error_of(step)):
        assert memfits_place(error) == ""
    with pytest.raises(CaptureError) as caught:  # called by memfit, with arguments that it does not take
        estimate(workload, device="cpu")
    assert memfits_place(caught.value) == "" and "itself failed" not in str(caught.value)


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
    monkeypatch.setenv("MEMFIT_TRACEBACK", "full")
    assert any(map(is_memfits, files(raised(WorkloadError, lambda: step(none)))))


def test_python_prints_no_frame_of_memfits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import memfit\n\nmemfit.estimate(None)\n")
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    lines = found.stderr.splitlines()
    assert lines[0].startswith("Traceback") and f'"{script}", line 3' in lines[1]
    assert [line.strip() for line in lines if "File" in line] == [lines[1].strip()]
    assert lines[-1].startswith("memfit.errors.UsageError: workload is None")
