"""The recording of a step on a copy: storages by category, their lifetimes if autograd saved nothing, the trace."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

from memfit._torch import storage_key_of
from memfit.capture.composites import composites_without_mode
from memfit.capture.control_flow import ControlFlowPath, DataRun, live_peak_bytes
from memfit.capture.external_state import external_tensors
from memfit.capture.fake_workload import aliasing
from memfit.capture.known_values import KnownValues
from memfit.capture.operator_calls import device_of
from memfit.capture.recorder import Recorder, Recording
from memfit.errors import CaptureError
from memfit.foundations import format_bytes
from memfit.hardware import AttentionKernels
from memfit.ir import Category, Device, Parameter, Phase, Storage, Trace, is_kernel
from memfit.workload import StepProgram, Workload, fingerprint, part_of, parts, samples_of, tensors_of

MOST_MICROBATCHES = 32  # run for one trace
NOTED_GARBAGE = 1e-3  # share of the peak
_OTHER_STEPS = 3  # recorded where each forward pass runs other operators
_OTHER_EACH_TIME = (
    "the forward pass runs other operators each time it is called. The prediction is the highest peak of"
    f" {_OTHER_STEPS + 1} steps in a row, and nothing is recomputed. Other steps may need more"
)

BuildStep = Callable[[Workload], contextlib.AbstractContextManager[StepProgram]]
"""A function that builds the step from a copy of the workload, as a context that undoes its changes to the copy."""


@dataclass(frozen=True)
class CaptureJob:
    """A step to capture.

    Attributes:
        workload: The user's workload, of which a copy runs.
        build: Builds the step from the copy.
        precision: The precision that the trace names.
        microbatch_size: Samples in a microbatch; None for the whole batch.
        device: The device that the copy runs on; None for the CPU. A CUDA device needs fake CUDA in this process
            (`memfit.hardware.shim`); another accelerator must be here.
        warm: Whether the workload comes from `warmed`, and the step updates its parameters as the one there did: then
            one step runs.
        reading: The run with data, for the values that the step reads; None where it can't run.
    """

    workload: Workload
    build: BuildStep
    precision: str = "32-true"
    microbatch_size: int | None = None
    device: Device | None = None
    warm: bool = False
    reading: DataRun | None = None


def inputs_of(copied: Workload) -> list[torch.Tensor]:
    """Return the tensors of a copy's batch, and of the whole batch that it is a part of."""
    return tensors_of([copied.batch, copied.batches])


@contextlib.contextmanager
def fake_modes(values: KnownValues | None) -> Iterator[None]:
    """Run code under the modes of known values; as it is where there are none."""
    if values is None:
        yield
    else:
        with values.fake, values:
            yield


def storages_of(workload: Workload) -> frozenset[int]:
    """Return the keys of the storages of a workload's own tensors."""
    held = [workload.batch, list(workload.optimizer.state.values()), workload.optimizer.param_groups]
    own = [*workload.model.parameters(), *workload.model.buffers(), *tensors_of(held)]
    return frozenset(storage_key_of(t) for t in own if t.layout is torch.strided)


def collected_bytes(recorder: Recorder) -> int:
    """Collect garbage, and return the bytes that this frees: objects that refer to each other held them."""
    live_bytes = recorder.live_bytes()
    gc.collect(0)  # the youngest generation: objects of this step
    return live_bytes - recorder.live_bytes()


def record(
    job: CaptureJob,
    copied: Workload,
    values: KnownValues | None,
    attention: AttentionKernels | None = None,
    path: ControlFlowPath | None = None,
) -> Trace:
    """Return the trace of a job's step, which runs on a copy of the workload: with data where `values` is None."""
    kind = next((device_of(t).type for t in [*copied.model.parameters(), *tensors_of(copied.batch)]), "cpu")
    recorder = Recorder(values.fake if values else None, kind, storages_of(job.workload))
    with (
        fake_modes(values),
        recorder,
        composites_without_mode(),
        recorder.unseen(),  # of what a lever empties as it is put on, too
        job.build(copied) as step,
        recorder.watch(copied.model),
        aliasing(inputs_of(copied)),
        contextlib.ExitStack() as stack,
    ):
        last = 0  # the step's last microbatch so far

        def enter_phase(phase: Phase, microbatch: int) -> None:
            nonlocal last
            last = microbatch if phase == "forward" else last
            if path is not None:
                path.follow(phase, microbatch)
            recorder.enter_phase(phase, microbatch)

        if path is not None and values is not None:
            values.replay = path.replay
            values.begin(inputs_of(copied), path.starts[0].extreme if path.starts[0] else "")
            stack.enter_context(path.replay.rewinding())
            stack.enter_context(path.replay.arrays(values.value_of))
        step.on_phase = enter_phase
        garbage_bytes = 0
        early_share = 0.0  # what an earlier step took more than the one that all later ones are like
        made_in_part = False  # whether one microbatch of several made the optimizer's state
        masters = [p for group in copied.optimizer.param_groups for p in group["params"]]
        held = [*copied.model.parameters(), *copied.model.buffers(), *inputs_of(copied), *masters]
        external = external_tensors(copied)
        for tensor in [*held, *external]:
            recorder.observe(tensor, -1)
        is_known = job.warm and step.workload is copied  # no code runs until the step that is recorded
        outside = [external] if is_known else []
        del held, tensor, external
        if not job.warm and not (path and path.records_first):
            microbatches = [copied.batch] if isinstance(copied.batch_size, int) else step.split(copied.batch)
            made_in_part = len(microbatches) > 1
            step(microbatches[0])  # makes the optimizer's state
            del microbatches
            garbage_bytes = collected_bytes(recorder) // (last + 1)
        if path is not None:
            path.begin_step(0 if path.records_first else 1)
        if attention is not None:
            attention.chosen.clear()
        recorded = _recorded(recorder, step, copied.batch, enter_phase, outside)
        count = last + 1 if job.microbatch_size is None else -(-samples_of(job.workload) // job.microbatch_size)
        garbage_bytes *= max(1, 2 * count - (last + 1))  # other microbatches may leave some, and all of the step before
        notes = attention.notes() if attention is not None else []
        dry, is_same = _dry_forward_passes(recorder, step, copied.batch, recorded[0], enter_phase)
        if job.warm and not is_same:
            raise CaptureError("the copy has the state of another step: memfit captures it from its first step on")
        if not is_same:
            more_steps = [_recorded(recorder, step, copied.batch, enter_phase) for _ in range(_OTHER_STEPS)]
            highest = max([recorded, *more_steps], key=lambda pair: live_peak_bytes(pair[0]))
            recorded = more_steps[-1]
            # Some settle after their second step: DistributedDataParallel makes its buckets anew there.
            forward = [
                [
                    (op.microbatch, name)
                    for op, name in zip(each.ops, _names(each), strict=True)
                    if op.phase == "forward"
                ]
                for each, _ in more_steps
            ]
            if all(names == forward[0] for names in forward):
                dry, is_same = _dry_forward_passes(recorder, step, copied.batch, recorded[0], enter_phase)
            if is_same:
                early_share = live_peak_bytes(highest[0]) / max(1, live_peak_bytes(recorded[0])) - 1
            else:
                recorded = highest
                recorded[0].saves.clear()
                notes, dry = [*notes, _OTHER_EACH_TIME], []
        rest = samples_of(job.workload) % job.microbatch_size if job.microbatch_size and count > last + 1 else 0
        reads = path is not None and (path.replay.logs or path.replay.guesses)  # it ran with data, or can't without
        if rest and not reads:  # the last microbatch is smaller: state that a module carries on may not fit it
            step.compute_loss(part_of(copied, copied.batch, 0, rest))
            step.drop_forward()
        step.on_phase = None  # which refers to the step, and would keep it until the garbage collector runs
        if path is not None and values is not None:
            path.reads_draws = values.reads_draws
    recording, categories = recorded
    late_share = 0.0
    if not made_in_part:  # the user's second step makes late state too, and later ones hold it from their beginning
        late_bytes = sum(recording.storages[index].nbytes for index in categories.late)
        late_share = late_bytes / max(1, live_peak_bytes(recording))
        categories.late.clear()
    trace = _assembled(job, copied, recording, categories, dry)
    share = garbage_bytes / max(1, live_peak_bytes(recording))
    if count > MOST_MICROBATCHES and share > 1:
        raise CaptureError(
            f"{count:,} microbatches and those of the step before leave {format_bytes(garbage_bytes)} in reference"
            " cycles until Python's garbage collector runs: more than the step needs. Give a larger microbatch_size="
        )
    if share > NOTED_GARBAGE:
        notes.append(
            f"a step and the one before leave {format_bytes(garbage_bytes)} in reference cycles until Python's"
            " garbage collector runs: a step may need that much more, and later steps even more"
        )
    return replace(trace, notes=notes, slack=late_share + early_share + (share if share > NOTED_GARBAGE else 0.0))


def _recorded(
    recorder: Recorder,
    step: StepProgram,
    batch: Any,
    enter_phase: Callable[[Phase, int], None],
    outside: list[list[torch.Tensor]] | None = None,
) -> tuple[Recording, _Categories]:
    """Record a step.

    Args:
        outside: Holds what `external_tensors` returns for the step, where that is known. It is taken out, since the
            step may let go of these tensors.
    """
    recorder.begin_step()
    categories = _Categories(recorder, step, outside.pop() if outside else external_tensors(step.workload))

    def on_phase(phase: Phase, microbatch: int) -> None:
        categories.see_gradients()
        enter_phase(phase, microbatch)

    step.on_phase = on_phase
    with recorder.saving():
        step(batch)
    categories.see_optimizer_state()
    return recorder.end_step(), categories


class _Categories:
    """The category of each storage, found while the step runs.

    Attributes:
        found: By storage: its category, owner and parameter.
        late: Storages of optimizer state that this step made, while other parameters had theirs from earlier steps, as
            for a layer that was dropped until now. They count as held from the beginning: another microbatch of an
            earlier step may have made them.
    """

    def __init__(self, recorder: Recorder, step: StepProgram, external: list[torch.Tensor]) -> None:
        self.recorder, self.step = recorder, step
        self.found: dict[int, tuple[Category, int, int]] = {}
        self.late: set[int] = set()
        model, state = step.workload.model, step.workload.optimizer.state
        self._position = {id(p): i for i, p in enumerate(model.parameters())}
        self._with_state = {id(p) for p, values in state.items() if tensors_of(values)}
        self._see(external, "buffers")
        self.see_optimizer_state()
        for position, (_, module) in enumerate(model.named_modules()):
            self._see(module.buffers(recurse=False), "buffers", position)
            for parameter in module.parameters(recurse=False):
                self._see([parameter], "parameters", position, parameter)
        self._see(inputs_of(step.workload), "inputs")

    def _see(self, tensors: Any, category: Category, owner: int = -1, parameter: Any = None) -> set[int]:
        """Note the category of tensors; return their storages."""
        observed = [self.recorder.observe(part, -1) for tensor in tensors for part in parts(tensor)]
        seen = {index for index in observed if index is not None}
        self.found |= dict.fromkeys(seen, (category, owner, self._position.get(id(parameter), -1)))
        return seen

    def see_optimizer_state(self) -> None:
        for parameter, values in self.step.workload.optimizer.state.items():
            seen = self._see(tensors_of(values), "optimizer state", parameter=parameter)
            if self._with_state and id(parameter) not in self._with_state:
                self.late |= seen
        self._see(self._masters(), "optimizer state")

    def _masters(self) -> list[torch.Tensor]:
        """Return the master weights: tensors that the optimizer updates and the model does not have."""
        held = [p for group in self.step.workload.optimizer.param_groups for p in group["params"]]
        return [p for p in held if id(p) not in self._position]

    def see_gradients(self) -> None:
        for parameter in [*self.step.workload.model.parameters(), *self._masters()]:
            if parameter.grad is not None:
                self._see([parameter.grad], "gradients", parameter=parameter)
        self._see(self.step.buckets, "gradients")


def _dry_forward_passes(
    recorder: Recorder, step: StepProgram, batch: Any, recording: Recording, enter_phase: Callable[[Phase, int], None]
) -> tuple[list[Recording], bool]:
    """Return, for each microbatch, a recording of the forward pass with nothing saved, in which storages die early.

    Microbatches that ran the same operators share one. Tensors that the forward pass itself unpacks are still saved.
    The second value tells whether they ran the same operators as in the step, but for those that weigh its loss.
    """
    recordings: dict[tuple[tuple[int, ...], int], Recording] = {}
    dry = []
    recorder.begin_step()  # splitting may make tensors, which are no part of the step recorded before
    microbatches = step.split(batch)
    recorder.end_step()
    names, is_same = _names(recording), True
    for index, microbatch in enumerate(microbatches):
        forward = _forward_of(recording, index)
        first, last = (forward[0], forward[-1]) if forward else (0, -1)
        kept = [0 <= save.unpacked <= last for save in recording.saves if first <= save.at <= last + 1]
        key = tuple(recording.ops[i].signature for i in forward), index if any(kept) else -1
        if key not in recordings:
            recorder.begin_step()
            enter_phase("forward", index)
            with recorder.dropping(kept):
                loss = step.compute_loss(microbatch)
            recordings[key] = recorder.end_step()
            del loss
            step.drop_forward()  # the next one begins as after a backward pass
        dry.append(recordings[key])
        is_same = is_same and [names[i] for i in forward[: len(dry[-1].ops)]] == _names(dry[-1])
    return dry, is_same


def _forward_of(recording: Recording, microbatch: int) -> list[int]:
    return [i for i, op in enumerate(recording.ops) if op.phase == "forward" and op.microbatch == microbatch]


def _names(recording: Recording) -> list[str]:
    """Return the operators' names; of kernels, which are all named alike, their operators."""
    texts = list(recording.signatures)
    return [texts[op.signature] if is_kernel(texts[op.signature]) else op.name for op in recording.ops]


def _releases(recording: Recording, dry: list[Recording]) -> dict[int, int]:
    """Return, for storages born in the forward pass, the operator after which they die where nothing is saved."""
    releases: dict[int, int] = {}
    for microbatch, dried in enumerate(dry):
        forward = _forward_of(recording, microbatch)[: len(dried.ops)]
        if not forward:
            continue
        first, last = forward[0], forward[-1]
        born = [i for i, s in enumerate(recording.storages) if first <= s.birth <= last]
        dried_storages = [s for s in dried.storages if s.birth >= 0]
        for index, storage in zip(born, dried_storages, strict=True):
            if storage.death < len(dried.ops):
                releases[index] = storage.death + first
    return releases


def _assembled(
    job: CaptureJob, copied: Workload, recording: Recording, categories: _Categories, dry: list[Recording]
) -> Trace:
    n = len(recording.ops)
    # A save holds its storage, but for one that is emptied and filled again for the backward pass.
    ends = [n if save.death < 0 else save.death for save in recording.saves]
    saves = [
        replace(save, death=min(end, recording.storages[save.storage].death))
        for save, end in zip(recording.saves, ends, strict=True)
    ]
    last_save: dict[int, int] = {}
    for save in saves:
        last_save[save.storage] = max(save.death, last_save.get(save.storage, -1))
    releases = _releases(recording, dry) | recording.releases
    full, captured = samples_of(job.workload), samples_of(copied)
    storages = []
    for index, storage in enumerate(recording.storages):
        by_lifetime: Category = "temporaries"
        if index in recording.refilled:
            by_lifetime = "parameters"
        elif storage.birth < 0:
            by_lifetime = "inputs"
        elif recording.ops[storage.birth].phase in ("forward", "recompute"):  # activations wait for the backward pass
            is_late = storage.death < n and recording.ops[storage.death].phase == "backward"
            by_lifetime = "activations" if is_late or index in last_save else by_lifetime
        category, owner, parameter = categories.found.get(index, (by_lifetime, -1, -1))
        release = releases.get(index, storage.death)
        if storage.death > max(release, last_save.get(index, -1)):  # something else holds it
            release = storage.death
        # Held from the step before and let go before the first operator: no operator of this step sees it.
        nbytes = storage.nbytes if storage.death >= 0 else 0
        death, release = max(storage.death, 0), max(release, 0)
        birth = -1 if index in categories.late else storage.birth
        storages.append(Storage(nbytes, birth, death, release, category, owner, parameter, storage.shape))
    size = job.microbatch_size or full
    groups = {id(p): i for i, group in enumerate(copied.optimizer.param_groups) for p in group["params"]}
    return Trace(
        workload=job.workload.name,
        fingerprint=fingerprint(job.workload),
        torch_version=str(torch.__version__),
        device="cpu",
        precision=job.precision,
        batch_size=full,
        microbatch_size=size,
        microbatches=-(-captured // size),
        scale_microbatches=-(-full // size),
        modules=categories.recorder.modules,
        calls=recording.calls,
        ops=recording.ops,
        storages=storages,
        saves=saves,
        signatures=list(recording.signatures),
        works=recording.works,
        parameters=[
            Parameter(name, tuple(p.shape), p.itemsize, p.requires_grad, groups.get(id(p), -1))
            for name, p in copied.model.named_parameters()
        ],
    )
