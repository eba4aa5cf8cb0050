"""Frozen weights in fewer bits: matrices that do not train, as NF4 or 8-bit codes, widened where a product needs them.

- `nf4` has 4 bits a number, each block of 64 with a scale, and the scales themselves in 8 bits (T. Dettmers, A.
  Pagnoni, A. Holtzman, L. Zettlemoyer 2023, *QLoRA: Efficient Finetuning of Quantized LLMs*, section 3).
- `int8` has 8 bits a number, each block of 256 with a scale (T. Dettmers, M. Lewis, S. Shleifer, L. Zettlemoyer 2022,
  *8-bit Optimizers via Block-wise Quantization*, section 2).

The operators are those of bitsandbytes. Codes and scales are buffers of the `nn.Linear`, and its `forward` a function
of our own: autograd saves no widened matrix, which is made again in the backward pass. No tensor is of a class of its
own, so that copies, captures and regions see plain memory.

The weight itself waits in a temporary file. In its place the parameter holds NaN, of its shape and dtype: what reads it
past the layer's `forward` gets no number, and a capture of the step says who does. The state dict has the weight as it
was given, and closing the step puts it back bit by bit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import math
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.overrides import TorchFunctionMode

from memfit._torch import (
    FakeTensor,
    disable_current_modes,
    own_modules,
    own_parameters,
    storage_key_of,
    tree_leaves,
)
from memfit.capture import is_compiled
from memfit.errors import PlanError, brought_by
from memfit.foundations import format_bytes
from memfit.ir import Device, FrozenWeights, Levers, Trace
from memfit.levers.adamw_8bit import NO_BITSANDBYTES
from memfit.levers.checkpointing import COMPILATION
from memfit.levers.lever import Circumstance, Conflict, Lever, LeversOn, NotOffered, Setting, least_bytes
from memfit.levers.shared_by_ranks import SHARDING
from memfit.workload import Workload

QUANTIZED_WEIGHTS = "frozen weights in fewer bits"
_OFF = "set levers.frozen_weights to null"
_ERRORS = {"nf4": 0.092, "int8": 0.011}
"""The norm of a quantiser's error, relative to that of a matrix of normally distributed numbers (fp32, 352 x 128)."""
_BITS = {"nf4": 4 + 8 / 64 + 32 / (64 * 256), "int8": 8 + 32 / 256}  # a number, with its share of the scales
_BLOCK, _WIDE_BLOCK = 64, 256
_LEAST_NUMBERS = 4096  # a smaller matrix stays as it is
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MATRIX = "_memfit_quantized"  # the attribute of a module that has its `QuantizedMatrix`
_MERGES = ("merge", "unmerge", "merge_and_unload", "merge_adapter", "unmerge_adapter")
"""Methods by which peft adds adapters to the weights that they are beside."""
_READING_NO_NUMBERS = frozenset(
    "data_ptr detach dim element_size get_device ndimension nelement numel register_hook requires_grad_"
    " register_post_accumulate_grad_hook size storage_offset stride untyped_storage view view_as".split()
)
"""Names of PyTorch's functions, besides queries, that a weight without numbers can be given to."""


class QuantizedWeights(Lever):
    """Matrices that do not train, in fewer bits."""

    name = QUANTIZED_WEIGHTS
    field = "frozen_weights"
    numerics_class = "reduced"
    rounds_weights = True
    conflicts = (
        Conflict(
            QUANTIZED_WEIGHTS,
            NO_BITSANDBYTES,
            "bitsandbytes provides its operators",
            f"pip install 'memfit[optimizers]', or {_OFF}",
        ),
        Conflict(
            QUANTIZED_WEIGHTS,
            "bf16-true",
            "that precision swaps every weight, and may keep its fp32 values too",
            f"use 'bf16-mixed', build the model in bf16, or {_OFF}",
        ),
        Conflict(
            QUANTIZED_WEIGHTS, SHARDING, "ranks would share the weights themselves", f"plan for one process, or {_OFF}"
        ),
        Conflict(QUANTIZED_WEIGHTS, COMPILATION, "the compiler can't trace its products", _OFF),
        Conflict(QUANTIZED_WEIGHTS, Circumstance.COMPILED, "the compiler can't trace its products", _OFF),
        Conflict(
            QUANTIZED_WEIGHTS,
            Circumstance.ADAPTING,
            "predictions for other shapes need the original model, and its weights are in a file by then",
            f"use memfit.apply with one plan for all shapes, or {_OFF}",
        ),
        Conflict(QUANTIZED_WEIGHTS, Circumstance.JITTOR, "this lever needs PyTorch", _OFF),
    )

    def words(self, on: LeversOn) -> tuple[str, str]:
        set_to = on.levers.frozen_weights
        assert set_to is not None
        kept = f", but for {', '.join(set_to.kept)}" if set_to.kept else ""
        error = _ERRORS[set_to.quantizer]
        bits = f"{set_to.quantizer}, {_BITS[set_to.quantizer]:.2f} bits a number"
        return f"{bits}, {error:.1%} of a matrix's norm off{kept}", f"frozen weights {set_to.quantizer}"

    def circumstances(self, workload: Workload, device: Device | None) -> set[str]:
        return {NO_BITSANDBYTES} if importlib.util.find_spec("bitsandbytes") is None else set()

    @contextlib.contextmanager
    def on_model(self, levers: Levers, model: nn.Module) -> Iterator[None]:
        """Hold a model's frozen matrices in fewer bits, until the context is left.

        Raises:
            PlanError: They are so already, or none is left of those that `kept` does not name.
        """
        set_to = levers.frozen_weights
        assert set_to is not None
        if _matrices_of(model):
            raise PlanError("the model's frozen weights are in fewer bits already: call close() on the earlier step")
        if unknown := set(set_to.kept) - dict(model.named_modules()).keys():
            raise PlanError(f"frozen_weights.kept names {sorted(unknown)[0]!r}, and the model has no such module")
        chosen = _chosen(levers, model)
        if not chosen:
            raise PlanError(
                "levers.frozen_weights changes nothing of this model: no nn.Linear but those in kept has a weight to"
                f" itself that does not train, of {_LEAST_NUMBERS:,} numbers or more. {_OFF[0].upper()}{_OFF[1:]}"
            )
        files = _Files()
        made = [QuantizedMatrix(module, fqn, set_to.quantizer, files) for fqn, module in chosen.items()]
        try:
            for matrix in made:
                matrix.put_on()
            with _refusing_merges(model), _named_where_read(made):
                yield
        finally:
            for matrix in made:
                matrix.take_off()

    def stays_behind(self, levers: Levers, model: nn.Module) -> list[nn.Parameter]:
        weights: list[Any] = [module.weight for module in _chosen(levers, model).values()]
        return weights

    def is_applied(self, workload: Workload) -> bool:
        return bool(_matrices_of(workload.model))

    @contextlib.contextmanager
    def lifted(self, workload: Workload) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for matrix in _matrices_of(workload.model):
                stack.enter_context(matrix.lifted())
            yield

    def round_weights(self, levers: Levers, model: nn.Module) -> None:
        with self.on_model(levers, model):
            widened = [(matrix.module.weight, matrix.widened(matrix.dtype)) for matrix in _matrices_of(model)]
        for weight, values in widened:
            weight.data.copy_(values)

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        offered = self._offered(step)
        bases = [x for x in wanted if step.allows(x) and x.precision != "bf16-true" and x.compiler == "none"]
        if not step.tries_all and any(levers.chunked_loss for levers in bases):  # whole losses are there to compare
            bases = [levers for levers in bases if levers.chunked_loss]
        return [*wanted, *(replace(levers, frozen_weights=offered) for levers in bases)]

    def _offered(self, step: Setting) -> FrozenWeights:
        """Return the bits that are worth trying: 8 where those alone make the step fit, else 4."""
        workload, plain = step.workload, step.predicted(step.plain)
        if not step.allows(replace(step.plain, frozen_weights=FrozenWeights(quantizer="nf4"))):
            raise NotOffered("its class is reduced: allow it with numerics='reduced'")
        if step.budget_bytes is not None and plain.peak_upper_bytes <= step.budget_bytes and not step.tries_all:
            raise NotOffered("the step fits with its weights as they are")
        if step.plain.sharding is not None or is_compiled(workload):
            raise NotOffered("ranks share the weights, or a compiler has them")
        kept = tuple(sorted(heads(workload.model, step.trace(step.plain)) & matrices(workload.model).keys()))
        few, more = (FrozenWeights(quantizer=quantizer, kept=kept) for quantizer in ("nf4", "int8"))
        saved, least = saved_bytes(workload.model, few), least_bytes(step)
        if saved < max(least, 1):
            raise NotOffered(f"it saves less than {format_bytes(least)} of frozen weights")
        if importlib.util.find_spec("bitsandbytes") is None:
            raise NotOffered(
                f"frozen weights of {format_bytes(saved)} more than they need are not quantised: bitsandbytes is not"
                " installed (pip install 'memfit[optimizers]')",
                is_noted=True,
            )
        over = math.inf if step.budget_bytes is None else plain.peak_upper_bytes - step.budget_bytes
        return more if least < saved_bytes(workload.model, more) >= over else few


# Which matrices


def matrices(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers whose weights can be held in fewer bits, by FQN.

    Their weights don't train, and no other module or name has them. Their products are PyTorch's own: what replaced a
    layer's `forward`, or reads its weight past it as `nn.MultiheadAttention` does, is not known to.
    """
    modules = dict(model.named_modules())
    held = [t for m in modules.values() for t in (*own_parameters(m).values(), *m.buffers(recurse=False))]
    uses = Counter(storage_key_of(t) for t in held if t is not None and t.layout is torch.strided)
    found: dict[str, nn.Linear] = {}
    for fqn, module in modules.items():
        weight: Any = own_parameters(module).get("weight")
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            continue
        if "forward" in vars(module) or isinstance(module, NonDynamicallyQuantizableLinear):
            continue
        if type(weight) not in (nn.Parameter, FakeTensor) or weight.requires_grad or weight.dtype not in _DTYPES:
            continue
        is_own = uses[storage_key_of(weight)] == 1 and weight.untyped_storage().nbytes() == weight.nbytes
        fits = weight.is_contiguous() and weight.numel() % _BLOCK == 0 and weight.numel() >= _LEAST_NUMBERS
        if is_own and fits:
            found[fqn] = module
    return found


def _chosen(levers: Levers, model: nn.Module) -> dict[str, nn.Linear]:
    assert levers.frozen_weights is not None
    head = () if levers.chunked_loss is None else (levers.chunked_loss.head,)
    kept = {*levers.frozen_weights.kept, *head}
    return {fqn: module for fqn, module in matrices(model).items() if fqn not in kept}


def saved_bytes(model: nn.Module, set_to: FrozenWeights) -> int:
    """Return the bytes by which matrices in fewer bits take less."""
    weights = [module.weight for fqn, module in matrices(model).items() if fqn not in set_to.kept]
    return sum(int(w.nbytes - w.numel() * _BITS[set_to.quantizer] / 8) for w in weights)


def heads(model: nn.Module, trace: Trace) -> set[str]:
    """Return the layers that make a model's output: the last linear one of the forward pass, and those it names."""
    named = dict(model.named_modules())
    linear = {fqn for fqn, module in named.items() if isinstance(module, nn.Linear)}
    calls = [call for call in trace.calls if call.phase == "forward" and trace.modules[call.module].fqn in linear]
    found = {trace.modules[max(calls, key=lambda call: call.end).module].fqn} if calls else set[str]()
    outputs = getattr(model, "get_output_embeddings", None)
    head = outputs() if callable(outputs) else None
    return found | {fqn for fqn, module in named.items() if head is not None and head in (module, *module.modules())}


# A matrix


class QuantizedMatrix:
    """The `forward` of a linear layer whose weight is in fewer bits. Copies with the layer, bound to the copy."""

    def __init__(self, module: nn.Linear, fqn: str, quantizer: str, files: _Files) -> None:
        self.module, self.fqn, self.quantizer, self.files = module, fqn, quantizer, files
        self.place, self.is_shared = Path(), False  # by copies, which read the same file
        weight: Any = module.weight
        self.shape, self.dtype, self.home = tuple(weight.shape), weight.dtype, weight.device
        self.device = getattr(weight, "memfit_place", self.home)  # of the codes
        self._hooks: list[Any] = []

    def put_on(self) -> None:
        """Take the weight's numbers off the layer, and put their codes there."""
        weight = self.module.weight
        self.place = self.files.write(weight)
        with torch.no_grad():
            self._attach(self._codes(weight.detach()))

    def take_off(self) -> None:
        """Put the weight back as it was."""
        if self._hooks:
            self._detach()
            weight: Any = self.module.weight
            weight.data = self.original(weight).to(self.home, copy=True)
            vars(weight).pop("memfit_place", None)
            self._leave_file()

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Leave the layer as it was, with its weight mapped from its file, until the context is left."""
        parts, weight = self._detach(), self.module.weight
        weight.data = self.original(weight)
        try:
            yield
        finally:
            self._attach(parts)

    def _attach(self, parts: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.memfit_made = True  # by which the workload's fingerprint leaves it out
            self.module.register_buffer(name, part, persistent=False)
        self.module.weight.data = _no_numbers(self.module.weight, self.device)
        vars(self.module).update({_MATRIX: self, "forward": self})
        self._hooks = [
            self.module.register_state_dict_post_hook(_show_weight),
            self.module.register_load_state_dict_pre_hook(_load_weight),
        ]

    def _detach(self) -> dict[str, Any]:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        del vars(self.module)["forward"], vars(self.module)[_MATRIX]
        parts = {name: getattr(self.module, name) for name in self._names}
        for name in parts:
            delattr(self.module, name)
        return parts

    def original(self, weight: Tensor) -> Tensor:
        """Return the weight as it was given, from its file; of fake tensors, one without numbers."""
        if isinstance(weight, FakeTensor):
            with weight.fake_mode:
                return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self.files.read(self.place, self.shape, self.dtype)

    def load(self, values: Tensor) -> None:
        """Take other numbers for the weight's."""
        weight = self.module.weight
        if isinstance(weight, FakeTensor) or torch.equal(self.original(weight), values.detach().to("cpu", self.dtype)):
            return
        values = values.detach().to(self.home, self.dtype)
        self._leave_file()
        self.place, self.is_shared = self.files.write(values), False
        with torch.no_grad():
            for name, part in self._codes(values.contiguous()).items():
                getattr(self.module, name).copy_(part)

    def _leave_file(self) -> None:
        if not self.is_shared and self.place != Path():
            self.place.unlink()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's product."""
        bias: Tensor | None = self.module.bias
        if self.module.weight.requires_grad:
            raise PlanError(
                f"{self.fqn}.weight trains now, and its numbers are in {self.quantizer}: call close() on the step, and"
                " make another plan"
            )
        kind = x.device.type
        is_cast = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.itemsize < 8
        dtype = torch.get_autocast_dtype(kind) if is_cast else self.dtype
        if is_cast:
            x, bias = x.to(dtype), bias if bias is None else bias.to(dtype)
        made: Tensor = _Product.apply(x, bias, self, dtype)  # type: ignore[no-untyped-call]
        return made

    def widened(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix that the codes stand for."""
        operators, parts = _operators(), [getattr(self.module, name) for name in self._names]
        if any(part.is_floating_point() and part.dtype is not torch.float32 for part in parts):
            raise PlanError(
                f"the scales of {self.fqn}.weight were converted with the model: call close() on the step before"
                " model.to() or model.half(), and make another plan"
            )
        if self.quantizer == "int8":
            codes, scales, table = parts
            made: Tensor = operators.dequantize_blockwise(codes, scales, table, _WIDE_BLOCK, dtype)
            return made
        codes, scale_codes, scale_scales, offset, table = parts
        scales = operators.dequantize_blockwise(scale_codes, scale_scales, table, _WIDE_BLOCK, torch.float32)
        scales += offset
        made = operators.dequantize_4bit(codes, scales, _BLOCK, "nf4", (math.prod(self.shape) // _BLOCK, _BLOCK), dtype)
        return made.view(self.shape)

    def _codes(self, weight: Tensor) -> dict[str, Tensor]:
        operators, table = _operators(), self.files.table(weight.device)
        if self.quantizer == "int8":
            codes, scales = operators.quantize_blockwise(weight, table, _WIDE_BLOCK)
            parts = [codes, scales]
        else:
            codes, scales = operators.quantize_4bit(weight, _BLOCK, "nf4", torch.uint8)
            offset = scales.mean()
            parts = [codes, *operators.quantize_blockwise(scales - offset, table, _WIDE_BLOCK), offset]
        parts = [part.to(self.device) for part in parts]
        return dict(zip(self._names, [*parts, self.files.table(self.device)], strict=True))

    @property
    def _names(self) -> tuple[str, ...]:
        if self.quantizer == "int8":
            return "weight_codes", "weight_scales", "weight_table"
        return "weight_codes", "weight_scale_codes", "weight_scale_scales", "weight_offset", "weight_table"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedMatrix:
        self.is_shared = True
        made = memo[id(self)] = object.__new__(type(self))
        vars(made).update(vars(self))
        made.module = copy.deepcopy(self.module, memo)
        made._hooks = []  # a copy is not closed
        weight: Any = copy.deepcopy(self.module.weight, memo)
        if not isinstance(weight, FakeTensor) and weight.untyped_storage().nbytes() > weight.itemsize:
            weight.data = _no_numbers(weight, weight.device)  # a clone is whole
        return made

    def __reduce__(self) -> Any:
        raise PlanError(
            f"{self.fqn}.weight is in {self.quantizer}, and its numbers in a temporary file: save model.state_dict(),"
            " or call close() on the step before the model is pickled"
        )


class _Product(torch.autograd.Function):
    """A product by a matrix in codes, which is widened again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
        ctx.matrix, ctx.dtype = matrix, dtype
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, matrix.widened(dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        of_x = of_bias = None
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_x = grad @ ctx.matrix.widened(ctx.dtype)
            if ctx.needs_input_grad[1]:
                of_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return of_x, of_bias, None, None


def _matrices_of(model: nn.Module) -> list[QuantizedMatrix]:
    return [vars(module)[_MATRIX] for module in model.modules() if _MATRIX in vars(module)]


def _no_numbers(weight: Tensor, device: torch.device) -> Tensor:
    """Return NaN of a weight's shape and dtype, in the memory of one number."""
    with contextlib.nullcontext() if not isinstance(weight, FakeTensor) else weight.fake_mode:
        return torch.full((), math.nan, dtype=weight.dtype, device=device).expand(weight.shape)


def _operators() -> Any:
    with brought_by("optimizers", "levers.frozen_weights"):
        import bitsandbytes  # noqa: F401  # which registers them
    return torch.ops.bitsandbytes


@functools.cache
def _table_numbers() -> tuple[float, ...]:
    """Return the 256 numbers that 8-bit codes stand for."""
    with brought_by("optimizers", "levers.frozen_weights"):
        from bitsandbytes.functional import create_dynamic_map
    with disable_current_modes():  # it reads them, which fake tensors do not have
        return tuple(create_dynamic_map().tolist())


def _show_weight(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put a layer's weight into a state dict as it was given."""
    state[f"{prefix}weight"] = vars(module)[_MATRIX].original(module.weight)


def _load_weight(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load a layer's weight from a state dict: the parameter, which has no numbers, is loaded from itself."""
    weight, given = module.weight, state.get(f"{prefix}weight")
    if isinstance(given, Tensor) and given.shape == weight.shape:
        vars(module)[_MATRIX].load(given)
        state[f"{prefix}weight"] = weight


# What the numbers are kept in, and who may not ask for them


class _Files:
    """A folder of temporary files that have the weights' numbers, which is removed with the last model that needs it.

    Mapped, they take no memory of the process's own; the system keeps what it has room for.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None  # until there is data
        self._count = 0
        self._tables: dict[torch.device, Tensor] = {}

    def table(self, device: torch.device) -> Tensor:
        """Return the numbers that 8-bit codes stand for, on a device: one tensor for all matrices."""
        if device not in self._tables:
            self._tables[device] = torch.tensor(_table_numbers(), dtype=torch.float32, device=device)
        return self._tables[device]

    def write(self, weight: Tensor) -> Path:
        """Write a weight to a new file; one without data leaves none."""
        if isinstance(weight, FakeTensor) or weight.device.type == "meta":
            return Path()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="memfit-weights-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._count += 1
        place = self._folder / f"{self._count}.bin"
        weight.detach().cpu().contiguous().view(torch.uint8).numpy().tofile(place)
        return place

    def read(self, place: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a weight, mapped: what is written to it does not reach the file."""
        return torch.from_file(str(place), shared=False, size=math.prod(shape), dtype=dtype).view(shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Files:
        return self


class _Refusal:
    """A method of peft that would add to weights which are not there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse."""
        raise PlanError(
            f"{self.name}() adds adapters to weights that levers.frozen_weights holds in fewer bits: call close() on"
            " the step first, which puts the weights back as they were"
        )


@contextlib.contextmanager
def _refusing_merges(model: nn.Module) -> Iterator[None]:
    """Have peft's methods that write to the weights of layers refuse to, until the context is left."""
    put: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if _is_of_adapters(module):
            put += [(module, name) for name in _MERGES if hasattr(type(module), name)]
    for module, name in put:
        vars(module)[name] = _Refusal(name)
    try:
        yield
    finally:
        for module, name in put:
            vars(module).pop(name, None)


def _is_of_adapters(module: nn.Module) -> bool:
    """Tell whether a module is one of peft's, or of a package that imitates it: beside a layer, or around a model."""
    return hasattr(type(module), "merge_and_unload") or "base_layer" in own_modules(module)


@contextlib.contextmanager
def _named_where_read(made: Sequence[QuantizedMatrix]) -> Iterator[None]:
    """Refuse a captured step whose code reads a weight past its layer's `forward`, until the context is left."""
    if not any(isinstance(matrix.module.weight, FakeTensor) for matrix in made):
        yield
        return
    with _Reads({storage_key_of(matrix.module.weight): matrix.fqn for matrix in made}):
        yield


class _Reads(TorchFunctionMode):
    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = getattr(func, "__name__", str(func))
        if what not in _READING_NO_NUMBERS and not what.startswith(("_", "is_")):
            for tensor in tree_leaves((args, kwargs)):
                is_tensor = isinstance(tensor, Tensor) and tensor.layout is torch.strided
                if is_tensor and (name := self._names.get(storage_key_of(tensor))):
                    raise PlanError(
                        f"the step reads {name}.weight past the layer's forward ({what}), and its numbers are in fewer"
                        " bits: name the layer in frozen_weights.kept"
                    )
        return func(*args, **(kwargs or {}))
