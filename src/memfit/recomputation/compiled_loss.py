"""A loss function, compiled together with the model that it calls, by a back end that recomputes a plan's regions.

Under fake tensors no code is made: the kernels of the graphs run one after the other, and each is recorded as one
operator.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx, nn

from memfit._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    SeenCode,
    all_forward_hooks,
    boxed,
    compiler_errors,
    current_compile_id,
    default_partition,
    mark_boxed,
    recompilations_limited,
    tree_leaves,
    untold_calls,
)
from memfit.capture import KnownValues, Recorder, composites_lifted
from memfit.errors import CaptureError, MemfitError, PlanError
from memfit.ir import Op, Phase, Region, Save
from memfit.recomputation.joint_graph import JointGraph, tensors_of
from memfit.recomputation.joint_rewriter import recompute_regions
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
        from memfit.recomputation.inductor_partition import lower  # takes seconds; `import memfit` must not

        compile_pass = self.recorded_pass if self.is_on_paper else None
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
        values = [(node, node.meta.get("val")) for node in module.graph.nodes]
        if any(isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) for _, value in values):
            raise PlanError(
                "levers.compiler is for fixed shapes, and the compiled graph has dynamic ones: mark no dimension as"
                " dynamic, or set levers.compiler to 'none'"
            )
        sparse = (node for node, v in values if isinstance(v, torch.Tensor) and v.layout is not torch.strided)
        user = next((user for node in sparse for user in node.users if user.op != "output"), None)
        if user is not None:  # such as the sum of two sparse gradients
            raise PlanError(
                f"the compiled graph computes with sparse gradients ({user.target}), and Inductor treats them as dense"
                " ones: call a table with sparse=True once in a step, or set levers.compiler to 'none'"
            )
        joint, called = recompute_regions(
            module.graph,
            forward_outputs,
            str(current_compile_id()),
            self.regions,
            self._called,
            channels_last=self.channels_last,
        )
        self.called.update(called)
        self.graphs += 1
        if self.is_on_paper:
            self._recorded = RecordedGraph(joint)
        module.graph.eliminate_dead_code()
        module.recompile()
        return default_partition(module, forward_outputs)

    def recorded_pass(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Return what runs one pass of a graph on paper, in place of Inductor's code."""
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


class RecordedGraph:
    """A joint graph as it is partitioned, whose two passes run as the compiled code would hold memory.

    A kernel's operators run as one: what only they read takes no memory. A storage dies after the last kernel that
    reads it.
    """

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        self.kernel_of = {node.name: index for index, nodes in enumerate(joint.ops) for node in nodes}
        self.storages_of = {node.name: storages for node, storages in joint.storages.items()}
        self.waiting: list[_Passed] = []

    def code(self, module: fx.GraphModule, *, is_backward: bool) -> Callable[[list[Any]], Any]:
        """Return code for the graph module of one pass, which takes a list of inputs and empties it."""
        return mark_boxed(lambda inputs: _Pass(self, module, is_backward).run(inputs))


class _Passed:
    """The record of a forward pass for its backward pass: its storages, by number in the joint graph, and its saves."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.saves: list[tuple[int, Save]] = []
        self.first_call = 0


class _Pass:
    def __init__(self, graph: RecordedGraph, module: fx.GraphModule, is_backward: bool) -> None:
        self.graph, self.trace, self.module, self.is_backward = graph, graph.joint.trace, module, is_backward
        self.recorder = Recorder.active()
        self.passed = graph.waiting.pop() if is_backward and graph.waiting else _Passed()
        self.values: dict[fx.Node, Any] = {}
        self.kernels: dict[int, list[fx.Node]] = defaultdict(list)
        self.frees: dict[int, list[fx.Node]] = defaultdict(list)
        kernel_of = {n: graph.kernel_of[n.name] for n in module.graph.nodes if n.op == "call_function"}
        kernel_of[module.graph.output_node()] = len(graph.joint.ops)  # what the graph returns is never freed
        for node in module.graph.nodes:
            if node.op == "call_function":
                self.kernels[kernel_of[node]].append(node)
            if node.op != "output":
                self.frees[max((kernel_of[n] for n in (node, *node.users) if n in kernel_of), default=-1)].append(node)

    def run(self, inputs: list[Any]) -> Any:
        """Run the pass, and return its outputs."""
        recorder = self.recorder if self.recorder is not None and self.recorder.recording else None
        joint, passed, trace = self.graph.joint, self.passed, self.trace
        offset = 0 if recorder is None else len(recorder.now.ops) - (joint.turn if self.is_backward else 0)
        if recorder is not None:
            for member, work in joint.operators.items():  # whose costs make up those of kernels
                recorder.add_signature(member, work)
            if not self.is_backward:
                passed.first_call = len(recorder.now.calls)
        for node, value in zip(self.module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            self.values[node] = value
            self._observe(node, -1)
        inputs.clear()
        for node in self.module.graph.find_nodes(op="get_attr"):
            constant = getattr(self.module, str(node.target))
            mode = next(
                (t.fake_mode for t in tree_leaves(list(self.values.values())) if isinstance(t, FakeTensor)), None
            )
            is_real = isinstance(constant, torch.Tensor) and not isinstance(constant, FakeTensor)
            # a constant of a graph is a fake tensor where the others are
            self.values[node] = mode.from_tensor(constant) if isinstance(mode, FakeTensorMode) and is_real else constant
        for index in (-1, *sorted(self.kernels)):
            if index >= 0:
                self._run_kernel(index, recorder)
            for node in self.frees.get(index, ()):
                del self.values[node]
        outputs = fx.map_arg(self.module.graph.output_node().args[0], self.values.__getitem__)
        if recorder is not None and self.is_backward:  # record the first and the last read of each save
            for number, save in passed.saves:
                recorder.now.saves[number] = replace(
                    recorder.now.saves[number], unpacked=save.unpacked + offset, death=save.death + offset
                )
        elif recorder is not None:  # record the calls of modules, the saves, and the releases of saved storages
            first, storages = passed.first_call, passed.storages
            for call in trace.calls:
                recorder.now.calls.append(
                    replace(
                        call,
                        module=recorder.add_module(trace.modules[call.module]),
                        parent=call.parent + first if call.parent >= 0 else -1,
                        microbatch=recorder.microbatch,
                        start=call.start + offset,
                        end=call.end + offset,
                        inputs=tuple(storages[s] for s in call.inputs if s in storages),
                    )
                )
            for save in trace.saves:
                if save.storage in storages:
                    saved_by = save.call + first if save.call >= 0 else -1
                    passed.saves.append((len(recorder.now.saves), save))
                    recorder.now.saves.append(Save(storages[save.storage], save.at + offset, saved_by, -1, -2))
            for storage, observed in storages.items():
                record = trace.storages[storage]
                if record.birth >= 0 and record.release != record.death:
                    recorder.now.releases[observed] = record.release + offset
            self.graph.waiting.append(passed)
        return list(outputs) if isinstance(outputs, tuple | list) else outputs

    def _run_kernel(self, index: int, recorder: Recorder | None) -> None:
        active = self.recorder
        with contextlib.nullcontext() if active is None else active.paused():
            for node in self.kernels[index]:
                args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
                if isinstance(node.target, OpOverload) and active is not None:
                    self.values[node] = active.run(node.target, args, kwargs)
                else:
                    assert callable(node.target)
                    self.values[node] = node.target(*args, **kwargs)
        if recorder is not None:
            op = self.trace.ops[index]
            number = recorder.add_signature(self.trace.signatures[op.signature], self.trace.works[op.signature])
            phase: Phase = op.phase if op.phase == "recompute" else recorder.phase
            call = op.call + self.passed.first_call if op.call >= 0 else -1
            recorder.now.ops.append(Op(op.name, call, phase, recorder.microbatch, number, (), op.random))
        position = -1 if recorder is None else len(recorder.now.ops) - 1
        for node in self.kernels[index]:
            self._observe(node, position, index)

    def _observe(self, node: fx.Node, position: int, kernel: int = -1) -> None:
        """Observe the storages of a node's outputs, except those that only its own kernel reads."""
        if self.recorder is None:
            return
        named = self.graph.storages_of.get(node.name, ())
        for tensor, storage in zip(tensors_of(self.values[node]), named, strict=False):
            record = self.trace.storages[storage]
            if kernel < 0 or not record.birth == record.death == kernel:
                observed = self.recorder.observe(tensor, position)
                if observed is not None:
                    self.passed.storages[storage] = observed
