"""Steps of single functions and small modules, as operator benchmarks run them.

They hold what the benchmark's own function holds: its inputs, whose gradients are kept and added to, and the output
until the function returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from benchmarks.published.building import dtype
from memfit import Loop, Workload

Drops = Literal["nothing", "gradients"]
Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class Begin(torch.autograd.Function):
    """`output.backward(gradient)` as a loss: its backward pass is the gradient, fresh where none is given."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor | None) -> Tensor:
        # autograd's engine holds the gradient through the backward pass, cast to the output's dtype
        ctx.gradient = torch.randn_like(output) if gradient is None else gradient.to(output.dtype)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class Held(nn.Module):
    """A module with its inputs as parameters, which is where their gradients are kept from call to call."""

    def __init__(self, layer: nn.Module, *inputs: Tensor, beside: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.beside, self.count = layer, beside, len(inputs)
        for i, x in enumerate(inputs):
            self.register_parameter(f"input_{i}", nn.Parameter(x))

    def forward(self, *more: Any) -> Any:
        return self.layer(*(getattr(self, f"input_{i}") for i in range(self.count)), *more)


def _step(model: nn.Module, batch: dict[str, Tensor], loss_fn: Loss, drops: Drops, retains: bool = False) -> Workload:
    """Return the step of a function that measures itself.

    Args:
        model: It has the inputs.
        batch: Tensors that are there and get no gradient.
        loss_fn: The function.
        drops: Whether gradients are dropped before each call; else they are added to.
        retains: Whether the graph is retained.
    """
    if drops == "nothing":
        _keep_gradients(model)
    return Workload(
        model,
        batch,
        loss_fn,
        None,  # type: ignore[arg-type]
        loop=Loop(holds_outputs="step", retain_graph=retains),
        batch_size=1,
    )


def _keep_gradients(model: nn.Module) -> None:
    """Make the parameters plain tensors that the model holds, whose gradients no loop drops."""
    for module in list(model.modules()):
        for name in list(module._parameters):
            module.__dict__[name] = module._parameters.pop(name)
    model.register_parameter("none", nn.Parameter(torch.zeros(1)))


def _of_output(model: nn.Module, gradient: Tensor | None, *, drops: Drops, retains: bool = True) -> Workload:
    """Return the step of `model().backward(gradient, retain_graph=retains)`."""
    batch = {"gradient": torch.zeros(1) if gradient is None else gradient}
    fresh = gradient is None

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        given = None if fresh else batch["gradient"]
        return Begin.apply(model(), given)  # type: ignore[no-any-return, no-untyped-call]

    return _step(model, batch, loss, drops, retains)


def cross_entropy(vocabulary: int, tokens: int = 16384, drops: Drops = "nothing") -> Workload:
    """Cross entropy on float32 logits."""
    model = Held(nn.CrossEntropyLoss(), torch.empty(tokens, vocabulary))
    batch = {"target": torch.empty(tokens, dtype=torch.long)}
    return _step(model, batch, lambda model, batch: model(batch["target"]), drops)


class LlamaRMSNorm(nn.Module):
    """The RMS norm of transformers' Llama, as the benchmark has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(given)


def rms_norm(width: int, rows: int = 2048, drops: Drops = "nothing") -> Workload:
    """The norm in float32 on bfloat16 inputs; the weight of the other implementation is there too."""
    x = torch.empty(rows, width, dtype=torch.bfloat16)
    model = Held(LlamaRMSNorm(width), x, beside=LlamaRMSNorm(width))
    return _of_output(model, torch.empty_like(x), drops=drops)


class AddRMSNorm(nn.Module):
    """A residual added, then the RMS norm, as the benchmark has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        given = x.dtype
        x = x.to(torch.float32) + residual.to(torch.float32)
        residual = x
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(given), residual.to(given)


def add_rms_norm(width: int, rows: int = 2048, drops: Drops = "nothing") -> Workload:
    """A residual added and the norm, both outputs with a gradient of their own."""
    model = Held(AddRMSNorm(width), torch.empty(rows, width), torch.empty(rows, width))
    batch = {"y": torch.empty(rows, width), "s": torch.empty(rows, width)}

    def both(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        y, s = model()
        return BeginBoth.apply(y, s, batch["y"], batch["s"])  # type: ignore[no-any-return, no-untyped-call]

    return _step(model, batch, both, drops)


class BeginBoth(torch.autograd.Function):
    """`torch.autograd.backward((a, b), (grad_a, grad_b))` as a loss."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, grad_a: Tensor, grad_b: Tensor) -> Tensor:
        ctx.gradients = grad_a, grad_b
        return a.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *ctx.gradients, None, None


def llama_mlp(length: int, batch: int, activation: str, drops: Drops = "nothing") -> Workload:
    """transformers' Llama MLP in bfloat16, with a fresh gradient each time."""
    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, hidden_act=activation)
    with dtype(torch.bfloat16):
        layer = LlamaMLP(config)
    model = Held(layer, torch.empty(batch, length, 4096, dtype=torch.bfloat16))
    return _of_output(model, None, drops=drops)


class KLDivergence(nn.Module):
    """The KL divergence of log probabilities that are made of a leaf once, outside of what is measured."""

    log_q: Tensor
    p: Tensor

    def __init__(self, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.leaf = nn.Parameter(torch.empty(tokens, vocabulary))
        self.register_buffer("log_q", torch.empty(tokens, vocabulary))
        self.register_buffer("p", torch.empty(tokens, vocabulary))

    def forward(self) -> Tensor:
        log_q = Made.apply(self.leaf, self.log_q)  # type: ignore[no-untyped-call]
        return F.kl_div(log_q, self.p, reduction="batchmean")


class Made(torch.autograd.Function):
    """The log-softmax of a leaf that was computed before the measured function: only its backward pass runs."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, output: Tensor) -> Tensor:
        ctx.output = output
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.ops.aten._log_softmax_backward_data(gradient, ctx.output, -1, gradient.dtype), None


def kl_divergence(vocabulary: int, tokens: int = 16384, drops: Drops = "nothing") -> Workload:
    """KLDivLoss(batchmean) of log probabilities."""
    return _alone(KLDivergence(tokens, vocabulary), drops)


def _alone(model: nn.Module, drops: Drops, retains: bool = True) -> Workload:
    batch = {"none": torch.zeros(1)}
    return _step(model, batch, lambda model, _: model(), drops, retains)


def torch_jsd(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence as the benchmark's class TorchJSD computes it."""
    log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
    log_p, log_q = log_p.view(-1, log_p.size(-1)), log_q.view(-1, log_q.size(-1))
    m = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
    loss = 0.5 * F.kl_div(torch.log(m), log_p, reduction="none", log_target=True).sum(dim=-1) + (1 - 0.5) * F.kl_div(
        torch.log(m), log_q, reduction="none", log_target=True
    ).sum(dim=-1)
    return (loss / log_q.shape[0]).sum()


class JSD(KLDivergence):
    """The same of the Jensen-Shannon divergence."""

    def forward(self) -> Tensor:
        return torch_jsd(Made.apply(self.leaf, self.log_q), self.p)  # type: ignore[no-untyped-call]


def jsd(vocabulary: int, tokens: int, drops: Drops = "nothing") -> Workload:
    """The Jensen-Shannon divergence of log probabilities."""
    return _alone(JSD(tokens, vocabulary), drops)


class HeadORPO(nn.Module):
    """A linear head and the ORPO loss, as the benchmark has them."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.lin(x)
        half = logits.shape[0] // 2
        loss = F.cross_entropy(logits[:half].view(-1, logits.shape[-1]), y[:half].view(-1))
        log_probs = F.log_softmax(logits, dim=-1).mean(dim=-1)
        chosen, rejected = log_probs[:half], log_probs[half:]
        odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
        ratio = 0.1 * F.logsigmoid(odds)
        mean: Tensor = loss - ratio.mean()
        return mean


def orpo(batch: int, length: int, drops: Drops = "nothing") -> Workload:
    """A linear head with the ORPO loss in bfloat16; the head of the other implementation is there too."""
    width, vocabulary = 4096, 128256
    model = Held(
        HeadORPO(width, vocabulary),
        torch.empty(batch, length, width, dtype=torch.bfloat16),
        beside=HeadORPO(width, vocabulary),
    )
    target = {"target": torch.empty(batch, length, dtype=torch.long)}
    return _step(model, target, lambda model, batch: model(batch["target"]), drops)


class HeadsJSD(nn.Module):
    """Heads of student and teacher, and the Jensen-Shannon divergence."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.student = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)
        self.teacher = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        ours, theirs = self.student(student), self.teacher(teacher)
        return torch_jsd(torch.log_softmax(ours / 1.0, dim=-1), torch.log_softmax(theirs / 1.0, dim=-1)).to(
            torch.bfloat16
        )


class StudentOfTeacher(nn.Module):
    """The heads with the student's input as a leaf, and the teacher's without gradient."""

    def __init__(self, tokens: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.heads = HeadsJSD(width, vocabulary)  # both implementations share it
        self.x = nn.Parameter(torch.empty(tokens, width, dtype=torch.bfloat16))
        self.register_buffer("theirs", torch.empty(tokens, width, dtype=torch.bfloat16))

    def forward(self) -> Tensor:
        found: Tensor = self.heads(self.x, self.theirs)
        return found


def linear_jsd(tokens: int, drops: Drops = "nothing") -> Workload:
    """Two linear heads and the Jensen-Shannon divergence of what they say."""
    return _alone(StudentOfTeacher(tokens, 4096, 128256), drops, retains=False)


class NeighbourhoodAttention(nn.Module):
    """Attention with a dense mask of neighbours, written out, as the benchmark has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head = heads, width // heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, self.head).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / self.head**0.5)
        mask = torch.zeros(length, length, device=x.device, dtype=torch.bool)
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
        mixed = torch.matmul(weights, v).transpose(1, 2).contiguous().view(batch, length, width)
        found: Tensor = self.out_proj(mixed)
        return found


def neighbourhood_attention(length: int, batch: int, width: int, heads: int, drops: Drops = "nothing") -> Workload:
    """Neighbourhood attention in float32; the other implementation's weights are there too."""
    x = torch.empty(batch, length, width)
    layer = NeighbourhoodAttention(width, heads)
    model = Held(layer, x, beside=NeighbourhoodAttention(width, heads))
    return _of_output(model, torch.empty_like(x), drops=drops)


class Experts(nn.Module):
    """A loop over experts, as transformers has it for mixtures of experts, with tokens spread evenly."""

    gate_up: Tensor
    down: Tensor
    chosen: Tensor

    def __init__(self, tokens: int, experts: int, width: int, inner: int, top: int) -> None:
        super().__init__()
        half = torch.bfloat16
        self.tokens, self.experts, self.top = tokens, experts, top
        self.x = nn.Parameter(torch.empty(tokens, width, dtype=half))
        # The weights are products with 0.02 of leaves, which the products keep alive.
        self.gate_up_leaf = nn.Parameter(torch.empty(experts, 2 * inner, width, dtype=half))
        self.down_leaf = nn.Parameter(torch.empty(experts, width, inner, dtype=half))
        self.register_buffer("gate_up", torch.empty(experts, 2 * inner, width, dtype=half))
        self.register_buffer("down", torch.empty(experts, width, inner, dtype=half))
        self.shares = nn.Parameter(torch.empty(tokens, top, dtype=half))
        self.register_buffer("chosen", torch.empty(tokens, top, dtype=torch.int32))

    def forward(self) -> Tensor:
        gate_up, down = Scaled.apply(self.gate_up_leaf, self.gate_up), Scaled.apply(self.down_leaf, self.down)  # type: ignore[no-untyped-call]
        final = torch.zeros_like(self.x)
        with torch.no_grad():
            mask = F.one_hot(self.chosen.long(), num_classes=self.experts).permute(2, 1, 0)
            torch.greater(mask.sum(dim=(-1, -2)), 0)
        each = self.tokens * self.top // self.experts
        for expert in range(self.experts):
            place = torch.empty(each, dtype=torch.long, device=self.x.device)
            token = torch.empty(each, dtype=torch.long, device=self.x.device)
            gate, up = F.linear(self.x[token], gate_up[expert]).chunk(2, dim=-1)
            current = F.linear(F.silu(gate) * up, down[expert])
            current = current * self.shares[token, place, None]
            final.index_add_(0, token, current.to(final.dtype))
        return final


class Scaled(torch.autograd.Function):
    """A leaf times 0.02, computed before the measured function: only its backward pass runs."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 0.02, None


def experts(tokens: int, experts: int, drops: Drops = "nothing") -> Workload:
    """A block of experts of Qwen3-MoE-30B's size as a loop in Python."""
    model = Experts(tokens, experts, 2048, 768, 8)
    return _of_output(model, None, drops=drops)


class SoftCappedLoss(nn.Module):
    """A linear head with soft-capped logits, and cross entropy in float32."""

    def __init__(self, tokens: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.empty(tokens, width, dtype=torch.bfloat16))
        self.head = nn.Parameter(torch.empty(vocabulary, width, dtype=torch.bfloat16))

    def forward(self, target: Tensor) -> Tensor:
        logits = self.x @ self.head.T
        logits = logits / 30
        logits = torch.tanh(logits)
        logits = logits * 30
        return F.cross_entropy(logits.float(), target)


def gemma_head(tokens: int = 8192, width: int = 2304, vocabulary: int = 256000) -> Workload:
    """The head and loss of Gemma 2 2B."""
    model = SoftCappedLoss(tokens, width, vocabulary)
    batch = {"target": torch.empty(tokens, dtype=torch.long)}
    return Workload(model, batch, lambda model, batch: model(batch["target"]), None, batch_size=1)  # type: ignore[arg-type]
