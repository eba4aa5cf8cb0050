"""The benchmarks that `benchmarks.gpu` runs on an accelerator, on small steps."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
from torch import nn

from benchmarks.frontier.cells import summarised
from benchmarks.frontier.measuring import peak_of
from benchmarks.frontier.methods import LOWEST, OURS, PLAIN, stepping
from benchmarks.frontier.models import Subject
from benchmarks.frontier.subject import Bench, methods
from benchmarks.frontier.xformers_policy import wrappers
from benchmarks.overhead import compare
from memfit import Workload
from memfit.capture import real_copy
from memfit.planner import CACHING
from tests.accelerators.steps import distilled


def chain() -> Workload:
    """A chain whose activations are many times what allocators round to."""
    torch.manual_seed(6)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = 4096 if torch.cuda.is_available() else 1024  # CUDA's allocator rounds to 20 MiB
    return Workload(model, torch.randn(rows, 128), lambda model, x: model(x).square().mean(), optimizer, name="chain")


SUBJECT = Subject(chain, (tuple(map(str, range(6))),))
CHECKPOINTS = "checkpoint every K-th block"


def bench(place: torch.device, monkeypatch: pytest.MonkeyPatch, *names: str) -> Bench:
    """Return the frontier of a few methods on a small model."""
    chosen = tuple(method for method in methods("eager") if method.name in names)
    monkeypatch.setattr("benchmarks.frontier.subject.methods", lambda kind: chosen)
    return Bench("gpt", SUBJECT, (0.8, 0.01), 0.0, str(place))


def test_plans_and_peers_are_measured_there(place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(bench(place, monkeypatch, PLAIN, CHECKPOINTS, OURS).rows("eager"))
    by = {(row["method"], row["setting"]): row for row in rows}
    assert {row["device"] for row in rows} == {str(place)}
    assert all(("allocated_bytes" in row) == (place.type in CACHING) for row in rows if "peak_bytes" in row)
    mine, plain = by[OURS, "0.8"], by[PLAIN, ""]
    assert mine["peak_bytes"] <= mine["budget_bytes"] == int(0.8 * plain["peak_bytes"])
    assert mine["rounds"] == 6 and mine["seconds"] > 0
    assert by[CHECKPOINTS, "1"]["peak_bytes"] < plain["peak_bytes"] and by[OURS, LOWEST]["peak_bytes"] > 0
    assert "no plan fits" in by[OURS, "0.01"]["error_message"]
    assert summarised(rows)["eager"]["wrong_gradients"] == []


def test_peers_that_do_not_run_there_are_rows_with_what_they_say(
    place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place.type != "acc":
        pytest.skip("on CUDA peers run as they come")
    names = "torch sac_milp", "xFormers as it comes", "xFormers' policy, memory_budget"
    rows = [row for row in bench(place, monkeypatch, PLAIN, *names).rows("eager") if row["method"] != PLAIN]
    assert [row["method"] for row in rows] == list(names[:2])  # the last is given times of the CPU, and run there only
    assert all(row["error_message"] for row in rows) and "pip install xformers" in rows[1]["error_message"]


def test_a_peak_there_is_what_its_allocator_counted(place: torch.device) -> None:
    workload = real_copy(distilled(), place)
    plain = stepping(lambda workload: contextlib.nullcontext())
    found = peak_of(plain, workload)
    assert found.allocated_bytes > sum(p.nbytes for p in workload.model.parameters())
    assert (found.reserved_bytes is not None) == (place.type in CACHING)
    assert found.held_bytes == (found.reserved_bytes or found.allocated_bytes) >= found.allocated_bytes


def test_blocks_are_wrapped_where_they_are_held() -> None:
    model = distilled().model
    found = wrappers(model, ["0", "2"], lambda block: nn.Sequential(block))
    (children,) = found.values()
    assert list(children) == ["0", "1", "2"] and children["1"] is model.get_submodule("1")
    assert all(next(children[name].children()) is model.get_submodule(name) for name in "02")


def test_a_step_is_compared_with_one_by_hand_there(kind: str) -> None:
    found = compare("tiny", 2, time.perf_counter, kind)
    assert found["largest_difference"] < 1e-2 and 0.2 < found["ratio"] < 5
