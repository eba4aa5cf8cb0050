"""What `memfit run` adds to the first two steps of a script: at its first start, and when it is started again.

Four scripts as people write them (`benchmarks/start/scripts`), none of which knows memfit, run as they are, then in a
budget with nothing kept from before, then once more. What a start costs is the time until its second step has ended,
less the plain script's. It may cost 10 plain steps or 15 s, whichever is longer, and 3 s where the script is started
again. Seconds are the clock's: on a machine that does other work too, compare those of processors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common import Case, main
from benchmarks.start.cases import BUDGETS, line, measured, summarised
from memfit.errors import UsageError

QUICK = ("diffusion",)
OPTIONS: dict[str, dict[str, Any]] = {"--only": {"nargs": "+", "metavar": "NAME", "help": "some scripts"}}


def run(quick: bool, only: Sequence[str] | None = None) -> tuple[list[Case], dict[str, Any]]:
    """Return a row of each script, and what they add up to.

    Args:
        quick: One script.
        only: The scripts of these names; None for all.

    Raises:
        UsageError: There is no script of a name.
    """
    if unknown := set(only or ()) - BUDGETS.keys():
        raise UsageError(f"--only {' '.join(sorted(unknown))}: there are {', '.join(BUDGETS)}")
    cases = []
    for name in only or (QUICK if quick else BUDGETS):
        cases.append(measured(name))
        print(line(cases[-1]), file=sys.stderr, flush=True)
    return cases, summarised(cases)


if __name__ == "__main__":
    main("start", run, __doc__, options=OPTIONS)
