"""Published figures beside predicted ones, and what they add up to."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.calibration import upper_error
from benchmarks.common import Case
from benchmarks.published.rows import Row, Source
from memfit.cost import KERNELS_BYTES

WITHIN_SECONDS, WITHIN_RATIO = 0.30, 0.15
RATE = 0.95
"""The wanted share of figures within their intervals."""
MEMORY = ("allocated", "after", "reserved", "process")
"""The figures that are bytes. `after` is counted as allocated; `process` holds the context, as `reserved` does not."""


def compared(source: str, row: Row, found: Case) -> Case:
    """Return a row of the result: what was published, what is predicted, and how far that is off."""
    case: Case = {
        "id": row.id,
        "source": source,
        "grade": row.grade,
        "what": row.what,
        "options": row.options,
        "device": row.device,
        "precision": row.precision,
        **{key: value for key, value in found.items() if key != "id"},
    }
    if "failed" in found:
        return case
    case["predicted"] = _predicted(row, found)
    case["published"] = {name: getattr(row, name) for name in (*MEMORY, "step") if getattr(row, name) is not None}
    case["errors"] = {name: case["predicted"][name] / value - 1 for name, value in case["published"].items()}
    case["interval"] = found["upper_bytes"] / found["reserved_bytes"] - 1
    case["scores"] = {name: _score(row, found, name) for name in MEMORY if name in case["published"]}
    case["within"] = {name: score <= 1 for name, score in case["scores"].items()}
    if row.fits is not None:
        case["published_fits"], case["fits"] = row.fits, found["fits"]
    return case


def _predicted(row: Row, found: Case) -> dict[str, Any]:
    """Return the predicted figures by the names of the published ones."""
    return {
        "allocated": found["allocated_bytes"],
        "after": found["after_bytes"],
        "reserved": found["reserved_bytes"],
        "process": found["reserved_bytes"] + _outside(row, found)[1],
        "step": found["step_seconds"],
    }


def _outside(row: Row, found: Case) -> tuple[int, int, int]:
    """Return what is outside of the allocator, as the row's meter shows it: at least, probably, and at most.

    It is known where the source measured it. Elsewhere the least is half of the context: its driver's part alone.
    """
    if row.idle is None:
        least, likely, most = found["context_bytes"] // 2, found["context_bytes"], found["context_upper_bytes"]
    else:
        loaded = found["context_upper_bytes"] - found["context_bytes"] - KERNELS_BYTES  # cuDNN's, where it is needed
        least = likely = most = row.idle + (loaded if row.loads_all else 0)
    return least + row.driver, likely + row.driver, most + row.driver


def _score(row: Row, found: Case, name: str) -> float:
    """Return how far a published figure is from the predicted one, as a share of the way to the interval's end."""
    predicted, published = _predicted(row, found)[name], getattr(row, name)
    low, high = _interval(row, found, name)
    end = high if published > predicted else low
    return float(abs(published - predicted) / abs(end - predicted)) if published != predicted else 0.0


def left_out_intervals(cases: Sequence[Case]) -> dict[str, tuple[float, list[bool]]]:
    """Return by source the width of interval that the other sources need, and which of its own figures are within.

    The width is a share of the stated interval: that which has `RATE` of the others' figures in it
    (`benchmarks.calibration`), and the whole where they are too few.
    """
    scores: dict[str, list[float]] = {}
    for case in cases:
        scores.setdefault(case["source"], []).extend(case.get("scores", {}).values())
    found = {}
    for name, own in scores.items():
        others = [score for other, values in scores.items() if other != name for score in values]
        width = upper_error(others, RATE) if len(others) >= RATE / (1 - RATE) else 1.0
        found[name] = (width, [score <= width for score in own])
    return found


def _interval(row: Row, found: Case, name: str) -> tuple[float, float]:
    """Return the stated interval around a predicted figure."""
    error = found["upper_bytes"] / found["reserved_bytes"] - 1
    if name != "process":
        predicted = _predicted(row, found)[name]
        return predicted * (1 - error), predicted * (1 + error)
    least, _, most = _outside(row, found)
    return found["reserved_bytes"] * (1 - error) + least, found["upper_bytes"] + most


def summarised(cases: Sequence[Case], sources: dict[str, Source]) -> dict[str, Any]:
    """Return the figures that the docs quote."""
    done = [case for case in cases if "failed" not in case]
    allocated = _errors(done, ("allocated", "after"))
    device = _errors(done, ("reserved", "process"))
    steps = _errors(done, ("step",))
    ratios = [ratio for name in sources for ratio in ratio_errors([case for case in done if case["source"] == name])]
    within = [inside for case in done for inside in case["within"].values()]
    left_out = left_out_intervals(done)
    fits = [case["fits"] == case["published_fits"] for case in done if "fits" in case and "published_fits" in case]
    return {
        "rows": len(done),
        "failed": len(cases) - len(done),
        "sources": len({case["source"] for case in done}),
        "left_out": sum(len(source.left_out) for source in sources.values()),
        "allocated_figures": len(allocated),
        "allocated_median_abs_error": _median(allocated),
        "allocated_p90_abs_error": _p90(allocated),
        "device_figures": len(device),
        "device_median_abs_error": _median(device),
        "device_p90_abs_error": _p90(device),
        "byte_figures": len(within),
        "within_interval": _share(within),
        "within_left_out_interval": _share([inside for _, own in left_out.values() for inside in own]),
        "left_out_widths": {name: width for name, (width, _) in left_out.items()},
        "fit_figures": len(fits),
        "fit_right": _share(fits),
        "times": len(steps),
        "time_within_30_percent": _share([error <= WITHIN_SECONDS for error in steps]),
        "time_ratios": len(ratios),
        "time_ratio_within_15_percent": _share([error <= WITHIN_RATIO for error in ratios]),
    }


def ratio_errors(cases: Sequence[Case]) -> list[float]:
    """Return how far the ratio of two neighbouring settings' step times is off, for the rows of one source."""
    timed = [case for case in cases if "step" in case.get("published", {})]
    pairs = ((a, b) for a, b in itertools.pairwise(timed) if a["device"] == b["device"] and _kin(a) == _kin(b))
    return [abs((1 + b["errors"]["step"]) / (1 + a["errors"]["step"]) - 1) for a, b in pairs]


def _kin(case: Case) -> str:
    """Return the name that settings of one step share: that of the group, or of the source where all are one step."""
    return str(case["id"]).split("/")[0] if "/" in case["id"] else str(case["source"])


def _errors(cases: Iterable[Case], names: Sequence[str]) -> list[float]:
    return sorted(abs(case["errors"][name]) for case in cases for name in names if name in case["errors"])


def _median(errors: Sequence[float]) -> float | None:
    return statistics.median(errors) if errors else None


def _p90(errors: Sequence[float]) -> float | None:
    """Return the 90th percentile, by the nearest rank."""
    return errors[math.ceil(0.9 * len(errors)) - 1] if errors else None


def _share(answers: Sequence[bool]) -> float | None:
    return sum(answers) / len(answers) if answers else None
