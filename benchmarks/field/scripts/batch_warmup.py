"""The batch grows on a schedule: 256, 512, then 1,024 samples, with dropout."""

import torch
from networks import perceptron, samples, save
from torch.nn import functional as F

torch.manual_seed(0)
model = perceptron(dropout=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(12):
    x, y = samples(256 * 2 ** (step // 4))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, len(x), loss.item())
save(model=model)
