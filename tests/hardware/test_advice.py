"""Advice follows what the hardware has, and says the same as the rates that are listed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memfit.hardware.catalogue import (
    advice,
    known_devices,
    precisions,
    supports_24_sparsity,
    supports_bfloat16,
    supports_float8,
    supports_tf32,
)
from memfit.ir.device import Device

KNOWN = known_devices()
OLD = {"t4", "rtx-2080-ti", "v100-16gb", "v100-32gb"}
FLOAT8 = {"rtx-4090", "rtx-5090", "l4", "l40s", "h100", "h100-pcie", "h200", "b200", "mi300x"}


@pytest.mark.parametrize("device", KNOWN.values(), ids=KNOWN)
def test_capability_and_listed_rates_agree(device: Device) -> None:
    assert supports_bfloat16(device) == ("bfloat16" in device.matrix_flops) == (device.name not in OLD)
    assert supports_tf32(device) == ("tf32" in device.matrix_flops) == (device.name not in OLD | {"mi250x"})
    assert supports_24_sparsity(device) == (device.name not in OLD | {"mi250x"})
    assert supports_float8(device) == ("float8" in device.matrix_flops) == (device.name in FLOAT8)


@pytest.mark.parametrize("device", KNOWN.values(), ids=KNOWN)
def test_precisions_are_those_the_advice_names(device: Device) -> None:
    half = "16-mixed" if device.name in OLD else "bf16-mixed"
    assert precisions(device) == ("32-true", half)
    assert advice(device)[0].startswith(f"Use {half}")
    assert all(sentence.endswith(".") for sentence in advice(device))


def test_turing_is_told_apart_from_what_pytorch_emulates() -> None:
    first, second = advice(KNOWN["t4"])
    assert "Turing has no bfloat16 units" in first and "emulates" in first
    assert "65 TFLOP/s, 8 times plain float32" in first
    assert "no TF32" in second


def test_what_saves_nothing_is_said() -> None:
    assert any("35.6 TFLOP/s, no more than plain float32" in sentence for sentence in advice(KNOWN["rtx-3090"]))
    assert any("156 TFLOP/s, 8 times plain float32" in sentence for sentence in advice(KNOWN["a100-80gb"]))


def test_amd() -> None:
    assert any("as they are (47.85 TFLOP/s" in sentence for sentence in advice(KNOWN["mi250x"]))
    assert any("HIPBLASLT_ALLOW_TF32=1" in sentence for sentence in advice(KNOWN["mi300x"]))
    assert not any("HIPBLASLT" in sentence for sentence in advice(KNOWN["h100"]))


def test_a_cpu_is_judged_by_what_was_measured() -> None:
    cpu = Device(
        name="cpu", kind="cpu", vendor="cpu", description="a CPU", memory_bytes=2**34, usable_bytes=2**33, cores=2
    )
    assert "probe-devices" in advice(cpu)[0]
    fast = replace(cpu, matrix_flops={"float32": 1e11, "bfloat16": 4e11})
    slow = replace(cpu, matrix_flops={"float32": 1e11, "bfloat16": 2e10})
    assert "saves memory and time" in advice(fast)[0] and "4.0 times" in advice(fast)[0]
    assert "no time" in advice(slow)[0] and "0.2" in advice(slow)[0]
    assert precisions(slow) == ("32-true", "bf16-mixed")
    assert not supports_tf32(fast) and not supports_24_sparsity(fast) and not supports_float8(fast)
