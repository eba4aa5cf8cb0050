"""A moving average of the weights, kept by a hook of the optimizer."""

import torch
from networks import perceptron, samples, save
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
model = perceptron(4, width=128)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer.register_step_post_hook(lambda optimizer, args, kwargs: average.update_parameters(model))
for step in range(7):
    x, y = samples(1024, 128)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
save(model=model, average=average)
