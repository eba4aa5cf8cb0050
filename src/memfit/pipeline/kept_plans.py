"""Plans that are kept for the next start of the same program: the same sources, arguments, model, shapes and budget.

A script that is started again would make the same plan again. What tells that it is the same program is all that a
plan depends on but the values of tensors, on which the plan of a running loop does not depend either: its later steps
have other values too. The proof by the first step is made in every start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn

from memfit import ir
from memfit._torch import own_buffers, own_modules, own_parameters
from memfit.errors import OutputError
from memfit.foundations import read_budget
from memfit.hardware import cache_folder, find_device, host_name
from memfit.pipeline.placement import device_kind
from memfit.version import __version__
from memfit.workload import Entry, ExecutionContext, Geometry, LoopWorkload, fingerprint

T = TypeVar("T")

_MOST_KEPT = 256  # records, the newest ones
_DEEP = 6  # of attributes in attributes that tell objects apart
_LONG = 1000  # entries of a list or dict that are looked at
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_INSTALLED = tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")})
_OWN = Path(__file__).parents[1]
_OF_TERMINALS = ("_", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "TERM", "SSH_", "XDG_", "DBUS_")
"""How the names of environment variables begin that differ between terminals; any other may change a model."""

is_on = True
"""Whether records are kept. Tests turn it off."""


class Kept:
    """What a loop takes from an earlier start of its program, and keeps for the next one.

    Attributes:
        is_taken: Whether the last record was taken from an earlier start.
    """

    def __init__(self) -> None:
        self.is_taken = False
        self._taken: list[Path] = []

    def of(self, kind: type[T], name: str, workload: LoopWorkload, options: object, make: Callable[[], T]) -> T:
        """Return a record as it was kept, or make it and keep it.

        Args:
            kind: Its class.
            name: What it is of the workload.
            options: What else it depends on.
        """
        self.is_taken = False
        key = _key(name, workload, options) if is_on else None
        if key is None:
            return make()
        path = _folder() / f"{key}.json"
        with contextlib.suppress(OSError, msgspec.DecodeError):  # there is none, or it is damaged, or of another memfit
            found = msgspec.json.decode(path.read_bytes(), type=kind)
            self._taken.append(path)
            self.is_taken = True
            return found
        made = make()
        with contextlib.suppress(OutputError, OSError):  # the next start makes it again
            ir.codec.write_atomic(path, ir.codec.encode(made))
            for old in sorted(_folder().glob("*.json"), key=lambda each: -each.stat().st_mtime)[_MOST_KEPT:]:
                old.unlink(missing_ok=True)
        return made

    def forget(self) -> None:
        """Drop what was taken: the next start makes it anew."""
        for path in self._taken:
            path.unlink(missing_ok=True)
        self._taken.clear()


def _folder() -> Path:
    return cache_folder() / "plans"


def _key(name: str, workload: LoopWorkload, options: object) -> str | None:
    """Return a digest of all that a plan depends on; None for a program without a file, as in a notebook."""
    program = _program()
    if program is None:
        return None
    digest = hashlib.sha256()
    for part in _parts(name, workload, options):
        digest.update(part.encode() + b"\0")
    digest.update(program.encode())
    return digest.hexdigest()[:32]


def _program() -> str | None:
    """Return the sources and arguments of the program that runs, and of memfit; None where it has no file."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    script = sys.argv[0] if sys.argv and Path(sys.argv[0]).is_file() else main
    if script is None:
        return None
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    installed = (*_INSTALLED, str(_OWN))  # Python, packages and memfit
    own = {script, *(p for p in loaded if isinstance(p, str) and not str(Path(p).resolve()).startswith(installed))}
    sources = [path for path in sorted(own) if path.endswith(".py") and Path(path).is_file()]
    texts = [f"{path}:{hashlib.sha256(Path(path).read_bytes()).hexdigest()}" for path in sources]
    memfit = max(path.stat().st_mtime_ns for path in _OWN.rglob("*.py"))
    environment = [
        f"{name}={value}" for name, value in sorted(os.environ.items()) if not name.startswith(_OF_TERMINALS)
    ]
    return "\n".join(
        [*sys.argv, *environment, *texts, __version__, str(memfit), torch.__version__, sys.version, host_name()]
    )


def _parts(name: str, workload: LoopWorkload, options: object) -> Iterator[str]:
    yield name
    yield fingerprint(workload)
    yield str(getattr(workload.loss_fn, "args", ()))  # the modes in which a stand-in for the loop's loss runs
    device = device_kind(workload.model)
    yield from _told(options, _DEEP)
    budget = options.get("budget") if isinstance(options, dict) else None
    if budget is not None and read_budget(budget).of == "device":
        yield str(find_device(device).usable_bytes)
    yield from _settings()
    for fqn, module in workload.model.named_modules():
        yield f"{fqn} {_source(type(module))}"
        own = {*own_modules(module), *own_parameters(module), *own_buffers(module)}
        plain = {key: value for key, value in vars(module).items() if key not in own and not key.startswith("_")}
        yield from _told(plain, _DEEP)
        yield str([len(hooks) for key, hooks in sorted(vars(module).items()) if key.endswith("_hooks")])
    optimizer = workload.optimizer
    yield _source(type(optimizer))
    for group in optimizer.param_groups:
        yield str([tuple(p.shape) for p in group["params"]])
        yield from _told({key: value for key, value in group.items() if key != "params" and "lr" not in key}, _DEEP)
    yield str(len(optimizer.state))
    yield from _told(workload.batch, _DEEP)
    yield f"{workload.tape.roots} {workload.tape.passes}"
    for entry in workload.tape.entries:
        yield from _of_entry(entry)


def _of_entry(entry: Entry) -> Iterator[str]:
    what = entry.what if isinstance(entry.what, int) else _named(entry.what)
    yield f"{entry.kind} {what} {entry.made} {entry.drops} {entry.phase} {entry.microbatch} {entry.context}"
    yield f"{entry.arguments.references}"
    yield from _told(entry.arguments.template, _DEEP)


def _named(what: Any) -> str:
    bound = getattr(what, "__self__", None)
    own = Geometry.of(bound) if isinstance(bound, (torch.Tensor, Geometry)) else type(bound).__name__
    return f"{getattr(what, '__module__', '')}.{getattr(what, '__qualname__', type(what).__qualname__)} {own}"


def _settings() -> Iterator[str]:
    kernels = torch.backends.cuda
    yield str(ExecutionContext.now())
    yield str(
        (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.get_deterministic_debug_mode(),
            torch.backends.mkldnn.enabled,
            torch.get_float32_matmul_precision(),
            (kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled()),
        )
    )


def _source(kind: type) -> str:
    """Return a class with the file that it is from, as that is now, and the version of its package."""
    module: ModuleType | None = sys.modules.get(kind.__module__)
    package = sys.modules.get(kind.__module__.partition(".")[0])
    stamps = []
    for each in (module, package):
        with contextlib.suppress(OSError, TypeError):
            found = os.stat(each.__file__)  # type: ignore[union-attr, arg-type]
            stamps.append((found.st_mtime_ns, found.st_size))
    return f"{kind.__module__}.{kind.__qualname__} {stamps} {getattr(package, '__version__', '')}"


def _told(value: Any, depth: int) -> Iterator[str]:
    """Yield what an object is by its plain attributes; of deeper ones, and of strange ones, the class alone."""
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, torch.Tensor):
        yield f"{type(value).__name__} {tuple(value.shape)} {value.dtype} {value.device} {value.requires_grad}"
    elif isinstance(value, nn.Module):
        yield type(value).__qualname__
    elif isinstance(value, type) or callable(value) and hasattr(value, "__qualname__"):
        yield f"{value.__module__}.{value.__qualname__}"
    elif depth == 0:
        yield type(value).__qualname__
    elif isinstance(value, dict):
        for key, each in list(value.items())[:_LONG]:
            yield repr(key) if isinstance(key, _PLAIN) else type(key).__qualname__
            yield from _told(each, depth - 1)
    elif isinstance(value, (list, tuple)):
        yield f"{type(value).__qualname__} {len(value)}"
        for each in value[:_LONG]:
            yield from _told(each, depth - 1)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(text for each in value for text in _told(each, depth - 1))
    else:
        yield type(value).__qualname__
        plain = {key: each for key, each in getattr(value, "__dict__", {}).items() if not key.startswith("_")}
        yield from _told(plain, depth - 1)
