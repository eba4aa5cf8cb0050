"""What memfit relies on of operations on lists of tensors."""

from __future__ import annotations

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._foreach_utils import _device_has_foreach_support

from memfit._torch import foreach

NAME = "_foreach_supported_types"


def test_foreach_copy_and_foreach_mul_write_their_first_list() -> None:
    """`foreach_copy_` casts, and `foreach_mul_` multiplies by one number."""
    halves = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1)]
    foreach.foreach_copy_(halves, [torch.ones(2), torch.full((1,), 3.0)])
    foreach.foreach_mul_(halves, 0.5)
    assert [tensor.tolist() for tensor in halves] == [[0.5, 0.5], [1.5]]


def test_optimizers_look_up_types_in_the_lists_at_each_step() -> None:
    """The lists of `supported_types`, of which `optimizer_types` is the first, are those that PyTorch itself reads."""

    assert foreach.supported_types[0] is foreach.optimizer_types is _default_to_fused_or_foreach.__globals__[NAME]
    assert foreach.supported_types[1] is _device_has_foreach_support.__globals__[NAME]
    assert all(torch.Tensor in types for types in foreach.supported_types)
