"""The steps that a loop makes, and its plans: made, kept from an earlier start of its program, or given.

A script that is started again would make the same plan again. What tells that it is the same program is all that a
plan depends on but the values of tensors, on which the plan of a running loop does not depend either: its later steps
have other values too. The proof by the first step is made in every start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from memfit import ir
from memfit._torch import own_buffers, own_modules, own_parameters, tree_leaves
from memfit.capture import Seen, Watcher, external_tensors, parameters_of
from memfit.cost import hurried
from memfit.errors import InfeasibleError, MemfitError, OutputError, PlanMismatchError, UsageError
from memfit.foundations import Progress, __version__, format_bytes, format_seconds, read_budget
from memfit.hardware import cache_folder, find_device, host_name
from memfit.ir import Levers, Plan, Prediction, simulate
from memfit.levers import check_plan
from memfit.pipeline._estimate import estimate
from memfit.pipeline._plan import planned as make_plan
from memfit.pipeline.placement import device_kind
from memfit.planner import Findings, PlanOptions, costs_of, predicted_under
from memfit.training import CombinedOptimizers, beside_text, held_beside
from memfit.workload import (
    CallNumber,
    Entry,
    ExecutionContext,
    Extent,
    Geometry,
    LoopWorkload,
    ModuleTensor,
    RecordedStep,
    Tape,
    fingerprint,
    in_turn,
    leaves_of,
    outside_autocast,
    tensors_of,
)

Mixed = Prediction | Literal["in use"] | None
"""What mixed precision is predicted to take: nothing, where the loop has it, or where that can't be run."""

Stages = Callable[[], contextlib.AbstractContextManager[Progress]]

T = TypeVar("T")

_MOST_KEPT = 256  # records, the newest ones
_DEEP = 6  # of attributes in attributes that tell objects apart
_LONG = 1000  # entries of a list or dict that are looked at
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_INSTALLED = tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")})
_OWN = Path(__file__).parents[1]
_OF_TERMINALS = ("_", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "TERM", "SSH_", "XDG_", "DBUS_")
"""How the names of environment variables begin that differ between terminals; any other may change a model."""

is_on = True
"""Whether records are kept. Tests turn it off."""
_NOTED_SHARE = 0.01  # of the budget: what the loop holds beside the step
_POINTS = 4
_FIRST_SECONDS = 0.5  # for solving for the first step


AND = " and "
"""Between the classes of the modules that a loop calls, in its workload's name."""


@dataclass
class StepKind:
    """A kind of step that the loop made."""

    seen: Seen
    step: RecordedStep
    saw: str = ""
    is_planned: bool = True

    def is_gone(self, watcher: Watcher) -> bool:
        """Tell whether an optimizer of the step is gone, and so is its training."""
        return any(watcher.optimizers[number] is None for number in self.step.optimizers)


class LargerBatches:
    """The calls of modules that a loop's plan holds, by their arguments' extents."""

    def __init__(self) -> None:
        self._promised: dict[CallNumber, list[Extent]] = {}
        self._grown = 0

    def forget(self) -> None:
        self._promised.clear()

    def promise(self, steps: Sequence[RecordedStep], also: Mapping[CallNumber, Extent] | None = None) -> None:
        for number, extent in [call for step in steps for call in step.calls.items()] + list((also or {}).items()):
            if not self.holds(number, extent):
                known = self._promised.setdefault(number, [])
                known[:] = [other for other in known if not extent.covers(other)] + [extent]
        self._grown += also is not None

    def holds(self, number: CallNumber, extent: Extent) -> bool:
        return any(known.covers(extent) for known in self._promised.get(number, ()))

    def difference(self, number: CallNumber, extent: Extent) -> str:
        """Return how a call exceeds those that the plan holds, in words."""
        return extent.difference_text(self._largest(number))

    def targets(self, number: CallNumber, extent: Extent) -> list[Extent]:
        """Return the extents to plan for: where batches grow again and again, a larger one first."""
        ahead = extent.looked_ahead(self._largest(number))
        return [ahead, extent] if self._grown and ahead != extent else [extent]

    def resized(self, step: RecordedStep, number: CallNumber, target: Extent) -> RecordedStep:
        """Return a step as it would be with a larger call."""
        before = step.calls.get(number, Extent())
        pairs = [(column.shape, target[path].shape) for path, column in before.items() if path in target]
        return step.resized(pairs)

    def _largest(self, number: CallNumber) -> Extent:
        known = self._promised.get(number)
        return known[-1] if known else Extent()


def module_workload(
    module: nn.Module, args: Any, kwargs: Any, optimizers: Sequence[torch.optim.Optimizer]
) -> LoopWorkload:
    """Return a call of a module as a workload, with a loss that stands for the loop's own."""
    loss = functools.partial(_standing_in, ExecutionContext.now())
    return _workload(module, [args, kwargs], loss, optimizers, [module])


def workload_of(steps: Sequence[RecordedStep], watcher: Watcher) -> LoopWorkload:
    """Return steps that were seen as a workload; refuse what can't be run again."""
    if watcher.fault:
        raise UsageError(
            f"the step can't be planned where it runs, since {watcher.fault}: write it as a memfit.Workload"
        )
    numbers = sorted({number for step in steps for number in step.roots})
    roots = {number: watcher.roots[number] for number in numbers}
    names = {number: f"{i}_{type(root).__name__}" for i, (number, root) in enumerate(roots.items())}
    model: nn.Module = _Roots()
    for number, root in roots.items():
        model.add_module(names[number], root)
    if len(roots) == 1:
        model, names = roots[numbers[0]], {numbers[0]: ""}
    stepped = sorted({number for step in steps for number in step.optimizers})
    optimizers = [o for number in stepped if (o := watcher.optimizers[number]) is not None]
    step = in_turn(steps)
    tape = Tape(
        tuple(dataclasses.replace(e, what=stepped.index(e.what)) if e.kind == "update" else e for e in step.entries),
        tuple(names.get(n, names[numbers[0]]) for n in range(len(watcher.roots))),
        step.passes,
    )
    return _workload(model, step.given, _not_called, optimizers, list(roots.values()), tape)


def roots_of(model: nn.Module) -> list[nn.Module]:
    return list(model.children()) if isinstance(model, _Roots) else [model]


class _Roots(nn.Module):
    """The modules that a loop calls, as the children of one."""


def _workload(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    roots: Sequence[nn.Module],
    tape: Tape | None = None,
) -> LoopWorkload:
    """Return a step of the loop as a workload, named by the classes of the modules that it calls."""
    optimizer: Any = optimizers[0] if len(optimizers) == 1 else CombinedOptimizers(optimizers)
    return LoopWorkload(
        model=model,
        batch=batch,
        loss_fn=loss_fn,
        optimizer=optimizer,
        name=AND.join(dict.fromkeys(type(root).__name__ for root in roots)),
        batch_size=1,
        tape=tape or Tape(),
    )


def _standing_in(context: ExecutionContext, model: nn.Module, batch: Any) -> torch.Tensor:
    """Return a loss in the place of the loop's own: what the model returns as one, or what takes as much as most."""
    args, kwargs = batch
    with context.entered():
        found = [t for t in leaves_of(model(*args, **kwargs)) if t.is_floating_point() and t.requires_grad]
        scalars = [t for t in found if t.dim() == 0]
        return sum(scalars or [t.float().log_softmax(-1).exp().square().mean() for t in found], torch.zeros(()))


def _not_called(model: nn.Module, batch: Any) -> torch.Tensor:
    raise AssertionError("the step of a taped workload is its tape")


def step_text(
    entries: Sequence[Entry], roots: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer | None]
) -> str:
    """Return what a step does, in words."""
    calls = Counter(type(roots[e.what]).__name__ for e in entries if e.kind == "module" and e.context.grad)
    updates = Counter(type(optimizers[e.what]).__name__ for e in entries if e.kind == "update")
    words = [f"{_counted(n, 'call')} of {name}" for name, n in calls.items()]
    words.append(_counted(sum(e.kind == "backward" for e in entries), "backward pass", "es"))
    words += [f"{_counted(n, 'update')} by {name}" for name, n in updates.items()]
    words.append("gradients clipped" if _clips(entries) else "gradients not clipped")
    return ", ".join(words)


def _clips(entries: Sequence[Entry]) -> bool:
    """Tell whether a step changes gradients between its backward passes and its update."""
    taken: set[int] = set()
    for entry in entries:
        name = getattr(entry.what, "__name__", "")
        if name == "__get__" and any(isinstance(r, ModuleTensor) for r in entry.arguments.references):
            taken |= set(entry.made)
        numbers = {getattr(r, "number", None) for r in entry.arguments.references}
        if name.rstrip("_") != name and "mul" in name and numbers & taken:
            return True
    return False


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


def untrained_texts(
    optimizers: Iterable[torch.optim.Optimizer], stepped: Iterable[torch.optim.Optimizer | None]
) -> list[str]:
    """Return what is known of parameters that an optimizer holds and that no step so far trained."""
    known, lines = set(map(id, stepped)), []
    for optimizer in optimizers:
        waiting = [p for p in parameters_of(optimizer) if id(optimizer) not in known or not p.requires_grad]
        if not waiting:
            continue
        wanted = set(map(id, waiting))  # the owner is the smallest module that holds them
        modules = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
        held = [({id(p) for p in module.parameters()}, type(module).__name__) for module in modules]
        owners = [(len(ids), name) for ids, name in held if wanted <= ids]
        owner = f" of {min(owners, key=lambda each: each[0])[1]}" if owners else ""
        lines.append(
            f"memfit: {len(waiting)} parameters{owner} ({format_bytes(sum(p.nbytes for p in waiting))}) in optimizer"
            f" {type(optimizer).__name__} have not trained yet. The plan does not cover steps that"
            " train them; memfit plans such a step when it runs"
        )
    return lines


def told_beside(workload: LoopWorkload, plan: Plan, given: Sequence[torch.Tensor | Geometry]) -> str | None:
    """Return what is told of the variables that hold memory beside the step, if more than a hundredth of the budget."""
    optimizer, model = workload.optimizer, workload.model
    known = [*model.parameters(), *model.buffers(), *external_tensors(workload), *workload.batch]
    known += tensors_of([list(optimizer.state.values()), optimizer.param_groups])
    known += [p.grad for p in model.parameters() if p.grad is not None]
    held = held_beside(known, given, plan.device)
    if sum(each.nbytes for each in held) <= _NOTED_SHARE * plan.budget_bytes:
        return None
    return f"memfit: {beside_text(held, plan.predicted.peak_bytes, plan.budget_bytes)}"


@contextlib.contextmanager
def generators_kept(tape: Tape) -> Iterator[None]:
    """Set the generators that a step draws from back on leaving: they are the loop's own, not copies."""
    held = [leaf for entry in tape.entries for leaf in tree_leaves(entry.arguments.template)]
    generators = {id(leaf): leaf for leaf in held if isinstance(leaf, torch.Generator)}.values()
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class LoopPlans:
    """Makes the plans of a loop, and keeps them for the next start of its program.

    Begun with a plan that is given, or by options of `memfit.plan`, `budget` at least. `is_taken` tells whether the
    last plan or prediction was taken from an earlier start.
    """

    def __init__(self, options: dict[str, Any], given: Plan | None, stages: Stages) -> None:
        self._options, self._given, self._stages = options, given, stages
        self._findings: tuple[nn.Module | None, Findings] = None, Findings()
        self.is_taken = False
        self._taken: list[Path] = []

    def for_module(self, workload: LoopWorkload, *, is_alone: bool) -> Plan:
        """Return a plan for a module by itself, which only its first step runs under; alone if nothing else trains."""
        given = self._given
        device = device_kind(workload.model)
        if given is not None and (given.fingerprint, given.device) == (fingerprint(workload), device):
            return given
        try:
            # Where others are trained too, they need a part of the budget, and nobody knows which.
            return self._made(workload, self._options["budget"] if is_alone else "1B", is_first=True)
        except InfeasibleError as e:
            return self._made(workload, f"{e.lowest_peak_bytes}B", is_first=True)

    def for_steps(self, workload: LoopWorkload, note: Callable[[str], None], *, is_later: bool) -> Plan:
        """Return a plan for steps that were seen: the one that was given, where it holds them, and a note where not.

        Later there was a plan for steps before.
        """
        given, budget = self._given, self._options["budget"]
        if given is None:
            return self._made(workload, budget)
        own, device = fingerprint(workload), device_kind(workload.model)
        # It may be for more modules than have trained so far, or have been in force for those before.
        is_part = is_later or set(workload.name.split(AND)) < set(given.workload.split(AND))
        if given.fingerprint != own and is_part:
            return self._made(workload, budget)
        if given.fingerprint != own or given.device != device:
            raise PlanMismatchError(
                f"plan= was made for {given.workload} on {given.device}, with the fingerprint {given.fingerprint}. The"
                f" loop trains {workload.name} on {device}, with {own}: another model, optimizer or"
                " device. Leave out plan= and give budget= to make a plan for this loop"
            )
        check_plan(given, workload)
        predicted = _predicted(given, workload)
        if predicted.peak_upper_bytes <= given.budget_bytes:
            return replace(given, predicted=predicted)
        note(
            f"memfit: under the given plan the step needs {format_bytes(predicted.peak_upper_bytes)} of"
            f" {format_bytes(given.budget_bytes)}: memfit plans it again"
        )
        return self._made(workload, budget)

    def again(self, workload: LoopWorkload, plan: Plan) -> tuple[Plan, Prediction]:
        """Return a plan that holds larger steps, and what it predicts: the one in force, or another of its budget."""
        with generators_kept(workload.tape):
            predicted = _predicted(plan, workload)
            if predicted.peak_upper_bytes <= plan.budget_bytes:
                return plan, predicted
            made = self._made(workload, f"{plan.budget_bytes}B")
        return made, made.predicted

    def _made(self, workload: LoopWorkload, budget: int | float | str, *, is_first: bool = False) -> Plan:
        """Return a plan for steps, or, in a hurry, for the first one, which is the only one that runs under it."""
        options = {"device": device_kind(workload.model)} | self._options | {"budget": budget}
        if is_first:
            asked = options.get("time_limit_seconds", _FIRST_SECONDS)
            options["time_limit_seconds"] = min(_FIRST_SECONDS, asked)

        def make() -> Plan:
            asked = PlanOptions(
                **options,
                precisions=("32-true",),
                optimizers=(),
                world_size=1,
                points=1 if is_first else _POINTS,
                measure=False,  # the loop's steps are its own
            )
            with self._stages() as progress:
                return make_plan(workload, asked, progress=progress, findings=self._findings_of(workload.model))

        return self._kept(Plan, "plan", workload, options, make)

    def _findings_of(self, model: nn.Module) -> Findings:
        """Return what the plans so far have found out about a model."""
        if self._findings[0] is not model:
            self._findings = model, Findings()
        return self._findings[1]

    def first_peak_bytes(self, first: Plan, workload: LoopWorkload) -> int:
        """Predict the peak of a first step, which ran under a plan for its module by itself."""
        plain = self._findings_of(workload.model).plain

        def make() -> int:
            regions = first.levers.regions
            if plain is None or first.levers != Levers(microbatch_size=1, regions=regions):
                return _predicted(first, workload).peak_bytes
            costs = costs_of([plain], find_device(first.device))
            return simulate(plain, costs, regions).peak_bytes

        return self._kept(int, "first", workload, first.levers, make)

    def mixed(self, workload: LoopWorkload) -> Mixed:
        """Predict a step with autocast around its forward passes, and no levers."""
        if any(entry.context.autocast for entry in workload.tape.entries):
            return "in use"

        def make() -> Prediction:
            return estimate(workload, device=device_kind(workload.model), precision="bf16-mixed")

        try:
            with generators_kept(workload.tape):
                return self._kept(Prediction, "mixed", workload, None, make)
        except MemfitError:  # autocast refuses some losses
            return None

    def advice(self, workload: LoopWorkload, plan: Plan) -> list[str]:
        """Return what the loop itself could do, where its plan is slow."""
        return advice(plan, self.mixed(workload)) if is_slow(plan) else []

    def _kept(self, kind: type[T], name: str, workload: LoopWorkload, options: object, make: Callable[[], T]) -> T:
        """Return a record as an earlier start of the program has kept it, or make it and keep it.

        It is of the workload what its name says, and depends on options too.
        """
        self.is_taken = False
        with outside_autocast(), hurried():  # autocast is where the module is called; the step enters its own
            program = _program() if is_on else None
            if program is None:
                return make()
            key = hashlib.sha256("\0".join([*_parts(name, workload, options), program]).encode())
            folder = cache_folder() / "plans"
            path = folder / f"{key.hexdigest()[:32]}.json"
            with contextlib.suppress(OSError, msgspec.DecodeError):  # none, or it is damaged, or of another memfit
                found = msgspec.json.decode(path.read_bytes(), type=kind)
                self._taken.append(path)
                self.is_taken = True
                return found
            made = make()
            with contextlib.suppress(OutputError, OSError):  # the next start makes it again
                ir.codec.write_atomic(path, ir.codec.encode(made))
                for old in sorted(folder.glob("*.json"), key=lambda each: -each.stat().st_mtime)[_MOST_KEPT:]:
                    old.unlink(missing_ok=True)
            return made

    def forget(self) -> None:
        """Drop what was taken from an earlier start: the next start makes it anew."""
        for path in self._taken:
            path.unlink(missing_ok=True)
        self._taken.clear()


def _predicted(plan: Plan, workload: LoopWorkload) -> Prediction:
    with outside_autocast(), hurried():
        return predicted_under(plan, workload)[0]


def is_slow(plan: Plan) -> bool:
    """Tell whether a plan makes a step so much slower that the loop itself could do better."""
    return plan.predicted.step_seconds > 1.1 * plan.plain.step_seconds


def advice(plan: Plan, mixed: Mixed) -> list[str]:
    """Return what the loop itself could do for a faster step or a lower peak, with the lines that do it."""
    lines = ["", "Changes to your loop that would make it faster or smaller:"]
    if (
        isinstance(mixed, Prediction)
        and mixed.peak_bytes < plan.plain.peak_bytes
        and mixed.step_seconds < plan.predicted.step_seconds
    ):
        peak, seconds = format_bytes(mixed.peak_bytes), format_seconds(mixed.step_seconds)
        change = mixed.step_seconds / plan.plain.step_seconds - 1
        than_plain = f"{abs(change):.0%} {'slower' if change > 0 else 'faster'} than plain"
        lines += [
            "  mixed precision:  with torch.autocast(device.type, dtype=torch.bfloat16):",
            "                        loss = ...  # the forward pass, and not the backward pass",
            f"                    predicted, with that alone: {peak}, {seconds}, {than_plain}",
        ]
    return [
        *lines,
        "  microbatches:     for part in batch.split(size // 2):",
        "                        (loss_of(part) / 2).backward()  # then one optimizer.step()",
        "                    not predicted: memfit cannot tell which dimension is the batch",
        "memfit.plan predicts and applies both, for a step written as a memfit.Workload.",
    ]


def _program() -> str | None:
    """Return the sources and arguments of the program that runs, and of memfit; None where it has no file."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    script = sys.argv[0] if sys.argv and Path(sys.argv[0]).is_file() else main
    if script is None:
        return None
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    installed = (*_INSTALLED, str(_OWN))  # Python, packages and memfit
    own = {script, *(p for p in loaded if isinstance(p, str) and not str(Path(p).resolve()).startswith(installed))}
    sources = [path for path in sorted(own) if path.endswith(".py") and Path(path).is_file()]
    texts = [f"{path}:{hashlib.sha256(Path(path).read_bytes()).hexdigest()}" for path in sources]
    memfit = max(path.stat().st_mtime_ns for path in _OWN.rglob("*.py"))
    environment = [
        f"{name}={value}" for name, value in sorted(os.environ.items()) if not name.startswith(_OF_TERMINALS)
    ]
    return "\n".join(
        [*sys.argv, *environment, *texts, __version__, str(memfit), torch.__version__, sys.version, host_name()]
    )


def _parts(name: str, workload: LoopWorkload, options: object) -> Iterator[str]:
    device, kernels, optimizer = device_kind(workload.model), torch.backends.cuda, workload.optimizer
    around = (
        name,
        fingerprint(workload),
        getattr(workload.loss_fn, "args", ()),  # the modes in which a stand-in for the loop's loss runs
        ExecutionContext.now(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
        (kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled()),
        (_source(type(optimizer)), len(optimizer.state)),
        (workload.tape.roots, workload.tape.passes),
    )
    yield str(around)
    told: list[object] = [options, workload.batch]
    if isinstance(options, dict) and read_budget(options["budget"]).of == "device":
        told.append(find_device(device).usable_bytes)
    for fqn, module in workload.model.named_modules():
        own = {*own_modules(module), *own_parameters(module), *own_buffers(module)}
        plain = {key: value for key, value in vars(module).items() if key not in own and not key.startswith("_")}
        hooks = [len(hooks) for key, hooks in sorted(vars(module).items()) if key.endswith("_hooks")]
        yield f"{fqn} {_source(type(module))} {hooks}"
        told.append(plain)
    for group in optimizer.param_groups:
        yield str([tuple(p.shape) for p in group["params"]])
        told.append({key: value for key, value in group.items() if key != "params" and "lr" not in key})
    for entry in workload.tape.entries:
        what = entry.what if isinstance(entry.what, int) else _named(entry.what)
        yield f"{entry.kind} {what} {entry.made} {entry.drops} {entry.phase} {entry.microbatch} {entry.context}"
        yield f"{entry.arguments.references}"
        told.append(entry.arguments.template)
    for each in told:
        yield from _told(each, _DEEP)


def _named(what: Any) -> str:
    bound = getattr(what, "__self__", None)
    own = Geometry.of(bound) if isinstance(bound, (torch.Tensor, Geometry)) else type(bound).__name__
    return f"{getattr(what, '__module__', '')}.{getattr(what, '__qualname__', type(what).__qualname__)} {own}"


def _source(kind: type) -> str:
    """Return a class with the file that it is from, as that is now, and the version of its package."""
    module: ModuleType | None = sys.modules.get(kind.__module__)
    package = sys.modules.get(kind.__module__.partition(".")[0])
    stamps = []
    for each in (module, package):
        with contextlib.suppress(OSError, TypeError):
            found = os.stat(each.__file__)  # type: ignore[union-attr, arg-type]
            stamps.append((found.st_mtime_ns, found.st_size))
    return f"{kind.__module__}.{kind.__qualname__} {stamps} {getattr(package, '__version__', '')}"


def _told(value: Any, depth: int) -> Iterator[str]:
    """Yield what an object is by its plain attributes; of deeper ones, and of strange ones, the class alone."""
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, torch.Tensor):
        yield f"{type(value).__name__} {tuple(value.shape)} {value.dtype} {value.device} {value.requires_grad}"
    elif isinstance(value, nn.Module):
        yield type(value).__qualname__
    elif isinstance(value, type) or callable(value) and hasattr(value, "__qualname__"):
        yield f"{value.__module__}.{value.__qualname__}"
    elif depth == 0:
        yield type(value).__qualname__
    elif isinstance(value, (set, frozenset)):
        yield from sorted(text for each in value for text in _told(each, depth - 1))
    elif isinstance(value, (list, tuple)):
        yield f"{type(value).__qualname__} {len(value)}"
        for each in value[:_LONG]:
            yield from _told(each, depth - 1)
    else:
        held = value
        if not isinstance(value, dict):
            yield type(value).__qualname__
            held = {key: each for key, each in getattr(value, "__dict__", {}).items() if not key.startswith("_")}
        for key, each in list(held.items())[:_LONG]:
            yield repr(key) if isinstance(key, _PLAIN) else type(key).__qualname__
            yield from _told(each, depth - 1)
