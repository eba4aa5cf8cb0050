from __future__ import annotations

from benchmarks.frontier.models import QUICK
from benchmarks.solving import solved


def test_each_budget_is_solved_and_time_grows_as_they_shrink() -> None:
    cases = solved("lstm", QUICK["lstm"])
    assert len(cases) >= 2 and all(0 <= case["gap"] < 0.02 for case in cases)
    ratios = [case["time_ratio"] for case in sorted(cases, key=lambda case: -case["share"])]
    assert ratios == sorted(ratios) and ratios[0] >= 1
