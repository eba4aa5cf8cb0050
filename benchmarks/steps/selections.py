"""Steps whose lengths depend on values: masks, experts, boxes, hard samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.steps.data import VOCABULARY, class_loss, convolved, images, seed_all, tokens
from memfit import Workload


class Experts(nn.Module):
    """A mixture of experts: each token goes to the k best, in a loop over the experts that were chosen."""

    def __init__(self, width: int, experts: int, chosen: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, indices = self.router(rows).softmax(1).topk(self.chosen, dim=1)
        weights = weights / weights.sum(1, keepdim=True)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(indices == index)
            if row.numel() == 0:
                continue
            out.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return x + out.view_as(x)


def expert_loop() -> Workload:
    """A language model of experts that tokens are routed to by `topk` and `torch.where`."""
    seed_all(110)
    width = 128
    layers = [nn.Sequential(nn.LayerNorm(width), Experts(width, 6)) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, width), *layers, nn.Linear(width, VOCABULARY))
    batch = {"x": tokens(8, 96), "y": tokens(8, 96)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model, batch, _token_loss, optimizer, name="expert_loop")


def _token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def _hard_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the pixels that are hard (Shrivastava et al. 2016), at least a sixteenth of all."""
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none").flatten()
    ordered = losses.detach().sort(descending=True).values
    threshold = min(ordered[len(ordered) // 16].item(), 2.0)
    return losses[losses > threshold].mean()


def hard_pixels() -> Workload:
    """A segmentation network trained on the pixels whose loss is above a threshold."""
    seed_all(111)
    model = nn.Sequential(convolved(3, 24), convolved(24, 24), convolved(24, 24), nn.Conv2d(24, 8, 1))
    batch = {"x": torch.randn(6, 3, 64, 64), "y": torch.randint(0, 8, (6, 64, 64))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Workload(model, batch, _hard_loss, optimizer, name="hard_pixels")


class Detector(nn.Module):
    """A one-stage detector: for each of 16 x 16 places a box and the scores of its classes."""

    def __init__(self, classes: int = 5, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(convolved(3, width), convolved(width, width, 2), convolved(width, 2 * width, 2))
        self.scores = nn.Conv2d(2 * width, classes + 1, 3, padding=1)
        self.boxes = nn.Conv2d(2 * width, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        places = torch.cartesian_prod(torch.arange(hidden.shape[2]), torch.arange(hidden.shape[3]))
        centres = (places.flip(1) + 0.5) / hidden.shape[2]
        raw = self.boxes(hidden).flatten(2).transpose(1, 2)
        middle, half = centres + 0.1 * raw[..., :2].tanh(), 0.2 * raw[..., 2:].sigmoid()
        return self.scores(hidden).flatten(2).transpose(1, 2), torch.cat([middle - half, middle + half], -1)


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Return the intersection over union of each box with each.

    Raises:
        ValueError: A box has its corners in the wrong order.
    """
    for boxes in (one, other):
        if not (boxes[:, 2:] >= boxes[:, :2]).all():
            raise ValueError("boxes must be (x0, y0, x1, y1) with x0 <= x1 and y0 <= y1")
    low = torch.maximum(one[:, None, :2], other[None, :, :2])
    high = torch.minimum(one[:, None, 2:], other[None, :, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (one, other)]
    return both / (areas[0][:, None] + areas[1] - both + 1e-6)


def _detection_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Boxes are matched to places by overlap; of the places without one, three for each matched one are learnt."""
    scores, boxes = model(batch["x"])
    losses = []
    for score, box, truth, label in zip(scores, boxes, batch["boxes"], batch["labels"], strict=True):
        best, which = overlap(box.detach(), truth).max(1)
        matched = (best > 0.1).nonzero().flatten()
        if len(matched) == 0:
            matched = best.argmax().reshape(1)
        target = torch.zeros(len(score), dtype=torch.long)
        target[matched] = label[which[matched]] + 1
        each = F.cross_entropy(score, target, reduction="none")
        others = each.detach().masked_fill(target > 0, -1.0).topk(min(3 * len(matched), len(each) - 1)).indices
        box_loss = F.l1_loss(box[matched], truth[which[matched]])
        losses.append(each[matched].mean() + each[others].mean() + box_loss)
    return torch.stack(losses).mean()


def detector() -> Workload:
    """A one-stage detector: box checks, matching by overlap, hard negatives; lengths follow from values."""
    seed_all(112)
    model = Detector()
    corner, size = torch.rand(6, 5, 2) * 0.6, 0.1 + 0.3 * torch.rand(6, 5, 2)
    boxes = torch.cat([corner, corner + size], -1)
    batch = {"x": torch.randn(6, 3, 64, 64), "boxes": boxes, "labels": torch.randint(0, 5, (6, 5))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    return Workload(model, batch, _detection_loss, optimizer, name="detector", max_grad_norm=10.0)


class Proposals(nn.Module):
    """Two stages: places are scored, boxes that overlap a better one are dropped, and what is left is classified."""

    def __init__(self, kept: int = 12) -> None:
        super().__init__()
        self.first, self.kept = Detector(classes=1), kept
        self.head = nn.Sequential(nn.Linear(64 * 16, 256), nn.ReLU(), nn.Linear(256, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        scores, boxes = self.first(x)
        hidden = self.first.body(x)
        chosen = [self._chosen(s[:, 1].detach(), b.detach()) for s, b in zip(scores, boxes, strict=True)]
        cut = [self._cut(h, b[c]) for h, b, c in zip(hidden, boxes.detach(), chosen, strict=True)]
        return self.head(torch.cat(cut)), chosen, scores

    def _chosen(self, scores: Tensor, boxes: Tensor) -> Tensor:
        """Non-maximum suppression, written as a loop."""
        order = scores.argsort(descending=True)
        kept: list[Tensor] = []
        while order.numel() > 0 and len(kept) < self.kept:
            kept.append(order[0])
            rest = order[1:]
            order = rest[overlap(boxes[order[:1]], boxes[rest])[0] < 0.5]
        return torch.stack(kept)

    def _cut(self, hidden: Tensor, boxes: Tensor) -> Tensor:
        """Features of each box on a 4 x 4 grid."""
        steps = torch.linspace(0, 1, 4)
        y, x = torch.meshgrid(steps, steps, indexing="ij")
        low, size = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
        grid = low[:, None, None] + size[:, None, None] * torch.stack([x, y], -1)
        sampled = F.grid_sample(hidden[None].expand(len(boxes), -1, -1, -1), 2 * grid - 1, align_corners=False)
        return sampled.flatten(1)


def _two_stage_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, chosen, scores = model(batch["x"])
    labels = torch.cat([y.expand(len(c)) for y, c in zip(batch["y"], chosen, strict=True)])
    objectness = torch.stack([s[c, 1].mean() for s, c in zip(scores, chosen, strict=True)])
    return F.cross_entropy(logits, labels) + F.softplus(-objectness).mean()


def two_stage_detector() -> Workload:
    """Region proposals by non-maximum suppression in a `while`, then features cut from a grid."""
    seed_all(113)
    model = Proposals()
    batch = {"x": torch.randn(4, 3, 64, 64), "y": torch.randint(0, 6, (4,))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Workload(model, batch, _two_stage_loss, optimizer, name="two_stage_detector")


class PrunedTokens(nn.Module):
    """An encoder that drops, after each layer, the tokens that hardly anyone attends to."""

    def __init__(self, width: int = 128, layers: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.score, self.head = nn.Linear(width, 1), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
            score = self.score(x).sigmoid().squeeze(-1)
            wanted = (score > score.mean()).any(0)
            x = (x * score[..., None])[:, wanted]
        logits: Tensor = self.head(x.mean(1))
        return logits


def pruned_tokens() -> Workload:
    """A vision transformer that keeps the tokens whose score is above the mean for any sample."""
    seed_all(114)
    model = PrunedTokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model, images(6, 64), class_loss, optimizer, name="pruned_tokens")


class ChildSum(nn.Module):
    """A tree of sums, as deep as the parents in the batch say, in a recursion over Python's numbers."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.embedding, self.join = nn.Embedding(512, width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, leaves: Tensor, lengths: Tensor) -> Tensor:
        roots = [self._root(self.embedding(row[:n])) for row, n in zip(leaves, lengths.tolist(), strict=True)]
        logits: Tensor = self.head(torch.stack(roots))
        return logits

    def _root(self, nodes: Tensor) -> Tensor:
        while len(nodes) > 1:
            even = len(nodes) // 2 * 2
            joined = torch.tanh(self.join(nodes[:even].reshape(even // 2, -1)))
            nodes = torch.cat([joined, nodes[even:]])
        return nodes[0]


def tree() -> Workload:
    """A recursive network over trees whose sizes are in the batch (`lengths.tolist()`)."""
    seed_all(115)
    model = ChildSum()
    batch = {"leaves": torch.randint(0, 512, (32, 60)), "lengths": 4 * torch.randint(2, 16, (32,))}
    batch["y"] = torch.randint(0, 5, (32,))
    return Workload(model, batch, _tree_loss, torch.optim.Adagrad(model.parameters(), lr=0.01), name="tree")


def _tree_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["leaves"], batch["lengths"]), batch["y"])


def _metric_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of the next token, weighted by how often the guess is right; the metrics are kept for the log."""
    logits = model(batch["x"])
    losses = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="none")
    chance = logits.softmax(-1)
    accuracy = (chance.argmax(-1) == batch["y"]).float().mean()
    confidence = chance.max(-1).values.mean()
    model.log = {"accuracy": accuracy.detach(), "confidence": confidence.detach()}  # type: ignore[assignment]
    loss: Tensor = losses.mean() * (1 + 0.1 * (1 - accuracy))
    return loss


def metric_in_loss() -> Workload:
    """A language model with the metrics of `softmax` and `argmax` taken in the loss."""
    seed_all(116)
    width = 96
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(VOCABULARY, width), encoder, nn.Linear(width, VOCABULARY))
    batch = {"x": tokens(6, 64), "y": tokens(6, 64)}
    return Workload(model, batch, _metric_loss, torch.optim.AdamW(model.parameters(), lr=1e-3), name="metric_in_loss")


def _chamfer_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """The distance of each point to the nearest of the other set, whose index is taken first."""
    made = model(batch.transpose(1, 2).flatten(1)).view_as(batch)
    nearest = torch.cdist(made, batch).argmin(-1)
    back = torch.cdist(batch, made).argmin(-1)
    there = batch.gather(1, nearest[..., None].expand_as(batch))
    here = made.gather(1, back[..., None].expand_as(batch))
    loss: Tensor = (made - there).square().sum(-1).mean() + (batch - here).square().sum(-1).mean()
    return loss


def nearest_points() -> Workload:
    """An autoencoder of point clouds with the Chamfer distance: `cdist`, `argmin`, `gather`."""
    seed_all(117)
    layers = [nn.Linear(3 * 256, 512), nn.LeakyReLU(0.2), nn.Linear(512, 64), nn.Linear(64, 512), nn.LeakyReLU(0.2)]
    model = nn.Sequential(*layers, nn.Linear(512, 3 * 256))
    return Workload(
        model, torch.randn(12, 256, 3), _chamfer_loss, torch.optim.Adam(model.parameters()), name="nearest_points"
    )
