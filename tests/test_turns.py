"""One verb at a time; what it changes of the process is for its thread, and for those that it starts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest

from memfit.interrupts import held_back
from memfit.turns import has_turn, here, turn


def test_a_turn_excludes_other_threads_and_not_its_own() -> None:
    running, most, done = 0, 0, []

    def work(number: int) -> None:
        nonlocal running, most
        for _ in range(20):
            with turn(), turn():
                running += 1
                most = max(most, running)
                time.sleep(0)
                running -= 1
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and len(done) == 4


def test_a_function_is_ours_in_the_threads_of_a_turn_and_theirs_in_others() -> None:
    chosen = here(lambda: "ours", lambda: "theirs")
    before, began, over = ThreadPoolExecutor(1), threading.Event(), threading.Event()
    before.submit(began.wait)  # a thread that runs already
    assert chosen() == "ours"
    with turn():
        began.set()
        with ThreadPoolExecutor(1) as within:
            assert within.submit(chosen).result() == "ours"
            nested: list[str] = []

            def start() -> None:
                thread = threading.Thread(target=lambda: nested.append(chosen()))
                thread.start()
                thread.join()

            within.submit(start).result()
            before.submit(start).result()
        assert nested == ["ours", "theirs"]
        assert before.submit(chosen).result() == "theirs"
        over.set()
    assert before.submit(chosen).result() == "ours"
    before.shutdown()


def test_threads_start_as_before_after_a_turn_that_fails() -> None:
    start = threading.Thread.__dict__["start"]
    with pytest.raises(ValueError), turn():
        assert threading.Thread.__dict__["start"] is not start
        raise ValueError
    assert threading.Thread.__dict__["start"] is start and has_turn()


@contextlib.contextmanager
def another_threads_turn() -> Iterator[None]:
    has, over = threading.Event(), threading.Event()

    def work() -> None:
        with turn():
            has.set()
            over.wait()

    other = threading.Thread(target=work)
    other.start()
    has.wait()
    try:
        yield
    finally:
        over.set()
        other.join()


def test_a_signal_ends_the_wait_for_another_threads_turn() -> None:
    class Rung(Exception):
        pass

    def handler(number: int, frame: FrameType | None) -> None:
        raise Rung

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with another_threads_turn():
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Rung), held_back(), turn():
                pass
    finally:
        signal.signal(signal.SIGALRM, before)
    with turn():
        pass


def test_a_process_that_is_forked_in_another_threads_turn_has_its_own() -> None:
    with another_threads_turn():
        child = os.fork()
        if not child:
            with turn():
                os._exit(0 if has_turn() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
