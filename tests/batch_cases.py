"""Steps whose batches are not dicts of tensors: other containers, graphs, lists of samples, packed sequences."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from memfit.workload import Workload

N = 8  # samples


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor
    name: str = "frozen"


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    y: Tensor
    lengths: list[int]


class Data:
    """As graph packages have it: attributes, and an inner store that knows who holds it."""

    def __init__(self, **fields: Any) -> None:
        self.store = SimpleNamespace(parent=self, **fields)

    def __getattr__(self, name: str) -> Any:
        if name == "store":
            raise AttributeError(name)
        return getattr(self.store, name)


class Encoding(UserDict[str, Any]):
    """As tokenizers return it: reads as a mapping, and by attribute."""

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


Pair = namedtuple("Pair", "x y")


def xy() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(N, 16), "y": torch.randn(N, 4)}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def by_attribute(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch.x), batch.y)


def by_key(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def of(model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Any], **options: Any) -> Workload:
    return Workload(model, batch, loss_fn, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), **options)


CONTAINERS: dict[str, Callable[[], Workload]] = {
    "frozen dataclass": lambda: of(mlp(), Frozen(**xy()), by_attribute),
    "slots": lambda: of(mlp(), Slotted(**xy(), lengths=list(range(N))), by_attribute),
    "named tuple": lambda: of(mlp(), Pair(**xy()), by_attribute),
    "object": lambda: of(mlp(), Data(**xy()), by_attribute),
    "namespace": lambda: of(mlp(), SimpleNamespace(**xy(), sizes=(2, 2)), by_attribute),
    "mapping": lambda: of(mlp(), Encoding(**xy(), texts=[str(i) for i in range(N)]), by_key),
    "nested": lambda: of(mlp(), {"pair": [SimpleNamespace(**xy())]}, lambda m, b: by_attribute(m, b["pair"][0])),
    "a number": lambda: of(
        mlp(), {**xy(), "level": torch.tensor(0.5), "step": 3}, lambda m, b: by_key(m, b) * b["level"]
    ),
    "an empty tensor": lambda: of(mlp(), {**xy(), "boxes": torch.zeros(0, 4)}, by_key),
    "an input that requires grad": lambda: of(
        mlp(), {**xy(), "w": torch.ones(N, 1, requires_grad=True)}, lambda m, b: (by_key(m, b) * b["w"]).mean()
    ),
    "integers": lambda: of(
        nn.Sequential(nn.Embedding(11, 16), nn.Flatten(), nn.Linear(64, 11)),
        (torch.arange(N * 4).view(N, 4) % 11, torch.arange(N) % 11),
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    ),
}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, images: Any, targets: Any) -> Tensor:
        losses = []
        for image, target in zip(images, targets, strict=True):
            found = self.head(self.body(image[None]).mean((2, 3)))
            losses.append((found - target["boxes"]).abs().mean())
        return torch.stack(losses).mean()


def images(same: bool = False) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(3, 8 + (0 if same else i), 8) for i in range(3)]


def targets() -> list[dict[str, Tensor]]:
    return [{"boxes": torch.rand(i + 1, 4), "labels": torch.ones(i + 1, dtype=torch.long)} for i in range(3)]


def detector() -> nn.Module:
    torch.manual_seed(0)
    return Detector()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.GRU) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = kind(16, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, sequences: Any) -> Tensor:
        _, last = self.recurrent(sequences)
        return self.head(last[0][-1] if isinstance(last, tuple) else last[-1])


def packed(enforce_sorted: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    lengths = (7, 5, 3, 2) if enforce_sorted else (2, 7, 3, 5)
    sequences = [torch.randn(n, 16) for n in lengths]
    return {"sequences": pack_sequence(sequences, enforce_sorted=enforce_sorted), "y": torch.randn(4, 4)}


def of_sequences(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["sequences"]), batch["y"])


SAMPLES: dict[str, Callable[[], Workload]] = {
    "lists of images and targets": lambda: of(detector(), (images(), targets()), lambda m, b: m(*b)),
    "tuples of images and targets": lambda: of(detector(), (tuple(images()), tuple(targets())), lambda m, b: m(*b)),
    "images and targets": lambda: of(detector(), (torch.stack(images(True)), targets()), lambda m, b: m(*b)),
    "a list of records": lambda: of(
        detector(),
        [{"image": i, "instances": SimpleNamespace(**t)} for i, t in zip(images(), targets(), strict=True)],
        lambda m, b: m([r["image"] for r in b], [vars(r["instances"]) for r in b]),
    ),
    "packed, sorted": lambda: of(Recurrent(), packed(True), of_sequences),
    "packed": lambda: of(Recurrent(), packed(False), of_sequences),
    "packed, of an LSTM": lambda: of(Recurrent(nn.LSTM), packed(False), of_sequences),
}


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, graph: Any) -> Tensor:
        source, target = graph.edge_index
        nodes = graph.x
        for layer in (self.first, self.second):
            nodes = layer(nodes).relu()
            nodes = nodes + torch.zeros_like(nodes).index_add(0, target, nodes[source])
        pooled = nodes.new_zeros(graph.num_graphs, 32).index_add(0, graph.graph, nodes)
        return self.head(pooled)


def graphs(count: int = 4, nodes: int = 10, edges: int = 30) -> Data:
    torch.manual_seed(4)
    first = torch.arange(count).repeat_interleave(edges) * nodes
    return Data(
        x=torch.randn(count * nodes, 16),
        edge_index=torch.randint(0, nodes, (2, count * edges)) + first,
        graph=torch.arange(count).repeat_interleave(nodes),
        y=torch.randn(count, 4),
        num_graphs=count,
    )


def split_graphs(batch: Any, start: int, stop: int) -> Data:
    """Return some graphs of a batch of graphs with equally many nodes and edges."""
    nodes, edges = len(batch.x) // batch.num_graphs, batch.edge_index.shape[1] // batch.num_graphs
    return Data(
        x=batch.x[start * nodes : stop * nodes],
        edge_index=batch.edge_index[:, start * edges : stop * edges] - start * nodes,
        graph=batch.graph[start * nodes : stop * nodes] - start,
        y=batch.y[start:stop],
        num_graphs=stop - start,
    )


def normalised(nodes: int = 40) -> Tensor:
    torch.manual_seed(5)
    return (torch.rand(nodes, nodes) > 0.8).float().to_sparse()


WHOLE: dict[str, Callable[[], Workload]] = {
    "a graph": lambda: of(Graphs(), graphs(), lambda m, b: F.mse_loss(m(b), b.y)),
    "a sparse adjacency": lambda: of(
        mlp(),
        {"adjacency": normalised(), "x": torch.randn(40, 16), "y": torch.randn(40, 4)},
        lambda m, b: F.mse_loss(m(torch.sparse.mm(b["adjacency"], b["x"])), b["y"]),
    ),
    "a sparse adjacency between layers": lambda: of(
        mlp(),
        (normalised(), torch.randn(40, 16), torch.randn(40, 4)),
        lambda m, b: F.mse_loss(m[2:](torch.sparse.mm(b[0], m[:2](b[1]))), b[2]),
    ),
    "no data": lambda: of(
        mlp(),
        None,
        lambda m, b: m(torch.full((N, 16), 0.5, device=m[0].weight.device)).square().mean(),
        batch_size=1,
    ),
    "samples that are not to be cut": lambda: of(mlp(), xy(), by_key, batch_size=1),
}
