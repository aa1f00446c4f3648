"""Whether an answer is right, and if not, where it first goes wrong.

Defines `Difference` and `differences`. Integers, bools and moved data are exact; so are the zeros of padding rows and
of rows that see no key, and their lse of -inf. All else is held to the bounds that the vector states for the dtype that
the implementation computes in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.cases import Case, Expected, base_name
from refimpl.partition import partition_indices

Array = NDArray[Any]

TOKEN_AXIS = {"out": 0, "dq": 0, "dk": 0, "dv": 0, "x": 0, "lse": 1}
"""The axis of an output that runs over rows of the buffer, or of a rank's part of it."""


@dataclass(frozen=True)
class Difference:
    """How one array of an answer differs from the right one.

    - `name`: the array, out.3 for instance. `problem`: missing, shape, dtype, exact (a value that must be exact is not)
      or value (beyond the bound).
    - `index`: the first element that differs; `wrong`: how many do. `got`, `wanted`: its values.
    - `error`: the largest error of the array, infinite for NaN; `bound`: what it may be.
    """

    name: str
    problem: str
    index: tuple[int, ...] = ()
    wrong: int = 0
    got: float = float("nan")
    wanted: float = float("nan")
    error: float = float("inf")
    bound: float = 0.0


def differences(case: Case, expected: Expected, answer: Mapping[str, Any], dtype: str = "float64") -> list[Difference]:
    """Every array of the answer that is wrong; an empty list if the answer is right.

    Args:
        answer: arrays by name; names that the case does not ask for are ignored.
        dtype: the float dtype that the implementation computes in, a key of `expected.bounds`.

    [N2] [A5] [B2]
    """
    found = (_difference(case, expected, name, answer.get(name), dtype) for name in expected.arrays)
    return [difference for difference in found if difference is not None]


def _difference(case: Case, expected: Expected, name: str, got: Any, dtype: str) -> Difference | None:
    wanted = expected.arrays[name]
    if got is None:
        return Difference(name, "missing")
    array = np.asarray(got)
    if array.shape != wanted.shape:
        return Difference(name, "shape")
    is_float = wanted.dtype.kind == "f"
    if (array.dtype.kind in "iub") == is_float or array.dtype.kind not in "iubfV":
        return Difference(name, "dtype")
    array, wanted = array.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(invalid="ignore"):
        errors = np.where(array == wanted, 0.0, np.abs(array - wanted))
    errors = np.where(np.isnan(errors), np.inf, errors)
    bounds = expected.bounds.get(dtype, {})
    bound = bounds.get(base_name(name), 0.0) if is_float else 0.0
    exact = np.zeros(wanted.shape, bool) if is_float else np.ones(wanted.shape, bool)
    if is_float and base_name(name) in TOKEN_AXIS:
        exact |= _rows_on_axis(exact_rows(case, expected, name), TOKEN_AXIS[base_name(name)], wanted.ndim)
    wrong = np.where(exact, errors > 0, errors > bound)
    if not wrong.any():
        return None
    first = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
    problem = "exact" if exact[first] else "value"
    largest = float(errors.max())
    return Difference(name, problem, first, int(wrong.sum()), float(array[first]), float(wanted[first]), largest, bound)


def _rows_on_axis(rows: Array, axis: int, ndim: int) -> Array:
    return rows.reshape([-1 if i == axis else 1 for i in range(ndim)])


@lru_cache(maxsize=1 << 14)
def exact_rows(case: Case, expected: Expected, name: str) -> Array:
    """Rows of an output where no rounding is allowed: padding, and for out, lse and dq rows that see no key; bool."""
    if case.operation == "merge":
        return np.asarray(np.isneginf(expected.arrays["lse"]).all(axis=0))
    exact = case.layout_of(name).document_ids < 0
    if base_name(name) in ("out", "lse", "dq"):
        exact = exact | ~sees_keys(case)
    if "." not in name:
        return exact
    rank = int(name.split(".")[1])
    return exact[partition_indices(case.layout, case.policy, case.cp_size, rank)]


def sees_keys(case: Case) -> Array:
    """Whether each row of the queries' buffer sees any key; bool."""
    queries, keys = case.layout_of("q"), case.layout_of("k")
    documents = queries.document_ids
    positions = queries.positions
    if case.is_step:
        positions = positions + np.append(case.step.first_query_positions, 0)[documents]
    first, last = case.mask.key_range(positions, np.append(keys.seqlens, 0)[documents])
    return np.asarray((documents >= 0) & (first < last))
