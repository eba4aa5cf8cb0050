"""Lists of devices, as a terminal of eighty columns shows them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memfit.hardware.catalogue import known_devices
from memfit.ir.device import Device
from memfit.report.listings import device_page, device_table
from tests.report.test_tables import line_with, shown

BARE = Device(
    name="cpu", kind="cpu", vendor="cpu", description="a [red]CPU", memory_bytes=2**35, usable_bytes=2**34, cores=2
)


@pytest.fixture(autouse=True)
def no_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_DEVICES", "/nowhere/devices.toml")


def test_every_name_and_figure_is_there() -> None:
    text = shown(device_table(list(known_devices().values())))
    line_with(text, "rtx-2080-ti", "11.0", "10.6", "616", "–", "13.4", "7.5")
    line_with(text, "a100-40gb", "40.0", "39.0", "1555", "312", "19.5", "8.0")
    line_with(text, "mi250x", "64.0", "63.5", "1638", "191.5", "47.85", "–")
    assert all(name in text for name in known_devices()) and "…" not in text


def test_what_is_not_known_is_a_dash_and_not_zero() -> None:
    line = line_with(shown(device_table([BARE])), "cpu", "a [red]CPU")
    assert line.split()[-6:] == ["32.0", "16.0", "–", "–", "–", "–"]


def test_long_names_leave_room_for_the_figures() -> None:
    probed = replace(BARE, name="intel-r-xeon-r-platinum-8481c-cpu-2-70ghz-16cores", matrix_flops={"float32": 1.5e12})
    assert "1.5" in shown(device_table([probed, *known_devices().values()]))


def test_a_page_shows_each_figure_with_its_source_and_the_advice() -> None:
    text = shown(device_page(known_devices()["t4"], ["Use this.", "Not [that]."]), 200)
    line_with(text, "float16, matrix", "65 TFLOP/s", "datasheet")
    line_with(text, "usable", "14.6 GiB", "14.75 GiB")
    line_with(text, "launch", "5.0 µs", "estimate")
    line_with(text, "cuBLAS workspace", "8.1 MiB")
    assert "• Use this." in text and "• Not [that]." in text


def test_a_page_of_a_cpu_has_no_gpu_figures() -> None:
    text = shown(device_page(BARE, []), 120)
    line_with(text, "threads", "2")
    assert "capability" not in text and "cuBLAS" not in text
