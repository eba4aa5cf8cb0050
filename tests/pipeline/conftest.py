from __future__ import annotations

from typing import Any

import pytest

from memfit.ir.plan import Levers
from memfit.pipeline import planning
from memfit.workload import Workload


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Levers]:
    """The levers of every capture that plans make in the test."""
    found: list[Levers] = []
    capture_levers = planning.capture_levers

    def counted(workload: Workload, levers: Levers, device: Any) -> Any:
        found.append(levers)
        return capture_levers(workload, levers, device)

    monkeypatch.setattr(planning, "capture_levers", counted)
    return found
