"""Costs measured on this machine, and the cache that keeps them."""

from __future__ import annotations

import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import threading
import time
import types
import weakref
from collections import Counter, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from memfit import ir
from memfit.cost import calibrate
from memfit.cost import cpu_costs as module
from memfit.cost.cpu_costs import cache_path, measure
from memfit.ir import CostTable, OpCost
from memfit.workload import signature
from tests.models import plain_trace

aten = torch.ops.aten


def text_of(func: Any, *args: Any, **kwargs: Any) -> str:
    return signature(func, args, kwargs)


ADD = text_of(aten.add.Tensor, torch.zeros(64, 64), torch.zeros(64, 64))
TRACE = plain_trace("twice")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder that is in use."""
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    return tmp_path


def fix_overheads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_dispatch_seconds", lambda: 1e-6)
    monkeypatch.setattr(module, "_checkpoint_overheads", lambda: (1e-5, 1e-6))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by how many calls are measured at a time."""
    counts: list[int] = []

    def counted(signatures: list[str], *args: Any) -> Any:
        counts.append(len(signatures))
        return measure(signatures, *args)

    monkeypatch.setattr(module, "measure", counted)
    fix_overheads(monkeypatch)
    return counts


def test_operators_without_buffers_or_in_place_have_no_workspace_and_larger_ones_take_longer() -> None:
    in_place = text_of(aten.relu_.default, torch.zeros(256, 256))
    small, large = (text_of(aten.mm.default, torch.zeros(n, n), torch.zeros(n, n)) for n in (8, 512))
    found = measure([ADD, in_place, small, large])
    assert found[ADD].measured and 0 < found[ADD].seconds < 0.1
    assert found[ADD].workspace_bytes == found[in_place].workspace_bytes == 0
    assert found[large].seconds > 10 * found[small].seconds


def test_progress_rises_by_first_runs_and_by_timing_to_its_total() -> None:
    told: list[tuple[int, int]] = []
    texts = [ADD, *(text_of(aten.add.Tensor, torch.zeros(n), torch.zeros(n)) for n in (4, 8))]
    measure(texts, lambda done, total: told.append((done, total)))
    assert told[:3] == [(1, 6), (2, 6), (3, 6)]
    assert told == sorted(told) and told[-1] == (6, 6)


def test_the_workspace_is_what_is_allocated_beyond_the_outputs() -> None:
    x = torch.zeros(1000, 64)
    text = text_of(aten.mean.dim, x.bfloat16(), [0], False, dtype=torch.float64)
    whole = text_of(aten.mse_loss.default, x, x)
    found = measure([text, whole])
    assert found[whole].measured
    assert 1000 * 64 * 4 <= found[whole].workspace_bytes <= 1000 * 64 * 4 + 64
    assert found[text].measured


class Calls:
    """Stands in for an operator, what empties the caches and the clock, and notes what happens when.

    Args:
        nbytes: Of the operator's argument.
    """

    def __init__(self, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.nbytes = 2**22  # of what empties the caches
        self.sets = 0
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.given = nbytes
        monkeypatch.setattr(module, "rebuild", self.rebuild)
        monkeypatch.setattr(module, "_clock", lambda: self.clock)

    def rebuild(self, *_: Any) -> Any:
        self.sets += 1
        return self.operator, [torch.zeros(self.given, dtype=torch.uint8), "AB"[self.sets - 1]], {}

    def operator(self, _: torch.Tensor, name: str) -> torch.Tensor:
        alive = any(output() is not None for output in self.outputs)
        self.events.append(f"{name} beside an output" if alive else name)
        out = torch.zeros(1)
        self.outputs.append(weakref.ref(out))
        return out

    def fill_(self, _: int) -> None:
        self.events.append("evict")

    def clock(self) -> float:
        self.events.append("clock")
        return 0.0


def test_what_is_timed_was_not_touched_since_the_caches_were_emptied_but_its_code_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls(2**20, monkeypatch)
    module._least_seconds("", calls)  # type: ignore[arg-type]
    run = ["evict", "B", "clock", "clock", "A beside an output", "clock"]
    assert calls.events == ["A", *run * 5]


FAULTS = """
import json, resource, sys
import torch
from memfit.cost import cpu_costs

def seconds(call, clock, plain=cpu_costs._seconds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    found = plain(call, clock)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return found

cpu_costs._seconds, faults = seconds, []
tensor = {"t": ["float32", [int(sys.argv[1])], [1]]}
text = json.dumps({"op": "aten.mul.Tensor", "args": [tensor, tensor]})
cpu_costs._timed(text, 1e-3, torch.zeros(cpu_costs._CACHE_BYTES, dtype=torch.uint8))
print(json.dumps(faults))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
@pytest.mark.parametrize(("elements", "is_mapped_anew"), [(3 * 10**6, False), (6 * 10**6, False), (10**7, True)])
@pytest.mark.ci
def test_outputs_that_a_heap_holds_cost_no_page_faults_as_amid_a_step(elements: int, is_mapped_anew: bool) -> None:
    """In a process of its own: what a heap returns to the system depends on what was freed there before."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    line = [sys.executable, "-c", FAULTS, str(elements)]
    output = subprocess.run(line, env=clean | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True)
    faults = sorted(json.loads(output.stdout))
    pages = elements * 4 / resource.getpagesize()
    assert faults[0] > 0.9 * pages if is_mapped_anew else faults[1] < 0.1 * pages


@pytest.mark.parametrize("nbytes", [2**10, 2**22])
def test_caches_are_not_emptied_of_what_is_too_small_or_too_large_for_them(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(nbytes, monkeypatch)
    module._least_seconds("", calls)  # type: ignore[arg-type]
    assert calls.events == ["A", *["clock", "A", "clock"] * 10]


@pytest.mark.parametrize(
    ("times", "runs", "least"),
    [
        ([2.0, 2.1, 9.0], 2, 2.0),  # long ones need no more than to be confirmed
        ([2.0, 9.0, 8.0, 2.2, 9.0], 4, 2.0),
        ([9.0, 8.9, 2.0], 2, 8.9),
        ([3.0, 9.0, 8.0, 2.0, 3.1, 2.1, 9.0], 6, 2.0),  # the least changes
        ([1.0] + [2.0] * 20, 10, 1.0),  # never confirmed: there is an end
        ([1e-6] * 20, 5, 1e-6),  # short ones
        ([1e-6] + [2e-6] * 6 + [1e-6] * 20, 8, 1e-6),
        ([0.0] * 20, 5, 0.0),
    ],
)
def test_the_least_time_is_one_that_another_confirms(times: list[float], runs: int, least: float) -> None:
    left = iter(times)
    assert module._least(lambda: next(left), 5) == least
    assert len(list(left)) == len(times) - runs


@pytest.mark.parametrize(
    ("threads", "tick_seconds", "clock"),
    [(1, 2e-7, time.thread_time), (2, 2e-7, time.perf_counter), (1, 0.01, time.perf_counter)],
)
def test_one_thread_is_timed_by_its_own_clock_where_that_is_fine(
    threads: int, tick_seconds: float, clock: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = itertools.chain([5.0, 5.0], itertools.count(5.0 + tick_seconds, tick_seconds))
    fake = types.SimpleNamespace(thread_time=lambda: next(readings), perf_counter=time.perf_counter)
    own = fake.thread_time if clock is time.thread_time else clock
    monkeypatch.setattr(module, "time", fake)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    module._thread_clock_is_fine.cache_clear()
    try:
        assert module._clock() is own
    finally:
        module._thread_clock_is_fine.cache_clear()


def test_backward_passes_run_in_the_thread_that_is_timed() -> None:
    x = torch.ones(8, requires_grad=True)
    threads: set[int] = set()

    def forward() -> torch.Tensor:
        y = x.sin()
        y.register_hook(lambda _: threads.add(threading.get_ident()))
        return y

    assert module._backward_seconds(forward) > 0
    assert threads == {threading.get_ident()}


UNRUNNABLE: dict[str, str] = {
    "no such operator": '{"op":"aten.no_such_operator.default","args":[]}',
    "no arguments known": '{"op":"aten.add.Tensor"}',
    "shapes that do not fit": text_of(aten.mm.default, torch.zeros(2, 3), torch.zeros(2, 3)),
    "an argument too many": text_of(aten.neg.default, torch.zeros(2), torch.zeros(2), 3),
    "a wrong type": text_of(aten.neg.default, "text"),
}


@pytest.mark.parametrize("name", UNRUNNABLE)
def test_what_cannot_be_run_is_not_measured(name: str) -> None:
    found = measure([ADD, UNRUNNABLE[name]])
    assert found[ADD].measured
    cost = found[UNRUNNABLE[name]]
    assert (cost.measured, cost.seconds, cost.workspace_bytes) == (False, 0.0, 0)


def test_every_call_of_a_trace_is_measured(cache: Path, measured: list[int]) -> None:
    done: list[tuple[int, int]] = []
    table = calibrate([TRACE], lambda *at: done.append(at))
    assert table.ops.keys() == set(TRACE.signatures)
    assert all(cost.measured for cost in table.ops.values())
    (total,) = {of for _, of in done}
    assert [at for at, _ in done] == sorted({at for at, _ in done}) and done[-1] == (total, total)
    assert total >= len(TRACE.signatures)  # each runs once for what it takes inside, and again for its time
    assert not table.of("unheard of").measured and table.of("unheard of").workspace_bytes == 0
    assert table.seconds_of("unheard of") == table.dispatch_seconds == 1e-6


def test_the_cache_is_used_again(cache: Path, measured: list[int]) -> None:
    first = calibrate([TRACE])
    assert cache_path().parent == cache and [p.name for p in cache.iterdir()] == [cache_path().name]
    assert calibrate([TRACE]) == first
    assert measured == [len(TRACE.signatures)]
    other = plain_trace("convnet")
    both = calibrate([TRACE, other])
    new = set(other.signatures) - set(TRACE.signatures)
    assert measured == [len(TRACE.signatures), len(new)]
    assert both.ops.keys() == set(TRACE.signatures) | set(other.signatures)
    assert all(both.ops[s] == first.ops[s] for s in TRACE.signatures)


def test_calls_are_timed_by_their_share_of_what_the_others_were_found_to_take(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first call that took a hundred times too long must not leave the others coarse, to be timed the next time."""
    slow, *others = TRACE.signatures
    timed: list[str] = []
    monkeypatch.setattr(module, "_coarse_seconds", lambda text, _: 0.09 if text == slow else 4e-4)
    monkeypatch.setattr(module, "_least_seconds", lambda text, _: timed.append(text) or 5e-4)
    fix_overheads(monkeypatch)
    first = calibrate([TRACE])
    assert timed[0] == slow and set(timed) == {slow, *others}
    timed.clear()
    assert calibrate([TRACE]) == first and not timed


def test_times_measured_in_another_way_are_not_mixed_in(
    cache: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_MEASURING", module._MEASURING - 1)
        calibrate([TRACE])
    calibrate([TRACE])
    assert measured == [len(TRACE.signatures)] * 2


class Machine:
    """Stands in for this machine: what calls take, and which of them are timed.

    Args:
        seconds: Of calls and of dispatch, each time that they are timed; the last one stays.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.dispatch_seconds = 1e-6
        self.timed: list[str] = []
        self.others_seconds = iter([0.0] * 100)
        monkeypatch.setattr(module, "_CHECK_SECONDS", 0.05)
        monkeypatch.setattr(module, "_others_seconds", lambda: next(self.others_seconds))
        monkeypatch.setattr(module, "_coarse_seconds", lambda text, _: self.seconds[text][0])
        monkeypatch.setattr(module, "_least_seconds", lambda text, _: self.time(text))
        fix_overheads(monkeypatch)
        monkeypatch.setattr(module, "_dispatch_seconds", lambda: self.dispatch_seconds)

    def time(self, text: str) -> float:
        self.timed.append(text)
        left = self.seconds[text]
        return left.pop(0) if len(left) > 1 else left[0]

    def calibrated(self, **seconds: list[float]) -> CostTable:
        """Return the costs as a process of its own has them, where calls take some time, by the names of operators."""
        module._seen.clear()
        self.timed.clear()
        for text in TRACE.signatures:
            self.seconds[text] = list(seconds.get(json.loads(text)["op"].split(".")[1], [1e-5]))
        return calibrate([TRACE])


@pytest.fixture
def machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


MM = next(text for text in TRACE.signatures if json.loads(text)["op"] == "aten.mm.default")
AT_REST = {"mm": [1e-3], "addmm": [2e-3]}


@pytest.mark.parametrize(
    "now",
    [
        AT_REST,
        {"mm": [1.15e-3], "addmm": [2.2e-3]},  # other programs only add to it
        {"mm": [0.98e-3], "addmm": [1.95e-3]},
        {"mm": [2e-3, 1e-3], "addmm": [9e-3, 2e-3]},  # another program was in the way
    ],
)
def test_kept_times_that_hold_are_taken(now: dict[str, list[float]], machine: Machine) -> None:
    kept = machine.calibrated(**AT_REST)
    assert machine.calibrated(**now) == kept
    assert {json.loads(text)["op"].split(".")[1] for text in machine.timed} == {"mm", "addmm"}  # the large ones


@pytest.mark.parametrize(
    "now",
    [
        {"mm": [1.3e-3], "addmm": [2.6e-3]},  # a lower clock rate
        {"mm": [0.8e-3], "addmm": [1.6e-3]},  # it was busy then
        {"mm": [0.7e-3], "addmm": [2e-3]},  # it was busy for a moment
    ],
)
def test_a_step_is_measured_anew_where_the_machine_has_drifted(now: dict[str, list[float]], machine: Machine) -> None:
    kept = machine.calibrated(**AT_REST)
    machine.dispatch_seconds = 2e-6
    found = machine.calibrated(**now)
    assert found.ops[MM].seconds == now["mm"][0] != kept.ops[MM].seconds
    assert found.dispatch_seconds == 2e-6
    assert ir.codec.read(cache_path(), CostTable).ops == found.ops
    machine.timed.clear()
    assert calibrate([TRACE]) == found and not machine.timed  # once in a process
    machine.dispatch_seconds = 1e-4  # which drifts too
    assert machine.calibrated().dispatch_seconds == 1e-4


def test_on_a_busy_machine_no_call_counts_as_slower(machine: Machine) -> None:
    kept = machine.calibrated(**AT_REST)
    machine.others_seconds = iter([0.0, 10.0])
    assert machine.calibrated(mm=[1.3e-3], addmm=[2.6e-3]) == kept
    machine.others_seconds = iter([0.0, 10.0])
    assert machine.calibrated(mm=[0.7e-3], addmm=[1.4e-3]) != kept  # it was busier then


def test_what_this_program_computes_is_not_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Times = namedtuple("Times", "user system idle iowait steal")
    monkeypatch.setattr(module.psutil, "cpu_times", lambda: Times(50.0, 7.0, 900.0, 30.0, 3.0))
    monkeypatch.setattr(module.time, "process_time", lambda: 12.0)
    assert module._others_seconds() == 48.0


def test_the_check_of_kept_times_has_an_end(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.0)
    kept = machine.calibrated(**AT_REST)
    assert machine.calibrated(**AT_REST) == kept and len(machine.timed) == 1


def test_the_largest_call_that_is_short_tells_the_pace(machine: Machine) -> None:
    assert module.reference_call() is None
    machine.calibrated(mm=[1e-3], addmm=[0.5])  # half a second is too long to run between steps
    found = module.reference_call()
    assert found is not None and json.loads(found[0])["op"] == "aten.mm.default" and found[1] == 1e-3
    machine.seconds[found[0]] = [3e-3]
    assert module.seconds_now(*found) == 3e-3
    module._seen.clear()  # what an earlier process kept was not held against the machine
    assert module.reference_call() is None


def another_schema(data: bytes) -> bytes:
    return msgspec.json.encode({**json.loads(data), "schema": "memfit.costs/0"})


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "binary": lambda data: bytes(range(256)) * 10,
    "another schema": another_schema,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_measured_anew_and_written_again(damage: str, cache: Path, measured: list[int]) -> None:
    calibrate([TRACE])
    path = cache_path()
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    table = calibrate([TRACE])
    assert measured == [len(TRACE.signatures)] * 2
    assert ir.codec.read(path, CostTable) == table


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[int]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "file"))
    assert calibrate([TRACE]).ops.keys() == set(TRACE.signatures)
    assert (tmp_path / "file").read_text() == ""


def test_measuring_draws_no_random_numbers_and_leaves_gradients_on(cache: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    random = text_of(aten.bernoulli_.float, torch.zeros(100), 0.5)
    assert measure([random])[random].measured
    table = calibrate([TRACE])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert table.dispatch_seconds >= 0 and table.checkpoint_seconds >= 0 and table.selective_op_seconds >= 0


def test_times_with_page_faults_are_not_mixed_with_those_without(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.hardware.heap.is_kept", lambda: False)  # a test before this one may have had it kept
    before = cache_path()
    assert torch.__version__ in before.name and f"{torch.get_num_threads()}threads" in before.name
    monkeypatch.setattr("memfit.hardware.heap.is_kept", lambda: True)
    assert cache_path() != before


def test_rnn_layers_are_run_with_the_workspace_that_they_need() -> None:
    trace = plain_trace("recurrent")
    layers = [s for s in trace.signatures if "mkldnn_rnn_layer" in s]
    assert len(layers) >= 2
    assert '"uint8",[0]' not in "".join(layers)
    assert all(cost.measured for cost in measure(layers).values())


def test_only_what_makes_up_the_time_is_timed_well(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []
    least = module._least_seconds
    monkeypatch.setattr(module, "_least_seconds", lambda text, evicting: timed.append(text) or least(text, evicting))
    large = text_of(aten.mm.default, torch.zeros(512, 512), torch.zeros(512, 512))
    small = [text_of(aten.add.Tensor, torch.zeros(n), torch.zeros(n)) for n in range(1, 60)]
    found = measure([*small, large], None, {large: 20})
    assert set(timed) == {large} and not found[large].coarse
    assert all(found[text].coarse and found[text].measured and found[text].seconds > 0 for text in small)
    timed.clear()
    assert not any(cost.coarse for cost in measure(small[:3]).values()) and set(timed) == set(small[:3])


@pytest.mark.parametrize(
    ("taken", "seconds", "rounds"),
    [
        ([[5e-4] * 9, [5e-4] * 9], [5e-4, 5e-4], 2),  # a machine at rest
        ([[9e-4, 5e-4, 5e-4], [5e-4, 5e-4, 5e-4]], [5e-4, 5e-4], 3),  # a program ran beside the first one
        ([[9e-4, 9e-4, 6e-4, 5e-4, 5e-4], [9e-4, 8e-4, 6e-4, 5e-4, 5e-4]], [5e-4, 5e-4], 5),  # beside all, for a while
        ([[5e-4, 9e-4, 7.0], [5e-4, 9e-4, 7.0]], [5e-4, 5e-4], 2),  # a machine that gets busy makes none slower
    ],
)
def test_calls_are_timed_again_until_the_step_gets_no_faster(
    taken: list[list[float]], seconds: list[float], rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {text: iter(times) for text, times in zip("ab", taken, strict=True)}
    timed: list[str] = []

    def least(text: str, _: torch.Tensor) -> float:
        timed.append(text)
        return next(left[text])

    monkeypatch.setattr(module, "_least_seconds", least)
    found = module._precise_seconds({"a": 6e-4, "b": 6e-4}, {"a": 10, "b": 20}, 0.0, None, 2, {})
    assert found == dict(zip("ab", seconds, strict=True))
    assert timed == ["b", "a"] * rounds


@pytest.mark.parametrize("pace", [0.94, 1.0, 1.15])
def test_calls_that_are_timed_later_are_told_at_the_pace_of_those_that_are_known(
    pace: float, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's new calls, timed on a machine that is slower by now, would make it slower than the steps before."""
    other = plain_trace("convnet")
    now = 1.0
    texts = dict.fromkeys([*TRACE.signatures, *other.signatures])
    seconds = {text: 1e-4 * (1 + index) for index, text in enumerate(texts)}
    monkeypatch.setattr(module, "_coarse_seconds", lambda text, _: now * seconds[text])
    monkeypatch.setattr(module, "_least_seconds", lambda text, _: now * seconds[text])
    fix_overheads(monkeypatch)
    calibrate([TRACE])
    now = pace
    found = calibrate([TRACE, other]).ops
    assert {text: cost.seconds for text, cost in found.items()} == pytest.approx(seconds)
    assert any(cost.coarse for cost in found.values()) and not all(cost.coarse for cost in found.values())


@pytest.mark.parametrize(("limit_seconds", "count"), [(30.0, 2), (3.0, 1), (2.0, 0)])
def test_known_calls_are_timed_no_longer_than_the_others(
    limit_seconds: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[str] = []
    monkeypatch.setattr(module, "_least_seconds", lambda text, _: timed.append(text) or 1e-3)
    monkeypatch.setattr(module, "_LIMIT_SECONDS", limit_seconds)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: float(len(timed))))  # one a second
    known = {str(index): 1e-3 for index in range(20)}
    times = dict.fromkeys(["a", "b", *known], 1)
    told: list[tuple[int, int]] = []
    found = module._precise_seconds(
        {"a": 1e-3, "b": 1e-3}, times, 0, lambda done, total: told.append((done, total)), 2, known
    )
    assert list(found) == ["a", "b", *list(known)[:count]]
    assert told[-1] == (4, 4)


def test_progress_ends_where_known_calls_are_as_many_as_those_that_are_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_least_seconds", lambda *_: 1e-3)
    told: list[tuple[int, int]] = []
    coarse, known = {"large": 1e-3, "small": 1e-9}, {"before": 1e-3}
    times = dict.fromkeys([*coarse, *known], 1)
    found = module._precise_seconds(coarse, times, 0.1, lambda done, total: told.append((done, total)), 2, known)
    assert "small" not in found and told[-1] == (4, 4)


def test_overheads_are_the_lesser_of_before_and_after_the_calls_of_a_new_table(
    cache: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = iter([14e-6, 2e-6, 7.0])
    checkpoints = iter([(1e-4, 2e-5), (2e-4, 1e-5), (7.0, 7.0)])
    monkeypatch.setattr(module, "_dispatch_seconds", lambda: next(dispatch))
    monkeypatch.setattr(module, "_checkpoint_overheads", lambda: next(checkpoints))
    monkeypatch.setattr(module, "_has_drifted", lambda *_: False)
    calibrate([TRACE])
    found = calibrate([TRACE, plain_trace("convnet")])  # which adds to a table that is known
    assert (found.dispatch_seconds, found.checkpoint_seconds, found.selective_op_seconds) == (2e-6, 1e-4, 1e-5)


def test_what_was_timed_coarsely_is_timed_again_where_it_matters() -> None:
    coarse = {"much": OpCost(1.0, 0, True, True), "little": OpCost(1e-4, 0, True, True), "well": OpCost(1.0, 0, True)}
    table = CostTable(
        device="", torch_version="", threads=1, ops=coarse, dispatch_seconds=0.0, checkpoint_seconds=0.0,
        selective_op_seconds=0.0, peak_error=0.0,
    )  # fmt: skip
    assert module._timed_too_coarsely(table, {"much": 1, "little": 3, "well": 2}) == ["much"]


@pytest.mark.parametrize(
    ("coarse_seconds", "others", "seconds"),
    [
        (0.9, [0.11, 0.1, 7.0], 0.1),  # memory that no program had touched yet
        (0.2, [0.19, 7.0], 0.19),
        (5.0, [5.1, 7.0], 5.0),
        (0.2, [0.3, 0.4, 0.5, 7.0], 0.2),  # a busy machine: there is an end
    ],
)
def test_a_long_call_is_confirmed_too(
    coarse_seconds: float, others: list[float], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(others)
    monkeypatch.setattr(module, "_seconds", lambda *_: next(left))
    assert module._precise_seconds({ADD: coarse_seconds}, {ADD: 1}, 0.0, None, 1, {}) == {ADD: seconds}
    assert list(left) == [7.0]


def test_no_time_is_spent_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIMIT_SECONDS", 0.0)
    assert measure([ADD])[ADD].coarse


def test_systems_are_solved_with_regular_matrices() -> None:
    matrix, right = torch.eye(4), torch.zeros(4, 2)
    texts = [
        text_of(aten.linalg_inv_ex.default, matrix),
        text_of(aten.linalg_cholesky_ex.default, matrix, check_errors=True),
        text_of(aten._linalg_solve_ex.default, matrix, right, check_errors=True),
        text_of(aten.linalg_lu_solve.default, matrix, torch.arange(1, 5, dtype=torch.int32), right),
    ]
    assert all(cost.measured for cost in measure(texts).values())


def test_calls_are_measured_where_the_user_has_a_profiler_running_which_goes_on() -> None:
    product = text_of(aten.mm.default, torch.zeros(64, 32), torch.zeros(32, 16))
    alone = measure([ADD, product])
    with torch.profiler.profile(profile_memory=True) as profile:
        found = measure([ADD, product])
        torch.zeros(1000).sum()
    assert [found[text].workspace_bytes for text in alone] == [cost.workspace_bytes for cost in alone.values()]
    assert all(cost.measured for cost in found.values())
    assert any(event.key == "aten::sum" for event in profile.key_averages())


def test_a_hurry_times_each_large_call_once_and_takes_kept_costs_as_they_are(
    cache: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = Counter[str]()
    timed = module._timed
    monkeypatch.setattr(module, "_timed", lambda text, *args: (times.update([text]), timed(text, *args))[1])
    with module.hurried():
        found = calibrate([TRACE])
        assert calibrate([TRACE]) == found
    assert measured == [len(set(TRACE.signatures))]
    assert set(times.values()) == {1} and times.keys() < set(TRACE.signatures)
    assert all(found.ops[text].coarse == (text not in times) for text in TRACE.signatures if found.ops[text].measured)
    module._seen.clear()
    whole = calibrate([TRACE])
    assert max(times.values()) > 1  # it checks whether the machine has drifted from what was timed in the hurry
    assert {s: whole.ops[s].workspace_bytes for s in TRACE.signatures} == {
        s: found.ops[s].workspace_bytes for s in TRACE.signatures
    }
    assert not module._is_hurried


def test_a_hurry_ends_after_the_time_of_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HURRIED_SECONDS", 0.0)
    monkeypatch.setattr(module, "_HURRIED_STEPS", 0.0)
    with module.hurried():
        found = measure([ADD], uses={ADD: 1})
    assert found[ADD].measured and found[ADD].coarse and found[ADD].seconds > 0
