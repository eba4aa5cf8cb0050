"""Which attention kernel runs: the rule of PyTorch's `sdp_utils.cpp`, case by case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from memfit import _torch
from memfit.hardware import AttentionCall, chosen_kernel, known_devices

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
TURING, AMPERE, CONSUMER, ADA, HOPPER, BLACKWELL, AMD = (
    "t4", "a100-80gb", "rtx-3090", "rtx-4090", "h100", "b200", "mi300x",
)  # fmt: skip


def call(
    dtype: torch.dtype = BRAIN, size: int = 64, *, keys: int = 128, key_heads: int = 8, **more: Any
) -> AttentionCall:
    """A call of 2 samples, 8 heads and 128 queries."""
    shape = (2, key_heads, keys, size)
    return AttentionCall(**{"query": (2, 8, 128, size), "key": shape, "value": shape, "dtype": dtype} | more)


MASK = {"mask": (2, 1, 128, 128)}
GROUPED = {"key_heads": 2, "enable_gqa": True}
CASES = [
    # flash: half precision, no mask, one head size of at most 256, from Ampere on
    (AMPERE, call(), "flash"),
    (AMPERE, call(HALF), "flash"),
    (CONSUMER, call(), "flash"),
    (AMPERE, call(SINGLE), "efficient"),
    (AMPERE, call(torch.float64), "math"),
    (AMPERE, call(same_dtypes=False), "math"),
    (AMPERE, call(last_strides_are_1=False), "math"),
    (AMPERE, call(**MASK), "efficient"),
    (AMPERE, call(is_causal=True), "flash"),
    (AMPERE, call(is_causal=True, keys=64), "efficient"),
    (AMPERE, call(keys=64), "flash"),
    (AMPERE, call(dropout=0.1), "flash"),
    (AMPERE, call(size=256), "flash"),
    (AMPERE, call(size=264), "efficient"),
    (AMPERE, call(size=20), "flash"),  # padded to 24
    (AMPERE, call(query=(128, 64), key=(128, 64), value=(128, 64)), "math"),
    (AMPERE, call(query=(2, 8, 0, 64)), "math"),
    (AMPERE, call(query=(4, 8, 128, 64)), "math"),  # more samples than keys
    (AMPERE, call(value=(2, 8, 128, 32)), "efficient"),
    # memory-efficient: head sizes of whole 16 bytes
    (AMPERE, call(size=20, **MASK), "math"),
    (AMPERE, call(SINGLE, size=20), "efficient"),
    (AMPERE, call(SINGLE, size=22), "math"),
    (TURING, call(HALF), "efficient"),
    (TURING, call(HALF, size=20), "math"),
    (TURING, call(SINGLE, size=22), "efficient"),
    (TURING, call(BRAIN), "math"),
    # grouped queries
    (AMPERE, call(**GROUPED), "flash"),
    (AMPERE, call(**GROUPED, **MASK), "math"),
    (AMPERE, call(SINGLE, **GROUPED), "math"),
    (AMPERE, call(key_heads=2), "math"),
    (AMPERE, call(key_heads=3, enable_gqa=True), "math"),
    # the backward pass of large heads needs more shared memory than consumer GPUs have
    (CONSUMER, call(size=224), "efficient"),
    (ADA, call(size=200), "efficient"),
    (ADA, call(size=256), "flash"),
    (ADA, call(size=256, dropout=0.1), "efficient"),
    (ADA, call(size=224, needs_gradient=False), "flash"),
    ("rtx-5090", call(size=224), "efficient"),
    (AMPERE, call(size=224), "flash"),
    # cuDNN comes first on data-centre Hopper and Blackwell, elsewhere after the math path
    (HOPPER, call(), "cudnn"),
    (BLACKWELL, call(), "cudnn"),
    ("h200", call(HALF), "cudnn"),
    ("rtx-5090", call(), "flash"),
    (HOPPER, call(**MASK), "cudnn"),
    (HOPPER, call(mask=(128, 128)), "cudnn"),
    (HOPPER, call(mask=(8, 128, 128)), "efficient"),
    (HOPPER, call(mask=(2, 3, 128, 128)), "efficient"),
    (HOPPER, call(mask_needs_gradient=True, **MASK), "efficient"),
    (HOPPER, call(**GROUPED, **MASK), "cudnn"),
    (HOPPER, call(SINGLE), "efficient"),
    (HOPPER, call(size=20), "flash"),
    (HOPPER, call(size=256), "cudnn"),
    (BLACKWELL, call(size=256), "flash"),
    (BLACKWELL, call(query=(2, 8, 128, 192), key=(2, 8, 128, 192)), "efficient"),
    (BLACKWELL, call(size=192, value=(2, 8, 128, 128)), "cudnn"),
    (HOPPER, call(dropout=0.125), "cudnn"),
    (HOPPER, call(dropout=0.1), "flash" if _torch.torch_version() >= (2, 12) else "cudnn"),
    (HOPPER, call(keys=1), "flash"),
    (HOPPER, call(query=(70000, 8, 128, 64), key=(70000, 8, 128, 64), value=(70000, 8, 128, 64)), "flash"),
    (HOPPER, call(is_causal=True, keys=64), "cudnn"),
    # AMD: AOTriton serves both fused kernels, with head sizes up to 512
    (AMD, call(), "flash"),
    (AMD, call(size=512), "flash"),
    (AMD, call(size=520), "math"),
    (AMD, call(SINGLE, size=22), "efficient"),
    (AMD, call(**MASK), "efficient"),
    (AMD, call(**GROUPED, **MASK), "math"),
]


@pytest.mark.parametrize(("device", "given", "kernel"), CASES)
def test_the_kernel_that_runs(device: str, given: AttentionCall, kernel: str) -> None:
    chosen, reasons = chosen_kernel(given, known_devices()[device])
    assert chosen == kernel
    assert kernel not in reasons and all(reasons.values())


def test_a_mask_that_forces_the_math_path_is_given_as_the_reason() -> None:
    _, reasons = chosen_kernel(call(**GROUPED, **MASK), known_devices()[AMPERE])
    assert reasons == {
        "flash": "it accepts no mask",
        "efficient": "it needs as many heads of keys (2) as of queries (8)",
    }


@pytest.mark.parametrize(
    ("backends", "kernel"),
    [
        ([SDPBackend.MATH], "math"),
        ([SDPBackend.EFFICIENT_ATTENTION], "efficient"),
        ([SDPBackend.CUDNN_ATTENTION], "cudnn"),
        ([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], "math"),
    ],
)
def test_kernels_that_are_switched_off_are_passed_over(backends: list[SDPBackend], kernel: str) -> None:
    with sdpa_kernel(backends):
        assert chosen_kernel(call(), known_devices()[AMPERE])[0] == kernel


def test_no_kernel_is_an_error_that_says_why() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="flash: it accepts no mask"):
        chosen_kernel(call(**MASK), known_devices()[AMPERE])


def test_deterministic_algorithms_exclude_cudnn() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen_kernel(call(), known_devices()[HOPPER])[0] == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


def test_cudnn_is_last_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert chosen_kernel(call(), known_devices()[HOPPER])[0] == "flash"
