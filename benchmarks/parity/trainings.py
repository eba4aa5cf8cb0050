"""The trainings: small enough for hundreds of runs on one core, on real data that packages ship."""

from __future__ import annotations

import dataclasses
import pydoc_data.topics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

import memfit
from benchmarks.parity.text import text_classifier
from examples import digits_resnet
from memfit import Workload
from memfit.recipes import SeededBatches, brain_segmentation, byte_lm, even_windows, random_windows, video


@dataclass(frozen=True)
class Training:
    """A training, and what difference in its result would matter.

    Attributes:
        make: `make(seed)` returns the workload; initial weights, batches and their order are the seed's.
        steps: Optimizer updates.
        metric: What counts, of those that the workload evaluates on held-out data.
        better: Whether "more" or "less" of it is better.
        chance: What it is without learning.
        margin: A difference of means that would not matter, said before the runs under levers.
        rationale: Why that.
    """

    what: str
    make: Callable[[int], Workload]
    steps: int
    metric: str
    better: str
    chance: float
    margin: float
    rationale: str

    def workload(self, seed: int) -> Workload:
        """Return the workload with its schedule: the learning rate falls to a tenth, in a straight line."""
        made = self.make(seed)
        return dataclasses.replace(made, scheduler=LinearLR(made.optimizer, 1.0, 0.1, total_iters=self.steps))

    @property
    def sign(self) -> int:
        """1 where more is better, -1 where less is."""
        return 1 if self.better == "more" else -1


def language_model(seed: int, **sizes: Any) -> Workload:
    """Return a byte-level Transformer on the standard library's source."""
    sizes = {"n_layer": 2, "d_model": 64, "n_head": 4, "context": 64, "batch_size": 16, **sizes}
    return byte_lm(**sizes, dropout=0.0, learning_rate=3e-3, n_validation_windows=256, seed=seed)


def fine_tuning(seed: int) -> Workload:
    """Return the language model after its training, which goes on with English prose at a small learning rate."""
    made = language_model(seed)
    made.model.load_state_dict(_trained(seed))
    for group in made.optimizer.param_groups:
        group["lr"] = 1e-4
    text, context = _prose(), made.batch["tokens"].shape[1]
    training, held_out = text[: len(text) * 4 // 5], text[len(text) * 4 // 5 :]
    batches = SeededBatches(partial(random_windows, training, 16, context), 1000, seed)
    evaluate = partial(made.evaluate.func, windows=even_windows(held_out, 256, context), batch_size=16)  # type: ignore[union-attr]
    return dataclasses.replace(
        made, name="fine_tuning", batches=batches, batch=batches.make(epoch=0, index=0), evaluate=evaluate
    )


@lru_cache(maxsize=1)
def _trained(seed: int) -> dict[str, Tensor]:
    training = TRAININGS["byte_lm"]
    workload = training.workload(seed)
    step, batches = memfit.Step(workload), endless(workload)
    for _ in range(training.steps):
        step(next(batches))
    return workload.model.state_dict()


@lru_cache(maxsize=1)
def _prose() -> Tensor:
    """Return Python's reference as its `help()` has it, uint8 [n_bytes]."""
    topics = "".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    return torch.frombuffer(bytearray(topics.encode()), dtype=torch.uint8)


def digits(seed: int, size: int = 8, batch_size: int = 128) -> Workload:
    """Return the digits ResNet of the examples with AdamW, which levers about AdamW need."""
    torch.manual_seed(seed)
    model = digits_resnet.resnet()
    images, labels = digits_resnet.digits(size)
    held_out, n = digits_resnet.N_HELD_OUT, 128
    train = TensorDataset(images[held_out:], labels[held_out:])
    shuffle = torch.Generator().manual_seed(seed)

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        predicted = torch.cat([model(part).argmax(1) for part in images[:held_out].split(n)])
        return {"accuracy": (predicted == labels[:held_out]).float().mean().item()}

    return Workload(
        model=model,
        batch=list(train[:batch_size]),
        loss_fn=digits_resnet.loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        name="digits_resnet",
        batches=DataLoader(train, batch_size, shuffle=True, drop_last=True, generator=shuffle),
        evaluate=evaluate,
    )


def brain(seed: int, **sizes: Any) -> Workload:
    """Return MONAI's 3-D UNet on the ICBM152 template at 4 mm."""
    sizes = {"patch": (16, 16, 16), "channels": (8, 16, 32), "batch_size": 4, **sizes}
    return brain_segmentation(**sizes, n_residual_units=1, resolution=4, learning_rate=5e-3, seed=seed)


def clips(seed: int, **sizes: Any) -> Workload:
    """Return the classifier of clips that move through a brain."""
    sizes = {"frames": 6, "size": 16, "channels": (8, 16, 32), "batch_size": 16, "speed": 2, **sizes}
    return video(**sizes, n_validation_clips=960, seed=seed)


TRAININGS = {
    "byte_lm": Training(
        "next byte of Python source, Transformer",
        language_model,
        steps=160,
        metric="bits_per_byte",
        better="less",
        chance=8.0,
        margin=0.05,
        rationale="about what the last tenth of the steps gains at a constant rate",
    ),
    "fine_tuning": Training(
        "the trained byte_lm goes on with English prose, at a small learning rate",
        fine_tuning,
        steps=120,
        metric="bits_per_byte",
        better="less",
        chance=8.0,
        margin=0.05,
        rationale="as byte_lm",
    ),
    "text_classifier": Training(
        "package that a text comes from, convolutions over bytes",
        lambda seed: text_classifier(seed=seed),
        steps=160,
        metric="accuracy",
        better="more",
        chance=0.125,
        margin=0.03,
        rationale="about twice the standard error of the 1,024 held-out texts",
    ),
    "digits_resnet": Training(
        "handwritten digit, residual network with BatchNorm",
        digits,
        steps=66,
        metric="accuracy",
        better="more",
        chance=0.1,
        margin=0.015,
        rationale="5 of the 360 held-out images",
    ),
    "brain_segmentation": Training(
        "grey and white matter, 3-D UNet",
        brain,
        steps=200,
        metric="dice/mean",
        better="more",
        chance=0.0,
        margin=0.02,
        rationale="a difference that two people who draw the same outlines easily have",
    ),
    "video": Training(
        "motion of a clip, convolutions over space and time",
        clips,
        steps=240,
        metric="accuracy",
        better="more",
        chance=1 / 6,
        margin=0.03,
        rationale="about twice the standard error of the 960 held-out clips",
    ),
}


def endless(workload: Workload) -> Iterator[Any]:
    """Yield the workload's batches, over and over."""
    while True:
        yield from workload.batches or [workload.batch]
