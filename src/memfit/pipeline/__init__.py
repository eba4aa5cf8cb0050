"""The stages, composed."""

from memfit.hardware.host import devices, find_device
from memfit.ir.verification import Verification
from memfit.pipeline._apply import apply
from memfit.pipeline._consolidate import consolidate
from memfit.pipeline._estimate import estimate
from memfit.pipeline._fit import fit
from memfit.pipeline._fleet import fleet
from memfit.pipeline._plan import plan
from memfit.pipeline._train import train, write_report
from memfit.pipeline._verify import verify
from memfit.pipeline.placement import check_launched, device_named, joined_by, on_this_machine, ranks_of
from memfit.pipeline.workload_files import load_fake_workload, load_log, load_workload
from memfit.planner.gpu_process import is_elsewhere
from memfit.report.notebook import show_records

__all__ = [
    "Verification",
    "apply",
    "check_launched",
    "consolidate",
    "device_named",
    "devices",
    "estimate",
    "find_device",
    "fit",
    "fleet",
    "is_elsewhere",
    "joined_by",
    "load_fake_workload",
    "load_log",
    "load_workload",
    "on_this_machine",
    "plan",
    "ranks_of",
    "train",
    "verify",
    "write_report",
]

show_records()
