"""The proof that a module is token-wise: what it returns for a token depends on that token alone.

The module runs on tensors without data (`meta`), and each operator is followed: of every tensor it is known which
dimensions are the tokens' and samples'. An operator may act on each element, or along other dimensions. One that acts
along the tokens (a softmax over keys, BatchNorm, pooling, a convolution) ends the proof, and so does one that is not
known here, that draws random numbers, or that reads or writes a tensor from outside. The module runs for a few shapes,
[samples, tokens, features] and tiles, [1, tokens, features]: all must run the same operators with the same numbers.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memfit._torch import (
    DispatchKey,
    TorchDispatchMode,
    all_forward_hooks,
    backward_hooks,
    disable_current_modes,
    has_kernel_for_dispatch_key,
    own_buffers,
    own_parameters,
    schema_of,
    storage_key_of,
    tree_leaves,
)
from memfit.capture import UserState

Factor = tuple[int, int]
"""A part of a dimension: the number of the dimension of samples or tokens that it is, 0 for none, and its size."""
Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]

_SHAPES = (3, 5), (1, 7), (4, 64), (1, 32)  # samples and tokens, and tiles; code may ask whether they are round
_FEW = 64  # numbers of a constant that are compared
_HEADS = (1, *(2**n for n in range(1, 8)))  # in which the features of an input may be, each with weights of one
_WIDTH = 8  # of the input of a module without parameters
_ALONG = {"softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "glu"}
_REDUCING = {
    *("sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "logsumexp", "prod"),
    *("linalg_vector_norm", "norm", "any", "all", "argmax", "argmin"),
}
_NORMALISING = {"native_layer_norm", "_fused_rms_norm"}
_LIKE = {"zeros_like", "ones_like", "empty_like", "full_like"}
_COPYING = {"clone", "alias", "detach", "contiguous"}
_SAME = _COPYING | {"_to_copy", "lift_fresh", "hardswish", "fill_", "zero_", "copy_"}
_SPLITTING = {"split", "split_with_sizes", "unbind", "select", "slice"}
_RESHAPING = {"view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten", "unflatten"}


class NotTokenWise(Exception):
    """A module is not proven to be token-wise; says why."""


def why_not_token_wise(module: nn.Module) -> str:
    """Return why a module is not token-wise, as far as is known; "" for one that is.

    It takes one tensor, [samples, tokens, features], and returns one, [samples, tokens, other features].
    """
    for inner in module.modules():
        if inner is not module and any([*all_forward_hooks(inner), *backward_hooks(inner)]):
            return f"hooks of its {type(inner).__name__} would run for each tile"
    key = _structure(module)
    if key is None:
        return _proof(module)
    if key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = _proof(module)
    return _known[key]


_known: dict[object, str] = {}
_MOST_KNOWN = 1000
_ATOMS = (bool, int, float, str, type(None), torch.dtype, types.FunctionType, types.BuiltinFunctionType)


def _structure(module: nn.Module) -> object | None:
    """Return what the operators of a module depend on: its classes, its tensors' shapes, its numbers and functions.

    None where it holds other code, as a replaced `forward`.
    """
    found = []
    for name, inner in module.named_modules():
        values = [(n, v) for n, v in vars(inner).items() if isinstance(v, _ATOMS) or callable(v)]
        if not all(isinstance(v, _ATOMS) for _, v in values):
            return None
        tensors = [(n, type(t), t.shape, t.dtype) for n, t in _own_tensors(inner)]
        found.append((name, type(inner), *tensors, *sorted(values, key=lambda pair: pair[0])))
    return tuple(found)


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    own = (*own_parameters(module).items(), *own_buffers(module).items())
    return [(name, tensor) for name, tensor in own if tensor is not None]


def _proof(module: nn.Module) -> str:
    tensors = [tensor for inner in module.modules() for _, tensor in _own_tensors(inner)]
    sizes = dict.fromkeys(n for t in tensors for n in reversed(t.shape) if n > 1) or [_WIDTH]
    widths = dict.fromkeys(heads * n for heads in _HEADS for n in sizes)
    dtypes = dict.fromkeys(t.dtype for t in tensors if t.is_floating_point()) | {torch.float32: None}
    failed = ""
    with _set_back(module) as state:
        for width in widths:
            for dtype in dtypes:
                try:
                    logs = [_followed(module, shape, width, dtype) for shape in _SHAPES]
                except NotTokenWise as e:
                    return str(e)
                except Exception as e:  # the module's code, which may raise anything: as for an input of another width
                    failed = failed or f"it does not run on a tensor without data ({type(e).__name__}: {e})"
                    continue
                if any(log != logs[0] for log in logs):
                    return "its operators depend on the number of tokens"
                return "it changes what is there after its call" if state.is_written() else ""
    return failed


@contextlib.contextmanager
def _set_back(module: nn.Module) -> Iterator[UserState]:
    """Set what a module's code changes, as a cache that it fills, back on leaving."""
    state = UserState([module])
    try:
        yield state
    finally:
        state.set_back()


def _followed(module: nn.Module, shape: Sequence[int], width: int, dtype: torch.dtype) -> list[object]:
    """Return the operators that a module runs on an input of a shape; raise `NotTokenWise` where they mix tokens."""
    with disable_current_modes(), _on_meta(module) as own:
        x = torch.empty(*shape, width, dtype=dtype, device="meta")
        rows: Dims = tuple(((n, size),) if size > 1 else () for n, size in enumerate(shape, start=1))
        mode = _Following([*own, x])
        mode.note(x, (*rows, _plain(width)))
        with torch.inference_mode(), torch.autocast("cpu", enabled=False), mode:
            out = type(module).forward(module, x) if "forward" not in vars(module) else module.forward(x)
        if not isinstance(out, Tensor) or id(out) not in mode.known:
            raise NotTokenWise("it returns something else than one tensor")
        if mode.dims_of(out)[:-1] != rows or len(out.shape) != len(x.shape):
            raise NotTokenWise("what it returns is not [..., tokens, features]")
        return mode.log


@contextlib.contextmanager
def _on_meta(module: nn.Module) -> Iterator[list[Tensor]]:
    """Put tensors without data in the place of a module's own; yield them."""
    places = [(own, name, tensor) for m in module.modules() for own, name, tensor in _places(m)]
    made: dict[int, Tensor] = {}
    for _, _, tensor in places:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        made.setdefault(id(tensor), nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty)
    try:
        for own, name, tensor in places:
            own[name] = made[id(tensor)]
        yield list(made.values())
    finally:
        for own, name, tensor in places:
            own[name] = tensor


def _places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for own in (own_parameters(module), own_buffers(module)):
        for name, tensor in list(own.items()):
            if tensor is not None:
                yield own, name, tensor


def _plain(size: int) -> Dim:
    return ((0, size),) if size > 1 else ()


def _has_rows(dims: Sequence[Dim]) -> bool:
    return any(label for dim in dims for label, _ in dim)


class _Following(TorchDispatchMode):
    """A dispatch mode that knows which dimensions of every tensor are the samples' and the tokens'.

    Args:
        outside: The module's own tensors, and its input: none of them may be written to.
    """

    def __init__(self, outside: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: dict[int, tuple[Tensor, Dims]] = {}  # by the tensor's id, which it keeps while it is held here
        self.log: list[object] = []
        self._outside = {storage_key_of(tensor) for tensor in outside}
        for tensor in outside:
            self.note(tensor, tuple(map(_plain, tensor.shape)))

    def note(self, tensor: Tensor, dims: Dims) -> None:
        sizes = tuple(math.prod(size for _, size in dim) for dim in dims)
        labels = [label for dim in dims for label, _ in dim if label]
        if sizes != tuple(tensor.shape) or len(set(labels)) < len(labels):
            raise NotTokenWise("an operator gives tensors of shapes that are not followed")
        self.known[id(tensor)] = tensor, dims

    def dims_of(self, tensor: Tensor) -> Dims:
        return self.known[id(tensor)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if has_kernel_for_dispatch_key(func.name(), DispatchKey.CompositeImplicitAutograd):
            with self:  # as it is seen outside of inference mode
                return func.decompose(*args, **kwargs)
        name = schema_of(func).name.partition("::")[2]
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotTokenWise(f"it draws random numbers ({name}), in another order by tiles")
        if func is torch.ops.aten.lift_fresh.default and given[0].numel() <= _FEW:  # a constant of its code
            self.note(given[0], tuple(map(_plain, given[0].shape)))
            self.log.append(given[0].tolist())
        if any(id(tensor) not in self.known for tensor in given):
            raise NotTokenWise(f"it reads a tensor that is neither its own nor given ({name})")
        named = dict(zip((a.name for a in schema_of(func).arguments), args, strict=False)) | kwargs
        written = [named[a.name] for a in schema_of(func).arguments if a.is_write and a.name in named]
        if any(storage_key_of(t) in self._outside for t in written if isinstance(t, Tensor)):
            raise NotTokenWise(f"it writes to its input, or to a tensor of its own ({name})")
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if not any(_has_rows(self.dims_of(tensor)) for tensor in given):
            self.log.append((name, *([] if given else _numbers((), {k: v for k, v in named.items() if k != "size"}))))
            for tensor in made:
                self.note(tensor, tuple(map(_plain, tensor.shape)))
            return out
        is_alike = torch.Tag.pointwise in func.tags or name in _SAME
        if name not in _RESHAPING | _COPYING:  # which depend on how a tensor lies in memory, and keep its numbers
            shapes = name in _SPLITTING | _LIKE | {"expand"}
            self.log.append((name, *(() if shapes else _numbers(args, kwargs))))
        before = [self.dims_of(t) for t in written]
        for tensor, dims in zip(made, self._dims(name, is_alike, given, named, made), strict=True):
            self.note(tensor, dims)
        if before != [self.dims_of(t) for t in written]:
            raise NotTokenWise(f"it fills a tensor with what it makes of tokens ({name})")
        return out

    def _dims(
        self, name: str, is_alike: bool, given: list[Tensor], named: dict[str, Any], made: list[Tensor]
    ) -> list[Dims]:
        """Return the dimensions of an operator's results."""
        first = self.dims_of(given[0])
        if is_alike:
            return [self._broadcast(given, t.dim()) for t in made]
        if name in _LIKE:
            return [first]
        if name in _RESHAPING:
            return [_reshaped(first, t.shape) for t in made]
        if name in _PRODUCTS:
            return [_PRODUCTS[name](*map(self.dims_of, given))]
        if name in ("t", "transpose", "permute"):
            order = list(range(len(first)))
            if name == "permute":
                order = [n % len(first) for n in named["dims"]]
            elif len(order) > 1:
                one, other = (0, 1) if name == "t" else (named["dim0"], named["dim1"])
                order[one], order[other] = order[other], order[one]
            return [tuple(first[n] for n in order)]
        if name == "expand":
            lead: Dims = ((),) * (made[0].dim() - len(first))
            pairs = zip((*lead, *first), made[0].shape, strict=True)
            return [tuple(dim or _plain(size) for dim, size in pairs)]
        if name in _NORMALISING:
            count = len(named["normalized_shape"])
            self._refuse_rows(name, first[-count:], *(self.dims_of(t) for t in given[1:]))
            return [first, *(self._shaped(first[:-count], t) for t in made[1:])]
        if name == "slice" and made[0].shape == given[0].shape:
            return [first]
        if name in _SPLITTING | _ALONG:
            dim = named.get("dim", 0 if name not in _ALONG else -1)
            self._refuse_rows(name, [first[dim]])
            gone = name in ("unbind", "select")
            rest = [*first[:dim], *first[dim % len(first) + 1 :]]
            at = dim % len(first)
            return [tuple(rest if gone else [*first[:at], _plain(t.shape[at]), *first[at + 1 :]]) for t in made]
        if name == "cat":
            at = named.get("dim", 0) % len(first)
            others = [[*self.dims_of(t)] for t in given]
            for each in others:
                self._refuse_rows(name, [each[at]])
                each[at] = _plain(made[0].shape[at])
            if any(each != others[0] for each in others):
                raise NotTokenWise("it joins tensors with tokens and without (cat)")
            return [tuple(others[0])]
        if name in _REDUCING and named.get("dim") not in (None, [], ()):
            asked = named["dim"] if isinstance(named["dim"], list | tuple) else [named["dim"]]
            along = {n % len(first) for n in asked}
            self._refuse_rows(name, [first[n] for n in along])
            kept = [() if n in along else dim for n, dim in enumerate(first)]
            return [
                tuple(kept if t.dim() == len(first) else [d for n, d in enumerate(first) if n not in along])
                for t in made
            ]
        raise NotTokenWise(f"it may mix tokens ({name})")

    def _refuse_rows(self, name: str, *of: Sequence[Dim]) -> None:
        if any(map(_has_rows, of)):
            raise NotTokenWise(f"it mixes tokens ({name})")

    def _shaped(self, lead: Dims, tensor: Tensor) -> Dims:
        """Return the dimensions of statistics: those of the samples and tokens, and others of size 1."""
        if not tensor.numel():
            return tuple(map(_plain, tensor.shape))
        return (*lead, *((),) * (tensor.dim() - len(lead)))

    def _broadcast(self, given: Sequence[Tensor], count: int) -> Dims:
        """Return the dimensions of what acts on each element of tensors, aligned at their last dimensions."""
        found: list[Dim] = []
        for place in range(1, count + 1):
            dims = {self.dims_of(t)[-place] for t in given if t.dim() >= place} - {()}
            if _has_rows(list(dims)) and len(dims) > 1:
                raise NotTokenWise("it joins tokens with others")
            found.append(next(iter(dims), ()))
        return tuple(reversed(found))


def _numbers(args: Any, kwargs: Any) -> list[object]:
    """Return the arguments that are no tensors; a number that depends on how many tokens there are shows here."""
    return [v for v in tree_leaves((args, kwargs)) if not isinstance(v, Tensor)]


def _reshaped(dims: Dims, shape: Sequence[int]) -> Dims:
    """Return the dimensions of the same elements in another shape."""
    left = [factor for dim in reversed(dims) for factor in reversed(dim)]
    found: list[Dim] = []
    for size in shape:
        taken: list[Factor] = []
        product = 1
        while product < size:
            label, n = left.pop()
            wanted = size // product
            if size % (product * n):
                if label or n % wanted or size % product:
                    raise NotTokenWise("it splits tokens over dimensions")
                left.append((0, n // wanted))
                n = wanted
            product *= n
            if taken and not label and not taken[-1][0]:  # parts of one dimension
                n *= taken.pop()[1]
            taken.append((label, n))
        found.append(tuple(taken))
    return tuple(found)


def _mm(left: Dims, right: Dims) -> Dims:
    if _has_rows([left[1], *right]):
        raise NotTokenWise("it mixes tokens (a matrix product)")
    return left[0], right[1]


def _addmm(bias: Dims, left: Dims, right: Dims) -> Dims:
    if _has_rows(bias) or (len(bias) == 2 and bias[0]):
        raise NotTokenWise("it joins tokens with others (addmm)")
    return _mm(left, right)


def _bmm(left: Dims, right: Dims) -> Dims:
    if left[0] != right[0] and _has_rows([left[0], right[0]]):
        raise NotTokenWise("it mixes tokens (a batched matrix product)")
    if _has_rows([left[2], right[1], right[2]]):
        raise NotTokenWise("it mixes tokens (a batched matrix product)")
    return left[0], left[1], right[2]


def _mv(left: Dims, right: Dims) -> Dims:
    return _mm(left, (*right, ()))[:1]


_PRODUCTS: dict[str, Callable[..., Dims]] = {"mm": _mm, "addmm": _addmm, "bmm": _bmm, "mv": _mv}
