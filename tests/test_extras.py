"""Extras bring what pages, examples and errors say, and `settings.md` lists those that exist."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit.pipeline import EXTRAS_OF_PACKAGES
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, run_python

SOURCE = ROOT / "src" / "memfit"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
SETTINGS = (DOCS / "reference" / "settings.md").read_text()
OURS = {"memfit", "benchmarks", "examples", "tests", "mine"}
ELSEWHERE = {"jittor", "keras"}
"""Extras with environments of their own, and the rooms of memfit that are imported there alone."""
WITHIN = {"integrations/internals.py": "accelerate"}
"""Modules that are imported by others with `brought_by` only, and what these ask for."""
BROUGHT_BY_OTHERS = {
    "IPython",  # imported in a notebook only
    "keras",  # by tensorflow
    "markupsafe",  # by jinja2
}


def brought(extra: str) -> set[str]:
    """Return the distributions that an extra of memfit brings, memfit's own requirements among them."""
    found = {_name(requirement) for requirement in PROJECT["dependencies"]}
    for requirement in EXTRAS[extra]:
        inner = re.match(r"memfit\[(.*)\]", requirement)
        found |= set().union(*map(brought, inner[1].split(","))) if inner else {_name(requirement)}
    return found


def _name(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    return name[0].lower()


def _distribution(package: str) -> str:
    return "scikit-learn" if package == "sklearn" else package.replace("_", "-")


def imports(tree: ast.AST, extra: str = "") -> Iterator[tuple[str, str]]:
    """Yield the packages of others that code imports, each with the extra that `brought_by` names around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        for package in {name.partition(".")[0] for name in names} - OURS - set(sys.stdlib_module_names):
            yield package, extra
        yield from imports(node, _named(node) or extra)


def _named(node: ast.AST) -> str:
    """Return the extra that a `with brought_by(...)` names; "" for any other code."""
    for item in node.items if isinstance(node, ast.With) else ():
        match item.context_expr:
            case ast.Call(func=ast.Name(id="brought_by"), args=[ast.Constant(value=str(extra)), *_]):
                return extra
    return ""


def _is_elsewhere(path: Path) -> bool:
    return path.stem in ELSEWHERE or path.parent.name in ELSEWHERE


def test_what_memfit_imports_is_required_or_asked_for_with_the_extra_that_brings_it() -> None:
    required = {_name(requirement) for requirement in PROJECT["dependencies"]}
    strays = []
    for path in (path for path in SOURCE.rglob("*.py") if not _is_elsewhere(path) or path.name == "tensorflow.py"):
        for package, named in imports(ast.parse(path.read_text())):
            extra = named or WITHIN.get(str(path.relative_to(SOURCE)), "")
            known = brought(extra) if extra else required
            if package not in BROUGHT_BY_OTHERS and _distribution(package) not in known:
                strays.append((str(path), package, extra))
    assert strays == []


def pages_and_examples() -> Iterator[tuple[str, str]]:
    """Yield the packages that examples and pages import, and where."""
    for path in (ROOT / "examples").rglob("*.py"):
        yield from ((package, str(path)) for package, _ in imports(ast.parse(path.read_text())))
    for page in (page for page in PAGES if not _is_elsewhere(page)):
        for block in blocks(page, "python"):
            yield from ((package, str(page)) for package, _ in imports(ast.parse(block.code)))


TRACKERS = {"wandb", "mlflow", "trackio"}
"""Examples of packages that their users have."""


def test_all_brings_what_pages_and_examples_import() -> None:
    known = brought("all")
    missing = {found for found in pages_and_examples() if _distribution(found[0]) not in known}
    assert {found for found in missing if found[0] not in TRACKERS} == set()


def test_all_is_every_extra_for_users() -> None:
    others = ELSEWHERE | {"benchmarks", "dev", "docs"}
    assert brought("all") == set().union(*(brought(name) for name in EXTRAS.keys() - others))


def test_files_of_workloads_name_extras_that_bring_what_they_import() -> None:
    assert {
        package for package, extra in EXTRAS_OF_PACKAGES.items() if _distribution(package) not in brought(extra)
    } == set()


def test_pages_name_extras_that_exist() -> None:
    named = [re.findall(r"'(?:memfit|\.)\[([\w,]+)\]'", page.read_text()) for page in PAGES]
    assert {extra for found in sum(named, []) for extra in found.split(",")} - EXTRAS.keys() - {"NAME"} == set()


def _first_column(heading: str) -> set[str]:
    table = SETTINGS.split(f"| {heading} |")[1].split("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_the_settings_are_the_extras_that_exist() -> None:
    assert _first_column("extra") == EXTRAS.keys()


def test_the_settings_are_the_variables_that_are_read() -> None:
    constants = {
        node.value
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    listed = _first_column("variable")
    assert listed - constants == set()
    assert {name for name in constants if re.fullmatch(r"MEMFIT_\w+", name)} - listed == {"MEMFIT_FAKE_CUDA"}  # its own


MISSING = {
    "accelerate": ("accelerate", "import memfit.integrations.accelerate"),
    "bitsandbytes": (
        "optimizers",
        "from memfit.levers.adamw_8bit import _bitsandbytes\n_bitsandbytes()",
    ),
    "keras": ("keras", "import memfit.keras"),
    "lightning": ("lightning", "import memfit.integrations.lightning"),
    "matplotlib": ("examples", "from examples.brain_segmentation.__main__ import figure_class\nfigure_class()"),
    "monai": (
        "brain",
        "from memfit.recipes import brain_segmentation\nbrain_segmentation(channels=(4, 8))",
    ),
    "nibabel": ("brain", "from memfit.recipes import load_slabs\nload_slabs(4)"),
    "peft": (
        "finetune",
        "from memfit.recipes import finetune\nfinetune(n_layer=1, d_model=32, n_head=2, context=32, base_steps=0)",
    ),
    "sklearn": ("examples", "import memfit\nmemfit.load_workload('examples/digits_resnet.py:workload')"),
    "tensorboard": ("tensorboard", "from memfit.training.runs.log import require_tensorboard\nrequire_tensorboard()"),
    "tensorflow": ("keras", "import sys, types\nsys.modules['keras'] = types.ModuleType('keras')\nimport memfit.keras"),
    "torch_pruning": ("structure", "from memfit.structure.pruning import _torch_pruning\n_torch_pruning()"),
    "transformers": ("transformers", "import memfit.integrations.transformers"),
}
"""What is not there, the extra that brings it, and code that needs it."""


@pytest.mark.parametrize("package", MISSING)
def test_what_is_missing_is_told_with_the_command_that_brings_it(package: str, tmp_path: Path) -> None:
    extra, code = MISSING[package]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    said = f"sys.modules[{package!r}] = None\ntry:\n" + "\n".join(f"    {line}" for line in code.splitlines())
    told = "from memfit.errors import MissingExtraError\nimport sys\n"
    printed = run_python(f"{told}{said}\nexcept MissingExtraError as e:\n    print(e)", tmp_path)
    command = f"pip install 'memfit[{extra}]'"
    assert f"needs the package '{package}', which is not installed: {command}" in printed
    assert _distribution(package) in brought(extra) or package in BROUGHT_BY_OTHERS
