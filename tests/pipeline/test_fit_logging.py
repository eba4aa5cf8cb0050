"""What `memfit.fit` gives to `log=`: a record for each step of the loop."""

from __future__ import annotations

import asyncio
import io
import sys
from typing import Any

import pytest
import torch

import memfit
from tests.pipeline import loops


class Full(Exception):
    pass


@pytest.mark.parametrize(
    ("loop", "make"),
    [
        (loops.accumulating, loops.one),
        pytest.param(loops.loss_outside, loops.one, marks=pytest.mark.ci),
        pytest.param(loops.adversarial, loops.pair, marks=pytest.mark.ci),
        pytest.param(loops.with_a_closure, loops.one, marks=pytest.mark.ci),
    ],
)
def test_each_step_is_logged_once_and_the_loop_is_as_before(loop: loops.Loop, make: Any) -> None:
    expected = loop(*make())
    records: list[dict[str, Any]] = []

    def log(record: dict[str, Any]) -> None:
        torch.ones(3).sum()  # of the tracker, not of the loop
        records.append(record)

    models, optimizers = make()
    with memfit.fit(models, optimizers, budget="2GiB", log=log, tell=lambda text: None) as fitted:
        assert loop(models, optimizers) == expected
    predicted = fitted.plan.predicted.peak_bytes if fitted.plan else 0
    assert [record["step"] for record in records] == [1, 2, 3]
    assert [record["predicted_peak_bytes"] for record in records] == [None, predicted, predicted]
    assert all(record["seconds"] > 0 and record["peak_bytes"] is None for record in records)


def test_an_error_of_the_log_is_raised_in_the_loop_and_the_modules_are_as_before() -> None:
    (model,), optimizers = loops.one()
    forwards = [module.forward for module in model.modules()]
    steps: list[int] = []

    def log(record: dict[str, Any]) -> None:
        steps.append(record["step"])
        if record["step"] == 2:
            raise Full

    with pytest.raises(Full), memfit.fit(model, optimizers, budget="2GiB", log=log, tell=lambda text: None):
        loops.loss_outside([model], optimizers)
    assert steps == [1, 2]
    assert [module.forward for module in model.modules()] == forwards and not model._forward_hooks


class Attributes:
    """Answers for what it lacks as trackers' runs do, by an error of its own."""

    __slots__ = ("__dict__", "empty")

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


RUN = Attributes()
TASK = asyncio.Future[None](loop=asyncio.new_event_loop())


def test_a_tracker_that_the_loop_names_and_that_patches_the_streams_is_no_part_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = sys.stderr.write

    def patched(text: str) -> int:
        assert RUN is not None and TASK is not None
        return write(text)

    class Named(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert RUN is not None
            return super().forward(x)

    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(sys.stderr, "write", patched)
    (model,), optimizers = loops.one()
    model.append(Named(10, 10))
    with memfit.fit(model, optimizers, budget="2GiB") as fitted:
        loops.loss_outside([model], optimizers)
    assert fitted.plan is not None
    TASK.get_loop().close()
