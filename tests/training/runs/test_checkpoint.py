from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from memfit import ir
from memfit.errors import CheckpointError, OutputError
from memfit.training import BatchStream, LossScaler, Step, StepOptions, write_tensors
from memfit.training.runs import checkpoint
from memfit.training.runs.checkpoint import HostBuffers
from memfit.workload import LossScaling, Workload, check_rng_state, rng_preserved, rng_state, set_rng_state
from tests.training.conftest import Tied, describe, make_plan, make_workload, read_tensors, restored, training_state


@pytest.fixture
def trained() -> Step:
    return advanced(Step(make_workload()))


def advanced(step: Step, n: int = 3, batch: Any = None) -> Step:
    for _ in range(n):
        step(step.workload.batch if batch is None else batch)
    return step


def assert_go_on_equally(step: Step, other: Step, rng: dict[str, Any]) -> None:
    """Both are the same now, and after more steps."""
    assert training_state(other) == training_state(step)
    for each in (step, other):
        set_rng_state(rng)
        advanced(each, 3, step.workload.batch)
    assert training_state(other) == training_state(step)


def begun(folder: Path, step: Step, position: Any = None, **options: Any) -> checkpoint.Writing:
    position = position or BatchStream(step.workload).position()
    return checkpoint.Writing(folder, step, make_plan(step.workload), position, **options)


def save(folder: Path, step: Step, position: Any = None, **options: Any) -> Path:
    return begun(folder, step, position, **options).finish()


def through_files(folder: Path, *values: Any) -> Any:
    """Return some values as they come back from a checkpoint, as a position in the data."""
    step = Step(make_workload())
    return restored(save(folder, step, {"values": values}), step).state.position["values"]


# Values as JSON and tensors

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    tensor = (torch.randn(shape, generator=generator) * 3).to(draw(st.sampled_from(DTYPES)))
    return tensor.permute(draw(st.permutations(range(len(shape)))))


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True).filter(lambda x: x == x)
    | st.text(max_size=5)
    | tensors()
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values=st.lists(values, min_size=5, max_size=5))
def test_values_come_back_bitwise(values: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    found = through_files(tmp_path_factory.mktemp("values"), *values)
    assert without_strides(describe(found)) == without_strides(describe(tuple(values)))


def without_strides(described: Any) -> Any:
    """Strides of dimensions of one element say nothing, so they may differ."""
    if isinstance(described, tuple) and described[:1] == ("tensor",):
        return described[:3] + described[4:]
    if isinstance(described, list | tuple):
        return type(described)(without_strides(item) for item in described)
    return described


def test_strides_and_special_values_come_back(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    given = images, images.mT, images[:, :, ::2], Counter("aab"), float("nan"), -float("inf")
    channels_last, transposed, part, counter, nan, inf = through_files(tmp_path, *given)
    assert describe([channels_last, transposed]) == describe([images, images.mT])
    assert torch.equal(part, images[:, :, ::2]) and part.is_contiguous()
    assert type(counter) is Counter and counter == {"a": 2, "b": 1}
    assert nan != nan and inf == -float("inf")


@pytest.mark.parametrize(
    ("left", "right"),
    [(1, 1.0), (True, 1), ([1], (1,)), (0.0, -0.0), ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    + [(torch.zeros(2), other) for other in (torch.zeros(2, 1), torch.zeros(2).double(), -torch.zeros(2))]
    + [(torch.zeros(3, 2), torch.zeros(2, 3).T)],
)
def test_the_comparison_sees_small_differences(left: Any, right: Any) -> None:
    assert describe(left) == describe(left)
    assert describe(left) != describe(right)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda x: x, r"position\.a\.0 is a function"),
        ({1, 2}, r"position\.a\.0 is a set"),
        (b"x", r"position\.a\.0 is a bytes"),
        ({(1, 2): 3}, r"position\.a\.0 has the key \(1, 2\)"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2).to_mkldnn(), "torch._mkldnn"),
    ],
)
def test_what_only_a_pickle_could_hold_is_refused_by_name(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, Step(make_workload()), {"a": [value]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("node", [{}, {"strange": 1}, {"tensor": "gone", "order": []}, {"dict": [1]}, {"float": "x"}])
def test_json_of_another_kind_is_refused(node: Any, trained: Step, tmp_path: Path) -> None:
    path = save(tmp_path, trained)
    training = json.loads((path / "training.json").read_bytes())
    forged(path, "training.json", json.dumps(training | {"position": node}).encode())
    assert_refused(path, trained, "a checkpoint's state can't have the form")


def test_tensors_that_share_a_storage_are_written_each(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    shared = {"all": base, "again": base, "part": base[2:4], "other": torch.ones(2)}
    write_tensors(shared, tmp_path / "x.safetensors")
    found, _ = read_tensors(tmp_path / "x.safetensors")
    assert found.keys() == shared.keys() and all(torch.equal(found[k], shared[k]) for k in shared)


# Random states


def draws() -> list[Any]:
    return [torch.rand(2).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]


def test_random_states_come_back_through_json() -> None:
    with rng_preserved():
        draws()
        state = json.loads(json.dumps(rng_state()))
        expected = draws()
        assert draws() != expected
        check_rng_state(state)
        set_rng_state(state)
        assert draws() == expected
        with rng_preserved():
            draws()
        after = draws()
        set_rng_state(state)
        assert draws() == expected and draws() == after


@pytest.mark.parametrize("key", ["torch", "python", "numpy"])
def test_a_random_state_that_is_none_changes_nothing(key: str) -> None:
    with rng_preserved():
        before = rng_state()
        with pytest.raises(CheckpointError, match="random number generators"):
            check_rng_state(before | {key: {"state": {}}})
        assert rng_state() == before


# Round trips


class KeepsFloat32(torch.optim.SGD):
    """State in fp32 for bf16 parameters, nested and with a string: what `load_state_dict` would cast or break."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["sum"] = state.get("sum", 0) + parameter.grad.float() ** 2
            state["nested"] = {"pair": [state["sum"] * 0.1, None], "kind": "fp32"}
            parameter.data.sub_(parameter.grad * 0.1)


OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW, amsgrad, lr tensor": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.1), amsgrad=True, foreach=False, capturable=False
    ),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW, groups": lambda p: torch.optim.AdamW(
        [dict[str, Any](params=p[:1], lr=0.2), dict[str, Any](params=p[1:], betas=(0.5, 0.6))]
    ),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "fp32 state": lambda p: KeepsFloat32(p, lr=0.1),
}


def convolutional(optimizer: str, dtype: torch.dtype, seed: int) -> Step:
    """A step of a channels-last convolution and tied linear layers."""
    torch.manual_seed(seed)
    conv = nn.Conv2d(2, 6, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = nn.Sequential(conv, nn.Flatten(), Tied(6)).to(dtype)
    batch = torch.randn(3, 2, 2, 2, dtype=dtype)
    optimizer_ = OPTIMIZERS[optimizer](list(model.parameters()))
    return Step(Workload(model=model, batch=batch, loss_fn=lambda m, b: (m(b) ** 2).mean(), optimizer=optimizer_))


@pytest.mark.parametrize(
    ("optimizer", "dtype", "done"),
    [(name, torch.float32, 2) for name in OPTIMIZERS]
    + [(name, torch.bfloat16, 2) for name in ("AdamW", "Adafactor", "fp32 state")]
    + [(name, torch.float32, 0) for name in ("AdamW", "SGD, momentum")],
)
def test_optimizers_come_back_bitwise_and_go_on_bitwise(
    optimizer: str, dtype: torch.dtype, done: int, tmp_path: Path
) -> None:
    step = advanced(convolutional(optimizer, dtype, 0), done)
    path = save(tmp_path, step)
    expected = training_state(step)
    other = convolutional(optimizer, dtype, 1)
    assert training_state(other) != expected
    loaded = restored(path, other)
    assert loaded.step_count == other.steps == done
    assert training_state(other) == expected
    assert_go_on_equally(step, other, loaded.state.training["rng"])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_and_the_loss_scale_come_back(scheduler: str, tmp_path: Path) -> None:
    def make(seed: int) -> Step:
        workload = make_workload(seed=seed)
        changed = {**workload.__dict__, "scheduler": SCHEDULERS[scheduler](workload.optimizer)}
        return Step(Workload(**changed), StepOptions(scaler=LossScaler(LossScaling(initial=256.0, growth_interval=2))))

    step = advanced(make(0))
    path = save(tmp_path, step)
    assert step.scaler is not None and step.scaler.scale == 512.0
    other = make(1)
    loaded = restored(path, other)
    assert_go_on_equally(step, other, loaded.state.training["rng"])


def test_others_can_read_the_model(trained: Step, tmp_path: Path) -> None:
    path = save(tmp_path, trained)
    model = Tied()
    safetensors.torch.load_model(model, path / "model.safetensors")
    assert describe(dict(model.state_dict())) == describe(dict(trained.workload.model.state_dict()))
    assert set(read_tensors(path / "model.safetensors")[0]) == set(model.state_dict()) - {"second.weight"}


class WithExtraState(nn.Linear):
    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [{"scale": (1.5, None)}, torch.arange(3)])
def test_extra_state_of_modules_comes_back(extra: Any, tmp_path: Path) -> None:
    def make(value: Any) -> Step:
        model = WithExtraState(value)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Step(Workload(model, torch.randn(2, 2), lambda m, b: m(b).mean(), optimizer))

    other = make({} if isinstance(extra, dict) else torch.zeros(3, dtype=torch.int64))
    restored(save(tmp_path, make(extra)), other)
    assert describe(other.workload.model.extra) == describe(extra)


def test_there_is_no_pickle(trained: Step, tmp_path: Path) -> None:
    path = save(tmp_path, trained)
    assert {p.name for p in path.iterdir()} == {checkpoint.MANIFEST, *checkpoint.FILES}
    for file in path.glob("*.json"):
        json.loads(file.read_bytes())
    for file in path.glob("*.safetensors"):
        read_tensors(file)
    assert len({p.stat().st_mode for p in path.iterdir()}) == 1


# Begun, and finished later


def test_what_was_begun_holds_the_state_of_that_moment(trained: Step, tmp_path: Path) -> None:
    """The plan, the position and the number of the step too, and twice in the same buffers."""
    buffers = HostBuffers()
    for number in range(2):
        expected, step_count = training_state(trained), trained.steps
        writing = begun(tmp_path, trained, buffers=buffers)
        advanced(trained)
        assert checkpoint.latest(tmp_path) == (tmp_path / "checkpoint-3" if number else None)
        path = writing.finish()
        other = Step(make_workload(seed=1))
        assert restored(path, other).step_count == writing.step_count == step_count
        assert training_state(other) == expected != training_state(trained)


def test_what_is_discarded_leaves_nothing(trained: Step, tmp_path: Path) -> None:
    for buffers in (None, HostBuffers()):
        writing = begun(tmp_path, trained, buffers=buffers)
        assert [path.name.endswith(".new.tmp") for path in tmp_path.iterdir()] == [True]
        writing.discard()
        assert list(tmp_path.iterdir()) == [] and writing.outcome == checkpoint.WRITTEN


def test_copies_that_find_no_memory_leave_nothing(trained: Step, tmp_path: Path) -> None:
    class Full(HostBuffers):
        def copied(self, files: Any) -> Any:
            raise RuntimeError("not enough memory")

    with pytest.raises(RuntimeError, match="not enough memory"):
        begun(tmp_path, trained, buffers=Full())
    assert list(tmp_path.iterdir()) == []


# The folder


def test_old_checkpoints_go_and_the_newest_is_found(trained: Step, tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None and checkpoint.latest(tmp_path / "none") is None
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "model.safetensors").write_bytes(b"of another tool")
    for n in range(4, 14):
        trained.steps = n
        path = save(tmp_path, trained, keep_checkpoints=3)
        assert checkpoint.latest(tmp_path) == path
        if n == 9:
            (path / "notes.txt").write_text("the best one")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint-1",
        *(f"checkpoint-{n}" for n in (11, 12, 13)),
        "checkpoint-9",
    ]


def test_a_checkpoint_of_the_same_step_is_replaced(trained: Step, tmp_path: Path) -> None:
    save(tmp_path, trained)
    advanced(trained).steps = 3
    path = save(tmp_path, trained)
    expected = training_state(trained)
    restored(path, advanced(trained))
    assert training_state(trained) == expected
    (path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="did not write"):
        save(tmp_path, trained)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-3"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize(
    ("function", "call"),
    [("mkdir", 2), ("fsync", 1), ("fsync", 4), ("fsync", 7), ("replace", 1), ("fsync", 8), ("rename", 1), ("fsync", 9)],
)
def test_a_crash_anywhere_leaves_the_earlier_checkpoint(
    function: str, call: int, is_clean: bool, trained: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether Python can clean up or not (a kill), and whichever call is the last."""
    first = save(tmp_path, trained)
    expected = training_state(trained)
    advanced(trained)
    real, calls = getattr(os, function), []

    def stop(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == call:
            raise OSError(28, "No space left on device") if is_clean else Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(os, function, stop)
    if not is_clean:
        monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
    with pytest.raises(OutputError, match="No space left") if is_clean else pytest.raises(Killed):
        save(tmp_path, trained)
    monkeypatch.undo()
    found = checkpoint.latest(tmp_path)
    assert found == first or call == 9  # the last call, after the checkpoint was moved to its place
    names = {p.name for p in tmp_path.iterdir()}
    assert not is_clean or names <= {"checkpoint-3", "checkpoint-6"}
    checkpoint.remove_leftovers(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} <= {"checkpoint-3", "checkpoint-6"}
    if found == first:
        restored(found, trained)
        assert training_state(trained) == expected


# What can't be loaded


def assert_refused(path: Path, step: Step, *texts: str) -> None:
    """The load fails with a message that holds the texts, and everything is as it was."""
    advanced(step, 1)
    before, rng = training_state(step), rng_state()
    with pytest.raises(CheckpointError) as caught:
        restored(path, step)
    assert all(text in str(caught.value) for text in texts), str(caught.value)
    assert training_state(step) == before and rng_state() == rng


@pytest.mark.parametrize("name", [*checkpoint.FILES, checkpoint.MANIFEST])
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_damage_is_named_with_what_to_do(name: str, damage: str, trained: Step, tmp_path: Path) -> None:
    save(tmp_path, trained)
    path = save(tmp_path, advanced(trained))
    file = path / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "truncated" and name != checkpoint.MANIFEST else b"")
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-3"
    assert_refused(path, trained, str(file))
    loaded, damages = checkpoint.read_newest(tmp_path, trained)
    assert loaded.path == tmp_path / "checkpoint-3" and str(file) in str(damages[0]) and len(damages) == 1


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from((checkpoint.MANIFEST, *checkpoint.FILES)),
    place=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
)
def test_a_flipped_byte_anywhere_is_seen(
    name: str, place: float, flip: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    step = Step(make_workload())
    file = save(tmp_path_factory.mktemp("flip"), step) / name
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= flip
    file.write_bytes(data)
    assert_refused(file.parent, step, str(file))


def forged(path: Path, name: str, data: bytes) -> None:
    """Replace a file, its entry in the manifest, and the manifest's own hash."""
    (path / name).write_bytes(data)
    manifest = ir.codec.read(path / checkpoint.MANIFEST, checkpoint.Checkpoint)
    entry = checkpoint.FileEntry(hashlib.sha256(data).hexdigest(), len(data))
    manifest = msgspec.structs.replace(manifest, files={**manifest.files, name: entry}).sealed()
    (path / checkpoint.MANIFEST).write_bytes(ir.codec.encode(manifest))


@pytest.mark.parametrize("name", checkpoint.FILES)
@pytest.mark.parametrize("data", [b"{}", b"[]", b"\x80\x04K\x01.", b"null"])
def test_foreign_files_with_right_hashes_are_refused(name: str, data: bytes, trained: Step, tmp_path: Path) -> None:
    path = save(tmp_path, trained)
    forged(path, name, data)
    assert_refused(path, trained, str(path))


def test_a_folder_that_is_not_there(trained: Step, tmp_path: Path) -> None:
    assert_refused(tmp_path / "checkpoint-9", trained, "checkpoint-9", "No such file")


@pytest.mark.parametrize("schema", ["memfit.checkpoint/2", "memfit.plan/1", None])
def test_another_schema_is_refused(schema: str | None, trained: Step, tmp_path: Path) -> None:
    path = save(tmp_path, trained)
    manifest = json.loads((path / checkpoint.MANIFEST).read_bytes())
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"schema": schema}))
    assert_refused(path, trained, repr(schema), "memfit.checkpoint/1")


def test_a_renamed_checkpoint_is_refused(trained: Step, tmp_path: Path) -> None:
    path = save(tmp_path, trained)
    copied = tmp_path / "best"
    shutil.copytree(path, copied)
    assert restored(copied, advanced(trained)).step_count == 3
    path.rename(tmp_path / "checkpoint-30")
    assert_refused(tmp_path / "checkpoint-30", trained, "checkpoint-30 was renamed", "step 3")


def test_another_workload_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    small, wide = Step(make_workload()), Step(make_workload(kind="none", width=8))
    path = save(tmp_path, small)
    fingerprints = [make_plan(step.workload).fingerprint for step in (small, wide)]
    assert_refused(path, wide, *fingerprints)


def other_groups(workload: Workload) -> dict[str, Any]:
    first, *others = workload.model.parameters()
    return {"optimizer": torch.optim.AdamW([{"params": [first]}, {"params": others}])}


def other_order(workload: Workload) -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW(list(workload.model.parameters())[::-1])}


def other_scheduler(workload: Workload) -> dict[str, Any]:
    return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(workload.optimizer, 0.5)}


def other_ties(workload: Workload) -> dict[str, Any]:
    workload.model.second.weight = nn.Parameter(torch.zeros_like(workload.model.first.weight))  # type: ignore
    return {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_groups, "2 parameter groups and the checkpoint 1"),
        (other_order, "Create the optimizer as for the checkpoint"),
        (other_scheduler, "Workload.scheduler is ExponentialLR, and the checkpoint has StepLR"),
        (lambda workload: {"scheduler": None}, "Workload.scheduler is None"),
        (other_ties, "fingerprint"),
    ],
)
def test_another_training_of_the_same_fingerprint_is_refused(
    change: Callable[[Workload], dict[str, Any]], message: str, tmp_path: Path
) -> None:
    path = save(tmp_path, Step(make_workload()))
    workload = make_workload()
    changed = {"scheduler": None if change in (other_groups, other_order) else workload.scheduler} | change(workload)
    assert_refused(path, Step(Workload(**{**workload.__dict__, **changed})), str(path), message)


def test_a_loss_scaler_must_be_on_both_sides(tmp_path: Path) -> None:
    def make(is_scaled: bool) -> Step:
        return Step(make_workload(), StepOptions(scaler=LossScaler() if is_scaled else None))

    for is_scaled in (True, False):
        path = save(tmp_path / str(is_scaled), make(is_scaled))
        assert_refused(path, make(not is_scaled), "loss scaler", "precision=")


def test_a_tensor_of_another_shape_is_refused(trained: Step, tmp_path: Path) -> None:
    path = save(tmp_path, trained)
    for name, key in (("model.safetensors", "norm.weight"), ("optimizer.safetensors", "optimizer.state.0.exp_avg")):
        found, metadata = read_tensors(path / name)
        write_tensors(found | {key: torch.zeros(2)}, tmp_path / name, metadata)
        original = (path / name).read_bytes()
        forged(path, name, (tmp_path / name).read_bytes())
        assert_refused(path, trained, key.rpartition(".")[2], "(2,)" if "norm" in key else "")
        forged(path, name, original)
    restored(path, trained)


def test_a_place_that_cannot_be_written_is_an_output_error(trained: Step, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can't write"):
        save(tmp_path / "file", trained)


# Copies in host memory, which a thread writes


def test_copies_stay_as_they_are_and_are_contiguous() -> None:
    base = torch.arange(12.0, requires_grad=True).reshape(3, 4)
    given = {
        "a": {"turned": base.T, "part": base[1:, :2], "none": torch.empty(0, 3)},
        "b": {"part": base[0].bfloat16()},
    }
    expected = {file: {key: t.clone() for key, t in tensors.items()} for file, tensors in given.items()}
    copies = HostBuffers().copied(given)
    with torch.no_grad():
        base.zero_()
        given["b"]["part"].zero_()
    assert copies.keys() == given.keys() and all(copies[file].keys() == given[file].keys() for file in given)
    for file, tensors in copies.items():
        for key, copy in tensors.items():
            assert copy.dtype is expected[file][key].dtype and torch.equal(copy, expected[file][key])
            assert copy.is_contiguous() and not copy.requires_grad and copy.grad_fn is None
    assert copies["a"]["part"].untyped_storage().data_ptr() != copies["a"]["turned"].untyped_storage().data_ptr()


def test_memory_is_used_again_for_what_has_the_same_shape_and_let_go_for_what_is_gone() -> None:
    buffers = HostBuffers()
    first = buffers.copied({"a": {"x": torch.ones(3), "y": torch.ones(3), "gone": torch.ones(3)}})["a"]
    gone = weakref.ref(first.pop("gone"))
    second = buffers.copied({"a": {"x": torch.zeros(3), "y": torch.zeros(4), "new": torch.zeros(1)}})["a"]
    assert second["x"] is first["x"] and second["y"] is not first["y"]
    assert all(torch.equal(copy, torch.zeros_like(copy)) for copy in second.values())
    assert gone() is None
