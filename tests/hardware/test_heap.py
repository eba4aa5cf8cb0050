"""Freed memory goes back to the system where it has to; what is resident is looked at in processes of their own."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import subprocess
import sys

import pytest

from memfit import hardware
from tests.covering import some

MIB = 2**20
is_glibc = platform.libc_ver()[0] == "glibc"
# As steps do: tensors of many sizes, of which some stay for a while and others go. The last one keeps the heap's end.
STEPS = """
import ctypes, random, sys
import torch
from memfit.hardware.heap import settle
from memfit.hardware.host import own_bytes
told = settle({peak}, {room})
random.seed(0)
before = own_bytes()
held = []
for _ in range(400):
    held.append(torch.ones(random.randrange(1, 12) * 2**18))
    if len(held) > 12:
        del held[random.randrange(len(held))]
last = torch.ones(2**10)
taken = sum(t.nbytes for t in held)
print(int(told is not None), taken, own_bytes() - before)
"""


def printed(code: str, *arguments: str, **environment: str) -> list[int]:
    """Return the numbers that code prints in a process whose environment sets no options of malloc but those given."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    line = [sys.executable, "-c", code, *arguments]
    output = subprocess.check_output(line, env=clean | environment | {"OMP_NUM_THREADS": "1"}, text=True)
    return [int(number) for number in output.split()]


def seen(peak_bytes: int, room_bytes: int, **environment: str) -> tuple[bool, int, int]:
    """Return whether something is told, what tensors take in the end, and what the process has resident for that."""
    told, taken, resident = printed(STEPS.format(peak=peak_bytes, room=room_bytes), **environment)
    return bool(told), taken, resident


@pytest.mark.skipif(not is_glibc, reason="the C library is not glibc")
def test_what_is_resident_is_what_tensors_take_where_there_is_little_room() -> None:
    told, taken, resident = seen(peak_bytes=100 * MIB, room_bytes=399 * MIB)
    assert told
    assert resident <= 1.1 * taken


# Steps that take 64 MiB in blocks of 1 and of 40 MiB, and free all of it, as a step of training does.
FAULTS = """
import resource, sys
import torch
from memfit.hardware import heap
if sys.argv[1] == "kept":
    assert heap.keep(peak_bytes=1, room_bytes=100)
for step in range(8):
    if step == 4:  # by then the heap is as large as it gets
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(n * 2**18) for n in [1] * 24 + [40]]
    del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not is_glibc, reason="the C library is not glibc")
@pytest.mark.ci
def test_steps_touch_no_new_memory_where_there_is_room() -> None:
    pages = 4 * 64 * MIB // resource.getpagesize()
    documented = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
    assert printed(FAULTS, "default")[0] > 0.5 * pages  # or there was nothing to mend
    assert printed(FAULTS, "kept")[0] < 0.1 * pages
    assert printed(FAULTS, "documented", **documented)[0] < 0.1 * pages


TOUCHED = """
import resource, sys
import torch
from memfit.hardware import heap
from tests.covering import some
blocks = [int(n) for n in sys.argv[1:]]
with heap.touched(3 * blocks):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(n // 4) for n in blocks]
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
del held
"""


MAPPED = [40 * MIB, MIB]
BLOCKS = [[12 * MIB], [5 * MIB, MIB, 3 * MIB], [24 * MIB, 24 * MIB], MAPPED]


@pytest.mark.skipif(not is_glibc, reason="the C library is not glibc")
@pytest.mark.parametrize("blocks", some(BLOCKS, [MAPPED]))
def test_a_call_finds_memory_that_was_touched_but_for_blocks_that_are_mapped_anew(blocks: list[int]) -> None:
    (pages,) = printed(TOUCHED, *map(str, blocks))
    mapped = sum(block for block in blocks if block > 32 * MIB) / resource.getpagesize()
    assert 0.9 * mapped <= pages <= 1.1 * mapped + 200  # small blocks have pages too


def test_where_nothing_is_to_be_touched_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", None)
    with hardware.heap.touched([]), hardware.heap.touched([2**30]):
        pass
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    with hardware.heap.touched([2**20]):
        pass


@pytest.mark.ci
@pytest.mark.skipif(not is_glibc, reason="the C library is not glibc")
def test_the_users_own_setting_stays() -> None:
    told, taken, resident = seen(peak_bytes=100 * MIB, room_bytes=MIB, MALLOC_MMAP_THRESHOLD_=str(2**25))
    assert not told
    assert resident > 1.2 * taken


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_the_environment_may_have_settled_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in [x for x in os.environ if x.startswith("MALLOC_") or x in ("GLIBC_TUNABLES", "LD_PRELOAD")]:
        monkeypatch.delenv(other)
    assert not hardware.heap.is_set_by_user()
    monkeypatch.setenv(name, "1")
    assert hardware.heap.is_set_by_user()


@pytest.mark.parametrize("library", ["", "musl"])
def test_other_c_libraries_are_left_alone(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: (library, ""))
    monkeypatch.setattr(ctypes, "CDLL", None)  # not even asked
    assert not hardware.heap.return_freed_memory()
    assert hardware.heap.settle(peak_bytes=100, room_bytes=1) is None
    assert not hardware.heap.keep(peak_bytes=1, room_bytes=100)
