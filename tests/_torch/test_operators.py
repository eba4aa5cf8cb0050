"""What memfit relies on of operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher

from memfit._torch.dispatch import DispatchKey
from memfit._torch.operators import call_at, destroy_library, packet_of, schema_of

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
