"""Wrong on purpose: right integers, and zeros wherever a float is asked, as a backend that does nothing returns them.

A test that compares ranks with each other finds nothing here; every case of attention must fail.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.adapters import reference
from refimpl.conformance.cases import Case

DECLARATION = {"name": "zeros", "dtype": "float64", "lacks": []}


def run(case: Case) -> dict[str, NDArray[Any]]:
    """Zeros in the shapes of the right answer."""
    right = reference.run(case)
    return {name: np.zeros_like(x) if x.dtype.kind == "f" else x for name, x in right.items()}
