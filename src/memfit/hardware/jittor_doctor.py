"""Jittor in working order: what its import needs, found out, prepared and loaded.

Jittor compiles itself when it is first imported, and that import fails or starts over for reasons that
have nothing to do with the user's program (Note [What Jittor's import trips over]). `load` is the way in:
it imports Jittor with all of them out of the way, and leaves the user's environment as it was.

Note [What Jittor's import trips over], of Jittor 1.3.11:
1. oneDNN is downloaded from a server that is often out of reach, though wheels of it exist: they are linked to
   where the download would have gone. Without oneDNN everything runs, convolutions about 30 times slower.
2. With nvcc but without the CUDA runtime library the import dies: nvcc is then hidden from it.
3. The cache's folder is named after the host, the kernel and the git branch, so that a new container or
   branch compiles everything anew: the three are pinned, compiler, Python and processor are not.
4. JITTOR_HOME is written to the user's ~/.cache/jittor/config.json for good: HOME is another one meanwhile. When
   kernels are compiled later, and JITTOR_HOME is set, Jittor still writes it, by truncating: programs with different
   ones that compile at the same time can fail, and succeed when run again.
5. torch is imported whenever it is installed: FIX_TORCH_ERROR=0.
6. Warnings and notices are printed at each import: it is silent meanwhile, and only then, since errors are too.
7. Kernels are compiled for fast mathematics, in which g++ divides and takes roots by approximations in vectors, and
   exactly elsewhere. Which it does depends on what is fused with what, so that gradients of BatchNorm changed by 4e-6
   where recomputed regions end. Exact ones are asked for.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import platformdirs

from memfit.errors import MissingExtraError, UsageError
from memfit.foundations import Progress

EXTRA = "jittor"
VERSION = "1.3.11.0"
"""The version that the recipe was tried with."""

_PROGRESS = re.compile(rb"Compiling (\S+?)\((\d+)/(\d+)\)")
_LONGEST_NAME = 20
_IMPORT = "from memfit.hardware.jittor_doctor import _import_jittor; _import_jittor(silent=False)"
_ONEDNN_FOLDER = "dnnl_lnx_2.2.0_cpu_gomp"
_EXACT_DIVISION = " -fno-reciprocal-math -mno-recip "  # Note [What Jittor's import trips over], 7


@dataclass(frozen=True)
class Check:
    """The check of one requirement of Jittor.

    Attributes:
        found: The version, path or text that was found.
        remedy: How to meet it; "" if it is met.
        needed: Whether Jittor can't run without it.
    """

    name: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True


def checks() -> list[Check]:
    """Check Jittor's requirements, without changing, compiling or importing anything."""

    def check(name: str, ok: bool, found: str, remedy: str, needed: bool = True) -> Check:
        return Check(name, ok, found, "" if ok else remedy, ok or needed)

    how = f"pip install 'memfit[{EXTRA}]' in an environment of its own"
    version, numpy = _version_of("jittor"), _version_of("numpy") or "not installed"
    compiler = shutil.which(os.environ.get("cc_path") or "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    folders, is_compiled = _onednn(), _marker().exists()
    cuda = _nvcc() or "no nvcc: Jittor uses the CPU"
    if _nvcc() is not None and not _can_use_cuda():
        cuda += " without its libcudart or a driver: hidden from Jittor, so Jittor uses the CPU"
    return [
        check("jittor", version == VERSION, version or "not installed",
              how if version is None else f"{how}: only {VERSION} was tried", needed=version is None),
        check("numpy", numpy.split(".")[0] in ("0", "1"), numpy,
              "pip install 'numpy<2', in an environment without packages that need 2"),
        check("C++ compiler", compiler is not None, compiler or "no g++", "install g++ (Debian: apt install g++)"),
        check("Python headers", header.exists(), str(header), "install them (Debian: apt install python3-dev)"),
        check("oneDNN", folders is not None, str(folders[0]) if folders else "not installed",
              f"pip install 'memfit[{EXTRA}]' brings the wheels; without them Jittor downloads oneDNN, unless use_mkl=0"
              " is set", needed=False),
        Check("CUDA", True, cuda),
        check("compiled", is_compiled, str(home()) if is_compiled else f"nothing in {home()}",
              "memfit tools doctor jittor: takes minutes, once", needed=False),
    ]  # fmt: skip


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def home() -> Path:
    """Return the folder of Jittor's compiled files: JITTOR_HOME, or one in memfit's cache folder (MEMFIT_CACHE_DIR)."""
    cache = os.environ.get("MEMFIT_CACHE_DIR") or platformdirs.user_cache_dir("memfit")
    return Path(os.environ.get("JITTOR_HOME") or Path(cache) / "jittor").absolute()


def _marker() -> Path:
    """Return the file that marks this Jittor as compiled, by this compiler for this Python and processor."""
    spec, processor = importlib.util.find_spec("jittor"), platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.startswith("model name")), processor)
    parts = [spec.origin if spec else "", _version_of("jittor"), sys.version, processor, shutil.which("g++")]
    return home() / f"memfit-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


def _onednn() -> tuple[Path, Path] | None:
    """Return the folders of oneDNN's library and headers, from its wheels; None without them."""
    places = []
    for package, file in (("onednn-cpu-gomp", "libmkldnn.so"), ("onednn-devel-cpu-gomp", "mkldnn.h")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            listed = importlib.metadata.files(package) or []
            places += [Path(str(f.locate())).resolve().parent for f in listed if f.name == file][:1]
    return (places[0], places[1]) if len(places) == 2 else None


def _seed_onednn() -> None:
    """Link oneDNN to where Jittor would download it to."""
    folders, target = _onednn(), home() / ".cache" / "jittor" / "mkl" / _ONEDNN_FOLDER
    if folders is None or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return
    target.mkdir(parents=True, exist_ok=True)
    for name, place in zip(("lib", "include"), folders, strict=True):
        link = target / name
        if not link.exists() or link.resolve() != place:
            link.unlink(missing_ok=True)
            link.symlink_to(place)


def _nvcc() -> str | None:
    """Return the CUDA compiler that Jittor would use."""
    places = ("/usr/local/cuda/bin/nvcc", "/usr/bin/nvcc", "/opt/cuda/bin/nvcc")
    return shutil.which("nvcc") or next((place for place in places if os.access(place, os.X_OK)), None)


def _can_use_cuda() -> bool:
    """Return whether the CUDA runtime is where Jittor looks for it, and a driver is installed."""
    nvcc = _nvcc()
    if nvcc is None or ctypes.util.find_library("cuda") is None:
        return False
    lib = Path("/usr/lib/x86_64-linux-gnu" if nvcc == "/usr/bin/nvcc" else Path(nvcc).parent.parent / "lib64")
    return (lib / "libcudart.so").exists()


def prepare(progress: Progress | None = None) -> None:
    """Compile Jittor if necessary, in a process of its own; the first time takes minutes.

    Args:
        progress: Called with the progress; None to print it on standard error.

    Raises:
        MissingExtraError: Jittor is not installed.
        UsageError: A requirement is missing, or compilation failed.
    """
    if importlib.util.find_spec("jittor") is None:
        raise MissingExtraError("memfit.jittor", EXTRA, "jittor")
    missing = [check for check in checks() if check.needed and not check.ok]
    if missing:
        raise UsageError("Jittor can't be used: " + "; ".join(f"{c.name}: {c.found}. {c.remedy}" for c in missing))
    if _marker().exists():
        return
    home().mkdir(parents=True, exist_ok=True)

    def on_stderr(what: str, done: int, total: int | None) -> None:
        end = "\n" if done == total else ""
        print(f"\rmemfit: compiling Jittor, once: {what} {done}/{total} ", end=end, file=sys.stderr, flush=True)

    command = [sys.executable, "-u", "-c", _IMPORT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        output = b""
        assert child.stdout is not None  # it is a pipe
        while part := os.read(child.stdout.fileno(), 65536):
            output = (output + part)[-65536:]
            progress_lines = _PROGRESS.findall(output)
            if progress_lines:
                name, done, total = progress_lines[-1]
                (progress or on_stderr)(f"compile {name.decode()[:_LONGEST_NAME]}", int(done), int(total))
    if child.returncode:
        text = output.decode(errors="replace").replace("\r", "\n")
        raise UsageError(f"Jittor could not be compiled (exit status {child.returncode}): {text[-2000:]}")
    _marker().touch()


def load() -> ModuleType:
    """Import Jittor, and compile it first if necessary.

    Raises:
        MissingExtraError: Jittor is not installed.
        UsageError: A requirement is missing, or compilation failed.
    """
    if "jittor" in sys.modules:
        return _set_up(sys.modules["jittor"])
    prepare()
    return _import_jittor()


def _import_jittor(silent: bool = True) -> ModuleType:
    """Import Jittor, in the surroundings that it needs."""
    _seed_onednn()
    settings = {
        "JITTOR_HOME": str(home()),
        "HOME": str(home()),
        "FIX_TORCH_ERROR": "0",
        "cache_name": "memfit",
        "log_silent": str(int(silent)),
        **({} if "nvcc_path" in os.environ or _can_use_cuda() else {"nvcc_path": ""}),
    }
    before = {name: os.environ.get(name) for name in settings}
    node, full = platform.node, platform.platform
    os.environ.update(settings)
    platform.node, platform.platform = (lambda: "memfit"), (lambda *_, **__: "memfit")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jittor = importlib.import_module("jittor")
    finally:
        platform.node, platform.platform = node, full
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return _set_up(jittor)


def _set_up(jittor: ModuleType) -> ModuleType:
    """Let an imported Jittor report errors, and divide exactly."""
    jittor.flags.log_silent = 0  # or errors would be lost too: `loss.backward()` did nothing, and said nothing
    jittor.LOG.log_silent = 0
    approximates = jittor.flags.cc_type == "g++" and platform.machine() == "x86_64"
    if approximates and _EXACT_DIVISION not in jittor.flags.cc_flags:
        jittor.flags.cc_flags += _EXACT_DIVISION
    return jittor
