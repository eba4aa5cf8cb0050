"""Dispatch modes, dispatch keys, and the dispatcher's table of kernels."""

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from torch.overrides import TorchFunctionMode as TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext as DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from memfit._torch.replacement import replaced

disabled_torch_function = torch._C._disabled_torch_function_impl
disable_current_modes = _python_dispatch._disable_current_modes
current_mode_stack: Callable[[], list[TorchDispatchMode]] = _python_dispatch._get_current_dispatch_mode_stack
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
        if isinstance(func, HigherOrderOperator):
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
