"""Beside the step stay: the batch before, its outputs, a template layer, and the weights that training began with."""

import copy

import torch
from networks import save
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 1024, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(64, 64))
first_weights = copy.deepcopy(model.state_dict())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(7):
    images = torch.randn(256, 40, 64)
    out = model(images)
    loss = F.mse_loss(out, images)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
moved = sum((p - first_weights[name]).norm() for name, p in model.state_dict().items())
print("moved", moved.item())
save(model=model)
