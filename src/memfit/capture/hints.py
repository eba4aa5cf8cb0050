"""Errors of steps that can't be captured: the line of the user's code, and advice."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from memfit._torch.fake import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
from memfit.errors import CaptureError, MemfitError
from memfit.frames import users_place

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_VALUES_HINT = (
    "Shapes must not depend on values: replace boolean-mask indexing or nonzero() by masking, or take such code out of"
    " Workload.loss_fn; for mixtures of experts of transformers, set experts_implementation='grouped_mm'"
)
_OPERATOR_HINT = "PyTorch can't run this operator without data: take it out of Workload.loss_fn, or estimate without it"
_CLOSURE_HINT = (
    "memfit runs the forward and backward passes once a step and calls Workload.optimizer.step() without a closure:"
    " give an optimizer that needs none"
)
_SUBCLASS_HINT = (
    "Tensor subclasses are captured as plain tensors, with their attributes and without their methods: put"
    " tensor.as_subclass(torch.Tensor) into Workload.batch, and beside it the value that the method returns"
)
_OTHER_HINT = "Check that Workload.loss_fn(model, batch) and backward() run with data"


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
        line = users_place(e)
        first_line = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise CaptureError(
            f"the step can't be captured without data{line} ({type(e).__name__}: {first_line}). {_hint(e)}"
        ) from e
    finally:
        log.setLevel(level)


def _hint(error: Exception) -> str:
    if isinstance(error, UnsupportedOperatorException):
        return _OPERATOR_HINT
    if "closure" in str(error):
        return _CLOSURE_HINT
    if isinstance(error, AttributeError) and "'FakeTensor'" in str(error):
        return _SUBCLASS_HINT
    return _VALUES_HINT if isinstance(error, _NEEDS_VALUES) or ".numpy()" in str(error) else _OTHER_HINT
