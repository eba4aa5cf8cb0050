"""The predictions of the claims page, for GPUs that are not here.

`benchmarks.claims` runs this module in a process with fake CUDA tensors (`memfit.hardware.shim`), where
models of any size are built and captured without memory.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import claims_workloads as workloads
from examples.large_gpt import gpt
from memfit.capture import KnownValues
from memfit.hardware import find_device
from memfit.ir import (
    MODES,
    CostTable,
    Device,
    Levers,
    Precision,
    Prediction,
    Region,
    Regions,
    Timeline,
    Trace,
    simulate,
)
from memfit.planner import capture_levers, costs_of, predict
from memfit.ranks import Sharding, shard
from memfit.solver import Solver, build, options
from memfit.workload import Workload, batch_size_of, rng_preserved

Case = dict[str, Any]
Make = Callable[[], Workload]

KERNELS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
BERT_LAYERS = tuple(Region((f"bert.encoder.layer.{i}",)) for i in range(24))
GPT_BLOCKS = tuple(Region((f"transformer.h.{i}",)) for i in range(24))
UNET_STAGES = ("ResidualUnit", "Convolution", "UnetBasicBlock", "UnetUpBlock", "UnetOutBlock")
MRI = (512, 512, 128)
RANKS = 8
PASSES = {"layers": ((), (8,), (4, 16), (2, 8, 32)), "blocks": ((), (1,), (1, 8), (1, 4, 16))}
"""Groups of a chain of 64 that are checkpointed, one in the other, by how often their forward pass runs again."""
EFFICIENTNETS = {
    "EfficientNet-B0": (224, 1.0, 1.0, 1280, 0.2),
    "EfficientNet-B1": (240, 1.0, 1.1, 1280, 0.2),
    "EfficientNet-B2": (260, 1.1, 1.2, 1408, 0.3),
    "EfficientNet-B3": (300, 1.2, 1.4, 1536, 0.3),
    "EfficientNet-B4": (380, 1.4, 1.8, 1792, 0.4),
}
"""Pixels, widths, depths, last channels and dropout (Tan and Le 2019, and its published code)."""
RESNETS = {"ResNet-50": (3, 4, 6, 3), "ResNet-152": (3, 8, 36, 3)}
PROVABLE = {"layers": 64, "blocks": 16}  # the depth up to which the solver proves its optimum in seconds


def fake(make: Make) -> Workload:
    """Return a workload whose tensors are fake and take no memory."""
    values = KnownValues.of(FakeTensorMode(allow_non_fake_inputs=True))
    with rng_preserved(), values.fake, values:
        return make()


def activation_bytes(timeline: Timeline) -> int:
    """Return the most bytes that activations and temporaries take together in forward and backward passes.

    That is what checkpointing and precision act on: no parameters, gradients, optimizer state or inputs.
    """
    kept, passing = timeline.live_bytes["activations"], timeline.live_bytes["temporaries"]
    rows = zip(kept, passing, timeline.phases, strict=True)
    return max(a + b for a, b, phase in rows if phase != "optimizer")


def state_bytes(timeline: Timeline) -> int:
    """Return the most bytes that parameters, gradients and optimizer state take together."""
    live = timeline.live_bytes
    rows = zip(live["parameters"], live["gradients"], live["optimizer state"], strict=True)
    return max(map(sum, rows))


def capture_step(workload: Workload, device: Device, precision: Precision, regions: Sequence[Region] = ()) -> Trace:
    """Return the trace of a workload's whole step."""
    levers = Levers(precision=precision, microbatch_size=batch_size_of(workload.batch), regions=tuple(regions))
    return capture_levers(workload, levers, device)


def case(claim: str, setting: str, trace: Trace, device: Device, **more: Any) -> Case:
    """Return a row of the result file: what a captured step is predicted to take."""
    prediction, timeline = predict(trace, costs_of([trace], device), device)
    print(f"{claim} · {setting} · {device.name} · {more}", file=sys.stderr)
    return {
        "claim": claim,
        "setting": setting,
        "device": device.name,
        "precision": trace.precision,
        **more,
        "peak_bytes": prediction.peak_bytes,
        "reserved_bytes": prediction.peak_reserved_bytes,
        "activation_bytes": activation_bytes(timeline),
        "state_bytes": state_bytes(timeline),
        "step_seconds": prediction.step_seconds,
        "fits": fits(prediction),
    }


def fits(prediction: Prediction) -> str:
    """Return whether a step fits its device: "yes", "no", or "perhaps" where the interval around it does not tell."""
    reserved, upper, usable = prediction.peak_reserved_bytes, prediction.peak_upper_bytes, prediction.device_bytes
    if usable is None or upper <= usable:
        return "yes"
    return "no" if (reserved or 0) > usable else "perhaps"


def mixed_precision(quick: bool) -> Iterator[Case]:
    """ResNet-50 at 224 x 224: float32 against autocast."""
    for name, mixed in (("a100-80gb", "bf16-mixed"), ("v100-16gb", "16-mixed"), ("rtx-3090", "bf16-mixed")):
        device = find_device(name)
        for size in (32,) if quick else (1, 8, 32, 64, 128):
            workload = fake(lambda size=size: workloads.resnet50(size, 224))  # type: ignore[misc]
            for precision in ("32-true", mixed):
                trace = capture_step(workload, device, precision)  # type: ignore[arg-type]
                yield case("mixed precision", precision, trace, device, batch_size=size)


def bert(quick: bool) -> Iterator[Case]:
    """BERT-large on 512 tokens: plain against every layer checkpointed, for both ways to compute attention."""
    device = find_device("a100-80gb")
    for attention in ("eager",) if quick else ("eager", "sdpa"):
        for size in (8,) if quick else (8, 32):
            workload = fake(lambda a=attention, s=size: workloads.bert(s, 512, attention=a))  # type: ignore[misc]
            for setting, regions in (("plain", ()), ("every layer", BERT_LAYERS)):
                trace = capture_step(workload, device, "32-true", regions)
                yield case("checkpointing", setting, trace, device, attention=attention, batch_size=size)


def chain(kind: str, depth: int, sizes: Sequence[int]) -> Workload:
    """Return a chain of 64 MiB (layers) or 16 MiB (blocks) activations between its members, in float32."""
    if kind == "layers":
        return workloads.layers(depth, sizes, rows=16384, width=1024)
    return workloads.blocks(depth, sizes, batch_size=8, length=512, width=1024)


def chain_cases(claim: str, kind: str, depth: int, groups: Sequence[int], sizes: Sequence[int]) -> Iterator[Case]:
    """Return what a chain takes with groups of each of some sizes checkpointed; a size of 0 checkpoints none."""
    device = find_device("a100-80gb")
    workload = fake(lambda: chain(kind, depth, groups))
    trace = capture_step(workload, device, "32-true")
    costs = costs_of([trace], device)
    row = {"claim": claim, "setting": kind, "device": device.name, "depth": depth}
    for size in sizes:
        names = workloads.groups_of(workload.model, size) if size else []
        yield {**row, "group": size, **simulated(trace, costs, [Region((name,)) for name in names])}
    if claim == "depth" and depth <= PROVABLE[kind]:
        regions = Regions(trace)
        problem = build(regions, costs, options(regions, costs, set()))
        choice = Solver(problem).leanest()
        found = simulated(trace, costs, problem.regions(choice.x))
        yield {**row, "group": "solver", "status": choice.status, **found}
    print(f"{claim} · {kind} · {depth}", file=sys.stderr)


def simulated(trace: Trace, costs: CostTable, regions: Sequence[Region]) -> Case:
    """Return the figures of a step with some regions checkpointed."""
    timeline = simulate(trace, costs, regions)
    return {
        "peak_bytes": timeline.peak_bytes,
        "activation_bytes": activation_bytes(timeline),
        "step_seconds": timeline.step_seconds,
    }


def depth(quick: bool) -> Iterator[Case]:
    """Chains of 4 to 256 members: plain, each member checkpointed, and groups of the square root of their number."""
    for kind in ("layers", "blocks"):
        for root in (2, 4, 8) if quick else (2, 3, 4, 6, 8, 10, 12, 16):
            yield from chain_cases("depth", kind, root * root, [root], (0, 1, root))


def spacing(quick: bool) -> Iterator[Case]:
    """Chains of 100 members, a checkpoint every K."""
    for kind in ("layers",) if quick else ("layers", "blocks"):
        yield from chain_cases("spacing", kind, 100, [2, 10, 50], (0, 1, 2, 10, 50))
        yield from chain_cases("spacing", kind, 100, [5, 25], (5, 25))
        yield from chain_cases("spacing", kind, 100, [4, 20], (4, 20))


@contextlib.contextmanager
def attention(kernel: str) -> Iterator[None]:
    """Let `scaled_dot_product_attention` take one kernel only."""
    with sdpa_kernel([KERNELS[kernel]]):
        yield


def passes(quick: bool) -> Iterator[Case]:
    """Chains of 64 members with checkpoints within checkpoints."""
    device = find_device("a100-80gb")
    for kind, groups in PASSES.items():
        for again, sizes in enumerate(groups[:2] if quick else groups):
            workload = fake(lambda k=kind, s=sizes: workloads.nested(chain(k, 64, []), s))  # type: ignore[misc]
            trace = capture_step(workload, device, "32-true")
            yield case("passes", kind, trace, device, passes=again, groups=list(sizes))


def image_nets(quick: bool) -> Iterator[Case]:
    """ResNets and EfficientNets, each at the image size that it was published with, batch 32."""
    device = find_device("a100-80gb")
    makes: dict[str, Make] = {n: lambda d=d: workloads.resnet50(32, 224, d) for n, d in RESNETS.items()}  # type: ignore[misc]
    makes |= {n: lambda a=a: workloads.efficientnet(32, *a) for n, a in EFFICIENTNETS.items()}  # type: ignore[misc]
    for net, make in list(makes.items())[: 1 if quick else None]:
        yield case("image nets", net, capture_step(fake(make), device, "32-true"), device)


def sequence_length(quick: bool) -> Iterator[Case]:
    """GPT-2 (124 M parameters), one sequence, by attention kernel."""
    device = find_device("a100-80gb")
    for exponent in range(9, 13 if quick else 16):
        workload = fake(lambda e=exponent: workloads.gpt2(1, 2**e))  # type: ignore[misc]
        for kernel in KERNELS:
            with attention(kernel):
                trace = capture_step(workload, device, "bf16-mixed")
            yield case("attention", kernel, trace, device, length=2**exponent)


def kept_convolutions(trace: Trace, names: Sequence[str]) -> tuple[Region, ...]:
    """Return regions in which what convolutions return is kept, and what lies between them computed again."""
    regions = Regions(trace)
    found = []
    for name in names:
        region = regions.calls[name][0]
        inside = range(region.start, region.stop)
        kept = [regions.op_key(region, op) for op in inside if trace.ops[op].name == "aten.convolution.default"]
        found.append(Region((name,), tuple(kept)))
    return tuple(found)


def mri(quick: bool) -> Iterator[Case]:
    """3-D U-Nets on one volume of 512 x 512 x 128."""
    channels = (32, 64, 128, 256, 512)
    nets: dict[str, Make] = {"UNet 32": lambda: workloads.unet(MRI, channels)}
    if not quick:
        nets["UNet 16"] = lambda: workloads.unet(MRI, [c // 2 for c in channels])
        nets["DynUNet 16"] = lambda: workloads.full_unet(MRI, 16)
        nets["DynUNet 32"] = lambda: workloads.full_unet(MRI, 32)
    device = find_device("rtx-3090")
    for net, make in nets.items():
        workload = fake(make)
        for precision in ("32-true", "bf16-mixed"):
            yield from unet_cases(net, workload, device, precision)


def unet_cases(net: str, workload: Workload, device: Device, precision: Precision) -> Iterator[Case]:
    """Return a U-Net's step plain, with lean norms, and with every stage checkpointed."""
    stages = workloads.outermost(workload.model, UNET_STAGES)
    plain = capture_step(workload, device, precision)
    yield case("mri", "plain", plain, device, net=net)
    lean = capture_step(workload, device, precision, kept_convolutions(plain, stages))
    yield case("mri", "lean norms", lean, device, net=net)
    whole = capture_step(workload, device, precision, [Region((name,)) for name in stages])
    yield case("mri", "checkpointed", whole, device, net=net)


def billion(quick: bool) -> Iterator[Case]:
    """A GPT of a billion parameters: attention by kernel, checkpointing, and one rank of eight."""
    device = find_device("a100-80gb")
    workload = fake(lambda: gpt("gpt_1b", n_layer=24, width=1792, n_head=14, batch_size=8))
    with attention("math"):
        yield case("billion", "fp32", capture_step(workload, device, "32-true"), device, ranks=1, checkpointed=False)
    for kernel in ("math", "flash"):
        with attention(kernel):
            plain = capture_step(workload, device, "bf16-mixed")
        yield case("billion", kernel, plain, device, ranks=1, checkpointed=False)
    if quick:
        return
    with attention("flash"):
        trace = capture_step(workload, device, "bf16-mixed", GPT_BLOCKS)
    yield case("billion", "flash", trace, device, ranks=1, checkpointed=True)
    for step, checkpointed in ((plain, False), (trace, True)):
        for mode in MODES:
            rank = shard(step, Sharding(world_size=RANKS, mode=mode))
            yield case("billion", mode, rank, device, ranks=RANKS, checkpointed=checkpointed)


CLAIMS = (mixed_precision, bert, depth, spacing, passes, image_nets, sequence_length, mri, billion)


def main() -> None:
    """Write the cases to the file that the first argument names; "quick" as the second takes fewer."""
    out, quick = Path(sys.argv[1]), "quick" in sys.argv[2:]
    cases = [row for claim in CLAIMS for row in claim(quick)]
    out.write_text(json.dumps(cases))


if __name__ == "__main__":
    main()
