"""Whether a step's numbers fit fp16, module by module, and what to do where they don't."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from memfit.ir.display import Shown
from memfit.ir.plan import Precision

FP16_LARGEST = 65504.0
"""Above this, fp16 knows infinity only."""

FP16_FLUSHED_EXPONENT = -25
"""Below 2 to this, fp16 rounds to zero."""

MOST_FLUSHED = 0.05
"""Share of the sum of a module's gradients that may flush to zero at the recommended scale. A choice, not measured."""

_HEADROOM_EXPONENT = 2  # gradients may grow to 4 times the largest seen before the scale has to shrink
_MOST_EXPONENT = 24
_FEW = 0.25  # of the modules: where more than this leave the range, fp16 is the wrong precision


class Seen(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers that were seen.

    Attributes:
        largest: The largest finite absolute value; 0 where there was none.
        not_finite: How many were not finite.
        sums: By exponent, the sum of the absolute values from 2 to this up to twice that.
    """

    largest: float = 0.0
    not_finite: int = 0
    sums: dict[int, float] = {}

    def flushed(self, scale: float = 1.0) -> float:
        """Return what share of the sum of absolute values fp16 rounds to zero, once the numbers are scaled.

        Not of their number: of a softmax over many classes most gradients are next to nothing, and not missed.
        """
        below = FP16_FLUSHED_EXPONENT - math.floor(math.log2(scale))
        total = sum(self.sums.values())
        return sum(n for e, n in self.sums.items() if e < below) / total if total else 0.0


class ModuleRange(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a module that mixed precision has in 16 bits.

    Attributes:
        module: Its FQN; "" for the model itself and for what the loss function does outside of modules.
        activations: What it takes and makes.
        gradients: Those of what it makes, and of its parameters, with an unscaled loss.
    """

    module: str
    activations: Seen
    gradients: Seen


class RangeReport(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `probe_range` found.

    Attributes:
        modules: Those that compute in 16 bits, in the order of the model.
        precision: What is recommended where the device has no bfloat16: "16-mixed", or "bf16-mixed" all the same.
        fp32_modules: For `Workload.fp32_modules`, with 16-mixed.
        initial_scale: For `LossScaling.initial`, with 16-mixed.
        overflowing: Modules whose activations leave fp16's range.
        flushing: Modules of whose gradients' sum more than `MOST_FLUSHED` flush to zero at `initial_scale`.
    """

    modules: list[ModuleRange]
    precision: Precision
    fp32_modules: list[str]
    initial_scale: float
    overflowing: list[str]
    flushing: list[str]

    def advice(self) -> str:
        """Return what to do, in a sentence or two."""
        start = "bf16-mixed has fp32's range: where the device has bfloat16, use it. "
        if self.precision == "bf16-mixed":
            names = ", ".join(repr(name) for name in [*self.overflowing, *self.flushing][:5])
            return f"{start}16-mixed does not suit this step: too much of it leaves fp16's range ({names})."
        kept = f" with Workload.fp32_modules={tuple(self.fp32_modules)}" if self.fp32_modules else ""
        return f"{start}16-mixed works{kept}, from LossScaling(initial={self.initial_scale:g})."


def range_report(activations: Mapping[str, Seen], gradients: Mapping[str, Seen]) -> RangeReport:
    """Judge the numbers seen by module.

    Args:
        activations: By FQN, in the order of the model.
        gradients: By FQN.
    """
    found = [
        ModuleRange(module=name, activations=seen, gradients=gradients.get(name, Seen()))
        for name, seen in activations.items()
    ]
    scale = _scale([module.gradients for module in found])
    overflowing = [
        m.module
        for m in found
        if m.activations.largest > FP16_LARGEST or m.activations.not_finite or m.gradients.not_finite
    ]
    flushing = [m.module for m in found if m.gradients.flushed(scale) > MOST_FLUSHED]
    troubled = list(dict.fromkeys([*overflowing, *flushing]))
    suits = len(troubled) <= _FEW * len(found) and "" not in troubled
    return RangeReport(
        modules=found,
        precision="16-mixed" if suits else "bf16-mixed",
        fp32_modules=troubled if suits else [],
        initial_scale=scale,
        overflowing=overflowing,
        flushing=flushing,
    )


def _scale(gradients: Sequence[Seen]) -> float:
    """Return the largest power of two that leaves the largest gradient some headroom."""
    largest = max((seen.largest for seen in gradients), default=0.0)
    if largest == 0.0:
        return 1.0
    exponent = math.floor(math.log2(FP16_LARGEST / largest)) - _HEADROOM_EXPONENT
    return 2.0 ** min(max(exponent, 0), _MOST_EXPONENT)
