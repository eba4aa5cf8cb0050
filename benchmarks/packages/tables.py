"""Tables and series by packages on PyPI."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit import Workload


def tabnet() -> Workload:
    """Return pytorch-tabnet's network with its sparsity loss, as its `fit` trains it."""
    from pytorch_tabnet.tab_network import TabNet

    torch.manual_seed(0)
    model = TabNet(
        input_dim=32, output_dim=5, n_d=16, n_a=16, n_steps=3, cat_idxs=[30, 31], cat_dims=[10, 20], cat_emb_dim=[2, 3],
        virtual_batch_size=128, group_attention_matrix=torch.eye(32),
    )  # fmt: skip
    x = torch.randn(1024, 32)
    x[:, 30], x[:, 31] = torch.randint(0, 10, (1024,)).float(), torch.randint(0, 20, (1024,)).float()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output, sparsity = model(batch["x"])
        total: Tensor = F.cross_entropy(output, batch["y"]) - 1e-3 * sparsity
        return total

    return Workload(
        model=model,
        batch={"x": x, "y": torch.randint(0, 5, (1024,))},
        loss_fn=loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-2),
        max_grad_norm=1.0,
    )


def ft_transformer() -> Workload:
    """Return rtdl-revisiting-models' FT-Transformer with its default sizes and its optimizer."""
    from rtdl_revisiting_models import FTTransformer

    torch.manual_seed(0)
    sizes = {**FTTransformer.get_default_kwargs(n_blocks=2), "d_block": 64}
    model = FTTransformer(n_cont_features=12, cat_cardinalities=[4, 7], d_out=1, **sizes)
    return Workload(
        model=model,
        batch={
            "numbers": torch.randn(256, 12),
            "categories": torch.stack([torch.randint(0, 4, (256,)), torch.randint(0, 7, (256,))], 1),
            "y": torch.randn(256),
        },
        loss_fn=lambda model, b: F.mse_loss(model(b["numbers"], b["categories"]).squeeze(-1), b["y"]),
        optimizer=model.make_default_optimizer(),
    )


def click_through() -> Workload:
    """Return deepctr-torch's DeepFM with its regularisation, as its `fit` trains it."""
    from deepctr_torch.inputs import DenseFeat, SparseFeat
    from deepctr_torch.models import DeepFM

    torch.manual_seed(0)
    columns: list[Any] = [SparseFeat(f"C{i}", vocabulary_size=2000, embedding_dim=8) for i in range(8)]
    columns += [DenseFeat(f"I{i}", 1) for i in range(4)]
    model = DeepFM(linear_feature_columns=columns, dnn_feature_columns=columns, task="binary", device="cpu")
    x = torch.cat([torch.randint(0, 2000, (512, 8)).float(), torch.rand(512, 4)], 1)

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        y_pred = model(batch["x"]).squeeze()
        entropy = F.binary_cross_entropy(y_pred, batch["y"].squeeze(), reduction="sum")
        total: Tensor = entropy + model.get_regularization_loss() + model.aux_loss
        return total

    return Workload(
        model=model,
        batch={"x": x, "y": torch.randint(0, 2, (512, 1)).float()},
        loss_fn=loss,
        optimizer=torch.optim.Adam(model.parameters()),
    )
