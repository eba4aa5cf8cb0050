"""Workloads by name, run under fake tensors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.errors import WorkloadError
from memfit.pipeline import load_fake_workload, load_workload

HEADER = """
import torch
from torch import nn
from memfit import Workload

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, x):
        return self.head(self.embed(x))

def make(move):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters()) if move is late else None
    model = move(model)
    assert model.head.weight is model.embed.weight
    ids = torch.arange(8).view(2, 4)
    loss = lambda model, batch: model(batch).mean()
    return Workload(model, ids, loss, optimizer or torch.optim.AdamW(model.parameters()))

def late(model):
    return model.to("cuda").to(torch.bfloat16)

def here():
    return make(lambda model: model)
def to():
    return make(lambda model: model.to("cuda"))
def to_device():
    return make(lambda model: model.to(device=torch.device("cuda", 0), non_blocking=True))
def cuda():
    return make(lambda model: model.cuda())
def half():
    return make(lambda model: model.cuda().half())
def optimizer_first():
    return make(late)
def under():
    with torch.device("cuda"):
        return make(lambda model: model)
def reads():
    found = make(lambda model: model.cuda())
    assert found.batch.cuda().sum().item() == 28
    return found
def recurrent():
    model = nn.LSTM(8, 8, batch_first=True).to("cuda")
    return Workload(model, torch.randn(2, 3, 8), lambda m, b: m(b)[0].mean(), torch.optim.AdamW(model.parameters()))
def computes():
    found = make(lambda model: model)
    assert torch.ones(3).numpy().sum() == 3
    return found
def breaks():
    raise ValueError("not today")
def after_a_layer():
    found = make(lambda model: model)
    assert found.model.embed.weight.detach().numpy().shape == (10, 8)
    return found
def too_large():
    model = nn.Linear(1 << 20, 1 << 20)
    return float(model.weight.detach().numpy().sum())
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "work.py"
    path.write_text(HEADER)
    return path


@pytest.mark.parametrize("name", ["here", "to", "to_device", "cuda", "under", "reads", "recurrent"])
def test_moves_to_a_gpu_that_is_not_here_are_left_out(file: Path, name: str) -> None:
    workload = load_fake_workload(f"{file}:{name}")
    parameters = list(workload.model.parameters())
    assert all(isinstance(p, FakeTensor) and p.device.type == "cpu" and p.requires_grad for p in parameters)
    held = [p for g in workload.optimizer.param_groups for p in g["params"]]
    assert [id(p) for p in held] == [id(p) for p in parameters]
    assert isinstance(workload.batch, FakeTensor) and workload.batch.device.type == "cpu"
    assert not torch.cuda.is_available()


@pytest.mark.parametrize(("name", "dtype"), [("half", torch.float16), ("optimizer_first", torch.bfloat16)])
def test_conversions_of_precision_stay(file: Path, name: str, dtype: torch.dtype) -> None:
    workload = load_fake_workload(f"{file}:{name}")
    weight = workload.model.get_parameter("embed.weight")
    assert weight.dtype is dtype and workload.model.get_parameter("head.weight") is weight
    assert workload.optimizer.param_groups[0]["params"][0] is weight


def test_a_function_that_computes_with_data_is_run_with_it(file: Path) -> None:
    workload = load_fake_workload(f"{file}:computes")
    assert not isinstance(next(workload.model.parameters()), FakeTensor)


@pytest.mark.parametrize(("name", "size"), [("after_a_layer", "384 B"), ("computes", "B")])
def test_a_build_with_data_is_told_before_it_runs_with_its_bytes(file: Path, name: str, size: str) -> None:
    told: list[str] = []
    load_fake_workload(f"{file}:{name}", told.append)
    assert len(told) == 1 and "can't be built on fake tensors" in told[0] and f"{size} or more" in told[0]
    assert f"{file}:" in told[0] and "numpy" in told[0]  # where, and what it was


def test_what_can_only_be_built_with_data_and_is_larger_than_the_machine_is_refused(file: Path) -> None:
    told: list[str] = []
    with pytest.raises(WorkloadError, match=r"needs 4.00 TiB or more, and this machine has .* free"):
        load_fake_workload(f"{file}:too_large", told.append)
    assert not told


ARGUMENTS = """
import argparse, os, sys
{at_import}
def read(*required):
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    for name in required:
        parser.add_argument(name, required=True)
    return parser.parse_args()
def takes():
    return make(lambda model: model) if read().width == 8 else None
def sees():
    assert sys.argv == [os.environ["EXPECTED"]], sys.argv
    return make(lambda model: model)
def requires():
    return read("--depth")
def ends():
    sys.exit()
def says():
    sys.exit("no data here")
"""


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "arguments.py"
    path.write_text(HEADER + ARGUMENTS.format(at_import=""))
    monkeypatch.setattr(sys, "argv", ["memfit", "plan", "arguments.py:takes", "--budget", "1GiB"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("EXPECTED", str(path))
    return path


@pytest.mark.parametrize("load", [load_workload, load_fake_workload])
def test_a_function_sees_its_own_file_and_no_arguments_of_memfits(arguments: Path, load: Any) -> None:
    before = list(sys.argv)
    for name in ("takes", "sees"):
        assert load(f"{arguments}:{name}").name == "workload"
        assert sys.argv == before


@pytest.mark.parametrize("load", [load_workload, load_fake_workload])
@pytest.mark.parametrize(("name", "status"), [("requires", "2"), ("ends", "None"), ("says", "'no data here'")])
def test_an_end_of_python_is_an_error_of_the_workload(arguments: Path, load: Any, name: str, status: str) -> None:
    with pytest.raises(WorkloadError, match=f"{name} ended Python with status {status}.* at .*parse_args\\(\\[\\]\\)"):
        load(f"{arguments}:{name}")
    assert sys.argv[0] == "memfit"


def test_an_end_of_python_while_the_file_is_imported_is_one_too(arguments: Path) -> None:
    code = "parser = argparse.ArgumentParser(); parser.add_argument('--lr', required=True); parser.parse_args()"
    arguments.write_text(HEADER + ARGUMENTS.format(at_import=code))
    with pytest.raises(WorkloadError, match=f"{arguments} ended Python with status 2"):
        load_workload(f"{arguments}:takes")
    arguments.with_name("needs_arguments.py").write_text(arguments.read_text())
    sys.path.insert(0, str(arguments.parent))
    with pytest.raises(WorkloadError, match="needs_arguments ended Python"):
        load_workload("needs_arguments:takes")
    assert sys.argv[0] == "memfit"


def test_errors_of_the_function_are_named(file: Path) -> None:
    with pytest.raises(WorkloadError, match="breaks raised ValueError: not today"):
        load_fake_workload(f"{file}:breaks")


@pytest.mark.parametrize("name", ["mine", "mine.py", "package.inner"])
def test_modules_of_the_current_folder_are_found_and_find_their_neighbours(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = HEADER + "\ndef late_import():\n    import a_neighbour\n    return here()\n"
    (tmp_path / "package").mkdir()
    for path in (tmp_path / "mine.py", tmp_path / "package/inner.py"):
        path.write_text(code)
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "a_neighbour.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    for module in ("mine", "package", "package.inner", "a_neighbour"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert load_workload(f"{name}:late_import").name == "workload"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere:x", "there is no module 'nowhere' in"),
        ("package.nowhere:x", "there is no module 'package.nowhere' in"),
        ("package.needs:x", "package.needs imports 'not_there', which is not installed at"),
    ],
)
def test_a_module_that_is_not_there_is_told_from_one_that_it_imports(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/needs.py").write_text("import not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("package", "package.needs"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(WorkloadError, match=words):
        load_workload(name)


def test_pytorch_is_left_as_it_was(file: Path) -> None:
    swap = torch.utils.swap_tensors
    load_fake_workload(f"{file}:half")
    assert torch.utils.swap_tensors is swap
