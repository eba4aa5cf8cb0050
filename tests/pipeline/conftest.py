from __future__ import annotations

from typing import Any

import pytest

from memfit.ir.plan import Levers
from memfit.pipeline import predicting
from memfit.workload import Workload


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Levers]:
    """The levers of every capture that plans make in the test."""
    found: list[Levers] = []
    captured = predicting._captured

    def counted(workload: Workload, levers: Levers, *arguments: Any, **options: Any) -> Any:
        found.append(levers)
        return captured(workload, levers, *arguments, **options)

    monkeypatch.setattr(predicting, "_captured", counted)
    return found
