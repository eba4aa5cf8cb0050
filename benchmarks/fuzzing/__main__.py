"""Fuzzing: random small training steps, whose predictions are held against the allocator and plans against a loop.

Of each step, the predicted peak is to be the measured one in bytes, but for what `checking.saved_number_bytes` bounds;
the same of a plan of class exact for a budget between the leanest plan and the plain step, which is also to keep its
budget, and to leave the losses and the state of a plain loop after two steps, bit by bit. Steps that PyTorch itself
refuses, or whose numbers are not finite, do not count.
"""

from __future__ import annotations

import collections
import gc
import sys
import traceback
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import torch

from benchmarks.common import Case, main
from benchmarks.fuzzing.checking import Checked, Costs, checked
from benchmarks.fuzzing.programs import Program, drawn, from_text, text_of

CASES, QUICK_CASES = 2000, 60
OPTIONS: dict[str, dict[str, Any]] = {
    "--cases": {"type": int, "metavar": "N", "help": f"how many steps (default {CASES}, quick {QUICK_CASES})"},
    "--seed": {"type": int, "default": 0, "help": "of the programs that are drawn"},
    "--first": {"type": int, "default": 0, "metavar": "N", "help": "the number of the first program"},
    "--program": {"metavar": "TEXT", "help": "check this program only, as a report of a failure shows it"},
}


def run(
    quick: bool, cases: int | None = None, seed: int = 0, first: int = 0, program: str | None = None
) -> tuple[list[Case], dict[str, Any]]:
    """Return a row for each step that was wrong, and how many there were.

    Args:
        quick: Fewer steps.
        cases: How many; None for the default.
        seed: Of the programs.
        first: The number of the first program.
        program: The text of the only one to check; None to draw them.
    """
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # measurements collect garbage, which is slow among all the objects of PyTorch
    costs, found, programs = Costs(), [], _drawn(seed, first)
    wanted = cases or (QUICK_CASES if quick else CASES)
    if program is not None:
        programs, wanted = iter([(0, from_text(program))]), 1
    for index, one in programs:
        result = _checked(one, costs)
        if result is not None:
            found.append((index, one, result))
            _report(index, one, result, len(found))
        if len(found) == wanted:
            break
    rows = [_row(*one) for one in found if one[2].wrong]
    return rows, _summary([result for _, _, result in found], seed)


def _drawn(seed: int, first: int) -> Iterator[tuple[int, Program]]:
    index = first
    while True:
        yield index, drawn(Random(f"{seed}:{index}"))
        index += 1


def _checked(program: Program, costs: Costs) -> Checked | None:
    """Return what was found; whatever memfit raises is wrong."""
    try:
        return checked(program, costs)
    except Exception as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        return Checked(wrong=[f"{type(e).__name__}: {e} ({last.filename}:{last.lineno})"])


def _row(index: int, program: Program, result: Checked) -> Case:
    return {
        "program": index,
        "text": text_of(program),
        "wrong": result.wrong,
        "predicted_peak_bytes": result.predicted_bytes,
        "measured_peak_bytes": result.measured_bytes,
        "budget_bytes": result.budget_bytes,
        "planned_peak_bytes": result.planned_bytes,
        "planned_measured_peak_bytes": result.planned_measured_bytes,
    }


def _summary(results: Sequence[Checked], seed: int) -> dict[str, Any]:
    planned = [one for one in results if one.planned_measured_bytes is not None]
    kinds = collections.Counter(said.split(":")[0].split(" is ")[0] for one in results for said in one.wrong)
    return {
        "fuzzed": len(results),
        "fuzzed_wrong": sum(bool(one.wrong) for one in results),
        "fuzzed_planned": len(planned),
        "fuzzed_with_regions": sum(one.regions > 0 for one in planned),
        "fuzzed_seed": seed,
        "fuzzed_wrong_by_kind": dict(kinds),
    }


def _report(index: int, program: Program, result: Checked, done: int) -> None:
    if result.wrong:
        said = "\n  ".join(result.wrong)
        print(f"program {index}:\n  {said}\n  python -m benchmarks.fuzzing --program '{text_of(program)}'", flush=True)
    elif done % 20 == 0:
        print(f"{done} checked, program {index}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main("fuzzing", run, __doc__, options=OPTIONS)
