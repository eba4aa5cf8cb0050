"""What others say of the same step's peak: what a user would reach for today instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from memfit.capture import KnownValues, fake_copy
from memfit.ir import Levers, Precision
from memfit.levers import applied
from memfit.workload import Workload, batch_size_of, tensors_of

_DTYPES: dict[str, str] = {"32-true": "float32", "bf16-mixed": "bfloat16"}
_BYTES_PER_PARAMETER: dict[str, int] = {"32-true": 16, "bf16-mixed": 18}


def accelerate_bytes(workload: Workload, precision: Precision) -> int:
    """Return what `accelerate estimate-memory` prints as "Training using Adam" for a model."""
    total, _ = calculate_maximum_sizes(workload.model)
    return int(max(estimate_training_usage(total, _DTYPES[precision]).values()))


def parameter_count_bytes(workload: Workload, precision: Precision) -> int:
    """Return the rule of 16 bytes a parameter (weight, gradient, two moments in fp32), 18 in mixed precision.

    As in transformers' guide "Model memory anatomy", after S. Rajbhandari et al. (2020), *ZeRO*, section 3.1: what
    training takes before activations.
    """
    return sum(p.numel() for p in workload.model.parameters()) * _BYTES_PER_PARAMETER[precision]


def mem_tracker_bytes(workload: Workload, precision: Precision) -> int:
    """Return the peak that `torch.distributed._tools.mem_tracker.MemTracker` gives for two steps under fake tensors.

    It is handed memfit's fake copy, and the values that the step reads: by itself it stops at the first `.item()`.
    """
    values = KnownValues(FakeTensorMode(allow_non_fake_inputs=True))
    copied = dataclasses.replace(fake_copy(workload, values), max_grad_norm=workload.max_grad_norm)
    levers = Levers(precision=precision, microbatch_size=batch_size_of(workload.batch))
    tracker = MemTracker()
    with values.fake, values, values.fake_paths_disabled(), applied(levers, copied) as step:
        tracker.track_external(copied.model, copied.optimizer, *tensors_of(copied.batch))
        with tracker:
            step(copied.batch)
            tracker.reset_mod_stats()  # as its documentation says to, between iterations
            step(copied.batch)
    return sum(int(bytes_of["Total"]) for bytes_of in tracker.get_tracker_snapshot("peak").values())


RIVALS: dict[str, Callable[[Workload, Precision], int]] = {
    "accelerate estimate-memory": accelerate_bytes,
    "MemTracker": mem_tracker_bytes,
    "parameter count": parameter_count_bytes,
}
"""Each by its name in the tables."""
