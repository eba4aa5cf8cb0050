"""Well-known figures about memory in training, predicted and measured: `docs/results/claims.md` is made from them.

What is predicted for GPUs is not yet measured on CUDA; what is measured is measured on this CPU, smaller.
`python -m benchmarks.claims_page` makes the page from the committed result.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.claims_measured import measured
from benchmarks.common import Case, main
from memfit import hardware


def predicted(quick: bool) -> list[Case]:
    """Return the predictions for GPUs, made in a process with fake CUDA tensors.

    Raises:
        OSError: No process here can have them; says why.
    """
    reason = hardware.shim.why_not()
    if reason is not None:
        raise OSError(f"fake CUDA tensors can't be had here: {reason}")
    with tempfile.TemporaryDirectory(prefix="memfit-claims-") as folder:
        out = Path(folder, "cases.json")
        line = hardware.shim.command("benchmarks.claims_predicted", str(out), *(["quick"] if quick else []))
        subprocess.run(line, check=True)
        found: list[Case] = json.loads(out.read_text())
    return found


def run(quick: bool) -> tuple[list[Case], dict[str, Any]]:
    """Return every case, and how far predicted peaks were from those measured here."""
    cases = [*measured(quick), *predicted(quick)]
    errors = [
        abs(c["predicted_peak_bytes"] / c["measured_peak_bytes"] - 1) for c in cases if "predicted_peak_bytes" in c
    ]
    return cases, {
        "cases": len(cases),
        "measured": len(errors),
        "largest_peak_error": max(errors),
        "median_peak_error": sorted(errors)[len(errors) // 2],
    }


if __name__ == "__main__":
    main("claims", run, __doc__)
