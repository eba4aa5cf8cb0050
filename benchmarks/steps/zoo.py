"""The table of the second zoo: training steps by family, none of which the first has.

Nothing is downloaded: models come from configurations, data from seeded generators. A plain step takes less than a
second on one core, and its peak is some tens of MiB.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from memfit import Workload

FAMILIES: dict[str, tuple[str, ...]] = {
    "branches": (
        "skipped_blocks",
        "early_exit",
        "adaptive_computation",
        "equilibrium",
        "checked_density",
        "running_weights",
        "switched_loss",
        "scheduled_sampling",
    ),
    "selections": (
        "expert_loop",
        "hard_pixels",
        "detector",
        "two_stage_detector",
        "pruned_tokens",
        "tree",
        "metric_in_loss",
        "nearest_points",
    ),
    "draws": ("layer_drop", "stochastic_depth", "mixed_images", "random_masks", "sampled_paths"),
    "kept": ("counted_calls", "listed_features", "hooked_features", "byol", "carried_state"),
    "decoders": (
        "opt",
        "gpt_neox",
        "qwen3",
        "qwen2_moe",
        "olmoe",
        "deepseek_v3",
        "gpt_oss",
        "phi3",
        "bloom",
        "rwkv",
        "mamba2",
        "recurrent_gemma",
        "jamba",
    ),
    "encoders": (
        "roberta",
        "deberta_v2",
        "electra",
        "albert",
        "fnet",
        "longformer",
        "big_bird",
        "reformer",
        "nystromformer",
        "funnel",
        "modernbert",
        "bart",
        "pegasus",
        "switch_transformers",
        "longt5",
        "prophetnet",
    ),
    "vision": (
        "deit",
        "beit",
        "vit_mae",
        "dinov2",
        "segformer",
        "efficientnet",
        "focalnet",
        "swinv2",
        "videomae",
        "detr",
        "yolos",
        "deformable_detr",
        "mask2former",
    ),
    "sound": (
        "hubert_ctc",
        "wav2vec2_ctc",
        "wav2vec2_pretraining",
        "wavlm_xvector",
        "speech_to_text",
        "audio_transformer",
        "deep_speech",
    ),
    "multimodal": ("clip", "siglip", "blip", "vilt", "llava", "image_captioner", "layoutlmv3"),
    "medical": (
        "attention_unet",
        "vnet",
        "basic_unet",
        "high_res_net",
        "monai_autoencoder",
        "var_autoencoder",
        "deep_segresnet",
        "registration",
        "latent_autoencoder",
        "vqvae",
        "densenet",
    ),
    "sequences": ("torch_transformer", "packed_lstm", "attending_decoder", "packed_tagger", "dilated_convolutions"),
    "graphs": ("graph_convolution", "graph_attention", "point_clouds", "molecular_forces"),
    "generative": (
        "diffusion",
        "latent_distributions",
        "running_codes",
        "stacked_codes",
        "adversaries",
        "gradient_penalty",
        "flow",
        "energy",
    ),
    "derivatives": (
        "meta_learning",
        "sample_gradients",
        "physics_informed",
        "neural_ode",
        "adjoint_ode",
        "reversible",
        "implicit_layer",
        "smooth_classifier",
        "adversarial_training",
    ),
    "representation": (
        "contrast",
        "momentum_queue",
        "hard_triplets",
        "self_distillation",
        "lora",
        "prompts",
        "sparse_words",
        "sparse_bags",
    ),
    "lazy": (
        "cached_mask",
        "cached_reach",
        "rotary_table",
        "table_in_a_default",
        "window_on_a_class",
        "late_buffer",
    ),
    "held": (
        "replay_in_a_dict",
        "replay_in_a_deque",
        "many_projections",
        "partial_prototypes",
        "bank_of_a_method",
        "statistics_of_hooks",
        "global_anchors",
        "nested_codebook",
        "teachers_in_a_dict",
    ),
    "updates": (
        "averaged_after",
        "shadow_weights",
        "polyak",
        "projected_weights",
        "noisy_gradients",
        "clipped_before",
        "gradient_hooks",
        "lookahead",
        "patched_forward",
    ),
    "layouts": (
        "transposed_batch_norm",
        "transposed_group_norm",
        "transposed_instance_norm",
        "mixed_layouts",
        "sliced_places",
        "least_squares",
        "orthogonal_layers",
        "forward_derivatives",
        "sparse_within",
        "gaussian_process",
        "kalman_gain",
        "pooled_segments",
        "jagged_sequences",
    ),
    "quantised": ("int8_adapters", "int4_adapters", "quantised_tower"),
}
"""For each family, a module here, its steps: functions without arguments."""


def _make(family: str, name: str) -> Workload:
    """Make a workload; its family is imported only then, since some packages take ten seconds to import."""
    made: Workload = getattr(importlib.import_module(f"benchmarks.steps.{family}"), name)()
    return made


STEPS: dict[str, Callable[[], Workload]] = {
    name: functools.partial(_make, family, name) for family, names in FAMILIES.items() for name in names
}
"""Each workload by its name."""
