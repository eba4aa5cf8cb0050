"""Context parallelism on paper: one rank of several that share the tokens of each sequence.

As in H. Liu, M. Zaharia, P. Abbeel (2023), "Ring Attention with Blockwise Transformers for Near-Infinite Context": each
rank has its tokens' activations, keys and values go round, and weights stay whole. A rank holds its own keys and values
and receives the next. Attention is taken to need memory in proportion to the tokens, as fused kernels do; where the
model writes the matrix of all pairs, a rank has a share of its rows.
"""

from __future__ import annotations

from collections import defaultdict

from msgspec.structs import replace

from memfit.ir.collectives import RING
from memfit.ir.operator_classes import ATTENTION, operator_class
from memfit.ir.trace import Trace
from memfit.sharding.insertion import Insertion
from memfit.sharding.shares import with_shares

_SCALAR_BYTES = 16
_ITEMSIZES = (1, 2, 4, 8)
_PASSES = ("forward", "backward", "recompute")


def context_parallel(trace: Trace, ranks: int) -> Trace:
    """Return the step of one rank of `ranks`, from the step of one process."""
    of_weights = _weight_sizes(trace)
    storages = []
    for storage in trace.storages:
        owner = trace.fqn_of(trace.ops[storage.birth].call) if storage.birth >= 0 else ""
        kept = (
            storage.parameter >= 0
            or storage.nbytes <= _SCALAR_BYTES
            or storage.category in ("parameters", "buffers", "optimizer state", "gradients")
            or (storage.birth >= 0 and trace.ops[storage.birth].phase not in _PASSES)
            or (storage.birth >= 0 and storage.nbytes in of_weights[owner])
        )
        storages.append(storage if kept else replace(storage, nbytes=-(-storage.nbytes // ranks), shape=()))
    positions = [i for i, op in enumerate(trace.ops) if op.phase in _PASSES]
    insertion = Insertion(replace(with_shares(trace, positions, ranks), storages=storages))
    for position in positions:
        op = trace.ops[position]
        if operator_class(op.name) == ATTENTION:
            # Keys and values, and their gradients too in the backward pass, each as large as what attention returns.
            times = 4 if op.phase == "backward" else 2
            nbytes = times * max((trace.storages[i].nbytes for i in trace.births[position]), default=0)
            sent = insertion.op(RING, nbytes, position, like=position, call=op.call, ranks=ranks)
            insertion.allocate(-(-nbytes // ranks), sent, "temporaries", -1).death = position
    return insertion.result()


def _weight_sizes(trace: Trace) -> dict[str, set[int]]:
    """Return, for each module, the bytes that its weights have in any dtype: what is as large may be one of them."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for parameter in trace.parameters:
        numel = parameter.nbytes // parameter.itemsize
        sizes[parameter.fqn.rpartition(".")[0]] |= {numel * size for size in _ITEMSIZES}
    return sizes


def note(ranks: int) -> str:
    """Return what is shared, in words."""
    return (
        f"context parallelism of {ranks} ranks: each has 1/{ranks} of the tokens; keys and values are passed from rank"
        " to rank"
    )
