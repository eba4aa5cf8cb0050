"""The architecture holds: imports point one way, and the public API is what it was."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import memfit

ROOT = Path(__file__).parent.parent

PUBLIC = [
    "BudgetError",
    "CaptureError",
    "InfeasibleError",
    "Loop",
    "LossScaling",
    "MemfitError",
    "MemoryLimitError",
    "Optimizers",
    "OutOfMemoryError",
    "Plan",
    "PlanMismatchError",
    "Step",
    "StepResult",
    "UsageError",
    "Verification",
    "Workload",
    "__version__",
    "adapt",
    "apply",
    "compare",
    "compile_backend",
    "devices",
    "estimate",
    "fit",
    "freeze_batch_norm",
    "group_norm_for_batch_norm",
    "ladder",
    "load_plan",
    "load_workload",
    "look_up",
    "memory_summary",
    "plan",
    "probe_range",
    "save_plan",
    "train",
    "verify",
    "write_report",
]


def test_public_api_is_pinned() -> None:
    assert memfit.__all__ == PUBLIC == sorted(PUBLIC)
    assert all(hasattr(memfit, name) for name in PUBLIC)


NO_TORCH = (
    "memfit.ir.replay",
    "memfit.ir.simulate",
    "memfit.report.chrome_trace",
    "memfit.report.snapshot",
    "memfit.report.tables",
    "memfit.solve.frontier",
)


@pytest.mark.parametrize("name", ["apply", "plan", "train"])
def test_verbs_are_functions_though_stages_have_the_same_names(name: str) -> None:
    assert callable(getattr(memfit, name))


def test_everything_public_is_documented() -> None:
    undocumented = [name for name in PUBLIC if name != "__version__" and not getattr(memfit, name).__doc__]
    assert undocumented == []


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def test_planning_on_a_saved_trace_imports_no_torch() -> None:
    program = "import sys, memfit.version\n" + "\n".join(f"import {name}" for name in NO_TORCH)
    stub = "import sys, types; p = types.ModuleType('memfit'); p.__path__ = [{!r}]; sys.modules['memfit'] = p\n"
    code = stub.format(str(ROOT / "src" / "memfit")) + program + "\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_error_tree_in_the_docstring_is_the_tree() -> None:
    from memfit import errors

    drawn = {word for line in errors.__doc__.splitlines() for word in line.split() if word.endswith("Error")}
    defined = {n.name for n in ast.parse(Path(errors.__file__).read_text()).body if isinstance(n, ast.ClassDef)}
    assert drawn == defined
