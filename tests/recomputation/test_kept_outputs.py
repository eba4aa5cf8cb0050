"""Kept outputs: the mode that keeps them is on in the modules that make them alone, and the numbers stay the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit._torch import current_mode_stack, disable_current_modes
from memfit.hardware import allocated
from memfit.ir import Region, makers_of_kept
from memfit.recomputation import checking, checkpointed
from tests.models import BUILDERS, captured
from tests.recomputation.steps import Executed, differing, results

ADDMM, GELU, ADD, TANH = "aten.addmm.default", "aten.gelu.default", "aten.add.Tensor", "aten.tanh.default"


class Watched(nn.Module):
    """Notes whether a region's mode is on while its own operators run, before and after it calls what is inside."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.seen = nn.ModuleList(inside), list[bool]()

    def note(self) -> None:
        self.seen.append(bool(current_mode_stack()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note()
        y = x.tanh()
        for module in self.inside:
            y = module(y)
        self.note()
        return y.sin()


class Block(nn.Module):
    """A region with modules in it, one of them called twice, and operators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.twice = nn.Linear(16, 32), nn.Linear(32, 32)
        self.inner = Watched(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2)), Watched(nn.Linear(32, 32)))
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.twice(self.twice(self.up(x)).relu())
        return x + self.down(self.inner(nn.functional.gelu(y)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Block(), Block(), nn.Linear(16, 3))


def loss(model: nn.Module, samples: int = 64) -> torch.Tensor:
    value: torch.Tensor = model(torch.linspace(-1, 1, samples * 16).view(samples, 16)).square().mean()
    return value


def autocast(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model)


def microbatches(model: nn.Module) -> torch.Tensor:
    return loss(model) + loss(model, 32)


KEEPS = {
    "a module's": (f"{ADDMM}#0",),
    "the second call's of a module": (f"{ADDMM}#2",),
    "a module's within another": (f"{ADDMM}#3", f"{TANH}#1"),
    "the region's own": (f"{GELU}#0", f"{ADD}#0"),
    "one that draws": ("aten.native_dropout.default#0", "aten.mul.Tensor#0"),
    "all": (*(f"{ADDMM}#{i}" for i in range(6)), f"{GELU}#0", f"{ADD}#0", f"{TANH}#0", f"{TANH}#1"),
    "one that is not there": (f"{ADDMM}#0", f"{ADDMM}#99"),
}


def regions(keep: tuple[str, ...], kind: str) -> list[Region]:
    if kind == "a run":
        return [Region(("1", "2"), keep)]
    return [Region((name,), keep, kind == "offloaded") for name in ("1", "2")]


@pytest.mark.parametrize("kind", ["modules", "a run", "offloaded"])
@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_later_passes_are_as_the_first_one(keep: tuple[str, ...], kind: str) -> None:
    """The first pass learns; the later ones compute, run and hold the same, and none is a plain pass."""

    def large(model: nn.Module) -> torch.Tensor:
        return loss(model, 1024)

    for forward in (large, autocast, microbatches):
        assert not differing(results(model(), forward, regions(keep, kind)), results(model(), forward))
    chosen = model()
    counts, peaks = [], []
    with checkpointed(chosen, regions(keep, kind)):
        for _ in range(3):
            torch.manual_seed(0)
            with Executed() as mode:
                large(chosen).backward()
            chosen.zero_grad()
            counts.append(mode.counts)
            with allocated() as meter:
                large(chosen).backward()
            chosen.zero_grad()
            peaks.append(meter.peak_bytes)
    assert counts[0] == counts[1] == counts[2]
    assert peaks[0] == peaks[1] == peaks[2]
    with Executed() as plain:
        large(chosen).backward()
    assert plain.counts != counts[0]
    assert not any("forward" in vars(module) for module in chosen.modules())


def is_on(keep: tuple[str, ...], steps: int = 2) -> tuple[list[bool], list[bool]]:
    """Return whether the mode was on in the outer watched module of a block and in the inner one, in the last step."""
    chosen = model()
    outer: Any = chosen[1].inner
    inner = outer.inside[1]
    with checkpointed(chosen, regions(keep, "modules")):
        for _ in range(steps):
            outer.seen.clear()
            inner.seen.clear()
            loss(chosen).backward()
    return outer.seen, inner.seen


def test_the_mode_is_on_in_the_modules_that_make_what_is_kept_in_both_passes() -> None:
    off, on = [False] * 4, [True] * 4
    assert is_on((f"{ADDMM}#0",), 1) == (on, on)  # the first pass learns, and is recomputed under the same modes
    assert is_on((f"{ADDMM}#0",)) == (off, off)
    assert is_on((f"{TANH}#0",)) == (on, off)  # it comes back on after the modules inside
    assert is_on((f"{TANH}#1",)) == (off, on)
    assert is_on((f"{GELU}#0",)) == (off, off)  # the region's own operator
    assert is_on(KEEPS["one that is not there"]) == (on, on)


class Changing(nn.Module):
    """Calls what is inside as often as it is told to, outside of its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.times, self.is_swapped = nn.Linear(16, 16), nn.Linear(16, 16), 1, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.g, self.f) if self.is_swapped else (self.f, self.g)
        for _ in range(self.times):
            x = first(x).tanh()
        y: torch.Tensor = second(x).sin() + first(x)
        return y


@pytest.mark.parametrize("keep", [(f"{ADDMM}#0",), (f"{ADDMM}#1", f"{TANH}#0"), (f"{ADDMM}#2",)])
def test_a_program_that_changes_between_passes_has_right_gradients(keep: tuple[str, ...]) -> None:
    def gradients(regions: list[Region]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        chosen = nn.Sequential(nn.Linear(16, 16), Changing(), nn.Linear(16, 3))
        found = []
        with checkpointed(chosen, regions), checking():
            for times, is_swapped in ((1, False), (3, False), (0, True), (2, True), (1, False)):
                chosen[1].times, chosen[1].is_swapped = times, is_swapped
                found += torch.autograd.grad(loss(chosen), list(chosen.parameters()))
        return found

    assert all(map(torch.equal, gradients([Region(("1",), keep)]), gradients([])))


def test_what_makes_kept_outputs_is_known_from_the_trace() -> None:
    """The trace of a step that keeps outputs names the modules that a step with data learns."""
    for keep in (("aten.addmm.default#0", "aten.addmm.default#3"), ("aten.add.Tensor#0", "aten.gelu.default#0")):
        chosen = [Region((name,), keep) for name in ("blocks.0", "blocks.1")]
        trace = captured(BUILDERS["transformer"](), regions=chosen)
        workload = BUILDERS["transformer"]()
        with checkpointed(workload.model, chosen):
            workload.loss_fn(workload.model, workload.batch)
            passes = [workload.model.get_submodule(region.modules[0]).__dict__["forward"].passes for region in chosen]
            learned = sorted(fqn for one in passes for fqn in one.occurrences.learned)
        assert makers_of_kept(trace, chosen) == learned and learned


def test_a_copy_learns_anew() -> None:
    chosen = model()
    with checkpointed(chosen, regions((f"{ADDMM}#0",), "modules")):
        loss(chosen).backward()
        copied = copy.deepcopy(chosen)
        assert copied[1].__dict__["forward"].passes.occurrences.learned is None
        assert chosen[1].__dict__["forward"].passes.occurrences.learned
        for one in (chosen, copied):
            one.zero_grad()
            torch.manual_seed(0)
            loss(one).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(chosen.parameters(), copied.parameters(), strict=True))
    assert copied[1].inner.__dict__["forward"].module is copied[1].inner


class UsersMode(nn.Module):
    """Runs what is inside under a dispatch mode of the user's, and without any."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        with Executed():
            y = self.f(y).tanh()
        with disable_current_modes():
            y = self.f(y)
        out: torch.Tensor = checkpoint(self.f, y.tanh(), use_reentrant=False)
        return out


@pytest.mark.parametrize("keep", [(f"{TANH}#0",), (f"{TANH}#1", f"{ADDMM}#1"), (f"{TANH}#2", f"{ADDMM}#0")])
def test_modes_and_checkpoints_of_the_users_are_left_alone(keep: tuple[str, ...]) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), UsersMode(), nn.Linear(16, 3))

    assert not differing(results(made(), loss, [Region(("1",), keep)]), results(made(), loss))
    assert current_mode_stack() == []


def test_an_exception_leaves_no_mode() -> None:
    chosen = model()
    with checkpointed(chosen, regions((f"{TANH}#0", f"{TANH}#1"), "modules")):
        loss(chosen).backward()
        handle = chosen[1].inner.inside[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss(chosen)
        handle.remove()
        assert current_mode_stack() == []
        assert not differing(results(model(), loss, regions((f"{TANH}#0",), "modules")), results(model(), loss))


@pytest.mark.ci  # Dynamo
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("how", ["compile()", "torch.compile", "a function"])
def test_compiled_modules_within_stay_whole(how: str) -> None:
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    class Function(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside
            self.call = torch.compile(lambda x: self.inside(x).tanh(), backend=backend)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.call(x)
            return out

    def made() -> nn.Sequential:
        torch._dynamo.reset()
        torch.manual_seed(0)
        inside: Any = Changing()
        if how == "compile()":
            inside.compile(backend=backend)
        else:
            inside = Function(inside) if how == "a function" else torch.compile(inside, backend=backend)
        return nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), inside), nn.Linear(16, 3))

    plain = results(made(), loss)
    count = len(graphs)
    assert not differing(results(made(), loss, [Region(("1",), (f"{ADDMM}#0",))]), plain)
    assert len(graphs) == 2 * count > 0


def test_modules_with_a_forward_of_their_own_count_as_the_module_around_them() -> None:
    chosen = model()
    own = chosen[1].up.forward
    mine = chosen[1].up.forward = lambda x: own(x)
    plain = results(chosen, loss)
    with checkpointed(chosen, regions((f"{ADDMM}#0",), "modules")):
        assert chosen[1].up.__dict__["forward"] is mine and "forward" in chosen[1].down.__dict__
        loss(chosen)
        assert list(chosen[1].__dict__["forward"].passes.occurrences.learned) == ["1"]
    assert not differing(results(chosen, loss, regions((f"{ADDMM}#0",), "modules")), plain)
