"""Where in a buffer an element of an answer lies.

Defines `Place` and `place_of`, which turn the index of an array into rank, row, document and head; `first_difference`,
the one to look at first; and `in_words`, which says it all in a line.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.cases import Case, Vector, base_name
from refimpl.conformance.judge import TOKEN_AXIS, Difference, exact_rows
from refimpl.partition import partition_indices

Array = NDArray[Any]

ROW_OPERATIONS = ("positions", "document_ids", "labels", "visible")
"""Outputs beside those of TOKEN_AXIS whose first axis runs over the rows of the buffer."""


@dataclass(frozen=True)
class Place:
    """An element, as far as each term applies; None where it does not.

    `local_row` counts within the rank's part, `row` in the buffer. `document` is -1 in padding.
    """

    rank: int | None = None
    step: int | None = None
    local_row: int | None = None
    row: int | None = None
    document: int | None = None
    position: int | None = None
    head: int | None = None
    column: int | None = None
    key: int | None = None
    entry: int | None = None

    def __str__(self) -> str:
        parts = []
        if self.rank is not None:
            parts.append(f"rank {self.rank}")
        if self.step is not None:
            parts.append(f"step {self.step}")
        if self.row is not None:
            where = f"document {self.document}, position {self.position}" if self.document != -1 else "padding"
            parts.append(f"row {self.row} ({where})" if self.document is not None else f"row {self.row}")
        elif self.local_row is not None:
            parts.append(f"local row {self.local_row}")
        for name in ("head", "column", "key", "entry"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name} {value}")
        return ", ".join(parts)


def place_of(case: Case, name: str, index: Sequence[int]) -> Place:
    """The place of element `index` of the array `name` of an answer."""
    base, numbers = base_name(name), [int(part) for part in name.split(".")[1:]]
    rank = numbers[0] if numbers else None
    step = numbers[1] if len(numbers) > 1 else None
    if not index:
        return Place(rank, step)
    if base not in TOKEN_AXIS and base not in ROW_OPERATIONS:
        return Place(rank, step, entry=index[0])
    axis = TOKEN_AXIS.get(base, 0)
    local_row = index[axis]
    rows = rows_of(case, name)
    row = int(rows[local_row]) if rows is not None and local_row < len(rows) else None
    document, position = _document_of(case, name, row)
    others = [number for i, number in enumerate(index) if i != axis]
    if base == "visible":
        return Place(rank, step, local_row, row, document, position, key=others[0])
    if base == "x":
        return Place(rank, step, local_row, row, document, position, column=others[-1] if others else None)
    head, column = [*others, None, None][:2]
    return Place(rank, step, local_row, row, document, position, head, column)


def rows_of(case: Case, name: str) -> Array | None:
    """The buffer's rows that the token axis of an array stands for; None in cases without a layout or a step."""
    if not case.is_step and "cu_seqlens" not in case.inputs:
        return None
    if "." not in name:
        return np.arange(case.layout_of(name).total_tokens)
    return partition_indices(case.layout, case.policy, case.cp_size, int(name.split(".")[1]))


def _document_of(case: Case, name: str, row: int | None) -> tuple[int | None, int | None]:
    if row is None:
        return None, None
    layout = case.layout_of(name)
    return int(layout.document_ids[row]), int(layout.positions[row])


def first_difference(differences: Sequence[Difference]) -> Difference:
    """The difference on the lowest rank; the first that is listed among those of one rank."""
    return min(differences, key=lambda difference: _rank_of(difference.name))


def _rank_of(name: str) -> int:
    number = name.split(".")[1] if "." in name else "0"
    return int(number) if number.isdigit() else 0


def in_words(vector: Vector, difference: Difference, arrays: Mapping[str, Array]) -> str:
    """One line: the array, the place, what was got and what was expected, and how far off the whole array is."""
    name, wanted = difference.name, vector.expected.arrays[difference.name]
    match difference.problem:
        case "missing":
            return f"{name} is missing from the answer"
        case "shape":
            return f"{name} has shape {list(arrays[name].shape)}, expected {list(wanted.shape)}"
        case "dtype":
            kind = {"f": "floats", "b": "bools or integers"}.get(wanted.dtype.kind, "integers")
            return f"{name} has dtype {arrays[name].dtype}, expected {kind}"
    place = str(place_of(vector.case, name, difference.index))
    where = f"{name} at {place}" if place else name
    bound = "exactly" if difference.problem == "exact" or not difference.bound else f"within {difference.bound:.1e}"
    values = f"got {_number(difference.got)}, expected {_number(difference.wanted)} {bound}"
    return (
        f"{where}: {values}; {difference.wrong} of {wanted.size} elements wrong, largest error {difference.error:.1e}"
    )


def _number(value: float) -> str:
    return str(int(value)) if np.isfinite(value) and value == int(value) and abs(value) < 2**53 else f"{value:.6g}"


def wrong_elements(vector: Vector, difference: Difference, array: Array) -> Array:
    """Which elements of an array of the right shape are wrong: bool, in its shape."""
    wanted = vector.expected.arrays[difference.name].astype(np.float64)
    got = np.asarray(array).astype(np.float64)
    with np.errstate(invalid="ignore"):
        right = (got == wanted) | (np.abs(got - wanted) <= difference.bound)
    base = base_name(difference.name)
    if vector.expected.arrays[difference.name].dtype.kind == "f" and base in TOKEN_AXIS:
        rows = exact_rows(vector.case, vector.expected, difference.name)
        right &= (got == wanted) | ~rows.reshape([-1 if i == TOKEN_AXIS[base] else 1 for i in range(wanted.ndim)])
    wrong: Array = ~right
    return wrong


def wrong_rows(vector: Vector, difference: Difference, array: Array) -> list[int]:
    """The rows of the buffer in which an array of the right shape is wrong; none where rows have no meaning."""
    base = base_name(difference.name)
    if base not in TOKEN_AXIS and base not in ROW_OPERATIONS:
        return []
    rows = rows_of(vector.case, difference.name)
    if rows is None or array.shape != vector.expected.arrays[difference.name].shape:
        return []
    axis = TOKEN_AXIS.get(base, 0)
    wrong = wrong_elements(vector, difference, array)
    return sorted(int(row) for row in rows[wrong.any(axis=tuple(i for i in range(wrong.ndim) if i != axis))])
