"""A convolutional network under autocast, with a schedule for its learning rate and label smoothing."""

import torch
from networks import ConvNet, save
from torch import nn

torch.manual_seed(0)
model = ConvNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
for step in range(8):
    images, labels = torch.randn(16, 3, 48, 48), torch.randint(0, 10, (16,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = criterion(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print("step", step, loss.item())
save(model=model)
