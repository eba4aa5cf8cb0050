"""Learning without labels, and what is added to trained models: contrast, slow copies, adapters, sparse tables."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.steps.data import VOCABULARY, convolved, images, own_loss, seed_all, tokens
from memfit import Workload


def _encoder(out: int = 64) -> nn.Sequential:
    stages = [convolved(3, 24), convolved(24, 32, 2), convolved(32, 64, 2)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, out))


def _views(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two views of images: noise, and flips of about a half of them."""
    flipped = (torch.rand(len(x)) < 0.5)[:, None, None, None]
    return x + 0.1 * torch.randn_like(x), torch.where(flipped, x.flip(-1), x) * (0.8 + 0.4 * torch.rand(()))


def _contrast(model: nn.Module, batch: dict[str, Tensor], temperature: float = 0.2) -> Tensor:
    """Return the loss of telling a view's other among all (Chen et al. 2020, "SimCLR")."""
    found = F.normalize(model(torch.cat(_views(batch["x"]))), dim=1)
    scores = found @ found.T / temperature
    scores.fill_diagonal_(-torch.inf)
    count = len(batch["x"])
    return F.cross_entropy(scores, (torch.arange(2 * count) + count) % (2 * count))


def contrast() -> Workload:
    """SimCLR: InfoNCE over a batch of pairs, the diagonal filled in place."""
    seed_all(340)
    model = _encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    return Workload(model, images(12, 40), _contrast, optimizer, name="contrast")


class Queue(nn.Module):
    """An encoder, its slow copy, and a queue of what the copy made of past batches (He et al. 2020, "MoCo")."""

    def __init__(self, width: int = 64, length: int = 1024) -> None:
        super().__init__()
        self.query, self.key = _encoder(width), _encoder(width).requires_grad_(False)
        self.key.load_state_dict(self.query.state_dict())
        self.register_buffer("queue", F.normalize(torch.randn(length, width), dim=1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.queue: Tensor
        self.place: Tensor

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        query = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.copy_(0.999 * slow + 0.001 * fast)
            order = torch.randperm(len(other))
            key = F.normalize(self.key(other[order]), dim=1)[order.argsort()]
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], 1) / 0.07
        self._enqueue(key)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    @torch.no_grad()
    def _enqueue(self, keys: Tensor) -> None:
        at = int(self.place)
        self.queue[at : at + len(keys)] = keys
        self.place[0] = (at + len(keys)) % len(self.queue)


def _queued(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(*_views(batch["x"]))
    return loss


def momentum_queue() -> Workload:
    """MoCo: a momentum encoder, and a queue written at a place that is read from a buffer."""
    seed_all(341)
    model = Queue()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.03, momentum=0.9)
    return Workload(model, images(16, 40), _queued, optimizer, name="momentum_queue")


def _triplets(model: nn.Module, batch: dict[str, Tensor], margin: float = 0.3) -> Tensor:
    """Return the loss of the hardest pairs of a batch (Hermans et al. 2017); those within the margin count."""
    found = F.normalize(model(batch["x"]), dim=1)
    distances = torch.cdist(found, found)
    same = batch["y"][:, None] == batch["y"]
    furthest = distances.masked_fill(~same, -1.0).max(1).values
    nearest = distances.masked_fill(same, torch.inf).min(1).values
    losses = F.relu(furthest - nearest + margin)
    wrong = losses[losses > 0]
    return wrong.mean() if len(wrong) else losses.sum() * 0.0


def hard_triplets() -> Workload:
    """Metric learning with the hardest triplets of a batch: `cdist`, masked minima, a selection by value."""
    seed_all(342)
    model = _encoder(32)
    batch = images(24, 40, classes=6)
    batch["y"] = torch.arange(24) % 6
    return Workload(model, batch, _triplets, torch.optim.Adam(model.parameters(), lr=3e-4), name="hard_triplets")


class Distillation(nn.Module):
    """A student and a teacher that follows it, whose outputs are centred and sharpened (Caron et al. 2021, "DINO")."""

    def __init__(self, classes: int = 512) -> None:
        super().__init__()
        self.student, self.teacher = self._network(classes), self._network(classes).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())
        self.register_buffer("centre", torch.zeros(1, classes))
        self.centre: Tensor

    def _network(self, classes: int) -> nn.Sequential:
        head = nn.utils.parametrizations.weight_norm(nn.Linear(64, classes, bias=False))
        return nn.Sequential(_encoder(), nn.GELU(), head)

    def forward(self, views: list[Tensor]) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
            taught = [self.teacher(view) for view in views[:2]]
            aims = [((t - self.centre) / 0.04).softmax(1) for t in taught]
            self.centre = 0.9 * self.centre + 0.1 * torch.cat(taught).mean(0, keepdim=True)
        guesses = [(self.student(view) / 0.1).log_softmax(1) for view in views]
        pairs = [(a, g) for i, a in enumerate(aims) for j, g in enumerate(guesses) if i != j]
        return torch.stack([-(a * g).sum(1).mean() for a, g in pairs]).mean()


def _crops(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"]
    small = [F.interpolate(x[..., at : at + 24, at : at + 24], 20, mode="bicubic") for at in (0, 8, 16)]
    loss: Tensor = model([*_views(x), *small])
    return loss


def self_distillation() -> Workload:
    """DINO: crops of two sizes, a teacher that follows, and a centre that is a new buffer after each call."""
    seed_all(343)
    model = Distillation()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4)
    return Workload(model, images(10, 40), _crops, optimizer, name="self_distillation", max_grad_norm=3.0)


class LowRank(nn.Module):
    """A frozen linear layer, and a product of two small matrices beside it (Hu et al. 2022, "LoRA")."""

    def __init__(self, layer: nn.Module, inputs: int, out: int, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(inputs, rank) / math.sqrt(inputs))
        self.up, self.dropout = nn.Parameter(torch.zeros(rank, out)), nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2.0 * (self.dropout(x) @ self.down @ self.up)  # type: ignore[no-any-return]


def lora() -> Workload:
    """A frozen GPT-2 with LoRA, by hand, on its attention and its perceptrons."""
    seed_all(344)
    config = transformers.GPT2Config(n_embd=128, n_layer=4, n_head=4, n_positions=128, vocab_size=VOCABULARY)
    config.use_cache = False
    model = transformers.GPT2LMHeadModel(config).train().requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LowRank(block.attn.c_attn, 128, 384)
        block.mlp.c_fc = LowRank(block.mlp.c_fc, 128, 512)
    ids = tokens(6, 96)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return Workload(model, {"input_ids": ids, "labels": ids}, own_loss, optimizer, name="lora", max_grad_norm=1.0)


class Prompted(nn.Module):
    """A frozen encoder after learnt vectors in front of each row (Lester et al. 2021), and a classifier."""

    def __init__(self, encoder: nn.Module, width: int, count: int = 16) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False)
        self.prompt, self.head = nn.Parameter(0.1 * torch.randn(count, width)), nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.encoder.get_input_embeddings()(ids)  # type: ignore[operator]
        rows = torch.cat([self.prompt.expand(len(ids), -1, -1), embedded], 1)
        logits: Tensor = self.head(self.encoder(inputs_embeds=rows).last_hidden_state[:, 0])
        return logits


def _row_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["y"])


def prompts() -> Workload:
    """A frozen BERT with learnt vectors in front: gradients go through it to its input."""
    seed_all(345)
    config = transformers.BertConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, vocab_size=VOCABULARY
    )
    model = Prompted(transformers.BertModel(config).train(), 128)
    batch = {"ids": tokens(8, 64), "y": torch.randint(0, 3, (8,))}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return Workload(model, batch, _row_loss, optimizer, name="prompts")


class Words(nn.Module):
    """Words near each other, against words drawn at random (Mikolov et al. 2013): two sparse tables."""

    def __init__(self, words: int = 30_000, width: int = 64) -> None:
        super().__init__()
        self.inside = nn.Embedding(words, width, sparse=True)
        self.outside = nn.Embedding(words, width, sparse=True)

    def forward(self, centre: Tensor, near: Tensor, others: Tensor) -> Tensor:
        found = self.inside(centre)
        right = F.logsigmoid((found * self.outside(near)).sum(1))
        wrong = F.logsigmoid(-torch.bmm(self.outside(others), found[..., None]).squeeze(2)).sum(1)
        return -(right + wrong).mean()


def _words_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["centre"], batch["near"], batch["others"])
    return loss


def sparse_words() -> Workload:
    """word2vec: gradients of the tables are sparse, updated by SparseAdam."""
    seed_all(346)
    model = Words()
    batch = {name: torch.randint(0, 30_000, (2048,)) for name in ("centre", "near")}
    batch["others"] = torch.randint(0, 30_000, (2048, 5))
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-3)
    return Workload(model, batch, _words_loss, optimizer, name="sparse_words")


class Interactions(nn.Module):
    """Bags of categories and dense features, and all products of pairs (Naumov et al. 2019, "DLRM")."""

    def __init__(self, sizes: tuple[int, ...] = (20_000, 8_000, 500), width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, width, mode="mean", sparse=True) for size in sizes)
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = (len(sizes) + 1) * len(sizes) // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, bags: Tensor) -> Tensor:
        below = self.bottom(dense)
        found = [below, *(table(bag) for table, bag in zip(self.tables, bags.unbind(1), strict=True))]
        rows = torch.stack(found, 1)
        products = torch.bmm(rows, rows.transpose(1, 2))
        one, other = torch.tril_indices(len(found), len(found), -1)
        scores: Tensor = self.top(torch.cat([below, products[:, one, other]], 1))
        return scores.squeeze(1)


def _clicks_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["dense"], batch["bags"]), batch["y"])


def sparse_bags() -> Workload:
    """DLRM: bags in sparse tables, products of pairs, plain SGD."""
    seed_all(347)
    model = Interactions()
    batch = {
        "dense": torch.randn(2048, 13),
        "bags": torch.randint(0, 500, (2048, 3, 4)),
        "y": torch.randint(0, 2, (2048,)).float(),
    }
    return Workload(model, batch, _clicks_loss, torch.optim.SGD(model.parameters(), lr=0.1), name="sparse_bags")
