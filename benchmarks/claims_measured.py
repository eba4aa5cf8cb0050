"""The measurements of the claims page: the same levers on this CPU, at sizes that fit it.

Peaks are what PyTorch's allocator reported, times the medians of steps that were run in turns.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import claims_workloads as workloads
from benchmarks.claims_predicted import (
    PASSES,
    UNET_STAGES,
    activation_bytes,
    attention,
    capture_step,
    kept_convolutions,
)
from benchmarks.common import whole_run_peak_bytes
from memfit.capture import measure_peak_bytes, real_copy
from memfit.hardware import find_device
from memfit.ir import Levers, Precision, Region, simulate
from memfit.levers import applied
from memfit.planner import capture_levers, costs_of
from memfit.training import Step
from memfit.workload import Workload, batch_size_of

Case = dict[str, Any]
Around = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Variant:
    """A workload with levers, one of those that are compared.

    Attributes:
        around: What the step runs in.
        more: Goes into its row.
    """

    setting: str
    workload: Workload
    regions: Sequence[Region] = ()
    precision: Precision = "32-true"
    around: Around = contextlib.nullcontext
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def levers(self) -> Levers:
        size = batch_size_of(self.workload.batch)
        return Levers(precision=self.precision, microbatch_size=size, regions=tuple(self.regions))


def compare(claim: str, variants: Sequence[Variant], rounds: int) -> list[Case]:
    """Return a row for each variant: its peak predicted and measured, and its time beside the others'."""
    seconds = interleaved_seconds(variants, rounds)
    rows = []
    for variant, median in zip(variants, seconds, strict=True):
        with variant.around():
            trace = capture_levers(variant.workload, variant.levers, find_device("cpu"))
            timeline = simulate(trace, costs_of([trace], find_device("cpu")))
            peak = whole_run_peak_bytes(variant.workload, variant.levers)
        row = {
            "claim": claim,
            "setting": variant.setting,
            "device": "cpu",
            "precision": variant.precision,
            **variant.more,
            "predicted_peak_bytes": timeline.peak_bytes,
            "measured_peak_bytes": peak,
            "activation_bytes": activation_bytes(timeline),
            "measured_seconds": median,
        }
        print(f"{claim} · {variant.setting} · measured · {variant.more}", file=sys.stderr)
        rows.append(row)
    return rows


def interleaved_seconds(variants: Sequence[Variant], rounds: int) -> list[float]:
    """Return the median time of a step of each variant; they run in turns, after one step of each that is left out."""
    taken: list[list[float]] = [[] for _ in variants]
    with contextlib.ExitStack() as stack:
        steps = [stack.enter_context(applied(v.levers, real_copy(v.workload))) for v in variants]
        for _ in range(rounds + 1):
            for variant, step, times in zip(variants, steps, taken, strict=True):
                times.append(_seconds(step, variant))
    return [statistics.median(times[1:]) for times in taken]


def _seconds(step: Step, variant: Variant) -> float:
    with variant.around():
        started = time.perf_counter()
        step(step.workload.batch)
        return time.perf_counter() - started


def mixed_precision(quick: bool) -> list[Case]:
    """ResNet-50 at 64 x 64."""
    workload = workloads.resnet50(8 if quick else 32, 64)
    variants = [Variant(name, workload, precision=name) for name in ("32-true", "bf16-mixed")]
    return compare("mixed precision", variants, 3)


def checkpointing(quick: bool) -> list[Case]:
    """A BERT of 4 layers."""
    workload = workloads.bert(4, 128 if quick else 256, attention="eager", width=256, layers=4, vocabulary=4096)
    every = [Region((f"bert.encoder.layer.{i}",)) for i in range(4)]
    return compare("checkpointing", [Variant("plain", workload), Variant("every layer", workload, every)], 5)


def depth(quick: bool) -> list[Case]:
    """Chains of layers and of blocks."""
    rows = []
    for kind in ("layers", "blocks"):
        root = 4 if quick else 8
        made = small_chain(kind, root * root, [root])
        rows += compare("depth", [spaced(made, kind, root * root, size) for size in (0, 1, root)], 3)
    return rows


def spacing(quick: bool) -> list[Case]:
    """100 layers, a checkpoint every K."""
    made = small_chain("layers", 100, [2, 10, 50])
    return compare("spacing", [spaced(made, "layers", 100, k) for k in (0, 1, 2, 10, 50)], 2 if quick else 3)


def small_chain(kind: str, depth: int, groups: Sequence[int]) -> Workload:
    if kind == "layers":
        return workloads.layers(depth, groups, rows=1024, width=256)
    return workloads.blocks(depth, groups, batch_size=8, length=128, width=128)


def spaced(made: Workload, kind: str, depth: int, size: int) -> Variant:
    """Return a chain with its groups of a size checkpointed; none for 0."""
    names = workloads.groups_of(made.model, size) if size else []
    return Variant(kind, made, [Region((name,)) for name in names], more={"depth": depth, "group": size})


def four(quick: bool) -> list[Case]:
    """Chains of four members, in two groups."""
    rows = []
    for kind in ("layers", "blocks"):
        made = small_chain(kind, 4, [2])
        rows += compare("four", [spaced(made, kind, 4, size) for size in (0, 1, 2)], 3 if quick else 15)
    return rows


def passes(quick: bool) -> list[Case]:
    """64 layers or blocks, with checkpoints within checkpoints."""
    rows = []
    for kind, groups in PASSES.items():
        variants = [
            Variant(kind, workloads.nested(small_chain(kind, 64, []), sizes), more={"passes": again})
            for again, sizes in enumerate(groups[:2] if quick else groups)
        ]
        rows += compare("passes", variants, 3)
    return rows


def undifferentiable(quick: bool) -> list[Case]:
    """Members with functions that have no gradient: whether gradients are those of the plain step, bit by bit."""
    rows = []
    for kind in list(workloads.UNDIFFERENTIABLE)[: 2 if quick else None]:
        made = workloads.undifferentiable(kind)
        every = tuple(Region((str(i),)) for i in range(4))
        found = [_gradients(made, regions) for regions in ((), every)]
        same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        rows.append({"claim": "undifferentiable", "setting": kind, "device": "cpu", "bitwise": same})
    return rows


def _gradients(made: Workload, regions: tuple[Region, ...]) -> list[torch.Tensor]:
    """Return the parameters after a step of SGD, so that each is its gradient beside what it was."""
    copied = real_copy(made)
    torch.manual_seed(0)  # of what is drawn
    with applied(Levers(microbatch_size=batch_size_of(made.batch), regions=regions), copied) as step:
        step(copied.batch)
    return [parameter.detach().clone() for parameter in copied.model.parameters()]


def sequence_length(quick: bool) -> list[Case]:
    """Two Transformer blocks, by attention kernel."""
    rows = []
    for exponent in range(9, 11 if quick else 13):
        made = workloads.blocks(2, [], batch_size=1, length=2**exponent, width=256)
        around = {kernel: (lambda k=kernel: attention(k)) for kernel in ("math", "flash")}
        variants = [Variant(k, made, around=a, more={"length": 2**exponent}) for k, a in around.items()]
        rows += compare("attention", variants, 3)
    return rows


def mri(quick: bool) -> list[Case]:
    """The UNet of 16 channels on a smaller volume."""
    made = workloads.unet((64, 64, 32) if quick else (128, 128, 64), (16, 32, 64, 128, 256))
    stages = workloads.outermost(made.model, UNET_STAGES)
    whole = [Region((name,)) for name in stages]
    variants = []
    precisions: tuple[Precision, ...] = ("32-true",) if quick else ("32-true", "bf16-mixed")
    for precision in precisions:
        lean = kept_convolutions(capture_step(made, find_device("cpu"), precision), stages)
        for setting, regions in (("plain", ()), ("lean norms", lean), ("checkpointed", whole)):
            variants.append(Variant(setting, made, regions, precision, more={"net": "UNet 16"}))
    return compare("mri", variants, 3)


def compiled(quick: bool) -> list[Case]:
    """A GPT-2 of 4 layers, eager and under `torch.compile`; peaks are of a step that is not the first."""
    if quick:
        return []
    made = workloads.gpt2(4, 256, width=256, layers=4, vocabulary=4096)
    levers, rows = Levers(microbatch_size=4), []
    with contextlib.ExitStack() as stack:
        steps = {name: stack.enter_context(applied(levers, real_copy(made))) for name in ("eager", "compiled")}
        steps["compiled"].workload.model.compile()
        for step in steps.values():
            step(made.batch)
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(5):
            for name, step in steps.items():
                taken[name].append(_seconds(step, Variant(name, made)))
        for name, step in steps.items():
            row = {"claim": "billion", "setting": name, "device": "cpu", "precision": "32-true"}
            peak = measure_peak_bytes(step, made.batch)
            rows.append({**row, "measured_peak_bytes": peak, "measured_seconds": statistics.median(taken[name])})
    return rows


CLAIMS = (
    mixed_precision,
    checkpointing,
    depth,
    spacing,
    four,
    passes,
    undifferentiable,
    sequence_length,
    mri,
    compiled,
)


def measured(quick: bool) -> list[Case]:
    """Return all rows."""
    torch.manual_seed(0)
    return [row for claim in CLAIMS for row in claim(quick)]
