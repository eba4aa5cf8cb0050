"""What every test starts from: a cache of its own, costs that no clock tells, and seeded random numbers."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from memfit import hardware
from memfit.foundations import interrupts
from memfit.ir import Levers, Trace
from memfit.pipeline import loop_plans
from memfit.planner import StepVariant, captured_through
from tests import warm
from tests.fixed_costs import fixed_costs
from tests.quick_plans import quick_plans
from tests.remembered import remembered_captures

with contextlib.suppress(ModuleNotFoundError):  # the environments of Jittor and TensorFlow do without
    from hypothesis import settings

    settings.register_profile("seeded", derandomize=True)
    settings.load_profile("seeded")  # before modules of tests are imported, which go on from it

_SHARED = "MEMFIT_TESTS_SHARED"
_CACHE = "MEMFIT_CACHE_DIR"
_CAPTURING = ("_torch", "capture", "cost", "fake_gpu", "jittor", "keras", "recomputation", "wheel")
"""The folders whose tests capture every step themselves."""
_MEASURING = ("test_a_loop_keeps_its_losses_and_the_budget",)
"""Tests that measure what a process allocates while it plans, as remembering a capture does too."""
_HARMLESS = {"captures", "memfit", "folder"}
"""Fixtures that use `monkeypatch`, and change nothing of how steps are captured."""
_NO_LSTM = "could not create a primitive descriptor for the LSTM"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    needing = [item for item in items if item.get_closest_marker("gpu") is not None]
    if needing and not torch.cuda.is_available():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="there is no GPU here"))


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder that the processes of a session share: their cache, and what they captured."""
    if _SHARED not in os.environ:
        os.environ[_SHARED] = tempfile.mkdtemp(prefix="memfit-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(_SHARED)))
    warm.servers.traces = shared_folder() / "traces"
    warm.servers.traces.mkdir(exist_ok=True)
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(_CACHE, _cache())
            warm.servers.share()
        config.add_cleanup(warm.servers.end)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Take costs that no clock tells, and steps that were captured before, where a test does not ask how they come."""
    with contextlib.ExitStack() as stack:
        if item.path.parent.name != "cost" and item.get_closest_marker("clock") is None:
            stack.enter_context(fixed_costs())
        if not _captures_itself(item):
            stack.enter_context(remembered_captures(shared_folder() / "traces"))
        return (yield)


def _captures_itself(item: pytest.Item) -> bool:
    """Tell whether a test may depend on how steps are captured: by where it is, or since it changes memfit."""
    fixtures = getattr(item, "_fixtureinfo", None)
    if item.get_closest_marker("harmless") is not None:
        return False
    if fixtures is None or item.path.parent.name in _CAPTURING or getattr(item, "originalname", "") in _MEASURING:
        return True
    changing = {name for name, found in fixtures.name2fixturedefs.items() if "monkeypatch" in found[-1].argnames}
    return "monkeypatch" in fixtures.argnames or bool(changing - _HARMLESS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip what asks for an LSTM in bfloat16 on a CPU for which oneDNN has none."""
    try:
        return (yield)
    except Exception as e:
        if torch.ops.mkldnn._is_mkldnn_bf16_supported() or _NO_LSTM not in _chain(e):
            raise
        pytest.skip("this CPU has no kernel for an LSTM in bfloat16")


def _chain(error: BaseException | None) -> str:
    """Return what an exception says, and those that it comes from."""
    return "" if error is None else f"{error}\n{_chain(error.__cause__ or error.__context__)}"


def shared_folder() -> Path:
    """Return the folder that the processes of a session share."""
    return Path(os.environ[_SHARED])


def _cache() -> str:
    return str(shared_folder() / "cache")


@pytest.fixture(scope="session", autouse=True)
def _own_cache() -> Iterator[None]:
    gc.collect()
    torch.set_num_threads(1)  # threads that wait for a busy machine are slower than one
    gc.freeze()  # captures collect garbage, which is slow among all the objects of PyTorch
    with pytest.MonkeyPatch.context() as patch, quick_plans():
        patch.setattr(gc, "get_freeze_count", lambda: 1)  # which counts one by one, and each capture asks
        patch.setenv("MEMFIT_MEASURE", "no")  # plans are chosen by predicted times, but where a test asks for more
        patch.setenv(_CACHE, _cache())  # the shim of fake CUDA is built in it, once
        patch.setattr(loop_plans, "is_on", False)  # a test's loop is planned, also where another one's is like it
        patch.setattr(hardware.shim, "command", warm.fake_cuda_command)
        patch.setattr(hardware.process, "command", functools.partial(warm.command, "-m"))
        yield
    warm.servers.end()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """What modules import, and never leave, is not looked through by each collection of the tests that measure."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _signals_are_free() -> Iterator[None]:
    """A context that holds signals back, and is never left, would hold those of every later test."""
    yield
    assert interrupts._held is None


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def captures() -> Iterator[list[Levers]]:
    """The levers of every capture that plans make in the test."""
    found: list[Levers] = []

    def counted(variant: StepVariant, capture: Callable[[StepVariant], Trace]) -> Trace:
        found.append(variant.levers)
        return capture(variant)

    with captured_through(counted):
        yield found
