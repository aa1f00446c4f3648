"""Threads and the BLAS under them: one thread a matrix product while any caller is inside, and then as before."""

import sys
import threading
from unittest import mock

import numpy as np
import pytest
from strategies import Heads, tensors
from support import assert_close, run

from refimpl import threads, tiled
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask

CAUSAL = AttentionMask()


class Library:
    """Stands in for threadpoolctl's handle of a BLAS; one that does not `obey` is under another thread's control."""

    def __init__(self, obeys=True):
        self.num_threads = 2
        self.obeys = obeys
        self.calls = []

    def set_num_threads(self, number):
        self.calls.append(number)
        if self.obeys:
            self.num_threads = number


@pytest.fixture
def library(monkeypatch):
    stand_in = Library()
    monkeypatch.setattr(threads, "_blas_libraries", lambda: [stand_in])
    return stand_in


def three_documents():
    return tensors(np.random.default_rng(0), 150, 150, Heads(2, 2, 4, 4)), PackedLayout.from_lengths([40, 50, 60])


def test_the_first_caller_limits_blas_and_the_last_one_restores_it(library):
    """Two ranks that are threads of one process, the first of them leaving first."""
    second_is_in, first_has_left, second_may_leave = (threading.Event() for _ in range(3))

    def first():
        with threads._one_blas_thread as limited:
            assert limited
            second_is_in.wait(10)
        first_has_left.set()

    def second():
        with threads._one_blas_thread as limited:
            assert limited
            second_is_in.set()
            second_may_leave.wait(10)

    callers = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in callers:
        thread.start()
    assert first_has_left.wait(10)
    assert library.calls == [1]
    second_may_leave.set()
    for thread in callers:
        thread.join(10)
    assert library.calls == [1, 2]
    with threads._one_blas_thread:
        assert library.num_threads == 1
    assert library.num_threads == 2


def test_a_task_that_fails_ends_the_call_with_its_error_and_restores_blas(library):
    arrays, layout = three_documents()

    def failing(*_):
        raise MemoryError("no room for a tile")

    for workers in (1, 3):
        with mock.patch.object(tiled, "_scores", failing), pytest.raises(MemoryError, match="no room"):
            tiled.attention_forward(*arrays[:3], layout, CAUSAL, workers=workers)
        assert library.num_threads == 2


def numpys_blas():
    """Threads of the BLAS that NumPy had loaded when this module was first used."""
    return [handle.num_threads for handle in threads._blas_libraries()]


def set_blas_threads(number):
    """From a thread that ends: a living one would keep control of the limit."""
    setter = threading.Thread(target=lambda: [handle.set_num_threads(number) for handle in threads._blas_libraries()])
    setter.start()
    setter.join()


def test_blas_itself_is_limited_while_any_of_many_callers_is_inside():
    """The callers come and go: whoever limited BLAS is often gone, or still alive, when the last one restores it."""
    arrays, layout = three_documents()
    seen = []

    def observing(*args):
        seen.append(numpys_blas())
        return scores(*args)

    def call():
        for _ in range(20):
            run(tiled, *arrays, layout, CAUSAL, workers=2)
        done.wait(60)

    scores = tiled._scores
    done = threading.Event()
    before = numpys_blas()
    set_blas_threads(2)
    try:
        with mock.patch.object(tiled, "_scores", observing):
            callers = [threading.Thread(target=call) for _ in range(4)]
            for caller in callers:
                caller.start()
            run(tiled, *arrays, layout, CAUSAL, workers=2)
            done.set()
            for caller in callers:
                caller.join(60)
        assert set(numpys_blas()) == {2}
        run(tiled, *arrays, layout, CAUSAL)
        assert set(numpys_blas()) == {2}
    finally:
        set_blas_threads(before[0])
    assert {number for numbers in seen for number in numbers} == {1}


@pytest.mark.parametrize("libraries", [[], [Library(obeys=False)]], ids=["no threadpoolctl", "not ours to limit"])
def test_one_worker_where_blas_cannot_be_limited(monkeypatch, libraries):
    arrays, layout = three_documents()
    expected = run(tiled, *arrays, layout, CAUSAL)
    monkeypatch.setattr(threads, "_blas_libraries", lambda: libraries)
    with mock.patch.object(threads, "ThreadPoolExecutor", side_effect=AssertionError("more than one worker")):
        assert_close(run(tiled, *arrays, layout, CAUSAL, workers=4), expected)


def test_without_threadpoolctl_there_is_no_blas_to_limit(monkeypatch):
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    assert threads._blas_libraries.__wrapped__() == []


@pytest.mark.parametrize(
    ("value", "workers"), [("3", 3), ("1", 1), (None, None), ("", None), ("0", None), ("4,2", None)]
)
def test_default_workers(monkeypatch, value, workers):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cpus = threads.default_workers()
    assert cpus >= 1
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert threads.default_workers() == (workers or cpus)
