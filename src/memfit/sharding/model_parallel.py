"""A model that several ranks share, on paper: tensor, context and pipeline parallelism of one copy of it."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from memfit.errors import UsageError
from memfit.ir.trace import Trace
from memfit.sharding import context_parallel
from memfit.sharding.pipeline_parallel import Pipeline
from memfit.sharding.tensor_parallel import TensorParallel

_NAMES = ("tp", "cp", "pp")


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
    """Return the step of one rank of each stage, the first stage's first.

    Args:
        trace: The step of one process, at the microbatch size of the pipeline.

    Raises:
        UsageError: The model can't be shared so.
    """
    notes: list[str] = []
    if parallel.tp > 1:
        cut = TensorParallel(trace, parallel.tp)
        trace = cut.result()
        notes.append(cut.note())
    if parallel.cp > 1:
        trace = context_parallel.context_parallel(trace, parallel.cp)
        notes.append(context_parallel.note(parallel.cp))
    stages = [trace]
    if parallel.pp > 1:
        pipeline = Pipeline(trace, parallel.pp)
        stages = [pipeline.stage(index) for index in range(parallel.pp)]
        notes.append(pipeline.note())
    noted = [f"prediction only, not applied or measured: {note}" for note in notes]
    return [replace(stage, notes=[*stage.notes, *noted]) for stage in stages]
