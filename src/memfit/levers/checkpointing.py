"""Levers that recompute: activation checkpointing of regions, their offload to the host, lean modules, compilation.

Lean modules are normalisations, activations and dropouts whose outputs alone are made again. Code that `torch.compile`
makes of the model and the loss holds less and reads memory less often; regions are then recomputed in the compiled
backward pass, by the operators of the graph itself, and not by running modules again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager

from msgspec.structs import replace
from torch import nn

from memfit._torch import FakeTensor
from memfit.capture import is_compiled
from memfit.foundations import format_bytes
from memfit.ir import CONVOLUTIONS, CompilerLever, CostTable, Device, Levers, operator_class
from memfit.levers.chunked_loss import CHUNKED_LOSS
from memfit.levers.lever import Circumstance, Conflict, Lever, LeversOn, NotOffered, Running, Setting, least_bytes
from memfit.levers.parameter_updates import IN_BACKWARD
from memfit.levers.shared_by_ranks import SHARDING
from memfit.recomputation import (
    CompiledLoss,
    PlannedBackend,
    checkpointed,
    is_checkpointed,
    is_lean,
    is_made_lean,
    lean,
)
from memfit.workload import LoopWorkload, Workload

_SOLVE_SECONDS = 0.5  # for each rung: within a few percent of the best
ACTIVATION_OFFLOAD = "activation offload"
LEAN = "lean norms and activations"
_ALL_LEAN = ("*",)
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


class Checkpointing(Lever):
    """Recomputation of regions, chosen by the solver."""

    name = "activation checkpointing"
    field = "regions"
    switchable = True
    recomputes = True
    rungs = ("selective checkpointing", "full checkpointing")

    def words(self, on: LeversOn) -> tuple[str, str]:
        count = len(on.levers.regions)
        plural = "s" * (count != 1)
        return f"{count:,} module{plural} recomputed", f"{count:,} region{plural}"

    def on_model(self, levers: Levers, model: nn.Module) -> AbstractContextManager[None]:
        return checkpointed(model, levers.regions) if self.switches(levers) else contextlib.nullcontext()

    def is_applied(self, workload: Workload) -> bool:
        return is_checkpointed(workload.model)

    def rung(self, name: str, step: Setting, levers: Levers) -> tuple[Levers, str]:
        """Checkpoint for the lowest peak; or as is fastest within the budget, halfway down where that is no bound."""
        combination = step.combination(replace(levers, regions=()))
        plain, leanest = combination.plain().peak_bytes, combination.leanest(_SOLVE_SECONDS)
        lowest, within = leanest.peak_bytes, step.budget_bytes
        if name == "full checkpointing":
            chosen = combination.candidate(leanest, lowest).levers
        else:
            within = within if within is not None and lowest <= within < plain else (plain + lowest) // 2
            point = combination.fastest(within, 0.01, _SOLVE_SECONDS)
            chosen = combination.levers if point is None else point.levers
        if not chosen.regions or chosen == levers:
            raise NotOffered("no choice of modules lowers the peak further")
        keeping = sum(bool(region.keep) for region in chosen.regions)
        return chosen, f"{len(chosen.regions)} regions, {keeping} of them keep operators"


class ActivationOffload(Lever):
    """Offload of regions, a part of checkpointing: it is chosen by the same solver, and applied with the regions."""

    name = ACTIVATION_OFFLOAD
    field = "regions"
    switchable = True
    rungs = ("offload",)
    conflicts = (
        Conflict(
            ACTIVATION_OFFLOAD,
            Circumstance.NO_LINK,
            "the speed of copies to the host is unknown, or the device has none",
            "leave out host_budget, or name a GPU with a known link_bytes_per_second",
        ),
        Conflict(ACTIVATION_OFFLOAD, Circumstance.JITTOR, "Jittor moves memory itself", "leave out offload="),
    )

    def words(self, on: LeversOn) -> tuple[str, str]:
        count = sum(region.offload for region in on.levers.regions)
        return f"{count:,} of them offloaded to host memory", f"{count:,} offloaded"

    def without(self, on: LeversOn) -> Levers:
        return replace(on.levers, regions=tuple(replace(region, offload=False) for region in on.levers.regions))

    def host_bytes(self, levers: Levers, state_bytes: int, host_budget_bytes: int) -> int:
        return host_budget_bytes

    def rung(self, name: str, step: Setting, levers: Levers) -> tuple[Levers, str]:
        raise NotOffered("for GPUs only, and not a rung: memfit.plan with host_budget= chooses the regions to offload")


class Lean(Lever):
    """Normalisations and activations that keep their inputs, not their outputs."""

    name = LEAN
    field = "lean"
    rungs = (LEAN,)
    switchable = True
    recomputes = True

    def words(self, on: LeversOn) -> tuple[str, str]:
        named = "all" if "*" in on.levers.lean else ", ".join(on.levers.lean)
        return f"outputs of {named} recomputed, inputs kept", "norms recomputed"

    def on_model(self, levers: Levers, model: nn.Module) -> AbstractContextManager[None]:
        return lean(model, levers.lean)

    def is_applied(self, workload: Workload) -> bool:
        return is_made_lean(workload.model)

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        self._check(step)
        if not step.tries_all:
            if step.is_long:  # captures of tens of seconds, and regions of norms alone are about as fast
                raise NotOffered("a long step is made lean only where nothing else fits")
            whole = replace(step.plain, lean=_ALL_LEAN)
            saved_bytes = step.predicted(step.plain).peak_bytes - step.predicted(whole).peak_bytes
            if saved_bytes < least_bytes(step):
                raise NotOffered(f"it lowers the peak by less than {format_bytes(least_bytes(step))}")
        lean = [replace(levers, lean=_ALL_LEAN) for levers in wanted if step.allows(levers)]
        if not step.tries_all and any(levers.chunked_loss for levers in lean):  # whole losses are there to compare
            lean = [levers for levers in lean if levers.chunked_loss]
        return [*wanted, *lean]

    def rung(self, name: str, step: Setting, levers: Levers) -> tuple[Levers, str]:
        self._check(step)
        count = sum(is_lean(module) for module in step.workload.model.modules())
        return replace(levers, lean=_ALL_LEAN), f"{count} modules recomputed"

    def _check(self, step: Setting) -> None:
        """Check that normalisations, activations and dropouts make enough bytes for the backward pass."""
        trace, least = step.trace(step.plain), least_bytes(step)
        names = {fqn for fqn, module in step.workload.model.named_modules() if is_lean(module)}
        kept_bytes = sum(
            storage.nbytes
            for storage in trace.storages
            if storage.category == "activations"
            and trace.ops[storage.birth].phase == "forward"
            and trace.fqn_of(trace.ops[storage.birth].call) in names
        )
        if not kept_bytes or kept_bytes < least or is_compiled(step.workload):
            raise NotOffered(f"norms, activations and dropouts keep less than {format_bytes(least)}")


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
