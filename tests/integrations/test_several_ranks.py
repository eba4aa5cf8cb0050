"""memfit under other libraries' trainers on two ranks: their engines share the step, memfit plans for a rank of it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from memfit import integrations, ir
from memfit.errors import PlanError, PlanMismatchError, UsageError
from memfit.integrations import TrainerPlan
from memfit.ir import Plan, Sharding
from memfit.pipeline import plan as make_plan
from memfit.workload import Workload

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lightning")

from accelerate.utils import DistributedType

from tests.integrations.trainers import SAMPLES, UNITS, Net, loss_fn, net, on_two_ranks, plugin

engine_of = integrations.accelerate.engine_of
DDP = Sharding(world_size=2, mode="ddp", reduces="last")
ZERO3 = Sharding(world_size=2, mode="zero3", units=UNITS, reduces="last")
CASES = {
    "accelerate, fully sharded": ("accelerate", True),
    "transformers": ("transformers", False),
    "lightning": ("lightning", False),
    "lightning, fully sharded": ("lightning", True),
}
TOLERANCE = {"transformers": 0.002, "lightning": 0.001, "accelerate": 0.0005}
"""Of a peak: losses and metrics that are kept, and autograd's scalars."""


def plan_of(found: Any) -> Plan:
    return ir.codec.decode(found["plan"], Plan, source="a rank's plan")


@pytest.mark.ci  # what memfit's own ranks hold, `make test` measures
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_without_memfit_and_hold_what_was_predicted(case: str) -> None:
    trainer, fully = CASES[case]
    own = {"plugin": {"activation_checkpointing": True}} if case == "accelerate, fully sharded" else {}
    runs: list[dict[str, Any]] = [
        {},
        {"budget": "0.8x", "numerics": "exact", "points": 1, "time_limit_seconds": 10, **own},  # on a busy machine too
        {"again": True},  # with the plan that was made
        {"budget": "0.5x", "precisions": ["32-true"], "points": 1},
        {"budget": "1B", "numerics": "exact", "points": 1},
    ]
    plain, exact, again, cut, infeasible = on_two_ranks(trainer, fully, runs)
    for rank in range(2):
        plan = plan_of(exact[rank])
        assert exact[rank]["plan"] == exact[0]["plan"]
        assert plan.levers.regions and exact[rank]["was_checkpointed"] and not plain[rank]["was_checkpointed"]
        assert plan.batch_size == plan.levers.microbatch_size == SAMPLES
        assert plan.engine is not None and plan.engine.is_fully_sharded == fully and plan.engine.world_size == 2
        assert not own or any("turned off" in note for note in plan.notes)
        for found in (exact[rank], again[rank]):  # bitwise
            assert found["losses"] == plain[rank]["losses"] and torch.equal(found["weights"], plain[rank]["weights"])
        tolerance = TOLERANCE[trainer]
        assert plain[rank]["peak_bytes"] == pytest.approx(plan.plain.peak_bytes, rel=tolerance)
        assert exact[rank]["peak_bytes"] == pytest.approx(plan.predicted.peak_bytes, rel=tolerance)
        assert exact[rank]["peak_bytes"] <= plan.budget_bytes < plain[rank]["peak_bytes"]
        assert plan_of(cut[rank]).levers.microbatch_size < SAMPLES
        assert cut[rank]["losses"] == pytest.approx(plain[rank]["losses"], rel=1e-4)
        assert cut[rank]["peak_bytes"] <= plan_of(cut[rank]).budget_bytes
        assert "InfeasibleError: Does not fit: needs" in infeasible[rank]


def workload() -> Workload:
    model = net()
    batch = {"x": torch.randn(2, 4, 64), "labels": torch.zeros(2, 4, dtype=torch.long)}
    return Workload(model, batch, loss_fn, torch.optim.SGD(model.parameters()), name="net")


def test_an_engine_changes_what_a_rank_holds_and_not_the_class() -> None:
    plain = make_plan(workload(), budget="8GiB", numerics="exact", points=1).predicted
    for engine, shards in ((DDP, 1), (ZERO3, 2)):
        made = make_plan(workload(), budget="8GiB", numerics="exact", points=1, engine=engine)
        assert made.engine == engine and made.levers.sharding is None and made.numerics == "exact"
        held = made.predicted.by_category["parameters"]
        assert shards == 2 or held == plain.by_category["parameters"]
        assert any("another library's engine" in note for note in made.notes)
    with pytest.raises(UsageError, match="with world_size=2 memfit shares the step, and with engine="):
        make_plan(workload(), budget="8GiB", engine=DDP, world_size=2)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"optimizers": ["fused"]}, "optimizers=.* the trainer updates"),
        ({"world_size": 2}, "world_size=2 is not for a trainer: the trainer's engine"),
        ({"sharding": "ddp"}, "sharding='ddp' is not for a trainer"),
    ],
)
def test_what_a_trainer_owns_is_refused(option: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainerPlan(workload(), budget="8GiB", **option)


def test_a_plan_for_another_engine_or_with_levers_that_the_trainer_owns_is_refused() -> None:
    made = make_plan(workload(), budget="8GiB", numerics="exact", points=1, engine=DDP)
    assert TrainerPlan(workload(), engine=DDP, given=made).plan == made
    with pytest.raises(PlanMismatchError, match="was made for 2 ranks, data parallel.* has 2 ranks, fully"):
        TrainerPlan(workload(), engine=ZERO3, given=made)
    with pytest.raises(PlanMismatchError, match="the trainer has one process"):
        TrainerPlan(workload(), given=made)
    for changes, message in (
        ({"sharding": DDP}, "memfit's own engine"),
        ({"optimizer": "fused"}, "plan= uses fused"),
        ({"precision": "tf32"}, "this trainer has no precision 'tf32'"),
    ):
        with pytest.raises(PlanError, match=message):
            TrainerPlan(workload(), engine=DDP, given=replace(made, levers=replace(made.levers, **changes)))


def accelerator(kind: Any, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "distributed_type": kind,
        "num_processes": 2,
        "mixed_precision": "no",
        "ddp_handler": None,
        "gradient_state": SimpleNamespace(plugin_kwargs={}),
        "state": SimpleNamespace(fsdp_plugin=None),
    }
    return SimpleNamespace(**(given | changes))


def test_an_accelerators_engine_is_read_with_its_arguments() -> None:
    model = Net()
    assert engine_of(accelerator(DistributedType.NO), model) is None
    assert engine_of(accelerator(DistributedType.MULTI_CPU), model) == DDP
    handler = SimpleNamespace(to_kwargs=lambda: {"bucket_cap_mb": 2, "gradient_as_bucket_view": True})
    each = SimpleNamespace(plugin_kwargs={"sync_each_batch": True})
    found = engine_of(accelerator(DistributedType.MULTI_GPU, ddp_handler=handler, gradient_state=each), model)
    size = 2 * 2**20
    assert found == replace(
        DDP, reduces="each", gradient_as_bucket_view=True, bucket_cap_bytes=size, first_bucket_bytes=size
    )
    sharded = accelerator(DistributedType.FSDP, state=SimpleNamespace(fsdp_plugin=plugin()))
    assert engine_of(sharded, model) == ZERO3
    kept = accelerator(DistributedType.FSDP, state=SimpleNamespace(fsdp_plugin=plugin(reshard_after_forward=False)))
    assert engine_of(kept, model) == replace(ZERO3, mode="zero2")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (DistributedType.DEEPSPEED, {}, "DEEPSPEED, which memfit does not predict"),
        (DistributedType.MULTI_CPU, {"parallelism_config": SimpleNamespace(tp_size=2)}, "tp_size=2"),
        (DistributedType.FSDP, {"fsdp_version": 1}, "fsdp_version=1: memfit predicts FSDP2"),
        (DistributedType.FSDP, {"cpu_offload": CPUOffloadPolicy()}, "cpu_offload"),
        (DistributedType.FSDP, {"ignored_modules": [nn.Linear(1, 1)]}, "ignored_modules"),
        (DistributedType.FSDP, {"mixed_precision": "bf16"}, "mixed_precision='bf16' under"),
    ],
)
def test_engines_that_are_not_counted_are_refused_by_name(kind: Any, changes: Any, message: str) -> None:
    of_plugin = {
        "fsdp_version": 2,
        "cpu_offload": None,
        "ignored_modules": None,
        "mixed_precision_policy": None,
        **{k: v for k, v in changes.items() if k not in ("parallelism_config", "mixed_precision")},
    }
    of_accelerator = {k: v for k, v in changes.items() if k in ("parallelism_config", "mixed_precision")}
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(**of_plugin))
    with pytest.raises(UsageError, match=message):
        engine_of(accelerator(kind, state=state, **of_accelerator), Net())
