"""Fine-tuning: the head alone for four iterations, then all of the network, with an optimizer of its own."""

import torch
from networks import ConvNet, images, save
from torch.nn import functional as F

torch.manual_seed(0)
model = ConvNet()
for parameter in model.parameters():
    parameter.requires_grad_(False)
for parameter in model.head.parameters():
    parameter.requires_grad_(True)


def epoch(optimizer, steps):
    model.train()
    for step in range(steps):
        x, y = images(24)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print("step", step, loss.item())


epoch(torch.optim.Adam(model.head.parameters(), lr=1e-3), 4)
for parameter in model.parameters():
    parameter.requires_grad_(True)
epoch(torch.optim.Adam(model.parameters(), lr=1e-4), 5)
save(model=model)
