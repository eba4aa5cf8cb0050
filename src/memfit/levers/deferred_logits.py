"""Logits without numbers, and what may be done with them while they have none.

The layer that makes the logits returns `Logits`: a tensor that knows what it would be computed from. What only shapes
it (`view`, slices of tokens, `float()`, ...) gives `Logits` again, and so does what is done with each row (token) by
itself: `log_softmax`, `gather`, `logsumexp`, products with a mask, a divergence from another head's. A value that has
no classes any more is computed when it is asked for, in chunks of rows, with all others that wait. Anything else that
needs the numbers gets them, as it would without the lever.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from memfit._torch import DisableTorchFunctionSubclass, make_wrapper_subclass, tree_map
from memfit.errors import UsageError
from memfit.levers.chunked_cross_entropy import LossOfChunks, Targets
from memfit.levers.row_chunks import Chunks, whole_value
from memfit.levers.row_expressions import (
    Applied,
    Expression,
    Index,
    Item,
    Leaf,
    Output,
    PerRow,
    Product,
    Shared,
    expressions_in,
    leaf,
    of_other_rows,
    tracked_tensors,
    version_of,
)

_DEEPEST = 200  # expressions within one another; more are computed whole
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


class _Space:
    """Rows of logits that are computed together: of a head's call, or of several that are used row by row."""

    def __init__(self) -> None:
        self.waiting: list[weakref.ref[Logits]] = []
        self._within: _Space | None = None

    def root(self) -> _Space:
        """Return the space that it is a part of."""
        return self if self._within is None else self._within.root()

    def join(self, other: _Space) -> None:
        """Compute another space's rows with these."""
        mine, others = self.root(), other.root()
        if mine is not others:
            mine.waiting += others.waiting
            others.waiting, others._within = [], mine


@dataclass(frozen=True, eq=False)
class _Form:
    """What logits would be: an expression at some rows, and how its values lie."""

    space: _Space
    index: Index  # the row of each place, [...]
    expression: Expression
    axis: int  # of the dimension of the classes, or of what became of them; where there is one
    classes: int  # of the head
    device: torch.device
    product: Product | None = None  # where nothing was done but shaping; its input has the dimensions of the index
    dtype: torch.dtype | None = None  # of that

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
        bias = None if product.bias is None else of(product.bias)
        value = replace(product, hidden=of(product.hidden), weight=of(product.weight), bias=bias).value()
        return (value if self.axis == self.index.ndim else value.movedim(-1, self.axis)).to(self.dtype)

    def tracked(self) -> list[Tensor]:
        """Return the tensors that the numbers have gradients by."""
        if self.product is not None:
            return [tensor for tensor in self.product.tensors if tensor.requires_grad]
        return tracked_tensors(self.expression)


class _PutOff(torch.autograd.Function):
    """Connects logits without numbers to the graph, for code that asks for their gradient below PyTorch's functions."""

    @staticmethod
    def forward(ctx: Any, form: _Form, tensors: Sequence[Tensor], *connected: Tensor) -> Logits:
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


class Logits(Tensor):
    """Logits without numbers, or what was made of them; see the module's docstring."""

    form: _Form
    base: tuple[Logits, Callable[[Tensor], Tensor]] | None  # what it is a view of, and the view
    found: Tensor | None  # its numbers, where they are kept
    changes: list[str]  # functions that may have changed these numbers

    @staticmethod
    def __new__(cls, form: _Form) -> Logits:
        dtype = form.expression.dtype if form.dtype is None else form.dtype
        made: Logits = make_wrapper_subclass(cls, form.shape, dtype=dtype, device=form.device, storage_size=0)
        made.form, made.base, made.found, made.changes = form, None, None, []
        return made

    @classmethod
    def of(cls, form: _Form, base: tuple[Logits, Callable[[Tensor], Tensor]] | None = None) -> Logits:
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
        return self.found

    def value(self) -> Tensor:
        """Return the numbers."""
        known = self.known()
        if known is not None:
            return known
        with torch.set_grad_enabled(self.form.expression.tracks), DisableTorchFunctionSubclass():
            if self.form.is_wide:
                return self.form.whole()
            _compute(self.form.space.root())
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
        name = getattr(func, "__name__", "")
        if func in _SHAPE_ONLY or name in ("__get__", "__set__"):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        rule = _RULES.get(name) if getattr(func, "__module__", None) in _MODULES and "out" not in kwargs else None
        if rule is not None:
            with contextlib.suppress(_UnfitError):
                return rule(func, args, kwargs)
        return _with_numbers(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _with_numbers(func, "_" if func._schema.is_mutable else "", args, kwargs or {})


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
    return isinstance(value, Tensor) and value.untyped_storage()._cdata == of.untyped_storage()._cdata


def _compute(space: _Space) -> None:
    """Compute all that waits for a space's rows, in chunks."""
    waiting = [logits for ref in space.waiting if (logits := ref()) is not None and logits.found is None]
    space.waiting = []
    outputs = [Output(logits.form.expression, logits.form.index.reshape(-1)) for logits in waiting]
    with torch.set_grad_enabled(any(output.expression.tracks for output in outputs)):
        for logits, values in zip(waiting, Chunks(outputs).values(), strict=True):
            logits.found = logits.form.laid_out(values)


def deferred(product: Product) -> Logits:
    """Return a head's logits without the numbers."""
    if not torch.is_grad_enabled():
        product = replace(
            product,
            hidden=product.hidden.detach(),
            weight=product.weight.detach(),
            bias=None if product.bias is None else product.bias.detach(),
        )
    shape, classes = product.hidden.shape[:-1], product.weight.shape[0]
    index = np.arange(math.prod(shape)).reshape(shape)
    device = product.hidden.device
    form = _Form(_Space(), index, leaf(product), len(shape), classes, device, product, product.dtype)
    return Logits.of(form)


# What only shapes logits


class _UnfitError(Exception):
    """A call that is not known to be one row's by itself: it takes the numbers."""


class _Change(NamedTuple):
    """A change of the leading dimensions, those of the rows."""

    of_index: Callable[[Index], Any]
    of_tensor: Callable[[Tensor], Tensor]  # [..., size]


def _reordered(logits: Logits, change: _Change, axis: int, view: Callable[[Tensor], Tensor]) -> Logits:
    """Return a view of logits at other rows."""
    form, product = logits.form, logits.form.product
    if product is not None:
        product = replace(product, hidden=change.of_tensor(product.hidden))
    changed = replace(
        form,
        index=np.asarray(change.of_index(form.index)),
        expression=of_other_rows(form.expression, change.of_tensor),
        axis=axis,
        product=product,
    )
    return Logits.of(changed, (logits, view))


def _is_last(form: _Form) -> bool:
    return form.size is None or form.axis == form.index.ndim


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """Return logits in another shape of their rows."""
    logits, *sizes = args
    sizes = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    form = logits.form
    if kwargs or not all(type(size) is int for size in sizes) or not _is_last(form):
        raise _UnfitError
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and known:
        sizes[sizes.index(-1)] = logits.numel() // known
    if math.prod(sizes) != logits.numel() or not known:
        raise _UnfitError
    if form.size == 1 and sizes[-1] != 1:
        return _view(func, (_squeezed(torch.squeeze, (logits, -1), {}), *sizes), {})
    if form.size is not None and (not sizes or sizes.pop() != form.size):
        raise _UnfitError
    wanted = tuple(sizes)
    change = _Change(lambda index: index.reshape(wanted), lambda t: t.reshape(*wanted, t.shape[-1]))
    return _reordered(logits, change, len(wanted), lambda value: func(value, *args[1:]))


def _flattened(func: Any, args: Any, kwargs: Any) -> Any:
    logits, start, end = inspect.getcallargs(lambda x, start_dim=0, end_dim=-1: 0, *args, **kwargs).values()
    form, dims = logits.form, logits.dim()
    last = dims - 1 - (form.size is not None)
    if not _is_last(form) or not 0 <= start % dims <= end % dims <= last:
        raise _UnfitError
    start, end = start % dims, end % dims
    shape = form.index.shape
    wanted = (*shape[:start], -1, *shape[end + 1 :])
    change = _Change(lambda index: index.reshape(wanted), lambda t: t.flatten(start, end))
    return _reordered(logits, change, len(wanted), lambda value: func(value, *args[1:], **kwargs))


def _indexed(func: Any, args: Any, kwargs: Any) -> Any:
    """Take some rows of logits, and some of their classes."""
    logits, given = args
    form, items = logits.form, list(given) if isinstance(given, tuple) else [given]
    kinds = [type(item) for item in items]
    if form.size is None and items[-1] is None and all(item == slice(None) or item is ... for item in items[:-1]):
        return _unsqueezed(torch.unsqueeze, (logits, -1), {})
    if kinds.count(type(...)) > 1 or not all(kind in (slice, int, list, type(...)) for kind in kinds):
        raise _UnfitError
    at = kinds.index(type(...)) if type(...) in kinds else len(items)
    missing = logits.dim() - (len(items) - (type(...) in kinds))
    full = [*items[:at], *[slice(None)] * missing, *items[at + 1 :]]
    of_class = slice(None) if form.size is None else full.pop(form.axis)
    if missing < 0 or not all(type(item) in (slice, int) for item in full):
        raise _UnfitError
    axis = form.axis - sum(type(item) is int for item in full[: form.axis])
    if of_class == slice(None):
        rows = given if form.size is not None and _is_last(form) else tuple(full)  # as it was said
        change = _Change(lambda index: index[tuple(full)], lambda t: t[rows])
        return _reordered(logits, change, axis, lambda value: value[given])
    if any(item != slice(None) for item in full):
        rows = tuple(full)
        between = (*full[: form.axis], slice(None), *full[form.axis :])
        change = _Change(lambda index: index[rows], lambda t: t[rows])
        logits = _reordered(logits, change, axis, lambda value: value[between])
    made = _applied(logits.form, Tensor.__getitem__, (logits.form.expression, (slice(None), of_class)), {})
    made.base = None if type(of_class) is list else (args[0], lambda value: value[given])
    return made


def _permuted(func: Any, args: Any, kwargs: Any) -> Any:
    logits = args[0]
    form, dims = logits.form, list(range(logits.dim()))
    if kwargs or not all(type(d) is int for d in args[1:] for d in (d if isinstance(d, tuple | list) else [d])):
        raise _UnfitError
    if func.__name__ == "transpose":
        one, other = args[1] % len(dims), args[2] % len(dims)
        dims[one], dims[other] = dims[other], dims[one]
    elif func.__name__ == "movedim":
        dims.insert(args[2] % len(dims), dims.pop(args[1] % len(dims)))
    else:
        dims = [d % len(dims) for d in (args[1] if isinstance(args[1], tuple | list) else args[1:])]
    of_rows, axis = dims, 0
    if form.size is not None:
        axis = dims.index(form.axis)
        of_rows = [d - (d > form.axis) for d in dims if d != form.axis]
    is_same = of_rows == sorted(of_rows)
    change = _Change(lambda i: i.transpose(of_rows), lambda t: t if is_same else t.permute(*of_rows, t.dim() - 1))
    return _reordered(logits, change, axis, lambda value: func(value, *args[1:]))


def _unsqueezed(func: Any, args: Any, kwargs: Any) -> Any:
    """Give each row's number a dimension of its own."""
    logits, dim = args
    form = logits.form
    if form.size is not None or kwargs or dim % (logits.dim() + 1) != logits.dim():
        raise _UnfitError
    made = _applied(replace(form, axis=form.index.ndim), torch.unsqueeze, (form.expression, -1), {})
    made.base = (logits, lambda value: func(value, dim))
    return made


def _squeezed(func: Any, args: Any, kwargs: Any) -> Any:
    logits, dim = args
    form = logits.form
    if form.size != 1 or kwargs or type(dim) is not int or dim % logits.dim() != form.axis:
        raise _UnfitError
    made = _applied(form, torch.squeeze, (form.expression, -1), {})
    made.base = (logits, lambda value: func(value, dim))
    return made


def _parted(func: Any, args: Any, kwargs: Any) -> Any:
    """Return logits' parts along a dimension of their rows, as a list or a loop over them asks for."""
    named = {"unbind": ("dim",), "split": ("split_size", "dim"), "chunk": ("chunks", "dim")}[func.__name__]
    given = {"dim": 0, **dict(zip(named, args[1:], strict=False)), **kwargs}
    logits, dim = args[0], given.pop("dim")
    form = logits.form
    dim %= logits.dim()
    if form.size is not None and dim == form.axis:
        raise _UnfitError
    count, before = logits.shape[dim], (slice(None),) * dim
    if func.__name__ == "unbind":
        return tuple(_indexed(func, (logits, (*before, number)), {}) for number in range(count))
    (size,) = given.values()
    size = size if func.__name__ == "split" else -(-count // size)
    sizes = (
        list(size) if isinstance(size, tuple | list) else [size] * (count // size) + [count % size] * (count % size > 0)
    )
    if sum(sizes) != count:
        raise _UnfitError
    ends = list(itertools.accumulate(sizes, initial=0))
    return tuple(_indexed(func, (logits, (*before, slice(a, b))), {}) for a, b in itertools.pairwise(ends))


def _cast(func: Any, args: Any, kwargs: Any) -> Any:
    logits, *wanted = args
    names = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
    dtype = names.get(func.__name__, logits.dtype)
    for value in (*wanted, *kwargs.values()):
        if isinstance(value, torch.dtype):
            dtype = value
        elif not isinstance(value, torch.device | str) or torch.device(value) != logits.device:
            raise _UnfitError
    form = logits.form
    if dtype == logits.dtype:
        return logits
    expression = Applied(
        *(Tensor.to, (form.expression, dtype), {}, form.expression.tracks and torch.is_grad_enabled(), None, dtype),
        *(form.size, form.expression.depth + 1),
    )
    is_wider = (
        dtype.is_floating_point
        and dtype.itemsize >= logits.dtype.itemsize
        and expression.tracks == form.expression.tracks
    )
    product = form.product if is_wider else None
    return Logits.of(replace(form, expression=expression, product=product, dtype=dtype if product else None))


def _itself(func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) > 1 or kwargs:
        raise _UnfitError
    return args[0]


# What is done with each row by itself


def _applied(form: _Form, function: Any, args: Any, kwargs: Any) -> Any:
    """Return what a function makes of rows' values, from its arguments as expressions."""
    taken = expressions_in((args, kwargs))
    depth = 1 + max(value.depth for value in taken if not isinstance(value, PerRow | Shared))
    if depth > _DEEPEST:
        raise _UnfitError

    def of_no_rows(value: Any) -> Any:
        if isinstance(value, Shared):
            return value.tensor
        if not isinstance(value, Applied | Item | Leaf | PerRow):
            return value
        return torch.empty((0,) if value.size is None else (0, value.size), dtype=value.dtype, device=form.device)

    with torch.no_grad():
        given = tree_map(of_no_rows, (args, kwargs))
        found = function(*given[0], **given[1])
    several = found if isinstance(found, tuple) else (found,)
    if not all(isinstance(each, Tensor) and each.dim() in (1, 2) and len(each) == 0 for each in several):
        raise _UnfitError
    sizes = [each.shape[1] if each.dim() == 2 else None for each in several]
    tracks = torch.is_grad_enabled() and any(value.tracks for value in taken) and function.__name__ != "detach"
    kind = form.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    is_single = several[0] is found
    dtype = several[0].dtype
    tracks = tracks and (not is_single or dtype.is_floating_point)
    expression = Applied(function, args, kwargs, tracks, autocast, dtype, sizes[0], depth)
    made = [
        expression if is_single else Item(expression, place, each.dtype, size)
        for place, (each, size) in enumerate(zip(several, sizes, strict=True))
    ]
    logits = [Logits.of(replace(form, expression=each, product=None, dtype=None)) for each in made]
    return logits[0] if is_single else type(found)(logits)


def _argument(value: Any, form: _Form) -> Any:
    """Return an argument that goes with each row of logits, as an expression.

    Raises:
        _UnfitError: It does not.
    """
    if isinstance(value, Logits):
        other = value.form
        same_rows = np.array_equal(other.index, form.index)
        same_dims = (other.size is None) == (form.size is None) and (form.size is None or other.axis == form.axis)
        if same_rows and same_dims and other.space.root() is form.space.root():
            return other.expression
        if not other.is_wide:
            return _argument(value.value(), form)
        if not same_rows or not same_dims:
            raise _UnfitError
        form.space.join(other.space)
        return other.expression
    if not isinstance(value, Tensor):
        if isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
            raise _UnfitError
        return value
    version = version_of(value)
    if value.dim() == 0:
        return Shared(value, version)
    dims = len(form.shape)
    if value.dim() > dims or value.device != form.device:
        raise _UnfitError
    shape = [1] * (dims - value.dim()) + list(value.shape)
    if any(size not in (1, whole) for size, whole in zip(shape, form.shape, strict=True)):
        raise _UnfitError
    if math.prod(shape) == 1:
        return Shared(value.reshape(1), version)
    if form.size is None:
        return PerRow(value.expand(form.index.shape)[..., None], True, version)
    size = shape.pop(form.axis)
    if math.prod(shape) == 1:
        return Shared(value.reshape(size), version)
    aligned = value.reshape(*shape[: form.axis], size, *shape[form.axis :]).movedim(form.axis, -1)
    return PerRow(aligned.expand(*form.index.shape, size), False, version)


def _by_element(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a function that takes each element, or those of several arguments, by itself."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    main = next((t.form for t in tensors if isinstance(t, Logits) and t.shape == shape), None)
    if main is None or not main.index.ndim or (func.__name__ == "where" and len(args) < 3):
        raise _UnfitError
    aligned = [_argument(value, main) for value in args], {name: _argument(v, main) for name, v in kwargs.items()}
    made = _applied(main, func, tuple(aligned[0]), aligned[1])
    if func.__name__ == "detach":
        made.base = (args[0], lambda value: value.detach())
    return made


def _broadcast(func: Any, args: Any, kwargs: Any) -> Any:
    shape = torch.broadcast_shapes(*(value.shape for value in args))
    if kwargs or any(isinstance(value, Logits) and value.shape != shape for value in args):
        raise _UnfitError
    return [value if isinstance(value, Logits) else value.expand(shape) for value in args]


def _over_classes(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a function along the dimension of the classes."""
    name = func.__name__
    if name in ("max", "min") and (len(args) > 1 and isinstance(args[1], Tensor) or "other" in kwargs):
        return _by_element(func, args, kwargs)
    place = 2 if name == "topk" else 1
    logits, *others = args
    form = logits.form if isinstance(logits, Logits) else None
    if form is None or form.size is None or not form.index.ndim:
        raise _UnfitError
    dim = kwargs["dim"] if "dim" in kwargs else args[place] if len(args) > place else -1 if name == "topk" else None
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if type(dim) is not int or dim % len(form.shape) != form.axis:
        raise _UnfitError
    given = list(args)
    if "dim" not in kwargs and len(args) > place:
        given[place] = -1
    else:
        kwargs = {**kwargs, "dim": -1}
    if any(isinstance(value, Tensor) for value in tree_leaves((others, kwargs))):
        raise _UnfitError
    return _applied(form, func, (form.expression, *given[1:]), kwargs)


def _gathered(func: Any, args: Any, kwargs: Any) -> Any:
    """Return some classes' values of each row."""
    names = ("input", "indices", "dim") if func.__name__ == "take_along_dim" else ("input", "dim", "index")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if set(given) != set(names) or not isinstance(given["input"], Logits) or type(given["dim"]) is not int:
        raise _UnfitError
    form, index = given["input"].form, given[names[1] if names[1] != "dim" else "index"]
    if form.size is None or given["dim"] % len(form.shape) != form.axis or not isinstance(index, Tensor):
        raise _UnfitError
    shape = list(index.shape)
    if index.dim() != len(form.shape) or (shape.pop(form.axis), tuple(shape))[1] != form.index.shape:
        raise _UnfitError
    if isinstance(index, Logits) and not index.form.is_wide and index.form.space.root() is not form.space.root():
        index = index.value()
    if isinstance(index, Logits):
        at = _argument(index, form)
    else:
        at = PerRow(index.movedim(form.axis, -1), False, version_of(index))
    return _applied(form, torch.gather, (form.expression, -1, at), {})


def _summed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the sum or the mean over classes and rows: of the classes in chunks, and then of what that gave."""
    given = {**dict(zip(("input", "dim"), args, strict=False)), **kwargs}
    logits, dims = given.pop("input", None), given.pop("dim", None)
    if not isinstance(logits, Logits) or not logits.form.is_wide:
        return _over_classes(func, args, kwargs)
    form = logits.form
    dims = tuple(d % len(form.shape) for d in ([dims] if type(dims) is int else dims or range(len(form.shape))))
    if dims == (form.axis,):
        return _over_classes(func, args, kwargs)
    if given or form.axis not in dims or not form.expression.dtype.is_floating_point:
        raise _UnfitError
    wide = torch.promote_types(logits.dtype, torch.float32)
    of_rows = _applied(form, torch.sum, (form.expression, -1), {"dtype": wide}).value()
    total = of_rows.sum([d - (d > form.axis) for d in dims if d != form.axis])
    if func.__name__ == "mean":
        total = total / math.prod(form.shape[d] for d in dims)
    return total.to(logits.dtype)


# Losses


def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the cross entropy, whose gradients are made with it where that is one number."""
    given = inspect.getcallargs(F.cross_entropy, *args, **kwargs)
    logits, target, reduction = given["input"], given["target"], given["reduction"]
    if not isinstance(logits, Logits) or isinstance(target, Logits):
        return _of_targets(func, args, kwargs)
    form, product = logits.form, logits.form.product
    is_plain = given["weight"] is None and reduction != "none" and not target.is_floating_point()
    if not is_plain or product is None or form.axis != 1 or target.shape != form.index.shape:
        return _of_targets(func, args, kwargs)
    if (given["size_average"], given["reduce"]) != (None, None):
        raise _UnfitError
    dtype = torch.float32 if torch.is_autocast_enabled(form.device.type) else logits.dtype
    target = target.reshape(-1)
    valid = target != given["ignore_index"]
    total = LossOfChunks.apply(  # type: ignore[no-untyped-call]
        product.hidden.reshape(-1, product.hidden.shape[-1]),
        product.weight,
        product.bias,
        product,
        Targets(target.where(valid, 0)[:, None], valid[:, None], given["label_smoothing"], torch.is_grad_enabled()),
    )
    return (total / valid.sum() if reduction == "mean" else total).to(dtype)


def _of_targets(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a loss of each row and its target, or their sum or mean."""
    given = inspect.getcallargs(func, *args, **kwargs)
    logits, target, weight, reduction = (given.pop(name) for name in ("input", "target", "weight", "reduction"))
    if not isinstance(logits, Logits) or not logits.form.is_wide or logits.form.axis != 1:
        raise _UnfitError
    if (given.pop("size_average"), given.pop("reduce")) != (None, None) or reduction not in ("none", "sum", "mean"):
        raise _UnfitError
    form, is_class = logits.form, not target.is_floating_point()
    target = target.value() if is_class and isinstance(target, Logits) else target
    if not form.index.ndim or target.shape != (form.index.shape if is_class else form.shape):
        raise _UnfitError
    at = PerRow(target[..., None], True, version_of(target)) if is_class else _argument(target, form)
    by_class = None if weight is None else Shared(weight, version_of(weight))
    options = {**given, "weight": by_class, "reduction": "none"}
    losses = _applied(form, func, (form.expression, at), options)
    if reduction == "none":
        return losses
    total = losses.value().sum()
    if reduction == "sum":
        return total
    if not is_class:
        return total / form.index.size
    valid = target != given["ignore_index"]
    count = valid.sum() if weight is None else (weight[target.where(valid, 0)] * valid).sum()
    return total / count


def _between(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a loss of each element of two arguments, or their sum or mean."""
    given = inspect.getcallargs(func, *args, **kwargs)
    if (given.pop("size_average", None), given.pop("reduce", None)) != (None, None):
        raise _UnfitError
    one, other, reduction = given.pop("input"), given.pop("target"), given.pop("reduction")
    if one.shape != other.shape or any(isinstance(value, Tensor) for value in given.values()):
        raise _UnfitError
    losses = _by_element(func, (one, other), {**given, "reduction": "none"})
    if reduction == "none":
        return losses
    if reduction not in ("sum", "mean", "batchmean") or not losses.form.is_wide:
        raise _UnfitError
    total = _summed(torch.sum, (losses,), {})
    return total if reduction == "sum" else total / (one.shape[0] if reduction == "batchmean" else one.numel())


_MODULES = {None, "torch", "torch._tensor", "torch.nn.functional", "torch._C._special", "torch.functional"}
_RULES: dict[str, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(("view", "reshape"), _view),
    **dict.fromkeys(("transpose", "permute", "movedim"), _permuted),
    **dict.fromkeys(("unbind", "split", "chunk"), _parted),
    **dict.fromkeys(("float", "double", "half", "bfloat16", "to"), _cast),
    **dict.fromkeys(("gather", "take_along_dim"), _gathered),
    **dict.fromkeys(("sum", "mean"), _summed),
    **dict.fromkeys(
        "softmax log_softmax special_softmax special_log_softmax logsumexp special_logsumexp amax amin argmax argmin"
        " max min prod std var any all topk cumsum".split(),
        _over_classes,
    ),
    **dict.fromkeys(
        "add sub subtract mul multiply div divide true_divide rsub __rsub__ __rdiv__ __rtruediv__ pow"
        " __rpow__ float_power neg negative exp exp2 expm1 log log2 log10 log1p tanh sigmoid relu abs square"
        " sqrt rsqrt reciprocal sign clamp clip clamp_min clamp_max where masked_fill minimum maximum fmin"
        " fmax xlogy special_xlogy special_entr logaddexp logaddexp2 softplus logsigmoid silu gelu softsign eq"
        " ne lt le gt ge __and__ __or__ __invert__ logical_and logical_or logical_not isfinite isnan isinf"
        " nan_to_num clone detach".split(),
        _by_element,
    ),
    **dict.fromkeys(
        "kl_div mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits".split(), _between
    ),
    "nll_loss": _of_targets,
    "cross_entropy": _cross_entropy,
    "flatten": _flattened,
    "__getitem__": _indexed,
    "broadcast_tensors": _broadcast,
    "contiguous": _itself,
    "squeeze": _squeezed,
    "unsqueeze": _unsqueezed,
}
"""What is known of PyTorch's functions, by their names: of both `torch.exp` and `Tensor.exp`."""
