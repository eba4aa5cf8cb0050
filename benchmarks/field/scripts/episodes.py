"""A recurrent network reads episodes of four windows, its state not detached within one, and updates after each."""

import torch
from networks import save
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Reader(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(256, width), nn.GRUCell(width, width), nn.Linear(width, 256)

    def forward(self, tokens, hidden):
        outputs = []
        for token in self.embedding(tokens).unbind(1):
            hidden = self.cell(token, hidden)
            outputs.append(hidden)
        return self.head(torch.stack(outputs, 1)), hidden


model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for episode in range(5):
    state, total = torch.zeros(64, 128), 0.0
    for _ in range(4):
        tokens = torch.randint(0, 256, (64, 16))
        logits, state = model(tokens, state)
        total = total + F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    print("episode", episode, total.item())
save(model=model)
