"""Devices on the command line: the list, the details of one, and the probe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import psutil

from memfit.cli.output import err, out, print_json, stages
from memfit.hardware.advice import advice, precisions
from memfit.hardware.catalogue import catalogue, missing_figures, read, user_file
from memfit.hardware.host import devices, find_device
from memfit.ir import codec
from memfit.ir.device import Device
from memfit.report.listings import device_page, device_table


def list_devices(as_json: bool) -> None:
    """Show the devices of this machine and of the catalogue."""
    here, others = devices(), list(catalogue().values())
    if as_json:
        print_json({"machine": here, "catalogue": others})
        return
    out.print(device_table(here))
    out.print(device_table(others, "Catalogue: vendors' peaks, and rates measured by probe-devices"))


def show_device(name: str, as_json: bool) -> None:
    """Show every figure of a device with its source, and advice."""
    device = find_device(name)
    if as_json:
        print_json(_with_advice(device))
    else:
        out.print(device_page(device, advice(device)))


def measure_devices(path: Path | None, as_json: bool) -> None:
    """Measure this machine's devices, and write the figures to a file of devices."""
    from memfit.hardware.measurement import keep, probe_all

    read(path or user_file())  # an invalid file is refused before the measurements
    codec.check_writable(path or user_file())
    if psutil.getloadavg()[0] > psutil.cpu_count() / 2:
        err.print(
            "Other programs are using this machine: the rates may be too low. Probe again when it is idle.",
            highlight=False,
        )
    with stages() as progress:
        probed = probe_all(progress)
    for device in probed:
        if missing := missing_figures(device):
            err.print(f"{device.name} is not saved: {', '.join(missing)} could not be measured", highlight=False)
    probed = [device for device in probed if not missing_figures(device)]
    written = keep(probed, path)
    if as_json:
        print_json({"written": str(written), "devices": [_with_advice(device) for device in probed]})
        return
    for device in probed:
        out.print(device_page(device, advice(device)))
    out.print(f"Written to {written}", highlight=False, soft_wrap=True)


def _with_advice(device: Device) -> dict[str, Any]:
    return {**msgspec.structs.asdict(device), "precisions": precisions(device), "advice": advice(device)}
