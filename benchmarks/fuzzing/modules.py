"""The modules and the workload of a random program."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

from benchmarks.fuzzing.layers import LAYERS, is_linear, layer, loss_of, tie
from benchmarks.fuzzing.operators import OF_ONE, OF_SEVERAL, fitted, floating
from benchmarks.fuzzing.programs import Block, Call, Operation, Program
from memfit.workload import Workload

Tensor = torch.Tensor
_MOST_ELEMENTS = 1 << 16
_CLASSES = 5


class RandomBlock(nn.Module):
    """The module of a block; its layers are made as it first runs.

    Args:
        block: What it does.
        others: The blocks that it may call.
    """

    def __init__(self, block: Block, others: list[RandomBlock]) -> None:
        super().__init__()
        self.block = block
        self.layers = nn.ModuleDict()
        called = {op.n for op in block.operations if op.name == "call"}
        self.others = nn.ModuleDict({str(n): others[n] for n in sorted(called)})
        self.last_use = _last_uses(block)

    def forward(self, x: Tensor) -> Any:
        """Run the operations in turn; results are let go of after their last use."""
        results: dict[int, Any] = {0: x}
        for index, operation in enumerate(self.block.operations):
            results[index + 1] = self._result(index, operation, results)
            done = [i for i in results if i not in (0, index + 1) and self.last_use.get(i, -1) <= index]
            for result in () if self.block.holds else done:
                del results[result]
        last = len(self.block.operations)
        out = _settled(_picked(results[last], 0), x)
        other = _picked(results[last], 1)
        results.clear()
        out = x + out if self.block.residual else out
        if self.block.returns == "tuple":
            return out, other
        return {"out": out, "other": other} if self.block.returns == "dict" else out

    def _result(self, index: int, operation: Operation, results: dict[int, Any]) -> Any:
        operands = [_picked(results[max(0, index + 1 - back)], operation.n) for back in operation.back]
        if operation.name == "call":
            return _first(self.others[str(operation.n)](_settled(operands[0], results[0])))
        if operation.name in LAYERS:
            return self._layer(index, operation, operands[0])(operands[0])
        function = OF_SEVERAL.get(operation.name) or OF_ONE[operation.name]
        return _bounded(function(*map(floating, operands), operation.n))

    def _layer(self, index: int, operation: Operation, x: Tensor) -> nn.Module:
        name = f"{operation.name}{index}"
        if name not in self.layers:
            self.layers[name] = layer(operation.name, x, operation.n)
        return self.layers[name]


def _last_uses(block: Block) -> dict[int, int]:
    """Return the operation that uses each result last; the last result is used to the end."""
    found: dict[int, int] = {}
    for index, operation in enumerate(block.operations):
        found |= {max(0, index + 1 - back): index for back in operation.back}
    return found | {len(block.operations): len(block.operations)}


def _first(out: Any) -> Tensor:
    """Return the main result of a block."""
    if isinstance(out, dict):
        out = out["out"]
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


def _other(out: Any) -> Tensor | None:
    if isinstance(out, dict):
        other: Tensor = out["other"]
        return other
    return out[1] if isinstance(out, tuple) else None


def _picked(value: Any, n: int) -> Tensor:
    found: Tensor = value[n % len(value)] if isinstance(value, tuple) else value
    return found


def _bounded(value: Any) -> Any:
    """Return a result that is no larger than what follows can take, and has more than the samples' dimension."""
    if isinstance(value, tuple | list):
        return tuple(_bounded(v) for v in value)
    if value.dim() < 2:
        value = value.view(-1, 1) if value.dim() else value.view(1, 1)
    if value.dim() > 4:
        value = value.flatten(3)
    while value.numel() > _MOST_ELEMENTS:
        value = value[..., : max(1, value.shape[-1] // 2)] if value.shape[-1] > 1 else value[:, : value.shape[1] // 2]
    return value


def _settled(y: Tensor, x: Tensor) -> Tensor:
    """Return a tensor in the shape and precision of a block's input, of moderate values."""
    y = floating(y).to(x.dtype)
    y = y if y.shape == x.shape else fitted(y, x).expand(x.shape)
    return y.clamp(-3, 3)


class RandomModel(nn.Module):
    """The model of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        features = program.shape[2]
        self.first = nn.Linear(features, features)
        blocks: list[RandomBlock] = []
        for block in program.blocks:
            blocks.append(RandomBlock(block, blocks))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(features, _CLASSES)
        if program.unused:
            self.unused = nn.Linear(features, features)
        self.kept: dict[int, Any] = {}

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the output, and further results of the blocks."""
        results = [self.first(x)]
        others: list[Tensor] = []
        for call in self.program.calls:
            given = results[-min(call.back, len(results))]
            out = _called(self.blocks[call.block], call, given)
            results = [results[-1], _first(out)]
            other = _other(out)
            if other is not None and self.program.loss.others:
                others.append(other)
            del out, other, given
        return self.head(results[-1]), others


def _called(block: nn.Module, call: Call, x: Tensor) -> Any:
    """Call a block within a context, or under activation checkpointing."""
    if call.within in ("checkpoint", "reentrant"):
        return checkpoint(block, x, use_reentrant=call.within == "reentrant")
    with _context(call.within):
        return block(x)


def _context(within: str) -> Any:
    if within == "no_grad":
        return torch.no_grad()
    if within in ("autocast", "float32"):
        return torch.autocast("cpu", torch.bfloat16, enabled=within == "autocast")
    if within == "hooks":
        return graph.saved_tensors_hooks(_packed, _unpacked)
    return graph.save_on_cpu() if within == "on_cpu" else contextlib.nullcontext()


def _packed(tensor: Tensor) -> Any:
    return (tensor.dtype, tensor.clone())


def _unpacked(packed: Any) -> Tensor:
    dtype, tensor = packed
    unpacked: Tensor = tensor.to(dtype)
    return unpacked


# Hooks of modules.


def _hook(model: RandomModel, index: int, block: nn.Module, what: str) -> None:
    """Put hooks on a block that do as its program says."""
    if what in ("keeps", "keeps detached"):
        block.register_forward_hook(functools.partial(_keep, model.kept, index, what == "keeps"))
    elif what == "collects":
        block.register_forward_hook(functools.partial(_collect, model.kept, index))
        model.register_forward_pre_hook(functools.partial(_clear, model.kept, index))
    elif what == "replaces output":
        block.register_forward_hook(_replace_output)
    elif what == "replaces input":
        block.register_forward_pre_hook(_replace_input)
    elif what == "backward":
        block.register_full_backward_hook(_scale_gradients)
    elif what == "before backward":
        block.register_full_backward_pre_hook(_scale_gradients)


def _keep(kept: dict[int, Any], index: int, attached: bool, module: nn.Module, args: Any, out: Any) -> None:
    kept[index] = _first(out) if attached else _first(out).detach()


def _collect(kept: dict[int, Any], index: int, module: nn.Module, args: Any, out: Any) -> None:
    kept.setdefault(index, []).append(_first(out).detach())


def _clear(kept: dict[int, Any], index: int, module: nn.Module, args: Any) -> None:
    kept.pop(index, None)


def _replace_output(module: nn.Module, args: Any, out: Any) -> Any:
    if isinstance(out, dict):
        return {**out, "out": out["out"] * 0.5}
    return (out[0] * 0.5, *out[1:]) if isinstance(out, tuple) else out * 0.5


def _replace_input(module: nn.Module, args: Any) -> Any:
    return (args[0] * 0.5, *args[1:])


def _scale_gradients(module: nn.Module, *gradients: Any) -> Any:
    return tuple(g if g is None else g * 0.5 for g in gradients[0])


# The workload.


def workload_of(program: Program) -> Workload:
    """Return the workload of a program, the same each time."""
    torch.manual_seed(program.seed)
    samples, rows, features = program.shape
    x = torch.randn(samples, rows, features)
    target = torch.randint(_CLASSES, (samples, rows))
    model = RandomModel(program)
    with torch.no_grad():
        model(x.clone())  # makes the layers
    if program.tied:
        _tie_all(model)
    for index, (block, module) in enumerate(zip(program.blocks, model.blocks, strict=True)):
        _hook(model, index, module, block.hook)
    return Workload(
        model=model,
        batch=_batch(program.batch, x, target),
        loss_fn=functools.partial(_loss, program),
        optimizer=_optimizer(program.optimizer, model),
        max_grad_norm=0.5 if program.clips else None,
        name="fuzzing",
    )


def _tie_all(model: RandomModel) -> None:
    linear = [module for module in model.modules() if is_linear(module)]
    for one, other in zip(linear[1:], linear, strict=False):
        tie(one, other)


def _batch(kind: str, x: Tensor, target: Tensor) -> Any:
    if kind == "tuple":
        return x, target
    return {"x": x, "y": target} if kind == "dict" else {"x": [x], "y": {"y": target}}


def _parts(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, tuple):
        return batch
    x, y = batch["x"], batch["y"]
    return (x, y) if isinstance(x, Tensor) else (x[0], y["y"])


def _loss(program: Program, model: nn.Module, batch: Any) -> Any:
    x, target = _parts(batch)
    out, others = model(x)
    loss = loss_of(program.loss.kind, out, target)
    if program.loss.metric:
        _note(program.loss.metric, model, out, target)
    for other in others:
        loss = loss + 0.1 * floating(other).float().clamp(-3, 3).mean()
    if program.loss.penalty:
        loss = loss + 1e-3 * torch.stack([p.float().norm() for p in model.parameters()]).sum()
    return (loss * x.shape[0], x.shape[0]) if program.loss.counted else loss


def _note(metric: str, model: Any, out: Tensor, target: Tensor) -> None:
    """Take a metric of the outputs; keep it, or read it."""
    accuracy = (out.softmax(-1).argmax(-1) == target).float().mean()
    if metric == "kept":
        model.kept[-1] = accuracy
    elif metric == "read":
        model.kept[-1] = float(accuracy)


_Make = Callable[[Any], torch.optim.Optimizer]


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    makers: dict[str, _Make] = {
        "sgd": lambda p: torch.optim.SGD(p, 1e-2),
        "momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, 1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
        "adagrad": lambda p: torch.optim.Adagrad(p, 1e-3),
        "adam-fused": lambda p: torch.optim.Adam(p, 1e-3, fused=True),
        "adam-single": lambda p: torch.optim.Adam(p, 1e-3, foreach=False),
    }
    return makers[name](model.parameters())
