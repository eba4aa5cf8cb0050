"""Modules in evaluation mode whose forward pass is another one in training."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from memfit._torch.modules import DropoutBase, NormBase
from memfit.workload import Workload

_SHOWN = 3


def evaluation_note(workload: Workload) -> str | None:
    """Return a note on modules in evaluation mode that would do something else in training; None where there are none.

    The step is captured as it is: a model may train with some of its modules in evaluation mode on purpose.
    """
    model = workload.model
    found = [(fqn, module) for fqn, module in model.named_modules() if not module.training and _heeds_mode(module)]
    if not found:
        return None
    names = ", ".join(f"{fqn or 'the model itself'} ({type(module).__name__})" for fqn, module in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
    said = f"{len(found):,} module{'s' if len(found) > 1 else ''} in evaluation mode: {names}{more}"
    if model.training:
        return f"{said}. The prediction keeps them in this mode"
    return (
        f"the model is in evaluation mode, as from_pretrained() leaves it, with {said}. The prediction is for this"
        " mode, and the peak of training mode differs: call model.train() first if your training does"
    )


def _heeds_mode(module: nn.Module) -> bool:
    """Tell whether a module's own forward pass depends on its mode: by its class, or by what its code reads."""
    if isinstance(module, DropoutBase):
        return module.p > 0
    if isinstance(module, NormBase):
        return module.track_running_stats
    if not _reads_mode(type(module)):
        return False
    rates = [v for name, v in vars(module).items() if "drop" in name and isinstance(v, float | int)]
    return not rates or any(rates)


def _reads_mode(kind: type[nn.Module]) -> bool:
    """Tell whether the code of a class's forward pass has the name `training`, in functions within it too."""
    forward: Any = inspect.unwrap(kind.forward)
    codes = [code] if inspect.iscode(code := getattr(forward, "__code__", None)) else []
    while codes:
        code = codes.pop()
        if "training" in code.co_names:
            return True
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return False
