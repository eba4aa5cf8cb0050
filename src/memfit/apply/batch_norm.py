"""BatchNorm out of the way of microbatches: frozen, or GroupNorm in its place.

BatchNorm normalises by the statistics of the batch that it is given, so that microbatches train another model than the
whole batch does. Both ways around it change the model, once and openly, and are of class `changed`; afterwards
microbatches are of class `reordered`. `numerics="changed"` in `memfit.plan` allows microbatches with BatchNorm as it
is.
"""

from __future__ import annotations

from torch import nn

from memfit.errors import WorkloadError


class _Frozen(nn.modules.batchnorm._BatchNorm):
    """Stays in evaluation mode, whatever mode the model is put in."""

    def train(self, mode: bool = True) -> _Frozen:
        super().train(False)
        return self


class FrozenBatchNorm1d(_Frozen, nn.BatchNorm1d):
    """`nn.BatchNorm1d` that normalises by its running statistics, in training too."""


class FrozenBatchNorm2d(_Frozen, nn.BatchNorm2d):
    """`nn.BatchNorm2d` that normalises by its running statistics, in training too."""


class FrozenBatchNorm3d(_Frozen, nn.BatchNorm3d):
    """`nn.BatchNorm3d` that normalises by its running statistics, in training too."""


_FROZEN: dict[type[nn.Module], type[_Frozen]] = {
    nn.BatchNorm1d: FrozenBatchNorm1d,
    nn.BatchNorm2d: FrozenBatchNorm2d,
    nn.BatchNorm3d: FrozenBatchNorm3d,
}


def freeze_batch_norm(model: nn.Module) -> list[str]:
    """Have every BatchNorm of a model normalise by its running statistics from now on, in training too.

    For models that were trained before: fresh statistics are means of 0 and variances of 1. Weights and biases go on
    being trained; parameters, buffers, hooks and names stay as they are.

    Args:
        model: Changed in place. Plan after, not before.

    Returns:
        The FQNs of what was frozen.

    Raises:
        WorkloadError: A BatchNorm keeps no running statistics, or is of a kind that is not known.
    """
    found = _batch_norms(model)
    for name, module in found.items():
        if module.running_mean is None or type(module) not in _FROZEN:
            raise WorkloadError(
                f"{name!r} is a {type(module).__name__} with track_running_stats={module.track_running_stats}: only"
                " nn.BatchNorm1d, 2d and 3d with running statistics can be frozen; see group_norm_for_batch_norm"
            )
    for module in {id(m): m for m in found.values()}.values():
        module.__class__ = _FROZEN[type(module)]
        module.train()
    return list(found)


def group_norm_for_batch_norm(model: nn.Module, *, groups: int = 32) -> list[str]:
    """Put a GroupNorm in the place of every BatchNorm of a model (Wu and He 2018, *Group Normalization*).

    Each sample is then normalised by itself. The weights and biases are the same parameters as before, so that an
    optimizer made earlier goes on with them; a trained model has to be trained further.

    Args:
        model: Changed in place. Plan after, not before.
        groups: Of channels (> 0); where they don't divide the channels, the next lower number that does. A group has
            two channels at least.

    Returns:
        The FQNs of what was replaced.

    Raises:
        WorkloadError: `groups` is not above 0, or the model is a BatchNorm itself.
    """
    if groups < 1:
        raise WorkloadError(f"groups={groups} is not above 0: give how many groups the channels are cut into")
    found = _batch_norms(model)
    if "" in found:
        raise WorkloadError("the model is a BatchNorm itself, which can't be replaced in place: put it in a module")
    made = {id(module): _group_norm(module, groups) for module in found.values()}
    for name, module in found.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made[id(module)])
    return list(found)


def _group_norm(module: nn.modules.batchnorm._BatchNorm, groups: int) -> nn.GroupNorm:
    channels = module.num_features
    most = min(groups, max(channels // 2, 1))
    count = next(g for g in range(most, 0, -1) if channels % g == 0)
    norm = nn.GroupNorm(count, channels, eps=module.eps, affine=False)
    norm.affine = module.affine
    norm.weight, norm.bias = module.weight, module.bias
    norm.training = module.training
    return norm


def _batch_norms(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """Return what is not frozen; a module with two names has both."""
    kind = nn.modules.batchnorm._BatchNorm
    named = model.named_modules(remove_duplicate=False)
    return {name: m for name, m in named if isinstance(m, kind) and not isinstance(m, _Frozen)}
