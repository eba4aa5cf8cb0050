"""Makes the error bars of predicted peaks from a committed result: `python -m benchmarks.calibration [FILE]`.

How honest they are is in the file as well: the share of the steps within the upper end that all other workloads give.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Case
from benchmarks.tables import ROOT, newest
from memfit.cost.error_bars import Calibration
from memfit.ir.codec import encode, write_atomic

RATE = 0.98
FLOOR = 0.001
"""The zoo's predictions are right to far less, but it does not have every model, and one machine measured it."""
_ROUNDING = 1e-9  # of rates such as 0.9
TARGET = ROOT / "src" / "memfit" / "cost" / "calibration.json"

Scored = tuple[str, float]
"""A workload, and the score of one of its steps."""


def calibrated(result: dict[str, Any], source: str, rate: float = RATE) -> Calibration:
    """Return the error bars that a result of `benchmarks.prediction` on a CPU gives."""
    done = [case for case in result["cases"] if "measured_peak_bytes" in case]
    scores = [(case["workload"], score(case)) for case in done]
    blind = [(case["workload"], score_without_workspaces(case)) for case in done]
    quantile = upper_error([s for _, s in scores], rate)
    inside = leave_one_out(scores, rate)
    missed = {name for name, covered in inside if not covered}
    names = {name for name, _ in scores}
    return Calibration(
        source=source,
        command=result["command"],
        machine=result["machine"]["description"],
        torch_version=result["versions"]["torch"],
        date=result["date"],
        rate=rate,
        cases=len(scores),
        workloads=len(names),
        quantile=quantile,
        floor=FLOOR,
        peak_error=max(quantile, FLOOR),
        unmeasured_peak_error=max(upper_error([s for _, s in blind], rate), FLOOR),
        coverage=_share(covered for _, covered in inside),
        unmeasured_coverage=_share(covered for _, covered in leave_one_out(blind, rate)),
        workloads_covered=1 - len(missed) / len(names),
    )


def upper_error(scores: Sequence[float], rate: float) -> float:
    """Return the share by which upper ends lie above predictions, at least 0.

    Args:
        scores: The relative excess of the measured over the predicted peak, for each step.
        rate: The share of new steps that must be within (0 to 1, exclusive).

    Raises:
        ValueError: There are fewer than rate / (1 - rate) scores.
    """
    rank = math.ceil((len(scores) + 1) * rate - _ROUNDING)
    if rank > len(scores):
        enough = math.ceil(rate / (1 - rate) - _ROUNDING)
        raise ValueError(f"{len(scores)} scores are too few for rate={rate}: give {enough} or more")
    return max(0.0, sorted(scores)[rank - 1])


def score(case: Case) -> float:
    """Return how far the measured peak is above the predicted one, as a share of the predicted."""
    return float(case["measured_peak_bytes"] / case["predicted_peak_bytes"] - 1)


def score_without_workspaces(case: Case) -> float:
    """Return the same had no operator's buffers been measured: those at the peak are taken off the prediction."""
    blind: int = case["predicted_peak_bytes"] - case["workspace_bytes"]
    return float(case["measured_peak_bytes"] / blind - 1)


def leave_one_out(scores: Sequence[Scored], rate: float) -> list[tuple[str, bool]]:
    """Return whether each step is within the upper end that the steps of all other workloads give."""
    found: list[tuple[str, bool]] = []
    for left_out in dict.fromkeys(name for name, _ in scores):
        bar = upper_error([s for name, s in scores if name != left_out], rate)
        found += [(name, s <= bar) for name, s in scores if name == left_out]
    return found


def _share(covered: Iterable[bool]) -> float:
    values = list(covered)
    return float(sum(values) / len(values))


def main() -> None:
    """Write the package's error bars."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibration", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="a result; the newest committed one by default")
    path = (parser.parse_args().file or newest("prediction")).resolve()
    source = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    write_atomic(TARGET, encode(calibrated(json.loads(path.read_text()), source)))
    print(TARGET.read_text())


if __name__ == "__main__":
    main()
