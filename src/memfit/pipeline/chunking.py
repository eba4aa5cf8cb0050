"""When a loss is worth chunking, as a trace of the step tells, and where."""

from __future__ import annotations

import json
import math
from typing import NamedTuple

from memfit.apply.chunked_loss import can_defer
from memfit.capture.step import is_compiled
from memfit.ir.plan import ChunkedLoss
from memfit.ir.trace import Trace
from memfit.workload import Workload

LEAST_SHARE = 0.05
"""Of the plain peak, that logits must take before a step with a chunked loss is captured."""
_LEAST_ROWS = 128  # below, products are slower (2048 rows of 256, 32768 classes: 64 rows 5 % slower than 128)


class _Logits(NamedTuple):
    """Logits that a loss takes whole, and the operator of the step that takes them."""

    op: int
    rows: int
    classes: int
    nbytes: int


def worthwhile(workload: Workload, trace: Trace, peak_bytes: int) -> ChunkedLoss | None:
    """Return how the loss of a step may be chunked, or None where its logits are few, or made in another way.

    A chunk has so many rows that its logits, and the probabilities made of them, take together what the gradient of
    the head's weight takes, which is there beside them.

    Args:
        workload: The workload.
        trace: Its step, with the loss whole.
        peak_bytes: The peak of that.
    """
    logits = max(_whole_logits(trace), key=lambda found: found.nbytes, default=None)
    if logits is None or logits.nbytes < LEAST_SHARE * peak_bytes or is_compiled(workload):
        return None
    modules = dict(workload.model.named_modules())
    before = [call for call in trace.calls if call.end <= logits.op and call.phase == "forward"]
    for call in reversed(before):
        fqn = trace.modules[call.module].fqn
        head = modules[fqn]
        if can_defer(head) and head.out_features == logits.classes:
            rows = max(_LEAST_ROWS, int(head.in_features) // 2)
            return ChunkedLoss(head=fqn, rows=rows) if rows < logits.rows else None
    return None


def is_chunked(chunked: Trace, plain: Trace, lever: ChunkedLoss) -> bool:
    """Tell whether a step has fewer logits whole than the plain one: something else than the loss may ask for them."""
    classes = max(_whole_logits(plain), key=lambda found: found.nbytes).classes
    whole = [
        sum(found.classes == classes and found.rows > lever.rows for found in _whole_logits(trace))
        for trace in (chunked, plain)
    ]
    return whole[0] < whole[1]


def _whole_logits(trace: Trace) -> list[_Logits]:
    """Return what each logarithm of a softmax in a step's first microbatch is taken of."""
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
