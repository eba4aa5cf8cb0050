"""Speech and audio by packages on PyPI, and quantisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit import Workload


def conformer_ctc() -> Workload:
    """Return a recogniser of the package conformer's blocks, trained by CTC on rows of different lengths."""
    from conformer import Conformer

    torch.manual_seed(0)
    blocks = Conformer(
        dim=96, depth=3, dim_head=24, heads=4, ff_mult=4, conv_expansion_factor=2, conv_kernel_size=31,
        attn_dropout=0.1, ff_dropout=0.1, conv_dropout=0.1,
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(80, 96), blocks, nn.Linear(96, 32))
    batch = {
        "features": torch.randn(4, 128, 80),
        "frames": torch.tensor([128, 120, 100, 90]),
        "labels": torch.randint(1, 32, (4, 20)),
        "letters": torch.tensor([20, 18, 15, 12]),
    }

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_probs = model(batch["features"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, batch["labels"], batch["frames"], batch["letters"])

    return Workload(model=model, batch=batch, loss_fn=loss, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


class _Quantised(nn.Module):
    """An autoencoder of sound around a quantiser that returns (quantised, indices, loss)."""

    def __init__(self, quantiser: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, 32, 7, 4, 3), nn.ELU(), nn.Conv1d(32, 64, 7, 4, 3))
        self.quantiser = quantiser
        self.decoder = nn.Sequential(nn.ConvTranspose1d(64, 32, 8, 4, 2), nn.ELU(), nn.ConvTranspose1d(32, 1, 8, 4, 2))

    def forward(self, sound: Tensor) -> tuple[Tensor, Tensor]:
        quantised, _, commitment = self.quantiser(self.encoder(sound).transpose(1, 2))
        return self.decoder(quantised.transpose(1, 2)), commitment.sum()


def _quantised(quantiser: nn.Module) -> Workload:
    model = _Quantised(quantiser)

    def loss(model: nn.Module, sound: Tensor) -> Tensor:
        out, commitment = model(sound)
        total: Tensor = (out - sound).abs().mean() + 0.1 * commitment
        return total

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model=model, batch=torch.randn(8, 1, 4096), loss_fn=loss, optimizer=optimizer)


def vector_quantised() -> Workload:
    """Return an autoencoder around vector-quantize-pytorch's codebook, which is an average and replaces dead codes."""
    from vector_quantize_pytorch import VectorQuantize

    torch.manual_seed(0)
    return _quantised(VectorQuantize(dim=64, codebook_size=256, decay=0.8, threshold_ema_dead_code=2))


def residual_quantised() -> Workload:
    """Return an autoencoder around vector-quantize-pytorch's residual quantiser with k-means and quantiser dropout."""
    from vector_quantize_pytorch import ResidualVQ

    torch.manual_seed(0)
    return _quantised(
        ResidualVQ(
            dim=64,
            codebook_size=128,
            num_quantizers=4,
            kmeans_init=True,
            kmeans_iters=4,
            quantize_dropout=True,
            quantize_dropout_cutoff_index=1,
        )  # fmt: skip
    )


def finite_scalars() -> Workload:
    """Return an autoencoder around vector-quantize-pytorch's finite scalar quantisation."""
    from vector_quantize_pytorch import FSQ

    class Scalars(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fsq = FSQ(levels=[8, 5, 5, 5], dim=64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            out, indices = self.fsq(x)
            return out, indices, out.new_zeros(())

    torch.manual_seed(0)
    return _quantised(Scalars())
