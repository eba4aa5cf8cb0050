"""A plan for somebody's own training loop: its first step is watched where it runs, the others run under the plan.

Before the first step nothing of the loop is known but the module that it calls. So that this step does not need more
memory than the budget either, it runs under a plan for that module and a loss that stands for the loop's own. What the
loop did in it is on a tape then, and the plan for the steps after it is made of that.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from memfit._torch import replaced
from memfit.capture import Seen, Verdict, Watcher, parameters_of
from memfit.errors import InfeasibleError, MemfitError, PlanMismatchError, UsageError
from memfit.foundations import LOOP, Progress, format_bytes, on_unused, public, read_budget, silent, undone
from memfit.ir import Numerics, Plan
from memfit.levers import switched
from memfit.pipeline.loop_plans import (
    LargerBatches,
    LoopPlans,
    Stages,
    StepKind,
    generators_kept,
    module_workload,
    roots_of,
    step_text,
    told_beside,
    untrained_texts,
    workload_of,
)
from memfit.pipeline.verbs import checked, plan_given, uninterrupted
from memfit.planner import first_line
from memfit.recomputation import checking
from memfit.training import Growth, LogFunction, LoopLog
from memfit.workload import CallNumber, Extent, LoopWorkload

_MOST_UPDATES = 8  # of one optimizer in a step, while another one waits for its turn
_MOST_KINDS = 4  # of steps that one plan is for
_MOST_TRIES = 3
_MOST_AWAITED = 1024  # steps that are recorded until one comes again that was not
_MOST_CHECKED = 16  # steps, where not all kinds come again


@dataclass(frozen=True)
class Listener:
    """Who hears of a fitted loop."""

    tell: Callable[[str], None]
    note: Callable[[str], None] | None = None  # of what asks for nothing, in the place of `tell`
    on_plan: Callable[[Plan], None] = lambda plan: None  # before the loop runs under it
    stages: Stages = lambda: contextlib.nullcontext(silent)  # gives what is told of the making of a plan
    log: LogFunction | None = None  # of each step


class Fitted:
    """A loop that memfit fits into a budget.

    Attributes:
        plan: What it runs under after its first step; None before.
        saw: Its step in words ("1 call of GPT, 1 backward pass, 1 update by AdamW, ..."); "" before.
    """

    def __init__(
        self,
        optimizers: Callable[[], Iterable[torch.optim.Optimizer]],
        options: dict[str, Any],
        listener: Listener,
        given: Plan | None = None,
    ) -> None:
        self.plan: Plan | None = None
        self.saw = ""
        self._optimizers, self._on_plan, self._log = optimizers, listener.on_plan, LoopLog(listener.log)
        tell, note = listener.tell, listener.note or listener.tell
        self._tell: Callable[[str], None] = lambda text: tell(LOOP.of(text))
        self._note: Callable[[str], None] = lambda text: note(LOOP.of(text))
        self._plans = LoopPlans(options, given, listener.stages)
        self._watcher = Watcher(self._called, self._passed, self._stepped_elsewhere)
        self._levers = contextlib.ExitStack()
        self._proving = contextlib.ExitStack()
        self._under: list[tuple[nn.Module, Plan]] = []
        self._unplanned: list[nn.Module] = []  # those for which no plan was found
        self._kinds: list[StepKind] = []
        self._proven: list[Seen] = []  # steps that held what is recomputed against what was computed
        self._unsteady = self._failures = self._passes = self._checked = self._awaited = 0
        self._advice: list[str] = []
        self._told: set[object] = set()
        self._reason = ""  # why nothing can be planned
        self._larger = LargerBatches()
        self._growth: Growth | None = None
        self._counted: Callable[[], torch.optim.Optimizer | None] = lambda: None  # whose updates are steps

    def __str__(self) -> str:
        if self.plan is None:
            return "memfit has not seen a whole step of the loop yet"
        return "\n".join([str(self.plan), f"The step: {self.saw}.", *self._advice])

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Fit the loop that runs in this context; the modules are as they were on leaving.

        An error that ended the loop is raised here, whatever the loop made of it.
        """
        watcher = self._watcher
        try:
            with watcher.watching(), contextlib.ExitStack() as hook:
                hook.callback(register_optimizer_step_post_hook(self._updated).remove)
                yield
                if watcher.verdict is None:
                    self._end_log()
            if watcher.verdict is not None:
                raise watcher.verdict
            if self.plan is None and self._reason:
                raise UsageError(f"nothing was planned, and the budget was not applied: {self._reason}")
            if self.plan is None:
                self._tell("memfit: nothing was planned: the loop made fewer than two training steps")
        except BaseException as e:
            self._plans.forget()  # what ended the loop may be a plan of a start before
            if watcher.verdict is None or e is watcher.verdict:
                raise
            if isinstance(e, Verdict) and isinstance(watcher.verdict, MemfitError):
                watcher.verdict.__traceback__ = e.__traceback__  # the loop's frames, where they are left by it
            raise watcher.verdict from None
        finally:
            undone(self._take_back)

    def _take_back(self) -> None:
        self._proving.close()
        self._levers.close()

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """See to a call of a module by the loop, before it runs."""
        watcher = self._watcher
        if not torch.is_grad_enabled() or not self._optimizers_of([module]):
            return
        if watcher.verdict is not None:  # the loop handled it, and goes on
            raise watcher.verdict
        if watcher.updates and any(known is module for known in watcher.called):
            # Another step begins where every optimizer of the modules called has updated since this one began. A module
            # that was not called yet belongs to the step that is under way, as a generator after its critic.
            waited = self._optimizers_of(watcher.called)
            if all(id(o) in watcher.updates for o in waited) or max(watcher.updates.values()) >= _MOST_UPDATES:
                self._end_log()
                self._end_step()
        call = watcher.note_call(module)
        extent = Extent.of((args, kwargs))
        is_known = any(call in known for kind in self._kinds for known in kind.seen.passes)
        if not watcher.is_writing and not is_known:
            self._notice(module)
            call = watcher.note_call(module)
        elif is_known and not self._larger.holds((call[0], call[2]), extent):
            with watcher.paused():
                is_held = self._held((call[0], call[2]), extent)
            if not is_held:
                call = watcher.note_call(module)
        if watcher.is_writing:
            watcher.note_extent((call[0], call[2]), extent)
        under = [root for model, _ in self._under for root in roots_of(model)]
        if not any(known is module for known in [*under, *self._unplanned]):
            with watcher.paused():
                self._begin_with(module, args, kwargs)
        self._log.begin(module)

    def _end_log(self) -> None:
        if not self._watcher.updates:
            return
        with self._watcher.paused():
            self._log.end(None if self.plan is None else self.plan.predicted.peak_bytes)

    # What runs between the loop's own lines is not interrupted: as copies die they call weak references' callbacks, of
    # which Python drops what a handler raises.

    @uninterrupted
    def _end_step(self) -> None:
        """End a step of the loop; plan for it, if it does what no step did before."""
        watcher, seen = self._watcher, self._watcher.seen
        kinds = [kind.seen for kind in self._kinds]
        if seen.is_in(kinds):
            if not seen.is_in(self._proven):
                self._proven.append(seen)
            self._checked += 1
            if self._checked == _MOST_CHECKED or all(kind.is_in(self._proven) for kind in kinds):
                self._proving.close()
            self._awaited -= bool(self._awaited)
            (watcher.begin if self._awaited else watcher.rest)()
            return
        stands = watcher.is_writing  # for the steps after it, or these are recorded
        if stands and not watcher.is_steady() and not self._unsteady:
            stands = False
            self._unsteady += 1
            self._levers.close()
            self._under = []  # gradients are held too, which nobody counted: the plans that take least, in its place
        elif stands and watcher.fault and self._kinds and self._failures < _MOST_TRIES:  # noticed within a step
            stands = False
            self._failures += 1
        if not stands:
            if self._kinds:
                self._tell_unplanned("the last step did something new")
            self._awaited = _MOST_AWAITED
            watcher.begin()
            return
        self._awaited = 0
        with watcher.paused():
            self._fit(StepKind(watcher.seen, watcher.end()))
        gc.collect()  # the step's data, which its workload holds in a cycle of objects

    def _tell_unplanned(self, what: str) -> None:
        self._tell_once(what, f"memfit: {what}: the plan does not cover that step. The next plan covers such steps too")

    @uninterrupted
    def _notice(self, module: nn.Module) -> None:
        """Begin to record at a call that no planned step has."""
        watcher = self._watcher
        if self._kinds:
            gc.collect()  # an optimizer that the loop dropped may be in a cycle
        gone = [kind for kind in self._kinds if kind.is_gone(watcher)]
        if gone and len(gone) == len(self._kinds):  # another model, as of another fold
            self._levers.close()
            watcher.forget_roots()
            self.plan, self._kinds, self._under, self._unplanned = None, [], [], []
        elif self._kinds:
            self._tell_unplanned(f"{type(module).__name__} is called in a new way")
        watcher.begin(within_step=bool(self._kinds))

    @uninterrupted
    def _held(self, number: CallNumber, extent: Extent) -> bool:
        """See to a call on a larger batch than any that the plan is for, before it runs; plan again where needed.

        The step is run again from its recording, with tensors of the larger shapes. Where that can't be done, the step
        is recorded as it comes, under a plan for the module by itself, as the first one was; False is returned then.
        """
        watcher, larger, plan = self._watcher, self._larger, self.plan
        assert plan is not None
        difference = larger.difference(number, extent)
        planned = [kind for kind in self._kinds if kind.is_planned]
        self._take_back()
        try:
            for target in larger.targets(number, extent) if planned else []:
                steps = [larger.resized(kind.step, number, target) for kind in planned]
                workload = workload_of(steps, watcher)
                try:
                    found, predicted = self._plans.again(workload, plan)
                except InfeasibleError:
                    if target is extent:
                        raise
                    continue
                took = f"{format_bytes(predicted.peak_bytes)} of {format_bytes(plan.budget_bytes)}"
                said = f"the plan still fits, {took}"
                if found is not plan:
                    self._on_plan(found)
                    larger.forget()
                    share = predicted.step_seconds / found.plain.step_seconds - 1
                    said = f"planned again, {took}, {share:.0%} slower than plain"
                self.plan, self._under = found, [(workload.model, found)]
                self._switch(workload.model, found)
                self._growth_anew()
                for kind, step in zip(planned, steps, strict=True):
                    kind.step = step.light()
                larger.promise([kind.step for kind in self._kinds], {number: target})
                self._proven, self._checked = [], 0
                gc.collect()
                self._note(f"memfit: a batch is larger than planned ({difference}): {said}")
                return True
        except InfeasibleError as e:
            raise InfeasibleError(
                f"{e}\nA batch is larger than planned ({difference})",
                budget_bytes=e.budget_bytes,
                lowest_peak_bytes=e.lowest_peak_bytes,
                where=e.where,
                proven=e.proven,
            ) from e
        except (MemfitError, RuntimeError, ValueError, TypeError, IndexError):  # what the loop does depends on shapes
            self._take_back()
        gc.collect()  # the error's frames held copies
        self._tell(
            f"memfit: a batch is larger than planned ({difference}), and the recorded step can't be resized to it."
            " This step runs under a plan for its modules alone; memfit plans the next steps again"
        )
        self._under, self._kinds = [], []
        watcher.begin()
        return False

    def _passed(self) -> None:
        """See to the end of a backward pass: whether memfit can see where steps end."""
        self._passes += 1
        called = self._watcher.called
        if self._kinds or self._passes < 2 or self._optimizers_of(called):
            return
        names = ", ".join(sorted({type(module).__name__ for module in called}))
        who = f"{names} had" if names else "the loop calls no torch.nn.Module in"
        self._reason = (
            f"{who} {self._passes} backward passes, and no torch.optim.Optimizer has the parameters of the"
            " called modules, so memfit cannot tell the end of a step. Update them by a torch.optim.Optimizer"
            " (a class of your own may derive from it), or write the step as a memfit.Workload"
        )
        self._tell_once(
            "no optimizer", f"memfit: nothing is planned so far, and the budget is not applied: {self._reason}"
        )
        self._watcher.next_step()

    def _stepped_elsewhere(self, optimizer: torch.optim.Optimizer) -> None:
        self._reason = (
            f"{type(optimizer).__name__} steps in another thread than memfit watches: train in the thread of"
            " `with memfit.fit(...)`, or of the script"
        )
        self._tell_once("thread", f"memfit: this loop is not planned, and its budget is not applied: {self._reason}")

    def _tell_once(self, key: object, text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._tell(text)

    @uninterrupted
    def _begin_with(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Put a module under a plan for itself, before its first call."""
        workload = module_workload(module, args, kwargs, self._optimizers_of([module]))
        held = {id(p) for p in module.parameters()}
        trained = (p for o in self._optimizers() for p in parameters_of(o))
        is_alone = all(id(p) in held for p in trained) and not self._unsteady
        try:
            plan = self._plans.for_module(workload, is_alone=is_alone)
        except MemfitError as e:
            self._tell_once(
                id(module), f"memfit: the first step runs unchanged: no plan was found for it ({first_line(e)})"
            )
            self._unplanned.append(module)
            return
        self._under.append((module, plan))
        self._switch(module, plan)

    def _fit(self, kind: StepKind) -> None:
        """Plan for a step that was seen, with those of other kinds, and put the loop's modules under the plan."""
        watcher = self._watcher
        self._take_back()
        kinds = [known for known in self._kinds if not known.is_gone(watcher) and not known.seen.is_in([kind.seen])]
        kinds = [*kinds, kind][-_MOST_KINDS:]
        try:
            workload = workload_of([known.step for known in kinds if known.is_planned], watcher)
            kind.saw = step_text(kind.step.entries, watcher.roots, watcher.optimizers)
            self.saw = kinds[0].saw if len(kinds) == 1 else "; ".join(f"({i}) {k.saw}" for i, k in enumerate(kinds, 1))
            self._note(f"memfit: saw a step{'' if len(kinds) == 1 else ' of another kind'}: {kind.saw}")
            with generators_kept(workload.tape):
                self.plan = self._plans.for_steps(workload, self._note, is_later=bool(self._kinds))
            self._on_plan(self.plan)
            is_kept = self._plans.is_taken
            self._tell_first(workload, self.plan)
            under = [(workload.model, self.plan)]
            if line := told_beside(workload, self.plan, [t for known in kinds for t in known.step.given]):
                self._tell(line)
            self._advice = self._plans.advice(workload, self.plan)
        except (InfeasibleError, PlanMismatchError):
            raise
        except MemfitError as e:
            if not self._under:
                raise
            under, kind.is_planned, is_kept = self._under, False, False
            self.plan = self.plan or under[0][1]
            self._tell(
                f"memfit: the loop can't be planned as it is ({first_line(e)}), so each of its modules keeps"
                " a plan of its own. Memory that your loop keeps outside of these modules is not in the"
                " prediction"
            )
        kind.step = kind.step.light()
        self._kinds, self._under, self._unplanned = kinds, under, []
        self._larger.forget()
        self._larger.promise([known.step for known in kinds])
        self._growth_anew()
        self._proven, self._checked = [], 0
        watcher.rest()
        for model, plan in under:
            self._switch(model, plan)
        self._note("\n".join([str(self.plan), *self._advice]))
        if is_kept:
            self._note("memfit: an earlier start of this program made this plan; nothing was solved again")
        for line in untrained_texts(self._optimizers(), watcher.optimizers):
            self._tell_once(line, line)

    def _tell_first(self, workload: LoopWorkload, plan: Plan) -> None:
        """Tell where the first step took more than the budget: it ran under a plan for its module by itself."""
        if self._kinds or [module for module, _ in self._under] != [workload.model]:
            return
        first = self._under[0][1]
        if plan.plain.peak_bytes <= plan.budget_bytes or first.levers == plan.levers:
            return
        with contextlib.suppress(MemfitError), generators_kept(workload.tape):
            took = self._plans.first_peak_bytes(first, workload)
            if took > plan.budget_bytes:
                self._tell(
                    f"memfit: the first step needed about {format_bytes(took)}, over the budget of"
                    f" {format_bytes(plan.budget_bytes)}: memfit did not know its loss before it ran"
                )

    def _growth_anew(self) -> None:
        """Watch the memory that is held between steps, from the next one on."""
        if self._growth is not None:
            self._growth.begin_anew()
            return

        def budget() -> tuple[int, int]:
            assert self.plan is not None
            return self.plan.budget_bytes, self.plan.predicted.peak_bytes

        device = next((p.device for root in self._watcher.roots for p in root.parameters()), torch.device("cpu"))
        self._growth = Growth(device, budget, lambda text: self._tell(f"memfit: {text}"))

    def _updated(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """See to an update by an optimizer: the first of each step is where held memory is looked at."""
        if not self._watcher.is_here():
            return
        self._log.update()
        if self._growth is None:
            return
        counted = self._counted()
        if counted is None:
            self._counted = weakref.ref(optimizer)
        elif counted is optimizer:
            self._growth.stepped()

    def _switch(self, model: nn.Module, plan: Plan) -> None:
        """Switch a plan on. Its first steps hold what is recomputed against what was computed."""
        self._levers.enter_context(switched(model, plan.levers))
        if not plan.is_proven:
            self._proving.enter_context(checking())

    def _optimizers_of(self, modules: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
        return _updating(self._optimizers(), (p for module in modules for p in self._watcher.held_by(module)))


@checked
def fit(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    budget: int | float | str | None = None,
    plan: Plan | Path | str | None = None,
    numerics: Numerics = "exact",
    host_budget: int | str | None = None,
    time_limit_seconds: float = 10.0,
    tell: Callable[[str], None] | None = None,
    progress: Progress = silent,
    log: LogFunction | None = None,
) -> contextlib.AbstractContextManager[Fitted]:
    """Fit your own training loop, unchanged, into a memory budget: the loop that runs in this context.

    The first step is watched where it runs; the steps after it run under the plan for it. Modules are recomputed in the
    backward pass, their norms and activations made again, and, on a GPU with `host_budget`, kept in host memory. What
    the loop itself would have to do (microbatches, another precision) is told.

    Args:
        model: The model, or the models, that the loop trains.
        optimizer: The optimizer, or the optimizers, that it steps.
        budget: Bytes, a string with a unit ("1.5GiB"), or a share of the device's memory ("90%") or of the plain
            step's peak ("0.5x"). Give this or `plan`.
        plan: A plan to begin with, or its file: `Fitted.plan` of an earlier run of this loop. Nothing is planned while
            it holds the loop's steps. Its budget, numerics and host budget are taken.
        numerics: "exact", or "reordered", with which losses are chunked too, where their logits are large.
        host_budget: As of `memfit.plan`.
        time_limit_seconds: As of `memfit.plan`; the plan for the first step takes half a second of it at most, and
            the frontier too.
        tell: Takes what is to be said; None writes it to standard error.
        progress: Called with (stage, done, total) while memfit plans.
        log: Given a dict for each step: `step`, `seconds`, `peak_bytes` (None where it was not measured, as on the CPU)
            and `predicted_peak_bytes`, for an experiment tracker. Its errors end the loop as they are.

    Warns:
        RuntimeWarning: The context is dropped without having been entered.

    Raises:
        BudgetError: `budget` can't be parsed.
        PlanMismatchError: `plan` was made for another model, optimizer or device.
        InfeasibleError: No plan fits. The loop ends where its second step begins, whatever it makes of exceptions; the
            error is raised where the context is left. The first step was made.
        UsageError: What the loop does can't be planned where it runs, such as an optimizer that needs a closure.
    """
    begins, options = _settled(budget, plan, numerics, host_budget)
    options["time_limit_seconds"] = time_limit_seconds
    given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not _updating(given, (p for model in models for p in model.parameters())):
        updates, trained = (" and ".join(type(each).__name__ for each in both) for both in (given, models))
        raise UsageError(
            f"optimizer is {updates} of other parameters than those of model, {trained}: create it from this model, as"
            f" {type(given[0]).__name__}(model.parameters())"
        )
    write = tell or functools.partial(print, file=sys.stderr, flush=True)
    listener = Listener(write, stages=lambda: contextlib.nullcontext(progress), log=log)
    return _Fitting(Fitted(lambda: given, options, listener, begins), given)


class _Fitting(contextlib.AbstractContextManager["Fitted", None]):
    """The context of a fitted loop; where it is dropped without having been entered, that is told."""

    _active: ClassVar[list[_Fitting]] = []

    def __init__(self, fitted: Fitted, optimizers: list[torch.optim.Optimizer]) -> None:
        self._fitted, self._optimizers, self._entered = fitted, optimizers, contextlib.ExitStack()
        self._unused = on_unused(
            self, "memfit.fit(...) was not entered, so nothing is planned: write `with memfit.fit(...):`"
        )

    @public
    def __enter__(self) -> Fitted:
        self._unused.detach()
        fitted = [id(optimizer) for other in self._active for optimizer in other._optimizers]
        for optimizer in self._optimizers:
            if id(optimizer) in fitted:
                raise UsageError(
                    f"memfit.fit is called a second time for the optimizer {type(optimizer).__name__}, within the first"
                    " one's `with` block: leave out one of the two"
                )
        self._entered.enter_context(LOOP.spoken())
        self._entered.enter_context(self._fitted.watching())
        self._active.append(self)
        return self._fitted

    @public
    def __exit__(self, *error: Any) -> None:
        self._active.remove(self)
        self._entered.__exit__(*error)


@contextlib.contextmanager
def fit_whatever_trains(
    *,
    budget: int | float | str | None = None,
    plan: Plan | None = None,
    numerics: Numerics = "exact",
    host_budget: int | str | None = None,
    listener: Listener,
) -> Iterator[Fitted]:
    """Fit the loop that runs in this context into a budget, with the optimizers that it makes; see `fit`, `Fitted`."""
    given, options = _settled(budget, plan, numerics, host_budget)
    made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
    initialise = torch.optim.Optimizer.__init__

    def initialise_and_note(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        made.add(optimizer)
        initialise(optimizer, *args, **kwargs)

    fitted = Fitted(lambda: list(made), options, listener, given)
    with replaced(torch.optim.Optimizer, "__init__", initialise_and_note), LOOP.spoken(), fitted.watching():
        yield fitted


def _updating(optimizers: Iterable[torch.optim.Optimizer], parameters: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that update one of some parameters."""
    held = set(map(id, parameters))
    return [o for o in optimizers if any(id(p) in held for p in parameters_of(o))]


def _settled(
    budget: int | float | str | None, plan: Plan | Path | str | None, numerics: Numerics, host_budget: int | str | None
) -> tuple[Plan | None, dict[str, Any]]:
    """Return the plan to begin with, if there is one, and the options of `memfit.plan`, both checked."""
    if (budget is None) == (plan is None):
        raise UsageError("give one of budget= and plan=")
    given = plan_given(plan)
    if given is not None:
        budget, numerics, host_budget = f"{given.budget_bytes}B", given.allowed, given.host_budget_bytes or None
    assert budget is not None
    read_budget(budget)
    if numerics not in ("exact", "reordered"):
        raise UsageError(f"numerics={numerics!r} can't be used for an unchanged loop: use 'exact' or 'reordered'")
    return given, {"budget": budget, "numerics": numerics, "host_budget": host_budget}
