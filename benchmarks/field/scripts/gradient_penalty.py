"""A loss with gradients in it, from the third iteration on."""

import torch
from networks import perceptron, samples, save
from torch.nn import functional as F

torch.manual_seed(0)
model = perceptron(4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    x, y = samples(512)
    x.requires_grad_(True)
    loss = F.cross_entropy(model(x), y)
    if step >= 2:
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + 10 * gradient.square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
save(model=model)
