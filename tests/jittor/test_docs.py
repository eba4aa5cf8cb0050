"""The examples of docs/guides/jittor.md run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_examples_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "guides" / "jittor.md").read_text()
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "40.0 MiB" in done.stdout and "would take" in done.stdout
    assert (tmp_path / "plan.json").exists() and (tmp_path / "state.safetensors").exists()
