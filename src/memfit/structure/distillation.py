"""Distillation: a small model that learns from a large one as well as from the data.

The distilled workload's model holds both, and its loss runs both, so that prediction and planning count the teacher.
The teacher runs first, without gradients: of its activations nothing is left when the student's begin. It may run in
microbatches and in 16 bits, or not at all where what it says was computed before (`precompute`).
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

from memfit.apply.precision import cast
from memfit.errors import WorkloadError
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
    """Return a workload that trains a copy of the user's model on its own loss and on what a teacher says.

    The loss is (1 − weight) · own + weight · softened (`softened_loss`) + feature_weight · the mean squared
    difference of each pair of features (Romero et al. 2015, *FitNets*). `student` gives the student back.

    Args:
        workload: The student's; nothing of it is changed. Its loss must call the model it is given.
        teacher: A model that is called as the student is; it is copied, frozen, and stays in evaluation mode. Or the
            file that `precompute` wrote.
        temperature: That logits are softened with (> 0).
        weight: Of the teacher's logits against the data, in [0, 1].
        features: FQNs of modules of the student, each with one of the teacher whose output it is to come near. Where
            their channels differ, a linear projection is trained with the student, in the optimizer's first group.
        feature_weight: Of each pair of features (≥ 0).
        channel_dim: Where classes and channels are: 1 as in images, -1 as in language.
        teacher_microbatch_size: Samples that the teacher runs at a time (> 0); None for all of the student's.
        teacher_dtype: Of the teacher's weights and arithmetic, `torch.bfloat16` or `torch.float16`; None leaves them.

    Raises:
        WorkloadError: An argument is out of its range, features are not there or of other places than the teacher's,
            or the file is not one for this workload.
    """
    if temperature <= 0 or not 0 <= weight <= 1 or feature_weight < 0 or (teacher_microbatch_size or 1) < 1:
        raise WorkloadError(
            f"temperature={temperature}, weight={weight}, feature_weight={feature_weight} and"
            f" teacher_microbatch_size={teacher_microbatch_size} have to be above 0, in [0, 1], 0 or more, above 0"
        )
    made = changeable_copy(workload)
    targets = None if isinstance(teacher, nn.Module) else Targets(Path(teacher), workload)
    if isinstance(teacher, nn.Module):
        projections = _projections(workload, teacher, features or {}, channel_dim)
        taught = copy.deepcopy(teacher).to(dtype=teacher_dtype).requires_grad_(False)
        model = Distilled(made.model, taught, features or {}, projections, teacher_microbatch_size, teacher_dtype)
        made.optimizer.param_groups[0]["params"].extend(projections.parameters())
    else:
        if features:
            raise WorkloadError("features= needs the teacher itself: a file of its outputs holds no features")
        model = Distilled(made.model)
    own = (made.loss_fn, temperature, weight, feature_weight, channel_dim)
    distilled = dataclasses.replace(
        made if targets is None else targets.joined(made),
        model=model,
        loss_fn=DistillationLoss(*own, is_precomputed=targets is not None),
        evaluate=None if made.evaluate is None else functools.partial(_of_student, made.evaluate),
        fp32_modules=tuple(f"student.{pattern}".rstrip(".") for pattern in made.fp32_modules),
        name=f"{made.name}, distilled",
    )
    replace_parameters(distilled, {})
    return distilled


def student(distilled: Workload, original: Workload) -> Workload:
    """Return the workload of a distilled model's student alone: the original's, with the model and optimizer trained.

    Args:
        distilled: What `distill` made of `original`. Its optimizer becomes the student's, and loses the projections.
        original: For its loss, data and evaluation.
    """
    model = distilled.model
    if not isinstance(model, Distilled):
        raise WorkloadError(f"distilled.model is a {type(model).__name__}: give what memfit.structure.distill returned")
    alone = dataclasses.replace(
        original, model=model.student, optimizer=distilled.optimizer, scheduler=distilled.scheduler
    )
    replace_parameters(alone, {parameter: [] for parameter in model.projections.parameters()})
    return alone


def softened_loss(student: Tensor, teacher: Tensor, *, temperature: float = 4.0, channel_dim: int = 1) -> Tensor:
    """Return how far a student's distribution over classes is from a teacher's, both softened: a mean over places.

    T² · KL(softmax(teacher / T) ‖ softmax(student / T)), whose gradients are of a size for every temperature T (Hinton,
    Vinyals and Dean 2015, *Distilling the Knowledge in a Neural Network*, section 2.1).

    Args:
        student: Logits.
        teacher: Logits of the same shape.
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

    A loss that is a sum and a count stays one: the teacher's part is a mean over places, times that count.
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

    def _taught(self, model: Distilled, seen: Seen, targets: Tensor | None) -> Tensor:
        if not seen.outputs or (targets is not None and len(seen.outputs) > 1):
            raise WorkloadError(
                f"Workload.loss_fn called the model {len(seen.outputs)} times: distillation needs it to be called, and"
                " once where the teacher's outputs come from a file"
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


class Seen:
    """What a student and its teacher made in one loss: outputs by call, and features by name."""

    def __init__(self) -> None:
        self.outputs: list[tuple[Any, Tensor | None]] = []
        self.noted: dict[str, list[Tensor]] = {}

    def features(self, model: Distilled) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the student's projected features beside the teacher's."""
        for ours, theirs in model.pairs.items():
            left, right = (torch.cat(self.noted[f"{who}.{name}"]) for who, name in (("s", ours), ("t", theirs)))
            yield model.projections[_key(ours)](left), right


class Distilled(nn.Module):
    """A student with its teacher. Called, it answers as the student; while it is watched, the teacher answers first.

    Args:
        student: The model that is trained.
        teacher: Frozen; None where its outputs are in the batch.
        pairs: FQNs of features.
        projections: Of the student's features, by FQN with dashes for dots.
        microbatch_size: Samples that the teacher runs at a time; None for all.
        dtype: That the teacher's inputs are cast to; None leaves them.
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
        self.seen: Seen | None = None
        for ours, theirs in self.pairs.items():
            assert teacher is not None
            student.get_submodule(ours).register_forward_hook(functools.partial(self._note, f"s.{ours}"))
            teacher.get_submodule(theirs).register_forward_hook(functools.partial(self._note, f"t.{theirs}"))
        self.train(student.training)

    def __getattr__(self, name: str) -> Any:
        """Answer as the student, whose attributes a loss may use."""
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
    def watched(self) -> Iterator[Seen]:
        """Have the teacher answer too, and both watched, until the context is left."""
        self.seen = Seen()
        try:
            yield self.seen
        finally:
            self.seen = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the student returns."""
        seen = self.seen
        taught = self._teach(args, kwargs) if seen is not None and self.teacher is not None else None
        output = self.student(*args, **kwargs)
        if seen is not None:
            seen.outputs.append((output, taught))
        return output

    @torch.no_grad()
    def _teach(self, args: Any, kwargs: Any) -> Tensor:
        assert self.teacher is not None
        given, size = (args, kwargs), batch_size_of((args, kwargs))
        length = self.microbatch_size or size
        context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.dtype is not None:
            device = next(self.teacher.parameters()).device.type
            given, context = cast(given, self.dtype), torch.autocast(device, enabled=False)
        with context:
            parts = []
            for start in range(0, size, length):
                some, named = given if length >= size else slice_batch(given, start, start + length)
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
    """Return what maps each feature of the student to as many channels as the teacher's has."""
    made = nn.ModuleDict()
    if not pairs:
        return made
    ours, theirs = (forward_pass(dataclasses.replace(workload, model=m)).outputs for m in (workload.model, teacher))
    place = next(workload.model.parameters())
    for name, other in pairs.items():
        if name not in ours or other not in theirs:
            who = "student" if name not in ours else "teacher"
            raise WorkloadError(f"features={{{name!r}: {other!r}}}: the {who} has no such module that returns a tensor")
        was, wanted = list(ours[name][0]), list(theirs[other][0])
        channels = was.pop(channel_dim), wanted.pop(channel_dim)
        if was != wanted:
            raise WorkloadError(
                f"features={{{name!r}: {other!r}}}: shapes {[*ours[name][0]]} and {[*theirs[other][0]]} differ in"
                f" more than channel_dim={channel_dim}: choose modules of the same resolution"
            )
        made[_key(name)] = _projection(*channels, len(was) + 1, channel_dim).to(place.device, place.dtype)
    return made


def _projection(n_in: int, n_out: int, dimensions: int, channel_dim: int) -> nn.Module:
    if n_in == n_out:
        return nn.Identity()
    if channel_dim in (-1, dimensions - 1):
        return nn.Linear(n_in, n_out, bias=False)
    kinds: dict[int, Callable[..., nn.Module]] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
    return kinds[dimensions](n_in, n_out, 1, bias=False)
