"""Standard output with --json is one document, and the user's own messages are all there, elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import memfit
from tests.cli.conftest import Shell, process
from tests.workloads import lean

NOISY = """
import atexit, ctypes, dataclasses, logging, os, sys, warnings
from tests.workloads import lean

print("on import")
atexit.register(lambda: print("at exit"))
logging.basicConfig(stream=sys.stdout)

def workload():
    found = lean()
    print("in python", flush=True)
    print("without an end", end="")
    os.system("echo in a child")
    ctypes.CDLL(None).puts(b"in C")
    os.write(1, b"by descriptor\\n")
    sys.__stdout__.write("by the first stream\\n")
    logging.getLogger().warning("a log")
    warnings.warn("a warning of mine")
    os.write(2, b"[W CPUAllocator.cpp:1] of mine\\n")

    def loss_fn(model, batch):
        print("a step")
        return found.loss_fn(model, batch)

    return dataclasses.replace(found, loss_fn=loss_fn)

def broken():
    print("before it broke")
    raise ValueError("no such dataset")
"""
SAID = [
    "on import",
    "in python",
    "without an end",
    "in a child",
    "in C",
    "by descriptor",
    "by the first stream",
    "a log",
    "a warning of mine",
    "[W CPUAllocator.cpp:1] of mine",
    "a step",
    "at exit",
]


@pytest.fixture
def noisy(tmp_path: Path) -> str:
    """The name of a file of workloads that print in every way."""
    (tmp_path / "noisy.py").write_text(NOISY)
    return str(tmp_path / "noisy.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return process(sys.executable, "-m", "memfit", *arguments)


@pytest.mark.ci
@pytest.mark.parametrize("device", ["cpu", pytest.param("h100", marks=pytest.mark.slow)])
def test_whatever_the_users_code_prints_the_document_is_alone(noisy: str, device: str) -> None:
    """A GPU's is predicted in a process that takes this one's place."""
    done = run("estimate", f"{noisy}:workload", "--device", device, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_bytes"] > 0
    assert [text for text in SAID if text not in done.stderr] == []


def test_so_is_the_document_of_an_error(noisy: str) -> None:
    done = run("estimate", f"{noisy}:broken", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["type"] == "WorkloadError"
    assert "before it broke" in done.stderr and "at exit" in done.stderr


def test_without_json_nothing_is_moved(noisy: str) -> None:
    done = run("estimate", f"{noisy}:broken")
    assert "before it broke" in done.stdout and "at exit" in done.stdout
    assert "no such dataset" in done.stderr


@pytest.mark.ci
@pytest.mark.slow
def test_what_pytorch_says_of_memory_it_measured_in_part_is_kept_out(noisy: str, tmp_path: Path) -> None:
    plan = memfit.plan(lean(), budget="1GiB", precisions=["32-true"], points=1).save(tmp_path / "plan")
    folder = str(tmp_path / "run")
    done = run("train", f"{noisy}:workload", "--plan", str(plan), "--out", folder, "--steps", "3", "--json")
    assert json.loads(done.stdout)["measured_peak_bytes"] > 0
    assert "Memory block of unknown size" not in done.stderr
    assert [text for text in SAID if text not in done.stderr] == []


def test_standard_output_is_put_back(tmp_path: Path, memfit: Shell, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os\ndef workload():\n    print('noise')\n    os.write(1, b'more\\n')\n    print('noise')\n"
    (tmp_path / "noise.py").write_text(code)
    for _ in range(2):
        status, shown, errors = memfit("estimate", f"{tmp_path}/noise.py:workload", "--json")
        assert status == 2 and json.loads(shown)["error"]["type"] == "WorkloadError"
        assert "noise\nmore\nnoise\n" in errors
    print("as always")
    assert capfd.readouterr().out == "as always\n"


# Completion, and help: PyTorch would take seconds to import

_WITHOUT_TORCH = """
import sys
sys.argv[0] = "memfit"
from memfit.cli import main
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def without_torch(*arguments: str, **environment: str) -> str:
    """Return what `memfit` prints, which may import no PyTorch."""
    done = process(sys.executable, "-c", _WITHOUT_TORCH, *arguments, **environment)
    assert done.stderr.strip() == "False", done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("memfit tools probe-r", ["probe-range"]),
        ("memfit verify --pl", ["--plan"]),
        ("memfit estimate --precision b", ["bf16-mixed", "bf16-true"]),
    ],
)
def test_words_are_completed_without_importing_torch(words: str, completions: list[str]) -> None:
    answer = without_torch(_MEMFIT_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1))
    assert answer.split() == completions


def test_completion_is_installed_for_the_shell_at_hand(tmp_path: Path) -> None:
    """As bash finds it: the command runs in a shell, whose settings are in a folder of their own."""
    code = f"{sys.executable} -c '{_WITHOUT_TORCH}' --install-completion; true"
    done = process("bash", "-c", code, HOME=str(tmp_path))
    assert "bash completion installed" in done.stdout, done.stderr
    assert done.stderr.strip() == "False"
    script = (tmp_path / ".bash_completions" / "memfit.sh").read_text()
    assert "_MEMFIT_COMPLETE=complete_bash" in script


def test_help_imports_no_torch() -> None:
    assert "estimate" in without_torch("--help")
    assert "--sharding" in without_torch("estimate", "--help", COLUMNS="120")
