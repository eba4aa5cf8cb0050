"""Each example of docs/guides/jittor.md runs by itself, as it is written."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import DOCS, blocks, run_python


def test_the_examples_run(tmp_path: Path) -> None:
    mine, *examples = blocks(DOCS / "guides" / "jittor.md", "python")
    printed = []
    for number, example in enumerate(examples):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "mine.py").write_text(mine.code)
        printed.append(run_python(example.code, folder))
    planned, by_hand = printed
    assert "40.0 MiB" in planned and "exceed limit" in by_hand
    assert (tmp_path / "0" / "plan.json").exists() and (tmp_path / "0" / "state.safetensors").exists()
