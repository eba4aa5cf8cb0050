"""What memfit relies on of fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memfit import _torch, ir
from memfit._torch import CachedFakeTensorMode, FakeTensor, FakeTensorMode, fake
from memfit.capture import fake_workload
from memfit.workload import Workload
from tests.models import captured, recurrent, transformer, unet


def test_FakeTensorMode_makes_a_FakeTensor_of_the_same_shape_without_data() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2, 3))
        out = x @ torch.ones(3, 4)
    assert isinstance(out, FakeTensor) and out.shape == (2, 4) and out.fake_mode is mode
    assert _torch.is_fake(out) and not _torch.is_fake(torch.ones(1))
    assert _torch.detect_fake_mode([out]) is mode and _torch.detect_fake_mode([torch.ones(1)]) is None


def test_unset_fake_temporarily_runs_with_data() -> None:
    with FakeTensorMode(), _torch.unset_fake_temporarily():
        assert float(torch.ones(2).sum()) == 2


def test_what_depends_on_data_raises() -> None:
    """A DataDependentOutputException, a DynamicOutputShapeException."""
    with FakeTensorMode():
        x = torch.ones(3)
        with pytest.raises(_torch.DataDependentOutputException):
            x.sum().item()
        with pytest.raises(_torch.DynamicOutputShapeException):
            torch.nonzero(x)


def test_UnsupportedOperatorException_names_an_operator_without_a_fake_kernel() -> None:
    library = torch.library.Library("memfit_contract", "DEF")
    try:
        library.define("unknown(Tensor x) -> Tensor")
        library.impl("unknown", lambda x: x.clone(), "CPU")
        with FakeTensorMode(), pytest.raises(_torch.UnsupportedOperatorException, match="memfit_contract"):
            torch.ops.memfit_contract.unknown(torch.ones(1))
    finally:
        library._destroy()


def test_fake_tensor_asks_init_gpu_context_before_a_gpus_tensors() -> None:
    """What stands in for a GPU replaces that function of the module, and a property of its mode."""
    assert callable(_torch.fake_tensor.init_gpu_context)
    assert isinstance(FakeTensorMode.avoid_device_init, property)


_METADATA = ("shape", "dtype", "layout", "device", "fake_device", "requires_grad", "is_leaf", "constant", "pytype")


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachedFakeTensorMode, "_kept", {})


def _described(tensor: torch.Tensor) -> dict[str, Any]:
    assert type(tensor) is FakeTensor
    found = {name: getattr(tensor, name) for name in _METADATA}
    found["nbytes"] = tensor.untyped_storage().nbytes()
    return found | {"stride": tensor.stride(), "offset": tensor.storage_offset(), "names": sorted(vars(tensor))}


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _views(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.t(), x[1:, 2], x.view(-1), x.unsqueeze(0).expand(3, -1, -1), *x.split(2), *x.unbind(1)]


def _in_place(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.clone()
    returned = [y.add_(1), y.mul_(x), y.t_(), y.zero_()]
    assert all(r is y for r in returned)
    return returned


def _several(x: torch.Tensor) -> list[torch.Tensor]:
    values, indices = x.sort(dim=0)
    return [values, indices, *torch.ops.aten.native_layer_norm(x, [x.shape[1]], None, None, 1e-5)]


def _made(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.zeros(3), torch.arange(4), x.new_ones(2, dtype=torch.bool), torch.empty(2, 3).t().contiguous()]


def _promoted(x: torch.Tensor) -> list[torch.Tensor]:
    return [x + 1, x + 1.0, x.long() + 1, x.long() + 1.0, x.long() + True, x.bfloat16() * x, x > 0]


def _channels_last(x: torch.Tensor) -> list[torch.Tensor]:
    image = x[None, None].expand(2, 3, -1, -1)
    last = image.contiguous(memory_format=torch.channels_last)
    weight = torch.ones(5, 3, 1, 1)
    return [last, last + 1, torch.conv2d(last, weight), torch.conv2d(image.contiguous(), weight)]


def _complex(x: torch.Tensor) -> list[torch.Tensor]:
    z = torch.complex(x, x)
    return [z, z.conj() * 2, (z * 2).real, torch.view_as_real(z)]


def _with_gradients(x: torch.Tensor) -> list[torch.Tensor]:
    w = torch.ones(x.shape[1], 2).requires_grad_()
    (gradient,) = torch.autograd.grad(torch.tanh(x @ w).sum(), w)
    return [x @ w, gradient]


@pytest.mark.parametrize(
    "run", [_views, _in_place, _several, _made, _promoted, _channels_last, _complex, _with_gradients]
)
def test_a_second_call_returns_what_pytorch_does(run: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
    """In metadata, in what shares memory with the argument, and in attributes; also under another mode."""

    def outputs(mode: FakeTensorMode) -> tuple[list[dict[str, Any]], list[bool]]:
        with mode:
            x = mode.from_tensor(torch.ones(4, 6))
            made = run(x)
        assert all(tensor.fake_mode is mode for tensor in made)  # type: ignore[attr-defined]
        return [_described(tensor) for tensor in made], [_is_same_memory(tensor, x) for tensor in made]

    expected = outputs(FakeTensorMode())
    first = CachedFakeTensorMode()
    assert outputs(first) == outputs(first) == outputs(CachedFakeTensorMode()) == expected
    assert any(kept is not None for kept in CachedFakeTensorMode._kept.values())


_aten = torch.ops.aten
_ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    _aten._unsafe_view.default: ([3, 8],),
    _aten.as_strided.default: ([2, 3], [1, 2], 1),
    _aten.expand.default: ([2, 4, 6],),
    _aten.permute.default: ([1, 0],),
    _aten.select.int: (1, 2),
    _aten.slice.Tensor: (0, 1, 3),
    _aten.squeeze.dim: (0,),
    _aten.transpose.int: (0, 1),
    _aten.unsqueeze.default: (1,),
    _aten.view.default: ([3, 8],),
    _aten.pow.Tensor_Scalar: (2,),
    _aten.fill_.Scalar: (0.5,),
}
"""The arguments after the first, where they are not one tensor for each that the operator takes."""


def _called(mode: FakeTensorMode, func: Any, like: torch.Tensor) -> tuple[dict[str, Any], bool, bool]:
    """Return an output's description, whether it is the first argument, and whether it shares its memory."""
    with mode:
        x = mode.from_tensor(like)
        more = _ARGUMENTS.get(func)
        if more is None:
            given = func._schema.arguments[1:]
            more = tuple(mode.from_tensor(like) for a in given if str(a.type) == "Tensor" and not a.has_default_value())
            more += tuple(0.5 for a in given if str(a.type) == "number" and not a.kwarg_only)
        out = func(x, *more)
    return _described(out), out is x, _is_same_memory(out, x)


@pytest.mark.parametrize("func", sorted({*fake._VIEWS, *fake._BY_ELEMENT, *fake._IN_PLACE}, key=str), ids=str)
@pytest.mark.parametrize(
    "like",
    [
        torch.ones(4, 6),
        torch.ones(4, 6, dtype=torch.bfloat16),
        torch.ones(6, 4).t(),
        torch.ones(1, 8, 6)[:, ::2].view(4, 6),
    ]
    + [torch.ones(4, 6, dtype=torch.long)],
    ids=["plain", "bf16", "transposed", "strided", "long"],
)
def test_an_output_that_follows_from_the_arguments_is_pytorchs(
    func: Any, like: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        expected = _called(FakeTensorMode(), func, like)
    except Exception as e:
        with pytest.raises((type(e), RuntimeError)):  # as kernels do, for views that can't be had
            _called(CachedFakeTensorMode(), func, like)
        return
    known: list[bool] = []
    ask = CachedFakeTensorMode._known_output

    def asked(self: CachedFakeTensorMode, called: Any, args: Any, kwargs: Any) -> Any:
        output = ask(self, called, args, kwargs)
        if called is func:
            known.append(output is not None)
        return output

    monkeypatch.setattr(CachedFakeTensorMode, "_known_output", asked)
    mode = CachedFakeTensorMode()
    assert _called(mode, func, like) == _called(mode, func, like) == expected
    assert expected[1] == (func in fake._IN_PLACE) and expected[2] == (func not in fake._BY_ELEMENT)
    if like.is_contiguous() and like.is_floating_point():
        assert known[0]  # PyTorch is not asked
    if func in fake._BY_ELEMENT | fake._IN_PLACE and not (like.is_contiguous() and like.is_floating_point()):
        assert not known[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + x[:1],
        lambda x: x.mul_(x[:, :1]),
        lambda x: x * x.bfloat16(),
        lambda x: x + True,
        lambda x: x * 2j,
        lambda x: x.clone(memory_format=torch.contiguous_format),
        lambda x: torch.zeros_like(x, dtype=torch.long),
        lambda x: x[:0] + x[:0],
    ],
)
def test_arguments_that_are_not_alike_are_left_to_pytorch(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = []
    for mode in (FakeTensorMode(), CachedFakeTensorMode()):
        with mode:
            found.append(_described(call(mode.from_tensor(torch.ones(4, 6)))))
    assert found[0] == found[1]


def test_what_tells_calls_apart_is_in_the_key() -> None:
    """The default dtype, the device, strides, a scalar's type, an optional argument."""
    with CachedFakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(4, 6))
        assert (x.long() + 1).dtype == torch.long and (x.long() + 1.0).dtype == torch.float32
        assert x.sum(0).shape == (6,) and x.sum(1).shape == (4,) and x.sum(1, keepdim=True).shape == (4, 1)
        assert (x * 2).stride() == (6, 1) and (x.t() * 2).stride() == (1, 6)
        assert torch.empty(2, device="meta").device.type == "meta" and torch.empty(2).device.type == "cpu"
        dtypes = []
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            dtypes.append(torch.ones(2).dtype)
        assert dtypes == [torch.float32, torch.float64, torch.float32]


def test_pytorchs_cache_decides_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that depend on data are not; nothing is where `_BypassDispatchCache` is raised, or the cache is off."""
    with CachedFakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(4))
        with pytest.raises(_torch.DataDependentOutputException):
            x.sum().item()
        with pytest.raises(_torch.DynamicOutputShapeException):
            torch.nonzero(x)
        torch.cumsum(x, 0)
        kept = CachedFakeTensorMode._kept
        sums = [key for key in kept if key[0] is torch.ops.aten.cumsum.default]
        assert len(sums) == 1 and isinstance(kept[sums[0]], fake._Kept)
        assert not any(kept[key] for key in kept if "nonzero" in str(key[0]) or "local_scalar" in str(key[0]))
        kept.clear()
        monkeypatch.setattr(mode, "cache_enabled", False)
        torch.cumsum(x, 0)
        monkeypatch.setattr(mode, "cache_enabled", True)

        def bypassed(*arguments: Any) -> None:
            raise fake._BypassDispatchCache("for a test")

        monkeypatch.setattr(mode, "_cache_key", bypassed)
        assert torch.cumsum(x, 0).shape == (4,)
        assert not kept


def test_data_of_a_kept_output_can_not_be_had() -> None:
    """`_set_throw_on_mutable_data_ptr`, or `_set_warn_deprecated_on_mutable_data_ptr`, is set on it."""
    with CachedFakeTensorMode() as mode:
        mode._allow_unsafe_data_ptr_access = False
        x = mode.from_tensor(torch.ones(4))
        for out in (torch.relu(x), torch.relu(x)):
            with pytest.raises(RuntimeError, match="data"):
                out.data_ptr()


@pytest.mark.parametrize("workload", [transformer, unet, recurrent])
def test_a_capture_records_what_it_does_without(
    workload: Callable[[], Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    def recorded() -> bytes:
        torch.manual_seed(0)
        return ir.codec.encode(captured(workload()))

    cached = [recorded(), recorded()]
    monkeypatch.setattr(fake_workload, "CachedFakeTensorMode", FakeTensorMode)
    assert cached == [recorded()] * 2


def test_a_module_of_fake_parameters_runs_from_the_cache() -> None:
    with CachedFakeTensorMode() as mode:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))
        x = mode.from_tensor(torch.ones(3, 4))
        for _ in range(2):
            model(x).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
