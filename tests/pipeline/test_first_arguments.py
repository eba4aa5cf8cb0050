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


FIRST = r"""
planned(MODEL) | workload is the model Sequential | memfit.plan(memfit.Workload(...), budget="90%")
memfit.plan(MODEL, BATCH, loss_fn, OPTIMIZER, budget=BUDGET) | workload is the model Sequential
    | memfit.plan(memfit.Workload(...)
planned(make_workload) | workload is the function make_workload | memfit.plan(make_workload(), budget="90%")
planned(lambda: workload()) | workload is a lambda | memfit.plan(memfit.Workload(...)
planned(Workload) | workload is the class Workload | memfit.plan(memfit.Workload(...)
planned(None) | workload is None | with `return workload`
planned("train.py:workload") | workload is 'train.py:workload' | memfit.load_workload('train.py:workload')
planned(plan) | workload is a Plan | Workload(...)
memfit.plan(workload(), BUDGET) | memfit.plan: too many positional arguments | memfit.plan(workload, budget="90%")
memfit.plan(workload()) | missing a required argument: 'budget' | memfit.plan(workload, budget="90%")
memfit.estimate(MODEL) | workload is the model Sequential | memfit.estimate(memfit.Workload(...))
memfit.fleet(MODEL, steps=9) | workload is the model Sequential | memfit.fleet(memfit.Workload(...), steps=10_000)
memfit.apply(workload(), plan) | plan is a Workload, and workload is a Plan
    | memfit.apply(plan, workload) in this order
memfit.verify(workload(), plan) | plan is a Workload, and workload is a Plan
    | memfit.verify(plan, workload) in this order
memfit.train(workload(), plan, out="run") | plan is a Workload, and workload is a Plan
    | memfit.train(plan, workload, out="run") in this order
memfit.train(plan, MODEL, out="run") | workload is the model Sequential
    | memfit.train(plan, memfit.Workload(...), out="run")
memfit.apply({"levers": {}}, workload()) | plan is a dict | memfit.apply(memfit.Plan.load(path), workload)
memfit.apply("plan.json", workload()) | plan is 'plan.json' | memfit.apply(memfit.Plan.load('plan.json'), workload)
memfit.verify(Path("plan.json"), workload()) | plan is a | memfit.verify(memfit.Plan.load('plan.json'), workload)
memfit.write_report(plan) | run is a Plan, not the folder of a run | memfit.write_report("run")
memfit.fit(MODEL, "adamw", budget=BUDGET) | optimizer is 'adamw'
    | memfit.fit(model, torch.optim.AdamW(model.parameters()), budget="90%")
memfit.fit(MODEL, torch.optim.SGD, budget=BUDGET) | optimizer is the class SGD
    | memfit.fit(model, SGD(model.parameters())
memfit.fit(MODEL, list(MODEL.parameters()), budget=BUDGET) | optimizer is a list
    | memfit.fit(model, torch.optim.AdamW(model.parameters())
memfit.fit(MODEL, SCHEDULER, budget=BUDGET) | optimizer is the scheduler StepLR
    | memfit.fit(model, scheduler.optimizer
memfit.fit(OPTIMIZER, MODEL, budget=BUDGET) | model is the optimizer AdamW, and optimizer is the model Sequential
    | in this order
memfit.fit(MODEL, budget=BUDGET) | missing a required argument: 'optimizer'
    | memfit.fit(model, optimizer, budget="90%")
memfit.fit(workload(), OPTIMIZER, budget=BUDGET) | model is a Workload | memfit.fit(workload.model, optimizer
memfit.fit(OTHER, OPTIMIZER, budget=BUDGET) | optimizer is AdamW of other parameters
    | create it from this model, as AdamW(model.parameters())
memfit.fit(MODEL, OPTIMIZER, budget=BUDGET, numerics="fast") | numerics='fast' | use 'exact' or 'reordered'
workload(model=lambda x: x) | Workload.model is a lambda | forward()
workload(model=nn.Linear) | Workload.model is the class Linear | create it: model = Linear(...)
planned(workload(model=nn.DataParallel(MODEL))) | Workload.model is a DataParallel
    | give the model inside, Workload.model.module
workload(optimizer=torch.optim.AdamW) | optimizer is the class AdamW; create it: AdamW(model.parameters())
workload(optimizer="adamw") | Workload.optimizer is 'adamw' | such as torch.optim.AdamW(model.parameters())
workload(optimizer=MODEL.parameters()) | Workload.optimizer is a generator
    | such as torch.optim.AdamW(model.parameters())
workload(optimizer=SCHEDULER) | Workload.optimizer is the scheduler StepLR | the scheduler as scheduler=
planned(workload(model=OTHER)) | Workload.optimizer is the optimizer AdamW over 2 tensors
    | : AdamW(model.parameters())
Workload(MODEL, loss_fn, BATCH, OPTIMIZER) | Workload.batch is the function loss_fn, and Workload.loss_fn is a tuple
    | write Workload(...) in this order
Workload(MODEL, BATCH, OPTIMIZER, loss_fn)
    | Workload.loss_fn is the optimizer AdamW, and Workload.optimizer is the function loss_fn
    | write Workload(...) in this order
Workload(BATCH, MODEL, loss_fn, OPTIMIZER) | Workload.model is a tuple, and Workload.batch is the model Sequential
    | write Workload(...) in this order
Workload(MODEL, OPTIMIZER, loss_fn, BATCH) | Workload.batch is the optimizer AdamW | write Workload(...) in this order
workload(loss_fn=nn.CrossEntropyLoss()) | Workload.loss_fn is a CrossEntropyLoss
    | write loss_fn=lambda model, batch: nn.CrossEntropyLoss()(model(batch[0]), batch[1])
workload(loss_fn=nn.MSELoss) | Workload.loss_fn is the class MSELoss
    | write loss_fn=lambda model, batch: nn.MSELoss()(model(batch[0]), batch[1])
workload(loss_fn=nn.functional.cross_entropy) | Workload.loss_fn is the function cross_entropy
    | write loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
workload(loss_fn=of_logits) | Workload.loss_fn is the function of_logits
    | write loss_fn=lambda model, batch: of_logits(model(batch[0]), batch[1])
workload(loss_fn=lambda batch: batch) | Workload.loss_fn is a lambda, which takes (batch)
    | memfit calls loss_fn(model, batch)
workload(loss_fn=torch.ones(())) | Workload.loss_fn is a tensor of shape () | give a function loss_fn(model, batch)
workload(batch=LOADER) | Workload.batch is a DataLoader | next(iter(loader))
workload(batch=DATA) | Workload.batch is a TensorDataset | next(iter(loader))
workload(batch=iter(LOADER)) | Workload.batch is a | next(iterator)
workload(batch=(part for part in [BATCH])) | Workload.batch is a generator | next(iterator)
workload(batch=None) | Workload.batch is None | next(iter(loader)) | batch_size=1
planned(workload(batch=(6, 8))) | Workload.batch has no samples: it is a tuple without a tensor
    | such as torch.randn(6, 8)
planned(workload(), budget=torch.ones(())) | budget is a Tensor
planned(workload(), budget=None) | budget is None | ('90%')
planned(workload(), budget=0.9) | budget is 0.9 | budget='90%'
planned(workload(), numerics="fast") | numerics='fast' is unknown | exact, reordered, reduced, changed
planned(workload(), device=0) | device is 0 | 'cuda:0'
"""
"""What somebody types, and what the answer says. `plan` is a plan, Workload(...) one of the four that are named."""
CASES = dict(line.split(" | ", 1) for line in FIRST.strip().replace("\n    | ", " | ").splitlines())


@pytest.mark.parametrize("code", CASES)
def test_what_was_given_and_what_to_type_is_said_before_anything_is_captured(
    code: str, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        eval(code, globals(), {"plan": plan, "Path": Path})
    said = str(caught.value).replace("Workload(model, batch, loss_fn, optimizer)", "Workload(...)")
    assert [text for text in CASES[code].split(" | ") if text not in said] == [], said
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
