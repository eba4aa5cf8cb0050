"""What recurrent layers keep and compute. How they run on fake CUDA is in `scenarios.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memfit.hardware import reserve_bytes
from memfit.ir import Levers
from memfit.workload import Workload
from tests.measuring import peaks

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


class Encoded(nn.Module):
    """A linear layer over what a recurrent layer gives."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.encoder = nn.LSTM(16, 32, num_layers=layers, bidirectional=True)
        self.head = nn.Linear(64, 4)


def frozen(model: Encoded, x: Tensor) -> Tensor:
    with torch.no_grad():
        encoded = model.encoder(x)[0]
    return model.head(encoded).mean()


def recomputed(model: Encoded, x: Tensor) -> Tensor:
    encoded = checkpoint(lambda x: model.encoder(x)[0], x.clone().requires_grad_(), use_reentrant=True)
    return model.head(encoded).mean()


def trained(model: Encoded, x: Tensor) -> Tensor:
    return model.head(model.encoder(x)[0]).mean()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("loss", [frozen, recomputed, trained])
def test_the_peak_is_that_of_the_kernel_with_or_without_gradients(loss: Any, layers: int) -> None:
    torch.manual_seed(0)
    model = Encoded(layers)
    workload = Workload(model, torch.randn(4, 8, 16), loss, torch.optim.SGD(model.parameters()))
    predicted, measured = peaks(workload, Levers(microbatch_size=4))
    assert predicted == measured
