"""Builds, loads and names the device "acc"."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import platformdirs
import torch
from torch.utils import backend_registration

from memfit import hardware

NAME = "acc"
TOTAL_BYTES = 2 * 2**30
_FOLDER = Path(__file__).parent
_SOURCES = [_FOLDER / name for name in ("device.cpp", "autocast.h", "memory.h", "recurrent.h", "runtime.h")]


def load(total_bytes: int = TOTAL_BYTES) -> ModuleType:
    """Give this process the device, of a size that a later call changes; returns `torch.acc`.

    Raises:
        OSError: There is no compiler (`MEMFIT_CXX` names one; g++ by default), or it failed.
    """
    is_new = not is_loaded()
    loaded().acc_set_total(total_bytes)
    if is_new:
        backend_registration.rename_privateuse1_backend(NAME)
        from tests.accelerator_device import module  # makes a generator of the device that was named just now

        torch._register_device_module(NAME, module)
        # `torch.acc` is importable as `torch.cuda` is; without it `import torch.acc` would fail.
        sys.modules[f"torch.{NAME}"] = module
        backend_registration.generate_methods_for_privateuse1_backend()
    return sys.modules[f"torch.{NAME}"]


def is_loaded() -> bool:
    """Tell whether this process has the device."""
    return f"torch.{NAME}" in sys.modules


@cache
def loaded() -> ctypes.CDLL:
    """Return the library, loaded into this process."""
    functions = ctypes.CDLL(str(library()))
    functions.acc_set_total.argtypes = [ctypes.c_size_t]
    functions.acc_set_fraction.argtypes = [ctypes.c_double]
    functions.acc_get_fraction.restype = ctypes.c_double
    return functions


def library() -> Path:
    """Return the library for the installed torch, building it where the cache has none."""
    torch_folder = Path(torch.__file__).parent
    key = hashlib.sha256((torch_folder / "version.py").read_bytes() + str(torch_folder).encode())
    for source in _SOURCES:
        key.update(source.read_bytes())
    folder = Path(os.environ.get("MEMFIT_CACHE_DIR") or platformdirs.user_cache_dir("memfit"))
    built = folder / f"accelerator_device-{key.hexdigest()[:16]}.so"
    if not built.exists():
        _build(torch_folder, built)
    return built


def _build(torch_folder: Path, built: Path) -> None:
    """Compile to a temporary file, then rename: two processes may build at once."""
    program = hardware.shim.compiler()
    if program is None:
        raise OSError("no C++ compiler is on the PATH: install g++, or name another in MEMFIT_CXX")
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        output = Path(folder, built.name)
        line = [program, "-std=c++20", "-O0", "-fPIC", "-shared", f"-I{torch_folder / 'include'}", str(_SOURCES[0])]
        line += [f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(output)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{program} could not build {_SOURCES[0].name}: {done.stderr.strip()[-2000:]}")
        output.rename(built)
