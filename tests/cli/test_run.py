"""Scripts that are run in a budget as they are: a process each, as their users start them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import run_script, started


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
    done = run_script(tmp_path, "--budget", "1GiB", "script.py")
    assert done.returncode == status
    assert all(word in done.stderr for word in words)
    assert "memfit/" not in done.stderr


SWALLOWING = """
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    try:
        nn.functional.cross_entropy(model(torch.randn(256, 64)), torch.randint(0, 10, (256,))).backward()
        optimizer.step()
        optimizer.zero_grad()
        print("done", step)
    except {caught}:
        print("skipped", step)
print("the end")
{last}
"""


@pytest.mark.parametrize(("caught", "last", "ends"), [("Exception", "", False), ("BaseException", "sys.exit(0)", True)])
def test_no_plan_fits_decides_the_status_whatever_the_script_catches(
    tmp_path: Path, caught: str, last: str, ends: bool
) -> None:
    (tmp_path / "script.py").write_text(SWALLOWING.format(caught=caught, last=last))
    done = run_script(tmp_path, "--budget", "300KiB", "script.py")
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("Does not fit") == 1 and "script.py" in done.stderr or ends
    assert done.stdout.count("done") == 1 and ("the end" in done.stdout) == ends


LOOP = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
steps = parser.parse_args().steps
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(3)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps):
    loss = model(torch.randn(512, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, repr(loss.item()))
    {at_the_end}
"""


def test_a_plan_is_kept_and_the_next_run_begins_with_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(at_the_end=""))
    plain = started(tmp_path, "train.py").stdout
    first = run_script(tmp_path, "--budget", "0.8x", "-o", "plans/plan.json", "train.py")
    assert first.returncode == 0 and first.stdout == plain and "memfit: solve" in first.stderr
    kept = (tmp_path / "plans/plan.json").read_bytes()
    second = run_script(tmp_path, "--plan", "plans/plan.json", "train.py", "--steps", "4")
    assert second.returncode == 0 and second.stdout.startswith(plain)
    assert "memfit: solve" not in second.stderr and "memfit plan for Sequential" in second.stderr
    refused = run_script(tmp_path, "--budget", "0.8x", "-o", "plans/plan.json", "train.py")
    assert refused.returncode == 2 and "--overwrite" in refused.stderr and refused.stdout == ""
    (tmp_path / "other.py").write_text(LOOP.format(at_the_end="").replace("SGD", "Adagrad"))
    other = run_script(tmp_path, "--plan", "plans/plan.json", "other.py")
    assert other.returncode == 2 and "another model, optimizer or device. Leave out --plan" in other.stderr
    assert (tmp_path / "plans/plan.json").read_bytes() == kept


def test_quiet_leaves_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(at_the_end=""))
    done = run_script(tmp_path, "-q", "--budget", "1GiB", "train.py", "--steps", "2")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("memfit: ")


@pytest.mark.parametrize("keeps", [True, False])
def test_an_interrupt_says_what_is_left_in_one_line(tmp_path: Path, keeps: bool) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(at_the_end="if step == 2: signal.raise_signal(signal.SIGINT)"))
    handled = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a shell may ignore
    code = handled + (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text(code)
    options = ("-o", "plan.json") if keeps else ()
    done = run_script(tmp_path, "--quiet", "--budget", "1GiB", *options, "train.py")
    assert done.returncode == 130 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("interrupted; ")
    assert ("`memfit run --plan plan.json train.py` starts with it" if keeps else "`-o plan.json` keeps it") in last


OWN = """
import argparse

parser = argparse.ArgumentParser()
{option}
print("began", parser.parse_args())
"""
STANDS = "stands before the script: memfit run"


@pytest.mark.parametrize(
    ("option", "line", "status", "words"),
    [
        ("", "script.py --budget 6GiB --lr 1", 2, f"error: --budget {STANDS} --budget 6GiB script.py --lr 1"),
        ("", "script.py --budget=6GiB", 2, f"error: --budget {STANDS} --budget=6GiB script.py"),
        ("", "--budget 1GiB script.py --numerics exact", 2, f"{STANDS} --numerics exact --budget 1GiB script.py"),
        ("parser.add_argument('--budget')", "--budget 1GiB script.py --budget 5", 0, ""),
        ("parser.add_argument('--numerics')", "--budget 1GiB script.py --numerics fast", 0, ""),
        ("parser.add_argument('--budget')", "--budget 1GiB script.py --budget 5 --wrong", 2, ""),
        (
            "parser.exit(2)",
            "--budget 1GiB script.py --output there",
            2,
            f"{STANDS} --output there --budget 1GiB script.py",
        ),
        ("parser.exit(3)", "--budget 1GiB script.py --output there", 3, ""),
    ],
)
def test_options_after_the_script_are_the_scripts_and_told_where_it_lacks_them(
    tmp_path: Path, option: str, line: str, status: int, words: str
) -> None:
    (tmp_path / "script.py").write_text(OWN.format(option=option))
    done = run_script(tmp_path, *line.split())
    assert done.returncode == status, done.stderr
    assert words in done.stderr and (words or STANDS not in done.stderr)
    assert ("began" in done.stdout) == (status == 0)


def test_memfits_frames_are_left_out_also_between_the_scripts_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        if x.shape[0] == 3:
            try:
                {}["missing"]
            except KeyError as e:
                raise ValueError("mine") from e
        return self.inner(x)

model = Mine()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for size in (4, 3):
    model(torch.randn(size, 4)).sum().backward()
    optimizer.step()
"""
    )
    done = run_script(tmp_path, "--budget", "1GiB", "script.py")
    assert done.returncode == 1 and "memfit/" not in done.stderr
    assert "in forward" in done.stderr and ", in <module>" in done.stderr
    assert "KeyError" in done.stderr and "ValueError: mine" in done.stderr
    assert "memfit/" in run_script(tmp_path, "--traceback", "--budget", "1GiB", "script.py").stderr
