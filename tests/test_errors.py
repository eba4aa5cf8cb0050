"""Errors travel between processes with what they say."""

from __future__ import annotations

import pickle

import pytest

from memfit.errors import (
    CaptureError,
    InfeasibleError,
    MemfitError,
    MemoryLimitError,
    MissingExtraError,
    NonFiniteError,
    OutOfMemoryError,
    SimulatedOutOfMemoryError,
    WorkloadError,
)

ERRORS = [
    CaptureError("no"),
    WorkloadError("no"),
    MissingExtraError("this", "brain", "monai"),
    InfeasibleError("no", budget_bytes=1, lowest_peak_bytes=2, where="here", proven=True),
    NonFiniteError("no", step=3, value=float("inf")),
    OutOfMemoryError("no", step=3, is_torn=True),
    MemoryLimitError("no", limit_bytes=3, held_bytes=2, requested_bytes=2, by_category={"buffers": 2}, where="here"),
    SimulatedOutOfMemoryError("no", requested_bytes=1, allocated_bytes=2, reserved_bytes=3, capacity_bytes=4),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_keep_their_type_message_and_attributes(error: MemfitError) -> None:
    error.add_note("a note")
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error) and str(found) == str(error) and found.exit_status == error.exit_status
    assert vars(found) == vars(error) and found.__notes__ == ["a note"]
