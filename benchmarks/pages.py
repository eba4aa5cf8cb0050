"""Pages and charts of the docs that are made whole from a result file, and the command that makes or checks them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tables import results
from memfit.ir import write_atomic

DOCS = Path(__file__).parents[1] / "docs"


def stale(made: dict[Path, str]) -> list[str]:
    """Return the names of files that are not as they would be made."""
    return [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]


def main(module: str, benchmark: str, files: Callable[[dict[str, Any]], dict[Path, str]], doc: str | None) -> None:
    """Write the files of a benchmark's newest result or, with `--check`, end with an error where they differ.

    Args:
        module: What the command is, after `python -m`.
        files: Returns the files of a result.
        doc: For `--help`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a file has other figures")
    made = files(results(benchmark))
    if parser.parse_args().check:
        found = stale(made)
        sys.exit(f"other than benchmarks/results: {', '.join(found)}; run {module}" if found else 0)
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
