"""Regions whose activations wait in host memory: the same numbers, and nothing left behind."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import RecomputationError
from memfit.ir import Region
from memfit.recomputation import checkpointed
from tests.recomputation import steps
from tests.recomputation.steps import Chain, Executed, differing, executed, results

ADDMM, GELU = "aten.addmm.default", "aten.gelu.default"
OUT, IN, WAIT = "memfit.copy_out.default", "memfit.copy_in.default", "memfit.wait.default"
DIM = 128  # samples × DIM floats are 64 KiB, the least that is moved


def chain() -> Chain:
    return steps.chain(4, DIM)


def loss(model: nn.Module, samples: int = 128) -> torch.Tensor:
    return steps.loss(model, samples, DIM)


def offloaded(*indices: int, keep: tuple[str, ...] = (), prefetch: str = "") -> Region:
    return Region(tuple(f"blocks.{i}" for i in indices), keep, True, prefetch)


CASES = {
    "its argument": [offloaded(1)],
    "with prefetch": [offloaded(i, prefetch=f"blocks.{i + 1}" if i < 3 else "head") for i in (1, 2, 3)],
    "what it keeps": [offloaded(1, keep=(f"{ADDMM}#0", f"{GELU}#0"), prefetch="blocks.3")],
    "a run": [offloaded(1, 2, keep=(f"{ADDMM}#2",), prefetch="blocks.3")],
    "beside other regions": [Region(("blocks.1",)), offloaded(2, prefetch="blocks.3"), Region(("blocks.3",))],
    "the first, with nothing to move": [offloaded(0)],
}


@pytest.mark.parametrize("regions", CASES.values(), ids=CASES)
def test_training_is_bitwise_the_same(regions: list[Region]) -> None:
    model = chain()
    assert not differing(results(model, loss), results(model, loss, regions))


def test_each_tensor_goes_out_and_comes_back_once() -> None:
    found = executed(chain(), loss, [offloaded(1, keep=(f"{ADDMM}#0",)), offloaded(2)])
    assert (found[OUT], found[IN], found[WAIT]) == (3, 3, 6)
    assert executed(chain(), loss, [offloaded(0)])[OUT] == 0  # the input has no gradient
    assert executed(chain(), lambda model: loss(model, 127), [offloaded(1)])[OUT] == 0  # too small


class Order(Executed):
    """Notes the order of copies back, waits and matrix products in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.order.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize(("prefetch", "products"), [("", 2 + 4 + 4), ("blocks.3", 2), ("blocks.2", 2 + 4)])
def test_copying_back_begins_as_the_backward_pass_enters_the_module_named(prefetch: str, products: int) -> None:
    """Before block 1 come, in the backward pass, the head with two products, then blocks 3 and 2 with four each."""
    model = chain()
    with checkpointed(model, [offloaded(1, prefetch=prefetch)]):
        value = loss(model)
        with Order() as mode:
            value.backward()
    assert mode.order[: mode.order.index(IN)].count("aten.mm.default") == products


def test_what_waits_is_not_on_the_device_and_is_let_go_of() -> None:
    model = chain()
    seen: list[weakref.ref[torch.Tensor]] = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    with steps.without_collector(), checkpointed(model, [offloaded(0), offloaded(1)]):
        value = loss(model)
        assert [one() for one in seen] == [None]  # the host has it
        value.backward()


def test_several_backward_passes_over_one_graph() -> None:
    model = chain()
    found = []
    for regions in ([], [*CASES["what it keeps"], offloaded(2)]):
        torch.manual_seed(1)
        with checkpointed(model, regions):
            value = loss(model)
            found += [torch.autograd.grad(value, list(model.parameters()), retain_graph=True) for _ in range(2)]
    for gradients in zip(*found, strict=True):
        assert all(torch.equal(gradients[0], other) for other in gradients)


class ChangesItsArgument(nn.Module):
    """Changes its argument in place while the argument is sent to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mul_(2.0))


def test_an_argument_that_is_changed_in_place_is_named() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), ChangesItsArgument(), nn.Linear(DIM, 3))
    with (
        checkpointed(model, [Region(("1",), offload=True)]),
        pytest.raises(RecomputationError, match="in place before its copy"),
    ):
        loss(model).backward()


def test_a_copy_of_a_model_prefetches_for_itself() -> None:
    model = chain()
    with checkpointed(model, CASES["with prefetch"]):
        other = copy.deepcopy(model)
        found = []
        for one in (model, other):
            torch.manual_seed(1)
            loss(one).backward()
            found.append([p.grad for p in one.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not any(m._forward_hooks for m in model.modules())


def test_evaluation_moves_nothing() -> None:
    model = chain()
    with checkpointed(model, CASES["with prefetch"]), torch.no_grad(), Executed() as mode:
        loss(model)
    assert not mode.counts[OUT]
