"""The joint forward and backward graph that AOTAutograd makes of a compiled model, as a trace.

The graph's forward operators come first, then the backward ones. A storage dies after the last operator that reads it,
as where a graph module runs with a boxed list of inputs. Inputs are alive from the start, outputs to the end.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx

from memfit._torch import OpOverload, schema_of, storage_key_of, tree_leaves, tree_map_only
from memfit.capture import draws_random_numbers, kernel_outputs, work_of
from memfit.compiled.fusion import (
    COMPUTED_FOR_EACH,
    INLINED,
    is_fusible,
    is_written_between,
    kernels,
    puts_into,
    reached,
)
from memfit.ir import Call, Category, Module, Op, Phase, Save, Storage, Trace, Work
from memfit.ir import kernel_text as kernel_text
from memfit.workload import signature

_RECOMPUTED, _KEPT = "memfit_recomputed", "memfit_kept"
_CPU = torch.device("cpu")
_INDEX = re.compile(r"\[['\"]?([^'\"\]]*)['\"]?\]")


def module_stack(node: fx.Node) -> list[str]:
    """Return the modules that a node was traced in, outermost first, without the model: FQN, class and key."""
    stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    entries = []
    for key, (path, kind) in stack.items():
        # A path is such as "L['self'].blocks.0".
        fqn = _INDEX.sub(r".\1", path.removeprefix("L").replace("_modules", "")).strip(".").partition(".")[2]
        if fqn:
            name = kind if isinstance(kind, str) else kind.__name__
            entries.append("\0".join((fqn, name.rsplit(".", 1)[-1], key)))
    return entries


def mark_recomputed(node: fx.Node, _: fx.Node, modules: tuple[str, ...]) -> None:
    """Mark a backward node as the recomputation of a forward node, in a module of a region.

    Nodes of different modules are not fused: both would run at once where they share an input (an attention mask), and
    the second one's output would wait.
    """
    fqns = {name.partition("@")[0] for name in modules}
    stack = (entry.partition("\0")[0] for entry in module_stack(node))
    node.meta[_RECOMPUTED] = modules, next((fqn for fqn in stack if fqn in fqns), None)


def mark_kept(node: fx.Node) -> None:
    """Mark a forward node whose output is never recomputed."""
    node.meta[_KEPT] = True


def has_symbols(graph: fx.Graph) -> bool:
    """Tell whether a graph has symbolic shapes."""
    return any(isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool) for node in graph.nodes)


def users_of_sparse(graph: fx.Graph) -> list[str]:
    """Return the operators of a graph that take sparse tensors, such as the sum of two sparse gradients."""
    return [
        str(user.target)
        for node in graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.layout is not torch.strided
        for user in node.users
        if user.op != "output"
    ]


def _phases(graph: fx.Graph, forward_outputs: int) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the operators of the forward and of the backward pass, in order.

    Forward operators are those that the forward outputs need, and those that AOTAutograd tagged so.
    """
    returned = tree_leaves(graph.output_node().args[0])[:forward_outputs]
    needed = reached((node for node in returned if isinstance(node, fx.Node)), lambda node: node.all_input_nodes)
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "call_function":
            source = node.args[0] if node.target is operator.getitem else node
            first = source in needed or source.meta.get("partitioner_tag") in ("is_forward", "must_be_in_forward")
            (forward if first else backward).append(node)
    return forward, backward


class JointGraph:
    """A joint graph, which Inductor runs, as a trace: an operator of it is a kernel (`compiled.fusion`).

    Each call of a module, and each part that other operators interrupt, has its own name, and can be recomputed by
    itself.

    Args:
        graph: The graph; its nodes hold their fake tensors in `meta["val"]`.
        forward_outputs: The number of outputs that the forward pass returns; the others are gradients.
        name: The trace's name.
        called: How often each module was called in the graphs before of the same function, which is changed.

    Attributes:
        ops: For each operator of the trace, its nodes: those of a kernel.
        storages: For each node, the storages of its outputs: indices into `Trace.storages`.
        makers: For each storage, the node that makes it.
        nbytes: For each storage, its size; a storage that is never written has size 0 in the trace.
        returned: The storages of the graph's outputs.
        fixed: The nodes whose outputs must be kept, since a recomputation would differ.
        call_of: For each backward node, in order, the call whose forward operator it differentiates, or -1.
        operators: The work of these operators, by signature.
    """

    def __init__(self, graph: fx.Graph, forward_outputs: int, name: str, called: Counter[str]) -> None:
        self.graph = graph
        self.outputs = tree_leaves(graph.output_node().args[0])
        self.forward_outputs = self.outputs[:forward_outputs]
        self.inputs = list(graph.find_nodes(op="placeholder"))
        self.device = next((t.device for node in self.inputs for t in _tensors(node) if t.device.type != "cpu"), _CPU)
        self.forward, self.backward = _phases(graph, forward_outputs)
        self.storages: dict[fx.Node, tuple[int, ...]] = {}
        self.sources: dict[fx.Node, fx.Node] = {}
        self.nbytes: list[int] = []
        self.makers: list[fx.Node] = []
        self.keys: list[int] = []
        for node in (*self.inputs, *graph.find_nodes(op="get_attr"), *self.forward, *self.backward):
            self._observe(node)
        forward = self._kernels(self.forward, lambda node: tuple(module_stack(node)))
        self.ops = [*forward, *self._kernels(self.backward, lambda node: node.meta.get(_RECOMPUTED))]
        self.turn = len(forward)
        position = {node: index for index, nodes in enumerate(self.ops) for node in nodes}
        self.birth = [position.get(node, -1) for node in self.makers]
        self.returned = frozenset(s for node in self.outputs for s in self.storages.get(node, ()))
        self.fixed = frozenset(self._fixed())
        modules, calls, of_op = self._read_calls(forward, called)
        self.call_of = {node: self._of_sequence.get(node.meta.get("seq_nr", -1), -1) for node in self.backward}
        self._index: dict[str, int] = {}
        self._works: list[Work] = []
        self.operators: dict[str, Work] = {}
        # For each storage, its readers, with the calls that backward readers differentiate.
        uses: list[list[tuple[int, int]]] = [[(birth, -1)] if birth >= 0 else [] for birth in self.birth]
        for index, nodes in enumerate(self.ops):
            for node in nodes:
                for given in (node, *node.all_input_nodes):
                    for storage in self.storages[given]:
                        uses[storage].append((index, self.call_of.get(node, -1)))
        storages = self._lifetimes(uses)
        saved = self._saved_bytes(storages)
        ops = [self._op(nodes, index, of_op, saved[index]) for index, nodes in enumerate(self.ops)]
        self.trace = Trace(
            workload=name,
            fingerprint="",
            torch_version=str(torch.__version__),
            device=str(self.device),
            precision="32-true",
            batch_size=1,
            microbatch_size=1,
            microbatches=1,
            scale_microbatches=1,
            modules=modules,
            calls=calls,
            ops=ops,
            storages=storages,
            saves=list(self._saves(uses)),
            signatures=list(self._index),
            works=self._works,
        )

    def span(self, modules: Sequence[str]) -> tuple[int, int]:
        """Return the first operator of modules called one after the other, and one past the last."""
        trace = self.trace
        calls = [call for call in trace.calls if trace.modules[call.module].fqn in modules]
        return min(call.start for call in calls), max(call.end for call in calls)

    def recomputable(self, start: int, end: int, keep: Sequence[str]) -> Iterator[fx.Node]:
        """Yield the forward nodes of a span that can be recomputed, without those in `keep` ("overload#occurrence")."""
        seen: dict[str, int] = defaultdict(int)
        for op in range(start, end):
            name = self.trace.ops[op].name
            if f"{name}#{seen[name]}" not in keep:
                yield from (node for node in self.ops[op] if node not in self.fixed)
            seen[name] += 1

    def gradients(self, start: int, end: int) -> Iterator[fx.Node]:
        """Yield the backward nodes that differentiate operators of calls within a span."""
        for node, index in self.call_of.items():
            if index >= 0 and start <= self.trace.calls[index].start and self.trace.calls[index].end <= end:
                yield node

    def _read_calls(
        self, ops: Sequence[Sequence[fx.Node]], called: Counter[str]
    ) -> tuple[list[Module], list[Call], list[int]]:
        """Return a module for each call, the calls, and for each forward operator the innermost call, or -1."""
        modules: list[Module] = []
        calls: list[Call] = []
        of_op: list[int] = []
        self._of_sequence: dict[int, int] = {}
        open_calls: list[tuple[str, int]] = []
        for index, nodes in enumerate(ops):
            stack = module_stack(nodes[0])  # a kernel's nodes are all of one module
            same = sum(1 for _ in itertools.takewhile(lambda p: p[0][0] == p[1], zip(open_calls, stack, strict=False)))
            del open_calls[same:]
            for key in stack[same:]:
                fqn, kind, _ = key.split("\0")
                modules.append(Module(f"{fqn}@{called[fqn]}" if called[fqn] else fqn, kind, False, False))
                called[fqn] += 1
                parent = open_calls[-1][1] if open_calls else -1
                calls.append(Call(len(modules) - 1, parent, 0, index, index, (), "forward"))
                open_calls.append((key, len(calls) - 1))
            for _, call in open_calls:
                calls[call] = replace(calls[call], end=index + 1)
            of_op.append(open_calls[-1][1] if open_calls else -1)
            for node in nodes:
                if (number := node.meta.get("seq_nr")) is not None:
                    self._of_sequence.setdefault(number, of_op[-1])
        reads = [
            {s for node in nodes for g in (node, *node.all_input_nodes) for s in self.storages[g]} for nodes in ops
        ]
        for index, made in enumerate(calls):
            taken = sorted(s for s in set[int]().union(*reads[made.start : made.end]) if self.birth[s] < made.start)
            calls[index] = replace(made, inputs=tuple(taken))
        return modules, calls, of_op

    def _observe(self, node: fx.Node) -> None:
        """Assign the storages of a node's outputs: its inputs', where it is a view, or new ones."""
        if node.target is operator.getitem:
            parent, index = node.args
            assert isinstance(parent, fx.Node) and isinstance(index, int)
            whole = parent.meta.get("val")
            start = sum(len(tensors_of(part)) for part in whole[:index]) if isinstance(whole, list | tuple) else 0
            self.storages[node] = self.storages[parent][start : start + len(_tensors(node))]
            self.sources[node] = parent
            return
        known: dict[int, int] = {}
        for given in node.all_input_nodes:
            known.update(zip(map(storage_key_of, _tensors(given)), self.storages[given], strict=True))
        storages = []
        value = node.meta.get("val")
        if isinstance(node.target, OpOverload):  # as the device's kernel allocates them
            args, kwargs = _values(node)
            value = kernel_outputs(value, node.target, args, kwargs, self.device.type)
        for tensor, made in zip(_tensors(node), tensors_of(value), strict=True):
            key = storage_key_of(tensor)
            if key not in known:
                known[key] = len(self.nbytes)
                self.nbytes.append(made.untyped_storage().nbytes())
                self.makers.append(node)
                self.keys.append(key)
            storages.append(known[key])
        self.storages[node] = tuple(storages)
        viewed = [given for given in node.all_input_nodes if set(storages) & set(self.storages[given])]
        if viewed and set(storages) <= {s for given in viewed for s in self.storages[given]}:
            self.sources[node] = viewed[0]

    def _kernels(self, nodes: list[fx.Node], place: Callable[[fx.Node], Any]) -> list[tuple[fx.Node, ...]]:
        return kernels(nodes, self.sources, place, lambda node: INLINED in node.meta)

    def _lifetimes(self, uses: list[list[tuple[int, int]]]) -> list[Storage]:
        end = len(self.ops)
        kept = [node for node in self.forward if _KEPT in node.meta]
        held = {s for node in (*self.forward_outputs, *kept) for s in self.storages.get(node, ())}
        returned = self.returned
        categories = {s: _category(node) for node in self.inputs for s in self.storages[node]}
        storages = []
        for index, birth in enumerate(self.birth):
            taken = [at for at, _ in uses[index]]
            death = end if birth < 0 or index in returned else max(taken)
            stays = birth < 0 or birth >= self.turn or index in held
            release = death if stays else max(at for at in taken if at < self.turn)
            category: Category = "temporaries"
            if birth < 0:
                category = categories.get(index, "inputs")
            elif index in returned - held:
                category = "gradients"
            elif birth < self.turn <= death:
                category = "activations"
            nbytes = 0 if birth == death else self.nbytes[index]
            storages.append(Storage(nbytes, birth, death, release, category, -1))
        return storages

    def _saves(self, uses: list[list[tuple[int, int]]]) -> Iterator[Save]:
        """Yield the forward storages that the backward pass reads, once for each call that it differentiates."""
        for storage, birth in enumerate(self.birth):
            taken: dict[int, list[int]] = defaultdict(list)
            for at, call in uses[storage]:
                if birth < self.turn <= at:
                    taken[call].append(at)
            for call, times in taken.items():
                yield Save(storage, birth + 1, call, min(times), max(times))

    def _working(self, nodes: tuple[fx.Node, ...]) -> Sequence[fx.Node]:
        """Return the nodes of an operator without views; the first one where all are."""
        return [node for node in nodes if node not in self.sources] or nodes[:1]

    def _op(self, nodes: tuple[fx.Node, ...], index: int, of_op: Sequence[int], saved_bytes: int) -> Op:
        working = self._working(nodes)
        is_recomputed = all(_RECOMPUTED in node.meta for node in working)
        phase: Phase = "recompute" if is_recomputed else "forward" if index < self.turn else "backward"
        call = of_op[index] if index < self.turn else self.call_of[working[-1]]
        return Op(str(working[-1].target), call, phase, 0, self._signature(working, saved_bytes), (), False)

    def _saved_bytes(self, storages: Sequence[Storage]) -> list[int]:
        """Return, for each kernel, the bytes that it holds less than its storages' lifetimes say.

        It writes over dying inputs. On a CPU, Inductor puts consecutive kernels of its own into one function, before
        which it allocates the outputs of all, and after which it frees (`CppScheduling.flush`, torch 2.13).
        """
        reused = [
            self._reused_bytes(nodes, index, storages) if is_fusible(self._working(nodes)[0]) else 0
            for index, nodes in enumerate(self.ops)
        ]
        saved: list[int] = []
        for function in self._functions():
            inside = [s for s in storages if s.birth in function or s.death in function] if len(function) > 1 else []
            for index in function:
                early = sum(s.nbytes for s in inside if index < s.birth < function.stop)
                late = sum(s.nbytes for s in inside if function.start <= s.death < index)
                saved.append(sum(reused[function.start : function.stop]) - early - late)
        return saved

    def _functions(self) -> Iterator[range]:
        """Yield the kernels that run in one function, in order."""
        start = 0
        for index in range(1, len(self.ops) + 1):
            if index in (self.turn, len(self.ops)) or not (self._is_loop(index - 1) and self._is_loop(index)):
                yield range(start, index)
                start = index

    def _is_loop(self, index: int) -> bool:
        """Tell whether Inductor puts a kernel into one function with others; views are no kernels, and end none."""
        working = self._working(self.ops[index])[0]
        return self.device.type == "cpu" and (working in self.sources or is_fusible(working))

    def _reused_bytes(self, nodes: tuple[fx.Node, ...], index: int, storages: Sequence[Storage]) -> int:
        """Return the bytes that a kernel writes into dying inputs of the same layout, less those written in between.

        A kernel that computes a node in each loop reuses no inputs; one that writes into a part of a tensor reuses
        nothing.
        """
        given = {s for node in nodes for g in node.all_input_nodes for s in self.storages[g]}
        ending = Counter(self._layout(s) for s in given if 0 <= storages[s].birth < index == storages[s].death)
        made = {s for node in nodes for s in self.storages[node] if storages[s].birth == index}
        written = Counter(self._layout(s) for s in made if index < storages[s].death)
        kernel = frozenset(nodes)
        held = {s for node in nodes if is_written_between(node, kernel) for s in self.storages[node]}
        between = Counter(self._layout(s) for s in held & made if index == storages[s].death)
        if any(puts_into(node) for node in nodes):
            written = Counter()
        if any(COMPUTED_FOR_EACH in node.meta for node in nodes):
            ending = Counter()
        reused = ending & (written - between)
        reused.subtract(between - written)
        return sum(count * layout[0] for layout, count in reused.items())

    def _layout(self, storage: int) -> tuple[int, torch.dtype, bool]:
        tensor = next(t for t in _tensors(self.makers[storage]) if storage_key_of(t) == self.keys[storage])
        return self.nbytes[storage], tensor.dtype, tensor.is_contiguous()

    def _signature(self, working: Sequence[fx.Node], reused_bytes: int) -> int:
        """Return the index of a kernel's signature, made of its operators', without fused views."""
        members = []
        for node in working:
            if isinstance(node.target, OpOverload) and node not in self.sources:
                args, kwargs = _values(node)
                member = signature(node.target, args, kwargs)
                members.append(member)
                if member not in self.operators:
                    out = node.meta.get("val")
                    self.operators[member] = work_of(node.target, args, kwargs, out, self.device.type)
        text = kernel_text(tuple(members), reused_bytes)
        if text not in self._index:
            self._index[text] = len(self._index)
            flops = sum(self.operators[member].flops for member in members)
            self._works.append(Work(flops, 0, 0, self.operators[members[0]].dtype if members else "", bool(members)))
        return self._index[text]

    def _fixed(self) -> Iterator[fx.Node]:
        mutated = {node.args[0] for node in self.graph.nodes if node.target is torch.ops.aten.copy_.default}
        for node in self.forward:
            source = node.args[0] if node.target is operator.getitem else node
            if isinstance(source, fx.Node) and (_KEPT in node.meta or _must_run_once(source, mutated)):
                yield node


def _must_run_once(node: fx.Node, mutated: set[Any]) -> bool:
    """Tell whether a second run of a node would differ, or repeat a side effect, as a collective's does.

    BatchNorm in training reads running statistics, written at the end, but its output does not depend on them.
    """
    func = node.target
    if not isinstance(func, OpOverload) or "c10d" in func.namespace:
        return True
    if node.is_impure(impure_random=False):
        return True
    args, kwargs = _values(node)
    if schema_of(func).is_mutable or draws_random_numbers(func, args, kwargs):
        return True
    trains = func is torch.ops.aten._native_batch_norm_legit_functional.default and args[5]
    return not trains and not mutated.isdisjoint(node.all_input_nodes)


def _values(node: fx.Node) -> tuple[Any, Any]:
    args, kwargs = tree_map_only(fx.Node, lambda n: n.meta.get("val"), (node.args, node.kwargs))
    return args, kwargs


def _tensors(node: fx.Node) -> Sequence[torch.Tensor]:
    return tensors_of(node.meta.get("val"))


def tensors_of(value: Any) -> Sequence[torch.Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def _category(node: fx.Node) -> Category:
    descriptor = type(node.meta.get("desc")).__name__
    if descriptor.startswith("Tangent"):
        return "gradients"
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and (value.requires_grad or isinstance(value, torch.nn.Parameter)):
        return "parameters"
    return "inputs"
