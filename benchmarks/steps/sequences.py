"""PyTorch's own transformer and recurrent layers, on sequences of different lengths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

from benchmarks.steps.data import VOCABULARY, seed_all
from memfit import Workload


class Translator(nn.Module):
    """PyTorch's own `nn.Transformer`, with embeddings, learnt positions and masks."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(0.02 * torch.randn(128, width))
        self.transformer = nn.Transformer(width, 4, 2, 2, 4 * width, 0.1, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = source == 0
        hidden = self.transformer(
            self.source(source) + self.places[: source.shape[1]],
            self.target(target) + self.places[: target.shape[1]],
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        logits: Tensor = self.head(hidden)
        return logits


def _translation_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    target = batch["target"]
    logits = model(batch["source"], target[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0, reduction="sum")
    return loss, (target[:, 1:] != 0).sum()


def _rows(batch: int, length: int, symbols: int = VOCABULARY) -> Tensor:
    lengths = torch.randint(length // 2, length + 1, (batch,))
    lengths[0] = length
    return pad_sequence([torch.randint(1, symbols, (int(n),)) for n in lengths], batch_first=True)


def torch_transformer() -> Workload:
    """`nn.Transformer` from padded rows to padded rows: a summed loss and its count."""
    seed_all(300)
    model = Translator()
    batch = {"source": _rows(6, 64), "target": _rows(6, 48)}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    return Workload(model, batch, _translation_loss, optimizer, name="torch_transformer", max_grad_norm=1.0)


class PackedClassifier(nn.Module):
    """A bidirectional LSTM over packed rows; its last states are classified."""

    def __init__(self, symbols: int = 2000, width: int = 128, classes: int = 4) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(symbols, width, padding_idx=0), nn.Dropout(0.3)
        self.lstm = nn.LSTM(width, width, 2, bidirectional=True, dropout=0.3, batch_first=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        embedded = self.dropout(self.embedding(ids))
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        logits: Tensor = self.head(self.dropout(torch.cat([hidden[-2], hidden[-1]], 1)))
        return logits


def _packed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"], batch["lengths"]), batch["y"])


def packed_lstm() -> Workload:
    """Classes of texts by an LSTM over `pack_padded_sequence`."""
    seed_all(301)
    ids = _rows(96, 48, 2000)
    batch = {"ids": ids, "lengths": (ids != 0).sum(1), "y": torch.randint(0, 4, (96,))}
    model = PackedClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model, batch, _packed_loss, optimizer, name="packed_lstm", max_grad_norm=5.0)


class Attending(nn.Module):
    """A GRU over packed rows, and one that decodes with attention to it (Bahdanau et al. 2015)."""

    def __init__(self, symbols: int = 1000, width: int = 128) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(symbols, width), nn.Embedding(symbols, width)
        self.encoder = nn.GRU(width, width // 2, bidirectional=True, batch_first=True)
        self.cell, self.score = nn.GRUCell(2 * width, width), nn.Linear(2 * width, width)
        self.vector, self.head = nn.Linear(width, 1, bias=False), nn.Linear(2 * width, symbols)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        lengths = (source != 0).sum(1)
        packed = pack_padded_sequence(self.source(source), lengths, batch_first=True, enforce_sorted=False)
        memory, _ = pad_packed_sequence(self.encoder(packed)[0], batch_first=True)
        padding, state, found = source == 0, memory.mean(1), []
        for symbol in target.unbind(1):
            asked = torch.cat([memory, state[:, None].expand_as(memory)], -1)
            scores = self.vector(torch.tanh(self.score(asked))).squeeze(-1).masked_fill(padding, -torch.inf)
            context = torch.bmm(scores.softmax(1)[:, None], memory).squeeze(1)
            state = self.cell(torch.cat([self.target(symbol), context], 1), state)
            found.append(self.head(torch.cat([state, context], 1)))
        return torch.stack(found, 1)


def attending_decoder() -> Workload:
    """Translation by recurrent layers: packed rows, and a loop over the target with attention."""
    seed_all(302)
    model = Attending()
    batch = {"source": _rows(32, 24, 1000), "target": _rows(32, 12, 1000)}
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    return Workload(model, batch, _translation_loss, optimizer, name="attending_decoder", max_grad_norm=1.0)


class Tagger(nn.Module):
    """A GRU that takes a packed sequence and gives one, and a score for each of its steps."""

    def __init__(self, features: int = 40, width: int = 192, classes: int = 12) -> None:
        super().__init__()
        self.gru = nn.GRU(features, width, 3, dropout=0.2)
        self.head = nn.Linear(width, classes)

    def forward(self, packed: PackedSequence) -> Tensor:
        hidden, _ = self.gru(packed)
        logits: Tensor = self.head(hidden.data)
        return logits


def _steps_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    lengths = batch["lengths"]
    packed = pack_padded_sequence(batch["x"].transpose(0, 1), lengths, enforce_sorted=False)
    labels = pack_padded_sequence(batch["y"].transpose(0, 1), lengths, enforce_sorted=False).data
    return F.cross_entropy(model(packed), labels)


def packed_tagger() -> Workload:
    """Labels of frames: the module itself takes and gives packed sequences."""
    seed_all(303)
    model = Tagger()
    lengths = torch.randint(30, 61, (24,))
    lengths[3] = 60
    batch = {"x": torch.randn(24, 60, 40), "lengths": lengths, "y": torch.randint(0, 12, (24, 60))}
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    return Workload(model, batch, _steps_loss, optimizer, name="packed_tagger", max_grad_norm=1.0)


class Dilated(nn.Module):
    """Causal convolutions with weight norm and dilation (Bai et al. 2018), and their residual."""

    def __init__(self, channels: int, out: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        convolution = nn.Conv1d(channels, out, 3, dilation=dilation, padding=self.pad)
        self.convolution = nn.utils.parametrizations.weight_norm(convolution)
        self.same = nn.Conv1d(channels, out, 1) if channels != out else nn.Identity()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(F.relu(self.convolution(x)[..., : -self.pad])) + self.same(x)  # type: ignore[no-any-return]


def _forecast_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.smooth_l1_loss(model(batch[..., :-1]), batch[..., 1:])


def dilated_convolutions() -> Workload:
    """A temporal convolutional network with weight norm that guesses the next values."""
    seed_all(304)
    layers = [Dilated(8 if at == 0 else 48, 48, 2**at) for at in range(5)]
    model = nn.Sequential(*layers, nn.Conv1d(48, 8, 1))
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
    return Workload(model, torch.randn(16, 8, 257), _forecast_loss, optimizer, name="dilated_convolutions")
