"""What memfit relies on of fake tensors."""

from __future__ import annotations

import pytest
import torch

from memfit._torch import fake


def test_FakeTensorMode_makes_a_FakeTensor_of_the_same_shape_without_data() -> None:
    with fake.FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2, 3))
        out = x @ torch.ones(3, 4)
    assert isinstance(out, fake.FakeTensor) and out.shape == (2, 4) and out.fake_mode is mode
    assert fake.is_fake(out) and not fake.is_fake(torch.ones(1))
    assert fake.detect_fake_mode([out]) is mode and fake.detect_fake_mode([torch.ones(1)]) is None


def test_unset_fake_temporarily_runs_with_data() -> None:
    with fake.FakeTensorMode(), fake.unset_fake_temporarily():
        assert float(torch.ones(2).sum()) == 2


def test_what_depends_on_data_raises() -> None:
    """A DataDependentOutputException, a DynamicOutputShapeException."""
    with fake.FakeTensorMode():
        x = torch.ones(3)
        with pytest.raises(fake.DataDependentOutputException):
            x.sum().item()
        with pytest.raises(fake.DynamicOutputShapeException):
            torch.nonzero(x)


def test_UnsupportedOperatorException_names_an_operator_without_a_fake_kernel() -> None:
    library = torch.library.Library("memfit_contract", "DEF")
    try:
        library.define("unknown(Tensor x) -> Tensor")
        library.impl("unknown", lambda x: x.clone(), "CPU")
        with fake.FakeTensorMode(), pytest.raises(fake.UnsupportedOperatorException, match="memfit_contract"):
            torch.ops.memfit_contract.unknown(torch.ones(1))
    finally:
        library._destroy()


def test_fake_tensor_asks_init_gpu_context_before_a_gpus_tensors() -> None:
    """What stands in for a GPU replaces that function of the module, and a property of its mode."""
    assert callable(fake.fake_tensor.init_gpu_context)
    assert isinstance(fake.FakeTensorMode.avoid_device_init, property)
