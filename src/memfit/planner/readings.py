"""Values that a workload's step reads with data, by microbatch size and precision."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from memfit.capture import DataRun, Policy, Readings, read_with_data, reads_unknown, why_no_data_run
from memfit.errors import CaptureError
from memfit.ir import Levers
from memfit.levers import applied
from memfit.workload import Workload, samples_of

_received: dict[int, Readings] = {}


class DataRuns:
    """Runs of a workload's step with data, which record the values that its code reads."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.readings: dict[Levers, Readings | None] = {}
        self.policy: Policy | None = None

    def of(self, levers: Levers, *, explores: bool = True) -> DataRun:
        """Return the run of the step with the precision and the microbatch size of some levers; each runs once.

        Where it explores, other control-flow paths of the step are tried too.
        """
        return _DataRun(self, Levers(precision=levers.precision, microbatch_size=levers.microbatch_size), explores)


class _DataRun:
    def __init__(self, data: DataRuns, plain: Levers, explores: bool) -> None:
        self.data, self.plain, self.explores = data, plain, explores

    @property
    def policy(self) -> Policy | None:
        return self.data.policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        self.data.policy = policy

    @property
    def known(self) -> Readings | None:
        return self.data.readings.get(self.plain) or _received.get(self.plain.microbatch_size)

    def __call__(self) -> Readings | None:
        if self.known is None and self.plain not in self.data.readings:
            build = functools.partial(applied, self.plain)
            self.data.readings[self.plain] = read_with_data(self.data.workload, build, self.plain.microbatch_size)
        return self.known


def readings_to_send(workload: Workload, sizes: Sequence[int]) -> dict[int, Readings]:
    """Return the step's readings with data, by microbatch size, for a process that has no data.

    Empty where the step reads known values only, or can't run here.
    """
    whole = Levers(microbatch_size=samples_of(workload))
    if why_no_data_run(workload) is not None or not reads_unknown(workload, functools.partial(applied, whole)):
        return {}
    runs = DataRuns(workload)
    try:
        by_size = {size: runs.of(Levers(microbatch_size=size))() for size in sorted(set(sizes))}
    except CaptureError:  # a step that runs on a GPU only
        return {}
    return {size: readings for size, readings in by_size.items() if readings is not None}


def receive(readings: dict[int, Readings]) -> None:
    """Store readings of another process."""
    _received.update(readings)
