"""The table by module: the bytes that each keeps for the backward pass, in the plain and the planned step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from memfit.ir.operator_costs import CostTable
from memfit.ir.remat import Region, enclosing
from memfit.ir.run_record import ModuleRow
from memfit.ir.simulation import repeats
from memfit.ir.trace import Trace


def module_table(plain: Trace, planned: Trace, costs: CostTable, regions: Iterable[Region]) -> list[ModuleRow]:
    """Return a row for each module that keeps activations or holds parameters, in the model's order."""
    before, after = kept_bytes(plain), kept_bytes(planned)
    parameters = _parameter_bytes(plain)
    seconds = _forward_seconds(plain, costs)
    actions = {module: _action(region) for region in regions for module in region.modules}
    kinds = {module.fqn: module.kind for module in plain.modules if before[module.fqn] or parameters[module.fqn]}
    return [
        ModuleRow(fqn or "(model)", kind, parameters[fqn], before[fqn], after[fqn], seconds[fqn], actions.get(fqn, ""))
        for fqn, kind in kinds.items()
    ]


def _action(region: Region) -> str:
    text = f"recomputed, keeps {len(region.keep)} operators" if region.keep else "recomputed"
    return f"{text}, offloaded" if region.offload else text


def kept_bytes(trace: Trace) -> dict[str, int]:
    """Return, by module, the bytes allocated in its forward pass that are alive when the first backward pass starts."""
    start = next((i for i, op in enumerate(trace.ops) if op.phase == "backward"), len(trace.ops))
    total: dict[str, int] = defaultdict(int)
    for storage in trace.storages:
        if 0 <= storage.birth < start <= storage.death:
            for fqn in _around(trace, trace.ops[storage.birth].call):
                total[fqn] += storage.nbytes
    return total


def _around(trace: Trace, call: int) -> set[str]:
    return {trace.modules[trace.calls[c].module].fqn for c in trace.call_chain(call)}


def _parameter_bytes(trace: Trace) -> dict[str, int]:
    total: dict[str, int] = defaultdict(int)
    for storage in trace.storages:
        if storage.category == "parameters" and storage.owner >= 0:
            for fqn in enclosing(trace.modules[storage.owner].fqn):
                total[fqn] += storage.nbytes
    return total


def _forward_seconds(trace: Trace, costs: CostTable) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for op, times in zip(trace.ops, repeats(trace), strict=True):
        if op.phase == "forward":
            for fqn in _around(trace, op.call):
                total[fqn] += float(times) * costs.seconds_of(trace.signatures[op.signature])
    return total
