"""Losses are kept for a plot, with their graphs."""

import torch
from networks import perceptron, samples, save
from torch.nn import functional as F

torch.manual_seed(0)
model = perceptron(4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(9):
    x, y = samples(512)
    features = model[:-1](x)
    loss = F.cross_entropy(model[-1](features), y)
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    losses.append(loss)
    print("step", step, loss.item())
print("mean", torch.stack(losses).mean().item())
save(model=model)
