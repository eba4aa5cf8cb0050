"""Refuses workloads that memfit can't run, by name: before anything is captured, and by the loss that they return."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memfit._torch import own_parameters
from memfit.errors import WorkloadError
from memfit.workload import Workload, described, tensors_of

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def check_supported(workload: Workload) -> None:
    """Raise WorkloadError unless a workload's model and optimizer can be copied and stepped, and belong together."""
    for refused in _refused(workload):
        raise WorkloadError(refused)


def _refused(workload: Workload) -> Iterator[str]:
    for name, module in workload.model.named_modules():
        where = f"Workload.model.{name}" if name else "Workload.model"
        kind = type(module).__name__
        if isinstance(module, _WRAPPERS):
            yield (
                f"{where} is a {kind}: give the model inside, {where}.module. For several GPUs give world_size= to"
                " memfit.plan"
            )
        if isinstance(module, torch.jit.ScriptModule):
            yield (
                f"{where} is a scripted module ({kind}). Scripted modules can't run on fake tensors: give the module"
                " itself, without torch.jit.script"
            )
        lazy = [key for key, p in own_parameters(module).items() if p is not None and is_lazy(p)]
        if lazy:
            yield (
                f"{where} is a {kind}, and its parameters have no shapes yet ({', '.join(lazy)}): run one batch through"
                " the model first, and create the optimizer after that"
            )
    yield from _refused_optimizers(workload.optimizer)
    own = {id(parameter) for parameter in workload.model.parameters() if parameter.requires_grad}
    updated = {id(parameter) for group in workload.optimizer.param_groups for parameter in group["params"]}
    if own and not own & updated:  # a model without any may serve an optimizer of other tensors
        kind, model = type(workload.optimizer).__name__, type(workload.model).__name__
        yield (
            f"Workload.optimizer is the optimizer {kind} over {len(updated)} tensors, and none of them is a parameter"
            f" of Workload.model ({model}): create it from this model: {kind}(model.parameters())"
        )
    place = next((p.device for p in workload.model.parameters()), None)
    others = {t.device for t in tensors_of(workload.batch)} - {place, torch.device("cpu"), torch.device("meta")}
    if place is not None and place.type != "meta" and others:
        yield (
            f"Workload.batch is on {', '.join(sorted(map(str, others)))}, and Workload.model is on {place}: move one of"
            f" them: batch.to({str(place)!r})"
        )


def _refused_optimizers(optimizer: Any) -> Iterator[str]:
    if optimizer is None:
        return
    kind = type(optimizer).__name__
    if _needs_closure(optimizer):
        yield (
            f"Workload.optimizer is {kind}. Its step(closure) runs the forward and backward passes itself, several"
            " times; memfit runs them once a step. Give an optimizer without a closure, such as torch.optim.AdamW"
        )
    inner = [*getattr(optimizer, "optimizers", []), getattr(optimizer, "optimizer", None)]
    for held in inner:
        if isinstance(held, torch.optim.Optimizer):
            yield from _refused_optimizers(held)


def _needs_closure(optimizer: Any) -> bool:
    try:
        # The class's method: learning-rate schedulers wrap the instance's, whose signature then has `self`.
        parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    except (TypeError, ValueError):  # not written in Python
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def checked_loss(value: Any) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """Return a loss and its count."""
    is_pair = isinstance(value, tuple) and len(value) == 2
    loss, count = value if is_pair else (value, None)
    is_count = isinstance(count, int | float)
    if isinstance(count, torch.Tensor):
        is_count = count.numel() == 1 and not count.requires_grad
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or (is_pair and not is_count):
        raise WorkloadError(_wrong_loss(value))
    if not loss.requires_grad:
        raise WorkloadError(
            "Workload.loss_fn returned a loss without a gradient: compute it with the first argument of loss_fn, the"
            " model, and without .detach() or torch.no_grad()"
        )
    return loss, count.reshape(()) if isinstance(count, torch.Tensor) and count.dim() else count


def _wrong_loss(value: Any) -> str:
    if value is None:
        return "Workload.loss_fn returned None: end it with `return loss`"
    if isinstance(value, torch.Tensor):
        return (
            f"Workload.loss_fn returned a tensor of shape {tuple(value.shape)}: return one number, such as loss.mean()"
        )
    if isinstance(value, int | float):
        return f"Workload.loss_fn returned the number {value}, not a tensor: return the loss without .item()"
    if isinstance(value, Mapping) and "loss" in value:
        return f"Workload.loss_fn returned {described(value)}: return only the loss, such as output['loss']"
    if isinstance(value, tuple) and len(value) == 2:
        parts = " and ".join(described(part) for part in value)
        return (
            f"Workload.loss_fn returned {parts}: return one scalar tensor, or (sum, count): a sum with a gradient, and"
            " a count without one, its divisor"
        )
    return f"Workload.loss_fn returned {described(value)}: return one scalar tensor, or (sum, count)"
