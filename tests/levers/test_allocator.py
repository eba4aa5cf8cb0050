"""Expandable segments: less reserved for the same step, proposed where it does not fit without them.

There is no GPU here: what is tested is the prediction, its use in a search, and how it is put on and taken off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import memfit
from memfit import _torch
from memfit.errors import InfeasibleError, PlanError
from memfit.hardware import find_device
from memfit.ir import AllocatorSettings, Levers, Region
from memfit.levers import LEVERS, as_captured, device_under, switched
from memfit.planner import capture_levers, costs_of, predict
from memfit.workload import Workload
from tests.models import transformer

PLAIN = Levers(microbatch_size=2)
EXPANDED = replace(PLAIN, allocator="expandable-segments")
(LEVER,) = (lever for lever in LEVERS if lever.field == "allocator")
ON, OFF = "expandable_segments:True", "expandable_segments:False"


def test_a_device_runs_steps_with_it_and_a_capture_is_the_same() -> None:
    card = replace(find_device("rtx-4090"), allocator=AllocatorSettings(max_split_bytes=256 * 2**20))
    assert device_under(PLAIN, card) == card
    expected = AllocatorSettings(max_split_bytes=256 * 2**20, expandable_segments=True)
    assert device_under(EXPANDED, card) == replace(card, allocator=expected)
    assert as_captured(EXPANDED) == PLAIN
    assert as_captured(replace(EXPANDED, lean=("*",))) == replace(PLAIN, lean=("*",))


@pytest.mark.parametrize(
    ("name", "count"), [("rtx-4090", 1), ("h100", 1), ("mi300x", 0), ("cpu", 0)], ids=lambda x: str(x)
)
def test_it_is_for_nvidias_cards(name: str, count: int) -> None:
    device = find_device(name)
    assert LEVER.beside(PLAIN, device) == [EXPANDED] * count
    assert LEVER.beside(EXPANDED, device) == []
    assert LEVER.beside(PLAIN, replace(device, allocator=AllocatorSettings(expandable_segments=True))) == []


class Growing(nn.Module):
    """Layers of which each makes a larger tensor than those before: what they free serves none of the later ones."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [512 * n for n in range(4, 14)]
        self.layers = nn.ModuleList([nn.Linear(512, size, bias=False) for size in sizes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for layer in self.layers:
                (layer(x) + 1).sum()
        return self.layers[0](x).sum()


def growing() -> Workload:
    model = Growing()
    return Workload(model, torch.randn(2048, 512), lambda m, x: m(x), torch.optim.SGD(model.parameters(), lr=0.1))


def test_what_is_reserved_is_less_and_what_is_held_the_same() -> None:
    """The CPU's program, replayed through the simulated allocator of a card."""
    card = replace(find_device("rtx-4090"), cublas_workspace_bytes=0)
    trace = capture_levers(growing(), Levers(microbatch_size=2048), find_device("cpu"))
    costs = costs_of([trace], find_device("cpu"))
    plain, expanded = (predict(trace, costs, device_under(levers, card))[0] for levers in (PLAIN, EXPANDED))
    assert plain.peak_reserved_bytes and expanded.peak_reserved_bytes
    assert expanded.peak_reserved_bytes < 0.8 * plain.peak_reserved_bytes
    # Blocks of fixed segments keep remainders of up to 1 MiB, which count as allocated.
    assert 0.95 * plain.peak_bytes < expanded.peak_bytes <= plain.peak_bytes
    assert expanded.peak_upper_bytes < 0.8 * plain.peak_upper_bytes
    assert expanded.step_seconds == plain.step_seconds


@pytest.mark.ci
def test_a_plan_takes_it_where_nothing_fits_without() -> None:
    workload = growing()
    options: dict[str, Any] = {"device": "rtx-4090", "numerics": "exact", "optimizers": (), "points": 1}
    plain = memfit.estimate(workload, device="rtx-4090")
    assert plain.peak_reserved_bytes and plain.peak_reserved_bytes > 1.2 * plain.peak_bytes
    with pytest.raises(InfeasibleError, match="expandable segments") as lowest:
        memfit.plan(workload, budget="1MiB", **options)
    assert lowest.value.lowest_peak_bytes < 0.9 * plain.peak_upper_bytes
    plan = memfit.plan(workload, budget=lowest.value.lowest_peak_bytes, **options)
    assert plan.levers.allocator == "expandable-segments" and plan.numerics == "exact"
    assert plan.predicted.peak_upper_bytes <= plan.budget_bytes < plain.peak_upper_bytes
    assert plan.classes["expandable segments"] == "exact"
    assert any(f"PYTORCH_CUDA_ALLOC_CONF={ON}: at most " in note for note in plan.notes)
    own = next(point for point in plan.frontier if point.levers == plan.levers)
    assert own.is_captured and own.peak_upper_bytes == plan.predicted.peak_upper_bytes
    roomy = memfit.plan(workload, budget=2 * plain.peak_upper_bytes, **options)
    assert roomy.levers.allocator == "as-is" and not any("PYTORCH_CUDA" in note for note in roomy.notes)


# How it is put on


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Have models look as if a GPU held them, and yield what the allocator is told; it is CUDA's own."""
    told: list[str] = []
    tell = _torch.set_allocator_settings
    before = _torch.allocator_settings()

    def telling(text: str) -> None:
        told.append(text)
        tell(text)

    monkeypatch.setattr("memfit.levers.allocator._runs_on_cuda", lambda model: True)
    monkeypatch.setattr("memfit.levers.allocator.set_allocator_settings", telling)
    monkeypatch.setattr("torch.cuda.get_allocator_backend", lambda: "native")
    monkeypatch.setattr("memfit.hardware.accelerators.release_cache", lambda: told.append("release"))
    yield told
    tell(before or OFF)


def test_it_is_set_and_taken_back(on_cuda: list[str]) -> None:
    model = nn.Linear(1, 1)
    with switched(model, EXPANDED):
        assert ON in _torch.allocator_settings()
        with switched(nn.Linear(1, 1), EXPANDED):
            pass
        assert ON in _torch.allocator_settings()  # the first one's
    assert on_cuda == ["release", ON, OFF] and OFF in _torch.allocator_settings()


def test_what_ends_in_another_order_keeps_it_to_the_last(on_cuda: list[str]) -> None:
    first, second = switched(nn.Linear(1, 1), EXPANDED), switched(nn.Linear(1, 1), EXPANDED)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert ON in _torch.allocator_settings()
    second.__exit__(None, None, None)
    assert on_cuda[-1] == OFF


def test_what_the_user_set_stays(on_cuda: list[str]) -> None:
    _torch.set_allocator_settings(ON)
    with switched(nn.Linear(1, 1), EXPANDED):
        pass
    assert on_cuda == [] and ON in _torch.allocator_settings()


@pytest.mark.parametrize(
    ("target", "value", "match"),
    [
        ("torch.cuda.get_allocator_backend", lambda: "cudaMallocAsync", "allocates by 'cudaMallocAsync'"),
        ("sys.platform", "win32", "Windows has none"),
    ],
)
def test_another_allocator_is_refused_by_name(
    target: str, value: Any, match: str, on_cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, value)
    with (
        pytest.raises(PlanError, match=rf"levers\.allocator is 'expandable-segments'.*{match}.*'as-is' and plan anew"),
        switched(nn.Linear(1, 1), EXPANDED),
    ):
        pass
    assert on_cuda == []


def test_an_allocator_that_takes_no_settings_names_the_variable(
    on_cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(text: str) -> None:
        raise RuntimeError("Allocator was initialized\nmore")

    monkeypatch.setattr("memfit.levers.allocator.set_allocator_settings", refuse)
    said = rf"no settings any more \(Allocator was initialized\): start the program with PYTORCH_CUDA_ALLOC_CONF={ON}"
    with pytest.raises(PlanError, match=said), switched(nn.Linear(1, 1), EXPANDED):
        pass
    monkeypatch.undo()
    assert LEVER._users == 0


def test_nothing_is_set_for_the_cpu_or_for_a_step_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(text: str) -> None:
        raise AssertionError(text)

    monkeypatch.setattr("memfit.levers.allocator.set_allocator_settings", told)
    with switched(nn.Linear(1, 1), EXPANDED):
        pass
    workload = transformer()
    trace = capture_levers(workload, replace(EXPANDED, regions=(Region(("blocks.0",)),)), find_device("cpu"))
    assert any(op.phase == "recompute" for op in trace.ops)
