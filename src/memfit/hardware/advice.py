"""Precisions and features that a device supports, by its capability and units, with advice."""

from __future__ import annotations

from memfit.ir.device import Device
from memfit.ir.plan import Precision

_ARCHITECTURES = {(7, 0): "Volta", (7, 2): "Volta", (7, 5): "Turing"}


def supports_bfloat16(device: Device) -> bool:
    """Return whether a device multiplies bfloat16 in hardware (NVIDIA from Ampere on, CDNA), or as a CPU at all."""
    return device.kind == "cpu" or _has(device, (8, 0), "bfloat16")


def supports_tf32(device: Device) -> bool:
    """Return whether a device multiplies float32 in TF32: NVIDIA from Ampere on, and CDNA 3."""
    return _has(device, (8, 0), "tf32")


def supports_24_sparsity(device: Device) -> bool:
    """Return whether a device skips the zeros of 2:4 sparsity: NVIDIA from Ampere on, and CDNA 3."""
    return _has(device, (8, 0), "float8")  # CDNA 3 brought both


def supports_float8(device: Device) -> bool:
    """Return whether a device multiplies float8: NVIDIA from Ada and Hopper on, and CDNA 3."""
    return _has(device, (8, 9), "float8")


def _has(device: Device, since: tuple[int, int], dtype: str) -> bool:
    """Return whether a device has a unit: by compute capability on NVIDIA, by its listed rate on others."""
    if device.vendor == "nvidia":
        return device.capability is not None and device.capability >= since
    return device.vendor == "amd" and dtype in device.matrix_flops


def precisions(device: Device) -> tuple[Precision, ...]:
    """Return the useful precisions of a device: 16-mixed only without bfloat16."""
    return ("32-true", "bf16-mixed") if supports_bfloat16(device) else ("32-true", "16-mixed")


def advice(device: Device) -> list[str]:
    """Return advice on a device, in sentences."""
    if device.kind == "cpu":
        return _cpu_advice(device)
    if device.kind != "cuda":  # of whose units nothing is known here
        return []
    found = [_half(device), _float32(device)]
    if supports_24_sparsity(device):
        found.append(
            "2:4 sparsity (torch.sparse.to_sparse_semi_structured) can double the rate of products; it prunes the"
            " model."
        )
    if supports_float8(device):
        rate = _speed(device, "float8")
        found.append(f"It has float8 products (torchao.float8){rate}; they change the numbers the most.")
    return found


def _cpu_advice(device: Device) -> list[str]:
    fast, plain = device.matrix_flops.get("bfloat16"), device.matrix_flops.get("float32")
    if not fast or not plain:
        return ["The speed of bfloat16 here is unknown: `memfit tools probe-devices` measures it."]
    ratio = fast / plain
    if ratio > 1:
        return [f"bf16-mixed saves memory and time: bfloat16 products ran {ratio:.1f} times as fast as float32 ones."]
    return [f"bf16-mixed saves memory but no time: bfloat16 products ran at {ratio:.2g} of float32's rate."]


def _half(device: Device) -> str:
    if supports_bfloat16(device):
        return f"Use bf16-mixed{_speed(device, 'bfloat16')}; it needs no loss scaling, as 16-mixed does."
    architecture = _ARCHITECTURES.get(device.capability or (0, 0), "It")
    return (
        f"Use 16-mixed, which scales the loss{_speed(device, 'float16')}. {architecture} has no bfloat16 units:"
        " torch.cuda.is_bf16_supported() says yes because PyTorch emulates them, slowly."
    )


def _float32(device: Device) -> str:
    if supports_tf32(device):
        needs = ", if HIPBLASLT_ALLOW_TF32=1 is set" if device.vendor == "amd" else ""
        return (
            f"torch.set_float32_matmul_precision('high') runs float32 products as TF32{_speed(device, 'tf32')},"
            f" with 10 bits of mantissa{needs}."
        )
    if "float32" in device.matrix_flops:
        return f"It has no TF32; float32 products run on matrix units as they are{_speed(device, 'float32')}."
    return "It has no TF32: float32 products run without matrix units."


def _speed(device: Device, dtype: str) -> str:
    """Return a rate and its ratio to float32's without matrix units, where both are known."""
    fast, plain = device.matrix_flops.get(dtype), device.vector_flops.get("float32")
    if not fast or not plain:
        return ""
    times = f"{fast / plain:.2g} times plain float32" if fast > 1.05 * plain else "no more than plain float32"
    return f" ({fast / 1e12:.4g} TFLOP/s, {times})"
