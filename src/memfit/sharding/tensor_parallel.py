"""Tensor parallelism on paper: one rank of several that share each block's matrix products.

In each repeated block, layers are cut as in M. Shoeybi et al. (2019), "Megatron-LM: Training Multi-Billion Parameter
Language Models Using Model Parallelism", section 3: the linear layers before an activation function or attention by
their columns, the one after it by its rows. What lies between them is cut too; a sum over the ranks follows the latter
in the forward pass, and the former in the backward pass. Sums are in place. Embeddings, normalisations, the layer of
the logits and the loss stay whole (Megatron's vocabulary and sequence parallelism are not counted).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from msgspec.structs import replace

from memfit.errors import UsageError
from memfit.ir.collectives import SUM
from memfit.ir.operator_classes import ATTENTION, MATRIX, SOFTMAX, operator_class
from memfit.ir.trace import Storage, Trace
from memfit.sharding.groups import innermost, repeated_blocks
from memfit.sharding.insertion import Insertion, with_shares

_LINEAR = ("Linear", "NonDynamicallyQuantizableLinear")
_TRANSPOSED = ("Conv1D",)  # transformers' linear layer, with a weight of inputs × outputs
_ACTIVATIONS = "gelu relu silu tanh sigmoid mish elu leaky_relu hardswish softplus relu6 glu".split()
_SCALAR_BYTES = 16
_ITEMSIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class _Linear:
    """A linear layer of a block."""

    fqn: str
    inputs: int
    outputs: int


@dataclass(eq=False)
class _Region:
    """Calls of linear layers that are cut together: by their columns, and the last one by its rows."""

    columns: list[int] = field(default_factory=list)
    row: int = -1
    mixes: bool = False


class TensorParallel:
    """The step of one rank of `ranks`, from the step of one process."""

    def __init__(self, trace: Trace, ranks: int) -> None:
        self.trace, self.ranks = trace, ranks
        self.linears = self._linears()
        self.regions = self._regions()
        self.columns = {self._linear(call).fqn for region in self.regions for call in region.columns}
        self.rows = {self._linear(region.row).fqn for region in self.regions}
        self._check()
        self.of_call = {call: region for region in self.regions for call in (*region.columns, region.row)}
        self.out_bytes = {call: self._product_bytes(call) for call in self.of_call}
        self.cut: set[int] = set()  # storages
        self.shared: set[int] = set()  # operators
        self.sums: list[tuple[int, int]] = []  # bytes, and the operator before which they are summed
        backward = self._backward()
        for region in self.regions:
            self._forward(region)
            self._after(region, backward)

    # Which layers

    def _linears(self) -> dict[str, _Linear]:
        weights = {p.fqn.removesuffix(".weight"): p.shape for p in self.trace.parameters if p.fqn.endswith(".weight")}
        found = {}
        for module in self.trace.modules:
            shape = weights.get(module.fqn)
            if shape is not None and len(shape) == 2 and module.kind in (*_LINEAR, *_TRANSPOSED):
                outputs, inputs = shape if module.kind in _LINEAR else reversed(shape)
                found[module.fqn] = _Linear(module.fqn, inputs, outputs)
        return found

    def _linear(self, call: int) -> _Linear:
        return self.linears[self.trace.fqn_of(call)]

    def _regions(self) -> list[_Region]:
        blocks = set(repeated_blocks(self.trace))
        found: list[_Region] = []
        for index, call in enumerate(self.trace.calls):
            if self.trace.fqn_of(index) in blocks and call.phase in ("forward", "recompute"):
                found += self._regions_in(range(call.start, call.end))
        return found

    def _regions_in(self, positions: range) -> list[_Region]:
        """Return the regions of one call of a block, in the order of its operators."""
        found, region, last = [], _Region(), -1
        for position in positions:
            op = self.trace.ops[position]
            if op.call < 0 or self.trace.fqn_of(op.call) not in self.linears:
                region.mixes |= bool(region.columns) and _mixes(op.name)
                continue
            if op.call == last:
                continue
            last, linear = op.call, self._linear(op.call)
            width = self._linear(region.columns[0]).inputs if region.columns else 0
            if region.mixes and linear.outputs == width:
                region.row = op.call
                found.append(region)
                region = _Region()
            elif not region.columns or linear.inputs == width:
                region.columns.append(op.call)
            else:  # another kind of layer: nothing here is cut
                region = _Region([op.call])
        return found

    def _check(self) -> None:
        if not self.regions:
            raise UsageError(
                f"parallel='tp={self.ranks}': {self.trace.workload!r} has no repeated blocks with linear layers around"
                " an activation function or attention: memfit can't cut it. Leave out tp"
            )
        sizes = [(fqn, "out_features", self.linears[fqn].outputs) for fqn in sorted(self.columns)]
        sizes += [(fqn, "in_features", self.linears[fqn].inputs) for fqn in sorted(self.rows)]
        for fqn, name, size in sizes:
            if size % self.ranks:
                raise UsageError(
                    f"parallel='tp={self.ranks}': {fqn}.{name}={size} is not a multiple of {self.ranks}. Give a tp that"
                    " divides it"
                )

    # What is cut

    def _product_bytes(self, call: int) -> int:
        """Return the bytes of what a linear layer returns."""
        start, end = self.trace.calls[call].start, self.trace.calls[call].end
        born = [s for at in range(start, end) if _multiplies(self.trace.ops[at].name) for s in self.trace.births[at]]
        return max((self.trace.storages[index].nbytes for index in born), default=0)

    def _in_bytes(self, call: int) -> int:
        linear = self._linear(call)
        return self.out_bytes[call] * linear.inputs // linear.outputs

    def _is_bias(self, nbytes: int, call: int) -> bool:
        return nbytes in [self._linear(call).outputs * itemsize for itemsize in _ITEMSIZES]

    def _forward(self, region: _Region) -> None:
        calls = self.trace.calls
        for position in range(calls[region.columns[0]].start, calls[region.row].end):
            op = self.trace.ops[position]
            self.shared.add(position)
            for index in self.trace.births[position]:
                nbytes = self.trace.storages[index].nbytes
                if op.call == region.row:
                    whole = _multiplies(op.name) or self._is_bias(nbytes, region.row)
                elif op.call in region.columns:
                    whole = not _multiplies(op.name) and _alike(nbytes, self._in_bytes(op.call))
                else:
                    whole = False
                self._take(index, whole)
        self.sums.append((self.out_bytes[region.row], calls[region.row].end))

    def _backward(self) -> dict[int, list[int]]:
        """Return the operators of the backward pass of each linear layer's call."""
        found: dict[int, list[int]] = defaultdict(list)
        for position, op in enumerate(self.trace.ops):
            if op.phase == "backward" and op.call in self.of_call:
                found[op.call].append(position)
        return found

    def _after(self, region: _Region, backward: dict[int, list[int]]) -> None:
        """Cut the backward pass of a region: from that of its last layer to that of its first ones."""
        of_columns = [position for call in region.columns for position in backward[call]]
        if not backward[region.row] or not of_columns:
            return
        first, entered, last = backward[region.row][0], min(of_columns), max(of_columns)
        in_bytes = self._in_bytes(region.columns[0])
        for position in range(first, last + 1):
            op = self.trace.ops[position]
            self.shared.add(position)
            for index in self.trace.births[position]:
                nbytes = self.trace.storages[index].nbytes
                if op.call == region.row:
                    is_output = _alike(nbytes, self.out_bytes[region.row])
                    whole = not _multiplies(op.name) and (is_output or self._is_bias(nbytes, region.row))
                elif op.call in region.columns or position > entered:
                    whole = _alike(nbytes, in_bytes)
                else:
                    whole = False
                self._take(index, whole)
        self.sums.append((in_bytes, last + 1))

    def _take(self, index: int, whole: bool) -> None:
        storage = self.trace.storages[index]
        if not whole and storage.parameter < 0 and storage.nbytes > _SCALAR_BYTES:
            self.cut.add(index)

    # The step of a rank

    def result(self) -> Trace:
        """Return the step of one rank."""
        parameters = [
            replace(p, shape=self._shape(p.fqn, p.shape)) if self._is_cut(p.fqn) else p for p in self.trace.parameters
        ]
        sizes: dict[int, int] = defaultdict(int)  # of parameters, for what the update allocates
        for before, after in zip(self.trace.parameters, parameters, strict=True):
            sizes[before.nbytes] = max(sizes[before.nbytes], after.nbytes)
        storages = [self._sized(index, sizes) for index in range(len(self.trace.storages))]
        shared = with_shares(self.trace, sorted(self.shared), self.ranks)
        insertion = Insertion(replace(shared, parameters=parameters, storages=storages))
        for summed, position in sorted(self.sums, key=lambda each: each[1]):
            insertion.op(SUM, summed, position, like=position - 1, call=-1, ranks=self.ranks)
        return insertion.result()

    def _is_cut(self, fqn: str) -> bool:
        module, _, name = fqn.rpartition(".")
        return module in self.columns or (module in self.rows and name == "weight")

    def _shape(self, fqn: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a rank's part; which dimension is cut does not matter to its bytes."""
        at = next(i for i, size in enumerate(shape) if size % self.ranks == 0)
        return (*shape[:at], shape[at] // self.ranks, *shape[at + 1 :])

    def _sized(self, index: int, sizes: dict[int, int]) -> Storage:
        storage = self.trace.storages[index]
        if storage.parameter >= 0:
            parameter = self.trace.parameters[storage.parameter]
            numel = parameter.nbytes // parameter.itemsize
            whole = storage.nbytes in [numel * size for size in _ITEMSIZES]
            return self._part(storage) if whole and self._is_cut(parameter.fqn) else storage
        if index in self.cut:
            return self._part(storage)
        in_update = storage.birth >= 0 and self.trace.ops[storage.birth].phase == "optimizer"
        return replace(storage, nbytes=sizes.get(storage.nbytes, storage.nbytes)) if in_update else storage

    def _part(self, storage: Storage) -> Storage:
        return replace(storage, nbytes=-(-storage.nbytes // self.ranks), shape=())

    def note(self) -> str:
        """Return what was cut, in words."""
        return (
            f"tensor parallelism of {self.ranks} ranks: columns of {self._patterns(self.columns)}, rows of"
            f" {self._patterns(self.rows)}; embeddings, normalisations and logits are not cut"
        )

    def _patterns(self, names: set[str]) -> str:
        """Return names with the numbers of their blocks as *, each once."""
        blocks = repeated_blocks(self.trace)
        kinds = set()
        for name in names:
            block = innermost(name, ("", *blocks))
            parent, _, last = block.rpartition(".")
            kinds.add(f"{parent}.*{name[len(block) :]}" if last.isdigit() and parent else name)
        return ", ".join(sorted(kinds))


def _multiplies(name: str) -> bool:
    return operator_class(name) == MATRIX


def _mixes(name: str) -> bool:
    base = name.split(".")[1].removesuffix("_") if "." in name else name
    return operator_class(name) in (ATTENTION, SOFTMAX, MATRIX) or base in _ACTIVATIONS


def _alike(nbytes: int, other: int) -> bool:
    """Tell whether tensors may have as many elements, of the same or of another itemsize."""
    return nbytes in (other // 2, other, 2 * other)
