"""Runs of modules as one region, regions in regions and offloaded ones: the same numbers, nothing left behind."""

from __future__ import annotations

import copy
import functools
import random
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memfit.errors import RecomputationError
from memfit.hardware import allocated
from memfit.ir import Region
from memfit.recomputation import checkpointed
from tests.recomputation.steps import (
    Chain,
    Executed,
    blocks,
    chain,
    differing,
    executed,
    loss,
    results,
    without_collector,
)

ADDMM, GELU, DROPOUT = "aten.addmm.default", "aten.gelu.default", "aten.bernoulli_.float"


def again(regions: list[Region], model: nn.Module | None = None) -> dict[str, int]:
    """Return how often operators run beyond a plain step."""
    model = model or chain()
    plain, found = executed(model, loss), executed(model, loss, regions)
    return {name: found[name] - plain[name] for name in (ADDMM, GELU, DROPOUT)}


def offloaded(*indices: int, keep: tuple[str, ...] = (), prefetch: str = "") -> Region:
    return Region(tuple(f"blocks.{i}" for i in indices), keep, True, prefetch)


NESTED = {
    "a run": [blocks(0, 1, 2), blocks(3, 4)],
    "a run that keeps operators": [blocks(0, 1, 2, keep=(f"{ADDMM}#1", f"{ADDMM}#4", f"{GELU}#2"))],
    "modules in a run": [blocks(0, 1, 2), Region(("blocks.0.f",)), Region(("blocks.2.f.2",), (f"{ADDMM}#0",))],
    "runs in a run": [
        blocks(0, 1, 2),
        Region(("blocks.0.f.0", "blocks.0.f.1")),
        Region(("blocks.2.f.2", "blocks.2.f.3")),
    ],
    "a run in the model": [Region(("",)), blocks(0, 1, 2), blocks(4)],
    "three deep": [Region(("",)), blocks(0, 1, 2), Region(("blocks.1.f",)), Region(("blocks.2.f.0", "blocks.2.f.1"))],
    "four deep": [Region(("",)), blocks(0, 1, 2), Region(("blocks.1.f",)), Region(("blocks.1.f.0", "blocks.1.f.1"))],
}
OFFLOADED = {
    "its argument": [offloaded(1)],
    "with prefetch": [offloaded(i, prefetch=f"blocks.{i + 1}" if i < 4 else "head") for i in (1, 2, 3, 4)],
    "what it keeps": [offloaded(1, keep=(f"{ADDMM}#0", f"{GELU}#0"), prefetch="blocks.3"), offloaded(2)],
    "a run": [offloaded(1, 2, keep=(f"{ADDMM}#2",), prefetch="blocks.3")],
    "beside other regions": [Region(("blocks.1",)), offloaded(2, prefetch="blocks.3"), Region(("blocks.3",))],
    "the first, with nothing to move": [offloaded(0)],
    "around a region": [offloaded(1, prefetch="blocks.2"), Region(("blocks.1.f",)), offloaded(2, prefetch="blocks.3")],
    "a run around its modules": [offloaded(1, 2, 3, prefetch="blocks.4"), *(Region((f"blocks.{i}",)) for i in (1, 2))],
    "around runs, copied back late": [
        offloaded(2),
        Region(("blocks.2.f.0", "blocks.2.f.1")),
        Region(("blocks.2.f.2",)),
    ],
}
ALL = NESTED | {f"offloaded: {name}": regions for name, regions in OFFLOADED.items()}
loss_of_many = functools.partial(loss, samples=1024)  # whose inputs of blocks are the least that is moved


@pytest.mark.parametrize("regions", ALL.values(), ids=ALL)
def test_training_is_bitwise_the_same(regions: list[Region]) -> None:
    assert not differing(results(chain(), loss_of_many, regions), results(chain(), loss_of_many))


@pytest.mark.parametrize("regions", ALL.values(), ids=ALL)
def test_nothing_is_left_behind_without_the_collector(regions: list[Region]) -> None:
    """Neither after steps, nor after forward passes whose graph is dropped."""
    model = chain()

    def some_steps() -> None:
        for _ in range(3):
            loss_of_many(model).backward()
            loss_of_many(model)
            model.zero_grad()

    with checkpointed(model, regions):
        some_steps()
        with without_collector(), allocated() as meter:
            some_steps()
    assert meter.net_bytes == 0 < meter.peak_bytes


def test_a_run_recomputes_its_modules_together_up_to_the_last_saved_tensor() -> None:
    assert again([blocks(0, 1, 2)]) == {ADDMM: 6, GELU: 3, DROPOUT: 3}
    assert again([Region(("blocks.0.f.0", "blocks.0.f.1", "blocks.0.f.2"))]) == {ADDMM: 1, GELU: 1, DROPOUT: 0}


def test_a_run_counts_the_operators_that_it_keeps_through_all_its_modules() -> None:
    assert again([blocks(0, 1, 2, keep=(f"{ADDMM}#3",))]) == {ADDMM: 5, GELU: 3, DROPOUT: 3}
    assert again([blocks(0, 1, 2, keep=(f"{ADDMM}#6",))]) == {ADDMM: 6, GELU: 3, DROPOUT: 3}


def test_a_region_within_is_checkpointed_again_while_the_outer_one_is_recomputed() -> None:
    within = [Region((f"blocks.{i}.f",)) for i in range(3)]
    # The run saves nothing after the input of its last region, whose own forward pass is not run for it.
    assert again([blocks(0, 1, 2), *within]) == {ADDMM: 4 + 6, GELU: 2 + 3, DROPOUT: 2 + 3}
    assert again([blocks(0, 1, 2), *within[:2]]) == {ADDMM: 6 + 4, GELU: 3 + 2, DROPOUT: 3 + 2}
    both = again([Region(("",)), blocks(0, 1, 2), blocks(3, 4)])
    assert both == {ADDMM: 10 + 6 + 4, GELU: 5 + 3 + 2, DROPOUT: 5 + 3 + 2}  # the head's input is saved by the model


def test_nested_modules_run_the_operators_that_torch_runs() -> None:
    """The same regions by torch.utils.checkpoint, written into the model."""

    class Nested(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outer = torch.utils.checkpoint.checkpoint(self.outer, x, use_reentrant=False)
            assert isinstance(outer, torch.Tensor)
            return self.inner.head(outer)

        def outer(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.inner.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    class Whole(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.Sequential(*self.blocks)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.all(x))

    torch.manual_seed(0)
    model = Whole()
    ours = executed(model, loss, [Region(("all",)), *(Region((f"blocks.{i}",)) for i in range(5))])
    theirs = executed(Nested(model), loss)
    assert {n: ours[n] for n in (ADDMM, GELU, DROPOUT)} == {n: theirs[n] for n in (ADDMM, GELU, DROPOUT)}


def peak_bytes(regions: list[Region]) -> int:
    model = chain(blocks=8)

    def step() -> None:
        with checkpointed(model, regions):
            loss(model, 1024).backward()
            model.zero_grad()

    step()
    with allocated() as meter:
        step()
    return meter.peak_bytes


def test_no_tensor_between_the_modules_of_a_run_stays_alive() -> None:
    boundary = 1024 * 16 * 4

    def kept_after_forward(regions: list[Region]) -> int:
        model = chain(blocks=8)
        with checkpointed(model, regions):
            loss(model, 1024)
            with allocated() as meter:
                value = loss(model, 1024)
            del value
        return meter.net_bytes

    together, apart = (kept_after_forward(r) for r in ([blocks(*range(8))], [blocks(i) for i in range(8)]))
    assert 7 * boundary <= apart - together <= 7 * (boundary + 5056)
    # A run of everything recomputes everything at once.
    assert peak_bytes([blocks(i) for i in range(8)]) < peak_bytes([blocks(*range(8))])


def test_regions_within_lower_the_peak_of_an_outer_one() -> None:
    outer = [blocks(*range(8))]
    assert peak_bytes([*outer, *(Region((f"blocks.{i}.f",)) for i in range(8))]) < 0.8 * peak_bytes(outer)


class Wild(Chain):
    """Calls its blocks in an order that changes, changes tensors between calls, and skips and repeats some."""

    def __init__(self, order: list[int], between: str = "nothing") -> None:
        super().__init__()
        self.order, self.between = order, between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
            if self.between == "new":
                x = x * 0.5
            elif self.between == "in place":
                x.mul_(0.5)
            elif self.between == "view in place":
                x[:, :2].mul_(0.5)
            elif self.between == "draws" and torch.rand(()) < 0.5:
                torch.rand(3)
            elif self.between == "no gradient":
                x = x.detach()
            elif self.between == "no_grad":
                with torch.no_grad():
                    self.blocks[index](x)
        return self.head(x)


ORDERS = [[0, 1, 2, 3, 4], [0, 2, 4], [1, 0, 2], [0, 0, 1, 1], [4, 3, 2, 1, 0], [1, 2], [0, 1, 2, 0, 1, 2], [3, 4]]
BETWEEN = ["nothing", "new", "in place", "view in place", "draws", "no gradient", "no_grad"]


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_gradients_are_right_whatever_the_parent_does(order: list[int], between: str) -> None:
    torch.manual_seed(0)
    model = Wild(order, between)
    plain = results(model, loss, steps=2)
    for regions in ([blocks(0, 1, 2)], [blocks(1, 2, 3, 4, keep=(f"{ADDMM}#1",))], [Region(("",)), blocks(0, 1, 2)]):
        assert not differing(results(model, loss, regions, steps=2), plain)


def test_layerdrop_keeps_the_passes_together() -> None:
    torch.manual_seed(0)
    model = Wild([0, 2], "draws")
    plain, found = executed(model, loss), executed(model, loss, [blocks(0, 1, 2)])
    assert found[ADDMM] - plain[ADDMM] == 4
    assert not differing(results(model, loss, [blocks(0, 1, 2)], steps=8), results(model, loss, steps=8))


class Branches(nn.Module):
    """Modules with keyword, nested and changing arguments, called one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (Taking() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.full((16,), 0.5)
        mask = x > 0
        first = self.one(x, mask=mask, pair=(x, {"z": scale}))
        second = self.two(first["y"], mask=mask, pair=(first["y"], {"z": first["w"]}), flag=True)
        third = self.three(second["y"], mask=first["same"], pair=[second["w"], {"z": x}])
        out = third["y"] + first["w"] + second["y"]
        assert isinstance(out, torch.Tensor)
        return out


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, *, mask: Any, pair: Any, flag: bool = False) -> dict[str, Any]:
        same = x is pair[0]
        y = self.f(x).tanh().masked_fill(mask, 0.1) * pair[1]["z"]
        y = y + pair[0].sin() if same else y * pair[0].cos()
        return {"y": y, "w": y.exp(), "same": mask, "flag": flag}


def test_arguments_of_any_kind_are_wired() -> None:
    torch.manual_seed(0)
    model = Branches()
    region = [Region(("one", "two", "three"))]
    for regions in (region, [Region(("one",)), Region(("three",))]):
        assert not differing(results(model, loss, regions), results(model, loss))
    plain, found = executed(model, loss), executed(model, loss, region)
    assert found["aten.exp.default"] - plain["aten.exp.default"] == 2  # the last one's saves nothing that is needed


def gradients_of_part(model: nn.Module, retain: bool) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 1024 * 16).view(1024, 16).requires_grad_()
    torch.manual_seed(3)
    value = model(x).square().mean()
    (one,) = torch.autograd.grad(value, model.blocks[4].f[0].weight, retain_graph=True)
    two = torch.autograd.grad(value, [x, *model.parameters()], retain_graph=retain)
    three = torch.autograd.grad(value, [x, *model.parameters()]) if retain else ()
    return [one, *two, *three]


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("name", [n for n in ALL if n not in ("a run that keeps operators", "modules in a run")])
def test_several_backward_passes_over_one_graph(name: str, retain: bool) -> None:
    model = chain()
    plain = gradients_of_part(model, retain)
    with checkpointed(model, ALL[name]):
        found = gradients_of_part(model, retain)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


class Inner(nn.Module):
    """Takes a gradient in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x).tanh()).sin()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + g.square()


@pytest.mark.parametrize("regions", [[Region(("0", "1"))], [Region(("0", "1")), Region(("1.a",))], [Region(("1",))]])
def test_backward_passes_within_the_forward_pass(regions: list[Region]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Inner(), nn.Linear(16, 16))
    assert not differing(results(model, loss, regions), results(model, loss))


def test_an_exception_in_the_forward_pass_leaves_no_trace() -> None:
    model = chain()
    plain = results(chain(), loss)

    def fail(*args: Any) -> None:
        raise ValueError("broken")

    with checkpointed(model, [blocks(0, 1, 2), Region(("blocks.1.f",))]):
        handle = model.blocks[1].f.register_forward_hook(fail)
        with without_collector(), allocated() as meter:
            for _ in range(3):
                with pytest.raises(ValueError, match="broken"):
                    loss(model)
        assert meter.net_bytes == 0
        handle.remove()
    assert not differing(results(model, loss, [blocks(0, 1, 2)]), plain)


def test_an_exception_in_the_recomputation_sets_everything_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 16))
    calls: list[int] = []

    def fail_once(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    handle = model[2].register_forward_pre_hook(fail_once)
    region = [Region(("0", "1", "2"))]
    with checkpointed(nn.ModuleDict({"m": model}), [Region(("m",))]):
        value = loss(model)
        before, statistics = torch.get_rng_state(), model[1]._buffers["running_mean"]
        with pytest.raises(KeyboardInterrupt):
            value.backward()
        assert torch.equal(torch.get_rng_state(), before) and model[1]._buffers["running_mean"] is statistics
    handle.remove()
    assert not differing(results(model, loss, region), results(model, loss))


@pytest.mark.parametrize("regions", [[blocks(0, 1, 2)], [blocks(0)], OFFLOADED["with prefetch"]])
def test_a_copy_of_a_model_has_passes_of_its_own(regions: list[Region]) -> None:
    model = chain()
    with checkpointed(model, regions):
        value = model.blocks[0](torch.ones(2, 16))  # a pass is open
        copied = copy.deepcopy(model)
        del value
        found = []
        for each in (copied, model):
            torch.manual_seed(1)
            found.append(loss_of_many(each))
        assert torch.equal(*found)
        found[0].backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in copied.parameters())


def test_autocast_that_changes_between_calls_begins_another_pass() -> None:
    class Mixed(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            with torch.autocast("cpu", torch.bfloat16):
                x = self.blocks[1](x)
                x = self.blocks[2](x)
            return self.head(self.blocks[3](x))

    torch.manual_seed(0)
    model = Mixed()
    assert not differing(results(model, loss, [blocks(0, 1, 2, 3)]), results(model, loss))


def random_regions(rng: random.Random, prefix: str, deep: int) -> list[Region]:
    """Return regions over the children of a residual chain, in one another to some depth."""
    names = {"": [f"blocks.{i}" for i in range(5)]}.get(prefix) or [f"{prefix}.f.{i}" for i in range(4)]
    found: list[Region] = []
    start = 0
    while start < len(names):
        size = rng.randint(1, 3)
        run = tuple(names[start : start + size])
        start += size
        within = [r for name in run for r in random_regions(rng, name, deep - 1)] if deep > 1 else []
        if rng.random() < 0.7:
            keep = tuple(f"{rng.choice((ADDMM, GELU))}#{rng.randint(0, 4)}" for _ in range(rng.randint(0, 2)))
            found.append(Region(run, () if within else keep))
        found += within
    rng.shuffle(found)
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2]))
def test_any_runs_in_any_nest_change_no_bit(seed: int, deep: int) -> None:
    rng = random.Random(seed)
    regions = random_regions(rng, "", deep)
    if rng.random() < 0.3:
        regions.append(Region(("",)))
        regions = [Region(r.modules) if any(b.startswith("blocks") for b in r.modules) else r for r in regions]
    assert not differing(results(chain(), loss, regions, steps=1), results(chain(), loss, steps=1))


def test_what_a_region_within_another_keeps_is_dropped_and_made_again_with_it() -> None:
    """It counts as saved by the outer one, whose recomputation runs it, so that the inner one's does not."""
    outer, part = blocks(0, 1, 2), "blocks.1.f"
    assert again([outer, Region((part,))])[ADDMM] == 6 + 2
    assert again([outer, Region((part,), (f"{ADDMM}#0",))])[ADDMM] == 6 + 1
    # The run's recomputation goes on within its last region, up to what that keeps.
    last = [Region(("blocks.0.f",)), Region((part,)), Region(("blocks.2.f",), (f"{ADDMM}#0",))]
    assert again([outer, *last])[ADDMM] == (2 + 2 + 1) + (2 + 2 + 1)

    def kept_bytes(keep: tuple[str, ...]) -> int:
        model = chain()
        with checkpointed(model, [outer, Region((part,), keep)]):
            loss(model, 1024)
            with allocated() as meter:
                value = loss(model, 1024)
            del value
        return meter.net_bytes

    assert kept_bytes((f"{ADDMM}#0",)) == kept_bytes(())


def test_kept_outputs_that_were_changed_or_taken_are_made_again() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).relu_().sin())

    torch.manual_seed(0)
    model = nn.Sequential(InPlace(), nn.Linear(16, 3))
    region = [Region(("0",), (f"{ADDMM}#0", f"{ADDMM}#1", "aten.relu_.default#0"))]
    assert not differing(results(model, loss, region), results(model, loss))
    with checkpointed(model, region):
        value = loss(model)
        first = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(value, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_graphs_that_reach_a_frame_through_the_parents_tensors_are_let_go_of() -> None:
    """An argument that the parent computed from an earlier output holds the graph of the frame that keeps it."""
    torch.manual_seed(0)
    model = Wild([0, 1, 2, 3], "new")
    with checkpointed(model, [blocks(0, 1, 2, 3)]):
        loss(model)
        with without_collector(), allocated() as meter:
            for _ in range(3):
                loss(model)
    assert meter.net_bytes == 0


# Offload

OUT, IN, WAIT = "memfit.copy_out.default", "memfit.copy_in.default", "memfit.wait.default"


def test_each_tensor_goes_out_and_comes_back_once() -> None:
    found = executed(chain(), loss_of_many, [offloaded(1, keep=(f"{ADDMM}#0",)), offloaded(2)])
    assert (found[OUT], found[IN], found[WAIT]) == (3, 3, 6)
    assert executed(chain(), loss_of_many, [offloaded(0)])[OUT] == 0  # the input has no gradient
    assert executed(chain(), lambda model: loss(model, 1023), [offloaded(1)])[OUT] == 0  # too small


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
    model = chain(4)
    with checkpointed(model, [offloaded(1, prefetch=prefetch)]):
        value = loss_of_many(model)
        with Order() as mode:
            value.backward()
    assert mode.order[: mode.order.index(IN)].count("aten.mm.default") == products


def test_what_waits_is_not_on_the_device_and_is_let_go_of() -> None:
    model = chain()
    seen: list[weakref.ref[torch.Tensor]] = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    with without_collector(), checkpointed(model, [offloaded(0), offloaded(1)]):
        value = loss_of_many(model)
        assert [one() for one in seen] == [None]  # the host has it
        value.backward()


def test_an_argument_that_is_changed_in_place_while_it_is_sent_is_named() -> None:
    model = chain()
    model.blocks[1].f.register_forward_pre_hook(lambda _, args: (args[0].mul_(2.0),))
    with checkpointed(model, [offloaded(1)]), pytest.raises(RecomputationError, match="in place before its copy"):
        loss_of_many(model).backward()


def test_evaluation_moves_nothing() -> None:
    model = chain()
    with checkpointed(model, OFFLOADED["with prefetch"]), torch.no_grad(), Executed() as mode:
        loss_of_many(model)
    assert not mode.counts[OUT]
