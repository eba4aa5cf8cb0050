"""A dispatch mode that records operators, storages and saved tensors, with fake or real data."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.autograd import graph
from torch.utils.weak import WeakIdKeyDictionary

from memfit._torch import (
    CLAMP_SPLITS_TIES,
    BatchNormBase,
    FakeTensor,
    FakeTensorMode,
    NormBase,
    PassiveMode,
    TorchDispatchMode,
    current_autograd_node,
    current_graph_task_id,
    current_mode_stack,
    forward_hooks,
    forward_pre_hooks,
    get_sequence_nr,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_wrapper,
    is_zerotensor,
    pop_saved_tensors_default_hooks,
    push_saved_tensors_default_hooks,
    replaced,
    replaced_here,
    sequence_nr_of,
    set_forward_hooks,
    storage_key,
    storage_key_of,
    storage_use_count,
    top_saved_tensors_default_hooks,
    tree_leaves,
    undone_by_exceptions,
    use_count,
)
from memfit.capture.kernel_storages import SparseOperators, kernel_outputs, per_tensor_calls
from memfit.capture.known_values import KnownValues
from memfit.capture.operator_calls import (
    dense_in,
    device_of,
    draws_random_numbers,
    tensors_in,
    text_of,
    work_of,
    written_by,
)
from memfit.errors import CaptureError
from memfit.foundations import safe_point
from memfit.ir import Call, Module, Op, Phase, Save, Work
from memfit.workload import Place, Reader, covers_storage, has_history, parts, with_selected

_aten = torch.ops.aten
_INCIDENTAL = ("profiler", "prim")  # marks, and queries such as `tensor.device` that only fake tensors dispatch
_DEVICE = torch.ops.prim.device.default
_LIFT = _aten.lift_fresh.default  # of what `torch.tensor` makes, which is a fake tensor from then on
_WITH_DATA = (torch.Tensor, nn.Parameter)
_NEVER = -2

_ADD, _ADD_IN_PLACE = _aten.add.Tensor, _aten.add_.Tensor
_FILLING = {
    _aten.scatter.src: (_aten.scatter_.src, ("",)),  # in the formulas of all that select values: max, sort, topk, ...
    _aten.scatter_add.default: (_aten.scatter_add_.default, ("Gather", "Cummax", "Cummin")),
    _aten.index_add.default: (_aten.index_add_.default, ("IndexSelect",)),
    _aten.index_put.default: (_aten.index_put_.default, ("IndexBackward",)),
    _aten.index_fill.int_Tensor: (_aten.index_fill_.int_Tensor, ("Trace",)),
    _aten.put.default: (_aten.put_.default, ("Take",)),
    _aten.masked_scatter.default: (_aten.masked_scatter_.default, ("MaskedSelect",)),
    _aten.masked_fill.Scalar: (_aten.masked_fill_.Scalar, ("Atan2", "Clamp", "Fmax", "Fmin", "Maximum", "Minimum")),
}
"""Operators that fill a formula's tensors: their in-place forms, and prefixes of the autograd nodes' names."""
_CONTINUING = {
    _aten.sub.Tensor: (_aten.sub_.Tensor, ("BinaryCrossEntropyWithLogits",)),
    _aten.mul.Tensor: (_aten.mul_.Tensor, ("BinaryCrossEntropyWithLogits",)),
}
"""Operators that write into the previous result, in the formulas of these autograd nodes."""
if not CLAMP_SPLITS_TIES:
    _CONTINUING[_aten.logical_and.default] = _aten.logical_and_.default, ("Clamp",)
    _CONTINUING[_aten.logical_or.default] = _aten.logical_or_.default, ("Clamp",)


class Accumulation:
    """Choice of the operators that autograd runs without a dispatch mode. Create it outside of any mode.

    The engine adds the gradients of a tensor in place if it holds the last reference to one of them
    (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp), and backward formulas fill zeros in place
    (`isTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp): both only without a tensor subclass or mode,
    where they allocate another tensor instead.

    Args:
        is_of_this_node: Tells whether a tensor was made by the autograd node that is running, or ran just before;
            without it, sums in formulas are made in place too, where nothing else holds the first term.
    """

    def __init__(self, is_of_this_node: Callable[[torch.Tensor], bool] = lambda tensor: False) -> None:
        self._is_of_this_node = is_of_this_node
        self._last = _references_of_last()
        self._continued = -1  # key of the storage that the last formula wrote to in place

    def engine_operator(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the operator and arguments that run without a mode.

        Call it straight from `__torch_dispatch__`, with its own arguments: their references are counted.
        """
        known = func is _ADD or func in _FILLING or func in _CONTINUING
        if not known or kwargs or current_graph_task_id() == -1 or torch.is_grad_enabled():
            return func, args
        node: Any = current_autograd_node()
        if func is _ADD:
            if not isinstance(args[0], torch.Tensor):
                return func, args
            if self._is_of_this_node(args[0]):
                edges = [] if node is None else [edge for edge in node.next_functions if edge[0] is not None]
                if len(set(edges)) == len(edges):  # no two lead to one tensor, whose gradients the engine adds
                    return func, args  # a sum of a formula
            is_own = self._is_last_reference(args)  # the engine does not ask about the second term
            return (_ADD_IN_PLACE if is_own and _called_by_engine() else func), args
        in_place, nodes = _FILLING.get(func) or _CONTINUING[func]
        if not ("" if node is None else node.name()).startswith(nodes) or not _called_by_engine():
            return func, args
        if func in _CONTINUING:
            storage = storage_key_of(args[0])
            # C++ holds both temporaries to the end of the statement: a result written in place has one reference more.
            if storage != self._continued and not self._is_last_reference(args):
                return func, args
            self._continued = storage
        return in_place, args

    def _is_last_reference(self, args: Any) -> bool:
        """Tell whether only the engine holds the first argument and its storage, which the argument covers."""
        if args[0].layout is not torch.strided:
            return False
        expected = 1
        for stride, size in sorted((d, n) for n, d in zip(args[0].shape, args[0].stride(), strict=True) if n != 1):
            if stride != expected:
                return False
            expected *= size
        return all(count <= last for count, last in zip(_references(args), self._last, strict=True))


def _called_by_engine() -> bool:
    """Tell whether no Python backward formula stands between the engine and this mode."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != graph.__file__:
        if frame.f_code.co_name in ("backward", "vjp"):
            return False
        frame = frame.f_back
    return frame is not None


def _references(args: Any) -> tuple[int, int, int]:
    """Return the numbers of C++'s references to the first argument and its storage, and of Python's to the argument.

    The tensor is passed within the mode's arguments, so that no caller's frame holds the tensor itself: under Dynamo's
    frame evaluation each call holds its arguments.
    """
    storage = storage_use_count(storage_key_of(args[0]))
    return use_count(args[0]), storage, sys.getrefcount(args[0])


@functools.cache
def _references_of_last() -> tuple[int, int, int]:
    """Return the reference counts that a mode sees of a gradient that only the engine holds, in this PyTorch."""
    seen: list[tuple[int, int, int]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD and current_graph_task_id() != -1:
                seen.append(_references(args))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad(), Look():  # type: ignore[no-untyped-call]
        y = torch.ones(1, requires_grad=True).exp()
        torch.autograd.backward([y.sin(), y.cos()], [torch.ones(1), torch.ones(1)])
    return seen[0]


@dataclass
class LiveStorage:
    """A storage under observation; `death` is `_NEVER` while it is alive."""

    nbytes: int
    birth: int
    death: int = _NEVER
    shape: tuple[int, ...] = ()


class _Saved:
    """The object that autograd holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "index", "tensor")

    def __init__(self, tensor: torch.Tensor, index: int) -> None:
        self.tensor, self.index = tensor, index


@dataclass
class Recording:
    """The record of one step, from `begin_step` to `end_step`.

    Attributes:
        refilled: Storages that were empty before.
        releases: For storages that compiled code keeps for its backward pass, `Storage.release`; of these the saves are
            known, and autograd's own are not recorded.
    """

    ops: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    storages: list[LiveStorage] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    signatures: dict[str, int] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)
    refilled: set[int] = field(default_factory=set)
    releases: dict[int, int] = field(default_factory=dict)

    def _saved_died(self, index: int) -> None:
        self.saves[index] = replace(self.saves[index], death=len(self.ops) - 1)


class _CallStates:
    """States of the places that modules read, noted as calls begin and compared before the backward pass.

    A call reads the places of its module and of its submodules. Equal states of a place are noted once.
    """

    def __init__(self, model: nn.Module) -> None:
        reader = Reader()
        own = {module: reader.places(fqn, module) for fqn, module in model.named_modules()}
        hooks = {module: reader.hooks(module) for module in own}
        self._places: dict[nn.Module, list[Place]] = {}
        for module in own:
            inside = [place for inner in module.modules() if inner is not module for place in own[inner] + hooks[inner]]
            self._places[module] = list({id(place): place for place in (*own[module], *inside)}.values())
        every = {id(place): place for places in self._places.values() for place in places}
        self._latest = {key: place.read() for key, place in every.items()}
        self._calls: dict[int, list[tuple[Place, dict[str, Any]]]] = {}

    def begin(self, call: int, module: nn.Module) -> None:
        self._calls[call] = [(place, self._now(place)) for place in self._places[module]]

    def _now(self, place: Place) -> dict[str, Any]:
        if (state := place.read()) != self._latest[id(place)]:
            self._latest[id(place)] = state
        return self._latest[id(place)]

    def changes(self) -> dict[int, str]:
        """Return the name of a changed value for each call that read one; forget these calls."""
        now = {id(place): self._now(place) for noted in self._calls.values() for place, _ in noted}
        changed: dict[int, str] = {}
        for call, noted in self._calls.items():
            for place, then in noted:
                present = now[id(place)]
                names = () if then is present else then.keys() | present.keys()
                if (name := next((n for n in names if then.get(n) != present.get(n)), None)) is not None:
                    changed[call] = f"{name} of {place.owner}"
                    break
        self._calls.clear()
        return changed


class _Uncounted(OrderedDict[int, Any]):
    """A mapping of module hooks that run although its length is 0."""

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True


class Recorder(PassiveMode):
    """A dispatch mode that records every operator below autograd, and the lifetime of every storage.

    Enter it inside (after) a fake tensor mode, or alone for a real run. `watch` attributes operators to modules,
    `enter_phase` to phases; `saving` records saved tensors.

    Args:
        fake: The fake tensor mode around it, or None.
        device_type: The device whose memory is recorded: "cpu" or "cuda".
        originals: The keys of storages that have copies: code that uses them takes no memory for that.
    """

    def __init__(
        self, fake: FakeTensorMode | None = None, device_type: str = "cpu", originals: frozenset[int] = frozenset()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake, self.device_type, self.originals = fake, device_type, originals
        self.sparse = SparseOperators(KnownValues.of(fake)) if fake is not None else None
        self.accumulation = Accumulation(self._is_of_this_node)
        self.now, self.recording = Recording(), False
        self.phase: Phase = "optimizer"
        self.microbatch = 0
        self.times = 1  # how often what is recorded runs in the real step
        self.modules: list[Module] = []
        self._index: dict[int, int] = {}  # of live storages in the recording, by their keys
        self._emptied: set[int] = set()
        self._from_outside: set[int] = set()
        self._in_modes = WeakIdKeyDictionary()
        self._stack: list[int] = []  # of the calls under way
        self._is_paused, self._watches = False, True
        self._node, self._node_began = -1, 0
        self._module_index: dict[int, int] = {}
        self._call_of_sequence: dict[int, int] = {}
        self._states: _CallStates | None = None

    @staticmethod
    def active() -> Recorder | None:
        """Return the recorder that is entered; None where there is none."""
        return next((mode for mode in reversed(current_mode_stack()) if isinstance(mode, Recorder)), None)

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Attribute operators to no modules, until the context is left, as those between compiled graphs.

        Hooks of saved tensors go on, and Dynamo does not look into them: what runs between graphs saves tensors too.
        """
        with replaced(self, "_watches", False), self._hooked(*self._opaque_hooks):
            yield

    @functools.cached_property
    def _opaque_hooks(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return torch.compiler.disable(self._pack), torch.compiler.disable(self._unpack)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Record nothing, until the context is left."""
        return replaced(self, "_is_paused", True)

    def begin_step(self) -> None:
        """Begin to record; live storages get birth -1."""
        live = [self.now.storages[index] for index in self._index.values()]
        self._index = {key: new for new, key in enumerate(self._index)}
        self.now, self.recording = Recording(storages=[LiveStorage(s.nbytes, -1, shape=s.shape) for s in live]), True
        self.microbatch, self.times = 0, 1
        for forgotten in (self._from_outside, self._call_of_sequence, self._stack):
            forgotten.clear()
        self._node, self._node_began = -1, 0

    def end_step(self) -> Recording:
        """Return the recording; storages still alive have death `len(ops)`.

        Raises:
            CaptureError: A module's call did not end, so that what came later was told as its own.
        """
        if self._stack:
            names = ", ".join(repr(self.modules[self.now.calls[call].module].fqn) for call in self._stack)
            raise CaptureError(
                f"the step ended while the module {names} still ran, so memfit can't tell which module runs an"
                " operator: end each module's forward pass before the step ends, in the thread that began it"
            )
        self.recording, self._states = False, None
        done = self.now
        for index in self._from_outside:
            if done.storages[index].death == _NEVER:
                done.storages[index].birth = -1
        for storage in done.storages:
            storage.birth = min(storage.birth, len(done.ops) - 1)
            if storage.death == _NEVER:
                storage.death = len(done.ops)
        return done

    def live_bytes(self) -> int:
        """Return the bytes of all live storages."""
        return sum(self.now.storages[index].nbytes for index in self._index.values())

    def observe(self, tensor: torch.Tensor, birth: int) -> int | None:
        """Return the index of a tensor's storage, whose lifetime is recorded from now on.

        None for a tensor on another device, for zeros without memory, as forward-mode derivatives have them, and for a
        sparse or wrapping tensor, whose parts are observed.
        """
        if tensor.layout is not torch.strided or is_wrapper(type(tensor)):
            for part in parts(tensor):
                self.observe(part, birth)
            return None
        tensor = self._in_mode(tensor)
        key = storage_key_of(tensor)
        if device_of(tensor).type != self.device_type or is_zerotensor(tensor):
            return None
        known = self._index.get(key)
        if known is not None:
            flat = self.now.storages[known]
            # A view of three dimensions shows the shape of a matrix product's rows, which are samples and tokens.
            if tensor.dim() == 3 and len(flat.shape) == 2 and tensor.numel() == math.prod(flat.shape):
                flat.shape = tuple(tensor.shape)
            return known
        storage = tensor.untyped_storage()
        index = self._index[key] = len(self.now.storages)
        shape = () if tensor.is_nested else tuple(tensor.shape)
        self.now.storages.append(LiveStorage(storage.nbytes(), birth, shape=shape))
        weakref.finalize(storage, self._died, key).atexit = False
        return index

    def _died(self, key: int) -> None:
        self._emptied.discard(key)
        index = self._index.pop(key, None)
        if index is not None:
            self.now.storages[index].death = len(self.now.ops) - 1

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Observe memory changes that no mode sees, inside this context.

        Storages are emptied and filled again, as of gathered parameters, and checkpointing keeps a copy of the CPU
        generator's state, of 5 KB, for each call.
        """
        original, get_state = torch.UntypedStorage.resize_, torch.get_rng_state

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            key = storage_key(storage)
            known = key in self._index or key in self._emptied
            if key in self._index:
                self._died(key)
            out = original(storage, nbytes)
            if known and nbytes == 0:
                self._emptied.add(key)
            elif known:
                self._emptied.discard(key)
                index = self._index[key] = len(self.now.storages)
                self.now.storages.append(LiveStorage(nbytes, self._birth()))
                self.now.refilled.add(index)
            return out

        def observed() -> torch.Tensor:
            state = get_state()
            self.observe(state, self._birth())
            return state

        with (
            replaced_here(torch.UntypedStorage, "resize_", resized),
            replaced_here(torch, "get_rng_state", observed),
        ):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):
            return NotImplemented  # they run operators on the tensors that they wrap, which come here again
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most of all calls, slow from mode to mode
        if func.namespace in _INCIDENTAL or self._is_paused:
            return func(*args, **kwargs)
        safe_point()
        if (calls := per_tensor_calls(func, args)) is not None:
            for operator, arguments in calls:
                self.__torch_dispatch__(operator, types, arguments)
            return None
        phase, birth = self._phase(), self._birth()
        call = self._current_call(phase)
        func, args = self.accumulation.engine_operator(func, args, kwargs)
        text = text_of(func, args, kwargs) if self.recording else ""  # before sparse arguments get other entries
        written = written_by(func, args, kwargs)
        sparse = [t for t in written if t.layout is not torch.strided]
        held = dense_in(sparse)  # the memory that they give up lives until the operator ends
        for tensor in tensors_in((args, kwargs)) if self.fake is not None and func is not _LIFT else ():
            # With data, such as a table that the user's own steps made: held where it outlives a step.
            if type(tensor) not in _WITH_DATA or tensor.layout is not torch.strided:
                continue
            if storage_key_of(self._in_mode(tensor)) in self._index or storage_key_of(tensor) in self.originals:
                continue
            self._from_outside.update(self._observed([tensor], birth))
        out = self.run(func, args, kwargs)
        for tensor in sparse:
            self.observe(tensor, birth)
        if self.recording:
            text = with_selected(text, func, args, out)
            mutated = tuple(i for t in dense_in(written) if (i := self.observe(t, -1)) is not None)
            number = self.now.signatures.get(text)
            if number is None:
                number = self.add_signature(text, work_of(func, args, kwargs, out, self.device_type))
            random = draws_random_numbers(func, args, kwargs)
            self.now.ops.append(Op(str(func), call, phase, self.microbatch, number, mutated, random, self.times))
        for tensor in tensors_in(out):
            self.observe(tensor, birth)
        del held
        return out

    def _birth(self) -> int:
        return len(self.now.ops) if self.recording else -1

    def _observed(self, tensors: Iterable[torch.Tensor], birth: int = -1) -> dict[int, None]:
        """Return the indices of tensors' storages, in order, each once."""
        return dict.fromkeys(i for t in tensors if (i := self.observe(t, birth)) is not None)

    def _in_mode(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor that operators take for one with data: theirs is the storage that views share."""
        if self.fake is None or type(tensor) not in _WITH_DATA:
            return tensor
        if tensor not in self._in_modes:
            self._in_modes[tensor] = self.fake.from_tensor(tensor)
        found: torch.Tensor = self._in_modes[tensor]
        return found

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the outputs of an operator with the storages of the device's kernel."""
        if self.sparse is None:
            return func(*args, **kwargs)
        if func is _aten._grouped_mm.default and args[0].dtype == args[1].dtype:
            # The fake kernel takes bfloat16 only, the device's any dtype.
            left, right, *rest = args
            return func(left.bfloat16(), right.bfloat16(), *rest, **kwargs).to(kwargs.get("out_dtype") or left.dtype)
        return kernel_outputs(self.sparse.run(func, args, kwargs), func, args, kwargs, self.device_type)

    def add_signature(self, text: str, work: Work) -> int:
        """Return the index of a signature, which is recorded once."""
        index = self.now.signatures.setdefault(text, len(self.now.works))
        if index == len(self.now.works):
            self.now.works.append(work)
        return index

    def add_module(self, module: Module) -> int:
        """Return the index of a module by its FQN, which is recorded once."""
        fqns = [other.fqn for other in self.modules]
        if module.fqn in fqns:
            return fqns.index(module.fqn)
        self.modules.append(module)
        return len(fqns)

    def _phase(self) -> Phase:
        recomputes = self.phase == "backward" and current_graph_task_id() != -1 and torch.is_grad_enabled()
        return "recompute" if recomputes else self.phase

    def enter_phase(self, phase: Phase, microbatch: int) -> None:
        """Begin a phase of a microbatch."""
        if self._states is not None and phase == "backward":
            for call, name in self._states.changes().items():
                self.now.calls[call] = replace(self.now.calls[call], changed=name)
        self.phase, self.microbatch = phase, microbatch

    def _current_call(self, phase: Phase) -> int:
        if phase == "backward":
            node = current_autograd_node()
            number = -1 if node is None else sequence_nr_of(node)
            if number != self._node:
                self._node, self._node_began = number, len(self.now.ops)
            return self._call_of_sequence.get(number, -1)
        call = self._stack[-1] if self._stack else -1
        if phase == "forward":
            # The autograd node of this operator was made just before; operators without a node come later.
            self._call_of_sequence.setdefault(get_sequence_nr() - 1, call)
        return call

    def _is_of_this_node(self, tensor: torch.Tensor) -> bool:
        """Tell whether the autograd node that is running, or ran just before, made a tensor's storage."""
        index = self._index.get(storage_key_of(tensor)) if tensor.layout is torch.strided else None
        return self.recording and index is not None and self.now.storages[index].birth >= self._node_began

    @contextlib.contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Attribute operators to the modules of a model, until the context is left."""
        self._states = _CallStates(model)
        # PyTorch's encoder layers run in one operator only where they have no hooks: ours are hidden from them.
        for layer in (module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)):
            within = list(layer.modules())
            if not any(forward_hooks(module) or forward_pre_hooks(module) for module in within):
                for module in within:
                    set_forward_hooks(module, _Uncounted(), _Uncounted())

        def began() -> Callable[[], None]:
            return functools.partial(self._end_calls, len(self._stack))

        with undone_by_exceptions(model, began), contextlib.ExitStack() as stack:
            for fqn, module in model.named_modules():
                self._module_index[id(module)] = len(self.modules)
                couples = isinstance(module, BatchNormBase) and module.training
                self.modules.append(Module(fqn, type(module).__name__, couples, isinstance(module, NormBase)))
                stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.recording or not self._watches:
            return
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for place, tensor in enumerate(tensors):
            while is_functorch_wrapped_tensor(tensor):  # by `torch.func`'s transforms
                tensors[place] = tensor = get_unwrapped(tensor)
        inputs = tuple(self._observed(tensors))
        activations = tuple(self._observed(t for t in tensors if covers_storage(t) and has_history(t)))
        parent = self._stack[-1] if self._stack else -1
        index, at, number = len(self.now.calls), len(self.now.ops), self._module_index[id(module)]
        self.now.calls.append(Call(number, parent, self.microbatch, at, at, inputs, self._phase(), activations))
        self._stack.append(index)
        if self._states is not None and self.phase == "forward":
            self._states.begin(index, module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        number = self._module_index[id(module)]
        depths = [depth for depth, call in enumerate(self._stack) if self.now.calls[call].module == number]
        if depths and self.recording and self._watches:
            self._end_calls(depths[-1])

    def _end_calls(self, depth: int) -> None:
        """End the calls within the outermost ones, as many as `depth`."""
        while len(self._stack) > depth:
            index = self._stack.pop()
            self.now.calls[index] = replace(self.now.calls[index], end=len(self.now.ops))

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Record the tensors that autograd saves, until the context is left."""
        return self._hooked(self._pack, self._unpack)

    def dropping(self, kept: Sequence[bool]) -> contextlib.AbstractContextManager[None]:
        """Have autograd save only the tensors that `kept`, in their order, names: as under activation checkpointing."""
        decisions = iter(kept)
        return self._hooked(lambda t: self._detached(t) if next(decisions, False) else None, self._unpack)

    def _detached(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_leaf:
            return tensor
        # A node holds what hooks return for its output: with history the two would hold each other, and never die
        # where no backward pass comes.
        with self.paused():
            return tensor.detach()

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not self.recording:
            return tensor
        storage = self.observe(tensor, -1)
        if storage is None:
            return tensor
        if storage in self.now.releases:
            return self._detached(tensor)
        index = len(self.now.saves)
        call = self._stack[-1] if self._stack else -1
        self.now.saves.append(Save(storage, len(self.now.ops), call, -1, _NEVER))
        saved = _Saved(self._detached(tensor), index)
        weakref.finalize(saved, self.now._saved_died, index).atexit = False
        return saved

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            if saved is None:
                raise CaptureError(
                    "the second forward pass used a saved tensor that the first one did not use, so the step's memory"
                    " can't be predicted: make Workload.loss_fn do the same on every call"
                )
            assert isinstance(saved, torch.Tensor)
            return saved
        record = self.now.saves[saved.index]
        if record.unpacked < 0:
            self.now.saves[saved.index] = replace(record, unpacked=len(self.now.ops))
        return saved.tensor

    @contextlib.contextmanager
    def _hooked(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
        """Set hooks of saved tensors, until the context is left, except within transforms of `torch.func`.

        Transforms refuse hooks: saved tensors show by the deaths of their storages, and the running modules are marked.
        """
        refuse = graph.disable_saved_tensors_hooks

        @contextlib.contextmanager
        def without(message: str) -> Iterator[None]:
            ours = top_saved_tensors_default_hooks(False) == (pack, unpack)
            for call in self._stack:  # no region within them can be checkpointed, since that takes hooks
                module = self.now.calls[call].module
                self.modules[module] = replace(self.modules[module], refuses_hooks=True)
            if ours:
                pop_saved_tensors_default_hooks()
            try:
                with refuse(message):
                    yield
            finally:
                if ours:
                    push_saved_tensors_default_hooks(pack, unpack)

        with replaced_here(graph, "disable_saved_tensors_hooks", without), graph.saved_tensors_hooks(pack, unpack):
            yield
