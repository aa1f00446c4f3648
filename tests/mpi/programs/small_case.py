"""What the programs of this folder share: one small request, one rank's work on it, and the time of the fault."""

import time
from typing import Any

import numpy as np

from refimpl.collectives import Collectives
from refimpl.context_parallel import REFERENCE, Parts, context_parallel_backward, context_parallel_forward
from refimpl.layout import PackedLayout


def work(group: Collectives, parts: Parts = REFERENCE, **change: Any) -> None:
    """Forward and backward of this rank on a document of 16 rows a rank, with something changed."""
    request = {
        "lengths": [16 * group.size],
        "policy": "packed_contiguous",
        "dtype": np.float32,
        "heads": 2,
    } | change
    q = np.ones((16, request["heads"], 4), request["dtype"])
    k, v = np.ones((2, 16, 1, 4), request["dtype"])
    layout = PackedLayout.from_lengths(request["lengths"])
    out, _, saved = context_parallel_forward(q, k, v, layout, request["policy"], group, parts=parts)
    context_parallel_backward(out, saved, group, parts)


def now() -> None:
    """Tell the test that the fault happens now."""
    print(f"fault at {time.time()}", flush=True)
