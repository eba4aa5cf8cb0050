"""Published peaks of fine-tuning on one card, beside predictions of the same steps, as nearly as sources state them.

The steps of LitGPT are rebuilt as for `benchmarks.published`, whose other rows of adapters stand in the same table.
What a source's own code does to the weights or the optimizer, memfit's lever does here: its quantiser, its updates.
Each row says in what it differs from what was measured. Every row has a process with fake CUDA tensors.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.common import Case
from benchmarks.processes import output_of
from benchmarks.published import lit
from benchmarks.published.building import causal_loss, dtype, fake, trained, with_lora
from benchmarks.published.language import LLAMA_3B, LLAMA_7B
from memfit import Workload, hardware
from memfit.hardware import find_device
from memfit.ir import Levers
from memfit.planner import capture_levers, costs_of, predict
from memfit.workload import samples_of

_SECONDS = 3600
_CHUNKS = 8  # of torchtune's `CEWithChunkedOutputLoss`
_ADAPTED = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_IN_BACKWARD = {"update": "in-backward"}
_EAGER = "compiled there; eager here, with fp32 logits made again"


class _Kept(torch.autograd.Function):
    """An input that is kept for the backward pass, which needs it for nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def litgpt(name: str, length: int) -> Workload:
    """Return LitGPT's LoRA as bitsandbytes 0.41.1 runs it, whose 4-bit product keeps its input (`MatMul4Bit`)."""
    made = lit.lora(name, 1, length)
    for module in made.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, given: (_Kept.apply(*given),))  # type: ignore[no-untyped-call]
    return made


def torchtune(config: Mapping[str, Any], batch: int, length: int, *, rank: int = 0, chunked: bool = True) -> Workload:
    """Return torchtune's recipe in bf16, without checkpoints, with logits made and upcast in chunks where `chunked`."""
    with dtype(torch.bfloat16):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).train()
    if rank:
        with_lora(model, _ADAPTED, rank, 0.0, torch.bfloat16)

    def of_chunk(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["tokens"]
        if not chunked:
            return causal_loss(model(input_ids=tokens).logits, tokens)
        hidden = model.model(input_ids=tokens)[0]
        targets = F.pad(tokens[:, 1:], (0, 1), value=-100).chunk(_CHUNKS, dim=1)
        logits = [model.lm_head(part) for part in hidden.chunk(_CHUNKS, dim=1)]
        sums = [checkpoint(of_chunk, *pair, use_reentrant=False) for pair in zip(logits, targets, strict=True)]
        return torch.stack(sums).sum() / (tokens.numel() - len(tokens))

    tokens = {"tokens": torch.empty(batch, length, dtype=torch.long)}
    return Workload(model, tokens, loss, torch.optim.AdamW(trained(model), fused=True))


def layers(config: Mapping[str, Any], *, offload: bool = False) -> dict[str, Any]:
    """Return checkpoints around all layers, whose inputs wait in the host where `offload`."""
    names = (f"model.layers.{index}" for index in range(config["num_hidden_layers"]))
    return {"regions": [{"modules": [name], "offload": offload} for name in names]}


@dataclass(frozen=True)
class Published:
    """A published peak of allocated bytes, and its step."""

    what: str
    nbytes: float
    make: Callable[[], Workload]
    differs: str  # from what was measured
    levers: Mapping[str, Any] = field(default_factory=dict)  # for what the source's own code does
    device: str = "a100-80gb"


_GB, _GIB = 1e9, 2**30
_TUNE = functools.partial(torchtune, LLAMA_3B, 2, 4096)
_AGAIN, _IN_HOST = layers(LLAMA_3B), layers(LLAMA_3B, offload=True)
ROWS = {
    **{
        f"LR-16/{name}": Published(
            f"LitGPT: {name}, LoRA r8 on queries and values, NF4 with double quantisation, 1 x {length}",
            gigabytes * _GB,
            functools.partial(litgpt, name, length),
            "its optimizer's states, of 0.01 GB, are paged",
            {"frozen_weights": {"quantizer": "nf4"}},
            "a100-40gb",
        )
        for name, length, gigabytes in (
            ("phi-1.5", 1044, 3.72),
            ("stablelm-3b", 1034, 6.19),
            ("llama-2-7b", 1304, 13.84),
        )
    },
    "TT-03/plain": Published(
        "torchtune: Llama-3.2-3B full, 2 x 4096",
        51.0 * _GIB,
        functools.partial(_TUNE, chunked=False),
        "compiled there, eager here",
    ),
    "TT-03/chunked": Published("the same, loss in chunks", 42.9 * _GIB, _TUNE, _EAGER),
    "TT-03/checkpoints": Published("the same, checkpoints", 24.9 * _GIB, _TUNE, _EAGER, _AGAIN),
    "TT-04/in-backward": Published(
        "the same, optimizer in the backward pass", 23.1 * _GIB, _TUNE, _EAGER, {**_AGAIN, **_IN_BACKWARD}
    ),
    "TT-04/8-bit": Published(
        "the same, layers' inputs in the host, 8-bit AdamW",
        17.6 * _GIB,
        _TUNE,
        _EAGER,
        {**_IN_HOST, **_IN_BACKWARD, "optimizer": "adamw-8bit"},
    ),
    "TT-05/LoRA": Published(
        "torchtune: Llama-3.2-3B LoRA r64 on all but keys, checkpoints with inputs in the host, 2 x 4096",
        8.5 * _GIB,
        functools.partial(_TUNE, rank=64),
        _EAGER,
        _IN_HOST,
    ),
    "TT-05/QLoRA": Published(
        "the same, NF4",
        4.6 * _GIB,
        functools.partial(_TUNE, rank=64),
        f"{_EAGER}; torchao's NF4 there",
        {**_IN_HOST, "frozen_weights": {"quantizer": "nf4", "kept": ["lm_head"]}},
    ),
    "TT-10": Published(
        "torchtune: Llama-2-7B full, checkpoints, paged AdamW in the backward pass, 4 x 2048",
        20.2 * _GB,
        functools.partial(torchtune, LLAMA_7B, 4, 2048, chunked=False),
        "states paged there, in pinned memory here; another maintainer measured 22.3 GB",
        {**layers(LLAMA_7B), **_IN_BACKWARD, "optimizer_state": "offloaded"},
    ),
}


def predicted(name: str) -> Case:
    """Return the prediction for a row's step, in a process with fake CUDA."""
    published = ROWS[name]
    workload, device = fake(published.make), find_device(published.device)
    levers = msgspec.convert({"microbatch_size": samples_of(workload), **published.levers}, Levers)
    trace = capture_levers(workload, levers, device)
    found, _ = predict(trace, costs_of([trace], device), device)
    return {
        "peak_bytes": found.peak_bytes,
        "peak_upper_bytes": found.peak_upper_bytes,
        "by_category": found.by_category,
        "where": found.where,
    }


def rows() -> Iterator[Case]:
    """Yield a row for each published peak."""
    for name, published in ROWS.items():
        start = {
            "published": name,
            "what": published.what,
            "differs": published.differs,
            "device": published.device,
            "published_bytes": round(published.nbytes),
        }
        output = output_of(hardware.shim.command("benchmarks.finetune.published", name), _SECONDS)
        if not output.rows:
            print(output.notices, file=sys.stderr)
            yield {**start, "error_message": output.end}
            continue
        found = output.rows[0]
        yield {**start, **found, "error": found["peak_bytes"] / published.nbytes - 1}


if __name__ == "__main__":
    print(json.dumps(predicted(sys.argv[1])))
