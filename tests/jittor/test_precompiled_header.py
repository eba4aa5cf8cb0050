"""The header that `make test-jittor` has g++ parse once: without it the suite takes twice as long."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import jittor as jt
import pytest


def test_kernels_are_compiled_with_it() -> None:
    if "precompiled.h" not in jt.flags.cc_flags:
        pytest.skip("Jittor's flags include no header: make test-jittor")
    (jt.ones(2) * 3 + 1).sync()
    key = max(Path(jt.flags.cache_path, "jit").glob("*_op.so.key"), key=lambda path: path.stat().st_mtime)
    command = shlex.split(key.read_text().splitlines()[0])
    source = next(i for i, part in enumerate(command) if part.endswith("_op.cc"))
    options = command[source + 1 : command.index("-o")]
    seen = subprocess.run(
        ["g++", "-H", "-g", "-fsyntax-only", command[source], *options], capture_output=True, text=True, check=True
    )
    assert re.search(r"^! .*precompiled\.h\.gch", seen.stderr, re.MULTILINE), seen.stderr
