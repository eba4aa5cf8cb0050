"""`memfit fleet`: its numbers of ranks, its document, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.cli.options import rank_numbers
from memfit.errors import UsageError
from memfit.fake_gpu import shim
from tests.cli.test_cli import Shell, memfit  # noqa: F401  # a fixture

MINE = "tests/workloads.py:lean"


def test_numbers_of_ranks_are_ranges_and_lists() -> None:
    assert rank_numbers("1-4") == [1, 2, 3, 4]
    assert rank_numbers("8, 1,2-3") == [1, 2, 3, 8]


@pytest.mark.parametrize("text", ["", "0-4", "4-1", "a", "1-", "1,,2", "1-9999999"])
def test_other_texts_name_no_ranks(text: str) -> None:
    with pytest.raises(UsageError, match="--ranks"):
        rank_numbers(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "10", "--ranks", "none"], "--ranks none"),
        (["--steps", "10", "--within", "soon"], "--within='soon'"),
        (["--steps", "10", "--device", "a1000"], "not in the catalogue"),
        (["--steps", "10", "--prices", "nowhere.toml"], "nowhere.toml"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_bad_input_ends_with_status_2(memfit: Shell, options: list[str], said: str) -> None:  # noqa: F811
    status, _, errors = memfit("fleet", MINE, *options)
    assert status == 2 and said in errors


def test_sharding_needs_several_ranks(memfit: Shell) -> None:  # noqa: F811
    status, _, errors = memfit("plan", MINE, "--budget", "1GiB", "--sharding", "zero3")
    assert status == 2 and "--world-size" in errors


@pytest.mark.ci
@pytest.mark.skipif(shim.why_not() is not None, reason="fake CUDA can't be had here")
def test_the_document_has_the_answers_and_the_page_is_written(tmp_path: Path) -> None:
    page = tmp_path / "fleet.html"
    command = ["fleet", MINE, "--steps", "10", "--device", "l4", "--ranks", "1,2", "--html", str(page), "--json"]
    run = subprocess.run([sys.executable, "-m", "memfit", *command], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["schema"] == "memfit.fleet/1"
    assert found["answers"]["fewest"]["device"] == "l4"
    assert found["answers"]["front"][0]["ranks"] == 1
    assert "memfit fleet" in page.read_text()
