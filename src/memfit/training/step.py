"""The training step: one object that owns the order of things."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from memfit._torch import (
    NormBase,
    foreach_copy_,
    is_shared,
    local_part,
    own_buffers,
    own_modules,
    own_parameters,
    tree_map,
)
from memfit.errors import NonFiniteError, UsageError, WorkloadError
from memfit.foundations import held_back, public, safe_point, undone
from memfit.ir import Phase, Prediction
from memfit.ranks import BatchPart, SingleProcess, T
from memfit.training.batches import on_device
from memfit.training.guards.limits import Ledger, device_of, ledger_of
from memfit.training.loss import LossScaler, Window, gradient_entries, gradient_values, watching
from memfit.training.optimizers import parameters_of
from memfit.training.refusals import checked_loss
from memfit.workload import (
    BatchTensor,
    Entry,
    ExecutionContext,
    Loop,
    LoopWorkload,
    ModuleTensor,
    Reference,
    ResultTensor,
    Workload,
    leaves_of,
    part_of,
    rng_preserved,
    samples_of,
    tensors_of,
)

TensorsByNumber = dict[int, torch.Tensor]
_log = logging.getLogger("memfit")
_UNRELATED = (
    "Workload.loss_fn returned a loss that depends on no parameter of Workload.optimizer: compute it with the first"
    " argument of loss_fn, the model"
)


class BackwardUpdates(Protocol):
    """Updates each parameter in the backward pass, as soon as its gradient is there."""

    def taken(self) -> AbstractContextManager[object]:
        """Make the context of a backward pass that updates."""

    def dropped(self) -> AbstractContextManager[object]:
        """Make the context of a backward pass that updates nothing, and leaves no gradients."""

    def norms(self) -> list[torch.Tensor]:
        """Return the norms of the gradients that it used."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Attributes:
        loss: Mean loss over the global batch.
        grad_norm: Global norm of the gradients before clipping; NaN when the update was skipped, and where a gradient
            is sparse and nothing clips: to add up its repeated entries may take a third of such a step.
        skipped: Whether the update was skipped since gradients overflowed (fp16 only).
        loss_scale: The loss scale of the step; 1.0 without scaling.
        seconds: Wall time.
        predicted_peak_bytes: What the plan predicts that the step allocates at its peak; None without a plan.
        skips: Updates skipped so far in this training.
    """

    loss: float
    grad_norm: float
    skipped: bool
    loss_scale: float
    seconds: float
    predicted_peak_bytes: int | None
    skips: int = 0


@dataclass(frozen=True)
class StepOptions:
    """The settings of a step.

    Attributes:
        microbatch_size: Samples in one forward and backward pass (> 0); None for the whole batch.
        autocast: Makes the context of each forward pass.
        around: Makes the context of a whole step.
        update: Updates the parameters from their gradients; None for `Workload.optimizer.step`.
        in_backward: Updates them in the backward pass instead; then there is one microbatch, and no clipping.
        masters: For parameters of the model that another one is updated for, which has the gradient: that one.
        prediction: What the step's plan predicts; None without a plan.
        recovery: Runs each step, and runs it again where memory runs out (`training.guards.recovery`).
        limit: Makes the context of a step on a batch in which no more may be held than it says.
        proving: Makes the context of the steps that hold what is computed again in the backward pass against what was
            computed before (`memfit.levers.registry`).
        admit: Called with each batch before its step: has the step predicted on a batch that is larger than planned, or
            raises.
        after: Called after each step.
        loop: The order of the user's own loop, in which the step runs to be captured: without checks, and without a
            result. None for the order of `Step`.
    """

    microbatch_size: int | None = None
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    scaler: LossScaler | None = None
    update: Callable[[], object] | None = None
    in_backward: BackwardUpdates | None = None
    masters: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    prediction: Prediction | None = None
    predicted_peak_bytes: int | None = None
    recovery: Callable[[Callable[[Any], StepResult], Any], StepResult] | None = None
    limit: Callable[[Any], AbstractContextManager[object]] | None = None
    ranks: SingleProcess = field(default_factory=SingleProcess)
    proving: Callable[[], AbstractContextManager[object]] | None = None
    admit: Callable[[Any], object] | None = None
    after: Callable[[], object] | None = None
    loop: Loop | None = None

    def __post_init__(self) -> None:
        size = self.microbatch_size
        if size is not None and size < 1:
            raise UsageError(f"microbatch_size={size} is not above 0: give a number of samples, or None")


class Step:
    """A training step: forward, backward, unscale, clip, step, update, zero.

    Gradients are those of the mean over the global batch, however it is cut into microbatches: means
    are weighted by their samples, sums are divided once by the count of the whole window.

    Gradients that are there before a step are dropped, those of parameters outside the optimizer too. A step that
    updates nothing, since its numbers are not finite, leaves everything as it was: running statistics of
    normalisations too.

    The step of a `LoopWorkload` is its tape, run again: it holds what the loop does, and checks nothing by itself. So
    does one in the order of `StepOptions.loop`. Both run to be captured, and return no results.

    Args:
        options: How the step runs; None for the defaults.
        changes: Options by name, in place of those of the record.

    Attributes:
        options: How the step runs: one record, which `change` replaces whole.
        on_phase: Told each phase of a step, and of which microbatch.
        on_use: Called once, where the step is first used or closed.
        events: What was unusual so far, such as a batch larger than planned or memory that grows: kinds and texts.

    Raises:
        UsageError: `microbatch_size` is not positive.
    """

    def __init__(self, workload: Workload, options: StepOptions | None = None, **changes: Any) -> None:
        self.workload = workload
        self.options = replace(options or StepOptions(), **changes)
        self.steps = 0
        self.last: StepResult | None = None
        self.on_phase: Callable[[Phase, int], None] | None = None
        self.on_close: Callable[[], None] | None = None
        self.on_use: Callable[[], object] | None = None
        self.events: list[tuple[str, str]] = []
        self._outputs: Any = None
        self._loss: torch.Tensor | None = None
        self._inputs: Any = None
        self._player: TapePlayer | None = None
        if isinstance(workload, LoopWorkload) and workload.tape.entries:
            self._player = TapePlayer(workload, self.autocast)

    def note(self, kind: str, text: str) -> None:
        """Note an event, and log it."""
        self.events.append((kind, text))
        if self.options.ranks.rank == 0:
            _log.warning("%s: %s", kind, text)

    def admit(self, batch: Any) -> None:
        """Predict the step on a batch larger than planned.

        Raises:
            UsageError: It would exceed the plan's budget.
        """
        if self.options.admit is not None:
            self.options.admit(batch)

    def change(self, **options: Any) -> None:
        """Change options of the next steps; see `StepOptions`."""
        self.options = replace(self.options, **options)

    @property
    def scaler(self) -> LossScaler | None:
        """Scales the loss of fp16 steps."""
        return self.options.scaler

    @property
    def recovery(self) -> Callable[[Callable[[Any], StepResult], Any], StepResult] | None:
        """Runs each step, and runs it again if memory runs out; None without recovery."""
        return self.options.recovery

    @property
    def limit(self) -> Callable[[Any], AbstractContextManager[object]] | None:
        """Makes the context of a step with a memory limit; None without a limit."""
        return self.options.limit

    @property
    def buckets(self) -> list[torch.Tensor]:
        """The buffers of gradients for other ranks, if an engine keeps them between steps."""
        return self.options.ranks.buckets

    @property
    def held_bytes(self) -> int:
        """The bytes of these buffers."""
        return self.options.ranks.held_bytes(self.workload)

    def close(self) -> None:
        """Undo the plan's changes to the model. The step can't run afterwards."""

        def close() -> None:
            self._use()
            if self.on_close is not None:
                self.on_close()
                self.on_close = None

        undone(close)

    def _use(self) -> None:
        if self.on_use is not None:
            self.on_use()
            self.on_use = None

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def memory_summary(self) -> Ledger:
        """Return the bytes of the step by category, predicted and measured; `print` shows a table.

        Call it after a step has run, and before `close`.
        """
        return ledger_of(self)

    def split(self, batch: Any) -> list[Any]:
        """Return the microbatches of a batch, as views; the last may be smaller.

        Of a tape, they are the tensors that each forward pass begins with.
        """
        if self._player is not None:
            return self._player.split(batch)
        return [microbatch for microbatch, _ in self._microbatches(batch, samples_of(self.workload, batch))]

    def compute_loss(self, microbatch: Any) -> Any:
        """Return the loss of a microbatch, and its divisor (None for a mean); of a tape, the tensors then held."""
        if self._player is not None:
            return self._player.forward(microbatch)
        return self._loss_of(self._as_inputs(microbatch))

    def _loss_of(self, inputs: Any) -> tuple[torch.Tensor, torch.Tensor | float | None]:
        with self.autocast():
            return checked_loss(self.workload.loss_fn(self.workload.model, inputs))

    def drop_forward(self) -> None:
        """Discard a forward pass without a backward pass: gathered parameters are cut again."""
        self.options.ranks.drop_forward()

    def autocast(self) -> AbstractContextManager[object]:
        """Make the context of a forward pass."""
        return self.options.autocast()

    def update_parameters(self) -> None:
        """Update the parameters from their present gradients."""
        (self.options.update or self.workload.optimizer.step)()

    @public
    def __call__(self, batch: Any) -> StepResult:
        """Run one optimizer update.

        Args:
            batch: A global batch, shaped like the workload's; it may be smaller. On a larger one the step of a plan is
                predicted first.

        Raises:
            UsageError: The batch is larger than the plan's, and the step would exceed the plan's budget on it.
            NonFiniteError: The loss or the gradient norm is not finite, outside fp16's loss scaling; or loss
                scaling skipped too many updates in a row. Nothing was updated.
            WorkloadError: The loss function returned something else than a loss, or one that no parameter
                of the optimizer leads to.
            OutOfMemoryError: Memory ran out under every plan that `recovery` has.
        """
        with held_back():  # a step is whole, or it is not
            self.admit(batch)
            result = self._once(batch) if self.recovery is None else self.recovery(self._once, batch)
            if self.options.after is not None:
                self.options.after()
            return result

    def _once(self, batch: Any) -> StepResult:
        if self._player is not None or self.options.loop is not None:
            if self._player is not None:
                self._player.step(batch, self._phase)
            elif self.options.loop is not None:
                self._run_in_order(self.options.loop, batch)
            return StepResult(math.nan, math.nan, False, 1.0, math.nan, None)
        started = time.perf_counter()
        share = self._arrived(batch)
        updating, proving = self.options.in_backward, self.options.proving or nullcontext
        if updating is not None and self.options.proving is not None:
            # A step that leaves nothing: where gradients are used as soon as they are there, errors come too late.
            buffers = list(self.workload.model.buffers())
            before = [buffer.clone() for buffer in buffers]
            with self._within(share.batch), proving():
                try:
                    with rng_preserved(), updating.dropped():
                        self._accumulate(share, [])
                finally:
                    _clear(self.parameters())
                    with torch.no_grad():
                        for buffer, value in zip(buffers, before, strict=True):
                            buffer.copy_(value)
            proving = nullcontext
        with self._within(share.batch), proving():
            parameters, statistics = self._held()
            before = [s.clone() for s in statistics]
            _clear(parameters)
            norm = math.nan
            try:
                loss = self._accumulate(share, parameters, updating=updating)
                self._check_loss(loss, share)
                self._phase("optimizer", 0)
                scale = 1.0 if self.scaler is None else self.scaler.scale
                norm, is_whole = self._update(loss, share)
            finally:
                _clear(parameters)
                if statistics and not math.isfinite(norm):
                    foreach_copy_(statistics, before)
        skipped = not math.isfinite(norm)
        self.steps += not skipped
        self.last = StepResult(
            loss,
            math.nan if skipped or not is_whole else norm,
            skipped,
            scale,
            time.perf_counter() - started,
            self.options.predicted_peak_bytes,
            0 if self.scaler is None else self.scaler.skips,
        )
        return self.last

    def evaluate(self, function: Callable[[nn.Module], T]) -> T:
        """Call a function with the model outside of steps, and return its result.

        Where ranks share the model, all of them call this: it gathers the parameters that are in parts.
        """
        return self.options.ranks.outside(lambda: function(self.workload.model))

    def gradients(self, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the loss and the unclipped gradient of every parameter by FQN, and update nothing.

        A tape runs whole, for observers of its passes, and has no gradients to return.
        """
        if self._player is not None:
            self(batch)
            return math.nan, {}
        share, whole = self._arrived(batch), self.options.ranks.whole
        parameters = self.parameters()
        _clear(parameters)
        try:
            with self.options.around():
                loss = self._accumulate(share, parameters)
            self._check_loss(loss, share)
            if self.scaler is not None:
                self.scaler.unscale(_gradients_of(parameters))
            found = {name: whole(p.grad) for name, p in self.named_owners() if p.grad is not None}
            return loss, {name: g.clone() if g.itemsize >= 4 else g.float() for name, g in found.items()}
        finally:
            _clear(parameters)

    def _arrived(self, batch: Any) -> BatchPart:
        """Return this rank's part of a batch, on the model's accelerator where all of it was left on the CPU."""
        self._use()
        share = self.options.ranks.share(self.workload, batch)
        place = device_of(self)
        if place.type == "cpu" or any(tensor.device.type != "cpu" for tensor in tensors_of(share.batch)):
            return share
        return replace(share, batch=on_device(share.batch, place))

    # What a step consists of

    @contextmanager
    def _within(self, batch: Any) -> Iterator[None]:
        with nullcontext() if self.limit is None else self.limit(batch), self.options.around():
            yield

    def _phase(self, phase: Phase, microbatch: int) -> None:
        safe_point(in_step=True)
        if self.on_phase is not None:
            self.on_phase(phase, microbatch)

    def _held(self) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
        """Return every parameter, of optimizer and model, and the statistics that the model's normalisations keep."""
        parameters = {id(p): p for p in parameters_of(self.workload.optimizer)}
        statistics: list[torch.Tensor] = []
        modules: dict[int, nn.Module] = {}
        waiting = [self.workload.model]
        while waiting:  # `modules()` takes several times as long, which small models feel
            module = waiting.pop()
            if id(module) in modules:
                continue
            modules[id(module)] = module
            waiting += [child for child in own_modules(module).values() if child is not None]
            parameters.update((id(p), p) for p in own_parameters(module).values() if p is not None)
            if isinstance(module, NormBase) and module.training:
                statistics += [buffer for buffer in own_buffers(module).values() if buffer is not None]
        return list(parameters.values()), statistics

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters of optimizer and model."""
        return self._held()[0]

    def named_owners(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters with the gradients, by the FQNs of the model's parameters."""
        return [(name, self.options.masters.get(p, p)) for name, p in self.workload.model.named_parameters()]

    def _microbatches(self, batch: Any, samples: int) -> list[tuple[Any, int]]:
        piece = self.options.microbatch_size or samples
        if piece >= samples:
            return [(batch, samples)]
        cuts = [(start, min(start + piece, samples)) for start in range(0, samples, piece)]
        return [(part_of(self.workload, batch, start, stop), stop - start) for start, stop in cuts]

    def _accumulate(
        self, share: BatchPart, parameters: list[nn.Parameter], updating: BackwardUpdates | None = None
    ) -> float:
        """Run every microbatch forward and backward; return the mean loss of the whole batch."""
        self._phase("optimizer", 0)
        ranks = self.options.ranks
        window = Window(share.mean_samples, ranks)
        # As many as every rank has, of which some count nothing.
        piece = self.options.microbatch_size or share.most_samples
        microbatches = self._microbatches(share.batch, share.samples) if share.samples else []
        if lacking := -(-share.most_samples // piece) - len(microbatches):
            microbatches += [(part_of(self.workload, share.batch, 0, 1), 0)] * lacking
        with ranks.drawing():
            for index, (microbatch, size) in enumerate(microbatches):
                with ranks.syncing(index == len(microbatches) - 1):
                    self._phase("forward", index)
                    loss, count = self.compute_loss(microbatch)
                    loss = window.weigh(loss, count, size)
                    scaled = loss if self.scaler is None else self.scaler.scaled(loss)
                    if updating is not None:
                        self._check_loss(window.mean_loss(), share)
                    self._phase("backward", index)
                    with nullcontext() if updating is None else updating.taken():
                        scaled.backward()
                del loss, scaled
        window.finish(_gradients_of(parameters))
        return window.mean_loss()

    def _update(self, loss: float, share: BatchPart) -> tuple[float, bool]:
        """Unscale, clip, step, update the scale. Return the gradient norm; where it is not finite nothing was done.

        The second value tells whether it is that of the gradients, or of their entries, repeated ones not added up.
        """
        if self.options.in_backward is not None:
            norms = self.options.in_backward.norms()
            if not norms:
                raise WorkloadError(_UNRELATED)
            norm = float(_norm_of(norms))
            if not math.isfinite(norm):
                raise NonFiniteError(
                    f"the gradient norm is {norm} at step {self.steps} (loss {loss:g}), and the weights are updated"
                    " already, since each gradient is used in the backward pass: resume from a checkpoint, lower the"
                    " learning rate, or set levers.update to 'after', which checks gradients before the update",
                    step=self.steps,
                    value=norm,
                )
            if self.workload.scheduler is not None:
                self.workload.scheduler.step()
            return norm, True
        updated = parameters_of(self.workload.optimizer)
        gradients = _gradients_of(updated)
        if not gradients:
            raise WorkloadError(_UNRELATED)
        if self.scaler is not None:
            self.scaler.unscale(gradients)
        is_whole = self.workload.max_grad_norm is not None or not any(g.is_sparse for g in gradients)
        values = [gradient_values(g) if is_whole else gradient_entries(g) for g in gradients]
        if all(gradient.dtype != torch.float16 for gradient in values):
            total = torch.nn.utils.get_total_norm(values)
        else:  # as it would take it, but in fp32 of those in fp16, which overflow
            wider = [torch.float32 if g.dtype == torch.float16 else None for g in values]
            total = _norm_of([torch.linalg.vector_norm(g, dtype=d) for g, d in zip(values, wider, strict=True)])
        total = self.options.ranks.norm(total, any(is_shared(type(p)) for p in updated))
        norm = float(total)
        if not math.isfinite(norm):
            self._skip(norm, loss, share)
            return norm, is_whole
        if self.workload.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(updated, self.workload.max_grad_norm, total)
        self.update_parameters()
        if self.scaler is not None:
            self.scaler.update(overflowed=False)
        if self.workload.scheduler is not None:
            self.workload.scheduler.step()
        return norm, is_whole

    # The order of the user's own loop

    def _run_in_order(self, loop: Loop, batch: Any) -> None:
        scaler = self.scaler if loop.scales_loss else None
        self._phase("optimizer", 0)
        if loop.zero_grad == "before-forward":
            self._zero_gradients(loop)
        samples = samples_of(self.workload, batch)
        for index, microbatch in enumerate(self.split(batch)):
            self._phase("forward", index)
            self._inputs = None
            self._inputs = inputs = self._as_inputs(microbatch)
            loss, count = self._loss_of(inputs)
            mean = loss if count is None else loss / count
            share = samples_of(self.workload, microbatch) / samples
            self._loss = mean if share == 1 else mean * share
            del loss, count, mean
            if loop.zero_grad == "after-forward" and index == 0:
                self._zero_gradients(loop)
            self._phase("backward", index)
            with self.autocast() if loop.autocast_backward else nullcontext():
                (self._loss if scaler is None else scaler.scaled(self._loss)).backward(retain_graph=loop.retain_graph)
            if loop.holds_outputs in ("", "backward"):
                self._outputs = self._loss = None
            del inputs
        self._phase("optimizer", 0)
        updated = parameters_of(self.workload.optimizer)
        if scaler is not None:
            scaler.unscale([p.grad for p in updated if p.grad is not None])
        if self.workload.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(updated, self.workload.max_grad_norm)
        self.update_parameters()
        if loop.zero_grad == "after-step":
            self._zero_gradients(loop)
        if loop.holds_outputs == "step":
            self._outputs = self._loss = None

    def _zero_gradients(self, loop: Loop) -> None:
        """Drop the gradients of every parameter, or fill them with zeros, as `Module.zero_grad` does."""
        for parameter in self.parameters():
            if not loop.set_to_none and parameter.grad is not None:
                parameter.grad.detach_().zero_()
            else:
                parameter.grad = None

    def _as_inputs(self, microbatch: Any) -> Any:
        """Return a microbatch whose floating-point tensors require gradients, where the loop's do."""
        if self.options.loop is None or not self.options.loop.inputs_require_grad:
            return microbatch
        return tree_map(
            lambda leaf: (
                leaf.detach().requires_grad_() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
            ),
            microbatch,
        )

    # What is not finite

    def _check_loss(self, loss: float, share: BatchPart) -> None:
        if self.scaler is None and not math.isfinite(loss):
            advice = "Look at the batch, lower the learning rate, or give Workload.max_grad_norm"
            text = f"the loss is {loss} at step {self.steps}"
            raise self._not_finite(share, loss, text, f": nothing was updated. {advice}")

    def _skip(self, norm: float, loss: float, share: BatchPart) -> None:
        """Count a skipped update."""
        owners = ((name, p.grad) for name, p in self.named_owners() if p.grad is not None)
        not_finite = (name for name, grad in owners if not torch.isfinite(gradient_values(grad)).all())
        parameter = next(not_finite, "none of the parameters")
        if self.scaler is None:
            text = f"the gradient norm is {norm} at step {self.steps} (loss {loss:g}), first in {parameter}"
            advice = "Look at the batch, or lower the learning rate"
            raise self._not_finite(share, norm, text, f": nothing was updated. {advice}")
        in_a_row, scale = self.scaler.skips_in_a_row + 1, self.scaler.scale
        if in_a_row >= self.scaler.settings.max_skips:
            raise self._not_finite(
                share,
                math.inf,
                f"the gradients overflowed in {in_a_row} consecutive steps, up to step {self.steps}, last in"
                f" {parameter}",
                f", and the loss scale fell to {scale:g}: nothing was updated. The model's values exceed the range of"
                " fp16: use precision='bf16-mixed', or name the module in Workload.fp32_modules",
            )
        self.scaler.update(overflowed=True)

    def _not_finite(self, share: BatchPart, value: float, before: str, after: str) -> NonFiniteError:
        """Return an error that says where values are not finite first: the batch runs again under watch."""
        parameters = self.parameters()
        _clear(parameters)  # of no use any more
        with rng_preserved(), watching(self.workload.model) as where:
            self._accumulate(share, parameters)
        text = f"{before} ({where}){after}"
        return NonFiniteError(text, step=self.steps, value=value, forward=where.forward, backward=where.backward)


class TapePlayer:
    """Runs a step of the user's loop again, from its tape; `autocast` is used where the loop has none of its own."""

    def __init__(self, workload: LoopWorkload, autocast: Callable[[], AbstractContextManager[object]]) -> None:
        self._tape, self._autocast = workload.tape, autocast
        self._left: TensorsByNumber = {}
        self._roots = [workload.model.get_submodule(name) for name in self._tape.roots]
        self._named = [
            {**dict(root.named_buffers(remove_duplicate=False)), **dict(root.named_parameters(remove_duplicate=False))}
            for root in self._roots
        ]
        optimizer = workload.optimizer
        self._optimizers: list[Any] = getattr(optimizer, "optimizers", [optimizer])

    def step(self, batch: Any, on_phase: Callable[[Phase, int], None]) -> None:
        """Run the step once, on the tensors of a batch."""
        on_phase("optimizer", 0)
        tensors, self._left = self._left, {}
        self._play(self._tape.entries, tensors, batch, on_phase)
        self._left = tensors  # the loop's variables, which the next step rebinds

    def split(self, batch: Any) -> list[Any]:
        """Return the tensors that each forward pass begins with: the batch, and earlier results of the step.

        The step runs up to the last forward pass: it may use results made after an earlier backward pass, such as noise
        for a generator, or a running mean of losses.
        """
        parameters = [p for root in self._roots for p in root.parameters()]
        gradients = [p.grad for p in parameters]
        tensors: TensorsByNumber = {}
        microbatches = []
        begun = 0
        for index in range(self._tape.passes):
            of_pass = (e.microbatch == index and e.phase in ("forward", "backward") for e in self._tape.entries)
            begins = next(i for i, is_of_pass in enumerate(of_pass) if is_of_pass)
            self._play(self._tape.entries[begun:begins], tensors, batch)
            begun = begins
            microbatches.append((index, dict(tensors), batch))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return microbatches

    def forward(self, microbatch: Any) -> TensorsByNumber:
        """Run one forward pass, and return the tensors that the loop holds after it."""
        index, tensors, batch = microbatch
        tensors = dict(tensors)
        forward = [e for e in self._tape.entries if e.phase == "forward" and e.microbatch == index]
        self._play(forward, tensors, batch)
        return tensors

    def _play(
        self,
        entries: Iterable[Entry],
        tensors: TensorsByNumber,
        batch: Any,
        on_phase: Callable[[Phase, int], None] | None = None,
    ) -> None:
        def tensor_of(reference: Reference) -> torch.Tensor:
            if isinstance(reference, ResultTensor):
                return tensors[reference.number]
            if isinstance(reference, ModuleTensor):
                return self._named[reference.root][reference.name]
            assert isinstance(reference, BatchTensor)
            tensor: torch.Tensor = batch[reference.index]
            return tensor

        phase: tuple[Phase, int] = ("optimizer", 0)
        context: ExecutionContext | None = None
        with ExitStack() as stack:
            for entry in entries:
                if on_phase is not None and (entry.phase, entry.microbatch) != phase:
                    phase = entry.phase, entry.microbatch
                    on_phase(*phase)
                if entry.context != context:
                    stack.close()
                    if entry.phase == "forward" and not entry.context.autocast:
                        stack.enter_context(self._autocast())
                    stack.enter_context(entry.context.entered())
                    context = entry.context
                if entry.kind == "update":
                    self._optimizers[entry.what].step()
                else:
                    call = self._roots[entry.what] if entry.kind == "module" else entry.what
                    args, kwargs = entry.arguments.filled(tensor_of)
                    results = leaves_of(call(*args, **kwargs))
                    del args, kwargs
                    tensors.update(zip(entry.made, results, strict=True))
                    del results
                for number in entry.drops:
                    tensors.pop(number, None)


@contextmanager
def in_order_of(loop: Loop, step: Step) -> Iterator[None]:
    """Run steps in the order of the user's loop while the context is entered, and hold its variables' values."""
    step.change(loop=loop)

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        step._outputs = output

    with step.workload.model.register_forward_hook(keep) if loop.holds_outputs else nullcontext():
        try:
            yield
        finally:
            step._outputs = step._loss = None


def _clear(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _gradients_of(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients that there are, of shards this rank's own."""
    return [local_part(p.grad) for p in parameters if p.grad is not None]


def _norm_of(norms: list[torch.Tensor]) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    return norm


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode without gradients; restore training flags and random states afterwards."""
    with rng_preserved(), torch.no_grad(), modes_restored(model):
        model.eval()
        yield


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Restore the training flags of a model's modules at the end of the context."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
