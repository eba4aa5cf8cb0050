"""The shim that makes fake CUDA tensors work: building, keeping and loading it."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import memfit
from memfit import hardware
from memfit.pipeline import estimate
from tests.models import transformer

pytestmark = pytest.mark.skipif(hardware.shim.has_gpu(), reason="a GPU is here, which needs no shim")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes an empty file, and a line for each time that it is called."""
    calls = tmp_path / "calls"
    script = tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("MEMFIT_CXX", str(script))
    calls.touch()
    return calls


def test_it_is_built_once(own_cache: Path, counting: Path) -> None:
    built = hardware.shim.library()
    assert built.parent == own_cache and hardware.shim.library() == built
    assert len(counting.read_text().splitlines()) == 1
    assert [path.name for path in own_cache.iterdir()] == [built.name]


def test_another_torch_or_source_has_another(
    own_cache: Path, counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hardware.shim.library()
    other = tmp_path / "torch"
    other.mkdir()
    (other / "version.py").write_text("__version__ = '2.99'")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(other / "__init__.py")))
        second = hardware.shim.library()
        (other / "version.py").write_text("__version__ = '2.99.1'")
        third = hardware.shim.library()
    source = tmp_path / "shim.cpp"
    source.write_text("// another")
    assert len({first, second, third, hardware.shim.library(source)}) == 4
    assert len(counting.read_text().splitlines()) == 4


def test_no_compiler_is_said(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CXX", "no-such-compiler")
    named = "no C++ compiler 'no-such-compiler' is on the PATH: install it, or name another in MEMFIT_CXX"
    assert hardware.shim.why_not() == named
    assert not own_cache.exists()


def test_a_compiler_that_fails_is_quoted(own_cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("#error nothing works")
    with pytest.raises(OSError, match=r"(?s)could not build broken\.cpp.*nothing works"):
        hardware.shim.library(source)
    assert list(own_cache.iterdir()) == []


def test_without_a_compiler_a_gpu_is_predicted_from_the_cpus_program(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_CXX", "no-such-compiler")
    found = estimate(transformer(), device="a100-80gb")
    assert any("no C++ compiler 'no-such-compiler'" in note and "error bar is wide" in note for note in found.notes)
    assert found.peak_reserved_bytes is not None
    assert found.peak_upper_bytes == pytest.approx(1.25 * found.peak_reserved_bytes, rel=1e-6)
    assert not own_cache.exists()


def test_it_is_refused_after_torch() -> None:
    with pytest.raises(RuntimeError, match="torch is imported already"):
        hardware.shim.load()
    assert not hardware.shim.is_loaded()


def test_children_of_a_process_with_fake_cuda_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_FAKE_CUDA", str(os.getpid()))
    assert hardware.shim.is_loaded()
    monkeypatch.setenv("MEMFIT_FAKE_CUDA", str(os.getppid()))
    assert not hardware.shim.is_loaded()


def test_this_process_stays_honest() -> None:
    assert hardware.shim.why_not() is None
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0


def test_a_module_runs_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text(
        "import json, sys\n"
        "before = 'torch' in sys.modules\n"
        "from memfit.hardware import shim\n"
        "print(json.dumps([__name__, sys.argv[1:], before, shim.is_loaded()]))\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(memfit.__file__).parent.parent)])
    done = subprocess.run(
        hardware.shim.command("asked", "one", "two"),
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout) == ["__main__", ["one", "two"], False, True]
    assert sys.argv[1:] != ["one", "two"]
