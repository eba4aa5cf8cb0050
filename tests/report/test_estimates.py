"""What `memfit estimate` prints: bytes, whether they fit the device, speed, and what was assumed."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from memfit.ir import Prediction, Throughput
from memfit.report import estimate_page

GIB = 1024**3
SPEED = Throughput(
    step_seconds=0.5,
    step_error=0.3,
    measured=False,
    samples_per_second=16.0,
    tokens_per_second=32768.0,
    seconds_by_class={f"class {i}": 0.1 / 2**i for i in range(9)},
    model_flops=10**14,
    hardware_flops=2 * 10**14,
    peak_dtype="bfloat16",
    peak_flops=312e12,
    model_utilisation=0.41,
    hardware_utilisation=0.5,
)
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


def shown(prediction: Prediction) -> str:
    console = Console(width=100, file=io.StringIO(), color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(estimate_page(prediction, "t"))
    return captured.get()


def test_a_gpus_estimate_says_what_is_reserved_and_whether_it_fits() -> None:
    text = shown(ON_A_GPU)
    assert "22.0 GiB by PyTorch's allocator, at most 23.0 GiB" in text
    assert "24.0 GiB for a step: fits, 1.0 GiB free" in text
    assert "0.5 s ± 30%" in text.replace("500.0 ms", "0.5 s") and "nothing was measured on the device" in text
    assert "16 samples/s, 32,768 tokens/s" in text
    assert "41 % of 312 TFLOP/s in bfloat16" in text
    assert "the [flash] kernel" in text


def test_what_does_not_fit_is_said() -> None:
    small = msgspec.structs.replace(ON_A_GPU, device_bytes=16 * GIB)
    assert "16.0 GiB for a step: 7.0 GiB over" in shown(small)


def test_the_process_is_what_is_reserved_and_the_context() -> None:
    told = msgspec.structs.replace(ON_A_GPU, context_bytes=GIB // 2)
    assert told.process_bytes == 22 * GIB + GIB // 2
    assert "22.5 GiB, including 512.0 MiB for the driver's context" in " ".join(shown(told).split())
    told = msgspec.structs.replace(told, context_upper_bytes=GIB)
    assert told.process_upper_bytes == 23 * GIB + GIB
    assert "at most 24.0 GiB, with every kernel loaded" in " ".join(shown(told).split())
    assert ON_A_GPU.process_upper_bytes is None
    assert ON_A_GPU.process_bytes is None and "nvidia-smi" not in shown(ON_A_GPU)


def test_a_step_that_runs_by_giving_the_cache_back_says_how_often() -> None:
    tight = msgspec.structs.replace(ON_A_GPU, device_bytes=16 * GIB, retries=3)
    assert "empties its cache 3 times in two steps" in " ".join(shown(tight).split())


def test_time_by_class_adds_up() -> None:
    lines = [line for line in shown(ON_A_GPU).splitlines() if "class" in line and "%" in line]
    assert len(lines) == 7 and lines[-1].strip().startswith("3 other classes")
    shares = [float(line.split("%")[0].split()[-1]) for line in lines]
    assert abs(sum(shares) - 100) < 1.0


def test_a_prediction_without_a_device_says_its_peak_and_its_time() -> None:
    bare = Prediction(peak_bytes=GIB, peak_upper_bytes=2 * GIB, step_seconds=0.25, by_category={}, where="")
    text = shown(bare)
    assert "1.0 GiB, at most 2.0 GiB" in text and "250.0 ms predicted" in text
    assert "Device" not in text and "samples/s" not in text
