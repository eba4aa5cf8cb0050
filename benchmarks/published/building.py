"""What the rebuilt models share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit import Loop, Workload
from memfit.capture import KnownValues
from memfit.workload import rng_preserved


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


class FlashOfPackedTokens(torch.autograd.Function):
    """The flash attention of torch 2.0 and of the nightlies of 2.1 up to August 2023, in front of FlashAttention 1.

    `attention.cu` and `attention_backward.cu` of those versions reshape queries, keys and values to rows of tokens,
    once in each pass, and give the output in that layout. Where the sequence comes before the batch, as in
    `nn.MultiheadAttention`, each of these is a copy, and what uses the output copies it back and keeps both. Later
    versions take any strides and give the output those of the queries. The kernel itself is today's.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool) -> Tensor:
        packed = [_packed(x) for x in (query, key, value)]
        found = torch.ops.aten._scaled_dot_product_flash_attention(*packed, dropout, is_causal)
        output, logsumexp, *rest = found[:8]
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.rest, ctx.options = rest, (dropout, is_causal)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        cumulative_q, cumulative_k, longest_q, longest_k, seed, offset = ctx.rest
        given = [_packed(x) for x in (gradient, query, key, value, output)]
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *given, logsumexp, cumulative_q, cumulative_k, longest_q, longest_k, *ctx.options, seed, offset
        )
        return *gradients, None, None


def _packed(x: Tensor) -> Tensor:
    """Return heads x tokens as rows of tokens, and as heads x tokens again: a copy where tokens aren't rows already."""
    batch, heads, length, width = x.shape
    rows = x.transpose(1, 2).reshape(batch * length, heads, width)
    return rows.view(batch, length, heads, width).transpose(1, 2)


@contextlib.contextmanager
def flash_of_packed_tokens() -> Iterator[None]:
    """Have `scaled_dot_product_attention` take that flash attention for 16-bit inputs."""
    current = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *rest: Any) -> Tensor:
        if mask is not None or query.dtype not in (torch.float16, torch.bfloat16):
            return current(query, key, value, mask, *rest)
        dropout, is_causal = (*rest, *(0.0, False)[len(rest) :])[:2]
        return FlashOfPackedTokens.apply(query, key, value, dropout, is_causal)  # type: ignore[no-any-return, no-untyped-call]

    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = current


@contextlib.contextmanager
def outputs_kept(modules: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """Keep what modules give within the block for as long as the list lives; what they give later is not kept."""
    kept: list[Tensor] = []
    hooks = [module.register_forward_hook(lambda _, given, output: kept.append(output.detach())) for module in modules]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def causal_loss(logits: Tensor, labels: Tensor, upcast: bool = True) -> Tensor:
    """Return transformers' loss of a causal language model."""
    if upcast:
        logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    labels = labels[..., 1:].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.size(-1)), labels.view(-1))


class LoRALinear(nn.Module):
    """A frozen linear layer with peft's adapter, whose weights are in float32 unless told."""

    def __init__(self, base: nn.Linear, rank: int, dropout: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base, self.scaling = base, 1.0
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.a = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.b = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        given = result.dtype
        x = x.to(self.a.weight.dtype)
        result = result + self.b(self.a(self.dropout(x))) * self.scaling
        return result.to(given)  # type: ignore[no-any-return]


def with_lora(
    model: nn.Module, names: tuple[str, ...], rank: int, dropout: float, dtype: torch.dtype = torch.float32
) -> None:
    """Freeze a model and put adapters beside its linear layers of some names."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child, rank, dropout, dtype))


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
