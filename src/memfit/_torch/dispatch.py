"""Dispatch modes, dispatch keys, and the dispatcher's table of kernels."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import overrides
from torch._C import DisableTorchFunction as DisableTorchFunction
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._C import DispatchKey as DispatchKey
from torch._C import TensorBase as TensorBase
from torch._C import _functorch
from torch._ops import OpOverload as OpOverload
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext as DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

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


class PassiveMode(TorchDispatchMode):
    """A dispatch mode under which Dynamo compiles code as without it, and which sees the operators of that code."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell Dynamo, which else leaves code alone that runs under modes, to compile: the mode is off meanwhile."""
        return True
