"""Logits without numbers, and what may be done with them while they have none.

The layer that makes the logits returns `Logits`: a tensor that knows what it would be computed from. What only shapes
it (`view`, slices of tokens, `float()`, ...) gives `Logits` again, and so does what is done with each row (token) by
itself: `log_softmax`, `gather`, `logsumexp`, products with a mask, a divergence from another head's. A value that has
no classes any more is computed when it is asked for, in chunks of rows, with all others that wait. Anything else that
needs the numbers gets them, as it would without the lever.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memfit._torch import (
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
    schema_of,
    storage_key_of,
    tree_leaves,
    tree_map,
)
from memfit.errors import UsageError
from memfit.levers.row_chunks import Chunks, whole_value
from memfit.levers.row_expressions import (
    Expression,
    Index,
    Output,
    Product,
    is_stale,
    tracked_tensors,
)

_FEW = 8  # of so many classes one: values that are computed in chunks
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
_KEEPS = {
    *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__setitem__"),
    *(f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()),
}
"""Functions after which the same object goes on, beside those that end in an underscore: its numbers are kept."""


class RowSpace:
    """Rows of logits that are computed together: of a head's call, or of several that are used row by row."""

    def __init__(self) -> None:
        self.waiting: list[weakref.ref[Logits]] = []
        self._within: RowSpace | None = None

    def root(self) -> RowSpace:
        """Return the space that it is a part of."""
        return self if self._within is None else self._within.root()

    def join(self, other: RowSpace) -> None:
        """Compute another space's rows with these."""
        mine, others = self.root(), other.root()
        if mine is not others:
            mine.waiting += others.waiting
            others.waiting, others._within = [], mine


@dataclass(frozen=True, eq=False)
class Form:
    """What logits would be: an expression at some rows, and how its values lie."""

    space: RowSpace
    index: Index  # the row of each place, [...]
    expression: Expression
    axis: int  # of the dimension of the classes, or of what became of them; where there is one
    classes: int  # of the head
    device: torch.device
    product: Product | None = None  # where nothing was done but shaping
    shaping: tuple[Callable[[Tensor], Tensor], ...] = ()  # that, of [..., size]
    dtype: torch.dtype | None = None  # of the result, where there is a product

    @property
    def size(self) -> int | None:
        """Of the dimension of the classes; None where there is none."""
        return self.expression.size

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.index.shape)
        if self.size is not None:
            shape.insert(self.axis, self.size)
        return tuple(shape)

    @property
    def is_wide(self) -> bool:
        """Whether its values are as many as logits."""
        return self.size is not None and self.size * _FEW > self.classes

    def laid_out(self, values: Tensor) -> Tensor:
        """Return values of its rows, [rows] or [rows, size], in its shape."""
        if self.size is None:
            return values.reshape(self.index.shape)
        whole = values.reshape(*self.index.shape, self.size)
        return whole if self.axis == self.index.ndim else whole.movedim(-1, self.axis)

    def whole(self, of: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
        """Return the numbers, with other tensors in the place of those that they are computed from."""
        if self.product is None:
            return self.laid_out(whole_value(self.expression, self.index.reshape(-1), of))
        product = self.product
        hidden, bias = of(product.hidden), None if product.bias is None else of(product.bias)
        for shape in self.shaping:
            hidden = shape(hidden)
        value = replace(product, hidden=hidden, weight=of(product.weight), bias=bias).value()
        return (value if self.axis == self.index.ndim else value.movedim(-1, self.axis)).to(self.dtype)

    def tracked(self) -> list[Tensor]:
        """Return the tensors that the numbers have gradients by."""
        if self.product is not None:
            return [tensor for tensor in self.product.tensors if tensor.requires_grad]
        return tracked_tensors(self.expression)


class _PutOff(torch.autograd.Function):
    """Connects logits without numbers to the graph, for code that asks for their gradient below PyTorch's functions."""

    @staticmethod
    def forward(ctx: Any, form: Form, tensors: Sequence[Tensor], *connected: Tensor) -> Logits:
        ctx.form, ctx.tensors = form, tensors
        made = Logits(form)
        ctx.changes = made.changes
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.changes:
            raise UsageError(
                "logits were changed in place, or have a hook, before a function that is not PyTorch's took them: plan"
                " without chunked_loss, or make new logits in place of changing them"
            )
        leaves = {id(tensor): tensor.detach().requires_grad_() for tensor in ctx.tensors}
        with torch.enable_grad():
            value = ctx.form.whole(lambda tensor: leaves.get(id(tensor), tensor))
        return None, None, *torch.autograd.grad(value, list(leaves.values()), grad.to(value.dtype))


class _Numbers(torch.autograd.Function):
    """Gives logits that a function returned their numbers, with the gradients of what it returned."""

    @staticmethod
    def forward(ctx: Any, logits: Logits, numbers: Tensor) -> Tensor:
        return numbers.view_as(numbers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class UnfitError(Exception):
    """A call that is not known to be one row's by itself: it takes the numbers."""


RULES: dict[str, Callable[[Any, Any, Any], Any]] = {}
"""What is known of PyTorch's functions, by their names: of both `torch.exp` and `Tensor.exp`. Each takes the function,
its arguments and its named ones, and returns what it gives; it raises `UnfitError` where that takes the numbers."""
_MODULES = {None, "torch", "torch._tensor", "torch.nn.functional", "torch._C._special", "torch.functional"}


class Logits(Tensor):
    """Logits without numbers, or what was made of them; see the module's docstring."""

    form: Form
    base: tuple[Logits, Callable[[Tensor], Tensor]] | None  # what it is a view of, and the view
    found: Tensor | None  # its numbers, where they are kept
    changes: list[str]  # functions that may have changed these numbers

    @staticmethod
    def __new__(cls, form: Form) -> Logits:
        dtype = form.expression.dtype if form.dtype is None else form.dtype
        made: Logits = make_wrapper_subclass(cls, form.shape, dtype=dtype, device=form.device, storage_size=0)
        made.form, made.base, made.found, made.changes = form, None, None, []
        return made

    @classmethod
    def of(cls, form: Form, base: tuple[Logits, Callable[[Tensor], Tensor]] | None = None) -> Logits:
        """Return logits of a form, part of autograd's graph where it has gradients."""
        if form.expression.tracks:
            tensors = form.tracked()
            made: Logits = _PutOff.apply(form, tensors, *tensors)  # type: ignore[no-untyped-call]
        else:
            made = Logits(form)
        made.base = base
        if not form.is_wide:
            form.space.root().waiting.append(weakref.ref(made))
        return made

    def known(self) -> Tensor | None:
        """Return the numbers, where they are kept."""
        if self.found is None and self.base is not None:
            of, view = self.base
            whole = of.known()
            if whole is not None:
                self.found = view(whole)
                self.changes += of.changes
        if self.found is None:
            with DisableTorchFunctionSubclass():
                node = self.grad_fn
            if node is not None and node.name() != f"{_PutOff.__name__}Backward":
                # A function that is not PyTorch's returned it: the graph goes on from there.
                self.found = _Numbers.apply(self, self._computed())  # type: ignore[no-untyped-call]
        return self.found

    def value(self) -> Tensor:
        """Return the numbers."""
        known = self.known()
        return self._computed() if known is None else known

    def _computed(self) -> Tensor:
        with torch.set_grad_enabled(self.form.expression.tracks), DisableTorchFunctionSubclass():
            if self.form.is_wide:
                return self.form.whole()
            _compute(self)
        assert self.found is not None
        return self.found

    def keep(self) -> Tensor:
        """Return the numbers, which are its own from now on: what changes them changes it."""
        if self.base is not None:
            self.base[0].keep()
        self.found = self.value()
        return self.found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_known, (args, kwargs or {}))
        if func is Tensor.view and not isinstance(args[1], torch.dtype):
            func = Tensor.reshape  # `contiguous` put nothing in order
        name = getattr(func, "__name__", "")
        if func in _SHAPE_ONLY or name in ("__get__", "__set__"):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        rule = RULES.get(name) if getattr(func, "__module__", None) in _MODULES and "out" not in kwargs else None
        if rule is not None and any(isinstance(value, Logits) for value in tree_leaves((args, kwargs))):
            with contextlib.suppress(UnfitError):
                return rule(func, args, kwargs)
        return _with_numbers(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _with_numbers(func, "_" if schema_of(func).is_mutable else "", args, kwargs or {})


def _known(value: Any) -> Any:
    known = value.known() if isinstance(value, Logits) else None
    return value if known is None else known


def _with_numbers(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call a function with the numbers of logits. Where the logits or views of them may be changed, they are kept."""
    given: list[tuple[Logits, Tensor]] = []
    keeps = name in _KEEPS or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs

    def valued(value: Any) -> Any:
        if not isinstance(value, Logits):
            return value
        numbers = value.keep() if keeps else value.value()
        if keeps:
            value.changes.append(name)
        given.append((value, numbers))
        return numbers

    args, kwargs = tree_map(valued, (args, kwargs))
    result = func(*args, **kwargs)
    for logits, numbers in given:
        if any(_is_view(made, numbers) for made in tree_leaves(result)):
            logits.found = numbers  # which a user may change by the view
    return result


def _is_view(value: Any, of: Tensor) -> bool:
    return isinstance(value, Tensor) and storage_key_of(value) == storage_key_of(of)


def _compute(asked: Logits) -> None:
    """Compute a value, with all that waits for the same rows and still can be, in chunks."""
    space = asked.form.space.root()
    waiting = [logits for ref in space.waiting if (logits := ref()) is not None and logits.found is None]
    space.waiting = []
    waiting = [logits for logits in waiting if logits is asked or not is_stale(logits.form.expression)]
    outputs = [Output(logits.form.expression, logits.form.index.reshape(-1)) for logits in waiting]
    with torch.set_grad_enabled(any(output.expression.tracks for output in outputs)):
        for logits, values in zip(waiting, Chunks(outputs).values(), strict=True):
            logits.found = logits.form.laid_out(values)
