"""Values that are known although the tensors are fake: of small integers and masks, and what follows from them.

A training step reads few values: whether a mask masks anything, how many labels count, the step
counter. They come from the batch's integers, from constants and from a few numbers drawn, so they are
computed beside the fake tensors. What depends on activations is not; `capture.reads` says what code is told of it.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from memfit.capture.draws import Extreme, drawn
from memfit.capture.reads import Replay

_aten = torch.ops.aten
_CONSTANTS = {
    _aten.arange,
    _aten.eye,
    _aten.full,
    _aten.linspace,
    _aten.ones,
    _aten.scalar_tensor,
    _aten.zeros,
}
_UNSET = {_aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
_FINITE = {_aten.isfinite: True, _aten.isnan: False, _aten.isinf: False, _aten.isposinf: False, _aten.isneginf: False}
_SAME = {_aten.eq: True, _aten.ne: False}  # of a number and itself; the opposite of any number and infinity
_LIMIT = 2**20  # elements; masks of a batch have fewer
_FEW = 64  # elements of floating-point tensors that are followed: settings, schedules, and draws that decide something
_CHECKS = {_aten.all: True}  # what a check reads that passes
_ATTRIBUTE = "_memfit_known_values"
_Unknown = object()


class KnownValues(TorchDispatchMode):
    """Follows the values of integers, truths and few other numbers under a fake tensor mode. Enter it inside that mode.

    Attributes:
        replay: Answers what code reads of tensors whose values are not known.
        extreme: Which numbers are drawn.
        reads_draws: Whether code read something that was drawn.
        reads_batch: Whether code read something known of what was said to be the batch.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.replay = Replay()
        self.extreme: Extreme = ""
        self.reads_draws = False
        self.reads_batch = False
        self._real = WeakIdKeyDictionary()
        self._drawn = WeakIdKeyDictionary()
        self._assumed = WeakIdKeyDictionary()
        self._passing = WeakIdKeyDictionary()
        self._batch = WeakIdKeyDictionary()

    @classmethod
    def of(cls, mode: FakeTensorMode) -> KnownValues:
        """Return the values known under a mode: one object for each."""
        known: KnownValues | None = getattr(mode, _ATTRIBUTE, None)
        if known is None:
            known = cls(mode)
            setattr(mode, _ATTRIBUTE, known)
        return known

    def know(self, fake: torch.Tensor, source: torch.Tensor) -> None:
        """Take over the values of another tensor for a fake one, if they are known: of integers, and of scalars."""
        real = self._real.get(source) if isinstance(source, FakeTensor) else source
        if real is not None and (is_followed(real) or real.dim() == 0) and real.device.type != "meta":
            with unset_fake_temporarily():
                self._real[fake] = real.detach().to("cpu", copy=True)

    def begin(self, batch: Iterable[torch.Tensor], extreme: Extreme) -> None:
        """Take the batch that samples are cut from, and the numbers that are drawn; forget all earlier reads."""
        self.extreme, self.reads_draws, self.reads_batch = extreme, False, False
        for tensor in batch:
            self._batch[tensor] = True

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor with the value of a tensor on the CPU; None where it is not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        self.reads_batch |= tensor in self._batch
        with unset_fake_temporarily():
            value = self._value(tensor)
        return None if value is _Unknown else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions about a tensor, such as its device, are most of all calls
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        known = self._known_arguments(func, args, kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            return self._read(func, args, kwargs, known)
        if known is None and _only_writes(func, args):
            self._forget(func, args, kwargs)
            return args[0]
        try:
            out = func(*args, **kwargs)
        except DynamicOutputShapeException:
            return self._run_with_shape(func, args, kwargs, known)
        if known is not None and all(is_followed(t) for t in tensors_in(out)):
            self._remember(out, _compute(func, *known))
            self._pass_on(func, args, kwargs, out)
        elif (answer := _if_finite(func, args)) is not None and is_followed(out):
            self._remember(out, _compute(torch.full, (tuple(out.shape), answer), {}))
            self._assumed[out] = True
        elif func._schema.is_mutable:
            self._forget(func, args, kwargs)
        elif func._overloadpacket in _CHECKS and isinstance(out, FakeTensor) and out.dim() == 0:
            self._passing[out] = True
        return out

    def _pass_on(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note of outputs whether they come from something drawn or assumed, or from the batch."""
        for noted in (self._drawn, self._assumed, self._batch):
            if noted and any(t in noted for t in tensors_in((args, kwargs))):
                for tensor in tensors_in(out):
                    noted[tensor] = True

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that draws; follow what it draws where that is little."""
        out = func(*args, **kwargs)
        tensors = tensors_in(out)
        few = all(isinstance(t, FakeTensor) and t.numel() <= _FEW for t in tensors)
        written = {id(t) for t in tensors}
        given = [t for t in tensors_in((args, kwargs)) if id(t) not in written]
        if not few or any(self._value(t) is _Unknown for t in given):
            if func._schema.is_mutable:
                self._forget(func, args, kwargs)
            return out
        with unset_fake_temporarily():
            real = tree_map(
                lambda v: torch.empty(v.shape, dtype=v.dtype) if id(v) in written else self._value(v), (args, kwargs)
            )
            self._remember(out, drawn(func, func._overloadpacket, real[0], real[1], self.extreme))
        for tensor in tensors:
            self._drawn[tensor] = True
        return out

    def _known_arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with real tensors, None unless the values of all are known."""
        if func._overloadpacket in _UNSET:
            return None
        tensors = tensors_in((args, kwargs))
        if not tensors and func._overloadpacket not in _CONSTANTS:
            return None
        if any(self._value(t) is _Unknown for t in tensors):
            return None
        real: tuple[Any, Any] = tree_map(self._value, (args, kwargs))
        return real

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, torch.device):
            return torch.device("cpu")
        if not isinstance(argument, torch.Tensor):
            return argument
        if not isinstance(argument, FakeTensor):
            return argument if argument.device.type == "cpu" and is_followed(argument) else _Unknown
        if argument in self._real:
            return self._real[argument]
        if argument.constant is None or device_of(argument).type != "cpu":
            return _Unknown
        return argument.constant.clone()  # the fake tensor mode itself writes to it

    def _read(self, func: Any, args: Any, kwargs: Any, known: tuple[Any, Any] | None) -> bool | int | float:
        """Answer `.item()` and other operators that return a number: what is known, else what the replay says."""
        tensor = args[0]
        if known is not None:
            logged = self.replay.logged("item", tensor)
            return logged if self._prefers(logged, tensor) else _compute(func, *known)  # type: ignore[no-any-return]
        try:
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        except DataDependentOutputException:
            is_truth = func is not _aten._local_scalar_dense.default  # `equal`, `allclose` and the like
            dtype = torch.bool if is_truth else tensor.dtype
            return self.replay.number(tensor, dtype, neutral=is_truth or tensor in self._passing)

    def _prefers(self, logged: Any, tensor: torch.Tensor) -> bool:
        """Tell whether what was read with data counts for more than what is known of a tensor: drawn, or assumed."""
        is_drawn = tensor in self._drawn
        self.reads_draws |= is_drawn
        self.reads_batch |= tensor in self._batch
        return logged is not None and ((is_drawn and not self.extreme) or tensor in self._assumed)

    def _run_with_shape(self, func: Any, args: Any, kwargs: Any, known: tuple[Any, Any] | None) -> Any:
        """Run an operator whose output's shape depends on values: known, in the log, or taken to be all there are.

        Raises:
            DynamicOutputShapeException: Nothing says what shape there may be.
        """
        logged = self.replay.logged(str(func), args[0])
        if known is not None and not any(self._prefers(logged, t) for t in tensors_in((args, kwargs))):
            real = _compute(func, *known)
            out = tree_map(lambda t: self._like(t, device_of(tensors_in((args, kwargs))[0])), real)
            self._remember(out, real)
            self._pass_on(func, args, kwargs, out)
            return out
        if func in (_aten.index.Tensor, _aten.masked_select.default):
            return self._select(func, args, logged)
        forms = logged if logged is not None else _largest(func, args)
        if forms is None:
            self.replay.needs_data = True
            raise DynamicOutputShapeException(func)
        if logged is None:
            self.replay.guessed_shape(func, args[0])
        outputs = tuple(torch.empty(shape, dtype=dtype, device=device_of(args[0])) for shape, dtype in forms)
        return outputs if len(func._schema.returns) > 1 else outputs[0]

    def _select(self, func: Any, args: Any, logged: Any) -> Any:
        """Run a selection by masks as one by positions."""
        if func is _aten.masked_select.default:
            source, mask = torch.broadcast_tensors(*args)
            if args[1] in self._real:
                self._remember(mask, _compute(torch.Tensor.expand, (self._real[args[1]], mask.shape), {}))
            indices = [mask]
            counts = None if logged is None else iter([logged[0][0][0]])
        else:
            source, indices = args
            counts = None if logged is None else iter(logged)
        return _aten.index.Tensor(
            source, [p for index in indices for p in self._positions(func, source, index, counts)]
        )

    def _positions(
        self, func: Any, source: torch.Tensor, index: torch.Tensor | None, counts: Iterator[int] | None
    ) -> list[torch.Tensor | None]:
        """Return a mask as the positions that it selects; other indices as they are."""
        if index is None or index.dtype is not torch.bool:
            return [index]
        if index in self._real and not self._prefers(counts, index):
            with unset_fake_temporarily():
                positions = self._real[index].nonzero(as_tuple=True)
            return [self._like(p, device_of(index)) for p in positions]
        if counts is None:
            self.replay.guessed_shape(func, source)
        count = index.numel() if counts is None else next(counts)
        return [torch.empty(count, dtype=torch.long, device=device_of(index)) for _ in index.shape]

    def _like(self, real: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=device)

    def _remember(self, out: Any, real: Any) -> None:
        for fake, value in zip(tensors_in(out), tensors_in(real), strict=True):
            if isinstance(fake, FakeTensor):
                self._real[fake] = value

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget what shares memory with something unknown that was written."""
        written: list[Any] = []
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(args[position] if position < len(args) else kwargs.get(argument.name))
        storages = {t.untyped_storage()._cdata for t in tensors_in(written) if t.layout is torch.strided}
        for fake in [t for t in self._real if t.untyped_storage()._cdata in storages]:
            del self._real[fake]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments or outputs: quicker than pytrees, which know more containers."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            found += tensors_in(value)
    return found


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return a tensor's device; of a fake one without a dispatched question."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def is_followed(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's values are of the kind that steps read: integers, truths, and few other numbers."""
    return tensor.numel() <= (_FEW if tensor.is_floating_point() or tensor.is_complex() else _LIMIT)


def _only_writes(func: Any, args: Any) -> bool:
    """Tell whether an operator on fake tensors only writes other numbers into the first, element by element.

    Nothing of a fake tensor is other then, and its kernel need not run: most operators of optimizers are of this kind.
    """
    if torch.Tag.pointwise not in func.tags or not func._schema.name.endswith("_"):
        return False
    written, *others = args
    if not isinstance(written, FakeTensor) or written.layout is not torch.strided or written.constant is not None:
        return False
    if not written.is_floating_point():  # what integers may not be multiplied with, say, its kernel tells
        return False
    for other in others:
        if isinstance(other, torch.Tensor) and not (
            isinstance(other, FakeTensor)
            and other.layout is torch.strided
            and other.dtype is written.dtype
            and other.fake_device == written.fake_device
            and other.shape == written.shape
        ):
            return False
    return True


def _largest(func: Any, args: Any) -> list[tuple[tuple[int, ...], torch.dtype]] | None:
    """Return the shapes and dtypes of the outputs of an operator that finds as much as there can be; None of others."""
    tensor = args[0]
    count, whole = tensor.numel(), ((tensor.numel(),), torch.long)
    if func is _aten.nonzero.default:
        return [((count, tensor.dim()), torch.long)]
    if func is _aten._ctc_loss.Tensor:
        length, samples = args[0].shape[0], args[0].shape[1]
        labels = args[1].shape[1] if args[1].dim() == 2 else args[1].numel()
        return [((samples,), tensor.dtype), ((samples, length, 2 * labels + 1), tensor.dtype)]
    if func in (_aten._unique2.default, _aten.unique_consecutive.default):
        return [((count,), tensor.dtype), (tuple(tensor.shape), torch.long), whole]
    return None


def _if_finite(func: Any, args: Any) -> bool | None:
    """Return what a question whether numbers are finite is answered with: they are. None for other operators."""
    name = func._overloadpacket
    if name not in _SAME or len(args) < 2 or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        return _FINITE.get(name)
    if args[0] is args[1]:
        return _SAME[name]
    infinite = isinstance(args[1], float) and math.isinf(args[1])
    return not _SAME[name] if infinite else None


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    with unset_fake_temporarily():
        return func(*args, **kwargs)


@contextlib.contextmanager
def libraries_run_as_with_data() -> Iterator[None]:
    """Keep libraries from the paths that they take for fake tensors.

    There transformers builds masks that it skips with data, PyTorch goes one by one through gradients that it
    norms and clips as a list, and a loss can't be formatted.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    asked = getattr(module, "is_fake_tensor", None)
    both = (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    lists = [types for types in both if FakeTensor not in types]
    for types in lists:
        types.append(FakeTensor)
    if asked is not None:
        module.is_fake_tensor = lambda _: False
    FakeTensor.__format__ = _format  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.__format__ = torch.Tensor.__format__  # type: ignore[method-assign]
        for types in lists:
            types.remove(FakeTensor)
        if asked is not None:
            module.is_fake_tensor = asked


def _format(tensor: torch.Tensor, spec: str) -> str:
    return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)
