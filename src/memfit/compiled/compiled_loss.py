"""A loss function, compiled together with the model that it calls, by a back end that recomputes a plan's regions."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from memfit._torch import (
    SeenCode,
    all_forward_hooks,
    boxed,
    compiler_errors,
    current_compile_id,
    default_partition,
    recompilations_limited,
    untold_calls,
)
from memfit.capture import KnownValues, Recorder, composites_lifted
from memfit.compiled.joint_graph import has_symbols, users_of_sparse
from memfit.compiled.joint_rewriter import recompute_regions
from memfit.compiled.kernel_recording import RecordedGraph
from memfit.compiled.layouts import hold_masks_as_bytes, lay_out_channels_last, show_in_any_layout
from memfit.errors import CaptureError, MemfitError, PlanError
from memfit.ir import Region
from memfit.workload import leaves_of

LossFn = Callable[[nn.Module, Any], Any]

MOST_SHAPES = 8
"""Shapes of a batch that one step compiles code for; a microbatch of fewer samples is a shape of its own."""


class PlannedBackend:
    """Compiles graphs with Inductor, so that their backward passes recompute regions.

    Args:
        regions: Modules' calls: further ones of a module have "@1", "@2" after its FQN.
        channels_last: Whether convolutions run with their channels last, where a graph has few others.
        is_on_paper: Whether the graphs run under fake tensors, to be recorded, and no code is made.

    Attributes:
        called: The names of the modules' calls in the graphs so far.
    """

    def __init__(self, regions: Sequence[Region], *, channels_last: bool = False, is_on_paper: bool = False) -> None:
        self.regions, self.channels_last, self.is_on_paper = tuple(regions), channels_last, is_on_paper
        self.called: set[str] = set()
        self.graphs = 0
        self.begin()

    def begin(self) -> None:
        """Name calls from the first on: the next graphs are those of another run of the function."""
        self._called = Counter[str]()

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph."""
        self._recorded: RecordedGraph | None = None
        from memfit.compiled.inductor_partition import lower  # takes seconds; `import memfit` must not

        compile_pass = self._recording if self.is_on_paper else None
        try:
            with composites_lifted():
                return lower(module, inputs, self._partition, compile_pass)
        except Exception as e:
            error: BaseException | None = e
            while error is not None and not isinstance(error, MemfitError):
                error = error.__cause__ or error.__context__
            if error is None:
                raise
            found = error

            def fail(*_: Any) -> Any:  # raised while it compiles, the compiler would wrap it
                raise found

            return fail

    def _partition(self, module: fx.GraphModule, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        if has_symbols(module.graph):
            raise PlanError(
                "levers.compiler is for fixed shapes, and the compiled graph has dynamic ones: mark no dimension as"
                " dynamic, or set levers.compiler to 'none'"
            )
        if users := users_of_sparse(module.graph):
            raise PlanError(
                f"the compiled graph computes with sparse gradients ({users[0]}), and Inductor treats them as dense"
                " ones: call a table with sparse=True once in a step, or set levers.compiler to 'none'"
            )
        show_in_any_layout(module.graph)
        hold_masks_as_bytes(module.graph)
        if self.channels_last:
            lay_out_channels_last(module.graph)
        joint, called = recompute_regions(
            module.graph, forward_outputs, str(current_compile_id()), self.regions, self._called
        )
        self.called.update(called)
        self.graphs += 1
        if self.is_on_paper:
            self._recorded = RecordedGraph(joint)
        module.graph.eliminate_dead_code()
        module.recompile()
        return default_partition(module, forward_outputs)

    def _recording(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        if self._recorded is None:  # no backward pass: its operators are recorded one by one
            return boxed(module.forward)
        return self._recorded.code(module, is_backward=bool(options.get("is_backward")))


class CompiledLoss:
    """A loss function that runs compiled, with a plan's regions recomputed in the backward pass.

    Code is made at the first call with each shape of the batch. Under fake tensors none is: its kernels are recorded.
    """

    def __init__(self, loss_fn: LossFn, backend: PlannedBackend) -> None:
        self._backend = backend
        self._shapes: set[Any] = set()
        self._seen_code = SeenCode()

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
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in leaves_of(batch))
        is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        shape = shapes, torch.is_grad_enabled(), is_cast  # what code is for
        is_new = shape not in self._shapes
        if is_new and len(self._shapes) == MOST_SHAPES:
            raise PlanError(
                f"the batch has a new shape, {shape[0]}, and this step has compiled code for {MOST_SHAPES} shapes"
                " already: pad batches to fewer shapes, or set levers.compiler to 'none'"
            )
        recorder, graphs = Recorder.active(), self._backend.graphs
        self._backend.begin()
        # Not at every step: to change the filters has Python show each warning of the user's anew.
        quiet = is_new or recorder is not None
        quieted = warnings.catch_warnings() if quiet else contextlib.nullcontext()
        with recompilations_limited(), self._seen_code.collecting(), quieted:
            if quiet:  # a warning that Dynamo causes itself: it looks at the gradients of outputs of earlier graphs
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            try:
                loss = self._compiled(model, batch) if recorder is None else self._recorded(recorder, model, batch)
            except compiler_errors() as e:
                inner = getattr(e, "inner_exception", e)  # of the back end
                said = (str(inner).strip().splitlines() or [""])[0]
                raise PlanError(
                    f"the step can't be compiled ({type(inner).__name__}: {said}): set levers.compiler to 'none', or"
                    " plan with compile=False"
                ) from inner
        if self._backend.graphs > graphs or (is_new and torch.is_grad_enabled()):
            self._check_graphs()
        self._shapes.add(shape)
        return loss

    def close(self) -> None:
        """Have Dynamo forget the code of this copy, so that other copies of the model are compiled as it was."""
        self._seen_code.forget()

    def _recorded(self, recorder: Recorder, model: nn.Module, batch: Any) -> Any:
        """Return the loss of a step that is captured."""
        if recorder.fake is None:
            raise CaptureError(
                "a compiled step is captured without data, but this step reads data: plan without compile="
            )
        with torch.compiler.set_stance("default"), unwatched(model), recorder.unwatched():
            sites = KnownValues.of(recorder.fake).read_sites
            sites.clear()
            loss = self._compiled(model, batch)
        if sites:
            raise PlanError(
                f"the step reads values of its tensors at {sites[0]}, between its compiled graphs, and torch.compile"
                " would compile new code for each value: plan with compile=False, or read them after the step"
            )
        return loss

    def _check_graphs(self) -> None:
        if not self._backend.graphs:
            raise PlanError(
                "torch.compile compiled nothing of the step; a loop may break it into several graphs. Check it with"
                " torch.compile(..., fullgraph=True), set levers.compiler to 'none', or plan with compile=False"
            )
        missing = [r.modules for r in self._backend.regions if not self._backend.called.issuperset(r.modules)]
        if missing:
            raise PlanError(
                f"the compiled step does not call {', '.join(missing[0])}, but levers.regions recomputes it: plan"
                " again, with this version of PyTorch"
            )


@contextlib.contextmanager
def unwatched(model: nn.Module) -> Iterator[None]:
    """Take a recorder's hooks off a model's modules, until the context is left.

    Dynamo would compile them; and it compiles layers of PyTorch's own by themselves where a graph breaks before them
    and they have hooks (PyTorch 2.13), even if only the note is left that a hook took keyword arguments.

    Hooks that the step adds or removes meanwhile stay so, and their handles hold the mappings: these are changed in
    place.
    """
    changed: list[tuple[MutableMapping[int, Any], dict[int, Any], set[int]]] = []
    for module in model.modules():
        mappings = all_forward_hooks(module)
        contents = [dict(mapping.items()) for mapping in mappings]  # a mapping may hide its length
        hooks = [item for content in contents for item in content.items()]
        watching = {key for key, hook in hooks if isinstance(getattr(hook, "__self__", None), Recorder)}
        for mapping, content in zip(mappings, contents, strict=True):
            if not watching.isdisjoint(content):
                changed.append((mapping, content, watching))
            for key in watching & content.keys():
                del mapping[key]
    try:
        with untold_calls(model):
            yield
    finally:
        for mapping, before, watching in changed:
            now = dict(mapping.items())
            mapping.clear()
            mapping.update({key: hook for key, hook in before.items() if key in now or key in watching} | now)
