"""Outputs and workspaces of kernels that fake ones, or arguments that hold one number, don't show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfit.ir import Levers
from memfit.workload import Workload
from tests.measuring import peaks


class Bags(nn.Module):
    def __init__(self, mode: str, **options: Any) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(200, 64, mode=mode, **options), nn.Linear(64, 8)

    def forward(self, indices: Tensor) -> Any:
        return self.head(self.bags(indices))


class Counting(nn.Module):
    """Weighs its output by numbers that are found once or more, in order."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.layer, self.options = nn.Linear(32, 64), options

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        found = torch.unique_consecutive((x.detach() * 3).round().flatten().sort().values, **self.options)
        values = found[0] if isinstance(found, tuple) else found
        kept = self.layer(x).sigmoid()
        return y * kept * values.mean()


class Taught(nn.Module):
    """Learns from an encoder that does not train: PyTorch runs each of its layers in one operator."""

    def __init__(self, nested: bool, padded: bool, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 128, batch_first=True, **options)
        self.teacher = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.teacher.requires_grad_(False)
        self.student, self.padded = nn.Linear(32, 32), padded

    def forward(self, x: Tensor) -> Any:
        self.teacher.eval()
        padding = torch.arange(x.shape[1]) >= torch.tensor([x.shape[1], *[17] * (len(x) - 1)])[:, None]
        with torch.no_grad():
            known = self.teacher(x, src_key_padding_mask=padding if self.padded else None)
        return self.student(x) - known


INDICES = torch.arange(24 * 10).reshape(24, 10) % 200
STEPS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "sums of embeddings": lambda: (Bags("sum"), INDICES),
    "greatest embeddings": lambda: (Bags("max"), INDICES),
    "greatest embeddings of few": lambda: (Bags("max"), INDICES[:, :3]),
    "numbers found": lambda: (Counting(), torch.randn(64, 32)),
    "numbers found and counted": lambda: (Counting(return_counts=True), torch.randn(64, 32)),
    "numbers found by place": lambda: (Counting(return_inverse=True), torch.randn(64, 32)),
    "an encoder in one operator": lambda: (Taught(False, False), torch.randn(6, 24, 32)),
    "a padded encoder": lambda: (Taught(False, True, norm_first=True), torch.randn(6, 24, 32)),
    "a nested encoder": lambda: (Taught(True, True), torch.randn(6, 24, 32)),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_the_peak_is_the_measured_one(name: str) -> None:
    torch.manual_seed(0)
    model, batch = STEPS[name]()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    workload = Workload(model, batch, lambda model, x: model(x).square().mean(), optimizer)
    predicted, measured = peaks(workload, Levers(microbatch_size=len(batch)))
    assert predicted == pytest.approx(measured, rel=1e-3)
