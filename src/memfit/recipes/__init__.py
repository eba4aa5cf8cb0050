"""Ready-made training steps on data that needs no download.

`byte_lm`, `brain_segmentation` and `video` are the factories; what data and models they are made of is here to be put
together otherwise. MONAI, nilearn and nibabel are imported when `brain_segmentation` or `video` is called.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
