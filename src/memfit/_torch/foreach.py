"""Operators on lists of tensors, and the tensor types that optimizers use them for."""

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils

foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
optimizer_types = optimizer._foreach_supported_types
supported_types = (optimizer_types, _foreach_utils._foreach_supported_types)
"""The tensor types for which optimizers, and the clipping of gradients, use operators on lists."""
