"""`memfit.estimate`: the peak and the time of a step as it is, without running it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace

from memfit import ir, planner
from memfit.cost import links_of, with_collectives
from memfit.errors import UsageError
from memfit.foundations import Progress, format_bytes, silent
from memfit.hardware import find_device, precisions
from memfit.ir import BUBBLE, CostTable, Device, Levers, OpCost, Precision, Prediction, Trace, allocations
from memfit.levers import check_as_given, check_workload
from memfit.pipeline.placement import device_named
from memfit.pipeline.verbs import checked, verb
from memfit.planner import (
    BENCHMARK_ERROR,
    EstimateOptions,
    capture_plain,
    check_precision,
    costs_of,
    options_of,
    predict,
)
from memfit.ranks import (
    Insertion,
    Mode,
    Parallel,
    Sharding,
    communication,
    read_parallel,
    shard,
    stages_of,
    with_share_of_update,
)
from memfit.report import stages, with_bars, write_chrome_trace, write_snapshot
from memfit.workload import Workload, packed, padding_note, precision_label, samples_of, tokens_per_sample

_PASSES = ("forward", "backward", "recompute")


@checked
@with_bars(stages)
@verb
def estimate(
    workload: Workload,
    *,
    device: str | torch.device | None = None,
    precision: Precision | Literal["auto"] = "32-true",
    microbatch_size: int | None = None,
    world_size: int = 1,
    sharding: Mode = "ddp",
    parallel: str | None = None,
    snapshot: Path | str | None = None,
    chrome_trace: Path | str | None = None,
    progress: Progress = silent,
) -> Prediction:
    """Predict the peak and the time of a step as it is, without running it.

    For a GPU, which need not be here, the step is captured in a process of its own: the workload is
    sent as its program and its tensors' shapes. A model built under `torch.device("meta")` takes no memory.

    Args:
        workload: The user's workload; nothing of it is changed.
        device: The device's name: "cpu", "cuda", or one of the catalogue (`memfit devices` shows it); None for the one
            that the model is on.
        precision: Of the step; "auto" takes the mixed one that the device is made for.
        microbatch_size: Samples in one forward and backward pass of a rank; None for all that it has.
        world_size: Ranks that share the step (≥ 1). The batch of the workload is the global one, of which each rank
            runs its part; predicted is the rank that holds most.
        sharding: How they share it, where they are more than one: "ddp", "zero1", "zero2" or "zero3"
            (`sharding.one_rank`).
        parallel: How ranks share one copy of the model, on paper: some of "tp=N" (tensor), "cp=N" (context) and "pp=N"
            (pipeline parallelism), as in "tp=4,pp=2". The batch is that of all of them; the peak is that of the rank
            that holds most. memfit does not apply it. None for a whole model on each rank.
        snapshot: Where to write the allocator's simulated history, for pytorch.org/memory_viz; GPUs only.
        chrome_trace: Where to write the step's timeline, for Perfetto.
        progress: Called with (stage, done, total); by default bars in a notebook, and nothing elsewhere.

    Raises:
        UsageError: No such device, precision or sharding, or more ranks than samples.
        OutputError: A file can't be written, which is found out first.
        CaptureError: The step can't be captured.
    """
    options = options_of(EstimateOptions, locals())
    found = estimated(workload, options, progress=progress)
    note = padding_note(workload.batch) if workload.split is None else None
    if note is None:
        return found
    return replace(found, notes=[*found.notes, note + _packed_peak(workload, options, found)])


def _packed_peak(workload: Workload, options: EstimateOptions, padded: Prediction) -> str:
    """Return the predicted peak of the same step on packed samples, for a note; "" where it is not known."""
    taking = (inspect.signature(type(module).forward).parameters for module in workload.model.modules())
    is_whole = (options.microbatch_size, options.world_size, options.parallel) == (None, 1, None)
    if type(workload) is not Workload or not is_whole or not any("position_ids" in names for names in taking):
        return ""
    try:
        row = dataclasses.replace(workload, batch=packed(workload.batch), batch_size=None)
        found = estimated(row, dataclasses.replace(options, snapshot=None, chrome_trace=None), progress=silent)
    except Exception:  # someone's loss, which may need what a packed batch does not have
        return ""
    return (
        f": {format_bytes(found.peak_bytes)} in the place of {format_bytes(padded.peak_bytes)} at the peak, in one row"
    )


def estimated(workload: Workload, options: EstimateOptions, *, progress: Progress) -> Prediction:
    """Return the prediction that `memfit.estimate` makes."""
    check_as_given(workload)
    device, world_size = device_named(options.device, workload), options.world_size
    found = find_device(device)
    precision = precisions(found)[-1] if options.precision == "auto" else options.precision
    check_precision(precision, "precision", found, workload)
    if world_size < 1:
        raise UsageError(f"world_size={world_size} is not above 0: give the number of ranks")
    if world_size > 1 and world_size > (samples := samples_of(workload)):
        raise UsageError(
            f"world_size={world_size} ranks share a batch of {samples} samples, so some ranks would have"
            " none: give a Workload.batch of all ranks' samples, or fewer ranks"
        )
    part = workload  # of the rank with the most samples
    if world_size > 1:
        from memfit.ranks import of_one_rank  # distributed packages take a second to import

        part = of_one_rank(workload, world_size)
    size = options.microbatch_size or samples_of(part)
    shared = Parallel() if options.parallel is None else read_parallel(options.parallel)
    if shared.ranks > 1 and world_size > 1:
        raise UsageError(
            f"parallel={options.parallel!r} and world_size={world_size} can't be predicted together. With parallel="
            " ranks share one copy of the model; with world_size= they share the batch. Leave out one of"
            " them, and give the batch of one copy with parallel="
        )
    snapshot, chrome_trace = options.snapshot, options.chrome_trace
    if snapshot is not None and found.kind != "cuda":
        raise UsageError(f"snapshot= shows the allocator of a GPU, and device={device!r} has none: give a GPU")
    for path in (snapshot, chrome_trace):
        if path is not None:
            ir.codec.check_writable(path)
    if planner.is_elsewhere(found):
        given = dataclasses.replace(
            options,
            device=device,
            precision=precision,
            snapshot=snapshot and Path(snapshot).resolve(),
            chrome_trace=chrome_trace and Path(chrome_trace).resolve(),
        )
        return planner.call_elsewhere(estimated, workload, [{"options": given}], progress, sizes=[size])[0]
    check_workload(workload, found)
    progress("capture", 0, 1)
    trace = capture_plain(part, Levers(precision=precision, microbatch_size=size), found)
    progress("capture", 1, 1)
    costs = costs_of([trace], found, functools.partial(progress, "measure operators"))
    if workload.loop is not None and workload.loop.cudnn_benchmark and found.kind == "cuda":
        costs = replace(costs, peak_error=costs.peak_error + BENCHMARK_ERROR)
    if world_size > 1:
        sharding = Sharding(world_size=world_size, mode=options.sharding)
        note = (
            f"{sharding.mode} over {world_size} ranks, on paper: the rank with the largest part of the"
            f" batch's {samples_of(workload)} samples has {trace.batch_size}"
        )
        if found.link_bytes_per_second:
            sent = communication(trace, sharding, found.link_bytes_per_second)
            total = sent.all_gather_bytes + sent.reduce_scatter_bytes + sent.all_reduce_bytes
            note += f". A rank sends {format_bytes(total)} a step; the step's time includes it"
        trace = with_share_of_update(shard(trace, sharding), sharding)
        trace = replace(trace, notes=[*trace.notes, note])
        costs = costs_of([trace], found)
    if shared.ranks > 1:
        trace, costs = _on_paper(trace, costs, shared, found)
    if (label := precision_label(workload, precision)) != precision:
        note = f"the model is not in fp32, so precision={precision!r} runs it as it was built: {label}"
        trace = replace(trace, notes=[*trace.notes, note])
    prediction, timeline = predict(trace, costs, found, tokens_per_sample(workload.batch))
    if snapshot is not None:
        write_snapshot(
            allocations(trace, costs),
            found.allocator,
            snapshot,
            capacity_bytes=found.usable_bytes,
            total_bytes=found.memory_bytes,
            seconds=timeline.seconds,
        )
    if chrome_trace is not None:
        write_chrome_trace(timeline, chrome_trace)
    return prediction


def _on_paper(trace: Trace, costs: CostTable, parallel: Parallel, device: Device) -> tuple[Trace, CostTable]:
    """Return the step of the rank that holds most, and its costs; its time is that of the whole pipeline."""
    stages = stages_of(trace, parallel)
    if device.kind != "cpu":  # a CPU's are measured: of a share they follow from those of the whole
        costs = costs_of(stages, device)
    links = links_of(device, Sharding(world_size=max(parallel.tp, parallel.cp, 2), mode="ddp"))
    costs = with_collectives(costs, stages, links)
    if parallel.pp == 1:
        return stages[0], costs
    found = [predict(stage, costs, device)[0] for stage in stages]
    peaks = [p.peak_reserved_bytes or p.peak_bytes for p in found]
    most = max(range(len(stages)), key=peaks.__getitem__)
    passes = [sum(p.phase_seconds.get(phase, 0.0) for phase in _PASSES) for p in found]
    bubble = (parallel.pp - 1) / trace.scale_microbatches * max(passes)
    waits = max(p.step_seconds for p in found) + bubble - found[most].step_seconds
    note = (
        f"stage {most} of 0 to {parallel.pp - 1} has the largest peak; the peaks: {', '.join(map(format_bytes, peaks))}"
    )
    # The wait for the other stages stands once, in the first microbatch.
    stage = stages[most]
    at = next((i for i, op in enumerate(stage.ops) if op.phase == "optimizer"), len(stage.ops))
    first = next(i for i, op in enumerate(stage.ops) if op.phase == "backward")
    insertion = Insertion(stage)
    wait = insertion.op(BUBBLE, 0, at, like=first, call=-1)
    waiting = insertion.result()
    cost = OpCost(max(0.0, waits - costs.dispatch_seconds), 0, False)
    ops = {**costs.ops, waiting.signatures[wait.op.signature]: cost}
    return replace(waiting, notes=[*waiting.notes, note]), replace(costs, ops=ops)
