"""Operators: what each makes on fake tensors, held against its real kernel, on PyTorch's own samples (`OpInfo`).

Samples are contiguous, transposed, channels-last, expanded and sliced, and with one transposed operand. Every operator
that runs in either pass is called once for each signature: strides, offsets, storage sizes and aliases of its outputs
must be the same. With `--peaks`, the bytes that the first sample allocates are held against the allocator too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Case, main
from benchmarks.operators.comparing import Fakes, Operators, Whole, compared
from benchmarks.operators.listed import listed, listed_peak
from benchmarks.operators.samples import dtype_of, operators, samples

SAMPLES, EVERY = 3, 12
OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"nargs": "*", "metavar": "NAME", "help": "these operators of PyTorch's list only"},
    "--samples": {"type": int, "default": SAMPLES, "metavar": "N", "help": f"of each (default {SAMPLES})"},
    "--peaks": {"action": "store_true", "help": "the bytes that samples allocate too; takes four times as long"},
    "--rows": {"type": Path, "metavar": "FILE", "help": "go on with a run that was cut short: its rows are kept there"},
}


def run(
    quick: bool, only: list[str] | None = None, samples: int = SAMPLES, peaks: bool = False, rows: Path | None = None
) -> tuple[list[Case], dict[str, Any]]:
    """Return a row for each operator of PyTorch's list, and what they add up to.

    Args:
        quick: One of some operators.
        only: Names of operators; None for all.
        samples: How many of each.
        peaks: Whether allocated bytes are compared too.
        rows: A file with rows of before; None for none.
    """
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # measurements collect garbage, which is slow among all the objects of PyTorch
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    chosen = [op for op in operators() if not only or op.name in only][:: EVERY if quick and not only else 1]
    lines = rows.read_text().splitlines() if rows is not None and rows.exists() else []
    known = {(row["operator"], row["variant"]): row for row in map(json.loads, lines)}
    mode, whole, found = Operators(Fakes()), Whole() if peaks else None, list[Case]()
    for op in chosen:
        row = known.get((op.name, op.variant_test_name))
        if row is None:
            row = _row(op, samples, mode, whole)
            if rows is not None:
                with rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        found.append(row)
        for one in row["different"]:
            print(f"{op.name}: {one['call']}: {one['said']}", file=sys.stderr, flush=True)
        for peak in row["peaks"]:
            if peak.get("reason") == "":
                text = f"predicted {peak['predicted_bytes']} bytes, measured {peak['measured_bytes']}"
                print(f"{op.name}: peak: {text}", file=sys.stderr, flush=True)
    return found, _summary(found)


def _row(op: Any, most: int, mode: Operators, whole: Whole | None) -> Case:
    before, refused = len(mode.seen), Counter[str]()
    different: list[Case] = []
    known: list[Case] = []
    peaks: list[Case] = []
    samples_run = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _counted(refused):
            for sample in samples(op, dtype_of(op), most):
                torch.manual_seed(0)
                with _counted(refused):
                    samples_run += 1
                    compared(sample, mode)
                    if whole is not None and sample.layout == "contiguous" and not peaks:
                        peak = whole.peaks(sample)
                        peaks.append(_peak_row(op.name, peak.predicted_bytes, peak.measured_bytes))
    for name, call, said in mode.found:
        reason = listed(name, said)
        case = {"call": name, "signature": call, "said": said}
        (known if reason else different).append({**case, "reason": reason} if reason else case)
    mode.found.clear()
    return {
        "operator": op.name,
        "variant": op.variant_test_name,
        "samples": samples_run,
        "calls": len(mode.seen) - before,
        "different": different,
        "listed": known,
        "peaks": peaks,
        "refused": dict(refused),
    }


def _peak_row(operator: str, predicted_bytes: int, measured_bytes: int) -> Case:
    row: Case = {"predicted_bytes": predicted_bytes, "measured_bytes": measured_bytes}
    if predicted_bytes != measured_bytes:
        row["reason"] = listed_peak(operator)
    return row


@contextlib.contextmanager
def _counted(refused: Counter[str]) -> Iterator[None]:
    """Count errors of PyTorch's own: layouts and dtypes that an operator does not take."""
    try:
        yield
    except Exception as e:
        refused[type(e).__name__] += 1


def _summary(rows: list[Case]) -> dict[str, Any]:
    peaks = [peak for row in rows for peak in row["peaks"]]
    reasons = [peak["reason"] for peak in peaks if "reason" in peak]
    return {
        "operators": len(rows),
        "operator_samples": sum(row["samples"] for row in rows),
        "operator_samples_refused": sum(sum(row["refused"].values()) for row in rows),
        "operator_calls": sum(row["calls"] for row in rows),
        "operator_differences": sum(len(row["different"]) for row in rows),
        "operator_differences_listed": sum(len(row["listed"]) for row in rows),
        "operator_peaks": len(peaks),
        "operator_peak_differences": sum(not reason for reason in reasons),
        "operator_peak_differences_listed": sum(bool(reason) for reason in reasons),
    }


if __name__ == "__main__":
    main("operators", run, __doc__, options=OPTIONS)
