"""Plans: for a workload and a budget, the fastest combination of levers that fits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import torch

from memfit import ir, levers, planner
from memfit.capture import without_collector
from memfit.errors import UsageError
from memfit.foundations import Progress, parse_budget, read_budget, silent
from memfit.hardware import find_device
from memfit.hardware import precisions as precisions_of
from memfit.ir import NUMERICS, CompilerLever, Mode, Numerics, Plan, Precision, Sharding, UpdateSetting, allows
from memfit.levers import (
    ACTIVATION_OFFLOAD,
    COMPILATION,
    SHARDING,
    check_as_given,
    check_lever_names,
    check_plan,
    check_workload,
    circumstances,
    microbatch_sizes,
)
from memfit.pipeline.placement import device_named, ranks_here
from memfit.pipeline.verbs import checked, verb
from memfit.planner import Findings, Measure, PlanOptions, Request, assemble, check_precision, options_of
from memfit.ranks import SEARCHED, SingleProcess, check_same, each, launched_size, once
from memfit.report import stages, with_bars
from memfit.workload import Workload, padding_note, samples_of

_COMPILERS: tuple[CompilerLever, ...] = ("inductor", "inductor-channels-last")


@checked
@with_bars(stages)
@verb
def plan(
    workload: Workload,
    *,
    budget: int | float | str,
    device: str | torch.device | None = None,
    numerics: Numerics = "reordered",
    precisions: Sequence[Precision] | None = None,
    optimizers: Sequence[UpdateSetting] | None = None,
    world_size: int | None = None,
    sharding: Mode | Literal["auto"] = "auto",
    engine: Sharding | None = None,
    points: int = 8,
    host_budget: int | str | None = None,
    time_limit_seconds: float = 10.0,
    measure: Measure = "auto",
    compile: bool | Literal["auto"] = False,
    progress: Progress = silent,
) -> Plan:
    """Choose the fastest combination of levers that fits a budget, by its predicted peak.

    Searched are precision, microbatch size (the global batch stays), chunked losses, lean normalisations and
    activations, activation checkpointing of any modules, whole or selective, and, for a GPU with `host_budget`, what
    waits in host memory. The plan chosen is applied to a copy and captured again; what it says is predicted is
    predicted for that step.

    Args:
        workload: The user's workload; nothing of it is changed.
        budget: Bytes, a string with a unit ("1.5GiB"), or a share of the device's memory ("90%") or of the plain
            step's peak ("0.5x").
        device: The device's name: "cpu", "cuda", or one of the catalogue; None for the one that the model is on. For a
            GPU the budget is held against what the allocator reserves, and the frontier's peaks are live bytes.
        numerics: How far the numbers may change: "exact", "reordered", "reduced" or "changed".
        precisions: Precisions to search; None for "32-true" and the mixed one that the device is made
            for; "tf32" and "bf16-true" only when asked for. Those that `numerics` does not allow are solved for
            the frontier only.
        host_budget: Pinned host memory for activations, optimizer states and frozen weights: bytes, or a string with
            a unit. None for none.
        optimizers: Ways of updating the parameters that may be tried where no other plan is cheap, alone and together:
            values of `Levers.optimizer`, `.optimizer_state` and `.update`; None for all that `numerics` allows.
        world_size: Ranks that share the step (≥ 1); None for those of the process group that this process has joined,
            1 outside of one. The batch of the workload is the global one, of which each rank runs its part; the budget
            and what is predicted are those of the rank that holds most. In a process group all ranks call this: the
            first plans, in a process of its own without data, for the least of their budgets, and all return its plan.
        sharding: How they share it: "ddp", "zero2" (everything sharded, parameters kept gathered from the forward to
            the backward pass) or "zero3"; "auto" searches all.
        engine: How another library's engine has ranks share the step, such as Lightning's. The workload is then one
            rank's, and the engine is counted on paper and not applied: `numerics` is about what memfit does besides.
            None where memfit shares the step, or nobody does.
        points: Budgets that the frontier is solved for, for each precision and microbatch size.
        time_limit_seconds: Of solving, about: nine tenths for the plan where it needs them, the rest, up to half,
            for the frontier. When time is up, the best found and how far it is from the bound proven are returned.
        measure: Whether to run plans before one is chosen, where their predicted times are too near to each other to
            choose by. At most four run, in turns, for a few steps each, on a copy of the workload, which takes its
            memory once more. This stops after 30 seconds, or 60 where plans are compiled, but for the step that is
            under way then and for making code, which "auto" does where it is predicted to take two minutes at most.
            "auto" runs them where the device is here, the workload has data, no other ranks share the step, and steps
            are short enough; never where the environment variable `MEMFIT_MEASURE` is "no". True takes up to 120
            seconds, until the ratios of plans are known to 1 %; it runs fewer plans where steps are long, and also a
            plan that no other is near. `Plan.measured` has the times, or a note says why there are none.
        compile: Whether the model and the loss may be compiled by `torch.compile`: "auto" searches compiled steps too,
            True searches no others. `numerics` must allow "reordered". Each combination takes as long to capture as
            Dynamo takes for the model. Code is made where plans are run to be compared, and in the first step of the
            plan where it is applied.
        progress: Called with (stage, done, total); by default bars in a notebook, and nothing elsewhere.

    Raises:
        BudgetError: `budget` can't be parsed.
        InfeasibleError: No plan that `numerics` allows fits.
        CaptureError: The step can't be captured.
        PlanMismatchError: The ranks of the process group have different workloads.
        UsageError: An argument is out of its range, or `world_size` is not the number of ranks of the process group.
    """
    options = options_of(PlanOptions, locals())
    if measure != "auto" and not isinstance(measure, bool):
        raise UsageError(f"measure={measure!r} is unknown: use 'auto', True or False")
    if measure == "auto" and os.environ.get("MEMFIT_MEASURE") == "no":
        options = replace(options, measure=False)
    found = planned(workload, options, progress=progress)
    note = padding_note(workload.batch) if workload.split is None else None
    return found if note is None else msgspec.structs.replace(found, notes=[*found.notes, note])


def planned(
    workload: Workload, options: PlanOptions, *, progress: Progress = silent, findings: Findings | None = None
) -> Plan:
    """Return the plan that `memfit.plan` makes; it adds to what plans of the same model have found so far."""
    ranks = ranks_here()
    if options.world_size is None:
        options = replace(options, world_size=ranks.size)
    if ranks.size > 1 and options.world_size != 1:
        check_ranks(options)
    else:
        check_as_given(workload)
    options = replace(options, device=device_named(options.device, workload))
    if ranks.size > 1 and options.world_size != 1:
        return _plan_on_ranks(ranks, workload, options, progress)
    processes = max(ranks.size, launched_size())
    request = _requested(workload, options, progress, findings or Findings(), processes)
    if planner.is_elsewhere(request.device):
        sizes = microbatch_sizes(-(-samples_of(workload) // request.world_size))
        return planner.call_elsewhere(planned, workload, [{"options": options}], progress, sizes=sizes)[0]
    check_workload(workload, request.device)
    with without_collector():  # which would go through millions of objects, none of which is garbage
        return assemble(request)


def _requested(
    workload: Workload, options: PlanOptions, progress: Progress, findings: Findings, processes: int
) -> Request:
    """Return options made definite, and checked."""
    found = find_device(str(options.device))
    budget, numerics, compile = read_budget(options.budget), options.numerics, options.compile
    searched = tuple(options.precisions or precisions_of(found))
    if numerics not in NUMERICS:
        raise UsageError(f"numerics={numerics!r} is unknown: use one of {', '.join(NUMERICS)}")
    if options.points < 1:
        raise UsageError(f"points={options.points} is not above 0: give the number of budgets on the frontier")
    updates = {lever.value: lever for lever in levers.registry.UPDATES}
    for value in set(options.optimizers or ()) - {"as-is", *updates}:
        raise UsageError(f"optimizers={value!r} is unknown: use some of {', '.join(updates)}")
    world_size = check_ranks(options)
    if options.engine is not None and world_size > 1:
        raise UsageError(
            f"with world_size={world_size} memfit shares the step, and with engine= another library does:"
            " leave out one of them"
        )
    if compile != "auto" and not isinstance(compile, bool):
        raise UsageError(f"compile={compile!r} is unknown: use 'auto', True or False")
    if compile and not allows(numerics, "reordered"):
        raise UsageError(
            f"numerics={numerics!r} does not allow compile={compile!r}: compiled code rounds differently."
            " Allow numerics='reordered'"
        )
    around = circumstances(workload, found)
    if compile:
        shared = {SHARDING} if world_size > 1 else set()
        check_lever_names({COMPILATION} | shared | around, where=f"compile={compile!r}: ")
    for precision in options.precisions or ():
        check_precision(precision, "precisions", found, workload)
    host_budget_bytes = 0 if options.host_budget is None else parse_budget(options.host_budget, None, "host_budget")
    if host_budget_bytes:
        where = f"host_budget={options.host_budget!r} on {found.name}: "
        check_lever_names({ACTIVATION_OFFLOAD} | around, where=where)
    if "32-true" not in searched and not allows(numerics, "reduced"):
        raise UsageError(
            f"precisions={list(searched)} are not allowed by numerics={numerics!r}: allow numerics='reduced'"
        )
    return Request(
        workload=workload,
        options=options,
        budget=budget,
        host_budget_bytes=host_budget_bytes,
        device=found,
        precisions=searched,
        fallbacks=[updates[value] for value in updates if options.optimizers is None or value in options.optimizers],
        progress=progress,
        world_size=world_size,
        modes=SEARCHED if options.sharding == "auto" else (options.sharding,),
        compilers=_COMPILERS if compile else (),
        processes=processes,
        findings=findings,
    )


def _plan_on_ranks(ranks: SingleProcess, workload: Workload, options: PlanOptions, progress: Progress) -> Plan:
    """Return the plan of the first rank on all; it is made in a process that is in no group."""
    world_size, device = options.world_size, str(options.device)
    if world_size != ranks.size:
        raise UsageError(
            f"world_size={world_size}, and this process has joined a process group of {ranks.size} ranks: leave"
            " world_size out, or plan before torch.distributed.init_process_group"
        )

    def own_budget() -> tuple[bool, float]:  # whether it is a share of the plain step's peak, and the share, or bytes
        check_as_given(workload)
        asked = read_budget(options.budget)
        if asked.of == "plain":
            return True, asked.amount
        return False, float(asked.nbytes(device_bytes=find_device(device).usable_bytes, plain_bytes=0))

    budgets, given = each(ranks, own_budget), options
    if len({is_share for is_share, _ in budgets}) > 1:
        raise UsageError(
            f"budget={options.budget!r}: some ranks give a share of the plain step's peak and others bytes. Give the"
            " same on all"
        )
    if len(set(budgets)) > 1:  # else it stays as it was said
        is_share, least = min(budgets)
        given = replace(options, budget=f"{least}x" if is_share else f"{int(least)}B")

    def make() -> bytes:
        # A process has only one default process group, in which the step of one of several ranks can't be captured.
        sizes = microbatch_sizes(-(-samples_of(workload) // world_size))
        fakes_cuda = planner.is_elsewhere(find_device(device))
        calls = [{"options": given}]
        made = planner.call_elsewhere(planned, workload, calls, progress, sizes=sizes, fakes_cuda=fakes_cuda)
        return ir.codec.encode(made[0])

    data = once(ranks, make)
    check_same(ranks, "plans", data)
    made = ir.codec.decode(data, Plan, source="the first rank's plan")
    each(ranks, lambda: check_plan(made, workload))
    return made


def check_ranks(options: PlanOptions) -> int:
    """Return how many ranks are to share a step; refuse what they can't share, or not as the options say."""
    world_size, sharding = options.world_size, options.sharding
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise UsageError(f"world_size={world_size!r} is not a whole number above 0: give the number of ranks")
    if sharding not in ("auto", *SEARCHED):
        raise UsageError(f"sharding={sharding!r} is unknown: use one of auto, {', '.join(SEARCHED)}")
    if world_size > 1 and not allows(options.numerics, "reordered"):
        raise UsageError(
            f"numerics={options.numerics!r} does not allow world_size={world_size}: ranks add up gradients in another"
            " order. Allow numerics='reordered'"
        )
    return world_size
