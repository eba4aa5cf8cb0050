"""Module calls in a trace, where a call before them ended by an exception."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.capture import Recorder
from memfit.errors import CaptureError
from memfit.ir import RangeReport, Region, Trace
from memfit.tools import probe_range
from memfit.workload import Workload
from tests.covering import each
from tests.models import captured, squared_error


class Residual(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        inner = Residual(width, depth - 1) if depth else nn.GELU()
        self.inside = nn.Sequential(nn.Linear(width, 2 * width), inner_of(inner, width), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inside(x))


def inner_of(inner: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2 * width, width), inner, nn.Linear(width, 2 * width))


def residual(depth: int = 1) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(6, depth) for _ in range(3)), nn.Linear(6, 2))
    data = (torch.randn(4, 6), torch.randn(4, 2))
    return Workload(model, data, squared_error, torch.optim.AdamW(model.parameters()))


def forward_calls(trace: Trace) -> list[tuple[str, ...]]:
    """Return the modules of each forward call, from the innermost to the outermost."""
    chains = [trace.call_chain(index) for index, call in enumerate(trace.calls) if call.phase == "forward"]
    return [tuple(trace.modules[trace.calls[i].module].fqn for i in chain) for chain in chains]


ADDED = ("aten.empty.memory_format", "aten.detach.default")
"""Operators of the engine of recomputations, and of hooks of saved tensors."""


def placed(trace: Trace, *phases: str) -> list[tuple[Any, ...]]:
    """Return each operator of some phases, and the modules that it is told to be in."""
    fqns = [module.fqn for module in trace.modules]
    return [
        (op.name, op.microbatch, *(fqns[trace.calls[i].module] for i in trace.call_chain(op.call)))
        for op in trace.ops
        if op.phase in phases and op.name not in ADDED
    ]


REGIONS: dict[str, list[Region]] = {
    "blocks": [Region(("0",)), Region(("1",))],
    "a run": [Region(("0", "1", "2"))],
    "within another": [Region(("1",)), Region(("1.inside.1",))],
    "with kept outputs": [Region(("0",), ("aten.addmm.default#0",)), Region(("2.inside",))],
    "deep": [Region(("0.inside.1",)), Region(("2.inside.1.1.inside",))],
}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.ci)])
@pytest.mark.parametrize("name", REGIONS)
def test_a_recomputation_changes_nothing_in_what_comes_after_it(name: str, size: int) -> None:
    """Forward calls and operators are in the modules in which they are without it, in every microbatch."""
    plain = captured(residual(), microbatch_size=size)
    trace = captured(residual(), microbatch_size=size, regions=REGIONS[name])
    assert any(op.phase == "recompute" for op in trace.ops)
    assert forward_calls(trace) == forward_calls(plain)
    assert placed(trace, "forward", "optimizer") == placed(plain, "forward", "optimizer")
    for call, chain in zip(trace.calls, trace.ancestors, strict=True):
        fqns = [trace.modules[trace.calls[i].module].fqn for i in chain]
        assert all(inner.startswith(f"{outer}.") or not outer for inner, outer in zip(fqns, fqns[1:], strict=False))
        assert call.start <= call.end <= len(trace.ops)


class Interrupted(BaseException):
    pass


class Stops(nn.Module):
    """A module that ends by an exception, within three others."""

    def __init__(self, error: type[BaseException] | None, place: str) -> None:
        super().__init__()
        self.error, self.place = error, place
        self.layer = nn.Linear(4, 4)

    def stop(self, *_: Any) -> None:
        if self.error is not None:
            raise self.error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hook = {"hook before": self.layer.register_forward_pre_hook, "hook after": self.layer.register_forward_hook}
        with contextlib.ExitStack() as stack:
            if self.place in hook:
                stack.callback(hook[self.place](self.stop).remove)
            x = self.layer(x)
        if self.place == "generator":
            parts = self.parts(x)
            x = next(parts)
            parts.close()
            return x
        self.stop()
        return x

    def parts(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        try:
            yield self.layer(x)
        finally:
            self.stop()


class Catches(nn.Module):
    """A model whose forward pass goes on after the exception, with operators of its own and with modules."""

    def __init__(self, error: type[BaseException] | None, place: str) -> None:
        super().__init__()
        self.error = error or Interrupted
        self.deep = nn.Sequential(nn.Identity(), nn.Sequential(Stops(error, place)))
        self.outer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def attempt(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(self.error):
            self.deep(x)
        return torch.sin(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attempt(self.outer(x))
        return self.head(F.gelu(x) * 2)


PLACES = ["forward", "hook before", "hook after", "generator"]


@pytest.mark.parametrize(("place", "error"), each(PLACES, [Interrupted, KeyboardInterrupt, GeneratorExit, ValueError]))
def test_operators_after_an_exception_that_is_caught_belong_to_who_caught_it(
    place: str, error: type[BaseException]
) -> None:
    def trace_of(error: type[BaseException] | None) -> Trace:
        torch.manual_seed(0)
        model = Catches(error, place)
        data = (torch.randn(3, 4), torch.randn(3, 2))
        return captured(Workload(model, data, squared_error, torch.optim.SGD(model.parameters(), lr=0.1)))

    trace, plain = trace_of(error), trace_of(None)
    after = [row for row in placed(trace, "forward") if not any("deep" in str(part) for part in row[2:])]
    assert after == [row for row in placed(plain, "forward") if not any("deep" in str(part) for part in row[2:])]
    assert ("aten.sin.default", 0, "") in after and ("aten.gelu.default", 0, "") in after
    assert {row[2:] for row in placed(trace, "optimizer")} == {()}
    assert forward_calls(trace)[-1] == ("head", "")


def test_a_step_that_ends_within_a_call_is_refused_and_the_next_begins_anew() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    recorder = Recorder()
    handle: list[Any] = []
    with recorder, recorder.watch(model):
        recorder.begin_step()
        handle.append(model.register_forward_pre_hook(lambda *_: recorder.end_step()))
        with pytest.raises(CaptureError, match="ended while the module '' still ran"):
            model(torch.ones(1, 2))
        handle.pop().remove()
        recorder.begin_step()
        recorder.enter_phase("forward", 0)
        model(torch.ones(1, 2))
        assert [call.parent for call in recorder.end_step().calls] == [-1, 0]
    assert "_call_impl" not in vars(model) and "_call_impl" not in vars(model[0])


def test_ranges_after_an_exception_are_of_who_caught_it_whatever_its_kind() -> None:
    def ranges(error: type[BaseException]) -> RangeReport:
        torch.manual_seed(0)
        model = Catches(error, "forward")
        data = (torch.randn(3, 4), torch.randn(3, 2))
        return probe_range(Workload(model, data, squared_error, torch.optim.SGD(model.parameters(), lr=0.1)))

    assert ranges(Interrupted) == ranges(ValueError)
    assert "" in {module.module for module in ranges(Interrupted).modules}
