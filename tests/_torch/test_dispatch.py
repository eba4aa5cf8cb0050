"""What memfit relies on of PyTorch's dispatcher and its modes."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops import while_loop
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.overrides import TorchFunctionMode
from torch.utils._foreach_utils import _device_has_foreach_support

from memfit import _torch
from memfit.foundations import turn

aten = torch.ops.aten


class Seen(_torch.TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


class PassivelySeen(_torch.PassiveMode, Seen):
    """Notes the operators that run, and leaves Dynamo to compile."""


class SeenInside(_torch.EagerMode, Seen):
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
    with SeenInside(), pytest.raises(_torch.UnfollowedOperatorError, match="cond"):
        torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    assert _torch.current_mode_stack() == []


def test_TorchDispatchMode_sees_each_operator_as_an_OpOverload_of_both_passes() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with Seen() as seen:
        torch.nn.functional.linear(x, torch.ones(4, 3)).sum().backward()
    assert all(isinstance(func, _torch.OpOverload) for func in seen.operators)
    assert aten.mm.default in seen.operators and aten.sum.default in seen.operators


def test_disable_current_modes_hides_operators_from_the_modes_around() -> None:
    with Seen() as seen:
        with _torch.disable_current_modes():
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
        modes.extend(_torch.current_mode_stack())
        return module.forward

    function = torch.compile(lambda x: (x + 1).exp(), backend=backend)
    x = torch.ones(2)
    with mode:
        function(x)
    assert (len(graphs), modes) == (compiled, [])
    assert mode.operators == [aten.add.Tensor, aten.exp.default]


def test_current_mode_stack_is_of_the_modes_that_are_entered_innermost_last() -> None:
    with Seen() as outer, Seen() as inner:
        assert _torch.current_mode_stack() == [outer, inner]
    assert _torch.current_mode_stack() == []


def test_pop_mode_temporarily_takes_the_innermost_mode_off() -> None:
    with Seen() as outer, Seen() as inner:
        with _torch.pop_mode_temporarily():
            assert _torch.current_mode_stack() == [outer]
            torch.ones(2)
        assert _torch.current_mode_stack() == [outer, inner]
    assert (outer.operators, inner.operators) == ([aten.ones.default], [])


def test_DispatchKey_and_below_autograd_run_a_composite_operator_as_its_parts() -> None:
    composite = _torch.DispatchKey.CompositeImplicitAutograd
    x = torch.ones(2, 3)
    with Seen() as seen:
        aten.linear.default._op_dk(composite, x, torch.ones(4, 3), None)
    assert aten.linear.default not in seen.operators and aten.mm.default in seen.operators
    with _torch.below_autograd():
        assert not (torch.ones(1, requires_grad=True) * 2).requires_grad


def test_exclude_dispatch_key_of_ADInplaceOrView_has_an_alias_share_its_tensors_version() -> None:
    x = torch.ones(2)
    with _torch.exclude_dispatch_key(_torch.DispatchKey.ADInplaceOrView, False):
        alias = x.detach()
    x.add_(1)
    assert alias._version == x._version == 1


@pytest.mark.parametrize("name", ["DisableTorchFunction", "DisableTorchFunctionSubclass"])
def test_DisableTorchFunction_and_DisableTorchFunctionSubclass_let_functions_by(name: str) -> None:
    wrapped = torch.ones(2).as_subclass(Wrapped)
    with getattr(_torch, name)():
        assert wrapped.dim() == 1
    with pytest.raises(AssertionError, match="came through"):
        wrapped.dim()


def test_disabled_torch_function_is_what_a_class_has_whose_functions_return_plain_tensors() -> None:
    class Quiet(torch.Tensor):
        __torch_function__ = _torch.disabled_torch_function

    class Loud(torch.Tensor):
        pass

    assert type(torch.ones(2).as_subclass(Quiet) + 1) is torch.Tensor
    assert type(torch.ones(2).as_subclass(Loud) + 1) is Loud
    assert torch.nn.Parameter.__torch_function__ is _torch.disabled_torch_function


def test_function_modes_are_a_stack_that_can_be_pushed_and_popped() -> None:
    outer, inner = Functions(), Functions()
    assert _torch.get_current_function_mode() is None
    _torch.push_function_mode(outer)
    _torch.push_function_mode(inner)
    assert _torch.get_current_function_mode() is inner
    assert list(_torch.get_current_function_mode_stack()) == [outer, inner]
    with _torch.pop_function_mode_temporarily():
        assert _torch.get_current_function_mode() is outer
    assert _torch.pop_function_mode() is inner and _torch.pop_function_mode() is outer
    assert _torch.get_current_function_mode() is None


def test_DeviceContext_is_what_a_device_as_a_context_puts_on_the_stack() -> None:
    with torch.device("meta"):
        (mode,) = _torch.get_current_function_mode_stack()
        assert isinstance(mode, _torch.DeviceContext) and mode.device.type == "meta"


def test_has_kernel_for_dispatch_key_tells_kernels_apart() -> None:
    assert _torch.has_kernel_for_dispatch_key("aten::mm", "CPU")
    assert not _torch.has_kernel_for_dispatch_key("aten::linear", "SparseCsrCPU")


def test_select_conv_backend_names_a_backend_by_the_arguments_of_a_convolution() -> None:
    x, weight = torch.ones(1, 2, 4, 4), torch.ones(2, 2, 3, 3)
    options = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert "Empty" not in str(_torch.select_conv_backend(x, weight, *options))
    assert "Empty" in str(_torch.select_conv_backend(x[:0], weight, *options))


def test_set_cudnn_enabled_is_what_get_cudnn_enabled_returns() -> None:
    before = _torch.get_cudnn_enabled()
    try:
        _torch.set_cudnn_enabled(not before)
        assert _torch.get_cudnn_enabled() is not before
    finally:
        _torch.set_cudnn_enabled(before)


def test_suggest_memory_format_follows_strides() -> None:
    x = torch.ones(2, 3, 4, 5)
    assert _torch.suggest_memory_format(x) is torch.contiguous_format
    assert _torch.suggest_memory_format(x.to(memory_format=torch.channels_last)) is torch.channels_last


def test_TensorBase_has_numpy_though_it_is_replaced_on_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    assert _torch.TensorBase.numpy(torch.ones(2)).tolist() == [1, 1]


def test_transforms_of_torch_func_are_seen() -> None:
    """By `is_functorch_wrapped_tensor`, `get_unwrapped` and `peek_interpreter_stack`."""

    def seen(x: torch.Tensor) -> torch.Tensor:
        assert _torch.is_functorch_wrapped_tensor(x) and _torch.peek_interpreter_stack() is not None
        assert not _torch.is_functorch_wrapped_tensor(_torch.get_unwrapped(x))
        return x.sum()

    torch.func.grad(seen)(torch.ones(2))
    assert _torch.peek_interpreter_stack() is None and not _torch.is_functorch_wrapped_tensor(torch.ones(2))


aten = torch.ops.aten
COMPOSITE = _torch.DispatchKey.CompositeImplicitAutograd


def test_schema_of_tells_arguments_returns_and_what_is_written() -> None:
    schema = _torch.schema_of(aten.add_.Tensor)
    assert schema.name == "aten::add_" and schema.is_mutable and len(schema.returns) == 1
    assert [(a.name, a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments] == [
        ("self", True),
        ("other", False),
        ("alpha", False),
    ]
    assert not _torch.schema_of(aten.add.Tensor).is_mutable


def test_packet_of_is_one_for_all_overloads() -> None:
    assert _torch.packet_of(aten.add.Tensor) is _torch.packet_of(aten.add.Scalar) is aten.add


def test_call_at_takes_the_kernel_of_a_key() -> None:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    found = _torch.call_at(aten.linear.default, COMPOSITE, x, weight, None)
    assert torch.equal(found, x @ weight.T)


def test_call_at_is_left_out_of_compiled_code_without_a_warning() -> None:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _torch.call_at(aten.linear.default, COMPOSITE, x * 2, weight, None)
        return found + 1

    assert torch.equal(torch.compile(doubled, backend="eager")(x), doubled(x))
    torch._dynamo.reset()


def test_destroy_library_takes_back_its_kernels() -> None:
    library = torch.library.Library("memfit_contract_of_libraries", "DEF")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x.clone(), "CPU")
    assert torch.ops.memfit_contract_of_libraries.same(torch.ones(1)).tolist() == [1]
    _torch.destroy_library(library)
    with pytest.raises((AttributeError, RuntimeError, NotImplementedError)):
        torch.ops.memfit_contract_of_libraries.same.default(torch.ones(1))


def test_destroy_library_has_the_python_dispatcher_look_for_kernels_again() -> None:
    """It remembers that an operator had one for a key, and would then call none of PyTorch's own for autograd."""
    x, weight = torch.ones(2, 3), torch.ones(4, 3, requires_grad=True)
    library = torch.library.Library("aten", "IMPL")
    library.impl(
        "linear", lambda x, weight, bias=None: _torch.call_at(aten.linear.default, COMPOSITE, x, weight), "AutogradCPU"
    )
    with enable_python_dispatcher():
        nn.functional.linear(x, weight)
    _torch.destroy_library(library)
    with enable_python_dispatcher():
        nn.functional.linear(x, weight).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [[2.0] * 3] * 4


def test_drawing_operators_are_what_other_operators_draw_by() -> None:
    """Without a generator of theirs none of these calls gets past them."""
    made = torch.Generator().manual_seed(1)
    library, draws = torch.library.Library("aten", "IMPL"), 0

    def counted(run, *args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal draws
        draws += 1
        return run(*args, **kwargs)

    for func, place in _torch.drawing_operators():
        assert _torch.schema_of(func).arguments[place].name == "generator"
        _torch.before_backends(library, func, counted)
    encoder = nn.TransformerEncoderLayer(8, 2, 8)
    calls = [
        lambda: torch.rand(3),
        lambda: torch.randn(3),
        lambda: torch.randperm(5),
        lambda: torch.randint(9, (3,)),
        lambda: torch.empty(3).normal_(),
        lambda: torch.multinomial(torch.ones(4), 2),
        lambda: torch.bernoulli(torch.full((4,), 0.5)),
        lambda: torch.poisson(torch.ones(3)),
        lambda: torch.native_dropout(torch.ones(4), 0.5, True),
        lambda: nn.functional.dropout(torch.ones(4)),
        lambda: nn.functional.rrelu(torch.randn(4), training=True),
        lambda: torch.distributions.Gamma(1.0, 1.0).sample(),
        lambda: encoder(torch.ones(2, 1, 8)),
        lambda: nn.init.trunc_normal_(torch.empty(3)),
    ]
    try:
        for call in calls:
            before, known = torch.get_rng_state(), draws
            call()
            assert (draws > known) == (not torch.equal(torch.get_rng_state(), before)) == True  # noqa: E712
        torch.rand(3, generator=made)
    finally:
        _torch.destroy_library(library)
    known = draws
    torch.rand(3)
    assert draws == known


def test_before_backends_runs_below_autograd_and_keeps_the_result() -> None:
    library, seen = torch.library.Library("aten", "IMPL"), []

    def noted(run, *args, **kwargs):  # type: ignore[no-untyped-def]
        seen.append(len(args) + len(kwargs))
        return run(*args, **kwargs)

    _torch.before_backends(library, aten.bernoulli_.float, noted)
    x = torch.ones(64, requires_grad=True)
    try:
        torch.manual_seed(3)
        found = nn.functional.dropout(x)
        found.sum().backward()
    finally:
        _torch.destroy_library(library)
    torch.manual_seed(3)
    assert seen and torch.equal(found, nn.functional.dropout(x)) and torch.equal(x.grad, found)


NAME = "_foreach_supported_types"


def test_foreach_copy_and_foreach_mul_write_their_first_list() -> None:
    """`foreach_copy_` casts, and `foreach_mul_` multiplies by one number."""
    halves = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1)]
    _torch.foreach_copy_(halves, [torch.ones(2), torch.full((1,), 3.0)])
    _torch.foreach_mul_(halves, 0.5)
    assert [tensor.tolist() for tensor in halves] == [[0.5, 0.5], [1.5]]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scaled_mm_multiplies_two_matrices_of_8_bits_and_their_scales(dtype: torch.dtype) -> None:
    """On the CPU, and for a GPU on paper."""
    torch.manual_seed(0)
    one, other = torch.randn(16, 32).to(dtype), torch.randn(48, 32).to(torch.float8_e4m3fn)
    scales = torch.tensor(0.5), torch.tensor(4.0)
    found = _torch.scaled_mm(one, other.t(), *scales, out_dtype=torch.float32, use_fast_accum=True)
    assert torch.allclose(found, 2 * one.float() @ other.float().t(), rtol=1e-5, atol=1e-5)
    with _torch.FakeTensorMode():
        one, other = (torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in (one, other))
        scales = torch.empty((), device="cuda"), torch.empty((), device="cuda")
        made = _torch.scaled_mm(one, other.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=False)
        assert (made.shape, made.dtype, made.device.type) == ((16, 48), torch.bfloat16, "cuda")


def test_optimizers_look_up_types_in_the_lists_at_each_step() -> None:
    """The lists of `supported_types`, of which `optimizer_types` is the first, are those that PyTorch itself reads."""

    assert _torch.supported_types[0] is _torch.optimizer_types is _default_to_fused_or_foreach.__globals__[NAME]
    assert _torch.supported_types[1] is _device_has_foreach_support.__globals__[NAME]
    assert all(torch.Tensor in types for types in _torch.supported_types)


def test_an_attribute_comes_back() -> None:
    owner = types.SimpleNamespace(value=1)
    with pytest.raises(RuntimeError), _torch.replaced(owner, "value", 2):
        assert owner.value == 2
        raise RuntimeError
    assert owner.value == 1


@pytest.mark.parametrize("name", ["numpy", "tolist", "__array__", "resize_"], ids=str)
def test_replaced_here_is_for_the_thread_that_has_the_turn(name: str) -> None:
    """Inherited functions too, which the class then has no longer."""
    before, found = vars(torch.Tensor).get(name), []

    def call() -> None:
        found.append(getattr(torch.Tensor, name)(torch.ones(0)) == "ours")

    with pytest.raises(RuntimeError), turn(), _torch.replaced_here(torch.Tensor, name, lambda tensor: "ours"):
        call()
        theirs = threading.Thread(target=call)
        theirs.start()  # by the thread that has the turn
        theirs.join()
        raise RuntimeError
    assert found == [True, True] and vars(torch.Tensor).get(name) is before
