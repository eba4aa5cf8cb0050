"""A plausible plan, its timelines and a run of it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any, Literal, get_origin

import msgspec
import pytest
from rich.console import Console, RenderableType

from memfit.ir import (
    TIMELINE_CATEGORIES,
    Candidate,
    Comparison,
    Evaluation,
    Event,
    Levers,
    MeasuredStep,
    ModuleRow,
    Numerics,
    Plan,
    Precision,
    Prediction,
    Region,
    RunRecord,
    Solution,
    Throughput,
    Timeline,
    Verification,
    Views,
)
from memfit.levers import LeversOn, lever_uses

MIB = 1024**2
GIB = 1024**3
BLOCKS = 12


def make_timeline(recompute: bool, microbatches: int = 1) -> Timeline:
    """Return a step of a 12-block model: activations pile up, are let go of in reverse, then the optimizer runs."""
    live: dict[str, list[int]] = {name: [] for name in TIMELINE_CATEGORIES}
    labels, modules, phases, seconds = [], [], [], []
    state = {"activations": 0, "gradients": 0}

    def point(phase: str, module: str, op: str, temporary: int, seconds_: float = 1e-3) -> None:
        fixed = {"parameters": 950 * MIB, "buffers": 3 * MIB, "optimizer state": 1900 * MIB, "inputs": 24 * MIB}
        now = {**fixed, **state, "temporaries": temporary, "workspaces": 65 * MIB if op == "mm" else 8 * MIB}
        for name in live:
            live[name].append(now[name])
        labels.append(" · ".join(part for part in (phase, module, f"aten.{op}.default") if part))
        modules.append(module)
        phases.append(phase)
        seconds.append(seconds_ / min(2, microbatches))

    def block(phase: str, i: int, grow: int) -> None:
        for j, (part, op) in enumerate((("norm", "native_layer_norm"), ("attn", "mm"), ("mlp", "mm"), ("mlp", "gelu"))):
            state["activations"] += grow
            point(phase, f"blocks.{i}.{part}", op, (40 + 12 * j) * MIB)

    size = 190 * MIB // microbatches
    for _ in range(min(2, microbatches)):
        for i in range(BLOCKS):
            block("forward", i, size)
            state["activations"] -= int(3.6 * size) if recompute else 0
        point("forward", "head", "mm", 700 * MIB // microbatches)
        point("forward", "", "cross_entropy_loss", 1400 * MIB // microbatches)
        for i in reversed(range(BLOCKS)):
            if recompute:
                block("recompute", i, int(0.9 * size))
            for part, op in (("mlp", "gelu_backward"), ("mlp", "mm"), ("attn", "mm"), ("norm", "layer_norm_backward")):
                state["activations"] -= size
                state["gradients"] = min(state["gradients"] + 20 * MIB, 950 * MIB)
                point("backward", f"blocks.{i}.{part}", op, 130 * MIB, 2e-3)
    for _ in range(30):
        point("optimizer", "", "_fused_adamw_", 20 * MIB, 5e-4)
    total = [sum(values) for values in zip(*live.values(), strict=True)]
    peak = total.index(max(total))
    return Timeline(
        live_bytes=live,
        labels=labels,
        modules=modules,
        phases=phases,
        seconds=seconds,
        peak_bytes=total[peak],
        peak_index=peak,
        step_seconds=sum(seconds) * max(1, microbatches / 2),
    )


def prediction(timeline: Timeline) -> Prediction:
    return Prediction(
        peak_bytes=timeline.peak_bytes,
        peak_upper_bytes=int(timeline.peak_bytes * 1.04),
        step_seconds=timeline.step_seconds,
        by_category=timeline.at_peak(),
        where=timeline.where(),
    )


def candidate(
    peak_gib: float,
    step_seconds: float,
    regions: int,
    precision: Precision = "32-true",
    microbatch_size: int = 16,
    numerics: Numerics = "exact",
) -> Candidate:
    levers = Levers(
        precision=precision,
        microbatch_size=microbatch_size,
        regions=tuple(Region((f"blocks.{i}",), ("aten.mm.default#0",) if i > 7 else ()) for i in range(regions)),
    )
    return Candidate(
        levers=levers,
        uses=lever_uses(LeversOn(levers, 16)),
        numerics=numerics,
        budget_bytes=int(peak_gib * 1.05 * GIB),
        peak_bytes=int(peak_gib * GIB),
        step_seconds=step_seconds,
        status="optimal" if regions % 2 else "feasible",
        bound_seconds=step_seconds * 0.98,
    )


@pytest.fixture
def views() -> Views:
    modules = [ModuleRow("", "ByteLM", 950 * MIB, 9120 * MIB, 2900 * MIB, 0.052, "")]
    for i in range(BLOCKS):
        action = "" if i >= 10 else "recomputed, keeps 1 operator" if i > 7 else "recomputed"
        saved = 760 * MIB - i * MIB
        after = saved // 10 if action else saved
        modules.append(ModuleRow(f"blocks.{i}", "Block", 71 * MIB, saved, after, 4e-3, action))
        modules.append(ModuleRow(f"blocks.{i}.attn", "Attention", 24 * MIB, 260 * MIB, 30 * MIB, 1.8e-3, ""))
    modules.append(ModuleRow("head", "Linear", 98 * MIB, 12 * MIB, 12 * MIB, 6e-3, ""))
    comparison = Comparison(
        plain_peak_bytes=13_300 * MIB,
        planned_peak_bytes=5_080 * MIB,
        plain_step_seconds=0.165,
        planned_step_seconds=0.210,
        plain_losses=[5.5452, 5.1, 4.75, 4.5],
        planned_losses=[5.5452, 5.1000004, 4.75, 4.500001],
    )
    return Views(plain=make_timeline(False), planned=make_timeline(True, 2), modules=modules, comparison=comparison)


@pytest.fixture
def plan(views: Views) -> Plan:
    frontier = [
        candidate(13.1, 0.161, 0),
        candidate(10.7, 0.169, 3),
        candidate(8.1, 0.177, 7),
        candidate(6.9, 0.183, 10),
        candidate(4.9, 0.202, 10, microbatch_size=8, numerics="reordered"),
        candidate(4.1, 0.231, 12, microbatch_size=4, numerics="reordered"),
        candidate(7.2, 0.094, 0, "bf16-mixed", 16, "reduced"),
        candidate(5.4, 0.103, 5, "bf16-mixed", 16, "reduced"),
        candidate(3.6, 0.121, 10, "bf16-mixed", 8, "reduced"),
    ]
    return Plan(
        memfit_version="0.1.0",
        torch_version="2.13.0",
        workload="recipes.byte_lm:byte_lm",
        fingerprint="3f9c1d70a4b2e8d5",
        device="rtx-3090",
        batch_size=16,
        budget_bytes=6 * GIB,
        levers=frontier[4].levers,
        numerics="reordered",
        uses=frontier[4].uses,
        allowed="reordered",
        plain=prediction(views.plain),
        predicted=prediction(views.planned),
        solution=Solution(status="feasible", bound_seconds=0.1964, gap=0.028, solve_seconds=1.34),
        frontier=frontier,
        notes=["Kernel times are estimates from the catalogue: no rtx-3090 is in this machine.", "Dropout is active."],
    )


def run_before(plan: Plan) -> Plan:
    """Return a plan with two that were run to choose it, of which it is the faster one."""
    other = plan.frontier[3]
    steps = (
        MeasuredStep(levers=plan.levers, uses=plan.uses, predicted_seconds=0.21, measured_seconds=0.19, steps=8),
        MeasuredStep(levers=other.levers, uses=other.uses, predicted_seconds=0.20, measured_seconds=0.25, steps=8),
    )
    return msgspec.structs.replace(plan, measured=steps)


@pytest.fixture
def run() -> RunRecord:
    return RunRecord(
        workload="recipes.byte_lm:byte_lm",
        fingerprint="3f9c1d70a4b2e8d5",
        memfit_version="0.1.0",
        torch_version="2.13.0",
        machine="NVIDIA GeForce RTX 3090, 24 GB",
        started="2026-05-09T07:35:25Z",
        status="finished",
        steps=300,
        measured_peak_bytes=5_090 * MIB,
        step_seconds=0.2114,
        first_loss=5.5452,
        last_loss=1.62,
        data_share=0.31,
        events=[
            Event(200, "damaged checkpoint", "checkpoint-250 was cut short; training continues from checkpoint-200")
        ],
        evaluations=[Evaluation(100, {"loss": 2.41}), Evaluation(300, {"loss": 1.71, "accuracy": 0.534})],
    )


@pytest.fixture
def metrics() -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": 1.5 + 4 * math.exp(-step / 60) + 0.08 * math.sin(step * 1.7),
            "grad_norm": 1.0,
            "skipped": step in (3, 4),
            "loss_scale": 65536.0,
            "seconds": 0.21 + 0.01 * math.sin(step),
            "peak_bytes": 5_090 * MIB if step > 1 else None,
        }
        for step in range(1, 301)
    ]


@pytest.fixture
def hostile(plan: Plan, views: Views, run: RunRecord) -> Callable[[str], Any]:
    """Make records in which every free text is the one given."""

    def replaced(value: Any, text: str) -> Any:
        if isinstance(value, str):
            return text
        if isinstance(value, list | tuple):
            return (tuple if isinstance(value, tuple) else list)(replaced(item, text) for item in value)
        if isinstance(value, dict):
            return {**value, **({text: [*value.values()][-1]} if value else {})}
        if not isinstance(value, msgspec.Struct):
            return value
        fields = {field.name: field.type for field in msgspec.structs.fields(value)}
        free = {name: kind for name, kind in fields.items() if name != "schema" and get_origin(kind) is not Literal}
        return msgspec.structs.replace(value, **{name: replaced(getattr(value, name), text) for name in free})

    def records(text: str) -> Any:
        of_run = msgspec.structs.replace(replaced(run, text), error=text, fingerprint=f"{text}2", command=[])
        return replaced(run_before(plan), text), replaced(views, text), of_run, []

    return records


SPEED = Throughput(
    step_seconds=0.5,
    step_error=0.3,
    measured=False,
    samples_per_second=16.0,
    tokens_per_second=32768.0,
    seconds_by_class={f"class {i}": 0.1 / 2**i for i in range(9)},
    model_flops=10**14,
    hardware_flops=2 * 10**14,
    peak_dtype="bfloat16",
    peak_flops=312e12,
    model_utilisation=0.41,
    hardware_utilisation=0.5,
)


VERIFIED = Verification(
    failures=[],
    numerics="exact",
    plain_loss=1.0,
    planned_loss=1.0,
    loss_difference=0.0,
    gradient_difference=0.0,
    bitwise=True,
    gradients=[],
    predicted_peak_bytes=99 * MIB,
    measured_peak_bytes=98 * MIB,
    plain_measured_peak_bytes=None,
    budget_bytes=100 * MIB,
    notes=[],
)


def shown(renderable: RenderableType, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def line_with(text: str, *parts: str) -> str:
    found = [line for line in text.splitlines() if all(part in line for part in parts)]
    assert len(found) == 1, f"{parts} is on {len(found)} lines of\n{text}"
    return found[0]
