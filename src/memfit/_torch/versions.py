"""The tested versions of PyTorch, and the differences between them.

docs/internals/torch-versions.md lists all of it.
"""

from __future__ import annotations

import torch

TESTED = ((2, 11), (2, 15))
"""The first and the last version, both of which are tested. `pyproject.toml` requires the first."""

TESTED_RANGE = " to ".join(".".join(map(str, version)) for version in TESTED)


def torch_version() -> tuple[int, ...]:
    """Return the first two numbers of this PyTorch's version."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


CLAMP_SPLITS_TIES = torch_version() >= (2, 14)
"""Whether `clamp` between tensors gives half of the gradient to a bound that its input equals.

That formula fills its own result in place. The one before combined its masks in place.
"""

SHARDED_LEAVES_ACCUMULATE = torch_version() >= (2, 15)
"""Whether parameters under `fully_shard` hold gradients that were not reduced in their `grad` alone."""


def why_untested() -> str:
    """Return why memfit's predictions may be wrong under this PyTorch; "" where it was tested."""
    if TESTED[0] <= torch_version() <= TESTED[1]:
        return ""
    return (
        f"memfit was tested with PyTorch {TESTED_RANGE}, and this is {torch.__version__}: run memfit.verify on a plan"
        " before a long training"
    )
