"""What memfit relies on of operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._foreach_utils import _device_has_foreach_support

from memfit._torch import operators
from memfit._torch.dispatch import DispatchKey
from memfit._torch.operators import (
    before_backends,
    call_at,
    destroy_library,
    drawing_operators,
    packet_of,
    schema_of,
)

aten = torch.ops.aten
COMPOSITE = DispatchKey.CompositeImplicitAutograd


def test_schema_of_tells_arguments_returns_and_what_is_written() -> None:
    schema = schema_of(aten.add_.Tensor)
    assert schema.name == "aten::add_" and schema.is_mutable and len(schema.returns) == 1
    assert [(a.name, a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments] == [
        ("self", True),
        ("other", False),
        ("alpha", False),
    ]
    assert not schema_of(aten.add.Tensor).is_mutable


def test_packet_of_is_one_for_all_overloads() -> None:
    assert packet_of(aten.add.Tensor) is packet_of(aten.add.Scalar) is aten.add


def test_call_at_takes_the_kernel_of_a_key() -> None:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    found = call_at(aten.linear.default, COMPOSITE, x, weight, None)
    assert torch.equal(found, x @ weight.T)


def test_call_at_is_left_out_of_compiled_code_without_a_warning() -> None:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = call_at(aten.linear.default, COMPOSITE, x * 2, weight, None)
        return found + 1

    assert torch.equal(torch.compile(doubled, backend="eager")(x), doubled(x))
    torch._dynamo.reset()


def test_destroy_library_takes_back_its_kernels() -> None:
    library = torch.library.Library("memfit_contract_of_libraries", "DEF")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x.clone(), "CPU")
    assert torch.ops.memfit_contract_of_libraries.same(torch.ones(1)).tolist() == [1]
    destroy_library(library)
    with pytest.raises((AttributeError, RuntimeError, NotImplementedError)):
        torch.ops.memfit_contract_of_libraries.same.default(torch.ones(1))


def test_destroy_library_has_the_python_dispatcher_look_for_kernels_again() -> None:
    """It remembers that an operator had one for a key, and would then call none of PyTorch's own for autograd."""
    x, weight = torch.ones(2, 3), torch.ones(4, 3, requires_grad=True)
    library = torch.library.Library("aten", "IMPL")
    library.impl(
        "linear", lambda x, weight, bias=None: call_at(aten.linear.default, COMPOSITE, x, weight), "AutogradCPU"
    )
    with enable_python_dispatcher():
        nn.functional.linear(x, weight)
    destroy_library(library)
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

    for func, place in drawing_operators():
        assert schema_of(func).arguments[place].name == "generator"
        before_backends(library, func, counted)
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
        destroy_library(library)
    known = draws
    torch.rand(3)
    assert draws == known


def test_before_backends_runs_below_autograd_and_keeps_the_result() -> None:
    library, seen = torch.library.Library("aten", "IMPL"), []

    def noted(run, *args, **kwargs):  # type: ignore[no-untyped-def]
        seen.append(len(args) + len(kwargs))
        return run(*args, **kwargs)

    before_backends(library, aten.bernoulli_.float, noted)
    x = torch.ones(64, requires_grad=True)
    try:
        torch.manual_seed(3)
        found = nn.functional.dropout(x)
        found.sum().backward()
    finally:
        destroy_library(library)
    torch.manual_seed(3)
    assert seen and torch.equal(found, nn.functional.dropout(x)) and torch.equal(x.grad, found)


NAME = "_foreach_supported_types"


def test_foreach_copy_and_foreach_mul_write_their_first_list() -> None:
    """`foreach_copy_` casts, and `foreach_mul_` multiplies by one number."""
    halves = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1)]
    operators.foreach_copy_(halves, [torch.ones(2), torch.full((1,), 3.0)])
    operators.foreach_mul_(halves, 0.5)
    assert [tensor.tolist() for tensor in halves] == [[0.5, 0.5], [1.5]]


def test_optimizers_look_up_types_in_the_lists_at_each_step() -> None:
    """The lists of `supported_types`, of which `optimizer_types` is the first, are those that PyTorch itself reads."""

    assert operators.supported_types[0] is operators.optimizer_types is _default_to_fused_or_foreach.__globals__[NAME]
    assert operators.supported_types[1] is _device_has_foreach_support.__globals__[NAME]
    assert all(torch.Tensor in types for types in operators.supported_types)
