"""Shardings that are worth trying for some ranks."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.ir.sharding import Mode, Sharding

SEARCHED: tuple[Mode, ...] = ("ddp", "zero2", "zero3")


def proposals(world_size: int, modes: Sequence[Mode], units: tuple[str, ...], ranks_per_node: int) -> list[Sharding]:
    """Return shardings of a step, the simplest first.

    Over several nodes what is fully sharded may be cut within each node, with a copy in each (hybrid sharding), so that
    parameters are gathered over the faster link. Of units, the last half may stay gathered: they are the first to be
    needed again.

    Args:
        world_size: Ranks (> 1).
        modes: What may be sharded.
        units: FQNs of the modules that are gathered by themselves.
        ranks_per_node: Ranks of one node (> 0).
    """
    found: list[Sharding] = []
    for mode in modes:
        if mode == "ddp":
            found.append(Sharding(world_size=world_size, mode=mode, gradient_as_bucket_view=True))
            continue
        sharding = Sharding(world_size=world_size, mode=mode, units=units)
        nodes = world_size // ranks_per_node if world_size % ranks_per_node == 0 else 1
        replicas = [1, nodes] if nodes > 1 else [1]
        kept = [(), units[len(units) // 2 :]] if mode == "zero3" and len(units) > 1 else [()]
        found += [
            Sharding(world_size=world_size, mode=mode, units=sharding.units, kept=of, replicas=count)
            for count in replicas
            for of in kept
        ]
    return found
