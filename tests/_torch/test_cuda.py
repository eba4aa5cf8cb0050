"""What memfit relies on of `torch.cuda`'s insides."""

from __future__ import annotations

import pytest
import torch

from memfit._torch import cuda


def test_answer_for_one_device_is_what_torch_cuda_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_cuda_getDeviceCount", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, None, raising=False)  # put back afterwards
    cuda.answer_for_one_device()
    assert torch._C._cuda_getDeviceCount() == 1


@pytest.mark.gpu
def test_take_snapshot_has_segments_and_traces() -> None:
    held = torch.ones(2**20, device="cuda")
    taken = cuda.take_snapshot(held.device)
    assert {"segments", "device_traces"} <= taken.keys() and taken["segments"]


@pytest.mark.gpu
def test_is_initialized_once_a_device_was_used() -> None:
    torch.ones(1, device="cuda")
    assert cuda.is_initialized("cuda")


def test_is_initialized_tells_of_accelerators_that_are_not_here() -> None:
    assert cuda.is_initialized("cuda") is torch.cuda.is_initialized()
