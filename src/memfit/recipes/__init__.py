"""Ready-made training steps on data that needs no download.

`memfit.recipes.byte_lm`, `memfit.recipes.brain_segmentation` and `memfit.recipes.video` are the
factories. The modules that define them have the same names: take their helpers by
`from memfit.recipes.byte_lm import ...`.

The factories are imported here at once and not on first use, because importing the submodule later
would put the module in the factory's place. It costs no more than `memfit.workload`: MONAI, nilearn
and nibabel are imported when `brain_segmentation` or `video` is called.
"""

from __future__ import annotations

from memfit.recipes.brain_segmentation import brain_segmentation
from memfit.recipes.byte_lm import byte_lm
from memfit.recipes.video import video

__all__ = ["brain_segmentation", "byte_lm", "video"]
