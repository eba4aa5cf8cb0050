"""Tensors: their storages, versions, parts and hooks, the state of autograd's engine, and that of accelerators.

Trees are of lists, tuples, mappings and registered containers.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_is_leaf as tree_is_leaf
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""The address of a storage's own record, the same for every tensor that aliases it; fake storages have one too."""


def storage_key_of(tensor: torch.Tensor) -> int:
    """Return the key of a strided tensor's storage."""
    return storage_key(tensor.untyped_storage())


version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""The version counter: how often a tensor, or an alias of it, was changed in place."""

# PyTorch's own method, not wrapped: the frame of a wrapper would hold one more reference to the tensor.
use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
"""The number of C++'s references to a tensor."""

nnz: Callable[[torch.Tensor], int] = torch.Tensor._nnz
sparse_indices: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._indices
sparse_values: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._values
nested_sizes: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._nested_tensor_size
is_zerotensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass


def _dispatches(kind: type) -> bool:
    own = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    return own and not issubclass(kind, FakeTensor)


dispatches: Callable[[Any], bool] = functools.cache(_dispatches)
"""Tells whether a class of tensors says by itself what operators do: what its tensors hold is its own affair."""


def _is_wrapper(kind: type) -> bool:
    known = all(callable(getattr(kind, f"__tensor_{way}__", None)) for way in ("flatten", "unflatten"))
    return issubclass(kind, torch.Tensor) and known and dispatches(kind)


is_wrapper: Callable[[Any], bool] = functools.cache(_is_wrapper)
"""Tells whether tensors of a class hold their memory in inner tensors, which PyTorch's protocol names."""


def inner_tensors(tensor: Any) -> dict[str, torch.Tensor]:
    """Return the inner tensors of a tensor of such a class, by name."""
    named = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return {name: inner for name, inner in named.items() if isinstance(inner, torch.Tensor)}  # and no mesh of devices


def context_of(tensor: Any) -> Any:
    """Return what a tensor of such a class is made of beside its inner tensors."""
    return tensor.__tensor_flatten__()[1]


def rewrapped(tensor: Any, inner: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor of such a class around other inner tensors."""
    names, context = tensor.__tensor_flatten__()
    whole = {name: inner[name] if name in inner else getattr(tensor, name) for name in names}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(whole, context, tensor.size(), tensor.stride())
    return made


# Autograd's engine

# PyTorch's own functions, not wrapped: a wrapper's frame would hold its arguments, and memfit counts references.
current_autograd_node = torch._C._current_autograd_node
current_graph_task_id = torch._C._current_graph_task_id
get_sequence_nr = torch._C._autograd._get_sequence_nr
profiler_enabled = torch._C._autograd._profiler_enabled
storage_use_count = torch._C._storage_Use_Count

pop_saved_tensors_default_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
push_saved_tensors_default_hooks = torch._C._autograd._push_saved_tensors_default_hooks
top_saved_tensors_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def after_backward(call: Callable[[], None]) -> None:
    """Have the engine call something once the backward pass that is running has ended without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def forward_ad_level() -> int:
    """Return the nesting depth of forward-mode derivatives; -1 outside of any."""
    level: int = forward_ad._current_level
    return level


def sequence_nr_of(node: Any) -> int:
    """Return the sequence number of an autograd node: the value of `get_sequence_nr` before it was made."""
    return int(node._sequence_nr())


Hooks = tuple[list[Any], list[Any]]


def tensor_hooks(tensor: torch.Tensor) -> Hooks:
    """Return the hooks of a tensor's gradient: those that see it, and those that are called when it is there."""
    accumulated = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return list((tensor._backward_hooks or {}).values()), list((accumulated or {}).values())


def add_tensor_hooks(tensor: torch.Tensor, hooks: Hooks) -> None:
    """Give a tensor hooks as `tensor_hooks` returns them, unless it has some."""
    if any(tensor_hooks(tensor)):
        return
    for hook in hooks[0]:
        tensor.register_hook(hook)
    for hook in hooks[1]:
        tensor.register_post_accumulate_grad_hook(hook)


# Accelerators


def set_memory(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor the memory of another one, on whichever device; references to it stay good."""
    if torch._has_compatible_shallow_copy_type(tensor, values):
        tensor.data = values
        if isinstance(tensor, FakeTensor):
            tensor.fake_device = values.device
    else:
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        other = torch.nn.Parameter(values, tensor.requires_grad) if is_parameter else values
        vars(other).update({name: value for name, value in vars(tensor).items() if name not in vars(other)})
        torch.utils.swap_tensors(tensor, other)


def take_snapshot(device: torch.device) -> Any:
    """Return the blocks of PyTorch's allocator on a GPU, and its recorded history."""
    return torch.cuda.memory._snapshot(device)


def allocator_settings() -> str:
    """Return the settings of the accelerator's allocator that this process was given last, as text."""
    return str(torch._C._accelerator_getAllocatorSettings())


def set_allocator_settings(text: str) -> None:
    """Change settings of the accelerator's allocator; those that are left out stay as they are.

    Raises:
        RuntimeError: It refuses them.
    """
    torch._C._accelerator_setAllocatorSettings(text)


def is_initialized(kind: str) -> bool:
    """Tell whether this process has initialized a kind of accelerator, and so has random generators there."""
    module = torch.get_device_module(kind)
    if hasattr(module, "is_initialized"):
        return bool(module.is_initialized())
    return bool(getattr(module, "_initialized", False))


def answer_for_one_device() -> None:
    """Make PyTorch's own code and Triton's drivers see one GPU, until the process ends."""
    torch._C._cuda_getDeviceCount = lambda: 1
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # looked up by Triton's drivers at import
