"""A model that several ranks share, on paper: tensor, context and pipeline parallelism of one copy of it.

Tensor parallelism cuts the layers of each repeated block as in M. Shoeybi et al. (2019), "Megatron-LM: Training
Multi-Billion Parameter Language Models Using Model Parallelism", section 3: the linear layers before an activation
function or attention by their columns, the one after it by its rows. What lies between them is cut too; a sum over the
ranks follows the latter in the forward pass, and the former in the backward pass. Sums are in place. Embeddings,
normalisations, the layer of the logits and the loss stay whole (Megatron's vocabulary and sequence parallelism are not
counted).

Context parallelism is as in H. Liu, M. Zaharia, P. Abbeel (2023), "Ring Attention with Blockwise Transformers for
Near-Infinite Context": each rank has its tokens' activations, keys and values go round, and weights stay whole. A rank
holds its own keys and values and receives the next. Attention is taken to need memory in proportion to the tokens, as
fused kernels do; where the model writes the matrix of all pairs, a rank has a share of its rows.

The schedule of pipelines is 1F1B (D. Narayanan et al., 2019, "PipeDream: Generalized Pipeline Parallelism for DNN
Training", and 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2): of
S stages, the stage i holds the activations of min(S − i, M) microbatches out of M, and a step takes (M + S − 1) / M
times as long as the slowest stage. As in `torch.distributed.pipelining`, a stage has buffers to receive what each of
the M microbatches sends it, in both passes, and keeps what it returns until its backward pass. What stages send one
another takes no time here. Weights that two stages share are counted on the first of them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from memfit.errors import UsageError
from memfit.ir import ATTENTION, MATRIX, RING, SOFTMAX, SUM, Op, Storage, Trace, enclosing, operator_class
from memfit.ranks.insertion import ITEMSIZES, Insertion, innermost, repeated_blocks, with_shares

_NAMES = ("tp", "cp", "pp")
_SCALAR_BYTES = 16
_LINEAR = ("Linear", "NonDynamicallyQuantizableLinear")
_TRANSPOSED = ("Conv1D",)  # transformers' linear layer, with a weight of inputs × outputs
_ACTIVATIONS = "gelu relu silu tanh sigmoid mish elu leaky_relu hardswish softplus relu6 glu".split()
_PASSES = ("forward", "backward", "recompute")


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """How ranks share one copy of a model.

    Attributes:
        tp: Ranks that share each block's matrix products (> 0): tensor parallelism.
        cp: Ranks that share each sequence's tokens (> 0): context parallelism.
        pp: Stages that the model is cut into (> 0): pipeline parallelism.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Ranks that share one copy of the model."""
        return self.tp * self.cp * self.pp


def read_parallel(text: str) -> Parallel:
    """Return what a text such as "tp=4,pp=2" says.

    Raises:
        UsageError: It says nothing of the kind.
    """
    given: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in _NAMES or not size.isdigit() or int(size) < 1 or name in given:
            raise UsageError(
                f"parallel={text!r} can't be parsed at {part!r}: give some of tp=N (tensor), cp=N (context) and pp=N"
                " (pipeline parallelism), each once and above 0, as in 'tp=4,pp=2'"
            )
        given[name] = int(size)
    return Parallel(**given)


def stages_of(trace: Trace, parallel: Parallel) -> list[Trace]:
    """Return the step of one rank of each stage, the first stage's first, from that of one process and microbatch size.

    Raises:
        UsageError: The model can't be shared so.
    """
    notes: list[str] = []
    if parallel.tp > 1:
        cut = TensorParallel(trace, parallel.tp)
        trace = cut.result()
        notes.append(cut.note())
    if parallel.cp > 1:
        trace = _context_parallel(trace, parallel.cp)
        notes.append(
            f"context parallelism of {parallel.cp} ranks: each has 1/{parallel.cp} of the tokens; keys and values are"
            " passed from rank to rank"
        )
    stages = [trace]
    if parallel.pp > 1:
        pipeline = Pipeline(trace, parallel.pp)
        stages = [pipeline.stage(index) for index in range(parallel.pp)]
        notes.append(pipeline.note())
    noted = [f"prediction only, not applied or measured: {note}" for note in notes]
    return [replace(stage, notes=[*stage.notes, *noted]) for stage in stages]


class _Sizes(NamedTuple):
    """The features of a linear layer."""

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
        weights = {p.fqn.removesuffix(".weight"): p.shape for p in trace.parameters if p.fqn.endswith(".weight")}
        self.linears: dict[str, _Sizes] = {}
        for module in trace.modules:
            shape = weights.get(module.fqn, ())
            if len(shape) == 2 and module.kind in (*_LINEAR, *_TRANSPOSED):
                outputs, inputs = shape if module.kind in _LINEAR else reversed(shape)
                self.linears[module.fqn] = _Sizes(inputs, outputs)
        blocks = set(repeated_blocks(trace))
        self.regions: list[_Region] = []
        for index, call in enumerate(trace.calls):
            if trace.fqn_of(index) in blocks and call.phase in ("forward", "recompute"):
                self.regions += self._regions_in(range(call.start, call.end))
        self.columns = {trace.fqn_of(call) for region in self.regions for call in region.columns}
        self.rows = {trace.fqn_of(region.row) for region in self.regions}
        if not self.regions:
            raise UsageError(
                f"parallel='tp={ranks}': {trace.workload!r} has no repeated blocks with linear layers around"
                " an activation function or attention: memfit can't cut it. Leave out tp"
            )
        sizes = [(fqn, "out_features", self.linears[fqn].outputs) for fqn in sorted(self.columns)]
        sizes += [(fqn, "in_features", self.linears[fqn].inputs) for fqn in sorted(self.rows)]
        for fqn, name, size in sizes:
            if size % ranks:
                raise UsageError(
                    f"parallel='tp={ranks}': {fqn}.{name}={size} is not a multiple of {ranks}. Give a tp that"
                    " divides it"
                )
        self.of_call = {call: region for region in self.regions for call in (*region.columns, region.row)}
        self.out_bytes: dict[int, int] = {}  # of what a linear layer returns
        for index in self.of_call:
            call = trace.calls[index]
            born = [
                s for at in range(call.start, call.end) if _multiplies(trace.ops[at].name) for s in trace.births[at]
            ]
            self.out_bytes[index] = max((trace.storages[s].nbytes for s in born), default=0)
        self.cut: set[int] = set()  # storages
        self.shared: set[int] = set()  # operators
        self.sums: list[tuple[int, int]] = []  # bytes, and the operator before which they are summed
        backward: dict[int, list[int]] = defaultdict(list)  # the operators of each linear layer's call
        for position, op in enumerate(trace.ops):
            if op.phase == "backward" and op.call in self.of_call:
                backward[op.call].append(position)
        for region in self.regions:
            self._cut_region(region, backward)

    def _linear(self, call: int) -> _Sizes:
        return self.linears[self.trace.fqn_of(call)]

    def _regions_in(self, positions: range) -> list[_Region]:
        """Return the regions of one call of a block, in the order of its operators."""
        found, region, last = [], _Region(), -1
        for position in positions:
            op = self.trace.ops[position]
            if op.call < 0 or self.trace.fqn_of(op.call) not in self.linears:
                base = op.name.split(".")[1].removesuffix("_") if "." in op.name else op.name
                mixes = operator_class(op.name) in (ATTENTION, SOFTMAX, MATRIX) or base in _ACTIVATIONS
                region.mixes |= bool(region.columns) and mixes
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

    # What is cut

    def _in_bytes(self, call: int) -> int:
        linear = self._linear(call)
        return self.out_bytes[call] * linear.inputs // linear.outputs

    def _is_bias(self, nbytes: int, call: int) -> bool:
        return nbytes in [self._linear(call).outputs * itemsize for itemsize in ITEMSIZES]

    def _cut_region(self, region: _Region, backward: dict[int, list[int]]) -> None:
        """Cut both passes of a region; the backward pass is from that of its last layer to that of its first ones."""
        row, columns, out_bytes = region.row, region.columns, self.out_bytes[region.row]

        def is_whole_forward(op: Op, position: int, nbytes: int) -> bool:
            if op.call == row:
                return _multiplies(op.name) or self._is_bias(nbytes, row)
            return op.call in columns and not _multiplies(op.name) and _alike(nbytes, self._in_bytes(op.call))

        end = self.trace.calls[row].end
        self._cut(range(self.trace.calls[columns[0]].start, end), is_whole_forward)
        self.sums.append((out_bytes, end))
        of_columns = [position for call in columns for position in backward[call]]
        if not backward[row] or not of_columns:
            return
        entered, last, in_bytes = min(of_columns), max(of_columns), self._in_bytes(columns[0])

        def is_whole_backward(op: Op, position: int, nbytes: int) -> bool:
            if op.call == row:
                return not _multiplies(op.name) and (_alike(nbytes, out_bytes) or self._is_bias(nbytes, row))
            return (op.call in columns or position > entered) and _alike(nbytes, in_bytes)

        self._cut(range(backward[row][0], last + 1), is_whole_backward)
        self.sums.append((in_bytes, last + 1))

    def _cut(self, positions: range, is_whole: Callable[[Op, int, int], bool]) -> None:
        """Cut what operators do, and what they allocate but for what stays whole, by operator and bytes."""
        self.shared.update(positions)
        for position in positions:
            for index in self.trace.births[position]:
                storage = self.trace.storages[index]
                may_be = storage.parameter < 0 and storage.nbytes > _SCALAR_BYTES
                if may_be and not is_whole(self.trace.ops[position], position, storage.nbytes):
                    self.cut.add(index)

    # The step of a rank

    def result(self) -> Trace:
        """Return the step of one rank."""
        parameters, sizes = [], defaultdict[int, int](int)  # sizes of parameters, for what the update allocates
        for p in self.trace.parameters:
            shape = p.shape
            if self._is_cut(p.fqn):  # which dimension is cut does not matter to the bytes
                at = next(i for i, size in enumerate(shape) if size % self.ranks == 0)
                shape = (*shape[:at], shape[at] // self.ranks, *shape[at + 1 :])
            parameters.append(replace(p, shape=shape))
            sizes[p.nbytes] = max(sizes[p.nbytes], parameters[-1].nbytes)
        storages = []
        for index, storage in enumerate(self.trace.storages):
            is_part = index in self.cut
            if storage.parameter >= 0:
                p = self.trace.parameters[storage.parameter]
                numel = p.nbytes // p.itemsize
                is_part = self._is_cut(p.fqn) and storage.nbytes in [numel * size for size in ITEMSIZES]
            elif not is_part and storage.birth >= 0 and self.trace.ops[storage.birth].phase == "optimizer":
                storage = replace(storage, nbytes=sizes.get(storage.nbytes, storage.nbytes))
            storages.append(replace(storage, nbytes=-(-storage.nbytes // self.ranks), shape=()) if is_part else storage)
        shared = with_shares(self.trace, sorted(self.shared), self.ranks)
        insertion = Insertion(replace(shared, parameters=parameters, storages=storages))
        for summed, position in sorted(self.sums, key=lambda each: each[1]):
            insertion.op(SUM, summed, position, like=position - 1, call=-1, ranks=self.ranks)
        return insertion.result()

    def _is_cut(self, fqn: str) -> bool:
        module, _, name = fqn.rpartition(".")
        return module in self.columns or (module in self.rows and name == "weight")

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


def _alike(nbytes: int, other: int) -> bool:
    """Tell whether tensors may have as many elements, of the same or of another itemsize."""
    return nbytes in (other // 2, other, 2 * other)


def _context_parallel(trace: Trace, ranks: int) -> Trace:
    """Return the step of one rank of `ranks`, from the step of one process."""
    # By module, the bytes that its weights have in any dtype: what is as large may be one of them.
    of_weights: dict[str, set[int]] = defaultdict(set)
    for parameter in trace.parameters:
        numel = parameter.nbytes // parameter.itemsize
        of_weights[parameter.fqn.rpartition(".")[0]] |= {numel * size for size in ITEMSIZES}
    storages = []
    for storage in trace.storages:
        owner = trace.fqn_of(trace.ops[storage.birth].call) if storage.birth >= 0 else ""
        kept = (
            storage.parameter >= 0
            or storage.nbytes <= _SCALAR_BYTES
            or storage.category in ("parameters", "buffers", "optimizer state", "gradients")
            or (storage.birth >= 0 and trace.ops[storage.birth].phase not in _PASSES)
            or (storage.birth >= 0 and storage.nbytes in of_weights[owner])
        )
        storages.append(storage if kept else replace(storage, nbytes=-(-storage.nbytes // ranks), shape=()))
    positions = [i for i, op in enumerate(trace.ops) if op.phase in _PASSES]
    insertion = Insertion(replace(with_shares(trace, positions, ranks), storages=storages))
    for position in positions:
        op = trace.ops[position]
        if operator_class(op.name) == ATTENTION:
            # Keys and values, and their gradients too in the backward pass, each as large as what attention returns.
            times = 4 if op.phase == "backward" else 2
            nbytes = times * max((trace.storages[i].nbytes for i in trace.births[position]), default=0)
            sent = insertion.op(RING, nbytes, position, like=position, call=op.call, ranks=ranks)
            insertion.allocate(-(-nbytes // ranks), sent, "temporaries", -1).death = position
    return insertion.result()


class Pipeline:
    """The stages of a step: blocks are shared evenly, the first stages have one more where that does not divide."""

    def __init__(self, trace: Trace, stages: int) -> None:
        self.trace, self.stages = trace, stages
        blocks = repeated_blocks(trace)
        if stages > len(blocks):
            raise UsageError(
                f"parallel='pp={stages}': {trace.workload!r} has {len(blocks)} repeated blocks, fewer than stages. Give"
                f" pp of at most {max(len(blocks), 1)}"
            )
        counts = [len(blocks) // stages + (i < len(blocks) % stages) for i in range(stages)]
        self.of_block = dict(zip(blocks, [i for i, count in enumerate(counts) for _ in range(count)], strict=True))
        self.op_stages = self._op_stages()
        self.outputs: set[int] = set()  # what the model's own calls return, as the last that they allocate
        for index, call in enumerate(trace.calls):
            if call.phase == "forward" and not trace.fqn_of(index):
                born = [i for at in range(call.start, call.end) for i in trace.births[at]]
                self.outputs |= {max(born, key=lambda i: trace.storages[i].birth)} if born else set()
        of_module: dict[str, int] = {}  # the stage of the first operator of a module's call
        for index, call in enumerate(trace.calls):
            if call.end > call.start:
                of_module.setdefault(trace.fqn_of(index), self.op_stages[call.start])
        self.parameter_stages = []
        for parameter in trace.parameters:
            around = enclosing(parameter.fqn)
            block = next((stage for fqn, stage in self.of_block.items() if fqn in around), None)
            of_call = of_module.get(parameter.fqn.rpartition(".")[0], 0)
            self.parameter_stages.append(of_call if block is None else block)

    def _op_stages(self) -> list[int]:
        """Return the stage of each operator: that of its block, or of the block before it in the forward pass."""
        first = {self.trace.fqn_of(i): c.start for i, c in reversed(list(enumerate(self.trace.calls)))}
        start = min((at for fqn, at in first.items() if fqn in self.of_block), default=0)
        stages: list[int] = []
        current, passing = 0, (-1, False)
        for op in self.trace.ops:
            backward = op.phase in ("backward", "recompute")
            if (op.microbatch, backward) != passing:
                passing, current = (op.microbatch, backward), self.stages - 1 if backward else 0
            for call in self.trace.call_chain(op.call):
                if (fqn := self.trace.fqn_of(call)) in self.of_block:
                    current = self.of_block[fqn]
                    break
            else:  # before the first block it is the first, else the last; around blocks it is not known
                if op.call >= 0 and not any(self.trace.fqn_of(op.call) in enclosing(block) for block in self.of_block):
                    is_first = self.trace.calls[op.call].start % len(self.trace.ops) < start
                    current = 0 if is_first else self.stages - 1
            stages.append(current)
        return stages

    def stage(self, stage: int) -> Trace:
        """Return the step of one stage, with the activations of the other microbatches in flight."""
        trace, ops, last = self.trace, self.trace.ops, self.trace.microbatches - 1
        kept = [self.op_stages[i] == stage or op.phase == "optimizer" for i, op in enumerate(ops)]
        # By microbatch and whether backward, the first and the last operator of the stage.
        reach: dict[tuple[int, bool], tuple[int, int]] = {}
        for position, op in enumerate(ops):
            if self.op_stages[position] == stage and op.phase in _PASSES:
                key = op.microbatch, op.phase != "forward"
                reach[key] = reach.get(key, (position, 0))[0], position
        wanted: dict[int, int] = defaultdict(int)
        for parameter, of in zip(trace.parameters, self.parameter_stages, strict=True):
            wanted[parameter.nbytes] += of == stage
        left: dict[int, dict[int, int]] = defaultdict(lambda: dict(wanted))
        received, storages = 0, list[Storage]()
        for index, storage in enumerate(trace.storages):
            birth, death = storage.birth, storage.death
            if storage.parameter >= 0:
                is_own = self.parameter_stages[storage.parameter] == stage
            elif birth < 0:
                is_own = storage.category != "inputs" or stage in (0, self.stages - 1)
            elif ops[birth].phase == "optimizer":
                counts = left[birth]
                is_own = storage.nbytes not in counts
                if not is_own:
                    counts[storage.nbytes] -= 1
                    is_own = counts[storage.nbytes] >= 0
            else:
                op, is_own = ops[birth], kept[birth]
                sender = stage - 1 if op.phase == "forward" else stage + 1
                start = reach.get((op.microbatch, op.phase != "forward"), (0, 0))[0]
                is_sent = op.phase != "recompute" and self.op_stages[birth] == sender
                if is_sent and birth < start <= storage.release and op.microbatch == last:
                    received += storage.nbytes
                used = self.op_stages[min(storage.release, len(ops) - 1)]
                is_returned = index in self.outputs if stage == self.stages - 1 else stage < used
                if is_own and op.phase == "forward" and is_returned:  # it is kept until the backward pass
                    death = max(death, reach.get((op.microbatch, True), (0, death))[1])
            storages.append(replace(storage, nbytes=storage.nbytes if is_own else 0, death=death))
        buffers = received * trace.scale_microbatches
        storages.append(Storage(buffers, -1, len(ops), len(ops), "temporaries", -1))
        if (last, False) in reach:  # the activations of the microbatches that are in flight besides the one that runs
            begins, end = reach[last, False]
            activations = sum(
                s.nbytes for s in storages
                if s.birth >= 0 and ops[s.birth].microbatch == last and s.birth <= end < s.death < len(ops)
                and ops[s.birth].phase == "forward"
            )  # fmt: skip
            ends = reach.get((last, True), (0, end))[1]
            others = (min(self.stages - stage, trace.scale_microbatches) - 1) * activations
            storages += [Storage(others, begins, ends, ends, "activations", -1)] if others else []
        updates = [i for i, op in enumerate(ops) if op.phase == "optimizer"]
        return _without(with_shares(replace(trace, storages=storages), updates, self.stages), kept)

    def note(self) -> str:
        """Return how the step is cut, in words."""
        m, s = self.trace.scale_microbatches, self.stages
        counts = [list(self.of_block.values()).count(i) for i in range(s)]
        return (
            f"pipeline of {s} stages (1F1B) with {', '.join(map(str, counts))} blocks, {m} microbatch{'es' * (m != 1)}:"
            f" the bubble adds {(s - 1) / m:.0%} to the step; communication between stages is counted as free"
        )


def _without(trace: Trace, kept: list[bool]) -> Trace:
    """Return a step without the operators of other stages, which are not `kept`."""
    before = [0, *itertools.accumulate(kept)]  # operators that are kept before each one

    def last(position: int) -> int:
        """Return the last operator kept up to a position; the start and the end of the step stay -1 and the end."""
        if position >= len(kept):
            return before[-1]
        return before[position + 1] - 1 if position >= 0 else -1

    def first(position: int) -> int:
        return before[position] if position >= 0 else -1

    def moved(storage: Storage) -> Storage:
        birth = min(first(storage.birth), before[-1] - 1)
        death, release = (max(birth, last(at)) for at in (storage.death, storage.release))
        return replace(storage, birth=birth, death=death, release=release)

    return replace(
        trace,
        ops=list(itertools.compress(trace.ops, kept)),
        calls=[replace(call, start=before[call.start], end=before[call.end]) for call in trace.calls],
        storages=[moved(storage) for storage in trace.storages],
        saves=[
            replace(save, at=before[save.at], unpacked=first(save.unpacked), death=last(save.death))
            for save in trace.saves
        ],
    )
