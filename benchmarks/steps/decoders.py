"""Decoders of transformers, from configurations: real architectures, small."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.steps.data import VOCABULARY, own_loss, seed_all, tokens
from memfit import Workload


def _workload(
    name: str, model: nn.Module, batch: int, length: int, optimizer: Any = None, norm: float | None = 1.0
) -> Workload:
    """Return the training of a decoder on full rows, by its own loss, with AdamW unless another is given."""
    ids = tokens(batch, length)
    chosen = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model.train(), {"input_ids": ids, "labels": ids}, own_loss, chosen, name=name, max_grad_norm=norm)


_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "use_cache": False,
}


def opt() -> Workload:
    """OPT: learnt positions, ReLU, and layers dropped by a draw."""
    seed_all(200)
    config = transformers.OPTConfig(
        hidden_size=128,
        word_embed_proj_dim=128,
        ffn_dim=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        layerdrop=0.1,
        use_cache=False,
    )
    return _workload("opt", transformers.OPTForCausalLM(config), 6, 96)


def gpt_neox() -> Workload:
    """GPT-NeoX: attention and perceptron side by side, rotary positions on a part, Adam with AMSGrad."""
    seed_all(201)
    config = transformers.GPTNeoXConfig(**_SIZES, hidden_dropout=0.1, attention_dropout=0.1)
    model = transformers.GPTNeoXForCausalLM(config)
    return _workload("gpt_neox", model, 6, 96, torch.optim.Adam(model.parameters(), lr=3e-4, amsgrad=True), None)


def qwen3() -> Workload:
    """Qwen3: grouped queries with norms on queries and keys, tied embedding, foreach AdamW."""
    seed_all(202)
    config = transformers.Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)
    model = transformers.Qwen3ForCausalLM(config)
    return _workload("qwen3", model, 6, 96, torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True))


def qwen2_moe() -> Workload:
    """Qwen2-MoE: shared and routed experts, and the router's balancing loss."""
    seed_all(203)
    config = transformers.Qwen2MoeConfig(
        **_SIZES,
        num_key_value_heads=2,
        moe_intermediate_size=192,
        shared_expert_intermediate_size=192,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    return _workload("qwen2_moe", transformers.Qwen2MoeForCausalLM(config), 4, 96)


def olmoe() -> Workload:
    """OLMoE with experts in a loop, as transformers writes it (`experts_implementation="eager"`)."""
    seed_all(204)
    config = transformers.OlmoeConfig(
        **{**_SIZES, "intermediate_size": 192},
        num_experts=6,
        num_experts_per_tok=2,
        output_router_logits=True,
        experts_implementation="eager",
    )
    return _workload("olmoe", transformers.OlmoeForCausalLM(config), 4, 96)


def deepseek_v3() -> Workload:
    """DeepSeek-V3: latent attention, experts chosen by groups, a dense first layer."""
    seed_all(205)
    config = transformers.DeepseekV3Config(
        **_SIZES,
        moe_intermediate_size=128,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
    )
    return _workload("deepseek_v3", transformers.DeepseekV3ForCausalLM(config), 4, 96)


def gpt_oss() -> Workload:
    """gpt-oss: attention sinks, sliding windows, experts with clipped gates; SGD with momentum."""
    seed_all(206)
    config = transformers.GptOssConfig(
        **{**_SIZES, "intermediate_size": 128},
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    model = transformers.GptOssForCausalLM(config)
    return _workload("gpt_oss", model, 4, 96, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


def phi3() -> Workload:
    """Phi-3: projections in one matrix each, dropout on the residuals, Adafactor."""
    seed_all(207)
    config = transformers.Phi3Config(
        **_SIZES, num_key_value_heads=4, resid_pdrop=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    model = transformers.Phi3ForCausalLM(config)
    return _workload("phi3", model, 6, 96, torch.optim.Adafactor(model.parameters(), lr=1e-2))


def bloom() -> Workload:
    """BLOOM: positions as slopes (ALiBi), GELU written as a custom autograd function."""
    seed_all(208)
    config = transformers.BloomConfig(
        hidden_size=128, n_layer=3, n_head=4, vocab_size=VOCABULARY, hidden_dropout=0.1, use_cache=False
    )
    return _workload("bloom", transformers.BloomForCausalLM(config), 6, 96)


def rwkv() -> Workload:
    """RWKV: linear attention as a loop over the tokens."""
    seed_all(209)
    config = transformers.RwkvConfig(
        hidden_size=128, num_hidden_layers=2, vocab_size=VOCABULARY, context_length=64, use_cache=False
    )
    return _workload("rwkv", transformers.RwkvForCausalLM(config), 6, 48)


def mamba2() -> Workload:
    """Mamba-2: a state space model computed in chunks."""
    seed_all(210)
    config = transformers.Mamba2Config(
        hidden_size=64,
        num_heads=4,
        head_dim=32,
        n_groups=1,
        state_size=16,
        chunk_size=16,
        num_hidden_layers=2,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return _workload("mamba2", transformers.Mamba2ForCausalLM(config), 4, 64)


def recurrent_gemma() -> Workload:
    """RecurrentGemma: gated linear recurrences between layers of local attention."""
    seed_all(211)
    config = transformers.RecurrentGemmaConfig(
        hidden_size=128,
        lru_width=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        attention_window_size=32,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return _workload("recurrent_gemma", transformers.RecurrentGemmaForCausalLM(config), 4, 48)


def jamba() -> Workload:
    """Jamba: state space layers, attention and experts in turns."""
    seed_all(212)
    config = transformers.JambaConfig(
        **{**_SIZES, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        expert_layer_period=2,
        attn_layer_period=4,
        attn_layer_offset=2,
        mamba_d_state=8,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
        output_router_logits=True,
    )
    return _workload("jamba", transformers.JambaForCausalLM(config), 4, 48)
