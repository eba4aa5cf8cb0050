"""The user's functions by name, `file.py:function` or `package.module:function`: of workloads, and of logs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit._torch import FakeTensorMode, PassiveMode, replaced, storage_key_of
from memfit.capture import KnownValues, UserState, tensors_in
from memfit.errors import MemfitError, MissingExtraError, WorkloadError
from memfit.foundations import HOW, NAME, format_bytes, look_in, no_module, parts_of, public, users_place
from memfit.hardware import free_bytes
from memfit.training import LogFunction
from memfit.workload import Workload, described, rng_preserved, samples_of

EXTRAS_OF_PACKAGES = dict.fromkeys(("transformers", "sklearn"), "examples") | dict.fromkeys(
    ("monai", "nilearn", "nibabel"), "brain"
)


class _StayOnCpu(TorchFunctionMode):
    """Lets code that moves its model or batch to a GPU run where there is none: memfit moves them itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        named = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **named) if func is torch.Tensor.to else func(*args, **named)


def _on_cpu(value: Any) -> Any:
    is_gpu = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return torch.device("cpu") if is_gpu else value


class _LiveBytes(PassiveMode):
    """A dispatch mode that adds up the bytes of the storages that operators make, while they are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_storage: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            if tensor.layout is torch.strided and (key := storage_key_of(tensor)) not in self.by_storage:
                storage = tensor.untyped_storage()
                self.by_storage[key] = storage.nbytes()
                weakref.finalize(storage, self.by_storage.pop, key).atexit = False
        return out


def load_fake_workload(name: str, tell: Callable[[str], None] = lambda line: None) -> Workload:
    """Return the workload that a function makes, run under fake tensors: its model takes no memory.

    Moves to a GPU, which need not be here, are left out. A function that can't run so, since it computes with data,
    is run as it is, where the machine has the memory; that is told before, in a line with the bytes that it takes at
    least.
    """
    values, made, around = KnownValues.of(FakeTensorMode(allow_non_fake_inputs=True)), _LiveBytes(), UserState([])
    # Modules convert fake parameters (`nn.Module.to`): PyTorch swaps them, and can't where it refers to them.
    converts = replaced(torch.utils, "swap_tensors", lambda old, new: setattr(old, "data", new.data))
    try:
        with rng_preserved(), values.fake, values, made, _StayOnCpu(), converts:
            return load_workload(name)
    except WorkloadError as e:
        if e.__cause__ is None or isinstance(e.__cause__, SystemExit):
            raise
        why = f"{name} can't be built on fake tensors ({e.__cause__!r}{users_place(e)})"
        nbytes = sum(made.by_storage.values())  # what the frames of the error hold
    around.set_back()  # or modules that it imported would keep fake tensors
    if nbytes > (free := free_bytes()):
        raise WorkloadError(
            f"{why}. Built with data it needs {format_bytes(nbytes)} or more, and this machine has"
            f" {format_bytes(free)} free: don't read values of tensors in the function (item(), .numpy()), or"
            " build a smaller model"
        )
    tell(f"{why}: memfit builds it with data, in {format_bytes(nbytes)} or more of this machine's memory")
    return load_workload(name)


@public
def load_workload(name: str) -> Workload:
    """Return the workload that a function makes.

    Args:
        name: `file.py:function` or `package.module:function`.

    Raises:
        WorkloadError: No such file, module or function, or it returns something else than a Workload.
        MissingExtraError: It imports a package that an extra of memfit brings.
    """
    workload = call(name)
    if not isinstance(workload, Workload):
        if workload is None:
            raise WorkloadError(f"{name} returned None: end the function with `return workload`")
        raise WorkloadError(f"{name} returned {described(workload)}, not a memfit.Workload: {HOW}")
    samples_of(workload)
    return workload


def call(name: str) -> Any:
    """Return the result of a function that is named as workloads are."""
    with replaced(sys, "argv", [name.rpartition(":")[0]]):  # and none of memfit's arguments
        return _run(name, _named(name, "workload", HOW))


def load_log(name: str) -> LogFunction:
    """Return the function that takes a run's records; a file that was loaded for a workload is not run again."""
    with replaced(sys, "argv", [name.rpartition(":")[0]]):
        return _named(name, "log", f"{NAME} takes a dict", reuse=True)


def _named(name: str, noun: str, how: str, *, reuse: bool = False) -> Callable[..., Any]:
    """Return a function by its name; `noun` and `how` say in errors what it is for and how it is named."""
    place, function = parts_of(name, noun, how)
    module = _load_file(Path(place), reuse) if place.endswith(".py") else _import(place)
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        public = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise WorkloadError(f"{place} has no function {function!r}; it has {', '.join(public) or 'none'}: {how}")
    return found


def _load_file(path: Path, reuse: bool) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"memfit_workload_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # a path that ends in .py has a loader
    known = sys.modules.get(spec.name)
    if reuse and known is not None and known.__file__ == spec.origin:
        return known
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    look_in(path.parent.resolve())
    _run(str(path), lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    return module


def _import(name: str) -> ModuleType:
    """Return a module of the current folder, or one that is installed."""
    look_in(Path.cwd())
    try:
        is_there = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as e:  # of the packages that it would be in
        is_there = not name.startswith(f"{e.name}.")
    except ValueError:  # a module that has no spec, such as __main__
        is_there = name in sys.modules
    if not is_there:
        raise WorkloadError(no_module(name))
    module: ModuleType = _run(name, lambda: importlib.import_module(name))
    return module


def _run(what: str, call: Callable[[], Any]) -> Any:
    """Run the user's code; what it raises becomes an error that names the place."""
    try:
        return call()
    except MemfitError:
        raise
    except ModuleNotFoundError as e:
        package = (e.name or "").split(".")[0]
        if package in EXTRAS_OF_PACKAGES:
            raise MissingExtraError(what, EXTRAS_OF_PACKAGES[package], package) from e
        raise WorkloadError(f"{what} imports {e.name!r}, which is not installed{users_place(e)}") from e
    except SystemExit as e:
        raise WorkloadError(
            f"{what} ended Python with status {e.code!r}{users_place(e)}. memfit runs it without arguments,"
            " so sys.argv is its name alone: give every argument of its parser a default, call"
            ' parse_args([]), or read the command line under `if __name__ == "__main__":`'
        ) from e
    except Exception as e:
        raise WorkloadError(f"{what} raised {type(e).__name__}: {e}") from e
