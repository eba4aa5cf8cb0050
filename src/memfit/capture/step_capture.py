"""Captures of training steps as traces."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from msgspec.structs import replace

from memfit._torch.compilers import is_compiled_function
from memfit._torch.fake import FakeTensor
from memfit._torch.modules import compiled_call, own_modules
from memfit._torch.tensors import storage_key_of
from memfit.batch import map_tensors
from memfit.capture.composites import composites_without_mode
from memfit.capture.control_flow import Course, Courses, DataRun, live_peak_bytes
from memfit.capture.conversions import in_place_conversions
from memfit.capture.external_state import external_tensors
from memfit.capture.fake_workload import fake_copy, mode_of, nothing_changes
from memfit.capture.hints import explained
from memfit.capture.known_values import KnownValues, device_of, fake_paths_disabled
from memfit.capture.lifetimes import (
    Categories,
    assemble_trace,
    dry_forward_passes,
    run_same_forward,
    runs_same_operators,
)
from memfit.capture.modes import evaluation_note
from memfit.capture.partial_steps import (
    MOST_MICROBATCHES,
    EveryMicrobatch,
    every_microbatch,
    inputs_of,
    real_part,
    shortened,
    unwrapped,
)
from memfit.capture.recorder import Recorder, Recording
from memfit.capture.subclasses import aliasing
from memfit.capture.torch_version import warn_if_untested
from memfit.capture.user_state import UserState
from memfit.capture.value_reads import Replay
from memfit.errors import CaptureError
from memfit.fake_gpu.attention import Attention
from memfit.fake_gpu.fake_cuda import fake_gpu
from memfit.ir.device import Device
from memfit.ir.trace import Phase, Trace
from memfit.units import format_bytes
from memfit.workload import StepProgram, Workload, samples_of, tensors_of, uncut_note

_NOTED_GARBAGE = 1e-3  # share of the peak
_OTHER_STEPS = 3  # recorded where each forward pass runs other operators
_OTHER_EACH_TIME = (
    "the forward pass runs other operators each time it is called. The prediction is the highest peak of"
    f" {_OTHER_STEPS + 1} steps in a row, and nothing is recomputed. Other steps may need more"
)
_OTHERS_MORE = 0.1  # chosen, not measured: the slack for microbatches that differ from the two captured
_MICROBATCHES_DIFFER = (
    "the microbatches run different operators, and are too many to run all of them: the prediction is from two of"
    " them, and others may need more"
)
_COMPILED = (
    "torch.compile is not predicted: the prediction is for the step without it. Compiled, a step takes less time, and"
    " mostly less memory for activations"
)

_is_collector_off = False  # within `without_collector`

BuildStep = Callable[[Workload], contextlib.AbstractContextManager[StepProgram]]
"""A function that builds the step from a copy of the workload, as a context that undoes its changes to the copy."""


def capture(
    workload: Workload,
    build: BuildStep,
    precision: str = "32-true",
    microbatch_size: int | None = None,
    *,
    device: Device | None = None,
    warm: bool = False,
    reading: DataRun | None = None,
) -> Trace:
    """Return the trace of a step that runs under fake tensors on a copy: without data, without memory.

    Two steps run: the first makes the optimizer's state, the second is recorded. Of equal microbatches two run; all run
    where those two differ, or add up sparse gradients. Where the forward pass then runs other operators, three more
    steps run: the last is taken if they are alike, else that with the highest peak. A step whose course depends on
    values of tensors or on random numbers runs again for each other course (`capture.control_flow`).

    Args:
        precision: The precision that the trace names.
        microbatch_size: Samples in a microbatch; None for the whole batch.
        device: The device that the copy runs on; None for the CPU. A CUDA device needs fake CUDA in this process
            (`memfit.fake_gpu.shim`); another accelerator must be here.
        warm: Whether the workload comes from `warmed`, and the step updates its parameters as the one there did: then
            one step runs.
        reading: The run with data, for the values that the step reads; None where it can't run.

    Raises:
        CaptureError: The step can't be run under fake tensors.
        WorkloadError: The workload can't be copied, or its loss function uses the original model.
    """

    def recorded(course: Course, size: int | None) -> tuple[Trace, bool]:
        with _fake_copied(workload, device, size) as (copied, values, attention, _):
            trace = _record(workload, copied, build, values, precision, microbatch_size, attention, warm, course)
        return trace, values.reads_batch

    def run(course: Course) -> Trace:
        trace, reads_batch = recorded(course, microbatch_size)
        may_differ = reads_batch or any(log.microbatches_differ for log in course.replay.logs)
        every = every_microbatch(trace, may_differ)
        return recorded(course, None)[0] if every is EveryMicrobatch.NEEDED else _with_slack(trace, every)

    trace = Courses(run, workload.values, reading).worst()
    if warm and trace.slack:
        raise CaptureError("the step may run other operators the next time: memfit captures it from its first step on")
    extra_notes = [uncut_note(workload), evaluation_note(workload), _COMPILED if is_compiled(workload) else None]
    notes = [*trace.notes, *(note for note in extra_notes if note)]
    return replace(trace, device=trace.device if device is None else device.name, notes=notes)


def warmed(workload: Workload, build: BuildStep, *, device: Device | None = None) -> Workload:
    """Return a copy under fake tensors that has run its first step, for captures that then run one step each.

    Raises:
        CaptureError: The step can't be run under fake tensors, or leaves garbage, which each capture must see.
        WorkloadError: The workload can't be copied, or its loss function uses the original model.
    """
    with _fake_copied(workload, device, None) as (copied, values, _, around):
        place = _place(device)
        recorder = Recorder(values.fake, "cpu" if place is None else place.type, _storages_of(workload))
        with _fake_modes(values), recorder, build(copied) as step:
            values.replay = Replay(stated=workload.values)
            step(copied.batch)
            garbage_bytes = _collected_bytes(recorder)
            if garbage_bytes > _NOTED_GARBAGE * recorder.live_bytes():
                raise CaptureError(f"the step leaves {format_bytes(garbage_bytes)} to Python's garbage collector")
            if around.is_written():
                raise CaptureError("the step's code changes state, and each capture needs that state unchanged")
    return copied


def reads_unknown(workload: Workload, build: BuildStep) -> bool:
    """Tell whether the forward pass of a workload reads values that are known with data only.

    True too where the forward pass raises on a guessed value.
    """
    replay = Replay(stated=workload.values)
    try:
        with _fake_copied(workload, None, None) as (copied, values, *_), _fake_modes(values), build(copied) as step:
            values.replay = replay
            with replay.arrays(values.value_of):
                step.compute_loss(copied.batch)
    except CaptureError:
        return True
    return bool(replay.guesses) or values.reads_draws


@contextlib.contextmanager
def _fake_copied(
    workload: Workload, device: Device | None, microbatch_size: int | None
) -> Iterator[tuple[Workload, KnownValues, Attention | None, UserState]]:
    """Yield a copy of a workload under fake tensors, for a step to run there, and the state that its code can write."""
    warn_if_untested()
    values = KnownValues.of(mode_of(workload))
    place = _place(device)
    attention = fake_gpu(device) if device is not None and device.kind == "cuda" else None
    values.fake.allow_fallback_kernels = place is None  # fallbacks run operators on real zeros, on the CPU
    with (
        nothing_changes(workload) as around,
        without_collector(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        moved = workload if place is None else dataclasses.replace(workload, batch=_moved_batch(workload.batch, values))
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors_of(moved.batch))
        with _fake_modes(values if is_fake else None):  # the values of their indices cut packed sequences
            part = shortened(moved, microbatch_size)
        copied = unwrapped(fake_copy(part, values, place))
        eager = torch.compiler.set_stance("force_eager")
        with explained(), eager, fake_paths_disabled(), in_place_conversions():
            yield copied, values, attention, around


def _place(device: Device | None) -> torch.device | None:
    """Return the device of fake tensors for a device that is predicted for; None for the CPU, where tensors are."""
    if device is None or device.kind == "cpu":
        return None
    return torch.device("cuda", 0) if device.kind == "cuda" else torch.device(device.name)


def capture_real(
    workload: Workload, build: BuildStep, precision: str = "32-true", microbatch_size: int | None = None
) -> Trace:
    """Return the trace of a step that runs with data, on a copy of the workload."""
    with nothing_changes(workload), without_collector(), torch.autograd.set_multithreading_enabled(False):
        trace = _record(workload, real_part(workload, microbatch_size), build, None, precision, microbatch_size)
        return _with_slack(trace, every_microbatch(trace, may_differ=False))


def _with_slack(trace: Trace, every: EveryMicrobatch) -> Trace:
    """Return a trace, with a note and slack where its two microbatches don't stand for all."""
    if every is EveryMicrobatch.NOT_NEEDED:
        return trace
    return replace(trace, notes=[*trace.notes, _MICROBATCHES_DIFFER], slack=trace.slack + _OTHERS_MORE)


def is_compiled(workload: Workload) -> bool:
    """Tell whether a model, a module of it (`compile()` in place too), or the loss function is compiled."""
    modules = any(
        "_orig_mod" in own_modules(module) or compiled_call(module) is not None for module in workload.model.modules()
    )
    return modules or is_compiled_function(workload.loss_fn)


def _moved_batch(batch: Any, values: KnownValues) -> Any:
    """Return a batch as after a move to another device, which copies only the elements that a view shows."""

    def moved(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.layout is not torch.strided:
            return leaf
        return leaf if leaf.untyped_storage().nbytes() == leaf.numel() * leaf.itemsize else leaf.clone()

    with _fake_modes(values):
        return map_tensors(moved, batch)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Run Python's garbage collector only where it is called, until the context is left, and then on new objects."""
    global _is_collector_off
    if _is_collector_off:  # asking for the count of frozen objects goes through all of them
        yield
        return
    # Objects alive now are frozen: going through all of PyTorch's takes most of a collection's time.
    enabled, freeze = gc.isenabled(), gc.get_freeze_count() == 0
    gc.disable()
    if freeze:
        gc.freeze()
    _is_collector_off = True
    try:
        yield
    finally:
        _is_collector_off = False
        gc.collect(1)  # what came meanwhile: copies with data may be in cycles of objects, and hold memory
        if freeze:
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _course_followed(
    course: Course | None, values: KnownValues | None, batch: list[torch.Tensor]
) -> Iterator[Callable[[Phase, int], None]]:
    """Have a step follow a course; yield the function to call at each of its phases."""
    if course is None or values is None:
        yield lambda phase, microbatch: None
        return
    replay = values.replay = course.replay
    values.begin(batch, course.starts[0].extreme if course.starts[0] else "")
    with replay.rewinding(), replay.arrays(values.value_of):
        yield course.follow
    course.reads_draws = values.reads_draws


@contextlib.contextmanager
def _fake_modes(values: KnownValues | None) -> Iterator[None]:
    if values is None:
        yield
    else:
        with values.fake, values:
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
    kind = next((device_of(t).type for t in [*copied.model.parameters(), *tensors_of(copied.batch)]), "cpu")
    recorder = Recorder(values.fake if values else None, kind, _storages_of(workload))
    with (
        _fake_modes(values),
        recorder,
        composites_without_mode(),
        build(copied) as step,
        recorder.watch(copied.model),
        recorder.generator_states(),
        recorder.resizes(),
        _course_followed(course, values, inputs_of(copied)) as follow,
        aliasing(inputs_of(copied)),
    ):
        last = 0  # the step's last microbatch so far

        def enter_phase(phase: Phase, microbatch: int) -> None:
            nonlocal last
            last = microbatch if phase == "forward" else last
            follow(phase, microbatch)
            recorder.enter_phase(phase, microbatch)

        step.on_phase = enter_phase
        garbage_bytes = 0
        early_share = 0.0  # what an earlier step took more than the one that all later ones are like
        made_in_part = False  # whether one microbatch of several made the optimizer's state
        masters = [p for group in copied.optimizer.param_groups for p in group["params"]]
        held = [*copied.model.parameters(), *copied.model.buffers(), *inputs_of(copied), *masters]
        for tensor in [*held, *external_tensors(copied)]:
            recorder.observe(tensor, -1)
        del held, tensor
        if not warm and not (course and course.records_first):
            microbatches = [copied.batch] if isinstance(copied.batch_size, int) else step.split(copied.batch)
            made_in_part = len(microbatches) > 1
            step(microbatches[0])  # makes the optimizer's state
            del microbatches
            garbage_bytes = _collected_bytes(recorder) // (last + 1)
        if course is not None:
            course.begin_step(0 if course.records_first else 1)
        if attention is not None:
            attention.chosen.clear()
        recorded = _recorded(recorder, step, copied.batch, enter_phase)
        count = last + 1 if microbatch_size is None else -(-samples_of(workload) // microbatch_size)
        garbage_bytes *= max(1, 2 * count - (last + 1))  # other microbatches may leave some, and all of the step before
        notes = attention.notes() if attention is not None else []
        dry = dry_forward_passes(recorder, step, copied.batch, recorded[0], enter_phase)
        is_same = runs_same_operators(recorded[0], dry)
        if warm and not is_same:
            raise CaptureError("the copy has the state of another step: memfit captures it from its first step on")
        if not is_same:
            more_steps = [_recorded(recorder, step, copied.batch, enter_phase) for _ in range(_OTHER_STEPS)]
            highest = max([recorded, *more_steps], key=lambda pair: live_peak_bytes(pair[0]))
            recorded = more_steps[-1]
            # Some settle after their second step: DistributedDataParallel makes its buckets anew there.
            if run_same_forward([each for each, _ in more_steps]):
                dry = dry_forward_passes(recorder, step, copied.batch, recorded[0], enter_phase)
                is_same = runs_same_operators(recorded[0], dry)
            if is_same:
                early_share = live_peak_bytes(highest[0]) / max(1, live_peak_bytes(recorded[0])) - 1
            else:
                recorded = highest
                recorded[0].saves.clear()
                notes, dry = [*notes, _OTHER_EACH_TIME], []
        step.on_phase = None  # which refers to the step, and would keep it until the garbage collector runs
    recording, categories = recorded
    late_share = 0.0
    if not made_in_part:  # the user's second step makes late state too, and later ones hold it from their beginning
        late_bytes = sum(recording.storages[index].nbytes for index in categories.late)
        late_share = late_bytes / max(1, live_peak_bytes(recording))
        categories.late.clear()
    trace = assemble_trace(workload, copied, recorder.modules, recording, categories, dry, precision, microbatch_size)
    share = garbage_bytes / max(1, live_peak_bytes(recording))
    if count > MOST_MICROBATCHES and share > 1:
        raise CaptureError(
            f"{count:,} microbatches and those of the step before leave {format_bytes(garbage_bytes)} in reference"
            " cycles until Python's garbage collector runs: more than the step needs. Give a larger microbatch_size="
        )
    if share > _NOTED_GARBAGE:
        notes.append(
            f"a step and the one before leave {format_bytes(garbage_bytes)} in reference cycles until Python's"
            " garbage collector runs: a step may need that much more, and later steps even more"
        )
    return replace(trace, notes=notes, slack=late_share + early_share + (share if share > _NOTED_GARBAGE else 0.0))


def _storages_of(workload: Workload) -> frozenset[int]:
    """Return the keys of the storages of a workload's own tensors."""
    held = [workload.batch, list(workload.optimizer.state.values()), workload.optimizer.param_groups]
    own = [*workload.model.parameters(), *workload.model.buffers(), *tensors_of(held)]
    return frozenset(storage_key_of(t) for t in own if t.layout is torch.strided)


def _collected_bytes(recorder: Recorder) -> int:
    """Collect garbage, and return the bytes that this frees: objects that refer to each other held them."""
    live_bytes = recorder.live_bytes()
    gc.collect(0)  # the youngest generation: objects of this step
    return live_bytes - recorder.live_bytes()


def _recorded(
    recorder: Recorder, step: StepProgram, batch: Any, enter_phase: Callable[[Phase, int], None]
) -> tuple[Recording, Categories]:
    """Return the recording of a step, and the categories of its storages."""
    recorder.begin_step()
    categories = Categories(recorder, step.workload, lambda: step.buckets)
    step.on_phase = categories.before(enter_phase)
    with recorder.saving():
        step(batch)
    categories.see_optimizer_state()
    return recorder.end_step(), categories
