"""Levers of fine-tuning, each alone and in random combinations: peaks predicted beside measured ones, and the numbers.

Values are those that levers themselves propose for the step, and regions those that the solver chooses under the other
levers for a random budget. Nothing is chosen for its price: most combinations are ones that no plan would take.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

import torch
from msgspec.structs import replace
from torch import Tensor

from benchmarks.common import Case
from benchmarks.finetune.models import TINY, llama
from memfit.capture import measure_peak_bytes, real_copy
from memfit.errors import MemfitError, PlanError
from memfit.foundations import read_budget, silent
from memfit.hardware import find_device
from memfit.ir import FrozenWeights, Levers, Numerics, Precision, freest, uses_text
from memfit.levers import LEVERS, NotOffered, UpdateLever, applied, check_combination, rounding
from memfit.levers.registry import UPDATES
from memfit.planner import Findings, PlanOptions, Request, capture_levers, coupling
from memfit.planner.captured_steps import CapturedSteps
from memfit.workload import Workload

COUNT, SAMPLES, TOKENS = 20, 4, 128
BASES: dict[str, dict[str, bool]] = {
    "LoRA": {"lora": True},
    "full": {},
    "LoRA, own checkpoints": {"lora": True, "checkpoints": True},
}
"""Of the tiny Llama, by name: what is trained, and whether transformers' own checkpointing is on."""
MOST: dict[Numerics, float] = {"exact": 0.0, "reordered": 1e-5, "reduced": 0.05, "changed": math.inf}
"""The largest difference of all gradients from the plain step's, by numerics class; `exact` is bitwise besides."""
QUANTISER: dict[str, float] = {"nf4": 0.094, "int8": 0.012}
"""The largest norm of a quantiser's error, as the plan states it, relative to that of the matrices."""
_STEPS = 2
_SOLVE_SECONDS = 0.5
_USED = 0.4  # the share of levers that a combination has, before those that conflict are drawn again


class Base:
    """A step that levers are put on: what they propose for it, and its numbers without them."""

    def __init__(self, name: str) -> None:
        self.name, self.device = name, find_device("cpu")
        made = llama(TINY, TOKENS, lora="lora" in BASES[name], samples=SAMPLES)
        if "checkpoints" in BASES[name]:
            made.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        self.workload = dataclasses.replace(made, bf16_updates="master-weights")
        self.steps = self._steps()
        self.plain = run(self.workload, self.steps.plain)
        self._known = dict[Levers, Ran]()  # plain steps with rounded weights
        self._weights_off = dict[FrozenWeights | None, float]()  # by which these differ from the model's

    def _steps(self) -> CapturedSteps:
        options = PlanOptions(budget="1GiB", device="cpu", numerics="changed", precisions=get_args(Precision))
        steps = CapturedSteps(
            Request(
                workload=self.workload,
                options=options,
                budget=read_budget(options.budget),
                host_budget_bytes=0,
                device=self.device,
                precisions=get_args(Precision),
                fallbacks=UPDATES,
                progress=silent,
                world_size=1,
                modes=(),
                compilers=(),
                processes=1,
                findings=Findings(),
            )
        )
        steps.coupling = coupling(steps.trace(steps.plain), self.workload)
        steps.tries_all = True
        return steps

    def values(self) -> dict[str, list[Any]]:
        """Return the values of each field that levers propose where little is missing, and where nothing fits."""
        plain, found = self.steps.plain, dict[str, list[Any]]()
        for budget_bytes in (self.steps.predicted(plain).peak_bytes - 1, 1):
            self.steps.budget_bytes = budget_bytes
            for lever in LEVERS:
                try:
                    if isinstance(lever, UpdateLever):
                        proposed = [lever.fallback(plain)]
                    else:
                        proposed = lever.propose(self.steps, [plain])
                except NotOffered:
                    continue
                own = found.setdefault(lever.field, [])
                own += [
                    v
                    for each in proposed
                    if (v := getattr(each, lever.field)) not in (getattr(plain, lever.field), *own)
                ]
        return {field: own for field, own in found.items() if own}

    def with_regions(self, levers: Levers, share: float) -> Levers:
        """Return levers with the regions that are fastest where a share of what regions can save is to be saved."""
        if not self.steps.captured([levers]):
            raise PlanError("; ".join(self.steps.failures.notes()))
        combination = self.steps.combination(levers)
        plain, leanest = combination.plain().peak_bytes, combination.leanest(_SOLVE_SECONDS)
        budget_bytes = int(plain - share * (plain - leanest.peak_bytes))
        point = combination.fastest(budget_bytes, 0.01, _SOLVE_SECONDS) or combination.candidate(leanest, budget_bytes)
        return point.levers

    def row(self, levers: Levers) -> Case:
        """Return a combination's peaks, and how far its numbers are from the plain step's.

        A step with rounded weights is held against the plain step with the same weights rounded: what else differs
        is of its other levers.
        """
        check_combination(levers, self.workload, self.device, allowed="changed")
        uses = self.steps.uses(levers)
        start = {"base": self.name, "combination": uses_text(uses), "numerics": freest(uses)}
        rounds = {lever.name for lever in rounding(levers)}
        others = freest(use for use in uses if use.name not in rounds)
        try:
            trace = capture_levers(self.workload, levers, self.device)
            predicted_bytes = self.steps.prediction_of(trace, levers).peak_bytes
            found = run(self.workload, levers)
        except MemfitError as error:
            return {**start, "error_message": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        plain = self._rounded(levers) if rounds else self.plain
        off = difference(found.gradients, plain.gradients)
        bitwise = found.losses == plain.losses and all(map(torch.equal, found.weights, plain.weights))
        is_held = bitwise if others == "exact" else off <= MOST[others]
        if rounds and levers.frozen_weights is not None:
            is_held &= self._weights_off[levers.frozen_weights] <= QUANTISER[levers.frozen_weights.quantizer]
        return {
            **start,
            "predicted_peak_bytes": predicted_bytes,
            "peak_bytes": found.peak_bytes,
            "error": predicted_bytes / found.peak_bytes - 1,
            "bitwise": bitwise and not rounds,
            "gradient_difference": off,
            "held_to": others,
            "holds": is_held,
            "rounding_difference": difference(found.gradients, self.plain.gradients) if rounds else None,
            "weights_off": self._weights_off.get(levers.frozen_weights),
        }

    def _rounded(self, levers: Levers) -> Ran:
        """Return what the plain step does with the weights that a step under some levers computes with."""
        bare = replace(self.steps.plain, frozen_weights=levers.frozen_weights, chunked_loss=levers.chunked_loss)
        if bare not in self._known:
            copied = real_copy(self.workload)
            for lever in rounding(bare):
                lever.round_weights(bare, copied.model)
            given, rounded = (dict(of.model.named_parameters()) for of in (self.workload, copied))
            changed = [name for name, weight in given.items() if not torch.equal(weight, rounded[name])]
            self._weights_off[levers.frozen_weights] = difference(
                *({name: weights[name].detach() for name in changed} for weights in (rounded, given))
            )
            self._known[bare] = run(copied, self.steps.plain)
        return self._known[bare]


class Ran(NamedTuple):
    """What a step did."""

    gradients: dict[str, Tensor]  # of the first step
    losses: list[float]
    weights: list[Tensor]  # that train, after as many steps
    peak_bytes: int  # of one step more


def run(workload: Workload, levers: Levers) -> Ran:
    """Run a copy of a step with levers."""
    copied = real_copy(workload)
    with applied(levers, copied) as step:
        _, gradients = step.gradients(copied.batch)
        losses = [float(step(copied.batch).loss) for _ in range(_STEPS)]
        state = copied.model.state_dict()
        trained = {name for name, p in workload.model.named_parameters() if p.requires_grad}
        weights = [state[name].clone() for name in sorted(trained)]
        del state
        peak_bytes = measure_peak_bytes(step, copied.batch)
    return Ran(gradients, losses, weights, peak_bytes)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the Euclidean norm of the difference of all gradients, relative; infinite where one is missing."""
    if found.keys() != expected.keys():
        return math.inf
    off, own = (
        math.hypot(*(float(t.float().norm()) for t in tensors))
        for tensors in ([found[name] - expected[name] for name in expected], expected.values())
    )
    return off / own


def alone(base: Base, values: dict[str, list[Any]]) -> Iterator[Levers]:
    """Yield each lever by itself, with each of its values; regions for two budgets."""
    for field, own in values.items():
        yield from (replace(base.steps.plain, **{field: value}) for value in own)
    regions = (base.with_regions(base.steps.plain, share) for share in (0.5, 1.0))
    yield from (levers for levers in regions if levers.regions)  # none where the model's own checkpoints leave nothing


def drawn(base: Base, values: dict[str, list[Any]], draw: random.Random) -> Levers:
    """Return a combination of two levers or more; raise `PlanError` where they don't go together."""
    fields = [field for field in sorted(values) if draw.random() < _USED]
    levers = replace(base.steps.plain, **{field: draw.choice(values[field]) for field in fields})
    share = draw.random() if draw.random() < _USED else None
    check_combination(levers, base.workload, base.device, allowed="changed")
    levers = levers if share is None else base.with_regions(levers, share)
    if len(base.steps.uses(levers)) < 2:
        raise PlanError("one lever alone is no combination")
    return levers


def rows(
    count: int = COUNT, *, seed: int = 0, each_alone: bool = True, bases: Sequence[str] = tuple(BASES)
) -> Iterator[Case]:
    """Yield a row for random combinations, why others were not run, and a row for each lever alone."""
    torch.use_deterministic_algorithms(True)
    made = [Base(name) for name in bases]
    values = [base.values() for base in made]
    draw, refused = random.Random(seed), Counter[str]()
    found = 0
    while found < count:
        base, own = draw.choice(list(zip(made, values, strict=True)))
        try:
            row = base.row(drawn(base, own, draw))
        except PlanError as error:
            refused[_why(error)] += 1
            continue
        found += 1
        yield _told({**row, "alone": False})
    yield {"refused_combinations": dict(refused)}
    for base, own in zip(made, values, strict=True) if each_alone else ():
        for levers in alone(base, own):
            with contextlib.suppress(PlanError):  # as TF32 here
                yield _told({**base.row(levers), "alone": True})


def _why(error: PlanError) -> str:
    return str(error).partition(":")[0]


def summary_of(cases: Sequence[Case]) -> dict[str, Any]:
    """Return how far predictions are off, and how many steps have the numbers that their class says."""
    ran = [case for case in cases if "combination" in case]
    together, single = ([case for case in ran if case["alone"] is alone] for alone in (False, True))

    def largest(rows: Sequence[Case]) -> float | None:
        return max((abs(case["error"]) for case in rows if "error" in case), default=None)

    return {
        "combinations": len(together),
        "combinations_largest_abs_error": largest(together),
        "combinations_refused": sum(n for case in cases for n in case.get("refused_combinations", {}).values()),
        "levers_alone": len(single),
        "levers_alone_largest_abs_error": largest(single),
        "combinations_that_hold": sum(case.get("holds", False) for case in ran),
        "combinations_that_fail": sum(not case.get("holds", False) for case in ran),
    }


def _told(row: Case) -> Case:
    said = (
        f"{row['error']:+.4%}  {row['gradient_difference']:.1e}{'' if row['holds'] else '  NOT HELD'}"
        if "error" in row
        else row["error_message"]
    )
    print(f"{row['base']:<22}{row['numerics']:<10}{row['combination']}  {said}", file=sys.stderr, flush=True)
    return row
