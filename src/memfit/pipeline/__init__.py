"""The stages, composed."""

from memfit.devices.host import devices, find_device
from memfit.ir.device import Device
from memfit.ir.verification import Verification
from memfit.pipeline.adapting import adapt
from memfit.pipeline.applying import apply
from memfit.pipeline.compiling import CompileBackend, CompiledPlan, compile_backend
from memfit.pipeline.fitting import fit
from memfit.pipeline.loading import load_fake_workload, load_workload
from memfit.pipeline.lookup import look_up
from memfit.pipeline.planning import plan
from memfit.pipeline.plans import load_plan, save_plan
from memfit.pipeline.predicting import estimate, is_elsewhere
from memfit.pipeline.ranging import probe_range
from memfit.pipeline.training import compare, train, write_report
from memfit.pipeline.verifying import verify
from memfit.report.showing import show_records

__all__ = [
    "CompileBackend",
    "CompiledPlan",
    "Device",
    "Verification",
    "adapt",
    "apply",
    "compare",
    "compile_backend",
    "devices",
    "estimate",
    "find_device",
    "fit",
    "is_elsewhere",
    "load_fake_workload",
    "load_plan",
    "load_workload",
    "look_up",
    "plan",
    "probe_range",
    "save_plan",
    "train",
    "verify",
    "write_report",
]

show_records()
