"""An image classifier: ResNet-18 of Transformers, on images of 224 × 224."""

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

torch.manual_seed(0)
model = ResNetForImageClassification(
    ResNetConfig(layer_type="basic", hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], num_labels=100)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
loss_fn = nn.CrossEntropyLoss()
for step in range(6):
    images, labels = torch.randn(8, 3, 224, 224), torch.randint(0, 100, (8,))
    loss = loss_fn(model(images).logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
