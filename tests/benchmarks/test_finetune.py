"""The fine-tuning benchmark: hand-made parts against what they stand for, and its figures on rows made up."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import memfit
from benchmarks.finetune import __main__ as finetune
from benchmarks.finetune import combinations, curves, figures, measured, paper, peers, published
from benchmarks.finetune.models import TINY, llama
from benchmarks.finetune.stacks import (
    ALST,
    ALST_HOOKS,
    ALST_HOST,
    CHECKPOINTS,
    LIGER,
    PLAIN,
    STACKS,
    TRL,
    UNSLOTH,
    Stack,
    stacked,
)
from benchmarks.processes import Output
from memfit import recipes
from memfit.capture import measure_peak_bytes, real_copy
from memfit.errors import InfeasibleError, PlanError, UsageError
from memfit.hardware import find_device
from memfit.ir import Levers
from memfit.workload import Workload

GIB, MIB = 2**30, 2**20
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
TOKENS = 512


@pytest.fixture(scope="module", params=[False, True], ids=["full", "LoRA"])
def plain(request: pytest.FixtureRequest) -> Workload:
    return llama(TINY, TOKENS, lora=request.param)


def gradients(stack: Stack, workload: Workload) -> tuple[float, dict[str, Tensor]]:
    copied = real_copy(workload)
    with stacked(stack, copied) as step:
        loss = step.forward(copied.batch)
        loss.backward()
        found = {n: p.grad for n, p in copied.model.named_parameters() if p.grad is not None}
    return loss.item(), found


@pytest.mark.parametrize("stack", [s for s in STACKS if not s.in_hooks], ids=lambda stack: stack.name)
def test_stacks_have_the_plain_steps_gradients(plain: Workload, stack: Stack) -> None:
    expected_loss, expected = gradients(PLAIN, plain)
    loss, found = gradients(stack, plain)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert found.keys() == expected.keys() and found
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 2e-5 * gradient.abs().max(), name
    if stack is CHECKPOINTS:
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("stack", [ALST_HOOKS, ALST_HOST], ids=lambda stack: stack.name)
def test_updates_in_hooks_are_the_optimizers(stack: Stack) -> None:
    trained = []
    for each in (ALST, stack):
        workload = llama(TINY, TOKENS)
        with stacked(each, workload) as step:
            for _ in range(3):
                step(workload.batch)
        trained.append(workload.model.state_dict())
    assert all(torch.equal(trained[0][name], value) for name, value in trained[1].items())


def test_each_part_lowers_the_peak_and_comes_off_again() -> None:
    workload = llama(TINY, TOKENS)
    peaks = {}
    for stack in STACKS:
        copied = real_copy(workload)
        own = [vars(module).get("forward") for module in copied.model.modules()]
        with stacked(stack, copied) as step:
            step(copied.batch)
            peaks[stack.name] = measure_peak_bytes(step, copied.batch)
        assert [vars(module).get("forward") for module in copied.model.modules()] == own
        assert not any(p._post_accumulate_grad_hooks for p in copied.model.parameters())
    order = [peaks[stack.name] for stack in (PLAIN, CHECKPOINTS, LIGER, TRL, ALST, ALST_HOOKS, ALST_HOST)]
    assert all(later < earlier for earlier, later in itertools.pairwise(order))
    # 2 layers' inputs of 512 x 128 in fp32, of which one is there while its layer is made again
    assert peaks[ALST_HOOKS.name] - peaks[ALST_HOST.name] == 256 * 1024
    assert peaks[UNSLOTH.name] <= peaks[LIGER.name]


def test_tiles_have_the_modules_gradients_where_rows_do_not_divide_the_tokens() -> None:
    layer = nn.Sequential(nn.Linear(4, 12), nn.SiLU(), nn.Linear(12, 6))
    x = torch.randn(2, 7, 4, requires_grad=True)
    (layer(x) * torch.arange(6.0)).sum().backward()
    expected = [x.grad, *(p.grad for p in layer.parameters())]
    copied = x.detach().requires_grad_()
    layer.zero_grad()
    out = peers.TokenTiles.apply(layer.forward, 3, copied, *layer.parameters())
    (out * torch.arange(6.0)).sum().backward()
    for found, wanted in zip([copied.grad, *(p.grad for p in layer.parameters())], expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("ignored", [0, 5])
def test_the_chunked_loss_is_the_cross_entropy(ignored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "chunk_rows", lambda rows, weight: 3)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 8, requires_grad=True) for n in (10, 20))
    targets = torch.randint(20, (10,))
    targets[:ignored] = -100
    expected = nn.functional.cross_entropy(hidden @ weight.t(), targets)
    wanted = torch.autograd.grad(3 * expected, (hidden, weight))
    found = peers.ChunkedCrossEntropy.apply(hidden, weight, targets)
    torch.testing.assert_close(found, expected)
    for gradient, other in zip(torch.autograd.grad(3 * found, (hidden, weight)), wanted, strict=True):
        torch.testing.assert_close(gradient, other)


def test_chunks_are_as_ligers_rule_has_them() -> None:
    assert peers.chunk_rows(4096, torch.empty(16_000, 256, device="meta")) == 128
    assert peers.chunk_rows(8192, torch.empty(128_256, 4096, device="meta")) == 256
    assert peers.chunk_rows(7, torch.empty(10, 10, device="meta")) == 7


def test_steps_are_timed_in_turns() -> None:
    class Step:
        workload = llama(TINY, 8)
        calls = 0

        def __call__(self, batch: Any) -> None:
            self.calls += 1

    steps = {"a": Step(), "b": Step()}
    found = measured.interleaved(steps, 4)
    assert [len(seconds) for seconds in found.values()] == [4, 4] == [step.calls for step in steps.values()]


def stack_row(stack: str, mib: float, **more: Any) -> dict[str, Any]:
    start = {"model": "small", "method": "full", "tokens": 4096, "by": "hand", "first_loss": 9.0}
    return {**start, "stack": stack, "peak_bytes": int(mib * MIB), "cpu_seconds": 1.0, **more}


def paper_row(key: str, gib: float, **more: Any) -> dict[str, Any]:
    setup = next(setup for setup in paper.SETUPS if setup.key == key)
    found = {"kind": "lowest", "layers": 32, "plan_cpu_seconds": 7.0, "lowest_peak_bytes": int(gib * GIB)}
    return {**paper._start(setup), **found, **more}


def context_row(device: str, share: float, fits: bool) -> dict[str, Any]:
    return paper_row("qlora_8k_gib", 9, kind="fits", device=device, share=share, fits=fits, tokens=100)


CASES = [
    stack_row("plain", 400),
    stack_row(ALST.name, 200),
    stack_row("memfit, exact, lowest", 300, error=0.001, levers="1 region"),
    stack_row("memfit, reordered, lowest", 180, error=-0.002, time_ratio=1.25, beside=ALST.name),
    {**stack_row("memfit, reduced, lowest", 0), "error_message": "no plan fits"},
    stack_row(f"memfit at the peak of: {ALST.name}", 199, error=0.0, time_ratio=1.02, beside=ALST.name),
    stack_row("plain", 4000, tokens=16_384, model="longer"),
    paper_row("lora_8k_gib", 30, kind="extrapolated from 2 and 4 layers"),
    paper_row("lora_8k_gib", 5, layers=2),
    paper_row("lora_8k_gib", 20),
    paper_row("lora_8k_gib", 21, kind="fits", fits=True, plan_cpu_seconds=55.0),
    paper_row("full_8k_gib", 40, kind="extrapolated from 2 and 4 layers"),
    {"part": "lora_128k_gib", "error_message": "no end within 60 s"},
]
del CASES[4]["peak_bytes"]
RESULT = {
    "command": "python -m benchmarks.finetune",
    "machine": {"description": "a machine", "threads": 1},
    "versions": {"torch": "2.13.0"},
    "date": "2026-01-01",
    "cases": CASES,
}


def test_the_summary_takes_whole_models_before_slices() -> None:
    found = figures.summarised(CASES)
    assert (found["small_plain_mib"], found["small_hand_mib"], found["small_reordered_mib"]) == (400, 200, 180)
    assert (found["small_reduced_mib"], found["time_ratio"], found["time_ratio_at_the_lowest"]) == (None, 1.02, 1.25)
    assert found["largest_abs_error"] == pytest.approx(0.002)
    assert (found["lora_8k_gib"], found["full_8k_gib"], found["lora_128k_gib"]) == (20, 40, None)
    assert (found["plan_cpu_seconds"], found["failed"]) == (55, 1)
    assert found["extrapolated"] == ["full_8k_gib"], "what is quoted from a slice, and nothing else"
    assert found["context_ratio_to_unsloth"] is None, "not all cards were tried"


def test_the_ratio_of_contexts_is_the_worst_cards() -> None:
    cases = [context_row(device, 1.0, True) for device in paper.UNSLOTH]
    assert figures.summarised(cases)["context_ratio_to_unsloth"] == 1.0
    cases += [context_row("rtx-3060", 0.5, True)]
    cases[0] = context_row("rtx-3060", 1.0, False)
    assert figures.summarised(cases)["context_ratio_to_unsloth"] == 0.5
    assert figures.summarised(cases[:-1])["context_ratio_to_unsloth"] == 0


def test_tables_show_every_row_and_where_they_are_from() -> None:
    stacks = figures.stacks_table(RESULT)
    assert (
        "| memfit, reduced, lowest | hand | no plan fits |" in stacks
        and "50.0%" in stacks
        and "1.00 s, 2 % more than ALST-like" in stacks
    )
    on_paper = figures.paper_table(RESULT)
    assert "extrapolated from 2 and 4 layers" in on_paper and "21.0 GiB: fits" in on_paper
    assert "5.0 GiB |" not in on_paper, "slices are no rows"
    result = {**RESULT, "cases": [context_row("rtx-3060", 0.5, False), context_row("rtx-4090", 1.0, True)]}
    contexts = figures.contexts_table(result)
    assert "| rtx-3060 | none of 100 | 21,848 | 932 |" in contexts and "| rtx-4090 | 100 |" in contexts


def test_a_line_through_slices_gives_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = {2: 6 * GIB, 4: 8 * GIB}
    monkeypatch.setattr(
        paper, "lowest", lambda setup, layers: paper_row(setup.key, 0, layers=layers, lowest_peak_bytes=lowest[layers])
    )
    *slices, whole = paper.extrapolated(paper.SETUPS[0])
    assert [row["layers"] for row in slices] == [2, 4]
    assert (whole["lowest_peak_bytes"], whole["layer_bytes"]) == (36 * GIB, GIB)
    monkeypatch.setattr(paper, "lowest", lambda setup, layers: {"error_message": "CaptureError: no"})
    assert list(paper.extrapolated(paper.SETUPS[0]))[-1]["error_message"] == "CaptureError: no"


@pytest.mark.ci
def test_memfits_plans_keep_to_their_predictions() -> None:
    found = measured.rows(TINY, 256, (LIGER, ALST), classes=("reordered",), rounds=1)
    planned = [row for row in found if row["by"] == "memfit" and "peak_bytes" in row]
    assert planned and all(abs(row["error"]) < 0.005 for row in planned)
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in planned)
    assert all(row["first_loss"] == pytest.approx(found[0]["first_loss"], rel=1e-5) for row in planned)


def test_a_model_on_paper_has_no_data() -> None:
    workload = paper.on_paper(lambda: llama(TINY, 64, lora=True))
    assert {p.device.type for p in workload.model.parameters()} == {"meta"}
    assert {t.device.type for t in workload.batch.values()} == {"cpu"}
    trained = {name.split(".")[-3] for name, p in workload.model.named_parameters() if p.requires_grad}
    assert trained == {"lora_A", "lora_B"}


SMALL_TRAINING = curves.Training(
    "finetune",
    functools.partial(
        recipes.finetune,
        **{"n_layer": 1, "d_model": 64, "n_head": 2, "context": 32, "batch_size": 4, "base_steps": 2},
        n_validation_windows=8,
        batches_per_epoch=10,
    ),
    ("base_model.model.model.layers.0",),
    "mlp",
    "validation_loss",
    head="base_model.model.lm_head",
    seeds=2,
)


def test_levers_train_beside_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "POINTS", 5)
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        found = list(curves.rows(SMALL_TRAINING, 10))
    finally:
        torch.use_deterministic_algorithms(deterministic)
    by_lever = {row["lever"]: row for row in found if row["seed"] == 0}
    assert len(found) == len(by_lever) + 2 and len(by_lever[curves.PLAIN]["curve"]) == 5
    assert by_lever["activation checkpointing"]["bitwise"] and not by_lever["bf16-mixed"]["bitwise"]
    assert 0 < by_lever["microbatches"]["largest_difference"] < 1e-4 < 10 * by_lever["bf16-mixed"]["largest_difference"]
    summary = curves.summary_of(found)
    assert summary["exact_runs"] == summary["exact_runs_with_the_same_bits"] == 2
    low, high = summary["lora_validation_loss"]
    assert low < high
    assert [row["seed"] for row in found if row["lever"] == curves.QLORA] == [0, 1]
    found = [row for row in found if row["lever"] != curves.QLORA]
    quantised = {**found[0], "lever": curves.QLORA, "numerics": "reduced", "reached": high}
    assert curves.summary_of([*found, quantised])["qlora_within_the_spread"] is True
    others = [quantised, {**quantised, "reached": high + 1}]
    summary = curves.summary_of([*found, *others])
    assert summary["qlora_within_the_spread"] is False and summary["qlora_seeds"] == 2
    assert summary["qlora_validation_loss"] == pytest.approx(high + 0.5)
    assert "bit-identical" in figures.curves_table({**RESULT, "cases": found})


def test_a_lever_that_this_memfit_has_not_is_left_out() -> None:
    lever = curves.Lever("new", "exact", ({"no_such_field": 1}, {"precision": "bf16-mixed"}))
    assert curves.settings_of(lever, 4) == Levers(microbatch_size=4, precision="bf16-mixed")
    assert curves.settings_of(curves.Lever("new", "exact", ({"no_such_field": 1},)), 4) is None


def test_parts_run_apart_and_a_run_that_was_cut_short_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def output_of(command: list[str], timeout_seconds: float) -> Output:
        asked.append(command[-1])
        if command[-1] == "lora_8k_gib":
            return Output([], f"no end within {timeout_seconds:g} s", "")
        return Output([stack_row("plain", 400)], "exit status 0", "")

    monkeypatch.setattr(finetune, "output_of", output_of)
    threads, names = torch.get_num_threads(), ["cpu, 4k tokens", "lora_8k_gib"]
    try:
        for _ in range(2):
            cases, summary = finetune.run(False, only=names, minutes=1, rows=tmp_path / "rows")
            assert summary["small_plain_mib"] == 400 and summary["failed"] == 1
            assert cases[1] == {"part": "lora_8k_gib", "error_message": "no end within 60 s"}
    finally:
        torch.set_num_threads(threads)
    assert asked == [*names, "lora_8k_gib"], "what ended well is not run again"
    with pytest.raises(UsageError, match="--only 12k: there are cpu, 4k tokens"):
        finetune.run(False, only=["12k"])


def test_every_setup_is_a_card_of_the_catalogue_and_a_key_of_its_own() -> None:
    keys = [setup.key for setup in paper.SETUPS]
    assert len({*keys}) == len(keys) and {"lora_8k_gib", "qlora_8k_gib", "full_8k_gib"} <= {*keys}
    cards = {device: find_device(device).memory_bytes for device in paper.UNSLOTH}
    assert [round(nbytes / GIB) for nbytes in cards.values()] == [12, 16, 24, 80]
    assert paper.UNSLOTH.keys() == paper.HF.keys()
    assert all(paper.HF[device] < tokens for device, tokens in paper.UNSLOTH.items())


def test_a_setup_is_planned_and_its_end_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = paper.SETUPS[0]
    monkeypatch.setattr(paper, "eight_billion", lambda layers: TINY)
    told = InfeasibleError("Does not fit", budget_bytes=1, lowest_peak_bytes=7, where="there")
    budgets: list[Any] = []

    def plan(workload: Workload, budget: Any, **options: Any) -> None:
        budgets.append(budget)
        assert options["device"] == setup.device and {p.device.type for p in workload.model.parameters()} == {"meta"}
        raise told

    monkeypatch.setattr(memfit, "plan", plan)
    row = paper.lowest(replace(setup, tokens=64), 2)
    assert (row["lowest_peak_bytes"], row["kind"], row["layers"], row["where"]) == (7, "lowest", 2, "there")
    monkeypatch.setitem(paper.UNSLOTH, "rtx-4090", 640)
    rows = list(paper.context("rtx-4090"))
    assert [row["tokens"] for row in rows] == [640, 320, 160, 64] and not any(row["fits"] for row in rows)
    assert budgets == [paper._LEAST_BYTES, *["100%"] * 4]
    monkeypatch.setattr(memfit, "plan", lambda *a, **o: (_ for _ in ()).throw(UsageError("not so")))
    assert paper.lowest(replace(setup, tokens=64), 2)["error_message"] == "UsageError: not so"
    assert len(list(paper.context("rtx-4090"))) == 1, "what fails is not tried again with fewer tokens"


@pytest.fixture(scope="module")
def adapted() -> Iterator[combinations.Base]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combinations, "TOKENS", 64)
        yield combinations.Base("LoRA")


@pytest.mark.ci
def test_levers_together_hold_what_is_predicted_and_keep_the_numbers(adapted: combinations.Base) -> None:
    values, draw, found = adapted.values(), random.Random(1), []
    assert {"precision", "optimizer", "update", "chunked_loss", "tiles", "frozen_weights", "lean"} <= values.keys()
    while len(found) < 6:
        with contextlib.suppress(PlanError):
            found.append(adapted.row(combinations.drawn(adapted, values, draw)))
    assert all(row["holds"] and abs(row["error"]) < 0.005 for row in found), found
    assert any(row["rounding_difference"] for row in found) and any("region" in row["combination"] for row in found)


@pytest.mark.ci
def test_a_lever_that_is_predicted_otherwise_than_it_runs_is_noticed(
    adapted: combinations.Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = adapted.steps.plain
    levers = msgspec.structs.replace(plain, update="in-backward", lean=("*",))
    right = adapted.row(levers)
    assert right["bitwise"] and right["holds"] and abs(right["error"]) < 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(combinations, "capture_levers", lambda *given: adapted.steps.traces[plain])
        assert adapted.row(levers)["error"] > 0.005
    ran = combinations.run(adapted.workload, levers)
    off = {name: gradient * (1 + 1e-6) for name, gradient in ran.gradients.items()}
    weights = [weight.nextafter(weight + 1) for weight in ran.weights]
    for other, holds in ((ran, True), (ran._replace(weights=weights), False), (ran._replace(losses=[0.0]), False)):
        monkeypatch.setattr(combinations, "run", lambda *_, other=other: other)
        assert adapted.row(levers)["holds"] is holds
    assert 5e-7 < combinations.difference(off, ran.gradients) < 2e-6
    assert combinations.difference({}, ran.gradients) == float("inf")


def test_the_summary_tells_the_farthest_combination() -> None:
    row = {"base": "LoRA", "combination": "a, b", "numerics": "exact", "bitwise": True, "gradient_difference": 0.0}
    row |= {"predicted_peak_bytes": MIB, "peak_bytes": MIB, "error": 1e-4, "holds": True, "rounding_difference": None}
    failed = {**{name: row[name] for name in ("base", "combination", "numerics")}, "error_message": "CaptureError: no"}
    cases = [{**row, "alone": False}, {**row, "alone": False, "error": -2e-3}, {**row, "alone": True, "holds": False}]
    cases += [{**failed, "alone": True}, {"refused_combinations": {"a can't be combined with b": 3}}]
    found = figures.summarised(cases)
    assert (found["combinations"], found["combinations_largest_abs_error"]) == (2, 2e-3)
    assert (found["levers_alone"], found["levers_alone_largest_abs_error"]) == (2, 1e-4)
    assert (found["combinations_that_hold"], found["combinations_that_fail"], found["combinations_refused"]) == (
        2,
        2,
        3,
    )
    table = figures.combinations_table({**RESULT, "cases": cases})
    assert "| 1.00 MiB | 1.00 MiB | -0.2000% | bit-identical | yes |" in table and "CaptureError: no" in table


def test_published_peaks_stand_beside_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def output_of(command: list[str], timeout_seconds: float) -> Output:
        asked.append(command[-1])
        return Output([{"peak_bytes": 2 * GIB}] if len(asked) > 1 else [], "exit status 1", "")

    monkeypatch.setattr(published, "output_of", output_of)
    found = list(published.rows())
    assert asked == list(published.ROWS) and found[0]["error_message"] == "exit status 1"
    for row in found[1:]:
        assert row["error"] == pytest.approx(2 * GIB / row["published_bytes"] - 1) and row["differs"]
        find_device(row["device"])
    table = figures.published_table({**RESULT, "cases": found})
    assert all(f"| {name} |" in table for name in asked)


def test_torchtunes_chunks_have_the_loss_of_the_whole() -> None:
    config = {**published.LLAMA_3B, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 101}
    torch.manual_seed(0)
    made = published.torchtune(config, 2, 16)
    made.batch["tokens"].random_(101)
    whole = published.torchtune(config, 2, 16, chunked=False).loss_fn(made.model, made.batch)
    torch.testing.assert_close(made.loss_fn(made.model, made.batch), whole)
