"""Pipeline parallelism on paper: the stages of a step that is cut between its repeated blocks.

The schedule is 1F1B (D. Narayanan et al., 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", and
2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2): of S stages, the
stage i holds the activations of min(S − i, M) microbatches out of M, and a step takes (M + S − 1) / M times as long as
the slowest stage. What stages send one another takes no time here.
"""

from __future__ import annotations

import json
from collections import defaultdict

from msgspec.structs import replace

from memfit.errors import UsageError
from memfit.ir.collectives import BUBBLE
from memfit.ir.remat import enclosing
from memfit.ir.trace import Op, Storage, Trace, Work
from memfit.sharding.groups import repeated_blocks

_PASSES = ("forward", "backward", "recompute")


class Pipeline:
    """The stages of a step: blocks are shared evenly, the first stages have one more where that does not divide."""

    def __init__(self, trace: Trace, stages: int) -> None:
        self.trace, self.stages = trace, stages
        blocks = repeated_blocks(trace)
        if stages > len(blocks):
            raise UsageError(
                f"parallel='pp={stages}': {trace.workload!r} has {len(blocks)} repeated blocks, fewer than stages. Give"
                f" pp of at most {max(len(blocks), 1)}"
            )
        counts = [len(blocks) // stages + (i < len(blocks) % stages) for i in range(stages)]
        self.of_block = dict(zip(blocks, [i for i, count in enumerate(counts) for _ in range(count)], strict=True))
        self.op_stages = self._op_stages()
        self.parameter_stages = self._parameter_stages()

    def _op_stages(self) -> list[int]:
        """Return the stage of each operator: that of its block, or of the block before it in the forward pass."""
        first = {self.trace.fqn_of(i): c.start for i, c in reversed(list(enumerate(self.trace.calls)))}
        start = min((at for fqn, at in first.items() if fqn in self.of_block), default=0)
        stages, current, microbatch, phase = [], 0, -1, ""
        for op in self.trace.ops:
            backward = op.phase in ("backward", "recompute")
            if (op.microbatch, backward) != (microbatch, phase):
                microbatch, phase, current = op.microbatch, backward, self.stages - 1 if backward else 0
            found = self._stage_of_call(op.call, start)
            current = current if found is None else found
            stages.append(current)
        return stages

    def _stage_of_call(self, call: int, first_block: int) -> int | None:
        """Return the stage of a call: that of its block, or the first or the last; None where neither is known."""
        for around in self.trace.call_chain(call):
            fqn = self.trace.fqn_of(around)
            if fqn in self.of_block:
                return self.of_block[fqn]
        if call < 0 or any(self._holds_blocks(self.trace.fqn_of(call), block) for block in self.of_block):
            return None
        return 0 if self.trace.calls[call].start % len(self.trace.ops) < first_block else self.stages - 1

    @staticmethod
    def _holds_blocks(fqn: str, block: str) -> bool:
        return fqn in enclosing(block)

    def _parameter_stages(self) -> list[int]:
        """Return the stage of each parameter: of its block, or of the first operator of its module's call."""
        of_module: dict[str, int] = {}
        for index, call in enumerate(self.trace.calls):
            if call.end > call.start:
                of_module.setdefault(self.trace.fqn_of(index), self.op_stages[call.start])
        stages = []
        for parameter in self.trace.parameters:
            around = enclosing(parameter.fqn)
            block = next((stage for fqn, stage in self.of_block.items() if fqn in around), None)
            stages.append(of_module.get(parameter.fqn.rpartition(".")[0], 0) if block is None else block)
        return stages

    def in_flight(self, stage: int) -> int:
        """Return the microbatches of which a stage holds the activations at most."""
        return min(self.stages - stage, self.trace.scale_microbatches)

    def stage(self, stage: int, bubble: bool = True) -> Trace:
        """Return the step of one stage, with the activations of the other microbatches in flight."""
        ops, storages = self.trace.ops, list(self.trace.storages)
        kept = [self.op_stages[i] == stage or op.phase == "optimizer" for i, op in enumerate(ops)]
        wanted: dict[int, int] = defaultdict(int)
        for parameter, of in zip(self.trace.parameters, self.parameter_stages, strict=True):
            wanted[parameter.nbytes] += of == stage
        left: dict[int, dict[int, int]] = defaultdict(lambda: dict(wanted))
        reads = self._reach(stage)
        for index, storage in enumerate(storages):
            if not self._holds(storage, stage, kept, reads, left):
                storages[index] = replace(storage, nbytes=0)
        trace = self._without_others(kept, storages, stage)
        return self._filled(trace, stage)

    def _reach(self, stage: int) -> dict[int, tuple[int, int]]:
        """Return, by microbatch and whether backward, the first and the last operator of a stage: (start, end)."""
        found: dict[int, tuple[int, int]] = {}
        for position, op in enumerate(self.trace.ops):
            if self.op_stages[position] == stage and op.phase in _PASSES:
                key = 2 * op.microbatch + (op.phase != "forward")
                found[key] = (found.get(key, (position, 0))[0], position)
        return found

    def _holds(
        self,
        storage: Storage,
        stage: int,
        kept: list[bool],
        reach: dict[int, tuple[int, int]],
        left: dict[int, dict[int, int]],
    ) -> bool:
        """Tell whether a stage holds a storage: its own, and what the neighbours send it."""
        if storage.parameter >= 0:
            return self.parameter_stages[storage.parameter] == stage
        if storage.birth < 0:
            return storage.category != "inputs" or stage in (0, self.stages - 1)
        op = self.trace.ops[storage.birth]
        if op.phase == "optimizer":
            counts = left[storage.birth]
            if storage.nbytes not in counts:
                return True
            counts[storage.nbytes] -= 1
            return counts[storage.nbytes] >= 0
        if kept[storage.birth]:
            return True
        start, _ = reach.get(2 * op.microbatch + (op.phase != "forward"), (0, 0))
        before = stage - 1 if op.phase == "forward" else stage + 1
        return self.op_stages[storage.birth] == before and storage.birth < start <= storage.release

    def _without_others(self, kept: list[bool], storages: list[Storage], stage: int) -> Trace:
        """Return the step with the operators of other stages as views, which take neither memory nor time."""
        nothing = len(self.trace.signatures)
        view = json.dumps({"op": BUBBLE, "args": [0]}, separators=(",", ":"))
        ops = [
            op if keep else Op("aten.detach.default", op.call, op.phase, op.microbatch, nothing, (), False)
            for op, keep in zip(self.trace.ops, kept, strict=True)
        ]
        return replace(
            self.trace,
            ops=ops,
            storages=storages,
            signatures=[*self.trace.signatures, view],
            works=[*self.trace.works, Work(0, 0, 0, "", False)],
        )

    def _filled(self, trace: Trace, stage: int) -> Trace:
        """Add the activations of the microbatches that are in flight besides the one that runs."""
        reach, last = self._reach(stage), trace.microbatches - 1
        if 2 * last not in reach:
            return trace
        end = reach[2 * last][1]
        activations = sum(
            s.nbytes for s in trace.storages
            if s.birth >= 0 and trace.ops[s.birth].microbatch == last and s.birth <= end < s.death < len(trace.ops)
            and trace.ops[s.birth].phase == "forward"
        )  # fmt: skip
        others = (self.in_flight(stage) - 1) * activations
        begins, ends = reach[2 * last][0], reach.get(2 * last + 1, (0, end))[1]
        held = Storage(others, begins, ends, ends, "activations", -1)
        return replace(trace, storages=[*trace.storages, held]) if others else trace

    def note(self) -> str:
        """Return how the step is cut, in words."""
        m, s = self.trace.scale_microbatches, self.stages
        counts = [list(self.of_block.values()).count(i) for i in range(s)]
        return (
            f"pipeline of {s} stages (1F1B) with {', '.join(map(str, counts))} blocks, {m}"
            f" microbatch{'es' * (m != 1)}: the bubble adds {(s - 1) / m:.0%} to the step; what stages send takes no"
            " time here"
        )
