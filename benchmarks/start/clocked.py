"""`python -m benchmarks.start.clocked REPORT (plain | run OPTIONS...) SCRIPT ARGS...`: a script, its updates clocked.

REPORT gets, after each update by an optimizer of the script's own, the monotonic clock's seconds and the processor's
seconds that the process and its children used. memfit is imported only where it runs.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any


def main() -> None:
    report, way, *line = sys.argv[1:]
    from torch.optim.optimizer import register_optimizer_step_post_hook

    clocks: list[tuple[float, float]] = []

    def updated(*_: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and "torch" in Path(frame.f_code.co_filename).parts:
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename == line[-1]:  # memfit's own copies are trained elsewhere
            times = os.times()
            used = times.user + times.system + times.children_user + times.children_system
            clocks.append((time.monotonic(), used))

    register_optimizer_step_post_hook(updated)
    try:
        if way == "run":
            from memfit.cli import main as memfit

            sys.argv = ["memfit", "run", *line]
            memfit()
        else:
            sys.argv = line
            runpy.run_path(line[0], run_name="__main__")
    finally:
        Path(report).write_text(json.dumps(clocks))


if __name__ == "__main__":
    main()
