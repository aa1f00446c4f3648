"""An adapter whose rank 1, or every rank, goes wrong in one way: `thdcp check --adapter faulty_adapter:run`, FAULT=HOW.

It is the reference but for the cases named below.
"""

import os
import sys
import time

import numpy as np

from refimpl.collectives import launched
from refimpl.conformance.adapters import Skip, reference
from refimpl.errors import SpecError

FAULT = os.environ.get("FAULT", "nothing")
RANK = (launched() or (0, 1))[0]
DECLARATION = {"name": "faulty", "dtype": "float64", "lacks": ["gqa"]}
STRUCK = {"partition": 1, "context_parallel_forward": 3}
"""Operations in which something happens; for context_parallel_forward others wait inside a collective."""


def now() -> None:
    """On the launcher's own output: that of ranks beyond the first is not shown."""
    print(f"fault at {time.time()}", file=sys.__stdout__, flush=True)


if FAULT == "import raises" and RANK == 1:
    now()
    raise RuntimeError("no such device,\nsorry")
if FAULT == "import waits for a rank that raises":
    now()
    if RANK == 1:
        raise RuntimeError("no such device")
    time.sleep(600)


def run(case):
    """The reference's answer, or the fault."""
    struck = case.operation in STRUCK
    if struck and FAULT == "every rank raises":
        raise ZeroDivisionError("on purpose,\nin two lines")
    if struck and FAULT == "every rank refuses" and "gqa" in case.features:
        raise SpecError("heads", "no grouped heads")
    if struck and FAULT == "every rank skips" and "gqa" in case.features:
        raise Skip("gqa")
    if RANK == 1 and case.operation == "partition":
        match FAULT:
            case "one rank raises, none waits":
                raise ZeroDivisionError("on purpose")
            case "one rank refuses, none waits":
                raise SpecError("policy", "not here")
            case "one rank answers in another shape":
                return {"indices.1": np.zeros((3, 10**7), np.int64)}
    if RANK == 1 and case.operation == "context_parallel_forward":
        match FAULT:
            case "one rank raises while others wait":
                now()
                raise ZeroDivisionError("on purpose,\nin two lines")
            case "one rank refuses while others wait":
                now()
                raise SpecError("heads", "not on this rank")
            case "one rank hangs":
                now()
                time.sleep(600)
            case "one rank takes no part":
                now()
                return {}
            case "one rank dies":
                now()
                os._exit(7)
    return reference.run(case)
