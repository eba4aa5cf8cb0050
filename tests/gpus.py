"""Devices that tests predict for: round figures, near an A100's and an H100's."""

from __future__ import annotations

from memfit.ir import Device

AMPERE = Device(
    name="ampere",
    kind="cuda",
    vendor="nvidia",
    description="a test's GPU",
    memory_bytes=40 * 2**30,
    usable_bytes=39 * 2**30,
    cores=100,
    bandwidth_bytes_per_second=1.5e12,
    cache_bytes=40 * 2**20,
    matrix_flops={"tf32": 150e12, "bfloat16": 300e12, "float16": 300e12},
    vector_flops={"float32": 20e12},
    capability=(8, 0),
    launch_seconds=6e-6,
    cublas_workspace_bytes=8_519_680,
)
