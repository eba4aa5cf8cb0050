"""What autograd computes in place or not, as in the step that nothing watches: sums of gradients, and formulas."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.workload import Workload
from tests.capture.steps import Function, difference_bytes, squared
from tests.models import captured, squared_error

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


class _Twice(nn.Module):
    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        z = y.exp()
        return z, z


def watched(y: Tensor) -> Tensor:
    """A module with a backward hook holds the gradients of its outputs until those of its inputs are there."""
    module = _Twice()
    module.register_full_backward_hook(lambda module, inputs, outputs: None)
    one, other = module(y)
    return 2 * one + 3 * other


def watched_before(y: Tensor) -> Tensor:
    """The user keeps what is to be added up, where it comes in: at the node."""
    KEPT.clear()
    z = y.exp()
    assert z.grad_fn is not None
    one, other = 2 * z, 3 * z
    for path in (one, other):
        assert path.grad_fn is not None
        path.grad_fn.register_hook(lambda inputs, outputs: KEPT.extend(inputs))  # type: ignore[arg-type]
    return one + other


def selected(y: Tensor) -> Tensor:
    """Every other column, by its number."""
    return y.index_select(1, torch.arange(0, SHAPE[1], 2)).repeat_interleave(2, 1)


def mirrored(y: Tensor) -> Tensor:
    """The gradient of the residual is a view, so that the engine adds to neither: of the second it does not ask."""
    rows = y.view(64, 64, SHAPE[1])
    return (rows + torch.stack(rows.unbind(1)[::-1], 1)).view(SHAPE)


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gather": lambda y: y.gather(1, y.detach().argsort(1)),
    "sort": lambda y: y.sort(1)[0],
    "topk": lambda y: y.topk(SHAPE[1])[0],
    "max": lambda y: y.max(1, keepdim=True)[0].expand(SHAPE),
    "cummax": lambda y: y.cummax(1)[0],
    "index_select": selected,
    "index": lambda y: y[:, torch.arange(SHAPE[1] - 1, -1, -1)],
    "take": lambda y: y.take(torch.arange(y.numel()).view(SHAPE)),
    "binary cross entropy": lambda y: F.binary_cross_entropy_with_logits(y, torch.ones(SHAPE), reduction="none"),
    "weighted binary cross entropy": lambda y: F.binary_cross_entropy_with_logits(
        y, torch.ones(SHAPE), torch.ones(SHAPE), reduction="none"
    ),
    "binary cross entropy with weights of positives": lambda y: F.binary_cross_entropy_with_logits(
        y, torch.ones(SHAPE), pos_weight=torch.full((SHAPE[1],), 2.0), reduction="none"
    ),
    "deviation and mean": lambda y: torch.stack(torch.std_mean(y, 1)).mean(0, keepdim=True).mT.expand(SHAPE),
    "a decomposition": lambda y: y @ torch.linalg.cholesky(1e-4 * (y.mT @ y) + torch.eye(SHAPE[1])),
    "a system of equations": lambda y: torch.linalg.solve_triangular(
        torch.eye(SHAPE[1]) + y[: SHAPE[1]], y, upper=True, left=False
    ),
    "clamped between tensors": lambda y: y.clamp(torch.zeros(SHAPE[1]), torch.ones(SHAPE[1])),
    "clamped to a floor": lambda y: y.clamp(min=torch.zeros(SHAPE[1])),
    "clamped between learnt bounds": lambda y: y.clamp(
        torch.zeros(SHAPE[1], requires_grad=True), torch.ones(SHAPE[1], requires_grad=True)
    ),
    "the larger of two": lambda y: torch.maximum(y, torch.zeros(SHAPE[1])),
    "an angle": lambda y: torch.atan2(y, torch.ones(SHAPE)),
    "the largest of all": lambda y: y * y.max() + y.median(),
    "patches and back": lambda y: F.fold(
        F.unfold(y.view(1, 4, 256, 256), 3, padding=1), (256, 256), 3, padding=1
    ).reshape(SHAPE),
    "one source of two gradients": lambda y: torch.hypot(y, y),
    "a linear layer of transposed rows": lambda y: F.linear(
        y.view(64, 64, 64).mT, torch.eye(64), torch.ones(64)
    ).mT.reshape(SHAPE),
    "a scatter of the user's": lambda y: torch.zeros(SHAPE).scatter(1, y.detach().argsort(1), y),
}
PATHS: dict[str, Callable[[Tensor], Tensor]] = {
    "a module with a backward hook": watched,
    "gradients that a hook keeps": watched_before,
    "three paths": lambda y: y.sin() + y.cos() + y.exp(),
    "columns": lambda y: torch.stack([y[:, i].sin() for i in range(SHAPE[1])], 1),
    "a residual": lambda y: y + y.sin().cos(),
    "views": lambda y: y.view(-1).sin().view(SHAPE) + y.t().cos().t(),
    "an expanded gradient": lambda y: y.sin() + y.sum(1, keepdim=True),
    "a gradient that is held elsewhere": retained,
    "a residual whose gradient is a view": mirrored,
    "a sum inside a custom function": lambda y: _Doubled.apply(y) + y.cos(),
    **FORMULAS,
}


def workload(name: str) -> Workload:
    paths = PATHS[name]
    model = nn.Sequential(nn.Linear(SHAPE[1], SHAPE[1]), Function(lambda y: paths(y).reshape(SHAPE)))
    return squared(model, (torch.randn(SHAPE), torch.randn(SHAPE)), loss_fn=squared_error)


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("name", PATHS)
def test_the_peak_is_that_of_the_step_that_nothing_watches(name: str, real: bool) -> None:
    # Memory from before the measurement would be freed in it.
    assert abs(difference_bytes(partial(workload, name), real=real, at_rest=KEPT.clear)) < NBYTES / 100


@pytest.mark.parametrize(
    ("name", "out_of_place", "in_place"),
    [
        ("columns", 0, SHAPE[1] - 1),
        ("a sum inside a custom function", 1, 1),
        (
            "a gradient that is held elsewhere",
            1,
            0,
        ),  # both gradients of the sum are the same tensor, which a hook keeps
    ],
)
def test_sums_are_in_place_where_nothing_else_holds_the_gradient(name: str, out_of_place: int, in_place: int) -> None:
    backward = [op.name for op in captured(workload(name)).ops if op.phase == "backward"]
    assert [backward.count(f"aten.{add}.Tensor") for add in ("add", "add_")] == [out_of_place, in_place]


def test_formulas_fill_zeros_in_place() -> None:
    names = {op.name for op in captured(workload("gather")).ops if op.phase == "backward"}
    assert "aten.scatter_add_.default" in names and "aten.scatter_add.default" not in names


@contextlib.contextmanager
def frames_evaluated_by_dynamo() -> Iterator[None]:
    """Have Dynamo evaluate the frames of this process, as while another thread runs what was compiled."""
    set_eval_frame = pytest.importorskip("torch._C._dynamo.eval_frame").set_eval_frame
    begun, done = threading.Event(), threading.Event()

    def other_thread() -> None:
        before = set_eval_frame(False)
        begun.set()
        done.wait()
        set_eval_frame(before)

    thread = threading.Thread(target=other_thread)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def references_within_a_call(arguments: tuple[object]) -> int:
    def called(argument: object) -> int:
        return sys.getrefcount(argument)

    return called(arguments[0])


def test_references_count_the_same_while_dynamo_evaluates_frames() -> None:
    # Of a process that compiled nothing before: where one did, Dynamo evaluates its frames from then on.
    code = f"import sys\n{inspect.getsource(references_within_a_call)}print(references_within_a_call((object(),)))"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    captured(workload("three paths"))  # how often what only the engine holds is referred to is found once
    with frames_evaluated_by_dynamo():
        assert references_within_a_call((object(),)) > int(fresh.stdout)  # or else the rest says nothing
        names = [op.name for op in captured(workload("three paths")).ops if op.phase == "backward"]
    assert "aten.add_.Tensor" in names and "aten.add.Tensor" not in names
