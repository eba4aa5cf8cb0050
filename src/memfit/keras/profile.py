"""What TensorFlow's allocator holds, and with it the bytes and seconds of each layer of a model.

Each unit runs by itself on copies of the inputs that the model gives it. What TensorFlow holds after the unit, and what
it frees when an output or an input is let go, tells what the backward pass needs: the unit's own buffers, its outputs,
its inputs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.errors import UsageError
from memfit.keras.internals import keras, losses_added, tf
from memfit.keras.recompute import Graph, Stretch, Unit, joined, states_of
from memfit.keras.workload import Workload

_TIMED = 3
_COUNTED_BYTES = 2**18
"""Smaller tensors are in no count of TensorFlow's on the CPU: they are taken as needed, and as no views."""


def default_device() -> str:
    """Return the name of the first GPU, or of the CPU where there is none."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def held_bytes(device: str) -> int:
    """Return the bytes that TensorFlow has allocated on a device."""
    return int(tf.config.experimental.get_memory_info(device)["current"])


def peak_of(run: Callable[[], Any], device: str) -> int:
    """Return the bytes that TensorFlow allocates at the peak of one run, beyond those held before.

    Raises:
        UsageError: TensorFlow does not count the device's memory.
    """
    try:
        tf.config.experimental.reset_memory_stats(device)
    except ValueError as e:
        raise UsageError(
            f"TensorFlow does not count the memory of device={device!r} ({e}): for a CPU, set TF_ENABLE_ONEDNN_OPTS=1"
            " in the environment before TensorFlow is imported"
        ) from e
    before = held_bytes(device)
    run()
    return int(tf.config.experimental.get_memory_info(device)["peak"]) - before


def measured_peak(run: Callable[[], Any], device: str = "CPU:0") -> int:
    """Return the peak memory of a run in bytes, minus the memory allocated before it.

    Args:
        run: The function, run once to trace it and once to measure it.
        device: Name of the device for `tf.config.experimental.get_memory_info`.

    Raises:
        UsageError: TensorFlow does not count the device's memory. It counts a CPU's where oneDNN is on, which it turns
            off by itself for processors without instructions for neural networks (AVX512-VNNI).
    """
    run()
    return peak_of(run, device)


@dataclass(frozen=True)
class Cost:
    """What a unit takes.

    Attributes:
        output_bytes: Of each output; 0 where it is a view of an input.
        needs_inputs: For each input, whether its backward pass needs it.
        needs_outputs: The same for each output.
        saved_bytes: What its backward pass needs beside these.
        forward_bytes: What its forward pass holds at its peak beyond its outputs and `saved_bytes`.
        backward_bytes: What its backward pass allocates at its peak, gradients included.
        weight_bytes: Gradients of its weights.
        forward_seconds: Of its forward pass.
        backward_seconds: Of its backward pass.
        refused: Why it must not be called again in the backward pass; "" where it may.
    """

    output_bytes: tuple[int, ...]
    needs_inputs: tuple[bool, ...]
    needs_outputs: tuple[bool, ...]
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    weight_bytes: int
    forward_seconds: float
    backward_seconds: float
    refused: str = ""


def profile(workload: Workload, graph: Graph, device: str, progress: Callable[[int, int], None]) -> list[Cost]:
    """Return the cost of each unit of a model; statistics and generators are as they were after.

    Args:
        device: Name of the device whose memory is counted.
        progress: Called with the number of units measured, and of all.
    """
    measured = _Measured(graph, device, workload.run_eagerly, progress)
    workload.loss_fn(joined(workload.model, graph, [measured], f"{graph.name}_measured"), workload.batch)
    return measured.costs


class _Measured(Stretch):
    """Units that are measured when they are called."""

    def __init__(self, graph: Graph, device: str, is_eager: bool, progress: Callable[[int, int], None]) -> None:
        super().__init__(graph, 0, len(graph.units))
        self.device, self.is_eager, self.progress = device, is_eager, progress
        self.costs: list[Cost] = []
        self.known: dict[Any, Cost] = {}

    def value(self, unit: Unit, values: dict[int, Any], training: bool | None) -> list[Any]:
        """Return what a unit gives, after it was measured."""
        state = [(v, tf.convert_to_tensor(v.value)) for v in (states_of(unit.operation) if unit.is_layer else [])]
        losses = losses_added(unit.operation) if unit.is_layer else 0
        results = unit.call(values, training)
        refused = unit.refused
        if unit.is_layer and losses_added(unit.operation) > losses:
            refused = refused or "adds a loss in its call"
        with keras.StatelessScope(state):  # nothing that is measured changes the model
            both = zip(results, unit.call(values, training), strict=True)
            if any(a.numpy().tobytes() != b.numpy().tobytes() for a, b in both):
                refused = refused or "returns other values when it is called again"
        del both
        for variable, before in state:
            variable.assign(before)
        given = {t: values[t] for t in unit.inputs}
        key = _signature(unit, given, refused)
        if key not in self.known:
            self.known[key] = _Meter(unit, given, state, training, self.device, self.is_eager).cost(refused)
        self.costs.append(self.known[key])
        self.progress(len(self.costs), len(self.units))
        return results


def _signature(unit: Unit, values: dict[int, Any], refused: str) -> Any:
    """Return a key that calls of the same cost share."""
    shapes = tuple((tuple(v.shape), str(v.dtype)) for v in values.values())
    if not unit.is_layer:
        return unit.name, shapes
    config = {key: value for key, value in unit.operation.get_config().items() if key not in ("name", "seed")}
    weights = tuple((tuple(v.shape), v.trainable) for v in unit.operation.variables)
    return type(unit.operation).__qualname__, str(config), weights, shapes, refused


@dataclass
class _Meter:
    """The measurement of one unit."""

    unit: Unit
    values: dict[int, Any]
    state: list[tuple[Any, Any]]
    training: bool | None
    device: str
    is_eager: bool

    def __post_init__(self) -> None:
        """Let the unit run as the step does: in a function whose gradient is made with it, or eagerly."""
        self.function = self._function(self._forward)
        self.weights = list(self.unit.operation.trainable_variables) if self.unit.is_layer else []

    def cost(self, refused: str) -> Cost:
        """Return what the unit takes."""
        self._backward_peak()  # makes once what is made once
        gc.collect()
        saved, freed_outputs, freed_inputs, output_bytes, forward_peak = self._held()
        forward, backward, needed = self._steps()
        kept = sum(size for size, freed in zip(output_bytes, freed_outputs, strict=True) if not freed and size)
        alone = max(0, saved - kept)
        saved = alone if needed is None else min(alone, max(0, needed - kept))
        return Cost(
            output_bytes=output_bytes,
            needs_inputs=tuple(not freed for freed in freed_inputs),
            needs_outputs=tuple(
                not freed and size > 0 for size, freed in zip(output_bytes, freed_outputs, strict=True)
            ),
            saved_bytes=saved,
            forward_bytes=max(0, forward_peak - sum(output_bytes) - alone),
            backward_bytes=self._backward_peak(),
            weight_bytes=sum(_nbytes(v) for v in self.weights),
            forward_seconds=forward,
            backward_seconds=backward,
            refused=refused,
        )

    def run(self, values: dict[int, Any]) -> list[Any]:
        """Return what the unit gives."""
        return list(self.function(*(values[t] for t in self.values)))

    def _held(self) -> tuple[int, list[bool], list[bool], tuple[int, ...], int]:
        """Return what the unit keeps, whether each output and input is freed, outputs' bytes, the forward peak."""
        copies = {t: _copy(v) for t, v in self.values.items()}
        before = held_bytes(self.device)
        found: list[Any] = []
        with tf.GradientTape() as tape:
            tape.watch([v for v in copies.values() if v.dtype.is_floating])
            peak = peak_of(lambda: found.extend(self.run(copies)), self.device)
        fresh = held_bytes(self.device) - before
        sizes = tuple(0 if fresh < _nbytes(v) >= _COUNTED_BYTES else _nbytes(v) for v in found)
        freed_outputs, freed_inputs = [], []
        while found:
            held = held_bytes(self.device)
            del found[0]
            freed_outputs.append(held_bytes(self.device) < held)
        saved = held_bytes(self.device) - before
        for tensor in list(copies):
            held = held_bytes(self.device)
            del copies[tensor]
            freed_inputs.append(held_bytes(self.device) < held)
        del tape
        return saved, freed_outputs, freed_inputs, sizes, peak

    def _targets(self, values: dict[int, Any]) -> list[Any]:
        return [*(v for v in values.values() if v.dtype.is_floating), *(v.value for v in self.weights)]

    def _backward_peak(self) -> int:
        targets = self._targets(self.values)
        with tf.GradientTape() as tape:
            tape.watch([t for t in targets if not isinstance(t, tf.Variable)])
            results = [v for v in self.run(self.values) if v.dtype.is_floating]
        gradients = [tf.ones_like(r) for r in results]
        if not targets or not results:
            return 0
        return peak_of(lambda: tape.gradient(results, targets, output_gradients=gradients), self.device)

    def _steps(self) -> tuple[float, float, int | None]:
        """Return the seconds of the forward and the backward pass, and in a function what the backward pass needs.

        That is less than the unit's function by itself keeps, since operators of both passes are fused and shared. It
        is what a second call of the unit adds to the peak, whose backward pass comes before that of the first one.
        """
        forward, once, twice = (self._function(f) for f in (self._forward, self._once, self._twice))
        values = list(self.values.values())
        zero = tf.constant(0.0)
        seconds = [_least_seconds(lambda: forward(*values)), _least_seconds(lambda: once(values, zero))]
        backward = max(0.0, seconds[1] - seconds[0])
        if self.is_eager:
            return seconds[0], backward, None
        copies = [_copy(v) for v in values]
        twice(values, copies)
        peaks = [peak_of(lambda: once(values, zero), self.device), peak_of(lambda: twice(values, copies), self.device)]
        return seconds[0], backward, max(0, peaks[1] - peaks[0])

    def _function(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function as the step runs one."""
        return run if self.is_eager else tf.function(lambda *values: run(*values), autograph=False)

    def _called(self, values: Sequence[Any]) -> Callable[..., Any]:
        """Call the unit, and return what makes its gradients after a number is there: a number that needs them all."""
        with keras.StatelessScope(self.state):
            named = dict(zip(self.values, values, strict=True))
            targets = self._targets(named)
            with tf.GradientTape() as tape:
                tape.watch([t for t in targets if not isinstance(t, tf.Variable)])
                results = [v for v in self.unit.call(named, self.training) if v.dtype.is_floating]

        def gradients(number: Any = 0.0) -> Any:
            upstream = _after(number, [tf.zeros(r.shape, r.dtype) for r in results])
            found = tape.gradient(results, targets, output_gradients=upstream) if targets and results else []
            sums = [tf.reduce_sum(tf.cast(tf.convert_to_tensor(g), "float32")) for g in found if g is not None]
            return tf.add_n(sums) if sums else tf.constant(0.0)

        self.results = results
        return gradients

    def _forward(self, *values: Any) -> Any:
        with keras.StatelessScope(self.state):  # from the same state each time
            return self.unit.call(dict(zip(self.values, values, strict=True)), self.training)

    def _once(self, values: Sequence[Any], number: Any) -> Any:
        return self._called(_after(number, values))()

    def _twice(self, first: Sequence[Any], second: Sequence[Any]) -> Any:
        first_gradients = self._called(first)
        sums = [tf.cast(tf.reshape(r, [-1])[0], "float32") for r in self.results] or [tf.constant(0.0)]
        found = self._once(second, tf.add_n(sums))
        self.results = []
        return first_gradients(found)


def _after(number: Any, values: Sequence[Any]) -> list[Any]:
    """Return copies of values that are made after a number is there, as `tf.recompute_grad` makes them."""
    zero = tf.where(number == number, 0.0, float("nan"))
    return [v + tf.cast(zero, v.dtype) if v.dtype.is_floating else v for v in values]


def _copy(value: Any) -> Any:
    return tf.raw_ops.DeepCopy(x=value)


def _nbytes(tensor: Any) -> int:
    return int(tf.TensorShape(tensor.shape).num_elements() or 0) * int(tf.as_dtype(tensor.dtype).size)


def _least_seconds(run: Callable[[], Any]) -> float:
    run()
    found = []
    for _ in range(_TIMED):
        started = time.perf_counter()
        keras.tree.map_structure(lambda t: t.device, run())
        found.append(time.perf_counter() - started)
    return min(found)
