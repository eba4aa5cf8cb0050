"""The cross entropy of the rows of logits, whose gradients are made with it, a few rows at a time.

The rows' gradients are computed as in P.-L. Hsu et al. (2025), *Liger Kernel: Efficient Triton Kernels for LLM
Training*, section 3.2 (fused linear cross entropy), with PyTorch's operators instead of a kernel. What torch 2.13 has
in `F.linear_cross_entropy` does the same; on the CPU it took twice the time (2048 rows of 256, 32768 classes), its
operators are not seen one by one, it can't smooth labels in chunks, and torch 2.11 and 2.12 have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.capture import representatives
from memfit.errors import UsageError
from memfit.levers.row_chunks import RowSet, add_to_weight, knows_values, wide
from memfit.levers.row_expressions import Index, Product


@dataclass(frozen=True, eq=False)
class RowTargets:
    """The targets of rows of logits, and how they count."""

    at: Index  # the row of each, among those of the head's input; sorted
    classes: Tensor  # [rows, 1]
    valid: Tensor  # whether each counts, [rows, 1]
    smoothing: float
    with_gradients: bool

    def pieces(self, rows: int) -> list[tuple[RowSet, RowSet]]:
        """Return the rows of each chunk, among the targets and among those of the head's input.

        Those that don't count are left out where that makes fewer chunks.
        """
        at = np.arange(len(self.valid))
        if knows_values(self.valid):
            counted = np.flatnonzero(self.valid[:, 0].cpu().numpy())
            at = counted if -(-len(counted) // rows) < -(-len(at) // rows) else at
        parts = [at[start : start + rows] for start in range(0, len(at), rows)]
        return [(RowSet(part), RowSet(self.at[part])) for part in parts]


class LossOfChunks(torch.autograd.Function):
    """The summed cross entropy of rows. Their gradients are made with it; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, product: Product, targets: RowTargets
    ) -> Tensor:
        dtype = product.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = [
                torch.zeros_like(t, dtype=wide(t.dtype))
                if targets.with_gradients and needed and t is not None
                else None
                for t, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
            ]
            ctx.gradients, ctx.dtypes = gradients, [None if t is None else t.dtype for t in (hidden, weight, bias)]
            total = torch.zeros((), dtype=wide(dtype), device=hidden.device)
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
            blocks = [hidden.shape[1]] if hidden.dim() == 3 else []
            pieces = targets.pieces(product.rows)
            for rows, of_hidden in representatives(pieces, lambda piece: (piece[0].kind(), piece[1].kind(blocks))):
                piece = of_hidden.of(hidden).to(dtype)
                found = torch.log_softmax(F.linear(piece, weight, bias), -1, dtype=total.dtype)
                total += _loss_of_rows(found, rows, targets)
                if targets.with_gradients:
                    found = _gradient_of_rows(found, rows, targets).to(dtype)
                    _add_gradients(gradients, of_hidden, found, piece, weight, rows.of(targets.valid).to(dtype))
                del found  # before the next rows' logits are made
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise UsageError(
                "the backward pass of a chunked loss ran twice, and its gradients are kept for one run only: plan"
                " without chunked_loss, or compute the loss again"
            )
        scaled = [None if g is None else g.mul_(grad).to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return *scaled, None, None


def _loss_of_rows(logs: Tensor, rows: RowSet, targets: RowTargets) -> Tensor:
    """Return the summed loss of rows from the logarithms of their probabilities."""
    target, valid, smoothing = rows.of(targets.classes), rows.of(targets.valid), targets.smoothing
    loss = -(1 - smoothing) * (logs.gather(1, target) * valid).sum()
    return loss - smoothing / logs.shape[1] * (logs.sum(1, keepdim=True) * valid).sum() if smoothing else loss


def _gradient_of_rows(logs: Tensor, rows: RowSet, targets: RowTargets) -> Tensor:
    """Return the gradient of rows' losses by their logits, in place of the logarithms of their probabilities."""
    target, smoothing = rows.of(targets.classes), targets.smoothing
    found = logs.exp_().scatter_add_(1, target, torch.full_like(target, smoothing - 1, dtype=logs.dtype))
    return found.sub_(smoothing / logs.shape[1]) if smoothing else found


def _add_gradients(
    gradients: Sequence[Tensor | None], rows: RowSet, by_logits: Tensor, piece: Tensor, weight: Tensor, valid: Tensor
) -> None:
    """Add what rows give to the gradients of input, weight and bias. Rows that are not valid give nothing."""
    by_hidden, by_weight, by_bias = gradients
    if by_hidden is not None:
        rows.put(by_hidden, (by_logits @ weight) * valid)
    if by_weight is not None:
        add_to_weight(by_weight, by_logits, piece, valid)
    if by_bias is not None:
        by_bias += (by_logits.t() @ valid).squeeze(1)
