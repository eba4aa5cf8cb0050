"""Products in float8: linear layers whose three products run on units for 8-bit floats, at twice the rate of bf16's.

Each factor is divided by one scale, the largest magnitude that it has at the moment over the largest of its format, and
rounded: inputs and weights to `e4m3` (3 bits of mantissa), gradients to `e5m2`, which has more range (P. Micikevicius
et al. 2022, *FP8 Formats for Deep Learning*, section 3; scales of the moment as torchao's "tensorwise" recipe has
them). Sums are in fp32, the result in the dtype that the layer computes in, and a weight's gradient in the weight's.

The operator is PyTorch's own, `_scaled_mm`, which CPUs emulate. The weights stay as they are, and are rounded for each
product. Autograd saves the input's 8 bits in place of the input. No tensor is of a class of its own, and no module is
replaced: names, state dict and optimizer know nothing of it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from memfit._torch import FakeTensor, own_parameters, scaled_mm
from memfit.capture import is_compiled
from memfit.errors import PlanError
from memfit.hardware import supports
from memfit.ir import Device, Levers
from memfit.levers.host_weights import HOST_WEIGHTS
from memfit.levers.lever import Circumstance, Conflict, Lever, LeversOn, NotOffered, Setting
from memfit.levers.precision import Casting, modules_within
from memfit.levers.quantized_weights import QUANTIZED_WEIGHTS, heads
from memfit.levers.shared_by_ranks import SHARDING
from memfit.levers.tiles import put_back
from memfit.workload import Workload

FLOAT8 = "products in float8"
NO_FLOAT8 = "a device without float8 products"
_OFF = "set levers.float8 to []"
_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16  # of every dimension that is summed over or last: cublasLt's kernels take no others
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_GAIN = 0.05  # of a step, predicted: what rounding costs is known less well than other operators
_TINY = 1e-30  # the least magnitude that a scale is made of: zeros stay zeros
_ERRORS = 0.037, 0.059
"""The norm of the error of a product in float8, relative to that of the product, of normally distributed matrices: with
both factors in e4m3, and with one in e5m2 (torch 2.13, 512 x 512 x 512)."""


class Float8(Lever):
    """Linear layers whose products are in float8."""

    name = FLOAT8
    field = "float8"
    switchable = True
    numerics_class = "reduced"
    conflicts = (
        Conflict(FLOAT8, QUANTIZED_WEIGHTS, "those layers have products of their own", _OFF),
        Conflict(FLOAT8, HOST_WEIGHTS, "the two were not tested together", _OFF),
        Conflict(FLOAT8, SHARDING, "it is not tested on ranks", _OFF),
        Conflict(FLOAT8, Circumstance.COMPILED, "it is not tested in code that others compile", _OFF),
        Conflict(FLOAT8, Circumstance.JITTOR, "this lever needs PyTorch", _OFF),
        Conflict(
            FLOAT8,
            NO_FLOAT8,
            "the device has no units for float8: NVIDIA's GPUs from Ada and Hopper on have; AMD's have other formats",
            _OFF,
        ),
    )

    def words(self, on: LeversOn) -> tuple[str, str]:
        count = len(on.levers.float8)
        which = "all linear layers" if "*" in on.levers.float8 else f"{count:,} linear layer{'s' * (count != 1)}"
        forward, backward = _ERRORS
        return f"{which}; {forward:.1%} of a product's norm off, {backward:.1%} of a gradient's", "float8"

    def circumstances(self, workload: Workload, device: Device | None) -> set[str]:
        return set() if device is None or device.kind == "cpu" or _has_units(device) else {NO_FLOAT8}

    @contextlib.contextmanager
    def on_model(self, levers: Levers, model: nn.Module) -> Iterator[None]:
        """Have linear layers multiply in float8, until the context is left; not the head of a chunked loss.

        Raises:
            PlanError: They do so already, or a pattern matches no layer that can.
        """
        if any(_multiplies(module) for module in model.modules()):
            raise PlanError("the model multiplies in float8 already: call close() on the earlier step first")
        head = None if levers.chunked_loss is None else levers.chunked_loss.head
        layers = {fqn: layer for fqn, layer in _layers(model).items() if fqn != head}
        chosen: dict[str, nn.Linear] = {}
        for pattern in levers.float8:
            matching = fnmatch.filter(layers, pattern)
            if not matching:
                raise PlanError(
                    f"levers.float8 has {pattern!r}, and no layer of that name can multiply in float8: it must be an"
                    f" nn.Linear of fp32, bf16 or fp16 with in_features and out_features that are multiples of"
                    f" {_MULTIPLE}, without another forward, and not the head of a chunked loss. Take it out of"
                    " levers.float8"
                )
            chosen |= {fqn: layers[fqn] for fqn in matching}
        with contextlib.ExitStack() as stack:
            for layer in chosen.values():
                holder = _holder(layer)
                stack.callback(put_back, holder, vars(holder).get("forward"))
                holder.forward = Multiplying(layer)
            yield

    def is_applied(self, workload: Workload) -> bool:
        return any(_multiplies(module) for module in workload.model.modules())

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        """Try it where it is predicted to save time; or whatever that is, since autograd saves 8 bits of the input."""
        if not _has_units(step.device):
            raise NotOffered(f"{step.device.name} has no float8 products")
        if not step.allows(replace(step.plain, float8=("*",))):
            raise NotOffered("its class is reduced: allow it with numerics='reduced'")
        if step.shardings or step.plain.sharding is not None or is_compiled(step.workload):
            raise NotOffered("ranks share the step, or a compiler has it")
        model = step.workload.model
        kept = heads(model, step.trace(step.plain)) | modules_within(model, step.workload.fp32_modules).keys()
        names = tuple(fqn for fqn in _layers(model) if fqn not in kept)
        if not names:
            raise NotOffered("no linear layer can multiply in float8")
        bases = [x for x in wanted if step.allows(x) and (x.compiler, x.frozen_weights) == ("none", None)]
        if not step.tries_all:
            plain = [replace(step.plain, precision=p) for p in dict.fromkeys(x.precision for x in bases)]
            fastest = min(plain, key=lambda levers: step.predicted(levers).step_seconds, default=step.plain)
            names = _faster(step, fastest, names)
            bases = [levers for levers in bases if levers.precision == fastest.precision]
            if any(levers.chunked_loss for levers in bases):  # whole losses are there to compare
                bases = [levers for levers in bases if levers.chunked_loss]
        return [*wanted, *(replace(levers, float8=names) for levers in bases)]


def _faster(step: Setting, base: Levers, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the layers that are predicted to be faster in float8; raise `NotOffered` where a step gains little."""
    before, after = (step.module_seconds(levers) for levers in (base, replace(base, float8=names)))
    found = tuple(fqn for fqn in names if after.get(fqn, 0.0) < before.get(fqn, 0.0))
    most = step.predicted(base).step_seconds / (1 + _LEAST_GAIN)
    if not found or step.predicted(replace(base, float8=found)).step_seconds > most:
        raise NotOffered("it saves little time: the layers are small, and rounding takes as long as it gains")
    return found


def _has_units(device: Device) -> bool:
    """Tell whether a device multiplies the formats used here. AMD's CDNA 3 has formats with another bias."""
    return device.vendor == "nvidia" and supports(device, "float8")


def _layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that can multiply in float8, by FQN: not those that compute in fp32 for the user."""
    found: dict[str, nn.Linear] = {}
    for fqn, module in model.named_modules():
        if type(module).forward is not nn.Linear.forward or isinstance(module, NonDynamicallyQuantizableLinear):
            continue
        assert isinstance(module, nn.Linear)
        weight: Any = own_parameters(module).get("weight")
        holder = _holder(module)
        if isinstance(holder, Casting) and holder.inputs is torch.float32 or vars(holder).get("forward") is not None:
            continue
        if type(weight) not in (nn.Parameter, FakeTensor) or weight.dtype not in _DTYPES:
            continue
        if module.in_features % _MULTIPLE == 0 == module.out_features % _MULTIPLE:
            found[fqn] = module
    return found


def _holder(module: nn.Module) -> Any:
    """Return the holder of a module's own `forward`: the casts around it, or the module."""
    cast = vars(module).get("forward")
    return cast if isinstance(cast, Casting) else module


def _multiplies(module: nn.Module) -> bool:
    return isinstance(vars(_holder(module)).get("forward"), Multiplying)


@dataclass(eq=False)
class Multiplying:
    """The `forward` of a linear layer that multiplies in float8. Copies with the layer, bound to the copy."""

    layer: nn.Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's product."""
        kind, weight = x.device.type, self.layer.weight
        is_cast = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.itemsize < 8
        dtype = torch.get_autocast_dtype(kind) if is_cast else x.dtype
        if dtype not in _DTYPES or not (is_cast or dtype is weight.dtype) or not x.numel():
            return nn.Linear.forward(self.layer, x)
        flat = x.to(dtype).reshape(-1, x.shape[-1])
        out: Tensor = _Product.apply(flat, weight, self.layer.bias)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """A linear layer's product of [rows, in_features] by its weight, [out_features, in_features]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, of_bias = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            codes, scale = _rounded(x, _FORWARD)
            out = _multiplied((codes, scale), _rounded(weight, _FORWARD), x.dtype, is_fast=True)
            if bias is not None:
                out += bias
        ctx.save_for_backward(*((codes, scale) if of_weight else (None, None)), weight if of_x else None)
        ctx.dtypes = x.dtype, weight.dtype, bias.dtype if of_bias and bias is not None else None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        of_x = of_weight = None
        codes, scale, weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        with torch.autocast(grad.device.type, enabled=False):
            of_bias = None if bias_dtype is None else grad.sum(0, dtype=bias_dtype)
            rounded = _rounded(grad, _BACKWARD)
            if weight is not None:
                of_x = _multiplied(rounded, _turned(_rounded(weight, _FORWARD)), x_dtype)
            if codes is not None and len(codes) % _MULTIPLE:  # sums over rows, which kernels take 16 at a time
                of_weight = (grad.t() @ (codes.to(grad.dtype) * scale)).to(weight_dtype)
            elif codes is not None:
                of_weight = _multiplied(_turned(rounded), _turned((codes, scale)), weight_dtype)
        return of_x, of_weight, of_bias


Rounded = tuple[Tensor, Tensor]
"""A matrix in 8 bits, and the scale by which its numbers are to be multiplied."""


def _rounded(values: Tensor, dtype: torch.dtype) -> Rounded:
    largest = torch.linalg.vector_norm(values, math.inf, dtype=torch.float32)
    scale = largest.clamp_(min=_TINY).div_(torch.finfo(dtype).max)
    return (values / scale).to(dtype, memory_format=torch.contiguous_format), scale


def _turned(matrix: Rounded) -> Rounded:
    """Return a matrix transposed, copied: kernels want the summed dimension last in memory."""
    codes, scale = matrix
    return codes.t().contiguous(), scale


def _multiplied(one: Rounded, other: Rounded, dtype: torch.dtype, *, is_fast: bool = False) -> Tensor:
    """Return the product of [rows, summed] by the transpose of [columns, summed].

    Args:
        is_fast: Whether sums may lose bits, as they do on Hopper at the full rate: of outputs, not of gradients.
    """
    made: Tensor = scaled_mm(one[0], other[0].t(), one[1], other[1], out_dtype=dtype, use_fast_accum=is_fast)
    return made
