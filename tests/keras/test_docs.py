"""The examples of the guide to Keras run as they are written."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import DOCS, blocks, run_python


def test_the_examples_run(tmp_path: Path) -> None:
    program = "\n".join(block.code for block in blocks(DOCS / "guides" / "keras.md", "python"))
    plain, planned = run_python(program, tmp_path).split()
    print(f"{int(plain) / 2**20:.1f} MiB plain, {int(planned) / 2**20:.1f} MiB planned")
    assert int(planned) <= 80 * 2**20 < int(plain)
