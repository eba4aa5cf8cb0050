"""The state of autograd's engine: its current node and task, its references, and its hooks of saved tensors."""

from typing import Any

import torch
from torch.autograd import forward_ad

# PyTorch's own functions, not wrapped: a wrapper's frame would hold its arguments, and memfit counts references.
current_autograd_node = torch._C._current_autograd_node
current_graph_task_id = torch._C._current_graph_task_id
get_sequence_nr = torch._C._autograd._get_sequence_nr
profiler_enabled = torch._C._autograd._profiler_enabled
storage_use_count = torch._C._storage_Use_Count

pop_saved_tensors_default_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
push_saved_tensors_default_hooks = torch._C._autograd._push_saved_tensors_default_hooks
top_saved_tensors_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks


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
