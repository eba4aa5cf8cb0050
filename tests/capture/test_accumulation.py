"""Gradients of several paths: added in place or not, as in the step that nothing watches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memfit.capture.accumulation import Accumulation
from memfit.capture.measure import measure_peak_bytes
from memfit.cost.calibrate import calibrate
from memfit.ir.simulate import simulate
from memfit.workload import Workload
from tests.models import captured, squared_error, step_of

SHAPE = (4096, 64)
NBYTES = 4096 * 64 * 4
KEPT: list[Tensor] = []


class _Doubled(torch.autograd.Function):
    """Its backward pass adds up by itself, out of place."""

    @staticmethod
    def forward(context: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.exp() + gradient.sin()


def retained(y: Tensor) -> Tensor:
    """One path's gradient is held by the user too, until the next step."""
    KEPT.clear()
    z = y.sin()
    z.register_hook(KEPT.append)
    return z + y


PATHS: dict[str, Callable[[Tensor], Tensor]] = {
    "three paths": lambda y: y.sin() + y.cos() + y.exp(),
    "columns": lambda y: torch.stack([y[:, i].sin() for i in range(SHAPE[1])], 1),
    "a residual": lambda y: y + y.sin().cos(),
    "views": lambda y: y.view(-1).sin().view(SHAPE) + y.t().cos().t(),
    "an expanded gradient": lambda y: y.sin() + y.sum(1, keepdim=True),
    "a gradient that is held elsewhere": retained,
    "a sum inside a custom function": lambda y: _Doubled.apply(y) + y.cos(),
}


class Paths(nn.Module):
    """A layer whose output is used several times."""

    def __init__(self, paths: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(SHAPE[1], SHAPE[1])
        self.paths = paths

    def forward(self, x: Tensor) -> Tensor:
        return self.paths(self.linear(x))


def workload(name: str) -> Workload:
    model = Paths(PATHS[name])
    batch = (torch.randn(SHAPE), torch.randn(SHAPE))
    return Workload(model, batch, squared_error, torch.optim.SGD(model.parameters(), lr=0.1), name=name)


def difference_bytes(name: str, *, real: bool = False) -> int:
    """Return predicted less measured."""
    trace = captured(workload(name), real=real)
    mine = workload(name)
    with step_of(mine) as step:
        step(mine.batch)
        KEPT.clear()  # memory from before the measurement would be freed in it
        measured = measure_peak_bytes(step, mine.batch)
    return simulate(trace, calibrate([trace])).peak_bytes - measured


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("name", PATHS)
def test_the_peak_is_that_of_the_step_that_nothing_watches(name: str, real: bool) -> None:
    assert abs(difference_bytes(name, real=real)) < NBYTES / 100


def test_the_comparison_notices_gradients_added_out_of_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accumulation, "as_the_engine", lambda self, func, args, kwargs: (func, args))
    assert difference_bytes("columns") > 0.9 * NBYTES


def test_a_sum_inside_a_custom_function_stays_out_of_place() -> None:
    trace = captured(workload("a sum inside a custom function"))
    backward = [op.name for op in trace.ops if op.phase == "backward"]
    assert backward.count("aten.add.Tensor") == 1 and backward.count("aten.add_.Tensor") == 1


def test_a_gradient_that_is_held_elsewhere_is_not_written_to() -> None:
    """Both gradients of the sum are the same tensor, which the hook keeps."""
    trace = captured(workload("a gradient that is held elsewhere"))
    assert [op.name for op in trace.ops if op.name.startswith("aten.add") and op.phase == "backward"] == [
        "aten.add_.Tensor"
    ]
