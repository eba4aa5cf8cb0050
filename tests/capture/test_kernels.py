"""Kernels whose outputs and workspaces are not those of fake ones: other layouts, other storages, jagged rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import memfit
from memfit.capture import recorder
from memfit.errors import CaptureError
from memfit.hardware import find_device
from memfit.ir import Levers
from memfit.planner import capture_levers
from memfit.workload import Workload
from tests.capture.steps import Function, assert_predicted, squared

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),  # by what PyTorch imports for derivatives and loops
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # by Dynamo
]


def normalised(channels: int) -> nn.Module:
    """Normalises features that are not the dimension behind the samples, as patch transformers do."""
    norm = (Function(lambda x: x.mT), nn.BatchNorm1d(channels), Function(lambda x: x.mT.contiguous()))
    return nn.Sequential(nn.Linear(32, channels), *norm, nn.Linear(channels, 8), Function(torch.sin))


def padded(mode: str) -> nn.Module:
    """Pads volumes that are channels-last."""
    layout = torch.channels_last_3d
    layer = nn.Conv3d(2, 4, 1).to(memory_format=layout)  # type: ignore[call-overload]
    pad = Function(lambda y: F.pad(y, (1,) * 6, mode).contiguous().sin())
    return nn.Sequential(Function(lambda x: x.contiguous(memory_format=layout)), layer, pad)


def scattered(y: Tensor) -> Tensor:
    """Write into a copy of a part of a larger tensor."""
    part = y.chunk(3, -1)[1]
    return torch.slice_scatter(part, part[:, :4].sin(), 1, 0, 4).cos()


def compared(y: Tensor) -> Tensor:
    """Raise a number to the power of a transposed tensor, and add logarithms."""
    powers = 2.0**y.mT
    return torch.logaddexp(powers, y.contiguous().mT[:1].expand_as(y.mT)).contiguous().sin()


def bags(mode: str) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(200, 64, mode=mode), nn.Linear(64, 8))


class Directional(nn.Module):
    """Takes the derivative of a layer along a direction that leaves its weights, and much else, as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            out = self.last(self.layer(dual).sin() * self.layer.bias.exp())
            tangent: Tensor = forward_ad.unpack_dual(out).tangent
        return tangent


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


class Packing(nn.Module):
    """Packs rows of several lengths, and returns their values, or pads them again."""

    def __init__(self, *, pads: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.pads = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16), pads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, 3, 8, x.shape[0] * x.shape[1]])
        rows = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), offsets)
        rows = self.last(self.norm(self.first(rows)).relu())
        return rows.to_padded_tensor(0.0) if self.pads else rows.values()


INDICES = torch.arange(24 * 10).reshape(24, 10) % 200
STEPS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "normalised behind a transposition": lambda: (normalised(48), torch.randn(6, 20, 32)),
    "more channels than rows": lambda: (normalised(96), torch.randn(6, 4, 32)),
    "reflected volumes": lambda: (padded("reflect"), torch.randn(2, 2, 6, 7, 8)),
    "repeated edges": lambda: (padded("replicate"), torch.randn(2, 2, 6, 7, 8)),
    "written into a copy": lambda: (nn.Sequential(nn.Linear(32, 96), Function(scattered)), torch.randn(8, 10, 32)),
    "a directional derivative": lambda: (Directional(), torch.randn(8, 10, 32)),
    "powers of a transposed tensor": lambda: (
        nn.Sequential(nn.Linear(32, 64), Function(compared)),
        torch.randn(8, 10, 32),
    ),
    "sums of embeddings": lambda: (bags("sum"), INDICES),
    "greatest embeddings": lambda: (bags("max"), INDICES),
    "greatest embeddings of few": lambda: (bags("max"), INDICES[:, :3]),
    "numbers found": lambda: (Counting(), torch.randn(64, 32)),
    "numbers found and counted": lambda: (Counting(return_counts=True), torch.randn(64, 32)),
    "numbers found by place": lambda: (Counting(return_inverse=True), torch.randn(64, 32)),
    "an encoder in one operator": lambda: (Taught(False, False), torch.randn(6, 24, 32)),
    "a padded encoder": lambda: (Taught(False, True, norm_first=True), torch.randn(6, 24, 32)),
    "a nested encoder": lambda: (Taught(True, True), torch.randn(6, 24, 32)),
    "jagged rows": lambda: (Packing(pads=False), torch.randn(4, 32, 16)),
    "padded jagged rows": lambda: (Packing(pads=True), torch.randn(4, 32, 16)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci] if "jagged" in name else []) for name in STEPS]
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_the_peak_is_the_measured_one(name: str) -> None:
    torch.manual_seed(0)
    assert_predicted(squared(*STEPS[name]()), rel=0.0 if "jagged" in name else 1e-3)


# Higher-order operators: those that can be followed, and refusals by name of the others


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


def between(function: Callable[[Tensor], Any]) -> Workload:
    """Return a step with a function between two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Function(function), nn.Linear(32, 32))
    return squared(model, torch.randn(4, 128, 32))


@pytest.mark.ci
@pytest.mark.parametrize("name", FOLLOWED)
def test_the_peak_with_a_higher_order_operator_is_the_measured_one(name: str) -> None:
    assert_predicted(between(FOLLOWED[name]), rel=1e-3)


@pytest.mark.parametrize("name", ["cond", *(pytest.param(n, marks=pytest.mark.ci) for n in REFUSED if n != "cond")])
def test_what_no_mode_sees_is_refused_by_name(name: str) -> None:
    with pytest.raises(CaptureError, match=f"higher-order operator {name} can't be followed") as e:
        capture_levers(between(REFUSED[name]), Levers(microbatch_size=4), find_device("cpu"))
    assert "repair" not in str(e.value) and "itself failed" not in str(e.value)


@pytest.mark.ci
def test_flex_attention_is_refused_by_name_on_a_gpu() -> None:
    """There it is compiled into one kernel, of which its eager formula says nothing."""
    with pytest.raises(CaptureError, match="flex_attention can't be followed on a GPU.*attn_implementation='sdpa'"):
        memfit.estimate(between(attended), device="h100")


def test_what_memfit_raises_is_not_said_to_be_the_steps_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def text(func: Any, args: Any, kwargs: Any) -> str:
        return json.dumps(object()) if "sin" in str(func) else ""

    monkeypatch.setattr(recorder, "text_of", text)
    with pytest.raises(CaptureError, match="not JSON serializable") as e:
        capture_levers(between(torch.sin), Levers(microbatch_size=4), find_device("cpu"))
    assert "repair" not in str(e.value)
