"""xFormers' `memory_budget`: for each block, which operators to keep within a fraction of what they make.

As it comes it runs on CUDA only, with torch below 2.12: that is tried first and what it says is kept. Then its program
is given operators that were timed on this CPU, and what it decides is applied with PyTorch's own selective contexts.
"""

from __future__ import annotations

import functools
import importlib
import time
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.frontier.checkpointing import Contexts, checkpointing
from benchmarks.frontier.methods import Method, Prepared, Task, stepping
from benchmarks.frontier.selective import contexts_of
from memfit.capture.fake_workload import real_copy

FRACTIONS = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.0)
_RUNS = 3

Profile = list[Any]
"""What xFormers knows of each operator of a block."""


def _as_it_comes(task: Task, studied: None, setting: str) -> Prepared:
    """Wrap each block in xFormers' own module, and run it once."""
    from xformers.checkpoint import selective_checkpoint_wrapper

    copied = real_copy(task.workload)
    for fqn in task.subject.blocks:
        parent, _, name = fqn.rpartition(".")
        holder = copied.model.get_submodule(parent)
        holder._modules[name] = selective_checkpoint_wrapper(copied.model.get_submodule(fqn), memory_budget=0.5)
    loss = copied.loss_fn(copied.model, copied.batch)
    (loss[0] if isinstance(loss, tuple) else loss).backward()
    raise NotImplementedError("xFormers' wrapper runs here as it comes: measure it rather than its program alone")


def study(task: Task) -> dict[str, Profile]:
    """Profile every block on the inputs that it gets in a step, as xFormers' wrapper does in its first call."""
    copied = real_copy(task.workload)
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
    checkpoint = importlib.import_module("xformers.checkpoint")  # the package has a function of that name too
    with mock.patch.object(checkpoint, "_analyze_operators", return_value=profile):
        # a tensor among the arguments says that random operators may be recomputed
        policy = checkpoint.get_optimal_checkpoint_policy(None, torch.empty(0), memory_budget=fraction)
    kept = {index for index, chosen in enumerate(policy.optim_output) if round(chosen) == 1}
    skipped = checkpoint.OPS_TO_ALWAYS_SKIP
    return contexts_of(lambda index, func: index in kept, lambda func: func not in skipped, mutation=True)


XFORMERS = (
    Method("xFormers as it comes", "eager", lambda task: ["memory_budget=0.5"], _as_it_comes),
    Method("xFormers' policy, memory_budget", "eager", lambda task: FRACTIONS, _make, study),
)
