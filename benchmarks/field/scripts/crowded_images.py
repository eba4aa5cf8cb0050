"""Detection: the loss matches queries with objects, whose number differs from image to image."""

import torch
from networks import ConvNet, images, save
from torch import nn

torch.manual_seed(0)


class Detector(nn.Module):
    def __init__(self, queries=256, width=24):
        super().__init__()
        self.body, self.queries = ConvNet(width=width, depth=3), nn.Parameter(torch.randn(queries, width))
        self.boxes = nn.Linear(width, 4)

    def forward(self, x, targets):
        memory = self.body.features(x).flatten(2).transpose(1, 2)
        found = self.boxes(torch.softmax(self.queries @ memory.transpose(1, 2), -1) @ memory)
        losses = []
        for boxes, wanted in zip(found, targets, strict=True):
            distances = (boxes[:, None] - wanted[None]).abs().mean(-1)
            losses.append((torch.softmax(-distances, 0) * distances).sum(0).mean())
        return {"boxes": torch.stack(losses).mean()}


model = Detector()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step, most in enumerate((10, 30, 20, 400, 50, 900, 100, 900)):
    x, _ = images(8)
    targets = [torch.rand(int(torch.randint(most // 2, most, ())), 4) for _ in range(8)]
    loss = sum(model(x, targets).values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
save(model=model)
