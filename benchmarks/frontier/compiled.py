"""What runs under torch.compile: the plain step, its memory budget, and checkpoints inside."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.frontier.checkpointing import checkpointed, forwarding, holding, segment_sizes, segments, whole
from benchmarks.frontier.methods import PLAIN, Apply, Method, Prepared, Task, Unsupported
from memfit.training import Step
from memfit.workload import Loss, Workload

ACTIVATION_BUDGETS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
Backend = Callable[..., Any]
Around = Callable[[nn.Module], Callable[[], contextlib.AbstractContextManager[Any]]]
"""Given a model, once, makes how to change it for each step."""


def inductor(**functorch: Any) -> Backend:
    """Return the default back end under settings of `torch._functorch.config`, without its caches of graphs.

    Kernels that a C++ compiler has translated before are taken from its cache on disk, whoever they were for. Each call
    returns another function: Dynamo keeps what it compiled by back end.
    """

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._functorch import config
        from torch._inductor import config as inductor_config
        from torch._inductor.compile_fx import compile_fx

        uncached = {"enable_autograd_cache": False, **functorch}
        with config.patch(**uncached), inductor_config.patch(fx_graph_cache=False):
            return compile_fx(graph, inputs)

    return backend


def compiling(backend: Backend, around: Around = lambda model: contextlib.nullcontext) -> Apply:
    """Return how to run a step whose model and loss are compiled as one graph; compiled when it first runs.

    A loss outside would hold several times the logits, which no plan sees. What `around` makes is made once for each
    model: modules that are wrapped anew would be compiled anew.
    """
    made: dict[nn.Module, tuple[Callable[..., Loss], Callable[[], contextlib.AbstractContextManager[Any]]]] = {}

    @contextlib.contextmanager
    def apply(workload: Workload) -> Iterator[Step]:
        model = workload.model
        if model not in made:
            made[model] = torch.compile(workload.loss_fn, backend=backend, fullgraph=True), around(model)
        loss_fn, changed = made[model]
        with changed(), _in_one_graph():
            yield Step(dataclasses.replace(workload, loss_fn=loss_fn))

    return apply


@contextlib.contextmanager
def _in_one_graph() -> Iterator[None]:
    """Say in a line what Dynamo says in pages: that it makes no graph."""
    try:
        yield
    except torch._dynamo.exc.Unsupported as e:
        raise Unsupported(f"torch.compile makes no graph of this step: {str(e).partition(chr(10))[0]}") from e


def _plain(task: Task, studied: None, setting: str) -> Prepared:
    return Prepared(compiling(inductor()))


def _budget(task: Task, studied: None, budget: float) -> Prepared:
    return Prepared(compiling(inductor(activation_memory_budget=budget)))


def _blocks(task: Task, studied: None, every: int) -> Prepared:
    regions = whole(task.subject.blocks[::every])
    return Prepared(compiling(inductor(), lambda model: partial(forwarding, checkpointed(model, regions))))


def _segments(task: Task, studied: None, size: int) -> Prepared:
    chains = task.subject.chains
    return Prepared(compiling(inductor(), lambda model: partial(holding, segments(model, chains, size))))


COMPILED = (
    Method(PLAIN, "compiled", lambda task: [""], _plain),
    Method("activation_memory_budget", "compiled", lambda task: ACTIVATION_BUDGETS, _budget),
    Method("checkpoint every K-th block", "compiled", lambda task: [1, 2], _blocks),
    Method("segments of K blocks", "compiled", lambda task: segment_sizes(task)[:1], _segments),
)
