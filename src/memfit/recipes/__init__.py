"""Ready-made training steps on data that needs no download.

`byte_lm`, `finetune`, `sentence_encoder`, `brain_segmentation` and `video` are the factories; what data and models they
are made of is here to be put together otherwise. transformers and peft are imported when `finetune` or
`sentence_encoder` is called, MONAI, nilearn and nibabel when `brain_segmentation` or `video` is.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
