"""Models that generate: diffusion, variational and quantized autoencoders, adversaries, flows, energies."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

from benchmarks.steps.data import seed_all
from memfit import Workload


class Residual(nn.Module):
    """Two convolutions with group norm, to which the time of the diffusion is added."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, 2 * out))
        self.norm, self.last = nn.GroupNorm(8, out), nn.Conv2d(out, out, 3, padding=1)
        self.same = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(time)[:, :, None, None].chunk(2, 1)
        hidden = self.norm(self.first(x)) * (1 + scale) + shift
        return self.last(F.silu(hidden)) + self.same(x)  # type: ignore[no-any-return]


class Denoiser(nn.Module):
    """A U-shaped network that guesses the noise, with attention in the middle."""

    def __init__(self, width: int = 24, time: int = 64) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time))
        self.first, self.frequencies = nn.Conv2d(3, width, 3, padding=1), time // 2
        self.down = nn.ModuleList([Residual(width, width, time), Residual(width, 2 * width, time)])
        self.middle, self.attention = Residual(2 * width, 2 * width, time), nn.MultiheadAttention(2 * width, 4)
        self.up = nn.ModuleList([Residual(4 * width, width, time), Residual(2 * width, width, time)])
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        rates = torch.exp(-math.log(1e4) * torch.arange(self.frequencies) / self.frequencies)
        angles = steps[:, None] * rates
        time, x, kept = self.time(torch.cat([angles.sin(), angles.cos()], 1)), self.first(x), []
        for block in self.down:
            x = block(x, time)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        rows = x.flatten(2).permute(2, 0, 1)
        x = x + self.attention(rows, rows, rows, need_weights=False)[0].permute(1, 2, 0).view_as(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1), time)
        noise: Tensor = self.last(x)
        return noise


def _noise_loss(model: nn.Module, images: Tensor) -> Tensor:
    steps = torch.randint(0, 1000, (len(images),))
    kept = torch.linspace(0.9999, 0.98, 1000).cumprod(0)[steps][:, None, None, None]
    noise = torch.randn_like(images)
    guess = model(kept.sqrt() * images + (1 - kept).sqrt() * noise, steps)
    weight = (kept / (1 - kept)).clamp(max=5.0).flatten()
    loss: Tensor = (weight * (guess - noise).square().mean((1, 2, 3))).mean()
    return loss


def diffusion() -> Workload:
    """Denoising diffusion with a U-shaped network, noise weighted by its step."""
    seed_all(320)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    return Workload(model, torch.randn(6, 3, 32, 32), _noise_loss, optimizer, name="diffusion", max_grad_norm=1.0)


class Latent(nn.Module):
    """A variational autoencoder written with `torch.distributions`, which check what they are given."""

    def __init__(self, width: int = 512, latent: int = 24) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.mean, self.deviation = nn.Linear(width, latent), nn.Linear(width, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, 784))

    def forward(self, x: Tensor) -> tuple[distributions.Distribution, distributions.Distribution]:
        hidden = self.encoder(x)
        posterior = distributions.Normal(self.mean(hidden), F.softplus(self.deviation(hidden)) + 1e-4)
        drawn = distributions.Bernoulli(logits=self.decoder(posterior.rsample()), validate_args=True)
        return posterior, distributions.Independent(drawn, 1)


def _bound(model: nn.Module, x: Tensor) -> Tensor:
    """Return the negative bound on the likelihood."""
    posterior, drawn = model(x)
    prior = distributions.Normal(torch.zeros_like(posterior.mean), torch.ones_like(posterior.mean))
    divergence = distributions.kl_divergence(posterior, prior).sum(1)
    loss: Tensor = (divergence - drawn.log_prob((x > 0.5).float())).mean()
    return loss


def latent_distributions() -> Workload:
    """A variational autoencoder by `torch.distributions`, whose arguments are validated."""
    seed_all(321)
    model = Latent()
    return Workload(
        model, torch.rand(512, 784), _bound, torch.optim.Adam(model.parameters(), lr=1e-3), name="latent_distributions"
    )


class Codes(nn.Module):
    """A codebook that follows running means of what is assigned to its codes (van den Oord et al. 2017)."""

    def __init__(self, count: int = 128, width: int = 32, rate: float = 0.99) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(count, width))
        self.register_buffer("counts", torch.ones(count))
        self.register_buffer("sums", self.codes.clone())
        self.codes: Tensor
        self.counts: Tensor
        self.sums: Tensor
        self.rate = rate

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
        distances = rows.square().sum(1, keepdim=True) - 2 * rows @ self.codes.T + self.codes.square().sum(1)
        nearest = distances.argmin(1)
        if self.training:
            self._follow(rows.detach(), F.one_hot(nearest, len(self.codes)).float())
        found = self.codes[nearest].view(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2)
        return x + (found - x).detach(), F.mse_loss(x, found.detach())

    @torch.no_grad()
    def _follow(self, rows: Tensor, assigned: Tensor) -> None:
        self.counts.mul_(self.rate).add_(assigned.sum(0), alpha=1 - self.rate)
        self.sums.mul_(self.rate).add_(assigned.T @ rows, alpha=1 - self.rate)
        total = self.counts.sum()
        smoothed = (self.counts + 1e-5) / (total + len(self.counts) * 1e-5) * total
        self.codes.copy_(self.sums / smoothed[:, None])


def _stage(channels: int, out: int, kind: type[nn.Module], *shape: int) -> nn.Sequential:
    return nn.Sequential(kind(channels, out, *shape), nn.ReLU(inplace=True))


class Quantized(nn.Module):
    """Convolutions down to codes, and up again."""

    def __init__(self, codes: nn.Module, width: int = 32) -> None:
        super().__init__()
        down = [_stage(3, width, nn.Conv2d, 4, 2, 1), _stage(width, width, nn.Conv2d, 3, 1, 1)]
        up = [_stage(width, width, nn.Conv2d, 3, 1, 1), nn.ConvTranspose2d(width, 3, 4, 2, 1)]
        self.encoder, self.codes, self.decoder = nn.Sequential(*down), codes, nn.Sequential(*up)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, loss = self.codes(self.encoder(x))
        return self.decoder(codes), loss


def _quantized_loss(model: nn.Module, images: Tensor) -> Tensor:
    drawn, commitment = model(images)
    loss: Tensor = F.mse_loss(drawn, images) + 0.25 * commitment
    return loss


def running_codes() -> Workload:
    """A VQ-VAE whose codebook is updated as running means within `forward`."""
    seed_all(322)
    model = Quantized(Codes())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model, torch.rand(16, 3, 48, 48), _quantized_loss, optimizer, name="running_codes")


class StackedCodes(nn.Module):
    """Codebooks of which each gets what the one before left, with gradients past them (Zeghidour et al. 2021)."""

    def __init__(self, stages: int = 3, count: int = 64, width: int = 32) -> None:
        super().__init__()
        self.books = nn.ModuleList(nn.Embedding(count, width) for _ in range(stages))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.permute(0, 2, 3, 1)
        left, total, losses = rows, torch.zeros_like(rows), []
        for book in self.books:
            assert isinstance(book, nn.Embedding)
            found = book(torch.cdist(left.flatten(0, 2), book.weight).argmin(1)).view_as(left)
            losses.append(F.mse_loss(found, left.detach()) + 0.25 * F.mse_loss(left, found.detach()))
            total, left = total + found, left - found.detach()
        straight = rows + (total - rows).detach()
        return straight.permute(0, 3, 1, 2), torch.stack(losses).sum()


def stacked_codes() -> Workload:
    """Residual vector quantization, straight-through: `cdist` and `argmin` for each codebook."""
    seed_all(323)
    model = Quantized(StackedCodes())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, torch.rand(16, 3, 48, 48), _quantized_loss, optimizer, name="stacked_codes")


class Adversaries(nn.Module):
    """A generator from noise and a discriminator, of convolutions (Radford et al. 2016)."""

    def __init__(self, noise: int = 32, width: int = 16) -> None:
        super().__init__()
        self.noise = noise
        self.generator = nn.Sequential(
            *(nn.ConvTranspose2d(noise, 4 * width, 4), nn.BatchNorm2d(4 * width), nn.ReLU(True)),
            *(nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(True)),
            *(nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU(True)),
            *(nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh()),
        )
        self.discriminator = nn.Sequential(
            *(nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, True)),
            *(nn.Conv2d(width, 2 * width, 4, 2, 1), nn.InstanceNorm2d(2 * width), nn.LeakyReLU(0.2, True)),
            *(nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.InstanceNorm2d(4 * width), nn.LeakyReLU(0.2, True)),
            *(nn.Conv2d(4 * width, 1, 4), nn.Flatten()),
        )

    def drawn(self, count: int) -> Tensor:
        images: Tensor = self.generator(torch.randn(count, self.noise, 1, 1))
        return images


def _both_losses(model: Adversaries, images: Tensor) -> Tensor:
    """Return the generator's and the discriminator's loss; the former leaves the discriminator without gradients."""
    drawn = model.drawn(len(images))
    model.discriminator.requires_grad_(False)
    fooled = F.softplus(-model.discriminator(drawn)).mean()
    model.discriminator.requires_grad_(True)
    judged = F.softplus(model.discriminator(drawn.detach())).mean() + F.softplus(-model.discriminator(images)).mean()
    return fooled + judged


def adversaries() -> Workload:
    """A GAN whose two losses are taken in one step, with `requires_grad_(False)` in between."""
    seed_all(324)
    model = Adversaries(width=24)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999))
    return Workload(model, torch.rand(24, 3, 32, 32), _both_losses, optimizer, name="adversaries")  # type: ignore[arg-type]


def _critic_loss(model: Adversaries, images: Tensor) -> Tensor:
    """Return the critic's loss with a penalty on its gradient between images and drawings (Gulrajani et al. 2017)."""
    with torch.no_grad():
        drawn = model.drawn(len(images))
    share = torch.rand(len(images), 1, 1, 1)
    between = (share * images + (1 - share) * drawn).requires_grad_()
    judged = model.discriminator(between)
    (gradient,) = torch.autograd.grad(judged, between, torch.ones_like(judged), create_graph=True)
    penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
    return model.discriminator(drawn).mean() - model.discriminator(images).mean() + 10 * penalty  # type: ignore[no-any-return]


def gradient_penalty() -> Workload:
    """The critic of a Wasserstein GAN: `autograd.grad(create_graph=True)` in the loss."""
    seed_all(325)
    model = Adversaries(width=24)
    model.generator.requires_grad_(False)
    optimizer = torch.optim.Adam(model.discriminator.parameters(), lr=1e-4, betas=(0.0, 0.9))
    return Workload(model, torch.rand(40, 3, 32, 32), _critic_loss, optimizer, name="gradient_penalty")  # type: ignore[arg-type]


class Coupling(nn.Module):
    """Half of the numbers scaled and shifted by a function of the others (Dinh et al. 2017)."""

    def __init__(self, size: int, width: int, flipped: bool) -> None:
        super().__init__()
        half = size // 2
        layers = [nn.Linear(half, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2 * half)]
        self.network, self.flipped = nn.Sequential(*layers), flipped

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = x.chunk(2, 1)
        one, other = (other, one) if self.flipped else (one, other)
        scale, shift = self.network(one).chunk(2, 1)
        scale = torch.tanh(scale)
        other = other * scale.exp() + shift
        return torch.cat([other, one] if self.flipped else [one, other], 1), scale.sum(1)


class Flow(nn.Module):
    """Couplings, one after the other."""

    def __init__(self, size: int = 64, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(size, width, at % 2 == 1) for at in range(layers))
        self.size = size

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(len(x))
        for layer in self.layers:
            x, logarithm = layer(x)
            total = total + logarithm
        return x, total


def _likelihood(model: nn.Module, x: Tensor) -> Tensor:
    z, logarithm = model(x)
    normal = distributions.MultivariateNormal(torch.zeros(z.shape[1]), torch.eye(z.shape[1]))
    loss: Tensor = -(normal.log_prob(z) + logarithm).mean()
    return loss


def flow() -> Workload:
    """A normalizing flow whose likelihood is that of a validated multivariate normal."""
    seed_all(326)
    model = Flow()
    return Workload(
        model, torch.randn(512, 64), _likelihood, torch.optim.Adam(model.parameters(), lr=1e-4), name="flow"
    )


class Energy(nn.Module):
    """A number for each image, and samples of low numbers by Langevin dynamics (Du and Mordatch 2019)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, width, 3, 2, 1), nn.SiLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * 64, 1))

    def forward(self, x: Tensor) -> Tensor:
        energy: Tensor = self.layers(x).squeeze(1)
        return energy

    def sampled(self, x: Tensor, steps: int = 5) -> Tensor:
        for _ in range(steps):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self(x).sum(), x)
            x = x - 10 * slope.clamp(-0.01, 0.01) + 0.005 * torch.randn_like(x)
        return x.detach()


def _energy_loss(model: Energy, images: Tensor) -> Tensor:
    sampled = model.sampled(torch.rand_like(images))
    real, made = model(images), model(sampled)
    loss: Tensor = real.mean() - made.mean() + 0.1 * (real.square() + made.square()).mean()
    return loss


def energy() -> Workload:
    """An energy model: its samples follow derivatives by the images, taken in the loss."""
    seed_all(327)
    model = Energy()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    return Workload(model, torch.rand(64, 3, 32, 32), _energy_loss, optimizer, name="energy", max_grad_norm=0.1)  # type: ignore[arg-type]
