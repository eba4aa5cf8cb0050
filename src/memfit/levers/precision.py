"""Precision: autocast, TF32 products, or weights in bf16."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import msgspec

from memfit.hardware.advice import precisions, supports_tf32
from memfit.ir.device import Device
from memfit.ir.plan import Levers
from memfit.levers.bf16_weights import bf16_weights
from memfit.levers.casts import autocast, is_cast, kept_in_fp32, tf32, uncast
from memfit.levers.conflicts import ADAPTING, Conflict
from memfit.levers.lever import Lever, Rung, Running, Setting
from memfit.training.loss import LossScaler
from memfit.workload import Workload, samples_of

NO_UPDATES = "Workload.bf16_updates=None"
NO_TF32 = "a device without TF32"


class Precision(Lever):
    """The precision of the forward pass and of the gradients it leads to."""

    name = "precision"
    field = "precision"
    numerics_class = "reduced"
    conflicts = (
        Conflict(
            "bf16-true",
            NO_UPDATES,
            "bf16 weights lose every update below 1/256 of their value",
            "give bf16_updates='master-weights' (fp32 copies that the optimizer updates) or 'stochastic-rounding', or"
            " use 'bf16-mixed'",
        ),
        Conflict(
            "bf16-true",
            ADAPTING,
            "predictions for other shapes need the original model, and its weights are in bf16 by then",
            "use 'bf16-mixed', or memfit.apply with one plan for all shapes",
        ),
        Conflict(
            "tf32", NO_TF32, "the device has no TF32 units", "use '32-true'; NVIDIA's GPUs from Ampere on have TF32"
        ),
    )

    def setting(self, levers: Levers, batch_size: int) -> str:
        return levers.precision

    def names(self, levers: Levers) -> set[str]:
        return {self.name, levers.precision}

    def circumstances(self, workload: Workload, device: Device | None) -> set[str]:
        no_updates = {NO_UPDATES} if workload.bf16_updates is None else set()
        return no_updates | ({NO_TF32} if device is not None and not supports_tf32(device) else set())

    def changes_state(self, levers: Levers) -> bool:
        return levers.precision == "bf16-true"

    def may_switch(self, levers: Levers, to: Levers, batch_size: int) -> bool:
        if levers.precision == "bf16-true":  # where gradients are held depends on whether they are added up
            accumulates = levers.microbatch_size < batch_size, to.microbatch_size < batch_size
            return levers.precision == to.precision and accumulates[0] == accumulates[1]
        return levers.precision == to.precision

    @contextlib.contextmanager
    def apply(self, levers: Levers, running: Running) -> Iterator[Running]:
        workload, options = running.workload, running.options
        if levers.precision == "bf16-true":
            with bf16_weights(workload, accumulates=levers.microbatch_size < samples_of(workload)) as weights:
                yield replace(running, options=replace(options, update=weights.update, masters=weights.masters))
        elif levers.precision == "tf32":
            yield replace(running, options=replace(options, around=tf32))
        else:
            device = next((p.device.type for p in workload.model.parameters()), "cpu")
            scaler = LossScaler(workload.loss_scaling) if levers.precision == "16-mixed" else None
            casts = functools.partial(autocast, levers.precision, device)
            with kept_in_fp32(workload.model, workload.fp32_modules, device):
                yield replace(running, options=replace(options, autocast=casts, scaler=scaler))

    def is_applied(self, workload: Workload) -> bool:
        return is_cast(workload.model)

    @contextlib.contextmanager
    def lifted(self, workload: Workload) -> Iterator[None]:
        with uncast(workload.model):  # weights that are in bf16 stay so
            yield

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        return [msgspec.structs.replace(levers, precision=p) for p in step.precisions for levers in wanted]

    def rungs(self) -> Mapping[str, Rung]:
        return {"precision": _advised}


def _advised(step: Setting, levers: Levers) -> tuple[Levers, str]:
    chosen = precisions(step.device)[-1]
    return msgspec.structs.replace(levers, precision=chosen), chosen
