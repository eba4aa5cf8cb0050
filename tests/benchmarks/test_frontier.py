"""The frontier benchmark: its figures on rows made up, its methods on small models, and one small case in full."""

from __future__ import annotations

import contextlib
import copy
import csv
import dataclasses
import functools
import io
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters

import memfit
from benchmarks.frontier import models, sac_milp
from benchmarks.frontier.__main__ import merge
from benchmarks.frontier.cells import WRONG, cells_of, contenders, is_wrong, read, summarised
from benchmarks.frontier.checkpointing import Segment, forwarding, segmented
from benchmarks.frontier.joint import largest_of_accelerate, largest_of_lightning
from benchmarks.frontier.measuring import (
    Gradients,
    beyond_rounding,
    difference,
    interleaved,
    peak_of,
    rounding_of,
    spread,
)
from benchmarks.frontier.methods import (
    LOWEST,
    OURS,
    PLAIN,
    PLAINS,
    Apply,
    Kind,
    Method,
    Prepared,
    Task,
    Unsupported,
    stepping,
)
from benchmarks.frontier.models import Subject
from benchmarks.frontier.ours import compiled_once
from benchmarks.frontier.page import csv_path, files, model_chart, page, pareto, rows_csv, tables
from benchmarks.frontier.peers import peers_of
from benchmarks.frontier.subject import Bench, Measured, methods, same_steps, without_place
from benchmarks.pages import stale
from benchmarks.tables import results
from memfit import Workload
from memfit.capture import real_copy
from memfit.recomputation import PlannedBackend
from memfit.training import Step
from tests.scalar_kernels import scalar_kernels

MIB = 2**20
PLAIN_PEAK = 1000 * MIB


def row(method: str, setting: Any, peak: float, ratio: float, *, model: str = "gpt", **more: Any) -> dict[str, Any]:
    """Return a measured row; `peak` is a share of the plain one."""
    return {
        "model": model,
        "kind": "eager",
        "method": method,
        "setting": str(setting),
        "peak_bytes": int(peak * PLAIN_PEAK),
        "plain_peak_bytes": PLAIN_PEAK,
        "above_parameters_bytes": int(peak * PLAIN_PEAK) - 100 * MIB,
        "gradient_difference": 0.0,
        "loss_difference": 0.0,
        "bitwise": True,
        "plan_seconds": 1.0,
        "ratio": ratio,
        "ratio_error": 0.01,
        "times": [ratio] * 6,
        "threads": 2,
        "date": "2026-01-01",
        **more,
    }


def ours(share: float, peak: float, ratio: float, **more: Any) -> dict[str, Any]:
    facts = {"share": share, "budget_bytes": int(share * PLAIN_PEAK), "gap": 0.0, "predicted_seconds": ratio}
    return row(OURS, share, peak, ratio, **{**facts, **more})


def infeasible(share: float) -> dict[str, Any]:
    start = {"model": "gpt", "kind": "eager", "method": OURS, "setting": str(share), "share": share}
    return {**start, "error_message": "InfeasibleError: no plan fits", "date": "2026-01-01"}


PEERS = [
    row(PLAIN, "", 1.0, 1.0),
    row("checkpoint every K-th block", 1, 0.4, 1.3),
    row("checkpoint every K-th block", 2, 0.7, 1.15),
    row("segments of K blocks", 2, 0.35, 1.32),
]
GOOD = [ours(0.75, 0.74, 1.05), ours(0.45, 0.44, 1.2), ours(0.35, 0.35, 1.3), row(OURS, LOWEST, 0.3, 1.5, gap=0.0)]


def summary(*rows: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = summarised([*PEERS, *rows])["eager"]
    return found


def test_a_cell_holds_memfit_against_the_fastest_peer_within_the_budget() -> None:
    cells = {cell.share: cell for cell in cells_of([*PEERS, *GOOD], "eager")}
    best = {share: cell.best and (cell.best["method"], cell.best["setting"]) for share, cell in cells.items()}
    every = "checkpoint every K-th block"
    assert best == {0.75: (every, "2"), 0.45: (every, "1"), 0.35: ("segments of K blocks", "2")}
    assert cells[0.75].ratio == pytest.approx(1.05 / 1.15)


def test_figures_of_plans_that_are_faster_everywhere() -> None:
    found = summary(*GOOD)
    assert found["worst_ratio_to_best_peer"] == pytest.approx(1.3 / 1.32)
    assert found["median_ratio_to_best_peer"] == pytest.approx(1.2 / 1.3)
    assert found["share_below_60_faster_or_at_bound"] == 1.0
    assert (found["budget_violations"], found["failures"], found["predicted_time_grows"]) == (0, [], [])
    assert found["lowest_peak_ratio_to_best_peer"] == {"gpt": pytest.approx(0.3 / 0.35)}
    assert (found["cells"], found["compared"], found["reached_by_memfit_only"]) == (3, 3, 0)


def test_a_slower_cell_is_named() -> None:
    found = summary(*GOOD[:1], ours(0.45, 0.44, 1.3 * 1.05, gap=0.1))
    assert found["worst_ratio_to_best_peer"] == pytest.approx(1.05)
    assert found["share_below_60_faster_or_at_bound"] == 0.0
    assert found["failures"] == ["gpt eager 45%: memfit takes 1.050 times as long as checkpoint every K-th block 1"]


def test_slightly_slower_is_not_a_failure_and_not_faster() -> None:
    found = summary(ours(0.45, 0.44, 1.3 * 1.015, gap=0.05))
    assert found["failures"] == [] and found["share_below_60_faster_or_at_bound"] == 0.0
    assert summary(ours(0.45, 0.44, 1.3 * 1.015, gap=0.005))["share_below_60_faster_or_at_bound"] == 1.0


def test_a_peak_over_the_budget_is_a_violation_and_a_failure() -> None:
    found = summary(ours(0.45, 0.46, 1.0))
    assert found["budget_violations"] == 1
    assert found["compared"] == 0
    assert found["failures"] == ["gpt eager 45%: memfit's peak is 2.22% over the budget"]


def test_a_cell_that_a_peer_reaches_and_memfit_does_not_is_named() -> None:
    found = summary(infeasible(0.35), infeasible(0.2))
    assert found["share_below_60_faster_or_at_bound"] == 0.0
    assert len(found["failures"]) == 1 and found["failures"][0].startswith("gpt eager 35%: segments of K blocks 2 fits")


def test_a_cell_that_only_memfit_reaches_counts_for_it() -> None:
    found = summary(ours(0.2, 0.2, 2.0, gap=0.5))
    assert (found["reached_by_memfit_only"], found["failures"]) == (1, [])
    assert found["share_below_60_faster_or_at_bound"] == 1


def test_a_higher_lowest_peak_a_gap_and_a_time_that_grows_with_the_budget_show() -> None:
    lowest = row(OURS, LOWEST, 0.42, 1.3, bitwise=False, gap=0.9)
    found = summary(ours(0.75, 0.7, 1.2, gap=0.3), ours(0.45, 0.44, 1.1), lowest)
    assert found["lowest_peak_ratio_to_best_peer"]["gpt"] == pytest.approx(1.2)
    assert found["largest_gap"] == 0.3
    assert found["predicted_time_grows"] == found["measured_time_grows"] == ["gpt eager 45% to 75%"]
    assert found["not_bitwise"] == ["gpt lowest"]


def test_a_time_that_grows_within_noise_is_none() -> None:
    noisy = ours(0.75, 0.7, 1.2, times=[1.0, 1.5, 1.1, 1.3, 0.9, 1.2])
    assert summary(noisy, ours(0.45, 0.44, 1.1))["measured_time_grows"] == []


def test_ratios_are_over_the_rounds_that_both_took_part_in() -> None:
    drifting = row("checkpoint every K-th block", 1, 0.4, 1.3, times=[9.0, None, 2.0, 4.0, None])
    mine = ours(0.45, 0.44, 1.2, times=[None, 1.0, 1.0, 2.0, 3.0])
    (cell,) = cells_of([PEERS[0], drifting, mine], "eager")
    assert cell.ratio == pytest.approx(0.5)


def test_a_peer_with_other_gradients_is_none_and_is_named() -> None:
    wrong = row("activation_memory_budget", 0.1, 0.2, 0.9, gradient_difference=0.4, bitwise=False)
    found = summary(*GOOD, wrong)
    assert found["wrong_gradients"] == ["gpt activation_memory_budget 0.1"]
    assert {k: v for k, v in found.items() if k != "wrong_gradients"} == {
        k: v for k, v in summary(*GOOD).items() if k != "wrong_gradients"
    }
    rounded = row("activation_memory_budget", 0.1, 0.2, 0.9, gradient_difference=1e-5, bitwise=False)
    assert summary(*GOOD, rounded)["worst_ratio_to_best_peer"] > 1.3
    joint = {**wrong, "kind": "joint", "share": 0.45}
    assert summarised([joint, {**ours(0.45, 0.4, 0.9), "kind": "joint"}])["joint_throughput_ratio"] == pytest.approx(1)


def test_what_counts_of_gradients_is_beyond_rounding_where_a_row_says_it() -> None:
    facts = {"gradient_difference": 0.9, "bitwise": False}
    assert is_wrong(row("a", 1, 0.2, 0.9, **facts))
    assert not is_wrong(row("a", 1, 0.2, 0.9, **facts, gradient_difference_beyond_rounding=1e-3))
    assert is_wrong(row("a", 1, 0.2, 0.9, **facts, gradient_difference_beyond_rounding=0.2))
    assert is_wrong(row("a", 1, 0.2, 0.9, **facts, gradient_difference_beyond_rounding=float("nan")))


def test_joint_rows_are_held_to_the_peers_of_their_budget() -> None:
    peers = [
        {**row("accelerate", 0.45, 0.44, 1.4), "kind": "joint", "share": 0.45},
        {**row("accelerate", 0.3, 0.29, 1.1), "kind": "joint", "share": 0.3},
    ]
    mine = {**ours(0.45, 0.45, 1.2), "kind": "joint"}
    found = summarised([*peers, mine])
    assert found["joint_throughput_ratio"] == pytest.approx(1.4 / 1.2)
    assert found["joint_failures"] == []


def test_joint_throughput_is_also_told_by_model() -> None:
    rows = [
        {**row("accelerate", 0.45, 0.44, ratio, model=model), "kind": "joint", "share": 0.45}
        for model, ratio in (("gpt", 1.4), ("bert", 1.1))
    ]
    rows += [{**ours(0.45, 0.45, 1.0, model="gpt"), "kind": "joint"}, {**ours(0.45, 0.45, 1.0), "kind": "joint"}]
    rows[-1]["model"] = "bert"
    found = summarised(rows)
    assert found["joint_throughput_ratio_by_model"] == {"gpt": pytest.approx(1.4), "bert": pytest.approx(1.1)}
    assert found["joint_throughput_ratio"] == pytest.approx(1.25)


def beside_all(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows of kind "all": eager and compiled peers, and memfit's."""
    compiled = [row(PLAINS[1], "", 0.8, 1.1), row("compiled checkpoint every K-th block", 1, 0.45, 1.1)]
    return [{**r, "kind": "all"} for r in [*PEERS, *compiled, *rows]]


def test_one_plan_is_held_against_eager_and_compiled_peers_alike() -> None:
    found = summarised(beside_all(ours(0.75, 0.7, 1.0), ours(0.45, 0.44, 1.2), row(OURS, LOWEST, 0.28, 1.4, gap=0.0)))
    cells = {cell.share: cell for cell in cells_of(beside_all(ours(0.75, 0.7, 1.0), ours(0.45, 0.44, 1.2)), "all")}
    assert [cells[share].best["method"] for share in (0.75, 0.45)] == ["compiled checkpoint every K-th block"] * 2  # type: ignore[index]
    assert found["all"]["worst_ratio_to_best_peer"] == pytest.approx(1.2 / 1.1)
    assert found["all"]["lowest_peak_ratio_to_best_peer"] == {"gpt": pytest.approx(0.28 / 0.35)}
    assert found["all"].keys() == summary(*GOOD).keys() and "eager" not in found


def test_dropout_drawn_again_makes_a_peer_none_and_leaves_memfits_row() -> None:
    drawn = {"gradient_difference": 0.4, "bitwise": False}
    mine, peer = ours(0.45, 0.44, 1.2, **drawn), row("compiled activation_memory_budget", 0.1, 0.2, 0.9, **drawn)
    found = summarised(beside_all(mine, peer))["all"]
    assert found["wrong_gradients"] == ["gpt compiled activation_memory_budget 0.1"]
    assert found["worst_ratio_to_best_peer"] == pytest.approx(1.2 / 1.1)
    assert found["not_bitwise"] == ["gpt 0.45"]  # and it is told


def test_both_plain_steps_go_on_after_the_first_rounds() -> None:
    rows = {str(index): r for index, r in enumerate(beside_all(row("fast", "", 0.3, 0.5)))}
    kept = {rows[key]["method"] for key in contenders(rows, (0.45,))}
    assert kept == {*PLAINS, "fast"}


def test_peers_of_an_earlier_result_are_those_that_may_decide_a_cell_or_are_lowest() -> None:
    plain, one, two, three = PEERS
    wrong = row("selective", "a", 0.1, 0.9, gradient_difference=0.4, bitwise=False)
    compiled = [row(PLAIN, "", 0.8, 1.0), row("activation_memory_budget", 0.5, 0.7, 1.05), infeasible(0.2)]
    rows = [plain, one, two, three, wrong, *GOOD, *({**r, "kind": "compiled"} for r in compiled)]
    every = "checkpoint every K-th block"
    assert peers_of(rows, "gpt", (0.75,))["eager"] == {(PLAIN, ""), (every, "2"), ("segments of K blocks", "2")}
    assert peers_of(rows, "gpt", (0.45,))["eager"] == {(PLAIN, ""), (every, "1"), ("segments of K blocks", "2")}
    expected = {(PLAINS[1], ""), ("compiled activation_memory_budget", "0.5")}
    assert peers_of(rows, "gpt", (0.3,))["compiled"] == expected
    assert peers_of(rows[:5], "gpt", (0.45,)).keys() == {"eager"} and peers_of(rows, "vit", (0.45,)) == {}


def test_contenders_are_ours_and_the_few_fastest_within_each_budget() -> None:
    rows = {str(index): r for index, r in enumerate([*PEERS, row("slow", "", 0.39, 1.6), *GOOD])}
    kept = {rows[key]["method"] + rows[key]["setting"] for key in contenders(rows, (0.45, 0.36))}
    assert "slow" not in kept and "checkpoint every K-th block2" not in kept
    assert {"segments of K blocks2", "checkpoint every K-th block1", "plain", "memfitlowest"} <= kept


def test_rows_that_are_run_anew_take_the_place_of_those_of_their_model_and_kind(tmp_path: Path) -> None:
    earlier = [row("a", 1, 0.4, 1.3, model="vit"), row("a", 1, 0.4, 1.3), row("b", 1, 0.4, 1.3)]
    newer = [row("a", 1, 0.4, 1.2, date="2026-02-02")]
    merged = merge(earlier, newer)
    assert [(r["model"], r["method"], r["date"]) for r in merged] == [
        ("gpt", "a", "2026-02-02"),
        ("vit", "a", "2026-01-01"),
    ]
    path = tmp_path / "partial.jsonl"
    path.write_text('{"model": "gpt", "kind": "eager"}\n{"model": "vit", "kind": "joint"}\n')
    assert [r["model"] for r in read(path)] == ["gpt", "vit"]


def result() -> dict[str, Any]:
    rows = [*PEERS, *GOOD, infeasible(0.2)]
    return {
        "command": "python -m benchmarks.frontier",
        "machine": {"description": "a machine", "threads": 2},
        "versions": {"torch": "2.13.0"},
        "date": "2026-01-01",
        "cases": rows,
        "summary": summarised(rows),
    }


def test_the_page_has_every_cell_every_row_and_what_failed() -> None:
    made = page("before\n<!-- frontier: made -->\nold\n<!-- /frontier -->\nafter\n", result())
    assert "old" not in made and made.startswith("before") and made.endswith("after\n")
    assert "| 45%, 450.0 MiB | 44.0% | 1.200 | checkpoint every K-th block 1 | 40.0% | 1.300 | 0.923 |" in made
    assert "| 20%, 200.0 MiB | no plan fits |" in made
    slower = result()
    slower["cases"] = [*PEERS, ours(0.75, 0.7, 1.6), ours(0.45, 0.44, 1.5)]
    slower["summary"] = summarised(slower["cases"])
    assert "memfit takes 1.154 times as long" in tables(slower)
    assert "- gpt eager 45% to 75%" in tables(slower) and "45% to 75%" not in made


def test_the_sheet_has_every_row_in_full() -> None:
    rows = result()["cases"]
    sheet = list(csv.DictReader(io.StringIO(rows_csv(rows, "gpt", "eager"))))
    assert [(r["method"], r["setting"]) for r in sheet] == [(r["method"], str(r["setting"])) for r in rows]
    for written, row in zip(sheet, rows, strict=True):
        if "peak_bytes" in row:
            assert int(written["peak_bytes"]) == row["peak_bytes"]
            assert float(written["ratio"]) == pytest.approx(row["ratio"], rel=1e-3)
    assert sheet[-1]["peak_bytes"] == "" and "no plan fits" in sheet[-1]["error_message"]


def test_the_page_is_that_of_the_committed_result() -> None:
    assert stale(files(results("frontier"))) == []


def test_the_page_has_one_plan_beside_all_peers_where_the_result_has_it() -> None:
    known = result()
    known["cases"] = [*known["cases"], *beside_all(ours(0.45, 0.44, 1.2))]
    known["summary"] = summarised(known["cases"])
    made = tables(known)
    assert "|  | eager | all |" in made and "|  | eager |\n" in tables(result())
    assert "| 45%, 450.0 MiB | 44.0% | 1.200 | compiled checkpoint every K-th block 1 | 45.0% | 1.100 | 1.091 |" in made
    assert "- gpt all 45%: memfit takes 1.091 times as long" in made
    sheet = list(csv.DictReader(io.StringIO(files(known)[csv_path("gpt", "all")])))
    assert len(sheet) == len(beside_all()) + 1 and csv_path("gpt", "all") not in files(result())


def test_the_chart_is_drawn_within_its_axes() -> None:
    drawn = ElementTree.fromstring(model_chart(result()["cases"], "gpt"))
    lines = [e for e in drawn.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 2
    places = [tuple(map(float, p.split(","))) for line in lines for p in line.attrib["points"].split()]
    width, height = float(drawn.attrib["width"]), float(drawn.attrib["height"])
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)


@given(st.lists(st.tuples(st.floats(0.1, 1), st.floats(1, 3)), min_size=1))
def test_a_pareto_front_holds_what_nothing_else_beats(points: list[tuple[float, float]]) -> None:
    front = pareto(points)
    for peak, ratio in points:
        assert any(p <= peak and r <= ratio for p, r in front)
    for kept in front:
        assert kept in points
        assert not any(p <= kept[0] and r <= kept[1] and (p, r) != kept for p, r in points)


@given(st.integers(1, 200), st.integers(0, 200))
def test_microbatch_finders_end_with_one_that_fits(batch: int, limit: int) -> None:
    largest = min(batch, limit)

    def fits(size: int) -> bool:
        assert 1 <= size <= batch
        return size <= limit

    assert largest_of_lightning(fits, batch) == (largest or None)
    with pytest.MonkeyPatch.context() as patch:  # it collects garbage at each size: a minute, after other tests
        patch.setattr("accelerate.utils.memory.clear_device_cache", lambda garbage_collection: None)
        found = largest_of_accelerate(fits, batch)
    assert found is None if largest == 0 else found is not None and 0.9 * largest - 1 < found <= largest


def test_the_spread_of_a_median_falls_with_the_number_of_values() -> None:
    generator = torch.Generator().manual_seed(0)
    values = (1 + 0.05 * torch.randn(400, generator=generator)).tolist()
    assert spread(values) == pytest.approx(1.2533 * 0.05 / 20, rel=0.2)
    assert spread(values[:25]) > 2 * spread(values)


class Block(nn.Sequential):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Chain(nn.Module):
    """Blocks in a list, and a head."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def chain() -> Workload:
    torch.manual_seed(0)
    model = Chain()
    batch = {"x": torch.randn(512, 32), "y": torch.randint(0, 4, (512,))}
    return Workload(
        model,
        batch,
        lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        torch.optim.SGD(model.parameters(), lr=0.1),
        name="chain",
    )


def short_chain() -> Workload:
    """Return a workload whose samples are of many rows each: a plan has few sizes of microbatches to compile."""
    torch.manual_seed(0)
    model = Chain(2)
    batch = {"x": torch.randn(4, 128, 32), "y": torch.randint(0, 4, (4, 128))}
    return Workload(
        model,
        batch,
        lambda model, batch: nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten()),
        torch.optim.SGD(model.parameters(), lr=0.1),
        name="short chain",
    )


SUBJECT = Subject(chain, (tuple(f"blocks.{index}" for index in range(6)),))
SHORT = Subject(short_chain, (("blocks.0", "blocks.1"),))


def applied(name: str, setting: Any) -> tuple[Workload, Any]:
    workload = chain()
    (method,) = (m for m in methods("eager") if m.name == name)
    task = Task(SUBJECT, workload, 1, (0.5,))
    return workload, method.make(task, method.study(task), setting).apply


@pytest.mark.filterwarnings("ignore:.*PuLP 4.0:DeprecationWarning")
def test_random_operators_of_a_module_are_recomputed_together_also_where_they_work_in_place() -> None:
    """Two dropouts: operators 1 to 3 and 5 to 7 are empty_like, bernoulli_ and div_."""
    order = SimpleNamespace(
        recomputed_ops={4},
        stored_ops=set(),
        inplace_op_groups={1: {1, 2, 3}, 5: {5, 6, 7}},
        random_ops_group={2: {2, 6}},
        msps_meta=[SimpleNamespace(op_idx=i) for i in (5, 0, 1)],
    )
    assert sac_milp.grouped(order, {5}) == {1, 2, 3, 5, 6, 7}
    estimator = SimpleNamespace(
        sac_mod_stats={"m": SimpleNamespace(memory=[1] * 8)}, sac_mod_greedy_order_meta={"m": order}
    )
    assert sac_milp.recomputed(estimator, "m", 0.2) == {1, 2, 3, 4, 5, 6, 7}
    order.stored_ops = {1}
    assert sac_milp.recomputed(estimator, "m", 0.2) == {0, 4}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("checkpoint every K-th block", 1),
        ("segments of K blocks", 2),
        ("selective, kept", "products"),
        ("selective, torchtitan", "every second product"),
        ("torch sac_milp", 0.6),
    ],
)
def test_a_method_takes_less_memory_gives_the_same_gradients_and_leaves_the_model_as_it_was(
    name: str, setting: Any
) -> None:
    for needed in ("pulp", "pwlf") if name == "torch sac_milp" else ():
        pytest.importorskip(needed)
    _, plain = applied(PLAIN, "")
    workload, apply = applied(name, setting)
    before = {n: id(p) for n, p in workload.model.named_parameters()}
    gradients = Gradients(workload)
    expected, found = gradients.of(plain)[1], gradients.of(apply)[1]
    assert difference(found, expected) == (0.0, True)
    assert {n: id(p) for n, p in workload.model.named_parameters()} == before
    assert not any("forward" in module.__dict__ for module in workload.model.modules())
    assert peak_of(apply, workload).held_bytes < peak_of(plain, workload).held_bytes


class Counted:
    """A back end that runs graphs as they are; `graphs` says of each whether the loss is in it."""

    def __init__(self) -> None:
        self.graphs: list[bool] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(any("cross_entropy" in str(node.target) for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.mark.ci
def test_a_compiled_step_is_compiled_once_loss_and_all_and_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload, plain = applied(PLAIN, "")
    gradients, backends, applies = Gradients(workload), [], []
    expected = gradients.of(plain)[1]
    modules = dict(workload.model.named_modules())
    task = Task(SUBJECT, workload, 1, (0.5,))
    for name, setting in ((PLAIN, ""), ("checkpoint every K-th block", 2), ("segments of K blocks", 3)):
        backends.append(Counted())
        monkeypatch.setattr("benchmarks.frontier.compiled.inductor", lambda: backends[-1])
        (method,) = (m for m in methods("compiled") if m.name == name)
        applies.append(method.make(task, None, setting).apply)
    for _ in range(3):
        for apply in applies:
            assert difference(gradients.of(apply)[1], expected)[0] < 1e-4
            assert dict(workload.model.named_modules()) == modules
            assert not any("forward" in module.__dict__ for module in modules.values())
    assert [backend.graphs for backend in backends] == [[True]] * 3


def test_of_a_step_without_one_graph_one_line_says_so() -> None:
    workload = models.QUICK["lstm"].make()
    for method in (m for m in methods("compiled") if m.name != OURS):  # memfit compiles several graphs
        task = Task(models.QUICK["lstm"], workload, 1, (0.5,))
        with pytest.raises(Unsupported, match=r"^torch.compile makes no graph of this step: .*LSTM$"):
            apply = method.make(task, method.study(task), method.settings(task)[0]).apply
            Gradients(workload).of(apply)


def test_other_gradients_are_told_from_the_plain_ones() -> None:
    workload, plain = applied(PLAIN, "")
    expected = Gradients(workload).of(plain)[1]
    other = copy.deepcopy(expected)
    other["head.bias"][0] += 0.5 * other["head.bias"].abs().max()
    assert difference(other, expected) == (pytest.approx(0.5), False)
    del other["head.bias"]
    assert difference(other, expected) == (float("inf"), False)


class Attention(nn.Module):
    """The bias of its keys shifts all scores of a row alike: its gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.query(x) @ self.key(x).mT, dim=-1)
        logits: torch.Tensor = self.head(self.dropout(weights @ x).mean(dim=1))
        return logits


def attention() -> Workload:
    torch.manual_seed(0)
    model = Attention()
    batch = {"x": torch.randn(16, 24, 32), "y": torch.randint(0, 4, (16,))}
    return dataclasses.replace(
        chain(), model=model, batch=batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), name="attention"
    )


def rounded_otherwise(workload: Workload) -> Any:
    """Run the linear layers in double precision: the same step, with other roundings."""

    def forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.double(), module.weight.double(), module.bias.double()).float()

    linear = [module for module in workload.model.modules() if isinstance(module, nn.Linear)]
    return forwarding({module: functools.partial(forward, module) for module in linear})


@contextlib.contextmanager
def drawn_again(workload: Workload) -> Iterator[None]:
    torch.manual_seed(1)
    yield


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_zero_but_for_rounding_is_not_wrong_and_dropout_drawn_again_is(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    arounds = {PLAIN: lambda workload: contextlib.nullcontext(), "right": rounded_otherwise, "wrong": drawn_again}
    applies = {name: stepping(around) for name, around in arounds.items()}
    made = [Method(name, kind, lambda task: [""], lambda *_, a=apply: Prepared(a)) for name, apply in applies.items()]
    bench = Bench("gpt", Subject(attention, ()), (0.8,), 0.0)
    monkeypatch.setattr("benchmarks.frontier.subject.methods", lambda kind: made)
    rows = {row["method"]: row for row in bench.rows(kind)}
    assert rows["right"]["gradient_difference"] > 10 * WRONG  # of the keys' bias
    assert rows["right"]["gradient_difference_beyond_rounding"] < WRONG / 100
    assert rows["wrong"]["gradient_difference_beyond_rounding"] > 10 * WRONG
    assert [is_wrong(rows[name]) for name in (PLAIN, "right", "wrong")] == [False, False, True]


def of_all(applies: dict[str, tuple[Kind, Apply]], **settings: Any) -> tuple[Method, ...]:
    """Return methods of kind "all", each by its name with the kind that it comes from; memfit's step is compiled."""
    return tuple(
        Method(
            name,
            kind,
            lambda task, name=name: settings.get(name, [""]),
            lambda *_, name=name, a=apply: Prepared(a, sort="compiled" if name == OURS else None),
        )
        for name, (kind, apply) in applies.items()
    )


def test_gradients_of_eager_and_compiled_steps_are_each_held_against_their_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_it_is = stepping(lambda workload: contextlib.nullcontext())
    other = stepping(drawn_again)  # stands for compiled code, which draws other masks
    applies: dict[str, tuple[Kind, Apply]] = {
        PLAIN: ("eager", as_it_is),
        "eager": ("eager", as_it_is),
        PLAINS[1]: ("compiled", other),
        "compiled right": ("compiled", other),
        "compiled wrong": ("compiled", as_it_is),
        OURS: ("all", other),
    }
    monkeypatch.setattr("benchmarks.frontier.subject.methods", lambda kind: of_all(applies))
    bench = Bench("gpt", Subject(attention, ()), (0.8,), 0.0)
    rows = {row["method"]: row for row in bench.rows("all")}
    assert {name: row["bitwise"] for name, row in rows.items()} == {name: name != "compiled wrong" for name in applies}
    assert [name for name, row in rows.items() if is_wrong(row)] == ["compiled wrong"]
    assert {row["kind"] for row in rows.values()} == {"all"}
    assert rows[PLAIN]["ratio"] == 1.0 != rows[PLAINS[1]]["ratio"]  # over the plain eager step


def test_without_the_plain_compiled_step_eager_peers_are_measured_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = stepping(lambda workload: contextlib.nullcontext())
    applies: dict[str, tuple[Kind, Apply]] = {
        "eager": ("eager", apply),
        "compiled other": ("compiled", apply),
        OURS: ("all", apply),  # of several graphs, and held against the eager step
    }
    monkeypatch.setattr("benchmarks.frontier.subject.methods", lambda kind: of_all(applies))
    rows = {row["method"]: row for row in Bench("gpt", SUBJECT, (0.8,), 0.0).rows("all")}
    assert [name for name, row in rows.items() if "error_message" in row] == ["compiled other"]
    assert rows[OURS]["bitwise"]


def test_methods_that_come_to_one_step_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def counted(name: str) -> Apply:
        @contextlib.contextmanager
        def apply(workload: Workload) -> Iterator[Step]:
            ran.append(name)
            yield Step(workload)

        return apply

    def made(name: str, program: str | None) -> Method:
        prepared = Prepared(counted(name), program=program)
        return Method(name, "joint", lambda task: [0.8], lambda *_: prepared)

    programs = {"one": "halves", "same": "halves", "other": "thirds", "alone": None, OURS: "halves"}
    chosen, plains = [made(name, program) for name, program in programs.items()], methods("eager")
    monkeypatch.setattr("benchmarks.frontier.subject.methods", lambda kind: chosen if kind == "joint" else plains)
    rows = {row["method"]: row for row in Bench("gpt", SUBJECT, (0.8,), 0.0).rows("joint")}
    measured = 2  # for the gradients, and for the peak
    assert ran.count("same") == ran.count(OURS) == measured < ran.count("other") <= ran.count("one")
    assert rows["one"]["times"] == rows["same"]["times"] == rows[OURS]["times"] != rows["other"]["times"]
    assert rows["alone"]["times"] != rows["one"]["times"]


def test_a_step_with_another_peak_is_another_step() -> None:
    def one(peak_bytes: int) -> Measured:
        return Measured({"peak_bytes": peak_bytes}, stepping(lambda workload: contextlib.nullcontext()), chain(), "p")

    assert same_steps({"0": one(8), "1": one(9), "2": one(8)}) == {"0": "0", "1": "1", "2": "0"}


def test_only_the_peers_asked_for_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = stepping(lambda workload: contextlib.nullcontext())
    applies: dict[str, tuple[Kind, Apply]] = {
        PLAIN: ("eager", apply),
        "segments": ("eager", apply),
        "left out": ("eager", apply),
        PLAINS[1]: ("compiled", apply),
        "compiled segments": ("compiled", apply),
        OURS: ("all", apply),
    }
    made = of_all(applies, segments=[2, 3], **{"compiled segments": [2, 3]})
    monkeypatch.setattr("benchmarks.frontier.subject.methods", lambda kind: made)
    bench = Bench("gpt", SUBJECT, (0.8,), 0.0, peers={"eager": {("segments", "3")}})
    run = [(row["method"], row["setting"]) for row in bench.rows("all")]
    compiled = [(PLAINS[1], ""), ("compiled segments", "2"), ("compiled segments", "3")]  # the result has none: whole
    assert run == [(PLAIN, ""), ("segments", "3"), *compiled, (OURS, "")]


def test_of_kind_all_are_the_methods_of_both_kinds_and_one_of_memfits() -> None:
    names = [method.name for method in methods("all")]
    assert names.count(OURS) == 1 and methods("all")[-1].kind == "all" and names[0] == PLAIN
    of_each = [[method.name for method in methods(kind) if method.name != OURS] for kind in ("eager", "compiled")]
    assert names[:-1] == [*of_each[0], *(f"compiled {name}" for name in of_each[1])]


def test_a_plan_that_is_applied_again_runs_the_code_that_it_has() -> None:
    made: list[Any] = []

    @contextlib.contextmanager
    def applying(workload: Workload) -> Iterator[Step]:
        made.append(lambda model, batch: workload.loss_fn(model, batch))
        yield Step(dataclasses.replace(workload, loss_fn=made[-1]))

    apply, one, another = compiled_once(applying), chain(), chain()
    used = []
    for workload in (one, one, another):
        with apply(workload) as step:
            used.append(step.workload.loss_fn)
    assert used == [made[0], made[0], made[2]]


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
@scalar_kernels()
def test_one_plan_that_compiles_is_measured_beside_a_compiled_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, plan = methods("all")
    others = (m for m in methods("all") if m.name in (*PLAINS, "checkpoint every K-th block", "segments of K blocks"))
    chosen = (*others, dataclasses.replace(plan, settings=lambda task: [0.8]))
    monkeypatch.setattr("benchmarks.frontier.subject.methods", lambda kind: chosen)
    planned = functools.partial(memfit.plan, measure=False)
    monkeypatch.setattr("memfit.plan", lambda workload, **searched: planned(workload, **{**searched, "compile": True}))
    compiled, while_timed, compile_graph = list[object](), list[int](), PlannedBackend.__call__

    def counted(backend: PlannedBackend, module: Any, inputs: Any) -> Any:
        compiled.append(module)
        return compile_graph(backend, module, inputs)

    def timed(*given: Any) -> Any:
        graphs = counters["stats"]["unique_graphs"]
        found = interleaved(*given)
        while_timed.append(counters["stats"]["unique_graphs"] - graphs)
        return found

    monkeypatch.setattr(PlannedBackend, "__call__", counted)
    monkeypatch.setattr("benchmarks.frontier.subject.interleaved", timed)
    rows = {(row["method"], row["setting"]): row for row in Bench("gpt", SHORT, (0.8,), 0.0).rows("all")}
    mine = rows[OURS, "0.8"]
    assert mine.get("error_message") is None
    assert mine["compiler"] == "inductor" and mine["peak_bytes"] <= mine["budget_bytes"]
    assert rows[PLAINS[1], ""]["bitwise"] and mine["rounds"] == 6
    assert compiled and while_timed == [0]  # whatever eager methods do to the model between compiled steps


def test_eager_methods_never_touch_the_copy_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' switch leaves another function on the model, after which Dynamo compiles its code again."""
    models_of: dict[str, set[int]] = {"eager": set(), "compiled": set()}

    def method(sort: Any, name: str) -> Method:
        def apply(workload: Workload) -> Any:
            models_of[sort].add(id(workload.model))
            return applied(PLAIN, "")[1](workload)

        return Method(name, sort, lambda task: [""], lambda *_: Prepared(apply))

    chosen = (method("eager", "one"), method("compiled", PLAINS[1]), method("compiled", "other"))
    monkeypatch.setattr(
        "benchmarks.frontier.subject.methods", lambda kind: methods(kind) if kind == "eager" else chosen
    )
    rows = list(Bench("gpt", SUBJECT, (0.8,), 0.0).rows("all"))
    assert len(rows) == 3 and all("ratio" in row for row in rows)
    assert len(models_of["eager"]) == len(models_of["compiled"]) == 1 and models_of["eager"] != models_of["compiled"]


def test_without_the_plain_compiled_step_no_other_is_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Prepared:
        raise Unsupported("no graph")

    apply = stepping(lambda workload: contextlib.nullcontext())
    other = Method("other", "compiled", lambda task: [""], lambda *_: Prepared(apply))
    bench = Bench("gpt", SUBJECT, (0.8,), 0.0)
    chosen = (dataclasses.replace(other, name=PLAIN, make=failing), other)
    monkeypatch.setattr("benchmarks.frontier.subject.methods", lambda kind: chosen)
    assert ["error_message" in row for row in bench.rows("compiled")] == [True, True]


def test_one_parameter_with_another_gradient_and_one_that_is_not_a_number_are_beyond_rounding() -> None:
    workload, plain = applied(PLAIN, "")
    gradients = Gradients(workload)
    expected = gradients.of(plain)[1]
    rounding = rounding_of(gradients, plain, expected)
    assert all(0 < moved < 1e-4 * expected[name].abs().max() for name, moved in rounding.items())
    other = copy.deepcopy(expected)
    other["blocks.2.0.bias"][3] += 0.2 * other["blocks.2.0.bias"].abs().max()
    assert beyond_rounding(other, expected, rounding) == pytest.approx(0.2, rel=1e-2)
    other["head.bias"][0] = torch.nan
    assert math.isnan(beyond_rounding(other, expected, rounding))
    del other["head.bias"]
    assert beyond_rounding(other, expected, rounding) == float("inf")


def test_segments_hold_the_blocks_of_their_chain_in_order() -> None:
    model = Chain()
    blocks = list(model.blocks)
    with segmented(model, SUBJECT.chains, 4):
        assert all(isinstance(segment, Segment) for segment in model.blocks)
        assert [list(segment.blocks) for segment in model.blocks] == [blocks[:4], blocks[4:]]
    assert list(model.blocks) == blocks


def test_steps_run_in_turns_until_only_contenders_are_left() -> None:
    workload, plain = applied(PLAIN, "")
    times = interleaved({"a": (plain, workload), "b": (plain, workload)}, 0.0, lambda times: {"a"})
    assert len(times["a"]) == len(times["b"]) == 6
    assert None not in times["a"] and times["b"][3:] == [None, None, None]


def test_blocks_and_levels_of_every_subject_are_modules_of_its_model() -> None:
    small = {
        "gpt": functools.partial(models.gpt, width=64, length=8),
        "bert": functools.partial(models.bert, width=64, length=8, batch=1),
        "unet": functools.partial(models.unet, size=16, batch=1),
        "resnet50": functools.partial(models.resnet50, size=32, batch=2),
        "vit": functools.partial(models.vit, width=64, size=16, batch=1),
        "moe": functools.partial(models.moe, width=64, length=8, batch=1),
        "lstm": functools.partial(models.lstm, width=8, length=8, batch=2),
        "llama": functools.partial(models.llama, width=64, length=8, batch=1),
        "diffusion": functools.partial(models.diffusion, size=8, batch=1),
    }
    assert small.keys() == models.SUBJECTS.keys()
    for name, make in small.items():
        subject, model = models.SUBJECTS[name], make().model
        known = dict(model.named_modules())
        assert {*subject.blocks, *subject.levels} <= known.keys()
        assert len(set(subject.blocks)) == len(subject.blocks)
        for one in subject.chains:
            parent = known[one[0].rpartition(".")[0]]
            assert len(one) in (1, len(list(parent.children())))


@pytest.mark.ci
def test_a_small_case_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = (PLAIN, "checkpoint every K-th block", "transformers' switch", OURS)
    chosen = tuple(m for m in methods("eager") if m.name in wanted)
    monkeypatch.setattr("benchmarks.frontier.subject.methods", lambda kind: chosen)
    rows = list(Bench("gpt", SUBJECT, (0.8, 0.01), 0.0).rows("eager"))
    by = {(r["method"], r["setting"]): r for r in rows}
    assert by[PLAIN, ""]["ratio"] == 1.0 and by[PLAIN, ""]["bitwise"]
    assert "is not of transformers" in by["transformers' switch", ""]["error_message"]
    mine = by[OURS, "0.8"]
    assert mine["peak_bytes"] <= mine["budget_bytes"] == int(0.8 * by[PLAIN, ""]["peak_bytes"])
    assert mine["bitwise"] and mine["rounds"] == 6
    assert "no plan fits" in by[OURS, "0.01"]["error_message"]
    assert by[OURS, LOWEST]["peak_bytes"] <= by["checkpoint every K-th block", "1"]["peak_bytes"]
    assert summarised(rows)["eager"]["budget_violations"] == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("No such file: '/home/someone/.venv/lib/python3.11/site-packages/torch/x.py'", "No such file: 'x.py'"),
        ('  File "/tmp/torchinductor_me/ab/cab.py", line 3, in <module>', '  File "cab.py", line 3, in <module>'),
        ("g++ /tmp/me/a.cpp -I/usr/include/python3.11 -o=/tmp/me/a.so", "g++ a.cpp -Ipython3.11 -o=a.so"),
        ("see file:///home/me/log.txt, /a/b:/c/d", "see log.txt, b:d"),
        ("https://pytorch.org/docs/stable and memfit/capture/fake_workload.py, 3 MiB/s, 1 / 2 / 3, ~/x/y", None),
    ],
)
def test_what_failed_is_said_without_the_directories_of_this_machine(text: str, expected: str | None) -> None:
    assert without_place(text) == (text if expected is None else expected)


def test_a_row_of_what_failed_has_no_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/home/me/kernels/a.so")

    chosen = tuple(dataclasses.replace(m, make=failing) for m in methods("eager") if m.name == PLAIN)
    bench = Bench("gpt", SUBJECT, (0.8,), 0.0)
    monkeypatch.setattr("benchmarks.frontier.subject.methods", lambda kind: chosen)
    (row,) = bench.rows("eager")
    assert row["error_message"] == "FileNotFoundError: [Errno 2] No such file or directory: 'a.so'"


def test_the_copy_that_is_measured_is_not_the_workload() -> None:
    workload = chain()
    gradients = Gradients(real_copy(workload))
    assert not any(gradients.values[n].data_ptr() == p.data_ptr() for n, p in workload.model.named_parameters())
