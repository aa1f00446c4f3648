"""Answers as vectors of numbers, so that a wrong one can be held against what each mutant answers.

Defines `Item`, one judged answer; `Reply`, an answer or a replay in comparable form; `replay`, what a mutant answers;
and `matches`, element by element. Replays are remembered, for a diagnosis asks for the same ones again and again.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.cases import PER_RANK, Case, Expected, base_name
from refimpl.conformance.faults.mutant import Mutant
from refimpl.conformance.implementation import answer
from refimpl.conformance.judge import TOKEN_AXIS, exact_rows
from refimpl.conformance.mutants import touches
from refimpl.errors import SpecError
from refimpl.layout import IntArray
from refimpl.tolerance import largest_finite

Array = NDArray[Any]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Answer = Mapping[str, Array] | str
"""Arrays by name, or the code of a refusal; CRASH for any other end."""

CRASH = "crash"
SAMPLE = 32
"""Wrong elements by which most mutants are told to be none of it."""

SLACK = 2.0
"""How much farther from a replay than from the right answer a number may lie: a fault can enlarge rounding errors."""


@dataclass(frozen=True, eq=False)
class Target:
    """The right answer to a case as one vector: the elements of all its arrays, in the order of their names.

    Arrays whose base names are `ignored` are not part of it: nobody judges them.
    """

    case: Case
    expected: Expected
    ignored: frozenset[str] = frozenset()

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """What is judged."""
        return {name: x for name, x in self.expected.arrays.items() if base_name(name) not in self.ignored}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The arrays."""
        return tuple(self.arrays)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where in the vector each array lies."""
        ends = np.cumsum([x.size for x in self.arrays.values()], dtype=int).tolist()
        return {name: slice(a, b) for name, a, b in zip(self.names, [0, *ends], ends, strict=False)}

    @cached_property
    def values(self) -> Floats:
        """The right numbers."""
        arrays = [np.ravel(x).astype(np.float64) for x in self.arrays.values()]
        return np.concatenate([np.zeros(0), *arrays])

    @cached_property
    def exact(self) -> Bools:
        """Elements where no rounding is allowed."""
        parts = [np.zeros(0, bool)]
        for name, x in self.arrays.items():
            exact = np.full(x.shape, x.dtype.kind != "f")
            axis = TOKEN_AXIS.get(base_name(name))
            if x.dtype.kind == "f" and axis is not None:
                rows = exact_rows(self.case, self.expected, name)
                exact |= rows.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
            parts.append(exact.ravel())
        return np.concatenate(parts)

    @cached_property
    def bounds(self) -> dict[str, Floats]:
        """What the judge allows each array, as one number an array, for every dtype."""
        bases = [base_name(name) for name in self.names]
        by_dtype = {dtype: [allowed.get(b, 0.0) for b in bases] for dtype, allowed in self.expected.bounds.items()}
        return defaultdict(lambda: np.zeros(len(bases)), {dtype: np.array(x) for dtype, x in by_dtype.items()})

    @cached_property
    def owner(self) -> IntArray:
        """The number of the array that each element belongs to."""
        return np.repeat(np.arange(len(self.names)), [x.size for x in self.arrays.values()])

    @cached_property
    def largest(self) -> Floats:
        """The largest finite magnitude of each array, or 1."""
        return np.array([max(1.0, largest_finite(x.astype(np.float64))) for x in self.arrays.values()])


@lru_cache(maxsize=1 << 12)
def target_of(case: Case, expected: Expected, ignored: frozenset[str] = frozenset()) -> Target:
    """The target of a case; always the same object."""
    return Target(case, expected, ignored)


@dataclass(frozen=True, eq=False)
class Reply:
    """An answer in the order of a target.

    - `error`: the code of a refusal; "" if there are arrays.
    - `values`: NaN in arrays that are missing or have the wrong form; these are in `odd`, with None if missing. What
      holds no numbers counts as missing.
    - `growth`: how much larger the numbers of each array are than the right ones, at least 1.
    """

    error: str
    values: Floats
    odd: dict[str, Array | None]
    growth: Floats

    @classmethod
    def of(cls, target: Target, given: Answer) -> "Reply":
        """From what an implementation gave."""
        if isinstance(given, str):
            return cls(given, np.zeros(0), {}, np.zeros(0))
        parts, odd, growth = [np.zeros(0)], {}, []
        for name, right in target.arrays.items():
            x = np.asarray(given[name]) if name in given else None
            x = None if x is not None and x.dtype.kind not in "iubfV" else x
            if x is None or x.shape != right.shape or (x.dtype.kind in "iub") != (right.dtype.kind in "iub"):
                odd[name] = x
                parts.append(np.full(right.size, np.nan))
                growth.append(1.0)
            else:
                parts.append(x.astype(np.float64).ravel())
                growth.append(largest_finite(parts[-1]))
        return cls("", np.concatenate(parts), odd, np.maximum(1.0, np.array(growth) / target.largest))

    def wrong(self, target: Target, dtype: str) -> Bools:
        """Elements that the judge finds wrong; arrays of the wrong form are wrong throughout."""
        limits = np.where(target.exact, 0.0, target.bounds[dtype][target.owner])
        return ~_close(self.values, target.values, limits) | self.in_odd(target)

    def in_odd(self, target: Target) -> Bools:
        """Elements of arrays that are missing or have the wrong form."""
        found = np.zeros(len(target.values), bool)
        for name in self.odd:
            found[target.slices[name]] = True
        return found


def _close(a: Floats, b: Floats, limits: Floats) -> Bools:
    with np.errstate(invalid="ignore"):
        close: Bools = (a == b) | (np.abs(a - b) <= limits)
    return close


def tolerance(target: Target, told: Reply, dtype: str, only: Any = slice(None)) -> Floats:
    """How far an answer may lie from a replay, by element: 0 where the replay has an exact value that is right."""
    limits = (target.bounds[dtype] * told.growth * SLACK)[target.owner[only]]
    return np.where(target.exact[only] & (told.values[only] == target.values[only]), 0.0, limits)


def alike(given: Floats, told: Floats, limits: Floats) -> Bools:
    """Numbers that a replay predicts; NaN predicts NaN."""
    return _close(given, told, limits) | (np.isnan(given) & np.isnan(told))


def matches(target: Target, given: Reply, told: Reply, limits: Floats) -> Bools:
    """Elements of an answer that a replay predicts; a wrong form predicts the same form and values."""
    same = alike(given.values, told.values, limits)
    for name in given.odd.keys() | told.odd.keys():
        same[target.slices[name]] = _same_form(given.odd.get(name, _ABSENT), told.odd.get(name, _ABSENT), limits)
    return same


_ABSENT = np.empty((0, 0, 0, 0, 0))


def _same_form(given: Array | None, told: Array | None, limits: Floats) -> bool:
    if given is None or told is None:
        return given is told
    if given.shape != told.shape or (given.dtype.kind in "iub") != (told.dtype.kind in "iub") or given is _ABSENT:
        return False
    limit = limits.max(initial=0.0) if given.dtype.kind not in "iub" else 0.0
    a, b = given.astype(np.float64), told.astype(np.float64)
    return bool(alike(a, b, np.asarray(limit)).all())


@lru_cache(maxsize=1 << 12)
def replay(target: Target, mutant: Mutant, only_rank: int | None = None) -> Reply | None:
    """What the mutant answers; None if the case asks for none of its wrong pieces, or its answer is the right one."""
    if not touches(mutant, target.case) or (only_rank and not _asked(target.case, only_rank)):
        return None
    given: Answer
    try:
        given = answer(target.case, mutant.implementation, only_rank)
    except SpecError as error:
        given = error.code
    except Exception:  # a mutant may break in any way
        given = CRASH
    told = Reply.of(target, given)
    if told.error != (target.expected.error or ""):
        return told
    return told if told.wrong(target, "float64").any() else None


@lru_cache(maxsize=1 << 12)
def reference_is_right(target: Target) -> bool:
    """Whether what mutants are made from is right here; if not, as in a checkout that was broken, neither are they."""
    try:
        told = Reply.of(target, answer(target.case))
    except SpecError as error:
        return error.code == target.expected.error
    except Exception:  # whatever broke it
        return False
    return target.expected.error is None and not told.wrong(target, "float64").any()


def _asked(case: Case, rank: int) -> bool:
    """Whether a case asks anything of a rank other than 0, which answers where there are no ranks."""
    return case.operation in PER_RANK and rank < case.cp_size


@dataclass(frozen=True, eq=False)
class Item:
    """One answer of the implementation under diagnosis, and what is wrong with it.

    `ignored` are base names of arrays that are not judged.
    """

    case: Case
    expected: Expected
    answer: Answer
    dtype: str
    ignored: frozenset[str] = frozenset()

    @cached_property
    def target(self) -> Target:
        """The right answer."""
        return target_of(self.case, self.expected, self.ignored)

    @cached_property
    def reply(self) -> Reply:
        """The answer."""
        return Reply.of(self.target, self.answer)

    @cached_property
    def wrong_outcome(self) -> bool:
        """Whether it refused where it should answer, or the reverse, or with another code."""
        return self.reply.error != (self.expected.error or "")

    @cached_property
    def wrong(self) -> Bools:
        """Elements that are wrong, if it answered as it should."""
        if self.wrong_outcome or self.reply.error:
            return np.zeros(0, bool)
        return self.reply.wrong(self.target, self.dtype)

    @cached_property
    def failed(self) -> bool:
        """Whether anything is wrong."""
        return self.wrong_outcome or bool(self.wrong.any())

    @cached_property
    def poisoned(self) -> bool:
        """Whether inputs hold NaN or infinity."""
        return self.case.operation != "merge" and not all(np.isfinite(x).all() for x in self.case.tensors.values())

    @cached_property
    def sample(self) -> IntArray:
        """Some of the wrong elements in arrays of the right form: most mutants predict none of them."""
        indices = np.flatnonzero(self.wrong & ~self.reply.in_odd(self.target))
        return indices[:: max(1, len(indices) // SAMPLE)]
