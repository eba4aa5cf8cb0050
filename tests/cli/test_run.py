"""Scripts that are run in a budget as they are: a process each, as their users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
"""Flat, with an evaluation, a schedule, accumulation, checkpoints and resume: as nanoGPT's train.py."""

import math
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

import helper  # beside the script

out, steps, resume = "out", 4, False
for argument in sys.argv[1:]:
    name, value = argument[2:].split("=")
    globals()[name] = type(globals()[name])(eval(value)) if not isinstance(globals()[name], str) else value
os.makedirs(out, exist_ok=True)
torch.manual_seed(1337)
model = helper.model()
decay = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
start, path = 0, os.path.join(out, "ckpt.pt")
if resume:
    kept = torch.load(path, weights_only=False)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    start = kept["step"]


def get_batch():
    rows = torch.randint(1000, (16,))
    data = torch.arange(2000)
    x = torch.stack([data[i : i + 64] % 97 for i in rows])
    y = torch.stack([data[i + 1 : i + 65] % 97 for i in rows])
    return x, y


@torch.no_grad()
def evaluate():
    model.eval()
    state = torch.get_rng_state()
    loss = sum(model(*get_batch())[1].item() for _ in range(2))
    torch.set_rng_state(state)
    model.train()
    return loss


x, y = get_batch()
for step in range(start, steps):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / 10))
    if step == 2:
        random = kept["random"] if resume else torch.get_rng_state()
        print("evaluated", repr(evaluate()))
        if not resume:
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "random": random}
            torch.save(kept, path)
        torch.set_rng_state(random)
        x, y = get_batch()
    for _ in range(2):
        logits, loss = model(x, y)
        loss = loss / 2
        x, y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print("step", step, repr(loss.item() * 2))
'''
HELPER = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(97, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64), nn.Dropout(0.1))
            for _ in range(4)
        )
        self.head = nn.Linear(64, 97)

    def forward(self, x, y):
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def model():
    return Model()
"""


def started(folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, *line]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text(HELPER)
    return folder


def memfit(folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    return started(folder, "-m", "memfit", "run", *line)


@pytest.mark.slow
def test_a_script_runs_in_half_of_its_plain_peak_with_the_same_losses_and_resumes(folder: Path) -> None:
    plain = started(folder, "train.py", "--out=plain")
    fitted = memfit(folder, "--budget", "0.5x", "train.py", "--out=fitted")
    assert fitted.returncode == plain.returncode == 0, fitted.stderr
    assert fitted.stdout == plain.stdout and "step 3" in plain.stdout
    assert "2 calls of Model, 2 backward passes, 1 update by AdamW, gradients clipped" in fitted.stderr
    assert "0.5x of the plain step's peak" in fitted.stderr and "fits" in fitted.stderr
    again = memfit(folder, "--budget", "0.5x", "train.py", "--out=fitted", "--resume=True")
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-2:] == plain.stdout.splitlines()[-2:]


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("import sys; sys.exit(7)", 7, []),
        ("print('no training')", 0, ["nothing was planned"]),
        ("def f():\n    return {}['missing']\nf()", 1, ["Traceback", 'script.py", line 2, in f', "KeyError"]),
        ("import nowhere", 1, ["ModuleNotFoundError"]),
    ],
)
def test_a_script_ends_as_it_ends_itself(tmp_path: Path, code: str, status: int, words: list[str]) -> None:
    (tmp_path / "script.py").write_text(code)
    done = memfit(tmp_path, "--budget", "1GiB", "script.py")
    assert done.returncode == status
    assert all(word in done.stderr for word in words)
    assert "memfit/" not in done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("--budget", "1GiB", "nowhere.py"), "nowhere.py"),
        (("--budget", "plenty", "script.py"), "plenty"),
        (("script.py",), "--budget"),
        (("--budget", "1GiB", "--numerics", "reduced", "script.py"), "numerics='reduced'"),
    ],
)
def test_bad_input_is_named_before_the_script_begins(tmp_path: Path, line: tuple[str, ...], words: str) -> None:
    (tmp_path / "script.py").write_text("print('began')")
    done = memfit(tmp_path, *line)
    assert done.returncode == 2 and words in done.stderr.replace("\n", "")
    assert "began" not in done.stdout and "Traceback" not in done.stderr
