"""Tensors that a pass through a region keeps: outputs of operators that its recomputation reuses, copies on the host.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` does the same by a policy function. These modes use one
table, pass kept outputs to a region around this one, which drops and recomputes them, and run an operator again where
its output was taken already or changed, rather than refuse.

Under a dispatch mode each operator costs several times its own dispatch. The first pass through a region learns which
modules' own operators make what it keeps; afterwards the mode is on in these modules alone (`InnerForward`).

Under activation offload, what a region keeps for its recomputation waits in host memory. On a GPU, copies run on two
streams beside the computation, one to pinned host memory and one back. On the CPU they are plain copies.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from memfit import workload
from memfit._torch import (
    DispatchKey,
    EagerMode,
    OpOverload,
    current_mode_stack,
    exclude_dispatch_key,
    pop_mode_temporarily,
    schema_of,
    top_saved_tensors_default_hooks,
    tree_leaves,
    version_of,
)
from memfit.ir import LEAST_BYTES, Keep
from memfit.recomputation import probe
from memfit.recomputation.call_state import mapped, tensors_in

_CPU = torch.device("cpu")
_NEVER = {"aten.detach.default", "prim.device.default"}  # a recomputation runs these a different number of times


class ChangedError(Exception):
    """A tensor was changed in place while it was copied to the host."""


def is_worth_moving(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is large enough to offload, and covers its storage."""
    return workload.transfers.covers_storage(tensor) and tensor.numel() * tensor.itemsize >= LEAST_BYTES


class _Link:
    """The streams between a device and the host; the CPU has none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.out, self.back = (None if self.module is None else self.module.Stream(device) for _ in range(2))

    def copy(self, operator: Any, stream: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy on a stream, after the computation so far; return the event of the copy's end."""
        if self.module is None:
            operator(target, source)
            return None
        stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(stream):
            operator(target, source)
            return stream.record_event()

    def wait(self, event: Any, tensor: torch.Tensor) -> None:
        """Make the computation's stream wait for an event."""
        if self.module is not None:
            self.module.current_stream(self.device).wait_event(event)
        workload.transfers.wait(tensor)


link_to = functools.cache(_Link)
"""Returns the streams of a device, made once."""


class HostCopy:
    """A tensor's copy in host memory, which begins at once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._source: torch.Tensor | None = tensor
        self._version = version_of(tensor)
        self._link = link_to(tensor.device)
        self._back: tuple[torch.Tensor, Any] | None = None
        self._is_changed = False
        with torch.no_grad():
            placed: dict[str, Any] = {} if self._link.module is None else {"device": "cpu", "pin_memory": True}
            self._host = torch.empty_like(tensor, **placed)
            self._event = self._link.copy(workload.transfers.copy_out, self._link.out, self._host, tensor)

    def land(self) -> None:
        """Make the computation wait for the copy to the host, and release the tensor.

        Its memory is then free for later operators, at the same place in every step.
        """
        if self._source is not None:
            self._link.wait(self._event, self._host)
            self._is_changed = version_of(self._source) != self._version
            self._source = None

    def prefetch(self) -> None:
        """Begin to copy the tensor back, unless that has begun; it is allocated on the computation's stream."""
        if self._back is None:
            with torch.no_grad():
                tensor = torch.empty_like(self._host, device=self._link.device)
                event = self._link.copy(workload.transfers.copy_in, self._link.back, tensor, self._host)
            self._back = tensor, event

    def take(self) -> torch.Tensor:
        """Return the tensor on its device, held by the caller only, after the copy back.

        Raises:
            ChangedError: The tensor was changed in place while it was copied to the host.
        """
        self.land()
        if self._is_changed:
            raise ChangedError
        self.prefetch()
        tensor, event = self._back  # type: ignore[misc]
        self._back = None
        with torch.no_grad():
            self._link.wait(event, tensor)
        return tensor

    def __del__(self) -> None:
        if self._back is not None and self._link.module is not None:
            # Never taken: its memory must not be given away while it is written to.
            self._link.module.current_stream(self._link.device).wait_event(self._back[1])


def hooks_around() -> Any:
    """Return the innermost active hooks of saved tensors, as (pack, unpack); None where there are none."""
    return top_saved_tensors_default_hooks(False)


def owner_of_hooks() -> Any:
    """Return the object whose methods are the innermost active hooks; None where there is none."""
    hooks = hooks_around()
    return None if hooks is None else getattr(hooks[0], "__self__", None)


def are_dropped() -> bool:
    """Tell whether tensors that autograd saves now are dropped, to be recomputed: by the innermost hooks' object."""
    return getattr(owner_of_hooks(), "drops_saved_tensors", False) is True


Learned = dict[str, dict[int, dict[Any, set[int]]]]
"""The kept occurrences of operators by module FQN, number of the module's call in the pass, and operator.

An occurrence counts the call's own operators, without those of calls inside it.
"""


class KeptOccurrences:
    """The occurrences of each operator whose outputs a region keeps, from their names: "overload#occurrence".

    Attributes:
        learned: The same by module call; None until a pass has kept all.
    """

    def __init__(self, keep: Keep) -> None:
        self._of_name: dict[str, set[int]] = {}
        for name, _, occurrence in (key.rpartition("#") for key in keep):
            if name not in _NEVER:
                self._of_name.setdefault(name, set()).add(int(occurrence))
        self._of: dict[Any, set[int]] = {}
        self.learned: Learned | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy knows, which may run other kernels on another device."""
        return self.__dict__ | {"_of": {}, "learned": None}

    def of(self, operator: Any) -> set[int]:
        """Return the occurrences of an operator whose outputs are kept; none where it writes to its arguments."""
        occurrences = self._of.get(operator)
        if occurrences is None:
            is_mutable = isinstance(operator, OpOverload) and schema_of(operator).is_mutable
            occurrences = self._of[operator] = set() if is_mutable else self._of_name.get(str(operator), set())
        return occurrences

    def learn(self, kept: KeptOutputs) -> None:
        """Note what makes the outputs that a pass has kept, if these are all."""
        if len(kept.outputs) == sum(map(len, self._of_name.values())):
            learned: Learned = {}
            for (fqn, number), operator, occurrence in kept.outputs:
                learned.setdefault(fqn, {}).setdefault(number, {}).setdefault(operator, set()).add(occurrence)
            self.learned = learned


class KeptOutputs:
    """The outputs that one pass keeps, with a record of the operator's arguments.

    Attributes:
        learned: `KeptOccurrences.learned` as the pass began.
        outputs: By module call, operator, and occurrence among the call's own operators.
        calls: Calls of each module so far.
        counts: Runs of each operator in the pass, while it learns.
    """

    def __init__(self, occurrences: KeptOccurrences, offload: bool) -> None:
        self.occurrences, self.learned = occurrences, occurrences.learned
        self.offloaded: list[HostCopy] | None = [] if offload else None  # those in host memory
        self.outputs: dict[tuple[tuple[str, int], Any, int], tuple[_Arguments, Any]] = {}
        self.calls, self.counts = defaultdict[str, int](int), defaultdict[Any, int](int)


class _KeptTensor:
    def __init__(
        self,
        tensor: torch.Tensor,
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], Any],
        offloaded: list[HostCopy] | None,
    ) -> None:
        # An alias, since the tensor itself gets the graph's history; under the guard it shares the version counter.
        with exclude_dispatch_key(DispatchKey.ADInplaceOrView, False):
            alias = tensor.detach()
        self.version = version_of(alias)
        self.held: Any
        if offloaded is not None and is_worth_moving(tensor):
            self.held = HostCopy(alias)
            offloaded.append(self.held)
        else:
            self.held, self.unpack = pack(alias), unpack

    def tensor(self) -> torch.Tensor:
        """Return the tensor; raise `ChangedError` where it was changed in place."""
        if isinstance(self.held, HostCopy):
            return self.held.take()
        tensor: torch.Tensor = self.unpack(self.held)
        if version_of(tensor) != self.version:
            raise ChangedError
        return tensor


class _Arguments:
    """The record of an operator's arguments.

    Attributes:
        shapes: Those of the tensors.
        values: The numbers among the arguments and the tensors' checksums, where recomputations are probed or checked;
            otherwise empty. A module that takes its next number at each run has moved on when it is recomputed, and no
            tensor that autograd saves need tell so where the operator that takes the number is not run again.
    """

    def __init__(self, args: Any, kwargs: Any, is_statistic: Callable[[torch.Tensor], bool] = lambda _: False) -> None:
        tensors = tensors_in((args, kwargs))
        self.shapes = [tensor.shape for tensor in tensors]
        self.values: list[Any] = []
        if probe.is_active():
            leaves = tree_leaves((args, kwargs))
            self.values += [repr(leaf) for leaf in leaves if isinstance(leaf, (int, float, complex))]
            self.values += [None if is_statistic(tensor) else probe.checksum(tensor) for tensor in tensors]


def as_it_is(value: Any) -> Any:
    return value


class InnerForward:
    """The `forward` of a module inside a region that keeps outputs. A deep copy of the module has one bound to it."""

    def __init__(self, fqn: str, module: nn.Module) -> None:
        self.fqn, self.module = fqn, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = None if torch.compiler.is_compiling() else _running.get()
        if mode is None or mode.passes_over(self.fqn):
            return type(self.module).forward(self.module, *args, **kwargs)
        return mode.run(self.fqn, functools.partial(type(self.module).forward, self.module), args, kwargs)


class _Mode(EagerMode):
    """A mode of a region, which is on while the own operators of some module calls run.

    Args:
        calls: Calls of each module so far.
    """

    def __init__(self, kept: KeptOutputs, calls: defaultdict[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self._calls = kept, calls
        self._is_on = False
        self._call = "", 0  # the innermost module call: an FQN, and how many calls of that module came before
        self._wanted: dict[Any, set[int]] | None = None  # the occurrences that it keeps; None where that is not known
        self._counts = defaultdict[Any, int](int)  # its own runs of each operator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def passes_over(self, fqn: str) -> bool:
        """Tell whether a module's call makes no difference."""
        return not self._is_on and self.kept.learned is not None and fqn not in self.kept.learned

    def run_region(self, fqn: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward pass of a module of the region."""
        token = _running.set(self)
        try:
            return self.run(fqn, forward, args, kwargs)
        finally:
            _running.reset(token)

    def run(self, fqn: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward pass of a module, of the region or inside it."""
        before = self._is_on, self._call, self._wanted, self._counts
        self._call, self._counts = (fqn, self._calls[fqn]), defaultdict(int)
        self._calls[fqn] += 1
        if self.kept.learned is not None:
            self._wanted = self.kept.learned.get(fqn, {}).get(self._call[1], {})
        is_watched = self._wanted is None or bool(self._wanted)
        switched: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if is_watched and not self._is_on:
            switched, self._is_on = self, True
        elif self._is_on and not is_watched and current_mode_stack()[-1:] == [self]:  # no mode of the user's is on top
            switched, self._is_on = pop_mode_temporarily(), False
        try:
            with switched:
                return forward(*args, **kwargs)
        finally:
            self._is_on, self._call, self._wanted, self._counts = before

    def occurrence_of(self, func: Any) -> int | None:
        """Return how often the call ran an operator before; None where it keeps no output of the operator."""
        if self._wanted is not None and func not in self._wanted:
            return None
        self._counts[func] += 1
        return self._counts[func] - 1


_running: ContextVar[_Mode | None] = ContextVar("_running", default=None)  # that of the region that runs


class KeepingMode(_Mode):
    """A dispatch mode that keeps outputs while a pass's call runs, through the hooks of a region around it."""

    def __init__(self, kept: KeptOutputs) -> None:
        super().__init__(kept, kept.calls)
        self.hooks = hooks_around() if are_dropped() else (as_it_is, as_it_is)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        occurrence = self.occurrence_of(func)
        if occurrence is not None and self._keeps(func, occurrence):
            pack, unpack = self.hooks
            items = mapped(out, torch.Tensor, lambda t: _KeptTensor(t, pack, unpack, self.kept.offloaded))
            self.kept.outputs[self._call, func, occurrence] = (_Arguments(args, kwargs), items)
            if self.kept.learned is None:
                self.kept.occurrences.learn(self.kept)
        return out

    def _keeps(self, func: Any, occurrence: int) -> bool:
        if self._wanted is not None:
            return occurrence in self._wanted[func]
        self.kept.counts[func] += 1
        return self.kept.counts[func] - 1 in self.kept.occurrences.of(func)


class ReusingMode(_Mode):
    """A dispatch mode that reuses kept outputs while all calls of a pass run again.

    Args:
        is_statistic: Tells the running statistics of normalisations.
        report: Called with a description and a device where an operator would take other values than before.
    """

    def __init__(
        self,
        kept: KeptOutputs,
        is_statistic: Callable[[torch.Tensor], bool],
        report: Callable[[str, torch.device], None],
    ) -> None:
        super().__init__(kept, defaultdict(int))
        self._is_statistic, self._report = is_statistic, report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        occurrence = self.occurrence_of(func)
        if occurrence is None:
            return func(*args, **(kwargs or {}))
        before, items = self.kept.outputs.pop((self._call, func, occurrence), (None, None))
        if before is not None:
            arguments = _Arguments(args, kwargs, self._is_statistic)
            if arguments.shapes != before.shapes:
                raise RuntimeError(
                    f"{func} has inputs of other shapes than in the forward pass, and its output is kept"
                )
            with contextlib.suppress(ChangedError):
                out = mapped(items, _KeptTensor, _KeptTensor.tensor)
                pairs = zip(arguments.values, before.values, strict=False)
                # Running statistics may differ: the forward pass updated them.
                if any(now is not None and then is not None and now != then for now, then in pairs):
                    device = next((t.device for t in tree_leaves(out) if isinstance(t, torch.Tensor)), _CPU)
                    how = f"{func} has inputs of other values than in the forward pass, and its output is kept"
                    self._report(how, device)
                return out
        return func(*args, **(kwargs or {}))
