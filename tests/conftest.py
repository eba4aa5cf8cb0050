"""What every test starts from: a cache of its own, and seeded random numbers."""

from __future__ import annotations

import gc
import inspect
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from memfit.ir.plan import Levers
from memfit.pipeline import planning, predicting
from memfit.workload import Workload

_NO_LSTM = "could not create a primitive descriptor for the LSTM"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    needing = [item for item in items if item.get_closest_marker("gpu") is not None]
    if needing and not torch.cuda.is_available():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="there is no GPU here"))


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


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    gc.collect()
    torch.set_num_threads(1)  # threads that wait for a busy machine are slower than one
    gc.freeze()  # captures collect garbage, which is slow among all the objects of PyTorch
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMFIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        defaults = inspect.unwrap(planning.plan).__kwdefaults__
        assert defaults is not None
        patch.setitem(defaults, "time_limit_seconds", 2.0)  # tests ask for many plans
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Levers]:
    """The levers of every capture that plans make in the test."""
    found: list[Levers] = []
    captured = predicting._captured

    def counted(workload: Workload, levers: Levers, *arguments: Any, **options: Any) -> Any:
        found.append(levers)
        return captured(workload, levers, *arguments, **options)

    monkeypatch.setattr(predicting, "_captured", counted)
    return found
