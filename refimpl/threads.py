"""Threads that compute with NumPy, each with a BLAS of one thread.

Defines `default_workers` and `run_on_threads`. A pool of threads whose matrix products use one core each is faster than
one thread whose products use all of them, but only if the BLAS is held back: both together get in each other's way.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any


def default_workers() -> int:
    """OMP_NUM_THREADS if that is a positive number, else the CPUs that this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_on_threads(work: Callable[[], None], threads: int) -> None:
    """Call `work` on so many threads at once, or once on this one, if NumPy's BLAS cannot be limited to one thread."""
    with _one_blas_thread as limited:
        if threads <= 1 or not limited:
            work()
            return
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(work) for _ in range(threads)]:
                done.result()


class _OneBlasThread:
    """Holds NumPy's BLAS at one thread a call while any caller is inside; entering says whether it is.

    The limit is one for the whole process, and ranks may be threads of one process. So the first in sets it, and the
    last out restores what was. Both do so from a thread that ends at once: to threadpoolctl 3.8 a thread that ever set
    a limit owns it while it lives, and the last out is not always the first in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: list[int] = []

    def __enter__(self) -> bool:
        libraries = _blas_libraries()
        with self._lock:
            if self._inside == 0:
                self._before = [library.num_threads for library in libraries]
                self._set([1] * len(libraries))
            self._inside += 1
        return len(libraries) > 0 and all(library.num_threads == 1 for library in libraries)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._set(self._before)

    def _set(self, threads: list[int]) -> None:
        def set_all() -> None:
            for library, number in zip(_blas_libraries(), threads, strict=True):
                library.set_num_threads(number)

        setter = threading.Thread(target=set_all)
        setter.start()
        setter.join()


_one_blas_thread = _OneBlasThread()


@cache
def _blas_libraries() -> list[Any]:
    """threadpoolctl's handles of the BLAS behind NumPy, and of any other that is loaded; none without threadpoolctl."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return []
    return list(ThreadpoolController().select(user_api="blas").lib_controllers)
