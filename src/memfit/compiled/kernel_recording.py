"""Compiled graphs under fake tensors: their kernels run one after the other, and each is recorded as one operator."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx

from memfit._torch import FakeTensor, FakeTensorMode, OpOverload, mark_boxed, tree_leaves
from memfit.capture import Recorder
from memfit.compiled.joint_graph import JointGraph, tensors_of
from memfit.ir import Op, Phase, Save

_ALWAYS = 1 << 62


class _Passed:
    """The record of a forward pass for its backward pass: its storages, by number in the joint graph, and its saves."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.saves: list[tuple[int, Save]] = []
        self.first_call = 0


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


class _Pass:
    def __init__(self, graph: RecordedGraph, module: fx.GraphModule, is_backward: bool) -> None:
        self.graph, self.trace, self.module, self.is_backward = graph, graph.joint.trace, module, is_backward
        self.recorder = Recorder.active()
        self.passed = graph.waiting.pop() if is_backward and graph.waiting else _Passed()
        self.values: dict[fx.Node, Any] = {}
        self.kernels: dict[int, list[fx.Node]] = defaultdict(list)
        self.frees: dict[int, list[fx.Node]] = defaultdict(list)
        kernel_of = graph.kernel_of
        for node in module.graph.nodes:
            if node.op == "output":
                continue
            if node.op == "call_function":
                self.kernels[kernel_of[node.name]].append(node)
            last = max((kernel_of[user.name] if user.op != "output" else _ALWAYS for user in node.users), default=-1)
            self.frees[max(last, kernel_of.get(node.name, -1) if node.op == "call_function" else -1)].append(node)

    def run(self, inputs: list[Any]) -> Any:
        """Run the pass, and return its outputs."""
        recorder = self.recorder if self.recorder is not None and self.recorder.recording else None
        self.offset = (
            0 if recorder is None else len(recorder.now.ops) - (self.graph.joint.turn if self.is_backward else 0)
        )
        if recorder is not None:
            for member, work in self.graph.joint.operators.items():  # whose costs make up those of kernels
                recorder.add_signature(member, work)
            if not self.is_backward:
                self.passed.first_call = len(recorder.now.calls)
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
        self._free(-1)
        for index in sorted(self.kernels):
            self._run_kernel(index, recorder)
            self._free(index)
        outputs = fx.map_arg(self.module.graph.output_node().args[0], self.values.__getitem__)
        if recorder is not None:
            if self.is_backward:  # record the first and the last read of each save
                for number, save in self.passed.saves:
                    recorder.now.saves[number] = replace(
                        recorder.now.saves[number], unpacked=save.unpacked + self.offset, death=save.death + self.offset
                    )
            else:
                self._finish_forward(recorder)
        return list(outputs) if isinstance(outputs, tuple | list) else outputs

    def _run_kernel(self, index: int, recorder: Recorder | None) -> None:
        with contextlib.nullcontext() if self.recorder is None else self.recorder.paused():
            for node in self.kernels[index]:
                self.values[node] = self._value(node)
        if recorder is not None:
            op = self.trace.ops[index]
            number = recorder.add_signature(self.trace.signatures[op.signature], self.trace.works[op.signature])
            phase: Phase = op.phase if op.phase == "recompute" else recorder.phase
            call = op.call + self.passed.first_call if op.call >= 0 else -1
            recorder.now.ops.append(Op(op.name, call, phase, recorder.microbatch, number, (), op.random))
        position = -1 if recorder is None else len(recorder.now.ops) - 1
        for node in self.kernels[index]:
            self._observe(node, position, index)

    def _value(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if isinstance(node.target, OpOverload) and self.recorder is not None:
            return self.recorder.run(node.target, args, kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _observe(self, node: fx.Node, position: int, kernel: int = -1) -> None:
        """Observe the storages of a node's outputs, except those that only its own kernel reads."""
        if self.recorder is None:
            return
        named = self.graph.storages_of.get(node.name, ())
        for tensor, storage in zip(tensors_of(self.values[node]), named, strict=False):
            record = self.trace.storages[storage]
            if kernel >= 0 and record.birth == record.death == kernel:
                continue
            observed = self.recorder.observe(tensor, position)
            if observed is not None:
                self.passed.storages[storage] = observed

    def _free(self, index: int) -> None:
        for node in self.frees.pop(index, ()):
            del self.values[node]

    def _finish_forward(self, recorder: Recorder) -> None:
        """Record the calls of modules, the saves, and the releases of saved storages."""
        first, storages = self.passed.first_call, self.passed.storages
        for call in self.trace.calls:
            recorder.now.calls.append(
                replace(
                    call,
                    module=recorder.add_module(self.trace.modules[call.module]),
                    parent=call.parent + first if call.parent >= 0 else -1,
                    microbatch=recorder.microbatch,
                    start=call.start + self.offset,
                    end=call.end + self.offset,
                    inputs=tuple(storages[s] for s in call.inputs if s in storages),
                )
            )
        for save in self.trace.saves:
            if save.storage not in storages:
                continue
            saved_by = save.call + first if save.call >= 0 else -1
            self.passed.saves.append((len(recorder.now.saves), save))
            recorder.now.saves.append(Save(storages[save.storage], save.at + self.offset, saved_by, -1, -2))
        for storage, observed in storages.items():
            record = self.trace.storages[storage]
            if record.birth >= 0 and record.release != record.death:
                recorder.now.releases[observed] = record.release + self.offset
        self.graph.waiting.append(self.passed)
