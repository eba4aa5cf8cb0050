"""VQGAN-like: an autoencoder alone at first; its discriminator begins in the fifth iteration."""

import torch
from networks import ConvNet, images, save
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = ConvNet(width=16, depth=2), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x):
        return self.out(self.body.features(x))


model, discriminator = Autoencoder(), ConvNet(width=24, depth=6, classes=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
optimizer_d = torch.optim.AdamW(discriminator.parameters(), lr=1e-4)
for step in range(10):
    x, _ = images(16)
    decoded = model(x)
    loss = F.l1_loss(decoded, x)
    if step >= 4:
        loss = loss - 0.1 * discriminator(decoded).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step >= 4:
        real, fake = discriminator(x), discriminator(decoded.detach())
        loss_d = F.relu(1 - real).mean() + F.relu(1 + fake).mean()
        optimizer_d.zero_grad()
        loss_d.backward()
        optimizer_d.step()
        print("discriminator", step, loss_d.item())
    print("step", step, loss.item())
save(model=model, discriminator=discriminator)
