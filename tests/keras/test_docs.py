"""The example of the guide to Keras runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import DOCS, blocks, run_python


def test_the_example_runs(tmp_path: Path) -> None:
    (block,) = blocks(DOCS / "guides" / "keras.md", "python")
    ((plain, planned),) = re.findall(r"^(\d+) (\d+)$", run_python(block.code, tmp_path), flags=re.MULTILINE)
    print(f"{int(plain) / 2**20:.1f} MiB plain, {int(planned) / 2**20:.1f} MiB planned")
    assert int(planned) <= 80 * 2**20 < int(plain)
