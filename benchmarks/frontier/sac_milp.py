"""PyTorch's `sac_milp` (torch.distributed._tools): its statistics, its program, its greedy order applied.

Its estimators time operators with CUDA events: on CUDA they run as they come, and on the CPU they are given the times
that the operators take on this machine.
What stops it is put right in its favour: modules without bytes of their own, modules that are called twice, and modules
of so few operators that its fit of their curve is not a number. So is its order where random operators work in place,
as dropouts do: it would draw some of a module's random numbers again and keep others. Everything else is PyTorch's.
What it solved, which takes minutes where budgets are loose, is kept in `runs/sac_milp` for the next run.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import math
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.common import slug
from benchmarks.frontier.checkpointing import Contexts, checkpointing
from benchmarks.frontier.methods import Method, Prepared, Task, Unsupported, stepping
from benchmarks.frontier.selective import contexts_of
from memfit.capture import KnownValues, fake_copy
from memfit.cost import measure
from memfit.hardware import find_device
from memfit.ir import write_atomic
from memfit.training import Step
from memfit.workload import fingerprint, signature, tensors_of

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3)
"""Of the peak that PyTorch's own statistics give: the budgets it is asked for."""
SOLVED = Path("runs/sac_milp")


@dataclass(frozen=True)
class Statistics:
    """What `sac_milp` takes.

    Attributes:
        graph: The tree of modules with their statistics.
        estimator: The `SACEstimator`, which knows the greedy order of each module.
        peak_bytes: Its baseline.
    """

    graph: Any
    estimator: Any
    peak_bytes: int


@functools.cache
def _milliseconds(text: str) -> float:
    return measure([text])[text].seconds * 1000


def timed(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Run an operator on fake tensors, and say how many milliseconds it takes on this machine."""
    out = func(*args, **(kwargs or {}))
    if func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
        return out, 0.0  # its fake workspace is empty, and reading it crashes; `sac_milp` uses forward times alone
    text = signature(func, args, kwargs or {})
    with torch.utils._python_dispatch._disable_current_modes():
        return out, _milliseconds(text)


def study(task: Task) -> Statistics:
    """Collect the statistics as PyTorch's tests of `sac_milp` do: two steps tracked, two timed, one forward pass."""
    from torch.distributed._tools.ilp_utils import (
        aggregate_stats,
        get_peak_memory_runtime_baseline,
        parse_module_info,
    )
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    values = KnownValues(FakeTensorMode(allow_non_fake_inputs=True))
    copied = fake_copy(task.workload, values, task.place)
    with values.fake, values, values.fake_paths_disabled(), contextlib.redirect_stdout(io.StringIO()):
        step = Step(copied)
        tracker, runtime, estimator = MemTracker(), RuntimeEstimator(), SACEstimator()
        tracker.track_external(copied.model, copied.optimizer, *tensors_of(copied.batch))
        with tracker:
            step(copied.batch)
            tracker.reset_mod_stats()
            step(copied.batch)
        runtime("operator-level-benchmark")
        estimator("operator-level-benchmark")
        if task.place.type == "cpu":
            runtime._estimate = estimator._estimate_runtime = timed
        with runtime:
            step(copied.batch)
        with estimator:
            loss, _ = step.compute_loss(copied.batch)
        loss.backward()
        for fqn in [fqn for fqn, stats in estimator.sac_mod_stats.items() if not sum(stats.memory)]:
            del estimator.sac_mod_stats[fqn]  # it divides by these bytes; a module that has none is as good as a leaf
        info = aggregate_stats(copied.model, tracker, runtime, estimator, task.place)
    order = info["mod_order"]
    order["fw_pre_order"] = list(dict.fromkeys(order["fw_pre_order"]))  # it refuses modules that are called twice
    graph = parse_module_info(info)
    for node in graph.nodes:
        if not all(map(math.isfinite, [*node["slopes"], *node["intercepts"]])):  # a curve of too few operators
            node["is_leaf"], node["n_segments"] = True, 0
    return Statistics(graph, estimator, get_peak_memory_runtime_baseline(graph)[0])


def _make(task: Task, found: Statistics, share: float) -> Prepared:
    where = [] if task.place.type == "cpu" else [slug(find_device(task.device).description)]
    solved = _solved("-".join([fingerprint(task.workload), *where]), found, share)
    discarded, predicted = solved["discarded"], solved["predicted_peak_bytes"]
    if predicted == -1:
        raise Unsupported(f"sac_milp finds no solution within {share:.0%} of its estimated peak")
    root = task.workload.model.__class__.__name__
    regions = {fqn.removeprefix(root).lstrip("."): greedy(found.estimator, fqn, r) for fqn, r in discarded.items()}
    if "" in regions:
        raise Unsupported("sac_milp checkpoints the whole model, so that nothing is saved")
    return Prepared(
        stepping(lambda workload: checkpointing(workload.model, regions)),
        {"predicted_peak_bytes": predicted, "regions": len(regions), "plan_seconds": solved["seconds"]},
    )


def _solved(name: str, found: Statistics, share: float) -> dict[str, Any]:
    """Return what share of each module's bytes to discard, the predicted peak, and the seconds that solving took."""
    from torch.distributed._tools.sac_ilp import sac_milp

    path = SOLVED / f"{name}-{share}.json"
    if not path.exists():
        started = time.perf_counter()
        logging.disable(logging.WARNING)
        with warnings.catch_warnings():  # PyTorch calls PuLP 3 in ways that PuLP 4 will not have
            warnings.simplefilter("ignore", DeprecationWarning)
            discarded, _, predicted = sac_milp(found.graph, share * found.peak_bytes / 2**30)
        logging.disable(logging.NOTSET)
        seconds = time.perf_counter() - started
        solved = {"discarded": discarded, "predicted_peak_bytes": predicted, "seconds": seconds}
        write_atomic(path, json.dumps(solved).encode())
    return dict(json.loads(path.read_text()))


def greedy(estimator: Any, fqn: str, ratio: float) -> Contexts | None:
    """Return contexts that discard a share of a module's bytes."""
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    again = recomputed(estimator, fqn, ratio)
    return contexts_of(
        lambda index, func: index not in again, lambda func: func not in OPS_TO_ALWAYS_SKIP, mutation=True
    )


def recomputed(estimator: Any, fqn: str, ratio: float) -> set[int]:
    """Return the operators that discard a share of a module's bytes in its order: most bytes a second first."""
    stats, order = estimator.sac_mod_stats[fqn], estimator.sac_mod_greedy_order_meta[fqn]
    wanted = ratio * sum(stats.memory)
    again, stored = grouped(order, order.recomputed_ops), grouped(order, order.stored_ops)
    for candidate in order.msps_meta:
        if sum(stats.memory[i] for i in again) >= wanted:
            break
        together = grouped(order, {candidate.op_idx})
        if not together & stored:
            again |= together
    return again


def grouped(order: Any, heads: set[int]) -> set[int]:
    """Return operators with those that are recomputed together with them: in place on their outputs, random."""
    groups = [*order.inplace_op_groups.values(), *order.random_ops_group.values()]
    found = set(heads)
    while joined := [group for group in groups if group & found and not group <= found]:
        found.update(*joined)
    return found


SAC_MILP = (Method("torch sac_milp", "eager", lambda task: SHARES, _make, study),)
