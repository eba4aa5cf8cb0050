"""The seam to private symbols of transformers and accelerate: what they have no public way for."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import fsdp_utils


def train_batch_size(trainer: Any) -> int:
    """Return the samples of each batch that a `transformers.Trainer` takes from its training loader."""
    return int(trainer._train_batch_size)


def set_train_batch_size(trainer: Any, samples: int) -> None:
    """Have a trainer's next training loader make batches of so many samples; its arguments are read once only."""
    trainer._train_batch_size = samples


def forget_accelerator_state(*, is_alone: bool = False) -> None:
    """Let the next `Accelerator` of this process have another precision than the ones before.

    Args:
        is_alone: Whether those before were for this process alone, and the next one may be for several.
    """
    AcceleratorState._reset_state()
    if is_alone:
        PartialState._reset_state()


def fully_sharded_modules(plugin: Any, model: Any) -> tuple[list[str], list[str]]:
    """Return the modules that accelerate calls `fully_shard` on besides the model, and which of them stay gathered.

    The plugin is left with its policy set, as `Accelerator.prepare` leaves it. What accelerate puts into one unit with
    tied weights is left to the whole model's, which is gathered and freed at the same times.
    """
    names = {module: name for name, module in model.named_modules()}
    plugin.set_auto_wrap_policy(model)
    is_unit = fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, model)
    units = [name for module, name in names.items() if name and is_unit is not None and is_unit(module)]
    entry = getattr(model, "get_input_embeddings", lambda: None)()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if entry is not None and head is not None and entry.weight is head.weight:
        return units, []
    last = [names[m] for m in (fsdp_utils._find_final_norm(model), head) if m is not None and names[m] not in units]
    first = [names[entry]] if entry is not None and names[entry] not in units else []
    return [*units, *first, *last], last
