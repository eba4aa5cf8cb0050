"""How many bytes a process may hold: a limit that fails before it is exceeded, and whether there is room."""

from __future__ import annotations

import torch

from memfit.devices.out_of_memory import allocations_can_fail, out_of_memory

_BLOCK_BYTES = 2**26  # memory is asked for in pieces, as an optimizer asks for it


def has_room(wanted_bytes: int, device: torch.device) -> bool:
    """Tell whether so many bytes can surely be had on a device now, without taking them where that can be known."""
    if device.type == "cpu" and not allocations_can_fail():
        return True
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0]
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if free_bytes + cached_bytes > 2 * wanted_bytes:  # twice, since what is cached may be in pieces
            return True
    return _can_take(wanted_bytes, device)


def _can_take(wanted_bytes: int, device: torch.device) -> bool:
    """Tell whether so many bytes can be had by taking them for a moment."""
    blocks = []
    try:
        for start in range(0, wanted_bytes, _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, wanted_bytes - start)
            blocks.append(torch.empty(size, dtype=torch.uint8, device=device))
    except Exception as e:
        if out_of_memory(e) is None:
            raise
        return False
    return True
