"""Two networks train in phases of three iterations each, the larger one second."""

import torch
from networks import perceptron, samples, save
from torch.nn import functional as F

torch.manual_seed(0)
players = {"small": perceptron(2), "large": perceptron(8)}
optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, model in players.items()}
for step in range(12):
    turn = "small" if step % 6 < 3 else "large"
    x, y = samples()
    loss = F.cross_entropy(players[turn](x), y)
    optimizers[turn].zero_grad()
    loss.backward()
    optimizers[turn].step()
    print(turn, step, loss.item())
save(**players)
