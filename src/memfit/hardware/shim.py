"""The shim with which PyTorch runs fake CUDA tensors in a process on a machine without a GPU.

It must be loaded before torch is imported, so this file also runs as a script, without the rest of memfit:
`python shim.py MODULE [ARGUMENT ...]` loads the shim, then runs the module (`command`).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs

_SOURCE = Path(__file__).with_suffix(".cpp")
_TORCH_LIBRARIES = ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so")
_MARK = "MEMFIT_FAKE_CUDA"  # id of the process that loaded the shim: its children inherit the variable
_COMPILER = "MEMFIT_CXX"


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a new process with fake CUDA."""
    return [sys.executable, str(Path(__file__).resolve()), module, *arguments]


def is_loaded() -> bool:
    """Tell whether fake CUDA tensors work in this process."""
    return os.environ.get(_MARK) == str(os.getpid())


def has_gpu() -> bool:
    """Tell whether the driver sees an NVIDIA GPU, without creating a context."""
    count = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value > 0
    return False


def compiler() -> str | None:
    """Return the C++ compiler that builds the shim, or None."""
    return shutil.which(os.environ.get(_COMPILER, "g++"))


def why_not() -> str | None:
    """Return why processes here can't have fake CUDA tensors; None where they can. Builds the shim on first use."""
    if is_loaded() or has_gpu():
        return None
    try:
        library()
    except OSError as e:
        return str(e)
    return None


def library(source: Path = _SOURCE) -> Path:
    """Return the shim for the installed torch, building it where the cache has none; OSError without a compiler."""
    torch_folder = _torch_folder()
    version = (torch_folder / "version.py").read_bytes()
    key = hashlib.sha256(source.read_bytes() + version + str(torch_folder).encode()).hexdigest()[:16]
    built = Path(os.environ.get("MEMFIT_CACHE_DIR") or platformdirs.user_cache_dir("memfit"), f"fake_cuda-{key}.so")
    if built.exists():
        return built
    program = compiler()
    if program is None:
        name = os.environ.get(_COMPILER, "g++")
        raise OSError(f"no C++ compiler {name!r} is on the PATH: install it, or name another in {_COMPILER}")
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:  # then it is renamed: two processes may build at once
        output = Path(folder, built.name)
        include = torch_folder / "include"
        line = [program, "-std=c++20", "-O0", "-fPIC", "-shared", f"-I{include}", str(source), "-o", str(output)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{program} could not build {source.name}: {done.stderr.strip()[-2000:]}")
        output.rename(built)
    return built


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise OSError("torch is not installed")
    return Path(spec.origin).parent


def load() -> None:
    """Load the shim after torch's own libraries and before torch."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: fake CUDA must be loaded before torch")
    built = library()
    folder = _torch_folder() / "lib"
    for path in [folder / name for name in _TORCH_LIBRARIES if (folder / name).exists()] + [built]:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def main() -> None:
    """Run a module with fake CUDA; without the shim where there is a GPU."""
    module, *sys.argv[1:] = sys.argv[1:]
    if not has_gpu():
        load()
    os.environ[_MARK] = str(os.getpid())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder: its neighbours are no top-level modules
    main()
