"""Categories of a recorded step's storages, and their lifetimes if autograd saved nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from memfit.capture.external_state import external_tensors
from memfit.capture.partial_steps import inputs_of
from memfit.capture.recorder import LiveStorage, Recorder, Recording
from memfit.ir.kernels import is_kernel
from memfit.ir.trace import Category, Module, Parameter, Phase, Storage, Trace
from memfit.sparse import parts
from memfit.workload import StepProgram, Workload, fingerprint, samples_of, tensors_of


class Categories:
    """The category of each storage, found while the step runs.

    Args:
        buckets: Returns what gradients are sent in.

    Attributes:
        late: Storages of optimizer state that this step made, while other parameters had theirs from earlier steps, as
            for a layer that was dropped until now. They count as held from the beginning: another microbatch of an
            earlier step may have made them.
    """

    def __init__(self, recorder: Recorder, workload: Workload, buckets: Callable[[], list[torch.Tensor]]) -> None:
        self.recorder, self.workload, self._buckets = recorder, workload, buckets
        self.found: dict[int, tuple[Category, int, int]] = {}  # by storage: category, owner and parameter
        self.late: set[int] = set()
        self.position = {id(p): i for i, p in enumerate(workload.model.parameters())}
        self._with_state = {id(p) for p, values in workload.optimizer.state.items() if tensors_of(values)}
        self._see(external_tensors(workload), "buffers")
        self.see_optimizer_state()
        for position, (_, module) in enumerate(workload.model.named_modules()):
            self._see(module.buffers(recurse=False), "buffers", position)
            for parameter in module.parameters(recurse=False):
                self._see([parameter], "parameters", position, parameter)
        self._see(inputs_of(workload), "inputs")

    def _see(self, tensors: Any, category: Category, owner: int = -1, parameter: Any = None) -> set[int]:
        """Note the category of tensors; return their storages."""
        seen: set[int] = set()
        for part in [part for tensor in tensors for part in parts(tensor)]:
            index = self.recorder.observe(part, -1)
            if index is not None:
                self.found[index] = category, owner, self.position.get(id(parameter), -1)
                seen.add(index)
        return seen

    def see_optimizer_state(self) -> None:
        for parameter, values in self.workload.optimizer.state.items():
            seen = self._see(tensors_of(values), "optimizer state", parameter=parameter)
            if self._with_state and id(parameter) not in self._with_state:
                self.late |= seen
        self._see(self._masters(), "optimizer state")

    def _masters(self) -> list[torch.Tensor]:
        """Return the master weights: tensors that the optimizer updates and the model does not have."""
        held = [p for group in self.workload.optimizer.param_groups for p in group["params"]]
        return [p for p in held if id(p) not in self.position]

    def see_gradients(self) -> None:
        for parameter in [*self.workload.model.parameters(), *self._masters()]:
            if parameter.grad is not None:
                self._see([parameter.grad], "gradients", parameter=parameter)
        self._see(self._buckets(), "gradients")

    def before(self, enter_phase: Callable[[Phase, int], None]) -> Callable[[Phase, int], None]:
        """Return the function to call at each phase, which notes the present gradients first."""

        def on_phase(phase: Phase, microbatch: int) -> None:
            self.see_gradients()
            enter_phase(phase, microbatch)

        return on_phase


def dry_forward_passes(
    recorder: Recorder, step: StepProgram, batch: Any, recording: Recording, enter_phase: Callable[[Phase, int], None]
) -> list[Recording]:
    """Return, for each microbatch, a recording of the forward pass with nothing saved, in which storages die early.

    Microbatches that ran the same operators share one. Tensors that the forward pass itself unpacks are still saved.
    """
    recordings: dict[tuple[tuple[int, ...], int], Recording] = {}
    dry = []
    recorder.begin_step()  # splitting may make tensors, which are no part of the step recorded before
    microbatches = step.split(batch)
    recorder.end_step()
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
    return dry


def _forward_of(recording: Recording, microbatch: int) -> list[int]:
    """Return the operators of a microbatch's forward pass."""
    return [i for i, op in enumerate(recording.ops) if op.phase == "forward" and op.microbatch == microbatch]


def runs_same_operators(recording: Recording, dry: list[Recording]) -> bool:
    """Tell whether the dry forward passes ran the same operators as in the step, but for those that weigh its loss."""
    recorded = _names(recording)
    return all(
        [recorded[i] for i in _forward_of(recording, microbatch)[: len(dried.ops)]] == _names(dried)
        for microbatch, dried in enumerate(dry)
    )


def run_same_forward(recordings: Sequence[Recording]) -> bool:
    """Tell whether steps ran the same operators in their forward passes."""
    named = []
    for recording in recordings:
        names = _names(recording)
        named.append([(op.microbatch, names[i]) for i, op in enumerate(recording.ops) if op.phase == "forward"])
    return all(names == named[0] for names in named)


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


def _parameters(workload: Workload) -> list[Parameter]:
    """Return the model's parameters, in the order of `named_parameters()`."""
    groups = {id(p): i for i, group in enumerate(workload.optimizer.param_groups) for p in group["params"]}
    return [
        Parameter(name, tuple(p.shape), p.itemsize, p.requires_grad, groups.get(id(p), -1))
        for name, p in workload.model.named_parameters()
    ]


def _category(storage: LiveStorage, recording: Recording, saved: bool) -> Category:
    """Return a storage's category by its lifetime: activations are those that wait for the backward pass."""
    if storage.birth < 0:
        return "inputs"
    kept = saved or (storage.death < len(recording.ops) and recording.ops[storage.death].phase == "backward")
    return "activations" if kept and recording.ops[storage.birth].phase in ("forward", "recompute") else "temporaries"


def assemble_trace(
    workload: Workload,
    copied: Workload,
    modules: list[Module],
    recording: Recording,
    categories: Categories,
    dry: list[Recording],
    precision: str,
    microbatch_size: int | None,
) -> Trace:
    """Return the trace of a recorded step."""
    n = len(recording.ops)
    saves = [replace(s, death=n) if s.death < 0 else s for s in recording.saves]
    last_save: dict[int, int] = {}
    for save in saves:
        last_save[save.storage] = max(save.death, last_save.get(save.storage, -1))
    releases = _releases(recording, dry) | recording.releases
    full, captured = samples_of(workload), samples_of(copied)
    storages = []
    for index, storage in enumerate(recording.storages):
        refilled = index in recording.refilled
        by_lifetime = "parameters" if refilled else _category(storage, recording, index in last_save)
        category, owner, parameter = categories.found.get(index, (by_lifetime, -1, -1))
        release = releases.get(index, storage.death)
        if storage.death > max(release, last_save.get(index, -1)):  # something else holds it
            release = storage.death
        # Held from the step before and let go before the first operator: no operator of this step sees it.
        nbytes = storage.nbytes if storage.death >= 0 else 0
        death, release = max(storage.death, 0), max(release, 0)
        birth = -1 if index in categories.late else storage.birth
        storages.append(Storage(nbytes, birth, death, release, category, owner, parameter, storage.shape))
    size = microbatch_size or full
    return Trace(
        workload=workload.name,
        fingerprint=fingerprint(workload),
        torch_version=str(torch.__version__),
        device="cpu",
        precision=precision,
        batch_size=full,
        microbatch_size=size,
        microbatches=-(-captured // size),
        scale_microbatches=-(-full // size),
        modules=modules,
        calls=recording.calls,
        ops=recording.ops,
        storages=storages,
        saves=saves,
        signatures=list(recording.signatures),
        works=recording.works,
        parameters=_parameters(copied),
    )
