"""What memfit relies on of PyTorch's dispatcher and its modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._higher_order_ops import while_loop
from torch.overrides import TorchFunctionMode

from memfit._torch import dispatch

aten = torch.ops.aten


class Seen(dispatch.TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


class PassivelySeen(dispatch.PassiveMode, Seen):
    """Notes the operators that run, and leaves Dynamo to compile."""


class SeenInside(dispatch.EagerMode, Seen):
    """Notes the operators that run, those within higher-order operators too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


class Functions(TorchFunctionMode):
    """Notes the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A subclass that refuses every function, and every operator."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} came through")

    __torch_dispatch__ = __torch_function__


@pytest.mark.ci  # Dynamo rewrites the loop
def test_EagerMode_sees_the_operators_within_a_loop_and_refuses_what_Dynamo_rewrites() -> None:
    x = torch.ones(3)
    with SeenInside() as seen:
        count, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), (torch.tensor(0), x))
    assert seen.operators.count(aten.sin.default) == 3 and int(count) == 3 and torch.equal(y, x.sin().sin().sin())
    with SeenInside(), pytest.raises(dispatch.UnfollowedOperatorError, match="cond"):
        torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    assert dispatch.current_mode_stack() == []


def test_TorchDispatchMode_sees_each_operator_as_an_OpOverload_of_both_passes() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with Seen() as seen:
        torch.nn.functional.linear(x, torch.ones(4, 3)).sum().backward()
    assert all(isinstance(func, dispatch.OpOverload) for func in seen.operators)
    assert aten.mm.default in seen.operators and aten.sum.default in seen.operators


def test_disable_current_modes_hides_operators_from_the_modes_around() -> None:
    with Seen() as seen:
        with dispatch.disable_current_modes():
            torch.ones(2) + 1
        assert seen.operators == []
        torch.ones(2)
    assert seen.operators == [aten.ones.default]


@pytest.mark.parametrize(("mode", "compiled"), [(Seen(), 0), (PassivelySeen(), 1)], ids=["other", "passive"])
def test_PassiveMode_has_Dynamo_compile_and_sees_the_code_run(mode: Seen, compiled: int) -> None:
    torch._dynamo.reset()  # it remembers code that it left alone
    graphs, modes = [], []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module)
        modes.extend(dispatch.current_mode_stack())
        return module.forward

    function = torch.compile(lambda x: (x + 1).exp(), backend=backend)
    x = torch.ones(2)
    with mode:
        function(x)
    assert (len(graphs), modes) == (compiled, [])
    assert mode.operators == [aten.add.Tensor, aten.exp.default]


def test_current_mode_stack_is_of_the_modes_that_are_entered_innermost_last() -> None:
    with Seen() as outer, Seen() as inner:
        assert dispatch.current_mode_stack() == [outer, inner]
    assert dispatch.current_mode_stack() == []


def test_DispatchKey_and_below_autograd_run_a_composite_operator_as_its_parts() -> None:
    composite = dispatch.DispatchKey.CompositeImplicitAutograd
    x = torch.ones(2, 3)
    with Seen() as seen:
        aten.linear.default._op_dk(composite, x, torch.ones(4, 3), None)
    assert aten.linear.default not in seen.operators and aten.mm.default in seen.operators
    with dispatch.below_autograd():
        assert not (torch.ones(1, requires_grad=True) * 2).requires_grad


def test_exclude_dispatch_key_of_ADInplaceOrView_has_an_alias_share_its_tensors_version() -> None:
    x = torch.ones(2)
    with dispatch.exclude_dispatch_key(dispatch.DispatchKey.ADInplaceOrView, False):
        alias = x.detach()
    x.add_(1)
    assert alias._version == x._version == 1


@pytest.mark.parametrize("name", ["DisableTorchFunction", "DisableTorchFunctionSubclass"])
def test_DisableTorchFunction_and_DisableTorchFunctionSubclass_let_functions_by(name: str) -> None:
    wrapped = torch.ones(2).as_subclass(Wrapped)
    with getattr(dispatch, name)():
        assert wrapped.dim() == 1
    with pytest.raises(AssertionError, match="came through"):
        wrapped.dim()


def test_disabled_torch_function_is_what_a_class_has_whose_functions_return_plain_tensors() -> None:
    class Quiet(torch.Tensor):
        __torch_function__ = dispatch.disabled_torch_function

    class Loud(torch.Tensor):
        pass

    assert type(torch.ones(2).as_subclass(Quiet) + 1) is torch.Tensor
    assert type(torch.ones(2).as_subclass(Loud) + 1) is Loud
    assert torch.nn.Parameter.__torch_function__ is dispatch.disabled_torch_function


def test_function_modes_are_a_stack_that_can_be_pushed_and_popped() -> None:
    outer, inner = Functions(), Functions()
    assert dispatch.get_current_function_mode() is None
    dispatch.push_function_mode(outer)
    dispatch.push_function_mode(inner)
    assert dispatch.get_current_function_mode() is inner
    assert list(dispatch.get_current_function_mode_stack()) == [outer, inner]
    with dispatch.pop_function_mode_temporarily():
        assert dispatch.get_current_function_mode() is outer
    assert dispatch.pop_function_mode() is inner and dispatch.pop_function_mode() is outer
    assert dispatch.get_current_function_mode() is None


def test_DeviceContext_is_what_a_device_as_a_context_puts_on_the_stack() -> None:
    with torch.device("meta"):
        (mode,) = dispatch.get_current_function_mode_stack()
        assert isinstance(mode, dispatch.DeviceContext) and mode.device.type == "meta"


def test_has_kernel_for_dispatch_key_tells_kernels_apart() -> None:
    assert dispatch.has_kernel_for_dispatch_key("aten::mm", "CPU")
    assert not dispatch.has_kernel_for_dispatch_key("aten::linear", "SparseCsrCPU")


def test_select_conv_backend_names_a_backend_by_the_arguments_of_a_convolution() -> None:
    x, weight = torch.ones(1, 2, 4, 4), torch.ones(2, 2, 3, 3)
    options = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert "Empty" not in str(dispatch.select_conv_backend(x, weight, *options))
    assert "Empty" in str(dispatch.select_conv_backend(x[:0], weight, *options))


def test_set_cudnn_enabled_is_what_get_cudnn_enabled_returns() -> None:
    before = dispatch.get_cudnn_enabled()
    try:
        dispatch.set_cudnn_enabled(not before)
        assert dispatch.get_cudnn_enabled() is not before
    finally:
        dispatch.set_cudnn_enabled(before)


def test_suggest_memory_format_follows_strides() -> None:
    x = torch.ones(2, 3, 4, 5)
    assert dispatch.suggest_memory_format(x) is torch.contiguous_format
    assert dispatch.suggest_memory_format(x.to(memory_format=torch.channels_last)) is torch.channels_last


def test_TensorBase_has_numpy_though_it_is_replaced_on_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    assert dispatch.TensorBase.numpy(torch.ones(2)).tolist() == [1, 1]


def test_transforms_of_torch_func_are_seen() -> None:
    """By `is_functorch_wrapped_tensor`, `get_unwrapped` and `peek_interpreter_stack`."""

    def seen(x: torch.Tensor) -> torch.Tensor:
        assert dispatch.is_functorch_wrapped_tensor(x) and dispatch.peek_interpreter_stack() is not None
        assert not dispatch.is_functorch_wrapped_tensor(dispatch.get_unwrapped(x))
        return x.sum()

    torch.func.grad(seen)(torch.ones(2))
    assert dispatch.peek_interpreter_stack() is None and not dispatch.is_functorch_wrapped_tensor(torch.ones(2))
