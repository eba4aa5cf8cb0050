"""A detector: the layers of YOLOv8n, with losses of boxes, their distributions and classes at cells that hold objects.

The layers are those of Ultralytics' `yolov8n.yaml` (3.2 million parameters). Each object belongs to the cell that its
centre lies in, on each of three scales: Ultralytics assigns cells by scores.
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
CLASSES, BINS, SIZE, BATCH = 80, 16, 320, 4


class Conv(nn.Module):
    def __init__(self, channels, out, kernel=1, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False)
        self.bn, self.act = nn.BatchNorm2d(out, eps=1e-3, momentum=0.03), nn.SiLU(inplace=True)

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self, channels, shortcut):
        super().__init__()
        self.cv1, self.cv2, self.shortcut = Conv(channels, channels, 3), Conv(channels, channels, 3), shortcut

    def forward(self, x):
        return x + self.cv2(self.cv1(x)) if self.shortcut else self.cv2(self.cv1(x))


class C2f(nn.Module):
    def __init__(self, channels, out, count=1, shortcut=False):
        super().__init__()
        half = out // 2
        self.cv1, self.cv2 = Conv(channels, out), Conv((2 + count) * half, out)
        self.m = nn.ModuleList(Bottleneck(half, shortcut) for _ in range(count))

    def forward(self, x):
        parts = list(self.cv1(x).chunk(2, 1))
        for block in self.m:
            parts.append(block(parts[-1]))
        return self.cv2(torch.cat(parts, 1))


class SPPF(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.cv1, self.cv2 = Conv(channels, channels // 2), Conv(2 * channels, channels)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x):
        parts = [self.cv1(x)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        return self.cv2(torch.cat(parts, 1))


class YOLOv8n(nn.Module):
    def __init__(self):
        super().__init__()
        self.p3 = nn.Sequential(
            Conv(3, 16, 3, 2), Conv(16, 32, 3, 2), C2f(32, 32, 1, True), Conv(32, 64, 3, 2), C2f(64, 64, 2, True)
        )
        self.p4 = nn.Sequential(Conv(64, 128, 3, 2), C2f(128, 128, 2, True))
        self.p5 = nn.Sequential(Conv(128, 256, 3, 2), C2f(256, 256, 1, True), SPPF(256))
        self.up, self.n4, self.n3 = nn.Upsample(scale_factor=2), C2f(384, 128), C2f(192, 64)
        self.down3, self.n4b = Conv(64, 64, 3, 2), C2f(192, 128)
        self.down4, self.n5b = Conv(128, 128, 3, 2), C2f(384, 256)
        self.boxes, self.classes = nn.ModuleList(), nn.ModuleList()
        for width in (64, 128, 256):
            self.boxes.append(nn.Sequential(Conv(width, 64, 3), Conv(64, 64, 3), nn.Conv2d(64, 4 * BINS, 1)))
            self.classes.append(nn.Sequential(Conv(width, 80, 3), Conv(80, 80, 3), nn.Conv2d(80, CLASSES, 1)))

    def forward(self, x):
        p3 = self.p3(x)
        p4 = self.p4(p3)
        p5 = self.p5(p4)
        n4 = self.n4(torch.cat([self.up(p5), p4], 1))
        n3 = self.n3(torch.cat([self.up(n4), p3], 1))
        n4 = self.n4b(torch.cat([self.down3(n3), n4], 1))
        n5 = self.n5b(torch.cat([self.down4(n4), p5], 1))
        scales = zip((n3, n4, n5), self.boxes, self.classes, strict=True)
        return [torch.cat([boxes(x), classes(x)], 1) for x, boxes, classes in scales]


def detection_loss(scales, objects):
    """Return the loss of some objects, rows of image, class, and box as centre and size in shares of the image."""
    image, label, centre, size = objects[:, 0].long(), objects[:, 1].long(), objects[:, 2:4], objects[:, 4:6]
    wanted = torch.cat([centre - size / 2, centre + size / 2], 1)
    total = 0.0
    for found in scales:
        cells = found.shape[-1]
        boxes, scores = found.split((4 * BINS, CLASSES), 1)
        place = (centre * cells).long().clamp(max=cells - 1)
        targets = torch.zeros_like(scores)
        targets[image, label, place[:, 1], place[:, 0]] = 1.0
        total = total + 0.5 * F.binary_cross_entropy_with_logits(scores, targets, reduction="sum") / len(objects)
        sides = boxes[image, :, place[:, 1], place[:, 0]].view(-1, 4, BINS)
        middle = (place + 0.5) / cells
        away = (torch.cat([middle - wanted[:, :2], wanted[:, 2:] - middle], 1) * cells).clamp(0, BINS - 1.01)
        left, share = away.long(), away - away.long()
        lower = F.cross_entropy(sides.flatten(0, 1), left.flatten(), reduction="none")
        upper = F.cross_entropy(sides.flatten(0, 1), left.flatten() + 1, reduction="none")
        total = total + 1.5 * (lower * (1 - share.flatten()) + upper * share.flatten()).mean()
        mean = (sides.softmax(-1) * torch.arange(BINS)).sum(-1) / cells
        predicted = torch.cat([middle - mean[:, :2], middle + mean[:, 2:]], 1)
        common = torch.minimum(predicted[:, 2:], wanted[:, 2:]) - torch.maximum(predicted[:, :2], wanted[:, :2])
        common = common.clamp(min=0).prod(1)
        union = (predicted[:, 2:] - predicted[:, :2]).prod(1) + size.prod(1) - common
        total = total + 7.5 * (1 - common / (union + 1e-7)).mean()
    return total * BATCH


model = YOLOv8n()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.937, nesterov=True, weight_decay=5e-4)
for step in range(6):
    images = torch.rand(BATCH, 3, SIZE, SIZE)
    objects = torch.cat(
        [
            torch.randint(0, BATCH, (24, 1)).float(),
            torch.randint(0, CLASSES, (24, 1)).float(),
            torch.rand(24, 2),
            0.05 + 0.4 * torch.rand(24, 2),
        ],
        1,
    )
    loss = detection_loss(model(images), objects)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    print("step", step, loss.item())
