"""The table of the third zoo: training steps of other people's packages, as they come from PyPI.

Each is what the package's README, documentation or examples tell a user to write: its own model, its own loss, the body
of its own loop. Nothing is downloaded; sizes are small, so that a plain step takes less than a second on one core.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from memfit import Workload

FAMILIES: dict[str, dict[str, str]] = {
    "language": {
        "x_decoder": "x-transformers",
        "x_encoder_decoder": "x-transformers",
        "performer": "performer-pytorch",
        "reformer": "reformer-pytorch",
        "litgpt": "litgpt",
        "mamba": "mambapy",
        "soft_experts": "soft-moe-pytorch",
        "experts": "mixture-of-experts",
    },
    "vision": {
        "vit_lion": "vit-pytorch",
        "packed_images": "vit-pytorch",
        "diffusion": "denoising-diffusion-pytorch",
        "elucidated_diffusion": "denoising-diffusion-pytorch",
        "segmentation_unet": "segmentation_models_pytorch",
        "segmentation_lovasz": "segmentation_models_pytorch",
        "timm_mixup": "timm",
        "perceiver": "perceiver-pytorch",
        "kornia_augmented": "kornia",
    },
    "graphs": {
        "node_classes": "torch-geometric",
        "graph_classes": "torch-geometric",
        "attention": "torch-geometric",
        "variational": "torch-geometric",
    },
    "science": {
        "ode_fixed": "torchdiffeq",
        "ode_adaptive": "torchdiffeq",
        "ode_adjoint": "torchdiffeq",
        "sde": "torchsde",
        "liquid": "ncps",
        "exact_gp": "gpytorch",
        "variational_gp": "gpytorch",
        "pyro_vae": "pyro-ppl",
    },
    "metric": {
        "mined_triplets": "pytorch-metric-learning",
        "supervised_contrastive": "pytorch-metric-learning",
        "arcface": "pytorch-metric-learning",
        "x_clip": "x-clip",
        "byol": "byol-pytorch",
    },
    "signals": {
        "conformer_ctc": "conformer",
        "vector_quantised": "vector-quantize-pytorch",
        "residual_quantised": "vector-quantize-pytorch",
        "finite_scalars": "vector-quantize-pytorch",
    },
    "tables": {
        "tabnet": "pytorch-tabnet",
        "ft_transformer": "rtdl_revisiting_models",
        "click_through": "deepctr-torch",
    },
}
"""For each family, a module here, its steps, functions without arguments, with the package on PyPI that each is of."""

PACKAGES: dict[str, str] = {name: package for steps in FAMILIES.values() for name, package in steps.items()}
"""The package of each workload."""


def _make(family: str, name: str) -> Workload:
    """Make a workload; what it imports is imported only then, since some packages take ten seconds."""
    importlib.import_module("benchmarks.packages.torchvision_operators")
    made: Workload = getattr(importlib.import_module(f"benchmarks.packages.{family}"), name)()
    return made


STEPS: dict[str, Callable[[], Workload]] = {
    name: functools.partial(_make, family, name) for family, steps in FAMILIES.items() for name in steps
}
"""Each workload by its name."""
