"""Values of expressions of the rows of logits, computed a few rows at a time: the logits are never whole in memory.

The values that are asked for together are computed together: the product of the head once for each chunk of rows, then
all that is done with it. The backward pass computes a chunk's logits again, and adds what the chunk gives to the
gradients. Rows whose gradients are all zero, as those that a mask takes out of a loss, are left out of it.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from memfit._torch import current_mode_stack, is_fake, tree_leaves, tree_map
from memfit.capture import representatives
from memfit.errors import UsageError
from memfit.levers.row_expressions import (
    EXPRESSIONS,
    Applied,
    Expression,
    Index,
    Item,
    Leaf,
    Output,
    PerRow,
    Shared,
    by_rows,
    changes_of,
)

_PARTS, _LEAST_CLASSES = 16, 512
"""In which a weight's gradient is added to one of more bits, and the fewest classes of a part. A product and its wider
copy, which the CPU's addition makes, otherwise take one and a half times the weight beside its gradient."""
_MOST_RUNS = 32  # of rows that are taken run by run; each is an operator


def knows_values(tensor: Tensor) -> bool:
    """Tell whether code may go by a tensor's values: they are there, and nobody records what is done."""
    is_busy = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (is_fake(tensor) or current_mode_stack() or is_busy)


class _Ref(NamedTuple):
    """The place of a value: of a head's logits, of a tensor among those of `Chunks`, or of a step's result."""

    kind: str  # "head", "vectors", "numbers", "shared" or "step"
    number: int


_OF_ROWS = ("vectors", "numbers")


def _is_ref(value: Any) -> bool:
    return type(value) is _Ref


@dataclass(eq=False)
class _Step:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tracks: bool
    autocast: torch.dtype | None
    spent: list[_Ref] = field(default_factory=list)  # values that nothing uses afterwards


@dataclass(eq=False)
class _Group:
    """Outputs that take the same rows."""

    rows: Index  # of each value; sorted by its first
    order: Index  # of the values, by row
    steps: list[_Step] = field(default_factory=list)
    results: list[tuple[int, _Ref]] = field(default_factory=list)  # with the outputs' numbers
    inputs: list[_Ref] = field(default_factory=list)  # tensors among those of `Chunks`

    def run(self, table: dict[_Ref, Any], device: str) -> list[Tensor]:
        """Return the results from the values in a table, which go from there once they are used."""
        kept = {ref for _, ref in self.results}

        def of(arg: Any) -> Any:
            return table[arg] if type(arg) is _Ref else arg

        for number, step in enumerate(self.steps):
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled() and step.tracks))
                if step.autocast is not None:
                    stack.enter_context(torch.autocast(device, step.autocast, cache_enabled=False))
                args, kwargs = tree_map(of, (step.args, step.kwargs), is_leaf=_is_ref)
                table[_Ref("step", number)] = step.function(*args, **kwargs)
            del args, kwargs
            for ref in step.spent:
                if ref not in kept:
                    del table[ref]
        return [table[ref] for _, ref in self.results]


class RowSet:
    """Some rows of tensors, to be taken and put: of [rows, size], or of blocks of rows, as `by_rows` returns them."""

    def __init__(self, at: Index) -> None:
        self.at = at
        ends = [*(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), len(at)]
        self.runs = [slice(int(at[a]), int(at[b - 1]) + 1) for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def _index(self, tensor: Tensor) -> Tensor:
        return torch.tensor(self.at, device=tensor.device)

    def kind(self, blocks: Collection[int] = ()) -> tuple[object, ...]:
        """Return the key of sets of rows that are taken and put by the same operators.

        Args:
            blocks: How many rows each block has, of tensors of blocks.
        """
        runs = [run.stop - run.start for run in self.runs] if len(self.runs) <= _MOST_RUNS else [len(self.at), -1]
        return *runs, *(tuple(rows.kind() for rows, _, _ in self._in_blocks(size)) for size in blocks)

    def _in_blocks(self, size: int) -> Iterator[tuple[RowSet, slice, int]]:
        """Yield these rows in each block of some size that has any, their places among all, and the block."""
        block, rows = np.divmod(self.at, size)
        ends = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), len(block)]
        for start, stop in itertools.pairwise(ends):
            yield RowSet(rows[start:stop]), slice(start, stop), int(block[start])

    def _by_block(self, tensor: Tensor) -> Iterator[tuple[Tensor, RowSet, slice]]:
        """Yield each block that has some of these rows, those rows in it, and their places among all."""
        for rows, places, block in self._in_blocks(tensor.shape[1]):
            yield tensor[block], rows, places

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor."""
        if tensor.dim() == 3:
            parts = [rows.of(block) for block, rows, _ in self._by_block(tensor)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        if len(self.runs) > _MOST_RUNS:
            return tensor.index_select(0, self._index(tensor))
        return tensor[self.runs[0]] if len(self.runs) == 1 else torch.cat([tensor[run] for run in self.runs])

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write values to these rows of a tensor."""
        if tensor.dim() == 3:
            for block, rows, places in self._by_block(tensor):
                rows.put(block, values[places])
            return
        if len(self.runs) > _MOST_RUNS:
            tensor.index_copy_(0, self._index(tensor), values)
            return
        start = 0
        for run in self.runs:
            stop = start + run.stop - run.start
            tensor[run] = values if len(self.runs) == 1 else values[start:stop]
            start = stop

    def add(self, tensor: Tensor, values: Tensor) -> None:
        """Add values to these rows of a tensor, each of which may come several times."""
        if tensor.dim() == 3:
            for block, rows, places in self._by_block(tensor):
                rows.add(block, values[places])
            return
        if len(self.runs) > _MOST_RUNS:
            tensor.index_add_(0, self._index(tensor), values)
            return
        start = 0
        for run in self.runs:
            stop = start + run.stop - run.start
            tensor[run] += values[start:stop]
            start = stop


class _Head(NamedTuple):
    """A product whose tensors are among those of `Chunks`."""

    hidden: int
    weight: int
    bias: int | None
    dtype: torch.dtype


class _Part(NamedTuple):
    """Values of a group that are computed with a chunk."""

    group: _Group
    places: RowSet  # of their rows in the chunk
    values: RowSet  # their own places
    is_all: bool  # whether they are of all rows of the chunk, in turn


class Chunks:
    """Values of expressions of the same rows, computed together, a few rows at a time.

    It holds no tensors: those of `tensors` are given to each pass, so that autograd can let them go.
    """

    def __init__(self, outputs: Sequence[Output]) -> None:
        self.tensors: list[Tensor] = []
        self.tracked = [output.expression.tracks for output in outputs]
        self.rows = 0
        self.heads: list[_Head] = []
        self.groups: list[_Group] = []
        together: dict[bytes, list[int]] = {}
        for number, output in enumerate(outputs):
            together.setdefault(output.rows.tobytes(), []).append(number)
        known: dict[int, Any] = {}
        for numbers in together.values():
            rows = outputs[numbers[0]].rows
            order = np.argsort(rows if rows.ndim == 1 else rows[:, 0], kind="stable")
            group = _Group(rows[order], order)
            self._compile(group, [(number, outputs[number].expression) for number in numbers], known)
            self.groups.append(group)
        self.device = self.tensors[0].device.type

    def _compile(self, group: _Group, wanted: Sequence[tuple[int, Expression]], known: dict[int, Any]) -> None:
        """Write the steps of a group's results, each expression once."""
        refs: dict[int, _Ref] = {}
        group.results = [(number, self._written(group, expression, refs, known)) for number, expression in wanted]
        last: dict[_Ref, int] = {}
        for number, step in enumerate(group.steps):
            used = tree_leaves((step.args, step.kwargs), is_leaf=_is_ref)
            last.update({ref: number for ref in used if _is_ref(ref)})
        for ref, number in last.items():
            group.steps[number].spent.append(ref)

    def _written(self, group: _Group, value: Any, refs: dict[int, _Ref], known: dict[int, Any]) -> Any:
        """Return where an argument's value will be; write the steps that make it."""
        if not isinstance(value, EXPRESSIONS):
            return value
        if id(value) in refs:
            return refs[id(value)]
        if isinstance(value, Leaf):
            ref = _Ref("head", self._head(value, known))
        elif isinstance(value, PerRow | Shared):
            kind = "shared" if isinstance(value, Shared) else "numbers" if value.is_flat else "vectors"
            ref = _Ref(kind, self._place(value.tensor, value.version, known))
            if ref not in group.inputs:
                group.inputs.append(ref)
        else:
            given = ((value.of, value.place), {}) if isinstance(value, Item) else (value.args, value.kwargs)
            args, kwargs = tree_map(lambda a: self._written(group, a, refs, known), given)
            step = _Step(operator.getitem, args, kwargs, True, None)
            if isinstance(value, Applied):
                step = _Step(value.function, args, kwargs, value.tracks, value.autocast)
            group.steps.append(step)
            ref = _Ref("step", len(group.steps) - 1)
        refs[id(value)] = ref
        return ref

    def _place(self, tensor: Tensor, version: int, known: dict[int, Any]) -> int:
        if changes_of(tensor) != version:
            raise UsageError(
                "a tensor that values of deferred logits are computed from was written to before they were asked for:"
                " ask for them earlier, as by adding 0 to the logits, or plan without chunked_loss"
            )
        if id(tensor) not in known:
            known[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        place: int = known[id(tensor)]
        return place

    def _head(self, made: Leaf, known: dict[int, Any]) -> int:
        product = made.product
        if id(product) not in known:
            places = [self._place(t, v, known) for t, v in zip(product.tensors, made.versions, strict=True)]
            known[id(product)] = len(self.heads)
            hidden, weight, *bias = places
            self.heads.append(_Head(hidden, weight, bias[0] if bias else None, product.dtype))
            self.rows = min(self.rows or product.rows, product.rows)
        number: int = known[id(product)]
        return number

    def _pieces(self, groups: Sequence[tuple[_Group, Index, Index]]) -> Iterator[tuple[RowSet, list[_Part]]]:
        """Yield chunks of the rows that some groups need, and the groups' values of each.

        A group whose values are of several rows, as a sample's loss of its frames, is the only one.
        """
        if groups and groups[0][1].ndim == 2:
            ((group, rows, order),) = groups
            count = max(1, self.rows // rows.shape[1])
            for start in range(0, len(rows), count):
                wanted = rows[start : start + count].reshape(-1)
                at = np.unique(wanted)
                places = np.searchsorted(at, wanted)
                is_all = np.array_equal(places, np.arange(len(at)))
                yield RowSet(at), [_Part(group, RowSet(places), RowSet(order[start : start + count]), is_all)]
            return
        needed = np.unique(np.concatenate([rows for _, rows, _ in groups]))
        for start in range(0, len(needed), self.rows):
            at = needed[start : start + self.rows]
            parts = []
            for group, rows, order in groups:
                first, last = np.searchsorted(rows, [at[0], at[-1] + 1])
                if first < last:
                    places = np.searchsorted(at, rows[first:last])
                    is_all = len(places) == len(at) and bool((np.diff(places) == 1).all())
                    parts.append(_Part(group, RowSet(places), RowSet(order[first:last]), is_all))
            yield RowSet(at), parts

    def values(self) -> list[Tensor]:
        """Return the outputs' values, [rows] or [rows, size] each."""
        tensors, self.tensors = self.tensors, []
        return list(_InChunks.apply(self, *tensors))  # type: ignore[no-untyped-call]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs' values from the tensors that `tensors` listed."""
        found: list[Any] = [None] * len(self.tracked)
        given = _Given(self, tensors)
        pieces = self._pieces([(group, group.rows, group.order) for group in self.groups])
        for rows, parts in representatives(pieces, given.kind):
            logits = [head.logits(rows.of(head.hidden).to(head.dtype)) for head in given.heads]
            while parts:
                part = parts.pop(0)
                table = given.table(part, logits)
                if not parts:
                    logits.clear()  # they go when they are used
                results = part.group.run(table, self.device)
                del table
                for (number, _), value in zip(part.group.results, results, strict=True):
                    if found[number] is None:
                        found[number] = value.new_empty((len(part.group.rows), *value.shape[1:]))
                    part.values.put(found[number], value)
                    del value
                del results
        return found

    def backward(self, tensors: Sequence[Tensor], grads: Sequence[Any], needs: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of the tensors from those of the outputs."""
        given = _Given(self, tensors, needs)
        found: list[Any] = given.zeros()
        for rows, parts in representatives(self._pieces(self._counted(grads)), given.kind):
            pieces = [rows.of(head.hidden).to(head.dtype) for head in given.heads]
            with torch.enable_grad():  # the graph is followed to the logits, not through them
                logits = [
                    head.logits(piece.detach().requires_grad_(head.is_needed))
                    for head, piece in zip(given.heads, pieces, strict=True)
                ]
            by_logits: list[Any] = [None] * len(pieces)
            is_alone = len(parts) == 1 and parts[0].is_all
            while parts:
                part = parts.pop(0)
                with torch.enable_grad():
                    table = given.table(part, logits)
                if not parts:
                    logits.clear()
                made = self._gradients(part, table, grads)
                while made:
                    ref, gradient = made.popitem()
                    if ref.kind == "head":
                        if by_logits[ref.number] is None and not is_alone:
                            by_logits[ref.number] = gradient.new_zeros((len(rows.at), gradient.shape[1]))
                        if is_alone:
                            by_logits[ref.number] = gradient
                        else:
                            part.places.add(by_logits[ref.number], gradient)
                    elif ref.kind == "shared":
                        found[ref.number].add_(gradient)
                    else:
                        gradient = gradient[:, None] if ref.kind == "numbers" else gradient
                        part.values.add(by_rows(found[ref.number]), gradient)
                    del gradient
            for number, head in enumerate(given.heads):
                of_logits, by_logits[number] = by_logits[number], None
                if of_logits is None:
                    continue
                by_hidden, by_weight, by_bias = (None if n is None else found[n] for n in self.heads[number][:3])
                if by_hidden is not None:
                    rows.add(by_rows(by_hidden), of_logits @ head.weight)
                if by_weight is not None:
                    add_to_weight(by_weight, of_logits, pieces[number])
                if by_bias is not None:
                    by_bias += of_logits.sum(0)
                del of_logits
        return [None if f is None else f.to(tensor.dtype) for f, tensor in zip(found, tensors, strict=True)]

    def _gradients(self, part: _Part, table: dict[_Ref, Any], grads: Sequence[Any]) -> dict[_Ref, Tensor]:
        """Return the gradients of what a chunk's values are made of, which goes from the table once it is used."""
        wanted = [ref for ref, value in table.items() if value.requires_grad]
        edges = [get_gradient_edge(table[ref]) for ref in wanted]  # which don't hold the logits
        with torch.enable_grad():
            results = part.group.run(table, self.device)
        table.clear()
        given = [
            (result, part.values.of(grads[number]))
            for (number, _), result in zip(part.group.results, results, strict=True)
            if grads[number] is not None and result.requires_grad
        ]
        del results
        if not given or not edges:
            return {}
        outs, upstream = zip(*given, strict=True)
        del given
        made = torch.autograd.grad(outs, edges, upstream, allow_unused=True)
        return {ref: gradient for ref, gradient in zip(wanted, made, strict=True) if gradient is not None}

    def _counted(self, grads: Sequence[Any]) -> list[tuple[_Group, Index, Index]]:
        """Return the rows of groups whose values have gradients; those that are all zero are left out where known."""
        counted = []
        for group in self.groups:
            wanted = [grads[number] for number, _ in group.results if grads[number] is not None]
            if not wanted:
                continue
            rows, order = group.rows, group.order
            if all(map(knows_values, wanted)):
                flags = [grad.reshape(len(grad), -1).ne(0).any(1).cpu().numpy() for grad in wanted]
                counts = np.logical_or.reduce(flags)[order]
                rows, order = rows[counts], order[counts]
            counted.append((group, rows, order))
        return counted


def whole_value(expression: Expression, rows: Index, of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the values of an expression at some rows, computed at once, with its tensors replaced by others."""
    chunks = Chunks([Output(expression, rows)])
    (group,) = chunks.groups
    with torch.autocast(chunks.device, enabled=False):
        given = _Given(chunks, [of(tensor) for tensor in chunks.tensors])
        part = _Part(group, RowSet(group.rows), RowSet(group.order), True)
        logits = [head.logits(part.places.of(head.hidden).to(head.dtype)) for head in given.heads]
        table = given.table(part, logits)
        del logits
        (value,) = group.run(table, chunks.device)
    in_turn = np.arange(len(rows))
    return value if (group.order == in_turn).all() else RowSet(np.argsort(group.order)).of(value)


@dataclass(frozen=True, eq=False)
class _CastHead:
    """A head whose weights are in what it is computed in."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    is_needed: bool  # whether anything of it takes a gradient

    def logits(self, piece: Tensor) -> Tensor:
        return F.linear(piece, self.weight, self.bias)


class _Given:
    """The tensors of one pass."""

    def __init__(self, chunks: Chunks, tensors: Sequence[Tensor], needs: Sequence[bool] = ()) -> None:
        self._tensors, self._needs = tensors, needs or [False] * len(tensors)
        self.heads = []
        for places in chunks.heads:
            weight = tensors[places.weight].to(places.dtype)
            bias = None if places.bias is None else tensors[places.bias].to(places.dtype)
            is_needed = any(self._needs[place] for place in places[:3] if place is not None)
            hidden = by_rows(tensors[places.hidden])
            self.heads.append(_CastHead(hidden, weight, bias, places.dtype, is_needed))
        by_row = {ref.number for group in chunks.groups for ref in group.inputs if ref.kind in _OF_ROWS}
        self._by_row = {number: by_rows(tensors[number]) for number in by_row}
        self._of_rows = by_row | {places.hidden for places in chunks.heads}

    def table(self, part: _Part, logits: Sequence[Tensor]) -> dict[_Ref, Any]:
        """Return what a part of the rows' values are made of, with gradients of their own where they are needed."""
        table = dict[_Ref, Any]()
        for ref in part.group.inputs:
            value = part.values.of(self._by_row[ref.number]) if ref.kind in _OF_ROWS else self._tensors[ref.number]
            value = value[:, 0] if ref.kind == "numbers" else value
            table[ref] = value.detach().requires_grad_() if self._needs[ref.number] else value
        for number, whole in enumerate(logits):
            table[_Ref("head", number)] = whole if part.is_all else part.places.of(whole)
        return table

    def kind(self, piece: tuple[RowSet, list[_Part]]) -> object:
        """Return the key of chunks that run the same operators; samples differ in their lengths."""
        rows, parts = piece
        if any(part.group.rows.ndim == 2 for part in parts):
            return rows.at.tobytes()
        given = [*(head.hidden for head in self.heads), *self._by_row.values()]
        blocks = sorted({tensor.shape[1] for tensor in given if tensor.dim() == 3})
        of_parts = ((id(p.group), p.places.kind(), p.values.kind(blocks), p.is_all) for p in parts)
        return rows.kind(blocks), *of_parts

    def zeros(self) -> list[Tensor | None]:
        """Return what the gradients are added to."""
        found: list[Tensor | None] = [None] * len(self._tensors)
        for number, (tensor, needed) in enumerate(zip(self._tensors, self._needs, strict=True)):
            if needed:
                laid_out = by_rows(tensor) if number in self._of_rows else tensor
                found[number] = torch.zeros_like(laid_out, dtype=wide(tensor.dtype)).view(tensor.shape)
        return found


class _InChunks(torch.autograd.Function):
    """The values of `Chunks`, whose rows are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, chunks: Chunks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.chunks = chunks
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with torch.autocast(tensors[0].device.type, enabled=False):
            values = chunks.forward(tensors)
        ctx.mark_non_differentiable(*(v for v, tracked in zip(values, chunks.tracked, strict=True) if not tracked))
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        with torch.autocast(tensors[0].device.type, enabled=False):
            return None, *ctx.chunks.backward(tensors, grads, ctx.needs_input_grad[1:])


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def add_to_weight(by_weight: Tensor, by_logits: Tensor, piece: Tensor, valid: Tensor | None = None) -> None:
    """Add what rows of the head's input give to the gradient of its weight; those that are not valid give nothing."""
    if by_weight.dtype == by_logits.dtype:
        by_weight.addmm_(by_logits.t(), piece if valid is None else piece * valid)
        return
    # The product is rounded to fewer bits before it is added: a part of the classes each.
    classes = max(_LEAST_CLASSES, -(-len(by_weight) // _PARTS))
    for part, of_part in zip(by_weight.split(classes), by_logits.split(classes, 1), strict=True):
        part += of_part.t() @ (piece if valid is None else piece * valid)
