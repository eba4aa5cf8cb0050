"""The seam holds: PyTorch's private modules and names are reached in `memfit._torch` only, and each has a test here."""

from __future__ import annotations

import ast
import functools
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import memfit
from memfit import _torch

SOURCE = Path(memfit.__file__).parent
_OPERATORS = ("aten", "_aten", "torch.ops.aten")  # whose names are those of schemas, private or not
_OTHERS = {
    ("functools", "_lru_cache_wrapper"),  # Python's, as the next
    ("os", "_exit"),
    ("sys", "_getframe"),
    ("sys", "_current_frames"),
    ("model", "_init_weights"),  # what models of transformers override: a hook, in spite of its name
}

_OF_NAMED_TUPLES = ("_replace", "_asdict", "_fields")  # whose public names begin so, lest they be those of fields


def is_private(dotted: str) -> bool:
    """Tell whether a dotted name is one of PyTorch's that begins with an underscore somewhere."""
    first, *names = dotted.split(".")
    is_hidden = any(name.startswith("_") and not name.startswith("__") for name in names)
    return first == "torch" and is_hidden and names[0] != "ops"  # operators go by their schemas' names


def strays(source: str) -> Iterator[str]:
    """Yield the private names of PyTorch that code imports or reaches."""
    tree = ast.parse(source)
    full: dict[str, str] = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))
            full.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full[alias.asname or alias.name] = name = f"{node.module}.{alias.name}"
                if is_private(name):
                    yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            if head in full and is_private(f"{full[head]}.{rest}"):
                yield f"{full[head]}.{rest}"


def foreign(source: str) -> Iterator[str]:
    """Yield the attributes that begin with an underscore, of objects that the code does not define itself."""
    nodes = list(ast.walk(ast.parse(source)))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
    }
    own |= {node.id for node in nodes if isinstance(node, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            is_known = node.attr in (*own, *_OF_NAMED_TUPLES) or (owner, node.attr) in _OTHERS
            if not is_known and owner not in _OPERATORS:
                yield f"{owner}.{node.attr}"


def files() -> list[Path]:
    """Return the modules of memfit outside of the seams: PyTorch's, and those of other frameworks."""
    paths = [path for path in SOURCE.rglob("*.py") if SOURCE / "_torch" not in path.parents]
    return [path for path in paths if path.name != "internals.py"]


def test_private_names_of_pytorch_are_reached_in_the_seam_only() -> None:
    assert {str(path): found for path in files() if (found := sorted(set(strays(path.read_text()))))} == {}


def test_private_attributes_of_others_are_reached_in_the_seam_only() -> None:
    assert {str(path): found for path in files() if (found := sorted(set(foreign(path.read_text()))))} == {}


@pytest.mark.parametrize("source", ["tensor._version", "for m in model.modules():\n    m._buffers", "a.b()._cdata = 1"])
def test_a_private_attribute_is_found(source: str) -> None:
    assert list(foreign(source))


def test_ones_own_attributes_are_not_foreign() -> None:
    assert not list(foreign("class A:\n    def __init__(self, other):\n        self._a = other._a\n        aten._foo"))


@pytest.mark.parametrize(
    "source",
    [
        "from torch._guards import detect_fake_mode",
        "from torch.overrides import _push_mode",
        "import torch.utils._pytree",
        "import torch\ntorch._C._current_graph_task_id()",
        "from torch import nn\nnn.modules.batchnorm._NormBase",
        "from torch.autograd import forward_ad as ad\nad._current_level",
    ],
)
def test_a_stray_is_found(source: str) -> None:
    assert list(strays(source))


@pytest.mark.parametrize("source", ["import torch\ntorch.__version__", "import torch\ntorch.ops.aten._foo.default"])
def test_public_names_and_operators_are_no_strays(source: str) -> None:
    assert list(strays(source)) == []


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(_torch.__path__)])
def test_every_name_of_the_seam_has_a_contract_test(name: str) -> None:
    file = Path(__file__).parent / f"test_{'compilers' if name == 'inductor' else name}.py"
    taken, tested = taken_of(name), file.read_text()
    assert taken and {one for one in taken if one not in tested} == set()


def taken_of(module: str) -> set[str]:
    """Return the names that memfit takes of a module of the seam, by its door or within it."""
    door = ast.parse((SOURCE / "_torch" / "__init__.pyi").read_text())
    doors = [node for node in ast.walk(door) if isinstance(node, ast.ImportFrom)]
    inner = [node for node in imports() if node.module == f"memfit._torch.{module}"]
    taken = {alias.name for node in (*inner, *doors) if node in inner or node.module == module for alias in node.names}
    return taken | {
        node.attr
        for path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == f"_torch.{module}"
    }


@functools.cache
def imports() -> list[ast.ImportFrom]:
    """Return what memfit imports of modules."""
    trees = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
