"""Steps that take another way by what their values are: `if`, `while`, `assert` on activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.steps.data import VOCABULARY, class_loss, images, seed_all, tokens
from memfit import Workload


class TransformerBlock(nn.Module):
    """Causal self-attention and a perceptron, normalised before."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class SkippingTransformer(nn.Module):
    """A language model that leaves out the blocks whose input has hardly any norm."""

    def __init__(self, width: int = 128, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(TransformerBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            if x.norm(dim=-1).mean().item() > 1e-3:
                x = block(x)
        logits: Tensor = self.head(x)
        return logits


def _next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def skipped_blocks() -> Workload:
    """A transformer whose blocks are run `if` the norm of their input, read by `.item()`, is large enough."""
    seed_all(100)
    model = SkippingTransformer(width=96)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model, tokens(8, 128), _next_token_loss, optimizer, name="skipped_blocks", max_grad_norm=1.0)


class EarlyExit(nn.Module):
    """A convolutional network with a classifier after each stage, which ends where all are certain enough.

    As in BranchyNet (Teerapittayanon et al. 2016), trained on the exits that were reached.
    """

    def __init__(self, classes: int = 10, width: int = 24, threshold: float = 0.95) -> None:
        super().__init__()
        widths = [3, width, 2 * width, 4 * width]
        self.stages = nn.ModuleList(
            nn.Sequential(_conv(a, b, 1), _conv(b, b, 2)) for a, b in zip(widths[:-1], widths[1:], strict=True)
        )
        self.exits = nn.ModuleList(nn.Linear(w, classes) for w in widths[1:])
        self.threshold = threshold

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for stage, exit in zip(self.stages, self.exits, strict=True):
            x = stage(x)
            found.append(exit(x.mean((2, 3))))
            if bool(found[-1].softmax(1).amax(1).min() > self.threshold):
                break
        return found


def _conv(channels: int, out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1), nn.GroupNorm(4, out), nn.SiLU())


def _exits_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = [F.cross_entropy(logits, batch["y"]) for logits in model(batch["x"])]
    return torch.stack(losses).mean()


def early_exit() -> Workload:
    """A network that leaves at the first classifier that is certain: `bool(t)` decides."""
    seed_all(101)
    model = EarlyExit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Workload(model, images(12, 64), _exits_loss, optimizer, name="early_exit")


class AdaptiveComputation(nn.Module):
    """A recurrent cell that is applied to each sample until it halts (Graves 2016, "Adaptive Computation Time")."""

    def __init__(self, width: int = 256, classes: int = 10, limit: int = 8) -> None:
        super().__init__()
        self.encode = nn.Linear(784, width)
        self.cell = nn.GRUCell(width, width)
        self.halt = nn.Linear(width, 1)
        self.head = nn.Linear(width, classes)
        self.limit = limit

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        encoded = self.encode(x)
        state = torch.zeros_like(encoded)
        halted = x.new_zeros(len(x))
        total, ponder, steps = torch.zeros_like(encoded), x.new_zeros(len(x)), 0
        while (halted < 0.99).any() and steps < self.limit:
            state = self.cell(encoded, state)
            chance = torch.sigmoid(self.halt(state)).squeeze(1)
            running = (halted < 0.99).float()
            weight = torch.minimum(chance, 1 - halted) * running
            halted = halted + weight
            total, ponder, steps = total + weight[:, None] * state, ponder + running, steps + 1
        return self.head(total), ponder


def _ponder_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, ponder = model(batch["x"])
    loss: Tensor = F.cross_entropy(logits, batch["y"]) + 0.01 * ponder.mean()
    return loss


def adaptive_computation() -> Workload:
    """A cell in a `while` that runs as long as any sample has not halted."""
    seed_all(102)
    model = AdaptiveComputation()
    batch = {"x": torch.rand(512, 784), "y": torch.randint(0, 10, (512,))}
    return Workload(
        model, batch, _ponder_loss, torch.optim.Adam(model.parameters(), lr=1e-3), name="adaptive_computation"
    )


class Equilibrium(nn.Module):
    """A layer that is iterated to its fixed point, and then once with gradients (Bai et al. 2019; Fung et al. 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(3))

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        y = self.norms[0](F.relu(self.first(z)))
        stepped: Tensor = self.norms[2](F.relu(z + self.norms[1](x + self.second(y))))
        return stepped

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z, residual, steps = torch.zeros_like(x), torch.tensor(1.0), 0
            while residual.item() > 1e-2 and steps < 12:
                after = self.step(z, x)
                residual, z, steps = (after - z).norm() / after.norm(), after, steps + 1
        return self.step(z, x)


def equilibrium() -> Workload:
    """A deep equilibrium model: iterations without gradients `while residual.item() > tolerance`."""
    seed_all(103)
    model = nn.Sequential(
        *(nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), Equilibrium(24), nn.AvgPool2d(2)),
        *(nn.Conv2d(24, 32, 3, padding=1), nn.BatchNorm2d(32), Equilibrium(32), nn.AvgPool2d(8)),
        *(nn.Flatten(), nn.Linear(32 * 4, 10)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model, images(16, 32), class_loss, optimizer, name="equilibrium")


class Density(nn.Module):
    """A mixture density network: weights, means and deviations of Gaussians, checked as they are made."""

    def __init__(self, inputs: int, width: int, parts: int) -> None:
        super().__init__()
        layers = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)]
        self.body = nn.Sequential(*layers, nn.Tanh())
        self.weights, self.means, self.deviations = (nn.Linear(width, parts) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(x)
        deviation = F.softplus(self.deviations(hidden)) + 1e-3
        assert (deviation > 0).all(), "deviations must be above 0"
        weight = self.weights(hidden).softmax(1)
        if not torch.allclose(weight.sum(1), torch.ones(len(x)), atol=1e-4):
            raise ValueError("the weights of the mixture don't add up to 1")
        return weight, self.means(hidden), deviation


def _mixture_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    weight, mean, deviation = model(batch["x"])
    log_chance = -0.5 * ((batch["y"][:, None] - mean) / deviation) ** 2 - deviation.log()
    loss = -torch.logsumexp(weight.log() + log_chance, 1).mean()
    if torch.isnan(loss):
        raise FloatingPointError("the loss is not a number")
    return loss


def checked_density() -> Workload:
    """A mixture density network whose values are asserted, in the model and in the loss."""
    seed_all(104)
    model = Density(64, 384, 20)
    batch = {"x": torch.randn(2048, 64), "y": torch.randn(2048)}
    return Workload(model, batch, _mixture_loss, torch.optim.Adam(model.parameters(), lr=1e-3), name="checked_density")


class LossScaledByItself:
    """Two tasks' losses, each divided by its running mean, which is read as a number."""

    def __init__(self) -> None:
        self.means = [1.0, 1.0]

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        shared = model.body(batch["x"])  # type: ignore[operator]
        losses = [F.cross_entropy(model.classes(shared), batch["y"]), F.mse_loss(model.copy(shared), batch["x"])]  # type: ignore[operator]
        self.means = [0.9 * m + 0.1 * loss.item() for m, loss in zip(self.means, losses, strict=True)]
        return torch.stack([loss / m for loss, m in zip(losses, self.means, strict=True)]).sum()


class TwoTasks(nn.Module):
    """A body of convolutions with a classifier and a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(3, width, 1), _conv(width, width, 1), _conv(width, width, 2))
        self.classes = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
        self.copy = nn.Sequential(_conv(width, width, 1), nn.Upsample(scale_factor=2), nn.Conv2d(width, 3, 3, 1, 1))


def running_weights() -> Workload:
    """Two losses weighted by their running means: `.item()` gives floats that multiply tensors."""
    seed_all(105)
    model = TwoTasks(24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, images(8, 64), LossScaledByItself(), optimizer, name="running_weights")


def _robust_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Another loss where the errors are large, and a penalty while the outputs are."""
    out = model(batch["x"])
    error = (out - batch["x"]).abs()
    loss = (error**2).mean() if error.max() < 1.0 else F.smooth_l1_loss(out, batch["x"])
    level = float(out.detach().std())
    if level > 0.05:
        loss = loss + 1e-3 * (out[..., 1:] - out[..., :-1]).abs().mean() * level
    return loss


def switched_loss() -> Workload:
    """A denoiser whose loss is chosen by the largest error, and has a term only where the output varies."""
    seed_all(106)
    layers = [_conv(3, 24, 1), *(_conv(24, 24, 1) for _ in range(3)), nn.Conv2d(24, 3, 3, padding=1)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    return Workload(model, images(6, 64), _robust_loss, optimizer, name="switched_loss")


class ScheduledSampling(nn.Module):
    """A decoder that stops once every row has said its end, and is fed with its own guesses when these are sure."""

    def __init__(self, width: int = 160, symbols: int = 64, length: int = 24) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(symbols, width), nn.LSTMCell(width, width)
        self.out, self.length = nn.Linear(width, symbols), length

    def forward(self, start: Tensor, target: Tensor) -> Tensor:
        state = (start, torch.zeros_like(start))
        symbol, ended, found = target[:, 0], torch.zeros(len(target), dtype=torch.bool), []
        for at in range(1, self.length):
            state = self.cell(self.embedding(symbol), state)
            logits = self.out(state[0])
            found.append(logits)
            guess = logits.argmax(1)
            symbol = guess if logits.softmax(1).max().item() > 0.9 else target[:, at]
            ended |= target[:, at] == 0
            if ended.all():
                break
        return torch.stack(found, 1)


def _spelling_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["start"], batch["target"])
    return F.cross_entropy(logits.flatten(0, 1), batch["target"][:, 1 : 1 + logits.shape[1]].flatten())


def scheduled_sampling() -> Workload:
    """A decoder whose next input is its own argmax `if` it is sure, and that ends once all rows have."""
    seed_all(107)
    target = torch.randint(1, 64, (96, 24))
    target[:, 18:] = 0
    model = ScheduledSampling()
    batch = {"start": torch.randn(96, 160), "target": target}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model, batch, _spelling_loss, optimizer, name="scheduled_sampling", max_grad_norm=5.0)
