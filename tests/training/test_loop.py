"""Described loops: what is predicted for them is what the same loop takes, written by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.capture import real_copy
from memfit.errors import WorkloadError
from memfit.hardware import allocated
from memfit.workload import Loop, Workload, precision_label

_STEPS = 3


def _classifier() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 300))
    return model, (torch.randn(96, 40), torch.randint(0, 300, (96,)))


def _convolutional() -> tuple[nn.Module, Any]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 50)
    )
    return model, (torch.randn(12, 3, 16, 16), torch.randint(0, 50, (12,)))


def _weights_only() -> tuple[nn.Module, Any]:
    """Return a model whose weights outweigh what it computes."""
    return nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 9)), (torch.randn(4, 300), torch.randint(0, 9, (4,)))


_MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "classifier": _classifier,
    "convolutional": _convolutional,
    "weights": _weights_only,
}


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def _workload(name: str, loop: Loop | None, *, update: bool = True) -> Workload:
    torch.manual_seed(0)
    model, batch = _MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if update else None
    return Workload(model, batch, _loss, optimizer, loop=loop)  # type: ignore[arg-type]


def _by_hand(workload: Workload, loop: Loop) -> None:
    """Run a few steps of a plain loop, as a user writes it."""
    model, (x, y), optimizer = workload.model, workload.batch, workload.optimizer
    out = loss = None
    for _ in range(_STEPS):
        if loop.inputs_require_grad:
            x = x.detach().requires_grad_()
        if loop.zero_grad == "before-forward":
            optimizer.zero_grad(set_to_none=loop.set_to_none)
        if loop.holds_outputs:
            out = model(x)
            loss = F.cross_entropy(out, y)
        else:
            loss = F.cross_entropy(model(x), y)
        if loop.zero_grad == "after-forward":
            optimizer.zero_grad(set_to_none=loop.set_to_none)
        loss.backward(retain_graph=loop.retain_graph)
        if loop.holds_outputs in ("", "backward"):
            out = loss = None
        optimizer.step()
        if loop.zero_grad == "after-step":
            optimizer.zero_grad(set_to_none=loop.set_to_none)
        if loop.holds_outputs == "step":
            out = loss = None
    del out


def _measured(workload: Workload, loop: Loop) -> tuple[int, int]:
    """Return the peak of a few steps by hand, and what is allocated after them."""
    with allocated() as meter:
        copied = real_copy(workload)
        _by_hand(copied, loop)
        held = copied
    assert held is not None
    return meter.peak_bytes, meter.net_bytes


LOOPS = {
    "memfit's own": Loop(),
    "a script": Loop(holds_outputs="next-forward"),
    "a function": Loop(holds_outputs="step", zero_grad="after-step"),
    "outputs through backward": Loop(holds_outputs="backward"),
    "zeroed after forward": Loop(zero_grad="after-forward"),
    "a script, zeroed after forward": Loop(holds_outputs="next-forward", zero_grad="after-forward"),
    "filled with zeros": Loop(set_to_none=False),
    "filled with zeros after forward": Loop(set_to_none=False, zero_grad="after-forward", holds_outputs="backward"),
    "retained": Loop(retain_graph=True),
    "retained in a script": Loop(retain_graph=True, holds_outputs="next-forward"),
    "inputs that require gradients": Loop(inputs_require_grad=True),
    "all at once": Loop("next-forward", "after-forward", False, True, True),
}


@pytest.mark.parametrize("name", sorted(_MODELS))
@pytest.mark.parametrize("which", sorted(LOOPS))
def test_described_loops_take_what_they_take_by_hand(which: str, name: str) -> None:
    workload = _workload(name, LOOPS[which])
    found = memfit.estimate(workload)
    assert found.peak_bytes == _measured(workload, LOOPS[which])[0]


@pytest.mark.parametrize("name", sorted(_MODELS))
def test_a_step_without_an_optimizer(name: str) -> None:
    workload = _workload(name, Loop(zero_grad="after-forward"), update=False)
    assert type(workload.optimizer).__name__ == "NoUpdate"
    found = memfit.estimate(workload)
    assert found.peak_bytes == _measured(workload, workload.loop or Loop())[0]
    memfit.apply(memfit.plan(workload, budget="1GiB", points=1), workload).close()


def test_options_change_what_is_predicted() -> None:
    peaks = {which: memfit.estimate(_workload("classifier", loop)).peak_bytes for which, loop in LOOPS.items()}
    assert peaks["memfit's own"] < peaks["a script"] < peaks["retained in a script"]
    assert len(set(peaks.values())) > 4


@pytest.mark.parametrize("which", ["memfit's own", "a function"])
def test_what_stays_after_a_step(which: str) -> None:
    workload = _workload("classifier", LOOPS[which])
    found = memfit.estimate(workload)
    own = memfit.estimate(_workload("classifier", None))
    gradients = sum(p.nbytes for p in workload.model.parameters())
    assert found.after_step_bytes is not None and own.after_step_bytes is not None
    assert found.after_step_bytes - own.after_step_bytes == (gradients if which == "memfit's own" else 0)
    assert found.after_step_bytes == _measured(workload, LOOPS[which])[1]


def test_phases_add_up_to_the_step() -> None:
    found = memfit.estimate(_workload("classifier", Loop()))
    assert list(found.phase_seconds) == ["forward", "backward", "optimizer"]
    assert sum(found.phase_seconds.values()) == pytest.approx(found.step_seconds)


def test_plans_say_that_they_run_memfits_own_order() -> None:
    plan = memfit.plan(_workload("classifier", Loop("next-forward")), budget="1GiB", points=1)
    assert any("memfit captured its own step" in note for note in plan.predicted.notes)


def test_unknown_options_are_named() -> None:
    with pytest.raises(WorkloadError, match=r"Loop\.zero_grad='never' is unknown"):
        Loop(zero_grad="never")  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["a script", "filled with zeros after forward"])
def test_pure_bfloat16_is_predicted_and_called_so(which: str) -> None:
    workload = _workload("weights", LOOPS[which])
    workload.model.bfloat16()
    x, y = workload.batch
    workload = dataclasses.replace(workload, batch=(x.bfloat16(), y))
    found = memfit.estimate(workload)
    assert found.peak_bytes == _measured(workload, LOOPS[which])[0]
    assert precision_label(workload, "32-true") == "pure bfloat16" and precision_label(workload, "tf32") == "tf32"
    assert any("pure bfloat16" in note for note in found.notes)


def test_mixed_precision_around_the_backward_pass_and_without_a_scaler() -> None:
    def peak(loop: Loop, precision: Any) -> int:
        return memfit.estimate(_workload("classifier", loop), precision=precision).peak_bytes

    assert peak(Loop(autocast_backward=True), "bf16-mixed") > 0
    assert peak(Loop(scales_loss=False), "16-mixed") <= peak(Loop(), "16-mixed")
