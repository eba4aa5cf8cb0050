"""Costs of operators on an accelerator that is here, of which the catalogue knows nothing."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from memfit import hardware, ir
from memfit.cost import AcceleratorCosts, OperatorCall, accelerator_cache, measure_calls, measured_costs
from memfit.errors import CaptureError
from memfit.foundations import Progress
from memfit.hardware import find_device
from memfit.ir import COPY_IN, Device, Levers, Matmul, Trace
from memfit.planner import capture_levers
from tests.accelerator_device import load
from tests.accelerators.steps import convnet

SUM = json.dumps({"op": "aten.add.Tensor", "args": [{"t": ["float32", [512, 512], [512, 1]]}] * 2})
PRODUCT = json.dumps({"op": "aten.mm.default", "args": [{"t": ["float32", [512, 512], [512, 1]]}] * 2})
IMPOSSIBLE = json.dumps({"op": "aten.mm.default", "args": [{"t": ["float32", [2, 3], [3, 1]]}] * 2})


@pytest.fixture
def device(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    yield find_device(kind)


def measured_calls(texts: list[str], place: torch.device, matmul: Matmul = "highest") -> AcceleratorCosts:
    return measure_calls(texts, place, matmul, False, lambda *_: None)


def read(path: Path) -> AcceleratorCosts:
    return ir.codec.read(path, AcceleratorCosts)


@pytest.fixture
def trace(device: Device) -> Trace:
    return capture_levers(convnet(), Levers(microbatch_size=4), device)


def test_every_call_of_a_step_is_measured_once(device: Device, trace: Trace) -> None:
    seen: list[tuple[int, int]] = []
    first = measured_costs([trace], device, lambda done, total: seen.append((done, total)))
    assert all(cost.measured and cost.seconds > 0 for cost in first.ops.values())
    assert set(first.ops) == {trace.signatures[op.signature] for op in trace.ops}
    assert seen and seen[-1][0] == seen[-1][1]
    assert accelerator_cache(device, "highest").exists()
    assert measured_costs([trace], device) == first  # times of another measurement would be others


def test_what_is_not_of_a_call_is_measured_once(device: Device, trace: Trace) -> None:
    """How fast operators follow one another and copies run costs a second, which each capture would take again."""
    path = accelerator_cache(device, "highest")
    measured_costs([replace(trace, signatures=[SUM], ops=[])], device)
    first = read(path)
    measured_costs([trace], device)
    assert replace(read(path), ops={}) == replace(first, ops={})
    assert first.ops.keys() < read(path).ops.keys()


def test_a_link_that_had_no_room_is_measured_for_the_next_step_that_copies(device: Device, trace: Trace) -> None:
    path = accelerator_cache(device, "highest")
    measured_costs([trace], device)
    first = read(path)
    ir.codec.write_atomic(path, ir.codec.encode(replace(first, link_bytes_per_second=0.0)))
    measured_costs([trace], device)
    assert read(path).link_bytes_per_second == 0  # a step without copies needs none
    copy = json.dumps({"op": COPY_IN, "args": [{"t": ["float32", [512, 512], [512, 1]]}]})
    measured_costs([replace(trace, signatures=[copy], ops=[])], device)
    assert read(path).link_bytes_per_second > 0 and read(path).ops == first.ops


def test_no_operator_is_quicker_than_one_can_be_dispatched(device: Device, trace: Trace) -> None:
    costs = measured_costs([trace], device)
    known = msgspec.json.decode(accelerator_cache(device, "highest").read_bytes(), type=AcceleratorCosts)
    assert known.launch_seconds > 1e-7 and known.link_bytes_per_second > 1e6
    measured = replace(device, launch_seconds=known.launch_seconds)
    for op in trace.ops:
        text = trace.signatures[op.signature]
        floor = OperatorCall(op.name, text, trace.works[op.signature], measured).floor_seconds
        assert costs.of(text).seconds >= floor > 0


def test_a_larger_call_takes_longer(place: torch.device) -> None:
    small = SUM.replace("512, 512", "8, 8").replace("512, 1", "8, 1")
    found = measured_calls([small, SUM, PRODUCT], place).ops
    assert found[small][0] < found[SUM][0] < found[PRODUCT][0]


def test_a_call_that_can_not_be_run_is_not_called_measured(device: Device, trace: Trace, place: torch.device) -> None:
    assert measured_calls([IMPOSSIBLE], place).ops == {}
    other = replace(trace, signatures=[IMPOSSIBLE, *trace.signatures[1:]])
    assert not measured_costs([other], device).of(IMPOSSIBLE).measured


def measured_there(kind: str, place: str, progress: Progress) -> AcceleratorCosts:
    if kind == "acc":
        load()
    return measured_calls([SUM, IMPOSSIBLE], torch.device(place), "high")


def test_a_process_of_its_own_measures_the_same_calls(kind: str, place: torch.device) -> None:
    """As it is done for CUDA."""
    there = functools.partial(measured_there, kind, str(place))
    found = hardware.process.run(there, lambda *_: None, fakes_cuda=False)
    assert list(found.ops) == [SUM] and found.ops[SUM][0] > 0


def test_a_process_that_ends_is_an_error(device: Device, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CaptureError, match="process that measures operators on cuda:0 ended with status 1"):
        measured_costs([trace], replace(device, kind="cuda", name="cuda:0"))


def test_measuring_leaves_random_states_and_precision_alone(place: torch.device) -> None:
    drop = json.dumps(
        {"op": "aten.native_dropout.default", "args": [{"t": ["float32", [8, 8], [8, 1]]}, {"f": "0.5"}, True]}
    )
    torch.manual_seed(3)
    expected = torch.rand(3, device=place)
    torch.manual_seed(3)
    assert drop in measured_calls([drop], place, "high").ops
    assert torch.equal(torch.rand(3, device=place), expected)
    assert torch.get_float32_matmul_precision() == "highest"
