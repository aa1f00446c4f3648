"""Wrong on purpose: right integers, and an input wherever a float is asked; every case of attention must fail.

v stands for out and every input for its own gradient, numbers of a likely size; lse is 0; shards stay as they lie.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.adapters import reference
from refimpl.conformance.cases import Case, base_name
from refimpl.partition import partition_indices

Array = NDArray[Any]

DECLARATION = {"name": "identity", "dtype": "float64", "lacks": []}

RETURNED = {"out": "v", "dq": "q", "dk": "k", "dv": "v"}


def run(case: Case) -> dict[str, Array]:
    """Inputs in the shapes of the right answer."""
    right = reference.run(case)
    return {name: _input(case, name, x) if x.dtype.kind == "f" else x for name, x in right.items()}


def _input(case: Case, name: str, right: Array) -> Array:
    """What an implementation that does nothing hands on, in the shape of the right answer."""
    if base_name(name) == "lse":
        return np.zeros_like(right)
    if case.operation == "unpartition":
        return np.concatenate([case.tensors[f"x.{r}"] for r in range(case.cp_size)])
    if case.operation == "merge":
        return case.tensors["out.0"]
    x = case.tensors[RETURNED[base_name(name)]].astype(np.float64)
    rank = name.partition(".")[2]
    rows = partition_indices(case.layout, case.policy, case.cp_size, int(rank)) if rank else np.arange(len(right))
    return np.repeat(x[rows % len(x)], right.shape[1] // x.shape[1], axis=1)  # a step may have fewer keys than queries
