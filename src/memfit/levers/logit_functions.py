"""What is known of PyTorch's functions of logits: which only shape them, and which take each row by itself.

Each function here stands for some of PyTorch's, which `RULES` lists by name at the end. It returns logits without
numbers, or what it makes of them in chunks, or raises `UnfitError`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from memfit._torch import tree_leaves, tree_map
from memfit.levers.chunked_cross_entropy import LossOfChunks, RowTargets
from memfit.levers.deferred_logits import RULES, Form, Logits, RowSpace, UnfitError
from memfit.levers.row_chunks import Chunks
from memfit.levers.row_expressions import (
    Applied,
    Index,
    Item,
    Leaf,
    Output,
    PerRow,
    Product,
    Shared,
    by_rows,
    changes_of,
    expressions_in,
    leaf,
    of_other_rows,
    parts_of,
)

_DEEPEST = 200  # expressions within one another; more are computed whole


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
    form = Form(RowSpace(), index, leaf(product), len(shape), classes, device, product, dtype=product.dtype)
    return Logits.of(form)


# What only shapes logits


class _Change(NamedTuple):
    """A change of the leading dimensions, those of the rows."""

    of_index: Callable[[Index], Any]
    of_tensor: Callable[[Tensor], Tensor]  # [..., size]


def _reordered(logits: Logits, change: _Change, axis: int, view: Callable[[Tensor], Tensor]) -> Logits:
    """Return a view of logits at other rows."""
    form = logits.form
    changed = replace(
        form,
        index=np.asarray(change.of_index(form.index)),
        expression=of_other_rows(form.expression, change.of_tensor),
        axis=axis,
        shaping=() if form.product is None else (*form.shaping, change.of_tensor),
    )
    return Logits.of(changed, (logits, view))


def _is_last(form: Form) -> bool:
    return form.size is None or form.axis == form.index.ndim


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """Return logits in another shape of their rows: of the dimensions before the classes, and of those after them."""
    logits, *sizes = args
    sizes = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    form = logits.form
    if kwargs or not all(type(size) is int for size in sizes):
        raise UnfitError
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and known:
        sizes[sizes.index(-1)] = logits.numel() // known
    if math.prod(sizes) != logits.numel() or not known:
        raise UnfitError
    if form.size == 1 and sizes[-1:] != [1]:
        return _view(func, (_squeezed(torch.squeeze, (logits, form.axis), {}), *sizes), {})
    axis = len(sizes)
    if form.size is not None:
        before = math.prod(form.index.shape[: form.axis])
        places = [place for place, size in enumerate(sizes) if size == form.size]
        axis = next((place for place in reversed(places) if math.prod(sizes[:place]) == before), -1)
        if axis < 0:
            raise UnfitError
        del sizes[axis]
    wanted = tuple(sizes)
    change = _Change(lambda index: index.reshape(wanted), lambda t: t.reshape(*wanted, t.shape[-1]))
    return _reordered(logits, change, axis, lambda value: func(value, *args[1:]))


def _flattened(func: Any, args: Any, kwargs: Any) -> Any:
    given = {"start_dim": 0, "end_dim": -1, **dict(zip(("start_dim", "end_dim"), args[1:], strict=False)), **kwargs}
    logits, dims = args[0], max(1, args[0].dim())
    start, end = given["start_dim"] % dims, given["end_dim"] % dims
    if start > end:
        raise UnfitError
    sizes = (*logits.shape[:start], math.prod(logits.shape[start : end + 1]), *logits.shape[end + 1 :])
    return _view(lambda value, *_: func(value, *args[1:], **kwargs), (logits, *sizes), {})


def _indexed(func: Any, args: Any, kwargs: Any) -> Any:
    """Take some rows of logits, and some of their classes."""
    logits, given = args
    form, items = logits.form, list(given) if isinstance(given, tuple) else [given]
    kinds = [type(item) for item in items]
    if form.size is None and items[-1] is None and all(item == slice(None) or item is ... for item in items[:-1]):
        return _unsqueezed(torch.unsqueeze, (logits, -1), {})
    if kinds.count(type(...)) > 1 or not all(kind in (slice, int, list, type(...)) for kind in kinds):
        raise UnfitError
    at = kinds.index(type(...)) if type(...) in kinds else len(items)
    missing = logits.dim() - (len(items) - (type(...) in kinds))
    full = [*items[:at], *[slice(None)] * missing, *items[at + 1 :]]
    of_class = slice(None) if form.size is None else full.pop(form.axis)
    if missing < 0 or not all(type(item) in (slice, int) for item in full):
        raise UnfitError
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
        raise UnfitError
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
        raise UnfitError
    made = _applied(replace(form, axis=form.index.ndim), torch.unsqueeze, (form.expression, -1), {})
    made.base = (logits, lambda value: func(value, dim))
    return made


def _squeezed(func: Any, args: Any, kwargs: Any) -> Any:
    logits, dim = args
    form = logits.form
    if form.size != 1 or kwargs or type(dim) is not int or dim % logits.dim() != form.axis:
        raise UnfitError
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
        raise UnfitError
    count, before = logits.shape[dim], (slice(None),) * dim
    if func.__name__ == "unbind":
        return tuple(_indexed(func, (logits, (*before, number)), {}) for number in range(count))
    (size,) = given.values()
    size = size if func.__name__ == "split" else -(-count // size)
    sizes = (
        list(size) if isinstance(size, tuple | list) else [size] * (count // size) + [count % size] * (count % size > 0)
    )
    if sum(sizes) != count:
        raise UnfitError
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
            raise UnfitError
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
        raise UnfitError
    return args[0]


# What is done with each row by itself


def _autocast(kind: str) -> torch.dtype | None:
    """Return the dtype of autocast on a kind of device, where it is on."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _applied(form: Form, function: Any, args: Any, kwargs: Any) -> Any:
    """Return what a function makes of rows' values, from its arguments as expressions."""
    taken = expressions_in((args, kwargs))
    depth = 1 + max(value.depth for value in taken if not isinstance(value, PerRow | Shared))
    if depth > _DEEPEST:
        raise UnfitError

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
        raise UnfitError
    sizes = [each.shape[1] if each.dim() == 2 else None for each in several]
    tracks = torch.is_grad_enabled() and any(value.tracks for value in taken) and function.__name__ != "detach"
    autocast = _autocast(form.device.type)
    is_single = several[0] is found
    dtype = several[0].dtype
    tracks = tracks and (not is_single or dtype.is_floating_point)
    expression = Applied(function, args, kwargs, tracks, autocast, dtype, sizes[0], depth)
    made = [
        expression if is_single else Item(expression, place, each.dtype, size)
        for place, (each, size) in enumerate(zip(several, sizes, strict=True))
    ]
    logits = [Logits.of(replace(form, expression=each, product=None, shaping=(), dtype=None)) for each in made]
    return logits[0] if is_single else type(found)(logits)


def _argument(value: Any, form: Form) -> Any:
    """Return an argument that goes with each row of logits, as an expression.

    Raises:
        UnfitError: It does not.
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
            raise UnfitError
        form.space.join(other.space)
        return other.expression
    if not isinstance(value, Tensor):
        if isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
            raise UnfitError
        return value
    version = changes_of(value)
    if value.dim() == 0:
        return Shared(value, version)
    dims = len(form.shape)
    if value.dim() > dims or value.device != form.device:
        raise UnfitError
    shape = [1] * (dims - value.dim()) + list(value.shape)
    if any(size not in (1, whole) for size, whole in zip(shape, form.shape, strict=True)):
        raise UnfitError
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
        raise UnfitError
    if not main.is_wide and any(tensor.dim() and not isinstance(tensor, Logits) for tensor in tensors):
        raise UnfitError  # a mask leaves rows without a gradient, where the value is not a part of the expression
    aligned = [_argument(value, main) for value in args], {name: _argument(v, main) for name, v in kwargs.items()}
    made = _applied(main, func, tuple(aligned[0]), aligned[1])
    if func.__name__ == "detach":
        made.base = (args[0], lambda value: value.detach())
    return made


def _broadcast(func: Any, args: Any, kwargs: Any) -> Any:
    shape = torch.broadcast_shapes(*(value.shape for value in args))
    if kwargs or any(isinstance(value, Logits) and value.shape != shape for value in args):
        raise UnfitError
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
        raise UnfitError
    dim = kwargs["dim"] if "dim" in kwargs else args[place] if len(args) > place else -1 if name == "topk" else None
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if type(dim) is not int or dim % len(form.shape) != form.axis:
        raise UnfitError
    given = list(args)
    if "dim" not in kwargs and len(args) > place:
        given[place] = -1
    else:
        kwargs = {**kwargs, "dim": -1}
    if any(isinstance(value, Tensor) for value in tree_leaves((others, kwargs))):
        raise UnfitError
    return _applied(form, func, (form.expression, *given[1:]), kwargs)


def _gathered(func: Any, args: Any, kwargs: Any) -> Any:
    """Return some classes' values of each row."""
    names = ("input", "indices", "dim") if func.__name__ == "take_along_dim" else ("input", "dim", "index")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if set(given) != set(names) or not isinstance(given["input"], Logits) or type(given["dim"]) is not int:
        raise UnfitError
    form, index = given["input"].form, given[names[1] if names[1] != "dim" else "index"]
    if form.size is None or given["dim"] % len(form.shape) != form.axis or not isinstance(index, Tensor):
        raise UnfitError
    shape = list(index.shape)
    if index.dim() != len(form.shape) or (shape.pop(form.axis), tuple(shape))[1] != form.index.shape:
        raise UnfitError
    if isinstance(index, Logits) and not index.form.is_wide and index.form.space.root() is not form.space.root():
        index = index.value()
    if isinstance(index, Logits):
        at = _argument(index, form)
    else:
        at = PerRow(index.movedim(form.axis, -1), False, changes_of(index))
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
        raise UnfitError
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
        raise UnfitError
    dtype = torch.float32 if torch.is_autocast_enabled(form.device.type) else logits.dtype
    rows, target = form.index.reshape(-1), target.reshape(-1)
    if (np.diff(rows) < 0).any():
        order = np.argsort(rows)
        rows, target = rows[order], target[torch.from_numpy(order).to(target.device)]
    valid = target != given["ignore_index"]
    classes = target.where(valid, 0)[:, None]
    total = LossOfChunks.apply(  # type: ignore[no-untyped-call]
        by_rows(product.hidden),
        product.weight,
        product.bias,
        product,
        RowTargets(rows, classes, valid[:, None], given["label_smoothing"], torch.is_grad_enabled()),
    )
    return (total / valid.sum() if reduction == "mean" else total).to(dtype)


def _of_targets(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a loss of each row and its target, or their sum or mean."""
    given = inspect.getcallargs(func, *args, **kwargs)
    logits, target, weight, reduction = (given.pop(name) for name in ("input", "target", "weight", "reduction"))
    if not isinstance(logits, Logits) or not logits.form.is_wide or logits.form.axis != 1:
        raise UnfitError
    if (given.pop("size_average"), given.pop("reduce")) != (None, None) or reduction not in ("none", "sum", "mean"):
        raise UnfitError
    form, is_class = logits.form, not target.is_floating_point()
    target = target.value() if is_class and isinstance(target, Logits) else target
    if not form.index.ndim or target.shape != (form.index.shape if is_class else form.shape):
        raise UnfitError
    at = PerRow(target[..., None], True, changes_of(target)) if is_class else _argument(target, form)
    by_class = None if weight is None else Shared(weight, changes_of(weight))
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


def _ctc(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the connectionist temporal classification losses of whole samples, or their sum or mean."""
    given = inspect.getcallargs(F.ctc_loss, *args, **kwargs)
    logs, targets, reduction = given["log_probs"], given["targets"], given["reduction"]
    if not isinstance(logs, Logits) or any(isinstance(value, Logits) for value in list(given.values())[1:]):
        raise UnfitError
    form, count = logs.form, logs.shape[1]
    is_usual = form.is_wide and form.axis == 2 == form.index.ndim and reduction in ("none", "sum", "mean")
    if not is_usual or any(isinstance(part, PerRow) for part in parts_of(form.expression)):
        raise UnfitError
    lengths = [torch.as_tensor(given[name]) for name in ("input_lengths", "target_lengths")]
    if any(length.shape != (count,) for length in lengths) or targets.dim() == 2 and len(targets) != count:
        raise UnfitError

    def by_sample(value: Tensor) -> PerRow:
        return PerRow(value[:, None], True, changes_of(value))

    start = by_sample(lengths[1].cumsum(0) - lengths[1]) if targets.dim() == 1 else None
    of_targets = (Shared if start else functools.partial(PerRow, is_flat=False))(targets, version=changes_of(targets))
    loss = functools.partial(_ctc_of_samples, blank=given["blank"], zero_infinity=given["zero_infinity"])
    expression = Applied(
        *(loss, (form.expression, of_targets, start, *map(by_sample, lengths)), {}, form.expression.tracks),
        *(_autocast(form.device.type), torch.promote_types(logs.dtype, torch.float32), None),
        form.expression.depth + 1,
    )
    with torch.set_grad_enabled(expression.tracks):
        (losses,) = Chunks([Output(expression, form.index.T)]).values()
    if reduction == "mean":
        return (losses / lengths[1].to(losses).clamp(min=1)).mean()
    return losses if reduction == "none" else losses.sum()


def _ctc_of_samples(
    logs: Tensor, targets: Tensor, start: Tensor | None, input_lengths: Tensor, target_lengths: Tensor, **options: Any
) -> Tensor:
    """Return the losses of samples, from the logarithms of the probabilities of their frames in turn."""
    if start is not None:  # targets are one after the other
        places = start.to(targets.device)[:, None] + torch.arange(len(targets), device=targets.device)
        targets = targets[places.clamp(max=len(targets) - 1)]
    of_samples = logs.view(len(input_lengths), -1, logs.shape[1]).transpose(0, 1)
    return F.ctc_loss(of_samples, targets, input_lengths, target_lengths, reduction="none", **options)


def _between(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a loss of each element of two arguments, or their sum or mean."""
    given = inspect.getcallargs(func, *args, **kwargs)
    if (given.pop("size_average", None), given.pop("reduce", None)) != (None, None):
        raise UnfitError
    one, other, reduction = given.pop("input"), given.pop("target"), given.pop("reduction")
    if one.shape != other.shape or any(isinstance(value, Tensor) for value in given.values()):
        raise UnfitError
    losses = _by_element(func, (one, other), {**given, "reduction": "none"})
    if reduction == "none":
        return losses
    if reduction not in ("sum", "mean", "batchmean") or not losses.form.is_wide:
        raise UnfitError
    total = _summed(torch.sum, (losses,), {})
    return total if reduction == "sum" else total / (one.shape[0] if reduction == "batchmean" else one.numel())


RULES |= {
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
    "ctc_loss": _ctc,
    "flatten": _flattened,
    "__getitem__": _indexed,
    "broadcast_tensors": _broadcast,
    "contiguous": _itself,
    "squeeze": _squeezed,
    "unsqueeze": _unsqueezed,
}
