"""The page of cards: made from their results alone, and missing where there are none."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.card_page import by_card, is_current, page, write
from memfit.errors import UsageError
from tests.benchmarks.cards import CORRECTIONS, PREDICTIONS


def test_the_page_is_that_of_the_committed_results() -> None:
    assert is_current()


def test_it_shows_every_part_that_was_measured_and_what_failed(tmp_path: Path) -> None:
    for part, result in {"prediction": PREDICTIONS, "corrections": CORRECTIONS}.items():
        (tmp_path / f"{part}-a-card.json").write_text(json.dumps(result))
    write(tmp_path / "gpu.md", tmp_path)
    text = (tmp_path / "gpu.md").read_text()
    assert "| peak reserved | 120 | 1.96% | 1.96% |" in text or "| peak reserved | 120 |" in text
    assert "| step time | 120 | 10.00% | 10.00% |" in text
    assert "0 of 60 planned steps went over their budget" in text
    assert "| matrix products | bfloat16 | ×1.50 | 9 | ×1.10 |" in text
    assert "- `corrections`: exit status 3" in text


def test_the_newest_result_of_each_card_counts() -> None:
    assert by_card() == by_card(tables.RESULTS)


def test_of_two_results_of_a_card_the_newer_is_shown(tmp_path: Path) -> None:
    for day, factor in (("2026-01-02", 2.0), ("2026-01-01", 3.0)):
        result = copy.deepcopy(CORRECTIONS)
        result["date"], result["summary"]["factors"][0]["factor"] = day, factor  # type: ignore[index]
        (tmp_path / f"corrections-{day}.json").write_text(json.dumps(result))
    assert "×2.00" in page(by_card(tmp_path)) and "×3.00" not in page(by_card(tmp_path))


def test_without_results_there_is_no_page(tmp_path: Path) -> None:
    (tmp_path / "prediction-cpu.json").write_text(json.dumps({**PREDICTIONS, "machine": {"description": "a CPU"}}))
    with pytest.raises(UsageError, match="no result of an accelerator"):
        write(tmp_path / "gpu.md", tmp_path)
    assert not (tmp_path / "gpu.md").exists()


def test_results_of_cards_are_not_taken_for_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for name, machine, day in (("cpu", {"description": "a CPU"}, "2026-01-01"), ("card", None, "2026-01-02")):
        result = PREDICTIONS if machine is None else {**PREDICTIONS, "machine": machine}
        (tmp_path / f"prediction-{name}.json").write_text(json.dumps({**result, "date": day}))
    assert tables.newest("prediction").name == "prediction-cpu.json"
