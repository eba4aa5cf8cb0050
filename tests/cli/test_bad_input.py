"""Bad input, each with the message that it gets: none is a traceback, and none loses a file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Shell

MINE = """
import torch
from torch import nn

import memfit


def tiny(**more):
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    arguments = {"model": model, "batch": torch.randn(4, 8), "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    return memfit.Workload(**({"loss_fn": lambda model, batch: model(batch).square().mean()} | arguments | more))

def wrong_keyword(): return tiny(loss=1)
def missing_key(): return {}["missing"]
def wrong_key_in_loss(): return tiny(batch={"x": torch.randn(4, 8)}, loss_fn=lambda model, batch: model(batch["z"]))
def loss_of_the_wrong_shape(): return tiny(loss_fn=lambda model, batch: model(batch))
def no_loss(): return tiny(loss_fn=lambda model, batch: None)
def no_samples(): return tiny(batch={})
def original_model(other=nn.Linear(8, 8)): return tiny(loss_fn=lambda _, batch: other(batch).mean())
def foreign_optimizer(): return tiny(optimizer=torch.optim.LBFGS(nn.Linear(2, 2).parameters()))
def bad_scaling(): return tiny(loss_scaling=memfit.LossScaling(growth_factor=0.5))
def unknown_loop(): return tiny(loop=memfit.Loop(zero_grad="never"))
"""
SYNTAX = "def workload(:\n"
FILES = {
    "mine.py": MINE,
    "syntax.py": SYNTAX,
    "raises.py": "1 / 0\n",
    "kept.json": "{}\n",
    "script.py": "print('began')\n",
}
BUDGET = ("--budget", "1GiB", "--points", "1")

TABLE: list[tuple[str, int, str]] = [
    # what names a workload
    ("estimate no.where:workload", 2, "there is no module 'no.where' in"),
    ("estimate mine", 2, "the workload 'mine' can't be found: write file.py:function"),
    ("estimate mine:", 2, "the workload 'mine:' can't be found"),
    ("estimate mine:huge", 2, "mine has no function 'huge'; it has bad_scaling"),
    ("estimate mine:torch", 2, "mine has no function 'torch'"),
    ("estimate syntax.py:workload", 2, "syntax.py raised SyntaxError"),
    ("estimate raises:workload", 2, "raises raised ZeroDivisionError: division by zero raises.py:1 in <module>"),
    ("estimate tests.workloads:a_number", 2, "returned 3, not a memfit.Workload"),
    ("estimate tests.workloads:needs_an_extra", 2, "pip install 'memfit[brain]'"),
    # what a workload is
    ("estimate mine:wrong_keyword", 2, "unexpected keyword argument 'loss' mine.py:13 in wrong_keyword"),
    ("estimate mine:missing_key", 2, "raised KeyError: 'missing' mine.py:14 in missing_key"),
    ("estimate mine:wrong_key_in_loss", 2, "KeyError: 'z'"),
    ("estimate mine:loss_of_the_wrong_shape", 2, "loss"),
    ("estimate mine:no_loss", 2, "loss"),
    ("estimate mine:no_samples", 2, "Workload.batch has no samples"),
    ("estimate mine:original_model", 2, "a loss that depends on no parameter of Workload.optimizer"),
    ("estimate mine:foreign_optimizer", 2, "Give an optimizer without a closure"),
    ("estimate mine:bad_scaling", 2, "LossScaling.growth_factor=0.5 is out of its range"),
    ("estimate mine:unknown_loop", 2, "Loop.zero_grad='never' is unknown: use one of 'before-forward'"),
    # options
    ("estimate mine:tiny --precision fp8", 2, "fp8"),
    ("estimate mine:tiny --microbatch-size 0", 2, "--microbatch-size"),
    ("estimate mine:tiny --sharding zero3", 2, "--sharding zero3 needs several ranks: give --world-size"),
    ("estimate mine:tiny --parallel dp=2", 2, "give some of tp=N (tensor), cp=N (context) and pp=N"),
    ("estimate mine:tiny --parallel pp=9", 2, "fewer than stages"),
    ("estimate mine:tiny --snapshot s.pickle", 2, "--snapshot shows the allocator of a GPU"),
    ("devices rtx-9000", 2, "rtx-5090"),
    ("tools probe-range mine:tiny --batches 0", 2, "--batches"),
    ("unheard-of", 2, "unheard-of"),
    # ranks and cards
    ("plan mine:tiny --budget 1GiB --sharding zero3", 2, "--world-size"),
    ("fleet mine:tiny --steps 10 --ranks none", 2, "--ranks none can't be read: give a range (1-64)"),
    ("fleet mine:tiny --steps 10 --within soon", 2, "--within='soon'"),
    ("fleet mine:tiny --steps 10 --device a1000", 2, "not in the catalogue"),
    ("fleet mine:tiny --steps 10 --prices nowhere.toml", 2, "nowhere.toml"),
    ("fleet mine:tiny --steps 0", 2, "--steps"),
    # budgets
    ("plan mine:tiny --budget 0", 2, "--budget 0 is 0 bytes"),
    ("plan mine:tiny --budget 150%", 2, "--budget 150% is more than the device has: a share is at most 100%"),
    ("plan mine:tiny --budget 0x", 2, "--budget 0x is 0 bytes"),
    ("plan mine:tiny --budget 0.5y", 2, "of the plain step's peak ('0.5x')"),
    ("plan mine:tiny --budget 1KiB --points 1", 3, "of 1 KiB. Smallest budget"),
    ("plan mine:tiny --budget 1GiB --numerics exact --precision bf16-mixed", 2, "allow --numerics reduced"),
    ("plan mine:tiny --budget 1GiB --precision auto --precision tf32", 2, "out --precision tf32, or --precision auto"),
    # files
    ("verify mine:tiny --plan kept.json", 2, "kept.json"),
    (
        "verify mine:tiny --plan plan.json",
        2,
        "modules, parameters, batch shapes or optimizer differ. Make a plan for this workload",
    ),
    ("train mine:tiny --plan plan.json --out run", 2, "give one of --steps and --epochs"),
    ("train mine:tiny --plan plan.json --out run --steps 2 --limit 90%", 2, "--limit 90% can't be read"),
    ("train tests.workloads:lean --plan plan.json --out mine.py --steps 2", 2, "mine.py"),
    ("train tests.workloads:lean --plan plan.json --out mine.py/run --steps 2", 2, "mine.py"),
    ("train tests.workloads:lean --plan plan.json --out run --steps 2 --adaptive --no-recover", 2, "--no-recover"),
    ("train tests.workloads:lean --plan plan.json --out run --steps 2 --epochs 1", 2, "--epochs"),
    ("train tests.workloads:other --plan plan.json --out run --steps 2", 2, "fingerprint"),
    ("report nowhere", 2, "nowhere"),
    # scripts
    ("run script.py", 2, "--budget"),
    ("run --budget 1GiB --numerics changed script.py", 2, "'exact', 'reordered'"),
    ("run --budget 1GiB --log mine script.py", 2, "the log 'mine' can't be found: write file.py:function"),
    ("run --budget 1GiB --log nowhere.py:log script.py", 2, "the log's file 'nowhere.py' does not exist"),
    ("run --budget 1GiB --log mine.py:lod script.py", 2, "mine.py has no function 'lod'; it has bad_scaling"),
    ("run --budget 1GiB --log nowhere:log script.py", 2, "there is no module 'nowhere'"),
]


@pytest.fixture
def folder(tmp_path: Path, plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    shutil.copy(plan_file, tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine", "syntax", "raises"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize(("line", "status", "words"), TABLE, ids=[line for line, _, _ in TABLE])
def test_bad_input_is_named_and_costs_nothing(
    memfit: Shell,
    folder: Path,
    line: str,
    status: int,
    words: str,
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    found, output, errors = memfit(*line.split())
    assert found == status and "began" not in output, errors
    assert words in " ".join(errors.split()) or words in errors.replace("\n", ""), errors  # boxes break words
    assert "Traceback" not in errors
    after = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert after == before and not (folder / "run").exists()
