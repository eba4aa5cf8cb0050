"""Accumulation by a schedule: one batch an update at first, four later, each of them larger."""

import torch
from networks import perceptron, samples, save
from torch.nn import functional as F

torch.manual_seed(0)
model = perceptron()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    parts = 1 if step < 4 else 4
    optimizer.zero_grad()
    for _ in range(parts):
        x, y = samples(512 if step < 4 else 768)
        loss = F.cross_entropy(model(x), y) / parts
        loss.backward()
    optimizer.step()
    print("step", step, loss.item())
save(model=model)
