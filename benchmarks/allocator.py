"""The simulated caching allocator against PyTorch's own, on random requests.

Truth is `libc10_cuda.so` out of PyPI's CUDA wheel of torch 2.13.0, run without a GPU over a CUDA runtime that only
counts bytes (`benchmarks/real_allocator`). After every request, both must have put the block at the same place of the
same segment, and agree on allocated, reserved and requested bytes, their peaks, retries and out-of-memory errors.
Needs g++, and downloads 0.5 GB once.
"""

from __future__ import annotations

import html
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from bisect import bisect_right
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Case, main
from memfit import MemfitError
from memfit.errors import SimulatedOutOfMemoryError
from memfit.ir import AllocatorSettings, CachingAllocator, MemoryBlock

WHEELS = {
    "torch": r"torch-2\.13\.0-cp311-cp311-manylinux\w*_x86_64\.whl",
    "nvidia-cuda-runtime": r"nvidia_cuda_runtime-13\.0\.96-py3-none-manylinux[\w.]*_x86_64\.whl",
    "nvidia-cuda-crt": r"nvidia_cuda_crt-13\.0\.88-py3-none-manylinux[\w.]*_x86_64\.whl",
}
SOURCES = Path(__file__).parent / "real_allocator"
FOLDER = Path(tempfile.gettempdir()) / "memfit-real-allocator-2.13.0"
MIB = 2**20
EDGES = [
    1,
    512,
    513,
    MIB - 1,
    MIB,
    MIB + 1,
    2 * MIB,
    9 * MIB,
    10 * MIB - 512,
    10 * MIB,
    10 * MIB + 1,
    20 * MIB,
    21 * MIB,
]
KINDS: dict[str, dict[str, list[Any]]] = {
    "classic": {},
    "expandable": {"expandable_segments": [True]},
    "rounding": {"roundup_power2_divisions": [1, 2, 8, 32], "expandable_segments": [False, True]},
    "max_split": {"max_split_bytes": [24 * MIB, 40 * MIB], "max_non_split_rounding_bytes": [None, 24 * MIB]},
    "garbage": {"garbage_collection_threshold": [0.3, 0.8], "memory_fraction": [0.9, 0.5]},
    "all": {
        "expandable_segments": [False, True],
        "roundup_power2_divisions": [0, 4, (2, 4, 8, 0) * 4],
        "max_split_bytes": [None, 24 * MIB, 40 * MIB],
        "garbage_collection_threshold": [0.0, 0.3, 0.8],
        "memory_fraction": [1.0, 0.9, 0.5],
        "large_segment_bytes": [11 * MIB, 20 * MIB, 24 * MIB],
    },
}
Request = tuple[str, int, int]


def run(quick: bool) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each kind of settings, and what they add up to."""
    program = build()
    cases = [_case(name, options, program, 40 if quick else 1000) for name, options in KINDS.items()]
    keys = ("sequences", "requests", "retries", "out_of_memory", "differ")
    return cases, {key: sum(case[key] for case in cases) for key in keys}


def _case(name: str, options: dict[str, list[Any]], program: Path, sequences: int) -> Case:
    numbers = random.Random(name)
    case: Case = {
        "settings": name,
        "sequences": sequences,
        "requests": 0,
        "retries": 0,
        "out_of_memory": 0,
        "differ": 0,
    }
    for _ in range(sequences):
        settings = AllocatorSettings(**{key: numbers.choice(values) for key, values in options.items()})
        capacity = numbers.choice([10**12, numbers.randint(20 * MIB, 300 * MIB), numbers.randint(100 * MIB, 700 * MIB)])
        total = int(capacity * numbers.choice([1, 1.1]))
        requests = random_requests(numbers)
        ours = simulated(settings, capacity, total, requests)
        truth = real(program, settings, capacity, total, requests)
        case["requests"] += len(requests)
        case["retries"] += int(ours[-1].split()[-2])
        case["out_of_memory"] += ours.count("oom")
        case["differ"] += ours != truth
        if ours != truth:
            line = next(i for i, pair in enumerate(zip(ours, truth, strict=True)) if pair[0] != pair[1])
            print(f"{settings.conf()!r} {capacity=}: {ours[line]!r}, really {truth[line]!r}", file=sys.stderr)
    print(
        f"{name:<12}{case['requests']:>9} requests, {case['differ']} of {sequences} sequences differ", file=sys.stderr
    )
    return case


def random_requests(numbers: random.Random) -> list[Request]:
    """Return requests: ("malloc", bytes, stream), ("free", which, 0) or ("empty", 0, 0)."""
    share = numbers.uniform(0.4, 0.7)
    requests: list[Request] = []
    for _ in range(numbers.randint(10, 300)):
        kind = numbers.random()
        if kind < share:
            most = numbers.choice([5000, 2 * MIB, 64 * MIB])
            size = numbers.choice([numbers.choice(EDGES), numbers.randint(1, most)])
            requests.append(("malloc", size, numbers.choice([0, 0, 0, 7])))
        else:
            requests.append(("free", numbers.randint(0, 10**6), 0) if kind < 0.985 else ("empty", 0, 0))
    return requests


class _Recording(CachingAllocator):
    """An allocator that remembers where each segment started."""

    def __init__(self, settings: AllocatorSettings, capacity: int, total: int) -> None:
        super().__init__(settings, capacity, total_bytes=total)
        self.starts: list[int] = []

    def _new_segment(self, pool: Any, nbytes: int, alignment: int, *, mapped: bool = True) -> MemoryBlock:
        block = super()._new_segment(pool, nbytes, alignment, mapped=mapped)
        self.starts.append(block.address)
        return block


def simulated(settings: AllocatorSettings, capacity: int, total: int, requests: list[Request]) -> list[str]:
    """Return what the simulator says after each request, in the words of `real_allocator/drive.cpp`."""
    allocator = _Recording(settings, capacity, total)
    live: list[MemoryBlock] = []
    lines = []
    for kind, number, stream in requests:
        if kind == "malloc":
            try:
                live.append(allocator.malloc(number, stream))
            except SimulatedOutOfMemoryError:
                lines.append("oom")
            else:
                region = bisect_right(allocator.starts, live[-1].address) - 1
                lines.append(f"at {region} {live[-1].address - allocator.starts[region]}")
        elif kind == "free" and live:
            allocator.free(live.pop(number % len(live)))
        elif kind == "empty":
            allocator.empty_cache()
        a = allocator
        now = (a.allocated_bytes, a.reserved_bytes, a.requested_bytes)
        peaks = (a.peak_allocated_bytes, a.peak_reserved_bytes, a.peak_requested_bytes)
        lines.append(" ".join(map(str, ("is", *now, *peaks, a.num_alloc_retries, a.num_ooms))))
    return lines


def real(program: Path, settings: AllocatorSettings, capacity: int, total: int, requests: list[Request]) -> list[str]:
    """Return what PyTorch's allocator says after each request."""
    environment = {
        **{key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key},
        "PYTORCH_ALLOC_CONF": settings.conf(),
        "STUB_CAPACITY": str(capacity),
        "STUB_TOTAL": str(total),
        "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0",  # what could be shared needs NVML
    }
    text = "".join(f"{kind} {number} {stream}\n" for kind, number, stream in requests)
    done = subprocess.run([program], input=text, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def build() -> Path:
    """Return the program that drives PyTorch's allocator, made on first use.

    Raises:
        MemfitError: The torch installed is not 2.13.0, whose headers the program needs.
    """
    if torch.__version__.partition("+")[0] != "2.13.0":
        raise MemfitError(f"torch {torch.__version__} is installed; this benchmark needs the headers of 2.13.0")
    program = FOLDER / "drive"
    if program.exists():
        return program
    for project, name in WHEELS.items():
        _unpack(project, name)
    libraries = FOLDER / "torch" / "lib"
    runtime = libraries / "libcudart.so.13"
    stub = ["-shared", "-fPIC", f"-Wl,-soname,{runtime.name}", f"-Wl,--version-script={SOURCES / 'cudart.map'}"]
    subprocess.run(["gcc", "-w", "-O1", *stub, "-o", runtime, SOURCES / "cudart.c", "-ldl"], check=True)
    includes = [Path(torch.__file__).parent / "include", *FOLDER.glob("nvidia/*/include")]
    options = ["-std=c++20", "-O1", "-w", "-DC10_USING_CUSTOM_GENERATED_MACROS", *(f"-I{path}" for path in includes)]
    names = ("libc10_cuda.so", "libc10.so", runtime.name)
    linked = [f"-L{libraries}", *(f"-l:{name}" for name in names), f"-Wl,-rpath,{libraries}"]
    subprocess.run(["g++", *options, "-o", program, SOURCES / "drive.cpp", *linked], check=True)
    return program


def _unpack(project: str, name: str) -> None:
    """Fetch a wheel from PyPI, and keep its libraries of c10 or its headers."""
    with urllib.request.urlopen(f"https://pypi.org/simple/{project}/") as page:
        links = re.findall(r'href="([^"]+)"', page.read().decode())
    link = next(html.unescape(link) for link in links if re.search(f"/{name}(#|$)", link))
    with tempfile.TemporaryFile() as file:
        print(f"downloading {link.partition('#')[0]}", file=sys.stderr)
        with urllib.request.urlopen(link) as wheel:
            shutil.copyfileobj(wheel, file)
        with zipfile.ZipFile(file) as archive:
            wanted = [n for n in archive.namelist() if "/include/" in n or re.fullmatch(r"torch/lib/libc10\w*\.so", n)]
            archive.extractall(
                FOLDER, [n for n in wanted if n.startswith("torch/lib" if project == "torch" else "nvidia")]
            )


if __name__ == "__main__":
    main("allocator", run, __doc__)
