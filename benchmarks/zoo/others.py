"""Speech, recurrence, tables: what is neither text nor images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from memfit import Workload


def whisper() -> Workload:
    """Whisper: convolutions over a spectrogram, encoder and decoder, AdamW, clipped gradients."""
    torch.manual_seed(40)
    config = transformers.WhisperConfig(
        d_model=192,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=768,
        decoder_ffn_dim=768,
        vocab_size=4096,
        max_source_positions=300,
        max_target_positions=64,
        dropout=0.1,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config).train()
    batch = {"sound": torch.randn(8, 80, 600), "text": torch.randint(3, 4096, (8, 64))}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model, batch, _transcription_loss, optimizer, name="whisper", max_grad_norm=1.0)


def _transcription_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_features=batch["sound"], decoder_input_ids=batch["text"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["text"][:, 1:].flatten())


def wav2vec2() -> Workload:
    """Wav2Vec 2.0 that classifies raw sound; its convolutional front end is frozen. Adamax."""
    torch.manual_seed(41)
    config = transformers.Wav2Vec2Config(
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=768,
        conv_dim=(64,) * 7,
        num_conv_pos_embedding_groups=8,
        classifier_proj_size=64,
        num_labels=12,
        apply_spec_augment=False,
        layerdrop=0.0,
    )
    model = transformers.Wav2Vec2ForSequenceClassification(config).train()
    model.freeze_feature_encoder()
    batch = {"sound": torch.randn(8, 48000), "y": torch.randint(0, 12, (8,))}
    optimizer = torch.optim.Adamax([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return Workload(model, batch, _sound_loss, optimizer, name="wav2vec2")


def _sound_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(input_values=batch["sound"]).logits.float(), batch["y"])


class LSTMLanguageModel(nn.Module):
    """Embedding, three LSTM layers with dropout between them, and a head tied to the embedding."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(0.3)
        self.lstm = nn.LSTM(width, width, num_layers=3, dropout=0.3, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.embedding(ids)))
        logits: Tensor = self.head(self.dropout(hidden))
        return logits


def lstm() -> Workload:
    """A three-layer LSTM language model with tied weights, SGD with momentum, clipped gradients."""
    torch.manual_seed(42)
    model = LSTMLanguageModel(4096, 320)
    batch = torch.randint(0, 4096, (16, 71))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    return Workload(model, batch, _lstm_loss, optimizer, name="lstm", max_grad_norm=0.25)


def _lstm_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


class Tagger(nn.Module):
    """A bidirectional GRU over convolved features, then multi-head attention, then a class for each frame."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.convolved = nn.Sequential(nn.Conv1d(features, width, 5, padding=2), nn.GELU(), nn.GroupNorm(8, width))
        self.gru = nn.GRU(width, width // 2, bidirectional=True, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 8, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        hidden, _ = self.gru(self.convolved(x.transpose(1, 2)).transpose(1, 2))
        attended, _ = self.attention(hidden, hidden, hidden, key_padding_mask=padding, need_weights=False)
        logits: Tensor = self.head(self.norm(hidden + attended))
        return logits


def tagger() -> Workload:
    """A tagger of padded sequences with GRU and attention: a summed loss and its count, RAdam."""
    torch.manual_seed(43)
    model = Tagger(64, 256, 48)
    lengths = torch.randint(16, 65, (64, 1))
    padding = torch.arange(64) >= lengths
    labels = torch.randint(0, 48, (64, 64)).masked_fill(padding, -100)
    batch = {"x": torch.randn(64, 64, 64), "padding": padding, "y": labels}
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
    return Workload(model, batch, _tagging_loss, optimizer, name="tagger")


def _tagging_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(batch["x"], batch["padding"]).flatten(0, 1)
    return F.cross_entropy(logits.float(), batch["y"].flatten(), reduction="sum"), (batch["y"] != -100).sum()


class Recommender(nn.Module):
    """Large embeddings of categories beside dense features, and a perceptron with BatchNorm and dropout."""

    def __init__(self, sizes: list[int], width: int, dense: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        widths = [len(sizes) * width + dense, 1024, 512, 256]
        blocks = [
            nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(inplace=True), nn.Dropout(0.2))
            for a, b in zip(widths[:-1], widths[1:], strict=True)
        ]
        self.perceptron = nn.Sequential(*blocks, nn.Linear(256, 1))

    def forward(self, categories: Tensor, dense: Tensor) -> Tensor:
        embedded = [table(ids) for table, ids in zip(self.embeddings, categories.unbind(1), strict=True)]
        scores: Tensor = self.perceptron(torch.cat([*embedded, dense], 1))
        return scores.squeeze(1)


def recommender() -> Workload:
    """Click prediction: large embeddings, BatchNorm, dropout, ReLU in place, Adagrad."""
    torch.manual_seed(44)
    sizes = [200_000, 50_000, 10_000, 1_000]
    model = Recommender(sizes, 32, 16)
    categories = torch.stack([torch.randint(0, size, (4096,)) for size in sizes], 1)
    batch = {"categories": categories, "dense": torch.randn(4096, 16), "y": torch.randint(0, 2, (4096,)).float()}
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    return Workload(model, batch, _click_loss, optimizer, name="recommender")


def _click_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["categories"], batch["dense"]).float(), batch["y"])


class Autoencoder(nn.Module):
    """A convolutional variational autoencoder: transposed convolutions, noise, weight norm."""

    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(3, width, 4, 2, 1), nn.SiLU(inplace=True)),
            *(nn.Conv2d(width, 2 * width, 4, 2, 1), nn.GroupNorm(8, 2 * width), nn.SiLU(inplace=True)),
            *(nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.GroupNorm(8, 4 * width), nn.SiLU(inplace=True)),
            nn.Conv2d(4 * width, 2 * latent, 1),
        )
        self.decoder = nn.Sequential(
            *(nn.ConvTranspose2d(latent, 4 * width, 4, 2, 1), nn.GroupNorm(8, 4 * width), nn.SiLU(inplace=True)),
            *(nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.GroupNorm(8, 2 * width), nn.SiLU(inplace=True)),
            nn.utils.parametrizations.weight_norm(nn.ConvTranspose2d(2 * width, 3, 4, 2, 1)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(latent), mean, log_variance


def autoencoder() -> Workload:
    """A variational autoencoder: transposed convolutions, random latents, weight norm; AdamW with foreach off."""
    torch.manual_seed(45)
    model = Autoencoder(32, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return Workload(model, torch.rand(16, 3, 96, 96), _elbo, optimizer, name="autoencoder")


def _elbo(model: nn.Module, batch: Tensor) -> Tensor:
    decoded, mean, log_variance = model(batch)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).float().sum((1, 2, 3)).mean()
    loss: Tensor = F.mse_loss(decoded.float(), batch, reduction="sum") / len(batch) + divergence
    return loss


class CharacterTransformer(nn.Module):
    """PyTorch's own encoder layers, causal, and an embedding tied to the head."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        logits: Tensor = self.head(self.encoder(self.embedding(ids), mask=mask, is_causal=True))
        return logits


def transformer() -> Workload:
    """PyTorch's own transformer encoder, causal, with tied weights and fused AdamW, clipped gradients."""
    torch.manual_seed(46)
    model = CharacterTransformer(2048, 256, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    batch = torch.randint(0, 2048, (8, 193))
    return Workload(model, batch, _lstm_loss, optimizer, name="transformer", max_grad_norm=1.0)
