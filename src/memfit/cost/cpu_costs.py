"""Costs of operators, measured on this machine for each distinct call, and cached.

Every call runs once, for its workspace. Times need many runs with emptied caches: only the calls that make up most of
the step's time are timed so. The times of the others are those of one or two runs.

Kept times may be those of a busy machine, or of one at another clock rate, and plans are told apart by a few percent:
a process times the largest calls of a step again before it takes kept times, and measures the step anew where the
machine has drifted from them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from memfit import hardware
from memfit._torch import EagerMode, profiler_enabled, storage_key, tree_leaves
from memfit.cost.error_bars import calibration
from memfit.cost.links import fixed_source, keep, kept
from memfit.foundations import Progress, StageProgress, safe_point, silent
from memfit.hardware import allocated_by_name, cache_folder, host_name
from memfit.ir import CostTable, OpCost, Share, Trace, among_ranks, is_unmeasurable, simulate
from memfit.workload import parts, rebuild

_MARK = "memfit-op-"
_ENOUGH_SECONDS = 0.02
_LEAST_RUNS, _COLD_RUNS, _WARM_RUNS = 2, 5, 10
_ALIKE = 1.1  # a least time is confirmed by another one that is at most this times as long
_FINE_SECONDS = 1e-5
_CACHE_BYTES, _NOTICED_BYTES = 48 * 2**20, 2**16
_OVERHEAD_RUNS = 40
_OUTPUTS = 5  # of a call, for which there is memory that was touched: two are alive together, and it has buffers
_NO_KERNEL = ("not implemented for", "nsupported dtype", "could not create a primitive", "not supported for")
_SHARE = 0.005  # share of a step's time: calls that take less of it in all are timed coarsely
_LIMIT_SECONDS = 30.0  # for timing; the slowest calls come first
_LONG_SECONDS, _ONCE_SECONDS = 0.1, 1.0  # such calls are confirmed by a third run, and by a second one
_LARGE_SHARE = 4 * _SHARE  # calls that take more are timed twice, and again where they were kept or timed coarsely
_STEADY = 0.02  # share of a step's time that its calls may still get faster by
_CHECK_SECONDS = 1.5  # for that, and begun ones end; the largest calls come first
_FASTER, _SLOWER = 0.07, 0.2  # shares by which times may differ from what was kept: other programs only add to them
_REFERENCE_SECONDS = 0.02  # a call that tells the machine's pace takes no longer
_BUSY_SHARE = 0.3  # of one processor, used by other programs
_HURRIED_STEPS, _HURRIED_SECONDS = 3.0, 1.0  # how long operators are timed in a hurry: steps, but at least seconds
_MEASURING = 6  # version of the measurement, in the cache's name

_is_hurried = False  # within `hurried`

Clock = Callable[[], float]


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """Take kept costs as they are within the context, and time others for a few steps' time: the largest calls once.

    A running loop waits for its plan. All calls run for their workspaces nevertheless, so peaks are as sure as ever.
    """
    global _is_hurried
    before, _is_hurried = _is_hurried, True
    try:
        yield
    finally:
        _is_hurried = before


def calibrate(traces: Iterable[Trace], progress: StageProgress | None = None) -> CostTable:
    """Return the costs of the operators of some traces on this machine's CPU.

    Distinct calls that the cache lacks are measured, and all of them where the machine has drifted from what is kept.
    The error bar is wider where an operator could not be run, so that its workspace is unknown.
    """
    path = cache_path()
    table = kept(path, CostTable) or _with_overheads(
        CostTable(
            device=host_name(),
            torch_version=str(torch.__version__),
            threads=torch.get_num_threads(),
            ops={},
            dispatch_seconds=0.0,
            checkpoint_seconds=0.0,
            selective_op_seconds=0.0,
            peak_error=calibration().peak_error,
        )
    )
    seen = _seen.setdefault(path, set())
    traces = list(traces)
    found = (among_ranks(s) for trace in traces for s in trace.signatures)
    shares = [share.whole for share in found if isinstance(share, Share)]
    whole = (s for trace in traces for s in trace.signatures if not is_unmeasurable(s))
    wanted = dict.fromkeys([*whole, *shares])
    uses = Counter(trace.signatures[op.signature] for trace in traces for op in trace.ops)
    missing = [s for s in wanted if s not in table.ops]
    is_new, checks = not table.ops, not _is_hurried and fixed_source() is None
    if checks:
        missing += _timed_too_coarsely(table, uses)
        if _has_drifted(table, {s: times for s, times in uses.items() if s in wanted}, seen):
            table, missing, is_new = _with_overheads(table), list(wanted), True
        seen.update(wanted)
    if missing:
        new = set(missing)
        others = _largest(table, {s: n for s, n in uses.items() if s not in new}) if checks else {}
        table = msgspec.structs.replace(table, ops={**table.ops, **measure(missing, progress, uses, others)})
        if is_new and checks:  # a program that took a processor during the one measurement may have stopped by now
            table = _with_overheads(table, again=True)
        keep(path, table)
    return msgspec.structs.replace(table, peak_error=_peak_error(table, traces))


def _peak_error(table: CostTable, traces: Sequence[Trace]) -> float:
    """Return the error bar of peaks: wider by the bytes of what could not be run, where these count at the peak.

    An operator's workspace is taken to be at most its arguments and outputs, and what it adds to the peak at most what
    it is where no workspace is known at all.
    """
    bars, above = calibration(), 0.0
    for trace in traces:
        works = {
            text: work
            for text, work in zip(trace.signatures, trace.works, strict=True)
            if not is_unmeasurable(text) and not table.of(text).measured
        }
        if works:
            most = {text: OpCost(0.0, work.read_bytes + work.write_bytes, False) for text, work in works.items()}
            highest = simulate(trace, msgspec.structs.replace(table, ops={**table.ops, **most})).peak_bytes
            above = max(above, highest / max(1, simulate(trace, table).peak_bytes) - 1)
    return min(bars.unmeasured_peak_error, bars.peak_error + (1 + bars.peak_error) * above)


def _timed_too_coarsely(table: CostTable, uses: Mapping[str, int]) -> list[str]:
    """Return the calls that were timed coarsely for another step, and take a large share of this one."""
    coarse = {s: times * table.ops[s].seconds for s, times in uses.items() if s in table.ops and table.ops[s].coarse}
    total = sum(times * table.of(s).seconds for s, times in uses.items())
    return [s for s, seconds in coarse.items() if seconds >= _LARGE_SHARE * total]


def _largest(table: CostTable, uses: Mapping[str, int]) -> dict[str, float]:
    """Return the seconds of the calls that take a large share of a step and were timed well, the largest first."""
    kept = {s: times * table.ops[s].seconds for s, times in uses.items() if s in table.ops}
    least = _LARGE_SHARE * sum(kept.values())
    largest = [s for s in sorted(kept, key=lambda s: -kept[s]) if kept[s] > least]
    return {s: table.ops[s].seconds for s in largest if table.ops[s].measured and not table.ops[s].coarse}


def known_workspace_bytes() -> dict[str, int]:
    """Return the cached workspaces of calls on this machine's CPU, by signature."""
    table = kept(cache_path(), CostTable)
    ops = table.ops if table is not None else {}
    return {text: cost.workspace_bytes for text, cost in ops.items() if cost.workspace_bytes}


def cache_path() -> Path:
    """Return the path of this machine's costs, in MEMFIT_CACHE_DIR or the user's cache folder."""
    machine = f"{host_name()}-torch{torch.__version__}-{torch.get_num_threads()}threads"
    if hardware.heap.is_kept():  # large outputs cost page faults where it is not
        machine += "-kept"
    source = fixed_source()  # in a file of its own: processes with a clock write to the other one
    return cache_folder() / f"costs{_MEASURING if source is None else f'-{source.name}'}-{machine}.json"


_seen: dict[Path, set[str]] = {}  # the calls that this process has measured or checked, by the cache's path


def _has_drifted(table: CostTable, uses: Mapping[str, int], seen: Collection[str]) -> bool:
    """Tell whether the largest calls of a step but for `seen` ones, and dispatch, take another time than the kept one.

    Calls that take longer are timed again, until they don't or the time is over: a machine needs a second to come to
    its clock rate, and to give a second thread a processor of its own. On a busy machine no call counts as slower: the
    least times of short calls are those of a machine at rest there, and those of long ones are not.
    """
    checked = [s for s in _largest(table, uses) if s not in seen]
    if not checked:
        return False
    evicting = torch.zeros(_CACHE_BYTES, dtype=torch.uint8)  # which takes time of its own
    started, others = time.perf_counter(), _others_seconds()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        dispatch_seconds = table.dispatch_seconds if seen else _dispatch_seconds()
        found = _timed_again(checked, table, evicting, started + _CHECK_SECONDS)
    pairs = [(uses[text] * table.ops[text].seconds, uses[text] * seconds) for text, seconds in found.items()]
    count = sum(uses.values())
    pairs.append((count * table.dispatch_seconds, count * dispatch_seconds))
    total = sum(before for before, _ in pairs)
    faster = sum(max(0.0, before - now) for before, now in pairs)
    slower = sum(max(0.0, now - before) for before, now in pairs)
    is_busy = _others_seconds() - others > _BUSY_SHARE * (time.perf_counter() - started)
    return faster > _FASTER * total or (slower > _SLOWER * total and not is_busy)


def _timed_again(calls: Sequence[str], table: CostTable, evicting: torch.Tensor, ends: float) -> dict[str, float]:
    """Return the least seconds of calls, until all are as fast as the kept ones or it is a time of `perf_counter`."""
    found: dict[str, float] = {}
    while left := [s for s in calls if found.get(s, math.inf) > (1 + _FASTER) * table.ops[s].seconds]:
        for text in left:
            with torch.no_grad():
                seconds = _timed(text, table.ops[text].seconds, evicting)
            found[text] = min(seconds, found.get(text, seconds))
            if time.perf_counter() >= ends:
                return found
    return found


def reference_call() -> tuple[str, float] | None:
    """Return a large call that this process timed or checked, and its seconds; None where there is none."""
    table = kept(cache_path(), CostTable)
    if table is None:
        return None
    known = {s: table.ops[s] for s in _seen.get(cache_path(), ()) if s in table.ops}
    seconds = {s: cost.seconds for s, cost in known.items() if cost.measured and not cost.coarse}
    short = [s for s in seconds if _FINE_SECONDS < seconds[s] <= _REFERENCE_SECONDS]
    text = max(short, key=lambda s: (seconds[s], s), default=None)
    return None if text is None else (text, seconds[text])


def seconds_now(text: str, about_seconds: float) -> float:
    """Return the least time of some runs of a call that took about some seconds."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return _timed(text, about_seconds, torch.zeros(_CACHE_BYTES, dtype=torch.uint8))


def _others_seconds() -> float:
    """Return the processors' time that other programs have used."""
    used = psutil.cpu_times()
    own = time.process_time()
    return float(sum(used) - used.idle - getattr(used, "iowait", 0.0) - getattr(used, "guest", 0.0) - own)


def _with_overheads(table: CostTable, again: bool = False) -> CostTable:
    """Return a table with the overheads as they are measured now; with `again`, the lesser of these and its own."""
    names = ("dispatch_seconds", "checkpoint_seconds", "selective_op_seconds")
    if (source := fixed_source()) is not None:
        return msgspec.structs.replace(table, **{name: getattr(source, name) for name in names})
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        checkpoints = _checkpoint_overheads()
        found = dict(zip(names, (_dispatch_seconds(), *checkpoints), strict=True))
    if again:
        found = {name: min(seconds, getattr(table, name)) for name, seconds in found.items()}
    return msgspec.structs.replace(table, **found)


def measure(
    signatures: list[str],
    progress: StageProgress | None = None,
    uses: Mapping[str, int] | None = None,
    known: Mapping[str, float] | None = None,
) -> dict[str, OpCost]:
    """Return the cost of each operator call: its least time, and its workspace.

    Args:
        uses: The number of each call's runs in a step, of which those with a small share are timed coarsely. None times
            all calls well.
        known: Seconds of other calls of the step, as they were measured before. They are timed again beside these,
            whose times are then those at the machine's pace of before: only so do they add up.
    """
    known = known or {}
    times = {text: 1 if uses is None else uses.get(text, 1) for text in [*signatures, *known]}
    with torch.random.fork_rng(devices=[]):
        first = first_runs(signatures, progress)
        if (source := fixed_source()) is not None:
            if progress is not None:
                progress(2 * len(signatures), 2 * len(signatures))
            coarse = seconds = {text: source.seconds(text) for text in first}
            known = {}
        else:
            with torch.no_grad():
                coarse = {text: _coarse_seconds(text, run.seconds) for text, run in first.items()}
                share = 0.0 if uses is None else _SHARE
                seconds = _precise_seconds(coarse, times, share, progress, len(signatures), known)
    again = [text for text in known if text in seconds]
    now = sum(times[text] * seconds[text] for text in again)
    pace = sum(times[text] * known[text] for text in again) / now if now else 1.0
    return {
        text: OpCost(pace * seconds.get(text, coarse[text]), first[text].workspace_bytes, True, text not in seconds)
        if text in first
        else OpCost(0.0, 0, False)  # it could not be run
        for text in signatures
    }


class _FirstRun(NamedTuple):
    seconds: float
    workspace_bytes: int


def _precise_seconds(
    coarse: Mapping[str, float],
    times: Mapping[str, int],
    share: float,
    progress: StageProgress | None,
    count: int,
    known: Mapping[str, float],
) -> dict[str, float]:
    """Return the least times of the calls that take a share of a step, longest first, until the time limit.

    Those of `known` calls are among them, as many as take no longer than the others did.
    """
    seconds_of: dict[str, float] = {}
    started = time.perf_counter()
    ends = started + _LIMIT_SECONDS
    if _is_hurried:
        share = max(share, _LARGE_SHARE)
        step_seconds = sum(seconds * times[text] for text, seconds in coarse.items())
        ends = started + min(_LIMIT_SECONDS, max(_HURRIED_SECONDS, _HURRIED_STEPS * step_seconds))
    evicting = torch.zeros(_CACHE_BYTES, dtype=torch.uint8)
    # Shares are of the best times so far: a first run may take many times as long as later ones.
    total = {text: seconds * times[text] for text, seconds in coarse.items()}
    for index, text in enumerate(sorted(total, key=lambda text: -total[text])):
        if total[text] < share * sum(total.values()) or time.perf_counter() >= ends:
            break
        seconds_of[text] = _timed(text, coarse[text], evicting, [coarse[text]])
        total[text] = seconds_of[text] * times[text]
        if progress is not None:
            progress(count + index + 1, 2 * count)
    now = time.perf_counter()
    enough = min(ends, now + (now - started))
    for text in known:
        if time.perf_counter() >= enough:
            break
        seconds_of[text] = _timed(text, known[text], evicting)
    if not _is_hurried:
        _settle(seconds_of, {**coarse, **known}, times, evicting, ends)
    if progress is not None and len(seconds_of.keys() - known.keys()) < count:
        progress(2 * count, 2 * count)
    return seconds_of


def _settle(
    seconds_of: dict[str, float],
    about_seconds: Mapping[str, float],
    times: Mapping[str, int],
    evicting: torch.Tensor,
    ends: float,
) -> None:
    """Time calls again, until a step of them gets no faster by it, or it is a time of `perf_counter`.

    What another program takes lasts longer than a call's runs, and calls that were timed at different paces say nothing
    of the ratio of two steps that differ in them.
    """
    calls = [text for text in seconds_of if about_seconds[text] < _LONG_SECONDS]
    faster = math.inf
    while faster > _STEADY * sum(seconds_of[text] * times[text] for text in seconds_of):
        faster = 0.0
        for text in calls:
            if time.perf_counter() >= ends:
                return
            seconds = min(seconds_of[text], _timed(text, about_seconds[text], evicting))
            faster += (seconds_of[text] - seconds) * times[text]
            seconds_of[text] = seconds


def _coarse_seconds(text: str, first_seconds: float) -> float:
    """Return the lesser time of the first run and a second one; the first run's where that took long."""
    if first_seconds >= _ONCE_SECONDS:
        return first_seconds
    func, args, kwargs = rebuild(text, "cpu")
    return min(first_seconds, _seconds(functools.partial(func, *args, **kwargs), _clock()))


def missing_kernel(text: str) -> str | None:
    """Return PyTorch's error for a call without a kernel on this machine; None for other errors or none."""
    try:
        func, args, kwargs = rebuild(text, "cpu")
        with torch.no_grad():
            func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as e:
        first_line = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        return f"{type(e).__name__}: {first_line}" if any(part in str(e) for part in _NO_KERNEL) else None
    except Exception:  # an operator may be anyone's code, which may raise anything
        return None
    return None


def with_workspaces(table: CostTable, traces: Iterable[Trace]) -> CostTable:
    """Return costs with the workspaces of the operators of some traces; new calls run once, and get no time."""
    missing = [s for s in dict.fromkeys(s for trace in traces for s in trace.signatures) if s not in table.ops]
    with torch.random.fork_rng(devices=[]):
        workspaces = {text: OpCost(0.0, run.workspace_bytes, False) for text, run in first_runs(missing).items()}
    return msgspec.structs.replace(table, ops={**table.ops, **workspaces})


def first_runs(signatures: list[str], progress: StageProgress | None = None) -> dict[str, _FirstRun]:
    """Run calls once; return the time and workspace of each. Calls that can't be run are left out."""
    if profiler_enabled():  # the user's: PyTorch has one at a time. That process has PyTorch's operators only
        there = functools.partial(_first_runs_there, torch.get_num_threads(), signatures)
        return hardware.process.run(there, silent, fakes_cuda=False)
    runs: dict[int, tuple[float, int]] = {}
    with torch.enable_grad(), allocated_by_name(_MARK) as meters:
        for index, text in enumerate(signatures):
            safe_point()
            with contextlib.suppress(Exception):  # an operator may be anyone's code, which may raise anything
                func, args, kwargs = rebuild(text, "cpu")
                known, clock = _blocks((args, kwargs)), _clock()
                with torch.profiler.record_function(f"{_MARK}{index}"):
                    started = clock()
                    out = func(*args, **kwargs)
                    seconds = clock() - started
                held = _blocks((out, args, kwargs))  # a sparse argument that is written gets new memory
                runs[index] = seconds, sum(nbytes for key, nbytes in held.items() if key not in known)
                del func, args, kwargs, out
            if progress is not None:
                progress(index + 1, 2 * len(signatures))
    return {
        signatures[index]: _FirstRun(seconds, max(0, meters[f"{_MARK}{index}"].peak_bytes - output_bytes))
        for index, (seconds, output_bytes) in runs.items()
    }


def _first_runs_there(threads: int, signatures: list[str], progress: Progress) -> dict[str, _FirstRun]:
    torch.set_num_threads(threads)
    return first_runs(signatures)


def storages_of(values: Any) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors among arguments or outputs."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [part.untyped_storage() for tensor in tensors for part in parts(tensor)]


def _timed(text: str, about_seconds: float, evicting: torch.Tensor, known: Iterable[float] = ()) -> float:
    """Return the least time of a call that takes about some seconds.

    On a virtual machine, memory that no program has touched yet is ten times slower than what one has freed: a first
    run of a copy took eight times as long as later ones.

    Args:
        known: Times of the call's first runs, which count where it is long.
    """
    safe_point()
    if about_seconds < _LONG_SECONDS:
        return _least_seconds(text, evicting)
    func, args, kwargs = rebuild(text, "cpu")  # whose data are in no cache anyway, and few runs are enough
    return _least(functools.partial(_seconds, functools.partial(func, *args, **kwargs), _clock()), _LEAST_RUNS, known)


def _least_seconds(text: str, evicting: torch.Tensor) -> float:
    """Return the least time of several runs of a call: other programs only add to it.

    Before each, the arguments are evicted from the caches where that matters. The code is in them, from a call alike,
    as in a step.
    """
    func, args, kwargs = rebuild(text, "cpu")
    given, call, clock = _blocks((args, kwargs)), functools.partial(func, *args, **kwargs), _clock()
    made = [nbytes for key, nbytes in _blocks(call()).items() if key not in given]
    if not _NOTICED_BYTES <= sum(given.values()) < evicting.nbytes:
        with hardware.heap.touched(made * _OUTPUTS):
            return _least(lambda: _seconds(call, clock), _WARM_RUNS)
    _, args, kwargs = rebuild(text, "cpu")
    alike = functools.partial(func, *args, **kwargs)

    def cold() -> float:
        evicting.fill_(1)
        held = alike()  # held, since the call would reuse its memory, which is in the caches
        clock()  # brings the clock's code into the caches
        seconds = _seconds(call, clock)
        del held
        return seconds

    with hardware.heap.touched(made * _OUTPUTS):
        return _least(cold, _COLD_RUNS)


def _blocks(values: Any) -> dict[int, int]:
    return {storage_key(storage): storage.nbytes() for storage in storages_of(values)}


def _least(run: Callable[[], float], runs: int, known: Iterable[float] = ()) -> float:
    """Return the least of some times, confirmed by another one; twice as many are taken where none confirms it."""
    times = list(known)
    while len(times) < 2 * runs:
        times.append(run())
        enough = len(times) >= runs or (len(times) >= _LEAST_RUNS and sum(times) >= _ENOUGH_SECONDS)
        if enough and sorted(times)[1] <= _ALIKE * min(times):
            break
    return min(times)


def _seconds(call: Callable[[], Any], clock: Clock) -> float:
    started = clock()
    call()
    return clock() - started


def _clock() -> Clock:
    """Return the clock: with one thread the thread's own, to which other programs don't add."""
    return time.thread_time if torch.get_num_threads() == 1 and _thread_clock_is_fine() else time.perf_counter


@functools.cache
def _thread_clock_is_fine() -> bool:
    """Tell whether a thread's own clock moves by microseconds; some systems count ticks of milliseconds."""
    started = time.thread_time()
    while (now := time.thread_time()) == started:
        pass
    return now - started < _FINE_SECONDS


class OperatorCount(EagerMode):
    """A dispatch mode that counts operators."""

    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


def tiny_model() -> torch.nn.Sequential:
    """Return a model of 8 blocks of layers, whose time is that of dispatching them."""
    layers = [torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(8)]
    return torch.nn.Sequential(*layers)


def _dispatch_seconds() -> float:
    """Return the measured time of an operator in a step of tiny modules beyond a bare call of a tiny operator."""
    model, x = tiny_model(), torch.ones(4, 8)
    with OperatorCount() as count:  # type: ignore[no-untyped-call]
        model(x).sum().backward()
    step = _backward_seconds(lambda: model(x)) / count.operators
    bare = measure([json.dumps({"op": "aten.add.Tensor", "args": [{"t": ["float32", [4, 8], [8, 1]]}] * 2})])
    return float(max(0.0, step - next(iter(bare.values())).seconds))


def _checkpoint_overheads() -> tuple[float, float]:
    """Return the measured overhead of a checkpointed call, and of a selective one for each of its operators."""
    x = torch.ones(8, requires_grad=True)

    def chain(value: torch.Tensor) -> torch.Tensor:
        for _ in range(16):
            value = value.sin()
        return value

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    plain = _backward_seconds(lambda: chain(x))
    whole = _backward_seconds(lambda: checkpoint(chain, x, use_reentrant=False))
    selective = _backward_seconds(lambda: checkpoint(chain, x, use_reentrant=False, context_fn=contexts))
    return max(0.0, whole - plain), max(0.0, (selective - whole) / 16)


def _backward_seconds(forward: Callable[[], torch.Tensor]) -> float:
    clock = _clock()  # on the CPU the backward pass runs in the thread that calls it
    return min(_seconds(lambda: forward().sum().backward(), clock) for _ in range(_OVERHEAD_RUNS))
