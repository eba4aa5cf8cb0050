"""A loss function, compiled together with the model that it calls."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memfit._torch.compilers import compiler_errors, recompilations_limited
from memfit._torch.modules import Hooks, forward_hooks, forward_pre_hooks
from memfit.batch import leaves_of
from memfit.capture.known_values import KnownValues
from memfit.capture.recorder import Recorder
from memfit.compiled.planned_backend import PlannedBackend
from memfit.errors import CaptureError, PlanError

LossFn = Callable[[nn.Module, Any], Any]

MOST_SHAPES = 8
"""Shapes of a batch that one step compiles code for; a microbatch of fewer samples is a shape of its own."""


class CompiledLoss:
    """A loss function that runs compiled, with a plan's regions recomputed in the backward pass.

    Code is made at the first call with each shape of the batch. Under fake tensors none is: its kernels are recorded.
    """

    def __init__(self, loss_fn: LossFn, backend: PlannedBackend) -> None:
        self._backend = backend
        self._shapes: set[Any] = set()

        def loss(model: nn.Module, batch: Any) -> Any:
            return loss_fn(model, batch)

        # Dynamo counts the recompilations of each code object: this is one of its own, for this model and plan.
        own = types.FunctionType(loss.__code__.replace(), loss.__globals__, "loss", None, loss.__closure__)
        self._compiled: LossFn = torch.compile(own, backend=backend, dynamic=False)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return the loss of a batch, as the loss function gives it.

        Raises:
            PlanError: It can't be compiled, or not as the plan says.
        """
        shape = _shape_of(batch)
        is_new = shape not in self._shapes
        if is_new:
            self._check_count(shape)
        recorder, graphs = Recorder.active(), self._backend.graphs
        self._backend.begin()
        # Not at every step: to change the filters has Python show each warning of the user's anew.
        quiet = is_new or recorder is not None
        with recompilations_limited(), _explained(), _without_notices() if quiet else contextlib.nullcontext():
            loss = self._compiled(model, batch) if recorder is None else self._recorded(recorder, model, batch)
        if self._backend.graphs > graphs or (is_new and torch.is_grad_enabled()):
            self._check_graphs()
        self._shapes.add(shape)
        return loss

    def _check_count(self, shape: Any) -> None:
        if len(self._shapes) == MOST_SHAPES:
            raise PlanError(
                f"the batch has a shape that no code was compiled for, {shape[0]}, and this step compiled code for"
                f" {MOST_SHAPES} others: pad batches to fewer shapes, or set levers.compiler to 'none'"
            )

    def _recorded(self, recorder: Recorder, model: nn.Module, batch: Any) -> Any:
        """Return the loss of a step that is captured."""
        if recorder.fake is None:
            raise CaptureError(
                "a compiled step is captured without data, and the step asks for data: plan without compile="
            )
        with torch.compiler.set_stance("default"), unwatched(model), recorder.unwatched():
            sites = KnownValues.of(recorder.fake).read_sites
            sites.clear()
            loss = self._compiled(model, batch)
        if sites:
            raise PlanError(
                f"the step reads values of its tensors at {sites[0]}, between its compiled graphs, and torch.compile"
                " would make code for each value: plan with compile=False, or read them after the step"
            )
        return loss

    def _check_graphs(self) -> None:
        if not self._backend.graphs:
            raise PlanError(
                "torch.compile makes no code of the step, as where a loop breaks into several graphs: look at"
                " torch.compile(..., fullgraph=True), set levers.compiler to 'none', or plan with compile=False"
            )
        missing = [r.modules for r in self._backend.regions if not self._backend.called.issuperset(r.modules)]
        if missing:
            raise PlanError(
                f"the compiled step does not call {', '.join(missing[0])}, which levers.regions has recomputed: make"
                " the plan again, with this version of PyTorch"
            )


def _shape_of(batch: Any) -> Any:
    """Return the key of a batch's code: shapes and dtypes, autocast, and whether gradients are recorded."""
    shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in leaves_of(batch))
    return shapes, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise a compiler's errors as errors of the plan."""
    try:
        yield
    except compiler_errors() as e:
        inner = getattr(e, "inner_exception", e)  # of the back end
        said = (str(inner).strip().splitlines() or [""])[0]
        raise PlanError(
            f"the step can't be compiled ({type(inner).__name__}: {said}): set levers.compiler to 'none', or plan with"
            " compile=False"
        ) from inner


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
    """Leave out warnings that Dynamo causes itself: it looks at the gradients of outputs of earlier graphs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


@contextlib.contextmanager
def unwatched(model: nn.Module) -> Iterator[None]:
    """Take a recorder's hooks off a model's modules, until the context is left: Dynamo would compile them.

    Hooks that the step adds or removes meanwhile stay so, and their handles hold the mappings: these are changed in
    place.
    """
    changed: list[tuple[Hooks, dict[int, Callable[..., Any]]]] = []
    for module in model.modules():
        for hooks in (forward_hooks(module), forward_pre_hooks(module)):
            before = dict(hooks.items())  # the mapping may hide its length
            watching = [key for key, hook in before.items() if _is_of_recorder(hook)]
            if watching:
                changed.append((hooks, before))
            for key in watching:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in changed:
            now = dict(hooks.items())
            hooks.clear()
            hooks.update({key: hook for key, hook in before.items() if key in now or _is_of_recorder(hook)} | now)


def _is_of_recorder(hook: Callable[..., Any]) -> bool:
    return isinstance(getattr(hook, "__self__", None), Recorder)
