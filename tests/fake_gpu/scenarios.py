"""Steps captured on fake CUDA tensors. `test_gpu.py` runs this module in a process of its own, and looks at them."""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from memfit.capture.fake_workload import fake_copy, mode_of
from memfit.capture.known_values import KnownValues
from memfit.capture.step_capture import capture
from memfit.capture.step_recording import CaptureJob
from memfit.cost.modelled_costs import roofline
from memfit.hardware.catalogue import known_devices
from memfit.hardware.host import find_device
from memfit.ir.plan import Levers
from memfit.ir.remat import Regions
from memfit.ir.simulate import simulate
from memfit.ir.trace import Trace
from memfit.levers.stack import applied
from memfit.pipeline._estimate import estimate
from memfit.pipeline._plan import plan
from memfit.planner.captures import capture_levers
from memfit.planner.prediction import predict
from memfit.recipes import byte_lm
from memfit.solver.candidates import options
from memfit.workload import Workload, batch_size_of
from tests.fake_gpu.process import answer
from tests.ir.test_simulate import SHARES_CASTS, differs
from tests.models import BUILDERS, COSTS, LARGE, cross_entropy, random_selection, transformer

SCENARIOS: dict[str, Callable[[], Any]] = {}


IN_CI: set[str] = {"offload planned", "optimizer states planned"}
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


def summary(trace: Trace) -> dict[str, Any]:
    """What the tests look at: bytes by category, operators by phase, notes."""
    nbytes: Counter[str] = Counter()
    for storage in trace.storages:
        nbytes[storage.category] += storage.nbytes
    ops: dict[str, dict[str, int]] = {}
    for op in trace.ops:
        ops.setdefault(op.phase, {}).setdefault(op.name.removeprefix("aten."), 0)
        ops[op.phase][op.name.removeprefix("aten.")] += 1
    return {"nbytes": dict(nbytes), "ops": ops, "notes": trace.notes, "device": trace.device}


def parameter_bytes(workload: Workload) -> int:
    return sum(p.numel() * p.element_size() for p in workload.model.parameters())


QUICK = ("transformer", "convnet", "twice")
"""Builders whose steps hold all that the tests look at: CI takes the others."""
CHECKPOINTED = {("transformer", "32-true"), ("convnet", "bf16-mixed")}
"""Microbatches, shared casts and running statistics."""
for _name in BUILDERS:
    for _precision in ("32-true", "16-mixed"):
        if _name not in QUICK:
            IN_CI.add(f"{_name} {_precision}")

        @scenario(f"{_name} {_precision}", _name, _precision)
        def builder(name: str, precision: str) -> Any:
            workload = BUILDERS[name]()
            found = summary(traced(workload, precision=precision))
            return {**found, "parameters": parameter_bytes(workload)}

    for _precision, _microbatches in (("32-true", 2 if _name == "transformer" else 1), ("bf16-mixed", 1)):
        _case = f"checkpointing {_name} {_precision} {_microbatches}"
        if (_name, _precision) not in CHECKPOINTED:
            IN_CI.add(_case)

        @scenario(_case, _name, _precision, _microbatches)
        def checkpointing(name: str, precision: str, microbatches: int) -> Any:
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
            return {
                "regions": len(regions),
                "differs": differs(simulate(plain, COSTS, regions), run, slack=slack),
                "notices": differs(simulate(plain, COSTS), run),
                "recomputed": any(op.phase == "recompute" for op in there.ops),
            }


@scenario("offload")
def offload() -> Any:
    """The simulation of blocks whose inputs, and what they keep, wait in host memory, against the step captured."""
    workload = transformer(**LARGE["transformer"])
    plain = traced(workload)
    costs = roofline([plain], known_devices()["a100-80gb"])
    found = [o for o in options(Regions(plain), costs, offload=True) if o.regions[0].offload]
    blocks = [o.regions[0] for o in found if o.modules in (("blocks.0",), ("blocks.1",))]
    answers = []
    for keeps in (0, 3):
        regions = [r for r in blocks if len(r.keep) == keeps and r.prefetch]
        there = traced(workload, regions=tuple(regions))
        run = simulate(there, roofline([there], known_devices()["a100-80gb"]))
        names = [op.name for op in there.ops]
        answers.append(
            {
                "prefetch": [r.prefetch for r in regions],
                "simulated": simulate(plain, costs, regions).peak_bytes,
                "applied": run.peak_bytes,
                "ops": Counter(name for name in names if name.startswith("memfit.")),
                "waits": sum(s for s, name in zip(run.seconds, names, strict=True) if name == "memfit.wait.default"),
            }
        )
    return answers


@scenario("offload planned")
def offload_planned() -> Any:
    """Plans within a budget, without the host's memory and with some."""
    workload = byte_lm(n_layer=2, d_model=512, n_head=8, context=512, batch_size=16, max_bytes=100_000, dropout=0.0)
    device = "a100-80gb"
    plain = estimate(workload, device=device)
    options = {"device": device, "numerics": "exact", "precisions": ["32-true"], "points": 1, "time_limit_seconds": 0.5}
    found = {}
    for host in (None, "1GiB"):
        budget = plain.peak_upper_bytes * 5 // 8
        made = plan(workload, budget=budget, host_budget=host, **options)  # type: ignore[arg-type]
        found[str(host)] = {
            "seconds": made.predicted.step_seconds,
            "fits": made.predicted.peak_upper_bytes <= budget,
            "offloaded": sum(region.offload for region in made.levers.regions),
            "classes": made.classes,
        }
    return found


@scenario("optimizer states planned")
def optimizer_states_planned() -> Any:
    """A plan that only states in the host's memory make fit, and the same states in 8 bits."""
    workload = byte_lm(n_layer=2, d_model=512, n_head=8, context=32, batch_size=1, max_bytes=100_000, dropout=0.0)
    found_device, whole = find_device("rtx-3090"), Levers(microbatch_size=1)
    peaks, seconds = {}, {}
    for lever in ("as-is", "offloaded", "adamw-8bit"):
        trace = capture_levers(workload, replace(whole, optimizer=lever), found_device)
        made = predict(trace, roofline([trace], found_device), found_device)[0]
        peaks[lever], seconds[lever] = made.peak_bytes, made.step_seconds
    settings = {"device": "rtx-3090", "numerics": "exact", "precisions": ["32-true"], "points": 1}
    budget = (peaks["as-is"] + peaks["offloaded"]) // 2
    planned = plan(workload, budget=budget, host_budget="1GiB", time_limit_seconds=0.5, **settings)  # type: ignore[arg-type]
    return {
        "state_bytes": sum(2 * p.nbytes for p in workload.model.parameters()),
        "link": found_device.link_bytes_per_second,
        "peaks": peaks,
        "seconds": seconds,
        "classes": planned.classes,
        "budget": budget,
        "upper": planned.predicted.peak_upper_bytes,
    }


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 16), "y": torch.tensor([0, 2, 1, 0])}


Loss = Callable[[nn.Module, Any], Any]


def of(model: nn.Module, loss: Loss = cross_entropy, data: Any = None, optimizer: Any = torch.optim.AdamW) -> Workload:
    return Workload(model, data or batch(), loss, optimizer(model.parameters()), max_grad_norm=1.0)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW fused": functools.partial(torch.optim.AdamW, fused=True),
    "AdamW one by one": functools.partial(torch.optim.AdamW, foreach=False),
    "AdamW capturable": functools.partial(torch.optim.AdamW, capturable=True),
    "AdamW tensor rate": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-3)),
    "SGD momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": torch.optim.RMSprop,
    "ASGD": torch.optim.ASGD,
}
for _name, _optimizer in OPTIMIZERS.items():
    for _precision in ("32-true", "16-mixed") if _name in ("AdamW", "AdamW fused", "Adafactor") else ("32-true",):

        @scenario(f"{_name} {_precision}", _optimizer, _precision)
        def optimizer(make: Callable[..., torch.optim.Optimizer], precision: str) -> Any:
            workload = of(mlp(), optimizer=make)
            return {**summary(traced(workload, precision=precision)), "parameters": parameter_bytes(workload)}


@scenario("optimizer with state")
def with_state() -> Any:
    workload = of(mlp(), optimizer=functools.partial(torch.optim.AdamW, fused=True))
    for _ in range(2):
        cross_entropy(workload.model, workload.batch).backward()
        workload.optimizer.step()
    return {**summary(traced(workload)), "parameters": parameter_bytes(workload)}


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


for _name, _loss in USER_CODE.items():

    @scenario(_name, _loss)
    def code(loss: Loss) -> Any:
        return summary(traced(of(mlp(), loss)))


@scenario("has_no_fake_kernel")
def has_no_fake_kernel() -> Any:
    def loss(model: nn.Module, batch: Any) -> Any:
        rescaled = torch.ops.aten._transform_bias_rescale_qkv(
            model(batch["x"])[None].repeat(1, 1, 4), torch.ones(12), 1
        )
        return rescaled[0].sum()

    return summary(traced(of(mlp(), loss)))


class Rnn(nn.Module):
    """A recurrent layer, and a head on its last output."""

    def __init__(self, kind: str, out: int, **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(16, 8, batch_first=True, **options)
        self.head = nn.Linear(out, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.rnn(x.unsqueeze(1).expand(-1, 5, -1))[0][:, -1])
        return found


RNNS = {
    "LSTM": Rnn("LSTM", 8),
    "LSTM projected": Rnn("LSTM", 4, proj_size=4),
    "GRU deep": Rnn("GRU", 16, num_layers=2, dropout=0.1, bidirectional=True),
    "RNN": Rnn("RNN", 8, nonlinearity="relu", bias=False),
}
for _name, _model in RNNS.items():
    for _precision in ("32-true", "bf16-mixed"):

        @scenario(f"{_name} {_precision}", _model, _precision)
        def recurrent(model: nn.Module, precision: str) -> Any:
            trace = traced(of(model), precision=precision)
            work = {op.name: trace.works[op.signature].flops for op in trace.ops if "_cudnn_rnn" in op.name}
            return {**summary(trace), "flops": work}


@scenario("kernels of a GPU")
def kernels() -> Any:
    model = nn.Sequential(nn.Linear(16, 8), nn.RMSNorm(8), nn.SiLU(), nn.Mish(), nn.Linear(8, 3))
    return summary(traced(of(model)))


@scenario("compiled")
def compiled() -> Any:
    in_place = mlp()
    in_place.compile()
    models = (torch.compile(mlp()), nn.Sequential(torch.compile(mlp())), in_place)
    return [traced(of(model)).notes for model in models] + [traced(of(mlp(), torch.compile(cross_entropy))).notes]


def attends(device: str, dtype: torch.dtype) -> Any:
    def loss(model: nn.Module, batch: Any) -> Any:
        x = model(batch["x"]).view(4, 5, 2, 16).transpose(1, 2).to(dtype)
        return F.scaled_dot_product_attention(x, x, x).float().mean()

    trace = traced(of(nn.Linear(16, 32), loss, {"x": torch.randn(4, 5, 16)}), device)
    return summary(trace)


for _device in ("a100-80gb", "h100", "mi300x", "t4"):
    scenario(f"attention {_device}", _device, torch.float16)(attends)
scenario("attention float32", "a100-80gb", torch.float32)(attends)


@scenario("attention masks")
def masks() -> Any:
    """Boolean masks made on the GPU, under autocast and in float32."""

    def loss(model: nn.Module, batch: Any) -> Any:
        x = model(batch["x"]).view(4, 5, 2, 16).transpose(1, 2)
        mask = torch.ones(5, 5, dtype=torch.bool, device=x.device).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, dropout_p=0.1).float().mean()

    workload = of(nn.Linear(16, 32), loss, {"x": torch.randn(4, 5, 16)})
    return {
        f"{device} {precision}": summary(traced(workload, device, precision=precision))
        for device, precision in (("a100-80gb", "32-true"), ("a100-80gb", "bf16-mixed"), ("h100", "bf16-mixed"))
    }


@scenario("grouped queries")
def grouped() -> Any:
    def loss(model: nn.Module, batch: Any) -> Any:
        x = model(batch["x"]).view(4, 5, 4, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], enable_gqa=True).float().mean()

    workload = of(nn.Linear(16, 32), loss, {"x": torch.randn(4, 5, 16)})
    return {device: summary(traced(workload, device, precision="bf16-mixed")) for device in ("a100-80gb", "h100", "t4")}


@scenario("transformers")
def from_transformers() -> Any:
    """A Llama whose batch has no padding, and one whose has."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(**batch, labels=batch["input_ids"]).loss

    found = {}
    for name, lengths in (("full", [16, 16]), ("padded", [16, 9])):
        ids = torch.randint(0, 64, (2, 16))
        mask = (torch.arange(16) < torch.tensor(lengths)[:, None]).long()
        workload = of(model, loss, {"input_ids": ids, "attention_mask": mask})
        found[name] = summary(traced(workload, precision="bf16-mixed"))
    return found


@scenario("microbatches")
def microbatches() -> Any:
    trace = traced(transformer(), microbatch_size=1)
    return {"scale": trace.scale_microbatches, "run": trace.microbatches, "inputs": summary(trace)["nbytes"]["inputs"]}


@scenario("a view of a large storage")
def view() -> Any:
    rows = torch.randn(1000, 16)
    return summary(traced(of(mlp(), data={"x": rows[:4], "y": torch.zeros(4, dtype=torch.long)})))["nbytes"]


@scenario("estimates")
def estimates() -> Any:
    found = {}
    for device in ("h100", "mi300x"):
        prediction = estimate(transformer(), device=device, precision="16-mixed")
        found[device] = [prediction.peak_bytes, prediction.peak_reserved_bytes, prediction.peak_upper_bytes]
    return found


@scenario("fake copies of fake copies")
def twice_fake() -> Any:
    workload = transformer()
    once = fake_copy(workload, KnownValues.of(mode_of(workload)))
    return summary(traced(once)) == summary(traced(workload))


if __name__ == "__main__":
    torch.manual_seed(0)
    answer({name: made for name, made in SCENARIOS.items() if name not in sys.argv[2:]})
