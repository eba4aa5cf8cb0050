"""The architecture holds: imports point one way, and the public API is what it was."""

from __future__ import annotations

import ast
import contextlib
import graphlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
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
    "apply",
    "devices",
    "estimate",
    "fit",
    "fleet",
    "load_workload",
    "plan",
    "tools",
    "train",
    "verify",
    "write_report",
]


def test_public_api_is_pinned() -> None:
    assert memfit.__all__ == PUBLIC == sorted(PUBLIC)
    assert all(hasattr(memfit, name) for name in PUBLIC)


NO_TORCH = (
    "memfit.allocator.caching_allocator",
    "memfit.ir.simulate",
    "memfit.planner.search",
    "memfit.report.chrome_trace",
    "memfit.report.memory_snapshot",
    "memfit.report.tables",
    "memfit.sharding.one_rank",
    "memfit.solver.frontier",
)


@pytest.mark.parametrize("name", ["apply", "plan", "train"])
def test_verbs_are_functions_though_stages_have_the_same_names(name: str) -> None:
    assert callable(getattr(memfit, name))


def test_everything_public_is_documented() -> None:
    undocumented = [name for name in PUBLIC if name != "__version__" and not getattr(memfit, name).__doc__]
    assert undocumented == []


def test_every_package_says_what_it_is_for() -> None:
    """Each folder with modules is a package, too: setuptools leaves out a folder without `__init__.py`."""
    folders = {path.parent for path in (ROOT / "src" / "memfit").rglob("*.py")}
    assert [f for f in folders if not ast.get_docstring(ast.parse((f / "__init__.py").read_text()))] == []


def test_modules_do_not_share_a_basename() -> None:
    """Rooms that mirror another framework share its nouns: memfit's own name a thing once."""
    package = ROOT / "src" / "memfit"
    mirrors = {"_torch", "integrations", "frameworks"}
    paths = (path.relative_to(package) for path in package.rglob("*.py") if not path.name.startswith("__"))
    names = Counter(path.name for path in paths if path.parts[0] not in mirrors)
    assert [name for name, count in names.items() if count > 1] == []


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def imported(files: dict[str, Path]) -> dict[str, set[str]]:
    """Return what each module imports of the others, wherever it says so, but for what only type checkers read."""

    def modules(name: str) -> Iterator[str]:
        waiting: list[ast.AST] = [ast.parse(files[name].read_text())]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                waiting += node.orelse
                continue
            waiting += ast.iter_child_nodes(node)
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} imports relative to itself"
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    yield whole if whole in files else str(node.module)

    return {name: {other for other in modules(name) if other in files and other != name} for name in files}


def modules_below(root: Path) -> dict[str, Path]:
    """Return the modules of the packages in a folder, by name."""
    parts = {path: path.relative_to(root).with_suffix("").parts for path in root.rglob("*.py")}
    return {".".join(names[:-1] if names[-1] == "__init__" else names): path for path, names in parts.items()}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graphlib.TopologicalSorter(imported(modules_below(ROOT / "src"))).prepare()


@pytest.mark.parametrize(
    "line", ["from house import a", "def later():\n    from house.a import A", "def later():\n    import house.a"]
)
def test_a_circle_is_found_though_an_import_is_deferred(line: str, tmp_path: Path) -> None:
    house = tmp_path / "house"
    house.mkdir()
    (house / "__init__.py").touch()
    (house / "a.py").write_text("from house import b\nA = b")
    for text, circular in ((line, True), ("from typing import TYPE_CHECKING\nif TYPE_CHECKING: import house.a", False)):
        (house / "b.py").write_text(text)
        with pytest.raises(graphlib.CycleError) if circular else contextlib.nullcontext():
            graphlib.TopologicalSorter(imported(modules_below(tmp_path))).prepare()


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
    assert drawn == {name for name in defined if name.endswith("Error")}
