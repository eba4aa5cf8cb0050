"""What captures tell users: why a step fails and what to do, modules in evaluation mode, an untested PyTorch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from memfit import _torch
from memfit._torch import (
    DataDependentOutputException,
    DropoutBase,
    DynamicOutputShapeException,
    NormBase,
    UnfollowedOperatorError,
    UnsupportedOperatorException,
)
from memfit.errors import CaptureError, MemfitError, UntestedTorchWarning
from memfit.foundations import memfits_place, users_place, warn_users
from memfit.workload import Workload

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_VALUES_HINT = (
    "A shape depends on the values of a tensor: replace boolean-mask indexing or nonzero() by torch.where or a product"
    " with the mask. For mixtures of experts of transformers, set experts_implementation='grouped_mm'"
)
_OPERATOR_HINT = "PyTorch can't run this operator without data: take it out of Workload.loss_fn, or estimate without it"
_UNFOLLOWED_HINT = (
    "memfit can't see the functions that it calls: call them in Workload.loss_fn yourself, as `f(x) if p else g(x)` in"
    " place of torch.cond(p, f, g, (x,)), or as a loop in place of scan and map"
)
_CLOSURE_HINT = (
    "memfit runs the forward and backward passes once a step and calls Workload.optimizer.step() without a closure:"
    " give an optimizer that needs none"
)
_SUBCLASS_HINT = (
    "memfit captures a tensor subclass as a plain tensor, without its methods: put tensor.as_subclass(torch.Tensor)"
    " into Workload.batch, and the value that the method returns beside it"
)
_OTHER_HINT = "Check that Workload.loss_fn(model, batch).backward() runs without memfit"
_FLEX_HINT = (
    "memfit has no rule for that kernel: use torch.nn.functional.scaled_dot_product_attention, or in transformers"
    " attn_implementation='sdpa'"
)

_SHOWN = 3  # modules in evaluation mode


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn errors of fake tensors into a `CaptureError` that names the user's line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    try:
        log.setLevel(logging.CRITICAL)
        yield
    except MemfitError:
        raise
    except Exception as e:
        raise CaptureError(
            f"the step can't be captured without data{users_place(e)} ({_first_line_of(e)}). {_hint(e)}"
        ) from e
    finally:
        log.setLevel(level)


def _first_line_of(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"


def own_fault(error: Exception) -> str:
    """Return a sentence that says where memfit itself failed; "" where other code did, or memfit refuses by name."""
    if isinstance(error, (*_NEEDS_VALUES, UnsupportedOperatorException, UnfollowedOperatorError)):
        return ""
    place = memfits_place(error)
    return f"memfit itself failed, at {place}, and not your code: please report it with this line" if place else ""


def _hint(error: Exception) -> str:
    if isinstance(error, UnsupportedOperatorException):
        return _OPERATOR_HINT
    if isinstance(error, UnfollowedOperatorError):
        return _FLEX_HINT if "flex_attention" in str(error) else _UNFOLLOWED_HINT
    if fault := own_fault(error):
        return fault[0].upper() + fault[1:]
    if "closure" in str(error):
        return _CLOSURE_HINT
    if isinstance(error, AttributeError) and "'FakeTensor'" in str(error):
        return _SUBCLASS_HINT
    return _VALUES_HINT if isinstance(error, _NEEDS_VALUES) or ".numpy()" in str(error) else _OTHER_HINT


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


@functools.cache
def warn_if_untested() -> None:
    """Warn at the user's line, once in a process, unless memfit was tested with this PyTorch."""
    if reason := _torch.versions.why_untested():
        warn_users(reason, UntestedTorchWarning)
