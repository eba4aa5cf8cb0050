"""Batches of any kind, from the prediction to the planned step: held against measured peaks and a plain loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.capture import real_copy
from memfit.errors import WorkloadError
from memfit.hardware import find_device
from memfit.ir import Levers
from memfit.planner import capture_levers
from memfit.workload import Workload, samples_of
from tests.batch_cases import CONTAINERS, SAMPLES, WHOLE, Graphs, graphs, mlp, of, split_graphs
from tests.measuring import peaks

CASES = {**CONTAINERS, **SAMPLES, **WHOLE}
CUT = {**CONTAINERS, **SAMPLES}
ALIKE = ("packed, sorted", "packed, of an LSTM", "tuples of images and targets")
"""Batches that are cut as others are: CI takes them too."""


def graphs_that_are_split(**options: Any) -> Workload:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch), batch.y)

    return of(Graphs(), graphs(), loss_fn, split=split_graphs, **options)


SPLIT: dict[str, Callable[[], Workload]] = {
    "a number of graphs": functools.partial(graphs_that_are_split, batch_size=4),
    "as each batch says": functools.partial(graphs_that_are_split, batch_size=lambda batch: batch.num_graphs),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.ci) if c in ALIKE else c for c in CASES])
def test_the_peak_is_predicted(case: str) -> None:
    workload = CASES[case]()
    predicted, measured = peaks(workload, Levers(microbatch_size=samples_of(workload)))
    assert predicted == measured


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(c, marks=pytest.mark.ci) if c in ALIKE else c for c in CUT if "requires grad" not in c),
        *SPLIT,
    ],
)
def test_the_peak_of_microbatches_is_predicted(case: str) -> None:
    workload = {**CUT, **SPLIT}[case]()
    predicted, measured = peaks(workload, Levers(microbatch_size=max(1, samples_of(workload) // 3)))
    assert predicted == measured


def test_two_of_many_microbatches_that_differ_are_said_not_to_be_all() -> None:
    lengths = torch.arange(1, 41)
    batch = {"x": torch.randn(40, 40, 16), "lengths": lengths}
    workload = of(Trimmed(False), batch, lambda model, batch: model(batch["x"], batch["lengths"]).square().mean())
    trace = capture_levers(workload, Levers(microbatch_size=1), find_device("cpu"))
    assert trace.microbatches == 2 and trace.slack > 0
    assert any("different operators" in note for note in trace.notes)


class Trimmed(nn.Module):
    """Sequences as long as the longest of a microbatch, or those alone whose length is even."""

    def __init__(self, selects: bool) -> None:
        super().__init__()
        self.selects, self.layers = selects, mlp()

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = x[lengths % 2 == 0] if self.selects else x[:, : int(lengths.max())]
        found: torch.Tensor = self.layers(x)
        return found


LENGTHS = {
    "longer and longer": [3, 4, 9, 8, 17, 20, 33, 40],
    "the longest in the middle": [8, 9, 8, 40, 8, 9, 7, 8],
    "two alike, and longer ones": [8, 8, 8, 8, 32, 31, 40, 30],
}


@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize("case", LENGTHS)
def test_the_peak_is_that_of_the_microbatch_that_takes_most(case: str, selects: bool) -> None:
    batch = {"x": torch.randn(8, 40, 16), "lengths": torch.tensor(LENGTHS[case])}
    workload = of(Trimmed(selects), batch, lambda model, batch: model(batch["x"], batch["lengths"]).square().mean())
    predicted, measured = peaks(workload, Levers(microbatch_size=2))
    assert predicted == measured


def plain_loop(workload: Workload, steps: int) -> list[torch.Tensor]:
    for _ in range(steps):
        workload.optimizer.zero_grad()
        loss = workload.loss_fn(workload.model, workload.batch)
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        workload.optimizer.step()
    return [p.detach() for p in workload.model.parameters()]


def lowest(workload: Workload, numerics: Any) -> memfit.Plan:
    """Return a plan that has to do something: for a budget a little below the step's peak, or that step's."""
    peak = memfit.estimate(workload).peak_bytes
    options: dict[str, Any] = {"numerics": numerics, "time_limit_seconds": 2, "points": 1, "optimizers": ["as-is"]}
    options["precisions"] = ["32-true"]
    try:
        return memfit.plan(workload, budget=peak - 600, **options)
    except memfit.InfeasibleError:
        return memfit.plan(workload, budget=peak + 1000, **options)


@pytest.mark.parametrize("case", ["object", "slots", "a number", "lists of images and targets", "packed", *WHOLE])
def test_an_exact_plan_trains_as_a_plain_loop(case: str) -> None:
    build = CASES[case]
    plan, workload = lowest(build(), "exact"), build()
    with memfit.apply(plan, workload) as step:
        for _ in range(2):
            step(workload.batch)
    for planned, plain in zip(workload.model.parameters(), plain_loop(build(), 2), strict=True):
        assert torch.equal(planned, plain)


@pytest.mark.parametrize(
    "case", ["a graph", "packed", *(pytest.param(c, marks=pytest.mark.ci) for c in ("a sparse adjacency", "mapping"))]
)
def test_a_plan_is_what_it_says(case: str) -> None:
    plan = lowest(CASES[case](), "reordered")
    assert not memfit.verify(plan, CASES[case](), steps=0).failures


@pytest.mark.parametrize("case", ["mapping", "images and targets", "packed, sorted", *SPLIT])
def test_microbatches_have_the_gradients_of_the_batch(case: str) -> None:
    build = {**CUT, **SPLIT}[case]
    workload = build()
    with memfit.Step(workload, microbatch_size=1) as step, memfit.Step(build()) as whole:
        (loss, gradients), (whole_loss, whole_gradients) = (
            step.gradients(workload.batch),
            whole.gradients(build().batch),
        )
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    for name, gradient in whole_gradients.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-3, atol=1e-4)


def test_a_graph_is_said_to_be_one_sample() -> None:
    workload = WHOLE["a graph"]()
    (note,) = [note for note in memfit.estimate(workload).notes if "one sample" in note]
    assert "(40, 16), (2, 120)" in note and "Workload.split" in note
    assert samples_of(workload) == 1
    assert not any("one sample" in n for n in memfit.estimate(dataclasses.replace(workload, batch_size=1)).notes)
    assert any("one sample" in n for n in lowest(workload, "reordered").notes)


def test_graphs_are_cut_where_the_workload_says_how() -> None:
    workload = graphs_that_are_split(batch_size=4)
    assert samples_of(workload) == 4
    step = memfit.Step(workload, microbatch_size=1)
    assert [part.num_graphs for part in step.split(workload.batch)] == [1] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 is not above 0"),
        (
            {"batch_size": 4},
            "batch_size=4, and the tensors of .* have different first dimensions: give Workload.split",
        ),
    ],
)
def test_numbers_of_samples_that_can_not_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        memfit.estimate(dataclasses.replace(WHOLE["a graph"](), **options))


def test_a_step_without_data_says_what_to_give() -> None:
    with pytest.raises(WorkloadError, match="batch is None.*makes its own data, give Workload.batch_size=1"):
        dataclasses.replace(WHOLE["no data"](), batch_size=None)


@pytest.mark.parametrize(
    "case",
    [
        "packed, of an LSTM",
        "slots",
        *(pytest.param(c, marks=pytest.mark.ci) for c in ("a graph", "a sparse adjacency")),
    ],
)
def test_a_gpu_that_is_not_here_is_predicted_for(case: str) -> None:
    assert memfit.estimate(CASES[case](), device="h200").peak_bytes > 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.jagged])
def test_layouts_that_can_not_be_captured_are_named(layout: torch.layout) -> None:
    tensor = (
        torch.nested.nested_tensor([torch.ones(2, 16), torch.ones(1, 16)], layout=layout)
        if layout is torch.jagged
        else torch.eye(16).to_sparse_coo()
    )
    workload = of(mlp(), {"x": tensor}, lambda m, b: m(b["x"].to_dense()).mean())
    if layout is not torch.jagged:
        workload = dataclasses.replace(
            workload, batch={"x": torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 16), check_invariants=False)}
        )
    with pytest.raises(WorkloadError, match=rf"layout {layout}.*give a dense tensor"):
        memfit.estimate(workload)


def test_a_batch_on_the_meta_device_is_predicted_as_one_with_data() -> None:
    with_data = CONTAINERS["object"]()
    batch = {name: torch.empty_like(getattr(with_data.batch, name), device="meta") for name in ("x", "y")}
    on_meta = of(mlp(), batch, lambda m, b: F.mse_loss(m(b["x"]), b["y"]))
    assert memfit.estimate(on_meta).peak_bytes == memfit.estimate(with_data).peak_bytes


def test_copies_do_not_share_a_batch() -> None:
    for case in CASES:
        workload = CASES[case]()
        copied = real_copy(workload)
        assert type(copied.batch) is type(workload.batch)
        assert copied.batch is not workload.batch or workload.batch is None
