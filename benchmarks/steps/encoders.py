"""Encoders, and encoders with decoders, of transformers, from configurations."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.steps.data import IGNORED, VOCABULARY, own_loss, padded, seed_all, tokens
from memfit import Workload

_SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 130,
}


def _workload(name: str, model: nn.Module, batch: dict[str, Tensor], optimizer: Any = None) -> Workload:
    """Return the training of a model by its own loss, with AdamW unless another optimizer is given."""
    chosen = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model.train(), batch, own_loss, chosen, name=name, max_grad_norm=1.0)


def roberta() -> Workload:
    """RoBERTa on padded rows with masked language modelling; positions follow the padding."""
    seed_all(220)
    model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**_SIZES, pad_token_id=0))
    return _workload("roberta", model, padded(6, 96))


def deberta_v2() -> Workload:
    """DeBERTa-v2: disentangled attention with relative positions in buckets, and a convolution."""
    seed_all(221)
    config = transformers.DebertaV2Config(
        **_SIZES,
        relative_attention=True,
        position_buckets=32,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        conv_kernel_size=3,
        conv_act="gelu",
    )
    return _workload("deberta_v2", transformers.DebertaV2ForMaskedLM(config), padded(4, 64))


def electra() -> Workload:
    """ELECTRA's discriminator: which tokens were replaced."""
    seed_all(222)
    config = transformers.ElectraConfig(**_SIZES, embedding_size=64)
    batch = padded(8, 96)
    batch["labels"] = torch.randint(0, 2, batch["input_ids"].shape)
    return _workload("electra", transformers.ElectraForPreTraining(config), batch)


def albert() -> Workload:
    """ALBERT: one layer's weights used by all layers, a factored embedding, LAMB-like SGD."""
    seed_all(223)
    config = transformers.AlbertConfig(
        **_SIZES, embedding_size=64, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1
    )
    model = transformers.AlbertForMaskedLM(config)
    return _workload("albert", model, padded(6, 96), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def fnet() -> Workload:
    """FNet: Fourier transforms in the place of attention, complex numbers in between."""
    seed_all(224)
    batch = {"input_ids": tokens(8, 96), "labels": tokens(8, 96)}
    return _workload("fnet", transformers.FNetForMaskedLM(transformers.FNetConfig(**_SIZES)), batch)


def longformer() -> Workload:
    """Longformer: windows, and a few tokens that see all, found by `nonzero`; classification of rows."""
    seed_all(225)
    config = transformers.LongformerConfig(**_SIZES, attention_window=16, num_labels=4)
    batch = padded(4, 96)
    batch["labels"] = torch.randint(0, 4, (4,))
    return _workload("longformer", transformers.LongformerForSequenceClassification(config), batch)


def big_bird() -> Workload:
    """BigBird: sparse blocks of attention, those at random drawn by NumPy."""
    seed_all(226)
    config = transformers.BigBirdConfig(
        **{**_SIZES, "num_hidden_layers": 2}, attention_type="block_sparse", block_size=8, num_random_blocks=2
    )
    return _workload("big_bird", transformers.BigBirdForMaskedLM(config), padded(2, 128))


def reformer() -> Workload:
    """Reformer: reversible layers with a backward pass of their own, attention in buckets of a hash."""
    seed_all(227)
    config = transformers.ReformerConfig(
        hidden_size=96,
        feed_forward_size=192,
        attn_layers=["local", "lsh", "local"],
        num_attention_heads=2,
        attention_head_size=48,
        axial_pos_shape=[8, 16],
        axial_pos_embds_dim=[32, 64],
        local_attn_chunk_length=16,
        lsh_attn_chunk_length=16,
        num_buckets=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        is_decoder=True,
        hash_seed=0,
        local_attention_probs_dropout_prob=0.0,  # the model seeds the generator from the clock, so nothing may draw
        hidden_dropout_prob=0.0,
        use_cache=False,
    )
    ids = tokens(4, 128)
    return _workload("reformer", transformers.ReformerModelWithLMHead(config), {"input_ids": ids, "labels": ids})


def nystromformer() -> Workload:
    """Nyströmformer: attention through landmarks and an iterated pseudo-inverse; classification of rows."""
    seed_all(228)
    config = transformers.NystromformerConfig(
        **_SIZES, segment_means_seq_len=96, num_landmarks=16, conv_kernel_size=9, num_labels=4
    )
    batch = {"input_ids": tokens(6, 96), "labels": torch.randint(0, 4, (6,))}
    return _workload("nystromformer", transformers.NystromformerForSequenceClassification(config), batch)


def funnel() -> Workload:
    """Funnel: a length that halves from block to block, and a decoder that restores it."""
    seed_all(229)
    config = transformers.FunnelConfig(
        vocab_size=VOCABULARY,
        block_sizes=[2, 2, 2],
        num_decoder_layers=1,
        d_model=128,
        n_head=4,
        d_head=32,
        d_inner=384,
        initializer_std=0.02,
    )
    return _workload("funnel", transformers.FunnelForMaskedLM(config), padded(4, 64))


def modernbert() -> Workload:
    """ModernBERT: rotary positions, gated units, windows between full attention; classes of tokens."""
    seed_all(230)
    config = transformers.ModernBertConfig(
        **{**_SIZES, "intermediate_size": 192, "num_hidden_layers": 4},
        local_attention=32,
        global_attn_every_n_layers=2,
        num_labels=9,
        pad_token_id=0,
    )
    batch = padded(8, 96)
    batch["labels"] = torch.randint(0, 9, (8, 96)).masked_fill(batch["attention_mask"] == 0, IGNORED)
    return _workload("modernbert", transformers.ModernBertForTokenClassification(config), batch)


_SEQ2SEQ = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def _pairs(batch: int, source: int, target: int) -> dict[str, Tensor]:
    rows = padded(batch, source)
    return {**rows, "labels": tokens(batch, target)}


def bart() -> Workload:
    """BART: encoder and decoder with dropped layers, label padding ignored."""
    seed_all(231)
    config = transformers.BartConfig(**_SEQ2SEQ, encoder_layerdrop=0.1, decoder_layerdrop=0.1, forced_eos_token_id=2)
    return _workload("bart", transformers.BartForConditionalGeneration(config), _pairs(6, 80, 48))


def pegasus() -> Workload:
    """Pegasus: sinusoidal positions, norms before; Adafactor with relative steps off."""
    seed_all(232)
    model = transformers.PegasusForConditionalGeneration(
        transformers.PegasusConfig(**_SEQ2SEQ, scale_embedding=True, forced_eos_token_id=2)
    )
    return _workload("pegasus", model, _pairs(6, 80, 48), torch.optim.Adafactor(model.parameters(), lr=1e-3))


_T5 = {
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 384,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0,
    "use_cache": False,
}


def switch_transformers() -> Workload:
    """Switch Transformers: one expert for each token, up to its capacity, in encoder and decoder."""
    seed_all(233)
    config = transformers.SwitchTransformersConfig(
        **_T5, num_experts=4, expert_capacity=64, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1
    )
    model = transformers.SwitchTransformersForConditionalGeneration(config)
    return _workload("switch_transformers", model, _pairs(4, 64, 40))


def longt5() -> Workload:
    """LongT5: attention to neighbours and to summaries of blocks."""
    seed_all(234)
    config = transformers.LongT5Config(
        **_T5, encoder_attention_type="transient-global", local_radius=15, global_block_size=8
    )
    return _workload("longt5", transformers.LongT5ForConditionalGeneration(config), _pairs(4, 96, 32))


def prophetnet() -> Workload:
    """ProphetNet: a decoder that guesses two tokens at a time."""
    seed_all(235)
    config = transformers.ProphetNetConfig(
        hidden_size=128,
        encoder_ffn_dim=384,
        decoder_ffn_dim=384,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        ngram=2,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return _workload("prophetnet", transformers.ProphetNetForConditionalGeneration(config), _pairs(4, 64, 32))
