"""Gradient descent by hand, without an optimizer object."""

import torch
from networks import perceptron, samples, save
from torch.nn import functional as F

torch.manual_seed(0)
model = perceptron(4)
for step in range(6):
    x, y = samples()
    loss = F.cross_entropy(model(x), y)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    print("step", step, loss.item())
save(model=model)
