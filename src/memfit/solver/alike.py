"""The problem in which modules that are alike are treated alike: small for deep models, and quickly solved.

A choice for each kind of module is a choice of the whole problem, with the same peak and time. The search over single
modules starts from it: of dozens of layers it hardly finds in time that each needs several options together, such as an
attention and an MLP whose inputs wait in host memory, with regions inside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memfit.solver.candidates import Ints, Option, pattern
from memfit.solver.problem import ALWAYS, Activity, Problem, Tightening

_LEAST_SMALLER = 2.0  # times, below which nothing is won


@dataclass(frozen=True)
class Uniform:
    """A problem whose options are those of another one together, for all modules that are alike."""

    problem: Problem
    members: list[list[int]]  # the options of the other problem, for each of its own

    def spread(self, x: Ints, count: int) -> Ints:
        """Return the choice of the other problem, of `count` options, that a choice stands for."""
        whole = np.zeros(count, np.int64)
        for chosen in np.flatnonzero(x):
            whole[self.members[int(chosen)]] = 1
        return whole


def uniform(problem: Problem) -> Uniform | None:
    """Return the problem in which modules that are alike have the same option; None where it is hardly smaller.

    Options that keep outputs of operators are left out: they hold more than those that keep none.
    """
    members = list(_alike(problem))
    if not members or len(members) * _LEAST_SMALLER > len(problem.options):
        return None
    place = {j: new for new, together in enumerate(members) for j in together}
    options = [_together([problem.options[j] for j in together]) for together in members]
    # Of options that overlap, here or there, at most one is chosen.
    conflicts = {frozenset(place[j] for j in clique if j in place) for clique in problem.conflicts}
    exclusive = [c for c in conflicts if len(c) > 1 and not any(c < larger for larger in conflicts)]
    tightened = Tightening(exclusive)
    columns = np.empty((len(members), problem.columns.shape[1]), np.int64)
    for line, together in zip(columns, members, strict=True):
        np.sum(problem.columns[together], axis=0, out=line)
    base = problem.base.copy()
    keepers: dict[frozenset[Activity], Ints] = {}
    for reasons, column in zip(problem.reasons, problem.columns[len(problem.options) :], strict=True):
        key = tightened([(lost, frozenset(place[j] for j in of if j in place)) for lost, of in reasons])
        if ALWAYS in key:
            base += column
        elif key:
            keepers[key] = keepers[key] + column if key in keepers else column
    rows = [row._replace(option=place[row.option]) for row in problem.rows if row.option in place]
    return Uniform(
        Problem(
            options,
            list(keepers),
            exclusive,
            base,
            np.concatenate([columns, *(column[np.newaxis] for column in keepers.values())]),
            [row for row in problem.rows if row.option < 0] + rows,
            problem.plain_seconds,
            problem.host_budget_bytes,
        ),
        members,
    )


def _alike(problem: Problem) -> Iterator[list[int]]:
    """Yield the options of modules that are alike, those that overlap none before them.

    Modules are alike that have the same name but for numbers, as many operators, and the same options.
    """
    kinds = [_kind(option) for option in problem.options]
    offered: dict[tuple[str, ...], set[object]] = defaultdict(set)
    for option, kind in zip(problem.options, kinds, strict=True):
        offered[option.modules].add(kind)
    offers = {modules: frozenset(of) for modules, of in offered.items()}
    alike: dict[object, list[int]] = defaultdict(list)
    for j, (option, kind) in enumerate(zip(problem.options, kinds, strict=True)):
        alike[kind, offers[option.modules]].append(j)
    cliques: dict[int, list[int]] = defaultdict(list)
    for number, clique in enumerate(problem.conflicts):
        for j in clique:
            cliques[j].append(number)
    for together in alike.values():
        first = problem.options[together[0]]
        is_lone_run = len(together) == 1 and len(set(map(pattern, first.modules))) < len(first.modules)
        if first.regions[0].keep or is_lone_run:  # of a run of layers, only those are of use that repeat
            continue
        taken: set[int] = set()
        chosen = []
        for j in together:
            if taken.isdisjoint(cliques[j]):
                taken.update(cliques[j])
                chosen.append(j)
        yield chosen


def _kind(option: Option) -> tuple[object, ...]:
    first = option.recomputations[0].region
    regions = ((pattern("+".join(r.modules)), r.keep, r.offload, pattern(r.prefetch)) for r in option.regions)
    return (*regions, first.stop - first.start, first.cut - first.start)


def _together(options: Sequence[Option]) -> Option:
    return replace(
        options[0],
        regions=tuple(region for option in options for region in option.regions),
        kept={region: kept for option in options for region, kept in option.kept.items()},
        recomputations=tuple(again for option in options for again in option.recomputations),
        seconds=sum(option.seconds for option in options),
        transfers=tuple(move for option in options for move in option.transfers),
        host_bytes=sum(option.host_bytes for option in options),
    )
