"""Error bars of predicted peaks, from measured steps by split conformal prediction.

The score of a step is the share by which its measured peak is above the predicted one (negative where it is below).
The upper end of a new prediction lies above it by the ⌈(n + 1) · rate⌉-th smallest of n scores, so that a new step's
peak is at most that with probability `rate` or more, if it is like those measured (exchangeable).

V. Vovk, A. Gammerman, G. Shafer (2005), *Algorithmic Learning in a Random World*; J. Lei, M. G'Sell, A. Rinaldo,
R. Tibshirani, L. Wasserman (2018), *Distribution-Free Predictive Inference for Regression*, algorithm 2 and theorem
2.2. Ours is one-sided and relative, with a model that is fitted to nothing.
"""

from __future__ import annotations

import functools
import importlib.resources

import msgspec

from memfit.ir import codec


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Error bars of predicted peaks on the CPU, and where they come from.

    Attributes:
        source: The result file.
        command: The command that made the source.
        machine, torch_version, date: Those of the measurements.
        rate: The wanted share of steps whose measured peak is within the upper end.
        cases: The number of steps measured.
        workloads: The number of their workloads.
        quantile: The share by which upper ends lie above predictions for that rate, from the scores.
        floor: The least share in use, chosen and not measured: for steps unlike those of the source.
        peak_error: The larger of the two: the share in use.
        unmeasured_peak_error: The same where the workspaces of operators are not known.
        coverage: Share of the steps within the upper end that the quantile of the other workloads gives, without
            the floor (leave one workload out).
        unmeasured_coverage: The same where the workspaces of operators are not known.
        workloads_covered: Share of the workloads whose steps are all covered, without the floor.
    """

    schema: str = "memfit.calibration/1"
    source: str
    command: str
    machine: str
    torch_version: str
    date: str
    rate: float
    cases: int
    workloads: int
    quantile: float
    floor: float
    peak_error: float
    unmeasured_peak_error: float
    coverage: float
    unmeasured_coverage: float
    workloads_covered: float


@functools.cache
def calibration() -> Calibration:
    """Return the calibration of this version, made by `python -m benchmarks.calibration`."""
    file = importlib.resources.files("memfit.cost") / "calibration.json"
    return codec.decode(file.read_bytes(), Calibration, source=str(file))
