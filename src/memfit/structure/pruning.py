"""Structured pruning: removes whole channels, with everything that depends on them.

torch-pruning's dependency graph groups the channels that go together, through residual sums, concatenations,
normalisations and depthwise kernels (Fang et al. 2023, *DepGraph: Towards Any Structural Pruning*). Here the
optimizer's state is cut to the remaining channels too, and the layers of the model's outputs are found and kept.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memfit._torch import tree_leaves
from memfit.capture import nothing_changes
from memfit.errors import WorkloadError, brought_by
from memfit.structure.proposal import (
    Change,
    Pricing,
    Proposal,
    changeable_copy,
    forward_pass,
    has_data,
    matching,
    refresh_statistics,
    replace_parameters,
)
from memfit.training import evaluation_mode
from memfit.workload import Loss, Workload, slice_batch

Importance = Literal["l1", "batch-norm"]
_STEPS = 50  # most steps, each of a fiftieth of the channels, until the multiply-adds are few enough
_TIE = 1e-5
_MOST = 0.95  # largest share of a layer's channels to remove
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def prune(
    workload: Workload,
    *,
    multiply_adds: float,
    importance: Importance = "l1",
    ignored: Sequence[str] = (),
    is_global: bool = False,
    round_to: int = 1,
    rounds: int = 1,
    fine_tune: Callable[[Workload], object] | None = None,
    device: str = "cpu",
    measure: bool = False,
) -> Proposal:
    """Propose a model with fewer channels: it loses the least important ones, down to a share of its multiply-adds.

    The running statistics of BatchNorms are taken anew from the workload's batch, before any fine-tuning.

    Args:
        workload: The user's workload, with data; nothing of it is changed.
        multiply_adds: The share of the model's multiply-adds to come down to, in (0, 1).
        importance: "l1": the L1 norm of the weights that make and use a channel (Li et al. 2017, *Pruning Filters for
            Efficient ConvNets*, over coupled layers); "batch-norm": the scale that BatchNorm gives it (Liu et al.
            2017, *Network Slimming*), best after training with `batch_norm_sparsity`.
        ignored: Patterns of FQNs of layers that keep their outputs, as the layers of the model's outputs always do.
        is_global: Whether channels compete over the whole model; else each layer loses the same share, which is the
            better start where layers differ in size.
        round_to: The number of remaining channels is a multiple of this (> 0): 8 for tensor cores.
        rounds: Number of prunings (> 0), each by the same factor of multiply-adds.
        fine_tune: Called after each round with the changed workload, to train it in place.
        device: Device that both steps are predicted for.
        measure: Whether to run both steps too, on that device where it is in this machine.

    Raises:
        WorkloadError: An argument is out of its range, too little can be pruned, or parameters are tied.
        MissingExtraError: torch-pruning is not installed.
    """
    if not 0 < multiply_adds < 1:
        raise WorkloadError(f"multiply_adds={multiply_adds} is not between 0 and 1: give a share of the model's")
    if importance not in ("l1", "batch-norm"):
        raise WorkloadError(f"importance={importance!r} is unknown: use 'l1' or 'batch-norm'")
    if round_to < 1 or rounds < 1:
        raise WorkloadError(f"round_to={round_to} and rounds={rounds} must both be above 0")
    if not has_data(workload):
        raise WorkloadError("Workload.model is on meta: pruning ranks channels by their weights; load them first")
    names: dict[int, str] = {}
    for name, parameter in workload.model.named_parameters(remove_duplicate=False):
        if names.setdefault(id(parameter), name) != name:
            raise WorkloadError(
                f"{names[id(parameter)]!r} and {name!r} of Workload.model are one parameter, and its channels can't be"
                " removed in two places: untie them, or don't prune this model"
            )
    if importance == "batch-norm" and not _scales(workload.model):
        raise WorkloadError(
            "importance='batch-norm' needs BatchNorm with scales, and Workload.model has none: use 'l1'"
        )
    pricing, made = Pricing(workload, device, measure), changeable_copy(workload)
    lost = set[str]()
    for index in range(rounds):
        target = pricing.before.multiply_adds * multiply_adds ** ((index + 1) / rounds)
        lost |= _prune_to(made, int(target), importance, ignored, is_global, round_to)
        refresh_statistics(made)
        if fine_tune is not None:
            fine_tune(made)
    note = f"the optimizer's state of {len(lost)} parameters could not be pruned, and starts again from nothing"
    were, changes = dict(workload.model.named_modules()), []
    for name, module in made.model.named_modules():
        was, now = _channels(were[name]), _channels(module)
        if was != now:
            changes.append(Change(name, f"{type(module).__name__} {'→'.join(was)}: now {'→'.join(now)} channels"))
    return pricing.proposal("pruning", made, changes, [note] * bool(lost))


def batch_norm_sparsity(workload: Workload, *, strength: float = 1e-4) -> Workload:
    """Return a workload with the L1 norm of BatchNorm's scales in its loss: it pushes channels towards zero.

    Train it for a while, then prune the original with `importance="batch-norm"` (Liu et al. 2017, *Network Slimming*,
    equation 1).

    Args:
        workload: The result shares its model and optimizer: training one trains the other.
        strength: Factor of the norm (> 0).

    Raises:
        WorkloadError: `strength` is not positive, or the model has no BatchNorm with scales.
    """
    if strength <= 0:
        raise WorkloadError(f"strength={strength} is not above 0")
    if not _scales(workload.model):
        raise WorkloadError(
            "batch_norm_sparsity needs BatchNorm with scales (affine=True), and Workload.model has none"
        )
    return dataclasses.replace(workload, loss_fn=_SparseLoss(workload.loss_fn, strength))


@dataclass(frozen=True)
class _SparseLoss:
    loss_fn: Callable[[nn.Module, Any], Loss]
    strength: float

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        loss = self.loss_fn(model, batch)
        penalty = self.strength * torch.stack([scale.abs().sum() for scale in _scales(model)]).sum()
        return (loss[0] + penalty * loss[1], loss[1]) if isinstance(loss, tuple) else loss + penalty


def _scales(model: nn.Module) -> list[Tensor]:
    return [m.weight for m in model.modules() if isinstance(m, _BATCH_NORMS) and m.affine]


def _prune_to(
    made: Workload, multiply_adds: int, importance: Importance, ignored: Sequence[str], is_global: bool, round_to: int
) -> set[str]:
    """Prune a workload in place, its optimizer included; return the parameters whose optimizer state is lost."""
    tp, model = _torch_pruning(), made.model
    original, old = copy.deepcopy(model), dict(model.named_parameters())
    named = {name: m for name, m in model.named_modules() if name}
    kept = [named[name] for name in matching(list(named), ignored, "ignored", "module")]
    for group in _graph(tp, made).get_all_groups():
        if any(dependency.target.type == tp.ops.OPTYPE.OUTPUT for dependency, _ in group):
            kept.append(group[0].dep.target.module)
    with _tracing(made):
        pruner = tp.pruner.BasePruner(
            model,
            made,
            _importance(tp, importance),
            global_pruning=is_global,
            pruning_ratio=1.0,
            max_pruning_ratio=_MOST,
            iterative_steps=_STEPS,
            ignored_layers=kept,
            round_to=round_to,
            forward_fn=_outputs,
            in_channel_groups={},
            out_channel_groups={},
        )
    while (remaining := forward_pass(made).multiply_adds) > multiply_adds:
        if pruner.current_step == _STEPS:
            raise WorkloadError(
                f"multiply_adds can't be reached: without all removable channels, {remaining:,} per sample remain, and"
                f" {multiply_adds:,} are requested. Raise multiply_adds, or give fewer modules in ignored"
            )
        pruner.step()
    graph = _graph(tp, dataclasses.replace(made, model=original))  # the same on a model that holds its own indices
    for parameter in original.parameters():
        parameter.data = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
    graph.load_pruning_history(pruner.pruning_history())
    return _carry(made, old, {name: parameter.detach().long() for name, parameter in original.named_parameters()})


def _importance(tp: Any, kind: Importance) -> Callable[[Any], Tensor | None]:
    """Return a function that rates the channels of a group by importance, with a mean of 1 over the group."""
    is_l1 = kind == "l1"
    rate = tp.importance.GroupMagnitudeImportance(p=1, normalizer=None) if is_l1 else tp.importance.BNScaleImportance()

    def importance(group: Any) -> Tensor | None:
        scores: Tensor | None = rate(group)
        if scores is None:
            return None
        scores = scores[: len(group[0].idxs)]  # longer where a concatenation follows a depthwise convolution
        # The order breaks ties, which else would all go at once.
        order = torch.linspace(0, _TIE, len(scores), device=scores.device)
        return scores / scores.mean().clamp(min=torch.finfo(scores.dtype).tiny) + order

    return importance


def _graph(tp: Any, workload: Workload) -> Any:
    """Return the dependency graph of a workload's model."""
    with _tracing(workload):
        return tp.DependencyGraph().build_dependency(workload.model, workload, forward_fn=_outputs, verbose=False)


def _outputs(model: nn.Module, workload: Workload) -> list[Tensor]:
    """Return the model's outputs for two samples, each tensor with a node of its own at the end of its graph."""
    seen: list[Any] = []
    with model.register_forward_hook(lambda module, args, output: seen.append(output)):
        workload.loss_fn(model, slice_batch(workload.batch, 0, 2))
    tensors = [t for t in tree_leaves(seen) if isinstance(t, Tensor) and t.requires_grad]
    if not tensors:
        raise WorkloadError(
            "Workload.loss_fn does not call its first argument, the model: pruning follows the layers in that call"
        )
    return [tensor * 1 for tensor in tensors]


@contextlib.contextmanager
def _tracing(workload: Workload) -> Iterator[None]:
    """Let torch-pruning trace a model in evaluation mode, and restore everything afterwards."""
    with nothing_changes(workload), evaluation_mode(workload.model), torch.enable_grad():
        yield


def _carry(made: Workload, old: Mapping[str, nn.Parameter], indices: Mapping[str, Tensor]) -> set[str]:
    """Put the pruned parameters into the optimizer, with its state cut alike; return those whose state is lost.

    Args:
        indices: The flat positions of a pruned parameter's elements in the original one.
    """
    replaced: dict[Tensor, list[Tensor]] = {}
    states: dict[Tensor, dict[str, Any]] = {}
    lost = set()
    for name, new in made.model.named_parameters():
        original = old[name]
        if new is original:
            continue
        new.requires_grad_(original.requires_grad)
        replaced[original] = [new]
        where = indices[name].to(original.device)
        if not torch.equal(original.detach().flatten()[where], new.detach()):
            raise WorkloadError(
                f"{name!r} can't be pruned: torch-pruning would change its values too; add its layer to ignored"
            )
        state = made.optimizer.state.get(original, {})
        whole = {key for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
        if all(state[key].shape == original.shape for key in whole):
            states[new] = {key: value.flatten()[where] if key in whole else value for key, value in state.items()}
        else:
            lost.add(name)
    replace_parameters(made, replaced, {new: state for new, state in states.items() if state})
    return lost


def _channels(module: nn.Module) -> list[str]:
    """Return a layer's numbers of inputs and outputs; nothing of other modules."""
    for names in (("in_channels", "out_channels"), ("in_features", "out_features")):
        if all(isinstance(getattr(module, name, None), int) for name in names):
            return [str(getattr(module, name)) for name in names]
    return []


def _torch_pruning() -> Any:
    with brought_by("structure", "structure.prune"):
        return importlib.import_module("torch_pruning")
