"""From a training step to its trace."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from msgspec.structs import replace
from torch._subclasses.fake_tensor import FakeTensor

from memfit.batch import map_tensors
from memfit.capture.attention import Attention
from memfit.capture.composites import composed_as_without_a_mode
from memfit.capture.conversions import converted_as_with_data
from memfit.capture.courses import Course, Reading, worst_course
from memfit.capture.fake import fake_copy, mode_of, nothing_changes
from memfit.capture.gpu import fake_gpu
from memfit.capture.hints import explained
from memfit.capture.lives import Categories, assembled, is_same_again, release_points
from memfit.capture.outside import held_besides
from memfit.capture.parts import EveryMicrobatch, every_microbatch, inputs_of, real_part, shortened, unwrapped
from memfit.capture.reads import Replay
from memfit.capture.recorder import Recorder, Recording
from memfit.capture.values import KnownValues, libraries_run_as_with_data
from memfit.errors import CaptureError
from memfit.ir.device import Device
from memfit.ir.trace import Phase, Trace
from memfit.units import format_bytes
from memfit.workload import StepProgram, Workload, tensors_of, uncut_note

_NOTED_GARBAGE = 1e-3  # of the peak
_OTHER_STEPS = 3  # recorded where the forward pass is another each time it is called
_OTHER_EACH_TIME = (
    "the forward pass runs other operators each time it is called: predicted is the step that takes most of"
    f" {_OTHER_STEPS + 1} in a row, and nothing is recomputed; others may take more"
)
_OTHERS_MORE = 0.1  # chosen, not measured: by what share microbatches that differ may take more than two of them
_MICROBATCHES_DIFFER = (
    "the microbatches run different operators, and are too many to run them all: predicted from two of them, and others"
    " may take more"
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

    The step runs twice, since the first makes the optimizer's state, and the second is recorded. Of many equal
    microbatches two are run: the second repeats. All are run where those two are not equal, or add up sparse gradients.
    A step that reads values of tensors, or whose course depends on draws, runs again for each other course that it may
    take (`capture.courses`).

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
        may_differ = values.reads_batch or any(log.microbatches_differ for log in course.replay.logs)
        every = every_microbatch(trace, may_differ)
        if every is not EveryMicrobatch.NEEDED:
            return _of_two_microbatches(trace, every)
        with _fake_copied(workload, device, None) as (copied, values, attention):
            return _record(workload, copied, build, values, precision, microbatch_size, attention, warm, course)

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
            part = shortened(moved, microbatch_size)
        copied = unwrapped(fake_copy(part, values, place))
        eager = torch.compiler.set_stance("force_eager")
        with explained(), eager, libraries_run_as_with_data(), converted_as_with_data():
            yield copied, values, attention


def capture_real(
    workload: Workload, build: BuildStep, precision: str = "32-true", microbatch_size: int | None = None
) -> Trace:
    """Return the trace of a step that really runs, on a copy of the workload, through the same records."""
    with nothing_changes(workload), _one_thread_and_no_collector():
        trace = _record(workload, real_part(workload, microbatch_size), build, None, precision, microbatch_size)
        return _of_two_microbatches(trace, every_microbatch(trace, may_differ=False))


def _of_two_microbatches(trace: Trace, every: EveryMicrobatch) -> Trace:
    """Return a trace that says where its two microbatches don't stand for all."""
    if every is EveryMicrobatch.NOT_NEEDED:
        return trace
    return replace(trace, notes=[*trace.notes, _MICROBATCHES_DIFFER], slack=trace.slack + _OTHERS_MORE)


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
def _following(
    course: Course | None, values: KnownValues | None, batch: list[torch.Tensor]
) -> Iterator[Callable[[Phase, int], None]]:
    """Have a step take a course; yield what is to be told of its phases."""
    if course is None or values is None:
        yield lambda phase, microbatch: None
        return
    replay = values.replay = course.replay
    values.begin(batch, course.starts[0].extreme if course.starts[0] else "")
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
        _following(course, values, inputs_of(copied)) as follow,
    ):

        def enter_phase(phase: Phase, microbatch: int) -> None:
            follow(phase, microbatch)
            recorder.enter_phase(phase, microbatch)

        step.on_phase = enter_phase
        garbage_bytes = 0
        made_in_part = False  # the optimizer's state, by one microbatch of several
        masters = [p for group in copied.optimizer.param_groups for p in group["params"]]
        held = [*copied.model.parameters(), *copied.model.buffers(), *inputs_of(copied), *masters]
        for tensor in [*held, *held_besides(copied)]:
            recorder.observe(tensor, -1)
        del held, tensor
        if not warm and not (course and course.records_first):
            microbatches = [copied.batch] if isinstance(copied.batch_size, int) else step.split(copied.batch)
            made_in_part = len(microbatches) > 1
            step(microbatches[0])  # makes the optimizer's state
            del microbatches
            garbage_bytes = recorder.live_bytes()
            gc.collect(0)  # what the step made, and no collection saw before
            garbage_bytes -= recorder.live_bytes()
        if course is not None:
            course.begin_step(0 if course.records_first else 1)
        if attention is not None:
            attention.chosen.clear()
        recorded = _recorded(recorder, step, copied.batch, enter_phase)
        notes = attention.notes() if attention is not None else []
        dry = release_points(recorder, step, copied.batch, recorded[0], enter_phase)
        is_same = is_same_again(recorded[0], dry)
        if warm and not is_same:
            raise CaptureError("the copy holds something of another step: it is captured from its first step on")
        if not is_same:
            others = [_recorded(recorder, step, copied.batch, enter_phase) for _ in range(_OTHER_STEPS)]
            recorded = max([recorded, *others], key=lambda one: _peak_bytes(one[0]))
            recorded[0].saves.clear()
            notes, dry = [*notes, _OTHER_EACH_TIME], []
    recording, categories = recorded
    late_share = 0.0
    if not made_in_part:  # the user's second step makes it too, and later ones hold it from their beginning
        late_bytes = sum(recording.storages[index].nbytes for index in categories.late)
        late_share = late_bytes / max(1, _peak_bytes(recording))
        categories.late.clear()
    trace = assembled(workload, copied, recorder.modules, recording, categories, dry, precision, microbatch_size)
    share = garbage_bytes / max(1, _peak_bytes(recording))
    if share > _NOTED_GARBAGE:
        notes.append(
            f"a step leaves {format_bytes(garbage_bytes)} in objects that refer to each other, which stay until"
            " Python's collector runs: a step that begins before takes as much more, for each step that left some"
        )
    return replace(trace, notes=notes, slack=late_share + (share if share > _NOTED_GARBAGE else 0.0))


def _recorded(
    recorder: Recorder, step: StepProgram, batch: Any, enter_phase: Callable[[Phase, int], None]
) -> tuple[Recording, Categories]:
    """Return the recording of a step, and what its storages are for."""
    recorder.begin_step()
    categories = Categories(recorder, step.workload)
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
