"""The verdict on one tensor of a capture.

Defines `Looked`, what is expected of the rows that were looked at, and `judge_tensor`, which holds the tensor against
it and, whatever was looked at, every padding row against 0 (lse: -inf) and every real row against NaN and infinity.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.capture.file import Capture
from refimpl.conformance.check import Result
from refimpl.conformance.locate import Place
from refimpl.conformance.yardstick import named_dtype
from refimpl.layout import IntArray
from refimpl.partition import partition_indices
from refimpl.tolerance import Tolerance, largest_finite

Array = NDArray[Any]
CHUNK = 4096
"""Rows at a time where all rows are looked at."""

NEIGHBOURS = {"out": 1, "dv": 1, "dq": 16, "dk": 16}
"""Rows that are held against their own length together. [V13]"""
PART, FARTHER, FLOOR = 0.25, 8.0, 0.01
"""Of the rows' length, of the plain implementation's error there, of the bound: rows farther off than all three are
wrong. [V13]"""


@dataclass(frozen=True, eq=False)
class Looked:
    """Some rows of a tensor as they should be.

    - `rows`: ascending rows of real tokens; `exact`: their values in float64, [n, H, D], lse [H, n].
    - `yardstick`: the largest error of the plain implementation in them. `is_all`: whether they are all there are.
    - `slack`: how much farther each element may lie; None: no farther.
    - `plain_rows` [n]: the length of the plain implementation's error in each row; infinite where it was not asked.
    """

    rows: IntArray
    exact: Array
    yardstick: float
    is_all: bool
    plain_rows: Array
    slack: Array | None = None

    def bound(self, dtype: str) -> float:
        """The largest error that passes, slack aside. [N2]"""
        return Tolerance.of(named_dtype(dtype), self.yardstick, largest_finite(self.exact)).bound


def by_row(name: str, x: Array) -> Array:
    """A view [rows, heads, columns] of a tensor; lse has one column."""
    return x.T[:, :, None] if name == "lse" else x


def errors_of(name: str, looked: Looked, got: Array) -> Array:
    """|got - expected| of the rows looked at, [n, H, D]; infinite where got is no number. `got` is the whole tensor."""
    exact = by_row(name, looked.exact)
    with np.errstate(invalid="ignore"):
        errors = np.abs(by_row(name, got)[looked.rows].astype(np.float64) - exact)
    return np.where(np.isnan(errors), np.inf, errors)


@dataclass(frozen=True)
class _Wrong:
    """The wrong elements of one row."""

    row: int
    elements: Array
    wanted: Array | None


def judge_tensor(capture: Capture, name: str, looked: Looked) -> Result:
    """Pass or fail, with the largest error and the tolerance, and the first place that is wrong: on the lowest rank.

    [N2] [A5] [B2] [V12]
    """
    dtype, got = capture.dtypes[name], by_row(name, capture.outputs[name])
    bound = looked.bound(dtype)
    errors = errors_of(name, looked, capture.outputs[name])
    wrong = wrong_of(name, looked, errors, bound)
    looked_at = looked.rows[wrong.any(axis=(1, 2))]
    padding, broken = _unwritten(capture, name, got), _not_finite(capture, got)
    largest = float(errors.max(initial=0.0))
    widest = bound if looked.slack is None else bound + float(looked.slack.max(initial=0.0))
    details = {"error": largest, "tolerance": widest, "rows": len(looked.rows), "yardstick": looked.yardstick}
    tolerance = f"tolerance {widest:.1e} ({dtype})"
    rows = np.unique(np.concatenate([looked_at, padding, broken]))
    if not len(rows):
        return Result(name, "pass", f"largest error {largest:.1e}, {tolerance}", dtype=dtype, details=details)
    place, value, wanted = _first(capture, name, got, rows, looked, wrong)
    told = [f"{name} at {place}: got {value:.6g}, expected {wanted}"]
    if len(looked_at):
        told.append(f"{len(looked_at)} of {len(looked.rows)} rows looked at are wrong, largest error {largest:.1e}")
    told += [f"{len(padding)} padding rows are not written as they must be"] if len(padding) else []
    told += [f"{len(broken)} rows of real tokens hold NaN or infinity"] if len(broken) else []
    details |= {"wrong": len(looked_at), "padding": len(padding), "not_finite": len(broken)}
    details |= {key: x for key, x in vars(place).items() if x is not None}
    return Result(name, "fail", "; ".join([*told, tolerance]), dtype=dtype, answered=True, details=details)


def wrong_of(name: str, looked: Looked, errors: Array, bound: float) -> NDArray[np.bool_]:
    """Wrong elements of the rows looked at [n, H, D]; all of a row that is wrong as a whole. [N2] [V13]"""
    wrong: NDArray[np.bool_] = errors > (bound if looked.slack is None else bound + by_row(name, looked.slack))
    wrong |= (_strayed(name, looked, errors, bound) & ~wrong.any(axis=(1, 2)))[:, None, None]
    return wrong


def _strayed(name: str, looked: Looked, errors: Array, bound: float) -> NDArray[np.bool_]:
    """Rows that are off by much of what they hold, however small that is: bool [n].

    In a long document most rows are averages of many values, and small beside the largest, which sets the bound. dq and
    dk are differences, of which rounding may leave anything in one row: there it takes NEIGHBOURS rows together. [V13]
    """
    if name not in NEIGHBOURS or not len(errors):
        return np.zeros(len(errors), bool)
    starts = np.arange(0, len(errors), NEIGHBOURS[name])
    columns = errors[0].size

    def length(squares: Array) -> Array:
        return np.sqrt(np.add.reduceat(squares, starts))

    with np.errstate(invalid="ignore", over="ignore"):
        off = length((errors**2).sum(axis=(1, 2)))
        exact = by_row(name, looked.exact)
        strayed = (off > PART * length((exact**2).sum(axis=(1, 2)))) & (off > FARTHER * length(looked.plain_rows**2))
        slack = 0 if looked.slack is None else length((by_row(name, looked.slack) ** 2).sum(axis=(1, 2)))
        strayed &= (off > FLOOR * bound * np.sqrt(columns)) & (off > 2 * slack)
    rows: NDArray[np.bool_] = np.repeat(strayed, np.diff(np.append(starts, len(errors))))
    if NEIGHBOURS[name] > 1:  # of neighbours, those that are off
        rows &= np.sqrt((errors**2).sum(axis=(1, 2))) > PART * np.sqrt((exact**2).sum(axis=(1, 2)))
    return rows


def _chunks(rows: IntArray) -> Iterator[IntArray]:
    for i in range(0, len(rows), CHUNK):
        yield rows[i : i + CHUNK]


def _unwritten(capture: Capture, name: str, got: Array) -> IntArray:
    """Padding rows that hold anything but 0, or in lse -inf. [A5] [B2]"""
    wanted = -np.inf if name == "lse" else 0.0
    padding = np.flatnonzero(capture.layout.document_ids < 0)
    found = [rows[(got[rows] != wanted).any(axis=(1, 2))] for rows in _chunks(padding)]
    return np.concatenate([np.zeros(0, np.int64), *found])


def _not_finite(capture: Capture, got: Array) -> IntArray:
    """Rows of real tokens that hold something other than numbers; every one of them sees itself, so lse is finite."""
    real = np.flatnonzero(capture.layout.document_ids >= 0)
    found = [rows[~np.isfinite(got[rows]).all(axis=(1, 2))] for rows in _chunks(real)]
    return np.concatenate([np.zeros(0, np.int64), *found])


def _first(
    capture: Capture, name: str, got: Array, rows: IntArray, looked: Looked, wrong: Array
) -> tuple[Place, float, str]:
    """The first wrong element on the lowest rank: its place, what it holds, and what it should, in words."""
    rank, local, row = _lowest(capture, rows)
    document = int(capture.layout.document_ids[row])
    at = int(np.searchsorted(looked.rows, row))
    if document < 0:
        right = -np.inf if name == "lse" else 0.0
        head, column = (int(i) for i in np.argwhere(got[row] != right)[0])
        wanted = f"{right:g} exactly"
    elif at < len(looked.rows) and looked.rows[at] == row and wrong[at].any():
        head, column = (int(i) for i in np.argwhere(wrong[at])[0])
        wanted = f"{by_row(name, looked.exact)[at, head, column]:.6g}"
    else:
        head, column = (int(i) for i in np.argwhere(~np.isfinite(got[row]))[0])
        wanted = "a finite number"
    position = int(capture.layout.positions[row])
    place = Place(rank, None, local, row, document, position, head, None if name == "lse" else column)
    return place, float(got[row, head, column]), wanted


def _lowest(capture: Capture, rows: IntArray) -> tuple[int | None, int, int]:
    """Rank, row within the rank and row of the first of these rows, counted rank by rank."""
    for rank in range(capture.cp_size):
        held = partition_indices(capture.layout, capture.policy, capture.cp_size, rank)
        local = np.flatnonzero(np.isin(held, rows))
        if len(local):
            return rank, int(local[0]), int(held[local[0]])
    raise AssertionError("every row is held by a rank [P1]")
