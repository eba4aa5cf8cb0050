"""`python -m benchmarks.field.metered REPORT (plain | run OPTIONS...) SCRIPT ARGS...`: a script, each step measured.

REPORT gets the peak of PyTorch's CPU allocations before each update by an optimizer and after the last, all that the
process holds included; and, of `memfit run`, each plan that was made: after how many updates, and for which budget.
While it plans no step is under way: what memfit allocates then to time operators is not counted.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memfit._torch import replaced
from memfit.cli import main as memfit
from memfit.hardware import allocated_between
from memfit.pipeline import loop_plans
from memfit.training import held_beside

_UPDATED, _PLANNING = "benchmarks: updated", "benchmarks: planning"


class Meter:
    """Counts updates, and notes plans."""

    def __init__(self) -> None:
        self.updates, self.plans, self._depth = 0, list[dict[str, Any]](), 0

    def updated(self, *_: Any) -> None:
        """Mark an update of the script's own."""
        if not self._depth:
            self.updates += 1
            with torch.profiler.record_function(_UPDATED):
                pass

    def marked(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of memfit's that plans, marked for the profiler."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                with torch.profiler.record_function(_PLANNING):
                    found = own(*args, **kwargs)
            finally:
                self._depth -= 1
            if hasattr(found, "levers"):
                row = {"updates": self.updates, "budget_bytes": found.budget_bytes, "held_beside_bytes": 0}
                self.plans.append(row | {"predicted_peak_bytes": found.predicted.peak_bytes})
            return found

        return call

    def weighed(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return memfit's function that finds what is held beside a plan, noted with that plan."""

        def call(*args: Any) -> Any:
            held = own(*args)
            self.plans[-1]["held_beside_bytes"] = sum(each.nbytes for each in held)
            return held

        return call


@contextmanager
def metered(report: Path) -> Iterator[None]:
    """Measure what runs in this context."""
    meter = Meter()
    hook = register_optimizer_step_post_hook(meter.updated)
    peaks: list[int] = []
    try:
        with ExitStack() as stack:
            for name in ("make_plan", "estimate", "predicted_under"):
                stack.enter_context(replaced(loop_plans, name, meter.marked(getattr(loop_plans, name))))
            stack.enter_context(replaced(loop_plans, "held_beside", meter.weighed(held_beside)))
            peaks = stack.enter_context(allocated_between(_UPDATED, but_in=_PLANNING))
            yield
    finally:
        hook.remove()
        report.write_text(json.dumps({"peaks": peaks, "plans": meter.plans}))


def main() -> None:
    report, way, *line = sys.argv[1:]
    ended: BaseException | None = None
    with metered(Path(report)):
        try:
            if way == "run":
                sys.argv = ["memfit", "run", *line]
                memfit()
            else:
                sys.argv = line
                sys.path.insert(0, str(Path(line[0]).parent))
                runpy.run_path(line[0], run_name="__main__")
        except BaseException as e:  # the profiler has no result of a context that is left by one
            ended = e
    if ended is not None:
        raise ended


if __name__ == "__main__":
    main()
