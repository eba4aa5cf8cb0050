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

UNITS = ("blocks.0", "blocks.1")
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


class Model(nn.Module):
    """Tied weights, a frozen prefix, and parts that the loss function calls by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.prefix = nn.Linear(8, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 8)) for _ in range(2))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.prefix(self.embedding(tokens))
        for block in self.blocks:
            x = x + block(x)
        return x


def mean_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model.head(model.features(batch["tokens"]))
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def sum_and_count(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets = model.head(model.features(batch["tokens"])), batch["targets"]
    kept = targets != 0
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * kept.flatten()).sum(), kept.sum()


def workload(samples: int = 4, *, counted: bool = False, momentum: float = 0.0) -> Workload:
    torch.manual_seed(0)
    model = Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5, momentum=0.9) if momentum else torch.optim.AdamW(trained, lr=0.1)
    batch = {"tokens": torch.randint(13, (samples, 5)), "targets": torch.randint(13, (samples, 5))}
    batch["targets"][:1, :4] = 0  # uneven counts
    loss_fn = sum_and_count if counted else mean_loss
    return Workload(model, batch, loss_fn, optimizer, max_grad_norm=1.0)


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def trained(given: Workload, levers: Levers, steps: int = STEPS) -> dict[str, Any]:
    """Return the losses, gradient norms and first gradients of some steps, and the weights after them."""
    with applied(levers, given) as step:
        first = step.gradients(given.batch)
        results = [step(given.batch) for _ in range(steps)]
        weights = {name: whole(p) for name, p in given.model.named_parameters()}
    return {
        "loss": first[0],
        "gradients": first[1],
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "weights": weights,
    }


def as_rank(rank: int, sharding: Sharding, size: int, samples: int, counted: bool) -> Iterator[Any]:
    given = workload(samples, counted=counted)
    if rank:  # weights become the first rank's
        with torch.no_grad():
            for parameter in given.model.parameters():
                parameter.add_(rank)
    yield trained(given, Levers(microbatch_size=size, sharding=sharding))


def alone(samples: int, world_size: int, counted: bool = False, size: int | None = None) -> dict[str, Any]:
    """Return the same of one process, with each rank's part as a microbatch."""
    return trained(workload(samples, counted=counted), Levers(microbatch_size=size or samples // world_size))


def halved(rank: int) -> Iterator[Any]:
    for sharding in SHARDINGS.values():
        yield from as_rank(rank, sharding, 2, 4, False)


@pytest.fixture(scope="module")
def halves() -> dict[str, list[Any]]:
    """Return what each rank found, by sharding."""
    return dict(zip(SHARDINGS, zip(*on_ranks(2, halved), strict=True), strict=True))


@pytest.mark.parametrize("name", SHARDINGS)
def test_two_ranks_are_bitwise_one_process_that_adds_up_two_halves(name: str, halves: dict[str, list[Any]]) -> None:
    expected = alone(4, 2)
    for found in halves[name]:
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
        yield from as_rank(rank, sharding, 2, samples, counted)


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


def hybrid(rank: int) -> Iterator[Any]:
    found = {}
    for name, changes in {"resharded": {}, "kept": {"mode": "zero2"}, "hybrid": {"replicas": 2}}.items():
        sharding = Sharding(world_size=4, mode="zero3", units=UNITS)
        levers = Levers(microbatch_size=2, sharding=replace(sharding, **changes))
        found[name] = trained(workload(8), levers)
    yield found


def test_four_ranks_kept_or_gathered_again_are_bitwise_equal_and_hybrid_within_rounding() -> None:
    expected = alone(8, 4)
    for (found,) in on_ranks(4, hybrid):
        for name, gradient in expected["gradients"].items():
            again, kept, mixed = (found[k]["gradients"][name] for k in ("resharded", "kept", "hybrid"))
            assert torch.equal(again, kept)
            torch.testing.assert_close(mixed, gradient, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(again, gradient, rtol=1e-5, atol=1e-7)


def dropping(rank: int, sharding: Sharding) -> Iterator[Any]:
    """Return the masks that the ranks draw, and what PyTorch's generator gives after a step."""
    torch.manual_seed(5)
    seen: list[torch.Tensor] = []
    model = nn.Linear(4, 4)

    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        seen.append(torch.nn.functional.dropout(torch.ones(64)))
        return model(batch).sum() * 0.1

    given = Workload(model, torch.ones(4, 4), loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    with applied(Levers(microbatch_size=2, sharding=sharding), given) as step:
        step(given.batch)
        step(given.batch)
    yield [mask.tolist() for mask in seen], torch.rand(3).tolist()


def test_each_rank_draws_its_own_numbers_in_a_step_and_all_the_same_outside() -> None:
    found = [rank[0] for rank in on_ranks(2, dropping, Sharding(world_size=2, mode="ddp"))]
    again = [rank[0] for rank in on_ranks(2, dropping, Sharding(world_size=2, mode="ddp"))]
    assert found == again
    (first, after), (second, after_too) = found
    masks = [*first, *second]
    assert len({tuple(mask) for mask in masks}) == len(masks) == 4
    assert after == after_too


def with_state(rank: int, sharding: Sharding) -> Iterator[Any]:
    """An optimizer that has made a step before the ranks share it."""
    given = workload(momentum=0.9)
    with applied(Levers(microbatch_size=4), given) as step:
        step(given.batch)
    yield trained(given, Levers(microbatch_size=2, sharding=sharding))


def test_the_optimizers_state_is_cut_as_its_parameters_are() -> None:
    given = workload(momentum=0.9)
    with applied(Levers(microbatch_size=4), given) as step:
        step(given.batch)
    expected = trained(given, Levers(microbatch_size=2))
    for (found,) in on_ranks(2, with_state, Sharding(world_size=2, mode="zero3", units=UNITS)):
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-5, atol=1e-6)


def refused(rank: int) -> Iterator[Any]:
    wrong = {
        "world_size=3": Sharding(world_size=3, mode="ddp"),
        "'blocks.7'": Sharding(world_size=2, mode="zero3", units=("blocks.7",)),
        "can be predicted only": Sharding(world_size=2, mode="zero1"),
    }
    texts = []
    for sharding in wrong.values():
        with pytest.raises(MemfitError) as e, applied(Levers(microbatch_size=2, sharding=sharding), workload()):
            pass
        texts.append(str(e.value))
    yield [key in text for key, text in zip(wrong, texts, strict=True)]


def test_what_does_not_go_is_refused_by_name() -> None:
    assert on_ranks(2, refused) == [[[True, True, True]]] * 2
    with (
        pytest.raises(PlanError, match="torchrun --nproc-per-node 2"),
        applied(Levers(microbatch_size=2, sharding=Sharding(world_size=2, mode="ddp")), workload()),
    ):
        pass


def passed_first(rank: int, sharding: Sharding) -> Iterator[Any]:
    """Run the model's own forward pass before the first step, as a run that goes on with an evaluation does."""
    given = workload()
    levers = Levers(microbatch_size=2, sharding=sharding)
    with applied(levers, given) as step, torch.no_grad():
        loss = step.options.ranks.outside(lambda: mean_loss(given.model, given.batch).item())
        with torch.enable_grad():
            results = [step(given.batch).loss for _ in range(STEPS)]
        yield loss, results, whole(given.model.head.weight)


@pytest.mark.parametrize("name", ["ddp", "kept", "resharded"])
def test_a_forward_pass_outside_of_steps_changes_nothing(name: str) -> None:
    given = workload()
    expected = mean_loss(given.model, given.batch).item()
    steps = alone(4, 2)
    for ((loss, results, weight),) in on_ranks(2, passed_first, SHARDINGS[name]):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert results == pytest.approx(steps["losses"], rel=1e-5)
        torch.testing.assert_close(weight, steps["weights"]["embedding.weight"], rtol=1e-4, atol=1e-5)


def fingerprints(rank: int) -> Iterator[Any]:
    for name in ("ddp", "kept", "resharded"):
        given = workload()
        before = fingerprint(given)
        with applied(Levers(microbatch_size=2, sharding=SHARDINGS[name]), given) as step:
            step(given.batch)
            yield fingerprint(given) == fingerprint(step.workload) == before


def test_a_workload_keeps_its_fingerprint_where_an_engine_changes_its_classes() -> None:
    assert on_ranks(2, fingerprints) == [[True] * 3] * 2


def _wrapped(rank: int, levers: Levers) -> Iterator[tuple[int, int, list[float]]]:
    """Yield the peak of what putting an engine on a model allocates, the model's bytes, and its first weights."""
    torch.manual_seed(rank)  # weights and buffers of its own
    model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Linear(512, 8))
    model[0].weight.requires_grad_(False)  # the engine then has small buckets
    model[1].running_mean.fill_(rank)
    batch = {"x": torch.randn(4, 256), "y": torch.randint(8, (4,))}
    workload = Workload(model, batch, _classified, torch.optim.SGD(model.parameters(), 0.1))
    nbytes = sum(p.nbytes for p in model.parameters())
    with allocated() as meter, applied(levers, workload):
        pass
    yield meter.peak_bytes, nbytes, [float(model[0].weight[0, 0]), float(model[1].running_mean[0])]


def _classified(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def test_weights_of_data_parallel_ranks_are_made_equal_without_copies_of_them() -> None:
    levers = Levers(microbatch_size=4, sharding=Sharding(world_size=2, mode="ddp"))
    first, second = on_ranks(2, _wrapped, levers)
    for peak_bytes, model_bytes, _ in (*first, *second):
        assert peak_bytes < model_bytes / 10
    assert first[0][2] == second[0][2] and first[0][2][1] == 0.0


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
