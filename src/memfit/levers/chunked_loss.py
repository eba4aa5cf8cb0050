"""Chunked loss: the logits of a model are never whole in memory.

The layer that makes the logits (the head: an `nn.Linear`, or a convolution over single positions) returns `Logits`
instead (`deferred_logits.py`): what a loss does with each token's or pixel's logits is computed a few of them at a
time, in the backward pass again.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from memfit.capture import external_modules, is_compiled
from memfit.errors import PlanError, PlanMismatchError
from memfit.foundations import format_bytes
from memfit.ir import ChunkedLoss, CostTable, Levers, Trace, enclosing
from memfit.levers.lever import Circumstance, Conflict, Lever, LeversOn, NotOffered, Setting, least_bytes
from memfit.levers.logit_functions import deferred
from memfit.levers.precision import Casting
from memfit.levers.row_expressions import Product
from memfit.solver import SIMPLER_WITHIN
from memfit.workload import LoopWorkload, Workload

CHUNKED_LOSS = "chunked loss"
HEAD_INSIDE = "a region around the head of the logits"
_FEW_CHUNKS = 8  # of a loss of few rows
_SHARE_OF_INPUT = 8  # of the head's input, what a chunk's logits may take
_LEAST_ROWS = 128  # below, products are slower (2048 rows of 256, 32768 classes: 64 rows 5 % slower than 128)


_Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ChunkedLossLever(Lever):
    """A loss whose logits are never whole in memory."""

    name = CHUNKED_LOSS
    rungs = (CHUNKED_LOSS,)
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
            Circumstance.COMPILED,
            "torch.compile can't trace the deferred logits",
            "set levers.chunked_loss to null, or don't compile the model",
        ),
        Conflict(CHUNKED_LOSS, Circumstance.JITTOR, "this lever needs PyTorch", "set levers.chunked_loss to null"),
    )

    def words(self, on: LeversOn) -> tuple[str, str]:
        assert on.levers.chunked_loss is not None
        return f"{on.levers.chunked_loss.rows:,} rows of {on.levers.chunked_loss.head} at a time", self.name

    def names(self, levers: Levers) -> set[str]:
        around = _around_head(levers)
        inside = any(fqn in around for region in levers.regions for fqn in region.modules)
        return {self.name, HEAD_INSIDE} if inside else {self.name}

    def recomputing(self, levers: Levers, costs: CostTable) -> tuple[set[str], CostTable]:
        return _around_head(levers), costs

    @contextlib.contextmanager
    def on_model(self, levers: Levers, model: nn.Module) -> Iterator[None]:
        """Have a model's head return logits whose numbers are put off, until the context is left.

        Raises:
            PlanMismatchError: The model has no module of the head's name.
            PlanError: The module is not a plain `nn.Linear` or 1x1 convolution, or its logits are chunked already; or
                other models' are to be chunked too, which a model does not lead to.
        """
        lever = levers.chunked_loss
        assert lever is not None
        if lever.others:
            raise PlanError(
                "the plan's chunked_loss.others chunks the logits of models that the loss function refers to, and here"
                " is no loss function that memfit knows: make the plan for Workload(loss_fn=...) and apply it to that,"
                " or set chunked_loss.others to false"
            )
        with _put_off(self._head(lever, model), lever):
            yield

    @contextlib.contextmanager
    def on_workload(self, levers: Levers, workload: Workload) -> Iterator[None]:
        """Have the head of a workload's model, and of others that its loss refers to, put off their logits' numbers."""
        lever = levers.chunked_loss
        assert lever is not None
        head = self._head(lever, workload.model)
        with contextlib.ExitStack() as stack:
            for module in [head, *(_other_heads(workload, len(head.weight)) if lever.others else [])]:
                stack.enter_context(_put_off(module, lever))
            yield

    def _head(self, lever: ChunkedLoss, model: nn.Module) -> _Layer:
        module = dict(model.named_modules()).get(lever.head)
        if module is None:
            raise PlanMismatchError(
                f"the plan's chunked_loss.head is {lever.head!r}, and the model has no such module: the plan is for"
                " another model"
            )
        if not can_defer(module):
            raise PlanError(
                f"chunked_loss.head={lever.head!r} is a {type(module).__name__}: name the nn.Linear that makes the"
                " logits, or the convolution over single positions (kernel and stride 1, no padding, no groups)"
            )
        return module

    def is_applied(self, workload: Workload) -> bool:
        forwards = [module.__dict__.get("forward") for module in workload.model.modules()]
        return any(isinstance(f.forward if isinstance(f, Casting) else f, Head) for f in forwards)

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        whole = replace(step.plain, chunked_loss=self._offered(step))
        # What is not allowed is there for comparison, as it is.
        with_it = [replace(levers, chunked_loss=whole.chunked_loss) for levers in wanted if step.allows(levers)]
        as_fast = (1 + SIMPLER_WITHIN) * step.predicted(step.plain).step_seconds
        if step.predicted(whole).step_seconds <= as_fast and not step.tries_all:
            # Where it costs no time, few steps are searched with their loss whole, for measuring to compare.
            wanted = [levers for levers in wanted if levers.precision == step.precisions[0] or levers == step.plain]
        return [*wanted, *with_it]

    def rung(self, name: str, step: Setting, levers: Levers) -> tuple[Levers, str]:
        chunks = self._offered(step)
        return replace(levers, chunked_loss=chunks), f"{chunks.rows} rows of {chunks.head} at a time"

    def _offered(self, step: Setting) -> ChunkedLoss:
        """Return the chunks of the loss, where logits take enough and the loss takes them token by token."""
        plain, least = step.trace(step.plain), least_bytes(step)
        logits = _largest_logits(plain, step.workload)
        chunks = None
        if logits is not None and logits.nbytes >= least and not is_compiled(step.workload):
            chunks = _chunks(logits, step.workload, plain, tries_all=not least)
        if logits is None or chunks is None:
            raise NotOffered(f"the loss uses no logits of a linear layer with {format_bytes(least)} or more")
        if not step.allows(replace(step.plain, chunked_loss=chunks)):
            raise NotOffered("its class is reordered: allow it with numerics='reordered'")
        head = dict(step.workload.model.named_modules())[chunks.head]
        assert can_defer(head)
        if not _is_run_by_others(step.workload) and _other_heads(step.workload, len(head.weight)):
            chunks = replace(chunks, others=True)
        # Something may ask for them whole.
        whole = step.trace(replace(step.plain, chunked_loss=chunks))
        most = max(chunks.rows, logits.rows // 2)  # a loss may take whole samples at a time
        if _whole_tensors(whole, head, most) >= _whole_tensors(plain, head, most):
            why = f"operators take the logits of {chunks.head} that are not one token's or pixel's by itself"
            raise NotOffered(f"the loss is not chunked: {why}", is_noted=logits.is_certain)
        return chunks


def _around_head(levers: Levers) -> set[str]:
    assert levers.chunked_loss is not None
    return enclosing(levers.chunked_loss.head)


class _Logits(NamedTuple):
    """Logits that a step makes, and an operator after which they are there."""

    op: int
    rows: int
    classes: int
    nbytes: int
    is_certain: bool  # whether a softmax is taken of so many classes


def _chunks(logits: _Logits, workload: Workload, trace: Trace, *, tries_all: bool) -> ChunkedLoss | None:
    """Return how the loss of a step may be chunked; None where its logits are few, or made in another way.

    A chunk has so many rows that its logits, and the probabilities made of them, take together what the gradient of
    the head's weight takes, which is there beside them; of a head that is not trained, a quarter of that. The logits
    may take an eighth of what the head's input takes: many pixels of few classes are few chunks.
    """
    modules = dict(workload.model.named_modules())
    calls = [call for call in trace.calls if call.phase == "forward"]
    before = [call for call in calls if call.end <= logits.op]
    for call in [*reversed(before), *calls]:  # those of a reference that ran first have none before
        fqn = trace.modules[call.module].fqn
        head = modules[fqn]
        if can_defer(head) and len(head.weight) == logits.classes:
            features = head.weight.shape[1]
            of_input = logits.rows * features // (_SHARE_OF_INPUT * logits.classes)
            rows = max(_LEAST_ROWS, features // (2 if head.weight.requires_grad else 8), of_input)
            if rows >= logits.rows and tries_all:  # products of few rows are slow, and small
                rows = -(-logits.rows // _FEW_CHUNKS)
            return ChunkedLoss(head=fqn, rows=rows) if rows < logits.rows else None
    return None


def _largest_logits(trace: Trace, workload: Workload) -> _Logits | None:
    """Return the logits of a step's first microbatch that take the most: whose softmax it takes, or what heads make."""
    by_softmax = max(_in_softmax(trace, "aten._log_softmax.default"), key=lambda found: found.nbytes, default=None)
    by_head = max(_of_heads(trace, workload), key=lambda found: found.nbytes, default=None)
    if by_head is None or (by_softmax is not None and by_head.nbytes < 2 * by_softmax.nbytes):
        return by_softmax
    # A softmax may be taken of a part at a time, or none.
    taken = _in_softmax(trace, "aten._log_softmax.default", "aten._softmax.default")
    return by_head._replace(is_certain=any(found.classes == by_head.classes for found in taken))


def _in_softmax(trace: Trace, *names: str) -> list[_Logits]:
    """Return the logits whose softmax a step's first microbatch takes."""
    found = []
    for index, op in enumerate(trace.ops):
        if op.name in names and op.phase == "forward" and op.microbatch == 0:
            tensor, dim, *_ = json.loads(trace.signatures[op.signature])["args"]
            _, shape, _ = tensor["t"]
            classes = shape[dim] if shape else 1
            rows = math.prod(shape) // max(1, classes)
            found.append(_Logits(index, rows, classes, trace.works[op.signature].write_bytes, True))
    return found


def _of_heads(trace: Trace, workload: Workload) -> list[_Logits]:
    """Return what linear layers make after which no module with other parameters runs, in the first microbatch."""
    modules = dict(workload.model.named_modules())
    found: list[_Logits] = []
    for call in sorted(trace.calls, key=lambda call: -call.start):
        module = modules[trace.modules[call.module].fqn]
        if call.phase != "forward" or call.microbatch or not any(True for _ in module.parameters(recurse=False)):
            continue
        if not can_defer(module) or (found and found[0].classes != len(module.weight)):
            break
        born = [s for op in range(call.start, call.end) for s in trace.births[op]]
        shapes = [(trace.storages[s].shape, trace.storages[s].nbytes) for s in born]
        classes, dims = len(module.weight), module.weight.dim()
        of_classes = -1 if dims == 2 else 1 - dims  # a convolution has them before its positions
        made = [(math.prod(s), nbytes) for s, nbytes in shapes if len(s) >= dims - 1 and s[of_classes] == classes]
        if made:
            numbers, nbytes = max(made)
            found.append(_Logits(call.end, numbers // classes, classes, nbytes, False))
    return found


def _whole_tensors(trace: Trace, head: _Layer, rows: int) -> int:
    """Count the tensors of more than so many rows of classes, in a step's first microbatch."""
    classes, features = head.weight.shape[:2]
    of_weight = {tuple(head.weight.shape), (classes, features), (features, classes)}
    count = 0
    for storage in trace.storages:
        shape = storage.shape
        if 0 <= storage.birth < len(trace.ops) and classes in shape and shape not in of_weight:
            op = trace.ops[storage.birth]
            is_here = op.microbatch == 0 and op.phase in ("forward", "backward")
            count += is_here and math.prod(shape) // classes > rows
    return count


def _is_run_by_others(workload: Workload) -> bool:
    """Tell whether a user's loop or another package's trainer runs the step: they are given a model's levers only."""
    loss = workload.loss_fn
    module = str(getattr(loss, "__module__", type(loss).__module__))
    return isinstance(workload, LoopWorkload) or module.startswith("memfit.integrations.")


def _other_heads(workload: Workload, classes: int) -> list[_Layer]:
    """Return the heads, of so many classes, of models that only a workload's loss function refers to."""
    others = external_modules(workload)
    return [each for each in others if can_defer(each) and len(each.weight) == classes]


def can_defer(module: nn.Module) -> TypeGuard[_Layer]:
    """Tell whether a module's product can be put off: that of a plain `nn.Linear`, or of each position by itself."""
    for kind in _LAYERS:
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return isinstance(module, nn.Linear) or (
                {*module.kernel_size, *module.stride, module.groups} == {1}
                and module.padding in ("valid", "same", (0,) * len(module.kernel_size))
            )
    return False


@contextlib.contextmanager
def _put_off(module: _Layer, lever: ChunkedLoss) -> Iterator[None]:
    """Have a head return its logits without numbers, until the context is left."""
    cast = module.__dict__.get("forward")
    holder: Any = cast if isinstance(cast, Casting) else module  # casts stay around what computes
    before = holder.__dict__.get("forward")
    if before is not None:
        raise PlanError(
            f"the forward of chunked_loss.head={lever.head!r} is replaced by {type(before).__name__} already: if a"
            " plan did that, call close() on the earlier step first; otherwise plan without chunked_loss"
        )
    holder.forward = Head(module, lever.rows)
    try:
        yield
    finally:
        if holder is module:
            del holder.forward
        else:
            holder.forward = None


class Head:
    """The `forward` of a head whose product is put off. Copies with the module (`copy.deepcopy`), bound to the copy."""

    def __init__(self, module: _Layer, rows: int) -> None:
        self.module, self.rows = module, rows

    def __call__(self, hidden: Tensor) -> Tensor:
        kind = hidden.device.type
        is_cast = torch.is_autocast_enabled(kind) and hidden.is_floating_point() and hidden.itemsize < 8
        dtype = torch.get_autocast_dtype(kind) if is_cast else hidden.dtype
        weight, bias, axis = self.module.weight, self.module.bias, 1 - self.module.weight.dim()
        if axis == -1:
            return deferred(Product(hidden, weight, bias, dtype, self.rows))
        of_positions = Product(hidden.movedim(axis, -1), weight.flatten(1), bias, dtype, self.rows, is_convolution=True)
        return deferred(of_positions).movedim(-1, axis)
