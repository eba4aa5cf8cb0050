"""Compilation: the model and the loss as code that `torch.compile` makes, which holds less and reads memory less often.

Regions are then recomputed in the compiled backward pass, by the operators of the graph itself, and not by running
modules again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from msgspec.structs import replace

from memfit._torch import FakeTensor
from memfit.ir import CONVOLUTIONS, CompilerLever, CostTable, Device, Levers, operator_class
from memfit.levers.checkpointing import ACTIVATION_OFFLOAD, LEAN
from memfit.levers.chunked_loss import CHUNKED_LOSS
from memfit.levers.lever import Circumstance, Conflict, Lever, LeversOn, NotOffered, Running, Setting
from memfit.levers.optimizer_in_backward import IN_BACKWARD
from memfit.levers.shared_by_ranks import SHARDING
from memfit.recomputation import CompiledLoss, PlannedBackend
from memfit.workload import LoopWorkload, Workload

COMPILATION = "compilation"
OWN_LOOP = "your own training loop (`memfit.fit`)"
LIMIT = "`limit_bytes` on the CPU"
CHANNELS_LAST: CompilerLever = "inductor-channels-last"
_OFF = "set levers.compiler to 'none', or plan with compile=False"
_REASONS = {
    CHUNKED_LOSS: "torch.compile can't trace the deferred logits",
    LEAN: "the compiler itself chooses the saved tensors of norms and activations",
    ACTIVATION_OFFLOAD: "compiled code keeps its saved tensors on the device",
    IN_BACKWARD: "a compiled backward pass returns all gradients at its end: this lever would free nothing",
    SHARDING: "sharding gathers parameters as modules are called, and compiled code calls no modules",
    Circumstance.COMPILED: "the workload compiles its model or loss itself",
    OWN_LOOP: "your loop calls the modules, not memfit",
    LIMIT: "the limit can't see the allocations of compiled code",
    Circumstance.JITTOR: "Jittor compiles its own operators",
}


class Compilation(Lever):
    """The model and the loss, compiled by Inductor."""

    name = COMPILATION
    field = "compiler"
    numerics_class = "reordered"
    compiles = True
    draws_otherwise = True
    conflicts = tuple(Conflict(COMPILATION, other, why, _OFF) for other, why in _REASONS.items())

    def words(self, on: LeversOn) -> tuple[str, str]:
        brief = "compiled, channels last" if on.levers.compiler == CHANNELS_LAST else "compiled"
        return on.levers.compiler, brief

    def circumstances(self, workload: Workload, device: Device | None) -> set[str]:
        return {OWN_LOOP} if isinstance(workload, LoopWorkload) else set()

    @contextlib.contextmanager
    def apply(self, levers: Levers, running: Running) -> Iterator[Running]:
        workload = running.workload
        backend = PlannedBackend(
            levers.regions,
            channels_last=levers.compiler == CHANNELS_LAST,
            is_on_paper=any(isinstance(p, FakeTensor) for p in workload.model.parameters()),
        )
        with contextlib.closing(CompiledLoss(workload.loss_fn, backend)) as loss:
            yield dataclasses.replace(running, workload=dataclasses.replace(workload, loss_fn=loss))

    def recomputing(self, levers: Levers, costs: CostTable) -> tuple[set[str], CostTable]:
        return set(), replace(costs, checkpoint_seconds=0.0, selective_op_seconds=0.0)

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        if not step.compilers:
            raise NotOffered("plan with compile='auto' or True")
        convolves = any(operator_class(op.name) == CONVOLUTIONS for op in step.trace(step.plain).ops)
        compilers = [c for c in step.compilers if convolves or c != CHANNELS_LAST]
        cut = dict.fromkeys(
            (levers.precision, levers.microbatch_size) for levers in wanted
        )  # nothing else goes with it
        compiled = [Levers(precision=p, microbatch_size=size, compiler=c) for p, size in cut for c in compilers]
        return compiled if step.must_compile else [*wanted, *compiled]
