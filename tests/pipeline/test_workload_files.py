"""Workloads by name, run under fake tensors."""

from __future__ import annotations

import sys
from pathlib import Path

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
