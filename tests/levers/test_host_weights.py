"""Weights in host memory: the plain step's bits, the predicted bytes, and the user's weights all the while."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memfit._torch import TorchDispatchMode
from memfit.capture import measure_peak_bytes, real_copy
from memfit.errors import PlanError, PlanMismatchError
from memfit.hardware import find_device
from memfit.ir import FrozenWeights, HostWeights, Levers, OpCost, Region, Sharding, Tiles, simulate
from memfit.levers import LEVERS, NotOffered, applied
from memfit.planner import capture_levers, costs_of, predict
from memfit.workload import Workload
from tests.frozen_blocks import COUNT, EACH, HELD, IN_HOST, MATRIX_BYTES, NAMES, PLAIN, made


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def trained(levers: Levers, workload: Workload, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    copied = real_copy(workload)
    torch.manual_seed(1)
    with applied(levers, copied) as step:
        losses = [step(copied.batch).loss for _ in range(steps)]
        inside = state_of(copied.model)
    after = state_of(copied.model)
    assert all(torch.equal(inside[name], value) for name, value in after.items())
    return losses, after


def same(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][name], value) for name, value in other[1].items())


def peaks(levers: Levers) -> tuple[int, int]:
    """Return the peak that is predicted, and the one that is measured."""
    cpu, copied = find_device("cpu"), real_copy(made())
    trace = capture_levers(made(), levers, cpu)
    predicted, _ = predict(trace, costs_of([trace], cpu), cpu)
    with applied(levers, copied) as step:
        step(copied.batch)
        return predicted.peak_bytes, measure_peak_bytes(step, copied.batch)


CASES: dict[str, dict[str, Any]] = {
    "alone": {},
    "a region each": {"regions": EACH},
    "regions inside": {"regions": (Region(("blocks.1.mlp",)), Region(("blocks.2.mlp.1",), keep=()))},
    "a run": {"regions": (Region(NAMES[:3]),)},
    "a run around regions": {"regions": (Region(NAMES[1:]), *EACH[1:])},
    "around all": {"regions": (Region(("",)),)},
    "kept outputs": {"regions": (Region(("blocks.1",), keep=("aten.addmm.default#0",)), EACH[2])},
    "microbatches": {"microbatch_size": 2, "regions": EACH[:2]},
    "tiles": {"tiles": Tiles(modules=tuple(f"{name}.mlp" for name in NAMES), tokens=64), "regions": EACH},
    "bf16-mixed": {"precision": "bf16-mixed", "regions": EACH[:2]},
    "lean": {"lean": ("*",)},
    "updates": {"update": "in-backward", "optimizer_state": "offloaded"},
    "offload": {"regions": tuple(Region((NAMES[i],), offload=True, prefetch=NAMES[i + 1]) for i in range(3))},
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_without_it_and_the_peak_is_the_predicted_one(case: str) -> None:
    plain = replace(PLAIN, **CASES[case])
    expected = trained(plain, made())
    assert same(trained(replace(plain, host_weights=HELD), made()), expected)
    assert not same(trained(replace(plain, host_weights=HELD), made(), steps=2), expected)
    predicted, measured = peaks(replace(plain, host_weights=HELD))
    assert predicted == measured


@pytest.mark.parametrize("quantizer", ["nf4", "int8"])
def test_codes_of_weights_in_fewer_bits_wait_in_the_host(quantizer: Any) -> None:
    pytest.importorskip("bitsandbytes")
    quantized = replace(PLAIN, frozen_weights=FrozenWeights(quantizer=quantizer), regions=EACH[:2])
    few = replace(quantized, host_weights=replace(HELD, modules=NAMES[1:]))
    if quantizer == "nf4":  # codes of less than 64 KiB stay on the device
        with pytest.raises(PlanError, match="no weight that can wait"), applied(few, real_copy(made())):
            pass
        return
    assert same(trained(few, made()), trained(quantized, made()))
    predicted, measured = peaks(few)
    assert predicted == measured


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_models_own_checkpointing_finds_the_weights(reentrant: bool) -> None:
    def call(block: nn.Module, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        out: Tensor = checkpoint(block, x, use_reentrant=reentrant)
        return out

    def model() -> Workload:
        return made(call=call)

    assert same(trained(IN_HOST, model()), trained(PLAIN, model()))


@pytest.mark.parametrize(
    "call",
    [
        lambda block, x: block(x) + block(2 * x),  # twice, before its backward pass
        lambda block, x: block(x.relu_()),  # in place
        lambda block, x: block(x).relu_(),
        lambda block, x: block(x) + 0 * block(x).detach(),  # of one, there is no backward pass
    ],
)
def test_blocks_may_be_called_in_any_way(call: Callable[..., Tensor]) -> None:
    assert same(trained(IN_HOST, made(call=call)), trained(PLAIN, made(call=call)))


class Copies(TorchDispatchMode):
    """The copies to the device, each by the block whose tensor it is of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.owners = {p.data_ptr(): name.split(".")[1] for name, p in model.named_parameters() if "mlp" in name}
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.memfit.copy_in.default:
            self.found.append(self.owners[args[1].data_ptr()])
        return func(*args, **(kwargs or {}))


def on_device(model: nn.Module) -> int:
    """Return the bytes of weights that blocks have on the device now."""
    blocks = [vars(module)["_memfit_block"] for module in model.modules() if "_memfit_block" in vars(module)]
    return sum(weight._twin()[0].untyped_storage().nbytes() for block in blocks for weight in block.weights)


@pytest.mark.parametrize(
    ("first", "regions", "expected"),
    [
        (0, (), "0123 3210"),
        (0, EACH, "0123 3210"),  # what runs again finds them there
        (2, (), "0123 32"),  # below, nothing has a gradient
        (0, (Region(NAMES),), "0123 32 01 10"),  # a run runs again from its first; 1 is wanted once more
    ],
)
def test_each_block_comes_once_in_each_pass_the_next_beside_it(
    first: int, regions: tuple[Region, ...], expected: str
) -> None:
    copied = real_copy(made(first=first))
    with applied(replace(IN_HOST, regions=regions), copied) as step:
        step(copied.batch)
        assert on_device(copied.model) == 0
        with Copies(copied.model) as copies:
            step(copied.batch)
        assert on_device(copied.model) == 0
    assert "".join(copies.found) == "".join(2 * name for name in expected.replace(" ", ""))  # of two matrices each


def test_no_more_than_two_blocks_are_on_the_device() -> None:
    copied, most = real_copy(made()), [0]

    class Most(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            most[0] = max(most[0], on_device(copied.model))
            return func(*args, **(kwargs or {}))

    with applied(replace(IN_HOST, regions=EACH[1:3]), copied) as step:
        step(copied.batch)
        with Most():
            step(copied.batch)
    assert most[0] == 4 * MATRIX_BYTES


def test_the_users_code_sees_and_sets_the_weights() -> None:
    copied = real_copy(made())
    weights = dict(copied.model.named_parameters())
    with applied(IN_HOST, copied) as step:
        step(copied.batch)
        assert all(p is weights[name] for name, p in copied.model.named_parameters())
        twin = copy.deepcopy(copied.model)
        assert torch.equal(twin(copied.batch), copied.model(copied.batch)) or copied.model.training
        twin.eval(), copied.model.eval()
        assert torch.equal(twin(copied.batch), copied.model(copied.batch))
        copied.model.train()
        state = {name: value + 1 if "mlp" in name else value for name, value in state_of(copied.model).items()}
        before = step(copied.batch).loss
        copied.model.load_state_dict(state)
        assert step(copied.batch).loss != before
    assert torch.equal(copied.model.blocks[0].mlp[0].weight, state["blocks.0.mlp.0.weight"])
    assert all("forward" not in vars(module) for module in copied.model.modules())


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_error_in_the_middle_loses_nothing(phase: str) -> None:
    class Fails(torch.autograd.Function):
        fails = False

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if Fails.fails and phase == "forward":
                raise ValueError("in the forward pass")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if Fails.fails:
                raise ValueError("in the backward pass")
            return grad

    def call(block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = Fails.apply(block(x))  # type: ignore[no-untyped-call]
        return out

    copied = real_copy(made(call=call))
    given = state_of(copied.model)
    with applied(IN_HOST, copied) as step:
        Fails.fails = True
        with pytest.raises(ValueError, match=phase):
            step(copied.batch)
        assert phase == "backward" or on_device(copied.model) <= 2 * MATRIX_BYTES
        Fails.fails = False
        assert all(torch.equal(given[name], value) for name, value in state_of(copied.model).items())
        torch.manual_seed(1)
        copied.optimizer.zero_grad()
        losses = [step(copied.batch).loss for _ in range(3)]
        assert on_device(copied.model) == 0
    assert losses == trained(PLAIN, made(call=call))[0]


@pytest.mark.parametrize("at", [0, 1])
def test_where_there_is_no_room_for_a_weight_none_stays_on_the_device(at: int) -> None:
    copied = real_copy(made())
    with applied(IN_HOST, copied) as step:
        weights = vars(copied.model.blocks[at])["_memfit_block"].weights

        def fails() -> None:
            raise torch.OutOfMemoryError("no room")

        weights[1].fetch = fails
        with pytest.raises(torch.OutOfMemoryError):
            step(copied.batch)
        assert on_device(copied.model) == (0 if at == 0 else 2 * MATRIX_BYTES)  # the block that was there before
        del weights[1].fetch
        torch.manual_seed(1)
        assert [step(copied.batch).loss for _ in range(3)] == trained(PLAIN, made())[0]
        assert on_device(copied.model) == 0


def test_what_can_not_wait_is_refused_by_name() -> None:
    def refused(error: type[Exception], match: str, *modules: str, **levers: Any) -> None:
        held = replace(HELD, modules=modules)
        with pytest.raises(error, match=match), applied(replace(PLAIN, host_weights=held, **levers), real_copy(made())):
            pass

    refused(PlanMismatchError, "'layers.0', and the model has no such module", "layers.0")
    refused(PlanError, "'head' of host_weights.modules has no weight that can wait", "head")
    refused(PlanError, "'blocks.0.mlp' of host_weights.modules wait in host", "blocks.0", "blocks.0.mlp")
    refused(PlanError, "one of tiles.modules", "blocks.0.mlp", tiles=Tiles(modules=("blocks.0.mlp",), tokens=8))
    copied = real_copy(made())
    with applied(IN_HOST, copied) as step:
        with pytest.raises(PlanError, match=r"close\(\)"), applied(IN_HOST, copied):
            pass
        step(copied.batch)
        copied.model.blocks[1].mlp[0].weight.requires_grad_(True)
        with pytest.raises(PlanError, match=r"blocks.1.mlp.0.weight trains now"):
            step(copied.batch)


def test_shared_weights_stay_on_the_device() -> None:
    workload = made()
    workload.model.blocks[1].mlp[0].weight = workload.model.blocks[0].mlp[0].weight
    copied = real_copy(workload)
    with applied(IN_HOST, copied) as step:
        step(copied.batch)
        waiting = {w.fqn for b in (vars(m)["_memfit_block"] for m in copied.model.blocks) for w in b.weights}
    assert "blocks.0.mlp.2.weight" in waiting and not {f"blocks.{i}.mlp.0.weight" for i in (0, 1)} & waiting


def test_a_step_takes_no_less_than_its_copies_and_hides_them_where_it_computes_longer() -> None:
    trace = replace(capture_levers(made(), IN_HOST, find_device("cpu")), device="card")  # whose copies run beside it
    costs = costs_of([trace], find_device("cpu"))
    copies = sum(op.name == "memfit.copy_in.default" for op in trace.ops)
    assert copies == 2 * 2 * COUNT

    def seconds(of_copy: float, of_product: float) -> float:
        def cost(text: str) -> OpCost:
            is_copy, is_product = (
                "memfit.copy_in" in text,
                '"aten.addmm.default"' in text or '"aten.mm.default"' in text,
            )
            return OpCost(of_copy if is_copy else of_product if is_product else 0.0, 0, True)

        return simulate(trace, replace(costs, ops={text: cost(text) for text in trace.signatures})).step_seconds

    assert seconds(1.0, 0.0) == pytest.approx(copies, rel=1e-3)
    alone = seconds(0.0, 1.0)
    assert alone + 2 <= seconds(0.1, 1.0) + 2 <= alone + 2 + 0.4 + 1e-9  # the first block's, and the last's again
    assert alone < seconds(0.1, 1.0)


def proposed(**options: Any) -> list[Levers]:
    """Return what the lever proposes beside the plain step, which it is told not to fit."""
    trace = capture_levers(made(), PLAIN, find_device("cpu"))
    step: dict[str, Any] = {
        **{"workload": made(), "device": find_device("rtx-4090"), "plain": PLAIN, "budget_bytes": 4 * MATRIX_BYTES},
        **{"host_budget_bytes": 2**30, "shardings": (), "tries_all": False, "is_long": False},
        **{"trace": lambda levers: trace, "allows": lambda levers: True, **options},
    }
    step["predicted"] = lambda levers: SimpleNamespace(peak_bytes=2**24, peak_upper_bytes=2**24)
    setting: Any = SimpleNamespace(**step)
    (lever,) = (lever for lever in LEVERS if lever.name == "weights in host memory")
    return lever.propose(setting, [PLAIN])


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, COUNT),
        ({"host_budget_bytes": 7 * MATRIX_BYTES}, 3),  # 3.5 blocks: what the host has room for, from the first
        ({"host_budget_bytes": 2 * MATRIX_BYTES, "tries_all": True, "budget_bytes": 1}, 1),
    ],
)
def test_blocks_are_proposed_as_far_as_the_host_has_room(options: dict[str, Any], count: int) -> None:
    held = HostWeights(modules=NAMES[:count], host_bytes=2 * count * MATRIX_BYTES)
    assert proposed(**options) == [PLAIN, replace(PLAIN, host_weights=held)]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"host_budget_bytes": 0}, "host_budget="),
        ({"device": find_device("cpu")}, "a device with a link"),
        ({"budget_bytes": 2**25}, "the step fits"),
        ({"is_long": True}, "only where nothing else fits"),
        ({"shardings": (Sharding(world_size=2, mode="ddp"),)}, "ranks share"),
        ({"host_budget_bytes": 4 * MATRIX_BYTES}, "less than"),  # two blocks, which are on the device at a time
    ],
)
def test_it_is_not_proposed_where_it_does_not_pay(options: dict[str, Any], why: str) -> None:
    with pytest.raises(NotOffered, match=why):
        proposed(**options)
