"""Steps captured on fake CUDA tensors, and what holds for them. `test_fake_cuda.py` runs this module in a process."""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from memfit.capture import CaptureJob, KnownValues, capture, fake_copy, mode_of
from memfit.cost import roofline
from memfit.errors import CaptureError
from memfit.hardware import find_device, known_devices
from memfit.ir import Levers, Region, Regions, Trace, simulate
from memfit.levers import applied
from memfit.pipeline import estimate, plan
from memfit.planner import capture_levers, predict
from memfit.recipes import byte_lm
from memfit.solver import options
from memfit.workload import Workload, batch_size_of
from tests.ir.test_simulate import SHARES_CASTS, differs
from tests.models import BUILDERS, COSTS, LARGE, cross_entropy, random_selection, transformer
from tests.update_settings import update_settings

SCENARIOS: dict[str, Callable[[], None]] = {}


IN_CI: set[str] = {"offload planned", "optimizer states planned", "optimizer settings together"}
"""Scenarios that repeat others with another model, and whole plans: CI runs them."""


def scenario(name: str, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to the scenarios, with arguments."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        SCENARIOS[name] = functools.partial(function, *arguments)
        return function

    return add


def traced(workload: Workload, device: str = "a100-80gb", **levers: Any) -> Trace:
    levers = {"precision": "32-true", "microbatch_size": batch_size_of(workload.batch), **levers}
    build, named = functools.partial(applied, Levers(**levers)), (levers["precision"], levers["microbatch_size"])
    return capture(CaptureJob(workload, build, *named, known_devices()[device]))


class Found:
    """What the scenarios look at of a trace: bytes by category, operators by phase, notes."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.notes = trace, trace.notes
        self.nbytes: Counter[str] = Counter()
        for storage in trace.storages:
            self.nbytes[storage.category] += storage.nbytes

    def ops(self, phase: str = "") -> set[str]:
        """Return the operators of a phase, or of all."""
        return {op.name.split(".")[1] for op in self.trace.ops if phase in ("", op.phase)}


def found(workload: Workload, device: str = "a100-80gb", **levers: Any) -> Found:
    return Found(traced(workload, device, **levers))


def parameter_bytes(workload: Workload) -> int:
    return sum(p.numel() * p.element_size() for p in workload.model.parameters())


QUICK = ("transformer", "convnet", "twice")
"""Builders whose steps hold all that is looked at: CI takes the others."""
STATES = {"transformer": 2, "convnet": 1, "twice": 0}
"""Copies of the parameters: AdamW's step counters are on the CPU; SGD's momentum is one; plain SGD has no state."""
CHECKPOINTED = {("transformer", "32-true"), ("convnet", "bf16-mixed")}
"""Microbatches, shared casts and running statistics."""
for _name in BUILDERS:
    if _name not in QUICK:
        IN_CI.add(_name)

    @scenario(_name, _name)
    def builder(name: str) -> None:
        """All tensors are on the GPU; loss scaling does not skip the optimizer's step."""
        workload = BUILDERS[name]()
        plain, scaled = (found(workload, precision=precision) for precision in ("32-true", "16-mixed"))
        for each in (plain, scaled):
            assert each.nbytes["parameters"] == each.nbytes["gradients"] == parameter_bytes(workload)
            assert each.trace.device == "a100-80gb"
            assert ("_to_copy" in each.ops("forward")) == (each is scaled)
            if name in STATES:
                assert each.nbytes["optimizer state"] == STATES[name] * parameter_bytes(workload)
        assert plain.ops("optimizer") <= scaled.ops("optimizer")
        assert any(op.startswith("_foreach_") and op.endswith("_") for op in scaled.ops("optimizer"))

    for _precision, _microbatches in (("32-true", 2 if _name == "transformer" else 1), ("bf16-mixed", 1)):
        _case = f"checkpointing {_name} {_precision} {_microbatches}"
        if (_name, _precision) not in CHECKPOINTED:
            IN_CI.add(_case)

        @scenario(_case, _name, _precision, _microbatches)
        def checkpointing(name: str, precision: str, microbatches: int) -> None:
            """The simulation of a random selection against the step captured with it."""
            workload = BUILDERS[name](**LARGE[name])
            levers = {"precision": precision, "microbatch_size": batch_size_of(workload.batch) // microbatches}
            plain = traced(workload, **levers)
            # What is nested may take more than the solver says: docs/internals/solving.md.
            flat = [o for o in options(Regions(plain), COSTS) if len(o.regions) == 1]
            regions = random_selection(random.Random(3), flat, share=0.8)
            there = traced(workload, **levers, regions=regions)
            run = simulate(there, COSTS)
            slack = 0.04 if precision != "32-true" and name in SHARES_CASTS else 0.0
            assert regions and any(op.phase == "recompute" for op in there.ops)
            assert not differs(simulate(plain, COSTS, regions), run, slack=slack)
            assert differs(simulate(plain, COSTS), run)


@scenario("offload")
def offload() -> None:
    """The simulation of blocks whose inputs, and what they keep, wait in host memory, against the step captured."""
    workload = transformer(**LARGE["transformer"])
    plain = traced(workload)
    costs = roofline([plain], known_devices()["a100-80gb"])
    offloads = [o for o in options(Regions(plain), costs, offload=True) if o.regions[0].offload and len(o.regions) == 1]
    blocks = [o.regions[0] for o in offloads if o.modules in (("blocks.0",), ("blocks.1",))]
    for keeps, moved, prefetch in ((0, 1, ["blocks.1", "norm"]), (3, 4, ["blocks.1", "head"])):
        regions = [r for r in blocks if len(r.keep) == keeps and r.prefetch]
        assert [r.prefetch for r in regions] == prefetch
        there = traced(workload, regions=tuple(regions))
        run = simulate(there, roofline([there], known_devices()["a100-80gb"]))
        assert run.peak_bytes <= simulate(plain, costs, regions).peak_bytes <= run.peak_bytes * 1.02
        names = [op.name for op in there.ops]
        copies = Counter(name.split(".")[1] for name in names if name.startswith("memfit."))
        assert copies["copy_out"] == copies["copy_in"] and copies["wait"] == 2 * copies["copy_out"]
        assert 2 <= copies["copy_out"] <= 2 * moved
        assert sum(s for s, name in zip(run.seconds, names, strict=True) if name == "memfit.wait.default") >= 0


@scenario("offload around regions")
def offload_around_regions() -> None:
    """Blocks whose inputs wait in host memory, with an MLP inside that is recomputed again from the copy."""
    workload = transformer(batch=64, tokens=64, dim=64, layers=8)
    plain, device = traced(workload), known_devices()["a100-80gb"]
    costs = roofline([plain], device)
    blocks = [Region((f"blocks.{i}",), (), True, f"blocks.{i + 1}" if i < 7 else "norm") for i in range(8)]
    inner = [Region((f"blocks.{i}.mlp",)) for i in range(8)]
    peaks: list[int] = []
    for regions in ([*blocks, *inner], [replace(r, offload=False, prefetch="") for r in blocks] + inner):
        there = traced(workload, regions=tuple(regions))
        peaks.append(simulate(there, roofline([there], device)).peak_bytes)
        assert peaks[-1] <= simulate(plain, costs, regions).peak_bytes <= peaks[-1] * 1.02
    names = Counter(op.name.split(".")[1] for op in traced(workload, regions=(*blocks, *inner)).ops)
    assert names["copy_out"] == names["copy_in"] >= 7 and names["wait"] == 2 * names["copy_out"]
    assert peaks[0] < peaks[1], peaks


@scenario("offload planned")
def offload_planned() -> None:
    """Plans within a budget use the host's memory where they may."""
    workload = byte_lm(n_layer=2, d_model=512, n_head=8, context=512, batch_size=16, max_bytes=100_000, dropout=0.0)
    device = "a100-80gb"
    plain = estimate(workload, device=device)
    options = {"device": device, "numerics": "exact", "precisions": ["32-true"], "points": 1, "time_limit_seconds": 0.5}
    budget = plain.peak_upper_bytes * 5 // 8
    without, using = (
        plan(workload, budget=budget, host_budget=host, **options)  # type: ignore[arg-type]
        for host in (None, "1GiB")
    )
    assert all(made.predicted.peak_upper_bytes <= budget for made in (without, using))
    assert not any(region.offload for region in without.levers.regions) and "activation offload" not in without.classes
    assert any(region.offload for region in using.levers.regions) and using.classes["activation offload"] == "exact"
    # within the gap of the search: expandable segments leave the other plan more room
    assert using.predicted.step_seconds < 1.005 * without.predicted.step_seconds


@scenario("optimizer states planned")
def optimizer_states_planned() -> None:
    """A plan that only states in the host's memory make fit, and the same states in 8 bits."""
    workload = byte_lm(n_layer=2, d_model=512, n_head=8, context=32, batch_size=1, max_bytes=100_000, dropout=0.0)
    found_device, whole = find_device("rtx-3090"), Levers(microbatch_size=1)
    peaks, seconds = {}, {}
    for lever in ("as-is", "offloaded", "adamw-8bit"):
        trace = capture_levers(workload, replace(whole, **update_settings(lever)), found_device)
        made = predict(trace, roofline([trace], found_device), found_device)[0]
        peaks[lever], seconds[lever] = made.peak_bytes, made.step_seconds
    settings = {"device": "rtx-3090", "numerics": "exact", "precisions": ["32-true"], "points": 1}
    budget = (peaks["as-is"] + peaks["offloaded"]) // 2
    planned = plan(workload, budget=budget, host_budget="1GiB", time_limit_seconds=0.5, **settings)  # type: ignore[arg-type]
    state_bytes = sum(2 * p.nbytes for p in workload.model.parameters())
    assert all(peaks["as-is"] - peaks[lever] > 0.7 * state_bytes for lever in ("offloaded", "adamw-8bit"))
    moved_seconds = 2 * state_bytes / found_device.link_bytes_per_second
    more_seconds = seconds["offloaded"] - seconds["as-is"]  # kernels for one parameter at a time are more, too
    assert 0.9 * moved_seconds < more_seconds < 1.5 * moved_seconds
    assert planned.classes.get("optimizer states in host memory") == "exact"
    assert planned.predicted.peak_upper_bytes <= budget


@scenario("optimizer settings together")
def optimizer_settings_together() -> None:
    """States in the host's memory that come in the backward pass: neither whole gradients nor states are there."""
    sizes = {"n_layer": 4, "d_model": 512, "n_head": 8, "context": 32, "batch_size": 1}
    workload = byte_lm(**sizes, max_bytes=100_000, dropout=0.0, max_grad_norm=None)  # type: ignore[arg-type]
    found_device, whole, peaks = find_device("rtx-3090"), Levers(microbatch_size=1), {}
    for values in ((), ("in-backward",), ("offloaded",), ("in-backward", "offloaded"), ("in-backward", "adamw-8bit")):
        trace = capture_levers(workload, replace(whole, **update_settings(*values)), found_device)
        peaks[values] = predict(trace, roofline([trace], found_device), found_device)[0].peak_bytes
    both, alone = peaks["in-backward", "offloaded"], min(peaks["in-backward",], peaks["offloaded",])
    assert both < 0.7 * alone and peaks["in-backward", "adamw-8bit"] < 0.6 * peaks["in-backward",]
    settings = {
        "device": "rtx-3090",
        "numerics": "exact",
        "precisions": ["32-true"],
        "points": 1,
        "host_budget": "1GiB",
    }
    planned = plan(workload, budget=int(0.95 * alone), time_limit_seconds=0.5, **settings)  # type: ignore[arg-type]
    assert {"optimizer states in host memory", "optimizer in the backward pass"} <= planned.classes.keys()
    assert planned.predicted.peak_upper_bytes <= planned.budget_bytes and planned.numerics == "exact"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 16), "y": torch.tensor([0, 2, 1, 0])}


Loss = Callable[[nn.Module, Any], Any]


def of(model: nn.Module, loss: Loss = cross_entropy, data: Any = None, optimizer: Any = torch.optim.AdamW) -> Workload:
    return Workload(model, data or batch(), loss, optimizer(model.parameters()), max_grad_norm=1.0)


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], str]] = {
    "AdamW": (torch.optim.AdamW, "_foreach_addcdiv_"),
    "AdamW fused": (functools.partial(torch.optim.AdamW, fused=True), "_fused_adamw_"),
    "AdamW one by one": (functools.partial(torch.optim.AdamW, foreach=False), "addcdiv_"),
    "AdamW capturable": (functools.partial(torch.optim.AdamW, capturable=True), "_foreach_addcdiv_"),
    "AdamW tensor rate": (lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-3)), "addcdiv_"),
    "SGD momentum": (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), "_foreach_add_"),
    "SGD fused": (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True), "_fused_sgd_"),
    "Adafactor": (torch.optim.Adafactor, "lerp_"),
    "RMSprop": (torch.optim.RMSprop, "_foreach_addcdiv_"),
    "ASGD": (torch.optim.ASGD, "_foreach_addcmul_"),
}
for _name, (_optimizer, _update) in OPTIMIZERS.items():

    @scenario(_name, _name, _optimizer, _update)
    def optimizer(name: str, make: Callable[..., torch.optim.Optimizer], update: str) -> None:
        """It takes the kernel that it takes on a GPU, under loss scaling too."""
        workload = of(mlp(), optimizer=make)
        plain = found(workload)
        assert {update, "_foreach_norm", "_foreach_mul_"} <= plain.ops("optimizer")  # clipping
        assert plain.nbytes["parameters"] == parameter_bytes(workload) and not plain.notes
        if name in ("AdamW", "AdamW fused", "Adafactor"):
            assert plain.ops("optimizer") <= found(workload, precision="16-mixed").ops("optimizer")


@scenario("optimizer with state")
def with_state() -> None:
    workload = of(mlp(), optimizer=functools.partial(torch.optim.AdamW, fused=True))
    for _ in range(2):
        cross_entropy(workload.model, workload.batch).backward()
        workload.optimizer.step()
    kept = found(workload)
    assert "_fused_adamw_" in kept.ops() and kept.nbytes["optimizer state"] >= 2 * parameter_bytes(workload)


USER_CODE: dict[str, Loss] = {}


def user_code(loss: Loss) -> Loss:
    USER_CODE[loss.__name__] = loss
    return loss


@user_code
def reads_values(model: nn.Module, batch: Any) -> Any:
    loss = cross_entropy(model, batch)
    value = loss.detach()
    float(value), bool(value > 0), value.tolist(), f"{value:.3f}", str(loss)
    assert batch["y"].max().item() == 2 and batch["y"].tolist() == [0, 2, 1, 0]
    if not torch.isfinite(value).all() or torch.isnan(value).any():
        raise ValueError("the loss is not finite")
    return loss


@user_code
def asks_for_the_gpu(model: nn.Module, batch: Any) -> Any:
    assert torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.device_count() == 1
    assert torch.cuda.get_device_capability() == (8, 0) and torch.cuda.is_bf16_supported()
    properties = torch.cuda.get_device_properties(0)
    assert properties.total_memory > 70 * 2**30 and properties.major == 8 and "A100" in torch.cuda.get_device_name()
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total and torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    for call in ("synchronize", "empty_cache", "memory_allocated", "reset_peak_memory_stats", "memory_summary"):
        getattr(torch.cuda, call)()
    torch.cuda.manual_seed(0), torch.cuda.manual_seed_all(0), torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    event.record()
    with torch.cuda.stream(stream), torch.cuda.device(0), torch.cuda.nvtx.range("mine"):
        stream.wait_stream(torch.cuda.current_stream())
    event.synchronize(), stream.synchronize(), event.elapsed_time(event)
    with torch.random.fork_rng():
        torch.manual_seed(1)
    return cross_entropy(model, batch)


@user_code
def makes_tensors_there(model: nn.Module, batch: Any) -> Any:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert batch["x"].device.type == "cuda"
    with torch.device(device):
        weight = torch.ones(3)
    weight = weight * torch.tensor([1.0, 2.0, 3.0], device=device) + torch.zeros(3).to(device, non_blocking=True)
    noise = torch.randn(4, 16, device=device, generator=torch.Generator(device=device)).cuda()
    pinned = torch.randn(4, 16).pin_memory()
    return F.cross_entropy(model(batch["x"] + noise + pinned.cuda(non_blocking=True)), batch["y"], weight=weight)


@user_code
def loads_data(model: nn.Module, batch: Any) -> Any:
    loader = DataLoader(TensorDataset(torch.randn(8, 16), torch.randint(0, 3, (8,))), batch_size=4, pin_memory=True)
    return sum(F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)) for x, y in loader)


@user_code
def casts_by_itself(model: nn.Module, batch: Any) -> Any:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(batch["x"])
    assert out.dtype is torch.bfloat16
    return F.cross_entropy(out.float(), batch["y"])


@user_code
def checkpoints_by_itself(model: nn.Module, batch: Any) -> Any:
    x = batch["x"].clone().requires_grad_()
    reentrant = checkpoint(model, x, use_reentrant=True)
    return F.cross_entropy(reentrant + checkpoint(model, batch["x"], use_reentrant=False), batch["y"])


@user_code
def selects_by_a_known_mask(model: nn.Module, batch: Any) -> Any:
    kept = batch["y"] != 0
    out, labels = model(batch["x"])[kept], batch["y"][kept]
    assert out.shape == (2, 3) and labels.tolist() == [2, 1]
    return F.cross_entropy(out, labels, reduction="sum"), kept.sum()


CALLED = {"casts_by_itself": ("forward", {"_to_copy"}), "checkpoints_by_itself": ("recompute", {"addmm", "relu"})}
for _name, _loss in USER_CODE.items():

    @scenario(_name, _loss)
    def code(loss: Loss) -> None:
        each = found(of(mlp(), loss))
        assert "_foreach_addcdiv_" in each.ops("optimizer")
        phase, operators = CALLED.get(loss.__name__, ("", set()))
        assert operators <= each.ops(phase)


@scenario("has_no_fake_kernel")
def has_no_fake_kernel() -> None:
    """What can't be captured names the user's line."""

    def loss(model: nn.Module, batch: Any) -> Any:
        given = model(batch["x"])[None].repeat(1, 1, 4)
        return torch.ops.aten._transform_bias_rescale_qkv(given, torch.ones(12), 1)[0].sum()

    with pytest.raises(CaptureError, match="PyTorch can't run this operator without data") as caught:
        traced(of(mlp(), loss))
    message = str(caught.value)
    assert "scenarios.py:" in message and "_transform_bias_rescale_qkv" in message and len(message) < 800


class Rnn(nn.Module):
    """A recurrent layer, and a head on its last output."""

    def __init__(self, kind: str, out: int, **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(16, 8, batch_first=True, **options)
        self.head = nn.Linear(out, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rnn(x.unsqueeze(1).expand(-1, 5, -1))[0][:, -1])
        return out


RNNS = {
    "LSTM": Rnn("LSTM", 8),
    "LSTM projected": Rnn("LSTM", 4, proj_size=4),
    "GRU deep": Rnn("GRU", 16, num_layers=2, dropout=0.1, bidirectional=True),
    "RNN": Rnn("RNN", 8, nonlinearity="relu", bias=False),
}
for _name, _model in RNNS.items():
    for _precision in ("32-true", "bf16-mixed"):

        @scenario(f"{_name} {_precision}", _name, _model, _precision)
        def recurrent(name: str, model: nn.Module, precision: str) -> None:
            trace = traced(of(model), precision=precision)
            flops = {op.name: trace.works[op.signature].flops for op in trace.ops if "_cudnn_rnn" in op.name}
            assert {op.name: op.phase for op in trace.ops if op.name in flops} == {
                "aten._cudnn_rnn.default": "forward",
                "aten._cudnn_rnn_backward.default": "backward",
            }
            assert flops["aten._cudnn_rnn_backward.default"] == 2 * flops["aten._cudnn_rnn.default"] > 0
            if name == "LSTM":  # 4 samples of 5 steps; gates of 8 features, from 16 inputs and 8 states
                assert flops["aten._cudnn_rnn.default"] == 2 * 20 * 4 * 8 * (16 + 8)


@scenario("kernels of a GPU")
def kernels() -> None:
    """Kernels that the CPU wheel lacks are not decomposed."""
    each = found(of(nn.Sequential(nn.Linear(16, 8), nn.RMSNorm(8), nn.SiLU(), nn.Mish(), nn.Linear(8, 3))))
    assert {"_fused_rms_norm", "silu", "mish"} <= each.ops("forward")
    assert {"_fused_rms_norm_backward", "silu_backward", "mish_backward"} <= each.ops("backward")


@scenario("compiled")
def compiled() -> None:
    in_place = mlp()
    in_place.compile()
    models = (torch.compile(mlp()), nn.Sequential(torch.compile(mlp())), in_place)
    for workload in (*map(of, models), of(mlp(), torch.compile(cross_entropy))):
        assert any("torch.compile is not predicted" in note for note in traced(workload).notes)


def attends(device: str, dtype: torch.dtype, operator: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        x = model(batch["x"]).view(4, 5, 2, 16).transpose(1, 2).to(dtype)
        return F.scaled_dot_product_attention(x, x, x).float().mean()

    each = found(of(nn.Linear(16, 32), loss, {"x": torch.randn(4, 5, 16)}), device)
    name = f"_scaled_dot_product_{operator}_attention"
    assert name in each.ops("forward") and f"{name}_backward" in each.ops("backward")
    assert len(each.notes) == 1 and "attention on" in each.notes[0]


for _device, _kernel in (("a100-80gb", "flash"), ("h100", "cudnn"), ("mi300x", "flash"), ("t4", "efficient")):
    scenario(f"attention {_device}", _device, torch.float16, _kernel)(attends)
scenario("attention float32", "a100-80gb", torch.float32, "efficient")(attends)


@scenario("attention masks")
def masks() -> None:
    """Boolean masks made on the GPU, under autocast and in float32, leave flash, and the notes say why."""

    def loss(model: nn.Module, batch: Any) -> Any:
        x = model(batch["x"]).view(4, 5, 2, 16).transpose(1, 2)
        mask = torch.ones(5, 5, dtype=torch.bool, device=x.device).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, dropout_p=0.1).float().mean()

    workload = of(nn.Linear(16, 32), loss, {"x": torch.randn(4, 5, 16)})
    for precision in ("32-true", "bf16-mixed"):
        each = found(workload, precision=precision)
        assert "_scaled_dot_product_efficient_attention" in each.ops("forward")
        assert "memory-efficient kernel: not flash since it accepts no mask" in each.notes[0]
    fused = {"_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"}
    assert fused & found(workload, "h100", precision="bf16-mixed").ops("forward")


@scenario("grouped queries")
def grouped() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        x = model(batch["x"]).view(4, 5, 4, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], enable_gqa=True).float().mean()

    workload = of(nn.Linear(16, 32), loss, {"x": torch.randn(4, 5, 16)})
    ampere, hopper, turing = (found(workload, device, precision="bf16-mixed") for device in ("a100-80gb", "h100", "t4"))
    assert "_scaled_dot_product_flash_attention" in ampere.ops()
    assert "_scaled_dot_product_cudnn_attention" in hopper.ops()
    assert "bmm" in turing.ops() and "the math kernel" in turing.notes[0]


@scenario("transformers")
def from_transformers() -> None:
    """Padding decides the kernel of a Llama."""
    if importlib.util.find_spec("transformers") is None:
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(**batch, labels=batch["input_ids"]).loss

    for kernel, lengths in (("flash", [16, 16]), ("efficient", [16, 9])):
        ids = torch.randint(0, 64, (2, 16))
        mask = (torch.arange(16) < torch.tensor(lengths)[:, None]).long()
        each = found(of(model, loss, {"input_ids": ids, "attention_mask": mask}), precision="bf16-mixed")
        assert f"_scaled_dot_product_{kernel}_attention" in each.ops()
        assert kernel == "flash" or "not flash since it accepts no mask" in each.notes[0]


@scenario("microbatches")
def microbatches() -> None:
    two, whole = found(transformer(), microbatch_size=1), found(transformer())
    assert (two.trace.scale_microbatches, two.trace.microbatches) == (4, 2)
    assert two.nbytes["inputs"] == whole.nbytes["inputs"]


@scenario("a view of a large storage")
def view() -> None:
    rows = torch.randn(1000, 16)
    each = found(of(mlp(), data={"x": rows[:4], "y": torch.zeros(4, dtype=torch.long)}))
    assert each.nbytes["inputs"] == 4 * 16 * 4 + 4 * 8


@scenario("estimates")
def estimates() -> None:
    for device in ("h100", "mi300x"):
        made = estimate(transformer(), device=device, precision="16-mixed")
        assert 0 < made.peak_bytes <= (made.peak_reserved_bytes or 0) <= made.peak_upper_bytes


@scenario("fake copies of fake copies")
def twice_fake() -> None:
    workload = transformer()
    once, whole = found(fake_copy(workload, KnownValues.of(mode_of(workload)))), found(workload)
    assert (once.nbytes, once.notes) == (whole.nbytes, whole.notes)
    assert [op.name for op in once.trace.ops] == [op.name for op in whole.trace.ops]


def main(reply: Path, left_out: list[str]) -> None:
    """Run all scenarios but some, and write what went wrong with each; "" for nothing."""
    gc.collect()
    gc.freeze()  # as tests/conftest.py
    wrong: dict[str, str] = {}
    for name in [name for name in SCENARIOS if name not in left_out]:
        try:
            SCENARIOS[name]()
            wrong[name] = ""
        except Exception:
            wrong[name] = traceback.format_exc()
    reply.write_text(json.dumps(wrong))


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]), sys.argv[2:])
