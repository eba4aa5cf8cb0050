"""Steps of models that several ranks share, predicted on paper."""

from __future__ import annotations

from msgspec.structs import replace

from memfit.cost.communication import with_collectives
from memfit.cost.links import links_of
from memfit.ir.collectives import BUBBLE
from memfit.ir.device import Device
from memfit.ir.operator_costs import CostTable, OpCost
from memfit.ir.sharding import Sharding
from memfit.ir.trace import Trace
from memfit.planner.prediction import costs_of, predict
from memfit.sharding.insertion import Insertion
from memfit.sharding.model_parallel import Parallel, stages_of
from memfit.units import format_bytes

_PASSES = ("forward", "backward", "recompute")


def on_paper(trace: Trace, costs: CostTable, parallel: Parallel, device: Device) -> tuple[Trace, CostTable]:
    """Return the step of the rank that holds most, and its costs; its time is that of the whole pipeline.

    Args:
        trace: The step of one process.
        costs: Its costs.
    """
    if parallel.ranks == 1:
        return trace, costs
    stages = stages_of(trace, parallel)
    if device.kind != "cpu":  # a CPU's are measured: of a share they follow from those of the whole
        costs = costs_of(stages, device)
    links = links_of(device, Sharding(world_size=max(parallel.tp, parallel.cp, 2), mode="ddp"))
    costs = with_collectives(costs, stages, links)
    if parallel.pp == 1:
        return stages[0], costs
    found = [predict(stage, costs, device)[0] for stage in stages]
    peaks = [p.peak_reserved_bytes or p.peak_bytes for p in found]
    most = max(range(len(stages)), key=peaks.__getitem__)
    passes = [sum(p.phase_seconds.get(phase, 0.0) for phase in _PASSES) for p in found]
    bubble = (parallel.pp - 1) / trace.scale_microbatches * max(passes)
    waits = max(p.step_seconds for p in found) + bubble - found[most].step_seconds
    note = (
        f"stage {most} of 0 to {parallel.pp - 1} has the largest peak; the peaks: {', '.join(map(format_bytes, peaks))}"
    )
    return _waiting(stages[most], costs, max(0.0, waits - costs.dispatch_seconds), note)


def _waiting(stage: Trace, costs: CostTable, seconds: float, note: str) -> tuple[Trace, CostTable]:
    """Return a stage's step that waits for the others, and costs with this wait."""
    at = next((i for i, op in enumerate(stage.ops) if op.phase == "optimizer"), len(stage.ops))
    first = next(i for i, op in enumerate(stage.ops) if op.phase == "backward")  # once: of the first microbatch
    insertion = Insertion(stage)
    bubble = insertion.op(BUBBLE, 0, at, like=first, call=-1)
    waiting = insertion.result()
    ops = {**costs.ops, waiting.signatures[bubble.op.signature]: OpCost(seconds, 0, False)}
    return replace(waiting, notes=[*waiting.notes, note]), replace(costs, ops=ops)
