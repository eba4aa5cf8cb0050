"""Whose frames an error shows: the user's, and neither memfit's nor PyTorch's nor Python's."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit import estimate
from memfit._torch import EagerMode
from memfit.errors import CaptureError, WorkloadError
from memfit.foundations import frames_text, memfits_place, users_frames, users_place
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


def raised(call: object, *arguments: object) -> BaseException:
    with pytest.raises((KeyError, RuntimeError)) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value


def names(error: BaseException) -> list[str]:
    return [frame.name for frame in users_frames(error) if frame.filename.endswith("mine.py")]


def test_frames_of_pytorch_and_of_python_are_left_out(mine: dict[str, object]) -> None:
    for name, expected in (("shapes", ["shapes"]), ("through_python", ["through_python", "<lambda>", "inner"])):
        error = raised(mine[name])
        assert names(error) == expected
        assert not any("/torch/" in f.filename or "contextlib" in f.filename for f in users_frames(error))


def test_what_memfit_raises_of_an_error_shows_that_error_s_frames(mine: dict[str, object]) -> None:
    error = raised(mine["inner"], 0)
    for kind in (WorkloadError, CaptureError):
        about = kind("mine.py raised KeyError")
        about.__cause__ = error
        assert names(about) == ["inner"]
    assert ':11: return {}["missing"]' in users_place(error)
    assert users_frames(WorkloadError("of no code")) == [] and frames_text(WorkloadError("of no code")) == ""


def test_of_many_frames_those_in_the_middle_are_left_out_and_paths_within_the_current_folder_are_short(
    mine: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = frames_text(raised(mine["inner"], 30))
    assert "more" in text and text.count("mine.py") <= 8
    assert text.splitlines()[-1].strip() == 'return {}["missing"]'
    monkeypatch.chdir(tmp_path)
    assert "\n  mine.py:11 in inner\n" in "\n" + frames_text(raised(mine["inner"], 0))


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
    for error in (raised(mine["inner"], 0), raised(mine["shapes"]), raised(step)):
        assert memfits_place(error) == ""
    with pytest.raises(CaptureError) as caught:  # called by memfit, with arguments that it does not take
        estimate(workload, device="cpu")
    assert memfits_place(caught.value) == "" and "itself failed" not in str(caught.value)
