"""Losses of pixels, frames and samples in chunks: segmentation, CTC and transducers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memfit
from memfit.errors import PlanError
from memfit.ir import ChunkedLoss, Levers
from memfit.levers import switched
from memfit.workload import Workload
from tests.measuring import peaks

CLASSES, FEATURES = 13, 5
Loss = Callable[[Any, Tensor], Tensor]


@contextmanager
def largest() -> Iterator[list[int]]:
    """Record how many rows of classes the tensors have that are made."""
    found = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in [] if func.is_view else tree_leaves(out):
                if isinstance(t, Tensor) and t.is_floating_point() and CLASSES in t.shape and FEATURES not in t.shape:
                    found.append(t.numel() // CLASSES)
            return out

    with Sizes():  # type: ignore[no-untyped-call]
        yield found


def outcome(model: nn.Module, loss: Callable[[], Tensor], rows: int | None) -> tuple[Tensor, Tensor, int]:
    """Return a loss, its gradients and the most rows of logits that there were."""
    model.zero_grad()
    lever = None if rows is None else ChunkedLoss(head="head", rows=rows)
    with switched(model, Levers(microbatch_size=1, chunked_loss=lever)), largest() as sizes:
        found = loss()
        found.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return found.detach() + 0, torch.cat(gradients), max(sizes)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


class Segmenter(nn.Module):
    def __init__(self, dims: int, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.body = convolution(3, FEATURES, 3, padding=1)
        self.head = convolution(FEATURES, CLASSES, 1, bias=bias)

    def forward(self, images: Tensor) -> Any:
        return self.head(torch.tanh(self.body(images)))


WEIGHT = torch.linspace(0.5, 2, CLASSES)


def focal(x: Any, y: Tensor) -> Tensor:
    losses = F.cross_entropy(x, y, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def classes_last(x: Any) -> Any:
    return x.permute(0, *range(2, x.dim()), 1).reshape(-1, x.size(1))


SEGMENTATION: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "sum, some ignored": lambda x, y: F.cross_entropy(x, y, ignore_index=3, reduction="sum"),
    "smoothed": lambda x, y: F.cross_entropy(x.float(), y, label_smoothing=0.1),
    "weighted classes": lambda x, y: F.cross_entropy(x, y, weight=WEIGHT, ignore_index=3, label_smoothing=0.1),
    "a module": lambda x, y: nn.CrossEntropyLoss(ignore_index=3)(x.contiguous(), y),
    "classes last": lambda x, y: F.cross_entropy(classes_last(x), y.reshape(-1)),
    "flat": lambda x, y: F.cross_entropy(x.flatten(2), y.flatten(1)),
    "in another shape": lambda x, y: F.cross_entropy(x.view(x.size(0), CLASSES, -1), y.view(y.size(0), -1)),
    "flat, transposed": lambda x, y: F.cross_entropy(x.flatten(2).transpose(1, 2).flatten(0, 1), y.flatten()),
    "pixels first": lambda x, y: F.cross_entropy(
        x.flatten(2).permute(2, 0, 1).reshape(-1, CLASSES), y.flatten(1).t().flatten()
    ),
    "a part": lambda x, y: F.cross_entropy(x[1:, :, 2:-1], y[1:, 2:-1]),
    "nll_loss": lambda x, y: F.nll_loss(F.log_softmax(x, dim=1), y, ignore_index=3),
    "focal": focal,
    "a mask": lambda x, y: (F.cross_entropy(x, y, reduction="none") * (y > 4)).sum() / (y > 4).sum(),
    "each class by itself": lambda x, y: F.binary_cross_entropy_with_logits(
        x, F.one_hot(y, CLASSES).movedim(-1, 1).float()
    ),
    "distilled": lambda x, y: F.kl_div(
        x.log_softmax(1), F.one_hot(y, CLASSES).movedim(-1, 1).float().softmax(1), reduction="sum"
    ),
    "entropy": lambda x, y: (x.logsumexp(1) - (x.softmax(1) * x).sum(1)).mean(),
    "beside a metric": lambda x, y: F.cross_entropy(x, y) * (x.argmax(1) == y).float().mean(),
}
SHAPES = [(3, 7, 9), (2, 16, 12), (1, 6, 11), (3, 200), (2, 4, 5, 3), (2, 5, 6, 7)]
NUMBERS: dict[str, Loss] = {
    "interpolated": lambda x, y: F.interpolate(x, scale_factor=2).square().mean(),
    "mixed shapes": lambda x, y: x.contiguous().view(x.size(0), -1)[:, 3:].logsumexp(1).sum(),
    "over pixels": lambda x, y: x.flatten(2).softmax(2).square().sum(),
    "dice": lambda x, y: (x.softmax(1).flatten(2) * F.one_hot(y.flatten(1), CLASSES).mT).sum((0, 2)).log().sum(),
}


@pytest.mark.parametrize("name", [*SEGMENTATION, *NUMBERS])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_pixels_are_computed_in_chunks(name: str, shape: tuple[int, ...], layout: str) -> None:
    if name == "a part" and shape[0] == 1:
        pytest.skip("one image")
    model = Segmenter(len(shape) - 1, bias=layout == "channels first")
    images = torch.randn(shape[0], 3, *shape[1:], generator=torch.Generator().manual_seed(1))
    if layout == "channels last" and len(shape) > 2:
        form: Any = torch.channels_last if len(shape) == 3 else torch.channels_last_3d
        model, images = model.to(memory_format=form), images.to(memory_format=form)  # type: ignore[call-overload]
    targets = torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(2))

    def loss() -> Tensor:
        return (SEGMENTATION | NUMBERS)[name](model(images), targets)

    expected, gradients, _ = outcome(model, loss, None)
    for rows in (20, 1000):
        found, chunked, most = outcome(model, loss, rows)
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert relative(found, expected) < 1e-5 and relative(chunked, gradients) < 1e-5
        assert name in NUMBERS or name in ("each class by itself", "distilled") or most <= rows
    assert relative(gradients + 1e-4 * gradients.norm(), gradients) > 1e-5


FRAMES, SAMPLES, LONGEST = 9, 5, 3


class Listener(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.body = nn.Linear(3, FEATURES)
        self.head = nn.Conv1d(FEATURES, CLASSES, 1) if kind == "convolution" else nn.Linear(FEATURES, CLASSES)

    def forward(self, sound: Tensor) -> Any:
        """Return logits, [frames, samples, classes]."""
        hidden = torch.tanh(self.body(sound))
        if self.kind == "convolution":
            return self.head(hidden.mT).permute(2, 0, 1)
        return self.head(hidden.transpose(0, 1)) if self.kind == "frames first" else self.head(hidden).transpose(0, 1)


def spoken() -> tuple[Tensor, ...]:
    """Return sound, targets, and the lengths of both; the last sample is too short for its targets."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(1, CLASSES, (SAMPLES, LONGEST), generator=generator)
    lengths = torch.tensor([9, 8, 9, 7, 2]), torch.tensor([3, 1, 2, 0, 3])
    return torch.randn(SAMPLES, FRAMES, 3, generator=generator), targets, *lengths


CTC: dict[str, Callable[[Any, Any, Any, Any], Tensor]] = {
    "mean": lambda x, y, n, m: F.ctc_loss(x.log_softmax(-1), y, n, m, zero_infinity=True),
    "sum": lambda x, y, n, m: F.ctc_loss(F.log_softmax(x, dim=2), y, n, m, reduction="sum", zero_infinity=True),
    "a module": lambda x, y, n, m: nn.CTCLoss(blank=2, zero_infinity=True)(x.float().log_softmax(-1), y, n, m),
    "samples apart": lambda x, y, n, m: (
        F.ctc_loss((x / 2).log_softmax(-1), y, n, m, reduction="none", zero_infinity=True).square().sum()
    ),
    "infinite": lambda x, y, n, m: F.ctc_loss(x.log_softmax(-1)[:, :4], y[:4], n[:4], m[:4]),
    "some samples": lambda x, y, n, m: (
        F.ctc_loss(x.log_softmax(-1)[:, 1:4], y[1:4], n[1:4], m[1:4], reduction="none")[1:]
    ).sum(),
    "beside a metric": lambda x, y, n, m: (
        F.ctc_loss(x.log_softmax(-1), y, n, m, zero_infinity=True) * (x.argmax(-1) != 0).float().mean()
    ),
    "numbers for lengths": lambda x, y, n, m: F.ctc_loss(
        x.log_softmax(-1), y, n.tolist(), m.tolist(), zero_infinity=True
    ),
    "targets in turn": lambda x, y, n, m: F.ctc_loss(
        x.log_softmax(-1), torch.cat([t[:k] for t, k in zip(y, m, strict=True)]), n, m, zero_infinity=True
    ),
}


@pytest.mark.parametrize("name", CTC)
@pytest.mark.parametrize("kind", ["samples first", "frames first", "convolution"])
def test_samples_are_computed_in_chunks(name: str, kind: str) -> None:
    model, (sound, targets, frames, letters) = Listener(kind), spoken()

    def loss() -> Tensor:
        return CTC[name](model(sound), targets, frames, letters)

    expected, gradients, _ = outcome(model, loss, None)
    for rows, samples in ((1, 1), (2 * FRAMES + 1, 2), (1000, SAMPLES)):
        found, chunked, most = outcome(model, loss, rows)
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert relative(found, expected) < 1e-5 and relative(chunked, gradients) < 1e-5
        assert most <= samples * FRAMES or (name == "beside a metric" and most <= max(rows, FRAMES))


class Transducer(nn.Module):
    def __init__(self, features: int = FEATURES, classes: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.predictor = nn.Linear(3, features), nn.Embedding(classes, features)
        self.head = nn.Linear(features, classes)

    def forward(self, sound: Tensor, letters: Tensor) -> Any:
        """Return logits, [samples, frames, 1 + letters, classes]."""
        of_frames, of_letters = self.encoder(sound), self.predictor(F.pad(letters, (1, 0)))
        return self.head(torch.tanh(of_frames[:, :, None] + of_letters[:, None]))


def transducer_loss(x: Any, y: Tensor, frames: Tensor, letters: Tensor) -> Tensor:
    """Return the mean negative log-likelihood (A. Graves (2012), Sequence Transduction with RNNs, equation 16)."""
    logs = x.log_softmax(-1)
    blank = logs[..., 0]
    label = logs[:, :, :-1].gather(-1, y[:, None, :, None].expand(-1, x.size(1), -1, -1)).squeeze(-1)
    rows: list[Tensor] = []
    for t in range(x.size(1)):
        forward = [rows[-1][:, 0] + blank[:, t - 1, 0] if t else torch.zeros_like(blank[:, 0, 0])]
        for u in range(1, x.size(2)):
            emitted = forward[-1] + label[:, t, u - 1]
            forward.append(torch.logaddexp(rows[-1][:, u] + blank[:, t - 1, u], emitted) if t else emitted)
        rows.append(torch.stack(forward, 1))
    samples = torch.arange(x.size(0))
    at_end = torch.stack(rows, 1)[samples, frames - 1, letters] + blank[samples, frames - 1, letters]
    return -at_end.mean()


@pytest.mark.parametrize("rows", [1, 50, 10_000])
def test_joints_of_transducers_are_computed_in_chunks(rows: int) -> None:
    model, (sound, targets, frames, letters) = Transducer(), spoken()

    def loss() -> Tensor:
        return transducer_loss(model(sound, targets), targets, frames, letters)

    expected, gradients, _ = outcome(model, loss, None)
    found, chunked, most = outcome(model, loss, rows)
    assert relative(found, expected) < 1e-5 and relative(chunked, gradients) < 1e-5
    assert most <= rows


class UNet(nn.Module):
    def __init__(self, classes: int = 150) -> None:
        super().__init__()

        def block(channels: int, out: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.ReLU())

        self.down, self.bottom, self.up = block(3, 8), block(8, 16), block(24, 16)
        self.head = nn.Conv2d(16, classes, 1)

    def forward(self, images: Tensor) -> Any:
        wide = self.down(images)
        narrow = F.interpolate(self.bottom(F.max_pool2d(wide, 2)), scale_factor=2.0)
        return self.head(self.up(torch.cat([wide, narrow], 1)))


def segmentation(loss: Loss = F.cross_entropy, layout: torch.memory_format = torch.contiguous_format) -> Workload:
    torch.manual_seed(0)
    model = UNet().to(memory_format=layout)  # type: ignore[call-overload]
    batch = {"x": torch.randn(2, 3, 48, 48).to(memory_format=layout), "y": torch.randint(150, (2, 48, 48))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, batch, lambda model, batch: loss(model(batch["x"]), batch["y"]), optimizer)


class SpeechEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(8, 32, 3, stride=2, padding=1), nn.BatchNorm1d(32))
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 5000)

    def forward(self, sound: Tensor) -> Any:
        return self.head(self.layer(F.gelu(self.front(sound)).mT))


def speech(*, in_turn: bool = False) -> Workload:
    torch.manual_seed(0)
    model, letters = SpeechEncoder(), torch.tensor([9, 5, 7, 2, 8, 8])
    batch = {
        "sound": torch.randn(6, 8, 80),
        "y": torch.randint(1, 5000, (6, 10)),
        "frames": 40 - torch.arange(6),
        "letters": letters,
    }

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logs, y = model(batch["sound"]).log_softmax(-1).transpose(0, 1), batch["y"]
        y = y[torch.arange(10) < batch["letters"][:, None]] if in_turn else y
        return F.ctc_loss(logs, y, batch["frames"], batch["letters"], zero_infinity=True)

    return Workload(model, batch, loss, torch.optim.SGD(model.parameters(), lr=0.1))


def transduction() -> Workload:
    model = Transducer(16, 1024)
    sound, targets, frames, letters = spoken()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return transducer_loss(model(batch["sound"], batch["y"]), batch["y"], batch["frames"], batch["letters"])

    batch = {"sound": sound, "y": targets, "frames": frames, "letters": letters}
    return Workload(model, batch, loss, torch.optim.SGD(model.parameters(), lr=0.1))


WORKLOADS: dict[str, tuple[Callable[[], Workload], int, int]] = {  # with bytes of fp32 logits, and rows
    "segmentation": (segmentation, 2 * 48 * 48 * 150 * 4, 200),
    "channels last": (lambda: segmentation(layout=torch.channels_last), 2 * 48 * 48 * 150 * 4, 200),
    "weighted": (lambda: segmentation(lambda x, y: F.cross_entropy(x, y, torch.ones(150))), 2 * 48 * 48 * 150 * 4, 500),
    "flat": (
        lambda: segmentation(lambda x, y: F.cross_entropy(x.permute(0, 2, 3, 1).reshape(-1, 150), y.view(-1))),
        *(2 * 48 * 48 * 150 * 4, 200),
    ),
    "speech": (speech, 6 * 40 * 5000 * 4, 40),
    "speech, two samples": (speech, 6 * 40 * 5000 * 4, 80),
    "speech, in turn": (lambda: speech(in_turn=True), 6 * 40 * 5000 * 4, 40),
    "transducer": (transduction, 5 * 9 * 4 * 1024 * 4, 16),
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_peaks_are_predicted_and_fall_by_the_logits(name: str, precision: Any) -> None:
    workload, logits_bytes, rows = WORKLOADS[name]
    plain = Levers(precision=precision, microbatch_size=len(next(iter(workload().batch.values()))))
    (predicted, measured), (lean_predicted, lean_measured) = (
        peaks(workload(), replace(plain, chunked_loss=lever)) for lever in (None, ChunkedLoss(head="head", rows=rows))
    )
    assert (predicted, lean_predicted) == (measured, lean_measured)
    assert measured - lean_measured > logits_bytes


def one_image(loss: Loss = F.cross_entropy) -> Workload:
    workload = segmentation(loss)
    return dataclasses.replace(workload, batch={name: tensor[:1] for name, tensor in workload.batch.items()})


@pytest.mark.parametrize(
    ("make", "share"),
    [
        pytest.param(one_image, 0.6, id="segmentation"),
        pytest.param(speech, 0.5, marks=pytest.mark.ci, id="speech"),
    ],
)
def test_plans_take_it(make: Callable[[], Workload], share: float) -> None:
    budget = int(share * memfit.estimate(make()).peak_bytes)
    plan = memfit.plan(make(), budget=budget, precisions=["32-true"], points=1)
    assert plan.levers.chunked_loss == ChunkedLoss(head="head", rows=128)
    assert plan.classes["chunked loss"] == "reordered"
    verification = memfit.verify(plan, make(), steps=0)
    assert verification.failures == [] and verification.gradient_difference < 1e-5


def resized(x: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(F.interpolate(x, scale_factor=0.5), y[:, ::2, ::2])


def dice(x: Any, y: Tensor) -> Tensor:
    p, t = x.softmax(1), F.one_hot(y, 150).movedim(-1, 1)
    return 1 - (2 * (p * t).sum((0, 2, 3)) / (p + t).sum((0, 2, 3))).mean()


@pytest.mark.parametrize("loss", [resized, dice])
def test_a_loss_of_several_pixels_is_left_whole_and_named(loss: Loss) -> None:
    plan = memfit.plan(one_image(loss), budget="1GiB", precisions=["32-true"], points=1)
    assert {candidate.levers.chunked_loss for candidate in plan.frontier} == {None}
    assert any("head that are not one token's or pixel's by itself" in note for note in plan.notes)


CONVOLUTIONS: dict[str, nn.Module] = {
    "kernel": nn.Conv2d(FEATURES, CLASSES, 3, padding=1),
    "one of its sides": nn.Conv2d(FEATURES, CLASSES, (1, 3), padding="same"),
    "stride": nn.Conv2d(FEATURES, CLASSES, 1, stride=2),
    "padding": nn.Conv1d(FEATURES, CLASSES, 1, padding=1),
    "groups": nn.Conv3d(CLASSES, CLASSES, 1, groups=CLASSES),
    "transposed": nn.ConvTranspose2d(FEATURES, CLASSES, 1),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_several_positions_are_refused(name: str) -> None:
    model = nn.ModuleDict({"head": CONVOLUTIONS[name]})
    levers = Levers(microbatch_size=1, chunked_loss=ChunkedLoss(head="head", rows=4))
    with pytest.raises(PlanError, match="convolution over single positions"), switched(model, levers):
        pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_rounds_no_more(dtype: torch.dtype) -> None:
    model, images = Segmenter(2), torch.randn(2, 3, 12, 16)
    targets = torch.randint(CLASSES, (2, 12, 16))

    def loss(weight: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            return F.cross_entropy(model(images), targets, weight)

    for weight in (None, WEIGHT):
        _, exact, _ = outcome(model, lambda weight=weight: loss(weight, None), None)
        expected, gradients, _ = outcome(model, lambda weight=weight: loss(weight, dtype), None)
        found, chunked, _ = outcome(model, lambda weight=weight: loss(weight, dtype), 50)
        assert found.dtype == expected.dtype and relative(found, expected) < 1e-3
        assert relative(chunked, exact) < 1.5 * relative(gradients, exact)


def test_numbers_lie_as_the_convolution_lays_them() -> None:
    for shape in ((2, 3, 12, 16), (2, 3, 4, 5), (3, 12, 16)):
        for layout in (torch.contiguous_format, torch.channels_last)[: len(shape) - 2]:
            model, images = Segmenter(2), torch.randn(shape).to(memory_format=layout)
            expected = model(images)
            with switched(model, Levers(microbatch_size=1, chunked_loss=ChunkedLoss(head="head", rows=4))):
                found = model(images).value()
            assert found.stride() == expected.stride()
            torch.testing.assert_close(found, expected)
