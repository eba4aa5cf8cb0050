"""A decoder-only Transformer that learns Python source code, byte by byte.

The data is the source of the running Python's standard library, so it needs no download and differs
from one Python version to another.
"""

from __future__ import annotations

import contextlib
import math
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.errors import UsageError, WorkloadError
from memfit.workload import Loss, Workload

N_BYTES = 256
"""Size of the vocabulary."""

Split = Literal["training", "validation"]

# `encodings` is left out too: its code pages are near copies of one another, so that a split by file
# would put nearly the same text in both parts.
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}


def byte_lm(
    *,
    n_layer: int = 6,
    d_model: int = 256,
    n_head: int = 8,
    context: int = 256,
    batch_size: int = 8,
    vocabulary_size: int = N_BYTES,
    dropout: float = 0.1,
    tied_embedding: bool = True,
    learning_rate: float = 3e-4,
    max_grad_norm: float | None = 1.0,
    batches_per_epoch: int = 500,
    n_validation_windows: int = 64,
    max_bytes: int | None = None,
    seed: int = 0,
) -> Workload:
    """Return the training step of a byte-level language model on the standard library's source.

    Args:
        n_layer: Number of blocks (> 0).
        d_model: Width of the residual stream (> 0, a multiple of `n_head`).
        n_head: Number of attention heads (> 0).
        context: Bytes in a window (> 0).
        batch_size: Windows in a batch (> 0).
        vocabulary_size: Size of the logits (>= 256); more than 256 imitates the logits of models with larger
            vocabularies.
        dropout: Probability of dropping an element, in [0, 1).
        tied_embedding: Whether the output layer shares the weight of the embedding.
        learning_rate: Learning rate of AdamW (> 0).
        max_grad_norm: Global gradient norm to clip to (> 0), or None not to clip.
        batches_per_epoch: Batches of random windows in an epoch (> 0).
        n_validation_windows: Windows that `evaluate` averages over (> 0).
        max_bytes: Bytes used of each part of the data, from its beginning; None uses all.
        seed: Seed of the initial weights and of the windows (>= 0). The global random state is left alone.

    Raises:
        WorkloadError: An argument is out of its range, or the data is shorter than one window.
    """
    check_positive(batch_size=batch_size, learning_rate=learning_rate, n_validation_windows=n_validation_windows)
    if max_grad_norm is not None:
        check_positive(max_grad_norm=max_grad_norm)
    options: dict[str, Any] = {"vocabulary_size": vocabulary_size, "dropout": dropout, "tied_embedding": tied_embedding}
    with seeded(seed):
        model = ByteLM(n_layer, d_model, n_head, context, **options)
    training, validation = (python_source(split, max_bytes) for split in ("training", "validation"))
    n_bytes = min(len(training), len(validation))
    if n_bytes <= context:
        raise WorkloadError(
            f"a window of context={context} bytes and the byte after it do not fit in {n_bytes} bytes of data "
            f"(max_bytes={max_bytes}): lower context or raise max_bytes"
        )
    batches = SeededBatches(partial(random_windows, training, batch_size, context), batches_per_epoch, seed)
    windows = even_windows(validation, n_validation_windows, context)
    evaluate = partial(_evaluate, windows=windows, batch_size=batch_size)
    return step_on(batches, model, loss_sum_and_count, learning_rate, "byte_lm", evaluate, max_grad_norm)


# The model


class ByteLM(nn.Module):
    """A decoder-only Transformer over bytes: pre-norm blocks, learned positions. Its arguments are those of `byte_lm`.

    Raises:
        WorkloadError: An argument is out of its range.
    """

    def __init__(
        self,
        n_layer: int,
        d_model: int,
        n_head: int,
        context: int,
        *,
        vocabulary_size: int = N_BYTES,
        dropout: float = 0.0,
        tied_embedding: bool = True,
    ) -> None:
        super().__init__()
        check_positive(n_layer=n_layer, d_model=d_model, n_head=n_head, context=context)
        check_probability(dropout=dropout)
        if d_model % n_head:
            raise WorkloadError(f"d_model={d_model} is not a multiple of n_head={n_head}: change d_model or n_head")
        if vocabulary_size < N_BYTES:
            raise WorkloadError(f"vocabulary_size={vocabulary_size} is below the {N_BYTES} bytes: give that or more")
        self.context = context
        self.embed = nn.Embedding(vocabulary_size, d_model)
        self.positions = nn.Embedding(context, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(d_model, n_head, dropout) for _ in range(n_layer))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocabulary_size, bias=False)
        # Drawn as GPT-2 does (Radford et al., Language Models are Unsupervised Multitask Learners, 2019).
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                residual_scale = 1 / math.sqrt(2 * n_layer) if name.endswith("proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * residual_scale)
        if tied_embedding:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte, [batch, time, vocabulary_size], for int64 tokens [batch, time].

        Raises:
            UsageError: The sequence is longer than `context`.
        """
        n_tokens = tokens.shape[1]
        if n_tokens > self.context:
            raise UsageError(f"a sequence of {n_tokens} bytes is longer than context={self.context}: raise context")
        x = self.embed(tokens) + self.positions(torch.arange(n_tokens, device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream after."""

    def __init__(self, d_model: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, n_head, dropout)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = MLP(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.mlp(self.norm2(x)))
        return x


class Attention(nn.Module):
    """Causal multi-head self-attention with one linear layer for queries, keys and values."""

    def __init__(self, d_model: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.n_head = n_head
        self.dropout = dropout
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        n_batch, n_tokens, d_model = x.shape
        qkv = self.qkv(x).view(n_batch, n_tokens, 3, self.n_head, d_model // self.n_head)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        mixed: Tensor = self.proj(heads.transpose(1, 2).reshape(n_batch, n_tokens, d_model))
        return mixed


class MLP(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.fc = nn.Linear(d_model, 4 * d_model)
        self.act = nn.GELU()
        self.proj = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(self.act(self.fc(x)))
        return y


def loss_sum_and_count(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the cross entropy summed over the tokens, in nats, and the number of tokens."""
    logits, targets = model(batch["tokens"]), batch["targets"]
    loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss_sum, targets.numel()


def _evaluate(model: nn.Module, *, windows: Mapping[str, Tensor], batch_size: int) -> dict[str, float]:
    """Return the mean validation loss in nats and in bits per byte."""
    device = next(model.parameters()).device
    loss_sum = 0.0
    for start in range(0, len(windows["tokens"]), batch_size):
        batch = {name: tensor[start : start + batch_size].to(device) for name, tensor in windows.items()}
        loss_sum += float(loss_sum_and_count(model, batch)[0])
    validation_loss = loss_sum / windows["targets"].numel()
    return {"validation_loss": validation_loss, "bits_per_byte": validation_loss / math.log(2)}


# The data


def source_files(split: Split) -> list[Path]:
    """Return the files of one part of the standard library's source, sorted by relative path.

    A file belongs to the validation part when the CRC-32 of its relative path is a multiple of 10.
    Tests, installed packages and the tables of `encodings` are in neither part.
    """
    root, paths = Path(sysconfig.get_paths()["stdlib"]), list[str]()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS]
        paths += [(Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    is_wanted = split == "validation"
    return [root / path for path in sorted(paths) if (zlib.crc32(path.encode()) % 10 == 0) == is_wanted]


@lru_cache(maxsize=4)
def python_source(split: Split, max_bytes: int | None = None) -> Tensor:
    """Return one part of the standard library's source as uint8 [n_bytes], read on first use.

    Args:
        max_bytes: Number of bytes of it, from its beginning (> 0); None returns all.

    Raises:
        WorkloadError: `max_bytes` is not positive, or this Python has no source files.
    """
    if max_bytes is not None:
        check_positive(max_bytes=max_bytes)
    data = bytearray()
    for path in source_files(split):
        data += path.read_bytes()
        if max_bytes is not None and len(data) >= max_bytes:
            del data[max_bytes:]
            break
    if not data:
        raise WorkloadError(
            f"no Python source files in {sysconfig.get_paths()['stdlib']}: use a full installation of Python"
        )
    return torch.frombuffer(data, dtype=torch.uint8)


def random_windows(source: Tensor, batch_size: int, context: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return windows at uniformly random places: tokens and, one byte on, targets.

    Args:
        source: uint8 [n_bytes], n_bytes > `context`.
    """
    starts = torch.randint(len(source) - context, (batch_size,), generator=generator)
    return _windows_at(source, starts, context)


def even_windows(source: Tensor, n_windows: int, context: int) -> dict[str, Tensor]:
    """Return windows at evenly spaced places, the same in each call; see `random_windows`."""
    starts = torch.arange(n_windows) * (len(source) - context) // n_windows
    return _windows_at(source, starts, context)


def _windows_at(source: Tensor, starts: Tensor, context: int) -> dict[str, Tensor]:
    windows = source[starts[:, None] + torch.arange(context + 1)].long()
    return {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


class SeededBatches:
    """Batches that are a function of (seed, epoch, index) only, with a position that can be saved.

    Iterating continues from the position: after a break, or after `load_state_dict`, the remaining
    batches of the epoch follow. When the epoch is complete, iterating again gives the next one.

    Args:
        make_batch: `make_batch(generator)` returns a batch; all its randomness is the generator's.
        batches_per_epoch: Number of batches in an epoch (> 0).
        seed: Seed of all batches (>= 0).

    Raises:
        WorkloadError: An argument is out of its range.
    """

    def __init__(
        self, make_batch: Callable[[torch.Generator], dict[str, Tensor]], batches_per_epoch: int, seed: int
    ) -> None:
        check_positive(batches_per_epoch=batches_per_epoch)
        self._make_batch = make_batch
        self._batches_per_epoch = batches_per_epoch
        self._seed = check_seed(seed)
        self._epoch = 0
        self._index = 0

    def __len__(self) -> int:
        return self._batches_per_epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if self._index == self._batches_per_epoch:
            self._epoch, self._index = self._epoch + 1, 0
        while self._index < self._batches_per_epoch:
            batch = self.make(epoch=self._epoch, index=self._index)
            self._index += 1
            yield batch

    def make(self, *, epoch: int, index: int) -> dict[str, Tensor]:
        """Return one batch, without moving the position."""
        (mixed_seed,) = np.random.SeedSequence([self._seed, epoch, index]).generate_state(1, np.uint64)
        return self._make_batch(torch.Generator().manual_seed(int(mixed_seed)))

    def state_dict(self) -> dict[str, int]:
        """Return the position: the epoch and the index of the batch that comes next."""
        return {"seed": self._seed, "epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position.

        Raises:
            UsageError: The position is one of other batches: another seed, or past the epoch's end.
        """
        if state["seed"] != self._seed:
            raise UsageError(
                f"the position was saved with seed={state['seed']}, and these batches have seed={self._seed}: give the"
                " saved seed"
            )
        if not 0 <= state["index"] <= self._batches_per_epoch:
            raise UsageError(
                f"the position, batch {state['index']} of its epoch, is not within"
                f" batches_per_epoch={self._batches_per_epoch}: give the saved batches_per_epoch"
            )
        self._epoch, self._index = int(state["epoch"]), int(state["index"])


# What the recipes share


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from a seed of the CPU inside this context.

    Raises:
        WorkloadError: The seed is negative.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(check_seed(seed))  # not those of accelerators, which nobody restores
        yield


def step_on(
    batches: SeededBatches,
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Loss],
    learning_rate: float,
    name: str,
    evaluate: Callable[[nn.Module], Mapping[str, float]],
    max_grad_norm: float | None = None,
) -> Workload:
    """Return a training step by AdamW, from the first of some batches on."""
    return Workload(
        model=model,
        batch=batches.make(epoch=0, index=0),
        loss_fn=loss_fn,
        optimizer=torch.optim.AdamW(model.parameters(), lr=learning_rate),
        name=name,
        batches=batches,
        evaluate=evaluate,
        max_grad_norm=max_grad_norm,
    )


def check_positive(**arguments: float) -> None:
    """Raise WorkloadError with the argument's name unless all are above zero."""
    for name, value in arguments.items():
        if not value > 0:
            raise WorkloadError(f"{name}={value} is not above 0")


def check_probability(**arguments: float) -> None:
    """Raise WorkloadError with the argument's name unless all are in [0, 1)."""
    for name, value in arguments.items():
        if not 0 <= value < 1:
            raise WorkloadError(f"{name}={value} is not in [0, 1)")


def check_seed(seed: int) -> int:
    """Return the seed, or raise WorkloadError if it is negative."""
    if seed < 0:
        raise WorkloadError(f"seed={seed} is negative: give 0 or more")
    return seed
