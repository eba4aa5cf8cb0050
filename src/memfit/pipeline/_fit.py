"""A plan for somebody's own training loop: its first step is watched where it runs, the others run under the plan.

Before the first step nothing of the loop is known but the module that it calls. So that this step does not need more
memory than the budget either, it runs under a plan for that module and a loss that stands for the loop's own. What the
loop did in it is on a tape then, and the plan for the steps after it is made of that.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from memfit._torch.pytree import tree_leaves
from memfit._torch.replacement import replaced
from memfit.batch import leaves_of
from memfit.capture.loop_recorder import Verdict, Watcher
from memfit.errors import InfeasibleError, MemfitError, UsageError
from memfit.frames import on_unused
from memfit.ir.plan import Numerics, Plan, Prediction
from memfit.levers.switch import switched
from memfit.pipeline._estimate import estimate
from memfit.pipeline._plan import plan as make_plan
from memfit.planner.prediction import Progress, silent
from memfit.planner.trials import first_line
from memfit.recomputation.probe import checking
from memfit.tape import ExecutionContext, LoopWorkload, ModuleTensor, Tape, outside_autocast
from memfit.training.taped import CombinedOptimizers
from memfit.units import format_bytes, format_seconds, read_budget
from memfit.workload import Workload

Mixed = Prediction | Literal["in use"] | None
"""What mixed precision is predicted to take: nothing, where the loop has it, or where that can't be run."""

_MOST_UPDATES = 8  # of one optimizer in a step, while another one waits for its turn
_POINTS = 4


class Fitted:
    """A loop that memfit fits into a budget.

    Attributes:
        plan: What it runs under after its first step; None before.
        saw: Its step in words ("1 call of GPT, 1 backward pass, 1 update by AdamW, ..."); "" before.
    """

    def __init__(
        self,
        optimizers: Callable[[], Iterable[torch.optim.Optimizer]],
        tell: Callable[[str], None],
        progress: Progress,
        options: dict[str, Any],
    ) -> None:
        self.plan: Plan | None = None
        self.saw = ""
        self._optimizers, self._tell, self._progress, self._options = optimizers, tell, progress, options
        self._watcher = Watcher(self._called)
        self._levers = contextlib.ExitStack()
        self._proving = contextlib.ExitStack()
        self._first: list[tuple[nn.Module, Plan]] = []
        self._advice: list[str] = []

    def __str__(self) -> str:
        if self.plan is None:
            return "memfit has not seen a whole step of the loop yet"
        return "\n".join([f"The step: {self.saw}.", str(self.plan), *self._advice])

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Fit the loop that runs in this context; the modules are as they were on leaving.

        An error that ended the loop is raised here, whatever the loop made of it.
        """
        watcher = self._watcher
        try:
            with watcher.watching():
                yield
            if watcher.verdict is not None:
                raise watcher.verdict
            if self.plan is None:
                self._tell("memfit: the loop made no two steps with gradients, so nothing was planned")
        except BaseException as e:
            if watcher.verdict is None or e is watcher.verdict:
                raise
            if isinstance(e, Verdict) and isinstance(watcher.verdict, MemfitError):
                watcher.verdict.__traceback__ = e.__traceback__  # the loop's frames, where they are left by it
            raise watcher.verdict from None
        finally:
            self._proving.close()
            self._levers.close()

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """See to a call of a module by the loop, before it runs."""
        watcher = self._watcher
        if not torch.is_grad_enabled() or not self._optimizers_of([module]):
            return
        if watcher.verdict is not None:  # the loop handled it, and goes on
            raise watcher.verdict
        if self._step_is_complete(watcher.updates):
            if self.plan is not None:  # the step that held what is recomputed against what was computed
                self._proving.close()
                watcher.stop()
                return
            self._fit(watcher.end())
        elif self.plan is None and not any(root is module for root in watcher.roots):
            if not watcher.is_writing:
                watcher.begin()
            self._begin_with(module, args, kwargs)

    def _step_is_complete(self, updates: dict[int, int]) -> bool:
        """Tell whether every optimizer of the modules called has updated since the step began."""
        if not updates:
            return False
        waited = self._optimizers_of(self._watcher.roots)
        return all(id(o) in updates for o in waited) or max(updates.values()) >= _MOST_UPDATES

    # The first step

    def _begin_with(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Put a module under a plan for itself, before its first call."""
        loss = functools.partial(_standing_in, ExecutionContext.now())
        workload = _workload(module, [args, kwargs], loss, self._optimizers_of([module]), module)
        try:
            try:
                # Where others are trained too, they need a part of the budget, and nobody knows which.
                held = {id(p) for p in module.parameters()}
                trained = (p for o in self._optimizers() for group in o.param_groups for p in group["params"])
                is_alone = all(id(p) in held for p in trained)
                found = self._planned(workload, self._options["budget"] if is_alone else 1)
            except InfeasibleError as e:
                found = self._planned(workload, e.lowest_peak_bytes)
        except MemfitError as e:
            self._tell(f"memfit: the first step runs as it is, as no plan was found for it ({first_line(e)})")
            return
        self._first.append((module, found))
        self._put_under(module, found)

    # Those after it

    def _fit(self, tape: Tape) -> None:
        """Plan for the step that was seen, and put the loop's modules under the plan."""
        self._levers.close()
        roots = self._watcher.roots
        model = roots[0] if len(roots) == 1 else _Roots(dict(zip(tape.roots, roots, strict=True)))
        self.saw = seen(tape, roots, self._watcher.optimizers)
        self._tell(f"memfit: saw a step: {self.saw}")
        self._proving.close()
        try:
            workload = self._workload_of(tape, model)
            with _generators_kept(tape):
                self.plan = self._planned(workload, self._options["budget"])
            under = [(model, self.plan)]
            self._advice = advice(self.plan, self._mixed(workload)) if is_slow(self.plan) else []
        except InfeasibleError:
            raise
        except MemfitError as e:
            if not self._first:
                raise
            under, self.plan = self._first, self._first[0][1]
            self._tell(
                f"memfit: the loop can't be planned as it is ({first_line(e)}), so its modules stay under plans for"
                " each by itself; what the loop holds beside them comes on top of these"
            )
        self._watcher.count()
        for module, plan in under:
            self._put_under(module, plan)
        if all(plan.is_proven for _, plan in under):
            self._watcher.stop()
        self._tell(str(self))

    def _workload_of(self, tape: Tape, model: nn.Module) -> LoopWorkload:
        """Return the step that was seen as a workload; refuse one that can't be run again."""
        if self._watcher.fault:
            raise UsageError(
                f"the step can't be planned where it runs, since {self._watcher.fault}: write it as a memfit.Workload"
            )
        watcher = self._watcher
        return _workload(model, watcher.given, _not_called, watcher.optimizers, watcher.roots[0], tape)

    def _mixed(self, workload: LoopWorkload) -> Mixed:
        """Predict the step that was seen with autocast around its forward passes, and no levers."""
        if any(entry.context.autocast for entry in workload.tape.entries):
            return "in use"
        try:
            with _generators_kept(workload.tape), outside_autocast():
                return estimate(workload, device=_device_of(workload.model), precision="bf16-mixed")
        except MemfitError:  # autocast refuses some losses
            return None

    def _put_under(self, model: nn.Module, plan: Plan) -> None:
        """Put modules under a plan. Its first step holds what is recomputed against what was computed."""
        self._levers.enter_context(switched(model, plan.levers))
        if not plan.is_proven:
            self._proving.enter_context(checking())

    def _planned(self, workload: Workload, budget: int | float | str) -> Plan:
        options = {"device": _device_of(workload.model)} | self._options | {"budget": budget}
        with outside_autocast():  # where the module is called; the step enters its own
            return make_plan(
                workload,
                **options,
                precisions=("32-true",),
                optimizers=(),
                world_size=1,
                points=_POINTS,
                measure=False,  # the loop's steps are its own
                progress=self._progress,
            )

    def _optimizers_of(self, modules: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
        return _updating(self._optimizers(), modules)


def fit(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    budget: int | float | str,
    numerics: Numerics = "exact",
    host_budget: int | str | None = None,
    time_limit_seconds: float = 10.0,
    tell: Callable[[str], None] | None = None,
    progress: Progress = silent,
) -> contextlib.AbstractContextManager[Fitted]:
    """Fit somebody's own training loop into a budget: whatever loop runs in this context, as it is.

    The first step is watched where it runs; the steps after it run under the plan for it. Modules are recomputed in the
    backward pass, their norms and activations made again, and, on a GPU with `host_budget`, kept in host memory. What
    the loop itself would have to do (microbatches, another precision) is told.

    Args:
        model: The model, or the models, that the loop trains.
        optimizer: The optimizer, or the optimizers, that it steps.
        budget: Bytes, a string with a unit ("1.5GiB"), or a share of the device's memory ("90%") or of the plain
            step's peak ("0.5x").
        numerics: "exact", or "reordered", with which losses of language models are chunked too.
        host_budget: As of `memfit.plan`.
        time_limit_seconds: As of `memfit.plan`, for each of the two plans that are made.
        tell: Takes what is to be said; None writes it to standard error.
        progress: Told how far planning is.

    Warns:
        RuntimeWarning: The context is dropped without having been entered.

    Raises:
        BudgetError: The budget says no number of bytes.
        InfeasibleError: No plan fits. The loop ends where its second step begins, whatever it makes of exceptions; the
            error is raised where the context is left. The first step was made.
        UsageError: What the loop does can't be planned where it runs, such as an optimizer that needs a closure.
    """
    _check(budget, numerics)
    given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not _updating(given, models):
        raise UsageError("optimizer= updates no parameter of model=: give the two that the loop trains with")
    options = {"numerics": numerics, "host_budget": host_budget, "time_limit_seconds": time_limit_seconds}
    write = tell or functools.partial(print, file=sys.stderr, flush=True)
    return _Fitting(Fitted(lambda: given, write, progress, {"budget": budget, **options}))


class _Fitting(contextlib.AbstractContextManager["Fitted", None]):
    """The context of a fitted loop; where it is dropped without having been entered, that is told."""

    def __init__(self, fitted: Fitted) -> None:
        self._fitted, self._entered = fitted, contextlib.ExitStack()
        self._unused = on_unused(
            self, "memfit.fit(...) was not entered, so nothing is planned: write `with memfit.fit(...):`"
        )

    def __enter__(self) -> Fitted:
        self._unused.detach()
        self._entered.enter_context(self._fitted.watching())
        return self._fitted

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


@contextlib.contextmanager
def fit_whatever_trains(
    *,
    budget: int | float | str,
    numerics: Numerics = "exact",
    host_budget: int | str | None = None,
    tell: Callable[[str], None],
    progress: Progress = silent,
) -> Iterator[Fitted]:
    """Fit the loop that runs in this context into a budget, with the optimizers that it makes; see `fit`."""
    _check(budget, numerics)
    made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
    initialise = torch.optim.Optimizer.__init__

    def initialise_and_note(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        made.add(optimizer)
        initialise(optimizer, *args, **kwargs)

    options = {"budget": budget, "numerics": numerics, "host_budget": host_budget}
    fitted = Fitted(lambda: list(made), tell, progress, options)
    with replaced(torch.optim.Optimizer, "__init__", initialise_and_note), fitted.watching():
        yield fitted


def _updating(optimizers: Iterable[torch.optim.Optimizer], modules: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that update a parameter of some modules."""
    held = {id(p) for module in modules for p in module.parameters()}
    return [o for o in optimizers if any(id(p) in held for group in o.param_groups for p in group["params"])]


def _check(budget: int | float | str, numerics: Numerics) -> None:
    """Check what a loop is to be fitted into, before it begins."""
    read_budget(budget)
    if numerics not in ("exact", "reordered"):
        raise UsageError(f"numerics={numerics!r} is not for a loop that goes on as it is: use 'exact' or 'reordered'")


def seen(tape: Tape, roots: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return what a step does, in words."""
    calls = Counter(type(roots[e.what]).__name__ for e in tape.entries if e.kind == "module" and e.context.grad)
    updates = Counter(type(optimizers[e.what]).__name__ for e in tape.entries if e.kind == "update")
    words = [f"{_counted(n, 'call')} of {name}" for name, n in calls.items()]
    words.append(_counted(tape.passes, "backward pass", "es"))
    words += [f"{_counted(n, 'update')} by {name}" for name, n in updates.items()]
    words.append("gradients clipped" if _clips(tape) else "gradients not clipped")
    return ", ".join(words)


def _clips(tape: Tape) -> bool:
    """Tell whether a step changes gradients between its backward passes and its update."""
    taken: set[int] = set()
    for entry in tape.entries:
        name = getattr(entry.what, "__name__", "")
        if name == "__get__" and any(isinstance(r, ModuleTensor) for r in entry.arguments.references):
            taken |= set(entry.made)
        numbers = {getattr(r, "number", None) for r in entry.arguments.references}
        if name.rstrip("_") != name and "mul" in name and numbers & taken:
            return True
    return False


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


def is_slow(plan: Plan) -> bool:
    """Tell whether a plan makes a step so much slower that the loop itself could do better."""
    return plan.predicted.step_seconds > 1.1 * plan.plain.step_seconds


def advice(plan: Plan, mixed: Mixed) -> list[str]:
    """Return what the loop itself could do for a faster step or a lower peak, with the lines that do it."""
    lines = ["", "What the loop itself could do, which memfit leaves to it:"]
    if isinstance(mixed, Prediction) and _helps(mixed, plan):
        peak, seconds = format_bytes(mixed.peak_bytes), format_seconds(mixed.step_seconds)
        times = mixed.step_seconds / plan.plain.step_seconds
        lines += [
            "  mixed precision:  with torch.autocast(device.type, dtype=torch.bfloat16):",
            "                        loss = ...  # the forward pass, and not the backward pass",
            f"                    predicted, with that alone: {peak}, {seconds}, ×{times:.2f} of plain",
        ]
    return [
        *lines,
        "  microbatches:     for part in batch.split(size // 2):",
        "                        (loss_of(part) / 2).backward()  # then one optimizer.step()",
        "                    not predicted: which tensors of the loop have a dimension of samples is not known here",
        "memfit.plan, on the step as a memfit.Workload, predicts and applies both.",
    ]


def _helps(mixed: Prediction, plan: Plan) -> bool:
    """Tell whether mixed precision is predicted to hold less than the plain step, in less time than the plan."""
    return mixed.peak_bytes < plan.plain.peak_bytes and mixed.step_seconds < plan.predicted.step_seconds


def _device_of(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")


@contextlib.contextmanager
def _generators_kept(tape: Tape) -> Iterator[None]:
    """Set the generators that a step draws from back on leaving: they are the loop's own, not copies."""
    held = [leaf for entry in tape.entries for leaf in tree_leaves(entry.arguments.template)]
    generators = {id(leaf): leaf for leaf in held if isinstance(leaf, torch.Generator)}.values()
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class _Roots(nn.Module):
    """The modules that a loop calls, as the children of one."""

    def __init__(self, roots: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, root in roots.items():
            self.add_module(name, root)


def _workload(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    named: nn.Module,
    tape: Tape | None = None,
) -> LoopWorkload:
    """Return a step of the loop as a workload, named by a module's class."""
    optimizer: Any = optimizers[0] if len(optimizers) == 1 else CombinedOptimizers(optimizers)
    return LoopWorkload(
        model=model,
        batch=batch,
        loss_fn=loss_fn,
        optimizer=optimizer,
        name=type(named).__name__,
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
