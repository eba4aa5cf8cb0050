"""A diffusion model: a U-Net with attention learns the noise of a random time step (Ho et al. 2020)."""

import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
WIDTH, STEPS = 48, 1000


class Residual(nn.Module):
    def __init__(self, channels, out):
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.time = nn.Linear(4 * WIDTH, out)
        self.second = nn.Sequential(nn.GroupNorm(8, out), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(out, out, 3, padding=1))
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x, time):
        return self.second(self.first(x) + self.time(time)[:, :, None, None]) + self.skip(x)


class Attention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(8, channels), nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        q, k, v = (t.flatten(2).transpose(1, 2)[:, None] for t in self.qkv(self.norm(x)).chunk(3, dim=1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed[:, 0].transpose(1, 2).reshape(x.shape))


class UNet(nn.Module):
    def __init__(self, sizes=(1, 2, 2)):
        super().__init__()
        widths = [WIDTH * size for size in sizes]
        self.embed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, 4 * WIDTH))
        self.stem, kept, here = nn.Conv2d(3, WIDTH, 3, padding=1), [WIDTH], WIDTH
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for level, width in enumerate(widths):
            for _ in range(2):
                self.down.append(nn.ModuleList([Residual(here, width), Attention(width) if level else nn.Identity()]))
                here = width
                kept.append(here)
            if level < len(widths) - 1:
                self.down.append(nn.Conv2d(here, here, 3, stride=2, padding=1))
                kept.append(here)
        self.middle = nn.ModuleList([Residual(here, here), Attention(here), Residual(here, here)])
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(3):
                residual = Residual(here + kept.pop(), width)
                self.up.append(nn.ModuleList([residual, Attention(width) if level else nn.Identity()]))
                here = width
            if level:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(here, here, 3, padding=1)))
        self.head = nn.Sequential(nn.GroupNorm(8, here), nn.SiLU(), nn.Conv2d(here, 3, 3, padding=1))

    def forward(self, x, steps):
        rates = torch.exp(torch.arange(WIDTH // 2) * (-math.log(10000) / (WIDTH // 2)))
        angles = steps[:, None].float() * rates[None]
        time = self.embed(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x = self.stem(x)
        kept = [x]
        for block in self.down:
            x = block(x) if isinstance(block, nn.Conv2d) else block[1](block[0](x, time))
            kept.append(x)
        x = self.middle[2](self.middle[1](self.middle[0](x, time)), time)
        for block in self.up:
            if isinstance(block, nn.Sequential):
                x = block(x)
            else:
                x = block[1](block[0](torch.cat([x, kept.pop()], dim=1), time))
        return self.head(x)


model = UNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
kept_signal = torch.cumprod(1 - torch.linspace(1e-4, 0.02, STEPS), dim=0)
for step in range(6):
    images, noise = torch.rand(8, 3, 32, 32) * 2 - 1, torch.randn(8, 3, 32, 32)
    steps = torch.randint(0, STEPS, (8,))
    signal = kept_signal[steps][:, None, None, None]
    loss = F.mse_loss(model(signal.sqrt() * images + (1 - signal).sqrt() * noise, steps), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
