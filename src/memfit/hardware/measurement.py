"""Measures this machine's devices, and writes their figures to the user's file of devices.

Every figure is the best of several measurements, since other programs only make them worse.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from memfit import ir
from memfit.errors import UsageError
from memfit.foundations import Progress, silent
from memfit.hardware.accelerators import synchronize
from memfit.hardware.catalogue import parse, read_text, user_file
from memfit.hardware.host import cpu_model, devices, host_name
from memfit.ir import Device

_SECONDS = 0.3  # duration of one measurement, unless one call takes longer
_LONGEST_CALL_SECONDS = 0.5
_MIB = 2**20
_LINK_BYTES = (256 * _MIB, 16 * _MIB, _MIB)  # less where there is no room for more
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_MATRIX_SIZES = (512, 1024, 2048, 4096, 8192)
_VECTOR_KIB = (64, 128, 512, 4096)
_CHAIN = 8
_DISPATCHES = 500
_MARKS = ("# memfit tools probe-devices wrote [{}]", "# end of [{}]")


def probe_all(progress: Progress = silent) -> list[Device]:
    """Measure this machine's CPU and accelerators, one of each product."""
    products: dict[tuple[str, str], Device] = {}
    for device in devices():
        products.setdefault((device.kind, device.description), device)
    return [probe(device, progress) for device in products.values()]


def probe(device: Device, progress: Progress = silent) -> Device:
    """Return a device of this machine with measured figures, under a name for the catalogue."""
    at = torch.device(device.name)
    add = functools.partial(torch.zeros(4, device=at).add_, 1)
    figures: dict[str, Any] = {"launch_seconds": float(f"{_least_seconds(at, add, _DISPATCHES):.4g}")}
    if at.type == "cpu":
        figures["cache_bytes"] = _cpu_cache_bytes()
    bandwidth = functools.partial(_bandwidth, at, figures.get("cache_bytes", device.cache_bytes), device.usable_bytes)
    # By attribute, and by dtype where the attribute has a figure for each.
    steps: list[tuple[str, str, Callable[[], float]]] = [("bandwidth_bytes_per_second", "", bandwidth)]
    measures = {"matrix_flops": _matrix_flops} | ({"vector_flops": _vector_flops} if at.type == "cpu" else {})
    for attribute, measure in measures.items():
        steps += [(attribute, name, functools.partial(measure, at, dtype)) for name, dtype in _DTYPES.items()]
    if device.vendor == "nvidia" and device.capability is not None and device.capability >= (8, 0):
        steps.append(("matrix_flops", "tf32", functools.partial(_matrix_flops, at, torch.float32)))
    if at.type != "cpu":
        steps.append(("link_bytes_per_second", "", functools.partial(link_rate, at)))
    for done, (attribute, name, measured) in enumerate(steps):
        progress(f"probe {device.name}", done, len(steps))
        with float32_precision("high" if name == "tf32" else "highest"):
            figure = float(f"{measured():.4g}")
        if not name:
            figures[attribute] = figure
        else:
            figures.setdefault(attribute, {}).update({name: figure} if figure else {})
    progress(f"probe {device.name}", len(steps), len(steps))
    if at.type != "cpu":  # eager elementwise kernels never reach the peak of a GPU's vector units; products do
        figures["vector_flops"] = {k: rate for k, rate in figures["matrix_flops"].items() if k == "float32"}
    return entry_of(device, figures)


def entry_of(device: Device, figures: dict[str, Any]) -> Device:
    """Return a device of this machine as an entry of the catalogue, with figures that were measured now."""
    identity: dict[str, Any]
    if device.kind == "cpu":
        name = host_name() if device.cores == os.cpu_count() else f"{host_name()}-{device.cores}threads"
        identity = {"name": name, "products": (cpu_model(),)}
    else:
        slug = re.sub(r"[^a-z0-9]+", "-", device.description.lower()).strip("-")
        taken = max(0, device.memory_bytes - device.usable_bytes)
        identity = {"name": slug, "products": (device.description,), "context_bytes": taken}
    measured = f"measured by memfit tools probe-devices, {datetime.date.today()}, torch {torch.__version__}"
    attributes = [*figures, *(identity.keys() - {"name", "products"}), "memory_bytes", "usable_bytes", "cores"]
    return replace(device, **identity, **figures, sources={**device.sources, **dict.fromkeys(attributes, measured)})


def _least_seconds(at: torch.device, call: Callable[[], Any], count: int = 1) -> float:
    """Return the least time of a call, of as many in a row."""
    least, started = math.inf, time.perf_counter()
    while time.perf_counter() - started < _SECONDS or least == math.inf:
        synchronize(at)
        before = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(at)
        least = min(least, time.perf_counter() - before)
    return least / count


def _bandwidth(at: torch.device, cache_bytes: int, usable_bytes: int) -> float:
    """Return the rate of a copy or of a triad (J. D. McCalpin, STREAM, 1995), whichever is higher."""
    each = min(max(256 * _MIB, 8 * cache_bytes), usable_bytes // 8)
    a, b, c = (torch.ones(each // 4, device=at) for _ in range(3))
    copied = 2 * a.nbytes / _least_seconds(at, lambda: c.copy_(a))
    added = 3 * a.nbytes / _least_seconds(at, lambda: torch.add(a, b, alpha=2.0, out=c))
    return max(copied, added)


def _matrix_flops(at: torch.device, dtype: torch.dtype) -> float:
    """Return the best rate of `torch.mm` over sizes that take no more than half a second; 0 without a kernel."""
    best = seconds = 0.0
    for size in _MATRIX_SIZES:
        if 8 * seconds > _LONGEST_CALL_SECONDS:
            break
        generator = torch.Generator().manual_seed(size)  # random values, since power and clocks depend on them
        try:
            a, b = (torch.rand(size, size, generator=generator).to(at, dtype) for _ in range(2))
            seconds = _least_seconds(at, functools.partial(torch.mm, a, b))
        except RuntimeError:  # no kernel, or no memory
            break
        best = max(best, 2 * size**3 / seconds)
    return best


@contextlib.contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    """Set `torch.set_float32_matmul_precision`, until the context is left."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _vector_flops(at: torch.device, dtype: torch.dtype) -> float:
    """Return the best rate of a chain of x + a·b on tensors that fit into caches."""
    best = 0.0
    for kib in _VECTOR_KIB:
        x, a, b = (torch.full((kib * 1024 // dtype.itemsize,), 0.5, dtype=dtype, device=at) for _ in range(3))
        best = max(best, 3 * x.numel() / _least_seconds(at, functools.partial(torch.addcmul, x, a, b, out=x), _CHAIN))
    return best


def link_rate(at: torch.device) -> float:
    """Return the rate of a copy to the device, of pinned memory where there is any; 0 where no MiB has room."""
    for pinned in (True, False):
        for nbytes in _LINK_BYTES:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                host = torch.ones(nbytes, dtype=torch.uint8)
                host = host.pin_memory() if pinned else host
                there = torch.empty(host.shape, dtype=host.dtype, device=at)
                copy = functools.partial(there.copy_, host, non_blocking=True)
                return float(f"{nbytes / _least_seconds(at, copy):.4g}")
    return 0.0


def _cpu_cache_bytes() -> int:
    """Return the size of the last-level cache; 0 if Linux does not report it."""
    sizes = [
        int(path.read_text().strip().removesuffix("K")) * 1024
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if re.fullmatch(r"\d+K", path.read_text().strip())
    ]
    return max(sizes, default=0)


def keep_devices(devices: list[Device], path: Path | None = None) -> Path:
    """Write devices to a file of devices, the user's by default; earlier probes' entries are replaced, others stay.

    Raises:
        UsageError: The file is invalid, or has an entry of the same name that no probe wrote.
        OutputError: The file can't be written.
    """
    path = path or user_file()
    text = read_text(path)
    parse(text, str(path))
    for device in devices:
        first, last = (re.escape(mark.format(device.name)) for mark in _MARKS)
        text = re.sub(rf"^{first}$.*?^{last}$\n*", "", text, flags=re.DOTALL | re.MULTILINE)
    for name in (device.name for device in devices if device.name in parse(text, str(path))):
        raise UsageError(
            f"{path} has an entry [{name}] that memfit did not write: rename it, or give --output another file"
        )
    text = "\n".join([*([text.rstrip("\n") + "\n"] if text.strip() else []), *map(_block, devices)])
    parse(text, str(path))
    return ir.codec.write_atomic(path, text.encode())


def _block(device: Device) -> str:
    """Return a device as TOML, between two marks for the next probe."""
    values = msgspec.to_builtins(device)
    defaults = {f.name: f.default for f in msgspec.structs.fields(Device)}
    attributes = {
        k: v for k, v in values.items() if k != "name" and v is not None and getattr(device, k) not in (defaults[k], {})
    }
    tables = {k: v for k, v in attributes.items() if isinstance(v, dict)}
    to_toml = functools.partial(json.dumps, ensure_ascii=False)  # strings, numbers and lists look as in JSON
    first, last = (mark.format(device.name) for mark in _MARKS)
    lines = [first, f"[{device.name}]", *(f"{k} = {to_toml(v)}" for k, v in attributes.items() if k not in tables)]
    for key, table in tables.items():
        lines += ["", f"[{device.name}.{key}]", *(f"{k} = {to_toml(v)}" for k, v in table.items() if v is not None)]
    return "\n".join([*lines, last, ""])
