"""A pretrained body and a new head, each with an optimizer of its own, both updated in every step."""

import torch
from networks import perceptron, samples, save
from torch.nn import functional as F

torch.manual_seed(0)
model = perceptron(8)
body, head = model[:-1], model[-1]
optimizers = [torch.optim.AdamW(body.parameters(), lr=1e-4), torch.optim.SGD(head.parameters(), lr=1e-2, momentum=0.9)]
for step in range(8):
    x, y = samples()
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    print("step", step, loss.item(), total.item())
save(model=model)
