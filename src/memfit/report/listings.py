"""Tables of devices and of verifications, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.ir.device import Device
from memfit.ir.verification import Verification
from memfit.units import format_bytes

_GRADIENTS_SHOWN = 5


def device_table(devices: Sequence[Device]) -> Table:
    """Return the devices of a machine."""
    table = Table(title="Devices of this machine", title_justify="left")
    for heading in ("name", "description", "memory", "usable", "cores"):
        table.add_column(heading, justify="right" if heading in ("memory", "usable", "cores") else "left")
    for device in devices:
        memory, usable = format_bytes(device.memory_bytes), format_bytes(device.usable_bytes)
        table.add_row(device.name, device.description, memory, usable, str(device.cores))
    return table


def verification_table(found: Verification) -> Group:
    """Return what a verification found: numerics, peaks, and what does not hold."""
    table = Table(title="Plain step against planned step", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("class", found.numerics)
    table.add_row(
        "loss", f"plain {found.plain_loss:.9g}, planned {found.planned_loss:.9g}, {_apart(found.loss_difference)}"
    )
    table.add_row("gradients", "bitwise equal" if found.bitwise else _apart(found.gradient_difference))
    table.add_row("predicted peak", format_bytes(found.predicted_peak_bytes))
    measured, plain = format_bytes(found.measured_peak_bytes), format_bytes(found.plain_measured_peak_bytes)
    table.add_row("measured peak", f"{measured} (plain {plain}, budget {format_bytes(found.budget_bytes)})")
    parts: list[RenderableType] = [table]
    if not found.bitwise:
        parts.append(_gradients(found))
    parts += [Text(note, style="dim") for note in found.notes]
    parts += [Text(f"does not hold: {failure}", style="red") for failure in found.failures]
    if found.holds:
        parts.append(Text("The plan is what it says.", style="green"))
    return Group(*parts)


def _apart(relative: float) -> str:
    return "equal" if relative == 0 else f"{relative:.2e} apart, relative"


def _gradients(found: Verification) -> Table:
    count = min(_GRADIENTS_SHOWN, len(found.gradients))
    table = Table(title=f"The {count} gradients furthest apart, of {len(found.gradients)}", title_justify="left")
    table.add_column("parameter")
    table.add_column("relative difference", justify="right")
    for gradient in found.gradients[:count]:
        table.add_row(gradient.parameter, f"{gradient.relative:.2e}")
    return table
