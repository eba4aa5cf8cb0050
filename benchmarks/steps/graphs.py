"""Networks on graphs and points, by scatter: a whole graph is the batch, and is not cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.steps.data import seed_all
from memfit import Workload


def edges(nodes: int, degree: int) -> Tensor:
    """Return pairs of nodes that are joined, `(2, nodes * degree)`, in both directions."""
    pairs = torch.randint(0, nodes, (2, nodes * degree // 2))
    return torch.cat([pairs, pairs.flip(0)], 1)


class Convolution(nn.Module):
    """A graph convolution (Kipf and Welling 2017), added up by `index_add`."""

    def __init__(self, inputs: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, out)

    def forward(self, x: Tensor, joined: Tensor) -> Tensor:
        start, end = joined
        degree = torch.ones(len(x)).index_add(0, end, torch.ones(len(end)))
        weight = (degree[start] * degree[end]).rsqrt()
        hidden = self.linear(x)
        added = torch.zeros_like(hidden).index_add(0, end, hidden[start] * weight[:, None])
        made: Tensor = added + hidden / degree[:, None]
        return made


class NodeClassifier(nn.Module):
    """Graph convolutions with dropout, and a class for each node."""

    def __init__(self, features: int = 64, width: int = 64, classes: int = 7) -> None:
        super().__init__()
        widths = [features, width, width, classes]
        self.layers = nn.ModuleList(Convolution(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True))

    def forward(self, x: Tensor, joined: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.dropout(F.relu(layer(x, joined)), 0.5, self.training)
        logits: Tensor = self.layers[-1](x, joined)
        return logits


def _nodes_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["x"], batch["joined"])
    return F.cross_entropy(logits[batch["known"]], batch["y"][batch["known"]])


def graph_convolution() -> Workload:
    """Classes of the nodes of one graph, of which some are known: `index_add`, and a mask of the batch."""
    seed_all(310)
    nodes = 2000
    batch = {
        "x": torch.randn(nodes, 64),
        "joined": edges(nodes, 8),
        "y": torch.randint(0, 7, (nodes,)),
        "known": torch.rand(nodes) < 0.3,
    }
    model = NodeClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    return Workload(model, batch, _nodes_loss, optimizer, name="graph_convolution")


class Attention(nn.Module):
    """Attention over a node's neighbours (Veličković et al. 2018): a softmax by scattered maxima and sums."""

    def __init__(self, inputs: int, width: int, heads: int = 4) -> None:
        super().__init__()
        self.linear, self.heads = nn.Linear(inputs, width, bias=False), heads
        self.asked = nn.Parameter(0.1 * torch.randn(2, heads, width // heads))

    def forward(self, x: Tensor, joined: Tensor) -> Tensor:
        start, end = joined
        hidden = self.linear(x).view(len(x), self.heads, -1)
        scores = [(hidden * asked).sum(-1) for asked in self.asked]
        score = F.leaky_relu(scores[0][start] + scores[1][end], 0.2)
        index = end[:, None].expand_as(score)
        largest = torch.full((len(x), self.heads), -torch.inf).scatter_reduce(0, index, score.detach(), "amax")
        weight = (score - largest[end]).exp()
        total = torch.zeros(len(x), self.heads).scatter_add(0, index, weight)
        weight = weight / (total[end] + 1e-16)
        return torch.zeros_like(hidden).index_add(0, end, hidden[start] * weight[..., None]).flatten(1)


class GraphClassifier(nn.Module):
    """Layers of attention and BatchNorm on many graphs at a time, and the mean over each graph's nodes."""

    def __init__(self, features: int = 32, width: int = 64, classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(features, width)
        self.layers = nn.ModuleList(Attention(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(3))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, joined: Tensor, graph: Tensor) -> Tensor:
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.elu(norm(layer(x, joined)))
        graphs = int(graph.max()) + 1
        total = torch.zeros(graphs, x.shape[1]).index_add(0, graph, x)
        logits: Tensor = self.head(total / torch.bincount(graph, minlength=graphs)[:, None])
        return logits


@dataclass
class Graphs:
    """Some graphs as one, whose parts are not joined.

    Attributes:
        x: Features of the nodes.
        joined: Pairs of nodes.
        graph: The graph of each node.
        y: The class of each graph.
    """

    x: Tensor
    joined: Tensor
    graph: Tensor
    y: Tensor


def _graphs_loss(model: nn.Module, batch: Graphs) -> Tensor:
    return F.cross_entropy(model(batch.x, batch.joined, batch.graph), batch.y)


def graph_attention() -> Workload:
    """Classes of graphs: the batch is a dataclass, and the number of graphs is read from it."""
    seed_all(311)
    sizes = torch.randint(15, 40, (48,))
    graph = torch.repeat_interleave(torch.arange(48), sizes)
    starts = sizes.cumsum(0) - sizes
    joined = torch.cat([edges(int(size), 4) + start for size, start in zip(sizes, starts, strict=True)], 1)
    batch = Graphs(torch.randn(len(graph), 32), joined, graph, torch.randint(0, 3, (48,)))
    model = GraphClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, batch, _graphs_loss, optimizer, name="graph_attention")


class EdgeConvolution(nn.Module):
    """Features of the nearest neighbours in the space of features (Wang et al. 2019, "Dynamic Graph CNN")."""

    def __init__(self, inputs: int, out: int, neighbours: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2 * inputs, out, 1, bias=False), nn.BatchNorm2d(out), nn.LeakyReLU(0.2))
        self.neighbours = neighbours

    def forward(self, x: Tensor) -> Tensor:
        points = x.transpose(1, 2)
        nearest = torch.cdist(points, points).topk(self.neighbours, largest=False).indices
        rows = torch.arange(len(x))[:, None, None]
        around = points[rows, nearest].permute(0, 3, 1, 2)
        itself = x[..., None].expand_as(around)
        found: Tensor = self.layers(torch.cat([around - itself, itself], 1)).amax(-1)
        return found


class PointClassifier(nn.Module):
    """Edge convolutions on points, and a class for each cloud."""

    def __init__(self, classes: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([EdgeConvolution(3, 24), EdgeConvolution(24, 24), EdgeConvolution(24, 48)])
        self.head = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, classes))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        logits: Tensor = self.head(torch.cat(found, 1).amax(-1))
        return logits


def _points_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=0.2)


def point_clouds() -> Workload:
    """Classes of point clouds: neighbours by `cdist` and `topk`, anew in each layer."""
    seed_all(312)
    batch = {"x": torch.randn(8, 3, 128), "y": torch.randint(0, 8, (8,))}
    model = PointClassifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, batch, _points_loss, optimizer, name="point_clouds")


class Interaction(nn.Module):
    """Energies of molecules from distances (Schütt et al. 2017, "SchNet"), whose forces are derivatives."""

    def __init__(self, width: int = 48, layers: int = 2, centres: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.register_buffer("centres", torch.linspace(0, 5, centres))
        self.centres: Tensor
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(centres, width), nn.Softplus(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.updates = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.energy = nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, 1))

    def forward(self, kinds: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        places = places.requires_grad_()
        between = places[:, :, None] - places[:, None]
        distance = (between.square().sum(-1) + 1e-6).sqrt()
        spread = torch.exp(-10 * (distance[..., None] - self.centres).square())
        x = self.embedding(kinds)
        for filter, update in zip(self.filters, self.updates, strict=True):
            x = x + update((filter(spread) * x[:, None]).sum(2))
        energy = self.energy(x).sum((1, 2))
        (gradient,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return energy, -gradient


def _forces_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    energy, forces = model(batch["kinds"], batch["places"].clone())
    return 0.01 * F.mse_loss(energy, batch["energy"]) + F.mse_loss(forces, batch["forces"])


def molecular_forces() -> Workload:
    """Energies and forces of molecules: the derivative of the network by its input is part of the loss."""
    seed_all(313)
    batch = {
        "kinds": torch.randint(0, 10, (8, 12)),
        "places": 2 * torch.rand(8, 12, 3),
        "energy": torch.randn(8),
        "forces": torch.randn(8, 12, 3),
    }
    model = Interaction()
    return Workload(model, batch, _forces_loss, torch.optim.Adam(model.parameters(), lr=1e-3), name="molecular_forces")
