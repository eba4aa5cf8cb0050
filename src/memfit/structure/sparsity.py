"""2:4 semi-structured sparsity: the two smallest of every four weights in a row are zero.

GPUs from NVIDIA's Ampere on multiply such matrices up to twice as fast, from half the bytes (Mishra et al. 2021,
*Accelerating Sparse Deep Neural Networks*): with PyTorch's sparse tensors, for inference, in 16 bits. Training with
masks gains nothing anywhere, and on a CPU nothing does; a proposal's price says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from memfit.errors import UsageError, WorkloadError
from memfit.structure.proposal import Change, Pricing, Proposal, changeable_copy, matching
from memfit.workload import Workload

_CAPABILITY = (8, 0)
_MULTIPLES = (32, 64)  # divide the rows and columns of the 16-bit weights that PyTorch's kernels take
_DTYPES = (torch.float16, torch.bfloat16)


def sparsify(
    workload: Workload, *, modules: Sequence[str] = ("*",), device: str = "cpu", measure: bool = False
) -> Proposal:
    """Propose linear layers with 2:4 masks by magnitude, kept during fine-tuning.

    Masked weights get no gradient. Masks are a parametrization: the parameters stay those of the optimizer, under the
    name `parametrizations.weight.original`. After training, `to_sparse` converts them to sparse tensors.

    Args:
        workload: The user's workload; nothing of it is changed.
        modules: Patterns of FQNs among which `nn.Linear` layers are masked; layers whose inputs are not a multiple of
            4 stay dense. None may share its weight with another module.
        device: Device that both steps are predicted for.
        measure: Whether to run both steps too, on that device where it is in this machine.

    Raises:
        WorkloadError: A pattern matches no linear layer, or none can be masked.
    """
    made = changeable_copy(workload)
    named = {n: m for n, m in made.model.named_modules() if type(m) is nn.Linear}
    chosen = [n for n in matching(list(named), modules, "modules", "nn.Linear") if named[n].in_features % 4 == 0]
    if not chosen:
        raise WorkloadError(f"modules={tuple(modules)} has no nn.Linear with in_features a multiple of 4")
    owners: dict[int, list[str]] = {}
    for owner, parameter in made.model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(owner)
    for name in chosen:
        others = [owner for owner in owners[id(named[name].weight)] if owner != f"{name}.weight"]
        if others:  # which the mask would not reach
            raise WorkloadError(
                f"{name}.weight is shared with {others[0]}, and that one would stay dense: leave {name!r} out of"
                " modules"
            )
    for name in chosen:
        parametrize.register_parametrization(named[name], "weight", Masked(mask_2_to_4(named[name].weight)))
    sizes = {name: f"{named[name].in_features}→{named[name].out_features}" for name in chosen}
    changes = [Change(name, f"Linear {size}: 2 of 4 weights kept") for name, size in sizes.items()]
    return Pricing(workload, device, measure).proposal("2:4 sparsity", made, changes, [_NOTE])


_NOTE = (
    "masks save nothing during training, and need a copy of the weights. The gain is in inference, after"
    " memfit.structure.to_sparse: in 16 bits, on CUDA with compute capability 8.0 or higher. On a CPU 2:4 sparsity"
    " saves nothing"
)


def mask_2_to_4(weight: Tensor) -> Tensor:
    """Return the mask of the weights that stay: the two of largest magnitude of every four in a row.

    Args:
        weight: [rows, columns], columns a multiple of 4.

    Returns:
        Booleans of the same shape, two of four of them true.
    """
    fours = weight.detach().abs().reshape(-1, 4)
    largest = fours.topk(2, dim=1).indices
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(1, largest, True).reshape(weight.shape)


class Masked(nn.Module):
    """A parametrization that keeps the weight where the mask is true, and is zero elsewhere."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the masked weight."""
        return weight * self.mask


def to_sparse(model: nn.Module) -> list[str]:
    """Convert a model's masked weights to PyTorch's sparse tensors in place, for inference only.

    Args:
        model: On a GPU of compute capability 8.0 or more, in fp16 or bf16, with layers that `sparsify` masked.

    Returns:
        The FQNs of the layers that are now sparse. Masked layers whose rows are not a multiple of 32, or whose columns
        are not one of 64, keep their zeros in a dense tensor.

    Raises:
        UsageError: The model has no masked layer, or its device or dtype has no sparse tensors.
    """
    masked = {name: module for name, module in model.named_modules() if is_masked(module)}
    if not masked:
        raise UsageError(
            "model has no layer masked by memfit.structure.sparsify: call sparsify, and train its workload, before"
            " to_sparse"
        )
    for name, module in masked.items():
        why = why_not_sparse(module.weight)
        if why is not None:
            raise UsageError(f"the weight of {name!r} can't be made sparse: {why}")
    converted = []
    for name, module in masked.items():
        parametrize.remove_parametrizations(module, "weight")
        weight = module.weight.detach()
        if not any(size % multiple for size, multiple in zip(weight.shape, _MULTIPLES, strict=True)):
            sparse = torch.sparse.to_sparse_semi_structured(weight)
            module.weight = nn.Parameter(sparse, requires_grad=False)
            converted.append(name)
    return converted


def why_not_sparse(weight: Tensor) -> str | None:
    """Return why a weight can't be made a sparse tensor, or None where it can."""
    if weight.device.type != "cuda":
        return f"it is on {weight.device.type}, and 2:4 sparsity saves nothing there: move the model to a GPU"
    capability = torch.cuda.get_device_capability(weight.device)
    if capability < _CAPABILITY:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, and 8.0 is needed"
    if weight.dtype not in _DTYPES:
        return f"its dtype is {weight.dtype}: make the model fp16 or bf16, model.to(torch.bfloat16)"
    return None


def is_masked(module: nn.Module) -> bool:
    """Tell whether `sparsify` masked a module's weight."""
    return isinstance(module, nn.Linear) and any(isinstance(part, Masked) for part in module.modules())
