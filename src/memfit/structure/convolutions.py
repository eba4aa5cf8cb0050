"""Depthwise-separable and grouped convolutions in the place of full ones, initialised from their weights.

A full convolution has a kernel for each pair of an output and an input channel. A depthwise-separable one
(Howard et al. 2017, *MobileNets*) has `rank` kernels for each input channel, and a 1×1 convolution that mixes their
outputs. Its weights follow from the original's: for each input channel i the matrix W[:, i, :], outputs by kernel
elements, is cut to its first `rank` singular vectors, the closest approximation by as many kernels (Eckart
and Young 1936; Jaderberg et al. 2014, *Speeding up Convolutional Neural Networks with Low Rank Expansions*). The
1×1 convolutions are then fitted to a batch by least squares, one layer after the other, from the outputs of the layers
replaced before to the original's outputs (Zhang et al. 2016, *Accelerating Very Deep Convolutional
Networks*, section 3.3, without its non-linearity).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from memfit._torch import forward_hooks, forward_pre_hooks
from memfit.errors import WorkloadError
from memfit.structure.proposal import (
    Change,
    Pricing,
    Proposal,
    changeable_copy,
    forward_pass,
    has_data,
    matching,
    refresh_statistics,
    replace_module,
    replace_parameters,
)
from memfit.training import evaluation_mode
from memfit.workload import Workload, samples_of

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Order = Literal["bytes", "multiply-adds"]
_KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)  # not their subclasses, whose forward may differ
_RIDGE = 1e-4  # of the mean square of the features: how strongly a fit stays with the weights' own decomposition


def separable_convolutions(
    workload: Workload,
    *,
    modules: Sequence[str] = ("*",),
    rank: int = 1,
    multiply_adds: float | None = None,
    by: Order = "multiply-adds",
    fit: Literal["weights", "batch"] = "batch",
    device: str = "cpu",
    measure: bool = False,
) -> Proposal:
    """Propose to replace full convolutions by depthwise-separable ones, initialised from their weights.

    Convolutions that would not take fewer multiply-adds stay: 1×1 kernels, and few outputs. Stride, padding,
    dilation, padding mode, groups, bias (the same parameter) and FQN stay; the weight becomes `depthwise.weight` and
    `pointwise.weight` below it.

    Args:
        workload: The user's workload; nothing of it is changed.
        modules: Patterns of FQNs ("down.*.conv") among which convolutions are replaced.
        rank: Kernels for each input channel (> 0).
        multiply_adds: The share of the model's multiply-adds to come down to, in (0, 1): convolutions are replaced,
            in the order of `by`, until it is reached. None replaces all.
        by: The order: "multiply-adds" starts with the convolutions that save most of them; "bytes" with those that add
            the fewest bytes of activations for each parameter saved, and so save the most bytes at the peak: a
            parameter with its gradient and optimizer state takes the same bytes in every layer.
        fit: "weights" takes the weights' decomposition; "batch" then fits the 1×1 convolutions to the workload's
            batch, in evaluation mode, for a much better start.
        device: Device that both steps are predicted for.
        measure: Whether to run both steps too, on that device where it is in this machine: depthwise kernels are slow
            on some back ends.

    Raises:
        WorkloadError: An argument is out of its range, a pattern matches no convolution, nothing can be replaced, or
            not enough for `multiply_adds`.
    """
    if rank < 1:
        raise WorkloadError(f"rank={rank} is not above 0: give the number of kernels for each input channel")
    if fit not in ("weights", "batch"):
        raise WorkloadError(f"fit={fit!r} is unknown: use 'weights' or 'batch'")
    if fit == "batch" and not has_data(workload):
        raise WorkloadError("fit='batch' needs a model with data, and Workload.model is on meta: use fit='weights'")

    def fit_to_batch(made: Workload, replaced: Mapping[str, nn.Module]) -> None:
        """Fit the pointwise weights, in call order, so that each layer's output on the batch nears the original's."""
        with evaluation_mode(workload.model), evaluation_mode(made.model):
            for name, new in replaced.items():
                targets = _seen(workload, workload.model.get_submodule(name), outputs=True)
                inputs = _seen(made, new, outputs=False)
                _fit(cast(SeparableConv, new), inputs, targets)

    make, finish = functools.partial(SeparableConv, rank=rank), fit_to_batch if fit == "batch" else None
    return _proposed("separable", workload, make, finish, _Selection(modules, multiply_adds, by), device, measure)


def grouped_convolutions(
    workload: Workload,
    *,
    groups: int,
    modules: Sequence[str] = ("*",),
    multiply_adds: float | None = None,
    by: Order = "multiply-adds",
    device: str = "cpu",
    measure: bool = False,
) -> Proposal:
    """Propose to replace full convolutions by grouped ones: each group of outputs sees one group of inputs.

    Weights within the groups are the original's, the least-squares solution for inputs of equal variance without
    correlation. Weights across groups are dropped: only later layers mix the groups. The running statistics of
    BatchNorms are taken anew from the workload's batch.

    Args:
        workload: The user's workload; nothing of it is changed.
        groups: Number of groups of channels (> 1); convolutions with channels that it does not divide stay.
        modules: Patterns of FQNs; see `separable_convolutions` for this and the other arguments.

    Raises:
        WorkloadError: As in `separable_convolutions`.
    """
    if groups < 2:
        raise WorkloadError(f"groups={groups} is not above 1: give the number of groups of channels")

    def refresh(made: Workload, _: Mapping[str, nn.Module]) -> None:
        if has_data(made):
            refresh_statistics(made)

    make = functools.partial(_grouped, groups=groups)
    return _proposed("grouped", workload, make, refresh, _Selection(modules, multiply_adds, by), device, measure)


class SeparableConv(nn.Sequential):
    """A depthwise-separable convolution: `rank` kernels for each input channel, and a 1×1 convolution of their outputs.

    Args:
        old: The full convolution; its weights are decomposed, its bias is taken over.
    """

    depthwise: Convolution
    pointwise: Convolution

    def __init__(self, old: Convolution, rank: int) -> None:
        super().__init__()
        self.depthwise = _like(old, old.in_channels, old.in_channels * rank, old.in_channels)
        self.pointwise = _like(old, old.in_channels * rank, old.out_channels, old.groups, is_pointwise=True)
        depthwise, pointwise = separated(old.weight.detach(), old.groups, rank)
        self.depthwise.weight = nn.Parameter(depthwise, old.weight.requires_grad)
        self.pointwise.weight = nn.Parameter(pointwise, old.weight.requires_grad)
        self.pointwise.bias = old.bias
        self.train(old.training)


def separated(weight: Tensor, groups: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return depthwise and pointwise weights whose product comes closest to a full convolution's.

    Args:
        weight: Weight of the full convolution, [out, in / groups, *kernel].
        rank: Kernels for each input channel (> 0); those beyond the number of kernel elements are zero.

    Returns:
        The depthwise weight [in · rank, 1, *kernel] and the pointwise one [out, in / groups · rank, 1, ...].
    """
    n_out, n_in, kernel = weight.shape[0] // groups, weight.shape[1], weight.shape[2:]
    by_input = weight.reshape(groups, n_out, n_in, -1).transpose(1, 2).double()  # [groups, in, out, elements]
    u, s, v = torch.linalg.svd(by_input, full_matrices=False)
    taken = min(rank, s.shape[-1])
    scale = s[..., :taken].sqrt()  # shared between both factors, so that their gradients are of a size
    mixing = by_input.new_zeros(groups, n_in, n_out, rank)
    kernels = by_input.new_zeros(groups, n_in, rank, by_input.shape[-1])
    mixing[..., :taken] = u[..., :taken] * scale[..., None, :]
    kernels[:, :, :taken] = v[..., :taken, :] * scale[..., None]
    pointwise = mixing.transpose(1, 2).reshape(groups * n_out, n_in * rank, *(1 for _ in kernel))
    depthwise = kernels.reshape(groups * n_in * rank, 1, *kernel)
    return depthwise.to(weight.dtype), pointwise.to(weight.dtype)


def _grouped(old: Convolution, groups: int) -> Convolution | None:
    """Return a convolution with `groups` times as many groups, or None where they don't divide the channels."""
    total = groups * old.groups
    if old.in_channels % total or old.out_channels % total:
        return None
    new = _like(old, old.in_channels, old.out_channels, total)
    n_in, n_out = old.in_channels // total, old.out_channels // total
    parts = old.weight.detach().reshape(old.groups, groups, n_out, groups, n_in, *old.weight.shape[2:])
    own = torch.stack([parts[:, index, :, index] for index in range(groups)], dim=1)
    new.weight = nn.Parameter(own.reshape(old.out_channels, n_in, *old.weight.shape[2:]), old.weight.requires_grad)
    new.bias = old.bias
    return new.train(old.training)


def _like(
    old: Convolution, in_channels: int, out_channels: int, groups: int, is_pointwise: bool = False
) -> Convolution:
    """Return a convolution without bias and data, with the geometry of `old`, or of kernel size 1 and stride 1."""
    names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    geometry: dict[str, Any] = {"kernel_size": 1} if is_pointwise else {name: getattr(old, name) for name in names}
    kind: Callable[..., Convolution] = type(old)
    return kind(in_channels, out_channels, groups=groups, bias=False, device="meta", **geometry)


@dataclass(frozen=True)
class _Candidate:
    """A convolution and its replacement, with the parameters and multiply-adds saved and the activation bytes added."""

    old: Convolution
    new: nn.Module
    parameters: int
    multiply_adds: int  # of one sample
    added_bytes: int


def _candidates(
    copied: Workload, make: Callable[[Any], nn.Module | None], patterns: Sequence[str]
) -> dict[str, _Candidate]:
    """Return the convolutions whose replacement saves multiply-adds, by FQN in call order."""
    outputs = forward_pass(copied).outputs
    named = {name: m for name, m in copied.model.named_modules() if isinstance(m, _KINDS) and name}
    samples, candidates = samples_of(copied), {}
    wanted = set(matching(list(named), patterns, "modules", "convolution"))
    for name in (name for name in outputs if name in wanted):
        old = named[name]
        if type(old) not in _KINDS or old.groups == old.in_channels > 1 or forward_hooks(old) or forward_pre_hooks(old):
            continue
        new = make(old)
        if new is None:
            continue
        places = sum(math.prod(shape[2:]) * shape[0] for shape in outputs[name]) // samples
        parts = [m for m in new.modules() if isinstance(m, _KINDS)]
        saved = old.weight.numel() - sum(part.weight.numel() for part in parts)
        added = sum(part.out_channels for part in parts[:-1]) * places * samples * old.weight.itemsize
        if saved > 0:
            candidates[name] = _Candidate(old, new, saved, saved * places, added)
    return candidates


@dataclass(frozen=True)
class _Selection:
    """The convolutions among which some are replaced, the share of the multiply-adds to come down to, and the order."""

    patterns: Sequence[str]
    share: float | None
    by: Order

    def check(self) -> None:
        if self.share is not None and not 0 < self.share < 1:
            raise WorkloadError(f"multiply_adds={self.share} is not between 0 and 1: give a share of the model's")
        if self.by not in ("bytes", "multiply-adds"):
            raise WorkloadError(f"by={self.by!r} is unknown: use 'bytes' or 'multiply-adds'")

    def worth(self, one: _Candidate) -> float:
        return one.multiply_adds if self.by == "multiply-adds" else -one.added_bytes / one.parameters

    def chosen(self, candidates: dict[str, _Candidate], total: int) -> dict[str, _Candidate]:
        """Return the best candidates, until the model is down to the share of its total of multiply-adds."""
        if self.share is None:
            return candidates
        remaining, taken = float(total), set()
        for name in sorted(candidates, key=lambda name: self.worth(candidates[name]), reverse=True):
            if remaining <= self.share * total:
                break
            remaining -= candidates[name].multiply_adds
            taken.add(name)
        if remaining > self.share * total:
            raise WorkloadError(
                f"multiply_adds={self.share} can't be reached: with all {len(candidates)} replaceable convolutions"
                f" replaced, {remaining / total:.3f} of the model's multiply-adds remain. Raise multiply_adds, lower"
                " rank, or match more layers in modules"
            )
        return {name: candidate for name, candidate in candidates.items() if name in taken}


def _proposed(
    kind: str,
    workload: Workload,
    make: Callable[[Any], nn.Module | None],
    finish: Callable[[Workload, Mapping[str, nn.Module]], None] | None,
    selection: _Selection,
    device: str,
    measure: bool,
) -> Proposal:
    """Propose a copy with convolutions replaced: `finish` gets it, and the new modules by FQN in call order."""
    selection.check()
    pricing, copied = Pricing(workload, device, measure), changeable_copy(workload)
    candidates = _candidates(copied, make, selection.patterns)
    if not candidates:
        raise WorkloadError(
            f"modules={tuple(selection.patterns)} has no convolution that would need fewer multiply-adds: memfit does"
            " not change 1×1 kernels, depthwise convolutions, subclasses of nn.Conv1d, 2d and 3d, and convolutions with"
            " hooks"
        )
    chosen = selection.chosen(candidates, pricing.before.multiply_adds)
    for candidate in chosen.values():
        replace_module(copied.model, candidate.old, candidate.new)
    remaining = set(copied.model.parameters())
    replacements: dict[Tensor, list[Tensor]] = {}
    changes = []
    for name, candidate in chosen.items():
        old, new = candidate.old, candidate.new
        own = replacements.setdefault(old.weight, [old.weight] if old.weight in remaining else [])  # other modules' too
        own += [parameter for parameter in new.parameters() if parameter is not old.bias]
        size = "×".join(map(str, old.kernel_size))
        if isinstance(new, SeparableConv):
            rank = new.depthwise.out_channels // old.in_channels
            what = f"{rank} kernel{'s' * (rank > 1)} per input, then 1×1"
        else:
            what = f"{new.groups} groups"
        what = f"{type(old).__name__} {old.in_channels}→{old.out_channels}, {size}: {what}"
        changes.append(Change(name, f"{what}; {candidate.parameters:,} fewer parameters"))
    replace_parameters(copied, replacements)
    if finish is not None:
        finish(copied, {name: candidate.new for name, candidate in chosen.items()})
    return pricing.proposal(f"{kind} convolutions", copied, changes)


def _seen(workload: Workload, module: nn.Module, *, outputs: bool) -> list[Tensor]:
    """Return the inputs of a module in a forward pass, or its outputs, a tensor for each call."""
    tensors: list[Tensor] = []
    with module.register_forward_hook(lambda module, args, out: tensors.append(out if outputs else args[0])):
        workload.loss_fn(workload.model, workload.batch)
    return tensors


def _fit(conv: SeparableConv, inputs: list[Tensor], targets: list[Tensor]) -> None:
    """Set the pointwise weight and bias by ridge regression to the targets, with their present values as prior."""
    pointwise, bias, groups = conv.pointwise, conv.pointwise.bias, conv.pointwise.groups
    before = pointwise.weight.detach().reshape(groups, pointwise.out_channels // groups, -1).double()
    if bias is not None:
        before = torch.cat([before, bias.detach().double().reshape(groups, -1, 1)], dim=2)
    gram: Tensor | float = 0.0
    products: Tensor | float = 0.0
    for given, target in zip(inputs, targets, strict=True):
        x, y = (_by_group(t, groups) for t in (conv.depthwise(given), target))
        if bias is not None:
            x = torch.cat([x, x.new_ones(groups, 1, x.shape[2])], dim=1)
        gram, products = gram + x @ x.mT, products + y @ x.mT
    assert isinstance(gram, Tensor)
    ridge = _RIDGE * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(gram.shape[1]).to(gram)
    fitted = torch.linalg.solve(gram + ridge, (products + before @ ridge).mT).mT
    weight = fitted if bias is None else fitted[..., :-1]
    pointwise.weight.copy_(weight.reshape(pointwise.weight.shape))
    if bias is not None:
        bias.copy_(fitted[..., -1].flatten())


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Return [batch, channels, ...] as float64 [groups, channels of the group, places of the batch]."""
    return x.double().transpose(0, 1).reshape(groups, x.shape[1] // groups, -1)
