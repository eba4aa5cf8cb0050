"""Precisions: autocast, TF32 and weights in bf16, whose updates are not lost; predictions hold, all is put back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memfit.capture import measure_peak_bytes, real_copy
from memfit.errors import PlanError, WorkloadError
from memfit.ir import Levers, Precision, Region
from memfit.levers import applied
from memfit.levers.precision import stochastically_rounded
from memfit.pipeline import estimate
from memfit.training import BatchStream, Optimizers, read_model
from memfit.training.runs import checkpoint
from memfit.workload import Workload, batch_size_of, fingerprint
from tests.models import BUILDERS
from tests.training.conftest import make_plan


def test_tf32_is_a_setting_of_the_step_alone() -> None:
    seen = []

    def loss_fn(model: Any, batch: Any) -> Any:
        seen.append(torch.get_float32_matmul_precision())
        return model(batch).mean()

    model = torch.nn.Linear(3, 1)
    workload = Workload(model, torch.ones(2, 3), loss_fn, torch.optim.SGD(model.parameters()))
    with applied(Levers(precision="tf32", microbatch_size=1), workload) as step:
        step(workload.batch)
        step.gradients(workload.batch)
        assert torch.get_float32_matmul_precision() == "highest"
    assert seen == ["high"] * 4


# Modules that stay in fp32


def dtypes_of(workload: Workload, levers: Levers) -> dict[str, torch.dtype]:
    """Return the dtype of what each linear layer makes."""
    found: dict[str, torch.dtype] = {}
    with applied(levers, workload) as step, contextlib.ExitStack() as stack:
        for name, module in workload.model.named_modules():
            if isinstance(module, torch.nn.Linear):
                hook = functools.partial(lambda n, m, args, out: found.__setitem__(n, out.dtype), name)
                stack.callback(module.register_forward_hook(hook).remove)
        step.compute_loss(workload.batch)
    return found


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_modules_that_are_named_compute_in_fp32(precision: Precision, dtype: torch.dtype) -> None:
    workload = BUILDERS["transformer"]()
    levers = Levers(precision=precision, microbatch_size=2)
    plain = dtypes_of(workload, levers)
    assert set(plain.values()) == {dtype}
    kept = dtypes_of(dataclasses.replace(workload, fp32_modules=("blocks.0", "h?ad")), levers)
    assert kept == {n: torch.float32 if n.startswith("blocks.0.") or n == "head" else dtype for n in plain}
    assert dtypes_of(workload, levers) == plain and not torch.is_autocast_enabled("cpu")
    assert {p.dtype for p in workload.model.parameters()} == {torch.float32}


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    workload = dataclasses.replace(BUILDERS["transformer"](), fp32_modules=("heads",))
    with (
        pytest.raises(WorkloadError, match="fp32_modules has 'heads'"),
        applied(Levers(precision="bf16-mixed", microbatch_size=2), workload),
    ):
        pass


class Careful(torch.nn.Module):
    """Switches autocast off for its middle layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.middle(x.float()).exp()
        return self.last(x)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("fp32_modules", [(), ("1.first", "2")])
def test_autocast_is_the_same_in_a_recomputation(precision: Precision, fp32_modules: tuple[str, ...]) -> None:
    regions = [(), (Region(("0",)), Region(("1", "2"))), (Region(("1.first",)), Region(("2",)))]
    found = []
    for chosen in regions:
        torch.manual_seed(0)
        model = torch.nn.Sequential(Careful(), Careful(), Careful())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        workload = Workload(
            model, torch.randn(4, 8), lambda m, b: m(b).float().square().mean(), optimizer, fp32_modules=fp32_modules
        )
        with applied(Levers(precision=precision, microbatch_size=2, regions=chosen), workload) as step:
            found.append(step.gradients(workload.batch))
    for loss, gradients in found[1:]:
        assert loss == found[0][0]
        assert all(torch.equal(g, found[0][1][name]) for name, g in gradients.items())


UPDATES = ["master-weights", "stochastic-rounding"]


def line(updates: str | None, count: int = 4096, **changes: Any) -> Workload:
    """Weights of 1 that every update moves by -1e-4, a fortieth of what bf16 can tell."""
    torch.manual_seed(0)
    model = nn.Linear(count, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    fields: dict[str, Any] = {
        "model": model,
        "batch": torch.ones(2, count),
        "loss_fn": lambda model, batch: model(batch).sum() / len(batch),
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4),
        "bf16_updates": updates,
    }
    return Workload(**(fields | changes))


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_small_updates_are_not_lost(updates: str, microbatch_size: int) -> None:
    workload = line(updates)
    with applied(Levers(precision="bf16-true", microbatch_size=microbatch_size), workload) as step:
        assert workload.model.weight.dtype is torch.bfloat16
        for _ in range(20):
            step(workload.batch)
    assert workload.model.weight.dtype is torch.float32
    assert float(workload.model.weight.detach().mean()) == pytest.approx(1 - 20e-4, abs=2e-4)


def test_they_are_lost_in_bf16_alone_which_is_refused() -> None:
    workload = line(None)
    workload.model.bfloat16()
    workload.model(workload.batch.bfloat16()).sum().backward()
    for _ in range(20):
        workload.optimizer.step()
    assert float(workload.model.weight.detach().mean()) == 1.0
    with (
        pytest.raises(PlanError, match="bf16_updates='master-weights'"),
        applied(Levers(precision="bf16-true", microbatch_size=2), line(None)),
    ):
        pass
    assert any(
        "16-bit weights" in note
        for note in estimate(dataclasses.replace(workload, batch=workload.batch.bfloat16())).notes
    )


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize(
    ("name", "microbatch_size"), [("tied", 1), ("convnet", 4), pytest.param("recurrent", 1, marks=pytest.mark.ci)]
)
def test_the_peak_is_predicted(name: str, updates: Any, microbatch_size: int) -> None:
    workload = dataclasses.replace(BUILDERS[name](batch=4), bf16_updates=updates)
    predicted = estimate(workload, precision="bf16-true", microbatch_size=microbatch_size).peak_bytes
    with applied(Levers(precision="bf16-true", microbatch_size=microbatch_size), real_copy(workload)) as step:
        step(step.workload.batch)
        assert measure_peak_bytes(step, step.workload.batch) == pytest.approx(predicted, rel=1e-3)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("updates", UPDATES)
def test_gradients_are_those_of_fp32_rounded(name: str, updates: Any) -> None:
    workload = dataclasses.replace(BUILDERS[name](), bf16_updates=updates)
    workload.model.eval()
    size = batch_size_of(workload.batch)
    with applied(Levers(microbatch_size=size), workload) as step:
        loss, gradients = step.gradients(workload.batch)
    for precision, tolerance in (("bf16-true", 0.15), ("bf16-mixed", 0.15)):
        with applied(Levers(precision=precision, microbatch_size=size), workload) as step:  # type: ignore[arg-type]
            assert fingerprint(step.workload) == fingerprint(workload)
            rounded_loss, rounded = step.gradients(workload.batch)
        assert rounded_loss == pytest.approx(loss, rel=0.05)
        assert list(rounded) == list(gradients)
        flat, expected = (torch.cat([g.flatten() for g in gs.values()]) for gs in (rounded, gradients))
        assert 0 < float((flat - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("updates", UPDATES)
def test_everything_is_put_back(updates: Any) -> None:
    workload = dataclasses.replace(BUILDERS["transformer"](), bf16_updates=updates, fp32_modules=("head",))
    before, own = fingerprint(workload), [id(p) for p in workload.model.parameters()]
    names = {n: [*m.__dict__] for n, m in workload.model.named_modules()}
    with applied(Levers(precision="bf16-true", microbatch_size=2), workload) as step:
        assert fingerprint(workload) == before
        assert workload.model.get_submodule("head").weight.dtype is torch.float32
        step(workload.batch)
        with (
            pytest.raises(PlanError, match="already"),
            applied(Levers(precision="bf16-true", microbatch_size=2), workload),
        ):
            pass
    assert fingerprint(workload) == before
    assert {p.dtype for p in workload.model.parameters()} == {torch.float32}
    assert {n: [*m.__dict__] for n, m in workload.model.named_modules()} == names
    held = [id(p) for g in workload.optimizer.param_groups for p in g["params"]]
    assert set(held) == {id(p) for p in workload.model.parameters()} == {id(p) for p in workload.optimizer.state}
    assert updates != "master-weights" or own == [id(p) for p in workload.model.parameters()]
    with applied(Levers(microbatch_size=2), workload) as step:
        step(workload.batch)


@pytest.mark.parametrize("updates", UPDATES)
def test_recomputed_regions_give_the_same_numbers(updates: Any) -> None:
    found = []
    for regions in ((), (Region(("blocks.0",)), Region(("blocks.1.mlp",)))):
        workload = dataclasses.replace(
            BUILDERS["transformer"](), bf16_updates=updates, fp32_modules=("blocks.0.norm?",)
        )
        torch.manual_seed(5)
        levers = Levers(precision="bf16-true", microbatch_size=batch_size_of(workload.batch), regions=regions)
        with applied(levers, workload) as step:
            losses = [step(workload.batch).loss for _ in range(2)]
        found.append((losses, [p.detach() for p in workload.model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("updates", UPDATES)
def test_a_training_goes_on_bitwise_from_its_checkpoint(updates: Any, tmp_path: Path) -> None:
    levers = Levers(precision="bf16-true", microbatch_size=2)
    workload = dataclasses.replace(BUILDERS["transformer"](), bf16_updates=updates)
    other = real_copy(workload)
    with applied(levers, workload) as step, applied(levers, other) as resumed:
        step(workload.batch)
        path = checkpoint.Writing(tmp_path, step, make_plan(workload), BatchStream(workload).position()).finish()
        dtype = torch.float32 if updates == "master-weights" else torch.bfloat16
        assert {t.dtype for t in read_model(path).values()} == {dtype}
        rng = torch.get_rng_state()
        losses = [step(workload.batch).loss for _ in range(3)]
        resumed(workload.batch)
        checkpoint.read(path, resumed).restore()
        torch.set_rng_state(rng)
        assert [resumed(workload.batch).loss for _ in range(3)] == losses


# Stochastic rounding


@settings(max_examples=100, deadline=None)
@given(value=st.floats(-(2.0**127), 2.0**127, width=32), seed=st.integers(0, 99))
def test_rounding_goes_to_a_neighbour(value: float, seed: int) -> None:
    torch.manual_seed(seed)
    exact = torch.full((64,), value)
    rounded = stochastically_rounded(exact)
    bits = exact.view(torch.int32)[0] & -65536
    below, above = (b.reshape(1).view(torch.float32).bfloat16() for b in (bits, bits + 65536))
    assert rounded.dtype is torch.bfloat16
    assert all(torch.equal(r, below[0]) or torch.equal(r, above[0]) for r in rounded)
    if float(below) == value:
        assert torch.equal(rounded, below.expand(64))


@pytest.mark.parametrize("value", [1.0001, -3.3333, 1e-20, 5e-39])
def test_rounding_is_right_on_average(value: float) -> None:
    torch.manual_seed(0)
    rounded = stochastically_rounded(torch.full((200_000,), value)).double()
    assert float(rounded.mean()) == pytest.approx(value, rel=1e-4)
    assert len(rounded.unique()) == 2


class Counting(torch.optim.SGD):
    """Counts its steps by group, and moves by that."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(p.grad * group["count"])


@pytest.mark.parametrize("several", [False, True])
def test_optimizers_that_count_by_group_count_once(several: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    both: list[torch.optim.Optimizer] = [Counting(layer.parameters(), lr=1.0) for layer in model]
    optimizer = Optimizers(both) if several else Counting(model.parameters(), lr=1.0)
    workload = Workload(
        model, torch.ones(2, 4), lambda m, b: m(b).mean(), optimizer, bf16_updates="stochastic-rounding"
    )
    with applied(Levers(precision="bf16-true", microbatch_size=2), workload) as step:
        for _ in range(3):
            step(workload.batch)
    assert [group["count"] for group in optimizer.param_groups] == [3] * len(optimizer.param_groups)
