"""Multi-scale training: each batch of images has a size of its own."""

import torch
from networks import ConvNet, images, save
from torch.nn import functional as F

torch.manual_seed(0)
model = ConvNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
for step, size in enumerate((32, 24, 40, 28, 36, 44, 20, 32, 44, 40)):
    x, y = images(12, size)
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    scheduler.step()
    print("step", step, size, loss.item())
save(model=model)
