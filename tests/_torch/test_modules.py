"""What memfit relies on of the bases of PyTorch's layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit import _torch


@pytest.mark.parametrize(
    ("layer", "bases"),
    [
        (nn.BatchNorm1d(2), {_torch.BatchNormBase, _torch.NormBase}),
        (nn.BatchNorm3d(2), {_torch.BatchNormBase, _torch.NormBase}),
        (nn.SyncBatchNorm(2), {_torch.BatchNormBase, _torch.NormBase}),
        (nn.InstanceNorm2d(2), {_torch.InstanceNormBase, _torch.NormBase}),
        (nn.Dropout(), {_torch.DropoutBase}),
        (nn.AlphaDropout(), {_torch.DropoutBase}),
        (nn.LayerNorm(2), set()),
        (nn.GroupNorm(1, 2), set()),
    ],
)
def test_layers_have_their_bases(layer: nn.Module, bases: set[type]) -> None:
    known = (_torch.BatchNormBase, _torch.DropoutBase, _torch.InstanceNormBase, _torch.NormBase)
    assert {base for base in known if isinstance(layer, base)} == bases


def test_modules_are_converted_by_the_replacement_and_then_by_what_was_there_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls of `apply_as_its_class` too; another library's method stays in place."""
    seen: list[str] = []

    def noting(name: str, original: _torch.Apply) -> _torch.Apply:
        def apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
            seen.append(name)
            return original(module, fn, recurse=recurse)

        return apply

    monkeypatch.setattr(nn.Module, "_apply", noting("another library's", nn.Module._apply))
    layer = nn.Linear(2, 2)
    with _torch.converted_by(lambda original: noting("the replacement", original)):
        layer.double()
        _torch.apply_as_its_class(layer, torch.Tensor.double)
    assert seen == ["the replacement", "another library's"] * 2 and layer.weight.dtype is torch.float64
    layer.float()
    assert seen[4:] == ["another library's"] and layer.weight.dtype is torch.float32


def test_a_modules_own_mappings_are_those_that_it_uses() -> None:
    """By `own_modules`, `own_parameters` and `own_buffers`: what is put there is there."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    assert _torch.own_modules(model) == {"0": model[0]} and _torch.own_parameters(model) == {} == _torch.own_buffers(
        model
    )
    assert _torch.own_parameters(model[0]).keys() == {"weight", "bias"}
    _torch.own_buffers(model[0])["running_mean"] = mean = torch.ones(2)
    assert model[0].running_mean is mean


def test_forward_hooks_and_forward_pre_hooks_run_unless_set_forward_hooks_puts_others_there() -> None:
    calls: list[str] = []
    layer = nn.Identity()
    layer.register_forward_hook(lambda *_: calls.append("after"))
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    assert len(_torch.forward_hooks(layer)) == len(_torch.forward_pre_hooks(layer)) == 1
    layer(torch.ones(1))
    _torch.set_forward_hooks(layer, {}, {})
    layer(torch.ones(1))
    assert calls == ["before", "after"] and not _torch.forward_hooks(layer) and not _torch.forward_pre_hooks(layer)


def test_all_forward_hooks_have_the_hooks_and_the_notes_about_them_and_no_others() -> None:
    layer = nn.Linear(1, 1)
    handles = [
        layer.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True),
        layer.register_forward_pre_hook(lambda *_: None, with_kwargs=True),
    ]
    found = [set(mapping.keys()) for mapping in _torch.all_forward_hooks(layer)]
    after, before = ({handle.id} for handle in handles)
    assert found == [after, before, after, before, after]
    state = {name: value for name, value in vars(layer).items() if "forward" in name and value}
    assert all(any(value is mapping for mapping in _torch.all_forward_hooks(layer)) for value in state.values())
    for handle in handles:
        handle.remove()
    assert not any(_torch.all_forward_hooks(layer))


def test_hooks_are_changed_in_place_and_their_handles_hold_the_mapping() -> None:
    layer = nn.Identity()
    handle = layer.register_forward_hook(lambda module, given, out: out + 1)
    hooks = _torch.forward_hooks(layer)
    (hook,) = hooks.values()
    hooks.clear()
    assert layer(torch.ones(1)).item() == 1
    hooks[handle.id] = hook
    assert layer(torch.ones(1)).item() == 2
    handle.remove()
    assert not hooks and layer(torch.ones(1)).item() == 1


def test_backward_hooks_are_those_of_a_modules_backward_pass() -> None:
    layer, seen = nn.Linear(1, 1), []
    handles = [
        layer.register_full_backward_hook(lambda *_: seen.append("after")),
        layer.register_full_backward_pre_hook(lambda *_: seen.append("before")),
    ]
    assert [list(hooks) for hooks in _torch.backward_hooks(layer)] == [[handle.id] for handle in handles]
    layer(torch.ones(1, requires_grad=True)).sum().backward()
    assert seen == ["before", "after"]
    for handle in handles:
        handle.remove()
    assert not any(_torch.backward_hooks(layer))


def test_compiled_call_is_there_once_a_module_was_compiled_in_place() -> None:
    layer = nn.Linear(1, 1)
    assert _torch.compiled_call(layer) is None
    layer.compile(backend="eager")
    assert _torch.compiled_call(layer) is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, ValueError])
def test_calls_that_end_by_an_exception_of_any_kind_undo_what_hooks_noted(error: type[BaseException]) -> None:
    """Hooks that are always called are not after a BaseException; compiled calls, and copies, are as they were."""

    def fail(*_: Any) -> None:
        raise error

    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Identity())
    running: list[nn.Module] = []
    always: list[nn.Module] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, given: running.append(module))
        module.register_forward_hook(lambda module, given, out: always.append(module), always_call=True)
    model[0][0].register_forward_hook(fail)

    def begun() -> Callable[[], None]:
        depth = len(running)
        return lambda: running.__delitem__(slice(depth, None))

    with _torch.undone_by_exceptions(model, begun):
        with pytest.raises(error):
            model(torch.ones(1))
        assert running == [] and (len(always) == 3) == issubclass(error, Exception)
        assert copy.deepcopy(model)[1](torch.ones(1)).item() == 1
        with _torch.untold_calls(model), pytest.raises(error):
            assert not any("_call_impl" in vars(module) for module in model.modules())
            model(torch.ones(1))
        assert len(running) == 4 and all("_call_impl" in vars(module) for module in model.modules())
    assert not any("_call_impl" in vars(module) for module in model.modules())


def test_hooks_of_all_modules_are_found() -> None:
    def hook(*_: object) -> None:
        """Do nothing."""

    registered = (
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
    )
    assert _torch.hooks_of_all_modules() == []
    handles = [register(hook) for register in registered]
    assert _torch.hooks_of_all_modules() == [hook] * 4
    for handle in handles:
        handle.remove()


def made() -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize("told", [_torch.mark_as_stepped, _torch.count_step, None])
def test_a_scheduler_warns_of_a_step_before_its_optimizers_unless_it_was_told(told: object) -> None:
    """By `mark_as_stepped` or `count_step`."""
    optimizer, scheduler = made()
    if told is _torch.mark_as_stepped:
        _torch.mark_as_stepped(optimizer)
    elif told is _torch.count_step:
        _torch.count_step(scheduler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
    assert bool(caught) is (told is None)


def test_hooks_of_steps_are_found() -> None:
    optimizer, _ = made()  # whose scheduler counts its steps
    pre, post = _torch.hooks_of_all()
    assert not _torch.step_hooks(optimizer) and not pre and not post

    def hook(*_: object) -> None:
        """Do nothing."""

    handles = [
        optimizer.register_step_pre_hook(hook),
        optimizer.register_step_post_hook(hook),
        register_optimizer_step_pre_hook(hook),
        register_optimizer_step_post_hook(hook),
    ]
    assert _torch.step_hooks(optimizer) == [hook] * 4 and [*pre.values(), *post.values()] == [hook] * 2
    for handle in handles:
        handle.remove()
    optimizer.step = hook  # type: ignore[method-assign, assignment]
    assert _torch.step_hooks(optimizer) == [hook]
