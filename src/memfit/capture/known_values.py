"""Known values of fake tensors: of integers, masks and few other numbers.

A training step reads few values: whether a mask masks anything, how many labels count, the step counter. They come from
the batch's integers, from constants and from a few random numbers, so they are computed beside the fake tensors.
Values of activations are not known: `capture.value_reads` answers for them.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memfit._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    PassiveMode,
    disable_dynamo,
    is_wrapper,
    packet_of,
    replaced_here,
    schema_of,
    storage_key_of,
    supported_types,
    tree_map,
    unset_fake_temporarily,
)
from memfit.capture.operator_calls import device_of, tensors_in, traits_of, written_by
from memfit.capture.value_reads import ReadReplay, Site, reading_site

_aten = torch.ops.aten
_CONSTANTS = {_aten.arange, _aten.eye, _aten.full, _aten.linspace, _aten.ones, _aten.scalar_tensor, _aten.zeros}
_CONSTANTS |= {torch.ops.prims.iota}  # what `arange` is in compiled graphs
_UNSET = {_aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
_FINITE = {_aten.isfinite: True, _aten.isnan: False, _aten.isinf: False, _aten.isposinf: False, _aten.isneginf: False}
_SAME = {_aten.eq: True, _aten.ne: False}  # of a number and itself; the opposite of any number and infinity
_LIMIT = 2**20  # elements; masks of a batch have fewer
_FEW = 64  # elements of floating-point tensors that are followed: settings, schedules, and random numbers
_CHECKS = {_aten.all: True}  # the value that a check reads when it passes
_ATTRIBUTE = "_memfit_known_values"
_UNIFORM = {_aten.rand, _aten.rand_like, _aten.uniform, _aten.uniform_}
_BERNOULLI = {_aten.bernoulli, _aten.bernoulli_}
_ALMOST_ONE = 1 - 2**-20
_Unknown = object()
_DRAWN, _ASSUMED, _BATCH, _HELD, _PASSING = (1 << bit for bit in range(5))
"""Marks of tensors: random, of assumed values, of the batch, from before the step (such as counters), of checks."""
_VARYING = _DRAWN | _ASSUMED | _BATCH | _HELD  # from step to step; results have them too

Extreme = Literal["", "low", "high"]
"""Whether generators draw the least ("low") or the greatest ("high") numbers; "" for neither."""


class KnownValues(PassiveMode):
    """A dispatch mode that follows values of integers, booleans and few other numbers. Enter it inside a fake mode.

    Attributes:
        replay: Answers readings of tensors whose values are not known.
        extreme: Whether random operators draw the least or the greatest numbers.
        reads_draws: Whether code read a value that depends on random numbers.
        reads_batch: Whether code read a known value that depends on the batch.
        read_sites: The lines that read numbers, or ran operators whose shapes depend on values, except those that are
            the same in every step: such as of `torch.arange(3)`. Truths have but two values.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.replay = ReadReplay()
        self.extreme: Extreme = ""
        self.reads_draws = False
        self.reads_batch = False
        self.read_sites: list[Site | None] = []
        self._real = WeakIdKeyDictionary()
        self._storages = set[int]()  # of the tensors in `_real`, and of some that are gone
        self._marks = WeakIdKeyDictionary()

    @classmethod
    def of(cls, mode: FakeTensorMode) -> KnownValues:
        """Return the known values of a fake tensor mode, which has one such object."""
        known: KnownValues | None = getattr(mode, _ATTRIBUTE, None)
        if known is None:
            known = cls(mode)
            setattr(mode, _ATTRIBUTE, known)
        return known

    @staticmethod
    @contextlib.contextmanager
    def fake_paths_disabled() -> Iterator[None]:
        """Keep libraries from the code paths that they take for fake tensors, until the context is left."""
        with contextlib.ExitStack() as stack:
            # transformers builds masks that it skips with data
            module = sys.modules.get("transformers.utils.import_utils")
            if getattr(module, "is_fake_tensor", None) is not None:
                stack.enter_context(replaced_here(module, "is_fake_tensor", lambda _: False))
            # PyTorch clips gradients one by one that it takes as a list with data
            for types in [types for types in supported_types if FakeTensor not in types]:
                types.append(FakeTensor)
                stack.callback(types.remove, FakeTensor)

            def format_(tensor: torch.Tensor, spec: str) -> str:
                return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)

            stack.enter_context(replaced_here(FakeTensor, "__format__", format_))  # a fake loss can't be formatted
            yield

    def know(self, fake: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the values of a source tensor to a fake one, if they are known integers or scalars."""
        real = self._real.get(source) if isinstance(source, FakeTensor) else source
        if real is not None and (is_followed(real) or real.dim() == 0) and real.device.type != "meta":
            self._mark([fake], _HELD)
            with unset_fake_temporarily():
                self._remember(fake, real.detach().to("cpu", copy=True))

    def begin(self, batch: Iterable[torch.Tensor], extreme: Extreme) -> None:
        """Begin a step: set the batch's tensors and the numbers that random operators draw; forget earlier readings."""
        self.extreme, self.reads_draws, self.reads_batch = extreme, False, False
        self._mark(batch, _BATCH)

    def _mark(self, tensors: Iterable[torch.Tensor], marks: int) -> None:
        for tensor in tensors if marks else ():
            self._marks[tensor] = self._marks.get(tensor, 0) | marks

    def _has(self, tensor: torch.Tensor, mark: int) -> bool:
        return bool(self._marks and self._marks.get(tensor, 0) & mark)

    @disable_dynamo  # which would look at each frame below, where a step reads between compiled graphs
    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a real tensor with a tensor's values, on the CPU; None where they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        self.reads_batch |= self._has(tensor, _BATCH)
        with unset_fake_temporarily():
            value = self._value(tensor)
        self._note_reading([tensor], is_known=value is not _Unknown)
        return None if value is _Unknown else value

    def _note_reading(self, tensors: list[torch.Tensor], *, is_known: bool) -> None:
        """Note the line that reads tensors, whose values may differ from step to step."""
        if not is_known or any(self._has(t, _VARYING) for t in tensors):
            self.read_sites.append(reading_site()[0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):
            return NotImplemented
        if func.namespace == "prim":  # most of all calls: queries, such as of a tensor's device
            return func(*args, **kwargs)
        traits = traits_of(func)
        if traits.draws:
            return self._draw(func, args, kwargs)
        known = self._known_arguments(func, args, kwargs)
        if traits.reads:
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
            self._mark_outputs(args, kwargs, out)
        elif (answer := _assumed_finite(func, args)) is not None and is_followed(out):
            self._remember(out, _compute(torch.full, (tuple(out.shape), answer), {}))
            self._mark([out], _ASSUMED)
        elif traits.written:
            self._forget(func, args, kwargs)
        elif packet_of(func) in _CHECKS and isinstance(out, FakeTensor) and out.dim() == 0:
            self._mark([out], _PASSING)
        return out

    def _mark_outputs(self, args: Any, kwargs: Any, out: Any) -> None:
        marks = 0
        for tensor in tensors_in((args, kwargs)) if self._marks else ():
            marks |= self._marks.get(tensor, 0)
        self._mark(tensors_in(out), marks & _VARYING)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a random operator; follow its output where that is small. Extremes are of even draws."""
        out = func(*args, **kwargs)
        tensors = tensors_in(out)
        few = all(isinstance(t, FakeTensor) and t.numel() <= _FEW for t in tensors)
        written = {id(t) for t in tensors}
        given = [t for t in tensors_in((args, kwargs)) if id(t) not in written]
        if not few or any(self._value(t) is _Unknown for t in given):
            if schema_of(func).is_mutable:
                self._forget(func, args, kwargs)
            return out
        with unset_fake_temporarily():
            given, options = tree_map(
                lambda v: torch.empty(v.shape, dtype=v.dtype) if id(v) in written else self._value(v), (args, kwargs)
            )
            drawn, name, is_low = func(*given, **options), packet_of(func), self.extreme == "low"
            if self.extreme and isinstance(drawn, torch.Tensor) and name in _UNIFORM:
                between: Any = given[1:3] if name in (_aten.uniform, _aten.uniform_) and len(given) > 2 else None
                low, high = between or (0.0, 1.0)
                drawn.fill_(low if is_low else low + (high - low) * _ALMOST_ONE)
            elif self.extreme and isinstance(drawn, torch.Tensor) and name in _BERNOULLI:
                drawn.fill_(is_low)
            self._remember(out, drawn)
        self._mark(tensors, _DRAWN)
        return out

    def _known_arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with real tensors; None unless all values are known."""
        tensors, name = tensors_in((args, kwargs)), packet_of(func)
        if name in _UNSET or not (tensors or name in _CONSTANTS) or any(self._value(t) is _Unknown for t in tensors):
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
        """Return the number for `.item()` and the like: the known value, else the replay's answer."""
        tensor = args[0]
        is_truth = func is not _aten._local_scalar_dense.default  # `equal`, `allclose` and the like
        if not is_truth and tensor.dtype != torch.bool:
            self._note_reading(tensors_in((args, kwargs)), is_known=known is not None)
        if known is not None:
            logged = self.replay.logged("item", tensor)
            return logged if self._prefers_log(logged, tensor) else _compute(func, *known)  # type: ignore[no-any-return]
        try:
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        except DataDependentOutputException:
            dtype = torch.bool if is_truth else tensor.dtype
            return self.replay.number(tensor, dtype, neutral=is_truth or self._has(tensor, _PASSING))

    def _prefers_log(self, logged: Any, tensor: torch.Tensor) -> bool:
        """Tell whether the logged reading replaces a known value, which was drawn or assumed."""
        is_drawn = self._has(tensor, _DRAWN)
        self.reads_draws |= is_drawn
        self.reads_batch |= self._has(tensor, _BATCH)
        return logged is not None and ((is_drawn and not self.extreme) or self._has(tensor, _ASSUMED))

    def _run_with_shape(self, func: Any, args: Any, kwargs: Any, known: tuple[Any, Any] | None) -> Any:
        """Run an operator whose output shape depends on values: known, logged, or guessed to be the largest."""
        self._note_reading(tensors_in((args, kwargs)), is_known=known is not None)
        logged = self.replay.logged(str(func), args[0])
        if known is not None and not any(self._prefers_log(logged, t) for t in tensors_in((args, kwargs))):
            real = _compute(func, *known)
            out = tree_map(lambda t: self._like(t, device_of(tensors_in((args, kwargs))[0])), real)
            self._remember(out, real)
            self._mark_outputs(args, kwargs, out)
            return out
        if func in (_aten.index.Tensor, _aten.masked_select.default):
            return self._select(func, args, logged)
        device = device_of(args[0])
        of_labels = func is _aten._ctc_loss.Tensor and self._value(args[3]) is not _Unknown
        is_exact = of_labels and not self._prefers_log(logged, args[3])
        if logged is not None and not is_exact:
            outputs = tuple(form.empty(device) for form in logged)
        elif (largest := self._largest_outputs(func, args, kwargs)) is not None:
            if not is_exact:
                self.replay.guessed_shape(func, args[0])
            outputs = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in largest)
        else:
            self.replay.needs_data = True
            raise DynamicOutputShapeException(func)
        return outputs if len(schema_of(func).returns) > 1 else outputs[0]

    def _largest_outputs(self, func: Any, args: Any, kwargs: Any) -> list[tuple[tuple[int, ...], torch.dtype]] | None:
        """Return the largest shapes, and the dtypes, of an operator's outputs; None where there is no largest one.

        Where the lengths of CTC's targets are known, its outputs are just as large.
        """
        tensor: torch.Tensor = args[0]
        count = tensor.numel()
        if func is _aten.nonzero.default:
            return [((count, tensor.dim()), torch.long)]
        if func is _aten._ctc_loss.Tensor:
            length, samples = tensor.shape[0], tensor.shape[1]
            labels, lengths = args[1].shape[1] if args[1].dim() == 2 else args[1].numel(), self._value(args[3])
            if lengths is not _Unknown:
                labels = _compute(lambda: int(lengths.max()), (), {})
            return [((samples,), tensor.dtype), ((samples, length, 2 * labels + 1), tensor.dtype)]
        if func not in (_aten._unique2.default, _aten.unique_consecutive.default, _aten.unique_dim.default):
            return None
        names = [argument.name for argument in schema_of(func).arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if (dim := given.get("dim")) is not None and (func is _aten.unique_dim.default or tensor.dim() != 1):
            slices = (tensor.shape[dim],)
            return [(tuple(tensor.shape), tensor.dtype), (slices, torch.long), (slices, torch.long)]
        inverse = tuple(tensor.shape) if given.get("return_inverse") else (0,)
        counts = (count if given.get("return_counts") else 0,)
        return [((count,), tensor.dtype), (inverse, torch.long), (counts, torch.long)]

    def _select(self, func: Any, args: Any, logged: Any) -> Any:
        """Run a selection by masks as a selection by positions."""
        if func is _aten.masked_select.default:
            source, mask = torch.broadcast_tensors(*args)
            if args[1] in self._real:
                self._remember(mask, _compute(torch.Tensor.expand, (self._real[args[1]], mask.shape), {}))
            indices = [mask]
            counts = None if logged is None else iter([logged[0].shape[0]])
        else:
            source, indices = args
            counts = None if logged is None else iter(logged)
        positions: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                positions.append(index)
            elif index in self._real and not self._prefers_log(counts, index):
                real = _compute(torch.nonzero, (self._real[index],), {"as_tuple": True})
                positions += [self._like(p, device_of(index)) for p in real]
            else:
                if counts is None:
                    self.replay.guessed_shape(func, source)
                count = index.numel() if counts is None else next(counts)
                positions += [torch.empty(count, dtype=torch.long, device=device_of(index)) for _ in index.shape]
        return _aten.index.Tensor(source, positions)

    def _like(self, real: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=device)

    def _remember(self, out: Any, real: Any) -> None:
        for fake, value in zip(tensors_in(out), tensors_in(real), strict=True):
            if isinstance(fake, FakeTensor):
                self._real[fake] = value
                if fake.layout is torch.strided:
                    self._storages.add(storage_key_of(fake))

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget the values of all aliases of the arguments that an operator wrote unknown values to."""
        written = [t for t in written_by(func, args, kwargs) if t.layout is torch.strided]
        storages = {storage_key_of(t) for t in written}
        if self._storages.isdisjoint(storages) and not any(t in self._real for t in written):
            return  # as for most operators of an optimizer
        for fake in [t for t in self._real if storage_key_of(t) in storages]:
            del self._real[fake]
        self._storages = {storage_key_of(t) for t in self._real}


def is_followed(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's values are followed: integers, booleans, and few other numbers."""
    return tensor.numel() <= (_FEW if tensor.is_floating_point() or tensor.is_complex() else _LIMIT)


def _only_writes(func: Any, args: Any) -> bool:
    """Tell whether an operator only writes numbers into its first argument, element by element.

    That changes nothing of a fake tensor, so the fake kernel need not run: it is most of an optimizer's operators.
    """
    if not traits_of(func).is_elementwise_in_place:
        return False
    written, *others = args
    if not isinstance(written, FakeTensor) or written.layout is not torch.strided or written.constant is not None:
        return False
    return written.is_floating_point() and all(  # the kernel refuses some operands of integers
        isinstance(other, FakeTensor)
        and other.layout is torch.strided
        and other.dtype is written.dtype
        and other.fake_device == written.fake_device
        and other.shape == written.shape
        for other in others
        if isinstance(other, torch.Tensor)
    )


def _assumed_finite(func: Any, args: Any) -> bool | None:
    """Return the assumed answer of a test whether numbers are finite: they are. None for other operators."""
    name = packet_of(func)
    if name not in _SAME or len(args) < 2 or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        return _FINITE.get(name)
    if args[0] is args[1]:
        return _SAME[name]
    infinite = isinstance(args[1], float) and math.isinf(args[1])
    return not _SAME[name] if infinite else None


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    with unset_fake_temporarily():
        return func(*args, **kwargs)
