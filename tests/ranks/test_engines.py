"""A step that ranks share against the step of one process: the same gradients, weights, losses, and who draws what."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

from memfit.errors import MemfitError, OutOfMemoryError, PlanError, PlanMismatchError, RankError
from memfit.hardware import allocated, find_device
from memfit.ir import Levers, Region, Regions, Sharding
from memfit.levers import applied
from memfit.planner import capture_levers
from memfit.ranks import Group, SingleProcess, check_same, each, once
from memfit.ranks.engines import Gather, ReduceScatter
from memfit.workload import Workload, fingerprint
from tests.models import squared_error
from tests.processes import on_ranks
from tests.ranks.trainings import UNITS, Model, whole

STEPS = 3
SHARDINGS = {
    "ddp": Sharding(world_size=2, mode="ddp"),
    "ddp with views": Sharding(world_size=2, mode="ddp", gradient_as_bucket_view=True),
    "ddp, reduced at the last": Sharding(world_size=2, mode="ddp", reduces="last"),
    "kept": Sharding(world_size=2, mode="zero2", units=UNITS),
    "kept, reduced at the last": Sharding(world_size=2, mode="zero2", units=UNITS, reduces="last"),
    "resharded": Sharding(world_size=2, mode="zero3", units=UNITS),
    "one kept": Sharding(world_size=2, mode="zero3", units=UNITS, kept=UNITS[1:]),
    "no units": Sharding(world_size=2, mode="zero3", units=()),
}


def mean_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Call parts of a model by themselves."""
    logits = model.head(model.features(batch["tokens"]))
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def sum_and_count(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets = model.head(model.features(batch["tokens"])), batch["targets"]
    kept = targets != 0
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * kept.flatten()).sum(), kept.sum()


def workload(samples: int = 4, *, counted: bool = False, momentum: float = 0.0) -> Workload:
    torch.manual_seed(0)
    model = Model(dropout=0.0)
    del model.count  # DDP sends buffers with some microbatches only
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5, momentum=0.9) if momentum else torch.optim.AdamW(trained, lr=0.1)
    batch = {"tokens": torch.randint(13, (samples, 5)), "targets": torch.randint(13, (samples, 5))}
    batch["targets"][:1, :4] = 0  # uneven counts
    loss_fn = sum_and_count if counted else mean_loss
    return Workload(model, batch, loss_fn, optimizer, max_grad_norm=1.0)


def trained(given: Workload, levers: Levers, *, is_passed_first: bool = False) -> dict[str, Any]:
    """Return the losses, gradient norms and first gradients of some steps, and the weights after them.

    With `is_passed_first` the model's own forward pass runs before the first step, as in a run that goes on with an
    evaluation.
    """
    before, passed = fingerprint(given), None
    with applied(levers, given) as step:
        if is_passed_first:
            with torch.no_grad():
                passed = step.options.ranks.outside(lambda: mean_loss(given.model, given.batch).item())
        loss, gradients = step.gradients(given.batch)
        results = [step(given.batch) for _ in range(STEPS)]
        weights = whole(dict(given.model.named_parameters()))
        assert fingerprint(given) == fingerprint(step.workload) == before  # where an engine changes classes too
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    found = {"loss": loss, "gradients": gradients, "losses": losses, "norms": norms, "weights": weights}
    return {**found, "passed": passed}


def as_rank(rank: int, sharding: Sharding, samples: int, counted: bool, **options: bool) -> dict[str, Any]:
    given = workload(samples, counted=counted)
    if rank:  # weights become the first rank's
        with torch.no_grad():
            for parameter in given.model.parameters():
                parameter.add_(rank)
    return trained(given, Levers(microbatch_size=2, sharding=sharding), **options)


def alone(samples: int, world_size: int, counted: bool = False, size: int | None = None) -> dict[str, Any]:
    """Return the same of one process, with each rank's part as a microbatch."""
    return trained(workload(samples, counted=counted), Levers(microbatch_size=size or samples // world_size))


PASSED = ("ddp", "kept", "resharded")
"""Those whose first forward pass is outside of steps."""


def halved(rank: int) -> Iterator[Any]:
    for name, sharding in SHARDINGS.items():
        yield as_rank(rank, sharding, 4, False, is_passed_first=name in PASSED)


@pytest.fixture(scope="module")
def halves() -> dict[str, list[Any]]:
    """Return what each rank found, by sharding."""
    return dict(zip(SHARDINGS, zip(*on_ranks(2, halved), strict=True), strict=True))


@pytest.mark.parametrize("name", SHARDINGS)
def test_two_ranks_are_bitwise_one_process_that_adds_up_two_halves(name: str, halves: dict[str, list[Any]]) -> None:
    expected, given = alone(4, 2), workload()
    for found in halves[name]:
        if name in PASSED:
            assert found["passed"] == pytest.approx(mean_loss(given.model, given.batch).item(), rel=1e-6)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert found["gradients"].keys() == expected["gradients"].keys()
        assert all(torch.equal(found["gradients"][n], g) for n, g in expected["gradients"].items())
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        for weight_name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][weight_name], weight, rtol=1e-4, atol=1e-5)


DIVIDED = list(itertools.product(("ddp", "zero3"), (8, 9, 3, 1), (False, True)))


def divided(rank: int) -> Iterator[Any]:
    for mode, samples, counted in DIVIDED:
        sharding = Sharding(world_size=4, mode=mode, units=None if mode == "ddp" else UNITS, reduces="last")
        yield as_rank(rank, sharding, samples, counted)


@pytest.fixture(scope="module")
def parts() -> dict[tuple[Any, ...], list[Any]]:
    """Return what each of four ranks found, by mode, samples, and whether they are counted."""
    return dict(zip(DIVIDED, zip(*on_ranks(4, divided), strict=True), strict=True))


@pytest.mark.ci
@pytest.mark.parametrize(("mode", "samples", "counted"), DIVIDED)
def test_however_a_batch_divides_the_step_is_that_of_one_process(
    mode: str, samples: int, counted: bool, parts: dict[tuple[Any, ...], list[Any]]
) -> None:
    """Four ranks, microbatches of one or two: parts that differ, counts that differ, and ranks without samples."""
    expected = alone(samples, 4, counted, size=1)
    for found in parts[mode, samples, counted]:
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        for name, gradient in expected["gradients"].items():
            scale = float(gradient.abs().max())
            assert float((found["gradients"][name] - gradient).abs().max()) <= 1e-6 * scale
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)


def four(rank: int) -> Iterator[Any]:
    zero3 = Sharding(world_size=4, mode="zero3", units=UNITS)
    for sharding in (zero3, replace(zero3, mode="zero2"), replace(zero3, replicas=2)):
        yield trained(workload(8), Levers(microbatch_size=2, sharding=sharding))["gradients"]


def test_four_ranks_kept_or_gathered_again_are_bitwise_equal_and_hybrid_within_rounding() -> None:
    expected = alone(8, 4)
    for found in on_ranks(4, four):
        for name, gradient in expected["gradients"].items():
            again, kept, mixed = (gradients[name] for gradients in found)
            assert torch.equal(again, kept)
            torch.testing.assert_close(mixed, gradient, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(again, gradient, rtol=1e-5, atol=1e-7)


def dropping(rank: int, sharding: Sharding) -> Iterator[Any]:
    """Return the masks that the ranks draw, and what PyTorch's generator gives after a step."""
    torch.manual_seed(5)
    seen: list[list[float]] = []
    model = nn.Linear(4, 4)

    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        seen.append(F.dropout(torch.ones(64)).tolist())
        return model(batch).sum() * 0.1

    given = Workload(model, torch.ones(4, 4), loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    with applied(Levers(microbatch_size=2, sharding=sharding), given) as step:
        step(given.batch)
        step(given.batch)
    yield seen, torch.rand(3).tolist()


def test_each_rank_draws_its_own_numbers_in_a_step_and_all_the_same_outside() -> None:
    found, again = (on_ranks(2, dropping, SHARDINGS["ddp"]) for _ in range(2))
    assert found == again
    ((first, after),), ((second, after_too),) = found
    masks = [*first, *second]
    assert len({tuple(mask) for mask in masks}) == len(masks) == 4
    assert after == after_too


def with_state(rank: int, sharding: Sharding | None) -> Iterator[dict[str, torch.Tensor]]:
    """An optimizer that has made a step before the ranks share it."""
    given = workload(momentum=0.9)
    with applied(Levers(microbatch_size=4), given) as step:
        step(given.batch)
    yield trained(given, Levers(microbatch_size=2, sharding=sharding))["weights"]


def test_the_optimizers_state_is_cut_as_its_parameters_are() -> None:
    (expected,) = with_state(0, None)
    for (found,) in on_ranks(2, with_state, SHARDINGS["resharded"]):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def refused(rank: int) -> Iterator[Any]:
    wrong = {
        "world_size=3": Sharding(world_size=3, mode="ddp"),
        "'blocks.7'": Sharding(world_size=2, mode="zero3", units=("blocks.7",)),
        "can be predicted only": Sharding(world_size=2, mode="zero1"),
    }
    for text, sharding in wrong.items():
        levers = Levers(microbatch_size=2, sharding=sharding)
        with pytest.raises(MemfitError, match=text), applied(levers, workload()):
            pass
    yield True


def test_what_does_not_go_is_refused_by_name() -> None:
    assert on_ranks(2, refused) == [[True]] * 2
    levers = Levers(microbatch_size=2, sharding=SHARDINGS["ddp"])
    with pytest.raises(PlanError, match="torchrun --nproc-per-node 2"), applied(levers, workload()):
        pass


def wrapped(rank: int, levers: Levers) -> Iterator[tuple[int, int, list[float]]]:
    """Yield the peak of what putting an engine on a model allocates, the model's bytes, and its first weights."""
    torch.manual_seed(rank)  # weights and buffers of its own
    model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Linear(512, 8))
    model[0].weight.requires_grad_(False)  # the engine then has small buckets
    model[1].running_mean.fill_(rank)
    batch = {"x": torch.randn(4, 256), "y": torch.randint(8, (4,))}
    workload = Workload(
        model, batch, lambda model, b: F.cross_entropy(model(b["x"]), b["y"]), torch.optim.SGD(model.parameters(), 0.1)
    )
    nbytes = sum(p.nbytes for p in model.parameters())
    with allocated() as meter, applied(levers, workload):
        pass
    yield meter.peak_bytes, nbytes, [float(model[0].weight[0, 0]), float(model[1].running_mean[0])]


def test_weights_of_data_parallel_ranks_are_made_equal_without_copies_of_them() -> None:
    (one,), (other,) = on_ranks(2, wrapped, Levers(microbatch_size=4, sharding=SHARDINGS["ddp"]))
    assert all(peak_bytes < model_bytes / 10 for peak_bytes, model_bytes, _ in (one, other))
    assert one[2] == other[2] and one[2][1] == 0.0


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of the views that the blocks return
@pytest.mark.parametrize("name", SHARDINGS)
def test_each_microbatch_is_captured_as_after_a_backward_pass(name: str) -> None:
    """A forward pass that is run again, without a backward pass, gathers what the step gathers, and nothing else."""
    levers = Levers(microbatch_size=1, sharding=SHARDINGS[name])
    trace = capture_levers(workload(samples=4), levers, find_device("cpu"))
    assert {op.microbatch for op in trace.ops} == {0, 1}
    assert not any("runs other operators each time" in note for note in trace.notes)
    for microbatch in range(2):  # each has activations that recomputing would free
        forward = {i for i, op in enumerate(trace.ops) if op.phase == "forward" and op.microbatch == microbatch}
        born = [storage for storage in trace.storages if storage.birth in forward]
        assert any(storage.release < storage.death for storage in born)


COUNT = 40_000


def gathered(rank: int) -> Iterator[tuple[bool, int]]:
    """Gather from a tensor of its own, and from its place in the output as `fully_shard` does."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    given = torch.arange(COUNT // ranks, dtype=torch.float32) + 1000 * rank
    expected = torch.empty(COUNT)
    dist.all_gather_into_tensor(expected, given)
    for within in (False, True):
        output = torch.zeros(COUNT)
        part = output.chunk(ranks)[rank].copy_(given) if within else given
        with allocated() as meter:
            Gather()(output, part, group)
        yield torch.equal(output, expected), meter.peak_bytes


def reduced(rank: int) -> Iterator[tuple[bool, int, int]]:
    group, ranks = dist.group.WORLD, dist.get_world_size()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        given = torch.rand(COUNT, generator=torch.Generator().manual_seed(rank))
        expected, output = torch.empty(COUNT // ranks), torch.empty(COUNT // ranks)
        dist.reduce_scatter_tensor(expected, given.clone(), op=op)
        gc.collect()
        with allocated() as meter:
            for _ in range(20):  # each let go by all threads before the next
                made = given.clone()
                ReduceScatter()(output, made, group, op)
                del made
        yield torch.equal(output, expected), meter.peak_bytes, meter.net_bytes


@pytest.mark.ci
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_arrives_is_what_gloo_itself_sends_without_a_copy(world_size: int) -> None:
    for rank in on_ranks(world_size, gathered):
        assert [same for same, _ in rank] == [True, True]
        assert max(nbytes for _, nbytes in rank) < 1024
    for rank in on_ranks(world_size, reduced):
        for same, peak_bytes, net_bytes in rank:
            assert same and net_bytes == 0
            assert peak_bytes < 4 * COUNT + 1024, "one of them at a time"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Sequential(nn.Linear(64, 16), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(F.gelu(self.a(x)))


@pytest.mark.parametrize("lean", [(), ("*",)])
@pytest.mark.parametrize("size", [1, 2])
def test_data_parallel_steps_with_recomputed_blocks_are_captured(size: int, lean: tuple[str, ...]) -> None:
    """Every call has the parents that it has without recomputation, in the last of several captured steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    data = (torch.randn(4, 8, 16), torch.randn(4, 8, 16))
    workload = Workload(model, data, squared_error, torch.optim.SGD(model.parameters(), lr=0.1))
    sharding = Sharding(world_size=2, mode="ddp")
    regions = (Region(modules=("0",)), Region(modules=("1", "2")))
    levers = Levers(sharding=sharding, microbatch_size=size, regions=regions, lean=lean)
    trace = capture_levers(workload, levers, find_device("cpu"))
    assert any(op.phase == "recompute" for op in trace.ops) and Regions(trace).calls
    for chain in trace.ancestors:
        fqns = [trace.modules[trace.calls[i].module].fqn for i in chain]
        assert all(inner.startswith(f"{outer}.") or not outer for inner, outer in zip(fqns, fqns[1:], strict=False))
    assert all(trace.fqn_of(op.call) == "" for op in trace.ops if op.phase == "optimizer")


def working(rank: int) -> Iterator[Any]:
    ranks = Group("cpu")
    yield each(ranks, lambda: rank * 10), once(ranks, lambda: f"by {rank}")
    yield ranks.most([rank, -rank]), ranks.all(rank < 2), ranks.all(rank == 0), ranks.first(rank + 5)

    def fails() -> None:
        if rank == 1:
            raise OutOfMemoryError("full", step=3)

    with pytest.raises(OutOfMemoryError) as e:
        each(ranks, fails)
    yield str(e.value), e.value.step, getattr(e.value, "__notes__", [])

    def fails_otherwise() -> None:
        if rank == 0:
            raise KeyError("name")

    with pytest.raises((KeyError, RankError)) as other:
        once(ranks, fails_otherwise)
    yield type(other.value).__name__, str(other.value)
    check_same(ranks, "plans", b"same")
    with pytest.raises(PlanMismatchError, match="rank 1's has the SHA-256") as different:
        check_same(ranks, "plans", bytes(rank))
    yield str(different.value)


def test_ranks_that_work_together_hear_of_errors() -> None:
    first, second = on_ranks(2, working)
    assert first[0] == second[0] == ([0, 10], "by 0")
    assert first[1] == second[1] == ([1.0, 0.0], True, False, 5)
    assert first[2] == ("full", 3, ["memfit: the error is from rank 1"]) and second[2] == ("full", 3, [])
    assert first[3] == ("KeyError", "'name'") and second[3] == ("RankError", "KeyError: 'name'")
    assert first[4] == second[4]


def test_one_process_works_by_itself() -> None:
    alone = SingleProcess()
    assert each(alone, lambda: 1) == [1] and once(alone, lambda: 2) == 2
    check_same(alone, "plans", b"any")
    assert alone.outside(lambda: 3) == 3 and alone.gathered(4) == [4]
