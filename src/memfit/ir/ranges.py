"""Whether a step's values fit the range of fp16, module by module, and the advice where they don't."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from memfit.ir.codec import Shown
from memfit.ir.plan import Precision

FP16_LARGEST = 65504.0
"""The largest finite fp16 value."""

FP16_FLUSHED_EXPONENT = -25
"""fp16 rounds values below 2 to this power to zero."""

MOST_FLUSHED = 0.05
"""Largest share of a module's summed gradients that may flush to zero at the recommended scale: a choice."""

_HEADROOM_EXPONENT = 2  # gradients may grow to 4 times the largest seen before the scale has to shrink
_MOST_EXPONENT = 24
_FEW = 0.25  # share of the modules: where more leave the range, fp16 is the wrong precision


class ValueStatistics(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Statistics of values: their largest, and their sums by exponent.

    Attributes:
        largest: The largest finite absolute value; 0 where there is none.
        not_finite: Number of values that are not finite.
        sums: By exponent e, the sum of the absolute values from 2^e up to 2^(e+1).
    """

    largest: float = 0.0
    not_finite: int = 0
    sums: dict[int, float] = {}

    def flushed(self, scale: float = 1.0) -> float:
        """Return the share of the sum of absolute values that fp16 rounds to zero, after scaling.

        It is not the share of their number, since most gradients of a softmax over many classes are negligible.
        """
        below = FP16_FLUSHED_EXPONENT - math.floor(math.log2(scale))
        total = sum(self.sums.values())
        return sum(n for e, n in self.sums.items() if e < below) / total if total else 0.0


class ModuleRange(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values of a module that mixed precision stores in 16 bits.

    Attributes:
        module: Its FQN; "" for the model itself and for the loss function outside of modules.
        activations: Statistics of its inputs and outputs.
        gradients: Statistics of the gradients of its outputs and parameters, with an unscaled loss.
    """

    module: str
    activations: ValueStatistics
    gradients: ValueStatistics


class RangeReport(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of `probe_range`.

    Attributes:
        modules: The modules that compute in 16 bits, in the order of the model.
        precision: The recommended precision for a device without bfloat16: "16-mixed", or "bf16-mixed" nevertheless.
        fp32_modules: Value for `Workload.fp32_modules`, with 16-mixed.
        initial_scale: Value for `LossScaling.initial`, with 16-mixed.
        overflowing: Modules whose activations leave fp16's range.
        flushing: Modules with more than `MOST_FLUSHED` of their summed gradients flushed to zero at `initial_scale`.
    """

    modules: list[ModuleRange]
    precision: Precision
    fp32_modules: list[str]
    initial_scale: float
    overflowing: list[str]
    flushing: list[str]

    def advice(self) -> str:
        """Return the advice, in a sentence or two."""
        start = "bf16-mixed has fp32's range: where the device has bfloat16, use it. "
        if self.precision == "bf16-mixed":
            names = ", ".join(repr(name) for name in [*self.overflowing, *self.flushing][:5])
            return f"{start}16-mixed does not suit this step: too much of it leaves fp16's range ({names})."
        modules = f" with Workload.fp32_modules={tuple(self.fp32_modules)}" if self.fp32_modules else ""
        return f"{start}16-mixed works{modules}, from LossScaling(initial={self.initial_scale:g})."


def range_report(activations: Mapping[str, ValueStatistics], gradients: Mapping[str, ValueStatistics]) -> RangeReport:
    """Evaluate the statistics of activations, by FQN in the order of the model, and those of gradients."""
    modules = [
        ModuleRange(module=name, activations=seen, gradients=gradients.get(name, ValueStatistics()))
        for name, seen in activations.items()
    ]
    scale = _scale([module.gradients for module in modules])
    overflowing = [
        m.module
        for m in modules
        if m.activations.largest > FP16_LARGEST or m.activations.not_finite or m.gradients.not_finite
    ]
    flushing = [m.module for m in modules if m.gradients.flushed(scale) > MOST_FLUSHED]
    troubled = list(dict.fromkeys([*overflowing, *flushing]))
    suits = len(troubled) <= _FEW * len(modules) and "" not in troubled
    return RangeReport(
        modules=modules,
        precision="16-mixed" if suits else "bf16-mixed",
        fp32_modules=troubled if suits else [],
        initial_scale=scale,
        overflowing=overflowing,
        flushing=flushing,
    )


def _scale(gradients: Sequence[ValueStatistics]) -> float:
    """Return the largest power of two that leaves the largest gradient some headroom."""
    largest = max((seen.largest for seen in gradients), default=0.0)
    if largest == 0.0:
        return 1.0
    exponent = math.floor(math.log2(FP16_LARGEST / largest)) - _HEADROOM_EXPONENT
    return 2.0 ** min(max(exponent, 0), _MOST_EXPONENT)
