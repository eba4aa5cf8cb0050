"""Chunked loss: the logits of a language model are never whole in memory.

The layer that makes the logits (the head, an `nn.Linear`) returns `Logits` instead: a tensor that knows its input and
its weight, and has no numbers. What only shapes it (`view`, slices of tokens, `float()`, ...) gives `Logits` again, and
`F.cross_entropy` takes a few rows after the other: their logits, their loss, and at once their share of the gradients,
so that the backward pass has only to scale what is there. Anything else that needs the numbers gets them, as without
the lever.

The rows' gradients are computed as in P.-L. Hsu et al. (2025), *Liger Kernel: Efficient Triton Kernels for LLM
Training*, section 3.2 (fused linear cross entropy), with PyTorch's operators instead of a kernel. What torch 2.13 has
in `F.linear_cross_entropy` does the same; on the CPU it took twice the time (2048 rows of 256, 32768 classes), its
operators are not seen one by one, it can't smooth labels in chunks, and torch 2.11 and 2.12 have none.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn

from memfit._torch import DisableTorchFunctionSubclass, make_wrapper_subclass, tree_map
from memfit.capture import is_compiled
from memfit.errors import PlanError, PlanMismatchError, UsageError
from memfit.foundations import format_bytes
from memfit.ir import ChunkedLoss, CostTable, Levers, Trace, enclosing
from memfit.levers.lever import Circumstance, Conflict, Lever, LeversOn, NotOffered, Setting, least_bytes
from memfit.levers.precision import Casting
from memfit.solver import SIMPLER_WITHIN
from memfit.workload import Workload

CHUNKED_LOSS = "chunked loss"
HEAD_INSIDE = "a region around the head of the logits"
_FEW_CHUNKS = 8  # of a loss of few rows
_LEAST_ROWS = 128  # below, products are slower (2048 rows of 256, 32768 classes: 64 rows 5 % slower than 128)

_PARTS, _LEAST_CLASSES = 16, 512
"""In which a weight's gradient is added to one of more bits, and the fewest classes of a part. A product and its wider
copy, which the CPU's addition makes, otherwise take one and a half times the weight beside its gradient."""
_SHAPE_ONLY = {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.stride,
    Tensor.get_device,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.untyped_storage,
    Tensor.__len__,
    torch.is_floating_point,
    torch.is_tensor,
}


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
        """Have a model's head return logits that `F.cross_entropy` takes in chunks, until the context is left.

        Raises:
            PlanMismatchError: The model has no module of the head's name.
            PlanError: The module is not a plain `nn.Linear`, or its logits are chunked already.
        """
        lever = levers.chunked_loss
        assert lever is not None
        module = dict(model.named_modules()).get(lever.head)
        if module is None:
            raise PlanMismatchError(
                f"the plan's chunked_loss.head is {lever.head!r}, and the model has no such module: the plan is for"
                " another model"
            )
        if not can_defer(module):
            raise PlanError(
                f"chunked_loss.head={lever.head!r} is a {type(module).__name__}: name the nn.Linear that makes the"
                " logits"
            )
        assert isinstance(module, nn.Linear)
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
        """Return the chunks of the loss, where logits take enough and nothing else asks for them."""
        plain, least = step.trace(step.plain), least_bytes(step)
        logits = max(_whole_logits(plain), key=lambda found: found.nbytes, default=None)
        chunks = None
        if logits is not None and logits.nbytes >= least and not is_compiled(step.workload):
            chunks = _chunks(logits, step.workload, plain, tries_all=not least)
        if logits is None or chunks is None:
            raise NotOffered(f"the loss uses no logits of a linear layer with {format_bytes(least)} or more")
        whole = replace(step.plain, chunked_loss=chunks)
        if not step.allows(whole):
            raise NotOffered("its class is reordered: allow it with numerics='reordered'")
        # Something else than the loss may ask for them.
        left, before = (
            sum(found.classes == logits.classes and found.rows > chunks.rows for found in _whole_logits(trace))
            for trace in (step.trace(whole), plain)
        )
        if left >= before:
            why = f"operators other than F.cross_entropy use the logits of {chunks.head}"
            raise NotOffered(f"the loss is not chunked: {why}", is_noted=True)
        return chunks


def _around_head(levers: Levers) -> set[str]:
    assert levers.chunked_loss is not None
    return enclosing(levers.chunked_loss.head)


class _Logits(NamedTuple):
    """Logits that a loss takes whole, and the operator of the step that takes them."""

    op: int
    rows: int
    classes: int
    nbytes: int


def _chunks(logits: _Logits, workload: Workload, trace: Trace, *, tries_all: bool) -> ChunkedLoss | None:
    """Return how the loss of a step may be chunked; None where its logits are few, or made in another way.

    A chunk has so many rows that its logits, and the probabilities made of them, take together what the gradient of
    the head's weight takes, which is there beside them; of a head that is not trained, a quarter of that.
    """
    modules = dict(workload.model.named_modules())
    before = [call for call in trace.calls if call.end <= logits.op and call.phase == "forward"]
    for call in reversed(before):
        fqn = trace.modules[call.module].fqn
        head = modules[fqn]
        if can_defer(head) and head.out_features == logits.classes:
            rows = max(_LEAST_ROWS, int(head.in_features) // (2 if head.weight.requires_grad else 8))
            if rows >= logits.rows and tries_all:  # products of few rows are slow, and small
                rows = -(-logits.rows // _FEW_CHUNKS)
            return ChunkedLoss(head=fqn, rows=rows) if rows < logits.rows else None
    return None


def _whole_logits(trace: Trace) -> list[_Logits]:
    """Return the logits whose softmax a step's first microbatch takes whole."""
    found = []
    for index, op in enumerate(trace.ops):
        if op.name == "aten._log_softmax.default" and op.phase == "forward" and op.microbatch == 0:
            tensor, dim, *_ = json.loads(trace.signatures[op.signature])["args"]
            _, shape, _ = tensor["t"]
            classes = shape[dim] if shape else 1
            rows = math.prod(shape) // max(1, classes)
            found.append(_Logits(index, rows, classes, trace.works[op.signature].write_bytes))
    return found


def can_defer(module: nn.Module) -> bool:
    """Tell whether a module's product can be put off: that of a plain `nn.Linear`."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


class Head:
    """The `forward` of a head whose product is put off. Copies with the module (`copy.deepcopy`), bound to the copy."""

    def __init__(self, module: nn.Linear, rows: int) -> None:
        self.module, self.rows = module, rows

    def __call__(self, hidden: Tensor) -> Tensor:
        kind = hidden.device.type
        is_cast = torch.is_autocast_enabled(kind) and hidden.is_floating_point() and hidden.itemsize < 8
        dtype = torch.get_autocast_dtype(kind) if is_cast else hidden.dtype
        return _Product(hidden, self.module.weight, self.module.bias, dtype, self.rows).logits()


@dataclass(frozen=True, eq=False)
class _Product:
    """A product that is put off."""

    hidden: Tensor  # input of the head, [..., features]
    weight: Tensor  # [classes, features]
    bias: Tensor | None  # [classes]
    dtype: torch.dtype  # what it is computed in
    rows: int  # of logits that there may be at a time

    def value(self) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self.dtype)
        with torch.autocast(self.hidden.device.type, enabled=False):
            return F.linear(self.hidden.to(self.dtype), self.weight.to(self.dtype), bias)

    def logits(self, dtype: torch.dtype | None = None, transposed: bool = False) -> Logits:
        """Return them without the numbers."""
        made: Logits = _PutOff.apply(  # type: ignore[no-untyped-call]
            self.hidden, self.weight, self.bias, self, dtype or self.dtype, transposed
        )
        return made


class _PutOff(torch.autograd.Function):
    """Connects logits without numbers to the graph, for code that asks for their gradient below PyTorch's functions."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, product: Any, dtype: Any, transposed: Any) -> Logits:
        ctx.product, ctx.transposed = product, transposed
        return Logits(product, dtype, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        product = ctx.product
        hidden, weight = product.hidden.detach().requires_grad_(), product.weight.detach().requires_grad_()
        bias = None if product.bias is None else product.bias.detach().requires_grad_()
        with torch.enable_grad():
            value = _Product(hidden, weight, bias, product.dtype, product.rows).value()
        grad = grad.transpose(1, 2) if ctx.transposed else grad
        found = torch.autograd.grad(value, [t for t in (hidden, weight, bias) if t is not None], grad.to(value.dtype))
        return *found, *([None] if bias is None else []), None, None, None


class Logits(Tensor):
    """Logits without numbers, [..., classes], or [batch, classes, tokens] if transposed; see the module's docstring."""

    product: _Product
    transposed: bool

    @staticmethod
    def __new__(cls, product: _Product, dtype: torch.dtype, transposed: bool) -> Logits:
        shape = [*product.hidden.shape[:-1], product.weight.shape[0]]
        if transposed:
            shape[1], shape[2] = shape[2], shape[1]
        made: Logits = make_wrapper_subclass(cls, shape, dtype=dtype, device=product.hidden.device, storage_size=0)
        made.product, made.transposed = product, transposed
        return made

    def value(self) -> Tensor:
        """Return the numbers."""
        found = self.product.value()
        with DisableTorchFunctionSubclass():
            dtype = self.dtype
        return (found.transpose(1, 2) if self.transposed else found).to(dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SHAPE_ONLY or func.__name__ in ("__get__", "__set__"):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func in _DEFERRED:
            found = _DEFERRED[func](*args, **kwargs)
            if found is not NotImplemented:
                return found
        args, kwargs = tree_map(_valued, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(_valued, (args, kwargs or {}))
        return func(*args, **kwargs)


def _valued(value: Any) -> Any:
    return value.value() if isinstance(value, Logits) else value


# What only shapes logits


def _of(logits: Logits, hidden: Tensor) -> Logits:
    """Return the logits of the same head for another input."""
    head = logits.product
    return _Product(hidden, head.weight, head.bias, head.dtype, head.rows).logits(logits.dtype)


def _reshaped(logits: Any, *sizes: Any) -> Any:
    wanted = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    known = 1
    if logits.transposed or not all(isinstance(size, int) for size in wanted):
        return NotImplemented
    for size in wanted:
        known *= size if size != -1 else 1
    if -1 in wanted and known:
        wanted[wanted.index(-1)] = logits.numel() // known
    if wanted[-1] != logits.shape[-1] or not known:
        return NotImplemented
    return _of(logits, logits.product.hidden.reshape(*wanted[:-1], logits.product.hidden.shape[-1]))


def _flattened(logits: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if logits.transposed or end_dim % logits.dim() == logits.dim() - 1:
        return NotImplemented
    return _of(logits, logits.product.hidden.flatten(start_dim, end_dim))


def _indexed(logits: Any, index: Any) -> Any:
    """Take some rows of logits: any index that leaves the classes as they are."""
    items = index if isinstance(index, tuple) else (index,)
    if logits.transposed or not all(item is ... or type(item) in (slice, int) for item in items):
        return NotImplemented
    at = [place for place, item in enumerate(items) if item is ...]
    if len(items) - len(at) >= logits.dim() or (at and at[-1] < len(items) - 1):
        if items[-1] != slice(None):
            return NotImplemented
    return _of(logits, logits.product.hidden[index])


def _cast(logits: Any, *wanted: Any, **named: Any) -> Any:
    """Widen logits; a conversion that rounds them is not put off."""
    dtype = logits.dtype
    for value in (*wanted, *named.values()):
        if isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize >= dtype.itemsize:
            dtype = value
        elif not isinstance(value, torch.device | str) or torch.device(value) != logits.device:
            return NotImplemented
    return logits if dtype == logits.dtype else logits.product.logits(dtype, logits.transposed)


def _transposed(logits: Any, dim0: int, dim1: int) -> Any:
    if logits.dim() != 3 or {dim0 % 3, dim1 % 3} != {1, 2}:
        return NotImplemented
    return logits.product.logits(logits.dtype, not logits.transposed)


def _permuted(logits: Any, *dims: Any) -> Any:
    order = tuple(dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)
    return _transposed(logits, 1, 2) if order == (0, 2, 1) else NotImplemented


def _itself(logits: Any, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if args or kwargs else logits


# The loss


@dataclass(frozen=True, eq=False)
class _Targets:
    """The targets of rows of logits, and how they count."""

    classes: Tensor  # [rows, 1]
    valid: Tensor  # whether each counts, [rows, 1]
    smoothing: float
    with_gradients: bool


def _cross_entropy(*args: Any, **kwargs: Any) -> Any:
    """Return the loss of logits without their numbers."""
    given = inspect.getcallargs(F.cross_entropy, *args, **kwargs)
    logits, target, reduction = given["input"], given["target"], given["reduction"]
    if not isinstance(logits, Logits) or isinstance(target, Logits):
        return NotImplemented
    if given["weight"] is not None or reduction == "none":
        return NotImplemented
    product = logits.product
    leading = product.hidden.shape[:-1]
    fits = logits.dim() == (3 if logits.transposed else 2) and target.shape == leading
    if not fits or target.is_floating_point() or (given["size_average"], given["reduce"]) != (None, None):
        return NotImplemented
    dtype = torch.float32 if torch.is_autocast_enabled(product.hidden.device.type) else logits.dtype
    target = target.reshape(-1)
    valid = target != given["ignore_index"]
    total = _LossOfChunks.apply(  # type: ignore[no-untyped-call]
        product.hidden.reshape(-1, product.hidden.shape[-1]),
        product.weight,
        product.bias,
        product,
        _Targets(target.where(valid, 0)[:, None], valid[:, None], given["label_smoothing"], torch.is_grad_enabled()),
    )
    return (total / valid.sum() if reduction == "mean" else total).to(dtype)


class _LossOfChunks(torch.autograd.Function):
    """The summed loss of rows. Their gradients are made with it; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, product: _Product, targets: _Targets
    ) -> Tensor:
        dtype = product.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = [
                torch.zeros_like(t, dtype=_wide(t.dtype))
                if targets.with_gradients and needed and t is not None
                else None
                for t, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
            ]
            ctx.gradients, ctx.dtypes = gradients, [None if t is None else t.dtype for t in (hidden, weight, bias)]
            total = torch.zeros((), dtype=_wide(dtype), device=hidden.device)
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
            for start in range(0, len(hidden), product.rows):
                rows = slice(start, start + product.rows)
                piece = hidden[rows].to(dtype)
                found = torch.log_softmax(F.linear(piece, weight, bias), -1, dtype=total.dtype)
                total += _loss_of_rows(found, rows, targets)
                if targets.with_gradients:
                    found = _gradient_of_rows(found, rows, targets).to(dtype)
                    _add_gradients(gradients, rows, found, piece, weight, targets.valid[rows].to(dtype))
                del found  # before the next rows' logits are made
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise UsageError(
                "the backward pass of a chunked loss ran twice, and its gradients are kept for one run only: plan"
                " without chunked_loss, or compute the loss again"
            )
        scaled = [None if g is None else g.mul_(grad).to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return *scaled, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _loss_of_rows(logs: Tensor, rows: slice, targets: _Targets) -> Tensor:
    """Return the summed loss of rows from the logarithms of their probabilities."""
    target, valid, smoothing = targets.classes[rows], targets.valid[rows], targets.smoothing
    loss = -(1 - smoothing) * (logs.gather(1, target) * valid).sum()
    return loss - smoothing / logs.shape[1] * (logs.sum(1, keepdim=True) * valid).sum() if smoothing else loss


def _gradient_of_rows(logs: Tensor, rows: slice, targets: _Targets) -> Tensor:
    """Return the gradient of rows' losses by their logits, in place of the logarithms of their probabilities."""
    target, smoothing = targets.classes[rows], targets.smoothing
    found = logs.exp_().scatter_add_(1, target, torch.full_like(target, smoothing - 1, dtype=logs.dtype))
    return found.sub_(smoothing / logs.shape[1]) if smoothing else found


def _add_gradients(
    gradients: Sequence[Tensor | None], rows: slice, by_logits: Tensor, piece: Tensor, weight: Tensor, valid: Tensor
) -> None:
    """Add what rows give to the gradients of input, weight and bias. Rows that are not valid give nothing."""
    by_hidden, by_weight, by_bias = gradients
    if by_hidden is not None:
        by_hidden[rows] = (by_logits @ weight) * valid
    if by_weight is not None and by_weight.dtype == by_logits.dtype:
        by_weight.addmm_(by_logits.t(), piece * valid)
    elif by_weight is not None:  # the product is rounded to fewer bits before it is added: a part of the classes each
        classes = max(_LEAST_CLASSES, -(-len(by_weight) // _PARTS))
        for part, of_part in zip(by_weight.split(classes), by_logits.split(classes, 1), strict=True):
            part += of_part.t() @ (piece * valid)
    if by_bias is not None:
        by_bias += (by_logits.t() @ valid).squeeze(1)


_DEFERRED: dict[Any, Callable[..., Any]] = {
    Tensor.view: _reshaped,
    Tensor.reshape: _reshaped,
    torch.reshape: _reshaped,
    Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    Tensor.__getitem__: _indexed,
    Tensor.contiguous: _itself,
    Tensor.float: lambda logits: _cast(logits, torch.float32),
    Tensor.to: _cast,
    Tensor.transpose: _transposed,
    torch.transpose: _transposed,
    Tensor.permute: _permuted,
    torch.permute: _permuted,
    F.cross_entropy: _cross_entropy,
}
