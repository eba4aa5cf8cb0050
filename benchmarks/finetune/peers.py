"""What people put on a fine-tuning step by hand, written from the papers and the code that they use.

Each is a context manager that changes a Llama of transformers and sets it back, or a function that stands for a part of
its step. `stacks.py` puts them together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.finetune.models import ADAPTED, decoder_of

Forward = Callable[[Tensor], Tensor]


class TokenTiles(torch.autograd.Function):
    """A module whose tokens do not see each other, a few tokens at a time, in the backward pass again.

    The forward pass saves the input only. The backward pass computes a tile with its graph, differentiates it and
    drops it, so that no intermediate of the whole sequence is ever there. Gradients of weights are summed over the
    tiles and returned whole.

    Source: Bekman et al. 2025, *Arctic Long Sequence Training* (arXiv 2506.13996), section 3.1 (TiledMLP); here for
    any module, and with the gradients of weights returned and not added to `.grad` by the tiles.
    """

    @staticmethod
    def forward(ctx: Any, forward: Forward, rows: int, x: Tensor, *weights: Tensor) -> Tensor:
        """Return the module's output of x, [batch, token, width]; `weights` are those that train."""
        ctx.tile, ctx.rows = forward, rows
        ctx.save_for_backward(x, *weights)
        out: Tensor | None = None
        for start in range(0, x.shape[1], rows):
            part = forward(x[:, start : start + rows])
            out = part.new_empty(*x.shape[:2], part.shape[-1]) if out is None else out
            out[:, start : start + rows] = part
            del part
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of the input, where it has one, and of the weights."""
        (gradient,) = gradients
        x, *weights = ctx.saved_tensors
        needs_input = ctx.needs_input_grad[2]
        of_input = torch.empty_like(x) if needs_input else None
        of_weights = [torch.zeros_like(weight) for weight in weights]
        for start in range(0, x.shape[1], ctx.rows):
            at = slice(start, start + ctx.rows)
            with torch.enable_grad():
                tile = x[:, at].detach().requires_grad_(needs_input)
                out = ctx.tile(tile)
            found = torch.autograd.grad(out, [tile] * needs_input + list(weights), gradient[:, at])
            del out
            if of_input is not None:
                of_input[:, at] = found[0]
            for total, part in zip(of_weights, found[needs_input:], strict=True):
                total += part
            del found
        return None, None, of_input, *of_weights


@contextlib.contextmanager
def tiled(model: nn.Module, rows: int) -> Iterator[None]:
    """Compute the MLPs, the normalisations and the adapted projections of a Llama over tiles of tokens."""
    decoder, _ = decoder_of(model)
    chosen = [m for m in decoder.modules() if type(m).__name__ in ("LlamaMLP", "LlamaRMSNorm")]
    for layer in decoder.layers:  # inside an MLP its tiles hold the projections
        chosen += [p for n, p in layer.self_attn.named_children() if n in ADAPTED and not isinstance(p, nn.Linear)]
    with _forwarding({module: _tiles(module, rows) for module in chosen}):
        yield


def _tiles(module: nn.Module, rows: int) -> Forward:
    own = module.forward

    def forward(x: Tensor) -> Tensor:
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        out: Tensor = TokenTiles.apply(own, rows, x, *trained)  # type: ignore[no-untyped-call]
        return out

    return forward


@contextlib.contextmanager
def concatenated(model: nn.Module, rows: int) -> Iterator[None]:
    """Compute the MLPs over tiles that are concatenated, as the guide of TRL on long sequences has it.

    Under a checkpoint the recomputation keeps every tile's intermediates all the same.
    """
    decoder, _ = decoder_of(model)

    def over_tiles(own: Forward) -> Forward:
        return lambda x: torch.cat([own(tile) for tile in x.split(rows, dim=1)], dim=1)

    with _forwarding({layer.mlp: over_tiles(layer.mlp.forward) for layer in decoder.layers}):
        yield


@contextlib.contextmanager
def _forwarding(forwards: dict[nn.Module, Forward]) -> Iterator[None]:
    before = {module: vars(module).get("forward") for module in forwards}  # transformers sets some of its own
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


class Rotation(torch.autograd.Function):
    """Rotary embedding that saves its angles only: its adjoint is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x, [batch, head, token, width], rotated."""
        ctx.save_for_backward(cos, sin)
        return (x * cos).add_(_half_turned(x).mul_(sin))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient rotated back."""
        (gradient,) = gradients
        cos, sin = ctx.saved_tensors
        return (gradient * cos).sub_(_half_turned(gradient * sin)), None, None


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@contextlib.contextmanager
def rotations() -> Iterator[None]:
    """Have Llamas rotate queries and keys by `Rotation`."""
    from transformers.models.llama import modeling_llama

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        angles = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return Rotation.apply(q, *angles), Rotation.apply(k, *angles)  # type: ignore[no-untyped-call]

    before = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = rotated
    try:
        yield
    finally:
        modeling_llama.apply_rotary_pos_emb = before


class ChunkedCrossEntropy(torch.autograd.Function):
    """The head and the mean cross-entropy of a few rows at a time, with gradients made in the forward pass.

    Source: Hsu et al. 2024, *Liger Kernel* (arXiv 2410.10989), section 3.2 (FusedLinearCrossEntropy) and the rule for
    the chunks' size of its code; here without Triton.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over targets that are not negative; hidden is [row, width], weight [vocabulary, width]."""
        count = (targets >= 0).sum()
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        total = hidden.new_zeros((), dtype=torch.float32)
        rows = chunk_rows(len(hidden), weight)
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            chunk, target = hidden[at], targets[at]
            logits = (chunk @ weight.t()).float()
            normaliser = logits.logsumexp(-1)
            is_counted, place = target >= 0, target.clamp_min(0)[:, None]
            total += ((normaliser - logits.gather(1, place).squeeze(1)) * is_counted).sum()
            logits.sub_(normaliser[:, None]).exp_()
            logits.scatter_add_(1, place, -torch.ones_like(place, dtype=logits.dtype))
            logits.mul_((is_counted / count)[:, None])
            gradient = logits.to(hidden.dtype)
            of_hidden[at] = gradient @ weight
            if of_weight is not None:
                of_weight.addmm_(gradient.t(), chunk)
            del logits, gradient
        ctx.save_for_backward(of_hidden, of_weight)
        return total / count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients that the forward pass made, scaled."""
        (scale,) = gradients
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden.mul_(scale), None if of_weight is None else of_weight.mul_(scale), None


def chunk_rows(rows: int, weight: Tensor) -> int:
    """Return how many rows of logits Liger computes at a time: they take about as much as the hidden states."""
    vocabulary, width = weight.shape
    return min(rows, 1 << (math.ceil(rows / math.ceil(vocabulary / width)) - 1).bit_length())


def chunked_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the next token, by `ChunkedCrossEntropy`."""
    decoder, head = decoder_of(model)
    hidden = decoder(input_ids=batch["tokens"]).last_hidden_state
    targets = nn.functional.pad(batch["tokens"][:, 1:], (0, 1), value=-100)
    mean: Tensor = ChunkedCrossEntropy.apply(hidden.flatten(0, 1), head.weight, targets.flatten())  # type: ignore[no-untyped-call]
    return mean


@contextlib.contextmanager
def checkpointed(model: Any) -> Iterator[None]:
    """Switch transformers' own checkpoints on, one for each layer."""
    own = model.get_base_model() if hasattr(model, "get_base_model") else model
    own.activation_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        own.activation_checkpointing_disable()


@contextlib.contextmanager
def in_the_host(shape: Sequence[int]) -> Iterator[None]:
    """Have what is saved of this shape wait in NumPy's memory: inputs of checkpoints have it, and nothing else saved.

    PyTorch's allocator does not hand NumPy's memory out, so that the peak measured is what a card would hold.
    Unsloth's gradient checkpointing and `torch.autograd.graph.save_on_cpu` do the same to pinned memory.
    """

    def pack(saved: Tensor) -> Any:
        if tuple(saved.shape) != tuple(shape) or not saved.is_floating_point() or isinstance(saved, nn.Parameter):
            return saved
        return saved.dtype, saved.detach().float().numpy().copy()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        dtype, values = packed
        return torch.from_numpy(values).to(dtype, copy=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@contextlib.contextmanager
def updating_in_hooks(optimizer: torch.optim.AdamW) -> Iterator[None]:
    """Update each parameter as soon as its gradient is there, and drop the gradient.

    Source: PyTorch's tutorial *How to save memory by fusing the optimizer step into the backward pass* (2023), after
    Lv et al. 2023, *Full Parameter Fine-tuning for Large Language Models with Limited Resources* (LOMO).
    """
    handles = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            single = torch.optim.AdamW([parameter], **{k: v for k, v in group.items() if k in ("lr", "weight_decay")})
            single.state = optimizer.state  # the state stays where the whole optimizer has it

            def update(updated: Tensor, single: torch.optim.AdamW = single) -> None:
                single.step()
                updated.grad = None

            handles.append(parameter.register_post_accumulate_grad_hook(update))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
