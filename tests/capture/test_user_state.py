"""Whatever a step's code fills lazily is after a capture as before, and counts as held."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memfit._torch import FakeTensor, FakeTensorMode, optimizer_types
from memfit.capture import UserState, nothing_changes, user_state
from memfit.hardware import find_device
from memfit.ir import Levers
from memfit.planner import Captures, capture_levers
from memfit.workload import Workload
from tests.capture.steps import squared

Table = Callable[[int], torch.Tensor]


def made(length: int) -> torch.Tensor:
    return torch.ones(length, length).tril()


def put(held: Any, key: Any, length: int) -> torch.Tensor:
    """Make a table, and keep it as an item."""
    held[key] = made(length)
    found: torch.Tensor = held[key]
    return found


def put_on(held: Any, length: int) -> torch.Tensor:
    """Make a table, and keep it as an attribute."""
    held.held = made(length)
    found: torch.Tensor = held.held
    return found


bounded, unbounded = functools.lru_cache(made), functools.cache(lambda length: made(length))
TABLES: dict[int, torch.Tensor] = {}
LISTED: list[torch.Tensor | None] = [None] * 64
PAIRS: list[tuple[int, torch.Tensor]] = []
NESTED: dict[str, dict[int, torch.Tensor]] = collections.defaultdict(dict)
LATEST: collections.deque[torch.Tensor] = collections.deque(maxlen=2)
ORDERED: collections.OrderedDict[int, torch.Tensor] = collections.OrderedDict()
SEEN: set[torch.Tensor] = set()
ONE: torch.Tensor | None = None
LOCAL = threading.local()
SPACE = types.SimpleNamespace()


class Config:
    """A key that lives on."""


class Slots:
    __slots__ = ("__own", "held")

    def own(self, length: int) -> torch.Tensor:
        if not hasattr(self, "_Slots__own"):
            self.__own = made(length)
        return self.__own


class Windows:
    held: torch.Tensor | None = None

    @functools.cached_property
    def lazily(self) -> torch.Tensor:
        return made(8)

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def of(self, length: int) -> torch.Tensor:
        return made(length)


CONFIG, SLOTS, WINDOWS = Config(), Slots(), Windows()
BY_CONFIG: weakref.WeakKeyDictionary[Config, torch.Tensor] = weakref.WeakKeyDictionary()
ELSEWHERE = types.ModuleType("tables_of_someone")
exec("held = {}", vars(ELSEWHERE))


def ordered(length: int) -> torch.Tensor:
    if length not in ORDERED:
        put(ORDERED, length, length)
    ORDERED.move_to_end(length)
    return ORDERED[length]


def in_global(length: int) -> torch.Tensor:
    global ONE
    if ONE is None:
        ONE = made(length)
    return ONE


def on_function(length: int) -> Any:
    return on_function.held if hasattr(on_function, "held") else put_on(on_function, length)


def _closing() -> Table:
    held: torch.Tensor | None = None

    def table(length: int) -> torch.Tensor:
        nonlocal held
        if held is None:
            held = made(length)
        return held

    return table


def in_a_module_that_is_imported_there(length: int) -> Any:
    import tables_of_someone

    return tables_of_someone.held.get(length) if tables_of_someone.held else put(tables_of_someone.held, length, length)


WAYS: dict[str, Callable[..., Any]] = {
    "lru_cache": bounded,
    "cache": unbounded,
    "dict": lambda n: TABLES[n] if n in TABLES else TABLES.setdefault(n, made(n)),
    "list": lambda n: put(LISTED, n, n) if LISTED[n] is None else LISTED[n],
    "tuples in a list": lambda n: (PAIRS or PAIRS.append((n, made(n))) or PAIRS)[0][1],
    "nested": lambda n: NESTED["masks"][n] if n in NESTED["masks"] else put(NESTED["masks"], n, n),
    "deque": lambda n: (LATEST or LATEST.append(made(n)) or LATEST)[-1],
    "ordered": ordered,
    "set": lambda n: next(iter(SEEN or SEEN.add(made(n)) or SEEN)),
    "global": in_global,
    "default": lambda n, held={}: held[n] if n in held else put(held, n, n),
    "function": on_function,
    "cell": _closing(),
    "class": lambda n: put_on(Windows, n) if Windows.held is None else Windows.held,
    "cached property": lambda n: WINDOWS.lazily,
    "lru_cache of methods": lambda n: WINDOWS.of(n),
    "slot": lambda n: SLOTS.held if hasattr(SLOTS, "held") else put_on(SLOTS, n),
    "private slot": lambda n: SLOTS.own(n),
    "weak key": lambda n: BY_CONFIG[CONFIG] if CONFIG in BY_CONFIG else put(BY_CONFIG, CONFIG, n),
    "thread": lambda n: LOCAL.held if hasattr(LOCAL, "held") else put_on(LOCAL, n),
    "namespace": lambda n: SPACE.held if hasattr(SPACE, "held") else put_on(SPACE, n),
    "module": in_a_module_that_is_imported_there,
}


class Masked(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WAYS[self.way](8) @ self.linear(x)


def lazily(way: str) -> Workload:
    return squared(nn.Sequential(Masked(way), Masked(way), nn.Linear(8, 1)), torch.ones(4, 8, 8))


@pytest.fixture(autouse=True)
def _state_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set back by the very thing that is tested, or the tests would depend on their order and on others' threads."""
    monkeypatch.setitem(sys.modules, "tables_of_someone", ELSEWHERE)
    monkeypatch.setattr(user_state, "_others", dict)
    around = UserState([lazily])
    yield
    around.set_back()


@pytest.mark.parametrize("way", WAYS)
def test_what_code_fills_lazily_is_as_before_and_counts_as_held(way: str) -> None:
    workload = lazily(way)
    around = UserState(vars(workload).values())
    empty = capture_levers(workload, Levers(microbatch_size=4), find_device("cpu"))
    assert not around.is_written()
    workload.loss_fn(workload.model, workload.batch).backward()
    assert around.is_written()  # the same comparison, of a step by itself
    filled = UserState(vars(workload).values())
    again = capture_levers(workload, Levers(microbatch_size=4), find_device("cpu"))
    # A cache of methods that has entries gets one by a copy's, and none can be taken out of it: it is emptied.
    assert not filled.is_written() or (way == "lru_cache of methods" and not Windows.of.cache_info().currsize)
    held = (8 * 8 * 4, -1, len(empty.ops))
    assert held in lives(empty)
    # What stands on a class is there for its code, and for the copy of an object of it that is reached beside it.
    assert sorted([*lives(empty), *[held] * (way == "class")]) == lives(again)


def lives(trace: Any) -> list[tuple[int, int, int]]:
    return sorted((s.nbytes, s.birth, s.death) for s in trace.storages)


def test_captures_of_one_search_see_the_same_step() -> None:
    workload = lazily("global")
    one, other = (Captures(workload, find_device("cpu"))(Levers(microbatch_size=n)) for n in (4, 2))
    alone = capture_levers(workload, Levers(microbatch_size=2), find_device("cpu"))
    assert lives(other) == lives(alone) and len(one.ops) < len(other.ops) and ONE is None


class _Counting:
    """What code writes that is no tensor."""

    calls = 0
    losses: list[float] = []
    at = {"step": 0}
    random, numpy, torch = random.Random(0), np.random.default_rng(0), torch.Generator().manual_seed(0)


def counting(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    noise = _Counting.random.random() + _Counting.numpy.random() + torch.rand(1, generator=_Counting.torch)
    loss = model(batch).pow(2).mean() * noise.item()
    _Counting.calls += 1
    _Counting.at["step"] += 1
    _Counting.losses.append(float(loss.detach()))
    return loss


def written() -> Any:
    kept = _Counting
    states = kept.random.getstate(), str(kept.numpy.bit_generator.state), kept.torch.get_state().tolist()
    return kept.calls, list(kept.losses), dict(kept.at), states


def counted() -> Workload:
    return squared(nn.Linear(8, 1), torch.ones(4, 8), loss_fn=counting)


def test_what_code_counts_and_draws_is_as_before() -> None:
    workload = counted()
    before = written()
    with nothing_changes(workload):
        counting(workload.model, workload.batch)
        assert all(a != b for a, b in zip(written(), before, strict=True))
    assert written() == before


def test_a_function_that_is_told_of_progress_sees_and_keeps_its_own() -> None:
    workload, seen, told = counted(), [], Told()

    def progress(done: int) -> None:
        seen.append((done, _Counting.calls))
        told.of.append(done)
        _Counting.at["told"] = done

    before = written()
    with nothing_changes(workload) as around:
        counting(workload.model, workload.batch)
        around.outside(progress)(1)
        assert _Counting.calls == 1 and _Counting.at == {"step": 1}  # the step goes on where it was
        counting(workload.model, workload.batch)
    assert seen == [(1, 0)] and told.of == [1]
    assert written() == (*before[:2], {"step": 0, "told": 1}, before[3])


def test_what_a_caller_watches_by_a_closure_stays_but_for_fake_tensors() -> None:
    seen: list[Any] = []
    workload = counted()
    watched = dataclasses.replace(
        workload, loss_fn=lambda model, batch: seen.append(len(seen)) or counting(model, batch)
    )
    with nothing_changes(watched):
        watched.loss_fn(watched.model, watched.batch)
        kept: list[Any] = [*seen]
    assert seen == kept == [0] and _Counting.calls == 0
    holding = dataclasses.replace(workload, loss_fn=lambda model, batch: seen.append(batch) or model(batch).mean())
    capture_levers(holding, Levers(microbatch_size=4), find_device("cpu"))
    assert seen == [0]


class Told:
    of: list[int] = []


def test_where_another_thread_runs_only_fake_tensors_go(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, moves = lazily("dict"), itertools.count()
    monkeypatch.setattr(user_state, "_others", lambda: {1: (0, next(moves))})
    around = UserState([*vars(workload).values(), counting])
    _Counting.losses.append(1.0)
    with FakeTensorMode():
        TABLES[8] = made(8)
        bounded(8)
    TABLES[4] = made(4)
    around.set_back()
    assert _Counting.losses == [1.0] and list(TABLES) == [4] and not bounded.cache_info().currsize


@pytest.mark.parametrize("is_alone", [True, False])
def test_globals_in_which_compiled_code_finds_its_parts_stay(is_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo takes them out itself; it knows what it compiled by fake tensors."""
    moves, space = itertools.count(), counting.__globals__
    monkeypatch.setattr(user_state, "_others", dict if is_alone else lambda: {1: (0, next(moves))})
    around = UserState([counting])
    with FakeTensorMode():
        compiled = space["__compiled_fn_0"] = [made(4)]
        space["FILLED"] = [made(4)]
    around.set_back()
    assert space.pop("__compiled_fn_0") is compiled and "FILLED" not in space


ITS_TYPES, OWN_TYPES = optimizer_types, [torch.Tensor]


def typed() -> tuple[list[Any], list[Any]]:
    return ITS_TYPES, OWN_TYPES


def test_pytorchs_lists_that_captures_add_to_are_not_the_users() -> None:
    """A step's code that reaches one, as through a module that imports it, would be taken for code that writes."""
    for types_, is_users in ((ITS_TYPES, False), (OWN_TYPES, True)):
        state = UserState([typed])
        types_.append(FakeTensor)
        try:
            assert state.is_written() == is_users
        finally:
            types_.remove(FakeTensor)


class LazyMapping(collections.OrderedDict[str, Any]):
    """A dictionary of another kind than its items say, as the models of transformers."""

    def items(self) -> Any:
        raise ValueError("could not be imported")

    __getitem__ = __iter__ = keys = values = items  # type: ignore[assignment]


def test_dictionaries_are_read_without_their_own_methods() -> None:
    LAZY.clear()
    for key in "ba":
        collections.OrderedDict.__setitem__(LAZY, key, key)
    around = UserState([lambda: LAZY])
    collections.OrderedDict.__setitem__(LAZY, "c", torch.ones(1))
    assert around.is_written()
    around.set_back()
    assert list(collections.OrderedDict.__iter__(LAZY)) == ["b", "a"]


LAZY = LazyMapping()
