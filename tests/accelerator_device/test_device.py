"""The device "acc" computes what the CPU does, bit by bit, and counts its memory as a GPU's is counted."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.accelerator_device import load
from tests.accelerator_device.cases import MODELS, Block, LanguageModel, assert_same, convnet, train

acc = load()
TOTAL = 2 * 2**30


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """The device as it was: empty, and without a limit."""
    yield
    acc.set_per_process_memory_fraction(1.0)
    gc.collect()
    acc.empty_cache()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_cpu_s(name: str, options: dict[str, bool]) -> None:
    assert_same(train(name, "acc", **options), train(name, "cpu", **options))


@pytest.mark.parametrize("name", MODELS)
def test_autocast_is_the_cpu_s(name: str) -> None:
    found = train(name, "acc", autocast=torch.bfloat16)
    assert_same(found, train(name, "cpu", autocast=torch.bfloat16))
    assert not all(torch.equal(a, b) for a, b in zip(found, train(name, "cpu"), strict=True))


@pytest.mark.parametrize("name", ["block", "language model"])
def test_scaled_gradients_in_half_precision_are_the_cpu_s(name: str) -> None:
    options = {"autocast": torch.float16, "scaler": True}
    assert_same(train(name, "acc", **options), train(name, "cpu", **options))


def test_autocast_knows_every_operator_that_the_cpu_s_knows() -> None:
    registrations = torch._C._dispatch_get_registrations_for_dispatch_key
    assert set(registrations("AutocastCPU")) == set(registrations("AutocastPrivateUse1"))
    a = torch.ones(2, 2, device="acc")
    with torch.autocast("acc", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        assert F.mse_loss(a @ a, a).dtype == torch.float32
        assert torch.cat([a @ a, a]).dtype == torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_scaler_skips_a_step_whose_gradients_overflow() -> None:
    weight = nn.Parameter(torch.ones(2, device="acc"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("acc", init_scale=4.0)
    scaler.scale(weight.sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0 and weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_networks_compute_nearly_what_the_cpu_does(kind: type[nn.Module]) -> None:
    found = []
    for device in ("cpu", "acc"):
        torch.manual_seed(0)
        module, x = kind(4, 5, num_layers=2, batch_first=True).to(device), torch.randn(2, 3, 4).to(device)
        module(x)[0].sum().backward()
        found.append([module(x)[0].cpu()] + [p.grad.cpu() for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(*found)


def test_views_share_memory() -> None:
    base = torch.arange(12.0, device="acc")
    matrix = base.view(3, 4)
    for view in (matrix.t()[1], matrix[:, 1], base[1::4], torch.as_strided(base, (3,), (4,), 1), matrix.unbind(1)[1]):
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        view += 1
    assert base.tolist() == [0, 6, 2, 3, 4, 10, 6, 7, 8, 14, 10, 11]
    assert base._version == 5
    assert torch.view_as_real(torch.zeros(2, dtype=torch.cfloat, device="acc"))._base is not None
    assert base.unfold(0, 3, 3)._base is base and matrix.diagonal()._base is base
    sign = torch.ones(2, device="acc", requires_grad=True)
    assert torch.autograd.grad(sign.sgn().sum(), sign)[0].tolist() == [0, 0]  # a tensor of zeros without memory
    assert torch.equal(torch.conj(torch.tensor([1 + 2j], device="acc")).cpu(), torch.tensor([1 - 2j]))


def test_in_place_operators_return_their_argument() -> None:
    a = torch.ones(3, device="acc")
    assert a.add_(1) is a and a.mul_(2) is a and a.clamp_(max=3) is a and a.index_fill_(0, a.long() * 0, 5) is a
    assert torch.neg(a, out=a) is a
    a[torch.tensor([True, False, True], device="acc")] = 7.0
    a.index_put_((torch.tensor([1]),), torch.tensor(9.0))
    assert a.tolist() == [7, 9, 7]


def test_out_variants_resize_their_results() -> None:
    a = torch.arange(6.0, device="acc").view(2, 3)
    out, values = torch.empty(0, device="acc"), torch.empty(0, device="acc")
    indices = torch.empty(0, dtype=torch.long, device="acc")
    torch.matmul(a, a.t(), out=out)
    torch.sort(a, descending=True, out=(values, indices))
    assert out.tolist() == [[5, 14], [14, 50]] and values.tolist() == [[2, 1, 0], [5, 4, 3]]
    assert indices.tolist() == [[2, 1, 0]] * 2 and indices.device.type == "acc"


def test_tensors_and_storages_can_be_resized_and_set() -> None:
    a = torch.arange(4.0, device="acc")
    a.resize_(2, 8)
    assert a.shape == (2, 8) and a[0, :4].tolist() == [0, 1, 2, 3] and a.untyped_storage().nbytes() == 64
    b = torch.empty(0, device="acc")
    b.set_(a.untyped_storage(), 1, (2,), (1,))
    assert b.tolist() == [1, 2] and b.data_ptr() == a.data_ptr() + 4
    a.set_()
    b.set_(torch.ones(3, device="acc"))
    assert a.numel() == 0 and b.tolist() == [1, 1, 1]
    before = acc.memory_allocated()
    b.untyped_storage().resize_(0)
    assert acc.memory_allocated() == before - 512


def test_devices_do_not_mix() -> None:
    a, b = torch.ones(2, 2, device="acc"), torch.ones(2, 2)
    message = "Expected all tensors to be on the same device, but found at least two devices, acc:0 and cpu!"
    for mix in (lambda: a + b, lambda: torch.where(a > 0, a, b), lambda: F.layer_norm(a, (2,), b[0])):
        with pytest.raises(RuntimeError, match=message):
            mix()
    with pytest.raises(RuntimeError, match="same device"):
        a @ b
    assert (a + torch.tensor(1.0)).sum().item() == 8
    assert a[torch.tensor([0])].device.type == "acc"
    with pytest.raises(TypeError, match="convert"):
        a.numpy()


def test_memory_is_counted() -> None:
    acc.empty_cache()
    before, requested = acc.memory_allocated(), acc.memory_stats()["requested_bytes.all.current"]
    acc.reset_peak_memory_stats()
    a = torch.empty(1000, device="acc")
    b = torch.empty(2**20, dtype=torch.uint8, device="acc")
    assert acc.memory_allocated() - before == 4096 + 2**20
    c = a + 1
    del b, c
    assert acc.memory_allocated() - before == 4096
    assert acc.max_memory_allocated() - before == 2 * 4096 + 2**20
    assert acc.memory_reserved() - acc.memory_allocated() == 4096 + 2**20
    statistics = acc.memory_stats()
    assert statistics["allocated_bytes.all.current"] == torch.accelerator.memory_allocated() == acc.memory_allocated()
    assert statistics["allocated_bytes.all.peak"] == acc.max_memory_allocated()
    assert statistics["reserved_bytes.all.peak"] == acc.max_memory_reserved()
    assert statistics["requested_bytes.all.current"] - requested == 4000
    del a
    acc.empty_cache()
    acc.reset_peak_memory_stats()
    assert acc.memory_allocated() == acc.max_memory_allocated() == acc.memory_reserved() == before
    assert acc.mem_get_info() == torch.accelerator.get_memory_info() == (TOTAL - before, TOTAL)


def test_training_leaves_no_memory_behind() -> None:
    gc.collect()
    before = acc.memory_allocated()
    train("language model", "acc", autocast=torch.bfloat16)
    gc.collect()
    assert acc.memory_allocated() == before


def test_limit_holds_and_work_goes_on_after_it() -> None:
    acc.empty_cache()
    acc.set_per_process_memory_fraction(2**24 / TOTAL)
    refused = acc.memory_stats()["num_ooms"]
    a = torch.ones(2**20, device="acc")
    with pytest.raises(torch.OutOfMemoryError, match=r"acc out of memory. Tried to allocate 16.00 MiB. .*16.00 MiB al"):
        torch.ones(2**22, device="acc")
    with pytest.raises(torch.OutOfMemoryError):
        kept = [a + i for i in range(4)]
    assert acc.memory_stats()["num_ooms"] == refused + 2
    gc.collect()  # the error holds the frame that holds tensors
    kept = [a + i for i in range(3)]
    assert kept[-1].cpu().sum().item() == 3 * 2**20 and acc.memory_reserved() == 2**24
    retries = acc.memory_stats()["num_alloc_retries"]
    del kept
    assert torch.ones(2**21, device="acc").sum().item() == 2**21  # what was freed is of another size
    assert acc.memory_stats()["num_alloc_retries"] == retries + 1


def test_total_size_can_be_set() -> None:
    load(2**20)
    try:
        assert acc.get_device_properties().total_memory == acc.mem_get_info()[1] == 2**20
        with pytest.raises(torch.OutOfMemoryError, match="total capacity of 1.00 MiB"):
            torch.empty(2**20, device="acc")
    finally:
        load(TOTAL)


def test_numbers_are_random_as_on_the_cpu_and_apart_from_it() -> None:
    draws: list[Callable[[str], torch.Tensor]] = [
        lambda device: torch.rand(5, device=device),
        lambda device: torch.randn(20, device=device),
        lambda device: torch.randperm(9, device=device),
        lambda device: torch.randint(0, 9, (5,), device=device),
        lambda device: torch.empty(7, device=device).bernoulli_(0.3),
        lambda device: torch.multinomial(torch.ones(6, device=device), 3),
        lambda device: torch.poisson(torch.ones(6, device=device) * 4),
        lambda device: F.dropout(torch.ones(50, device=device), 0.1),
        lambda device: F.rrelu(-torch.ones(5, device=device), training=True),
        lambda device: F.gumbel_softmax(torch.ones(5, device=device)),
    ]
    torch.manual_seed(3)
    on_cpu = [draw("cpu") for draw in draws]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    on_acc = [draw("acc").cpu() for draw in draws]
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(on_cpu, on_acc)


def test_random_states_can_be_kept() -> None:
    acc.manual_seed(5)
    assert acc.initial_seed() == 5
    state = acc.get_rng_state()
    with torch.random.fork_rng(device_type="acc"):
        first = torch.rand(3, device="acc")
    assert torch.equal(acc.get_rng_state(), state)
    assert torch.equal(torch.rand(3, device="acc"), first)
    acc.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="acc"), first)
    mine = torch.Generator(device="acc").manual_seed(5)
    assert mine.device.type == "acc" and mine.initial_seed() == 5
    assert torch.equal(torch.rand(3, device="acc", generator=mine), first)
    assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(5)), first.cpu())
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="acc", generator=torch.Generator())


def test_pinned_memory_and_copies() -> None:
    a = torch.arange(4.0).pin_memory()
    assert a.is_pinned() and a[1:].is_pinned() and not torch.arange(4.0).is_pinned()
    b = a.to("acc", non_blocking=True)
    c = torch.empty(4, pin_memory=True)
    c.copy_(b, non_blocking=True)
    acc.synchronize()
    assert torch.equal(a, c)
    half = torch.empty(2, 2, dtype=torch.float16, device="acc").t().copy_(b.view(2, 2))
    assert half.cpu().tolist() == [[0, 1], [2, 3]]


def test_modules_move_and_are_saved(tmp_path: Path) -> None:
    module = Block().to("acc")
    assert {p.device for p in module.parameters()} == {torch.device("acc:0")}
    torch.save(module.state_dict(), tmp_path / "state.pt")
    safetensors.torch.save_file(module.state_dict(), tmp_path / "state.safetensors")
    where = torch.load(tmp_path / "state.pt")["out.weight"].device
    assert where == torch.device("acc:0")
    mapped = torch.load(tmp_path / "state.pt", map_location="cpu")
    loaded = safetensors.torch.load_file(tmp_path / "state.safetensors")
    assert_same(list(mapped.values()), list(loaded.values()) and [loaded[name] for name in mapped])
    other = Block().acc()
    other.load_state_dict(loaded)
    twin = copy.deepcopy(other)
    assert twin.out.weight.device.type == "acc" and twin.out.weight.data_ptr() != other.out.weight.data_ptr()
    assert_same(list(twin.cpu().state_dict().values()), list(module.cpu().state_dict().values()))
    assert torch.ones(2).acc().is_acc and torch.ones(2, device="acc").cpu().device.type == "cpu"


def test_checkpoint_draws_the_same_numbers_again() -> None:
    def gradients(device: str, is_kept: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        block, x = Block().to(device), torch.randn(2, 16, 32).to(device)
        torch.manual_seed(1)
        y = block(x) if is_kept else checkpoint(block, x, use_reentrant=False)
        y.sum().backward()
        return [p.grad.cpu() for p in block.parameters() if p.grad is not None]

    assert_same(gradients("acc", False), gradients("acc", True))
    assert_same(gradients("acc", False), gradients("cpu", True))


def test_saved_tensors_can_be_moved() -> None:
    moved: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.shape)
        return tensor.cpu()

    block, x = Block(dropout=0.0).acc(), torch.randn(2, 16, 32, device="acc")
    (expected,) = torch.autograd.grad(block(x).sum(), [block.out.weight])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.to("acc")):
        loss = block(x).sum()
    (found,) = torch.autograd.grad(loss, [block.out.weight])
    assert moved and torch.equal(found, expected)
    with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type="acc"):
        loss = block(x).sum()
    assert torch.equal(torch.autograd.grad(loss, [block.out.weight])[0], expected)


def test_fake_tensors_take_no_memory() -> None:
    real, x = Block().acc(), torch.randn(2, 16, 32, device="acc")
    gc.collect()
    before = acc.memory_allocated()
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        empty = torch.empty(2, device="acc")
        assert empty.device == torch.device("acc:0")
        with torch.device("acc"):
            module, images = LanguageModel(), convnet()
        module(torch.zeros(2, 16, dtype=torch.long, device="acc")).backward()
        assert module.head.weight.grad is not None and module.head.weight.grad.device.type == "acc"
        torch.optim.AdamW(module.parameters(), fused=True).step()
        images(torch.zeros(4, 3, 12, 12, device="acc")).sum().backward()
        names = [name for name, _ in real.named_parameters()]
        fake = {name: mode.from_tensor(p) for name, p in real.named_parameters()}
        assert fake["out.weight"].device == torch.device("acc:0") and isinstance(fake["out.weight"], nn.Parameter)
        y = torch.func.functional_call(real, fake, (mode.from_tensor(x),))
        F.mse_loss(y, torch.zeros_like(y)).backward()
        assert all(fake[name].grad is not None for name in names)
        del module, images  # a constant made under fake tensors is real, and its fake tensor keeps it
        with torch.autocast("acc", dtype=torch.bfloat16):
            assert F.linear(mode.from_tensor(x), fake["out.weight"]).dtype == torch.bfloat16
    gc.collect()
    assert acc.memory_allocated() == before


def test_dispatch_modes_see_the_device_s_operators() -> None:
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.found.append(str(func))
            return func(*args, **(kwargs or {}))

    module, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5)).acc(), torch.ones(2, 4, device="acc")
    with Names() as names:
        module(x).sum().backward()
    assert names.found[:4] == ["aten.t.default", "aten.addmm.default", "aten.native_layer_norm.default"] + [
        "aten.native_dropout.default"
    ]
    assert "aten.native_layer_norm_backward.default" in names.found


def test_streams_and_events_exist() -> None:
    first, second = acc.Event(enable_timing=True), torch.Event("acc", enable_timing=True)
    first.record()
    side = acc.Stream()
    with acc.stream(side):
        assert acc.current_stream() == side
        side.wait_event(first)
        a = torch.ones(3, device="acc")
        a.record_stream(side)
    second.record()
    second.synchronize()
    assert acc.current_stream() == acc.default_stream() == torch.accelerator.current_stream()
    assert first.elapsed_time(second) >= 0 and first.query() and torch.Stream(device="acc").query()


def test_device_is_the_accelerator() -> None:
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == acc.device_count() == 1
    assert torch.accelerator.current_accelerator() == torch.device("acc")
    assert torch.get_device_module("acc") is acc and load() is acc
    assert acc.get_device_name() == "Python accelerator"
    with acc.device(0), torch.device("acc"):
        assert torch.ones(2).device == torch.device("acc:0")
    with pytest.raises(RuntimeError, match="only acc:0"):
        torch.ones(2, device="acc:1")


def test_modules_run_with_the_device(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import sys, torch\nprint(torch.ones(2, device='acc').device, sys.argv[1:])\n")
    line = [sys.executable, "-m", "tests.accelerator_device", "shown", "--flag"]
    paths = {"PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | paths, check=False)
    assert done.stdout == "acc:0 ['--flag']\n", done.stderr
