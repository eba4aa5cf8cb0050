"""Costs of operators on an accelerator that is here: measured there for each distinct call, and cached.

Times are by the device's own events, over calls in a row; workspaces by the allocator's own peak around one call, once
libraries have made their handles. CUDA is measured in a process of its own, so that neither the user's statistics nor
a process with fake CUDA are touched. A call that can't be run there is modelled (`memfit.cost.modelled_costs`) where
the device's rates are known.
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

from memfit import hardware, ir
from memfit.cost.cpu_costs import OperatorCount, storages_of, tiny_model
from memfit.cost.error_bars import measured_like
from memfit.cost.modelled_costs import check_figures, floor_seconds, peak_error, roofline
from memfit.cost.operator_call import distinct_calls, resident_bytes
from memfit.errors import OutputError, PlanError, UsageError
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
from memfit.ir import COPY_IN, COPY_OUT, CostTable, Device, Matmul, OpCost, Trace
from memfit.workload import rebuild

STEP_ERROR = 0.2
_MEASURING = 3  # version of the measurement, in the cache's name
_BLOCK_BYTES = 512  # to which allocators round
_SECONDS, _BATCHES, _MOST_CALLS = 0.005, 3, 100
_TINY_STEPS = 20
_DRIVER = Path("/proc/driver/nvidia/version")


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
    """Return the costs of the operators of some traces on an accelerator of this machine.

    Raises:
        CaptureError: The process that measures ended without a result.
    """
    traces = list(traces)
    path = cache_path(device, matmul)
    known = read_cache(path)
    wanted = dict.fromkeys(s for trace in traces for s in trace.signatures)
    missing = [text for text in wanted if text not in known.ops and _name(text) not in (COPY_IN, COPY_OUT)]
    lacks_link = not known.link_bytes_per_second and any(_name(text) in (COPY_IN, COPY_OUT) for text in wanted)
    if missing or not known.launch_seconds or lacks_link:
        knows_the_device = known.launch_seconds > 0 and known.link_bytes_per_second > 0
        found = _measure(missing, device, matmul, progress, knows_the_device)
        ops = {**known.ops, **found.ops}
        known = replace(known if knows_the_device else found, ops=ops)
        with contextlib.suppress(OutputError):  # without a cache, the next run measures again
            ir.codec.write_atomic(path, ir.codec.encode(known))
    return _table(traces, replace(device, launch_seconds=known.launch_seconds), known, matmul)


def _table(traces: list[Trace], device: Device, known: AcceleratorCosts, matmul: Matmul) -> CostTable:
    """Return measured costs, with modelled ones for calls that could not be run."""
    modelled: dict[str, OpCost] = {}
    with contextlib.suppress(UsageError):  # a card that the catalogue does not know
        check_figures(device)
        modelled = roofline(traces, device, matmul=matmul).ops
    ops: dict[str, OpCost] = {}
    for call in distinct_calls(traces, device):
        text = call.signature
        if call.copies:
            if not known.link_bytes_per_second:
                raise UsageError(
                    "the device had no room to measure copies to the host: free memory there, and try again"
                )
            ops[text] = OpCost(call.largest_bytes / known.link_bytes_per_second, 0, True)
        elif text in known.ops:
            seconds, nbytes = known.ops[text]
            ops[text] = OpCost(max(seconds, floor_seconds(call)), nbytes, True)
        else:
            ops[text] = modelled.get(text, OpCost(known.launch_seconds, 0, False))
    peak_share, step_share, notes = peak_error(traces), STEP_ERROR, []
    like = measured_like(device)
    if like is not None and like.peak_error is not None and like.step_error is not None:
        peak_share, step_share = like.peak_error, like.step_error
        notes = [f"error bars are those of {like.cases} steps on {like.device} ({like.date})"]
    return CostTable(
        device=device.name,
        torch_version=str(torch.__version__),
        threads=0,
        ops=ops,
        dispatch_seconds=0.0,  # within each operator's time, as the accelerator works on while the host dispatches
        checkpoint_seconds=known.checkpoint_seconds,
        selective_op_seconds=0.0,
        peak_error=peak_share,
        step_error=step_share,
        notes=notes,
        resident_workspace_bytes=max((resident_bytes(trace, device) for trace in traces), default=0),
        link_bytes_per_second=known.link_bytes_per_second,
    )


def _name(signature: str) -> str:
    return str(json.loads(signature)["op"])


def cache_path(device: Device, matmul: Matmul) -> Path:
    """Return the path of a device's costs: by product, driver, PyTorch, and how it multiplies float32."""
    try:
        driver = re.search(r"\d+\.\d+[.\d]*", _DRIVER.read_text())
    except OSError:
        driver = None
    name = f"{device.description}-{driver[0] if driver else device.kind}-torch{torch.__version__}-{matmul}"
    return cache_folder() / f"accelerator_costs{_MEASURING}-{re.sub(r'[^A-Za-z0-9.+]+', '-', name)}.json"


def read_cache(path: Path) -> AcceleratorCosts:
    """Return the figures in a file of the cache; none where it is missing or damaged."""
    with contextlib.suppress(PlanError):
        return ir.codec.read(path, AcceleratorCosts) if path.exists() else AcceleratorCosts()
    return AcceleratorCosts()


def _measure(
    signatures: list[str], device: Device, matmul: Matmul, progress: StageProgress | None, ops_only: bool
) -> AcceleratorCosts:
    """Measure calls here, or for CUDA in a process of its own."""
    there = functools.partial(measure, signatures, torch.device(device.name), matmul, ops_only=ops_only)
    if device.kind != "cuda":
        return there(progress=progress)
    failure = f"the process that measures operators on {device.name} ended with status {{status}}: see its output above"
    found = hardware.process.run(functools.partial(_unwatched, there), silent, fakes_cuda=False, failure=failure)
    if progress is not None:
        progress(len(signatures), len(signatures))
    return found


def _unwatched(call: Callable[[], AcceleratorCosts], progress: Progress) -> AcceleratorCosts:
    return call()


def measure(
    signatures: list[str],
    device: torch.device,
    matmul: Matmul,
    progress: StageProgress | None = None,
    *,
    ops_only: bool = False,
) -> AcceleratorCosts:
    """Return the figures of calls on an accelerator, measured here; with `ops_only` not those of the device itself."""
    ops = {}
    with float32_precision(matmul), torch.random.fork_rng([device.index or 0], device_type=device.type):
        for index, text in enumerate(signatures):
            if (cost := _cost(text, device)) is not None:
                ops[text] = cost
            if progress is not None:
                progress(index + 1, len(signatures))
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
        return _least_seconds(call, device), workspace_bytes
    except Exception:  # an operator may be anyone's code, which may raise anything; or memory is too small
        return None


def _least_seconds(call: Callable[[], Any], device: torch.device) -> float:
    timed = stopwatch(device)
    once = timed(call, 1)
    count = max(1, min(_MOST_CALLS, int(_SECONDS / max(once, 1e-7))))
    return min(once, *(timed(call, count) for _ in range(_BATCHES)))


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
