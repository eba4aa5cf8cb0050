"""Selective checkpointing of each block with PyTorch's contexts: policies by operator, as users and torchtitan have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.frontier.checkpointing import Contexts, checkpointing
from benchmarks.frontier.methods import Method, Prepared, Task, stepping

_aten = torch.ops.aten
PRODUCTS = (
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten._grouped_mm.default),
    *(_aten.convolution.default, _aten.mkldnn_rnn_layer.default, _aten._cudnn_rnn.default),
)
ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)


def contexts_of(
    decide: Callable[[int, Any], bool], counted: Callable[[Any], bool] = lambda func: True, mutation: bool = False
) -> Contexts:
    """Return what makes selective contexts.

    Args:
        decide: `decide(index, func)` says whether an operator's output is kept.
        counted: Which operators have an index; the others are recomputed.
        mutation: What is kept may be written to afterwards, by an operator whose result is kept too.
    """

    def contexts() -> Any:
        seen: Counter[bool] = Counter()

        def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if not counted(func):
                return CheckpointPolicy.PREFER_RECOMPUTE
            index = seen[context.is_recompute]
            seen[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if decide(index, func) else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=mutation)

    return contexts


POLICIES: dict[str, Contexts] = {
    "products and attention": contexts_of(lambda index, func: True, lambda func: func in PRODUCTS + ATTENTION),
    "attention": contexts_of(lambda index, func: True, lambda func: func in ATTENTION),
    "products": contexts_of(lambda index, func: True, lambda func: func in PRODUCTS),
}
"""What each keeps."""


def _every_second() -> Any:
    """Return torchtitan's contexts: attention and every second product are kept.

    After torchtitan, `torchtitan/distributed/activation_checkpoint.py`, `_apply_op_sac`: products are counted, and
    the odd ones kept. There they are `mm` alone; here every kind, since layers with a bias are `addmm`.
    """

    seen: Counter[bool] = Counter()

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = func in ATTENTION
        if func in PRODUCTS:
            seen[context.is_recompute] += 1
            kept = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def each_block(task: Task, contexts: Contexts) -> Prepared:
    """Return every block under a checkpoint with the same contexts."""
    regions = dict.fromkeys(task.subject.blocks, contexts)
    return Prepared(stepping(lambda workload: checkpointing(workload.model, regions)))


def _policy(task: Task, studied: None, kept: str) -> Prepared:
    return each_block(task, POLICIES[kept])


def _titan(task: Task, studied: None, setting: str) -> Prepared:
    return each_block(task, _every_second)


SELECTIVE = (
    Method("selective, kept", "eager", lambda task: list(POLICIES), _policy),
    Method("selective, torchtitan", "eager", lambda task: ["every second product"], _titan),
)
