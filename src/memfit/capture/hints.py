"""Errors of steps that can't be captured: the line of the user's code, and advice."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from memfit._torch.dispatch import UnfollowedOperatorError
from memfit._torch.fake import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
from memfit.errors import CaptureError, MemfitError
from memfit.frames import memfits_place, users_place

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
            f"the step can't be captured without data{users_place(e)} ({first_line_of(e)}). {_hint(e)}"
        ) from e
    finally:
        log.setLevel(level)


def first_line_of(error: Exception) -> str:
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
