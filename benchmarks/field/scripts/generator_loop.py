"""The loop is a generator: each update is made when the next loss is asked for."""

import torch
from networks import perceptron, samples, save
from torch.nn import functional as F


def training(model, optimizer, steps):
    for _ in range(steps):
        x, y = samples()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        yield loss.item()


torch.manual_seed(0)
model = perceptron(dropout=0.2)
for step, loss in enumerate(training(model, torch.optim.Adam(model.parameters()), 7)):
    print("step", step, loss)
save(model=model)
