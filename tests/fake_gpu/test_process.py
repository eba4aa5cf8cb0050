"""Calls that run in a process with fake CUDA."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from typing import Any

import pytest

from memfit.errors import CaptureError, InfeasibleError, UntestedTorchWarning
from memfit.fake_gpu import process, shim

COLD = process.command  # as tests are collected: later the session's is in its place

pytestmark = pytest.mark.skipif(shim.has_gpu(), reason="a GPU is here: nothing is sent")


def silent(stage: str, done: int, total: int) -> None:
    """Hear nothing."""


def prints(progress: Any) -> Any:
    """Report progress while user code prints."""
    for i in range(3):
        print("the user prints", flush=True)
        sys.stderr.write("and complains\n")
        progress("counting", i, 3)
    return {"returned": "as it is"}


def raises(kind: str, progress: Any) -> Any:
    """Fail in some way."""
    if kind == "infeasible":
        raise InfeasibleError("no plan", budget_bytes=1, lowest_peak_bytes=2, where="here", proven=True)
    if kind == "bug":
        raise ZeroDivisionError("oops")
    os._exit(9)


def test_prints_and_progress_do_not_mix(capfd: pytest.CaptureFixture[str]) -> None:
    stages: list[tuple[str, int, int]] = []
    assert process.run(prints, lambda *stage: stages.append(stage)) == {"returned": "as it is"}
    assert stages == [("counting", i, 3) for i in range(3)]
    out, err = capfd.readouterr()
    assert out == "" and err.count("the user prints") == err.count("and complains") == 3


def warns(progress: Any) -> None:
    """Warn as the user's code would, and of this PyTorch."""
    warnings.warn("of something", UserWarning, stacklevel=1)
    warnings.warn("not tested", UntestedTorchWarning, stacklevel=1)


def test_the_warning_of_an_untested_torch_is_left_to_the_process_that_waits(capfd: pytest.CaptureFixture[str]) -> None:
    process.run(warns, silent)
    told = capfd.readouterr().err
    assert "of something" in told and "not tested" not in told


def tells(name: str, progress: Any) -> Any:
    """Return an environment variable, and whether tensors can be on a fake GPU."""
    return os.environ.get(name), shim.has_gpu() or "MEMFIT_FAKE_CUDA" in os.environ


def test_a_process_without_fake_cuda_is_a_new_interpreter_and_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "command", COLD)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("KEPT", "1")
    assert process.run(functools.partial(tells, "RANK"), silent, fakes_cuda=False) == (None, False)
    assert process.run(functools.partial(tells, "KEPT"), silent, fakes_cuda=False) == ("1", False)


def test_errors_arrive_with_what_they_say() -> None:
    with pytest.raises(InfeasibleError, match="no plan") as caught:
        process.run(functools.partial(raises, "infeasible"), silent)
    assert (caught.value.budget_bytes, caught.value.lowest_peak_bytes, caught.value.proven) == (1, 2, True)


@pytest.mark.parametrize(
    ("kind", "message"), [("bug", "ZeroDivisionError: oops"), ("death", "ended without a reply, with status 9")]
)
def test_other_failures_are_capture_errors(kind: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        process.run(functools.partial(raises, kind), silent)
