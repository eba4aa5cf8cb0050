"""`python -m tests.cli.metered REPORT (plain | BUDGET) SCRIPT ARGS...`: a script as it is or by `memfit run`, measured.

REPORT gets the peak of what PyTorch's allocator gave to the process while it trained.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from memfit.cli import main as memfit_main
from tests.measuring import peak_bytes_of


def main() -> None:
    report, budget, script, *arguments = sys.argv[1:]
    if budget == "plain":
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path(script).parent))
        _, peak_bytes = peak_bytes_of(lambda: runpy.run_path(script, run_name="__main__"))
    else:
        sys.argv = ["memfit", "run", "--budget", budget, script, *arguments]
        _, peak_bytes = peak_bytes_of(_memfit)
    Path(report).write_text(str(peak_bytes))


def _memfit() -> None:
    try:
        memfit_main()
    except SystemExit as e:
        if e.code:
            raise


if __name__ == "__main__":
    main()
