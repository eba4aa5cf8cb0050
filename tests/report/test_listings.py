"""Tables of estimates, devices, verifications and runs."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from memfit.hardware import known_devices
from memfit.ir import Device, Prediction
from memfit.report import device_page, device_table, estimate_page
from tests.report.conftest import SPEED, line_with, shown

GIB = 1024**3
ON_A_GPU = Prediction(
    peak_bytes=20 * GIB,
    peak_reserved_bytes=22 * GIB,
    peak_upper_bytes=23 * GIB,
    step_seconds=0.5,
    by_category={"activations": 20 * GIB},
    where="start of the backward pass, in head (mm)",
    device_bytes=24 * GIB,
    throughput=SPEED,
    notes=["attention on rtx-3090: 6 calls take the [flash] kernel"],
)


def estimated(prediction: Prediction) -> str:
    return shown(estimate_page(prediction, "t"), 100)


def test_a_gpus_estimate_says_what_is_reserved_and_whether_it_fits() -> None:
    text = estimated(ON_A_GPU)
    assert "22.0 GiB by PyTorch's allocator, at most 23.0 GiB" in text
    assert "24.0 GiB for a step: fits, 1.0 GiB free" in text
    assert "0.5 s ± 30%" in text.replace("500.0 ms", "0.5 s") and "nothing was measured on the device" in text
    assert "16 samples/s, 32,768 tokens/s" in text
    assert "41 % of 312 TFLOP/s in bfloat16" in text
    assert "the [flash] kernel" in text


def test_what_does_not_fit_is_said() -> None:
    small = msgspec.structs.replace(ON_A_GPU, device_bytes=16 * GIB)
    assert "16.0 GiB for a step: 7.0 GiB over" in estimated(small)


def test_the_process_is_what_is_reserved_and_the_context() -> None:
    told = msgspec.structs.replace(ON_A_GPU, context_bytes=GIB // 2)
    assert told.process_bytes == 22 * GIB + GIB // 2
    assert "22.5 GiB, including 512.0 MiB for the driver's context" in " ".join(estimated(told).split())
    told = msgspec.structs.replace(told, context_upper_bytes=GIB)
    assert told.process_upper_bytes == 23 * GIB + GIB
    assert "at most 24.0 GiB, with every kernel loaded" in " ".join(estimated(told).split())
    assert ON_A_GPU.process_upper_bytes is None
    assert ON_A_GPU.process_bytes is None and "nvidia-smi" not in estimated(ON_A_GPU)


def test_a_step_that_runs_by_giving_the_cache_back_says_how_often() -> None:
    tight = msgspec.structs.replace(ON_A_GPU, device_bytes=16 * GIB, retries=3)
    assert "empties its cache 3 times in two steps" in " ".join(estimated(tight).split())


def test_time_by_class_adds_up() -> None:
    lines = [line for line in estimated(ON_A_GPU).splitlines() if "class" in line and "%" in line]
    assert len(lines) == 7 and lines[-1].strip().startswith("3 other classes")
    shares = [float(line.split("%")[0].split()[-1]) for line in lines]
    assert abs(sum(shares) - 100) < 1.0


def test_a_prediction_without_a_device_says_its_peak_and_its_time() -> None:
    bare = Prediction(peak_bytes=GIB, peak_upper_bytes=2 * GIB, step_seconds=0.25, by_category={}, where="")
    text = estimated(bare)
    assert "1.0 GiB, at most 2.0 GiB" in text and "250.0 ms predicted" in text
    assert "Device" not in text and "samples/s" not in text


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
