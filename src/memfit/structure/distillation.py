"""Distillation: a small model that learns from a large one as well as from the data.

The distilled workload's model holds both, and its loss runs both, so that prediction and planning count the teacher.
The teacher runs first, without gradients: its activations are freed before the student's forward pass begins. It may
run in microbatches and in 16 bits, or not at all where its outputs were computed before (`precompute`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memfit import ir
from memfit.errors import OutputError, WorkloadError
from memfit.levers import cast
from memfit.structure.proposal import changeable_copy, forward_pass, replace_parameters
from memfit.training import evaluation_mode
from memfit.workload import Loss, Workload, batch_size_of, slice_batch, tensors_of

_KEY_BYTES = 16
_FORMAT = "memfit teacher 1"


def distill(
    workload: Workload,
    teacher: nn.Module | Path | str,
    *,
    temperature: float = 4.0,
    weight: float = 0.5,
    features: Mapping[str, str] | None = None,
    feature_weight: float = 1.0,
    channel_dim: int = 1,
    teacher_microbatch_size: int | None = None,
    teacher_dtype: torch.dtype | None = None,
) -> Workload:
    """Return a workload to train a copy of the model on its own loss and on a teacher's outputs.

    The loss is (1 − weight) · own + weight · softened (`softened_loss`) + feature_weight · the mean squared
    difference of each pair of features (Romero et al. 2015, *FitNets*). `student` gives the student back.

    Args:
        workload: The student's workload, left unchanged. Its loss must call the model it is given.
        teacher: A model with the student's call signature: it is copied, frozen, and kept in evaluation mode. Or the
            file that `precompute` wrote.
        temperature: Temperature that softens the logits (> 0).
        weight: Weight of the teacher's logits against the data, in [0, 1].
        features: FQNs of the student's modules, each with the teacher's module whose output it shall approach. Where
            their channels differ, a linear projection is trained with the student, in the optimizer's first group.
        feature_weight: Weight of each pair of features (≥ 0).
        channel_dim: The dimension of classes and channels: 1 for images, -1 for language.
        teacher_microbatch_size: Samples that the teacher runs at a time (> 0); None for all.
        teacher_dtype: Dtype of the teacher's weights and arithmetic, torch.bfloat16 or torch.float16; None keeps it.

    Raises:
        WorkloadError: An argument is out of its range, a feature is missing or of another resolution than the
            teacher's, or the file was made for another workload.
    """
    if temperature <= 0 or not 0 <= weight <= 1 or feature_weight < 0 or (teacher_microbatch_size or 1) < 1:
        raise WorkloadError(
            f"temperature={temperature}, weight={weight}, feature_weight={feature_weight},"
            f" teacher_microbatch_size={teacher_microbatch_size}: give a temperature above 0, a weight in [0, 1], a"
            " feature_weight of 0 or more, and a teacher_microbatch_size above 0"
        )
    copied, targets = changeable_copy(workload), None
    if isinstance(teacher, nn.Module):
        projections = _projections(workload, teacher, features or {}, channel_dim)
        frozen = copy.deepcopy(teacher).to(dtype=teacher_dtype).requires_grad_(False)
        model = Distilled(copied.model, frozen, features or {}, projections, teacher_microbatch_size, teacher_dtype)
        copied.optimizer.param_groups[0]["params"].extend(projections.parameters())
    else:
        targets = Targets(Path(teacher), workload)
        if features:
            raise WorkloadError("features= needs the teacher's model as teacher=: a file of outputs has no features")
        model = Distilled(copied.model)
    distilled = dataclasses.replace(
        copied if targets is None else targets.joined(copied),
        model=model,
        loss_fn=DistillationLoss(
            copied.loss_fn, temperature, weight, feature_weight, channel_dim, is_precomputed=targets is not None
        ),
        evaluate=None if copied.evaluate is None else functools.partial(_of_student, copied.evaluate),
        fp32_modules=tuple(f"student.{pattern}".rstrip(".") for pattern in copied.fp32_modules),
        name=f"{copied.name}, distilled",
    )
    replace_parameters(distilled, {})
    return distilled


def student(distilled: Workload, original: Workload) -> Workload:
    """Return the original workload with the trained student as its model.

    Args:
        distilled: The result of `distill(original, ...)`. Its optimizer becomes the student's, without the projections.
        original: The workload whose loss, data and evaluation are taken.
    """
    model = distilled.model
    if not isinstance(model, Distilled):
        raise WorkloadError(
            f"distilled.model is a {type(model).__name__}: give the workload that memfit.structure.distill returned"
        )
    workload = dataclasses.replace(
        original, model=model.student, optimizer=distilled.optimizer, scheduler=distilled.scheduler
    )
    replace_parameters(workload, {parameter: [] for parameter in model.projections.parameters()})
    return workload


def softened_loss(student: Tensor, teacher: Tensor, *, temperature: float = 4.0, channel_dim: int = 1) -> Tensor:
    """Return the KL divergence of a student's softened class distribution from a teacher's, a mean over positions.

    T² · KL(softmax(teacher / T) ‖ softmax(student / T)), whose gradients are of a size for every temperature T (Hinton,
    Vinyals and Dean 2015, *Distilling the Knowledge in a Neural Network*, section 2.1).

    Args:
        student: The student's logits.
        teacher: The teacher's logits, of the same shape.
        temperature: T (> 0).
        channel_dim: The dimension of the classes.
    """
    ours = F.log_softmax(student.float() / temperature, dim=channel_dim)
    theirs = F.log_softmax(teacher.float() / temperature, dim=channel_dim)
    places = student.numel() // student.shape[channel_dim]
    return F.kl_div(ours, theirs, reduction="sum", log_target=True) * (temperature**2 / places)


@dataclass(frozen=True)
class DistillationLoss:
    """The loss of a distilled workload; see `distill`.

    A loss that is a sum and a count stays one: the teacher's mean over positions is multiplied by that count.
    """

    loss_fn: Callable[[nn.Module, Any], Loss]
    temperature: float
    weight: float
    feature_weight: float
    channel_dim: int
    is_precomputed: bool

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        assert isinstance(model, Distilled)
        given, targets = (batch["batch"], batch["teacher"]) if self.is_precomputed else (batch, None)
        with model.watched() as (outputs, features):
            loss = self.loss_fn(model, given)
        if not outputs or (targets is not None and len(outputs) > 1):
            raise WorkloadError(
                f"Workload.loss_fn called the model {len(outputs)} times: it must call the model at least once,"
                " and exactly once if teacher= is a file of outputs"
            )
        soft = [
            softened_loss(logits_of(ours), taught, temperature=self.temperature, channel_dim=self.channel_dim)
            for ours, theirs in outputs
            if (taught := theirs if targets is None else targets) is not None
        ]
        total = torch.stack(soft).mean() * self.weight
        for name, teacher_name in model.pairs.items():
            ours = model.projections[_key(name)](torch.cat(features[f"s.{name}"]))
            theirs = torch.cat(features[f"t.{teacher_name}"])
            total = total + self.feature_weight * F.mse_loss(ours.float(), theirs.float())
        own = 1 - self.weight
        if isinstance(loss, tuple):
            return own * loss[0] + total * loss[1], loss[1]
        return own * loss + total


_Seen = tuple[list[tuple[Any, Tensor | None]], dict[str, list[Tensor]]]


class Distilled(nn.Module):
    """A student with its teacher. It returns the student's outputs; while it is watched, the teacher runs first.

    Args:
        teacher: The frozen teacher; None where its outputs are in the batch.
        pairs: FQNs of the student's feature modules, with the teacher's.
        projections: Projections of the student's features, by FQN with dashes for dots.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module | None = None,
        pairs: Mapping[str, str] | None = None,
        projections: nn.ModuleDict | None = None,
        microbatch_size: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        self.projections = projections or nn.ModuleDict()
        self.pairs, self.microbatch_size, self.dtype = dict(pairs or {}), microbatch_size, dtype
        self.seen: _Seen | None = None
        for ours, theirs in self.pairs.items():
            assert teacher is not None
            student.get_submodule(ours).register_forward_hook(functools.partial(self._note, f"s.{ours}"))
            teacher.get_submodule(theirs).register_forward_hook(functools.partial(self._note, f"t.{theirs}"))
        self.train(student.training)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the student, which a loss may use."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            student = self.__dict__.get("_modules", {}).get("student")
            if student is None:
                raise
            return getattr(student, name)

    def train(self, mode: bool = True) -> Distilled:
        """Set the student's mode; the teacher stays in evaluation mode."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    @contextlib.contextmanager
    def watched(self) -> Iterator[_Seen]:
        """Run the teacher with each call, and collect both outputs, by call, and features, by name, until left."""
        self.seen = ([], {})
        try:
            yield self.seen
        finally:
            self.seen = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the student's output."""
        if self.seen is None:
            return self.student(*args, **kwargs)
        outputs, _ = self.seen
        taught = None if self.teacher is None else self._teach(self.teacher, args, kwargs)
        output = self.student(*args, **kwargs)
        outputs.append((output, taught))
        return output

    @torch.no_grad()
    def _teach(self, teacher: nn.Module, args: Any, kwargs: Any) -> Tensor:
        inputs, size = (args, kwargs), batch_size_of((args, kwargs))
        length = self.microbatch_size or size
        context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.dtype is not None:
            device = next(teacher.parameters()).device.type
            inputs, context = cast(inputs, self.dtype), torch.autocast(device, enabled=False)
        with context:
            parts = []
            for start in range(0, size, length):
                some, named = inputs if length >= size else slice_batch(inputs, start, start + length)
                parts.append(logits_of(teacher(*some, **named)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.seen is not None:
            self.seen[1].setdefault(name, []).append(output)


def _of_student(evaluate: Callable[[nn.Module], Mapping[str, float]], model: nn.Module) -> Mapping[str, float]:
    return evaluate(model.student if isinstance(model, Distilled) else model)


def _key(name: str) -> str:
    return name.replace(".", "-")


def _projections(workload: Workload, teacher: nn.Module, pairs: Mapping[str, str], channel_dim: int) -> nn.ModuleDict:
    """Return a projection of each feature of the student to the teacher's number of channels."""
    projections = nn.ModuleDict()
    if not pairs:
        return projections
    ours, theirs = (forward_pass(dataclasses.replace(workload, model=m)).outputs for m in (workload.model, teacher))
    place = next(workload.model.parameters())
    for name, teacher_name in pairs.items():
        if name not in ours or teacher_name not in theirs:
            who = "student" if name not in ours else "teacher"
            raise WorkloadError(
                f"features={{{name!r}: {teacher_name!r}}}: the {who} has no module of this name that returns a tensor"
            )
        shape, teacher_shape = list(ours[name][0]), list(theirs[teacher_name][0])
        channels = shape.pop(channel_dim), teacher_shape.pop(channel_dim)
        if shape != teacher_shape:
            raise WorkloadError(
                f"features={{{name!r}: {teacher_name!r}}}: shapes {[*ours[name][0]]} and {[*theirs[teacher_name][0]]}"
                f" differ in more than channel_dim={channel_dim}: choose modules of the same resolution"
            )
        projection: nn.Module = nn.Identity()
        if channels[0] != channels[1]:
            kinds: dict[int, Callable[..., nn.Module]] = {2: nn.Conv1d, 3: nn.Conv2d, 4: nn.Conv3d}
            is_last = channel_dim in (-1, len(shape))
            projection = nn.Linear(*channels, bias=False) if is_last else kinds[len(shape)](*channels, 1, bias=False)
        projections[_key(name)] = projection.to(place.device, place.dtype)
    return projections


# The file of a teacher's outputs


def precompute(
    workload: Workload,
    teacher: nn.Module,
    path: Path | str,
    *,
    batches: Iterable[Any] | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a teacher's outputs on the data: `distill(workload, path)` then trains without the teacher.

    A file that already holds this teacher's outputs for such data is left as it is.

    Args:
        workload: A workload whose loss calls the teacher in place of its own model. Nothing of it is changed.
        teacher: The teacher; it runs in evaluation mode, without gradients, and is left unchanged.
        path: The file, written whole or not at all.
        batches: Every sample that training will see, in any order; `Workload.batches` by default, an epoch of it, and
            `Workload.batch`. Mind loaders that drop the last batch.
        dtype: Dtype that outputs are stored in; None keeps theirs.
        overwrite: Whether to replace another file.

    Raises:
        OutputError: The file holds something else, or can't be written.
        WorkloadError: The loss does not call its model exactly once, for an output with a row for each sample.
    """
    path, wanted = Path(path), {"format": _FORMAT, "teacher": _fingerprint(teacher), "samples": _signature(workload)}
    if path.exists() and not overwrite:
        if _metadata(path) == wanted:
            return path
        raise OutputError(f"{path} exists, without this teacher's outputs: give overwrite=True to replace it")
    rows: dict[bytes, Tensor] = {}
    outputs: list[Any] = []
    noting = teacher.register_forward_hook(lambda module, args, output: outputs.append(output))
    with evaluation_mode(teacher), noting:
        for batch in (workload.batch, *((workload.batches or ()) if batches is None else batches)):
            outputs.clear()
            workload.loss_fn(teacher, batch)
            if len(outputs) != 1 or logits_of(outputs[0]).shape[0] != batch_size_of(batch):
                raise WorkloadError(
                    "Workload.loss_fn must call the model exactly once, and its output must have a row for each sample"
                )
            for key, row in zip(keys(batch), logits_of(outputs[0]), strict=True):
                rows[key] = row.cpu() if dtype is None else row.to("cpu", dtype)
    sample_keys = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), _KEY_BYTES)
    tensors = {"keys": sample_keys, "outputs": torch.stack(list(rows.values()))}
    return ir.codec.write_atomic(path, safetensors.torch.save(tensors, metadata=wanted))


class Targets:
    """A file of a teacher's outputs that `precompute` wrote, in memory.

    Args:
        workload: The workload whose samples it shall hold.

    Raises:
        WorkloadError: The file can't be read, or was made for samples of other shapes.
    """

    def __init__(self, path: Path, workload: Workload) -> None:
        metadata, wanted = _metadata(path), _signature(workload)
        if metadata is None or metadata.get("format") != _FORMAT:
            raise WorkloadError(
                f"teacher={str(path)!r} was not written by memfit.structure.precompute: give a file from precompute"
            )
        if metadata["samples"] != wanted:
            raise WorkloadError(
                f"teacher={str(path)!r} has outputs for samples of {metadata['samples']}, and Workload.batch has"
                f" {wanted}: run memfit.structure.precompute for this workload"
            )
        tensors = safetensors.torch.load_file(path)
        self._path, self._outputs = path, tensors["outputs"]
        self._rows = {bytes(key): row for row, key in enumerate(tensors["keys"].numpy())}

    def with_batch(self, batch: Any) -> dict[str, Any]:
        """Return a batch together with the teacher's outputs for it.

        Raises:
            WorkloadError: Some of its samples are not in the file.
        """
        rows = [self._rows.get(key) for key in keys(batch)]
        missing = rows.count(None)
        if missing:
            raise WorkloadError(
                f"{missing} of {len(rows)} samples of a batch are not in {self._path}: they are augmented, or were not"
                " in batches= of memfit.structure.precompute. Give precompute every sample, exactly as in training"
            )
        return {"batch": batch, "teacher": self._outputs[torch.tensor(rows)]}

    def joined(self, workload: Workload) -> Workload:
        """Return a workload whose batches come with the teacher's outputs."""
        batches = None if workload.batches is None else WithTargets(workload.batches, self)
        return dataclasses.replace(workload, batch=self.with_batch(workload.batch), batches=batches)


class WithTargets:
    """Batches with the teacher's outputs; all other attributes are those of the original batches."""

    def __init__(self, batches: Iterable[Any], targets: Targets) -> None:
        self.batches, self.targets = batches, targets

    def __iter__(self) -> Iterator[Any]:
        return map(self.targets.with_batch, self.batches)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in ("batches", "targets"):  # while this is being copied
            raise AttributeError(name)
        return getattr(self.batches, name)


def keys(batch: Any) -> list[bytes]:
    """Return a key for each sample of a batch: a hash of its tensors' values."""
    size = batch_size_of(batch)
    hashes = [hashlib.blake2b(digest_size=_KEY_BYTES) for _ in range(size)]
    for index, digest in enumerate(hashes):
        for tensor in tensors_of(batch if size == 1 else slice_batch(batch, index, index + 1)):
            digest.update(_bytes(tensor).numpy().tobytes())
    return [digest.digest() for digest in hashes]


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output: itself, or its entry or attribute "logits".

    Raises:
        WorkloadError: It has none.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise WorkloadError(f"Workload.model returned {type(output).__name__} without a tensor 'logits' to distill")
    return logits


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _signature(workload: Workload) -> str:
    """Return the shapes and dtypes of a sample."""
    return ", ".join(f"{str(t.dtype)[6:]}{list(t.shape[1:])}" for t in tensors_of(workload.batch))


def _fingerprint(teacher: nn.Module) -> str:
    """Return a hash of the names and values of a teacher's parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in teacher.state_dict().items():
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        digest.update(_bytes(tensor).numpy().tobytes())
    return digest.hexdigest()[:16]


def _metadata(path: Path) -> dict[str, str] | None:
    """Return the metadata of a file; None where it can't be read."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata: dict[str, str] | None = file.metadata()
            return metadata
    except (OSError, safetensors.SafetensorError):
        return None
