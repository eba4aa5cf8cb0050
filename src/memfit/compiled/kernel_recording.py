"""Compiled graphs under fake tensors: their kernels run one after the other, and each is recorded as one operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx

from memfit._torch.compilers import mark_boxed
from memfit._torch.dispatch import OpOverload
from memfit._torch.fake import FakeTensor, FakeTensorMode
from memfit._torch.tensors import tree_leaves
from memfit.capture.recorder import Recorder
from memfit.compiled.joint_graph import JointGraph, tensors_of
from memfit.ir.trace import Op, Phase, Save

_ALWAYS = 1 << 62


class RecordedGraph:
    """A joint graph, whose two passes run as the compiled code would hold memory.

    A kernel's operators run as one: what only they read takes no memory. A storage dies after the last kernel that
    reads it.

    Args:
        joint: The graph as it is partitioned.
    """

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        self.turn = next((i for i, op in enumerate(joint.trace.ops) if op.phase != "forward"), len(joint.trace.ops))
        self.kernel_of = {node.name: index for index, nodes in enumerate(joint.ops) for node in nodes}
        self.storages_of = {node.name: storages for node, storages in joint.storages.items()}
        self.waiting: list[_Passed] = []

    def code(self, module: fx.GraphModule, *, is_backward: bool) -> Callable[[list[Any]], Any]:
        """Return code for the graph module of one pass, which takes a list of inputs and empties it."""

        def run(inputs: list[Any]) -> Any:
            recorder = Recorder.active()
            passed = self.waiting.pop() if is_backward and self.waiting else _Passed()
            return _Pass(self, module, is_backward, recorder, passed).run(inputs)

        return mark_boxed(run)


class _Passed:
    """The record of a forward pass for its backward pass: its storages, by number in the joint graph, and its saves."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.saves: list[tuple[int, Save]] = []
        self.first_call = 0


class _Pass:
    """One run of one pass."""

    def __init__(
        self,
        graph: RecordedGraph,
        module: fx.GraphModule,
        is_backward: bool,
        recorder: Recorder | None,
        passed: _Passed,
    ) -> None:
        self.graph, self.trace, self.module, self.is_backward = graph, graph.joint.trace, module, is_backward
        self.recorder, self.passed = recorder, passed
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
        self.offset = 0 if recorder is None else len(recorder.now.ops) - (self.graph.turn if self.is_backward else 0)
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
            self.values[node] = _as_fake(getattr(self.module, str(node.target)), self.values.values())
        self._free(-1)
        for index in sorted(self.kernels):
            self._run_kernel(index, recorder)
            self._free(index)
        outputs = fx.map_arg(self.module.graph.output_node().args[0], self.values.__getitem__)
        if recorder is not None:
            self._finish_backward(recorder) if self.is_backward else self._finish_forward(recorder)
        return list(outputs) if isinstance(outputs, tuple | list) else outputs

    def _run_kernel(self, index: int, recorder: Recorder | None) -> None:
        if self.recorder is None:
            for node in self.kernels[index]:
                self.values[node] = self._value(node)
            return
        with self.recorder.paused():
            for node in self.kernels[index]:
                self.values[node] = self._value(node)
        if recorder is not None:
            recorder.now.ops.append(self._op(index, recorder))
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

    def _op(self, index: int, recorder: Recorder) -> Op:
        op, trace = self.trace.ops[index], self.trace
        number = recorder.add_signature(trace.signatures[op.signature], trace.works[op.signature])
        phase: Phase = op.phase if op.phase == "recompute" else recorder.phase
        call = op.call + self.passed.first_call if op.call >= 0 else -1
        return Op(op.name, call, phase, recorder.microbatch, number, (), op.random)

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

    def _finish_backward(self, recorder: Recorder) -> None:
        """Record the first and the last read of each save."""
        for index, save in self.passed.saves:
            recorder.now.saves[index] = replace(
                recorder.now.saves[index], unpacked=save.unpacked + self.offset, death=save.death + self.offset
            )


def _as_fake(value: Any, others: Any) -> Any:
    """Return a constant of a graph as a fake tensor, where the others are."""
    mode = next((t.fake_mode for t in tree_leaves(list(others)) if isinstance(t, FakeTensor)), None)
    if isinstance(mode, FakeTensorMode) and isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return mode.from_tensor(value)
    return value
