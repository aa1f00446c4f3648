"""What is known of wrong answers without naming a fault: where they first differ, and what they look like.

Defines `Observation` and `observe`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.cases import FEATURES, PER_RANK, Case, base_name
from refimpl.conformance.comparison import CRASH, Item, reference_is_right
from refimpl.conformance.judge import TOKEN_AXIS
from refimpl.conformance.locate import Place, place_of, rows_of

Array = NDArray[Any]


@dataclass(frozen=True)
class Observation:
    """The first difference, and sentences about all of them.

    - `case`: the smallest that fails. `name`, `place`: the array, and the place in it; `got`, `wanted`: its values.
    - `problem`: value, missing, form (shape or dtype), refusal (refused or crashed where it should answer, or the
      reverse); `got` and `wanted` are NaN unless it is value.
    - `outputs`: what is wrong, by base name. `patterns`: what the wrong numbers look like, as sentences.
    """

    case: str
    name: str
    place: Place
    problem: str
    got: float
    wanted: float
    outputs: tuple[str, ...]
    patterns: tuple[str, ...]

    def __str__(self) -> str:
        where = f" at {self.place}" if str(self.place) else ""
        first = {
            "value": f"{self.name}{where}: got {self.got:.6g}, expected {self.wanted:.6g}",
            "missing": f"{self.name} is missing",
            "form": f"{self.name} has another shape or dtype than expected",
        }.get(self.problem, self.name)
        return "; ".join([f"first in {self.case}, {first}", *self.patterns])


@dataclass(frozen=True, eq=False)
class Wrong:
    """One wrong array of a float or integer answer, in the right form."""

    item: Item
    name: str
    got: Array
    wanted: Array
    wrong: Array

    @property
    def axis(self) -> int:
        """The axis of rows."""
        return TOKEN_AXIS.get(base_name(self.name), 0)

    @property
    def rank(self) -> int | None:
        """The rank that it belongs to."""
        return int(self.name.split(".")[1]) if self.item.case.operation in PER_RANK else None

    @property
    def bound(self) -> float:
        """What the judge allows, twice: rows are compared with other rows."""
        return 2 * self.item.expected.bounds.get(self.item.dtype, {}).get(base_name(self.name), 0.0)

    @property
    def is_float(self) -> bool:
        """Whether it holds floats."""
        return self.item.expected.arrays[self.name].dtype.kind == "f"


def observe(failing: Sequence[Item], passing: Sequence[Item]) -> Observation:
    """What the failing answers have in common, and what tells them from the passing ones."""
    first = min(failing, key=lambda item: (not item.wrong.any(), len(item.target.values)))
    arrays = [wrong for item in failing for wrong in wrong_arrays(item)]
    patterns = [sentence for pattern in _PATTERNS if (sentence := pattern(arrays))]
    patterns += [sentence for sentence in _where(failing, passing, arrays) if sentence]
    outputs = tuple(dict.fromkeys(base_name(name) for item in failing for name in _wrong_names(item)))
    return Observation(first.case.id, *_first(first), outputs, tuple(patterns))


def wrong_arrays(item: Item) -> Iterator[Wrong]:
    """The arrays of an answer that are wrong but for their form."""
    if not len(item.wrong):
        return
    for name, part in item.target.slices.items():
        if item.wrong[part].any() and name not in item.reply.odd:
            right = item.expected.arrays[name]
            values = (x[part].reshape(right.shape) for x in (item.reply.values, item.target.values, item.wrong))
            yield Wrong(item, name, *values)


def _wrong_names(item: Item) -> list[str]:
    if not len(item.wrong):
        return list(item.target.names) or ["refusal"]
    return [name for name, part in item.target.slices.items() if item.wrong[part].any()]


def _first(item: Item) -> tuple[str, Place, str, float, float]:
    """Name, place, problem, got and wanted of the first difference: on the lowest rank, in the order of the arrays."""
    nan = float("nan")
    if item.wrong_outcome:
        got = f"refused with {item.reply.error}" if item.reply.error else "answered"
        got = "crashed" if item.reply.error == CRASH else got
        wanted = f"refused with {item.expected.error}" if item.expected.error else "answered"
        return f"{got}, expected to be {wanted}", Place(), "refusal", nan, nan
    name = min(_wrong_names(item), key=lambda name: _number(name, 1))
    if name in item.reply.odd:
        return name, Place(), "missing" if item.reply.odd[name] is None else "form", nan, nan
    found = next(wrong for wrong in wrong_arrays(item) if wrong.name == name)
    index = tuple(int(i) for i in np.argwhere(found.wrong)[0]) if found.wrong.ndim else ()
    return name, place_of(item.case, name, index), "value", float(found.got[index]), float(found.wanted[index])


def rows_in_buffer(case: Case, name: str) -> Array | None:
    """The buffer's rows of an array, if it has any."""
    if base_name(name) not in (*TOKEN_AXIS, *_ROWS):
        return None
    return rows_of(case, name)


_ROWS = ("positions", "document_ids", "labels", "visible")


def _number(name: str, part: int) -> int:
    numbers = name.split(".")
    return int(numbers[part]) if len(numbers) > part else 0


# --- patterns: each a sentence about all wrong arrays, or "" --------------------------------------------------------


def all_zeros(arrays: Sequence[Wrong]) -> str:
    """Nothing but zeros."""
    return "every wrong array is zero throughout" if arrays and not any(x.got.any() for x in arrays) else ""


def not_a_number(arrays: Sequence[Wrong]) -> str:
    """NaN or infinity where a number belongs."""
    counts = [
        (int((~np.isfinite(x.got) & np.isfinite(x.wanted)).sum()), int(x.wrong.sum())) for x in arrays if x.is_float
    ]
    bad, wrong = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    if not bad:
        return ""
    return f"NaN or infinity in {f'{bad} of {wrong} wrong elements' if bad < wrong else 'every wrong element'}"


def scaled(arrays: Sequence[Wrong]) -> str:
    """A constant times the right numbers, one for each output."""
    factors: dict[str, float] = {}
    for x in arrays:
        if np.count_nonzero(x.wrong) < 3:
            continue
        factor = _factor(x)
        if factor is None or not np.isclose(factors.setdefault(base_name(x.name), factor), factor, rtol=1e-2):
            return ""
    if not factors or all(abs(factor - 1) < 1e-9 or abs(factor) < 1e-9 for factor in factors.values()):
        return ""
    return ", ".join(f"{name} is {factor:.6g} times the right value" for name, factor in factors.items())


def _factor(x: Wrong) -> float | None:
    finite = np.isfinite(x.wanted)
    if not x.is_float or not np.array_equal(x.got[~finite], x.wanted[~finite]) or not np.isfinite(x.got[finite]).all():
        return None
    got, wanted = x.got[finite], x.wanted[finite]
    size = float((wanted * wanted).sum())
    if size == 0:
        return None
    factor = float((got * wanted).sum()) / size
    return factor if np.abs(got - factor * wanted).max() <= x.bound * max(1.0, abs(factor)) else None


def transposed(arrays: Sequence[Wrong]) -> str:
    """The transpose of the right array, where that has the same shape."""

    def is_transposed(x: Wrong) -> bool:
        return x.wanted.ndim == 2 and x.wanted.shape[0] == x.wanted.shape[1] and _near(x.got, x.wanted.T, x.bound)

    return "every wrong array is the transpose of the right one" if arrays and all(map(is_transposed, arrays)) else ""


def moved_rows(arrays: Sequence[Wrong]) -> str:
    """Rows that are right but for their place."""
    orders: list[list[int]] = []
    for x in arrays:
        order = _order(x)
        if order is None:
            return ""
        orders.append(order)
    shifts = {_shift(order) for order in orders}
    if len(shifts) == 1 and None not in shifts:
        return f"rows are shifted: row i holds what belongs in row i + {shifts.pop()}"
    if not orders:
        return ""
    x = arrays[0]
    return f"rows are right but permuted: {x.name} of {x.item.case.id} holds the rows {_short(orders[0])}"


def _order(x: Wrong) -> list[int] | None:
    """The right rows that the rows of an array equal, if that is a permutation."""
    if not x.is_float or x.wanted.ndim < 2 or x.wanted.shape[x.axis] < 2:
        return None
    got, wanted = (np.moveaxis(y, x.axis, 0).reshape(y.shape[x.axis], -1) for y in (x.got, x.wanted))
    free = list(range(len(wanted)))
    order = []
    for row in got:
        same = next((i for i in free if _near(row, wanted[i], x.bound)), None)
        if same is None:
            return None
        free.remove(same)
        order.append(same)
    return order


def _shift(order: list[int]) -> int | None:
    n = len(order)
    shift = (order[0] + n) % n
    return shift if order == [(i + shift) % n for i in range(n)] else None


def rows_of_other_ranks(arrays: Sequence[Wrong]) -> str:
    """The part of another rank in place of one's own."""
    found = []
    for x in arrays:
        others = _parts_of_others(x)
        if not others:
            return ""
        found.append((x.rank, others))
    return f"rank {found[0][0]} returns what belongs to rank {found[0][1][0]}" if found else ""


def _parts_of_others(x: Wrong) -> list[int]:
    if x.rank is None or not x.is_float:
        return []
    parts = {_number(name, 1): y for name, y in x.item.expected.arrays.items() if base_name(name) == base_name(x.name)}
    return [r for r, y in parts.items() if r != x.rank and y.shape == x.got.shape and _near(x.got, y, x.bound)]


def _near(a: Array, b: Array, bound: float) -> bool:
    with np.errstate(invalid="ignore"):
        return bool(((a == b) | (np.abs(a - b) <= bound)).all())


def _short(order: list[int]) -> str:
    return f"[{', '.join(map(str, order[:16]))}{', ...' if len(order) > 16 else ''}]"


_PATTERNS: tuple[Callable[[Sequence[Wrong]], str], ...] = (
    all_zeros,
    not_a_number,
    scaled,
    transposed,
    rows_of_other_ranks,
    moved_rows,
)


# --- where ----------------------------------------------------------------------------------------------------------


def _where(failing: Sequence[Item], passing: Sequence[Item], arrays: Sequence[Wrong]) -> Iterator[str]:
    if not all(reference_is_right(item.target) for item in failing):
        yield "the reference that faults are made from is itself wrong there, so that none can be told"
    yield only_padding(arrays)
    yield only_backward(failing, passing)
    rank = only_rank(failing)
    if rank is not None:
        yield f"only rank {rank} is wrong"
    yield from telling_features(failing, passing)


def only_padding(arrays: Sequence[Wrong]) -> str:
    """Nothing wrong but in padding."""
    for x in arrays:
        rows = rows_in_buffer(x.item.case, x.name)
        if rows is None or not x.is_float:
            return ""
        wrong_rows = np.moveaxis(x.wrong, x.axis, 0).reshape(len(rows), -1).any(axis=1)
        if (x.item.case.layout_of(x.name).document_ids[rows[wrong_rows]] >= 0).any():
            return ""
    return "only padding rows are wrong" if arrays else ""


def only_backward(failing: Sequence[Item], passing: Sequence[Item]) -> str:
    """Gradients are wrong, and what they are gradients of is right."""
    gradients = all(item.case.operation.endswith("_backward") for item in failing)
    forward = any(item.case.operation.endswith("_forward") for item in passing)
    return "only gradients are wrong" if gradients and forward else ""


def only_rank(failing: Sequence[Item]) -> int | None:
    """The one rank that is wrong in every failing case with ranks, although there are more; None if there is none.

    What it contributes to dk and dv reaches others, so these tell only where nothing else is wrong. Rank 0 answers
    where there are no ranks.
    """
    ranks: set[int] = set()
    several = False
    for item in failing:
        names = _wrong_names(item) if item.case.operation in PER_RANK and len(item.wrong) else []
        own = {_number(name, 1) for name in names if base_name(name) not in ("dk", "dv")}
        ranks |= own or {_number(name, 1) for name in names} or {0}
        several |= bool(names) and item.case.cp_size > 1
    return ranks.pop() if len(ranks) == 1 and several else None


def telling_features(failing: Sequence[Item], passing: Sequence[Item]) -> Iterator[str]:
    """Features that all failing cases need and no passing one does."""
    asked = {base.removesuffix("_forward").removesuffix("_backward") for base in (x.case.operation for x in failing)}
    for feature in FEATURES:
        needed = all(feature in item.case.features for item in failing)
        if needed and feature not in asked and passing and not any(feature in item.case.features for item in passing):
            yield f"every case with {feature} fails, and no other"
