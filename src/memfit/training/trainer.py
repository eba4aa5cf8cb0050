"""Training: repeated steps with evaluation, a log, checkpoints and a run record."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from memfit import hardware, ir
from memfit.errors import (
    MemfitError,
    MemoryLimitError,
    OutOfMemoryError,
    PlanMismatchError,
    RankError,
    UsageError,
    WorkloadError,
)
from memfit.foundations import HeldSignals, format_bytes, held_back
from memfit.ir import Plan, RunRecord, uses_text
from memfit.ranks import once
from memfit.training.batches import BatchStream
from memfit.training.guards.limits import device_of
from memfit.training.guards.recovery import OutOfMemoryObserver, Recovery
from memfit.training.runs import checkpoint
from memfit.training.runs.folder import (
    METRICS,
    PLAN,
    RUN,
    TENSORBOARD,
    check_folder,
    clear_folder,
    held_folder,
    remove_leftovers,
)
from memfit.training.runs.log import (
    History,
    RunLog,
    StepRecord,
    finite,
    require_tensorboard,
    resumed_history,
)
from memfit.training.runs.run_options import RunOptions
from memfit.training.step import Step, evaluation_mode
from memfit.workload import fingerprint, rng_state, samples_of, set_rng_state

PREEMPTED = 75
"""Exit status after SIGTERM: EX_TEMPFAIL of sysexits.h, "try again later", on which a scheduler requeues."""
_FINE, _LIMIT, _FAILED, _INTERRUPTED, _TERMINATED = range(5)
_AT_THE_END = -1
_log = logging.getLogger("memfit")

_Doing = Literal[
    "nothing", "reading", "holding a batch to agree on", "holding a batch", "admitting", "a step", "logging"
]
"""What a run was doing when it failed, which tells what its last checkpoint can be of."""
_READING: tuple[_Doing, ...] = ("reading", "holding a batch to agree on")
_HOLDING: tuple[_Doing, ...] = ("holding a batch to agree on", "holding a batch")


@dataclass(eq=False, repr=False)
class Trainer:
    """One run of training. A step is one optimizer update; updates that fp16 skips do not count.

    Ranks that share the step all train: the first writes the run's files, and each its shards of checkpoints. All stop
    together, after the same step.

    A resumed run ends bitwise as an uninterrupted one: weights, optimizer state and losses. The workload's batches must
    meet the conditions of `BatchStream`.

    Args:
        options: The options of the run; see `RunOptions`.
        measure: `measure(step, batch)` runs one step and returns its peak allocated bytes.
        watch: Called before every batch is loaded; a MemoryLimitError of it ends the run with a checkpoint.
    """

    step: Step
    plan: Plan
    options: RunOptions
    _: KW_ONLY
    measure: Callable[[Step, Any], int] | None = None
    watch: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.out = self.options.out
        self.options.check()
        own = fingerprint(self.step.workload)
        if self.plan.fingerprint != own:
            raise PlanMismatchError(
                f"the plan is for the workload {self.plan.workload!r} with fingerprint {self.plan.fingerprint}; the"
                f" workload {self.step.workload.name!r} has {own}: make a plan for this workload"
            )
        if self.options.tensorboard:
            require_tensorboard()
        self._ranks = self.step.options.ranks
        self._is_first = self._ranks.rank == 0  # which writes the run's files
        once(self._ranks, lambda: check_folder(self.out, overwrite=self.options.overwrite, resume=self.options.resume))
        self._stream = BatchStream(self.step.workload, self.options.prefetch_batches)
        self._recoveries_noted = self._events_noted = 0
        self._saved_step: int | None = None
        self._writing: checkpoint.Writing | None = None
        self._buffers = checkpoint.HostBuffers() if self.options.async_checkpoints else None
        self._doing: _Doing = "nothing"
        self._is_agreed = False

    def fit(self) -> RunRecord:
        """Train to the end, and return the record of the run. Call it once.

        On Ctrl-C or SIGTERM the current step is completed and a checkpoint written first; then SIGTERM raises
        SystemExit with status 75. A checkpoint is also written when loading a batch or `log` fails.

        Raises:
            CheckpointError: The checkpoint can't be resumed from; nothing was changed.
            NonFiniteError: The loss or a gradient is not finite. Checkpoints are as they were.
            OutOfMemoryError: A step ran out of memory under every plan. A checkpoint from before it was written,
                unless the optimizer had begun to change the weights.
            OutputError: A file can't be written, or another run has the folder.
            WorkloadError: The workload's batches or its `evaluate` break their contract.
        """
        overwrite, resume = self.options.overwrite, self.options.resume
        with held_folder(self.out, overwrite=overwrite, resume=resume, ranks=self._ranks):
            self._history, happened = self._resumed() if resume else (self._begun(), [])
            self._retries_before = hardware.accelerators.allocation_retries(device_of(self.step)) or 0
            metrics, events = self.out / METRICS, self.out / TENSORBOARD if self.options.tensorboard else None
            with (
                contextlib.closing(self._stream),
                _deferred_interrupts() as interrupt,
                RunLog(metrics, events, self.step.steps) if self._is_first else contextlib.nullcontext() as self._log,
            ):
                try:
                    for kind, text in happened:
                        self.note(kind, text)
                    self._write_record(self._history.record("running", self.step.steps))
                    self._train(interrupt)
                except BaseException as e:
                    self._fail(e)
                    raise
                record = self._history.record("finished", self.step.steps)
                self._write_record(record)
            return record

    def note(self, kind: str, text: str) -> None:
        """Log an unusual event, such as a refused checkpoint."""
        if self._is_first:
            _log.warning("%s: %s", kind, text)
        self._write_event(kind, text)

    # Before

    def _begun(self) -> History:
        def begin() -> None:
            if self.options.overwrite and self.out.exists():
                clear_folder(self.out)
            ir.codec.write_atomic(self.out / PLAN, ir.codec.encode(self.plan))

        once(self._ranks, begin)
        if self._ranks.size > 1:  # what Python's generator draws would differ, and so would batches shuffled with it
            set_rng_state(once(self._ranks, rng_state))
        return History(self.step.workload)

    def _resumed(self) -> tuple[History, list[tuple[str, str]]]:
        """Restore the training's state; return the history so far, and the events of resuming: kinds and texts."""
        loaded, damages = checkpoint.read_newest(self.out, self.step, self.plan.levers.precision)
        self._stream.seek(loaded.state.position)
        loaded.restore()
        history = resumed_history(
            self.step.workload, self.out / RUN, self.out / METRICS, loaded.step_count, is_writing=self._is_first
        )

        def tidy() -> list[Path]:
            remove_leftovers(self.out)
            damaged = [p for p in checkpoint.newest_first(self.out) if (checkpoint.step_of(p) or 0) > loaded.step_count]
            aside = [checkpoint.set_aside(path) for path in damaged]
            ir.codec.write_atomic(self.out / PLAN, ir.codec.encode(self.plan))
            return aside

        happened = [
            (
                "damaged checkpoint",
                f"{damage}; the checkpoint was renamed to {place}, and training continues from {loaded.path}",
            )
            for damage, place in zip(damages, once(self._ranks, tidy), strict=True)
        ]
        was, is_now, scaler = loaded.plan.levers.precision, self.plan.levers.precision, self.step.scaler
        if was != is_now:
            had_scaler = loaded.state.training["scaler"] is not None
            done = []
            if scaler is not None and not had_scaler:
                done.append(f"a new loss scaler starts at {scaler.scale:g}")
            if scaler is None and had_scaler:
                done.append("the loss scaler's state is dropped")
            if self.step.workload.bf16_updates == "stochastic-rounding" and "bf16-true" in (was, is_now):
                done.append(f"weights are {'widened from' if was == 'bf16-true' else 'rounded to'} bf16")
            text = f"{loaded.path} was written with precision={was!r}; training continues with {is_now!r}"
            done = done or ["weights and optimizer state are unchanged"]
            happened.append(("another precision", "; ".join([text, *done])))
        if replace(loaded.plan.levers, precision=is_now) != self.plan.levers:
            text = f"{loaded.path} was written with {uses_text(loaded.plan.uses)}"
            happened.append(("another plan", f"{text}; training continues with {uses_text(self.plan.uses)}"))
        self._saved_step = loaded.step_count
        set_rng_state(loaded.state.training["rng"])
        return history, happened

    # During

    def _train(self, interrupt: HeldSignals) -> None:
        if self._is_due(self.options.evaluate_every) and not self._is_evaluated():
            self._evaluate()  # the run was interrupted just before
        if self._saved_step is None and self.options.checkpoint_every is not None:
            self._save()
        while self.options.steps is None or self.step.steps < self.options.steps:
            read = self._next_batch(interrupt)
            if read is None:
                break
            self._doing = "admitting"
            self.step.admit(read[0])
            self._doing = "a step"
            progress = self._run(*read)
            self._doing = "nothing"
            self._note_events(progress)
            self._after(progress)
        if not self._is_evaluated():
            self._evaluate()
        self._finish_writing()
        if self._saved_step != self.step.steps:
            self._save()

    def _next_batch(self, interrupt: HeldSignals) -> tuple[Any, float] | None:
        """Return the next batch and how long it took to load, once all ranks have theirs; None at the end."""
        error: BaseException | None = None
        batch, samples, started = None, None, time.perf_counter()
        try:
            self._doing = "reading"
            interrupt.check()
            if self.watch is not None:
                self.watch()
            started = time.perf_counter()
            batch = self._stream.next_batch(self.options.epochs)
            if batch is not None:
                self._doing = "holding a batch to agree on"
                samples = samples_of(self.step.workload, batch[0]) if self._ranks.size > 1 else None
        except BaseException as e:
            error = e
        seconds = time.perf_counter() - started
        written: float = checkpoint.WRITTEN if self._writing is None else self._writing.outcome
        stop = error
        if self._ranks.size > 1:
            stop, written = self._meet(error, _AT_THE_END if samples is None else samples, written)
        if stop is not None:
            self._is_agreed = True
            raise stop
        self._doing = "nothing" if batch is None else "holding a batch"
        if written != checkpoint.GOING_ON:  # on all ranks, or one of them could not
            self._finish_writing()
        return None if batch is None else (batch[0], seconds)

    def _meet(self, error: BaseException | None, samples: int, written: float) -> tuple[BaseException | None, float]:
        """Meet the other ranks before a step: return why this one must stop, if so, and the worst of all `written`."""
        kinds = (SystemExit, _TERMINATED), (KeyboardInterrupt, _INTERRUPTED), (MemoryLimitError, _LIMIT)
        code = next((code for kind, code in kinds if isinstance(error, kind)), _FINE if error is None else _FAILED)
        counts = [samples, -samples] if code == _FINE else [-float("inf")] * 2
        mine = self._ranks.rank + 1 if code else 0
        worst, who, most, least, written = self._ranks.most([code, mine, *counts, written])
        if error is None and worst != _FINE:
            text = f"rank {int(who) - 1} stopped before the step: read that rank's output"
            no_figures: dict[str, Any] = {"limit_bytes": 0, "held_bytes": 0, "requested_bytes": 0, "by_category": {}}
            error = {
                _TERMINATED: SystemExit(PREEMPTED),
                _INTERRUPTED: KeyboardInterrupt(),
                _LIMIT: MemoryLimitError(text, **no_figures, where=""),
            }.get(int(worst), RankError(text))
        elif error is None and most != -least:
            told = ["no more batches" if n == _AT_THE_END else f"a batch of {n:.0f} samples" for n in (-least, most)]
            error = RankError(
                f"Workload.batches gave {told[0]} on one rank and {told[1]} on another: every rank must give the"
                " same global batches; memfit takes the rank's part. Shuffle with the same seed on every rank"
            )
        return error, written

    def _run(self, batch: Any, data_seconds: float) -> StepRecord:
        learning_rate = float(self.step.workload.optimizer.param_groups[0]["lr"])
        epoch, number = self._stream.epoch, self.step.steps + 1
        # DistributedDataParallel makes its buckets anew in the second step. That takes no more memory, since it drops
        # the old ones first; but frees of what was there before a measurement are not seen in it.
        first, every = 3 if self.step.held_bytes else 2, self.options.measure_every
        is_due = number == first if every is None else number >= first and (number - first) % every == 0
        peak_bytes: int | None = None
        if is_due and self.measure is not None:
            before, self.step.last = self.step.steps, None
            peak_bytes = self.measure(self.step, batch)
            if self.step.last is None or self.step.steps > before + 1:
                ran = self.step.steps - before
                raise UsageError(f"measure= ran {ran} steps on one batch: it must run the step once")
            result, peak_bytes = self.step.last, int(self._ranks.most([peak_bytes])[0])
        else:
            result = self.step(batch)
        retries = hardware.accelerators.allocation_retries(device_of(self.step))
        if result.predicted_peak_bytes is None:
            result = dataclasses.replace(result, predicted_peak_bytes=self.plan.predicted.peak_bytes)
        return StepRecord(
            **vars(result),
            step=number,
            epoch=epoch,
            data_seconds=data_seconds,
            samples_per_second=samples_of(self.step.workload, batch) / result.seconds,
            peak_bytes=peak_bytes,
            learning_rate=learning_rate,
            allocation_retries=None if retries is None else retries - self._retries_before,
        )

    def _after(self, progress: StepRecord) -> None:
        self._write_line({key: finite(value) for key, value in dataclasses.asdict(progress).items()})
        if self.options.on_step is not None:
            self.options.on_step(progress)
        if progress.skipped:
            return
        if self._is_due(self.options.evaluate_every):
            self._evaluate()
        if self._is_due(self.options.checkpoint_every):
            self._save(buffers=self._buffers)

    def _note_events(self, progress: StepRecord | None = None) -> None:
        """Log what happened to steps since the last call: larger batches, a peak over the budget, and recoveries."""
        if progress is not None and (progress.peak_bytes or 0) > self.plan.budget_bytes:
            predicted = progress.predicted_peak_bytes or self.plan.predicted.peak_bytes
            self.step.note(
                "over budget",
                f"step {progress.step} needed {format_bytes(progress.peak_bytes or 0)}, above the plan's budget of"
                f" {format_bytes(self.plan.budget_bytes)}; the prediction was {format_bytes(predicted)}",
            )
        for kind, text in self.step.events[self._events_noted :]:
            self._write_event(kind, text)
        self._events_noted = len(self.step.events)
        recovery = self.step.recovery
        if not isinstance(recovery, OutOfMemoryObserver):
            return
        for event in recovery.events[self._recoveries_noted :]:
            self.note("out of memory", str(event))
        self._recoveries_noted = len(recovery.events)
        if recovery.plan is not self.plan:  # the plan taken then becomes the run's plan
            self.plan = recovery.plan
            if self._is_first:
                ir.codec.write_atomic(self.out / PLAN, ir.codec.encode(self.plan))

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.step.steps > 0 and self.step.steps % every == 0

    def _is_evaluated(self) -> bool:
        evaluations = self._history.evaluations
        return bool(evaluations) and evaluations[-1].step == self.step.steps

    def _evaluate(self) -> None:
        workload = self.step.workload
        if workload.evaluate is None:
            return
        with evaluation_mode(workload.model):
            try:
                values = self.step.evaluate(workload.evaluate)
            except RuntimeError as e:
                if "same device" in str(e):  # of data that stayed on the CPU, where the model was before
                    e.add_note(
                        f"memfit: the model is on {device_of(self.step)}: Workload.evaluate must move its data there,"
                        " to next(model.parameters()).device"
                    )
                raise
        figures = None
        if isinstance(values, Mapping):
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                figures = {str(name): finite(float(value)) for name, value in values.items()}
        if figures is None:
            raise WorkloadError(f"Workload.evaluate returned {str(values)[:100]}: return a dict of names and floats")
        self._write_line({"step": self.step.steps, "epoch": self._stream.epoch, "evaluation": figures})

    def _save(self, position: dict[str, Any] | None = None, buffers: checkpoint.HostBuffers | None = None) -> None:
        """Write a checkpoint; with `buffers`, a thread does, and `_finish_writing` comes later."""
        self._finish_writing()
        if self._log is not None:
            self._log.sync()
        self._writing = checkpoint.Writing(
            self.out,
            self.step,
            self.plan,
            position or self._stream.position(),
            keep_checkpoints=self.options.keep_checkpoints,
            buffers=buffers,
        )
        if buffers is None:
            self._finish_writing()

    def _finish_writing(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, until it has its place."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish()
            self._saved_step = writing.step_count
            self._write_record(self._history.record("running", self.step.steps))

    def _write_line(self, line: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write(line)
        self._history.add(line)
        if self.options.log is not None and self._is_first:
            self._doing = "logging"
            self.options.log(copy.deepcopy(line))  # its own, to change
            self._doing = "nothing"

    def _write_event(self, kind: str, text: str) -> None:
        self._write_line({"step": self.step.steps, "epoch": self._stream.epoch, "event": {"kind": kind, "text": text}})

    def _write_record(self, record: RunRecord) -> None:
        if self._is_first:
            ir.codec.write_atomic(self.out / RUN, ir.codec.encode(record))

    # After a failure

    def _fail(self, error: BaseException) -> None:
        """Write a checkpoint and the record, as far as possible, when the run ends in an exception."""
        self.options = dataclasses.replace(self.options, log=None)  # another error would hide this one
        with contextlib.suppress(MemfitError):
            self._note_events()
        is_interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        is_stopped = is_interrupted or isinstance(error, MemoryLimitError)
        is_between_steps, is_reading = self._doing != "a step", self._doing in _READING
        is_resumable = is_between_steps and (is_stopped or is_reading or self._doing == "logging")
        text = f"interrupted after step {self.step.steps}" if is_interrupted else f"{type(error).__name__}: {error}"
        recovers = isinstance(self.step.recovery, Recovery) and not is_between_steps
        is_undone = isinstance(error, OutOfMemoryError) and not error.is_torn and recovers
        is_undone = is_undone or self._doing == "admitting"  # the batch that a plan does not hold
        is_alone = self._ranks.size > 1 and not self._is_agreed  # the others don't write their parts
        if not is_alone:
            try:
                self._finish_writing()
            except MemfitError as e:
                error.add_note(f"memfit: {e}")
        elif self._writing is not None:
            self._writing.discard()
        if (is_resumable or is_undone) and self._saved_step != self.step.steps and not is_alone:
            with contextlib.suppress(MemfitError):
                self._save(self._stream.take_back() if is_undone or self._doing in _HOLDING else None)
        if is_alone and not isinstance(error, MemfitError):
            error.add_note(
                f"memfit: on rank {self._ranks.rank}; if the error is a lost connection, another rank ended first"
            )
        newest = checkpoint.latest(self.out)
        advice = "no checkpoint was written" if newest is None else f"resume=True continues from {newest}"
        error.add_note(f"memfit: {advice}")
        if is_interrupted:
            text = f"{text}; {advice}"
        with contextlib.suppress(MemfitError):
            self._write_record(self._history.record("failed", self.step.steps, text))


@contextlib.contextmanager
def _deferred_interrupts() -> Iterator[HeldSignals]:
    """Defer what signals' handlers raise until `HeldSignals.check`, or until the context is left.

    Where SIGTERM has no handler, it raises SystemExit. Ctrl-C after another signal stops at once.
    """

    def preempted(number: int, frame: Any) -> None:
        raise SystemExit(PREEMPTED)

    def announce(number: signal.Signals) -> None:
        _log.warning("%s: stopping after this step, with a checkpoint; Ctrl-C to stop at once", number.name)

    with held_back(ends_steps=False) as held:
        is_main = threading.current_thread() is threading.main_thread()
        ours = [signal.SIGTERM] if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else []
        before = held.on_first, held.stops_at_once
        held.on_first = announce
        held.stops_at_once = lambda number, _: number == signal.SIGINT  # schedulers may send SIGTERM more than once
        try:
            for number in ours:
                held.hold(number, preempted)
            yield held
        finally:
            held.let_go(ours)
            held.on_first, held.stops_at_once = before
        held.check()
