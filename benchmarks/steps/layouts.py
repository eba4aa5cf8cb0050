"""Steps of transposed, expanded and sliced tensors, of kernels with buffers of their own, and of other derivatives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from benchmarks.steps.data import class_loss, images, seed_all
from memfit import Workload

Batch = dict[str, Tensor]


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _series(rows: int = 32, length: int = 256, channels: int = 64) -> Batch:
    return {"x": torch.randn(rows, length, channels), "y": torch.randint(0, 10, (rows,))}


class Transposed(nn.Module):
    """Normalises channels that stand last, by a module that wants them second."""

    def __init__(self, norm: nn.Module, channels: int = 64) -> None:
        super().__init__()
        self.norm, self.mix = norm, nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.mix(self.norm(x.transpose(1, 2)).transpose(1, 2)))


class Mean(nn.Module):
    """The mean over places, and a head."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.mean(1))
        return out


def _transposed(name: str, seed: int, norms: list[nn.Module]) -> Workload:
    seed_all(seed)
    model = nn.Sequential(*(Transposed(norm) for norm in norms), Mean())
    return Workload(model, _series(), class_loss, _adam(model), name=name)


def transposed_batch_norm() -> Workload:
    """BatchNorm over transposed series, as patch transformers of time series have it (Nie et al. 2023)."""
    return _transposed("transposed_batch_norm", 330, [nn.BatchNorm1d(64) for _ in range(4)])


def transposed_group_norm() -> Workload:
    """GroupNorm over transposed series."""
    return _transposed("transposed_group_norm", 331, [nn.GroupNorm(8, 64) for _ in range(4)])


def transposed_instance_norm() -> Workload:
    """InstanceNorm over transposed series, with weights."""
    return _transposed("transposed_instance_norm", 332, [nn.InstanceNorm1d(64, affine=True) for _ in range(4)])


class Mixed(nn.Module):
    """A convolution whose output is read as rows of channels, and put back, as in networks with attention in them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x).permute(0, 2, 3, 1)
        y = self.mix(self.norm(y)).permute(0, 3, 1, 2)
        return x + F.max_pool2d(F.silu(y), 3, 1, 1)


def mixed_layouts() -> Workload:
    """Convolutions in channels-last, with normalised rows of channels between them."""
    seed_all(333)
    body = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *(Mixed() for _ in range(3)))
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batch = images(8, 40)
    batch["x"] = batch["x"].contiguous(memory_format=torch.channels_last)
    return Workload(model, batch, class_loss, _adam(model), name="mixed_layouts")


class Sliced(nn.Module):
    """Every second place, and the places in reverse, by convolutions forth and back."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.down, self.up = nn.Conv1d(channels, channels, 3, padding=1), nn.ConvTranspose1d(channels, channels, 2, 2)
        self.pair = nn.Bilinear(channels, channels, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        y = y + self.up(F.relu(self.down(y[:, :, ::2])))
        query = y.mean(2)[:, None].expand(-1, y.shape[2], -1)
        out: Tensor = self.head(torch.tanh(self.pair(query, y.transpose(1, 2).flip(1))).mean(1))
        return out


def sliced_places() -> Workload:
    """Strided, flipped and expanded inputs of convolutions and a bilinear layer."""
    seed_all(334)
    model = Sliced()
    return Workload(model, _series(16, 128), class_loss, _adam(model), name="sliced_places")


def _features(out: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, out))


def _points(rows: int = 1024) -> Batch:
    return {"x": torch.randn(rows, 64), "y": torch.randn(rows, 8)}


def least_squares() -> Workload:
    """A last layer that is the least-squares solution of each batch (Bertinetto et al. 2019)."""
    seed_all(335)
    model = _features()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found = model(batch["x"])
        # By the default, "gelsy", two plain steps differ in their last bits.
        weights = torch.linalg.lstsq(found[:512], batch["y"][:512], driver="gels").solution
        return F.mse_loss(found[512:] @ weights, batch["y"][512:])

    return Workload(model, _points(), loss, _adam(model), name="least_squares", batch_size=1)


def orthogonal_layers() -> Workload:
    """Orthogonal weights that are not square, made of Householder reflections in each call."""
    seed_all(336)
    wide, narrow = nn.Linear(64, 384, bias=False), nn.Linear(384, 96, bias=False)
    layers = [parametrizations.orthogonal(layer, orthogonal_map="householder") for layer in (wide, narrow)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), nn.Linear(96, 8))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    return Workload(model, _points(2048), loss, _adam(model), name="orthogonal_layers")


def forward_derivatives() -> Workload:
    """A loss with derivatives along directions, by forward mode (Hutchinson's trace of a flow)."""
    seed_all(337)
    model = _features(64)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        direction = torch.ones_like(batch["x"])
        out, along, *_ = torch.func.jvp(model, (batch["x"],), (direction,))
        lost: Tensor = out.square().mean() + (along * direction).sum(1).square().mean()
        return lost

    return Workload(model, _points(512), loss, _adam(model), name="forward_derivatives")


def sparse_within() -> Workload:
    """A graph's adjacency made sparse within the step, from scores against a threshold."""
    seed_all(338)
    model = _features(64)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        near = (torch.cdist(batch["x"][:, :4], batch["x"][:, :4]) < 1.0).float().to_sparse()
        features = model(torch.sparse.mm(near, batch["x"]))
        return F.mse_loss(torch.sparse.mm(near, features)[:, :8], batch["y"])

    return Workload(model, _points(768), loss, _adam(model), name="sparse_within", batch_size=1)


def gaussian_process() -> Workload:
    """The likelihood of a Gaussian process over learnt features: a Cholesky factor and solutions of batches."""
    seed_all(339)
    model = _features(16)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        features = model(batch["x"]).view(8, 128, 16)
        kernel = (-torch.cdist(features, features).square()).exp() + 0.1 * torch.eye(128)
        factor = torch.linalg.cholesky(kernel)
        y = batch["y"].view(8, 128, 8)
        fit = (y * torch.cholesky_solve(y, factor)).sum((1, 2))
        lost: Tensor = (fit + factor.diagonal(dim1=1, dim2=2).log().sum(1)).mean()
        return lost

    return Workload(model, _points(), loss, _adam(model), name="gaussian_process", batch_size=1)


def kalman_gain() -> Workload:
    """A filter over time whose gain is by inverses and solutions of batches of small matrices."""
    seed_all(340)
    model = _features(36)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        parts = model(batch["x"]).view(-1, 6, 6)
        spread = parts @ parts.mT + torch.eye(6)
        gain = spread @ torch.linalg.inv(spread + torch.eye(6))
        state = torch.linalg.solve(spread, gain @ F.pad(batch["y"], (0, -2))[..., None])
        lost: Tensor = state.square().mean()
        return lost

    return Workload(model, _points(2048), loss, _adam(model), name="kalman_gain")


def pooled_segments() -> Workload:
    """Means of segments of unequal length, and phases by `polar`."""
    seed_all(341)
    model = _features(32)
    lengths = torch.arange(1, 33)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        rows = model(batch["x"][: int(lengths.sum())])
        means = torch.segment_reduce(rows, "mean", lengths=lengths, unsafe=True)
        turned = torch.polar(means.abs() + 1, means) * torch.view_as_complex(means.view(32, 16, 2)).repeat(1, 2)
        return turned.abs().mean()

    return Workload(model, _points(640), loss, _adam(model), name="pooled_segments", batch_size=1)


def jagged_sequences() -> Workload:
    """Sequences of unequal length as a nested tensor that the model makes itself."""
    seed_all(342)

    class Jagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = _features(64), nn.Linear(64, 8)

        def forward(self, parts: list[Tensor]) -> Tensor:
            nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
            found = self.body(nested)
            out: Tensor = self.head(torch.nested.to_padded_tensor(found, 0.0).mean(1))
            return out

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(list(batch["x"].split([100, 300, 80, 32]))), batch["y"][:4])

    model = Jagged()
    return Workload(model, _points(512), loss, _adam(model), name="jagged_sequences", batch_size=1)
