"""`train_one_epoch`, as torchvision's references have it: `zero_grad` between the forward and backward passes."""

import torch
from networks import ConvNet, images, save
from torch import nn


def train_one_epoch(model, criterion, optimizer, data, epoch):
    model.train()
    for i, (image, target) in enumerate(data):
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        correct = (output.argmax(1) == target).float().mean()
        print("epoch", epoch, i, loss.item(), correct.item())


def evaluate(model, criterion, data):
    model.eval()
    with torch.inference_mode():
        return sum(criterion(model(image), target).item() for image, target in data)


def main():
    torch.manual_seed(0)
    model = ConvNet()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for epoch in range(2):
        train_one_epoch(model, criterion, optimizer, (images(24) for _ in range(4)), epoch)
        schedule.step()
        print("evaluated", evaluate(model, criterion, (images(24) for _ in range(2))))
    save(model=model)


if __name__ == "__main__":
    main()
