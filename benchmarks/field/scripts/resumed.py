"""Trains four steps and keeps a checkpoint, which stays loaded in the second half of the training."""

import os

import torch
from networks import perceptron, samples, save
from torch.nn import functional as F

torch.manual_seed(0)
model = perceptron(width=96)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
start, checkpoint = 0, None
if os.path.exists("checkpoint.pt"):
    checkpoint = torch.load("checkpoint.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    torch.set_rng_state(checkpoint["random"])
    start = checkpoint["step"]
for step in range(start, start + 5):
    x, y = samples(768, 96)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
torch.save({**kept, "step": start + 5}, "checkpoint.pt")
save(model=model)
