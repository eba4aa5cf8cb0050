"""What the rebuilt models share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit import Loop, Workload
from memfit.capture.known_values import KnownValues
from memfit.rng import rng_preserved


def fake(make: Callable[[], Workload]) -> Workload:
    """Return a workload whose tensors are fake and take no memory."""
    values = KnownValues.of(FakeTensorMode(allow_non_fake_inputs=True))
    with rng_preserved(), values.fake, values:
        return make()


@contextlib.contextmanager
def dtype(wanted: torch.dtype) -> Iterator[None]:
    """Build modules in a dtype: fake ones can't be converted afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(wanted)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class SoftmaxWithInput(torch.autograd.Function):
    """The softmax of torch up to 1.10, which kept its input too: its backward function took the input for its dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        output = torch.softmax(x, dim)
        ctx.save_for_backward(x, output)
        ctx.dim = dim
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, output = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradient, output, ctx.dim, x.dtype), None


def softmax_with_input(x: Tensor, dim: int) -> Tensor:
    """Return that softmax, in float32 under autocast."""
    found: Tensor = SoftmaxWithInput.apply(x.float() if torch.is_autocast_enabled("cuda") else x, dim)  # type: ignore[no-untyped-call]
    return found


def causal_loss(logits: Tensor, labels: Tensor, upcast: bool = True) -> Tensor:
    """Return transformers' loss of a causal language model."""
    if upcast:
        logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    labels = labels[..., 1:].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.size(-1)), labels.view(-1))


class LoRALinear(nn.Module):
    """A frozen linear layer with peft's adapter, whose weights are in float32."""

    def __init__(self, base: nn.Linear, rank: int, dropout: float) -> None:
        super().__init__()
        self.base, self.scaling = base, 1.0
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.a = nn.Linear(base.in_features, rank, bias=False, dtype=torch.float32)
        self.b = nn.Linear(rank, base.out_features, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        given = result.dtype
        x = x.to(self.a.weight.dtype)
        result = result + self.b(self.a(self.dropout(x))) * self.scaling
        return result.to(given)  # type: ignore[no-any-return]


def with_lora(model: nn.Module, names: tuple[str, ...], rank: int, dropout: float) -> None:
    """Freeze a model and put adapters beside its linear layers of some names."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child, rank, dropout))


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that get gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def created(model: nn.Module) -> Workload:
    """Return the step that touches nothing of a model: what it takes is the model's own memory."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    touched = nn.Parameter(torch.zeros(1))
    model.register_parameter("touched", touched)
    batch = {"one": torch.zeros(1)}
    return Workload(model, batch, lambda model, batch: model.touched.sum(), None, loop=Loop(), batch_size=1)  # type: ignore[arg-type, operator]
