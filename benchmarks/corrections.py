"""How right the roofline's kernel times are on an accelerator that is here, and by what they are to be multiplied.

For each class of operators and dtype, the factor is the weighted median of measured over modelled seconds, which
minimises the mean |log(predicted / measured)|, longer calls weighing more (by the root of their seconds), as
`benchmarks/roofline.py` does it. Calls that take little longer than their launch say nothing of kernels and are left
out. Each model's step is then predicted with the factors that all others give.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.common import Case, main
from benchmarks.roofline import PRECISIONS, WORKLOADS, Call, calls_of
from memfit import ir
from memfit.cost import AcceleratorCosts, accelerator_cache, check_figures, key_of
from memfit.errors import UsageError
from memfit.hardware import find_device
from memfit.ir import Device

LEAST_CALLS = 5
"""Distinct calls of a class and dtype that a factor is taken from, at least."""
_ABOVE_LAUNCH = 1.5
_QUICK = ("byte_lm", "digits_resnet")

Factors = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Compared:
    """A distinct call, measured and modelled.

    Attributes:
        kind: Its class and dtype.
        kernel_seconds: As the roofline has it, without corrections.
        floor_seconds: The least time from one such operator to the next.
    """

    kind: tuple[str, str]
    seconds: float
    times: int
    kernel_seconds: float
    floor_seconds: float

    @property
    def tells(self) -> bool:
        """Whether its time is that of kernels."""
        return self.kernel_seconds > 0 and self.seconds > _ABOVE_LAUNCH * self.floor_seconds

    def predicted(self, factors: Factors) -> float:
        """Return its time with corrected kernels."""
        return max(self.kernel_seconds * factors.get(self.kind, 1.0), self.floor_seconds)


def compared(call: Call, device: Device) -> Compared:
    """Return a call beside the roofline's figures for a device."""
    operator = replace(call.operator, device=device)
    return Compared(call.kind, call.seconds, call.times, operator.kernel_seconds, operator.floor_seconds)


def factors_of(rows: Iterable[Compared]) -> dict[tuple[str, str], float]:
    """Return the factor of each class and dtype of which enough calls tell one."""
    by_kind: dict[tuple[str, str], list[Compared]] = defaultdict(list)
    for row in rows:
        if row.tells:
            by_kind[row.kind].append(row)
    return {kind: _middle(found) for kind, found in sorted(by_kind.items()) if len(found) >= LEAST_CALLS}


def _middle(rows: list[Compared]) -> float:
    """Return the weighted median of measured over modelled seconds."""
    ordered = sorted((row.seconds / row.kernel_seconds, math.sqrt(row.seconds)) for row in rows)
    passed = itertools.accumulate(weight for _, weight in ordered)
    half = sum(weight for _, weight in ordered) / 2
    return next(ratio for (ratio, _), weight in zip(ordered, passed, strict=True) if weight >= half * (1 - 1e-9))


def left_out(name: str, precision: str, rows: list[Compared], others: list[Compared]) -> Case:
    """Return how well a model's step is predicted with the factors of other models, and without any."""
    truth = sum(row.seconds * row.times for row in rows)
    factors = factors_of(others)
    predicted, estimated = (sum(row.predicted(f) * row.times for row in rows) for f in (factors, {}))
    return {
        "workload": name,
        "precision": precision,
        "operators": len(rows),
        "measured_seconds": truth,
        "predicted_seconds": predicted,
        "error": predicted / truth - 1,
        "estimated_seconds": estimated,
        "estimated_error": estimated / truth - 1,
    }


def device_with_rates(name: str, rates: Path | None = None) -> Device:
    """Return an accelerator of this machine, with the vendor's figures or else those of a probe.

    Args:
        rates: What `memfit tools probe-devices --output` wrote.

    Raises:
        UsageError: Neither has its figures.
    """
    found = find_device(name)
    try:
        check_figures(found)
        return found
    except UsageError:
        if rates is None or not rates.exists():
            raise
    os.environ["MEMFIT_DEVICES"] = str(rates)
    found = find_device(name)
    check_figures(found)
    return found


def is_probed(device: Device) -> bool:
    """Tell whether a device's figures are those of a probe."""
    return device.sources.get("bandwidth_bytes_per_second", "").startswith("measured")


def run(quick: bool, device: str, rates: Path | None = None) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each model that was left out, and the factors of all together."""
    found = device_with_rates(device, rates)
    calls = {
        (n, p): list(calls_of(WORKLOADS[n], p, found)) for n in (_QUICK if quick else WORKLOADS) for p in PRECISIONS
    }
    measured = ir.codec.read(accelerator_cache(found, "highest"), AcceleratorCosts)
    launched = replace(found, launch_seconds=measured.launch_seconds)
    rows = {key: [compared(call, launched) for call in known] for key, known in calls.items()}
    cases = []
    for (name, precision), own in rows.items():
        others = [row for (other, _), known in rows.items() if other != name for row in known]
        case = left_out(name, precision, own, others)
        print(f"{name:20} {precision:10} {case['error']:+.1%}, without corrections {case['estimated_error']:+.1%}")
        cases.append(case)
    return cases, {
        "key": key_of(found, probed=is_probed(found)),
        "cases": len(cases),
        "median_abs_error": statistics.median(abs(case["error"]) for case in cases),
        "median_abs_estimated_error": statistics.median(abs(case["estimated_error"]) for case in cases),
        "factors": _told([row for known in rows.values() for row in known]),
    }


def _told(rows: list[Compared]) -> list[dict[str, Any]]:
    """Return the factors, with how many calls each is from and how far these are off with it."""
    told = []
    for kind, factor in factors_of(rows).items():
        own = [row for row in rows if row.kind == kind and row.tells]
        errors = [abs(math.log(row.kernel_seconds * factor / row.seconds)) for row in own]
        middle = math.exp(statistics.median(errors))
        told.append({"class": kind[0], "dtype": kind[1], "factor": factor, "calls": len(own), "median_factor": middle})
    return told


if __name__ == "__main__":
    main(
        "corrections",
        run,
        __doc__,
        options={
            "--device": {"required": True, "help": "an accelerator of this machine, such as cuda"},
            "--rates": {"type": Path, "metavar": "FILE", "help": "a probe's, where the catalogue lacks the device"},
        },
    )
