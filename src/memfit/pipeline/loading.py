"""Workloads by name: `file.py:function` or `package.module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.capture.values import KnownValues
from memfit.errors import MemfitError, MissingExtraError, WorkloadError
from memfit.rng import rng_preserved
from memfit.workload import Workload, batch_size_of

_HOW = "name it as file.py:function or package.module:function, where the function takes nothing and returns a Workload"
_EXTRAS = {
    "transformers": "examples",
    "sklearn": "examples",
    "monai": "brain",
    "nilearn": "brain",
    "nibabel": "brain",
}


def load_fake_workload(name: str) -> Workload:
    """Return the workload that a function makes, run under fake tensors: its model takes no memory.

    A function that can't run so, since it computes with data, is run as it is.

    Args:
        name: `file.py:function` or `package.module:function`.

    Raises:
        WorkloadError: No such file, module or function, or it returns something else than a Workload.
        MissingExtraError: It imports a package that an extra of memfit brings.
    """
    values = KnownValues.of(FakeTensorMode(allow_non_fake_inputs=True))
    try:
        with rng_preserved(), values.fake, values:
            return load_workload(name)
    except WorkloadError as e:
        if e.__cause__ is None:
            raise
    return load_workload(name)


def load_workload(name: str) -> Workload:
    """Return the workload that a function makes.

    Args:
        name: `file.py:function` or `package.module:function`.

    Raises:
        WorkloadError: No such file, module or function, or it returns something else than a Workload.
        MissingExtraError: It imports a package that an extra of memfit brings.
    """
    place, separator, function = name.rpartition(":")
    if not separator or not place or not function:
        raise WorkloadError(f"the workload {name!r} can't be found: {_HOW}")
    module = _load_file(Path(place)) if place.endswith(".py") else _run(place, lambda: importlib.import_module(place))
    make = getattr(module, function, None)
    if not callable(make):
        public = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise WorkloadError(f"{place} has no function {function!r}; it has {', '.join(public) or 'none'}: {_HOW}")
    workload = _run(name, make)
    if not isinstance(workload, Workload):
        raise WorkloadError(f"{name} returned a {type(workload).__name__}, not a memfit.Workload: {_HOW}")
    batch_size_of(workload.batch)
    return workload


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise WorkloadError(f"the workload's file {str(path)!r} does not exist: {_HOW}")
    spec = importlib.util.spec_from_file_location(f"memfit_workload_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # a path that ends in .py has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        _run(str(path), lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    finally:
        sys.path.pop(0)
    return module


def _run(what: str, call: Callable[[], Any]) -> Any:
    """Run the user's code; what it raises becomes an error that names the place."""
    try:
        return call()
    except MemfitError:
        raise
    except ModuleNotFoundError as e:
        package = (e.name or "").split(".")[0]
        if package in _EXTRAS:
            raise MissingExtraError(what, _EXTRAS[package], package) from e
        raise WorkloadError(f"{what} imports {e.name!r}, which is not installed: {_HOW}") from e
    except Exception as e:
        raise WorkloadError(f"{what} raised {type(e).__name__}: {e}") from e
