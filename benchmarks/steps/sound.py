"""Speech and sound: models of transformers on raw sound and spectra, and CTC by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.steps.data import own_loss, seed_all
from memfit import Workload

_SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "conv_dim": (32,) * 7,
    "num_conv_pos_embeddings": 32,
    "num_conv_pos_embedding_groups": 8,
    "vocab_size": 32,
    "pad_token_id": 0,
}


def _workload(name: str, model: nn.Module, batch: dict[str, Any], norm: float | None = None) -> Workload:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    return Workload(model.train(), batch, own_loss, optimizer, name=name, max_grad_norm=norm)


def _transcribed(batch: int, samples: int, length: int) -> dict[str, Tensor]:
    """Return sound and the letters of each, padded with what the loss ignores."""
    labels = torch.randint(1, 32, (batch, length))
    lengths = torch.randint(length // 2, length + 1, (batch, 1))
    return {
        "input_values": torch.randn(batch, samples),
        "labels": labels.masked_fill(torch.arange(length) >= lengths, -100),
    }


def hubert_ctc() -> Workload:
    """HuBERT with CTC: layers dropped by a draw, frames masked by NumPy."""
    seed_all(260)
    config = transformers.HubertConfig(**_SIZES, layerdrop=0.1, mask_time_prob=0.2, ctc_loss_reduction="mean")
    return _workload("hubert_ctc", transformers.HubertForCTC(config), _transcribed(4, 12000, 12))


def wav2vec2_ctc() -> Workload:
    """Wav2Vec 2.0 with CTC on padded sound: lengths from the mask, a frozen front end."""
    seed_all(261)
    config = transformers.Wav2Vec2Config(
        **_SIZES,
        layerdrop=0.0,
        mask_time_prob=0.1,
        ctc_loss_reduction="mean",
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
    )
    model = transformers.Wav2Vec2ForCTC(config)
    model.freeze_feature_encoder()
    batch = _transcribed(4, 12000, 10)
    lengths = torch.randint(9000, 12001, (4, 1))
    batch["attention_mask"] = (torch.arange(12000) < lengths).long()
    return _workload("wav2vec2_ctc", model, batch, norm=1.0)


def wav2vec2_pretraining() -> Workload:
    """Wav2Vec 2.0's contrastive loss: Gumbel codes, and distractors that NumPy chose."""
    seed_all(262)
    from transformers.models.wav2vec2 import modeling_wav2vec2 as own

    config = transformers.Wav2Vec2Config(
        **_SIZES,
        codevector_dim=64,
        proj_codevector_dim=64,
        num_codevectors_per_group=32,
        num_negatives=20,
        layerdrop=0.0,
    )
    model = transformers.Wav2Vec2ForPreTraining(config)
    frames = int(model._get_feat_extract_output_lengths(torch.tensor(10000)))
    masked = own._compute_mask_indices((4, frames), mask_prob=0.5, mask_length=4)
    distractors = own._sample_negative_indices((4, frames), config.num_negatives, mask_time_indices=masked)
    batch = {
        "input_values": torch.randn(4, 10000),
        "mask_time_indices": torch.from_numpy(masked),
        "sampled_negative_indices": torch.from_numpy(distractors),
    }
    return _workload("wav2vec2_pretraining", model, batch)


def wavlm_xvector() -> Workload:
    """WavLM that tells speakers: gated relative positions, statistics over time, additive margins."""
    seed_all(263)
    config = transformers.WavLMConfig(
        **_SIZES, layerdrop=0.05, num_labels=10, tdnn_dim=(64, 64, 64, 64, 160), xvector_output_dim=64
    )
    batch = {"input_values": torch.randn(6, 12000), "labels": torch.randint(0, 10, (6, 1))}
    return _workload("wavlm_xvector", transformers.WavLMForXVector(config), batch)


def speech_to_text() -> Workload:
    """Speech2Text: a spectrogram shortened by convolutions, encoder and decoder, lengths from a mask."""
    seed_all(264)
    config = transformers.Speech2TextConfig(
        vocab_size=256,
        d_model=96,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=384,
        decoder_ffn_dim=384,
        max_source_positions=400,
        max_target_positions=64,
        encoder_layerdrop=0.1,
        use_cache=False,
    )
    lengths = torch.randint(200, 301, (6, 1))
    lengths[0] = 300
    batch = {
        "input_features": torch.randn(6, 300, 80),
        "attention_mask": (torch.arange(300) < lengths).long(),
        "labels": torch.randint(3, 256, (6, 40)),
    }
    return _workload("speech_to_text", transformers.Speech2TextForConditionalGeneration(config), batch, norm=1.0)


def audio_transformer() -> Workload:
    """The audio spectrogram transformer: patches of a spectrogram, several classes at once."""
    seed_all(265)
    config = transformers.ASTConfig(
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=384,
        max_length=128,
        num_mel_bins=64,
        num_labels=12,
        problem_type="multi_label_classification",
    )
    batch = {"input_values": torch.randn(6, 128, 64), "labels": (torch.rand(6, 12) < 0.2).float()}
    return _workload("audio_transformer", transformers.ASTForAudioClassification(config), batch)


class Listener(nn.Module):
    """Convolutions over a spectrogram, recurrent layers over packed sequences, and letters (Deep Speech 2)."""

    def __init__(self, bins: int = 64, width: int = 128, letters: int = 29) -> None:
        super().__init__()
        self.convolved = nn.Sequential(
            *(nn.Conv2d(1, 16, (11, 5), (2, 2), (5, 2)), nn.BatchNorm2d(16), nn.Hardtanh(0, 20, inplace=True)),
            *(nn.Conv2d(16, 16, (11, 5), (1, 2), (5, 2)), nn.BatchNorm2d(16), nn.Hardtanh(0, 20, inplace=True)),
        )
        self.gru = nn.GRU(16 * bins // 4, width, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, letters)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.convolved(x.unsqueeze(1)).transpose(1, 2).flatten(2)
        lengths = (lengths + 1) // 2
        packed = nn.utils.rnn.pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
        unpacked, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.head(unpacked).log_softmax(-1), lengths


def _ctc_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    chances, lengths = model(batch["x"], batch["lengths"])
    return F.ctc_loss(chances.transpose(0, 1), batch["letters"], lengths, batch["letter_lengths"], zero_infinity=True)


def deep_speech() -> Workload:
    """Convolutions, packed bidirectional GRUs and PyTorch's CTC loss on spectra of different lengths."""
    seed_all(266)
    model = Listener()
    batch = {
        "x": torch.randn(8, 160, 64),
        "lengths": torch.randint(100, 161, (8,)),
        "letters": torch.randint(1, 29, (8, 20)),
        "letter_lengths": torch.randint(10, 21, (8,)),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
    return Workload(model, batch, _ctc_loss, optimizer, name="deep_speech", max_grad_norm=400.0)
