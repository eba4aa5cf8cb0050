"""The machine at hand, and what a process may use of it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from memfit.devices import host
from memfit.errors import UsageError


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that stands for /sys/fs/cgroup."""

    class Moved(type(tmp_path)):  # type: ignore[misc]
        def __new__(cls, *parts: str) -> Path:
            return Path(*(str(part).replace("/sys/fs/cgroup", str(tmp_path)) for part in parts))

    monkeypatch.setattr(host, "Path", Moved)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_cpu_is_here_and_usable() -> None:
    device = host.find_device("cpu")
    assert device.kind == "cpu" and device.description
    assert 0 < device.usable_bytes <= device.memory_bytes == psutil.virtual_memory().total
    assert device.cores == torch.get_num_threads()
    assert host.devices()[0].name == "cpu"


@pytest.mark.parametrize("name", ["", "CPU", "cuda:99", "h200", "nonsense"])
def test_unknown_devices_are_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(UsageError, match="which has cpu.*use device='cpu'") as caught:
        host.find_device(name)
    assert repr(name) in str(caught.value)


def test_a_gpu_that_is_here_is_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(name="Some GPU", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (30, 40))
    gpu = host.devices()[1]
    assert (gpu.name, gpu.kind, gpu.usable_bytes, gpu.memory_bytes, gpu.cores) == ("cuda:0", "cuda", 30, 40, 132)
    with pytest.raises(UsageError, match="plans for the CPU only"):
        host.find_device("cuda:0")


def test_a_group_of_version_two_leaves_the_difference(cgroup: Path) -> None:
    write(cgroup, memory__max="1000000\n", memory__current="250000\n")
    assert host.cgroup_limit_bytes() == 750000


def test_a_group_of_version_one_leaves_the_difference(cgroup: Path) -> None:
    write(cgroup / "memory", memory__limit_in_bytes="5000", memory__usage_in_bytes="1000")
    assert host.cgroup_limit_bytes() == 4000


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory__max": "max\n", "memory__current": "250000\n"},
        {"memory__max": "garbage", "memory__current": "1"},
        {"memory__max": "1000"},
    ],
)
def test_no_limit_is_none(cgroup: Path, files: dict[str, str]) -> None:
    write(cgroup, **files)
    assert host.cgroup_limit_bytes() is None


def test_a_group_above_its_limit_leaves_nothing(cgroup: Path) -> None:
    write(cgroup, memory__max="1000", memory__current="2000")
    assert host.cgroup_limit_bytes() == 0


def test_what_can_be_given_back_is_not_taken(cgroup: Path) -> None:
    write(
        cgroup,
        memory__max="1000",
        memory__current="900",
        memory__stat="anon 300\nfile 500\ninactive_file 400\nactive_file 100\n",
    )
    assert host.cgroup_limit_bytes() == 500


def test_the_group_bounds_what_is_usable(cgroup: Path) -> None:
    write(cgroup, memory__max="123456", memory__current="0")
    assert host.find_device("cpu").usable_bytes == 123456


def test_the_name_of_the_host_fits_a_file_name() -> None:
    assert re.fullmatch(r"[a-z0-9-]+-\d+cores", host.host_name())
