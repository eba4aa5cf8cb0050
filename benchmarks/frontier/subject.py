"""One model of the frontier: `python -m benchmarks.frontier.subject NAME`, one JSON row for each line printed.

It runs by itself, so that one model's failure or crash leaves the others alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import gc
import json
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import Case
from benchmarks.frontier import cells
from benchmarks.frontier.measuring import (
    Gradients,
    Times,
    beyond_rounding,
    difference,
    interleaved,
    least_ratio,
    median_ratio,
    peak_of,
    ratios,
    rounding_of,
    spread,
)
from benchmarks.frontier.methods import (
    KINDS,
    LOWEST,
    OURS,
    PLAIN,
    PLAINS,
    Apply,
    Kind,
    Method,
    Prepared,
    Sort,
    Task,
    Unsupported,
    compiled_name,
)
from benchmarks.frontier.models import QUICK, SUBJECTS, Subject
from benchmarks.frontier.peers import SORTS, Peers, only, peers_of
from memfit.capture import real_copy
from memfit.errors import MemfitError
from memfit.hardware import find_device
from memfit.workload import Workload

SECONDS = 120.0
"""Of timing, for each model and kind."""
_DIRECTORIES = re.compile(r"(?:file://|(?<=-[IL])|(?<![\w./~]))/(?:[^\s/'\"`<>()\[\],;:=]+/+)+")
"""Of absolute paths, also behind a compiler's -I and -L; not of addresses of the web, nor of relative paths."""


def methods(kind: Kind) -> tuple[Method, ...]:
    """Return the methods of a kind, the plain step first where there is one."""
    if kind == "eager":
        from benchmarks.frontier.checkpointing import CHECKPOINTING
        from benchmarks.frontier.ours import EAGER
        from benchmarks.frontier.rockmate import ROCKMATE
        from benchmarks.frontier.sac_milp import SAC_MILP
        from benchmarks.frontier.selective import SELECTIVE
        from benchmarks.frontier.xformers_policy import XFORMERS

        return (*CHECKPOINTING, *SELECTIVE, *SAC_MILP, *XFORMERS, *ROCKMATE, *EAGER)
    if kind == "compiled":
        from benchmarks.frontier import ours
        from benchmarks.frontier.compiled import COMPILED

        return (*COMPILED, *ours.COMPILED)
    if kind == "all":
        from benchmarks.frontier.ours import ONE_PLAN

        eager, compiled = ([m for m in methods(sort) if m.name != OURS] for sort in SORTS)
        renamed = (dataclasses.replace(m, name=compiled_name(m.name)) for m in compiled)
        return (*eager, *renamed, *ONE_PLAN)
    from benchmarks.frontier.joint import JOINT

    return JOINT


@dataclass
class Reference:
    """The plain step of a sort, which the others of that sort are held against.

    Args:
        gradients: What made `found`.
    """

    gradients: Gradients
    apply: Apply
    loss: float
    found: Mapping[str, torch.Tensor]

    @functools.cached_property
    def rounding(self) -> Mapping[str, float]:
        """What rounding does to each gradient."""
        return rounding_of(self.gradients, self.apply, self.found)


class Measured(NamedTuple):
    """A step whose peak and gradients are measured, and how to run it again.

    Attributes:
        program: See `Prepared`.
    """

    row: Case
    apply: Apply
    workload: Workload
    program: str | None = None


def same_steps(measured: Mapping[str, Measured]) -> dict[str, str]:
    """Return, for each step, the first one that is the same: of one program, with one peak."""
    first: dict[tuple[str, int], str] = {}
    return {
        key: key if one.program is None else first.setdefault((one.program, one.row["peak_bytes"]), key)
        for key, one in measured.items()
    }


@dataclass
class Bench:
    """Measures the methods on one model.

    Args:
        name: Of the model.
        shares: Budgets, as shares of the plain peak.
        seconds: Of timing, for each kind.
        device: Where steps run, by the name that PyTorch has for it here.
        peers: Which peers to run in kind "all", by their sort; None for all of them.
    """

    name: str
    subject: Subject
    shares: Sequence[float]
    seconds: float
    device: str = "cpu"
    peers: Mapping[Sort, Peers] | None = None

    def __post_init__(self) -> None:
        workload = self.subject.make()
        # Compiled steps have a copy of their own: what eager methods do to a model has Dynamo compile its code again.
        # On an accelerator, whose peaks count all that is there, all share one.
        eager = Gradients(real_copy(workload, torch.device(self.device)))
        compiled = Gradients(real_copy(workload, torch.device(self.device))) if self.device == "cpu" else eager
        self.gradients: dict[Sort, Gradients] = {"eager": eager, "compiled": compiled}
        self.references: dict[Sort, Reference] = {}
        self.parameter_bytes = sum(p.numel() * p.element_size() for p in workload.model.parameters())
        plain = methods("eager")[0]
        task = Task(self.subject, workload, 0, self.shares, self.device)
        self.plain_apply = plain.make(task, None, "").apply
        plain_bytes = peak_of(self.plain_apply, self.gradients["eager"].workload).held_bytes
        self.task = dataclasses.replace(task, plain_peak_bytes=plain_bytes)

    def rows(self, kind: Kind) -> Iterator[Case]:
        """Yield a row for each method and setting of a kind."""
        self.references = {}
        if kind != "compiled":
            self._refer("eager", self.plain_apply, *self.gradients["eager"].of(self.plain_apply))
        measured: dict[str, Measured] = {}
        chosen = methods(kind)
        if kind == "all" and self.peers is not None:
            chosen = only(chosen, self.peers)
        for method in chosen:
            for row, applied in self._points(method):
                row = {"model": self.name, "kind": kind, "device": self.device, "method": method.name, **row}
                _report(row)
                if applied is None:
                    yield {**row, "date": _today()}
                else:
                    measured[str(len(measured))] = Measured(row, *applied)
        yield from self._timed(kind, measured)

    def _points(self, method: Method) -> Iterator[tuple[Case, tuple[Apply, Workload, str | None] | None]]:
        """Yield what is measured of a method at each setting, how to run it again on which copy, and its program.

        None where it failed.
        """
        settings = method.settings(self.task)
        if not settings:
            return
        studied, study_seconds, failure = _attempt(functools.partial(method.study, self.task))
        if failure:
            yield {"setting": "", **failure}, None
            return
        for setting in settings:
            row: Case = {"setting": str(setting)}
            if method.name == OURS and setting != LOWEST:
                row["share"] = setting
            elif method.kind == "joint":
                row["share"] = setting
            prepared, seconds, failure = _attempt(functools.partial(method.make, self.task, studied, setting))
            if failure:
                yield {**row, **failure}, None
                continue
            facts, _, failure = _attempt(functools.partial(self._measure, method, prepared))
            plan_seconds = study_seconds + seconds + (facts or {}).pop("compile_seconds", 0.0)
            row |= {"plan_seconds": plan_seconds, **prepared.facts, **(failure or facts)}
            workload = self.gradients[prepared.sort or method.sort].workload
            yield row, None if failure else (prepared.apply, workload, prepared.program)

    def _refer(self, sort: Sort, apply: Apply, loss: float, found: Mapping[str, torch.Tensor]) -> None:
        """Have later steps of a sort held against this one."""
        self.references[sort] = Reference(self.gradients[sort], apply, loss, found)

    def _measure(self, method: Method, prepared: Prepared) -> Case:
        """Return a step's gradients against the plain ones of its sort, and its peak."""
        apply, sort = prepared.apply, prepared.sort or method.sort
        started = time.perf_counter()
        loss, found = self.gradients[sort].of(apply)
        compile_seconds = time.perf_counter() - started
        if sort not in self.references and method.name in PLAINS:
            self._refer(sort, apply, loss, found)
        # memfit compiles steps of several graphs too, of which there is no plain compiled one.
        reference = self.references.get(sort) or (self.references.get("eager") if method.name == OURS else None)
        if reference is None:
            raise Unsupported("the plain step of its kind failed: there is nothing to hold the gradients against")
        off, bitwise = difference(found, reference.found)
        beyond = 0.0 if bitwise else beyond_rounding(found, reference.found, reference.rounding)
        lost = abs(loss / reference.loss - 1)
        del found
        gc.collect()
        peak = peak_of(apply, self.gradients[sort].workload, warm=True)
        return {
            "loss_difference": lost,
            "gradient_difference": off,
            "gradient_difference_beyond_rounding": beyond,
            "bitwise": bitwise,
            "peak_bytes": peak.held_bytes,
            **({} if peak.reserved_bytes is None else {"allocated_bytes": peak.allocated_bytes}),
            "above_parameters_bytes": peak.held_bytes - self.parameter_bytes,
            "plain_peak_bytes": self.task.plain_peak_bytes,
            **({"compile_seconds": compile_seconds} if sort == "compiled" else {}),
        }

    def _timed(self, kind: Kind, measured: Mapping[str, Measured]) -> Iterator[Case]:
        """Yield the rows with the times of their steps; a step that several methods come to is run once a round."""
        if not measured:
            return
        plain = next((key for key, one in measured.items() if one.row["method"] == PLAIN), PLAIN)
        run_as = same_steps(measured)
        steps = {plain: (self.plain_apply, self.gradients["eager"].workload)}
        steps |= {key: (measured[key].apply, measured[key].workload) for key in run_as.values()}
        gc.freeze()

        def contenders(times: Mapping[str, Times]) -> set[str]:
            rows = {
                key: {**one.row, "ratio": least_ratio(times[run_as[key]], times[plain])}
                for key, one in measured.items()
            }
            return {plain, *(run_as[key] for key in cells.contenders(rows, self.task.shares))}

        times = interleaved(steps, self.seconds, contenders)
        for key, one in measured.items():
            own = times[run_as[key]]
            found = ratios(own, times[plain])
            yield {
                **one.row,
                "ratio": median_ratio(own, times[plain]),
                "ratio_error": spread(found),
                "seconds": sorted(t for t in own if t is not None)[len(found) // 2],
                "rounds": len(found),
                "times": own,
                "threads": torch.get_num_threads(),
                "date": _today(),
            }


def _attempt(make: Any) -> tuple[Any, float, Case | None]:
    """Return what something makes, how long that took, and what to put into the row if it failed."""
    started = time.perf_counter()
    try:
        return make(), time.perf_counter() - started, None
    except (Unsupported, MemfitError) as e:
        failure = str(e) if isinstance(e, Unsupported) else f"{type(e).__name__}: {e}"
    except Exception as e:  # a failure is a row of the table
        traceback.print_exc(limit=-1)
        frame = traceback.extract_tb(e.__traceback__)[-1]
        failure = f"{type(e).__name__}: {e}" if str(e) else f"{type(e).__name__} in {frame.name}: {frame.line}"
    return None, time.perf_counter() - started, {"error_message": without_place(failure).strip()[:1000]}


def without_place(text: str) -> str:
    """Return a text whose absolute paths are cut down to their last part: where things lie is this machine's own."""
    return _DIRECTORIES.sub("", text)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _report(row: Case) -> None:
    start = f"{row['model']:<9}{row['kind']:<9}{row['method']:<34}{row['setting']:<24}"
    if "error_message" in row:
        print(f"{start} {row['error_message'][:150]}", file=sys.stderr, flush=True)
        return
    share = row["peak_bytes"] / row["plain_peak_bytes"]
    over = row.get("budget_bytes", sys.maxsize) < row["peak_bytes"]
    found = ["WRONG"] * cells.is_wrong(row) + ["OVER BUDGET"] * over
    print(
        f"{start}{row['peak_bytes'] / 2**20:8.1f} MiB {share:6.1%}  gradients {row['gradient_difference']:.0e}"
        f"  planned in {row['plan_seconds']:.1f} s  {row.get('levers', '')}  {'  '.join(found)}".rstrip(),
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    """Print the rows of a model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frontier.subject", description=__doc__)
    parser.add_argument("name", choices=SUBJECTS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["eager"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--shares", nargs="+", type=float)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print notices, solvers in C too
    torch._dynamo.config.recompile_limit = 10_000  # Dynamo keeps what it compiled for each back end
    subject = (QUICK if arguments.quick else SUBJECTS)[arguments.name]
    shares = arguments.shares or (cells.QUICK_SHARES if arguments.quick else cells.SHARES)
    device = find_device(arguments.device).name
    peers = None if arguments.peers is None else peers_of(cells.read(arguments.peers), arguments.name, shares)
    bench = Bench(arguments.name, subject, shares, arguments.seconds, device, peers)
    for kind in arguments.kinds:
        for row in bench.rows(kind):
            print(json.dumps(row), file=rows, flush=True)


if __name__ == "__main__":
    main()
