from __future__ import annotations

import subprocess
import sys
from typing import Any

import jittor as jt
import numpy as np
import pytest

from memfit import jittor as mj
from memfit.errors import BudgetError, MemoryLimitError, OutOfMemoryError, UsageError
from memfit.jittor import Step, Workload, seed
from memfit.jittor.variables import named_variables
from tests.jittor.models import mlp, residuals

MIB = 2**20


def elementwise(x: Any, operators: int = 18) -> Any:
    for index in range(operators):
        x = x * 1.01 + 0.1 if index % 2 else jt.tanh(x)
    return x


def test_the_meter_sees_what_is_alive_at_once_and_release_gives_it_back() -> None:
    mj.memory.release()
    before = mj.memory.held_bytes()
    with mj.memory.measure() as one:
        jt.ones((16 * MIB // 4,)).sync()
    with mj.memory.measure() as three:
        kept = [jt.ones((16 * MIB // 4,)) * index for index in range(3)]
        jt.sync(kept)
    assert 16 * MIB <= one.added_bytes <= 18 * MIB
    assert 48 * MIB <= three.added_bytes <= 54 * MIB
    assert one.seconds > 0
    del kept
    assert mj.memory.held_bytes() >= before + 48 * MIB
    mj.memory.release()
    assert mj.memory.held_bytes() <= before


def test_the_ledger_counts_each_category() -> None:
    seed(0)
    model = residuals(2, 16)
    optimizer = jt.nn.Adam(model.parameters(), 1e-3)
    batch = {"x": jt.randn(4, 16, 8, 8)}
    Step(Workload(model, batch, lambda m, b: m(b["x"]).sqr().mean(), optimizer))(batch)
    mj.memory.release()
    found = mj.memory.ledger(model, optimizer, batch)
    named = named_variables(model)
    buffers = sum(v.nbytes for name, v in named.items() if "running" in name)
    assert found["buffers"] == buffers == 2 * 2 * 2 * 16 * 4
    assert found["parameters"] == sum(v.nbytes for v in named.values()) - buffers
    assert found["inputs"] == 4 * 16 * 8 * 8 * 4
    assert found["optimizer state"] == 2 * sum(v.nbytes for v in named.values())  # for buffers too
    assert sum(found.values()) == mj.memory.held_bytes()
    text = mj.memory.summary(model, optimizer, batch)
    assert "optimizer state" in text and "variables and" in text


def test_a_variable_that_would_pass_the_limit_is_not_made() -> None:
    mj.memory.release()
    allowed = mj.memory.held_bytes() + 8 * MIB
    with mj.memory.limit(allowed):
        small = jt.ones((MIB // 4,))
        assert small.numpy().sum() == MIB // 4
        for read in (lambda v: v.sync(), lambda v: v.numpy(), lambda v: v.data):
            large = jt.ones((16 * MIB // 4,))
            with pytest.raises(OutOfMemoryError, match=r"a variable of shape \(4194304,\) .* it was not run") as caught:
                read(large)
            del large
            assert isinstance(caught.value, MemoryLimitError)
            assert caught.value.limit_bytes == allowed and caught.value.requested_bytes == 16 * MIB
            assert caught.value.held_bytes == sum(caught.value.by_category.values())
    assert jt.ones((16 * MIB // 4,)).sum().item() == 16 * MIB // 4


def test_predictions_from_few_samples_are_near_what_is_measured() -> None:
    seed(0)
    model = mlp(6, 64)
    batch = jt.randn(65536, 64)
    step = Step(Workload(model, batch, lambda m, b: m(b).sqr().mean(), jt.nn.SGD(model.parameters(), 0.1)))
    predicted = step.predict_peak(batch)
    step(batch)
    with mj.memory.measure() as measured:
        step(batch)
    print(f"{predicted / MIB:.1f} MiB predicted, {measured.peak_bytes / MIB:.1f} MiB measured")
    assert predicted == pytest.approx(measured.peak_bytes, rel=0.15)


def test_limits_are_checked() -> None:
    with pytest.raises(BudgetError), mj.memory.limit("nothing"):
        pass
    with pytest.raises(UsageError, match="JT_SAVE_MEM=1"), mj.memory.limit("1GiB", swap=True):
        pass
    assert mj.memory.limit_bytes() is None


SWAPPING = """
from memfit import jittor as mj
import jittor as jt
def run():
    kept = [jt.ones((8 * 2**20 // 4,)) * index for index in range(6)]
    jt.sync(kept)
    return [float(one[0].item()) for one in kept]
with mj.memory.measure() as plain:
    values = run()
with mj.memory.limit(plain.before_bytes + 24 * 2**20, swap=True), mj.memory.measure() as swapped:
    assert run() == values == list(range(6))
print(plain.added_bytes, swapped.added_bytes)
"""


def test_swapping_stays_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JT_SAVE_MEM", "1")
    done = subprocess.run([sys.executable, "-c", SWAPPING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plain, swapped = (int(word) for word in done.stdout.splitlines()[-1].split())
    print(f"{plain / MIB:.0f} MiB plain, {swapped / MIB:.0f} MiB swapping")
    assert plain >= 48 * MIB and swapped <= 26 * MIB


def test_pool_use_counts_what_is_used_again() -> None:
    def run() -> None:
        for _ in range(4):
            jt.ones((8 * MIB // 4,)).sync()

    found = mj.memory.pool_use(run)
    assert found.requested_bytes >= 4 * 8 * MIB and found.requests >= 4
    assert found.taken_bytes < 2 * 8 * MIB + 6 * MIB
    assert found.reused_share == pytest.approx(1 - found.taken_bytes / found.requested_bytes)


def test_fusion_use_is_measured() -> None:
    x = jt.array(np.ones(4 * MIB, "float32"))
    jt.sync([x])
    found = mj.memory.fusion_use(lambda: jt.grad(elementwise(x).sum(), x).sync())
    print(f"{found.fused.added_bytes / MIB:.0f} MiB fused, {found.apart.added_bytes / MIB:.0f} MiB apart")
    assert found.saved_bytes > 4 * 16 * MIB
