"""The architecture holds: imports point one way, and the public API is what it was."""

from __future__ import annotations

import ast
import contextlib
import graphlib
import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
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
    "memfit.ir.caching_allocator",
    "memfit.ir.simulation",
    "memfit.planner.candidate_search",
    "memfit.report.exports",
    "memfit.report.exports",
    "memfit.report.tables",
    "memfit.ranks.one_rank",
    "memfit.solver.frontiers",
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


def test_public_classes_do_not_share_a_name() -> None:
    """A class name means one thing, but where users of other frameworks and trainers expect it."""
    package = ROOT / "src" / "memfit"
    trees = [ast.parse(path.read_text()) for path in package.rglob("*.py")]
    classes = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert {name for name, count in classes.items() if count > 1 and not name.startswith("_")} <= TWO_CLASSES


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
    program = "import sys, memfit.foundations\n" + "\n".join(f"import {name}" for name in NO_TORCH)
    stub = "import sys, types; p = types.ModuleType('memfit'); p.__path__ = [{!r}]; sys.modules['memfit'] = p\n"
    code = stub.format(str(ROOT / "src" / "memfit")) + program + "\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_error_tree_in_the_docstring_is_the_tree() -> None:
    from memfit import errors

    drawn = {word for line in errors.__doc__.splitlines() for word in line.split() if word.endswith("Error")}
    defined = {n.name for n in ast.parse(Path(errors.__file__).read_text()).body if isinstance(n, ast.ClassDef)}
    assert drawn == {name for name in defined if name.endswith("Error")}


ROOMS = {path.parent.name for path in (ROOT / "src" / "memfit").glob("*/__init__.py")}
PAST_DOORS = {
    "_torch": {"compilers", "fake"},
    "capture": {"fake_workload", "recorder", "user_state"},
    "cli": {"app"},
    "cost": {"cpu_costs"},
    "foundations": {"interrupts"},
    "hardware": {"measurement"},
    "integrations": {"internals"},
    "jittor": {"checkpointing", "planning", "variables"},
    "keras": {"internals", "planning", "recompute"},
    "levers": {"precision", "registry"},
    "pipeline": {"loop_plans"},
    "planner": {"assembly", "captured_steps", "confirmation", "measured_steps"},
    "ranks": {"engines"},
    "recomputation": {"joint_rewriter", "probe"},
    "report": {"summary"},
    "solver": {"milp"},
    "structure": {"compound_scaling", "convolutions", "proposal", "sparsity"},
    "tools": {"_ladder", "_probe_range"},
    "training": {"runs.checkpoint"},
    "workload": {"held_state"},
}
"""By room, the inner modules that tests and benchmarks still reach for: this list only gets shorter."""
TWO_CLASSES = {"MemfitCallback", "Step", "Workload"}
"""Names that users of Jittor, Keras and two trainers expect as they are."""


def past_doors(files: Iterable[Path], inner: Collection[str], own: str | None = None) -> set[str]:
    """Return the inner modules of rooms that files import, but for those of the room they are in."""
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                named = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            else:
                named = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            found |= {name for name in named & inner if name.split(".")[1] != own}
    return found


def inner_modules() -> set[str]:
    """Return the modules that stand behind a door."""
    files = modules_below(ROOT / "src")
    return {name for name, path in files.items() if name.count(".") > 1 and path.name != "__init__.py"}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_is_entered_by_its_door(room: str) -> None:
    inner = {name for name in inner_modules() if name.split(".")[1] == room}
    package = ROOT / "src" / "memfit"
    others = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != room]
    assert past_doors(others, inner) == set()


def test_tests_and_benchmarks_go_past_few_doors() -> None:
    files = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    known = {f"memfit.{room}.{module}" for room, modules in PAST_DOORS.items() for module in modules}
    assert past_doors(files, inner_modules()) == known


PUBLIC_ARGUMENTS = {
    *("memfit.pipeline._estimate.estimate", "memfit.pipeline._fit.fit", "memfit.pipeline._fleet.fleet"),
    *("memfit.pipeline._plan.plan", "memfit.pipeline._train.train"),
    *("memfit.recipes.brain.brain_segmentation", "memfit.recipes.clips.video", "memfit.recipes.language.byte_lm"),
    *("memfit.recipes.adapters.finetune", "memfit.recipes.adapters.sentence_encoder"),
    *("memfit.structure.compound_scaling.scale", "memfit.structure.convolutions.separable_convolutions"),
    *("memfit.structure.distillation.distill", "memfit.structure.pruning.prune"),
    "memfit.integrations.lightning.__init__",
}
"""Functions that users call with options by name."""


def test_functions_but_for_those_of_users_have_at_most_seven_arguments() -> None:
    wide = set()
    for name, path in modules_below(ROOT / "src").items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if len([a for a in given if a.arg not in ("self", "cls")]) > 7:
                    wide.add(f"{name}.{node.name}")
    assert wide == PUBLIC_ARGUMENTS


@pytest.mark.parametrize(
    "line", ["from memfit.ir import plan", "from memfit.ir.plan import Plan", "import memfit.ir.plan"]
)
def test_a_way_past_a_door_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"def later():\n    {line}")
    (tmp_path / "b.py").write_text("from memfit import ir\nfrom memfit.ir import Plan\nir.plan.Plan")
    assert past_doors(tmp_path.glob("a.py"), {"memfit.ir.plan"}) == {"memfit.ir.plan"}
    assert past_doors(tmp_path.glob("*.py"), {"memfit.ir.plan"}, own="ir") == set()
    assert past_doors(tmp_path.glob("b.py"), {"memfit.ir.plan"}) == set()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of parts of PyTorch that some rooms import
def test_doors_name_what_is_there() -> None:
    """Type checkers read the stubs; what they say is imported when it is first asked for."""
    for room in sorted(ROOMS - {"integrations", "jittor", "keras"}):
        door = importlib.import_module(f"memfit.{room}")
        assert [name for name in door.__all__ if not hasattr(door, name)] == []
