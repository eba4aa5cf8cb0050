"""Costs of operators on an accelerator: measured for each distinct call where it is here and cached, or modelled.

[Modelled] By the roofline model, for a device that is not here, and for calls that can't be run. Williams, Waterman,
Patterson (2009), *Roofline: An Insightful Visual Performance Model for Multicore Architectures*: a kernel's time is the
larger of its arithmetic and its memory traffic (`OperatorCall`), and times what was measured on a device like it
(`memfit.cost.error_bars`). So is the time to make a compiled step's code.

[Measured] Times are by the device's own events, over calls in a row; workspaces by the allocator's own peak around one
call, once libraries have made their handles. CUDA is measured in a process of its own, so that neither the user's
statistics nor a process with fake CUDA are touched.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch.utils.checkpoint import checkpoint

from memfit import hardware
from memfit.cost.cpu_costs import OperatorCount, storages_of, tiny_model
from memfit.cost.error_bars import measured_like
from memfit.cost.links import keep, kept
from memfit.cost.operator_call import OperatorCall, distinct_calls, figures, resident_bytes
from memfit.errors import UsageError
from memfit.foundations import Progress, StageProgress, silent
from memfit.hardware import (
    allocated_bytes,
    cache_folder,
    float32_precision,
    link_rate,
    peaks,
    reset_peaks,
    stopwatch,
    synchronize,
)
from memfit.ir import (
    CONVOLUTIONS,
    COPY_IN,
    COPY_OUT,
    CostTable,
    Device,
    Matmul,
    OpCost,
    Trace,
    is_kernel,
    operator_class,
)
from memfit.workload import rebuild

STEP_ERROR, MEASURED_STEP_ERROR = 0.30, 0.2  # estimates, not measured: see `CostTable.step_error`
PEAK_ERROR = 0.05
PEAK_ERROR_CONVOLUTIONS = 0.10  # cuDNN's workspaces are bounds, and wide ones
_MEASURING = 3  # version of the measurement, in the cache's name
_BLOCK_BYTES = 512  # to which allocators round
_SECONDS, _BATCHES, _MOST_CALLS = 0.005, 3, 100
_TINY_STEPS = 20
_DRIVER = Path("/proc/driver/nvidia/version")


def roofline(traces: Iterable[Trace], device: Device, *, matmul: Matmul = "highest") -> CostTable:
    """Return the costs of the operators of some traces on a device, without running any.

    Each operator's seconds are the larger of its kernel's time and `device.launch_seconds`, so that they add up; the
    dispatch of later operators that a long kernel hides is not subtracted.

    Raises:
        UsageError: The device's figures are missing, or the rate of a step's copies to the host.
    """
    check_figures(device)
    traces, like = list(traces), measured_like(device)

    def cost(call: OperatorCall) -> OpCost:
        factor = like.time_factor(call.kind, call.work.dtype) if like is not None else 1.0
        return OpCost(max(call.kernel_seconds * factor, call.floor_seconds), call.workspace_bytes, False)

    return _table(
        traces,
        device,
        matmul,
        cost,
        f"device={device.name!r} has no link_bytes_per_second, the rate of copies to the host: add it",
        torch_version=traces[0].torch_version if traces else "",
        checkpoint_seconds=figures()["device"]["checkpoint_seconds"],
        selective_op_seconds=figures()["device"]["selective_op_seconds"],
        step_error=STEP_ERROR,
        notes=[f"times are modelled, and corrected by measured steps on {like.device} ({like.date})"] if like else [],
    )


def _table(
    traces: list[Trace],
    device: Device,
    matmul: Matmul,
    cost: Callable[[OperatorCall], OpCost],
    no_link: str,
    *,
    is_measured: bool = False,
    **more: Any,
) -> CostTable:
    """Return the costs of calls, and of copies to the host: with `no_link` as the error where their rate is unknown."""
    ops: dict[str, OpCost] = {}
    for call in distinct_calls(traces, device, matmul):
        if call.copied_bytes is None:
            ops[call.signature] = cost(call)
        elif not device.link_bytes_per_second:
            raise UsageError(no_link)
        else:
            ops[call.signature] = OpCost(call.copied_bytes / device.link_bytes_per_second, 0, is_measured)
    return CostTable(
        device=device.name,
        threads=0,
        ops=ops,
        dispatch_seconds=0.0,  # within each operator's time, as the accelerator works on while the host dispatches
        resident_workspace_bytes=max((resident_bytes(trace, device) for trace in traces), default=0),
        link_bytes_per_second=device.link_bytes_per_second,
        **{"peak_error": peak_error(traces), **more},
    )


def peak_error(traces: Iterable[Trace]) -> float:
    """Return the estimated error of predicted peaks."""
    convolves = any(operator_class(op.name) == CONVOLUTIONS for trace in traces for op in trace.ops)
    return PEAK_ERROR_CONVOLUTIONS if convolves else PEAK_ERROR


def check_figures(device: Device) -> None:
    """Raise UsageError where a device lacks a figure that times are computed from."""
    needed = {
        "bandwidth_bytes_per_second": device.bandwidth_bytes_per_second,
        "vector_flops": device.vector_flops.get("float32", 0.0),
        "cores": device.cores,
    }
    missing = [name for name, value in needed.items() if value <= 0]
    if missing:
        raise UsageError(
            f"device={device.name!r} has no {', '.join(missing)}, so memfit can't predict its times: add"
            f" {'them' if len(missing) > 1 else 'it'} to its entry (vector_flops needs 'float32')"
        )


# [How long code takes to make] Measured on two cores of an AMD EPYC with torch 2.13 and g++ 12, in CPU seconds with one
# process that compiles, for six steps: perceptrons of 2 and 8 blocks, byte-level Transformers of 1 and 4 layers, a
# GPT-2 of 4 layers and a ResNet. They took 16 to 55 s, and these constants give each of them to within 16 %. No
# benchmark holds that yet, and another machine takes other times: it is an estimate to be said, and nothing is chosen
# by it.
_HEADER_SECONDS = 10.0  # PyTorch's headers, compiled once before the kernels
_OPERATOR_SECONDS = 0.016  # tracing, partitioning and lowering, in Python, for each operator of the step
_KERNEL_SECONDS = 0.3  # the C++ compiler, for each kernel


def kernels_of(trace: Trace) -> int:
    """Return how many kernels code is made of, in the trace of a compiled step."""
    return sum(map(is_kernel, trace.signatures))


def code_seconds(trace: Trace, processes: int) -> float:
    """Return about how long a captured step's code takes to make on a CPU without kept code, some kernels at a time."""
    return _HEADER_SECONDS + _OPERATOR_SECONDS * len(trace.ops) + _KERNEL_SECONDS * kernels_of(trace) / processes


# Measured


class AcceleratorCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures of an accelerator's operators.

    Attributes:
        ops: Seconds and workspace bytes by signature; without calls that can't be run there.
        launch_seconds: Time from one operator to the next in a step of tiny modules.
        checkpoint_seconds: Overhead of a checkpointed call.
        link_bytes_per_second: Bandwidth of copies of pinned memory, or of other memory where none can be pinned; 0
            where there was no room to measure it.
    """

    schema: str = "memfit.accelerator_costs/1"
    ops: dict[str, tuple[float, int]] = {}
    launch_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    link_bytes_per_second: float = 0.0


def measured_costs(
    traces: Iterable[Trace], device: Device, progress: StageProgress | None = None, *, matmul: Matmul = "highest"
) -> CostTable:
    """Return the costs of the operators of some traces on an accelerator of this machine."""
    traces = list(traces)
    path = accelerator_cache(device, matmul)
    known = kept(path, AcceleratorCosts) or AcceleratorCosts()
    wanted = dict.fromkeys(s for trace in traces for s in trace.signatures)
    copies = {text for text in wanted if json.loads(text)["op"] in (COPY_IN, COPY_OUT)}
    missing = [text for text in wanted if text not in known.ops and text not in copies]
    if missing or not known.launch_seconds or (copies and not known.link_bytes_per_second):
        knows_the_device = known.launch_seconds > 0 and known.link_bytes_per_second > 0
        found = _measure(missing, device, matmul, progress, knows_the_device)
        ops = {**known.ops, **found.ops}
        known = replace(known if knows_the_device else found, ops=ops)
        keep(path, known)
    device = replace(device, launch_seconds=known.launch_seconds)
    modelled: dict[str, OpCost] = {}
    with contextlib.suppress(UsageError):  # a card that the catalogue does not know
        modelled = roofline(traces, device, matmul=matmul).ops

    def cost(call: OperatorCall) -> OpCost:
        if call.signature not in known.ops:
            return modelled.get(call.signature, OpCost(known.launch_seconds, 0, False))
        seconds, nbytes = known.ops[call.signature]
        return OpCost(max(seconds, call.floor_seconds), nbytes, True)

    more: dict[str, Any] = {"step_error": MEASURED_STEP_ERROR}
    like = measured_like(device)
    if like is not None and like.peak_error is not None and like.step_error is not None:
        more = {"peak_error": like.peak_error, "step_error": like.step_error}
        more["notes"] = [f"error bars are those of {like.cases} steps on {like.device} ({like.date})"]
    return _table(
        traces,
        replace(device, link_bytes_per_second=known.link_bytes_per_second),
        matmul,
        cost,
        "the device had no room to measure copies to the host: free memory there, and try again",
        is_measured=True,
        torch_version=str(torch.__version__),
        checkpoint_seconds=known.checkpoint_seconds,
        selective_op_seconds=0.0,
        **more,
    )


def accelerator_cache(device: Device, matmul: Matmul) -> Path:
    """Return the path of a device's costs: by product, driver, PyTorch, and how it multiplies float32."""
    try:
        driver = re.search(r"\d+\.\d+[.\d]*", _DRIVER.read_text())
    except OSError:
        driver = None
    name = f"{device.description}-{driver[0] if driver else device.kind}-torch{torch.__version__}-{matmul}"
    return cache_folder() / f"accelerator_costs{_MEASURING}-{re.sub(r'[^A-Za-z0-9.+]+', '-', name)}.json"


def _measure(
    signatures: list[str], device: Device, matmul: Matmul, progress: StageProgress | None, ops_only: bool
) -> AcceleratorCosts:
    """Measure calls here, or for CUDA in a process of its own."""
    there = functools.partial(measure_calls, signatures, torch.device(device.name), matmul, ops_only)

    def told(stage: str, done: int, total: int) -> None:
        if progress is not None:
            progress(done, total)

    if device.kind != "cuda":
        return there(told)
    failure = f"the process that measures operators on {device.name} ended with status {{status}}: see its output above"
    found = hardware.process.run(there, silent, fakes_cuda=False, failure=failure)
    told("", len(signatures), len(signatures))
    return found


def measure_calls(
    signatures: list[str], device: torch.device, matmul: Matmul, ops_only: bool, progress: Progress
) -> AcceleratorCosts:
    """Return the figures of calls on an accelerator, measured here; with `ops_only` not those of the device itself."""
    ops = {}
    with float32_precision(matmul), torch.random.fork_rng([device.index or 0], device_type=device.type):
        for index, text in enumerate(signatures):
            if (cost := _cost(text, device)) is not None:
                ops[text] = cost
            progress("", index + 1, len(signatures))
        launch_seconds, checkpoint_seconds = (0.0, 0.0) if ops_only else _overheads(device)
    return AcceleratorCosts(
        ops=ops,
        launch_seconds=launch_seconds,
        checkpoint_seconds=checkpoint_seconds,
        link_bytes_per_second=0.0 if ops_only else link_rate(device),
    )


def _cost(text: str, device: torch.device) -> tuple[float, int] | None:
    """Return the seconds and the workspace of a call; None where it can't be run."""
    try:
        func, args, kwargs = rebuild(text, str(device))

        def call() -> Any:
            return func(*args, **kwargs)

        call()  # makes the libraries' handles, and chooses algorithms
        synchronize(device)
        given = {storage.data_ptr() for storage in storages_of((args, kwargs))}
        before_bytes = allocated_bytes(device)
        reset_peaks(device)
        out = call()
        synchronize(device)
        made = {s.data_ptr(): -(-s.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES for s in storages_of(out)}
        found = peaks(device)
        out_bytes = sum(nbytes for pointer, nbytes in made.items() if pointer not in given)
        workspace_bytes = 0 if found is None else max(0, found.allocated_bytes - before_bytes - out_bytes)
        del out
        timed = stopwatch(device)
        once = timed(call, 1)
        count = max(1, min(_MOST_CALLS, int(_SECONDS / max(once, 1e-7))))
        return min(once, *(timed(call, count) for _ in range(_BATCHES))), workspace_bytes
    except Exception:  # an operator may be anyone's code, which may raise anything; or memory is too small
        return None


def _overheads(device: torch.device) -> tuple[float, float]:
    """Return the time from one operator to the next in a step of tiny modules, and of a checkpointed call."""
    model = tiny_model().to(device)
    x = torch.ones(4, 8, device=device)

    def step() -> None:
        model(x).sum().backward()

    def again() -> None:
        value = x
        for layer in model:
            value = checkpoint(layer, value, use_reentrant=False)
        value.sum().backward()

    with OperatorCount() as plain:  # type: ignore[no-untyped-call]
        step()
    with OperatorCount() as recomputed:  # type: ignore[no-untyped-call]
        again()
    timed = stopwatch(device)
    plain_seconds, again_seconds = (min(timed(run, 1) for _ in range(_TINY_STEPS)) for run in (step, again))
    launch_seconds = plain_seconds / plain.operators
    more = again_seconds - plain_seconds - (recomputed.operators - plain.operators) * launch_seconds
    return launch_seconds, max(0.0, more / len(model))
