"""What was measured on accelerators, by family: error bars of steps that ran there, and how right the roofline is.

A family is a vendor with a compute capability, such as "nvidia-9.0". A measurement relative to figures that a probe
found, and not the vendor, holds for its own product only. Where nothing was measured, estimates are in use.
"""

from __future__ import annotations

import functools
import importlib.resources
import re

import msgspec

from memfit.ir import codec
from memfit.ir.device import Device


class CardMeasurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of `python -m benchmarks.gpu` on an accelerator.

    Attributes:
        device: Its name for people.
        sources: The result files.
        torch_version, date: Those of the measurements.
        rate: The wanted share of steps within the error bars (`memfit.cost.error_bars`).
        cases: The number of steps measured.
        workloads: The number of their workloads.
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
    file = importlib.resources.files("memfit.cost") / "card_measurements.json"
    return codec.decode(file.read_bytes(), CardMeasurements, source=str(file))


def measured_like(device: Device) -> CardMeasurement | None:
    """Return what was measured on a device of the same product, or else family; None where nothing was."""
    cards = card_measurements().cards
    names = [*(_product(device.vendor, product) for product in (device.description, *device.products)), family(device)]
    return next((cards[name] for name in names if name in cards), None)


def key_of(device: Device, *, probed: bool) -> str:
    """Return what a device's measurements are kept under.

    Args:
        probed: Whether its figures are those of a probe, and not the vendor's.
    """
    of_family = family(device)
    return of_family if of_family and not probed else _product(device.vendor, device.description)


def family(device: Device) -> str:
    """Return a device's vendor and compute capability; "" where it has none."""
    return "" if device.capability is None else f"{device.vendor}-{device.capability[0]}.{device.capability[1]}"


def _product(vendor: str, product: str) -> str:
    return f"{vendor} {re.sub(r'[^a-z0-9]+', '-', product.lower()).strip('-')}"
