"""The description of the user's own training step."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import nn

from memfit._torch import FakeTensor
from memfit.errors import WorkloadError
from memfit.foundations import constructor
from memfit.workload.batch import batch_size_of, samples_in, slice_batch, tensors_of

Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor | int | float]
"""The result of a `loss_fn`: a scalar mean, or a sum and the count to divide it by."""


@constructor
@dataclass(frozen=True)
class LossScaling:
    """The loss scaling of 16-mixed steps. Scales may be any number above 0; powers of two cause no rounding.

    Args:
        initial: The initial loss scale.
        growth_interval: Consecutive updates without overflow after which the scale grows (> 0); None keeps it at
            `initial` (static scaling).
        growth_factor: Factor by which it grows (≥ 1).
        backoff_factor: Factor by which it shrinks when gradients overflow (< 1).
        floor: Lower limit of the scale.
        ceiling: Upper limit of the scale.
        max_skips: Consecutive skipped updates after which training stops with an error (> 0).

    Raises:
        WorkloadError: A figure is out of its range.
    """

    initial: float = 2.0**16
    growth_interval: int | None = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    floor: float = 1.0
    ceiling: float = 2.0**24
    max_skips: int = 32

    def __post_init__(self) -> None:
        wrong = {
            "initial": not self.floor <= self.initial <= self.ceiling,
            "growth_interval": self.growth_interval is not None and self.growth_interval < 1,
            "growth_factor": self.growth_factor < 1,
            "backoff_factor": not 0 < self.backoff_factor < 1,
            "floor": self.floor <= 0,
            "max_skips": self.max_skips < 1,
        }
        for name in (name for name, is_wrong in wrong.items() if is_wrong):
            raise WorkloadError(
                f"LossScaling.{name}={getattr(self, name)} is out of its range: give floor <= initial <= ceiling, all"
                " above 0, growth_interval and max_skips of 1 or more, growth_factor of 1 or more, and backoff_factor"
                " between 0 and 1"
            )


@constructor
@dataclass(frozen=True)
class Loop:
    """A description of the user's own training loop, for `memfit.estimate` to predict.

    docs/guides/any-step.md explains how to find the values.

    `Loop()` is a loop that zeroes gradients first and holds nothing: it takes as much memory as memfit's own step,
    which plans always run.

    Args:
        holds_outputs: How long a variable holds the model's outputs and the loss: "" not beyond the loss, "backward"
            through the backward pass, "step" to the end of the step (a function that returns then), "next-forward"
            until the next step's forward pass replaces them (a script's `out = model(x)`).
        zero_grad: When gradients are zeroed: "before-forward", "after-forward" (just before the backward pass), or
            "after-step".
        set_to_none: Whether gradients are dropped, as `zero_grad()` does; False if they are filled with zeros.
        retain_graph: Whether `backward(retain_graph=True)` is used: saved tensors live as long as loss or outputs.
        inputs_require_grad: Whether the batch's floating-point tensors require gradients.
        autocast_backward: Whether the backward pass of a mixed precision runs within autocast too.
        scales_loss: Whether 16-mixed scales the loss; False for fp16 without a scaler.
        cudnn_benchmark: Whether `torch.backends.cudnn.benchmark` is on: convolutions on a GPU take the fastest kernels,
            whatever their workspace. It is unknown without the GPU, so that this only widens the interval.

    Raises:
        WorkloadError: An option has an unknown value.
    """

    holds_outputs: Literal["", "backward", "step", "next-forward"] = ""
    zero_grad: Literal["before-forward", "after-forward", "after-step"] = "before-forward"
    set_to_none: bool = True
    retain_graph: bool = False
    inputs_require_grad: bool = False
    autocast_backward: bool = False
    scales_loss: bool = True
    cudnn_benchmark: bool = False

    def __post_init__(self) -> None:
        known = {
            "holds_outputs": ("", "backward", "step", "next-forward"),
            "zero_grad": ("before-forward", "after-forward", "after-step"),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise WorkloadError(
                    f"Loop.{name}={getattr(self, name)!r} is unknown: use one of {', '.join(map(repr, values))}"
                )


class NoUpdate(torch.optim.Optimizer):
    """A placeholder for a step without an optimizer: it has the parameters and never changes them."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


@constructor
@dataclass(frozen=True, repr=False)
class Workload:
    """One training step, unmodified, with the data, evaluation and schedule for a training run.

    Args:
        model: The model, on the CPU, in training mode.
        batch: One global batch: tensors, in dicts, lists, tuples, dataclasses or other objects. The first dimension
            of each tensor is the sample; a list may have an entry a sample instead (detection targets). A batch whose
            tensors have different numbers of samples, as a graph's nodes and edges, counts as one sample, and is
            not cut into microbatches.
        loss_fn: `loss_fn(model, batch)` returns a scalar tensor that is a mean over the samples, or
            `(sum, count)` when the loss is normalised by tokens or voxels. It must reach the parameters through its
            `model` argument. Other tensors that it holds, such as a teacher in its closure, count, and are copied with
            the model where memfit runs the step by itself.
        optimizer: An optimizer over the model's parameters; None for a step that updates nothing.
        name: Name in reports.
        batches: Training data: an iterable of batches shaped like `batch`, iterated once an epoch.
            If it has `state_dict()` and `load_state_dict()`, resuming uses them to restore the
            position; else resuming skips used batches. None trains on `batch`.
        evaluate: `evaluate(model)` returns named metrics. It runs in evaluation mode without gradients.
        scheduler: A learning-rate scheduler, stepped once after every optimizer update.
        max_grad_norm: Global gradient norm to clip to (> 0), or None not to clip.
        loss_scaling: Loss scaling of the precision 16-mixed.
        bf16_updates: Weight updates of the precision bf16-true: "master-weights" (fp32 copies) or
            "stochastic-rounding"; None refuses that precision, since bf16 weights alone lose small updates.
        fp32_modules: Patterns of FQNs ("head", "blocks.*.norm1"): these modules, and those inside them, compute in
            fp32 under mixed precisions and bf16-true.
        values: Values that code reads from tensors with `item()` and the like, by the reading line ("train.py:42"), for
            predictions. Without them predictions run the step with data, or try both outcomes where they can't.
        batch_size: Number of samples in a batch whose tensors don't show it, or a function `batch_size(batch)`: 1 for
            batches that must not be cut, the number of graphs with `split`. A number holds for every batch. None to
            count the samples.
        split: `split(batch, start, stop)` returns the samples from `start` up to `stop` of a batch that memfit can't
            cut by itself. None to slice its tensors.
        loop: The user's own loop, which `memfit.estimate` then predicts; None for memfit's own step.

    Raises:
        WorkloadError: A field is of another kind than it must be.
    """

    model: nn.Module
    batch: Any
    loss_fn: Callable[[nn.Module, Any], Loss]
    optimizer: torch.optim.Optimizer  # `NoUpdate` where None is given
    name: str = "workload"
    batches: Iterable[Any] | None = None
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    max_grad_norm: float | None = None
    loss_scaling: LossScaling = LossScaling()
    bf16_updates: Literal["master-weights", "stochastic-rounding"] | None = None
    fp32_modules: tuple[str, ...] = ()
    values: Mapping[str, bool | int | float] = field(default_factory=dict)
    batch_size: int | Callable[[Any], int] | None = None
    split: Callable[[Any, int, int], Any] | None = None
    loop: Loop | None = None
    batch_varies: ClassVar[bool] = False
    """Whether a plan is also for batches of other shapes: of a loop, each call is held against the plan."""

    def __post_init__(self) -> None:
        _check_order(self)
        if self.optimizer is None:
            object.__setattr__(self, "optimizer", NoUpdate(self.model.parameters()))
        _check_fields(self)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.model.parameters())
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(self.batch)[:3])
        optimizer = type(self.optimizer).__name__
        return (
            f"<Workload {self.name!r}: {type(self.model).__name__} with {count:,} parameters, batch of {shapes},"
            f" {optimizer}>"
        )


def _check_order(workload: Workload) -> None:
    """Check the kinds of the four arguments that are given by position, and say which of them are swapped."""
    given = {
        "model": (workload.model, _model_remedy),
        "batch": (workload.batch, _batch_remedy),
        "loss_fn": (workload.loss_fn, _loss_remedy),
        "optimizer": (workload.optimizer, _optimizer_remedy),
    }
    remedies = {name: remedy for name, (value, remedy_of) in given.items() if (remedy := remedy_of(value))}
    if workload.batch is None and workload.batch_size is not None:  # a `loss_fn` that makes its own data
        remedies.pop("batch")
    for name in remedies:
        other = _role(given[name][0])
        if other != name and other in remedies:
            raise WorkloadError(
                f"Workload.{name} is {described(given[name][0])}, and Workload.{other} is"
                f" {described(given[other][0])}: write Workload(model, batch, loss_fn, optimizer) in this order"
            )
    for name, remedy in remedies.items():
        raise WorkloadError(f"Workload.{name} is {described(given[name][0])}{remedy}")


def _role(value: object) -> str:
    """Return the argument that a value is for; "" where that is not plain."""
    if isinstance(value, nn.Module):
        return "loss_fn" if _is_criterion(value) else "model"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if inspect.isroutine(value):
        return "loss_fn"
    return "batch" if isinstance(value, torch.Tensor | Mapping | list | tuple) else ""


# What is wrong with each of the four, as the end of a sentence; "" where nothing is.


def _model_remedy(model: object) -> str:
    if isinstance(model, nn.Module):
        return ""
    if isinstance(model, type) and issubclass(model, nn.Module):
        return f"; create it: model = {model.__name__}(...)"
    return ": give the torch.nn.Module that trains. A function goes into forward() of such a class"


def _batch_remedy(batch: object) -> str:
    if batch is None:
        return ": give one batch, such as next(iter(loader)). If loss_fn makes its own data, give Workload.batch_size=1"
    if isinstance(batch, torch.utils.data.DataLoader):
        return "; take one batch: next(iter(loader)). The loader itself goes into batches="
    if isinstance(batch, torch.utils.data.Dataset):
        return "; take one batch of its DataLoader: next(iter(loader))"
    if hasattr(type(batch), "__next__"):
        return "; take one batch: next(iterator)"
    if inspect.isroutine(batch):
        return f"; take its result: {_name_of(batch)}(...)"
    if isinstance(batch, nn.Module | torch.optim.Optimizer | type):
        return ": give the tensors of one batch, in the form that loss_fn(model, batch) reads"
    return ""


_OUTPUTS = ("input", "inputs", "output", "outputs", "logits", "pred", "preds", "prediction", "predictions", "y_pred")
_TARGETS = ("target", "targets", "label", "labels", "y_true")


def _loss_remedy(loss_fn: object) -> str:
    called: Any = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = inspect.signature(called)
    except (TypeError, ValueError):  # nothing to call, or not written in Python
        parameters = None
    names = [] if parameters is None else list(parameters.parameters)
    takes_output = len(names) > 1 and names[0] in _OUTPUTS and names[1] in _TARGETS
    if _is_criterion(loss_fn) or takes_output:
        name = loss_fn.__name__ if isinstance(loss_fn, type) else _name_of(loss_fn)
        call = f"{name}()" if isinstance(loss_fn, nn.Module | type) else name
        home = ("nn." if call != name else "F.") if _is_criterion(loss_fn) else ""
        return (
            ", which takes (output, target). memfit calls loss_fn(model, batch): write"
            f" loss_fn=lambda model, batch: {home}{call}(model(batch[0]), batch[1])"
        )
    if isinstance(loss_fn, type) or not callable(loss_fn):
        return ": give a function loss_fn(model, batch) that returns the loss"
    try:
        if parameters is not None:
            parameters.bind(None, None)
    except TypeError:
        return f", which takes {parameters}. memfit calls loss_fn(model, batch): give a function of these two"
    return ""


def _is_criterion(value: object) -> bool:
    """Tell whether a value is one of PyTorch's losses, of an output and a target."""
    kind = value if isinstance(value, type) else type(value)
    of_loss = issubclass(kind, nn.Module) and kind.__module__ == "torch.nn.modules.loss"
    return of_loss or (inspect.isroutine(value) and getattr(value, "__module__", "") == "torch.nn.functional")


def _optimizer_remedy(optimizer: object) -> str:
    if isinstance(optimizer, type):
        return f"; create it: {optimizer.__name__}(model.parameters())"
    missing = [name for name in ("step", "param_groups", "state") if not hasattr(optimizer, name)]
    if optimizer is None or not missing:
        return ""
    if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
        return ": give its optimizer as optimizer=, and the scheduler as scheduler="
    if "step" not in missing:
        return f" without {', '.join(missing)}: give the torch.optim.Optimizer in it"
    return ": give a torch.optim.Optimizer, such as torch.optim.AdamW(model.parameters())"


def _check_fields(workload: Workload) -> None:
    """Check the kinds of a workload's other fields, so that none is found wrong after minutes of planning."""

    def is_iterable(value: object) -> bool:
        """Tell whether `iter` takes a value: by its class, so that nothing of the user's runs."""
        kind = type(value)
        return not isinstance(value, type) and (hasattr(kind, "__iter__") or hasattr(kind, "__getitem__"))

    def steps_alone(scheduler: object) -> bool:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        return callable(getattr(scheduler, "step", None)) and not isinstance(scheduler, plateau | type)

    checks: dict[str, tuple[Callable[[Any], bool], str]] = {  # of what is given: None may be where it is the default
        "name": (lambda value: isinstance(value, str), "give a text"),
        "batches": (
            is_iterable,
            "give an iterable that is iterated once an epoch: a list, a DataLoader, an object with __iter__. Call a"
            " function that yields batches; for several epochs put its code into __iter__ of a class",
        ),
        "evaluate": (callable, "give a function evaluate(model), or None"),
        "scheduler": (steps_alone, "give a learning-rate scheduler whose step() takes no metric, or None"),
        "max_grad_norm": (
            lambda value: not isinstance(value, bool | str) and value > 0,
            "give a number > 0, or None",
        ),
        "loss_scaling": (lambda value: isinstance(value, LossScaling), "give memfit.LossScaling(...)"),
        "bf16_updates": (
            lambda value: value in ("master-weights", "stochastic-rounding"),
            "give 'master-weights', 'stochastic-rounding', or None",
        ),
        "fp32_modules": (
            lambda value: not isinstance(value, str) and is_iterable(value),
            "give a tuple of patterns, ('head',) for one",
        ),
        "values": (lambda value: isinstance(value, Mapping), "give a dict from reading lines to values"),
        "batch_size": (
            lambda value: callable(value) or (isinstance(value, int) and not isinstance(value, bool)),
            "give a whole number, a function batch_size(batch), or None",
        ),
        "split": (callable, "give a function split(batch, start, stop), or None"),
        "loop": (lambda value: isinstance(value, Loop), "give memfit.Loop(...), or None"),
    }
    for name, (is_right, remedy) in checks.items():
        value = getattr(workload, name)
        if not (value is None and getattr(Workload, name, ...) is None) and not is_right(value):
            raise WorkloadError(f"Workload.{name} is {described(value)}: {remedy}")


def described(value: object) -> str:
    """Return what a value is, in a few words for an error."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return "a lambda" if _name_of(value) == "<lambda>" else f"the function {_name_of(value)}"
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module) and not _is_criterion(value):
        return f"the model {kind}"
    if isinstance(value, torch.optim.Optimizer):
        return f"the optimizer {kind}"
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return f"the scheduler {kind}"
    if isinstance(value, str | int | float | None):
        return repr(value)
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def _name_of(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


class StepProgram(Protocol):
    """The interface of a training step that `capture` can run and watch.

    Attributes:
        on_phase: Called with the phase that begins ("forward", "backward", "optimizer") and the
            index of the microbatch, or None.
        buckets: What gradients are sent in to other ranks, where an engine holds that between steps; known in captures.
        held_bytes: Bytes of that.
    """

    workload: Workload
    on_phase: Callable[[Any, int], None] | None

    @property
    def buckets(self) -> list[torch.Tensor]: ...

    @property
    def held_bytes(self) -> int: ...

    def __call__(self, batch: Any) -> Any:
        """Run one optimizer update on a global batch."""

    def split(self, batch: Any) -> list[Any]:
        """Return the microbatches of a global batch."""

    def compute_loss(self, microbatch: Any) -> Any:
        """Run the forward pass as the step does."""

    def drop_forward(self) -> None:
        """Make the model ready for another forward pass, after one without a backward pass."""


def samples_of(workload: Workload, batch: Any = None) -> int:
    """Return the number of samples of a batch, by default the workload's: by `Workload.batch_size`, else by tensors.

    It is 1 for a batch that can't be cut into microbatches.

    Raises:
        WorkloadError: The batch has no samples, or can't be cut into `Workload.batch_size` samples.
    """
    batch = workload.batch if batch is None else batch
    given = workload.batch_size
    if given is None:
        return batch_size_of(batch)
    size = int(given(batch) if callable(given) else given)
    if size < 1:
        raise WorkloadError(f"Workload.batch_size={size} is not above 0: give the number of samples, or None")
    if size > 1 and workload.split is None and (found := samples_in(batch)) != size:
        have = "different first dimensions" if found is None else f"{found} samples"
        raise WorkloadError(
            f"Workload.batch_size={size}, and the tensors of Workload.batch have {have}: give Workload.split"
            " to cut the batch, or batch_size=1 to leave it whole"
        )
    return size


def has_data(workload: Workload) -> bool:
    """Tell whether all of a workload's tensors hold values: none is fake, or on the meta device."""
    tensors = [*workload.model.parameters(), *workload.model.buffers(), *tensors_of(workload.batch)]
    return not any(isinstance(t, FakeTensor) or t.device.type == "meta" for t in tensors)


def part_of(workload: Workload, batch: Any, start: int, stop: int) -> Any:
    """Return the samples from `start` up to `stop` of a batch of a workload.

    Raises:
        WorkloadError: The batch can't be cut.
    """
    return slice_batch(batch, start, stop) if workload.split is None else workload.split(batch, start, stop)


def uncut_note(workload: Workload) -> str | None:
    """Return a note on a batch that counts as one sample since it can't be cut; None for other batches."""
    if workload.batch_size is not None or samples_in(workload.batch) is not None:
        return None
    shapes = [tuple(t.shape) for t in tensors_of(workload.batch)]
    shown = ", ".join(map(str, shapes[:4])) + (", ..." if len(shapes) > 4 else "")
    return (
        f"the batch counts as one sample, and is not cut into microbatches: its tensors have different first"
        f" dimensions ({shown}), as a graph's have. Figures per sample are figures per batch. To cut it, give"
        " Workload.batch_size and Workload.split"
    )


def is_in_fp32(workload: Workload) -> bool:
    """Tell whether a model's weights are all in fp32, as those of a step that can be trained in mixed precision."""
    return {p.dtype for p in workload.model.parameters() if p.is_floating_point()} <= {torch.float32}


def precision_label(workload: Workload, precision: str) -> str:
    """Return the usual name of a step's precision, such as "pure bfloat16" for a model built in 16 bits."""
    dtypes = {p.dtype for p in workload.model.parameters() if p.is_floating_point()}
    if precision != "32-true" or dtypes <= {torch.float32}:
        return precision
    names = " and ".join(sorted(str(dtype)[6:] for dtype in dtypes))
    return f"pure {names}" if len(dtypes) == 1 else f"weights in {names}"


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, or of the one that it stands for in a step that ranks share."""
    name: str = getattr(type(module), "memfit_stands_for", type(module).__qualname__)
    return name


def fingerprint(workload: Workload) -> str:
    """Return a hash of a workload's modules, parameters and buffers with their ties, batch shapes, and optimizer.

    Values play no part: a workload keeps its fingerprint while it trains.
    """
    model = workload.model
    parts = [f"{name}:{class_name(module)}" for name, module in model.named_modules()]
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    for name, t in named:
        if hasattr(t, "memfit_made"):  # by a step, beside what the model has
            continue
        dtype = getattr(t, "memfit_dtype", t.dtype)  # the original one of weights that a step holds in another
        parts.append(f"{name}={first.setdefault(id(t), name)}:{tuple(t.shape)}:{dtype}:{t.requires_grad}")
    if not workload.batch_varies:
        parts += [f"batch:{tuple(t.shape)}:{t.dtype}" for t in tensors_of(workload.batch)]
    parts.append(getattr(workload.optimizer, "memfit_stands_for", type(workload.optimizer).__qualname__))
    parts += [f"{what}" for what in (workload.bf16_updates, workload.fp32_modules) if what]
    parts += [f"batch_size:{samples_of(workload)}"] if workload.batch_size is not None else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
