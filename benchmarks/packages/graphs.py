"""Graph networks of PyTorch Geometric, trained as its introduction and its examples do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit import Workload


def _random_graph(nodes: int, edges: int, features: int, classes: int) -> Any:
    from torch_geometric.data import Data

    return Data(
        x=torch.randn(nodes, features),
        edge_index=torch.randint(0, nodes, (2, edges)),
        y=torch.randint(0, classes, (nodes,)),
        train_mask=torch.rand(nodes) < 0.3,
    )


def node_classes() -> Workload:
    """Return the graph convolution of PyTorch Geometric's introduction: one graph is the batch."""
    from torch_geometric.nn import GCNConv

    class GCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = GCNConv(64, 64)
            self.conv2 = GCNConv(64, 7)

        def forward(self, data: Any) -> Tensor:
            x = F.dropout(F.relu(self.conv1(data.x, data.edge_index)), training=self.training)
            return F.log_softmax(self.conv2(x, data.edge_index), dim=1)

    torch.manual_seed(0)
    model = GCN()
    return Workload(
        model=model,
        batch=_random_graph(2000, 12000, 64, 7),
        loss_fn=lambda model, data: F.nll_loss(model(data)[data.train_mask], data.y[data.train_mask]),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4),
    )


def graph_classes() -> Workload:
    """Return PyTorch Geometric's GIN on a mini-batch of graphs, as its example on mutagens does."""
    from torch_geometric.data import Batch
    from torch_geometric.nn import GIN, MLP, global_add_pool

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gnn = GIN(32, 64, 4, dropout=0.5, jk="cat")
            self.classifier = MLP([64, 64, 2], norm="batch_norm", dropout=0.5)

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, batch_size: int) -> Tensor:
            x = self.gnn(x, edge_index)
            x = global_add_pool(x, batch, size=batch_size)
            out: Tensor = self.classifier(x)
            return out

    torch.manual_seed(0)
    sizes = torch.randint(20, 60, (24,)).tolist()
    graphs = [_random_graph(n, 4 * n, 32, 2) for n in sizes]
    for graph in graphs:
        graph.y = graph.y[:1]
    model = Net()

    def loss(model: nn.Module, data: Any) -> Tensor:
        out = model(data.x, data.edge_index, data.batch, data.num_graphs)
        return F.cross_entropy(out, data.y)

    return Workload(
        model=model,
        batch=Batch.from_data_list(graphs),
        loss_fn=loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
    )


def attention() -> Workload:
    """Return PyTorch Geometric's GAT, its graph given as a dictionary of tensors."""
    from torch_geometric.nn import GAT

    torch.manual_seed(0)
    model = GAT(64, 64, num_layers=3, out_channels=7, v2=True, heads=4, dropout=0.4, norm="batch_norm")
    graph = _random_graph(1000, 6000, 64, 7)
    return Workload(
        model=model,
        batch={"x": graph.x, "edge_index": graph.edge_index, "y": graph.y},
        loss_fn=lambda model, batch: F.cross_entropy(model(batch["x"], batch["edge_index"]), batch["y"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.005),
    )


def variational() -> Workload:
    """Return PyTorch Geometric's variational graph autoencoder, whose loss samples edges that are not there."""
    from torch_geometric.nn import VGAE, GCNConv

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = GCNConv(64, 64)
            self.conv_mu = GCNConv(64, 32)
            self.conv_logstd = GCNConv(64, 32)

        def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
            x = self.conv1(x, edge_index).relu()
            return self.conv_mu(x, edge_index), self.conv_logstd(x, edge_index)

    def loss(model: Any, data: Any) -> Tensor:
        z = model.encode(data.x, data.edge_index)
        total: Tensor = model.recon_loss(z, data.edge_index) + (1 / data.num_nodes) * model.kl_loss()
        return total

    torch.manual_seed(0)
    model = VGAE(Encoder())
    return Workload(
        model=model,
        batch=_random_graph(1000, 8000, 64, 7),
        loss_fn=loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
    )
