"""The machine at hand, and what a process may use of it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from memfit import hardware
from memfit.errors import UsageError
from memfit.hardware import cgroup_limit_bytes, devices, find_device, host_name, keep_devices, known_devices
from tests.hardware.conftest import cgroups


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return cgroups(tmp_path, monkeypatch)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_cpu_is_here_and_usable() -> None:
    device = find_device("cpu")
    assert device.kind == "cpu" and device.description
    assert 0 < device.usable_bytes <= device.memory_bytes == psutil.virtual_memory().total
    assert device.cores == torch.get_num_threads()
    assert devices()[0].name == "cpu"
    assert re.fullmatch(r"[a-z0-9-]+-\d+cores", host_name())


@pytest.mark.parametrize("name", ["cuda", "cuda:99", "CUDA:1"])
def test_gpus_that_are_not_here_are_refused_with_what_there_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match="which has cpu.*catalogue") as caught:
        find_device(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["", "nonsense", "cuda:x", "cpu:0"])
def test_what_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not in the catalogue"):
        find_device(name)


GIB = 2**30
RTX_3090 = SimpleNamespace(
    name="NVIDIA GeForce RTX 3090", multi_processor_count=82, major=8, minor=6, L2_cache_size=6 * 2**20
)


def present(monkeypatch: pytest.MonkeyPatch, properties: SimpleNamespace) -> None:
    """Let PyTorch see one GPU with 23.7 GiB, of which 20 are free and one is the allocator's."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (20 * GIB, int(23.7 * GIB)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: GIB)


def test_a_gpu_that_is_here_has_the_catalogues_rates_and_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, RTX_3090)
    known = find_device("rtx-3090")
    for name in ("cuda", "cuda:0"):
        gpu = find_device(name)
        assert (gpu.name, gpu.kind, gpu.vendor, gpu.cores) == ("cuda:0", "cuda", "nvidia", 82)
        assert (gpu.memory_bytes, gpu.usable_bytes) == (int(23.7 * GIB), 21 * GIB)
        assert (gpu.matrix_flops, gpu.bandwidth_bytes_per_second) == (known.matrix_flops, 936.2e9)
        assert gpu.sources["memory_bytes"].startswith("this machine")
        assert gpu.sources["matrix_flops"] == known.sources["matrix_flops"]


def test_a_gpu_of_an_unknown_product_needs_no_rates(monkeypatch: pytest.MonkeyPatch, own_file: Path) -> None:
    present(monkeypatch, SimpleNamespace(**{**vars(RTX_3090), "name": "NVIDIA Mystery"}))
    gpu = devices()[1]
    assert (gpu.description, gpu.capability, gpu.cache_bytes) == ("NVIDIA Mystery", (8, 6), 6 * 2**20)
    assert (gpu.cublas_workspace_bytes, gpu.bandwidth_bytes_per_second) == (8_519_680, 0)
    assert find_device("cuda") == gpu and gpu.is_here


def test_a_gpu_that_was_probed_is_known(monkeypatch: pytest.MonkeyPatch, own_file: Path) -> None:
    present(monkeypatch, SimpleNamespace(**{**vars(RTX_3090), "name": "NVIDIA Mystery"}))
    rates = {"vector_flops": {"float32": 1e13}, "bandwidth_bytes_per_second": 5e11, "launch_seconds": 4e-6}
    keep_devices([hardware.entry_of(devices()[1], rates)])
    gpu = find_device("cuda")
    assert (gpu.name, gpu.bandwidth_bytes_per_second, gpu.usable_bytes) == ("cuda:0", 5e11, 21 * GIB)


def test_amds_have_no_compute_capability() -> None:
    properties = SimpleNamespace(name="AMD Instinct MI250X", multi_processor_count=110, major=9, minor=0)
    gpu = hardware.present_accelerator(
        "cuda:3", properties, "amd", 60 * GIB, int(63.98 * GIB), known_devices().values()
    )
    assert (gpu.name, gpu.capability, gpu.matrix_flops["bfloat16"]) == ("cuda:3", None, 191.5e12)


V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V1 = {"memory__limit_in_bytes": "5000", "memory__usage_in_bytes": "1000"}
CACHED = "anon 300\nfile 500\ninactive_file 400\nactive_file 100\n"


@pytest.mark.parametrize(
    ("folder", "files", "left"),
    [
        ("", {"memory__max": "1000000\n", "memory__current": "250000\n"}, 750000),
        ("memory", V1, 4000),  # version 1
        ("", {"memory__max": "1000", "memory__current": "2000"}, 0),  # above its limit
        ("", {"memory__max": "1000", "memory__current": "900", "memory__stat": CACHED}, 500),  # can be given back
        ("", {}, None),
        ("", {"memory__max": "max\n", "memory__current": "250000\n"}, None),
        ("", {"memory__max": "garbage", "memory__current": "1"}, None),
        ("", {"memory__max": "1000"}, None),
    ],
)
def test_a_control_group_leaves_the_difference(
    cgroup: Path, folder: str, files: dict[str, str], left: int | None
) -> None:
    write(cgroup / folder, **files)
    assert cgroup_limit_bytes() == left


@pytest.mark.parametrize(
    ("root", "names", "groups"),
    [
        ("", ("memory.max", "memory.current"), "0::/slurm/job_1\n"),
        ("memory", V1_NAMES, "9:name=systemd:/\n4:memory:/slurm/job_1\n1:cpu,cpuacct:/c\n0::/\n"),
        ("memory", V1_NAMES, "3:cpu,memory:/slurm/job_1\n"),
    ],
)
def test_the_groups_around_a_job_count_too(root: str, names: tuple[str, str], groups: str, cgroup: Path) -> None:
    """As those that a scheduler makes: the tightest limit holds, wherever it is."""
    (cgroup / "own").write_text(groups)
    (cgroup / root / "slurm/job_1").mkdir(parents=True)
    for folder, left in (("slurm/job_1", 700), ("", 600), ("slurm", 500)):
        for name, value in zip(names, (1000, 1000 - left), strict=True):
            (cgroup / root / folder / name).write_text(str(value))
        assert cgroup_limit_bytes() == left


def test_the_group_bounds_what_is_usable(cgroup: Path) -> None:
    write(cgroup, memory__max="123456", memory__current="0")
    assert find_device("cpu").usable_bytes == 123456
