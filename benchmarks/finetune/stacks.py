"""The hand-made stacks: which of the peers' parts are put on a step together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.finetune import peers
from benchmarks.finetune.models import decoder_of
from memfit import Workload

TILE_TOKENS = 256
"""Tokens of a tile; a sixty-fourth of the sequence where that is more."""


@dataclass(frozen=True)
class Stack:
    """Parts put on a step by hand.

    Attributes:
        name: In tables.
        checkpoints: Whether each layer is checkpointed.
        chunked: Whether the loss is `ChunkedCrossEntropy`.
        tiles: "function" for `TokenTiles` and `Rotation`, "cat" for the MLP over tiles that are concatenated.
        in_hooks: Whether parameters are updated in the backward pass.
        in_host: Whether inputs of checkpoints wait in the host's memory.
    """

    name: str
    checkpoints: bool = True
    chunked: bool = True
    tiles: str = ""
    in_hooks: bool = False
    in_host: bool = False


PLAIN = Stack("plain", checkpoints=False, chunked=False)
CHECKPOINTS = Stack("transformers' checkpoints", chunked=False)
LIGER = Stack("checkpoints, Liger's loss")
TRL = Stack("checkpoints, Liger's loss, MLP tiles by cat", tiles="cat")
UNSLOTH = Stack("Unsloth-like: checkpoints' inputs in the host, chunked loss", in_host=True)
ALST = Stack("ALST-like: checkpoints, Liger's loss, token tiles", tiles="function")
ALST_HOOKS = replace(ALST, name=f"{ALST.name}, AdamW in hooks", in_hooks=True)
ALST_HOST = replace(ALST_HOOKS, name=f"{ALST_HOOKS.name}, inputs in the host", in_host=True)

STACKS = (PLAIN, CHECKPOINTS, LIGER, TRL, UNSLOTH, ALST, ALST_HOOKS, ALST_HOST)


class HandStep:
    """A training step by hand, in the form that memfit measures."""

    held_bytes = 0

    def __init__(self, stack: Stack, workload: Workload) -> None:
        self.stack, self.workload = stack, workload
        self.on_phase = None
        width = decoder_of(workload.model)[0].config.hidden_size
        self._saved_shape = (*workload.batch["tokens"].shape, width)

    def __call__(self, batch: dict[str, Tensor]) -> float:
        """Run a step and return its loss."""
        loss = self.forward(batch)
        loss.backward()
        if not self.stack.in_hooks:
            self.workload.optimizer.step()
        self.workload.optimizer.zero_grad()
        return loss.item()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss with its graph."""
        in_host = peers.in_the_host(self._saved_shape) if self.stack.in_host else contextlib.nullcontext()
        with in_host:
            loss = self.workload.loss_fn(self.workload.model, batch)
        assert isinstance(loss, Tensor)
        return loss


@contextlib.contextmanager
def stacked(stack: Stack, workload: Workload) -> Iterator[HandStep]:
    """Put a stack on a workload's model, and take it off again."""
    model: Any = workload.model
    tokens = workload.batch["tokens"].shape[1]
    rows = max(TILE_TOKENS, tokens // 64)
    tiles: dict[str, Callable[[Any, int], contextlib.AbstractContextManager[None]]]
    tiles = {"function": peers.tiled, "cat": peers.concatenated}
    with contextlib.ExitStack() as parts:
        if stack.checkpoints:
            parts.enter_context(peers.checkpointed(model))
        if stack.tiles:
            parts.enter_context(tiles[stack.tiles](model, rows))
        if stack.tiles == "function":
            parts.enter_context(peers.rotations())
        if stack.in_hooks:
            assert isinstance(workload.optimizer, torch.optim.AdamW)
            parts.enter_context(peers.updating_in_hooks(workload.optimizer))
        yield HandStep(stack, replace(workload, loss_fn=peers.chunked_loss) if stack.chunked else workload)
