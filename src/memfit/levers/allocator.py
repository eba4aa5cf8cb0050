"""The settings of the GPU's caching allocator: expandable segments, so that freed blocks leave no gaps.

Under PyTorch's defaults memory is reserved in segments of fixed sizes, and what is freed in one serves no request that
is larger. With expandable segments each pool is one segment that grows by pages, and its gaps are filled. Steps compute
the same, in the same time.

Other settings are not proposed. On a Llama in bf16 the simulated allocator reserved as much or more by
`max_split_size_mb`, more by `roundup_power2_divisions`, and about as much by `large_segment_size_mb`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from msgspec.structs import replace
from torch import nn

from memfit import hardware
from memfit._torch import FakeTensor, allocator_settings, set_allocator_settings
from memfit.errors import PlanError
from memfit.ir import Device, Levers
from memfit.levers.lever import Lever, LeversOn

_ON, _OFF = "expandable_segments:True", "expandable_segments:False"


class Allocator(Lever):
    """Expandable segments of the GPU's allocator: a step holds the same, and less is reserved for it."""

    name = "expandable segments"
    field = "allocator"
    switchable = True
    is_captured = False

    def __init__(self) -> None:
        self._users = 0  # models under it at present, of which the last one ends it

    def words(self, on: LeversOn) -> tuple[str, str]:
        return f"PYTORCH_CUDA_ALLOC_CONF={_ON}", self.name

    def on_device(self, levers: Levers, device: Device) -> Device:
        return replace(device, allocator=replace(device.allocator, expandable_segments=True))

    def beside(self, levers: Levers, device: Device) -> list[Levers]:
        """For NVIDIA's GPUs: the host's other allocators have no such segments, and ROCm's are not ready for them."""
        has_them = device.kind == "cuda" and device.vendor == "nvidia"
        if not has_them or device.allocator.expandable_segments or levers.allocator != "as-is":
            return []
        return [replace(levers, allocator="expandable-segments")]

    @contextlib.contextmanager
    def on_model(self, levers: Levers, model: nn.Module) -> Iterator[None]:
        """Have the allocator of this process expand its segments, until the context is left; on a GPU alone.

        What was reserved before, for the weights, stays where it is.

        Raises:
            PlanError: The process has another allocator, or this one takes no such setting any more.
        """
        if not _runs_on_cuda(model):
            yield
            return
        is_mine = self._users > 0 or _ON not in allocator_settings()  # as the user may have set it
        if is_mine and self._users == 0:
            _expand()
        self._users += is_mine
        try:
            yield
        finally:
            self._users -= is_mine
            if is_mine and self._users == 0:
                set_allocator_settings(_OFF)


def _runs_on_cuda(model: nn.Module) -> bool:
    """Tell whether a model's weights are in a GPU's memory, and not on paper."""
    return any(p.device.type == "cuda" and not isinstance(p, FakeTensor) for p in model.parameters())


def _expand() -> None:
    advice = f"start the program with PYTORCH_CUDA_ALLOC_CONF={_ON}, or set levers.allocator to 'as-is' and plan anew"
    if sys.platform == "win32":
        raise PlanError(
            "levers.allocator is 'expandable-segments', and Windows has none: set it to 'as-is' and plan anew"
        )
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        raise PlanError(
            f"levers.allocator is 'expandable-segments', and this process allocates by {backend!r}: leave"
            f" PYTORCH_CUDA_ALLOC_CONF=backend:{backend} out; then {advice}"
        )
    hardware.accelerators.release_cache()  # what is unused would stay in segments of fixed sizes
    try:
        set_allocator_settings(_ON)
    except (RuntimeError, ValueError) as e:
        said = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise PlanError(
            f"levers.allocator is 'expandable-segments', and this process's allocator takes no settings any more"
            f" ({said}): {advice}"
        ) from e
