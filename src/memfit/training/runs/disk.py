"""Checks before a run that the disk has room for it: a full disk at the end costs all of its work."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from memfit.errors import OutputError
from memfit.ir.plan import Plan
from memfit.training.guards.host_memory import stored_bytes
from memfit.training.runs import checkpoint_folders
from memfit.training.runs.run_options import RunOptions
from memfit.units import format_bytes
from memfit.workload import Workload

_REST_BYTES = 2**24  # upper bound seen for the record, the views, the report and the small files of checkpoints
_LINE_BYTES = 600  # upper bound for a step's line in the log


def check_disk(plan: Plan, workload: Workload, options: RunOptions) -> None:
    """Refuse a run that needs more disk space than is free.

    Raises:
        OutputError: Disk space or the file size limit is too small.
    """
    out, steps, keep_checkpoints = options.out, options.steps, options.keep_checkpoints
    model_bytes, state_bytes = stored_bytes(plan, workload)
    each = model_bytes + state_bytes
    every = options.checkpoint_every
    written = 1 if every is None else 2 + (keep_checkpoints if steps is None else steps // every)
    at_once = min(written, keep_checkpoints + 1)  # the oldest is removed after the newest is written
    replaced_bytes = _bytes_there(out)
    needed = at_once * each + _REST_BYTES + _LINE_BYTES * (steps or 0)
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    total, _, free = shutil.disk_usage(place)
    checkpoints = f"{at_once} checkpoint{'s' if at_once > 1 else ''} of {format_bytes(each)} at a time"
    if total and needed - replaced_bytes > free:  # some network file systems report a size of 0
        replaced = (
            (f" ({format_bytes(replaced_bytes)} of it in use by the present run already)") if replaced_bytes else ""
        )
        raise OutputError(
            f"out={str(out)!r} has {format_bytes(free)} free, and the run needs {format_bytes(needed)}{replaced}:"
            f" {checkpoints}, the log and the report. Free space there, lower keep_checkpoints= ({keep_checkpoints}),"
            " or give another out="
        )
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    largest = max(model_bytes, state_bytes)
    if limit != resource.RLIM_INFINITY and largest > limit:
        raise OutputError(
            f"this process may write files of at most {format_bytes(limit)} (ulimit -f), and the run's largest file"
            f" needs {format_bytes(largest)}: raise the limit with ulimit -f"
        )


def _bytes_there(out: Path) -> int:
    """Return the bytes of the checkpoints in a folder, which those of the run replace."""
    if not out.is_dir():
        return 0
    files = (f for path in out.iterdir() if checkpoint_folders.is_ours(path) for f in path.iterdir())
    return sum(os.stat(file).st_size for file in files)
