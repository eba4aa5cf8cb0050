"""Wrong first arguments: what was given and what to type, before anything is captured."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit._torch import FakeTensor, FakeTensorMode
from memfit.errors import UsageError
from memfit.ir import Plan
from memfit.workload import Workload

BUDGET = "1GiB"
CALLED = "loss_fn was called"  # printed: what it writes to variables is set back after a capture


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    print(CALLED)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def of_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, labels)


def make_workload() -> Workload:
    print(CALLED)
    return workload()


MODEL = nn.Sequential(nn.Linear(8, 4))
OTHER = nn.Sequential(nn.Linear(8, 4))
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())
SCHEDULER = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)
BATCH = (torch.ones(6, 8), torch.zeros(6, dtype=torch.int64))
DATA = torch.utils.data.TensorDataset(*BATCH)
LOADER = torch.utils.data.DataLoader(DATA, batch_size=3)


def workload(**fields: Any) -> Workload:
    return Workload(**{"model": MODEL, "batch": BATCH, "loss_fn": loss_fn, "optimizer": OPTIMIZER, **fields})


@pytest.fixture(scope="module")
def plan() -> Plan:
    return memfit.plan(workload(), budget=BUDGET, points=1, measure=False)


def planned(given: Any, **options: Any) -> Any:
    return memfit.plan(given, **{"budget": BUDGET, **options})


OF_WORKLOAD = "memfit.Workload(model, batch, loss_fn, optimizer)"
ORDER = "write Workload(model, batch, loss_fn, optimizer) in this order"
CRITERION = "write loss_fn=lambda model, batch: {}(model(batch[0]), batch[1])"

FIRST: dict[str, tuple[Callable[[Plan], Any], list[str]]] = {
    "a model for a workload": (
        lambda plan: planned(MODEL),
        ["workload is the model Sequential", f'memfit.plan({OF_WORKLOAD}, budget="90%")'],
    ),
    "all that a workload holds": (
        lambda plan: memfit.plan(MODEL, BATCH, loss_fn, OPTIMIZER, budget=BUDGET),  # type: ignore[call-arg, arg-type]
        ["workload is the model Sequential", f"memfit.plan({OF_WORKLOAD}"],
    ),
    "a function for its result": (
        lambda plan: planned(make_workload),
        ["workload is the function make_workload", 'memfit.plan(make_workload(), budget="90%")'],
    ),
    "a lambda": (lambda plan: planned(lambda: workload()), ["workload is a lambda", f"memfit.plan({OF_WORKLOAD}"]),
    "the class": (lambda plan: planned(Workload), ["workload is the class Workload", f"memfit.plan({OF_WORKLOAD}"]),
    "a forgotten return": (lambda plan: planned(None), ["workload is None", "with `return workload`"]),
    "a workload's name": (
        lambda plan: planned("train.py:workload"),
        ["workload is 'train.py:workload'", "memfit.load_workload('train.py:workload')"],
    ),
    "a plan for a workload": (lambda plan: planned(plan), ["workload is a Plan", OF_WORKLOAD]),
    "a budget by position": (
        lambda plan: memfit.plan(workload(), BUDGET),  # type: ignore[call-arg, misc]
        ["memfit.plan: too many positional arguments", 'memfit.plan(workload, budget="90%")'],
    ),
    "no budget": (
        lambda plan: memfit.plan(workload()),  # type: ignore[call-arg]
        ["missing a required argument: 'budget'", 'memfit.plan(workload, budget="90%")'],
    ),
    "a model to estimate": (
        lambda plan: memfit.estimate(MODEL),  # type: ignore[arg-type]
        ["workload is the model Sequential", f"memfit.estimate({OF_WORKLOAD})"],
    ),
    "a model for a fleet": (
        lambda plan: memfit.fleet(MODEL, steps=9),  # type: ignore[arg-type]
        ["workload is the model Sequential", f"memfit.fleet({OF_WORKLOAD}, steps=10_000)"],
    ),
    "apply, swapped": (
        lambda plan: memfit.apply(workload(), plan),  # type: ignore[arg-type]
        ["plan is a Workload, and workload is a Plan", "memfit.apply(plan, workload) in this order"],
    ),
    "verify, swapped": (
        lambda plan: memfit.verify(workload(), plan),  # type: ignore[arg-type]
        ["plan is a Workload, and workload is a Plan", "memfit.verify(plan, workload) in this order"],
    ),
    "train, swapped": (
        lambda plan: memfit.train(workload(), plan, out="run"),  # type: ignore[arg-type]
        ["plan is a Workload, and workload is a Plan", 'memfit.train(plan, workload, out="run") in this order'],
    ),
    "a plan for a model": (
        lambda plan: memfit.train(plan, MODEL, out="run"),  # type: ignore[arg-type]
        ["workload is the model Sequential", f'memfit.train(plan, {OF_WORKLOAD}, out="run")'],
    ),
    "a plan's dict": (
        lambda plan: memfit.apply({"levers": {}}, workload()),  # type: ignore[arg-type]
        ["plan is a dict", "memfit.apply(memfit.Plan.load(path), workload)"],
    ),
    "a plan's file": (
        lambda plan: memfit.apply("plan.json", workload()),  # type: ignore[arg-type]
        ["plan is 'plan.json'", "memfit.apply(memfit.Plan.load('plan.json'), workload)"],
    ),
    "a plan's path": (
        lambda plan: memfit.verify(Path("plan.json"), workload()),  # type: ignore[arg-type]
        ["plan is a", "memfit.verify(memfit.Plan.load('plan.json'), workload)"],
    ),
    "a plan for a run": (
        lambda plan: memfit.write_report(plan),  # type: ignore[arg-type]
        ["run is a Plan, not the folder of a run", 'memfit.write_report("run")'],
    ),
    "fit, a name": (
        lambda plan: memfit.fit(MODEL, "adamw", budget=BUDGET),
        ["optimizer is 'adamw'", 'memfit.fit(model, torch.optim.AdamW(model.parameters()), budget="90%")'],
    ),
    "fit, a class": (
        lambda plan: memfit.fit(MODEL, torch.optim.SGD, budget=BUDGET),  # type: ignore[arg-type]
        ["optimizer is the class SGD", "memfit.fit(model, SGD(model.parameters())"],
    ),
    "fit, parameters": (
        lambda plan: memfit.fit(MODEL, list(MODEL.parameters()), budget=BUDGET),  # type: ignore[arg-type]
        ["optimizer is a list", "memfit.fit(model, torch.optim.AdamW(model.parameters())"],
    ),
    "fit, a scheduler": (
        lambda plan: memfit.fit(MODEL, SCHEDULER, budget=BUDGET),  # type: ignore[arg-type]
        ["optimizer is the scheduler StepLR", "memfit.fit(model, scheduler.optimizer"],
    ),
    "fit, swapped": (
        lambda plan: memfit.fit(OPTIMIZER, MODEL, budget=BUDGET),  # type: ignore[arg-type]
        ["model is the optimizer AdamW, and optimizer is the model Sequential", "in this order"],
    ),
    "fit, no optimizer": (
        lambda plan: memfit.fit(MODEL, budget=BUDGET),  # type: ignore[call-arg]
        ["missing a required argument: 'optimizer'", 'memfit.fit(model, optimizer, budget="90%")'],
    ),
    "fit, a workload": (
        lambda plan: memfit.fit(workload(), OPTIMIZER, budget=BUDGET),  # type: ignore[arg-type]
        ["model is a Workload", "memfit.fit(workload.model, optimizer"],
    ),
    "fit, another model's": (
        lambda plan: memfit.fit(OTHER, OPTIMIZER, budget=BUDGET),
        ["optimizer is AdamW of other parameters", "create it from this model, as AdamW(model.parameters())"],
    ),
    "fit, numerics": (
        lambda plan: memfit.fit(MODEL, OPTIMIZER, budget=BUDGET, numerics="fast"),  # type: ignore[arg-type]
        ["numerics='fast'", "use 'exact' or 'reordered'"],
    ),
    "a lambda for a model": (lambda plan: workload(model=lambda x: x), ["Workload.model is a lambda", "forward()"]),
    "a model's class": (
        lambda plan: workload(model=nn.Linear),
        ["Workload.model is the class Linear", "create it: model = Linear(...)"],
    ),
    "a wrapped model": (
        lambda plan: planned(workload(model=nn.DataParallel(MODEL))),
        ["Workload.model is a DataParallel", "give the model inside, Workload.model.module"],
    ),
    "an optimizer's class": (
        lambda plan: workload(optimizer=torch.optim.AdamW),
        ["optimizer is the class AdamW; create it: AdamW(model.parameters())"],
    ),
    "an optimizer's name": (
        lambda plan: workload(optimizer="adamw"),
        ["Workload.optimizer is 'adamw'", "such as torch.optim.AdamW(model.parameters())"],
    ),
    "parameters for an optimizer": (
        lambda plan: workload(optimizer=MODEL.parameters()),
        ["Workload.optimizer is a generator", "such as torch.optim.AdamW(model.parameters())"],
    ),
    "a scheduler for an optimizer": (
        lambda plan: workload(optimizer=SCHEDULER),
        ["Workload.optimizer is the scheduler StepLR", "the scheduler as scheduler="],
    ),
    "an optimizer of another model": (
        lambda plan: planned(workload(model=OTHER)),
        ["Workload.optimizer is the optimizer AdamW over 2 tensors", ": AdamW(model.parameters())"],
    ),
    "batch and loss swapped": (
        lambda plan: Workload(MODEL, loss_fn, BATCH, OPTIMIZER),  # type: ignore[arg-type]
        ["Workload.batch is the function loss_fn, and Workload.loss_fn is a tuple", ORDER],
    ),
    "loss and optimizer swapped": (
        lambda plan: Workload(MODEL, BATCH, OPTIMIZER, loss_fn),  # type: ignore[arg-type]
        ["Workload.loss_fn is the optimizer AdamW, and Workload.optimizer is the function loss_fn", ORDER],
    ),
    "model and batch swapped": (
        lambda plan: Workload(BATCH, MODEL, loss_fn, OPTIMIZER),  # type: ignore[arg-type]
        ["Workload.model is a tuple, and Workload.batch is the model Sequential", ORDER],
    ),
    "three in another order": (
        lambda plan: Workload(MODEL, OPTIMIZER, loss_fn, BATCH),  # type: ignore[arg-type]
        ["Workload.batch is the optimizer AdamW", ORDER],
    ),
    "a criterion": (
        lambda plan: workload(loss_fn=nn.CrossEntropyLoss()),
        ["Workload.loss_fn is a CrossEntropyLoss", CRITERION.format("nn.CrossEntropyLoss()")],
    ),
    "a criterion's class": (
        lambda plan: workload(loss_fn=nn.MSELoss),
        ["Workload.loss_fn is the class MSELoss", CRITERION.format("nn.MSELoss()")],
    ),
    "a functional criterion": (
        lambda plan: workload(loss_fn=nn.functional.cross_entropy),
        ["Workload.loss_fn is the function cross_entropy", CRITERION.format("F.cross_entropy")],
    ),
    "a criterion of one's own": (
        lambda plan: workload(loss_fn=of_logits),
        ["Workload.loss_fn is the function of_logits", CRITERION.format("of_logits")],
    ),
    "a loss of one argument": (
        lambda plan: workload(loss_fn=lambda batch: batch),
        ["Workload.loss_fn is a lambda, which takes (batch)", "memfit calls loss_fn(model, batch)"],
    ),
    "a loss, computed": (
        lambda plan: workload(loss_fn=torch.ones(())),
        ["Workload.loss_fn is a tensor of shape ()", "give a function loss_fn(model, batch)"],
    ),
    "a loader": (lambda plan: workload(batch=LOADER), ["Workload.batch is a DataLoader", "next(iter(loader))"]),
    "a data set": (lambda plan: workload(batch=DATA), ["Workload.batch is a TensorDataset", "next(iter(loader))"]),
    "a loader's iterator": (lambda plan: workload(batch=iter(LOADER)), ["Workload.batch is a", "next(iterator)"]),
    "a generator": (
        lambda plan: workload(batch=(part for part in [BATCH])),
        ["Workload.batch is a generator", "next(iterator)"],
    ),
    "no batch": (lambda plan: workload(batch=None), ["Workload.batch is None", "next(iter(loader))", "batch_size=1"]),
    "a shape for a batch": (
        lambda plan: planned(workload(batch=(6, 8))),
        ["Workload.batch has no samples: it is a tuple without a tensor", "such as torch.randn(6, 8)"],
    ),
    "a budget that is a tensor": (lambda plan: planned(workload(), budget=torch.ones(())), ["budget is a Tensor"]),
    "a budget that is missing": (lambda plan: planned(workload(), budget=None), ["budget is None", "('90%')"]),
    "a budget that is a share": (lambda plan: planned(workload(), budget=0.9), ["budget is 0.9", "budget='90%'"]),
    "numerics": (
        lambda plan: planned(workload(), numerics="fast"),
        ["numerics='fast' is unknown", "exact, reordered, reduced, changed"],
    ),
    "a device's number": (lambda plan: planned(workload(), device=0), ["device is 0", "'cuda:0'"]),
}


@pytest.mark.parametrize("case", FIRST)
def test_what_was_given_and_what_to_type_is_said_before_anything_is_captured(
    case: str, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    call, texts = FIRST[case]
    with pytest.raises(UsageError) as caught:
        call(plan)
    assert [text for text in texts if text not in str(caught.value)] == [], str(caught.value)
    assert CALLED not in capsys.readouterr().out


RETURNED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "nothing": (lambda loss: None, "Workload.loss_fn returned None: end it with `return loss`"),
    "a vector": (lambda loss: loss.expand(6), "a tensor of shape (6,): return one number, such as loss.mean()"),
    "a detached loss": (
        lambda loss: loss.detach(),
        "returned a loss without a gradient: compute it with the first argument of loss_fn",
    ),
    "a number": (lambda loss: 0.5, "returned the number 0.5, not a tensor: return the loss without .item()"),
    "a dict": (lambda loss: {"loss": loss}, "returned a dict: return only the loss, such as output['loss']"),
    "another model's loss": (
        lambda loss: OTHER(BATCH[0]).mean(),
        "depends on no parameter of Workload.optimizer: compute it with the first argument of loss_fn",
    ),
}


@pytest.mark.parametrize("returned", RETURNED)
def test_a_wrong_loss_is_told_after_one_forward_pass(returned: str, capsys: pytest.CaptureFixture[str]) -> None:
    value, message = RETURNED[returned]
    with pytest.raises(UsageError) as caught:
        planned(workload(loss_fn=lambda model, batch: value(loss_fn(model, batch))))
    assert message in str(caught.value)
    assert capsys.readouterr().out.count(CALLED) == 1


def test_a_batch_on_another_device_than_the_model_is_refused() -> None:
    batch = FakeTensor(FakeTensorMode(), torch.empty(2, 8, device="meta"), torch.device("cuda:1"))
    given = Workload(MODEL, batch, lambda model, batch: model(batch).mean(), OPTIMIZER)
    with pytest.raises(UsageError, match=r"batch is on cuda:1, and Workload.model is on cpu: .* batch.to\('cpu'\)"):
        memfit.estimate(given)


def test_a_torch_device_is_a_device() -> None:
    assert memfit.estimate(workload(), device=torch.device("cpu")).peak_bytes > 0


def test_a_loop_is_fitted_once_at_a_time() -> None:
    with memfit.fit(MODEL, OPTIMIZER, budget=BUDGET, tell=lambda text: None):
        with pytest.raises(UsageError, match="a second time for the optimizer AdamW.*leave out one of the two"):
            with memfit.fit(MODEL, OPTIMIZER, budget=BUDGET):
                pass
    with memfit.fit(MODEL, OPTIMIZER, budget=BUDGET, tell=lambda text: None):
        pass


def test_all_public_functions_of_a_workload_check_it() -> None:
    functions = [getattr(memfit, name) for name in memfit.__all__ if inspect.isfunction(getattr(memfit, name))]
    taking = [f for f in functions if "workload" in inspect.signature(f).parameters]
    assert len(taking) >= 6
    for function in taking:
        with pytest.raises(UsageError, match="is a Generator, not a memfit"):
            function(torch.Generator())
