"""Each example of docs/guides/jittor.md runs by itself, as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_examples_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "guides" / "jittor.md").read_text()
    mine, *examples = re.findall(r"^```python.*?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    printed = []
    for number, example in enumerate(examples):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "mine.py").write_text(mine)
        command = [sys.executable, "-c", example]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    planned, by_hand = printed
    assert "40.0 MiB" in planned and "exceed limit" in by_hand
    assert (tmp_path / "0" / "plan.json").exists() and (tmp_path / "0" / "state.safetensors").exists()
