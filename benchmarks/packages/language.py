"""Language models of packages on PyPI, each trained as its README or its examples do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit import Workload

VOCABULARY = 256


def _own_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the loss that the model itself computes."""
    loss: Tensor = model(batch)
    return loss


def x_decoder() -> Workload:
    """Return x-transformers' decoder in its wrapper for autoregression, as its enwik8 example trains it."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    torch.manual_seed(0)
    layers = Decoder(dim=128, depth=3, heads=4, rotary_pos_emb=True)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=128, attn_layers=layers))
    return Workload(
        model=model,
        batch=torch.randint(0, VOCABULARY, (2, 129)),
        loss_fn=_own_loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4),
        max_grad_norm=0.5,
    )


def x_encoder_decoder() -> Workload:
    """Return x-transformers' encoder and decoder with tied embeddings, by its README."""
    from x_transformers import XTransformer

    torch.manual_seed(0)
    sizes = {f"{side}_{name}": n for side in ("enc", "dec") for name, n in _SIDE.items()}
    model = XTransformer(dim=128, tie_token_emb=True, **sizes)
    source = torch.randint(0, VOCABULARY, (4, 128))
    return Workload(
        model=model,
        batch={"src": source, "tgt": torch.randint(0, VOCABULARY, (4, 96)), "mask": torch.ones_like(source).bool()},
        loss_fn=lambda model, batch: model(batch["src"], batch["tgt"], mask=batch["mask"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-4),
    )


_SIDE = {"num_tokens": VOCABULARY, "depth": 2, "heads": 4, "max_seq_len": 128}


def performer() -> Workload:
    """Return performer-pytorch's language model by its README, trained to tell masked tokens.

    It is not causal: without CUDA the package's causal attention takes seconds.
    """
    from performer_pytorch import PerformerLM

    torch.manual_seed(0)
    sizes = {"num_tokens": VOCABULARY, "dim": 128, "depth": 2, "max_seq_len": 128, "heads": 4}
    model = PerformerLM(**sizes, causal=False, nb_features=64)
    tokens = torch.randint(1, VOCABULARY, (4, 128))
    chosen = torch.rand(tokens.shape) < 0.15
    return Workload(
        model=model,
        batch={
            "x": tokens.masked_fill(chosen, 0),
            "mask": torch.ones_like(tokens).bool(),
            "labels": tokens.masked_fill(~chosen, -100),
        },
        loss_fn=lambda model, b: F.cross_entropy(model(b["x"], mask=b["mask"]).transpose(1, 2), b["labels"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4),
    )


def reformer() -> Workload:
    """Return reformer-pytorch's reversible language model in its training wrapper, by its README."""
    from reformer_pytorch import ReformerLM
    from reformer_pytorch.generative_tools import TrainingWrapper

    torch.manual_seed(0)
    sizes = {"num_tokens": VOCABULARY, "dim": 128, "depth": 2, "max_seq_len": 64, "heads": 4, "bucket_size": 16}
    model = TrainingWrapper(ReformerLM(**sizes, n_hashes=2, causal=True, lsh_dropout=0.1))
    return Workload(
        model=model,
        batch=torch.randint(0, VOCABULARY, (2, 65)),
        loss_fn=lambda model, batch: model(batch, return_loss=True),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4),
    )


def litgpt() -> Workload:
    """Return a LitGPT of Pythia's kind with its chunked cross-entropy, as `litgpt pretrain` trains it."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    torch.manual_seed(0)
    config = Config.from_name(
        "pythia-14m", n_layer=3, n_embd=128, n_head=4, block_size=128, padded_vocab_size=1024, intermediate_size=512
    )
    model = GPT(config)
    tokens = torch.randint(0, 1024, (2, 129))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.1, betas=(0.9, 0.95))

    def loss(model: Any, batch: Tensor) -> Tensor:
        logits = model(batch[:, 0 : model.max_seq_length].contiguous().long())
        targets = batch[:, 1 : model.max_seq_length + 1].contiguous().long()
        mean: Tensor = chunked_cross_entropy(logits, targets)
        return mean

    return Workload(model=model, batch=tokens, loss_fn=loss, optimizer=optimizer, max_grad_norm=1.0)


def mamba() -> Workload:
    """Return mambapy's Mamba between an embedding and a head; its scan is an in-place `torch.autograd.Function`.

    The package's own language model also imports Mamba 2, which needs CUDA.
    """
    from mambapy.mamba import Mamba, MambaConfig

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(512, 64), Mamba(MambaConfig(d_model=64, n_layers=3)), nn.Linear(64, 512))
    return Workload(
        model=model,
        batch=torch.randint(0, 512, (2, 65)),
        loss_fn=lambda model, x: F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        max_grad_norm=1.0,
    )


def soft_experts() -> Workload:
    """Return a classifier around soft-moe-pytorch's mixture of experts."""
    from soft_moe_pytorch import SoftMoE

    torch.manual_seed(0)
    model = nn.Sequential(SoftMoE(dim=128, seq_len=64, num_experts=4), nn.LayerNorm(128), nn.Linear(128, 10))
    return Workload(
        model=model,
        batch={"x": torch.randn(16, 64, 128), "y": torch.randint(0, 10, (16, 64))},
        loss_fn=lambda model, batch: F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten()),
        optimizer=torch.optim.AdamW(model.parameters()),
    )


def experts() -> Workload:
    """Return mixture-of-experts' sparsely gated layer before a projection, with its auxiliary loss."""
    from mixture_of_experts import MoE

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = MoE(dim=128, num_experts=8, hidden_dim=256)
            self.head = nn.Linear(128, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out, aux_loss = self.moe(x)
            return self.head(out), aux_loss

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, aux_loss = model(batch["x"])
        total: Tensor = F.cross_entropy(logits.transpose(1, 2), batch["y"]) + aux_loss
        return total

    torch.manual_seed(0)
    model = Experts()
    batch = {"x": torch.randn(4, 256, 128), "y": torch.randint(0, 16, (4, 256))}
    return Workload(model=model, batch=batch, loss_fn=loss, optimizer=torch.optim.Adam(model.parameters()))
