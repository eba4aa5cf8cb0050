"""What a turn draws, sets and seeds is of its own generators; other threads draw as if it were not there."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memfit.foundations import turn
from memfit.workload import generators_of_turn, rng_snapshot


def reseed() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(11)


def of_torch() -> list[Any]:
    encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    x = torch.randn(3, 4, 8, requires_grad=True)
    y = encoder(x)
    y.sum().backward()
    assert x.grad is not None
    return [y.tolist(), x.grad.tolist(), torch.randperm(9).tolist(), torch.rand(2).tolist()]


def of_python() -> list[Any]:
    return [random.random(), random.gauss(0, 1), random.sample(range(99), 5)]


def of_numpy() -> list[Any]:
    return [np.random.rand(3).tolist(), np.random.permutation(5).tolist(), float(np.random.normal())]


def seeds_itself() -> list[Any]:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        found = [torch.rand(2).tolist()]
    return [*found, torch.rand(2).tolist(), torch.initial_seed(), random.random(), np.random.rand()]


@pytest.mark.parametrize("draw", [of_torch, of_python, of_numpy, seeds_itself])
def test_a_turn_draws_what_it_would_and_the_global_generators_stay(draw: Callable[[], list[Any]]) -> None:
    reseed()
    alone = draw()
    reseed()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    functions = dict(vars(random)), dict(vars(np.random)), torch.random.default_generator
    with ThreadPoolExecutor(1) as pool, turn():
        pool.submit(int).result()  # its thread is there before the turn
        with generators_of_turn():
            assert draw() == alone
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert (dict(vars(random)), dict(vars(np.random)), torch.random.default_generator) == functions
    assert draw() == alone  # a comparison that would see one number more


@pytest.mark.parametrize("draw", [of_torch, of_python, of_numpy])
@pytest.mark.parametrize("seed", range(2))
def test_another_thread_draws_as_alone_while_a_turn_draws_and_sets(draw: Callable[[], list[Any]], seed: int) -> None:
    reseed()
    alone = [draw() for _ in range(30)]
    reseed()
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # its thread is there before the turn

        def train() -> list[Any]:
            try:
                return [draw() for _ in range(30)]
            finally:
                over.set()

        waiting = None
        with turn(), generators_of_turn():
            waiting = pool.submit(train)
            while not over.is_set():
                set_back = rng_snapshot()
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)
                nn.functional.dropout(torch.ones(8))
                random.random()
                np.random.rand()
                set_back()
        assert waiting.result() == alone
