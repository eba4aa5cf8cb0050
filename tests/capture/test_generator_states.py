"""States of generators that draw the least and the greatest numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from memfit.capture.control_flow import GeneratorStates
from memfit.capture.known_values import random_output


@pytest.mark.parametrize("extreme", ["low", "high"])
def test_both_generators_draw_an_extreme_and_come_to_an_end(extreme: str) -> None:
    GeneratorStates.drawing(extreme).restore()  # type: ignore[arg-type]
    expected = pytest.approx(0.0 if extreme == "low" else 1.0, abs=1e-9)
    assert [random.random() for _ in range(200)] == [expected] * 200
    assert np.random.rand(200).tolist() == [expected] * 200
    assert 0 <= random.randrange(10) < 10 and len(random.sample(range(10), 3)) == 3
    assert np.isfinite(np.random.randn(3)).all() and np.isfinite(random.gauss(0, 1))


def test_states_come_back() -> None:
    states = GeneratorStates.now()
    first = random.random(), np.random.rand(), torch.rand(1).item()
    assert not GeneratorStates.now().has_states_of(states)
    states.restore()
    assert GeneratorStates.now().has_states_of(states)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == first


def test_seeds_are_seeds() -> None:
    GeneratorStates.seeded(5).restore()
    assert (random.random(), np.random.rand()) == (random.Random(5).random(), np.random.RandomState(5).rand())


def test_even_draws_of_pytorch_can_be_extreme() -> None:
    aten = torch.ops.aten
    assert random_output(aten.rand.default, aten.rand, ([2],), {}, "low").tolist() == [0.0, 0.0]
    assert (random_output(aten.rand.default, aten.rand, ([2],), {}, "high") > 0.999).all()
    uniform = aten.uniform_.default, aten.uniform_, (torch.empty(2), 3.0, 5.0), {}
    assert random_output(*uniform, "low").tolist() == [3.0, 3.0] and (random_output(*uniform, "high") < 5).all()
    bernoulli = aten.bernoulli_.float, aten.bernoulli_, (torch.empty(2), 0.5), {}
    assert random_output(*bernoulli, "low").tolist() == [1.0, 1.0] and random_output(*bernoulli, "high").tolist() == [
        0.0,
        0.0,
    ]
    torch.manual_seed(0)
    found = random_output(aten.rand.default, aten.rand, ([2],), {}, "")
    torch.manual_seed(0)
    assert torch.equal(found, torch.rand(2))
