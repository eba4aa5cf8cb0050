"""The dispatcher: modes, keys, schemas, kernels and libraries of operators, and functions that are replaced a while."""

import functools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import overrides
from torch._C import DisableTorchFunction as DisableTorchFunction
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._C import DispatchKey as DispatchKey
from torch._C import TensorBase as TensorBase
from torch._C import _functorch
from torch._C._dynamo import eval_frame
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode as TorchFunctionMode
from torch.utils import _foreach_utils, _python_dispatch
from torch.utils._device import DeviceContext as DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from memfit._torch.compilers import disable_dynamo
from memfit.foundations import here

disabled_torch_function = torch._C._disabled_torch_function_impl
disable_current_modes = _python_dispatch._disable_current_modes
current_mode_stack: Callable[[], list[TorchDispatchMode]] = _python_dispatch._get_current_dispatch_mode_stack
pop_mode_temporarily: Callable[[], AbstractContextManager[Any]] = _python_dispatch._pop_mode_temporarily
below_autograd = torch._C._AutoDispatchBelowAutograd
exclude_dispatch_key = torch._C._SetExcludeDispatchKeyGuard
has_kernel_for_dispatch_key = torch._C._dispatch_has_kernel_for_dispatch_key
select_conv_backend = torch._C._select_conv_backend
set_cudnn_enabled = torch._C._set_cudnn_enabled
get_cudnn_enabled = torch._C._get_cudnn_enabled

get_current_function_mode: Callable[[], TorchFunctionMode | None] = overrides._get_current_function_mode
get_current_function_mode_stack: Callable[[], list[TorchFunctionMode]] = overrides._get_current_function_mode_stack
pop_function_mode: Callable[[], TorchFunctionMode] = overrides._pop_mode
pop_function_mode_temporarily: Callable[[], AbstractContextManager[Any]] = overrides._pop_mode_temporarily
push_function_mode: Callable[[TorchFunctionMode], None] = overrides._push_mode

get_unwrapped = _functorch.get_unwrapped
is_functorch_wrapped_tensor = _functorch.is_functorch_wrapped_tensor
peek_interpreter_stack = _functorch.peek_interpreter_stack


_FOLLOWED = ("flex_attention", "flex_attention_backward", "while_loop")
"""Higher-order operators whose eager kernels only call the functions that they are given, and other operators.

Dynamo first rewrites the functions that others get (`torch.cond`, `scan`, `map`), which it does not do under modes.
"""


_SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


class UnfollowedOperatorError(NotImplementedError):
    """A higher-order operator runs code that no mode can see."""


class EagerMode(TorchDispatchMode):
    """A dispatch mode that sees the operators within higher-order operators, such as `torch.cond`, one by one."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell PyTorch not to have Dynamo leave the mode alone: `_looking_inside` does."""
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        if (seen := cls.__dict__.get("__torch_dispatch__")) is not None:
            setattr(cls, "__torch_dispatch__", _looking_inside(seen))  # noqa: B010
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]


def _looking_inside(seen: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(seen)
    def dispatched(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) is not OpOverload and isinstance(func, HigherOrderOperator):  # the latter asks an abstract class
            return _followed(self, func, args, kwargs or {})
        return seen(self, func, types, args, kwargs)

    # Dynamo skips it and all that it calls, as under `torch._disable_dynamo`, whose wrapper takes time at each call.
    eval_frame.set_code_exec_strategy(dispatched.__code__, _SKIPPED)  # type: ignore[attr-defined]
    return dispatched


def _followed(mode: TorchDispatchMode, func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
    """Run the operators within a higher-order operator under a mode."""
    if func.name() not in _FOLLOWED:
        raise UnfollowedOperatorError(f"the higher-order operator {func.name()} can't be followed")
    if func.name().startswith("flex_attention") and args[0].device.type == "cuda":
        raise UnfollowedOperatorError(
            f"the higher-order operator {func.name()} can't be followed on a GPU, where it is one compiled kernel"
        )
    kernel: Any = func.py_kernels[DispatchKey.CompositeExplicitAutograd]
    with mode, _unchecked(sys.modules[kernel.__module__]):
        return kernel(*args, **kwargs)


def _unchecked(module: Any) -> AbstractContextManager[None]:
    """Have kernels not refuse modes, under which PyTorch has other rules for them."""
    name = "_get_current_dispatch_mode"
    return replaced(module, name, lambda: None) if hasattr(module, name) else nullcontext()


class PassiveMode(EagerMode):
    """A dispatch mode under which Dynamo compiles code as without it, and which sees the operators of that code."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell Dynamo, which else leaves code alone that runs under modes, to compile: the mode is off meanwhile."""
        return True


# Operators

schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
"""The schema of an operator: its arguments and returns, and the arguments that it writes."""

packet_of: Callable[[Any], Any] = operator.attrgetter("_overloadpacket")
"""The packet of an operator: all overloads of its name."""


@disable_dynamo
def call_at(func: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator's kernel for a dispatch key, out of compiled code: Dynamo warned of it before PyTorch 2.13."""
    return func._op_dk(key, *args, **kwargs)


def destroy_library(library: torch.library.Library) -> None:
    """Unregister the operators and kernels of a library.

    The Python dispatcher, under which compilers trace, keeps which kernel it took for a key: it looks again. PyTorch
    frees a kernel although another thread waits within it for Python's lock, and would go on in freed memory.
    """
    kernels = []
    for kernel in library._op_impls:
        namespace, name, key = kernel.split("/")
        packet, _, overload = name.partition(".")
        func = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        func._dispatch_cache.clear()
        kernels.append(torch.library.get_kernel(func, key))
    _destroyed.append(kernels)
    library._destroy()


_destroyed: deque[list[Any]] = deque(maxlen=64)
"""The kernels of the last libraries, which other threads may be in."""


@functools.cache
def drawing_operators() -> tuple[tuple[Any, int], ...]:
    """Return the operators with kernels for the CPU that take a generator, and the generator's place.

    All random numbers on the CPU are drawn by them: other operators call them.
    """
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, qualified = full.partition("::")
        if namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"):
            name, _, overload = qualified.partition(".")
            func = getattr(getattr(torch.ops.aten, name), overload or "default", None)
            names = [] if func is None else [argument.name for argument in schema_of(func).arguments]
            if "generator" in names:
                found.append((func, names.index("generator")))
    return tuple(found)


def before_backends(library: torch.library.Library, func: Any, kernel: Callable[..., Any]) -> None:
    """Register a kernel that runs before that of any device, for as long as a library lives.

    Args:
        kernel: Called with a function that runs the device's kernel, and the operator's arguments.
    """
    later = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel(functools.partial(func.redispatch, keys & later), *args, **kwargs)

    library.impl(func, run, "BackendSelect", with_keyset=True)


foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
scaled_mm = torch._scaled_mm
optimizer_types = optimizer._foreach_supported_types
supported_types = (optimizer_types, _foreach_utils._foreach_supported_types)
"""The tensor types for which optimizers, and the clipping of gradients, use operators on lists."""


# Replacement of PyTorch's own functions, and of other attributes, while a context is entered

_INHERITED = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object, until the context is left."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def replaced_here(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a class or a module that other threads go on using, until the context is left."""
    own = vars(owner).get(name, _INHERITED)
    setattr(owner, name, here(function, getattr(owner, name)))
    try:
        yield
    finally:
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
