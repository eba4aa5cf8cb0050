"""A zoo of training steps, small and real: what predictions are held against.

Nothing is downloaded: models come from configurations, data from seeded generators. A measured step takes about a
second on two cores, and its plain peak is some hundreds of MiB.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.zoo import language, medical, others, vision
from memfit import Workload

_MAKERS: tuple[Callable[[], Workload], ...] = (
    language.gpt2,
    language.gpt2_padded,
    language.gpt2_frozen,
    language.llama,
    language.llama_8bit,
    language.gemma,
    language.bert,
    language.t5,
    language.mixtral,
    language.mamba,
    vision.vit,
    vision.vit_probe,
    vision.resnet50,
    vision.convnext,
    vision.swin,
    vision.mobilenet,
    vision.vgg,
    medical.monai_unet,
    medical.dynunet,
    medical.segresnet,
    medical.swin_unetr,
    medical.unetr,
    others.whisper,
    others.wav2vec2,
    others.lstm,
    others.tagger,
    others.recommender,
    others.autoencoder,
    others.transformer,
)

ZOO: dict[str, Callable[[], Workload]] = {make.__name__: make for make in _MAKERS}
"""Each workload by its name."""
