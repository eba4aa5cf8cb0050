"""A moving average of the weights, as a dict of tensors that the loop updates itself."""

import torch
from networks import perceptron, samples, save
from torch.nn import functional as F

torch.manual_seed(0)
model = perceptron(4, width=128)
shadow = {name: value.detach().clone() for name, value in model.state_dict().items()}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(7):
    x, y = samples(1024, 128)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            shadow[name].mul_(0.9).add_(value, alpha=0.1)
    print("step", step, loss.item())
model.load_state_dict(shadow)
save(model=model)
