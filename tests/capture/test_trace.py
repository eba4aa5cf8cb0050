"""Captures under fake tensors against captures of the same step really run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.ir import Precision, Trace, simulate
from memfit.workload import Workload, batch_size_of
from tests.capture.steps import Function, squared
from tests.covering import covering, each
from tests.models import BUILDERS, COSTS, captured, convnet, plain_trace, squared_error, step_of, transformer, twice

NORMS = {"aten.linalg_vector_norm.default", "aten._foreach_norm.Scalar"}
CLIPS = {"aten.mul_.Tensor", "aten._foreach_mul_.Tensor"}
"""The gradient norm and its clipping are one operator for real tensors, and one for each gradient for fake ones."""


def operators(trace: Trace) -> list[tuple[str, str, str, int]]:
    """Return what runs where on what, in order, but for the gradient norm and clipping."""
    return [
        (trace.signatures[op.signature], op.phase, trace.fqn_of(op.call), op.microbatch)
        for op in trace.ops
        if op.phase != "optimizer" or op.name not in NORMS | CLIPS
    ]


def lives(trace: Trace) -> Counter[tuple[Any, ...]]:
    """Return every storage that is born in a forward or backward pass, by what it is and when it is born and dies."""
    return Counter(
        (s.nbytes, s.birth, min(s.death, end), min(s.release, end), s.category)
        for end in [sum(op.phase != "optimizer" for op in trace.ops)]
        for s in trace.storages
        if s.birth >= 0 and trace.ops[s.birth].phase != "optimizer"
    )


def resident(trace: Trace) -> Counter[tuple[int, str]]:
    """Return the storages that are alive when the step starts."""
    return Counter((s.nbytes, s.category) for s in trace.storages if s.birth < 0)


def saves(trace: Trace) -> list[tuple[int, int, str, int, int]]:
    """Return what autograd saves, in order."""
    return [
        (trace.storages[s.storage].nbytes, s.at, trace.fqn_of(s.call), s.unpacked, min(s.death, len(trace.ops) - 1))
        for s in trace.saves
    ]


def differences(fake: Trace, real: Trace) -> list[str]:
    """Return in what two traces differ."""
    found = [
        name
        for name, view in [("operators", operators), ("lives", lives), ("resident", resident), ("saves", saves)]
        if view(fake) != view(real)  # type: ignore[operator]
    ]
    one, other = simulate(fake, COSTS).peak_bytes, simulate(real, COSTS).peak_bytes
    return found + ([f"peak {one} {other}"] if abs(one - other) > 1024 else [])


@pytest.mark.parametrize(("name", "precision", "microbatches"), each(BUILDERS, ["32-true", "bf16-mixed"], [1, 2]))
def test_the_fake_step_is_the_real_one(name: str, precision: Precision, microbatches: int) -> None:
    workload = BUILDERS[name]()
    size = batch_size_of(workload.batch) // microbatches
    real = captured(workload, real=True, precision=precision, microbatch_size=size)
    assert not differences(plain_trace(name, precision, microbatches), real)


def test_the_comparison_notices_another_step() -> None:
    fake = plain_trace("convnet")
    assert len(differences(fake, plain_trace("convnet", "bf16-mixed"))) == 4
    assert len(differences(fake, captured(convnet(channels=9)))) >= 3


def of_loss(name: str, last: bool) -> Workload:
    """Return a step with a loss that keeps its terms, over rows or over channels-last images."""
    images = torch.randn(2, 3, 18, 18).contiguous(memory_format=torch.channels_last)
    x, y = (images, torch.rand(2, 8, 8, 8)) if last else (torch.randn(64, 16), torch.rand(64, 512))
    convolution = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)).to(memory_format=torch.channels_last)
    model = convolution if last else nn.Sequential(nn.Linear(16, 512))
    return squared(model, (x, y), loss_fn=lambda m, b: getattr(F, name)(m(b[0]).sigmoid(), b[1]))


def of_sequences(module: nn.Module) -> Workload:
    return squared(module, (torch.randn(6, 5, 16), torch.randn(6, 5, 16)), loss_fn=squared_error)


def first_of(module: nn.Module) -> nn.Module:
    return nn.Sequential(module, Function(lambda found: found[0]))


def of_norms(affine: bool) -> Workload:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8, affine=affine),
        nn.GroupNorm(2, 8, affine=affine),
        nn.InstanceNorm2d(8, affine=affine),
        nn.Conv2d(8, 4, 3),
        nn.LayerNorm([4, 6, 6], elementwise_affine=affine),
    )
    return squared(model, (torch.randn(2, 3, 10, 10), torch.randn(2, 4, 6, 6)), loss_fn=squared_error)


LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss", "soft_margin_loss", "binary_cross_entropy")
STEPS: dict[str, Callable[[], Workload]] = {
    "gru": lambda: of_sequences(first_of(nn.GRU(16, 16, batch_first=True))),
    "rnn": lambda: of_sequences(first_of(nn.RNN(16, 16))),
    "bidirectional lstm": lambda: of_sequences(first_of(nn.LSTM(16, 8, 2, dropout=0.1, bidirectional=True))),
    "encoder layer": lambda: of_sequences(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)),
    "norms": lambda: of_norms(True),
    "norms without parameters": lambda: of_norms(False),
    **{
        f"{name}{' of images' if last else ''}": partial(of_loss, name, last)
        for name in (*LOSSES, "binary_cross_entropy_with_logits")
        for last in (False, True)
    },
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "32-true") for name in STEPS), *((name, "bf16-mixed") for name in STEPS if "norm" in name)],
)
def test_outputs_are_kept_as_their_kernels_keep_them(name: str, precision: Precision) -> None:
    """Terms of losses, workspaces of recurrent layers, statistics of norms; in the memory format of the kernels."""
    workload = STEPS[name]()
    assert not differences(*(captured(workload, real=really, precision=precision) for really in (False, True)))


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: nn.BatchNorm2d(8),
    "norm in evaluation": lambda: nn.BatchNorm2d(8).eval(),
    "groups": lambda: nn.GroupNorm(2, 8),
    "groups whose gradient is contiguous": lambda: nn.Sequential(nn.GroupNorm(2, 8), Function(torch.Tensor.contiguous)),
    "reflected": lambda: nn.ReflectionPad2d(1),
    "replicated": lambda: nn.ReplicationPad2d(1),
    "shuffled": lambda: nn.ChannelShuffle(2),
    "rolled": lambda: Function(lambda x: x.roll(1, 2)),
    "unpooled": lambda: Function(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
    **{
        kind.__name__: kind
        for kind in (nn.ELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LogSigmoid, nn.ReLU6, nn.Softplus, nn.SiLU)
    },
    "gates": lambda: nn.GLU(1),
}


@pytest.mark.parametrize(("kind", "last", "ends"), covering(IMAGES, ["weights", "batch", "both"], [False, True]))
def test_outputs_are_laid_out_as_the_kernels_do_with_channels_last(kind: str, last: str, ends: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), IMAGES[kind](), *([nn.LazyConv2d(4, 3)] if ends else []))
    x = torch.randn(2, 3, 10, 10)
    model(x)  # makes the layer at the end
    if last != "batch":
        model.to(memory_format=torch.channels_last)
    if last != "weights":
        x = x.contiguous(memory_format=torch.channels_last)
    workload = squared(model, x)
    assert not differences(*(captured(workload, real=really) for really in (False, True)))


@pytest.mark.parametrize(
    ("channels", "dims", "dtype"),
    covering([(16, 2), (4, 8)], [1, 2, 3], [torch.float32, torch.float64, torch.bfloat16]),
)
def test_transposed_convolutions_keep_the_memory_that_they_were_made_with(
    channels: tuple[int, int], dims: int, dtype: torch.dtype
) -> None:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    model = nn.Sequential(kind(*channels, 2), nn.Tanh()).to(dtype)
    given, wanted = (torch.randn(2, n, *[size] * dims, dtype=dtype) for n, size in zip(channels, (4, 5), strict=True))
    workload = squared(model, (given, wanted), loss_fn=squared_error)
    assert not differences(*(captured(workload, real=really) for really in (False, True)))


@pytest.mark.parametrize("name", BUILDERS)
def test_a_checkpointed_step_is_the_real_one_too(name: str) -> None:
    regions = {"transformer": "blocks.0", "tied": "blocks.1", "convnet": "stages", "unet": "unet.inner"}
    region = {regions.get(name, "head"): ()}
    workload = BUILDERS[name]()
    fake, real = (captured(workload, real=really, regions=region) for really in (False, True))
    assert not differences(fake, real)
    assert any(op.phase == "recompute" for op in fake.ops) or name in ("recurrent", "twice")


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2]),
}


@pytest.mark.parametrize("steps", [0, pytest.param(2, marks=pytest.mark.ci)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_is_captured_whether_it_has_a_state_or_not(optimizer: str, steps: int) -> None:
    workload = twice()
    workload = dataclasses.replace(workload, optimizer=OPTIMIZERS[optimizer](list(workload.model.parameters())))
    with step_of(workload) as step:
        for _ in range(steps):
            step(workload.batch)
    state = str(workload.optimizer.state_dict())
    fake, real = captured(workload), captured(workload, real=True)
    assert str(workload.optimizer.state_dict()) == state
    assert resident(fake) == resident(real)
    assert abs(simulate(fake, COSTS).peak_bytes - simulate(real, COSTS).peak_bytes) <= 1024
    parameter_bytes = sum(p.numel() * 4 for group in workload.optimizer.param_groups for p in group["params"])
    state_bytes = sum(s.nbytes for s in fake.storages if s.category == "optimizer state" and s.birth < 0)
    copies = {"sgd": 0, "momentum": 1, "adam amsgrad": 3, "adagrad": 1, "muon": 1}.get(optimizer, 2)
    assert copies * parameter_bytes <= state_bytes <= copies * parameter_bytes + 4 * 16


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    workload = transformer()
    for parameter in workload.model.blocks[0].parameters():
        parameter.requires_grad_(False)
    free = [p for p in workload.model.parameters() if p.requires_grad]
    workload = dataclasses.replace(workload, optimizer=torch.optim.SGD(free, lr=0.1, momentum=0.9))
    fake, real = captured(workload), captured(workload, real=True)
    assert not differences(fake, real)
    gradients = sum(s.nbytes for s in fake.storages if s.category == "gradients")
    assert gradients == sum(p.numel() * 4 for p in free)


def test_tied_weights_are_one_parameter() -> None:
    untied, shared = plain_trace("transformer"), plain_trace("tied")
    weight = 40 * 32 * 4

    def parameters(trace: Trace) -> int:
        return sum(s.nbytes for s in trace.storages if s.category == "parameters")

    assert parameters(untied) - parameters(shared) == weight


@pytest.mark.parametrize("name", BUILDERS)
def test_bytes_born_are_bytes_dead_or_alive(name: str) -> None:
    trace = plain_trace(name, "bf16-mixed", 2)
    end = len(trace.ops)
    assert all(-1 <= s.birth < end and s.birth <= s.release <= s.death <= end for s in trace.storages)
    born = sum(s.nbytes for s in trace.storages)
    dead = sum(s.nbytes for s in trace.storages if s.death < end)
    alive = sum(s.nbytes for s in trace.storages if s.death == end)
    assert born == dead + alive
    start = sum(s.nbytes for s in trace.storages if s.birth < 0)
    assert start == alive  # a steady step leaves as much as it finds


@pytest.mark.parametrize("name", BUILDERS)
def test_categories_are_what_the_workload_holds(name: str) -> None:
    workload, trace = BUILDERS[name](), plain_trace(name)

    def total(category: str) -> int:
        return sum(s.nbytes for s in trace.storages if s.category == category)

    def held(tensors: Any) -> int:
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    assert total("parameters") == held(workload.model.parameters())
    assert total("buffers") == held(workload.model.buffers())
    assert total("gradients") == held(workload.model.parameters())
    batch = workload.batch.values() if isinstance(workload.batch, dict) else workload.batch
    assert total("inputs") == held(batch)


def test_saves_are_attributed_to_the_module_that_made_them() -> None:
    trace = plain_trace("convnet")
    found = {trace.fqn_of(s.call) for s in trace.saves}
    assert {"stem.0", "stem.1", "stages.0.conv1", "stages.1.bn2", "stages.0", "pool", "head", ""} <= found
    for save in trace.saves:
        assert trace.ops[save.unpacked].phase == "backward" or save.unpacked < 0
        assert save.at <= save.unpacked <= save.death or save.unpacked < 0
        if save.call >= 0:
            assert trace.calls[save.call].start <= save.at <= trace.calls[save.call].end


def test_backward_operators_belong_to_the_call_that_they_differentiate() -> None:
    trace = plain_trace("convnet")
    backward = [trace.fqn_of(op.call) for op in trace.ops if op.name == "aten.convolution_backward.default"]
    forward = [trace.fqn_of(op.call) for op in trace.ops if op.name == "aten.convolution.default"]
    assert backward == forward[::-1] and len(forward) == 5
    shared = plain_trace("twice")
    calls = [op.call for op in shared.ops if op.name == "aten.tanh.default"]
    assert [op.call for op in shared.ops if op.name == "aten.tanh_backward.default"] == calls[::-1]


def test_phases_and_microbatches_follow_each_other() -> None:
    trace = plain_trace("transformer", "32-true", 2)
    cut = next(i for i, op in enumerate(trace.ops) if op.phase == "forward")
    assert {op.name for op in trace.ops[:cut]} == {"aten.slice.Tensor"}
    order = list(dict.fromkeys((op.phase, op.microbatch) for op in trace.ops[cut:]))
    assert order == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1), ("optimizer", 0)]


def test_calls_nest_and_contain_their_operators() -> None:
    trace = plain_trace("unet")
    for index, call in enumerate(trace.calls):
        if call.parent >= 0:
            parent = trace.calls[call.parent]
            assert call.parent < index and parent.start <= call.start <= call.end <= parent.end
            inner, outer = trace.modules[call.module].fqn, trace.modules[parent.module].fqn
            assert outer == "" or inner.startswith(f"{outer}.")
        for op in trace.ops[call.start : call.end]:
            assert index in trace.call_chain(op.call)


def test_matrix_products_have_flops_and_dropout_is_random() -> None:
    trace = plain_trace("transformer")
    linear = [op for op in trace.ops if op.name == "aten.addmm.default" and trace.fqn_of(op.call) == "blocks.0.qkv"]
    assert [trace.works[op.signature].flops for op in linear] == [2 * 4 * 12 * 32 * 96]
    assert {op.name for op in trace.ops if op.random} == {"aten.native_dropout.default"} or {
        op.name for op in trace.ops if op.random
    } == {"aten.bernoulli_.float"}


def test_what_the_trace_says_of_itself() -> None:
    trace = plain_trace("convnet", "bf16-mixed", 2)
    assert (trace.workload, trace.precision, trace.device) == ("convnet", "bf16-mixed", "cpu")
    assert (trace.batch_size, trace.microbatch_size, trace.microbatches, trace.scale_microbatches) == (4, 2, 2, 2)
    norms = [m.fqn for m in trace.modules if m.couples_batch]
    assert norms == [m.fqn for m in trace.modules if m.tracks_statistics] and len(norms) == 5


def test_evaluation_mode_does_not_couple_the_batch() -> None:
    workload = convnet()
    for module in workload.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    trace = captured(workload)
    assert not any(m.couples_batch for m in trace.modules) and any(m.tracks_statistics for m in trace.modules)


def test_an_uneven_last_microbatch_is_captured() -> None:
    workload = twice(batch=8)
    trace = captured(workload, microbatch_size=5)
    assert (trace.microbatches, trace.scale_microbatches) == (2, 2)
    assert squared_error(workload.model, workload.batch).isfinite()
