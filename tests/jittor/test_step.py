from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jittor as jt
import numpy as np
import pytest
import torch

from memfit import jittor as mj
from memfit.errors import CheckpointError, MemoryLimitError, NonFiniteError, UsageError, WorkloadError
from memfit.ir import Region
from memfit.jittor import Step, Workload, seed
from memfit.jittor.variables import is_trainable, named_variables
from memfit.training import LossScaler
from memfit.workload import LossScaling
from tests.jittor.models import mlp, residuals

nn = jt.nn
OPTIMIZERS = {
    "SGD": lambda p: nn.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: nn.Adam(p, 1e-2),
    "AdamW": lambda p: jt.optim.AdamW(p, 1e-2, weight_decay=0.01),
}


def mean_loss(model: Any, batch: Any) -> Any:
    return (model(batch["x"]) - batch["y"]).sqr().mean()


def counted_loss(model: Any, batch: Any) -> Any:
    error = (model(batch["x"]) - batch["y"]).sqr().sum(1) * batch["weight"]
    return error.sum(), batch["weight"].sum()


def workload_of(
    optimizer: str = "Adam", samples: int = 16, loss_fn: Any = mean_loss, dropout: float = 0.0, **changes: Any
) -> Workload:
    seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout, is_train=True), nn.Linear(8, 3))
    batch = {
        "x": jt.randn(samples, 6),
        "y": jt.randn(samples, 3),
        "weight": jt.array(list(range(1, samples + 1))).float32(),
    }
    parameters = OPTIMIZERS[optimizer](model.parameters())
    return Workload(**{"model": model, "batch": batch, "loss_fn": loss_fn, "optimizer": parameters, **changes})


def weights_of(workload: Workload) -> dict[str, Any]:
    return {name: v.numpy().copy() for name, v in named_variables(workload.model).items()}


def largest_difference(left: dict[str, Any], right: dict[str, Any]) -> float:
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_accumulation_is_the_large_batch(optimizer: str) -> None:
    """Parameters after 10 steps over k microbatches, against Jittor's own step on the whole batch."""
    plain = workload_of(optimizer)
    for _ in range(10):
        plain.optimizer.step(mean_loss(plain.model, plain.batch))
    expected = weights_of(plain)
    for k in (1, 4, 16):
        workload = workload_of(optimizer)
        step = Step(workload, microbatch_size=16 // k)
        for _ in range(10):
            step(workload.batch)
        difference = largest_difference(weights_of(workload), expected)
        print(f"{optimizer}, k = {k}: {difference:.1e}")
        assert difference <= 1e-6


def test_the_comparison_sees_what_jittors_own_accumulation_does() -> None:
    plain, own = workload_of("Adam"), workload_of("Adam")
    for _ in range(10):
        plain.optimizer.step(mean_loss(plain.model, plain.batch))
        for start in range(0, 16, 4):
            piece = {name: v[start : start + 4] for name, v in own.batch.items()}
            own.optimizer.backward(mean_loss(own.model, piece) / 4)
        own.optimizer.step()
    assert largest_difference(weights_of(own), weights_of(plain)) > 1e-3


@pytest.mark.parametrize("microbatch_size", [1, 3, 16])
def test_sums_with_counts_are_normalised_over_the_whole_batch(microbatch_size: int) -> None:
    workload = workload_of(loss_fn=counted_loss)
    total, count = counted_loss(workload.model, workload.batch)
    parameters = workload.model.parameters()
    expected = [g.numpy() for g in jt.grad(total / count, parameters)]
    loss, gradients = Step(workload, microbatch_size=microbatch_size).gradients(workload.batch)
    assert loss == pytest.approx((total / count).item(), rel=1e-5)
    for found, wanted in zip(gradients.values(), expected, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-7)


def test_memory_does_not_grow_with_the_microbatches() -> None:
    """The same microbatch, four and sixteen times; its tensors are larger than the blocks that pools cut up."""
    peaks = {}
    for k in (4, 16):
        seed(0)
        model = mlp(6, 64)
        batch = {"x": jt.randn(24576 * k, 64), "y": jt.randn(24576 * k, 64)}
        step = Step(Workload(model, batch, mean_loss, nn.Adam(model.parameters(), 1e-3)), microbatch_size=24576)
        step(batch)
        with mj.memory.measure() as measured:
            step(batch)
        peaks[k] = measured.added_bytes
    print({k: f"{peak / 2**20:.1f} MiB" for k, peak in peaks.items()})
    assert peaks[16] <= 1.1 * peaks[4]


def test_clipping_scales_the_whole_gradient() -> None:
    free, clipped = workload_of("SGD"), workload_of("SGD", max_grad_norm=0.05)
    before = weights_of(free)
    norms = [Step(workload)(workload.batch).grad_norm for workload in (free, clipped)]
    assert norms[0] == norms[1] > 0.05
    decay = {name: 0.1 * 0.01 * value for name, value in before.items()}
    moved = [{n: before[n] - decay[n] - v for n, v in weights_of(w).items()} for w in (free, clipped)]
    for name in before:
        np.testing.assert_allclose(moved[1][name], moved[0][name] * 0.05 / norms[0], rtol=2e-3, atol=1e-7)


def test_what_is_not_finite_changes_nothing() -> None:
    workload = workload_of()
    step = Step(workload)
    step(workload.batch)
    assert all("grads" not in group for group in workload.optimizer.param_groups)  # no second update uses them

    def state() -> dict[str, Any]:
        return {name: v.numpy().copy() for name, v in step.state().items()}

    before = state()
    bad = {**workload.batch, "x": workload.batch["x"] * math.nan}
    with pytest.raises(NonFiniteError, match=r"the loss is nan .* first in 0\.weight"):
        step(bad)
    assert largest_difference(before, state()) == 0 and step.steps == 1 and workload.optimizer.n_step == 1


def test_gradients_update_nothing() -> None:
    seed(0)
    model = residuals(1, 4)
    workload = Workload(model, jt.randn(2, 4, 5, 5), lambda m, b: m(b).sqr().mean(), nn.SGD(model.parameters(), 0.1))
    before = weights_of(workload)
    _, gradients = Step(workload).gradients(workload.batch)
    assert gradients.keys() == {name for name, v in named_variables(model).items() if is_trainable(v)}
    assert largest_difference(before, weights_of(workload)) == 0


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_resuming_is_bitwise(tmp_path: Path, precision: Any) -> None:
    def training() -> Step:
        scaler = LossScaler(LossScaling(growth_interval=2)) if precision == "16-mixed" else None
        return Step(workload_of("AdamW", dropout=0.3), microbatch_size=8, precision=precision, scaler=scaler, seed=5)

    whole, half = training(), training()
    batch = whole.workload.batch
    losses = [whole(batch).loss for _ in range(6)]
    assert losses[:3] == [half(batch).loss for _ in range(3)]
    half.save(tmp_path / "state.safetensors")
    resumed = training()
    jt.rand(100).sync()  # whatever Jittor's own generator does meanwhile
    resumed.load(tmp_path / "state.safetensors")
    assert losses[3:] == [resumed(batch).loss for _ in range(3)]
    assert largest_difference(weights_of(whole.workload), weights_of(resumed.workload)) == 0
    assert (resumed.steps, resumed.workload.optimizer.n_step) == (whole.steps, whole.workload.optimizer.n_step)


def test_checkpoints_of_other_workloads_change_nothing(tmp_path: Path) -> None:
    step = Step(workload_of())
    other = Step(Workload(mlp(1, 4), jt.ones((2, 4)), mean_loss, nn.SGD(mlp(1, 4).parameters(), 0.1)))
    other.save(tmp_path / "other.safetensors")
    (tmp_path / "noise.safetensors").write_bytes(b"noise" * 9)
    before = weights_of(step.workload)
    for name, said in (("other", "another workload"), ("noise", "not a checkpoint"), ("nowhere", "can't read")):
        with pytest.raises(CheckpointError, match=said):
            step.load(tmp_path / f"{name}.safetensors")
    assert largest_difference(before, weights_of(step.workload)) == 0


@pytest.mark.parametrize("overflows", ["0110010011", "1111", "000000", "0100010001"])
def test_the_scale_moves_as_that_of_grad_scaler_and_overflow_skips_nothing_else(overflows: str) -> None:
    """The oracle is PyTorch's scaler, on the same overflows."""
    oracle = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = LossScaler(LossScaling(initial=2.0**8, growth_interval=2, floor=2.0**-9, ceiling=2.0**20))
    workload = workload_of("Adam")
    step, batch = Step(workload, precision="16-mixed", scaler=scaler), workload.batch
    reference = workload_of("Adam")
    without = Step(reference, precision="16-mixed", scaler=LossScaler(LossScaling(growth_interval=None)))
    for overflow in overflows:
        parameter.grad = torch.full((1,), math.inf if overflow == "1" else 1.0)
        oracle.scale(torch.zeros(()))
        oracle.unscale_(optimizer)
        oracle.update()
        before = weights_of(workload)
        result = step({**batch, "x": batch["x"] * (1e30 if overflow == "1" else 1.0)})
        assert result.skipped == (overflow == "1")
        assert scaler.scale == oracle.get_scale()
        if result.skipped:
            assert largest_difference(before, weights_of(workload)) == 0
        else:
            without(batch)
    assert step.steps == workload.optimizer.n_step == overflows.count("0")
    assert largest_difference(weights_of(workload), weights_of(reference)) < 1e-4  # the scale rounds nothing but itself


def test_overflow_without_end_is_an_error() -> None:
    workload = workload_of()
    step = Step(workload, precision="16-mixed", scaler=LossScaler(LossScaling(max_skips=3)))
    bad = {**workload.batch, "x": workload.batch["x"] * 1e30}
    step(bad), step(bad)
    with pytest.raises(NonFiniteError, match="overflowed in 3 steps in a row"):
        step(bad)


def test_fp16_learns_as_fp32() -> None:
    """A small classifier: the loss within 1 % of that in fp32, weights and optimizer state in fp32."""
    losses = {}
    for precision in ("32-true", "16-mixed"):
        seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))
        x = np.random.RandomState(0).randn(64, 8).astype("float32")
        batch = {"x": jt.array(x).stop_grad(), "y": jt.array((x[:, :4]).argmax(1))}
        workload = Workload(
            model, batch, lambda m, b: nn.cross_entropy_loss(m(b["x"]), b["y"]), nn.Adam(model.parameters(), 1e-2)
        )
        step = Step(workload, precision=precision)  # type: ignore[arg-type]
        losses[precision] = [step(batch).loss for _ in range(30)]
        assert {str(v.dtype) for v in named_variables(model).values()} == {"float32"}
        assert {str(v.dtype) for v in mj.memory.optimizer_state(workload.optimizer)} == {"float32"}
    print({precision: f"{found[0]:.4f} to {found[-1]:.4f}" for precision, found in losses.items()})
    assert losses["32-true"][-1] < 0.6 * losses["32-true"][0]
    assert losses["16-mixed"][-1] == pytest.approx(losses["32-true"][-1], rel=0.01)
    assert losses["16-mixed"] != losses["32-true"]


def test_recomputation_in_fp16_is_the_same() -> None:
    found = []
    for regions in ((), (Region(("0", "1", "2")),)):
        workload = workload_of(dropout=0.3)
        step = Step(workload, precision="16-mixed", regions=regions)
        found.append([step(workload.batch).loss for _ in range(3)])
    assert found[0] == found[1]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="microbatch_size=0"):
        Step(workload_of(), microbatch_size=0)
    with pytest.raises(UsageError, match="precision='bf16-mixed'"):
        Step(workload_of(), precision="bf16-mixed")
    with pytest.raises(WorkloadError, match="must return a scalar"):
        workload = workload_of(loss_fn=lambda model, batch: model(batch["x"]))
        Step(workload)(workload.batch)


def test_a_step_that_would_pass_the_limit_is_not_run() -> None:
    """The process lives on, and the same step runs without the limit."""
    seed(0)
    model = mlp(6, 128)
    batch = {"x": jt.randn(4096, 128), "y": jt.randn(4096, 128)}
    step = Step(Workload(model, batch, mean_loss, nn.Adam(model.parameters(), 1e-3)))
    before = weights_of(step.workload)
    with mj.memory.limit("24MiB"), pytest.raises(MemoryLimitError, match="parameters .* it was not run") as caught:
        step(batch)
    assert caught.value.limit_bytes == 24 * 2**20
    assert caught.value.by_category["optimizer state"] == 2 * 6 * (128 * 128 + 128) * 4
    assert largest_difference(before, weights_of(step.workload)) == 0
    with mj.memory.measure() as measured:
        assert math.isfinite(step(batch).loss)
    with mj.memory.limit(int(1.3 * measured.peak_bytes) + 8 * 2**20):
        assert math.isfinite(step(batch).loss)
