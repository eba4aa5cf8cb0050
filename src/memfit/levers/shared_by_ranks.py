"""Sharding: a step that ranks share, by DistributedDataParallel or `fully_shard`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from msgspec.structs import replace

from memfit.errors import PlanError
from memfit.ir import Levers, Numerics, Sharding
from memfit.levers.adamw_4bit import ADAMW_4BIT
from memfit.levers.adamw_8bit import ADAMW_8BIT
from memfit.levers.lever import Circumstance, Conflict, Lever, LeversOn, Running, Setting
from memfit.levers.parameter_updates import IN_BACKWARD, OFFLOADED
from memfit.levers.replaced_optimizer import ADAFACTOR

SHARDING = "sharding"
OF_WEIGHTS = "sharding of weights"
ON_HOST = "shards in host memory"


class SharedByRanks(Lever):
    """Ranks that share a step: each runs its part of the batch."""

    name = SHARDING
    field = "sharding"
    conflicts = (
        Conflict(
            SHARDING,
            Circumstance.BATCH_NORM,
            "the model normalises over the samples of each rank: the number of ranks would change the training",
            "allow numerics='changed', or use memfit.tools.freeze_batch_norm or memfit.tools.group_norm_for_batch_norm",
            unless="changed",
        ),
        Conflict(
            SHARDING,
            Circumstance.COUPLING_LOSS,
            "the whole batch's loss differs from the mean over its parts",
            "return (sum, count) for a mean over tokens or voxels, or allow numerics='changed'",
            unless="changed",
        ),
        Conflict(
            SHARDING,
            IN_BACKWARD,
            "gradients are used before the ranks have averaged them",
            "set levers.update to 'after'; with 'zero2' and 'zero3' each rank keeps a share of gradients and state",
        ),
        *(
            Conflict(
                OF_WEIGHTS,
                other,
                "it updates whole weights, and each rank has only a share",
                "use levers.optimizer 'as-is', levers.optimizer_state 'on-device', precision 'bf16-mixed', or"
                " levers.sharding.mode 'ddp'",
            )
            for other in (OFFLOADED, ADAMW_8BIT, ADAMW_4BIT, ADAFACTOR, "bf16-true", Circumstance.SEVERAL_OPTIMIZERS)
        ),
        Conflict(
            ON_HOST, Circumstance.NO_LINK, "host and device share their memory", "set levers.sharding.offload to false"
        ),
        Conflict(
            SHARDING,
            Circumstance.ADAPTING,
            "predictions for other shapes need captures, and a process in a process group can't capture the step of"
            " several ranks",
            "use memfit.apply with recover=True: one plan for all shapes, and one with a lower peak if memory runs out",
        ),
    )

    def names(self, levers: Levers) -> set[str]:
        sharding = levers.sharding
        if sharding is None:
            return {self.name}
        of_weights = {OF_WEIGHTS} if sharding.is_fully_sharded else set[str]()
        return {self.name} | of_weights | ({ON_HOST} if sharding.offload else set())

    def words(self, on: LeversOn) -> tuple[str, str]:
        assert on.levers.sharding is not None
        return sharding_text(on.levers.sharding), f"{on.levers.sharding.mode} of {on.levers.sharding.world_size}"

    def numerics(self, on: LeversOn) -> Numerics:
        if on.couples_batch:
            return "changed"
        return "reduced" if on.levers.sharding and on.levers.sharding.param_dtype else "reordered"

    def changes_state(self, levers: Levers) -> bool:
        return levers.sharding is not None

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        """Return the combinations with each sharding; of several microbatches, the last may be the one that sends."""
        if not step.shardings:
            return wanted
        return [
            replace(levers, sharding=replace(sharding, reduces=reduces))
            for levers in wanted
            for sharding in step.shardings
            for reduces in (("last", "each") if levers.microbatch_size < step.batch_size else ("each",))
        ]

    @contextlib.contextmanager
    def apply(self, levers: Levers, running: Running) -> Iterator[Running]:
        # Distributed packages take a second to import.
        from memfit.ranks import check_size, is_joined, kind_of_group, mesh_of, shared

        assert levers.sharding is not None
        mesh = running.mesh
        if mesh is None and not is_joined():
            raise PlanError(
                f"the plan is for {levers.sharding.world_size} ranks, and this process runs alone: start it with"
                f" torchrun --nproc-per-node {levers.sharding.world_size}; your own loop must also call"
                " torch.distributed.init_process_group()"
            )
        if mesh is None:
            place = next((p.device.type for p in running.workload.model.parameters()), "cpu")
            mesh = mesh_of(levers.sharding, kind_of_group() if place == "meta" else place)
        check_size(levers.sharding, mesh.size())
        workload, ranks = shared(running.workload, levers.sharding, mesh, is_part=running.is_part)
        options = dataclasses.replace(running.options, ranks=ranks)
        yield dataclasses.replace(running, workload=workload, options=options)


def sharding_text(sharding: Sharding) -> str:
    """Return a sharding in words."""
    if not sharding.is_fully_sharded:
        engine = "data parallel" if sharding.mode == "ddp" else "data parallel, the optimizer's state sharded"
    else:
        kept = len(sharding.kept) if sharding.mode == "zero3" else len(sharding.units or ())
        engine = f"fully sharded, {len(sharding.units or ())} units, {kept} of them kept gathered"
    parts = [f"{sharding.world_size} ranks", engine]
    parts += [f"{sharding.replicas} replicas"] if sharding.replicas > 1 else []
    parts += [f"gathered in {sharding.param_dtype}"] if sharding.param_dtype else []
    parts += ["reduced at the last microbatch"] if sharding.reduces == "last" else []
    parts += ["shards on the host"] if sharding.offload else []
    return ", ".join(parts)
