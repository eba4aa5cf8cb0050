"""Captures of training steps as traces."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import logging
import re
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from msgspec.structs import replace
from torch import nn

from memfit import _torch
from memfit._torch import (
    DataDependentOutputException,
    DropoutBase,
    DynamicOutputShapeException,
    EagerMode,
    FakeTensor,
    NormBase,
    UnfollowedOperatorError,
    UnsupportedOperatorException,
    compiled_call,
    converted_by,
    is_compiled_function,
    own_modules,
)
from memfit.capture.composites import composites_without_mode
from memfit.capture.control_flow import ControlFlowPath, ControlFlowPaths, GeneratorStates, Readings
from memfit.capture.fake_workload import applied_in_place, fake_copy, mode_of, nothing_changes, real_copy
from memfit.capture.known_values import KnownValues
from memfit.capture.quantized_parameters import quantized_hint, unquantized_note
from memfit.capture.recorder import Recorder
from memfit.capture.step_recording import (
    MOST_MICROBATCHES,
    NOTED_GARBAGE,
    BuildStep,
    CaptureJob,
    collected_bytes,
    fake_modes,
    record,
    storages_of,
)
from memfit.capture.user_state import UserState
from memfit.capture.value_reads import ReadRecorder, ReadReplay
from memfit.errors import CaptureError, MemfitError, UntestedTorchWarning
from memfit.foundations import format_bytes, memfits_place, safe_point, users_place, warn_users
from memfit.hardware import AttentionKernels, fake_gpu
from memfit.ir import Device, Trace
from memfit.workload import Workload, has_data, map_tensors, part_of, samples_of, tensors_of, uncut_note

_OTHERS_MORE = 0.1  # chosen, not measured: the slack for microbatches that differ from the two captured
_MICROBATCHES_DIFFER = (
    "the microbatches run different operators, and are too many to run all of them: the prediction is from two of"
    " them, and others may need more"
)
_COMPILED = (
    "torch.compile is not predicted: the prediction is for the step without it. Compiled, a step takes less time, and"
    " mostly less memory for activations"
)
_NUMBERS = re.compile(r"-?\d+(\.\d+(e[+-]?\d+)?|e[+-]?\d+)")  # such as weights of losses, which change no size
_SIZED = re.compile(r'(",|"l":)\[\d')  # a tensor with dimensions, or a list of sizes
_MOST_OPERATORS = 20_000  # run for one trace, in some fifteen seconds
_MOST_SECONDS = 60.0  # time limit of a step with data
_LEAST_FREE = 0.1  # share of the machine's memory that a step with data leaves free
_COPIES = 4  # sizes of the parameters: the user's, the copy's, its gradients, and as much of optimizer states
_CHECK_EVERY = 64  # operators from one check of free memory to the next

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_VALUES_HINT = (
    "A shape depends on the values of a tensor: replace boolean-mask indexing or nonzero() by torch.where or a product"
    " with the mask. For mixtures of experts of transformers, set experts_implementation='grouped_mm'"
)
_OPERATOR_HINT = "PyTorch can't run this operator without data: take it out of Workload.loss_fn, or estimate without it"
_UNFOLLOWED_HINT = (
    "memfit can't see the functions that it calls: call them in Workload.loss_fn yourself, as `f(x) if p else g(x)` in"
    " place of torch.cond(p, f, g, (x,)), or as a loop in place of scan and map"
)
_CLOSURE_HINT = (
    "memfit runs the forward and backward passes once a step and calls Workload.optimizer.step() without a closure:"
    " give an optimizer that needs none"
)
_SUBCLASS_HINT = (
    "memfit captures a tensor subclass as a plain tensor, without its methods: put tensor.as_subclass(torch.Tensor)"
    " into Workload.batch, and the value that the method returns beside it"
)
_OTHER_HINT = "Check that Workload.loss_fn(model, batch).backward() runs without memfit"
_FLEX_HINT = (
    "memfit has no rule for that kernel: use torch.nn.functional.scaled_dot_product_attention, or in transformers"
    " attn_implementation='sdpa'"
)

_SHOWN = 3  # modules in evaluation mode

_is_collector_off = False  # within `without_collector`


def capture(job: CaptureJob) -> Trace:
    """Return the trace of a step that runs under fake tensors on a copy: without data, without memory.

    Two steps run: the first makes the optimizer's state, the second is recorded. Of equal microbatches two run; all run
    where those two differ, or add up sparse gradients. Where the forward pass then runs other operators, three more
    steps run: the last is taken if they are alike, else that with the highest peak. A step whose control flow depends
    on values of tensors or on random numbers runs again for each other path (`capture.control_flow`).

    Raises:
        CaptureError: The step can't be run under fake tensors.
        WorkloadError: The workload can't be copied, or its loss function uses the original model.
    """
    workload = job.workload

    def recorded(path: ControlFlowPath, size: int | None) -> tuple[Trace, bool]:
        with _fake_copied(workload, job.device, size) as (copied, values, attention, _):
            trace = record(job, copied, values, attention, path)
        return trace, values.reads_batch

    def run(path: ControlFlowPath) -> Trace:
        trace, reads_batch = recorded(path, job.microbatch_size)
        may_differ = reads_batch or any(len(set(log.forward.values())) > 1 for log in path.replay.logs)
        return _standing_for_all(trace, may_differ) or recorded(path, None)[0]

    trace = ControlFlowPaths(run, workload.values, job.reading).worst()
    if job.warm and trace.slack:
        raise CaptureError("the step may run other operators the next time: memfit captures it from its first step on")
    extra_notes = [
        uncut_note(workload),
        evaluation_note(workload),
        unquantized_note(workload.model),
        _COMPILED if is_compiled(workload) else None,
    ]
    notes = [*trace.notes, *(note for note in extra_notes if note)]
    return replace(trace, device=trace.device if job.device is None else job.device.name, notes=notes)


def warmed(workload: Workload, build: BuildStep, *, device: Device | None = None) -> Workload:
    """Return a copy under fake tensors that has run its first step, for captures that then run one step each.

    Raises:
        CaptureError: The step can't be run under fake tensors, or leaves garbage, which each capture must see.
        WorkloadError: The workload can't be copied, or its loss function uses the original model.
    """
    with _fake_copied(workload, device, None) as (copied, values, _, around):
        place = _place(device)
        recorder = Recorder(values.fake, "cpu" if place is None else place.type, storages_of(workload))
        with fake_modes(values), recorder, build(copied) as step:
            values.replay = ReadReplay(stated=workload.values)
            step(copied.batch)
            garbage_bytes = collected_bytes(recorder)
            if garbage_bytes > NOTED_GARBAGE * recorder.live_bytes():
                raise CaptureError(f"the step leaves {format_bytes(garbage_bytes)} to Python's garbage collector")
            if around.is_written():
                raise CaptureError("the step's code changes state, and each capture needs that state unchanged")
    return copied


def reads_unknown(workload: Workload, build: BuildStep) -> bool:
    """Tell whether the forward pass of a workload reads values that are known with data only.

    True too where the forward pass raises on a guessed value.
    """
    replay = ReadReplay(stated=workload.values)
    try:
        with _fake_copied(workload, None, None) as (copied, values, *_), fake_modes(values), build(copied) as step:
            values.replay = replay
            with replay.arrays(values.value_of):
                step.compute_loss(copied.batch)
    except CaptureError:
        return True
    return bool(replay.guesses) or values.reads_draws


@contextlib.contextmanager
def _fake_copied(
    workload: Workload, device: Device | None, microbatch_size: int | None
) -> Iterator[tuple[Workload, KnownValues, AttentionKernels | None, UserState]]:
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
        moved = workload
        if place is not None:  # a move to another device copies only the elements that a view shows

            def own_storage(leaf: torch.Tensor) -> torch.Tensor:
                is_whole = leaf.layout is not torch.strided or leaf.untyped_storage().nbytes() == leaf.nbytes
                return leaf if is_whole else leaf.clone()

            with fake_modes(values):
                moved = dataclasses.replace(workload, batch=map_tensors(own_storage, workload.batch))
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors_of(moved.batch))
        with fake_modes(values if is_fake else None):  # the values of their indices cut packed sequences
            part = _with_part(moved, microbatch_size)
        copied = _unwrapped(fake_copy(part, values, place))
        eager = torch.compiler.set_stance("force_eager")
        with _explained(workload.model), eager, values.fake_paths_disabled(), converted_by(applied_in_place):
            yield copied, values, attention, around


def _place(device: Device | None) -> torch.device | None:
    """Return the device of fake tensors for a device that is predicted for; None for the CPU, where tensors are."""
    if device is None or device.kind == "cpu":
        return None
    return torch.device("cuda", 0) if device.kind == "cuda" else torch.device(device.name)


def is_compiled(workload: Workload) -> bool:
    """Tell whether a model, a module of it (`compile()` in place too), or the loss function is compiled."""
    modules = any(
        "_orig_mod" in own_modules(module) or compiled_call(module) is not None for module in workload.model.modules()
    )
    return modules or is_compiled_function(workload.loss_fn)


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


# Parts of a batch: two microbatches, or all where they differ, with the whole batch held


def _with_part(workload: Workload, microbatch_size: int | None) -> Workload:
    """Return a workload to copy: its batch is a list of a part of two microbatches, as views, and the whole batch.

    Where the whole has no more, it is alone in the list. The storages keep their size.
    """
    size = samples_of(workload)
    microbatch_size, start = microbatch_size or size, 0
    two = min(size, 2 * microbatch_size)
    if two == size:
        return dataclasses.replace(workload, batch=[workload.batch])
    if workload.split is not None or len({t.shape[0] for t in tensors_of(workload.batch) if t.dim()}) != 1:
        # Two of which the second has the most elements: its gradients are added to earlier ones.
        parts = [
            part_of(workload, workload.batch, first, min(first + microbatch_size, size))
            for first in range(0, size, microbatch_size)
        ]
        later = [sum(t.numel() for t in tensors_of(part)) for part in parts][1 : size // microbatch_size]
        start = microbatch_size * later.index(max(later))
    batch = part_of(workload, workload.batch, start, start + two)
    counted = workload.batch_size if callable(workload.batch_size) or workload.batch_size is None else two
    return dataclasses.replace(workload, batch=[batch, workload.batch], batch_size=counted)


def _unwrapped(copied: Workload) -> Workload:
    """Return a copied workload with the batch's part as its `batch`, and the whole batch as its `batches`."""
    part, *whole = copied.batch
    return dataclasses.replace(copied, batch=part, batches=whole or None)


def _real_part(workload: Workload, microbatch_size: int | None) -> Workload:
    """Return a copy of a workload with data, and all microbatches of its batch if they are few, else two."""
    size = samples_of(workload)
    few = -(-size // (microbatch_size or size)) <= MOST_MICROBATCHES
    return _unwrapped(real_copy(_with_part(workload, None if few else microbatch_size)))


def _standing_for_all(trace: Trace, may_differ: bool) -> Trace | None:
    """Return a trace whose two microbatches stand for all, or would if these were fewer; None where all must run.

    They don't where they run different operators, as where lengths or values decide, where others may differ, and where
    sparse gradients are added up, which grow with each microbatch.

    Raises:
        CaptureError: The microbatches add up sparse gradients, and are too many to run.
    """
    if trace.microbatches == trace.scale_microbatches:
        return trace
    operators = len(trace.ops) * trace.scale_microbatches // trace.microbatches
    adding = (op for op in trace.ops if op.phase == "backward" and op.microbatch and op.name == "aten.add_.Tensor")
    if any('"args":[{"s":' in trace.signatures[op.signature] for op in adding):  # sparse gradients
        if operators > _MOST_OPERATORS:
            raise CaptureError(
                f"{trace.scale_microbatches:,} microbatches add up sparse gradients, and the sum grows with each."
                f" They run {operators:,} operators; a capture runs at most {_MOST_OPERATORS:,}. Give a larger"
                " microbatch_size="
            )
        return None
    texts = [_NUMBERS.sub("", text) if _SIZED.search(text) else "" for text in trace.signatures]
    forward: list[list[str]] = [[], []]
    for op in trace.ops:
        if op.phase == "forward" and texts[op.signature]:
            forward[op.microbatch].append(texts[op.signature])
    differ = forward[0] != forward[1]
    if (differ or may_differ) and trace.scale_microbatches <= MOST_MICROBATCHES and operators <= _MOST_OPERATORS:
        return None
    return _with_slack(trace) if differ else trace


def _with_slack(trace: Trace) -> Trace:
    return replace(trace, notes=[*trace.notes, _MICROBATCHES_DIFFER], slack=trace.slack + _OTHERS_MORE)


# Steps with data, within limits of time and memory


class DataRunLimitError(MemfitError):
    """A step with data exceeds its limit of time or memory."""


class _DataRunLimits(EagerMode):
    """A dispatch mode that ends code which takes too long from now on, or too much of the machine's memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.until, self.operators = time.monotonic() + _MOST_SECONDS, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        safe_point()
        self.operators += 1
        if time.monotonic() > self.until:
            raise DataRunLimitError(f"the step takes more than {_MOST_SECONDS:g} s with data")
        if self.operators % _CHECK_EVERY == 0 and not _has_memory(0):
            raise DataRunLimitError("with data the step needs more memory than the machine has free")
        return func(*args, **(kwargs or {}))


def _has_memory(nbytes: int) -> bool:
    memory = psutil.virtual_memory()
    return bool(memory.available - nbytes > _LEAST_FREE * memory.total)


@contextlib.contextmanager
def _limited(instead_of: CaptureError | None = None) -> Iterator[None]:
    """Run the user's code with data, within limits; say of its errors that it fails with data too.

    Args:
        instead_of: The error of the capture under fake tensors, which is raised where the code fails in the same way.
    """
    try:
        with _DataRunLimits():
            yield
    except MemfitError:
        raise
    except Exception as e:
        cause = None if instead_of is None else instead_of.__cause__
        if instead_of is not None and (type(cause), str(cause)) == (type(e), str(e)):
            raise instead_of from e
        place = f"{users_place(e)} ({type(e).__name__}: {e})"
        if fault := _own_fault(e):
            raise CaptureError(f"memfit can't record the step while it runs with data{place}: {fault}") from e
        told = "fix Workload.model, .loss_fn or .batch first"
        raise CaptureError(f"the step fails with real data too{place}: {told}") from e


def why_no_data_run(workload: Workload) -> str | None:
    """Return the reason why a workload can't run with data in this process; None where it can."""
    if not has_data(workload):
        return "there is no data"
    nbytes = sum(t.numel() * t.itemsize for t in workload.model.parameters())
    return None if _has_memory(_COPIES * nbytes) else "the machine has too little memory left"


def capture_with_data(job: CaptureJob, *, instead_of: CaptureError | None = None) -> Trace:
    """Return the trace of a step that runs with data, from its first step on, on a copy of the workload.

    Args:
        instead_of: The error of the capture under fake tensors, which a note quotes; it is raised where the step
            exceeds limits of time and memory. None for no limits.

    Raises:
        CaptureError: The step can't be captured with data either.
    """
    if instead_of is None:
        with nothing_changes(job.workload), without_collector(), torch.autograd.set_multithreading_enabled(False):
            trace = record(dataclasses.replace(job, warm=False), _real_part(job.workload, job.microbatch_size), None)
            return _standing_for_all(trace, may_differ=False) or _with_slack(trace)
    try:
        with _limited(instead_of):
            trace = capture_with_data(job)
    except DataRunLimitError as e:
        raise instead_of from e
    why = str(instead_of.__cause__ or instead_of).splitlines()[0]
    note = f"the step was captured while it ran with data, not under fake tensors ({why})"
    return replace(trace, notes=[*trace.notes, note])


def read_with_data(workload: Workload, build: BuildStep, microbatch_size: int | None = None) -> Readings | None:
    """Return the values that two steps in a row read with data on a copy; None where they exceed the limits.

    Args:
        microbatch_size: Samples in a microbatch, of which as many run as a capture may; None for the whole batch.

    Raises:
        CaptureError: The user's code raises.
    """
    if why_no_data_run(workload) is not None:
        return None
    with nothing_changes(workload):
        copied = _real_part(workload, microbatch_size)
        logs, starts = [], []
        try:
            with _limited(), composites_without_mode(), build(copied) as step:
                for _ in range(2):
                    starts.append(GeneratorStates.now())
                    recorder = ReadRecorder()
                    step.on_phase = recorder.enter_phase
                    with torch.autograd.set_multithreading_enabled(False), recorder, recorder.arrays():
                        step(copied.batch)
                    logs.append(recorder.log)
        except DataRunLimitError:
            return None
    return Readings((logs[0], logs[1]), (starts[0], starts[1]))


# What captures tell users: why a step fails and what to do, modules in evaluation mode, an untested PyTorch


@contextlib.contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Turn errors of fake tensors into a `CaptureError` that names the user's line, and a model's quantisation."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    try:
        log.setLevel(logging.CRITICAL)
        yield
    except MemfitError:
        raise
    except Exception as e:
        name, text = type(e).__name__, str(e)
        what = f"{name}: {(text.strip() or name).splitlines()[0]}"
        if isinstance(e, UnsupportedOperatorException):
            hint = _OPERATOR_HINT
        elif isinstance(e, UnfollowedOperatorError):
            hint = _FLEX_HINT if "flex_attention" in text else _UNFOLLOWED_HINT
        elif fault := _own_fault(e):
            hint = fault[0].upper() + fault[1:]
        elif "closure" in text:
            hint = _CLOSURE_HINT
        elif isinstance(e, AttributeError) and "'FakeTensor'" in text:
            hint = _SUBCLASS_HINT
        else:
            hint = _VALUES_HINT if isinstance(e, _NEEDS_VALUES) or ".numpy()" in text else _OTHER_HINT
        raise CaptureError(
            f"the step can't be captured without data{users_place(e)} ({what}). {hint}{quantized_hint(model)}"
        ) from e
    finally:
        log.setLevel(level)


def _own_fault(error: Exception) -> str:
    """Return a sentence that says where memfit itself failed; "" where other code did, or memfit refuses by name."""
    if isinstance(error, (*_NEEDS_VALUES, UnsupportedOperatorException, UnfollowedOperatorError)):
        return ""
    place = memfits_place(error)
    return f"memfit itself failed, at {place}, and not your code: please report it with this line" if place else ""


def evaluation_note(workload: Workload) -> str | None:
    """Return a note on modules in evaluation mode that would do something else in training; None where there are none.

    The step is captured as it is: a model may train with some of its modules in evaluation mode on purpose.
    """
    model = workload.model
    found = [(fqn, module) for fqn, module in model.named_modules() if not module.training and _heeds_mode(module)]
    if not found:
        return None
    names = ", ".join(f"{fqn or 'the model itself'} ({type(module).__name__})" for fqn, module in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
    said = f"{len(found):,} module{'s' if len(found) > 1 else ''} in evaluation mode: {names}{more}"
    if model.training:
        return f"{said}. The prediction keeps them in this mode"
    return (
        f"the model is in evaluation mode, as from_pretrained() leaves it, with {said}. The prediction is for this"
        " mode, and the peak of training mode differs: call model.train() first if your training does"
    )


def _heeds_mode(module: nn.Module) -> bool:
    """Tell whether a module's own forward pass depends on its mode: by its class, or by names that its code reads."""
    if isinstance(module, DropoutBase):
        return module.p > 0
    if isinstance(module, NormBase):
        return module.track_running_stats
    forward: Any = inspect.unwrap(type(module).forward)
    codes = [code] if inspect.iscode(code := getattr(forward, "__code__", None)) else []
    for code in codes:
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    if not any("training" in code.co_names for code in codes):
        return False
    rates = [v for name, v in vars(module).items() if "drop" in name and isinstance(v, float | int)]
    return not rates or any(rates)


@functools.cache
def warn_if_untested() -> None:
    """Warn at the user's line, once in a process, unless memfit was tested with this PyTorch."""
    if reason := _torch.versions.why_untested():
        warn_users(reason, UntestedTorchWarning)
