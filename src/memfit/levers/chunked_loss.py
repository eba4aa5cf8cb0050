"""Chunked loss: the logits of a language model, a few rows at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

from msgspec.structs import replace
from torch import nn

from memfit.capture import is_compiled
from memfit.foundations import format_bytes
from memfit.ir import ChunkedLoss as Chunks
from memfit.ir import Levers, Trace, enclosing
from memfit.levers.chunked_cross_entropy import can_defer, chunked, is_chunked
from memfit.levers.conflicts import COMPILED, JITTOR, Conflict
from memfit.levers.lever import Lever, LeversOn, NotOffered, Rung, Setting, least_bytes
from memfit.solver import SIMPLER_WITHIN
from memfit.workload import Workload

CHUNKED_LOSS = "chunked loss"
HEAD_INSIDE = "a region around the head of the logits"
_FEW_CHUNKS = 8  # of a loss of few rows
_LEAST_ROWS = 128  # below, products are slower (2048 rows of 256, 32768 classes: 64 rows 5 % slower than 128)


class ChunkedLossLever(Lever):
    """A loss whose logits are never whole in memory."""

    name = CHUNKED_LOSS
    field = "chunked_loss"
    switchable = True
    numerics_class = "reordered"
    conflicts = (
        Conflict(
            CHUNKED_LOSS,
            HEAD_INSIDE,
            "the forward pass computes the chunks' gradients, and a recomputation would compute them twice",
            "take the region out of levers.regions, or set levers.chunked_loss to null",
        ),
        Conflict(
            CHUNKED_LOSS,
            COMPILED,
            "torch.compile can't trace the deferred logits",
            "set levers.chunked_loss to null, or don't compile the model",
        ),
        Conflict(CHUNKED_LOSS, JITTOR, "this lever needs PyTorch", "set levers.chunked_loss to null"),
    )

    def setting(self, on: LeversOn) -> str:
        assert on.levers.chunked_loss is not None
        return f"{on.levers.chunked_loss.rows:,} rows of {on.levers.chunked_loss.head} at a time"

    def brief(self, on: LeversOn) -> str:
        return self.name

    def names(self, levers: Levers) -> set[str]:
        around = self.not_recomputed(levers)
        inside = any(fqn in around for region in levers.regions for fqn in region.modules)
        return {self.name, HEAD_INSIDE} if inside else {self.name}

    def not_recomputed(self, levers: Levers) -> set[str]:
        assert levers.chunked_loss is not None
        return enclosing(levers.chunked_loss.head)

    def on_model(self, levers: Levers, model: nn.Module) -> AbstractContextManager[None]:
        return chunked(model, levers.chunked_loss)

    def is_applied(self, workload: Workload) -> bool:
        return is_chunked(workload.model)

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        whole = replace(step.plain, chunked_loss=self._offered(step))
        # What is not allowed is there for comparison, as it is.
        with_it = [replace(levers, chunked_loss=whole.chunked_loss) for levers in wanted if step.allows(levers)]
        as_fast = (1 + SIMPLER_WITHIN) * step.predicted(step.plain).step_seconds
        if step.predicted(whole).step_seconds <= as_fast and not step.tries_all:
            # Where it costs no time, few steps are searched with their loss whole, for measuring to compare.
            wanted = [levers for levers in wanted if levers.precision == step.precisions[0] or levers == step.plain]
        return [*wanted, *with_it]

    def rungs(self) -> Mapping[str, Rung]:
        return {self.name: self._rung}

    def _rung(self, step: Setting, levers: Levers) -> tuple[Levers, str]:
        chunks = self._offered(step)
        return replace(levers, chunked_loss=chunks), f"{chunks.rows} rows of {chunks.head} at a time"

    def _offered(self, step: Setting) -> Chunks:
        """Return the chunks of the loss, where logits take enough and nothing else asks for them."""
        plain = step.trace(step.plain)
        chunks = worthwhile(step.workload, plain, least_bytes(step))
        if chunks is None:
            least = format_bytes(least_bytes(step))
            raise NotOffered(f"the loss uses no logits of a linear layer with {least} or more")
        whole = replace(step.plain, chunked_loss=chunks)
        if not step.allows(whole):
            raise NotOffered("its class is reordered: allow it with numerics='reordered'")
        if not has_fewer_logits(step.trace(whole), plain, chunks):
            why = f"operators other than F.cross_entropy use the logits of {chunks.head}"
            raise NotOffered(f"the loss is not chunked: {why}", is_noted=True)
        return chunks


class _Logits(NamedTuple):
    """Logits that a loss takes whole, and the operator of the step that takes them."""

    op: int
    rows: int
    classes: int
    nbytes: int


def worthwhile(workload: Workload, trace: Trace, least_bytes: float) -> Chunks | None:
    """Return how the loss of a step may be chunked; None where its logits are fewer bytes, or made in another way.

    A chunk has so many rows that its logits, and the probabilities made of them, take together what the gradient of
    the head's weight takes, which is there beside them; of a head that is not trained, a quarter of that.
    """
    logits = max(_whole_logits(trace), key=lambda found: found.nbytes, default=None)
    if logits is None or logits.nbytes < least_bytes or is_compiled(workload):
        return None
    modules = dict(workload.model.named_modules())
    before = [call for call in trace.calls if call.end <= logits.op and call.phase == "forward"]
    for call in reversed(before):
        fqn = trace.modules[call.module].fqn
        head = modules[fqn]
        if can_defer(head) and head.out_features == logits.classes:
            rows = max(_LEAST_ROWS, int(head.in_features) // (2 if head.weight.requires_grad else 8))
            if rows >= logits.rows and not least_bytes:  # all is tried: products of few rows are slow, and small
                rows = -(-logits.rows // _FEW_CHUNKS)
            return Chunks(head=fqn, rows=rows) if rows < logits.rows else None
    return None


def has_fewer_logits(chunked: Trace, plain: Trace, lever: Chunks) -> bool:
    """Tell whether a step has fewer logits whole than the plain one: something else than the loss may ask for them."""
    classes = max(_whole_logits(plain), key=lambda found: found.nbytes).classes
    whole = [
        sum(found.classes == classes and found.rows > lever.rows for found in _whole_logits(trace))
        for trace in (chunked, plain)
    ]
    return whole[0] < whole[1]


def _whole_logits(trace: Trace) -> list[_Logits]:
    """Return the logits whose softmax a step's first microbatch takes whole."""
    found = []
    for index, op in enumerate(trace.ops):
        if op.name == "aten._log_softmax.default" and op.phase == "forward" and op.microbatch == 0:
            tensor, dim, *_ = json.loads(trace.signatures[op.signature])["args"]
            _, shape, _ = tensor["t"]
            classes = shape[dim] if shape else 1
            found.append(
                _Logits(index, math.prod(shape) // max(1, classes), classes, trace.works[op.signature].write_bytes)
            )
    return found
