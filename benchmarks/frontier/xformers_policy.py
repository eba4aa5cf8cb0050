"""xFormers' `memory_budget`: for each block, which operators to keep within a fraction of what they make.

As it comes it runs on CUDA only, with torch below 2.12: that is tried everywhere, and what it says is kept. On the CPU
its program is also given operators that were timed there, and what it decides is applied with PyTorch's own selective
contexts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.frontier.checkpointing import Contexts, Replaced, checkpointing, holding
from benchmarks.frontier.methods import Method, Prepared, Task, Unsupported, stepping
from benchmarks.frontier.selective import contexts_of
from memfit.workload import Workload

FRACTIONS = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.0)
_RUNS = 3

Profile = list[Any]
"""What xFormers knows of each operator of a block."""


def _checkpoint_module() -> Any:
    """Return xFormers' module of checkpoints, whose name a function of the package has too.

    Raises:
        Unsupported: It can't be imported.
    """
    try:
        return importlib.import_module("xformers.checkpoint")
    except ImportError as e:
        raise Unsupported(f"xFormers can't be imported ({type(e).__name__}: {e}): pip install xformers") from e


def _as_it_comes(task: Task, checkpoint: Any, fraction: float) -> Prepared:
    """Wrap each block in xFormers' own module, which profiles the block when it is first called."""
    made: dict[nn.Module, Replaced] = {}

    @contextlib.contextmanager
    def wrapped(workload: Workload) -> Iterator[None]:
        model = workload.model
        if model not in made:
            made[model] = wrappers(
                model,
                task.subject.blocks,
                functools.partial(checkpoint.selective_checkpoint_wrapper, memory_budget=fraction),
            )
        with holding(made[model]):
            yield

    return Prepared(stepping(wrapped))


def wrappers(model: nn.Module, blocks: Sequence[str], wrap: Any) -> Replaced:
    """Return the children of the modules that hold blocks, with the wrapped blocks in their place."""
    found: dict[nn.Module, dict[str, nn.Module]] = {}
    for fqn in blocks:
        parent, _, name = fqn.rpartition(".")
        holder = model.get_submodule(parent)
        children = found.setdefault(holder, dict(holder.named_children()))
        children[name] = wrap(children[name])
    return found


def study(task: Task) -> dict[str, Profile]:
    """Profile every block on the inputs that it gets in a step, as xFormers' wrapper does in its first call."""
    _checkpoint_module()
    copied = task.copied()
    found: dict[str, Profile] = {}
    handles = []

    def hook(fqn: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        if fqn not in found:
            found[fqn] = []  # the profiled call comes through this hook again
            with torch.random.fork_rng(devices=[]):
                found[fqn] = _profile(functools.partial(block, *args, **kwargs))

    for fqn in task.subject.blocks:
        block = copied.model.get_submodule(fqn)
        handles.append(block.register_forward_pre_hook(functools.partial(hook, fqn), with_kwargs=True))
    copied.loss_fn(copied.model, copied.batch)
    return found


def _profile(call: Any) -> Profile:
    from xformers.checkpoint import ProfileMetadata, ProfileOperatorsTorchDispatchMode, is_inplace_view_fn, is_view_fn

    class OnCPU(ProfileOperatorsTorchDispatchMode):  # type: ignore[misc]
        """xFormers' profiler with the CPU's clock, and with the bytes of an operator's outputs."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            out = func(*args, **kwargs)
            index, output_ids, in_place = self._get_inplace_metadata(func, out)
            is_view = is_view_fn(func) or is_inplace_view_fn(func)
            tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            nbytes = 0 if is_view or in_place else sum(t.untyped_storage().nbytes() for t in tensors)
            random = torch.Tag.nondeterministic_seeded in func.tags
            seconds = 0.0 if in_place else _seconds(func, args, kwargs)
            self.data.append(ProfileMetadata(func, seconds, nbytes, index, output_ids, in_place, is_view, random))
            return out

    mode = OnCPU(_RUNS)
    with mode:
        call()  # with gradients: it knows tensors by their addresses, which must not be used again
    found: Profile = mode.data
    return found


def _seconds(func: Any, args: Any, kwargs: Any) -> float:
    started = time.perf_counter()
    for _ in range(_RUNS):
        func(*args, **kwargs)
    return (time.perf_counter() - started) / _RUNS


def _make(task: Task, profiles: dict[str, Profile], fraction: float) -> Prepared:
    regions = {fqn: _contexts(profile, fraction) for fqn, profile in profiles.items()}
    return Prepared(stepping(lambda workload: checkpointing(workload.model, regions)))


def _contexts(profile: Profile, fraction: float) -> Contexts:
    """Return contexts that keep what xFormers decides, which counts the operators that it does not skip."""
    checkpoint = _checkpoint_module()
    with mock.patch.object(checkpoint, "_analyze_operators", return_value=profile):
        # a tensor among the arguments says that random operators may be recomputed
        policy = checkpoint.get_optimal_checkpoint_policy(None, torch.empty(0), memory_budget=fraction)
    kept = {index for index, chosen in enumerate(policy.optim_output) if round(chosen) == 1}
    skipped = checkpoint.OPS_TO_ALWAYS_SKIP
    return contexts_of(lambda index, func: index in kept, lambda func: func not in skipped, mutation=True)


def _given_times(task: Task) -> Sequence[float]:
    """Return the fractions to try with times of the CPU, which are of use there only."""
    return FRACTIONS if task.place.type == "cpu" else ()


XFORMERS = (
    Method("xFormers as it comes", "eager", lambda task: FRACTIONS, _as_it_comes, lambda task: _checkpoint_module()),
    Method("xFormers' policy, memory_budget", "eager", _given_times, _make, study),
)
