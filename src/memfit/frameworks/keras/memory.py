"""What TensorFlow's allocator holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memfit.errors import UsageError
from memfit.frameworks.keras.internals import tf


def default_device() -> str:
    """Return the name of the first GPU, or of the CPU where there is none."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def held_bytes(device: str) -> int:
    """Return the bytes that TensorFlow has allocated on a device."""
    return int(tf.config.experimental.get_memory_info(device)["current"])


def peak_of(run: Callable[[], Any], device: str) -> int:
    """Return the bytes that TensorFlow allocates at the peak of one run, beyond those held before.

    Raises:
        UsageError: TensorFlow does not count the device's memory.
    """
    try:
        tf.config.experimental.reset_memory_stats(device)
    except ValueError as e:
        raise UsageError(
            f"TensorFlow does not count the memory of device={device!r} ({e}): for a CPU, set TF_ENABLE_ONEDNN_OPTS=1"
            " in the environment before TensorFlow is imported"
        ) from e
    before = held_bytes(device)
    run()
    return int(tf.config.experimental.get_memory_info(device)["peak"]) - before


def measured_peak(run: Callable[[], Any], device: str = "CPU:0") -> int:
    """Return the peak memory of a run in bytes, minus the memory allocated before it.

    Args:
        run: The function, run once to trace it and once to measure it.
        device: Name of the device for `tf.config.experimental.get_memory_info`.

    Raises:
        UsageError: TensorFlow does not count the device's memory. It counts a CPU's where oneDNN is on, which it turns
            off by itself for processors without instructions for neural networks (AVX512-VNNI).
    """
    run()
    return peak_of(run, device)
