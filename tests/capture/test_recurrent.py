"""What recurrent layers keep and compute. How they run on fake CUDA is in `test_gpu.py`."""

from __future__ import annotations

import pytest
import torch

from memfit.capture.recurrent import reserve_bytes

LSTM, GRU, RELU = 2, 3, 0


@pytest.mark.parametrize(("mode", "nbytes"), [(LSTM, 736_000_000), (GRU, 864_000_000)])
def test_the_reserve_is_that_of_a_published_step(mode: int, nbytes: int) -> None:
    # pytorch/pytorch#2895: 4 layers, 320 features, 25,000 steps of all samples, float32
    x = torch.empty(1000, 25, 123, device="meta")
    assert reserve_bytes(x, mode, 320, 4, 0.0, False) == nbytes


def test_the_reserve_grows_with_directions_and_dropout() -> None:
    x = torch.empty(10, 2, 7, device="meta", dtype=torch.float16)
    one = reserve_bytes(x, RELU, 5, 1, 0.0, False)
    assert one == 10 * 2 * 5 * 2
    assert reserve_bytes(x, RELU, 5, 1, 0.0, True) == 2 * one
    assert reserve_bytes(x, LSTM, 5, 2, 0.1, False) - reserve_bytes(x, LSTM, 5, 2, 0.0, False) == 10 * 2 * 5
