"""Bytes alive and seconds spent over a step, and the tensors that make its peak."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from memfit.ir.codec import Shown
from memfit.ir.operators import Tensor, arguments, base_name
from memfit.ir.trace import CATEGORIES, Trace

WORKSPACE = "workspaces"
TIMELINE_CATEGORIES: tuple[str, ...] = (*CATEGORIES, WORKSPACE)
_EDGE, _FEW = 0.1, 4  # share of a pass that is its start, or its end, and operators of one that has few


class Timeline(Shown, frozen=True, kw_only=True):
    """A step's memory by category, one point for each operator, while it runs.

    Attributes:
        live_bytes: For each category of `TIMELINE_CATEGORIES`, the bytes alive at each point.
        labels: The operator at each point: "phase · module FQN · operator".
        peak_bytes: The largest total over the points.
        peak_index: The first point that reaches it.
        step_seconds: The predicted duration of the whole step, with every microbatch.
    """

    live_bytes: dict[str, list[int]]
    labels: list[str]
    modules: list[str]
    phases: list[str]
    seconds: list[float]
    peak_bytes: int
    peak_index: int
    step_seconds: float

    def at_peak(self) -> dict[str, int]:
        """Return the bytes by category at the peak."""
        return {name: values[self.peak_index] for name, values in self.live_bytes.items()}

    def where(self) -> str:
        """Return the place of the peak: "start of the backward pass, in blocks.7 (sum)"; "" without points."""
        if not self.labels:
            return ""
        at = self.peak_index
        passes = ["backward" if phase == "recompute" else phase for phase in self.phases]
        begin = end = at
        while begin and passes[begin - 1] == passes[at]:
            begin -= 1
        while end + 1 < len(passes) and passes[end + 1] == passes[at]:
            end += 1
        near = max(_FEW, _EDGE * (end - begin))
        part = "start" if at - begin <= near else "end" if end - at <= near else "middle"
        stage = "optimizer step" if passes[at] == "optimizer" else f"{passes[at]} pass"
        operator = operator_text(self.labels[at].rpartition(" · ")[2])
        again = ", recomputed" if self.phases[at] == "recompute" else ""
        fqn = self.modules[at]
        within = f", in {'module ' * fqn[0].isdecimal()}{fqn}" if fqn else ""
        return f"{part} of the {stage}{within} ({operator}{again})"


def operator_text(name: str) -> str:
    """Return the name of an operator without its namespace and overload: "sum" for "aten.sum.dim_IntList"."""
    return base_name(name).lstrip("_")


_MOST_PARTS, _LEAST_SHARE = 3, 0.05
_TAKES_LOGITS = ("log_softmax", "nll_loss_forward", "nll_loss2d_forward")
_MAKES_LOGITS = ("log_softmax", "log_softmax_backward_data", "nll_loss_backward", "nll_loss2d_backward")
_SOFTMAX = ("softmax", "safe_softmax")
_CASTS = ("to_copy", "copy")
_Size = tuple[int, tuple[int, ...]]  # elements, and the last two dimensions


class _Held(NamedTuple):
    """A storage that is alive at the peak, with the operator that made it and the FQN of its module call."""

    shape: tuple[int, ...]
    nbytes: int
    operator: str = ""
    fqn: str = ""


class PeakPart(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensors of one kind that are alive at a step's peak.

    Attributes:
        kind: "logits", "attention scores", "activations", "activation gradients", "workspaces", or another category of
            the timeline. What shrinks them depends on it.
        text: The tensors, in words ("logits of 8 × 48 × 16,384").
    """

    kind: str
    text: str
    nbytes: int


def peak_parts(trace: Trace, timeline: Timeline) -> tuple[PeakPart, ...]:
    """Return the largest groups of tensors at the peak of a captured step, the largest first.

    Args:
        timeline: Of the trace as it is, without further regions.
    """
    if not trace.ops:
        return ()
    peak = timeline.peak_index
    logits, scores = _logits(trace), _scores(trace)
    groups: dict[tuple[str, int], list[_Held]] = defaultdict(list)  # by kind, and elements where there may be several
    for index, storage in enumerate(trace.storages):
        if storage.nbytes and max(storage.birth, 0) <= peak <= storage.death:
            elements, op = math.prod(storage.shape), trace.ops[storage.birth] if storage.birth >= 0 else None
            group: tuple[str, int]
            if storage.category not in ("activations", "temporaries"):
                group = storage.category, 0
            elif index in logits:
                group = "logits", elements
            elif len(storage.shape) > 2 and (elements, storage.shape[-2:]) in scores:
                group = "attention scores", elements
            else:
                kinds = {"backward": "activation gradients", "optimizer": "temporaries of the update"}
                group = kinds.get(op.phase if op else "forward", "activations"), 0
            made = () if op is None else (operator_text(op.name), trace.fqn_of(op.call))
            groups[group].append(_Held(storage.shape, storage.nbytes, *made))
    if workspace := timeline.live_bytes[WORKSPACE][peak]:
        groups[WORKSPACE, 0].append(_Held((), workspace, operator_text(trace.ops[peak].name)))
    total = {group: sum(held.nbytes for held in members) for group, members in groups.items()}
    largest = sorted(total, key=lambda group: -total[group])[:_MOST_PARTS]
    return tuple(
        PeakPart(kind=group[0], text=_text(group[0], groups[group]), nbytes=total[group])
        for i, group in enumerate(largest)
        if not i or total[group] >= _LEAST_SHARE * timeline.peak_bytes
    )


def _logits(trace: Trace) -> set[int]:
    """Return the storages of logits, their log-probabilities and their gradients, with their casts."""
    found: set[int] = set()
    sizes: set[int] = set()
    for at, op in enumerate(trace.ops):
        name = operator_text(op.name)
        if name in _MAKES_LOGITS:
            found.update(trace.births[at])
        if name not in (*_TAKES_LOGITS, *_CASTS):
            continue
        tensor = arguments(trace.signatures[op.signature]).get(0, "")
        elements = tensor.elements if isinstance(tensor, Tensor) else 0
        if name in _TAKES_LOGITS:
            found.update(_before(trace, at, elements))
            sizes.add(elements)
        elif elements in sizes and not found.isdisjoint(_before(trace, at, elements)[:1]):
            found.update(trace.births[at])
    return found


def _before(trace: Trace, at: int, elements: int) -> list[int]:
    """Return the last storage of so many elements that was made before an operator, and what it is a cast of."""
    found = []
    for birth in range(at - 1, -1, -1):
        made = [i for i in trace.births[birth] if math.prod(trace.storages[i].shape) == elements]
        found += made
        if made and operator_text(trace.ops[birth].name) not in _CASTS:
            break
    return found


def _scores(trace: Trace) -> set[_Size]:
    """Return the sizes of attention scores: a softmax takes them over the last of three or more dimensions."""
    found = set()
    for signature in {op.signature for op in trace.ops if operator_text(op.name) in _SOFTMAX}:
        given = arguments(trace.signatures[signature])
        tensor = given.get(0, "")
        if isinstance(tensor, Tensor) and len(tensor.shape) > 2:
            if given.get(1, "dim", -1) in (-1, len(tensor.shape) - 1):
                found.add((tensor.elements, tensor.shape[-2:]))
    return found


def _text(kind: str, members: list[_Held]) -> str:
    if kind == WORKSPACE:
        return f"workspace of {members[0].operator}"
    if kind in ("logits", "attention scores"):
        count = f" ({len(members)} tensors)" if len(members) > 1 else ""
        return f"{kind} of {_shape_text(max((held.shape for held in members), key=len))}{count}"
    if kind not in ("activations", "activation gradients"):
        return kind
    alike: dict[tuple[str, tuple[int, ...]], list[_Held]] = defaultdict(list)
    for held in members:
        alike[held.operator, held.shape].append(held)
    (operator, shape), most = max(alike.items(), key=lambda item: sum(held.nbytes for held in item[1]))
    places = list(dict.fromkeys(held.fqn for held in most))
    where = places[0] or "the loss" if len(places) == 1 else f"{places[0]} to {places[-1]}"
    within = "in" if len(alike) == 1 else "the largest in"
    return f"{kind}, {within} {where} ({', '.join(filter(None, [operator, _shape_text(shape)]))})"


def _shape_text(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{n:,}" for n in shape)
