"""Measured savings of proposals, in the prediction benchmark's terms."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.common import whole_run_peak_bytes
from memfit.capture import nothing_changes
from memfit.ir import Levers
from memfit.structure import Proposal
from memfit.workload import Workload, batch_size_of
from tests.models import cross_entropy


def classifier(model: nn.Module, x: torch.Tensor, classes: int) -> Workload:
    """Return the step of a model by SGD on random labels."""
    batch = {"x": x, "y": torch.randint(0, classes, (len(x),))}
    return Workload(model, batch, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))


def measured_peak_bytes(workload: Workload) -> int:
    """Return the allocator's peak over a run of two plain steps of a copy, its making included."""
    with nothing_changes(workload):
        return whole_run_peak_bytes(workload, Levers(microbatch_size=batch_size_of(workload.batch)))


def savings(original: Workload, found: Proposal) -> tuple[int, int]:
    """Return the bytes that a proposal saves, as it predicts and as measured."""
    measured = measured_peak_bytes(original) - measured_peak_bytes(found.workload)
    return found.before.peak_bytes - found.after.peak_bytes, measured
