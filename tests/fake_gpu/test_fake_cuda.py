"""Steps captured on fake CUDA tensors, in one process for all of these tests (`scenarios.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

import memfit
from memfit import hardware
from tests.fake_gpu.scenarios import IN_CI, SCENARIOS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(hardware.shim.has_gpu(), reason="a GPU is here, on which nothing is faked"),
]
ROOTS = (Path(memfit.__file__).parent.parent, Path(__file__).parents[2])


@pytest.fixture(scope="module")
def wrong(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return what went wrong with each scenario that is asked for; "" for nothing."""
    assert hardware.shim.why_not() is None
    mine = [item for item in request.session.items if item.path == request.path]
    asked = {item.get_closest_marker("ci") is not None for item in mine}
    left_out = sorted(name for name in SCENARIOS if (name in IN_CI) not in asked)
    with tempfile.TemporaryDirectory() as folder:
        reply = Path(folder, "reply")
        done = subprocess.run(
            hardware.shim.command("tests.fake_gpu.scenarios", str(reply), *left_out),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, ROOTS)), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert reply.exists(), done.stderr[-4000:]
        found: dict[str, str] = json.loads(reply.read_text())
        return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ci if name in IN_CI else ()) for name in SCENARIOS]
)
def test_a_step_is_captured_as_on_a_gpu(name: str, wrong: dict[str, str]) -> None:
    assert not wrong[name], wrong[name]
