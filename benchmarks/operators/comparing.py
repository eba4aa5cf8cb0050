"""Fake outputs and predicted peaks of operators, held against what real kernels make and allocate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.operators.samples import Sample, backward, mapped
from memfit._torch import CachedFakeTensorMode, EagerMode, disable_current_modes, storage_key_of
from memfit.capture import Faker, KnownValues, Recorder, composites_without_mode, tensors_in
from memfit.cost import first_runs
from memfit.hardware import allocated
from memfit.workload import signature

Found = list[tuple[str, str, str]]
"""Differences: the operator, its call, and what differs."""


class Fakes:
    """Operators run on fake tensors as memfit captures them."""

    def __init__(self) -> None:
        mode = CachedFakeTensorMode(allow_non_fake_inputs=True)
        self.values, self.recorder = KnownValues.of(mode), Recorder(mode)

    def outputs(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, dict[int, int]]:
        """Return the outputs of an operator on fake tensors like real ones, and the place of each input's storage."""
        faker = Faker(self.values)
        args, kwargs = mapped(lambda t: faker(t.detach()), (tuple(args), kwargs))
        places = _places((args, kwargs))
        with self.values.fake, self.values:
            return self.recorder.run(func, args, kwargs), places


@dataclass
class Operators(EagerMode):
    """A dispatch mode that compares each operator that runs with the same on fake tensors.

    Attributes:
        fakes: Runs them.
        seen: The calls that were compared: each is, once.
        found: What differs.
    """

    fakes: Fakes
    seen: dict[str, None] = field(default_factory=dict)
    found: Found = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        text = signature(func, args, kwargs)
        if func.namespace != "aten" or text in self.seen:
            return func(*args, **kwargs)
        self.seen[text] = None
        fake: Any
        with disable_current_modes():
            places = _places((args, kwargs))
            try:
                fake = self.fakes.outputs(func, args, kwargs)
            except Exception as e:
                fake = e
        out = func(*args, **kwargs)
        with disable_current_modes():
            if isinstance(fake, Exception):
                said = [f"{type(fake).__name__}: {str(fake).splitlines()[0][:100] if str(fake) else ''}"]
            else:
                said = differences((out, places), fake)
        self.found += [(str(func), text, one) for one in said]
        return out


def _places(arguments: Any) -> dict[int, int]:
    tensors = [t for t in tensors_in(arguments) if t.layout is torch.strided]
    return {storage_key_of(t): place for place, t in reversed(list(enumerate(tensors)))}


def differences(real: tuple[Any, dict[int, int]], fake: tuple[Any, dict[int, int]]) -> list[str]:
    """Return how a fake operator's outputs differ from the real one's; each with the places of inputs' storages."""
    pairs = [[(form(t, places), place) for place, t in enumerate(tensors_in(out))] for out, places in (real, fake)]
    if len(pairs[0]) != len(pairs[1]):
        return [f"{len(pairs[0])} outputs, fake {len(pairs[1])}"]
    said = []
    for (one, place), (other, _) in zip(*pairs, strict=True):
        parts = [f"{key} {value}, fake {other.get(key)}" for key, value in one.items() if value != other.get(key)]
        if parts:
            said.append(f"output {place}: {'; '.join(parts)}")
    return said


def form(tensor: torch.Tensor, places: dict[int, int]) -> dict[str, Any]:
    """Return what a tensor is: strides of dimensions of one element don't count, nor sizes of inputs' storages."""
    found: dict[str, Any] = {"layout": tensor.layout, "dtype": tensor.dtype, "shape": tuple(tensor.shape)}
    if tensor.layout is not torch.strided:
        return found
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    found["stride"] = tuple(stride for stride, size in pairs if size > 1) if tensor.numel() else ()
    found["offset"], found["input"] = int(tensor.storage_offset()), places.get(storage_key_of(tensor))
    if found["input"] is None:
        found["nbytes"] = tensor.untyped_storage().nbytes()
    return found


@dataclass
class Peaks:
    """What a sample allocates at its peak, forward and backward: predicted and measured."""

    predicted_bytes: int
    measured_bytes: int


class Whole:
    """Samples run without any mode, and as memfit captures them."""

    def __init__(self) -> None:
        self.workspaces: dict[str, int] = {}

    def peaks(self, sample: Sample) -> Peaks:
        """Return the predicted and the measured peak of a sample."""
        with allocated() as meter:
            kept = _both_passes(sample, sample.arguments)
        del kept
        return Peaks(self._predicted(sample), meter.peak_bytes)

    def _predicted(self, sample: Sample) -> int:
        mode = CachedFakeTensorMode(allow_non_fake_inputs=True)
        values, recorder = KnownValues.of(mode), Recorder(mode)
        faker = Faker(values)
        arguments = mapped(lambda t: faker(t.detach()).requires_grad_(t.requires_grad), sample.arguments)
        threads = torch.autograd.set_multithreading_enabled(False)
        with threads, mode, values, recorder, composites_without_mode(), recorder.unseen():
            for tensor in tensors_in(arguments):
                recorder.observe(tensor, -1)
            recorder.begin_step()
            recorder.enter_phase("forward", 0)
            out = sample.run(arguments)
            recorder.enter_phase("backward", 0)
            kept = out, backward(out, arguments, sample.layout)
            recording = recorder.end_step()
        del out, kept
        return self._peak_of(recording)

    def _peak_of(self, recording: Any) -> int:
        texts = list(recording.signatures)
        missing = [text for text in texts if text not in self.workspaces]
        runs = first_runs(missing) if missing else {}
        self.workspaces |= {text: runs[text].workspace_bytes if text in runs else 0 for text in missing}
        changes = [0] * (len(recording.ops) + 2)
        for storage in recording.storages:
            if storage.birth >= 0:
                changes[storage.birth] += storage.nbytes
                changes[max(storage.death, storage.birth) + 1] -= storage.nbytes
        live = peak = 0
        for position, op in enumerate(recording.ops):
            live += changes[position]
            peak = max(peak, live + self.workspaces[texts[op.signature]])
        return peak


def _both_passes(sample: Sample, arguments: Any) -> Any:
    out = sample.run(arguments)
    return out, backward(out, arguments, sample.layout)


def compared(sample: Sample, operators: Operators, again: Callable[[], Sample] | None = None) -> None:
    """Run a sample, with each of its operators compared."""
    with operators:
        _both_passes(sample, sample.arguments)
