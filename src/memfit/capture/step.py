"""From a training step to its trace."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)

from memfit.batch import map_tensors
from memfit.capture.attention import Attention
from memfit.capture.composites import composed_as_without_a_mode
from memfit.capture.courses import Course, Reading, worst_course
from memfit.capture.fake import fake_copy, mode_of, nothing_changes, real_copy
from memfit.capture.gpu import fake_gpu
from memfit.capture.reads import Replay
from memfit.capture.recorder import LiveStorage, Recorder, Recording
from memfit.capture.values import KnownValues, libraries_run_as_with_data
from memfit.errors import CaptureError, MemfitError
from memfit.ir.device import Device
from memfit.ir.trace import Category, Module, Parameter, Phase, Storage, Trace
from memfit.sparse import parts
from memfit.units import format_bytes
from memfit.workload import StepProgram, Workload, fingerprint, part_of, samples_of, tensors_of, uncut_note

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_VALUES_HINT = (
    "Shapes must not depend on values: replace boolean-mask indexing or nonzero() by masking, or take such code out of"
    " Workload.loss_fn; mixtures of experts of transformers take experts_implementation='grouped_mm'"
)
_OPERATOR_HINT = "PyTorch can't run this operator without data: take it out of Workload.loss_fn, or estimate without it"
_CLOSURE_HINT = (
    "memfit runs the forward and backward passes once a step and calls Workload.optimizer.step() without a closure:"
    " give an optimizer that needs none"
)
_SUBCLASS_HINT = (
    "Tensors of classes of their own are captured as plain ones, with their attributes and without their methods: give"
    " Workload.batch tensor.as_subclass(torch.Tensor), and what the method returns beside it"
)
_OTHER_HINT = "See whether Workload.loss_fn(model, batch) and backward() run with data"

_NOTED_GARBAGE = 1e-3  # of the peak
_OTHER_STEPS = 3  # recorded where the forward pass is another each time it is called
_OTHER_EACH_TIME = (
    "the forward pass runs other operators each time it is called: predicted is the step that takes most of"
    f" {_OTHER_STEPS + 1} in a row, and nothing is recomputed; others may take more"
)
_COMPILED = (
    "torch.compile is not predicted: the step was captured as it runs without; compiled, it takes less time, and mostly"
    " less memory for activations"
)

BuildStep = Callable[[Workload], contextlib.AbstractContextManager[StepProgram]]
"""Makes the step to capture from a copy of the workload; on leaving, undoes what it did to the copy."""


def capture(
    workload: Workload,
    build: BuildStep,
    precision: str = "32-true",
    microbatch_size: int | None = None,
    *,
    device: Device | None = None,
    warm: bool = False,
    reading: Reading | None = None,
) -> Trace:
    """Return the trace of a step, run under fake tensors: no data, no memory, nothing of the user's changed.

    The step runs twice, since the first makes the optimizer's state, and the second is recorded. Of
    many equal microbatches two are run: the second repeats; all are run where they add up sparse gradients. A step that
    reads values of tensors, or whose course depends on draws, runs again for each other course that it may take
    (`capture.courses`).

    Args:
        workload: The user's workload.
        build: Makes the step from a copy of it.
        precision: Goes into the trace.
        microbatch_size: Samples in a microbatch; None for the whole batch.
        device: The device that the copy runs on; None for the CPU. A GPU stands for one of its kind, and
            needs fake CUDA in this process (`memfit.devices.fake_cuda`).
        warm: The workload comes from `warmed`, and the step updates its parameters as the one there did: it runs
            once.
        reading: Runs the step with data, and returns what it reads; None where that can't be.

    Raises:
        CaptureError: The step can't be run under fake tensors.
        WorkloadError: The workload can't be copied, or its loss function uses the original model.
    """

    def run(course: Course) -> Trace:
        with _fake_copied(workload, device, microbatch_size) as (copied, values, attention):
            trace = _record(workload, copied, build, values, precision, microbatch_size, attention, warm, course)
        if trace.microbatches < trace.scale_microbatches and _adds_up_sparse_gradients(trace):
            with _fake_copied(workload, device, None) as (copied, values, attention):
                trace = _record(workload, copied, build, values, precision, microbatch_size, attention, warm, course)
        return trace

    trace = worst_course(run, workload.values, reading)
    if warm and trace.slack:
        raise CaptureError("the step may take other courses: it is captured from its first step on")
    said = [uncut_note(workload), _COMPILED if is_compiled(workload) else None]
    notes = [*trace.notes, *(note for note in said if note)]
    return replace(trace, device=trace.device if device is None else device.name, notes=notes)


def warmed(workload: Workload, build: BuildStep, *, device: Device | None = None) -> Workload:
    """Return a copy under fake tensors that has made a step: for many captures, which then need not make it first.

    Args:
        workload: The user's workload.
        build: Makes the step from a copy of it.
        device: As of the captures.

    Raises:
        CaptureError: The step can't be run under fake tensors.
        WorkloadError: The workload can't be copied, or its loss function uses the original model.
    """
    with _fake_copied(workload, device, None) as (copied, values, _), _faked(values), build(copied) as step:
        values.replay = Replay(stated=workload.values)
        step(copied.batch)
    return copied


def reads_unknown(workload: Workload, build: BuildStep) -> bool:
    """Tell whether the forward pass of a workload with data reads values that are not known without.

    Also where it can't be told, since the forward pass raises on what it is told instead.
    """
    replay = Replay(stated=workload.values)
    try:
        with _fake_copied(workload, None, None) as (copied, values, _), _faked(values), build(copied) as step:
            values.replay = replay
            with replay.arrays(values.value_of):
                step.compute_loss(copied.batch)
    except CaptureError:
        return True
    return bool(replay.guesses) or values.reads_draws


def _adds_up_sparse_gradients(trace: Trace) -> bool:
    """Tell whether a microbatch adds to a sparse gradient, which then has the entries of both."""
    adding = (op for op in trace.ops if op.phase == "backward" and op.microbatch and op.name == "aten.add_.Tensor")
    return any('"args":[{"s":' in trace.signatures[op.signature] for op in adding)


@contextlib.contextmanager
def _fake_copied(
    workload: Workload, device: Device | None, microbatch_size: int | None
) -> Iterator[tuple[Workload, KnownValues, Attention | None]]:
    """Yield a copy of a workload under fake tensors, for a step to run there."""
    values = KnownValues.of(mode_of(workload))
    attention = fake_gpu(device) if device is not None and device.kind == "cuda" else None
    place = torch.device("cuda", 0) if attention else None
    values.fake.allow_fallback_kernels = attention is None  # which run operators on real zeros
    with nothing_changes(workload), _one_thread_and_no_collector():
        moved = workload if place is None else dataclasses.replace(workload, batch=_as_moved(workload.batch, values))
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors_of(moved.batch))
        with _faked(values if is_fake else None):  # packed sequences are cut by the values of their indices
            shortened = _shortened(moved, microbatch_size)
        copied = _unwrapped(fake_copy(shortened, values, place))
        with _explained(), torch.compiler.set_stance("force_eager"), libraries_run_as_with_data():
            yield copied, values, attention


def capture_real(
    workload: Workload, build: BuildStep, precision: str = "32-true", microbatch_size: int | None = None
) -> Trace:
    """Return the trace of a step that really runs, on a copy of the workload, through the same records."""
    with nothing_changes(workload), _one_thread_and_no_collector():
        copied = real_part(workload, microbatch_size)
        return _record(workload, copied, build, None, precision, microbatch_size)


def real_part(workload: Workload, microbatch_size: int | None) -> Workload:
    """Return an independent copy of a workload with data, with at most two microbatches in its batch."""
    return _unwrapped(real_copy(_shortened(workload, microbatch_size)))


def is_compiled(workload: Workload) -> bool:
    """Tell whether a model, a module of it (`compile()` in place too), or the loss function is compiled."""
    modules = any(
        "_orig_mod" in module._modules or module._compiled_call_impl is not None for module in workload.model.modules()
    )
    return modules or hasattr(workload.loss_fn, "_torchdynamo_orig_callable")


def _as_moved(batch: Any, values: KnownValues) -> Any:
    """Return a batch as it is once moved to another device: of a view's storage, only what the view shows."""

    def moved(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.layout is not torch.strided:
            return leaf
        return leaf if leaf.untyped_storage().nbytes() == leaf.numel() * leaf.itemsize else leaf.clone()

    with _faked(values):
        return map_tensors(moved, batch)


def _shortened(workload: Workload, microbatch_size: int | None) -> Workload:
    """Return the workload with at most two microbatches in its batch, as views: its storages keep their size."""
    size = samples_of(workload)
    two = min(size, 2 * (microbatch_size or size))
    if two == size:
        return workload
    start = _heaviest(workload, microbatch_size or size, size)
    batch = part_of(workload, workload.batch, start, start + two)
    counted = workload.batch_size if callable(workload.batch_size) or workload.batch_size is None else two
    return dataclasses.replace(workload, batch=_Shortened(batch, workload.batch), batch_size=counted)


@dataclasses.dataclass
class _Shortened:
    """A part of a batch that is run, and the batch, whose memory is held meanwhile."""

    part: Any
    whole: Any


def _unwrapped(copied: Workload) -> Workload:
    """Return a copied workload with the part of its batch as its batch, and the whole one as its batches."""
    if isinstance(copied.batch, _Shortened):
        return dataclasses.replace(copied, batch=copied.batch.part, batches=[copied.batch.whole])
    return dataclasses.replace(copied, batches=None)


def _heaviest(workload: Workload, microbatch_size: int, size: int) -> int:
    """Return the sample at which two microbatches begin of which the second has most elements: samples may differ."""
    if workload.split is None and len({t.shape[0] for t in tensors_of(workload.batch) if t.dim()}) == 1:
        return 0
    parts = [
        part_of(workload, workload.batch, start, min(start + microbatch_size, size))
        for start in range(0, size, microbatch_size)
    ]
    elements = [sum(t.numel() for t in tensors_of(part)) for part in parts]
    later = elements[1 : size // microbatch_size]  # whose gradients are added to those that are there
    return microbatch_size * later.index(max(later))


def _inputs(copied: Workload) -> list[torch.Tensor]:
    """Return the tensors of a copy's batch, and of the whole one that it is a part of."""
    return tensors_of([copied.batch, copied.batches])


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Run Python's collector only at known points.

    What is alive before is set aside meanwhile, since going through all of PyTorch's objects takes most
    of the collector's time.
    """
    enabled, freeze = gc.isenabled(), gc.get_freeze_count() == 0
    gc.disable()
    if freeze:
        gc.freeze()
    try:
        yield
    finally:
        if freeze:
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _one_thread_and_no_collector() -> Iterator[None]:
    """Run the backward pass in this thread, and Python's collector only at known points."""
    with without_collector(), torch.autograd.set_multithreading_enabled(False):
        yield


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn what fake tensors can't do into an error that names the user's line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    try:
        log.setLevel(logging.CRITICAL)
        yield
    except MemfitError:
        raise
    except Exception as e:
        line = users_line(e)
        said = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise CaptureError(
            f"the step can't be captured without data{line} ({type(e).__name__}: {said}). {_hint(e)}"
        ) from e
    finally:
        log.setLevel(level)


def users_line(error: Exception) -> str:
    """Return the innermost line of an exception outside of PyTorch and memfit, as " at FILE:LINE: CODE"; else ""."""
    here = str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), contextlib.__file__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(here)]
    return f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def _hint(error: Exception) -> str:
    if isinstance(error, UnsupportedOperatorException):
        return _OPERATOR_HINT
    if "closure" in str(error):
        return _CLOSURE_HINT
    if isinstance(error, AttributeError) and "'FakeTensor'" in str(error):
        return _SUBCLASS_HINT
    return _VALUES_HINT if isinstance(error, _NEEDS_VALUES) or ".numpy()" in str(error) else _OTHER_HINT


@contextlib.contextmanager
def _following(course: Course | None, values: KnownValues | None) -> Iterator[Callable[[Phase, int], None]]:
    """Have a step take a course; yield what is to be told of its phases."""
    if course is None or values is None:
        yield lambda phase, microbatch: None
        return
    replay = values.replay = course.replay
    values.extreme, values.reads_draws = course.starts[0].extreme if course.starts[0] else "", False
    with replay.rewinding(), replay.arrays(values.value_of):
        yield course.follow
    course.reads_draws = values.reads_draws


@contextlib.contextmanager
def _faked(values: KnownValues | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if values is not None:
            stack.enter_context(values.fake)
            stack.enter_context(values)
        yield


def _record(
    workload: Workload,
    copied: Workload,
    build: BuildStep,
    values: KnownValues | None,
    precision: str,
    microbatch_size: int | None,
    attention: Attention | None = None,
    warm: bool = False,
    course: Course | None = None,
) -> Trace:
    recorder = Recorder(values.fake if values else None, "cuda" if attention else "cpu")
    with (
        _faked(values),
        recorder,
        composed_as_without_a_mode(),
        build(copied) as step,
        recorder.watch(copied.model),
        recorder.generator_states(),
        _following(course, values) as follow,
    ):

        def enter_phase(phase: Phase, microbatch: int) -> None:
            follow(phase, microbatch)
            recorder.enter_phase(phase, microbatch)

        step.on_phase = enter_phase
        garbage_bytes = 0
        masters = [p for group in copied.optimizer.param_groups for p in group["params"]]
        for tensor in [*copied.model.parameters(), *copied.model.buffers(), *_inputs(copied), *masters]:
            recorder.observe(tensor, -1)
        if not warm and not (course and course.records_first):
            is_any_size = not isinstance(copied.batch_size, int)
            step(step.split(copied.batch)[0] if is_any_size else copied.batch)  # makes the optimizer's state
            garbage_bytes = recorder.live_bytes()
            gc.collect(0)  # what the step made, and no collection saw before
            garbage_bytes -= recorder.live_bytes()
        if course is not None:
            course.begin_step(0 if course.records_first else 1)
        if attention is not None:
            attention.chosen.clear()
        recorded = _recorded(recorder, step, copied.batch, enter_phase)
        notes = attention.notes() if attention is not None else []
        dry = _release_points(recorder, step, copied.batch, recorded[0], enter_phase)
        if not _is_same_again(recorded[0], dry):
            others = [_recorded(recorder, step, copied.batch, enter_phase) for _ in range(_OTHER_STEPS)]
            recorded = max([recorded, *others], key=lambda one: _peak_bytes(one[0]))
            recorded[0].saves.clear()
            notes, dry = [*notes, _OTHER_EACH_TIME], []
    recording, categories = recorded
    trace = _assemble(workload, copied, recorder.modules, recording, categories, dry, precision, microbatch_size)
    share = garbage_bytes / max(1, _peak_bytes(recording))
    if share > _NOTED_GARBAGE:
        notes.append(
            f"a step leaves {format_bytes(garbage_bytes)} in objects that refer to each other, which stay until Python's"
            " collector runs: a step that begins before takes as much more, for each step that left some"
        )
    return replace(trace, notes=notes, slack=share if share > _NOTED_GARBAGE else 0.0)


def _recorded(
    recorder: Recorder, step: StepProgram, batch: Any, enter_phase: Callable[[Phase, int], None]
) -> tuple[Recording, _Categories]:
    """Return the recording of a step, and what its storages are for."""
    recorder.begin_step()
    categories = _Categories(recorder, step.workload)
    step.on_phase = categories.before(enter_phase)
    with recorder.saving():
        step(batch)
    categories.see_optimizer_state()
    return recorder.end_step(), categories


def _peak_bytes(recording: Recording) -> int:
    """Return the most bytes that storages take at a time."""
    change = [0] * (len(recording.ops) + 2)
    for storage in recording.storages:
        change[max(storage.birth, 0)] += storage.nbytes
        change[storage.death + 1] -= storage.nbytes
    return max(itertools.accumulate(change))


class _Categories:
    """Finds out what each storage is for, while the step runs."""

    def __init__(self, recorder: Recorder, workload: Workload) -> None:
        self.recorder, self.workload = recorder, workload
        self.found: dict[int, Category] = {}
        self.owners: dict[int, int] = {}
        self.parameters: dict[int, int] = {}
        self.position = {id(p): i for i, p in enumerate(workload.model.parameters())}
        self.see_optimizer_state()
        for position, (_, module) in enumerate(workload.model.named_modules()):
            self._see(module.buffers(recurse=False), "buffers", position)
            for parameter in module.parameters(recurse=False):
                self._see([parameter], "parameters", position, parameter)
        self._see(_inputs(workload), "inputs")

    def _see(self, tensors: Any, category: Category, owner: int = -1, parameter: Any = None) -> None:
        for part in [part for tensor in tensors for part in parts(tensor)]:
            index = self.recorder.observe(part, -1)
            if index is not None:
                self.found[index] = category
                self.owners[index] = owner
                self.parameters[index] = self.position.get(id(parameter), -1)

    def see_optimizer_state(self) -> None:
        for parameter, values in self.workload.optimizer.state.items():
            self._see(tensors_of(values), "optimizer state", parameter=parameter)
        self._see(self._masters(), "optimizer state")

    def _masters(self) -> list[torch.Tensor]:
        """Return what the optimizer updates and the model does not have: copies of its parameters in fp32."""
        held = [p for group in self.workload.optimizer.param_groups for p in group["params"]]
        return [p for p in held if id(p) not in self.position]

    def see_gradients(self) -> None:
        for parameter in [*self.workload.model.parameters(), *self._masters()]:
            if parameter.grad is not None:
                self._see([parameter.grad], "gradients", parameter=parameter)

    def before(self, enter_phase: Callable[[Phase, int], None]) -> Callable[[Phase, int], None]:
        """Return what a step calls at each phase: gradients that are there are seen first."""

        def on_phase(phase: Phase, microbatch: int) -> None:
            self.see_gradients()
            enter_phase(phase, microbatch)

        return on_phase


def _release_points(
    recorder: Recorder,
    step: StepProgram,
    batch: Any,
    recording: Recording,
    enter_phase: Callable[[Phase, int], None],
) -> list[Recording]:
    """Run the forward pass with nothing saved, to see when its storages die by themselves: for each microbatch.

    Those of the same shapes run once. What autograd takes within the forward pass is saved all the same.
    """
    recordings: dict[Any, Recording] = {}
    found = []
    recorder.begin_step()  # what splitting makes, as of packed sequences, is no part of the step recorded before
    microbatches = step.split(batch)
    recorder.end_step()
    for index, microbatch in enumerate(microbatches):
        kept = _taken_in_forward(recording, index)
        key = tuple(tuple(t.shape) for t in tensors_of(microbatch)), index if any(kept) else -1
        if key not in recordings:
            recorder.begin_step()
            enter_phase("forward", index)
            with recorder.dropping(kept):
                loss = step.compute_loss(microbatch)
            recordings[key] = recorder.end_step()
            del loss
        found.append(recordings[key])
    return found


def _taken_in_forward(recording: Recording, microbatch: int) -> list[bool]:
    """Tell, for each tensor that is saved in a microbatch's forward pass, whether autograd within the loss takes it."""
    first, last = _forward_range(recording, microbatch)
    saves = [save for save in recording.saves if first <= save.at <= last + 1]
    return [0 <= save.unpacked <= last for save in saves]


def _forward_range(recording: Recording, microbatch: int) -> tuple[int, int]:
    """Return the first and the last operator of a microbatch's forward pass; (0, -1) where it has none."""
    forward = [i for i, op in enumerate(recording.ops) if op.phase == "forward" and op.microbatch == microbatch]
    return (forward[0], forward[-1]) if forward else (0, -1)


def _is_same_again(recording: Recording, dry: list[Recording]) -> bool:
    """Tell whether the forward passes run the operators that they ran in the step."""
    return all(
        [recording.ops[i].name for i in _forward_of(recording, microbatch, dried)] == [op.name for op in dried.ops]
        for microbatch, dried in enumerate(dry)
    )


def _forward_of(recording: Recording, microbatch: int, dried: Recording) -> list[int]:
    """Return the operators of a microbatch's forward pass; not those by which a step weighs its loss."""
    forward = [i for i, op in enumerate(recording.ops) if op.phase == "forward" and op.microbatch == microbatch]
    return forward[: len(dried.ops)]


def _releases(recording: Recording, dry: list[Recording]) -> dict[int, int]:
    """Return, for storages born in the forward pass, the operator after which they die if nothing is saved."""
    found: dict[int, int] = {}
    for microbatch, dried in enumerate(dry):
        forward = _forward_of(recording, microbatch, dried)
        if not forward:
            continue
        first, last = forward[0], forward[-1]
        born = [i for i, s in enumerate(recording.storages) if first <= s.birth <= last]
        again = [s for s in dried.storages if s.birth >= 0]
        for index, storage in zip(born, again, strict=True):
            if storage.death < len(dried.ops):
                found[index] = storage.death + first
    return found


def _parameters(workload: Workload) -> list[Parameter]:
    """Return the model's parameters, in the order of `named_parameters()`."""
    groups = {id(p): i for i, group in enumerate(workload.optimizer.param_groups) for p in group["params"]}
    return [
        Parameter(name, tuple(p.shape), p.itemsize, p.requires_grad, groups.get(id(p), -1))
        for name, p in workload.model.named_parameters()
    ]


def _category(storage: LiveStorage, recording: Recording, saved: bool) -> Category:
    """Return what a storage is for, by when it lives: activations are what waits for the backward pass."""
    if storage.birth < 0:
        return "inputs"
    kept = saved or (storage.death < len(recording.ops) and recording.ops[storage.death].phase == "backward")
    return "activations" if kept and recording.ops[storage.birth].phase in ("forward", "recompute") else "temporaries"


def _assemble(
    workload: Workload,
    copied: Workload,
    modules: list[Module],
    recording: Recording,
    categories: _Categories,
    dry: list[Recording],
    precision: str,
    microbatch_size: int | None,
) -> Trace:
    n = len(recording.ops)
    saves = [replace(s, death=n) if s.death < 0 else s for s in recording.saves]
    last_save: dict[int, int] = {}
    for save in saves:
        last_save[save.storage] = max(save.death, last_save.get(save.storage, -1))
    releases = _releases(recording, dry)
    full, captured = samples_of(workload), samples_of(copied)
    storages = []
    for index, storage in enumerate(recording.storages):
        category = categories.found.get(index) or _category(storage, recording, index in last_save)
        release = releases.get(index, storage.death)
        if storage.death > max(release, last_save.get(index, -1)):  # something else holds it
            release = storage.death
        owner = categories.owners.get(index, -1)
        parameter = categories.parameters.get(index, -1)
        # Held from the step before and let go before the first operator: no operator of this step sees it.
        nbytes = storage.nbytes if storage.death >= 0 else 0
        death, release = max(storage.death, 0), max(release, 0)
        storages.append(Storage(nbytes, storage.birth, death, release, category, owner, parameter))
    size = microbatch_size or full
    return Trace(
        workload=workload.name,
        fingerprint=fingerprint(workload),
        torch_version=str(torch.__version__),
        device="cpu",
        precision=precision,
        batch_size=full,
        microbatch_size=size,
        microbatches=-(-captured // size),
        scale_microbatches=-(-full // size),
        modules=modules,
        calls=recording.calls,
        ops=recording.ops,
        storages=storages,
        saves=saves,
        signatures=list(recording.signatures),
        works=recording.works,
        parameters=_parameters(copied),
    )
