"""WGAN: the critic updates in every iteration, the generator in every third, from the third on."""

import torch
from networks import Block, save
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(32, 128), *(Block(128) for _ in range(4)), nn.Linear(128, 64))
critic = nn.Sequential(nn.Linear(64, 64), *(Block(64) for _ in range(2)), nn.Linear(64, 1))
optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=1e-4)
optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=1e-4)
for i in range(1, 13):
    real, noise = torch.randn(1024, 64), torch.randn(1024, 32)
    optimizer_c.zero_grad()
    loss_c = critic(generator(noise).detach()).mean() - critic(real).mean()
    loss_c.backward()
    optimizer_c.step()
    if i % 3 == 0:
        optimizer_g.zero_grad()
        loss_g = -critic(generator(noise)).mean()
        loss_g.backward()
        optimizer_g.step()
        print("generator", i, loss_g.item())
    print("critic", i, loss_c.item())
save(generator=generator, critic=critic)
