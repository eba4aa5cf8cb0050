"""Time to the first steps: the figures on rows made up, and a small script that is clocked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.start import cases
from benchmarks.start.cases import BUDGETS, SCRIPTS, Clocks, line, measured, summarised

SMALL = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for step in range(6):
    loss = model(torch.randn(2048, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
"""


def clocks(second: float) -> Clocks:
    """Return the clocks of a run whose second step ends then, and whose others take a second each."""
    walls = [second - 1 + i for i in range(6)]
    return Clocks(walls, [wall / 2 for wall in walls])


@pytest.mark.parametrize(
    ("first", "second", "within"), [(14.0, 2.9, (True, True)), (16.0, 3.1, (False, False)), (14.0, 3.1, (True, False))]
)
def test_a_start_that_costs_too_much_is_counted_and_told(
    first: float, second: float, within: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter([clocks(5.0), clocks(5.0 + first), clocks(5.0 + second)])
    monkeypatch.setattr(cases, "run", lambda *_: next(runs))
    case = measured("gpt2")
    assert (case["first_is_within"], case["second_is_within"]) == within
    assert case["plain_step_seconds"] == 1.0 and case["first_costs_processor_seconds"] == first / 2
    figures: dict[str, Any] = summarised([case, case])
    assert (figures["first_within"], figures["second_within"]) == tuple(2 * each for each in within)
    assert figures["first_costs_seconds_at_most"] == figures["first_costs_steps_at_most"] == first
    assert line(case).count("TOO LONG") == 2 - sum(within)


def test_long_steps_allow_for_ten_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Clocks([10.0 * i for i in range(1, 7)], [1.0] * 6)
    runs = iter([slow, Clocks([10.0, 119.0], [1.0, 1.0]), Clocks([10.0, 20.0], [1.0, 1.0])])
    monkeypatch.setattr(cases, "run", lambda *_: next(runs))
    assert measured("gpt2")["first_is_within"]


def test_every_script_has_a_budget_and_knows_nothing_of_memfit() -> None:
    paths = {path.stem: path.read_text() for path in SCRIPTS.glob("*.py")}
    assert paths.keys() == BUDGETS.keys()
    assert not [name for name, text in paths.items() if "memfit" in text]


@pytest.mark.ci
def test_a_script_is_clocked_at_its_own_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    monkeypatch.setattr(cases, "SCRIPTS", tmp_path)
    monkeypatch.setitem(BUDGETS, "small", "0.8x")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    plain = cases.run("small", ["plain"], str(tmp_path))
    first = cases.run("small", ["run", "--budget", "0.8x"], str(tmp_path))
    second = cases.run("small", ["run", "--budget", "0.8x"], str(tmp_path))
    for found in (plain, first, second):
        assert len(found.wall_seconds) == 6 and found.wall_seconds == sorted(found.wall_seconds)
    assert second.processor_seconds[1] < first.processor_seconds[1]
