"""The sharding of a step over ranks, and the grouping of its modules for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

from memfit.ir.remat import enclosing
from memfit.ir.trace import Trace

Mode = Literal["ddp", "zero1", "zero2", "zero3"]
MODES: tuple[Mode, ...] = get_args(Mode)

_MIB = 2**20
_CONTAINERS = ("ModuleList", "Sequential")


class Sharding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sharding of a step over ranks. The batch of the trace is that of each rank.

    Attributes:
        world_size: Number of ranks (> 0).
        mode: The state that is sharded among them.
        units: For zero2 and zero3, FQNs of the modules that `fully_shard` is called on, besides the root. None:
            the repeated blocks (`repeated_blocks`).
        gradient_as_bucket_view: For ddp and zero1, the argument of DistributedDataParallel.
        bucket_cap_bytes: For ddp and zero1, the size from which a bucket is full.
        first_bucket_bytes: The same for the first bucket.
        shard_itemsize: For zero2 and zero3, bytes per element of the sharded parameters, where their dtype differs from
            the computation's: 4 for `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`, with a trace of the model in
            bf16. None: as in the trace.
        reduce_itemsize: Bytes per element of the gradients during reduction (`reduce_dtype`). None: as in the trace.
    """

    world_size: int
    mode: Mode
    units: tuple[str, ...] | None = None
    gradient_as_bucket_view: bool = False
    bucket_cap_bytes: int = 25 * _MIB
    first_bucket_bytes: int = _MIB
    shard_itemsize: int | None = None
    reduce_itemsize: int | None = None


def repeated_blocks(trace: Trace) -> tuple[str, ...]:
    """Return the FQNs of a model's repeated blocks.

    They are the outermost called children of a ModuleList or Sequential that have parameters and a sibling of their
    class.
    """
    kinds = {module.fqn: module.kind for module in trace.modules}
    called = {trace.fqn_of(index) for index, call in enumerate(trace.calls) if call.phase == "forward"}
    siblings: dict[tuple[str, str], int] = defaultdict(int)
    for fqn, kind in kinds.items():
        siblings[_parent(fqn), kind] += 1
    filled = {fqn for parameter in trace.parameters for fqn in enclosing(parameter.fqn)}
    blocks: list[str] = []
    for fqn, kind in kinds.items():
        listed = fqn in called and kinds.get(_parent(fqn)) in _CONTAINERS and siblings[_parent(fqn), kind] > 1
        if fqn and listed and fqn in filled and enclosing(fqn).isdisjoint(blocks):
            blocks.append(fqn)
    return tuple(blocks)


def _parent(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def innermost(fqn: str, units: Iterable[str]) -> str:
    """Return the innermost unit that contains a module or parameter."""
    return max(enclosing(fqn).intersection(units), key=len)


def gradients_by_parameter(trace: Trace) -> dict[int, int]:
    """Return the storages of gradients by parameter, in the order in which they become ready."""
    births = [(s.birth, i) for i, s in enumerate(trace.storages) if s.category == "gradients" and s.parameter >= 0]
    return {trace.storages[index].parameter: index for _, index in sorted(births)}
