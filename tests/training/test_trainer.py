from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from memfit import hardware, ir
from memfit.errors import (
    CheckpointError,
    MissingExtraError,
    NonFiniteError,
    OutputError,
    PlanMismatchError,
    UsageError,
    WorkloadError,
)
from memfit.ir import Plan, RunRecord
from memfit.training import METRICS, LossScaler, RunOptions, Step, StepOptions, Trainer, read_lines
from memfit.workload import Workload, rng_state
from tests import warm
from tests.ranks.trainings import is_same
from tests.training.conftest import (
    Tied,
    lines_of,
    make_batches,
    make_plan,
    make_workload,
    restored,
    squared_error,
    training_state,
)
from tests.training.held_writes import HeldWrites, names, stored

BATCH_KINDS = ("seeded", "ends empty", "none", "list", "shuffled", "shuffled by a generator")
KEYS = "step epoch loss grad_norm skipped loss_scale data_seconds seconds samples_per_second peak_bytes"


class Run:
    """A training in a folder, made anew from the same seed or from another."""

    def __init__(self, out: Path, kind: str = "seeded", **workload: Any) -> None:
        self.out, self.kind, self.changes = out, kind, workload

    def trainer(self, *, seed: int = 0, scaler: bool = False, **options: Any) -> Trainer:
        workload = make_workload(self.kind, seed=seed, **self.changes)
        step = Step(workload, StepOptions(scaler=LossScaler() if scaler else None))
        options = {"out": self.out} | ({"steps": 8} if "epochs" not in options else {}) | options
        own = {name: options.pop(name) for name in ("measure", "watch") if name in options}
        return Trainer(step, make_plan(workload), RunOptions(**options), **own)

    def fit(self, **options: Any) -> Any:
        trainer = self.trainer(**options)
        trainer.fit()
        return training_state(trainer.step)

    def crash(self, at: int, **options: Any) -> None:
        """Train until an error after a step."""
        with pytest.raises(Crash):
            self.fit(**options, on_step=crash_at(at))

    @property
    def lines(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = lines_of(self.out)
        return lines

    @property
    def record(self) -> RunRecord:
        return ir.codec.read(self.out / "run.json", RunRecord)

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.out.glob("checkpoint-*"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


class Crash(Exception):
    pass


def crash_at(step: int, error: BaseException | None = None) -> Callable[[Any], None]:
    def on_step(progress: Any) -> None:
        if progress.step == step and not progress.skipped:
            raise Crash if error is None else error

    return on_step


def noisy_evaluate(model: nn.Module) -> dict[str, float]:
    """Draw random numbers, and say what mode it is in."""
    torch.rand(3)
    np.random.rand()
    return {"training": float(any(m.training for m in model.modules())), "grad": float(torch.is_grad_enabled())}


# What a run writes


def test_a_run_is_recorded(run: Run) -> None:
    seen: list[Any] = []
    trainer = run.trainer(steps=7, checkpoint_every=3, on_step=seen.append)
    record = trainer.fit()
    assert record == run.record
    assert [(p.step, p.loss) for p in seen] == [(line["step"], line["loss"]) for line in run.lines]
    assert (record.status, record.steps, record.error, record.workload) == ("finished", 7, None, "tied")
    assert record.first_loss == run.lines[0]["loss"] and record.last_loss == run.lines[-1]["loss"]
    assert record.step_seconds is not None and record.step_seconds > 0 and record.measured_peak_bytes is None
    assert ir.codec.read(run.out / "plan.json", Plan) == trainer.plan
    assert run.checkpoints == ["checkpoint-6", "checkpoint-7"]
    raw = read_lines(run.out / METRICS)
    rest = ["predicted_peak_bytes", "learning_rate", "skips", "allocation_retries"]
    assert all(list(line) == [*KEYS.split(), *rest] for line in raw)
    assert [line["step"] for line in raw] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["epoch"] for line in raw] == [0] * 6 + [1]
    assert [line["learning_rate"] for line in raw] == [0.05] * 3 + [0.025] * 3 + [0.0125]
    assert all(line["predicted_peak_bytes"] == 1000 and line["peak_bytes"] is None for line in raw)
    assert all(line["samples_per_second"] == 4 / line["seconds"] for line in raw)


@pytest.mark.parametrize("last", [4, 3])
def test_the_trainer_is_a_plain_loop(last: int, tmp_path: Path) -> None:
    """The last batch of an epoch may be smaller."""
    batches = make_batches("list")
    batches[-1] = tuple(tensor[:last] for tensor in batches[-1])
    run = Run(tmp_path / "run", batches=batches)
    state = run.fit(epochs=2, evaluate_every=2, checkpoint_every=3)
    step = Step(make_workload(batches=batches))
    losses = [step(batch).loss for _ in range(2) for batch in batches]
    assert [line["loss"] for line in run.lines] == losses and run.record.steps == 12
    assert state == training_state(step)


@pytest.mark.parametrize("batches", BATCH_KINDS)
def test_epochs_go_over_all_batches(batches: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", batches)
    trainer = run.trainer(epochs=3)
    record = trainer.fit()
    per_epoch = 1 if batches == "none" else 6
    assert record.steps == 3 * per_epoch
    assert [line["epoch"] for line in run.lines] == [epoch for epoch in range(3) for _ in range(per_epoch)]
    assert ("one batch, repeated" in record.workload) == (batches == "none")


def test_evaluation_leaves_the_training_alone(tmp_path: Path) -> None:
    silent = Run(tmp_path / "silent")
    evaluated = Run(tmp_path / "evaluated", evaluate=noisy_evaluate)
    assert silent.fit() == evaluated.fit(evaluate_every=3)
    evaluations = [line for line in evaluated.lines if "evaluation" in line]
    expected = {"training": 0.0, "grad": 0.0}
    assert evaluations == [{"step": n, "epoch": n // 7, "evaluation": expected} for n in (3, 6, 8)]
    assert [(e.step, e.values) for e in evaluated.record.evaluations] == [(n, expected) for n in (3, 6, 8)]
    assert [line for line in evaluated.lines if "loss" in line] == silent.lines


def test_evaluation_puts_every_flag_back(tmp_path: Path) -> None:
    def broken(model: nn.Module) -> dict[str, float]:
        raise Crash

    run = Run(tmp_path / "run", evaluate=broken)
    trainer = run.trainer(evaluate_every=1)
    model: Any = trainer.step.workload.model
    model.norm.eval()
    with pytest.raises(Crash):
        trainer.fit()
    assert model.training and not model.norm.training and torch.is_grad_enabled()


@pytest.mark.parametrize("values", [None, [1.0], {"x": "high"}, {"x": torch.zeros(2)}])
def test_evaluate_must_return_figures(values: Any, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", evaluate=lambda model: values)
    with pytest.raises(WorkloadError, match="return a dict of names and floats"):
        run.fit(steps=1)
    assert "return a dict of names and floats" in str(run.record.error)


def test_figures_that_are_not_finite(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", evaluate=lambda model: {"nan": math.nan, "one": torch.ones(())})
    run.fit(steps=1)
    assert run.lines[-1]["evaluation"] == {"nan": None, "one": 1.0}
    assert run.record.evaluations[0].values == {"one": 1.0}


def test_measured_steps_are_the_same_steps(tmp_path: Path) -> None:
    def measure(step: Step, batch: Any) -> int:
        step(batch)
        return 100 + step.steps

    plain, measured = Run(tmp_path / "plain"), Run(tmp_path / "measured")
    assert plain.fit() == measured.fit(measure=measure, measure_every=3)
    assert [line["peak_bytes"] for line in measured.lines] == [None, 102, None, None, 105, None, None, 108]
    assert measured.record.measured_peak_bytes == 108
    once = Run(tmp_path / "once")
    once.fit(measure=measure)
    assert [line["peak_bytes"] for line in once.lines] == [None, 102] + [None] * 6


@pytest.mark.parametrize("calls", [0, 2])
def test_a_measurement_must_run_the_step_once(calls: int, run: Run) -> None:
    def measure(step: Step, batch: Any) -> int:
        for _ in range(calls):
            step(batch)
        return 1

    with pytest.raises(UsageError, match=f"measure= ran {calls} steps"):
        run.fit(measure=measure)


def test_a_log_is_given_each_line_of_the_metrics(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", evaluate=noisy_evaluate)
    records: list[dict[str, Any]] = []

    def log(record: dict[str, Any]) -> None:
        records.append(dict(record))
        record.clear()  # it is the function's own

    run.trainer(log=log, evaluate_every=4, scaler=True).fit()
    lines = read_lines(run.out / METRICS)
    assert records == lines
    assert [line["step"] for line in lines if "evaluation" in line] == [4, 8]


@pytest.mark.parametrize(("name", "last"), [("loss", 5), ("evaluation", 4), ("event", 2)])
def test_an_error_of_a_log_ends_the_run_as_it_is_and_the_run_resumes_bitwise(
    tmp_path: Path, name: str, last: int
) -> None:
    whole, run = (Run(tmp_path / folder, evaluate=noisy_evaluate) for folder in ("whole", "run"))
    expected = whole.fit(evaluate_every=4)

    def log(record: dict[str, Any]) -> None:
        if name in record and record["step"] == last:
            raise Crash

    def over_budget(step: Step, batch: Any) -> int:
        step(batch)
        return 10**15

    with pytest.raises(Crash) as caught:
        run.fit(evaluate_every=4, log=log, measure=over_budget)
    assert run.record.status == "failed" and run.checkpoints == [f"checkpoint-{last}"]
    assert f"resume=True continues from {run.out / run.checkpoints[0]}" in caught.value.__notes__[0]
    assert run.fit(evaluate_every=4, resume=True) == expected


def test_what_ended_a_run_is_not_hidden_by_its_log(run: Run) -> None:
    def log(record: dict[str, Any]) -> None:
        raise AssertionError

    def fail(step: Step, batch: Any) -> int:
        step.note("event", "of a step that fails")
        raise Crash

    with pytest.raises(Crash):
        run.fit(measure=fail, log=lambda record: None if record["step"] == 1 else log(record))


def test_allocation_retries_are_counted_from_the_beginning_of_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the allocator's statistics of a GPU: those of a process, of which 3 were before the run."""
    counts = iter([3, 3, 4, 4, 6, 6, 6, 6, 7])
    monkeypatch.setattr(hardware.accelerators, "allocation_retries", lambda device: next(counts))
    run.fit(steps=8)
    assert [line["allocation_retries"] for line in run.lines] == [0, 1, 1, 3, 3, 3, 3, 4]
    assert run.record.allocation_retries == 4
    monkeypatch.undo()
    run.fit(steps=2, overwrite=True)
    assert run.record.allocation_retries is None


def test_tensorboard(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run.crash(5, tensorboard=True, checkpoint_every=3)
    run.fit(tensorboard=True, resume=True)
    events = accumulator.EventAccumulator(str(run.out / "tensorboard")).Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == {line["step"]: pytest.approx(line["loss"]) for line in run.lines}
    assert "memory/predicted_peak(GiB)" in events.Tags()["scalars"]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match="tensorboard logging"):
        run.trainer(tensorboard=True, overwrite=True)


# Skipped updates


def boosted_loss(model: nn.Module, batch: Any) -> Any:
    """Overflows in the third and fourth batch of an epoch of `BOOSTED`."""
    return ((model(batch[0]) - batch[1]) ** 2).mean() * batch[2].mean()


def boosted_batches() -> list[Any]:
    return [(*batch, torch.full((4,), 3e38 if n in (2, 3) else 1.0)) for n, batch in enumerate(make_batches("list"))]


def test_skipped_updates_are_not_steps(tmp_path: Path) -> None:
    batches = boosted_batches()
    make = {"batch": batches[0], "loss_fn": boosted_loss, "batches": batches}
    whole, broken = Run(tmp_path / "whole", **make), Run(tmp_path / "broken", **make)
    state = whole.fit(scaler=True, checkpoint_every=2)
    lines = whole.lines
    steps = [(1, False), (2, False), (3, True), (3, True), (3, False)]
    assert [(line["step"], line["skipped"]) for line in lines[:5]] == steps
    assert lines[2]["grad_norm"] is None and lines[2]["loss_scale"] == 65536.0 and lines[4]["loss_scale"] == 16384.0
    assert whole.record.steps == 8
    json.loads((whole.out / "metrics.jsonl").read_text().splitlines()[2], parse_constant=pytest.fail)
    broken.crash(3, scaler=True, checkpoint_every=2)
    assert state == broken.fit(scaler=True, checkpoint_every=2, resume=True, seed=4)
    assert broken.lines == lines


# Resuming


@pytest.mark.parametrize("batches", BATCH_KINDS)
@pytest.mark.parametrize(
    ("length", "every", "at"),
    [
        ({"steps": 15}, 4, 10),  # in the middle of an epoch
        ({"steps": 15}, 6, 6),  # at its end, before the checkpoint
        ({"steps": 15}, 6, 7),  # just after the checkpoint at its end
        ({"epochs": 3}, 5, 14),
        ({"epochs": 3}, 6, 17),
        ({"steps": 15, "prefetch_batches": 3}, 4, 10),
        ({"steps": 15, "prefetch_batches": 3}, 6, 6),
        ({"steps": 15, "prefetch_batches": 3}, 5, 14),
    ],
)
def test_resumed_runs_end_bitwise_as_others(
    batches: str, length: dict[str, int], every: int, at: int, tmp_path: Path
) -> None:
    if batches == "none" and "epochs" in length:
        length = {"epochs": 18}
    options = {**length, "checkpoint_every": every, "evaluate_every": 4}
    whole = Run(tmp_path / "whole", batches, evaluate=noisy_evaluate)
    broken = Run(tmp_path / "broken", batches, evaluate=noisy_evaluate)
    expected = whole.fit(**(options | {"prefetch_batches": 0}))
    rng = rng_state()
    broken.crash(at, **options)
    assert broken.record.status == "failed" and "Crash" in str(broken.record.error)
    started = broken.record.started
    assert broken.fit(**options, resume=True, seed=7) == expected
    assert rng_state() == rng
    assert broken.lines == whole.lines
    assert broken.record.evaluations == whole.record.evaluations
    assert (broken.record.first_loss, broken.record.started) == (whole.record.first_loss, started)
    assert broken.checkpoints == whole.checkpoints
    assert not [thread for thread in threading.enumerate() if thread.name == "memfit-prefetch"]


def test_the_comparison_of_resumed_runs_sees_a_lost_random_state(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run.fit(steps=8)
    broken = Run(tmp_path / "broken")
    broken.crash(6, checkpoint_every=4)
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    assert broken.fit(resume=True, seed=7) != expected
    assert broken.lines[:4] == run.lines[:4] and broken.lines != run.lines


def test_a_crash_right_after_each_step_changes_nothing(run: Run, tmp_path: Path) -> None:
    expected = run.fit(steps=8, checkpoint_every=1, evaluate_every=2)
    broken = Run(tmp_path / "broken", "seeded")
    with pytest.raises(KeyboardInterrupt):
        broken.fit(checkpoint_every=1, evaluate_every=2, on_step=crash_at(1, KeyboardInterrupt()))
    for step in range(2, 9):
        with pytest.raises(KeyboardInterrupt):
            broken.fit(resume=True, evaluate_every=2, on_step=crash_at(step, KeyboardInterrupt()), seed=step)
    assert broken.fit(resume=True, evaluate_every=2) == expected
    assert broken.lines == run.lines


def test_an_evaluation_that_was_missed_is_made_up_for(tmp_path: Path) -> None:
    whole, broken = (Run(tmp_path / name, evaluate=noisy_evaluate) for name in ("whole", "broken"))
    whole.fit(evaluate_every=4)
    with pytest.raises(KeyboardInterrupt):
        broken.fit(evaluate_every=4, on_step=crash_at(4, KeyboardInterrupt()))
    broken.fit(evaluate_every=4, resume=True)
    assert broken.lines == whole.lines


def test_a_finished_run_can_be_made_longer(run: Run, tmp_path: Path) -> None:
    longer = Run(tmp_path / "longer")
    expected = longer.fit(epochs=3)
    run.fit(epochs=1)
    assert run.fit(epochs=1, resume=True) == run.fit(epochs=1, overwrite=True)
    run.fit(steps=9, resume=True, seed=5)
    assert run.fit(epochs=3, resume=True, seed=6) == expected
    assert run.lines == longer.lines


def test_a_line_cut_short_is_dropped(run: Run, tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole")
    whole.fit()
    run.crash(5, checkpoint_every=3)
    metrics = run.out / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-9])
    run.fit(resume=True)
    assert run.lines == whole.lines


def test_loaders_that_end_too_early_are_named(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "list")
    run.crash(5, checkpoint_every=4)
    shorter = Run(run.out, "list", batches=make_batches("list")[:3])
    trainer = shorter.trainer(resume=True, seed=3)
    before, rng = training_state(trainer.step), rng_state()
    with pytest.raises(CheckpointError, match="gave 3 batches in epoch 0, and the checkpoint used 4"):
        trainer.fit()
    assert training_state(trainer.step) == before and rng_state() == rng
    with pytest.raises(CheckpointError, match=r"state_dict\(\)"):
        Run(run.out, "seeded").fit(resume=True)


def test_one_shot_batches_are_named(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", batches=iter(make_batches("list")))
    with pytest.raises(WorkloadError, match="no batch in epoch 1"):
        run.fit()
    assert run.record.steps == 6


def test_another_precision_is_an_event(run: Run) -> None:
    run.fit(steps=2)
    trainer = run.trainer(resume=True)
    trainer.plan = ir.codec.decode(
        ir.codec.encode(trainer.plan).replace(b"32-true", b"bf16-mixed"), Plan, source="the changed plan"
    )
    (event,) = trainer.fit().events
    assert event.kind == "another precision"
    assert "precision='32-true'; training continues with 'bf16-mixed'" in event.text


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        ("training.json", lambda data: data[: len(data) // 2]),
        ("optimizer.json", None),
        ("checkpoint.json", lambda data: b""),
        ("checkpoint.json", lambda data: data.replace(b'"step": 4', b'"step": 5')),
        ("checkpoint.json", None),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_earlier_one_goes_on(
    name: str, damage: Callable[[bytes], bytes] | None, run: Run, tmp_path: Path, caplog: Any
) -> None:
    whole = Run(tmp_path / "whole")
    expected = whole.fit()
    run.crash(5, checkpoint_every=2)
    file = run.out / "checkpoint-4" / name
    if damage is None:
        file.unlink()
    else:
        assert (data := damage(file.read_bytes())) != file.read_bytes()
        file.write_bytes(data)
    before = {} if damage is None else {name: file.read_bytes()}
    assert run.fit(resume=True, checkpoint_every=2, seed=3) == expected
    aside = contents(run.out / "damaged-checkpoint-4")
    assert run.checkpoints == ["checkpoint-6", "checkpoint-8"] and before.items() <= aside.items()
    (event,) = run.record.events
    assert (event.step, event.kind) == (2, "damaged checkpoint") and f"checkpoint-4/{name}" in event.text
    assert "continues from" in event.text and event.text in caplog.text
    assert [line for line in run.lines if "event" not in line] == whole.lines
    run.fit(overwrite=True)
    assert (run.out / "damaged-checkpoint-4").exists() == (b"memfit" not in aside.get("checkpoint.json", b""))


def test_all_checkpoints_damaged_stops_with_each_named_and_changes_nothing(run: Run) -> None:
    run.crash(5, checkpoint_every=2)
    for n in (2, 4):
        file = run.out / f"checkpoint-{n}" / "training.json"
        file.write_bytes(file.read_bytes().replace(b'"used"', b'"uzed"'))
    trainer = run.trainer(resume=True, seed=3)
    before, files = training_state(trainer.step), contents(run.out)
    with pytest.raises(CheckpointError, match=r"checkpoint-4/training\.json.*checkpoint-2/training\.json.*overwrite"):
        trainer.fit()
    assert training_state(trainer.step) == before and contents(run.out) == files


# Ends before the end


@pytest.fixture
def usual_handlers() -> Iterator[None]:
    """Signals handled as in a program at a terminal: what runs in the background inherits that Ctrl-C is ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_with_a_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", "shuffled")
    expected = whole.fit()
    handler = signal.getsignal(number)

    def signalled_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if trainer.step.steps == 4:
            signal.raise_signal(number)
        loss: torch.Tensor = squared_error(model, batch)
        return loss

    broken = Run(tmp_path / "broken", "shuffled", loss_fn=signalled_loss)
    trainer = broken.trainer()
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as caught:
        trainer.fit()
    assert number == signal.SIGINT or caught.value.code == 75
    assert signal.getsignal(number) is handler
    assert broken.checkpoints == ["checkpoint-5"]
    assert broken.record.status == "failed" and broken.record.steps == 5
    assert str(broken.record.error).startswith("interrupted after step 5; resume=True continues from")
    assert "resume=True" in caught.value.__notes__[0]
    assert Run(broken.out, "shuffled").fit(resume=True, seed=3) == expected
    assert broken.lines == whole.lines


def test_an_interrupt_in_the_middle_of_a_step_writes_no_checkpoint(tmp_path: Path) -> None:
    class Interrupted(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls == 5:
                self.param_groups[0]["params"][0].data.zero_()
                raise KeyboardInterrupt
            return super().step(closure)

    model = Tied()
    changes = {"model": model, "optimizer": Interrupted(model.parameters(), lr=0.1), "scheduler": None}
    run = Run(tmp_path / "run", **changes)
    with pytest.raises(KeyboardInterrupt):
        run.fit(checkpoint_every=3)
    assert run.checkpoints == ["checkpoint-0", "checkpoint-3"]
    assert str(run.record.error).startswith("interrupted after step 4; resume=True continues from")


def test_a_loss_that_is_not_finite_stops_the_run(run: Run, tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = squared_error(model, batch)
        return loss * (math.nan if trainer.step.steps == 5 else 1.0)

    run = Run(tmp_path / "run", loss_fn=loss_fn)
    trainer = run.trainer(checkpoint_every=2)
    with pytest.raises(NonFiniteError):
        trainer.fit()
    assert run.checkpoints == ["checkpoint-2", "checkpoint-4"]
    assert run.record.status == "failed" and str(run.record.error).startswith(
        "NonFiniteError: the loss is nan at step 5"
    )
    assert run.record.steps == 5 and [line["step"] for line in run.lines] == [1, 2, 3, 4, 5]
    restored(run.out / "checkpoint-4", trainer.step)


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("number", [0, 2])
def test_a_full_disk_is_an_output_error_and_noticed_before_the_first_step(
    number: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        if trainer.step.steps == number:
            raise FULL
        write(*args)

    trainer, write = run.trainer(checkpoint_every=2), safetensors.torch.save_file
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OutputError, match=f"checkpoint-{number}: No space left"):
        trainer.fit()
    assert run.record.status == "failed" and run.checkpoints == ["checkpoint-0"] * (number > 0)
    assert len(run.lines) == number


# Checkpoints that a thread writes


def test_a_thread_writes_what_was_there_when_it_began_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, goes_on = Run(tmp_path / "waits", "shuffled"), Run(tmp_path / "goes-on", "shuffled")
    expected, rng = waits.fit(checkpoint_every=3, keep_checkpoints=9), rng_state()
    held, seen = HeldWrites(monkeypatch), {}

    def on_step(progress: Any) -> None:
        seen[progress.step] = names(goes_on.out)
        if progress.step in (5, 8):
            held.end()
        if progress.step == 6:
            held.hold()

    trainer = goes_on.trainer(checkpoint_every=3, keep_checkpoints=9, async_checkpoints=True, on_step=on_step)
    trainer.fit()
    assert seen[4] == seen[5] == ["checkpoint-0", "checkpoint-3 in the making"]
    assert seen[6] == ["checkpoint-0", "checkpoint-3"]
    assert seen[7] == seen[8] == ["checkpoint-0", "checkpoint-3", "checkpoint-6 in the making"]
    assert names(goes_on.out) == waits.checkpoints == [f"checkpoint-{n}" for n in (0, 3, 6, 8)]
    assert training_state(trainer.step) == expected and goes_on.lines == waits.lines and rng_state() == rng
    for name in waits.checkpoints:
        assert is_same(stored(goes_on.out / name), stored(waits.out / name))


def test_the_next_checkpoint_waits_for_the_one_before(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies are in the same memory."""
    seen: list[list[str]] = []
    write = safetensors.torch.save_file

    def slowly(*args: Any) -> None:
        time.sleep(0.02)
        if seen[-1:] != [names(run.out)]:
            seen.append(names(run.out))
        write(*args)

    monkeypatch.setattr(safetensors.torch, "save_file", slowly)
    run.fit(checkpoint_every=1, keep_checkpoints=9, steps=4, async_checkpoints=True)
    made = [f"checkpoint-{n}" for n in range(5)]
    assert seen == [[*made[:count], f"{made[count]} in the making"] for count in range(5)]


@pytest.mark.parametrize("at", [4, 5, 7])
def test_a_run_that_fails_while_a_thread_writes_goes_on_from_what_it_wrote(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = (Run(tmp_path / name, "shuffled by a generator") for name in ("whole", "broken"))
    expected = whole.fit(steps=9, checkpoint_every=4)
    held = HeldWrites(monkeypatch)

    def crash(progress: Any) -> None:
        if progress.step == at:
            held.let_go()
            raise Crash

    with pytest.raises(Crash) as caught:
        broken.fit(steps=9, checkpoint_every=4, async_checkpoints=True, on_step=crash)
    newest = "checkpoint-0" if at == 4 else "checkpoint-4"  # at step 4 it had not begun
    assert names(broken.out)[-1] == newest and newest in caught.value.__notes__[0]
    assert broken.fit(steps=9, checkpoint_every=4, async_checkpoints=True, resume=True, seed=7) == expected
    assert broken.lines == whole.lines and broken.checkpoints == whole.checkpoints


def test_a_run_that_is_killed_while_a_thread_writes_ends_bitwise_as_others(tmp_path: Path) -> None:
    whole, broken = (Run(tmp_path / name, "shuffled") for name in ("whole", "broken"))
    expected = whole.fit(checkpoint_every=4)
    killed = warm.run(["-m", "tests.training.held_writes", str(broken.out)], cwd=warm.ROOT)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert names(broken.out) == ["checkpoint-0", "checkpoint-4 in the making"]
    assert broken.fit(checkpoint_every=4, async_checkpoints=True, resume=True, seed=7) == expected
    assert names(broken.out) == whole.checkpoints and broken.lines == whole.lines


@pytest.mark.usefixtures("usual_handlers")
@pytest.mark.parametrize("error", [None, FULL], ids=["written", "full"])
def test_a_signal_while_a_thread_writes_waits_for_it_and_writes_one_more(
    error: OSError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells of the one that could not be written, too."""
    whole, broken = (Run(tmp_path / name, "shuffled") for name in ("whole", "broken"))
    expected = whole.fit()
    held = HeldWrites(monkeypatch, error)

    def on_step(progress: Any) -> None:
        if progress.step == 5:
            signal.raise_signal(signal.SIGTERM)
            held.let_go()

    with pytest.raises(SystemExit) as caught:
        broken.fit(checkpoint_every=4, async_checkpoints=True, on_step=on_step)
    *notes, last = caught.value.__notes__
    assert caught.value.code == 75 and "checkpoint-5" in last
    assert len(notes) == (error is not None) and all("checkpoint-4: No space left" in note for note in notes)
    assert names(broken.out) == ["checkpoint-4" if error is None else "checkpoint-0", "checkpoint-5"]
    monkeypatch.undo()
    assert broken.fit(resume=True, seed=3) == expected


def test_a_disk_that_is_full_for_the_thread_ends_the_run_before_the_next_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldWrites(monkeypatch, FULL)
    trainer = run.trainer(
        checkpoint_every=4,
        async_checkpoints=True,
        on_step=lambda progress: held.end() if progress.step == 6 else None,
    )
    with pytest.raises(OutputError, match=r"can't write .*checkpoint-4: No space left.*Free space") as caught:
        trainer.fit()
    assert trainer.step.steps == 6 and run.record.status == "failed"
    assert names(run.out) == ["checkpoint-0"] and "checkpoint-0" in caught.value.__notes__[0]


# The folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_run_is_not_overwritten_unasked(run: Run) -> None:
    run.fit(steps=2)
    before = contents(run.out)
    with pytest.raises(OutputError, match=r"is not empty.*overwrite=True.*resume=True"):
        run.trainer()
    assert contents(run.out) == before


def test_overwriting_removes_the_run_and_nothing_else(run: Run) -> None:
    pytest.importorskip("tensorboard")
    expected = run.fit(steps=2, tensorboard=True)
    (run.out / ".checkpoint-7.123.new.tmp").mkdir()
    foreign = {"notes.txt": b"mine", "tensorboard/notes.txt": b"too", "checkpoint-best/model.safetensors": b"x"}
    for name, data in foreign.items():
        (run.out / name).parent.mkdir(exist_ok=True)
        (run.out / name).write_bytes(data)
    assert run.fit(steps=2, overwrite=True) == expected
    left = contents(run.out)
    assert {name: left[name] for name in foreign} == foreign
    assert not any("tfevents" in name or ".tmp" in name for name in left)
    assert len(run.lines) == 2 and run.checkpoints == ["checkpoint-2", "checkpoint-best"]


@pytest.mark.parametrize(
    ("name", "data"),
    [("plan.json", b'{"schema": "other/1"}'), ("run.json", b"x"), ("metrics.jsonl", b"{}\n"), ("checkpoint-5/x", b"")],
)
@pytest.mark.parametrize("mode", ["overwrite", "resume"])
def test_what_others_wrote_under_our_names_is_not_touched(name: str, data: bytes, mode: str, run: Run) -> None:
    run.fit(steps=2)
    (run.out / name).parent.mkdir(exist_ok=True)
    (run.out / name).write_bytes(data)
    before = contents(run.out)
    with pytest.raises(OutputError, match=name.split("/")[0]):
        run.trainer(**{mode: True})
    assert contents(run.out) == before


def test_folders_that_cannot_be_written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OutputError, match="is a file"):
            run.trainer(out=out)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(OutputError, match="no permission"):
        run.trainer()
    monkeypatch.undo()
    trainer = run.trainer()
    run.out.write_text("in the way since")
    with pytest.raises(OutputError, match="can't write"):
        trainer.fit()


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": None}, "steps=None and epochs=None"),
        ({"steps": 1, "epochs": 1}, "steps=1 and epochs=1"),
        ({"steps": 0}, "steps=0"),
        ({"epochs": -1}, "epochs=-1"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"steps": True}, "steps=True"),
        ({"evaluate_every": 0}, "evaluate_every=0"),
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0"),
        ({"async_checkpoints": True}, "async_checkpoints=True needs checkpoint_every="),
        ({"measure_every": 0}, "measure_every=0"),
        ({"overwrite": True, "resume": True}, "contradict"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str, run: Run) -> None:
    with pytest.raises(UsageError, match=message):
        run.trainer(**options)
    assert not run.out.exists()


def test_a_plan_for_another_workload_is_refused(run: Run) -> None:
    plan = make_plan(make_workload(kind="none", width=8))
    workload: Workload = make_workload()
    with pytest.raises(PlanMismatchError, match=plan.fingerprint):
        Trainer(Step(workload), plan, RunOptions(out=run.out, steps=1))


# The command that started a run, for a report to say how it goes on


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/memfit", "train", "a.py:w", "--plan", "p.json"], ["train", "a.py:w", "--plan", "p.json"]),
        (["/lib/memfit/__main__.py", "train", "a.py:w"], ["train", "a.py:w"]),
        (["C:/Scripts/memfit.exe", "train", "a.py:w"], ["train", "a.py:w"]),
        (["/usr/bin/memfit", "demo", "--out", "x"], []),
        (["train.py", "train", "--token", "secret"], []),
        (["/other/__main__.py", "train"], []),
        ([], []),
    ],
)
def test_only_the_command_of_a_training_is_kept(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], command: list[str], run: Run
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    run.fit(steps=1)
    assert run.record.command == command
