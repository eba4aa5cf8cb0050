"""What the allocator handed out, for allocations that are known; and every form that running out of memory takes."""

from __future__ import annotations

import contextlib
import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from memfit.errors import CaptureError, MemoryLimitError, NonFiniteError
from memfit.hardware import allocated, allocated_between, allocated_by_name, cgroup_oom_kills, out_of_memory
from tests.hardware.conftest import cgroups

KIB = 1024


def block(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_a_known_pattern_has_its_known_peak() -> None:
    with allocated() as meter:
        one = block(100)
        two = block(300)
        del one
        three = block(150)
        del two
        four = block(50)
        del three
    assert meter.peak_bytes == 450 * KIB
    assert meter.net_bytes == 50 * KIB
    del four


def test_the_peak_is_not_the_sum_and_nothing_allocated_is_nothing() -> None:
    held = block(10)
    with pytest.raises(ZeroDivisionError), allocated():
        block(1)
        raise ZeroDivisionError
    for count in (0, 5):
        with allocated() as meter:
            for _ in range(count):
                block(64)
        assert (meter.peak_bytes, meter.net_bytes) == (64 * KIB * bool(count), 0)
    del held


def test_buffers_inside_operators_count() -> None:
    x = torch.randn(64, 256).bfloat16()
    with allocated() as meter:
        out = torch.nn.functional.mse_loss(x.float(), torch.zeros(64, 256))
    assert meter.peak_bytes >= 3 * 64 * 256 * 4
    assert out.isfinite()


def test_named_blocks_are_measured_each_for_itself() -> None:
    with allocated_by_name("mine-") as meters:
        with torch.profiler.record_function("mine-a"):
            a = block(100)
            block(50)
        with torch.profiler.record_function("other"):
            b = block(1000)
        with torch.profiler.record_function("mine-b"):
            del b
            c = block(30)
    assert meters.keys() == {"mine-a", "mine-b"}
    assert (meters["mine-a"].peak_bytes, meters["mine-a"].net_bytes) == (150 * KIB, 100 * KIB)
    assert (meters["mine-b"].peak_bytes, meters["mine-b"].net_bytes) == (0, -970 * KIB)
    del a, c


@pytest.mark.parametrize("is_profiled", [False, True], ids=["unseen", "seen by an earlier profile"])
def test_a_free_of_an_earlier_tensor_counts_for_nothing(is_profiled: bool) -> None:
    with allocated() if is_profiled else contextlib.nullcontext():
        earlier = [torch.empty(1000)]
    with allocated() as meter:
        earlier.clear()
        kept = torch.empty(100)
        freed = torch.empty(50)
        del freed
    assert (meter.peak_bytes, meter.net_bytes) == (600, 400)
    del kept


def test_a_free_by_another_thread_is_seen_when_its_address_is_allocated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [(0, 100, 7), (1, 30, 8), (2, 100, 7), (3, -30, 8), (4, -100, 7), (5, -50, 9)]  # at, bytes, address
    nodes = [
        SimpleNamespace(start_time_ns=at, children=[], extra_fields=SimpleNamespace(alloc_size=nbytes, ptr=address))
        for at, nbytes, address in events
    ]
    results = SimpleNamespace(experimental_event_tree=lambda: nodes, events=list)
    profile = SimpleNamespace(kineto_results=results)
    monkeypatch.setattr(torch.autograd.profiler, "profile", lambda **_: contextlib.nullcontext(profile))
    with allocated() as meter:
        pass
    assert (meter.peak_bytes, meter.net_bytes) == (130, 0)


def test_peaks_between_marks_are_those_of_all_that_is_held_by_then() -> None:
    mib = 2**20

    def mark(name: str) -> None:
        with torch.profiler.record_function(name):
            pass

    with allocated_between("mark", but_in="aside") as peaks:
        kept = torch.empty(mib, dtype=torch.uint8)
        mark("mark")
        torch.empty(2 * mib, dtype=torch.uint8)
        mark("another")
        with torch.profiler.record_function("aside"):
            torch.empty(8 * mib, dtype=torch.uint8)
        mark("mark")
        del kept
        torch.empty(mib // 2, dtype=torch.uint8)
    assert peaks == [mib, 3 * mib, mib]
    with allocated_between("mark") as peaks:
        pass
    assert peaks == [0]


RAISED_HERE: dict[str, tuple[Callable[[], object], str, int | None]] = {
    "PyTorch's CPU allocator": (lambda: torch.empty(1 << 50, dtype=torch.uint8), "allocator", 1 << 50),
    "Python": (lambda: bytearray(1 << 60), "host", None),
    "NumPy": (lambda: np.empty(1 << 57, np.uint8), "host", None),
    "mmap": (lambda: mmap.mmap(-1, 1 << 60), "host", None),
    "shared memory": (lambda: torch.UntypedStorage._new_shared(1 << 50), "host", None),
}


@pytest.mark.parametrize("name", RAISED_HERE)
def test_real_errors(name: str) -> None:
    allocate, kind, requested_bytes = RAISED_HERE[name]
    with pytest.raises(Exception) as caught:
        allocate()
    found = out_of_memory(caught.value)
    assert found is not None and (found.kind, found.requested_bytes) == (kind, requested_bytes)
    assert found.text.startswith(type(caught.value).__name__)


UNDER_A_LIMIT = """
import resource, torch
from memfit.hardware.memory import out_of_memory
convolution, images = torch.nn.Conv2d(64, 64, 3, padding=1), torch.randn(8, 64, 128, 128)
convolution(images[:1])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
found = []
def attempt(run):
    try:
        run()
    except RuntimeError as error:
        found.append((str(error)[:24], out_of_memory(error)))
attempt(lambda: torch.nn.Conv2d(3, 3, 9)(torch.randn(1, 3, 2, 2)))
resource.setrlimit(resource.RLIMIT_AS, (used, -1))
attempt(lambda: convolution(images).sum().backward())
attempt(lambda: torch.empty(2**28))
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
attempt(lambda: (_ for _ in ()).throw(RuntimeError("could not create a primitive")))
for text, said in found:
    print(text, "|", said and said.kind)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_a_limited_address_space_fails_in_onednn_and_in_the_allocator() -> None:
    done = subprocess.run([sys.executable, "-c", UNDER_A_LIMIT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split(" | ")[1] for line in done.stdout.splitlines()] == ["None", "library", "allocator", "None"]
    assert done.stdout.count("could not create a primi") == 2


TEXTS = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), "allocator", 5 * 2**29),
    (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 MiB."), "allocator", 20 * 2**20),
    (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB."), "allocator", 20 * 2**20),
    (RuntimeError("MPS backend out of memory (MPS allocated: 18.13 GB)"), "allocator", None),
    (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."), "allocator", 64),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), "driver", None),
    (torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), "driver", None),
    (RuntimeError("CUDA driver error: out of memory"), "driver", None),
    (RuntimeError("HIP error: out of memory"), "driver", None),
    (RuntimeError("Triton Error [CUDA]: out of memory"), "driver", None),
    (RuntimeError("ncclUnhandledCudaError: Call failed. Cuda failure 'out of memory'"), "driver", None),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "library", None),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "library", None),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "library", None),
    (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling"), "library", None),
    (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), "library", None),
    (RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"), "library", None),
    (RuntimeError("std::bad_alloc"), "host", None),
    (OSError(12, "Cannot allocate memory"), "host", None),
    (MemoryError(), "host", None),
    (
        MemoryLimitError(
            "no", limit_bytes=8, held_bytes=6, requested_bytes=3, by_category={"parameters": 6}, where="forward"
        ),
        "limit",
        3,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("error", "kind", "requested_bytes"), TEXTS, ids=lambda value: str(value)[:50])
def test_known_texts(error: Exception, kind: str, requested_bytes: int | None) -> None:
    found = out_of_memory(error)
    assert found is not None and (found.kind, found.requested_bytes) == (kind, requested_bytes)


OTHERS = [
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if the input is not contiguous."),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("could not create a primitive"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated."),
    ValueError("the memory of Tom Sawyer: out of memory"),
    OSError(28, "No space left on device"),
    NonFiniteError("no", step=1, value=float("nan")),
    KeyboardInterrupt(),
]  # fmt: skip


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: repr(error)[:50])
def test_other_errors_are_none(error: BaseException) -> None:
    assert out_of_memory(error) is None


def test_an_error_raised_from_one_counts_as_it() -> None:
    with pytest.raises(CaptureError) as caught:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        except RuntimeError as e:
            raise CaptureError("the step can't be captured") from e
    found = out_of_memory(caught.value)
    assert found is not None and found.kind == "allocator" and found.text.startswith("OutOfMemoryError: CUDA")
    looped = ValueError("loop")
    looped.__cause__ = looped
    assert out_of_memory(looped) is None


def test_a_worker_that_the_control_group_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed. ")
    for kills, kind in ((0, None), (2, "control group")):
        (tmp_path / "memory.events").write_text(f"low 0\nhigh 0\nmax 31\noom {kills}\noom_kill {kills}\n")
        cgroups(tmp_path, monkeypatch)
        assert cgroup_oom_kills() == kills
        found = out_of_memory(killed)
        assert (found and found.kind) == kind
    (tmp_path / "memory.events").unlink()
    assert cgroup_oom_kills() == 0
