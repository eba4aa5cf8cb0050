"""Signals' handlers run when their signals come; what they raise waits for a safe point, and comes out once."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

from memfit.foundations import HeldSignals, held_back, safe_point
from memfit.training import Step
from memfit.workload import Workload

NUMBERS = (signal.SIGINT, signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM)


class Rung(Exception):
    """What the tests' handlers raise: an exception that `except Exception` catches."""


@contextlib.contextmanager
def handling(handlers: dict[int, Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raising(error: BaseException) -> Callable[[int, FrameType | None], None]:
    def handler(number: int, frame: FrameType | None) -> None:
        raise error

    return handler


@pytest.mark.parametrize("number", NUMBERS)
def test_what_a_handler_raises_comes_out_at_a_safe_point_as_it_is(number: int) -> None:
    error, done = Rung("now"), []
    with handling({number: raising(error)}):
        handler = signal.getsignal(number)
        with pytest.raises(Rung) as caught, held_back():
            signal.raise_signal(number)
            done.append("held")
            try:
                safe_point()
            except Exception:  # a step's own, or memfit's, that explains errors of the step
                done.append("taken for an error")
            done.append("went on")
        assert caught.value is error and done == ["held"]
        assert signal.getsignal(number) is handler
        safe_point()


@pytest.mark.parametrize("swallowed", [False, True], ids=["never left", "swallowed on the way"])
def test_it_comes_out_at_the_end_at_the_latest(swallowed: bool) -> None:
    with handling({signal.SIGALRM: raising(Rung())}):
        done = []
        with pytest.raises(Rung), held_back():
            signal.raise_signal(signal.SIGALRM)
            if swallowed:
                with contextlib.suppress(BaseException):
                    safe_point()
            done.append("to the end")
        assert done == ["to the end"]
        with pytest.raises(Rung) as caught, held_back():
            signal.raise_signal(signal.SIGALRM)
            raise ValueError("of the step")
        assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_that_returns_is_called_at_once_and_ends_nothing() -> None:
    calls: list[int] = []
    with handling({signal.SIGUSR1: lambda number, frame: calls.append(number)}), held_back():
        signal.raise_signal(signal.SIGUSR1)
        assert calls == [signal.SIGUSR1]
        safe_point()
        signal.raise_signal(signal.SIGUSR1)
    assert calls == [signal.SIGUSR1] * 2


def test_the_last_of_several_comes_out_with_the_one_before_as_its_cause() -> None:
    first, last = Rung("first"), KeyboardInterrupt()
    with handling({signal.SIGALRM: raising(first), signal.SIGINT: raising(last)}):
        with pytest.raises(KeyboardInterrupt) as caught, held_back():
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGINT)
            safe_point()
    assert caught.value is last and last.__cause__ is first


def test_a_signal_that_comes_again_where_no_safe_point_came_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with handling({signal.SIGINT: signal.default_int_handler}):
        done = []
        with pytest.raises(KeyboardInterrupt), held_back():
            for wait in (0.0, 0.5, 0.6, 9.0):  # an impatient user is no reason to break anything
                now[0] += wait
                signal.raise_signal(signal.SIGINT)
                done.append(wait)
        assert done == [0.0, 0.5]


def test_contexts_within_hold_for_the_outermost() -> None:
    with handling({signal.SIGALRM: raising(Rung())}):
        done = []
        with pytest.raises(Rung), held_back(ends_steps=True):
            with held_back(ends_steps=False):
                signal.raise_signal(signal.SIGALRM)
                safe_point(in_step=True)
                done.append("the step is whole")
            safe_point(in_step=True)
            done.append("more")
        assert done == ["the step is whole"]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL], ids=["ignored", "default"])
def test_what_the_system_handles_is_left_to_it(handler: Any) -> None:
    with handling({signal.SIGUSR2: handler}), held_back():
        assert signal.getsignal(signal.SIGUSR2) is handler


def test_a_handler_that_someone_sets_within_stays_and_one_that_keeps_ours_works() -> None:
    with handling({signal.SIGUSR1: raising(Rung())}):
        with held_back():
            ours = signal.getsignal(signal.SIGUSR1)
            assert callable(ours)

            def theirs(number: int, frame: FrameType | None) -> None:
                ours(number, frame)

            signal.signal(signal.SIGUSR1, theirs)
        assert signal.getsignal(signal.SIGUSR1) is theirs
        with pytest.raises(Rung):
            signal.raise_signal(signal.SIGUSR1)


def test_other_threads_hold_nothing_and_are_not_left() -> None:
    with handling({signal.SIGALRM: raising(Rung())}):
        handler, done = signal.getsignal(signal.SIGALRM), []

        def work() -> None:
            with held_back():
                safe_point()  # the main thread's exception is none of this one's
                done.append(signal.getsignal(signal.SIGALRM))

        with pytest.raises(Rung), held_back():
            signal.raise_signal(signal.SIGALRM)
            other = threading.Thread(target=work)
            other.start()
            other.join()
        assert done and done[0] is not handler


def test_a_forked_process_holds_nothing_back() -> None:
    with handling({signal.SIGUSR1: raising(SystemExit(7))}), held_back():
        child = os.fork()
        if not child:
            status = 1
            try:
                signal.raise_signal(signal.SIGUSR1)
            except SystemExit as e:
                status = e.code  # type: ignore[assignment]
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@functools.cache
def instants(code: CodeType) -> set[int]:
    """Return the offsets of code where Python has just looked for signals: after calls, and as loops begin anew."""
    found, looks = set[int](), True
    for instruction in dis.get_instructions(code):
        if looks:
            found.add(instruction.offset)
        looks = instruction.opname in ("RESUME", "CALL", "CALL_FUNCTION_EX") or "JUMP_BACKWARD" in instruction.opname
    return found


def signalled(run: Callable[[], None], number: int, at: int) -> tuple[int, bool]:
    """Send a signal at one of the instants of a call; return how many came, and whether the call raised `Rung`."""
    came = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal came
        if frame.f_code.co_filename not in (inspect.getfile(HeldSignals), contextlib.__file__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in instants(frame.f_code):
            came += 1
            if came == at:
                signal.raise_signal(number)
        return trace

    before, raised = sys.gettrace(), False
    sys.settrace(trace)
    try:
        run()
    except Rung:
        raised = True
    finally:
        sys.settrace(before)
    return came, raised


@pytest.mark.parametrize("number", NUMBERS[:3])
def test_at_any_instruction_handlers_are_set_back_and_nothing_gets_lost(number: int) -> None:
    """A signal comes at each instant at which Python runs handlers while code holds them back, one a round."""

    within: list[HeldSignals] = []

    def held() -> None:
        with held_back() as signals:
            within.append(signals)
            safe_point()

    with handling({number: raising(Rung())}):
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        for at in itertools.count(1):
            came, raised = signalled(held, number, at)
            assert raised == (came >= at)
            assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers
            with held_back() as others:  # or this would be within what is not left
                assert others not in within, f"at instant {at}"
            if not raised:
                break
        assert at > 50


def test_at_any_instruction_a_step_that_is_closed_is_closed() -> None:
    model = nn.Linear(2, 1)
    workload = Workload(model, torch.ones(4, 2), lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters()))
    with handling({signal.SIGUSR1: raising(Rung())}):
        for at in itertools.count(1):
            step, closed = Step(workload, microbatch_size=4), list[int]()
            step.on_close = functools.partial(closed.append, at)
            _, raised = signalled(step.close, signal.SIGUSR1, at)
            assert closed or at == 1, f"at instant {at}"  # the call itself begins with one, before any `try`
            if not raised:
                break
        assert at > 50
