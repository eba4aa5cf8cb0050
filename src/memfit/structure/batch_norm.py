"""BatchNorm frozen, or replaced by GroupNorm, so that microbatches can be used.

BatchNorm normalises by the statistics of the batch that it is given, so that microbatches train another model than the
whole batch does. Both functions change the model once and are of class `changed`; microbatches are of class
`reordered` afterwards. `numerics="changed"` in `memfit.plan` allows microbatches with an unchanged BatchNorm.
"""

from __future__ import annotations

from torch import nn

from memfit._torch import BatchNormBase
from memfit.errors import WorkloadError
from memfit.structure.proposal import replace_module


class _Frozen(BatchNormBase):
    """A BatchNorm that normalises by its running statistics, whatever mode the model is put in."""

    def train(self, mode: bool = True) -> _Frozen:
        super().train(False)
        return self


class FrozenBatchNorm1d(_Frozen, nn.BatchNorm1d): ...


class FrozenBatchNorm2d(_Frozen, nn.BatchNorm2d): ...


class FrozenBatchNorm3d(_Frozen, nn.BatchNorm3d): ...


_FROZEN: dict[type[nn.Module], type[_Frozen]] = {
    nn.BatchNorm1d: FrozenBatchNorm1d,
    nn.BatchNorm2d: FrozenBatchNorm2d,
    nn.BatchNorm3d: FrozenBatchNorm3d,
}


def freeze_batch_norm(model: nn.Module) -> list[str]:
    """Freeze every BatchNorm of a model: in training too it then uses its running statistics.

    Use it on trained models: fresh statistics are means of 0 and variances of 1. Weights and biases are trained
    further; parameters, buffers, hooks and names stay as they are.

    Args:
        model: The model, changed in place. Plan after this call, not before.

    Returns:
        The FQNs of the frozen BatchNorms.

    Raises:
        WorkloadError: A BatchNorm keeps no running statistics, or is of an unknown class.
    """
    batch_norms = _batch_norms(model)
    for name, module in batch_norms.items():
        if module.running_mean is None or type(module) not in _FROZEN:
            raise WorkloadError(
                f"{name!r} is a {type(module).__name__} with track_running_stats={module.track_running_stats}: only"
                " nn.BatchNorm1d, 2d and 3d with running statistics can be frozen; use group_norm_for_batch_norm"
            )
    for module in {id(m): m for m in batch_norms.values()}.values():
        module.__class__ = _FROZEN[type(module)]
        module.train()
    return list(batch_norms)


def group_norm_for_batch_norm(model: nn.Module, *, groups: int = 32) -> list[str]:
    """Replace every BatchNorm of a model by a GroupNorm (Wu and He 2018, *Group Normalization*).

    Each sample is then normalised by itself. The weights and biases are the same parameters as before, so that an
    optimizer made earlier goes on with them; a trained model has to be trained further.

    Args:
        model: The model, changed in place. Plan after this call, not before.
        groups: Number of groups of channels (> 0); where it does not divide the channels, the next lower number that
            does. A group has at least two channels.

    Returns:
        The FQNs of the replaced BatchNorms.

    Raises:
        WorkloadError: `groups` is not above 0, or the model is a BatchNorm itself.
    """
    if groups < 1:
        raise WorkloadError(f"groups={groups} is not above 0: give the number of groups of channels")
    batch_norms = _batch_norms(model)
    if "" in batch_norms:
        raise WorkloadError("the model is a BatchNorm itself, and can't be replaced in place: put it in a module")
    for module in {id(m): m for m in batch_norms.values()}.values():
        channels = module.num_features
        most = min(groups, max(channels // 2, 1))
        count = next(g for g in range(most, 0, -1) if channels % g == 0)
        norm = nn.GroupNorm(count, channels, eps=module.eps, affine=False)
        norm.affine = module.affine
        norm.weight, norm.bias = module.weight, module.bias
        norm.training = module.training
        replace_module(model, module, norm)
    return list(batch_norms)


def _batch_norms(model: nn.Module) -> dict[str, BatchNormBase]:
    """Return the BatchNorms that are not frozen, by FQN; a module with two names appears under both."""
    named = model.named_modules(remove_duplicate=False)
    return {name: m for name, m in named if isinstance(m, BatchNormBase) and not isinstance(m, _Frozen)}
