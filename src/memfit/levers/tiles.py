"""Tiles over tokens: token-wise modules that are computed a few tokens at a time, in both passes.

A gated MLP of a language model makes seven tensors of its inner width in its backward pass, a normalisation three of
the model's: at long contexts they are most of what a recomputed layer takes. Such a module treats each token alone, so
that it can be computed a few tokens after the other: in the forward pass without a graph, and in the backward pass
again, tile by tile, each with the gradients that it gives. Only the module's input is kept, and no tensor in between is
ever there for all tokens. Weights' gradients are added up over the tiles, in fp32 where weights have fewer bits, and
handed to autograd whole, once: what updates a weight in the backward pass sees one gradient.

As in S. Bekman et al. (2025), *Arctic Long Sequence Training: Scalable and Efficient Training for Multi-Million Token
Sequences*, section 3.1.1 (tiled MLP). Theirs tiles modules that the user names, and adds up gradients in the weights'
own dtype; here they are found, and proven to be token-wise (`levers.token_wise`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memfit._torch import own_parameters
from memfit.capture import is_compiled, representatives
from memfit.errors import PlanError, PlanMismatchError
from memfit.foundations import format_bytes
from memfit.ir import Call, Levers, Tiles, Trace, enclosing
from memfit.levers.checkpointing import COMPILATION
from memfit.levers.lever import Circumstance, Conflict, Lever, LeversOn, NotOffered, Setting, least_bytes
from memfit.levers.precision import Casting
from memfit.levers.token_wise import why_not_token_wise
from memfit.recomputation import CallState, foreign_generators, running_again
from memfit.workload import ForeignGenerator, Reader, Workload, generators_of

TILES = "tiles over tokens"
_OFF = "set levers.tiles to null"
_FEW_BITS = (torch.bfloat16, torch.float16)
_PARTS, _MOST_PARTS = 8, 32
"""Into how many tiles the tokens are cut; the second where nothing fits. Fewer are faster, more hold less."""
_LEAST_TOKENS, _FEWEST_TOKENS = 128, 32  # of a tile, likewise: below, products are slower, as of chunks of a loss
_TOLD = ("it draws", "it writes", "it may mix", "it reads", "hooks")  # why some modules are not token-wise
_LEAST_INSIDE = 0.5
"""What a module must hold inside to be tiled, as a share of its output: a linear layer holds nothing."""


class TilesLever(Lever):
    """Token-wise modules that are computed a few tokens at a time, in both passes."""

    name = TILES
    field = "tiles"
    switchable = True
    recomputes = True
    numerics_class = "reordered"
    conflicts = (
        Conflict(TILES, Circumstance.COMPILED, "compiled code does not run its modules one by one", _OFF),
        Conflict(TILES, COMPILATION, "the compiler would look into each tile", f"{_OFF}, or plan with compile=False"),
        Conflict(TILES, Circumstance.JITTOR, "this lever needs PyTorch", _OFF),
    )

    def words(self, on: LeversOn) -> tuple[str, str]:
        tiles = on.levers.tiles
        assert tiles is not None
        plural = "s" * (len(tiles.modules) != 1)
        return f"{len(tiles.modules):,} module{plural}, {tiles.tokens:,} tokens at a time", f"tiles of {tiles.tokens:,}"

    def reruns(self, levers: Levers) -> tuple[str, ...]:
        return () if levers.tiles is None else levers.tiles.modules

    @contextlib.contextmanager
    def on_model(self, levers: Levers, model: nn.Module) -> Iterator[None]:
        """Have modules compute a few tokens at a time, until the context is left.

        Raises:
            PlanMismatchError: The model has no module of a name.
            PlanError: A module is not token-wise, is tiled already, or lies within another one that is.
        """
        assert levers.tiles is not None
        modules = dict(model.named_modules())
        with contextlib.ExitStack() as stack:
            for fqn in levers.tiles.modules:
                if fqn not in modules:
                    raise PlanMismatchError(
                        f"the plan's tiles.modules has {fqn!r}, and the model has no such module: the plan is for"
                        " another model"
                    )
                module = modules[fqn]
                if any(_tiled(inner) for inner in module.modules()) or any(
                    other in enclosing(fqn) for other in levers.tiles.modules if other != fqn
                ):
                    raise PlanError(
                        f"{fqn!r} of tiles.modules is computed in tiles already, or lies within another module that"
                        " is: name each once, and call close() on an earlier step first"
                    )
                if why := why_not_token_wise(module):
                    raise PlanError(f"{fqn!r} of tiles.modules is not token-wise: {why}. Take it out of tiles.modules")
                cast = module.__dict__.get("forward")
                holder: Any = cast if isinstance(cast, Casting) else module  # casts stay around what computes
                before = holder.__dict__.get("forward")
                holder.forward = Tiled(module, before, levers.tiles.tokens)
                stack.callback(put_back, holder, before)
            yield

    def is_applied(self, workload: Workload) -> bool:
        return any(_tiled(module) for module in workload.model.modules())

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        least = least_bytes(step)
        budget = step.budget_bytes
        if budget is not None and step.predicted(step.plain).peak_upper_bytes <= budget:
            raise NotOffered("the step fits without it, and computes the modules once")
        if step.shardings or step.trace(step.plain).sharding is not None:
            raise NotOffered("ranks share the step, and tiles were not tested there")
        if step.is_long and not step.tries_all:  # thousands of operators more, and regions alone are seldom slower
            raise NotOffered("a long step is tiled only where nothing else fits")
        if is_compiled(step.workload):
            raise NotOffered("the workload compiles its model or loss itself")
        found, refused = _worthwhile(step.trace(step.plain), step.workload.model)
        kept_bytes = sum(each.kept_bytes for each in found)
        if not found or kept_bytes < least:
            lost = {fqn: why for fqn, (why, nbytes) in refused.items() if nbytes >= max(1.0, least)}
            note = _note(lost)
            raise NotOffered(
                note or f"token-wise modules keep less than {format_bytes(least)} inside", is_noted=bool(note)
            )
        names = tuple(each.fqn for each in found)
        with_it = [
            replace(levers, tiles=Tiles(modules=names, tokens=tokens))
            for levers in wanted
            if step.allows(levers)
            for tokens in _lengths(found, levers, step)
        ]
        if with_it and not step.allows(with_it[0]):
            raise NotOffered("its class is reordered: allow it with numerics='reordered'")
        if any(levers.chunked_loss for levers in with_it):  # whole losses are there to compare
            with_it = [levers for levers in with_it if levers.chunked_loss]
        return [*wanted, *with_it]


def _note(lost: dict[str, str]) -> str:
    """Return why modules that hold much are computed whole; "" where none is but for what it is, as attention."""
    lost = {
        fqn: why
        for fqn, why in lost.items()
        if why.startswith(_TOLD) and not any(other.startswith(f"{fqn}.") for other in lost)
    }
    if not lost:
        return ""
    fqn, why = next(iter(lost.items()))
    others = sum(other == why for other in lost.values()) - 1
    more = f" and {others} more" if others else ""
    return f"{fqn}{more} {'are' if others else 'is'} not computed in tiles over tokens: {why}"


class _Found(NamedTuple):
    """A module that is worth tiling."""

    fqn: str
    tokens: int  # that it is given, of all samples of the microbatch
    kept_bytes: int  # that its inside keeps for the backward pass


class _Inside(NamedTuple):
    """What a call of a module makes."""

    tokens: int  # of its output, [samples, tokens, features]; 0 for another one
    out_bytes: int
    kept_bytes: int  # inside, for the backward pass
    most_bytes: int  # inside, at a time


def _worthwhile(trace: Trace, model: nn.Module) -> tuple[list[_Found], dict[str, tuple[str, int]]]:
    """Return the outermost token-wise modules that hold much inside, and why others that do are not token-wise."""
    modules = dict(model.named_modules())
    found: dict[str, _Found] = {}
    refused: dict[str, tuple[str, int]] = {}
    for call in trace.calls:
        fqn = trace.modules[call.module].fqn
        is_first = call.phase == "forward" and call.microbatch == 0 and fqn not in found and fqn not in refused
        if not fqn or not is_first or len(call.inputs) != 1 or not enclosing(fqn).isdisjoint(found):
            continue
        inside = _inside(trace, call)
        if inside.tokens and max(inside.kept_bytes, inside.most_bytes) >= _LEAST_INSIDE * inside.out_bytes:
            if why := why_not_token_wise(modules[fqn]):
                refused[fqn] = why, inside.kept_bytes
            else:
                found[fqn] = _Found(fqn, inside.tokens, inside.kept_bytes)
    return list(found.values()), refused


def _inside(trace: Trace, call: Call) -> _Inside:
    born = [trace.storages[index] for op in range(call.start, call.end) for index in trace.births[op]]
    inner = [storage for storage in born if storage.release < call.end]
    out = [storage for storage in born if storage.release >= call.end]
    changes = [change for s in inner for change in ((s.birth, s.nbytes), (s.release + 1, -s.nbytes))]
    held = itertools.accumulate(nbytes for _, nbytes in sorted(changes))
    shape = out[-1].shape if out else ()
    return _Inside(
        tokens=shape[0] * shape[1] if len(shape) == 3 else 0,
        out_bytes=sum(storage.nbytes for storage in out),
        kept_bytes=sum(storage.nbytes for storage in inner if storage.death >= call.end),
        most_bytes=max(held, default=0),
    )


def _lengths(found: Sequence[_Found], levers: Levers, step: Setting) -> list[int]:
    """Return the tokens that a tile may have: a peak is about affine in them, and shorter ones take longer."""
    tokens = max(each.tokens for each in found) * levers.microbatch_size // step.batch_size
    lengths = {max(_LEAST_TOKENS, -(-tokens // _PARTS))}
    if step.tries_all:
        lengths |= {max(_FEWEST_TOKENS, -(-tokens // _MOST_PARTS))}
    return sorted((length for length in lengths if length < tokens), reverse=True)


def put_back(holder: Any, forward: Callable[..., Any] | None) -> None:
    """Set a forward pass as it was: a module's own, or that within casts."""
    if isinstance(holder, Casting):
        holder.forward = forward
        return
    del holder.forward
    if forward is not None:
        holder.forward = forward


def _tiled(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward.forward if isinstance(forward, Casting) else forward, Tiled)


class Tiled:
    """The `forward` of a module that is computed a few tokens at a time. Copies with the module, bound to the copy."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any] | None, tokens: int) -> None:
        self.module, self.forward, self.tokens = module, forward, tokens
        self._inside: list[nn.Module] = []
        self._sources: list[ForeignGenerator] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_inside": [], "_sources": []}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.forward or functools.partial(type(self.module).forward, self.module)
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or x.dim() != 3 or x.numel() // max(1, x.shape[-1]) <= self.tokens:
            return forward(*args, **kwargs)
        if not self._inside:
            self._inside = list(self.module.modules())
            self._sources = foreign_generators(generators_of(self._inside, Reader()))
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        run = _Run(self, forward, parameters, CallState(self._inside, [x], self._sources))
        if torch.is_grad_enabled() and (x.requires_grad or parameters):
            anchor = torch.empty(0, requires_grad=True)
            run.kept = _Keep.apply(anchor, (x, *parameters))  # type: ignore[no-untyped-call]
        out: Tensor = _InTiles.apply(x, run.kept, run, *parameters)  # type: ignore[no-untyped-call]
        run.state.end()
        run.state.forget_undrawn()
        run.kept = None if run.kept is None else run.kept.grad_fn
        return out

    @property
    def inside(self) -> list[nn.Module]:
        return self._inside


@dataclass(eq=False)
class _Run:
    """One call of a module in tiles."""

    tiled: Tiled
    forward: Callable[..., Any]
    parameters: Sequence[nn.Parameter]
    state: CallState
    kept: Any = None  # the node that keeps the call's input and parameters for the backward pass

    def tiles(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of each tile, and the tile, [1, ..., tokens, features]."""
        rows = x.reshape(-1, x.shape[-1])
        leading = [1] * (x.dim() - 2)
        starts = range(0, len(rows), self.tiled.tokens)
        all_rows = [slice(start, min(start + self.tiled.tokens, len(rows))) for start in starts]
        for at in representatives(all_rows, lambda at: at.stop - at.start):
            part = rows[at]
            yield at, part.reshape(*leading, *part.shape)


class _Keep(torch.autograd.Function):
    """A function that keeps tensors for the backward pass before the tiles are computed.

    A region around it, whose recomputation stops at the last tensor that autograd saves, then computes no tile again.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        ctx.save_for_backward(*(t if t.is_leaf else t.detach() for t in tensors))
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class _InTiles(torch.autograd.Function):
    """A module, tile by tile: without a graph, and again with one in the backward pass, which adds up the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor | None, run: _Run, *parameters: nn.Parameter) -> Tensor:
        ctx.run, ctx.set_materialize_grads = run, False
        out: Tensor | None = None
        with _leaves(run.tiled.inside, parameters):
            for rows, tile in run.tiles(x):
                found = run.forward(tile)
                if out is None:
                    out = found.new_empty(x.numel() // x.shape[-1], found.shape[-1])
                out[rows] = found.reshape(-1, found.shape[-1])
                del found
        assert out is not None
        return out.reshape(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        run: _Run = ctx.run
        x, *_ = run.kept.saved_tensors  # autograd sees here whether a parameter has changed
        by_rows = grad.reshape(-1, grad.shape[-1])
        by_input = torch.empty_like(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[0] else None
        modules = run.tiled.inside
        with running_again([run.state], modules, ()), _leaves(modules, run.parameters) as leaves:
            run.state.restore()
            for rows, tile in run.tiles(x):
                tile = tile.detach().requires_grad_(by_input is not None)
                with torch.enable_grad():
                    found = run.forward(tile.view_as(tile))  # no leaf: autocast would keep each tile's cast
                inputs = [*leaves, *([tile] if by_input is not None else [])]
                torch.autograd.backward(found, by_rows[rows].reshape(found.shape), inputs=inputs)
                if by_input is not None:
                    assert tile.grad is not None
                    by_input[rows] = tile.grad.reshape(-1, x.shape[-1])
                del found, tile, inputs
            sums = [None if p.grad is None else p.grad.to(p.dtype) for p in leaves]
        return None if by_input is None else by_input.reshape(x.shape), None, None, *sums


@contextlib.contextmanager
def _leaves(modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Put other leaves with the same memory in place of parameters: hooks don't see the gradients of a tile."""
    leaves = [nn.Parameter(p.detach()) for p in parameters]
    for leaf in leaves:
        if leaf.dtype in _FEW_BITS:
            leaf.grad_dtype = torch.float32
    of = dict(zip(map(id, parameters), leaves, strict=True))
    places = [(own_parameters(m), name, p) for m in modules for name, p in own_parameters(m).items() if id(p) in of]
    try:
        for own, name, parameter in places:
            own[name] = of[id(parameter)]
        yield leaves
    finally:
        for own, name, parameter in places:
            own[name] = parameter
