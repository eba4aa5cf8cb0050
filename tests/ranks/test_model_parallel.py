"""Tensor, context and pipeline parallelism on paper, against steps that hold what a rank of them holds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import memfit
from memfit.errors import UsageError
from memfit.hardware import allocated
from memfit.ir import Trace, simulate
from memfit.ranks import Parallel, read_parallel, stages_of
from memfit.workload import Workload
from tests.models import COSTS, Transformer, captured, cross_entropy, plain_trace, transformer
from tests.processes import on_two_ranks

TENSOR_ERROR = 0.001
PIPELINE_ERROR = 0.03


def peak(trace: Trace) -> int:
    return simulate(trace, COSTS).peak_bytes


def stages(trace: Trace, **parallel: int) -> list[int]:
    return [peak(stage) for stage in stages_of(trace, Parallel(**parallel))]


def squares(model: nn.Module, x: torch.Tensor) -> Workload:
    return Workload(model, x, lambda model, x: model(x).square().mean(), torch.optim.SGD(model.parameters()))


# Nothing shared


def test_one_rank_of_each_is_the_plain_estimate_to_the_byte() -> None:
    given = transformer()
    plain = replace(memfit.estimate(given), device_bytes=0)  # of the machine's memory, what is free
    assert replace(memfit.estimate(given, parallel="tp=1,cp=1,pp=1"), device_bytes=0) == plain
    trace = plain_trace("transformer")
    assert stages_of(trace, Parallel()) == [trace]


# Tensor parallelism


class Shard(nn.Module):
    """One rank's part of a transformer's block: the columns of its first layers, the rows of its last ones."""

    def __init__(self, dim: int, heads: int, ranks: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.part = heads // ranks, dim // ranks
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * self.part), nn.Linear(self.part, dim)
        hidden = 4 * self.part
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim), nn.Dropout(dropout))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        head = self.part // self.heads
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, head).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / head**0.5).softmax(-1)
        x = x + self.drop(self.out((weights @ v).transpose(1, 2).reshape(b, t, self.part)))
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.ci)])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.ci)])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.ci)])
def test_tensor_parallelism_holds_what_one_ranks_module_holds(precision: Any, ranks: int, size: int) -> None:
    dim, heads, layers = 64, 4, 2
    whole = transformer(batch=4, tokens=20, dim=dim, layers=layers)
    model = Transformer(40, dim, layers, 0.1, False)
    model.blocks = nn.ModuleList(Shard(dim, heads, ranks, 0.1) for _ in range(layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    part = Workload(model, whole.batch, cross_entropy, optimizer, max_grad_norm=1.0)
    of_rank = peak(captured(part, precision=precision, microbatch_size=size))
    trace = captured(whole, precision=precision, microbatch_size=size)
    (found,) = stages(trace, tp=ranks)
    assert found == pytest.approx(of_rank, rel=TENSOR_ERROR) and found < 0.8 * peak(trace)


class Gated(nn.Module):
    """A block whose layers before the last are called around an activation function, with fused attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, 3 * dim, bias=False)
        self.down, self.norm = nn.Linear(3 * dim, dim, bias=False), nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def gated(tokens: int = 16) -> Workload:
    model = nn.Sequential(*(Gated(32) for _ in range(2)))
    return squares(model, torch.randn(2, tokens, 32))


def test_layers_around_attention_and_gates_are_found() -> None:
    (stage,) = stages_of(captured(gated()), Parallel(tp=2))
    assert "columns of 0.gate, 0.k, 0.q, 0.up, 0.v, 1.gate" in stage.notes[-1]
    assert "rows of 0.down, 0.o, 1.down, 1.o" in stage.notes[-1]
    assert sum(op.name == "memfit.sum" for op in stage.ops) == 2 * 2 * 2
    shapes = {p.fqn: p.shape for p in stage.parameters}
    assert shapes["0.q.weight"] == (16, 32) and shapes["0.norm.weight"] == (32,)
    assert stage.notes[-1].startswith("prediction only, not applied or measured")


# Context parallelism


class Tokenwise(nn.Sequential):
    """A block that treats each token alike."""

    def __init__(self, dim: int) -> None:
        super().__init__(nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallelism_holds_what_fewer_tokens_hold(ranks: int) -> None:
    def given(tokens: int) -> Workload:
        model = nn.Sequential(*(Tokenwise(24) for _ in range(3)))
        return squares(model, torch.randn(2, tokens, 24))

    (found,) = stages(captured(given(64)), cp=ranks)
    assert found == peak(captured(given(64 // ranks)))


def test_context_parallelism_receives_the_next_keys_and_values() -> None:
    (whole, half), received = (captured(gated(tokens)) for tokens in (64, 32)), 4 * 2 * 32 * 32 * 4
    (stage,) = stages_of(whole, Parallel(cp=2))
    assert sum(op.name == "memfit.ring" for op in stage.ops) == 2 * 2  # a block's attention, forward and backward
    assert 0 <= peak(stage) - peak(half) <= received


# Pipeline parallelism


def pipelined(blocks: int = 4) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Tokenwise(32) for _ in range(blocks)))
    return model, torch.randn(16, 32, 32)


def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def run_stage(rank: int, microbatches: int) -> Iterator[tuple[int, list[float]]]:
    """Yield the peak of a rank's stage under PyTorch's own 1F1B schedule, and the losses of the last stage."""
    model, x = pipelined()
    half = model[2 * rank : 2 * rank + 2]
    optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss)
    peaks, losses = [], []
    for _ in range(4):
        gc.collect()
        with allocated() as meter:
            of_step: list[torch.Tensor] = []
            given: dict[str, Any] = {"target": x, "losses": of_step} if rank else {}
            schedule.step(*([] if rank else [x]), return_outputs=False, **given)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(torch.stack(of_step).detach().mean()) if rank else 0.0)
        peaks.append(meter.peak_bytes)
    received = x.nbytes  # buffers for all microbatches, which are there from the first step on
    held = sum(p.nbytes for p in half.parameters()) + x.nbytes + received
    yield min(peaks[1:]) + held, losses


@pytest.mark.ci
@pytest.mark.parametrize("microbatches", [4, 8])
def test_stages_hold_what_those_of_pytorchs_1f1b_hold(microbatches: int) -> None:
    model, x = pipelined()
    given = Workload(
        model, {"x": x}, lambda model, batch: loss(model(batch["x"]), batch["x"]), torch.optim.SGD(model.parameters())
    )
    predicted = stages(captured(given, microbatch_size=16 // microbatches), pp=2)
    measured = [rank[0][0] for rank in on_two_ranks(run_stage, microbatches)]
    assert predicted == pytest.approx(measured, rel=PIPELINE_ERROR)
    assert predicted[0] > predicted[1]  # the first has two microbatches in flight


def test_more_stages_hold_fewer_blocks_each_and_as_many_microbatches_as_are_in_flight() -> None:
    trace = captured(transformer(batch=8, layers=4), microbatch_size=1)
    two, four = stages(trace, pp=2), stages(trace, pp=4)
    assert four == sorted(four, reverse=True) and max(four) < max(two) < peak(trace) + max(two) / 2


def test_a_bubble_lengthens_a_step() -> None:
    given = transformer(batch=8, layers=4)
    few, many = (memfit.estimate(given, parallel="pp=4", microbatch_size=size) for size in (8, 1))
    assert few.phase_seconds["backward"] > 2 * many.phase_seconds["backward"] / 8
    assert any("the bubble adds 300% to the step" in note for note in few.notes)
    assert any("the bubble adds 38% to the step" in note for note in many.notes)
    assert any(note.startswith("stage 0 of 0 to 3 has the largest peak") for note in many.notes)


@pytest.mark.ci
def test_they_combine() -> None:
    given = transformer(batch=4, tokens=32, layers=4)
    both = memfit.estimate(given, parallel="tp=2,cp=2,pp=2", microbatch_size=2)
    assert all(
        both.peak_bytes < memfit.estimate(given, parallel=one, microbatch_size=2).peak_bytes
        for one in ("tp=2", "cp=2", "pp=2")
    )
    assert sum(" of 2 ranks" in note or " of 2 stages" in note for note in both.notes) >= 3


# What can't be


@pytest.mark.parametrize("text", ["tp", "tp=0", "tp=2,tp=2", "dp=2", "tp=x", ""])
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="give some of tp=N"):
        read_parallel(text)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ("pp=3", "has 2 repeated blocks, fewer than stages. Give pp of at most 2"),
        ("tp=3", "blocks.0.mlp.0.out_features=128 is not a multiple of 3"),
    ],
)
def test_what_does_not_divide_is_refused(parallel: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        memfit.estimate(transformer(), parallel=parallel)


def test_models_without_layers_to_cut_and_copies_are_refused() -> None:
    given = squares(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(UsageError, match="no repeated blocks with linear layers"):
        memfit.estimate(given, parallel="tp=2")
    with pytest.raises(UsageError, match="parallel='tp=2' and world_size=2"):
        memfit.estimate(given, parallel="tp=2", world_size=2)
