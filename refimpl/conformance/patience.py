"""An end to waiting for an implementation that does not come back.

Defines `limit`. Nothing can call a thread back from a collective or a kernel, so what ends is the process, or the job.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from refimpl.errors import SpecError

End = Callable[[SpecError], None]
"""Ends this process, or all ranks, with an error; called from another thread than the one that hangs."""

DEFAULT_TIMEOUT = 120.0
"""Seconds for one case: it is tiny, but the first one may compile something."""


@contextmanager
def limit(seconds: float, what: str, end: End) -> Iterator[None]:
    """Call `end` with a SpecError rank_failed of the text `what` if the block takes longer; 0: no limit."""
    if not seconds:
        yield
        return
    timer = threading.Timer(seconds, lambda: end(SpecError("rank_failed", what)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
