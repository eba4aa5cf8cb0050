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

from memfit._torch import FakeTensor, FakeTensorMode, operators
from memfit.capture import UserState, nothing_changes, user_state
from memfit.hardware import find_device
from memfit.ir import Levers
from memfit.planner import Captures, capture_levers
from memfit.workload import Workload

Table = Callable[[int], torch.Tensor]


def made(length: int) -> torch.Tensor:
    return torch.ones(length, length).tril()


@functools.lru_cache
def bounded(length: int) -> torch.Tensor:
    return made(length)


@functools.cache
def unbounded(length: int) -> torch.Tensor:
    return made(length)


TABLES: dict[int, torch.Tensor] = {}
LISTED: list[torch.Tensor | None] = [None] * 64
APPENDED: list[torch.Tensor] = []
PAIRS: list[tuple[int, torch.Tensor]] = []
NESTED: dict[str, dict[int, list[torch.Tensor]]] = collections.defaultdict(dict)
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


def in_dict(length: int) -> torch.Tensor:
    return TABLES.setdefault(length, made(length)) if length not in TABLES else TABLES[length]


def in_list(length: int) -> torch.Tensor:
    if LISTED[length] is None:
        LISTED[length] = made(length)
    found = LISTED[length]
    assert found is not None
    return found


def appended(length: int) -> torch.Tensor:
    if not PAIRS:
        PAIRS.append((length, made(length)))
    return PAIRS[0][1]


def nested(length: int) -> torch.Tensor:
    tables = NESTED["masks"]
    if length not in tables:
        tables[length] = [made(length)]
    return tables[length][0]


def in_deque(length: int) -> torch.Tensor:
    if not LATEST:
        LATEST.append(made(length))
    return LATEST[-1]


def ordered(length: int) -> torch.Tensor:
    if length not in ORDERED:
        ORDERED[length] = made(length)
    ORDERED.move_to_end(length)
    return ORDERED[length]


def in_set(length: int) -> torch.Tensor:
    if not SEEN:
        SEEN.add(made(length))
    return next(iter(SEEN))


def in_global(length: int) -> torch.Tensor:
    global ONE
    if ONE is None:
        ONE = made(length)
    return ONE


def in_default(length: int, _held: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    if length not in _held:
        _held[length] = made(length)
    return _held[length]


def on_function(length: int) -> torch.Tensor:
    if not hasattr(on_function, "held"):
        on_function.held = made(length)  # type: ignore[attr-defined]
    found: torch.Tensor = on_function.held  # type: ignore[attr-defined]
    return found


def _closing() -> Table:
    held: torch.Tensor | None = None

    def table(length: int) -> torch.Tensor:
        nonlocal held
        if held is None:
            held = made(length)
        return held

    return table


in_cell = _closing()


def on_class(length: int) -> torch.Tensor:
    if Windows.held is None:
        Windows.held = made(length)
    return Windows.held


def on_object(length: int) -> torch.Tensor:
    return WINDOWS.lazily


def by_method(length: int) -> torch.Tensor:
    return WINDOWS.of(length)


def in_slot(length: int) -> torch.Tensor:
    if not hasattr(SLOTS, "held"):
        SLOTS.held = made(length)
    found: torch.Tensor = SLOTS.held
    return found


def in_private_slot(length: int) -> torch.Tensor:
    return SLOTS.own(length)


def by_weak_key(length: int) -> torch.Tensor:
    if CONFIG not in BY_CONFIG:
        BY_CONFIG[CONFIG] = made(length)
    return BY_CONFIG[CONFIG]


def by_thread(length: int) -> torch.Tensor:
    if not hasattr(LOCAL, "held"):
        LOCAL.held = made(length)
    found: torch.Tensor = LOCAL.held
    return found


def in_namespace(length: int) -> torch.Tensor:
    if not hasattr(SPACE, "held"):
        SPACE.held = made(length)
    found: torch.Tensor = SPACE.held
    return found


def in_a_module_that_is_imported_there(length: int) -> torch.Tensor:
    import tables_of_someone  # type: ignore[import-not-found]

    if length not in tables_of_someone.held:
        tables_of_someone.held[length] = made(length)
    found: torch.Tensor = tables_of_someone.held[length]
    return found


WAYS: dict[str, Table] = {
    "lru_cache": bounded,
    "cache": unbounded,
    "dict": in_dict,
    "list": in_list,
    "tuples in a list": appended,
    "nested": nested,
    "deque": in_deque,
    "ordered": ordered,
    "set": in_set,
    "global": in_global,
    "default": in_default,
    "function": on_function,
    "cell": in_cell,
    "class": on_class,
    "cached property": on_object,
    "lru_cache of methods": by_method,
    "slot": in_slot,
    "private slot": in_private_slot,
    "weak key": by_weak_key,
    "thread": by_thread,
    "namespace": in_namespace,
    "module": in_a_module_that_is_imported_there,
}


class Masked(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WAYS[self.way](8) @ self.linear(x)


def lazily(way: str) -> Workload:
    model = nn.Sequential(Masked(way), Masked(way), nn.Linear(8, 1))

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).pow(2).mean()

    return Workload(model, torch.ones(4, 8, 8), loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))


def plain_step(workload: Workload) -> None:
    workload.loss_fn(workload.model, workload.batch).backward()  # type: ignore[union-attr]
    workload.model.zero_grad()


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
    plain_step(workload)
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
    model = nn.Linear(8, 1)
    return Workload(model, torch.ones(4, 8), counting, torch.optim.SGD(model.parameters(), lr=0.1))


def test_what_code_counts_and_draws_is_as_before() -> None:
    workload = counted()
    before = written()
    with nothing_changes(workload):
        counting(workload.model, workload.batch)
        assert all(a != b for a, b in zip(written(), before, strict=True))
    assert written() == before


def test_a_function_that_is_told_of_progress_sees_and_keeps_its_own() -> None:
    workload, seen = counted(), []
    told = Told()

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
    moves = itertools.count()
    monkeypatch.setattr(user_state, "_others", dict if is_alone else lambda: {1: (0, next(moves))})
    space = counting.__globals__
    around = UserState([counting])
    with FakeTensorMode():
        compiled = [made(4)]
        space["__compiled_fn_0"], space["FILLED"] = compiled, [made(4)]
    try:
        around.set_back()
        assert space["__compiled_fn_0"] is compiled and "FILLED" not in space
    finally:
        space.pop("__compiled_fn_0", None)


ITS_TYPES, OWN_TYPES = operators.optimizer_types, [torch.Tensor]


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
    lazy = LazyMapping()
    for key in "ba":
        collections.OrderedDict.__setitem__(lazy, key, key)
    assert list(user_state._dict_contents(lazy).items()) == [("b", "b"), ("a", "a")]
