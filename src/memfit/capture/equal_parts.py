"""Loops over equal parts: of a step on paper one part stands for all that are like it, as one microbatch does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from memfit._torch import replaced
from memfit.capture.recorder import Recorder

_Part = TypeVar("_Part")


def representatives(parts: Iterable[_Part], kind: Callable[[_Part], Hashable]) -> Iterator[_Part]:
    """Yield the parts of a loop: all of them, or representatives where the step is on paper.

    These are the first part, after which sums and outputs are there, and of the later ones one of each kind, whose
    operators are recorded to run as often as there are such parts (`Op.times`).

    Args:
        kind: Returns what makes parts alike: all of a kind run the same operators on tensors of the same shapes.
    """
    recorder = Recorder.active()
    if recorder is None or recorder.fake is None:
        yield from parts
        return
    first, *later = parts
    yield first
    counts = Counter(map(kind, later))
    chosen = {kind(part): part for part in reversed(later)}
    for key, count in counts.items():
        with replaced(recorder, "times", recorder.times * count):
            yield chosen[key]
