"""Error bars, from measured steps: of peaks on the CPU, and by family of accelerator, with how right the roofline is.

Those of peaks are by split conformal prediction.

The score of a step is the share by which its measured peak is above the predicted one (negative where it is below).
The upper end of a new prediction lies above it by the ⌈(n + 1) · rate⌉-th smallest of n scores, so that a new step's
peak is at most that with probability `rate` or more, if it is like those measured (exchangeable).

V. Vovk, A. Gammerman, G. Shafer (2005), *Algorithmic Learning in a Random World*; J. Lei, M. G'Sell, A. Rinaldo,
R. Tibshirani, L. Wasserman (2018), *Distribution-Free Predictive Inference for Regression*, algorithm 2 and theorem
2.2. Ours is one-sided and relative, with a model that is fitted to nothing.

A family is a vendor with a compute capability, such as "nvidia-9.0". A measurement relative to figures that a probe
found, and not the vendor, holds for its own product only. Where nothing was measured, estimates are in use.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import msgspec

from memfit import ir
from memfit.ir import Device

_FOLDER = Path(__file__).parent


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Error bars of predicted peaks on the CPU, and where they come from.

    Attributes:
        source, command: The result file, and the command that made it.
        rate: The wanted share of steps whose measured peak is within the upper end.
        cases, workloads: The number of steps measured, and of their workloads.
        quantile: The share by which upper ends lie above predictions for that rate, from the scores.
        floor: The least share in use, chosen and not measured: for steps unlike those of the source.
        peak_error: The larger of the two: the share in use.
        unmeasured_peak_error: The same where the workspaces of operators are not known.
        coverage: Share of the steps within the upper end that the quantile of the other workloads gives, without
            the floor (leave one workload out).
        unmeasured_coverage: The same where the workspaces of operators are not known.
        workloads_covered: Share of the workloads whose steps are all covered, without the floor.
    """

    schema: str = "memfit.calibration/1"
    source: str
    command: str
    machine: str
    torch_version: str
    date: str
    rate: float
    cases: int
    workloads: int
    quantile: float
    floor: float
    peak_error: float
    unmeasured_peak_error: float
    coverage: float
    unmeasured_coverage: float
    workloads_covered: float


@functools.cache
def calibration() -> Calibration:
    """Return the calibration of this version, made by `python -m benchmarks.calibration`."""
    return ir.codec.read(_FOLDER / "calibration.json", Calibration)


class CardMeasurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of `python -m benchmarks.gpu` on an accelerator.

    Attributes:
        device: Its name for people.
        sources: The result files.
        rate: The wanted share of steps within the error bars.
        cases, workloads: The number of steps measured, and of their workloads.
        peak_error: The share by which upper ends lie above predicted peaks, reserved where the device counts it; None
            where too few steps were measured for the rate.
        step_error: The relative half-width of the interval around predicted step times; None likewise.
        coverage: Share of the steps within the upper end that the other workloads give (leave one workload out).
        time_factors: Measured over modelled seconds of kernels, by class of operator and dtype.
    """

    device: str
    sources: tuple[str, ...]
    torch_version: str
    date: str
    rate: float
    cases: int
    workloads: int
    peak_error: float | None
    step_error: float | None
    coverage: float | None
    time_factors: dict[str, dict[str, float]]

    def time_factor(self, kind: str, dtype: str) -> float:
        """Return the factor of modelled seconds of a class of operators; 1 where it was not measured."""
        return self.time_factors.get(kind, {}).get(dtype, 1.0)


class CardMeasurements(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of this version, by family or product."""

    schema: str = "memfit.card_measurements/1"
    cards: dict[str, CardMeasurement] = {}


@functools.cache
def card_measurements() -> CardMeasurements:
    """Return the measurements of this version, made by `python -m benchmarks.gpu`."""
    return ir.codec.read(_FOLDER / "card_measurements.json", CardMeasurements)


def measured_like(device: Device) -> CardMeasurement | None:
    """Return what was measured on a device of the same product, or else family; None where nothing was."""
    cards = card_measurements().cards
    names = [*(_product(device, product) for product in (device.description, *device.products)), _family(device)]
    return next((cards[name] for name in names if name in cards), None)


def key_of(device: Device, *, probed: bool) -> str:
    """Return the name of a device's measurements: its product, where its figures are those of a probe."""
    return (not probed and _family(device)) or _product(device, device.description)


def _family(device: Device) -> str:
    return "" if device.capability is None else f"{device.vendor}-{device.capability[0]}.{device.capability[1]}"


def _product(device: Device, product: str) -> str:
    return f"{device.vendor} {re.sub(r'[^a-z0-9]+', '-', product.lower()).strip('-')}"
