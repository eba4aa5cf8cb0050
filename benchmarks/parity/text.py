"""A classifier of text: which package of the standard library do some lines come from?"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit import Workload
from memfit.errors import WorkloadError
from memfit.recipes import SeededBatches, source_files

PACKAGES = ("asyncio", "email", "idlelib", "importlib", "multiprocessing", "tkinter", "unittest", "xml")
"""The classes. Of each, every fourth file is held out."""

N_HELD_OUT = 1024
_PARTS = 128


class TextClassifier(nn.Module):
    """Convolutions over bytes, and the class of the strongest of each feature.

    Source: Kim 2014, *Convolutional Neural Networks for Sentence Classification*; here over bytes.
    """

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.words = nn.Conv1d(32, width, 6, stride=2)
        self.act = nn.GELU()
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, len(PACKAGES))

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the classes, [batch, 8], for int64 bytes [batch, length]."""
        found = self.act(self.words(self.embed(text).transpose(1, 2))).amax(2)
        logits: Tensor = self.head(self.dropout(self.norm(found)))
        return logits


def text_classifier(
    *, length: int = 256, width: int = 128, batch_size: int = 32, learning_rate: float = 4e-3, seed: int
) -> Workload:
    """Return the training step of the classifier; texts of a file begin anywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = TextClassifier(width)
    batches = SeededBatches(partial(random_texts, sources("training"), batch_size, length), 1000, seed)
    held_out = random_texts(sources("validation"), N_HELD_OUT, length, torch.Generator().manual_seed(0))
    return Workload(
        model=model,
        batch=batches.make(epoch=0, index=0),
        loss_fn=loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=learning_rate),
        name="text_classifier",
        batches=batches,
        evaluate=partial(accuracy, texts=held_out),
        max_grad_norm=1.0,
    )


@lru_cache(maxsize=2)
def sources(split: Literal["training", "validation"]) -> tuple[Tensor, ...]:
    """Return the source of each package, uint8 [n_bytes].

    Raises:
        WorkloadError: This Python lacks one of the packages, as Debian's lacks `idlelib` and `tkinter`.
    """
    every = sorted([*source_files("training"), *source_files("validation")])
    files = {package: [path for path in every if package in path.parts] for package in PACKAGES}
    if missing := [package for package in PACKAGES if not files[package]]:
        raise WorkloadError(
            f"no source files of {', '.join(missing)} in {sysconfig.get_paths()['stdlib']}: use a Python with all of"
            " its standard library (make PYTHON=...)"
        )
    texts = []
    for paths in files.values():
        chosen = [path for index, path in enumerate(paths) if (index % 4 == 3) == (split == "validation")]
        texts.append(torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in chosen)), dtype=torch.uint8))
    return tuple(texts)


def random_texts(
    texts: tuple[Tensor, ...], batch_size: int, length: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return texts, int64 [batch, length], of packages that are drawn at random, and their classes."""
    classes = torch.randint(len(texts), (batch_size,), generator=generator)
    places = torch.rand(batch_size, generator=generator)
    starts = [int(place * (len(texts[c]) - length)) for c, place in zip(classes, places.tolist(), strict=True)]
    cut = [texts[c][start : start + length].long() for c, start in zip(classes, starts, strict=True)]
    return {"text": torch.stack(cut), "package": classes}


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross entropy over the texts, in nats."""
    return F.cross_entropy(model(batch["text"]), batch["package"])


def accuracy(model: nn.Module, *, texts: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the share of texts that a model gives the right class."""
    logits = torch.cat([model(part) for part in texts["text"].split(_PARTS)])
    return {"accuracy": (logits.argmax(1) == texts["package"]).float().mean().item()}
