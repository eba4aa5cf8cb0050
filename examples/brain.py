"""A 3-D UNet that segments grey and white matter."""

from memfit.recipes import brain_segmentation
from memfit.workload import Workload


def workload() -> Workload:
    return brain_segmentation(batch_size=4)
