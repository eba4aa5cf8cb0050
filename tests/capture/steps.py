"""Small steps of a model, a batch and the mean square of what comes out, and what is asked of their peaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfit.capture import measure_peak_bytes
from memfit.cost import calibrate
from memfit.ir import Levers, simulate
from memfit.workload import Workload, batch_size_of
from tests.measuring import peaks
from tests.models import captured, step_of


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


def squared(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Workload:
    """Return the step, of plain SGD where no optimizer is given."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.SGD(trained, lr=0.1)
    return Workload(model, batch, options.pop("loss_fn", mean_square), optimizer, **options)


def assert_predicted(workload: Workload, microbatch_size: int | None = None, rel: float = 0.0, **levers: Any) -> None:
    """Assert that a peak is predicted as it is measured, up to a share of it."""
    size = microbatch_size or batch_size_of(workload.batch)
    predicted, measured = peaks(workload, Levers(microbatch_size=size, **levers))
    assert predicted == pytest.approx(measured, rel=rel, abs=0)


def difference_bytes(make: Callable[[], Workload], *, real: bool = False, at_rest: Callable[[], Any] = list) -> int:
    """Return a step's predicted peak less its measured one; `at_rest` is called between its two steps."""
    trace, mine = captured(make(), real=real), make()
    with step_of(mine) as step:
        step(mine.batch)
        at_rest()
        measured = measure_peak_bytes(step, mine.batch)
    return simulate(trace, calibrate([trace])).peak_bytes - measured
