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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memfit.errors import WorkloadError
from memfit.levers import cast
from memfit.structure.proposal import changeable_copy, forward_pass, replace_parameters
from memfit.structure.targets import Targets, logits_of
from memfit.workload import Loss, Workload, batch_size_of, slice_batch


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
    copied = changeable_copy(workload)
    targets = None if isinstance(teacher, nn.Module) else Targets(Path(teacher), workload)
    if isinstance(teacher, nn.Module):
        projections = _projections(workload, teacher, features or {}, channel_dim)
        frozen_teacher = copy.deepcopy(teacher).to(dtype=teacher_dtype).requires_grad_(False)
        model = Distilled(
            copied.model, frozen_teacher, features or {}, projections, teacher_microbatch_size, teacher_dtype
        )
        copied.optimizer.param_groups[0]["params"].extend(projections.parameters())
    else:
        if features:
            raise WorkloadError("features= needs the teacher's model as teacher=: a file of outputs has no features")
        model = Distilled(copied.model)
    own = (copied.loss_fn, temperature, weight, feature_weight, channel_dim)
    distilled = dataclasses.replace(
        copied if targets is None else targets.joined(copied),
        model=model,
        loss_fn=DistillationLoss(*own, is_precomputed=targets is not None),
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
        with model.watched() as seen:
            loss = self.loss_fn(model, given)
        taught = self._taught(model, seen, targets)
        own = 1 - self.weight
        if isinstance(loss, tuple):
            return own * loss[0] + taught * loss[1], loss[1]
        return own * loss + taught

    def _taught(self, model: Distilled, seen: Outputs, targets: Tensor | None) -> Tensor:
        if not seen.outputs or (targets is not None and len(seen.outputs) > 1):
            raise WorkloadError(
                f"Workload.loss_fn called the model {len(seen.outputs)} times: it must call the model at least once,"
                " and exactly once if teacher= is a file of outputs"
            )
        pairs = [(ours, theirs if targets is None else targets) for ours, theirs in seen.outputs]
        soft = [
            softened_loss(logits_of(ours), theirs, temperature=self.temperature, channel_dim=self.channel_dim)
            for ours, theirs in pairs
            if theirs is not None
        ]
        total = torch.stack(soft).mean() * self.weight
        for ours, theirs in seen.features(model):
            total = total + self.feature_weight * F.mse_loss(ours.float(), theirs.float())
        return total


class Outputs:
    """Outputs of a student and its teacher in one loss, by call, and their features, by name."""

    def __init__(self) -> None:
        self.outputs: list[tuple[Any, Tensor | None]] = []
        self.noted: dict[str, list[Tensor]] = {}

    def features(self, model: Distilled) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the student's projected features beside the teacher's."""
        for ours, theirs in model.pairs.items():
            student_features, teacher_features = self.noted[f"s.{ours}"], self.noted[f"t.{theirs}"]
            yield model.projections[_key(ours)](torch.cat(student_features)), torch.cat(teacher_features)


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
        self.seen: Outputs | None = None
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
    def watched(self) -> Iterator[Outputs]:
        """Run the teacher with each call, and collect both outputs, until the context is left."""
        self.seen = Outputs()
        try:
            yield self.seen
        finally:
            self.seen = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the student's output."""
        seen = self.seen
        taught = self._teach(args, kwargs) if seen is not None and self.teacher is not None else None
        output = self.student(*args, **kwargs)
        if seen is not None:
            seen.outputs.append((output, taught))
        return output

    @torch.no_grad()
    def _teach(self, args: Any, kwargs: Any) -> Tensor:
        assert self.teacher is not None
        inputs, size = (args, kwargs), batch_size_of((args, kwargs))
        length = self.microbatch_size or size
        context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.dtype is not None:
            device = next(self.teacher.parameters()).device.type
            inputs, context = cast(inputs, self.dtype), torch.autocast(device, enabled=False)
        with context:
            parts = []
            for start in range(0, size, length):
                some, named = inputs if length >= size else slice_batch(inputs, start, start + length)
                parts.append(logits_of(self.teacher(*some, **named)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.seen is not None:
            self.seen.noted.setdefault(name, []).append(output)


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
        projections[_key(name)] = _projection(*channels, len(shape) + 1, channel_dim).to(place.device, place.dtype)
    return projections


def _projection(n_in: int, n_out: int, dimensions: int, channel_dim: int) -> nn.Module:
    if n_in == n_out:
        return nn.Identity()
    if channel_dim in (-1, dimensions - 1):
        return nn.Linear(n_in, n_out, bias=False)
    kinds: dict[int, Callable[..., nn.Module]] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
    return kinds[dimensions](n_in, n_out, 1, bias=False)
