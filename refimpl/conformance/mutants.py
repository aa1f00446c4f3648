"""Deliberately wrong implementations, each modelled on a fault that frameworks have shipped or nearly did.

Defines `MUTANTS`; `failing`, whether a mutant gives a wrong answer to a case; and `margin`, by how much. The faults
themselves are in the modules of `faults`, by kind. How firmly the vectors kill each of them is told by
`python -m refimpl.conformance.margins`.
"""

from functools import lru_cache

import numpy as np

from refimpl.conformance.cases import Case, Expected
from refimpl.conformance.faults import (
    collectives,
    gradients,
    ids,
    labels,
    lse,
    masks,
    offsets,
    ownership,
    padding,
    refusals,
    scores,
    zeros,
)
from refimpl.conformance.faults.mutant import Mutant
from refimpl.conformance.implementation import answer, pieces_used
from refimpl.conformance.judge import Difference, differences
from refimpl.errors import SpecError

MUTANTS: tuple[Mutant, ...] = (
    *zeros.MUTANTS,
    *masks.MUTANTS,
    *padding.MUTANTS,
    *ownership.MUTANTS,
    *offsets.MUTANTS,
    *ids.MUTANTS,
    *labels.MUTANTS,
    *refusals.MUTANTS,
    *scores.MUTANTS,
    *lse.MUTANTS,
    *gradients.MUTANTS,
    *collectives.MUTANTS,
)
"""Every mutant, in the order in which a diagnosis prefers them where they predict the same numbers."""

LEAST_MARGIN = 10.0
"""A mutant that fails a case does so by at least so many bounds in float64, or it might pass on another machine."""

BY_NAME: dict[str, Mutant] = {mutant.name: mutant for mutant in MUTANTS}


def failing(case: Case, expected: Expected, mutant: Mutant, dtype: str = "float64") -> bool:
    """Whether the suite tells the mutant from a right implementation by this case. [V7]"""
    return margin(case, expected, mutant, dtype) > 1


def margin(case: Case, expected: Expected, mutant: Mutant, dtype: str = "float64") -> float:
    """How far the mutant's answer is from passing: its largest error, as a multiple of what is allowed.

    Infinite where a value must be exact, where the answer has the wrong form, and where the mutant refuses, or does not
    refuse, or refuses with another code, or crashes; 0 if the answer is right. [V7]
    """
    if not touches(mutant, case):
        return 0.0
    try:
        arrays = answer(case, mutant.implementation)
    except SpecError as error:
        return 0.0 if error.code == expected.error else np.inf
    except Exception:  # a mutant may break in any way
        return np.inf
    if expected.error is not None:
        return np.inf
    found = differences(case, expected, arrays, dtype)
    return max((excess(difference) for difference in found), default=0.0)


def touches(mutant: Mutant, case: Case) -> bool:
    """Whether the case asks for a piece that is wrong in the mutant."""
    return not mutant.pieces.isdisjoint(_pieces_used(case))


@lru_cache(maxsize=1 << 12)
def _pieces_used(case: Case) -> frozenset[str]:
    return pieces_used(case)


def excess(difference: Difference) -> float:
    """The error of an array as a multiple of its bound; infinite where nothing but the exact value or form passes."""
    return difference.error / difference.bound if difference.problem == "value" and difference.bound else np.inf
