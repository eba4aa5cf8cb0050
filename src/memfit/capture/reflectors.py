"""The backward pass of `linalg.householder_product`, run as without a dispatch mode.

There it writes the gradient of each reflector into one tensor; under a mode it makes a list of them, which it joins
(`householder_product_backward` in torch/csrc/autograd/FunctionsManual.cpp). Temporary tensors have names where C++
keeps them to the end of a statement, and Python would not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HouseholderProduct(torch.autograd.Function):
    """A product of reflectors, by PyTorch's own kernel."""

    @staticmethod
    def forward(ctx: Any, run: Any, given: Tensor, tau: Tensor) -> Tensor:
        result: Tensor = run(given)
        ctx.save_for_backward(given, tau, result)
        ctx.run = run
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given, tau, result = ctx.saved_tensors
        if torch.is_grad_enabled():  # what is differentiated again is never written to
            inputs = (given, tau) if tau.requires_grad else (given,)
            found = torch.autograd.grad(ctx.run(given), inputs, grad, create_graph=True)
            return None, found[0], found[1] if tau.requires_grad else None
        count = tau.shape[-1]
        if 0 in (given.numel(), count):
            return None, torch.zeros_like(given), torch.zeros_like(tau)
        vectors = given.tril(-1)
        vectors.diagonal(0, -2, -1).fill_(1.0)
        inverse = _inverse_factors(vectors.narrow(-1, 0, count), tau)
        inner = result.matmul(grad.mH)
        _reflect_rows(inner, vectors, inverse, 0)
        of_given, of_tau = torch.zeros_like(given), torch.zeros_like(tau)
        for k in range(count):
            of_vector, of_factor = _gradients(inner, vectors, tau, k)
            of_given.select(-1, k).copy_(of_vector)
            of_tau.select(-1, k).copy_(of_factor)
            if k + 1 < count:
                _reflect_rows(inner, vectors, inverse, k + 1)
                _reflect_columns(inner, vectors, tau, k)
            del of_vector, of_factor
        return None, of_given.tril_(-1), of_tau


def _inverse_factors(vectors: Tensor, tau: Tensor) -> Tensor:
    """Return the factors of the reflectors' inverses."""
    squared = (vectors * vectors.conj()).sum(-2)
    return tau / (tau * squared - 1.0)


def _part(values: Tensor, dim: int, k: int) -> Tensor:
    return values.narrow(dim, k, values.shape[dim] - k)


def _vector(vectors: Tensor, k: int) -> Tensor:
    """Return reflector `k`, which is 0 before its place `k`: of shape (..., m - k, 1)."""
    return _part(vectors.narrow(-1, k, 1), -2, k)


def _reflect_rows(inner: Tensor, vectors: Tensor, factors: Tensor, k: int) -> None:
    v, rows = _vector(vectors, k), _part(inner, -2, k)
    projected = v.mH.matmul(rows)
    scaled = factors.narrow(-1, k, 1).unsqueeze(-1) * v
    rows.sub_(scaled * projected)


def _reflect_columns(inner: Tensor, vectors: Tensor, factors: Tensor, k: int) -> None:
    v, columns = _vector(vectors, k), _part(inner, -1, k)
    scaled = factors.narrow(-1, k, 1).unsqueeze(-1) * v
    projected = columns.matmul(scaled)
    columns.sub_(projected * v.mH)


def _gradients(inner: Tensor, vectors: Tensor, tau: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of a reflector and of its factor."""
    v, factor = _vector(vectors, k), tau.narrow(-1, k, 1).unsqueeze(-1)
    left = v.mH.matmul(_part(inner, -2, k))
    right = _part(inner, -1, k).matmul(v)
    of_vector = (-factor * left.conj()).squeeze(-2) - (factor.conj() * right).squeeze(-1)
    of_factor = -left.narrow(-1, k, v.shape[-2]).matmul(v).conj()
    return of_vector, of_factor.flatten(-2).squeeze(-1)
