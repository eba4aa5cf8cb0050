"""The training step in Jittor.

In contrast to `optimizer.backward` and `optimizer.step`:

- Adam and AdamW count an update once, not once for each microbatch (`n_step`).
- Gradients are computed, added and freed microbatch by microbatch, so that memory does not grow with their number.
- Gradients are dropped after the update: a second update can't use them again.
- Random numbers are a function of the seed and the step, so that a resumed training draws the same.

16-mixed steps cast weights and inputs to fp16, with fp32 master weights that the optimizer updates.
Jittor's own levels of mixed precision fail on the CPU or turn the optimizer's parameters to fp16; casts in the graph
do neither, and pass gradients on to the master weights. Normalisations, layers without weights, and the loss run in
fp32. On the CPU fp16 is emulated, about a hundred times slower: good for trying out only.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from memfit.errors import CheckpointError, NonFiniteError, UsageError, WorkloadError
from memfit.ir import Precision, Region, write_atomic
from memfit.jittor import memory
from memfit.jittor.checkpointing import Draws, checkpointed, substituted
from memfit.jittor.internals import jt, keep_gradients
from memfit.jittor.variables import (
    FLOATS,
    buffers_of,
    executing,
    is_trainable,
    mapped,
    modules_of,
    named_variables,
    patched,
    put_back,
    slots_of,
    variables_of,
)
from memfit.jittor.workload import Workload, batch_size_of, first, split, trainables
from memfit.training import LossScaler, StepResult

_POOL_BLOCK_BYTES = 5 * 2**20  # blocks in which Jittor's pools place tensors of 1 to 5 MiB
_SCHEMA = "memfit.jittor.step/1"


class Step:
    """A training step: forward, backward, unscale, clip, update, drop the gradients.

    Gradients are those of the mean over the global batch, however it is cut into microbatches.

    Args:
        microbatch_size: Samples in one forward and backward pass (> 0); None for the whole batch.
        precision: "32-true", or "16-mixed" with fp32 master weights and loss scaling.
        regions: The regions to checkpoint.
        scaler: The loss scaler of 16-mixed steps; None for a new one.
        seed: Seed of the model's random numbers.

    Attributes:
        attempts: Number of steps run, skipped ones included.

    Raises:
        UsageError: `microbatch_size` is not positive, or `precision` is unknown.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        microbatch_size: int | None = None,
        precision: Precision = "32-true",
        regions: Sequence[Region] = (),
        scaler: LossScaler | None = None,
        seed: int = 0,
        predicted_peak_bytes: int | None = None,
    ) -> None:
        if microbatch_size is not None and microbatch_size < 1:
            raise UsageError(f"microbatch_size={microbatch_size} is not above 0: give a number of samples, or None")
        if precision not in ("32-true", "16-mixed"):
            raise UsageError(f"precision={precision!r} is not supported for Jittor: use '32-true' or '16-mixed'")
        self.workload = workload
        self.microbatch_size = microbatch_size
        self.precision = precision
        self.regions = tuple(regions)
        self.scaler = None if precision == "32-true" else scaler or LossScaler()
        self.seed = seed
        self.steps = 0
        self.attempts = 0
        self._predicted_peak_bytes = predicted_peak_bytes
        self._cleared: set[tuple[Any, ...]] = set()

    def __call__(self, batch: Any) -> StepResult:
        """Run one optimizer update.

        Args:
            batch: A global batch, shaped like the workload's.

        Raises:
            NonFiniteError: The loss or the gradient norm is not finite, outside fp16's loss scaling; or loss scaling
                skipped too many updates in a row. Nothing was updated.
            MemoryLimitError: The step would exceed the `memory.limit` in force. It was not run.
            WorkloadError: The loss function did not return a loss.
        """
        started = time.perf_counter()
        self._check_limit(batch)
        scale = 1.0 if self.scaler is None else self.scaler.scale
        loss, gradients = self._accumulate(batch)
        self.attempts += 1
        norm = _norm(gradients)
        overflowed = self.scaler is not None and not math.isfinite(norm)
        if not overflowed:
            self._check_finite(loss, norm, gradients)
            self._update(gradients, norm)
        if self.scaler is not None:
            self.scaler.update(overflowed=overflowed)
            if self.scaler.skips_in_a_row >= self.scaler.settings.max_skips:
                raise NonFiniteError(
                    f"the gradients overflowed in {self.scaler.skips_in_a_row} steps in a row at step {self.steps}, and"
                    f" the loss scale fell to {self.scaler.scale:g}: nothing was updated. The model leaves the range of"
                    " fp16: use precision='32-true'",
                    step=self.steps,
                    value=math.inf,
                )
        return StepResult(
            loss=loss,
            grad_norm=math.nan if overflowed else norm,
            skipped=overflowed,
            loss_scale=scale,
            seconds=time.perf_counter() - started,
            predicted_peak_bytes=self._predicted_peak_bytes,
            skips=0 if self.scaler is None else self.scaler.skips,
        )

    def gradients(self, batch: Any) -> tuple[float, dict[str, Any]]:
        """Return the loss and the gradient of every trained parameter by FQN; update nothing, not even statistics."""
        names = {id(v): name for name, v in named_variables(self.workload.model).items()}
        with self.untouched():
            loss, gradients = self._accumulate(batch)
        return loss, {names[id(p)]: g for p, g in zip(trainables(self.workload), gradients, strict=True)}

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Restore the model's buffers on leaving."""
        buffers = buffers_of(self.workload.model)
        with put_back(buffers):
            for place, name in buffers:
                place[name] = place[name].detach().stop_grad()
            yield

    def _accumulate(self, batch: Any) -> tuple[float, list[Any]]:
        """Run every microbatch forward and backward; return the mean loss and the gradients of the whole batch.

        Means are weighted by their share of the samples. Sums are divided by an estimate of the batch's count from the
        first microbatch, and the gradients corrected afterwards, so that fp16 gradients stay in range.

        Raises:
            WorkloadError: A loss is neither a scalar nor a pair of a scalar and a count.
        """
        scale = 1.0 if self.scaler is None else self.scaler.scale
        parameters, model, batch_size = trainables(self.workload), self.workload.model, batch_size_of(batch)
        sums: list[Any] = []
        total: Any = 0.0
        counts: list[float] = []
        forms, divisor = set[bool](), 1.0
        with substituted(Draws((self.seed * 0x9E3779B1 + self.attempts * 0x85EBCA77 + 1) % 2**32)):
            for microbatch in split(batch, self.microbatch_size):
                precise = contextlib.nullcontext() if self.scaler is None else half(model)
                with precise, checkpointed(model, self.regions):
                    value = self.workload.loss_fn(model, microbatch)
                    is_pair = isinstance(value, tuple | list) and len(value) == 2
                    loss = value[0] if is_pair else value
                    forms.add(is_pair)
                    if not isinstance(loss, jt.Var) or loss.numel() != 1 or len(forms) > 1:
                        raise WorkloadError(
                            f"Workload.loss_fn returned {type(value).__name__}: it must return a scalar variable, or"
                            " (sum, count) for each microbatch"
                        )
                    share = batch_size_of(microbatch) / batch_size
                    if is_pair:
                        counts.append(float(value[1].item() if isinstance(value[1], jt.Var) else value[1]))
                        if len(counts) == 1:
                            divisor = max(counts[0], 1.0) / share
                        loss, share = loss / divisor, 1.0
                    weighted = loss.float32() if share == 1.0 else loss.float32() * share
                    total = (total + weighted).detach().stop_grad()
                    target = weighted if scale == 1.0 else weighted * scale
                    gradients = jt.grad(target, parameters, retain_graph=False)
                del value, loss, weighted, target
                sums = [
                    g.stop_grad() if not sums else (s + g).stop_grad()
                    for s, g in zip(sums or gradients, gradients, strict=True)
                ]
                del gradients
                jt.sync([*sums, total, *(v for v in named_variables(model).values() if not is_trainable(v))])
        factor = (divisor / max(sum(counts), 1.0) if counts else 1.0) / scale
        mean_loss = float(total.item()) * factor * scale
        return mean_loss, sums if factor == 1.0 else [(g * factor).stop_grad() for g in sums]

    def _check_finite(self, loss: float, norm: float, gradients: list[Any]) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        names = {id(v): name for name, v in named_variables(self.workload.model).items()}
        parameters = trainables(self.workload)
        bad = (
            names.get(id(p), "?") for p, g in zip(parameters, gradients, strict=True) if not math.isfinite(_norm([g]))
        )
        where = next(bad, "no single parameter")
        raise NonFiniteError(
            f"the loss is {loss:g} and the gradient norm {norm:g} at step {self.steps}, first in {where}: nothing was"
            " updated. Look at the batch, lower the learning rate, or give Workload.max_grad_norm",
            step=self.steps,
            value=norm if math.isfinite(loss) else loss,
        )

    def _update(self, gradients: list[Any], norm: float) -> None:
        """Clip, and let the optimizer update the parameters once."""
        optimizer, most = self.workload.optimizer, self.workload.max_grad_norm
        if most is not None and norm > most:
            gradients = [g * (most / (norm + 1e-6)) for g in gradients]
        remaining = iter(gradients)
        for group in optimizer.param_groups:
            group["grads"] = [next(remaining).stop_grad() if is_trainable(p) else jt.zeros(1) for p in group["params"]]
        keep_gradients(optimizer)
        optimizer.n_step += 1
        optimizer.step()
        for group in optimizer.param_groups:
            del group["grads"]
        jt.sync([*trainables(self.workload), *memory.optimizer_state(optimizer)])
        self.steps += 1

    def _check_limit(self, batch: Any) -> None:
        """Predict the peak for a batch of a new shape, and compare it with the limit in force, if any."""
        shapes = (memory.limit_bytes(), *(tuple(v.shape) for v in variables_of(batch)))
        if memory.limit_bytes() is None or shapes in self._cleared:
            return
        memory.release()
        held, peak = memory.held_bytes(), self.predict_peak(batch)
        workload = self.workload
        peak += peak // 10 + _POOL_BLOCK_BYTES  # a margin, since the process dies where the limit is exceeded
        memory.refuse(
            peak - held, f"a step of {batch_size_of(batch)} samples", model=workload.model, optimizer=workload.optimizer
        )
        self._cleared.add(shapes)

    def predict_peak(self, batch: Any) -> int:
        """Return the predicted peak of the step in bytes, from runs with an eighth, a quarter and half of the samples.

        Beyond the held bytes and the gradients, a step's bytes are proportional to its samples, but for the pools'
        rounding, which matters with few samples: the largest run counts. Where a limit is in force, runs stay below it
        as far as predicted. Nothing is updated.
        """
        size = min(self.microbatch_size or batch_size_of(batch), batch_size_of(batch))
        allowed, slope = memory.limit_bytes(), 0.0
        fixed = self.fixed_bytes()
        for samples in sorted({max(1, size // share) for share in (8, 4, 2)}):
            if allowed is None or fixed + slope * samples <= allowed:
                part = first(batch, samples)
                for _ in range(2):  # the first compiles
                    with memory.measure() as measured:
                        self.gradients(part)
                slope = max(0, measured.peak_bytes - fixed) / samples
        return fixed + int(slope * size)

    def fixed_bytes(self) -> int:
        """Return the bytes of a step without samples: allocated bytes and gradients."""
        memory.release()
        return memory.held_bytes() + sum(p.nbytes for p in trainables(self.workload))

    def save(self, path: str | Path) -> Path:
        """Write parameters, buffers, optimizer state, loss scale and position as safetensors, atomically.

        Raises:
            OutputError: The file can't be written.
        """
        state = {
            "schema": _SCHEMA,
            "steps": self.steps,
            "attempts": self.attempts,
            "seed": self.seed,
            "n_step": self.workload.optimizer.n_step,
            "lr": self.workload.optimizer.lr,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }
        arrays = {name: np.ascontiguousarray(v.numpy()) for name, v in self.state().items()}
        return write_atomic(path, save(arrays, {"memfit": json.dumps(state)}))

    def load(self, path: str | Path) -> None:
        """Restore the state of a saved checkpoint, bit for bit.

        Raises:
            CheckpointError: The file can't be read, or is of another workload. Nothing was changed.
        """
        path = Path(path)
        try:
            data = path.read_bytes()
            length = int.from_bytes(data[:8], "little")
            state = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["memfit"])
            arrays = load(data)
        except OSError as e:
            raise CheckpointError(f"can't read the checkpoint {path}: {e.strerror or e}") from e
        except Exception as e:
            raise CheckpointError(f"{path} is not a checkpoint of memfit.jittor.Step: {e}") from e
        if state.get("schema") != _SCHEMA:
            raise CheckpointError(f"{path} has the schema {state.get('schema')!r}, not {_SCHEMA!r}")
        expected = self.state()
        wrong = [n for n, v in expected.items() if n not in arrays or tuple(arrays[n].shape) != tuple(v.shape)]
        wrong += [name for name in arrays if name not in expected]
        if wrong or (state["scaler"] is None) != (self.scaler is None):
            what = f"differs in {', '.join(wrong[:3])}" if wrong else "is of another precision"
            raise CheckpointError(f"{path} is a checkpoint of another workload: it {what}. Nothing was changed")
        self.restore(arrays)
        self.steps, self.attempts, self.seed = state["steps"], state["attempts"], state["seed"]
        self.workload.optimizer.n_step, self.workload.optimizer.lr = state["n_step"], state["lr"]
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])

    def restore(self, arrays: dict[str, Any]) -> None:
        """Set the variables of `state` to arrays of the same names."""
        variables = self.state()
        with jt.flag_scope(auto_convert_64_to_32=0):
            for name, variable in variables.items():
                variable.assign(jt.array(arrays[name]))
        jt.sync(list(variables.values()))

    def state(self) -> dict[str, Any]:
        """Return the variables that a checkpoint holds: parameters, buffers and the optimizer's, by name."""
        named = {f"model.{name}": v for name, v in named_variables(self.workload.model).items()}
        optimizer_state = memory.optimizer_state(self.workload.optimizer)
        return named | {f"optimizer.{index}": v for index, v in enumerate(optimizer_state)}


NORMALISATIONS = (jt.nn.BatchNorm, jt.nn.LayerNorm, jt.nn.GroupNorm, jt.nn.InstanceNorm)


@contextlib.contextmanager
def half(model: Any) -> Iterator[None]:
    """Run a model in fp16, forward and backward, for calls and gradients inside this context."""
    in_fp32 = [
        module
        for module in modules_of(model).values()
        if isinstance(module, NORMALISATIONS) or (len(modules_of(module)) == 1 and not module.parameters())
    ]  # the latter are activations, dropout, pooling
    fp32_ids = {id(v) for module in in_fp32 for v in module.parameters()}
    masters = [
        (place, name)
        for _, place, name in slots_of(model)
        if is_trainable(place[name]) and str(place[name].dtype) == "float32" and id(place[name]) not in fp32_ids
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(put_back(masters))
        casts: dict[int, Any] = {}
        for place, name in masters:
            place[name] = casts.setdefault(id(place[name]), place[name].float16())
        stack.enter_context(patched(_COMPARISONS, _in_fp32))
        for module in in_fp32:
            stack.enter_context(executing(module, _in(module.execute, "float32", "float16")))
        stack.enter_context(executing(model, _in(model.execute, "float16", "float32")))
        yield


_COMPARISONS = ("__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__")


def _in_fp32(_: str, comparison: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Compare fp16 variables in fp32: Jittor's CPU code for comparisons, as in relu, does not compile otherwise."""
    return lambda v, other: comparison(v.float32() if str(v.dtype) == "float16" else v, other)


def _in(execute: Callable[..., Any], inside: str, outside: str) -> Callable[..., Any]:
    """Wrap a function so that its floating-point inputs have one dtype and its outputs another."""

    @functools.wraps(execute)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = mapped((args, kwargs), lambda v: cast(v, inside))
        return mapped(execute(*args, **kwargs), lambda v: cast(v, outside))

    def cast(variable: Any, dtype: str) -> Any:
        return variable.cast(dtype) if str(variable.dtype) in FLOATS and str(variable.dtype) != dtype else variable

    return run


def _norm(gradients: list[Any]) -> float:
    """Return the global norm of gradients."""
    squares = [g.float32().sqr().sum() for g in gradients]  # held: what is not, Jittor fuses, at another peak
    return math.sqrt(sum(float(v) for v in jt.concat([s.reshape((1,)) for s in squares]).numpy()))
