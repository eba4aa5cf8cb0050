"""Deep models: a smaller problem in which blocks that repeat are recomputed alike, a group of them at a time.

A model of many equal blocks has as many copies of each option, and programs over all of them are too large to be solved
in the time there is. Most of their choices differ only in which of the equal blocks they take. Here consecutive blocks
form units (of one block, of two, ...), and consecutive units form groups whose sizes are powers of two, so that every
number of units can choose one option and the others another. A group chooses at once for all of its units: its columns
are the sums of theirs, and reasons that become equal are one. What is left is a `Problem` of a few blocks, for the
solver as it is; and each of its choices is one of the whole problem, of the same peak and the same seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.ir import Region
from memfit.solver.candidates import Ints, Option
from memfit.solver.problem import Activity, Problem, Row

LEAST_BLOCKS = 8
"""A stack of fewer equal blocks is solved as it is."""
_LEAST_SHARE = 0.5  # of the options that belong to the stack's blocks, for it to be worth a problem of its own
_UNITS = (1, 2, 4)  # blocks of a unit: a region of several is recomputed with smaller ones inside
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True)
class Tied:
    """A problem in which groups of equal blocks choose alike.

    Attributes:
        problem: It has an option for each set of options that are chosen together.
        members: For each option of it, those of the whole problem.
    """

    problem: Problem
    members: list[list[int]]

    def whole(self, x: Ints, count: int) -> Ints:
        """Return the choice of the whole problem, of as many options as `count`, for a choice of this one."""
        found = np.zeros(count, np.int64)
        for taken in np.flatnonzero(x):
            found[self.members[int(taken)]] = 1
        return found


def tied_problems(problem: Problem) -> Iterator[Tied]:
    """Yield problems with groups of blocks that choose alike: none for a model that has no deep stack of equal ones.

    They are of units of one block, of two, and so on; the larger groups are first at the front and then at the back.
    """
    stack = _stack(problem.options)
    if stack is None:
        return
    spans = [_numbers(option, stack) for option in problem.options]
    numbers = sorted(set().union(*spans))
    for size in (each for each in _UNITS if any(len(span) == each for span in spans)):
        units = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        whole = [unit for unit in units if len(unit) == size]
        larger = _groups(max(0, len(whole) - 2))
        for arranged in ([1, *larger, 1], [1, *larger[::-1], 1]):  # blocks at an end are often not like the others
            places: dict[int, tuple[int, int]] = {}  # of each block: its group, and its place in its unit
            waiting = iter(units)
            for group, length in enumerate([*arranged, *([1] * (len(units) > len(whole)))]):
                for unit in (next(waiting) for _ in range(length)):
                    places |= {number: (group, at) for at, number in enumerate(unit)}
            yield _tied(problem, stack, places)


def alike(options: Sequence[Option], x: Ints) -> npt.NDArray[np.bool_]:
    """Return which options are those of a choice, in any of the equal blocks."""
    stack = _stack(options)
    kinds = [
        _kind(option, stack, min(_numbers(option, stack), default=0)) if stack else j
        for j, option in enumerate(options)
    ]
    chosen = {kind for kind, taken in zip(kinds, x, strict=True) if taken}
    return np.array([kind in chosen for kind in kinds], np.bool_)


def _groups(count: int) -> list[int]:
    """Return sizes that sum up to a count, such that every smaller number is the sum of some: the largest first."""
    sizes: list[int] = []
    while count:
        sizes.append((count + 1) // 2)
        count -= sizes[-1]
    return sizes


def _stack(options: Sequence[Option]) -> str | None:
    """Return the name of the list of equal blocks that most options are within; None where no stack is deep."""
    kinds: dict[str, dict[int, Counter[Any]]] = defaultdict(lambda: defaultdict(Counter))
    for option in options:
        for number in _NUMBER.finditer(option.modules[0]):
            stack = option.modules[0][: number.start()]
            if len(_numbers(option, stack)) == 1:
                kinds[stack][int(number.group())][_kind(option, stack, int(number.group()))] += 1
    deep: dict[str, int] = {}
    for stack, of_block in kinds.items():
        alike = Counter(frozenset(kinds) for kinds in of_block.values())
        most, count = alike.most_common(1)[0]
        if count >= LEAST_BLOCKS:
            deep[stack] = count * len(most)
    best = max(deep, key=lambda stack: deep[stack], default=None)
    return best if best is not None and deep[best] >= _LEAST_SHARE * len(options) else None


def _names(option: Option) -> Iterator[str]:
    for region in option.regions:
        yield from region.modules


@functools.lru_cache(maxsize=65536)
def _number_of(name: str, stack: str) -> int:
    """Return the number of the block that a module is in; -1 for none."""
    number = _NUMBER.match(name, len(stack)) if name.startswith(stack) else None
    return -1 if number is None else int(number.group())


def _numbers(option: Option, stack: str) -> set[int]:
    """Return the numbers of the blocks that an option is within; none where some of it is outside of all."""
    found = {_number_of(name, stack) for name in _names(option)}
    return set() if -1 in found else found


def _kind(option: Option, stack: str, first: int) -> tuple[object, ...]:
    """Return what an option has in common with those of other blocks: its names with numbers counted from the first."""

    def relative(name: str) -> str:
        number = _number_of(name, stack)
        return name if number < 0 else f"{stack}+{number - first}{name[len(stack) + len(str(number)) :]}"

    def of_region(region: Region) -> tuple[object, ...]:
        return tuple(map(relative, region.modules)), region.keep, region.offload, relative(region.prefetch)

    return tuple(map(of_region, option.regions))


def _tied(problem: Problem, stack: str, places: dict[int, tuple[int, int]]) -> Tied:
    """Return the problem in which the blocks of a group choose alike, by the group and the place of each block.

    Options that span units are left out, and so are those that not all units of their group have.
    """
    sizes = Counter(group for group, at in places.values() if at == 0)
    classes: dict[object, list[int]] = defaultdict(list)
    for j, option in enumerate(problem.options):
        numbers = sorted(_numbers(option, stack))
        if not numbers:
            classes[j].append(j)
            continue
        if not all(number in places for number in numbers):
            continue
        group, at = places[numbers[0]]
        span = [(group, at + i) for i in range(len(numbers))]
        if [places[number] for number in numbers] == span and numbers[-1] - numbers[0] == len(numbers) - 1:
            classes[group, at, _kind(option, stack, numbers[0])].append(j)
    members = [found for key, found in classes.items() if not isinstance(key, tuple) or len(found) == sizes[key[0]]]
    owner = np.full(len(problem.options), -1, np.int64)
    for tie, found in enumerate(members):
        owner[found] = tie

    def of(activity: Activity) -> Activity:
        lost, taken = activity
        return lost, frozenset(int(owner[j]) for j in taken if owner[j] >= 0)

    count = len(members)
    places_of: dict[frozenset[Activity], int] = {}
    variables: list[int] = owner.tolist()
    for reasons in problem.reasons:
        mapped = frozenset(map(of, reasons))
        variables.append(count + places_of.setdefault(mapped, len(places_of)))
    conflicts = {frozenset(int(owner[j]) for j in one if owner[j] >= 0) for one in problem.conflicts}
    rows = [
        Row(row.axis, int(owner[row.option]), row.nbytes) if row.option >= 0 else row
        for row in problem.rows
        if row.option < 0 or owner[row.option] >= 0
    ]
    options = [_together([problem.options[j] for j in found]) for found in members]
    made = Problem(
        options,
        list(places_of),
        [one for one in conflicts if len(one) > 1],
        problem.base,
        problem.columns.merged(np.array(variables, np.int64), count + len(places_of)),
        rows,
        problem.plain_seconds,
        problem.host_budget_bytes,
    )
    return Tied(made, members)


def _together(options: Sequence[Option]) -> Option:
    """Return options that are chosen together as one."""
    first, *others = options
    if not others:
        return first
    return dataclasses.replace(
        first,
        regions=tuple(region for option in options for region in option.regions),
        kept={call: kept for option in options for call, kept in option.kept.items()},
        recomputations=tuple(again for option in options for again in option.recomputations),
        seconds=sum(option.seconds for option in options),
        transfers=tuple(move for option in options for move in option.transfers),
        host_bytes=sum(option.host_bytes for option in options),
    )
