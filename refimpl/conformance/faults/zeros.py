"""Mutants whose answers do not depend on attention at all.

Defines `MUTANTS`. The functions above it are the wrong pieces; signatures are those of `implementation`.
"""

import numpy as np

from refimpl.conformance.cases import Case
from refimpl.conformance.faults.mutant import Array, Mutant, mutant, returned_as, rows_of_output


def zeros(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """Zeros."""
    return np.zeros_like(array)


def zeros_on_later_ranks(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """Zeros but on rank 0."""
    return np.zeros_like(array) if rank else array


def inputs_again(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """The input of the same shape: v for out, q for dq, the shards in a row; zeros for lse."""
    if name == "lse":
        return np.zeros_like(array)
    if name == "x":
        return np.concatenate([np.asarray(case.tensors[f"x.{r}"], np.float64) for r in range(case.cp_size)])
    if case.operation == "merge":
        return np.asarray(case.tensors["out.0"], np.float64)
    source = {"out": "v", "dq": "q", "dk": "k", "dv": "v"}[name]
    x = np.asarray(case.tensors[source], np.float64)
    x = x[rows_of_output(name, case, rank) % len(x)]  # a step may have fewer keys than queries
    return np.repeat(x, array.shape[1] // x.shape[1], axis=1)


MUTANTS: tuple[Mutant, ...] = (
    mutant("zeros-everywhere", "zeros", "returns zeros", "TE#3536", finish=zeros),
    mutant(
        "zero-gradients",
        "zeros",
        "returns zeros for the gradients",
        "TE#3528",
        **returned_as("dq", "dk", "dv")(lambda array, case: np.zeros_like(array)),
    ),
    mutant("zeros-on-later-ranks", "zeros", "returns zeros on every rank but the first", finish=zeros_on_later_ranks),
    mutant("returned-inputs", "zeros", "returns its inputs", finish=inputs_again),
)
"""In the order of `mutants.MUTANTS`."""
