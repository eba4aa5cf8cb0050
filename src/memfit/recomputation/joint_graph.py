"""The joint forward and backward graph that AOTAutograd makes of a compiled model, as a trace.

The graph's forward operators come first, then the backward ones. A storage dies after the last operator that reads it,
as where a graph module runs with a boxed list of inputs. Inputs are alive from the start, outputs to the end.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx

from memfit._torch import OpOverload, schema_of, storage_key_of, tree_leaves, tree_map_only
from memfit.capture import draws_random_numbers, kernel_outputs, work_of
from memfit.ir import Call, Category, Module, Op, Phase, Save, Storage, Trace, Work, kernel_text
from memfit.recomputation.fusion import COMPUTED_FOR_EACH, is_fusible, is_written_between, kernels, puts_into, reached
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


class JointGraph:
    """A joint graph, which Inductor runs, as a trace: an operator of it is a kernel (`recomputation.fusion`).

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
        outputs = tree_leaves(graph.output_node().args[0])
        inputs = list(graph.find_nodes(op="placeholder"))
        self.device = next((t.device for node in inputs for t in _tensors(node) if t.device.type != "cpu"), _CPU)
        # Forward operators are those that the forward outputs need, and those that AOTAutograd tagged so.
        needed = reached(
            (node for node in outputs[:forward_outputs] if isinstance(node, fx.Node)), lambda node: node.all_input_nodes
        )
        forward: list[fx.Node] = []
        backward: list[fx.Node] = []
        for node in graph.nodes:
            if node.op == "call_function":
                source = node.args[0] if node.target is operator.getitem else node
                first = source in needed or source.meta.get("partitioner_tag") in ("is_forward", "must_be_in_forward")
                (forward if first else backward).append(node)
        self.storages: dict[fx.Node, tuple[int, ...]] = {}
        self.sources: dict[fx.Node, fx.Node] = {}
        self.nbytes: list[int] = []
        self.makers: list[fx.Node] = []
        self.keys: list[int] = []
        for node in (*inputs, *graph.find_nodes(op="get_attr"), *forward, *backward):
            self._observe(node)
        self.ops = kernels(forward, self.sources, lambda node: tuple(module_stack(node)))
        self.turn = len(self.ops)
        self.ops += kernels(backward, self.sources, lambda node: node.meta.get(_RECOMPUTED))
        position = {node: index for index, nodes in enumerate(self.ops) for node in nodes}
        self.birth = [position.get(node, -1) for node in self.makers]
        self.returned = frozenset(s for node in outputs for s in self.storages.get(node, ()))
        mutated = {node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default}
        sources = [(node, node.args[0] if node.target is operator.getitem else node) for node in forward]
        self.fixed = frozenset(
            node
            for node, source in sources
            if isinstance(source, fx.Node) and (_KEPT in node.meta or _must_run_once(source, mutated))
        )
        modules, calls, of_op, of_sequence = self._read_calls(called)
        self.call_of = {node: of_sequence.get(node.meta.get("seq_nr", -1), -1) for node in backward}
        uses: list[list[tuple[int, int]]] = [[] for _ in self.nbytes]
        for index, nodes in enumerate(self.ops):
            for node in nodes:
                for given in (node, *node.all_input_nodes):
                    for storage in self.storages[given]:
                        uses[storage].append((index, self.call_of.get(node, -1)))
        kept = [*outputs[:forward_outputs], *(node for node in forward if _KEPT in node.meta)]
        held = {s for node in kept for s in self.storages.get(node, ())}
        categories = {s: _category(node) for node in inputs for s in self.storages[node]}
        storages, saves = [], []
        for number, birth in enumerate(self.birth):
            times = [at for at, _ in uses[number]]
            death = len(self.ops) if birth < 0 or number in self.returned else max(times)
            stays = birth < 0 or birth >= self.turn or number in held
            release = death if stays else max(at for at in times if at < self.turn)
            category: Category = "temporaries"
            if birth < 0:
                category = categories.get(number, "inputs")
            elif number in self.returned - held:
                category = "gradients"
            elif birth < self.turn <= death:
                category = "activations"
            storages.append(Storage(0 if birth == death else self.nbytes[number], birth, death, release, category, -1))
            # What the backward pass reads of the forward pass is saved once for each call that it differentiates.
            taken: dict[int, list[int]] = defaultdict(list)
            for at, call in uses[number]:
                if birth < self.turn <= at:
                    taken[call].append(at)
            saves += [Save(number, birth + 1, call, min(reads), max(reads)) for call, reads in taken.items()]
        self.operators: dict[str, Work] = {}
        numbers: dict[str, int] = {}
        works: list[Work] = []
        ops = []
        for index, (nodes, saved_bytes) in enumerate(zip(self.ops, self._saved_bytes(storages), strict=True)):
            working = self._working(nodes)
            text, work = self._signature(working, saved_bytes)
            if text not in numbers:
                numbers[text] = len(works)
                works.append(work)
            is_recomputed = all(_RECOMPUTED in node.meta for node in working)
            phase: Phase = "recompute" if is_recomputed else "forward" if index < self.turn else "backward"
            call = of_op[index] if index < self.turn else self.call_of[working[-1]]
            ops.append(Op(str(working[-1].target), call, phase, 0, numbers[text], (), False))
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
            saves=saves,
            signatures=list(numbers),
            works=works,
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

    def _read_calls(self, called: Counter[str]) -> tuple[list[Module], list[Call], list[int], dict[int, int]]:
        """Read the calls of modules from the forward operators.

        Returns:
            A module for each call, the calls, for each operator the innermost call, or -1, and for each of autograd's
            sequence numbers the same.
        """
        modules: list[Module] = []
        calls: list[Call] = []
        of_op: list[int] = []
        of_sequence: dict[int, int] = {}
        open_calls: list[tuple[str, int]] = []
        for index, nodes in enumerate(self.ops[: self.turn]):
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
                    of_sequence.setdefault(number, of_op[-1])
        for index, made in enumerate(calls):
            inside = [node for nodes in self.ops[made.start : made.end] for node in nodes]
            read = {s for node in inside for given in (node, *node.all_input_nodes) for s in self.storages[given]}
            calls[index] = replace(made, inputs=tuple(sorted(s for s in read if self.birth[s] < made.start)))
        return modules, calls, of_op, of_sequence

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

    def _working(self, nodes: tuple[fx.Node, ...]) -> Sequence[fx.Node]:
        """Return the nodes of an operator without views; the first one where all are."""
        return [node for node in nodes if node not in self.sources] or nodes[:1]

    def _saved_bytes(self, storages: Sequence[Storage]) -> list[int]:
        """Return, for each kernel, the bytes that it holds less than its storages' lifetimes say.

        It writes over dying inputs. On a CPU, Inductor puts consecutive kernels of its own into one function, before
        which it allocates the outputs of all, and after which it frees (`CppScheduling.flush`, torch 2.13). Views are
        no kernels, and end none.
        """
        working = [self._working(nodes)[0] for nodes in self.ops]
        reused = [
            self._reused_bytes(nodes, index, storages) if is_fusible(working[index]) else 0
            for index, nodes in enumerate(self.ops)
        ]
        is_loop = [self.device.type == "cpu" and (node in self.sources or is_fusible(node)) for node in working]
        ends = [at for at in range(1, len(working)) if at == self.turn or not (is_loop[at - 1] and is_loop[at])]
        saved: list[int] = []
        for function in itertools.starmap(range, itertools.pairwise([0, *ends, len(working)])):
            inside = [s for s in storages if s.birth in function or s.death in function] if len(function) > 1 else []
            for index in function:
                early = sum(s.nbytes for s in inside if index < s.birth < function.stop)
                late = sum(s.nbytes for s in inside if function.start <= s.death < index)
                saved.append(sum(reused[function.start : function.stop]) - early - late)
        return saved

    def _reused_bytes(self, nodes: tuple[fx.Node, ...], index: int, storages: Sequence[Storage]) -> int:
        """Return the bytes that a kernel writes into dying inputs of the same layout, less those written in between.

        A kernel that computes a node in each loop reuses no inputs; one that writes into a part of a tensor reuses
        nothing.
        """

        def layouts(numbers: Iterable[int]) -> Counter[tuple[int, torch.dtype, bool]]:
            found = Counter[tuple[int, torch.dtype, bool]]()
            for number in numbers:
                tensor = next(t for t in _tensors(self.makers[number]) if storage_key_of(t) == self.keys[number])
                found[self.nbytes[number], tensor.dtype, tensor.is_contiguous()] += 1
            return found

        given = {s for node in nodes for g in node.all_input_nodes for s in self.storages[g]}
        ending = layouts(s for s in given if 0 <= storages[s].birth < index == storages[s].death)
        made = {s for node in nodes for s in self.storages[node] if storages[s].birth == index}
        written = layouts(s for s in made if index < storages[s].death)
        kernel = frozenset(nodes)
        held = {s for node in nodes if is_written_between(node, kernel) for s in self.storages[node]}
        between = layouts(s for s in held & made if index == storages[s].death)
        if any(puts_into(node) for node in nodes):
            written.clear()
        if any(COMPUTED_FOR_EACH in node.meta for node in nodes):
            ending.clear()
        reused = ending & (written - between)
        reused.subtract(between - written)
        return sum(count * layout[0] for layout, count in reused.items())

    def _signature(self, working: Sequence[fx.Node], reused_bytes: int) -> tuple[str, Work]:
        """Return a kernel's signature, made of its operators', without fused views, and its work."""
        members = []
        for node in working:
            if isinstance(node.target, OpOverload) and node not in self.sources:
                args, kwargs = _values(node)
                member = signature(node.target, args, kwargs)
                members.append(member)
                if member not in self.operators:
                    out = node.meta.get("val")
                    self.operators[member] = work_of(node.target, args, kwargs, out, self.device.type)
        flops = sum(self.operators[member].flops for member in members)
        work = Work(flops, 0, 0, self.operators[members[0]].dtype if members else "", bool(members))
        return kernel_text(tuple(members), reused_bytes), work


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
