"""The first commands of somebody who has installed the wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Block, blocks
from tests.wheel.conftest import ROOT, Run, variables

FIRST = (ROOT / "README.md", DOCS / "index.md", DOCS / "quickstart.md", DOCS / "guides" / "trainers.md")

MINE = """
import torch
import torch.nn.functional as F
from torch import nn

import memfit


def workload():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    return memfit.Workload(
        model=model,
        batch={"x": torch.randn(512, 64)},
        loss_fn=lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=torch.optim.AdamW(model.parameters()),
        name="mine",
    )


if __name__ == "__main__":
    mine = workload()
    for _ in range(3):
        loss = mine.loss_fn(mine.model, mine.batch)
        loss.backward()
        mine.optimizer.step()
        mine.optimizer.zero_grad()
    print("loss", loss.item())
"""


def test_both_hold_every_file_of_the_package(distributions: Path) -> None:
    (sdist,), (wheel,) = distributions.glob("*.tar.gz"), distributions.glob("*.whl")
    tracked = subprocess.run(["git", "ls-files", "src/memfit"], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = {name.removeprefix("src/") for name in tracked.stdout.split()}
    assert any(name.endswith(".toml") for name in wanted)
    with zipfile.ZipFile(wheel) as archive:
        assert wanted <= set(archive.namelist())
    with tarfile.open(sdist) as archive:
        names = {name.partition("/src/")[2] for name in archive.getnames()}
        assert wanted <= names


def test_it_is_the_wheel_that_runs(environment: Path, tmp_path: Path) -> None:
    line = [environment, "-c", "import memfit; print(memfit.__file__)"]
    found = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(environment.parent.parent)


def test_devices(memfit: Run) -> None:
    assert "a100-80gb" in memfit("devices").stdout


def test_from_an_estimate_to_a_report(memfit: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    plain = json.loads(memfit("estimate", "mine:workload", "--json").stdout)
    memfit("plan", "mine.py:workload", "--budget", "0.7x", "-o", "plan.json", "--points", "2")
    memfit("verify", "mine.py:workload", "--plan", "plan.json")
    memfit("train", "mine.py:workload", "--plan", "plan.json", "--steps", "3", "--out", "runs/mine")
    memfit("report", "runs/mine")
    assert (tmp_path / "runs/mine/report.html").stat().st_size < 1_000_000
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["predicted"]["peak_bytes"] < plain["peak_bytes"]
    assert "saw a step" in memfit("run", "--budget", "0.8x", "mine.py").stderr


def test_an_estimate_for_a_card_runs_its_kernels(memfit: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    found = json.loads(memfit("estimate", "mine:workload", "--device", "a100-80gb", "--json").stdout)
    assert found["peak_reserved_bytes"] > found["peak_bytes"] > 0
    degraded = any("fake CUDA tensors are not available" in note for note in found["notes"])
    assert degraded == (shutil.which("g++") is None)


def test_the_demo_ends_with_its_report(memfit: Run, tmp_path: Path) -> None:
    shown = memfit("demo", "--steps", "2").stdout
    assert "Peak, measured" in shown and (tmp_path / "runs/demo/report.html").exists()


def test_what_an_extra_brings_is_named(environment: Path, tmp_path: Path) -> None:
    line = [environment, "-c", "from memfit.integrations.accelerate import FittedLoop; print(FittedLoop.__name__)"]
    without = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert without.returncode == 1 and "pip install 'memfit[accelerate]'" in without.stderr


def blocks_of_the_first_pages() -> Iterator[object]:
    """Yield the blocks of the pages that one reads first, and of the trainers', once where several have the same."""
    seen = set()
    for page in FIRST:
        for block in blocks(page):
            if block.language in ("python", "sh") and not block.file and block.code not in seen:
                seen.add(block.code)
                yield pytest.param(page, block, id=f"{page.stem}: {block.code.strip().splitlines()[0][:60]}")


@pytest.mark.parametrize(("page", "block"), list(blocks_of_the_first_pages()))
def test_a_block_runs_by_itself_in_an_empty_folder(page: Path, block: Block, complete: Path, tmp_path: Path) -> None:
    for shown in (shown for shown in blocks(page) if shown.file and shown.language != "text"):
        (tmp_path / shown.file).write_text(shown.code)
    command = ["python", "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    line, environment = [*command, block.code], variables(complete)
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
