"""Models that come quantised: which of their parameters are, and which were left as they were.

Quantisers keep codes in integers: in a parameter (bitsandbytes' `Params4bit` and `Int8Params`), or inside a tensor
subclass (torchao). Both are captured as what they hold.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from memfit._torch import inner_tensors, is_wrapper, own_parameters
from memfit.foundations import format_bytes

_NAMED = 3  # parameters that a note names before it counts the others
_LEAST_SHARE = 0.05  # of the parameters' bytes: weights that take less are not noted
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_MEANT_TO_STAY = (nn.Embedding, nn.EmbeddingBag, *_CONVOLUTIONS)


def quantized_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that hold codes in place of numbers, by name."""
    return {name: p for name, p in model.named_parameters() if _has_codes(p)}


def quantized_hint(model: nn.Module) -> str:
    """Return the sentence of an error on a model's quantised parameters; "" where it has none."""
    kinds = Counter(type(p).__name__ for p in quantized_parameters(model).values())
    if not kinds:
        return ""
    counted = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    return (
        f"The model has quantised parameters ({counted}), whose own operators may need their values: estimate and plan"
        " with device='cpu', where the step runs with data, or quantise in another way (4 bits by bitsandbytes, or"
        " Linear8bitLt with threshold=0.0, as llm_int8_threshold=0.0 has it)"
    )


def unquantized_note(model: nn.Module) -> str | None:
    """Return a note on a quantised model's weights that are not; None where there are few.

    Quantisers take layers of some classes and leave others without a word, as bitsandbytes leaves experts' weights that
    are fused into one tensor. Embeddings, normalisations, convolutions and the layer that makes the logits are meant to
    stay, and what trains; of models of which nothing says what was meant, all linear layers.
    """
    quantized = quantized_parameters(model)
    if not quantized:
        return None
    skipped, is_told = _meant_to_stay(model)
    left: dict[str, int] = {}
    for fqn, module in model.named_modules():
        stays = isinstance(module, _MEANT_TO_STAY) or (isinstance(module, nn.Linear) and not is_told)
        if stays or any(name == part or name.endswith(f".{part}") for part in skipped for name in _around(fqn)):
            continue
        for name, parameter in own_parameters(module).items():
            if parameter is not None and parameter.dim() > 1 and not parameter.requires_grad:
                if parameter.is_floating_point() and not _has_codes(parameter):
                    left[f"{fqn}.{name}" if fqn else name] = parameter.nbytes
    whole = sum(p.nbytes for p in model.parameters())
    nbytes = sum(left.values())
    if nbytes < _LEAST_SHARE * whole:
        return None
    names = sorted(left, key=lambda name: -left[name])
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return (
        f"the model is quantised, but these of its weights are not: {', '.join(names[:_NAMED])}{more}. They take"
        f" {format_bytes(nbytes)}, {nbytes / whole:.0%} of the parameters: the quantiser left them out"
    )


def _has_codes(parameter: Any) -> bool:
    if is_wrapper(type(parameter)):
        return any(_is_of_integers(part) for part in inner_tensors(parameter).values())
    return _is_of_integers(parameter)


def _is_of_integers(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool


def _around(fqn: str) -> list[str]:
    parts = fqn.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _meant_to_stay(model: nn.Module) -> tuple[set[str], bool]:
    """Return the names of modules that a model of `transformers` says are not to be quantised, and whether it does."""
    names, is_told = set[str](), False
    modules = dict(model.named_modules())
    for module in modules.values():
        settings = getattr(getattr(module, "config", None), "quantization_config", None)
        if settings is not None:
            is_told = True
            for field in ("llm_int8_skip_modules", "modules_to_not_convert"):
                given = settings.get(field) if isinstance(settings, dict) else getattr(settings, field, None)
                names |= set(given or ())
        outputs = getattr(type(module), "get_output_embeddings", None)
        if callable(outputs):
            head = outputs(module)
            names |= {fqn for fqn, each in modules.items() if each is head}
    return names, is_told
