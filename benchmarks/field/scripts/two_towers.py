"""Two networks under one optimizer, with a contrastive loss over both, and a temperature that trains beside them."""

import itertools

import torch
from networks import ConvNet, perceptron, save
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
seeing, reading = ConvNet(width=16, depth=4, classes=32), perceptron(4, out=32)
scale = nn.Parameter(torch.tensor(2.0))
optimizer = torch.optim.AdamW(itertools.chain(seeing.parameters(), reading.parameters(), [scale]), lr=1e-3)
for step in range(7):
    pictures, texts = torch.randn(32, 3, 24, 24), torch.randn(32, 16, 64)
    a = F.normalize(seeing(pictures), dim=-1)
    b = F.normalize(reading(texts).mean(1), dim=-1)
    similarity = scale.exp() * a @ b.T
    labels = torch.arange(len(a))
    loss = (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.T, labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
save(seeing=seeing, reading=reading)
