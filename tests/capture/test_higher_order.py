"""Steps with higher-order operators: those that can be followed, and refusals by name of the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import memfit
from memfit.capture import recorder
from memfit.errors import CaptureError
from memfit.hardware import find_device
from memfit.ir import Levers
from memfit.planner import capture_levers
from memfit.workload import Workload
from tests.capture.steps import assert_predicted, squared

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # by Dynamo
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),  # by what PyTorch imports for them
]


def halved(x: Tensor) -> Tensor:
    with torch.no_grad():
        _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.5), (torch.tensor(0), x))
    return x + y


def attended(x: Tensor) -> Tensor:
    given = x.detach().unsqueeze(1)
    return x * flex_attention(given, given, given).squeeze(1)


def attended_causally(x: Tensor) -> Tensor:
    given = x.detach().unsqueeze(1)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, x.shape[1], x.shape[1], device="cpu")
    out = flex_attention(given, given, given, lambda s, b, h, i, j: s + 0.1 * (i - j), block_mask=mask)
    return x * out.squeeze(1)


FOLLOWED: dict[str, Callable[[Tensor], Any]] = {
    "a loop": halved,
    "attention to a teacher": attended,
    "masked attention": attended_causally,
    "an associative scan": lambda x: associative_scan(torch.add, x, 1, combine_mode="generic"),
    "a vectorised function": lambda x: torch.vmap(lambda y: y.sin().exp())(x),
    "a directional derivative": lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1],
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)),
    "map_impl": lambda x: map(lambda y: y.sin(), x),
    "scan": lambda x: scan(lambda c, y: (c + y, c * y), torch.zeros_like(x[:, 0]), x, dim=1)[1],
}


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(32, 32), nn.Linear(32, 32), function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.function(self.first(x)))
        return y


def workload(function: Callable[[Tensor], Any]) -> Workload:
    torch.manual_seed(0)
    return squared(Between(function), torch.randn(4, 128, 32))


@pytest.mark.ci
@pytest.mark.parametrize("name", FOLLOWED)
def test_the_peak_is_the_measured_one(name: str) -> None:
    assert_predicted(workload(FOLLOWED[name]), rel=1e-3)


@pytest.mark.parametrize("name", ["cond", *(pytest.param(n, marks=pytest.mark.ci) for n in REFUSED if n != "cond")])
def test_what_no_mode_sees_is_refused_by_name(name: str) -> None:
    with pytest.raises(CaptureError, match=f"higher-order operator {name} can't be followed") as e:
        capture_levers(workload(REFUSED[name]), Levers(microbatch_size=4), find_device("cpu"))
    assert "repair" not in str(e.value) and "itself failed" not in str(e.value)


@pytest.mark.ci
def test_flex_attention_is_refused_by_name_on_a_gpu() -> None:
    """There it is compiled into one kernel, of which its eager formula says nothing."""
    with pytest.raises(CaptureError, match="flex_attention can't be followed on a GPU.*attn_implementation='sdpa'"):
        memfit.estimate(workload(attended), device="h100")


def test_what_memfit_raises_is_not_said_to_be_the_steps_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def text(func: Any, args: Any, kwargs: Any) -> str:
        return json.dumps(object()) if "sin" in str(func) else ""

    monkeypatch.setattr(recorder, "text_of", text)
    with pytest.raises(CaptureError, match="not JSON serializable") as e:
        capture_levers(workload(torch.sin), Levers(microbatch_size=4), find_device("cpu"))
    assert "repair" not in str(e.value)
