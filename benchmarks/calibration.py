"""Makes the error bars of predictions from results: `python -m benchmarks.calibration [FILE]` for those of the CPU.

`benchmarks.gpu` makes those of an accelerator, beside the corrections of its modelled times.

How honest they are is in the file as well: the share of the steps within the upper end that all other workloads give.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Case
from benchmarks.tables import ROOT, newest
from memfit import ir
from memfit.cost import Calibration, CardMeasurement, CardMeasurements
from memfit.errors import UsageError
from memfit.ir import write_atomic

RATE = 0.98
FLOOR = 0.001
"""The zoo's predictions are right to far less, but it does not have every model, and one machine measured it."""
CARD_FLOOR = 0.01
"""The same on an accelerator, where another driver or library may choose algorithms with other workspaces."""
_ROUNDING = 1e-9  # of rates such as 0.9
TARGET = ROOT / "src" / "memfit" / "cost" / "calibration.json"
CARDS = ROOT / "src" / "memfit" / "cost" / "card_measurements.json"

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


def measured_card(
    predictions: Mapping[str, Any], corrections: Mapping[str, Any], sources: Sequence[str], rate: float = RATE
) -> CardMeasurement:
    """Return what an accelerator's results say of predictions for it and for others of its family.

    Args:
        predictions: A result of `benchmarks.prediction` there.
        corrections: A result of `benchmarks.corrections` there.
        sources: Their files.
    """
    done = [case for case in predictions["cases"] if "measured_peak_bytes" in case]
    scores = [(case["workload"], score(case)) for case in done]
    times = [time_score(case) for case in done if "step_error" in case]
    factors: dict[str, dict[str, float]] = {}
    for one in corrections["summary"]["factors"]:
        factors.setdefault(one["class"], {})[one["dtype"]] = one["factor"]
    peak_error, step_error = (_error_if_enough(values, rate) for values in ([s for _, s in scores], times))
    try:
        coverage = _share(covered for _, covered in leave_one_out(scores, rate))
    except ValueError:  # too few workloads to leave one out
        coverage = None
    return CardMeasurement(
        device=predictions["machine"]["accelerator"],
        sources=tuple(sources),
        torch_version=predictions["versions"]["torch"],
        date=predictions["date"],
        rate=rate,
        cases=len(scores),
        workloads=len({name for name, _ in scores}),
        peak_error=None if peak_error is None else max(peak_error, CARD_FLOOR),
        step_error=step_error,
        coverage=coverage,
        time_factors=factors,
    )


def _error_if_enough(scores: Sequence[float], rate: float) -> float | None:
    """Return the share that holds for a rate of new steps; None where the scores are too few, and estimates stay."""
    try:
        return upper_error(scores, rate)
    except ValueError:
        return None


def calibrate_card(predictions: Path, corrections: Path, target: Path, rate: float = RATE) -> CardMeasurement:
    """Add what an accelerator's results say to a file of measurements; what it says of other families stays.

    Raises:
        UsageError: A result is missing.
    """
    for path in (predictions, corrections):
        if not path.exists():
            raise UsageError(f"{path} is missing, from which error bars and rates are made: measure that part first")
    results = [json.loads(path.read_text()) for path in (predictions, corrections)]
    found = measured_card(results[0], results[1], [predictions.name, corrections.name], rate)
    known = ir.codec.read(target, CardMeasurements).cards if target.exists() else {}
    cards = {**known, results[1]["summary"]["key"]: found}
    write_atomic(target, ir.codec.encode(CardMeasurements(cards=cards)))
    return found


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
    """Return how far the measured peak is above the predicted one, as a share of the predicted; reserved if counted."""
    if "reserved_error" in case:
        return float(1 / (1 + case["reserved_error"]) - 1)
    return float(case["measured_peak_bytes"] / case["predicted_peak_bytes"] - 1)


def score_without_workspaces(case: Case) -> float:
    """Return the same had no operator's buffers been measured: those at the peak are taken off the prediction."""
    blind: int = case["predicted_peak_bytes"] - case["workspace_bytes"]
    return float(case["measured_peak_bytes"] / blind - 1)


def time_score(case: Case) -> float:
    """Return how far the measured time is from the predicted one, as a share of the predicted."""
    return abs(float(1 / (1 + case["step_error"]) - 1))


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
    write_atomic(TARGET, ir.codec.encode(calibrated(json.loads(path.read_text()), source)))
    print(TARGET.read_text())


if __name__ == "__main__":
    main()
