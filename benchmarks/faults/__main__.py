"""Trainings that are disturbed once, at a random place, and must end as if they had not been.

Each is a training of a recipe, made small, with a plan that recomputes and accumulates, in a process of its own. After
the fault it is resumed until it is done, as a scheduler would. Then its last checkpoint (weights, optimizer state, loss
scaler, random states, data position) and its log are held, bit by bit, against those of the undisturbed run.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Case, main
from benchmarks.faults.figures import summarised, table
from benchmarks.faults.injections import FAULTS
from benchmarks.faults.subjects import SUBJECTS
from benchmarks.faults.trials import Prepared, prepare, trial
from memfit.errors import UsageError

TRIALS, QUICK_TRIALS = 8, 2
MAX_DRAWS = 5
OPTIONS: dict[str, dict[str, Any]] = {
    "--subjects": {"nargs": "+", "metavar": "NAME", "help": f"of {'; '.join(SUBJECTS)}"},
    "--faults": {"nargs": "+", "metavar": "NAME", "help": f"of {'; '.join(FAULTS)}"},
    "--trials": {"type": int, "help": f"of each fault on each subject; {TRIALS} by default, {QUICK_TRIALS} if quick"},
}


def run(
    quick: bool,
    subjects: Sequence[str] | None = None,
    faults: Sequence[str] | None = None,
    trials: int | None = None,
) -> tuple[list[Case], dict[str, Any]]:
    """Return a row for each injection, and how many there were, were survived, lost updates or doubled them.

    Raises:
        UsageError: There is no subject or fault of a name.
    """
    unknown = {*(subjects or ())} - {*SUBJECTS} | {*(faults or ())} - {*FAULTS}
    if unknown:
        raise UsageError(f"--subjects and --faults: {sorted(unknown)} are none; there are {[*SUBJECTS, *FAULTS]}")
    torch.set_num_threads(1)
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="memfit-faults-") as folder:
        for index, name in enumerate(subjects or SUBJECTS):
            place = Path(folder, str(index))
            prepared = prepare(SUBJECTS[name], place / "undisturbed")
            for fault in faults or FAULTS:
                if FAULTS[fault].concerns(prepared.subject):
                    count = trials or (QUICK_TRIALS if quick else TRIALS)
                    cases += _trials(prepared, fault, count, place / fault.replace(" ", "-"))
    print(table(cases))
    return cases, summarised(cases)


def _trials(prepared: Prepared, fault: str, count: int, place: Path) -> list[Case]:
    """Return that many trials of a fault; those that the run ended before are drawn again.

    Raises:
        RuntimeError: The fault does not strike.
    """
    found: list[Case] = []
    for seed in itertools.count():
        if seed > MAX_DRAWS * count:
            raise RuntimeError(f"{fault!r} struck {prepared.subject.name!r} {len(found)} times in {seed} runs")
        case = trial(prepared, fault, seed, place / str(seed))
        found += [] if case is None else [case]
        if len(found) == count:
            break
    survived = sum(case["survived"] for case in found)
    print(f"{prepared.subject.name}: {fault}: {survived} of {count} survived", file=sys.stderr, flush=True)
    for case in found:
        if case["wrong"]:
            print(f"  seed {case['seed']}, statuses {case['statuses']}: {'; '.join(case['wrong'])}", file=sys.stderr)
    return found


if __name__ == "__main__":
    main("faults", run, __doc__, options=OPTIONS)
