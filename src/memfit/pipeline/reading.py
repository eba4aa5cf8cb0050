"""What a workload's step reads when it runs with data: once for each microbatch size and precision, asked for."""

from __future__ import annotations

import functools

from memfit.capture.courses import Reading, Readings
from memfit.capture.reads import Policy
from memfit.capture.step import reads_unknown
from memfit.capture.with_data import read_with_data, why_not_here
from memfit.errors import CaptureError
from memfit.ir.plan import Levers
from memfit.pipeline.applying import applied
from memfit.workload import Workload, samples_of

_received: dict[int, Readings] = {}


class WithData:
    """Runs a workload's step with data, to see what its code reads.

    Args:
        workload: The user's workload; nothing of it is changed.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.found: dict[Levers, Readings | None] = {}
        self.policy: Policy | None = None

    def of(self, levers: Levers, *, explores: bool = True) -> Reading:
        """Return what runs the step in the precision and with the microbatches of some levers; it runs once.

        Args:
            levers: The levers.
            explores: Whether other courses of the step are tried too.
        """
        return _Reading(self, Levers(precision=levers.precision, microbatch_size=levers.microbatch_size), explores)


class _Reading:
    def __init__(self, data: WithData, plain: Levers, explores: bool) -> None:
        self.data, self.plain, self.explores = data, plain, explores

    @property
    def policy(self) -> Policy | None:
        return self.data.policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        self.data.policy = policy

    @property
    def known(self) -> Readings | None:
        return self.data.found.get(self.plain) or _received.get(self.plain.microbatch_size)

    def __call__(self) -> Readings | None:
        if self.known is None and self.plain not in self.data.found:
            build = functools.partial(applied, self.plain)
            self.data.found[self.plain] = read_with_data(self.data.workload, build, self.plain.microbatch_size)
        return self.known


def readings_to_send(workload: Workload, sizes: list[int]) -> dict[int, Readings]:
    """Return what the step reads with data here, for a process that has none, by microbatch size.

    Empty where the step reads nothing that isn't known, or can't run here.
    """
    whole = Levers(microbatch_size=samples_of(workload))
    if why_not_here(workload) is not None or not reads_unknown(workload, functools.partial(applied, whole)):
        return {}
    reader = WithData(workload)
    try:
        found = {size: reader.of(Levers(microbatch_size=size))() for size in sizes}
    except CaptureError:  # a step that runs on a GPU only
        return {}
    return {size: readings for size, readings in found.items() if readings is not None}


def receive(readings: dict[int, Readings]) -> None:
    """Take over what another process read."""
    _received.update(readings)
