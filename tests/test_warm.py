"""Forks of a warm process end, print and start as processes of their own do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memfit import hardware
from tests import warm
from tests.fixed_costs import DISPATCH_SECONDS
from tests.quick_plans import TIME_LIMIT_SECONDS

PROGRAMS = {
    "ends": "import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(7)",
    "says why it ends": "raise SystemExit('no such dataset')",
    "raises": "def f():\n    return {}['missing']\nf()",
    "runs at its end": "import atexit\natexit.register(print, 'last')\nprint('first', end=' ')",
    "shows where it is": "import os, sys\nprint(os.getcwd(), sys.argv, os.environ['GIVEN'], __name__)",
    "draws": "import torch\ntorch.manual_seed(3)\nprint(torch.rand(2).tolist())",
    "warns": "import warnings\nwarnings.warn('of mine')",
    "is stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fork_does_what_a_process_of_its_own_does(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "GIVEN": "é", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    line = ["-c", PROGRAMS[name], "one", "two"]
    cold = subprocess.run([sys.executable, *line], cwd=tmp_path, env=environment, capture_output=True, text=True)
    forked = warm.run(line, cwd=tmp_path, env=environment)
    assert (forked.returncode, forked.stdout, forked.stderr) == (cold.returncode, cold.stdout, cold.stderr)
    assert (cold.returncode == -signal.SIGTERM) == (name == "is stopped")


def test_one_fork_leaves_nothing_to_the_next() -> None:
    program = "import sys, torch\nprint(hasattr(torch, 'mark'), torch.get_default_dtype())\ntorch.mark = 1\n"
    program += "torch.set_default_dtype(torch.float64)"
    assert [warm.run(["-c", program]).stdout for _ in range(2)] == ["False torch.float32\n"] * 2


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_forks_take_what_tests_take_in_the_place_of_clocks(kind: str) -> None:
    if kind == "cuda" and (hardware.shim.why_not() is not None or hardware.shim.has_gpu()):
        pytest.skip("fake CUDA tensors can't be had here")
    program = "import inspect\nfrom memfit.cost import cpu_costs\nfrom memfit import plan\n"
    program += "limit_seconds = inspect.unwrap(plan).__kwdefaults__['time_limit_seconds']\n"
    program += "print(cpu_costs.calibrate([]).dispatch_seconds, limit_seconds)"
    found = subprocess.run(warm.command("-c", program, kind=kind), capture_output=True, text=True, check=True).stdout
    assert found == f"{DISPATCH_SECONDS} {TIME_LIMIT_SECONDS}\n"


@pytest.mark.skipif(hardware.shim.why_not() is not None, reason="fake CUDA tensors can't be had here")
@pytest.mark.skipif(hardware.shim.has_gpu(), reason="a GPU is here, on which nothing is faked")
def test_fake_cuda_is_in_forks_of_its_own_server_only() -> None:
    program = "import torch\nfrom memfit.hardware import shim\nprint(shim.is_loaded(), torch.cuda.is_available())"
    lines = [warm.command("-c", program, kind=kind) for kind in ("cpu", "cuda")]
    found = [subprocess.run(line, capture_output=True, text=True, check=True).stdout for line in lines]
    assert found[0] == "False False\n" and found[1].startswith("True ")


def test_a_fork_ends_with_its_client() -> None:
    """A launcher that kills a rank kills what it started: the fork would wait for its peers for ever."""
    program = "import os, sys, time\nprint(os.getpid(), flush=True)\ntime.sleep(300)"
    with subprocess.Popen(warm.command("-c", program), stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        fork = int(client.stdout.readline())
        client.kill()
    ends = time.monotonic() + 30
    while Path(f"/proc/{fork}").exists() and time.monotonic() < ends:
        time.sleep(0.02)
    assert not Path(f"/proc/{fork}").exists()
