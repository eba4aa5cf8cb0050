"""Probing: figures that a machine can have, and a file that is only added to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from memfit import hardware
from memfit.errors import OutputError, UsageError
from memfit.hardware import (
    entry_of,
    find_device,
    host_name,
    keep_devices,
    known_devices,
    measurement,
    missing_figures,
    read,
)
from memfit.ir import AllocatorSettings, Device
from tests.hardware.test_catalogue import MINE, SHIPPED


@pytest.fixture(scope="module")
def found() -> Device:
    """Return this machine's CPU, probed less thoroughly than the command does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurement, "_SECONDS", 0.05)
        patch.setattr(measurement, "_MATRIX_SIZES", (256, 512))
        patch.setattr(measurement, "_cpu_cache_bytes", lambda: 2**20)  # arrays of eight times that are measured
        patch.setenv("MEMFIT_DEVICES", "/nowhere/devices.toml")
        return measurement.probe_all()[0]


def test_the_figures_are_such_as_a_cpu_has(found: Device) -> None:
    assert 1e9 < found.bandwidth_bytes_per_second < 2e12
    assert 1e8 < found.matrix_flops["float32"] < 1e14
    assert {"float32", "bfloat16", "float64"} <= found.matrix_flops.keys()
    assert all(1e6 < rate < 1e14 for rate in found.vector_flops.values())
    assert found.matrix_flops["float32"] > 0.1 * found.vector_flops["float32"]
    assert 1e-7 < found.launch_seconds < 1e-3
    assert found.cores == torch.get_num_threads()
    assert found.sources["matrix_flops"].startswith("measured by memfit tools probe-devices")
    assert found.name.startswith(host_name())


def test_what_was_measured_is_what_the_cpu_has_from_then_on(found: Device, own_file: Path) -> None:
    keep_devices([msgspec.structs.replace(found, cores=found.cores + 1)])  # with other threads
    assert find_device("cpu").matrix_flops == {} and find_device("cpu").bandwidth_bytes_per_second == 0
    assert keep_devices([found]) == own_file
    assert known_devices()[found.name] == found
    cpu = find_device("cpu")
    assert cpu.name == "cpu"
    assert (cpu.matrix_flops, cpu.launch_seconds) == (found.matrix_flops, found.launch_seconds)


def test_nothing_else_in_the_file_changes(found: Device, own_file: Path) -> None:
    own_file.parent.mkdir()
    own_file.write_text(f"# my devices\n{MINE}# a remark\n")
    keep_devices([found])
    once = own_file.read_text()
    assert once.startswith(f"# my devices\n{MINE}# a remark\n")
    keep_devices([msgspec.structs.replace(found, launch_seconds=1e-6)])
    own_file.write_text(own_file.read_text() + "\n# at the end\n" + MINE.replace("[mine]", "[second]"))
    keep_devices([found])
    text = own_file.read_text()
    assert set(read(own_file)) == {"mine", found.name, "second"}
    assert read(own_file)[found.name] == found
    assert "# my devices" in text and "# a remark" in text and "# at the end" in text
    assert text.count(f"[{found.name}]\n") == 3  # its table and its marks


@pytest.mark.parametrize(("text", "message"), [(MINE, "memfit did not write.*--output"), ("[mine", "not valid TOML")])
def test_an_entry_that_no_probe_wrote_and_a_damaged_file_are_left_alone(
    text: str, message: str, found: Device, own_file: Path
) -> None:
    own_file.parent.mkdir()
    text = text.replace("[mine]", f"[{found.name}]")
    own_file.write_text(text)
    with pytest.raises(UsageError, match=message):
        keep_devices([found])
    assert own_file.read_text() == text


def test_other_files_can_be_written_and_not_every_one(found: Device, own_file: Path, tmp_path: Path) -> None:
    assert keep_devices([found], tmp_path / "other.toml") == tmp_path / "other.toml"
    assert not own_file.exists()
    with pytest.raises((OutputError, UsageError), match="/dev/null"):
        keep_devices([found], Path("/dev/null/devices.toml"))


def test_every_device_of_the_catalogue_survives_the_file(tmp_path: Path) -> None:
    odd = msgspec.structs.replace(
        SHIPPED[0],
        name="odd",
        description='quotes " and \\ and ü\n',
        allocator=AllocatorSettings(expandable_segments=True, roundup_power2_divisions=4),
    )
    keep_devices([*SHIPPED, odd], tmp_path / "all.toml")
    assert list(read(tmp_path / "all.toml").values()) == [*SHIPPED, odd]
    keep_devices([odd], tmp_path / "all.toml")
    assert len(read(tmp_path / "all.toml")) == len(SHIPPED) + 1


def test_copies_are_timed_from_other_memory_where_none_can_be_pinned_and_by_less_where_room_is_scarce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def empty(shape: torch.Size, **options: object) -> torch.Tensor:
        sizes.append(shape[0])
        if shape[0] > 2**20:
            raise torch.OutOfMemoryError("no room")
        return torch.zeros(shape, dtype=torch.uint8)

    monkeypatch.setattr(measurement, "_SECONDS", 0.01)
    monkeypatch.setattr(torch.Tensor, "pin_memory", _not_pinned)
    monkeypatch.setattr(torch, "empty", empty)
    assert measurement.link_rate(torch.device("cpu")) > 1e8
    assert sizes == [*measurement._LINK_BYTES]


def _not_pinned(tensor: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("cannot pin")


ARC = Device(
    name="xpu:0",
    kind="xpu",
    vendor="intel",
    description="Intel Arc B580",
    memory_bytes=12_000,
    usable_bytes=11_000,
    cores=20,
    products=("Intel Arc B580",),
)


def test_an_accelerator_of_another_kind_is_kept_for_where_it_is(own_file: Path) -> None:
    bare = msgspec.structs.replace(ARC, launch_seconds=1)
    assert missing_figures(bare) == ["bandwidth_bytes_per_second", "vector_flops.float32"]
    rates = {"float32": 1e13}
    figures = {"matrix_flops": rates, "vector_flops": rates, "bandwidth_bytes_per_second": 4e11}
    entry = entry_of(ARC, {**figures, "launch_seconds": 1e-5})
    keep_devices([entry])
    properties = SimpleNamespace(name="Intel Arc B580", multi_processor_count=20)
    found = hardware.present_accelerator("xpu:0", properties, "intel", 10_000, 12_000, known_devices().values())
    assert (found.name, found.usable_bytes, found.matrix_flops) == ("xpu:0", 10_000, rates)
    with pytest.raises(UsageError, match="'intel-arc-b580' is of kind 'xpu'.*device='xpu'"):
        find_device("intel-arc-b580")


def test_a_gpu_is_an_entry_of_its_product() -> None:
    identity = {"name": "cuda:0", "kind": "cuda", "vendor": "nvidia", "description": "NVIDIA GeForce RTX 4070"}
    gpu = msgspec.structs.replace(ARC, **identity, capability=(8, 9))
    rates = {"float32": 2e13, "tf32": 4e13}
    figures = {"matrix_flops": rates, "vector_flops": {"float32": 2e13}, "bandwidth_bytes_per_second": 4e11}
    entry = entry_of(gpu, {**figures, "launch_seconds": 4e-6})
    assert (entry.name, entry.products) == ("nvidia-geforce-rtx-4070", ("NVIDIA GeForce RTX 4070",))
    assert (entry.context_bytes, entry.matrix_flops) == (1000, rates)
    assert {"context_bytes", "matrix_flops", "usable_bytes"} <= entry.sources.keys()
