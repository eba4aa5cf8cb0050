"""Language models of transformers, from configurations: real architectures, small."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from memfit import Workload

VOCABULARY = 4096
_IGNORED = -100


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    logits = model(input_ids=batch["tokens"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["tokens"][:, 1:].flatten())


def summed_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of the labelled tokens of a padded batch, and their number."""
    logits = model(input_ids=batch["tokens"], attention_mask=batch["mask"]).logits
    labels = batch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=_IGNORED, reduction="sum")
    return total, (labels != _IGNORED).sum()


def tokens(batch: int, length: int) -> dict[str, Tensor]:
    """Return a batch of full rows."""
    return {"tokens": torch.randint(0, VOCABULARY, (batch, length))}


def padded(batch: int, length: int, labelled: float = 1.0) -> dict[str, Tensor]:
    """Return a batch of rows of different lengths, a share of whose tokens has a label."""
    lengths = torch.randint(length // 4, length + 1, (batch, 1))
    mask = (torch.arange(length) < lengths).long()
    ids = torch.randint(0, VOCABULARY, (batch, length)) * mask
    kept = mask.bool() & (torch.rand(batch, length) < labelled)
    return {"tokens": ids, "mask": mask, "labels": ids.masked_fill(~kept, _IGNORED)}


def _gpt2(length: int = 256, **given: Any) -> transformers.GPT2LMHeadModel:
    settings = {"n_layer": 4, "n_embd": 256, "n_head": 8, "n_positions": length, "vocab_size": VOCABULARY}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**settings, **ends, **given})).train()


def _llama(**given: Any) -> transformers.LlamaForCausalLM:
    settings = {
        "hidden_size": 320,
        "intermediate_size": 864,
        "num_hidden_layers": 4,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "use_cache": False,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **given})).train()


def gpt2() -> Workload:
    """GPT-2: dropout, tied embedding and head, AdamW, clipped gradients."""
    torch.manual_seed(10)
    model = _gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model, tokens(6, 256), next_token_loss, optimizer, name="gpt2", max_grad_norm=1.0)


def gpt2_padded() -> Workload:
    """GPT-2 with eager attention on rows of different lengths, a summed loss and its count, and Adam."""
    torch.manual_seed(11)
    model = _gpt2(attn_implementation="eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    return Workload(model, padded(6, 256), summed_loss, optimizer, name="gpt2_padded")


def gpt2_frozen() -> Workload:
    """GPT-2 whose embeddings and lower half are frozen; the optimizer has what is left."""
    torch.manual_seed(12)
    model = _gpt2(n_layer=6)
    for part in (model.transformer.wte, model.transformer.wpe, *model.transformer.h[:3]):
        part.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4)
    return Workload(model, tokens(6, 256), next_token_loss, optimizer, name="gpt2_frozen", max_grad_norm=1.0)


def llama() -> Workload:
    """Llama with grouped queries, AdamW over lists of tensors (foreach), clipped gradients."""
    torch.manual_seed(13)
    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)
    return Workload(model, tokens(4, 256), next_token_loss, optimizer, name="llama", max_grad_norm=1.0)


def llama_8bit() -> Workload:
    """Llama with bitsandbytes' 8-bit AdamW."""
    import bitsandbytes

    torch.manual_seed(14)
    model = _llama()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=3e-4)
    return Workload(model, tokens(4, 256), next_token_loss, optimizer, name="llama_8bit")


def gemma() -> Workload:
    """Gemma 3: layers with a sliding window between those with full attention, tied head, Adafactor."""
    torch.manual_seed(15)
    config = transformers.Gemma3TextConfig(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        sliding_window=64,
        use_cache=False,
    )
    model = transformers.Gemma3ForCausalLM(config).train()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    return Workload(model, tokens(4, 256), next_token_loss, optimizer, name="gemma")


def bert() -> Workload:
    """BERT, masked language modelling of padded rows: a summed loss and its count, fused AdamW."""
    torch.manual_seed(16)
    config = transformers.BertConfig(
        hidden_size=320,
        num_hidden_layers=4,
        num_attention_heads=5,
        intermediate_size=1280,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
    )
    model = transformers.BertForMaskedLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Workload(model, padded(6, 192, labelled=0.15), summed_loss, optimizer, name="bert")


def t5() -> Workload:
    """T5: encoder and decoder with relative positions, Adafactor."""
    torch.manual_seed(17)
    config = transformers.T5Config(
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=3,
        num_heads=8,
        vocab_size=VOCABULARY,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = transformers.T5ForConditionalGeneration(config).train()
    batch = {"source": torch.randint(1, VOCABULARY, (6, 160)), "target": torch.randint(1, VOCABULARY, (6, 96))}
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    return Workload(model, batch, _translation_loss, optimizer, name="t5", max_grad_norm=1.0)


def _translation_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(input_ids=batch["source"], labels=batch["target"]).loss
    return loss


def mixtral() -> Workload:
    """A Mixtral-like mixture of 4 experts, 2 for each token.

    With `experts_implementation="grouped_mm"`, which transformers chooses itself where it can: "eager" loops over the
    experts that were chosen, so that its shapes depend on values.
    """
    torch.manual_seed(18)
    config = transformers.MixtralConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=192,
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    model = transformers.MixtralForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model, tokens(4, 192), next_token_loss, optimizer, name="mixtral")


def mamba() -> Workload:
    """Mamba, whose scan is a loop over the tokens where its CUDA kernels are not at hand."""
    torch.manual_seed(19)
    config = transformers.MambaConfig(
        hidden_size=192, state_size=16, num_hidden_layers=2, vocab_size=VOCABULARY, use_cache=False
    )
    model = transformers.MambaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model, tokens(6, 48), next_token_loss, optimizer, name="mamba")
