"""What a mutant is: a deliberately wrong implementation.

Defines `Mutant`, `mutant`, which makes one from the pieces that are wrong in it, and `KINDS`; and `returned_as` and
`rows_of_output`, with which faults of several kinds are made.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.cases import Case
from refimpl.conformance.implementation import REFERENCE, Implementation, once
from refimpl.layout import IntArray
from refimpl.partition import partition_indices

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Pieces = dict[str, Callable[..., Any]]
"""Wrong pieces by their names in `Implementation`."""

KINDS = {
    "ownership": "which rows a rank holds, in which order, and how they are put back",
    "offsets": "the offsets and lengths that a layout or a step states",
    "positions": "position and document ids",
    "labels": "next-token labels",
    "mask": "which keys a query sees",
    "padding": "rows that hold no token",
    "heads": "which K/V head a query head reads, and head dimensions",
    "numerics": "the arithmetic of scores, weights and indices",
    "lse": "the log-sum-exp and what is merged with it",
    "backward": "gradients, where the forward is right",
    "collectives": "what ranks gather and reduce",
    "zeros": "answers that do not depend on attention at all",
    "refusal": "requests that are answered but should be refused, or the reverse",
}
"""Where a fault sits. A diagnosis names the kind first."""


@dataclass(frozen=True, eq=False)
class Mutant:
    """An implementation with one fault.

    - `name`: a noun phrase with hyphens; "rows 5, 6 of document 1 match top-left alignment" is made of it.
    - `kind`: a key of KINDS. `what`: what it does wrong, as the end of a sentence that starts with "it".
    - `source`: the public report that it is modelled on, as in the specification's sources; "" if there is none.
    - `change`: makes it from the reference.
    """

    name: str
    kind: str
    what: str
    source: str
    change: Callable[[Implementation], Implementation]

    @cached_property
    def implementation(self) -> Implementation:
        """The reference with the fault in it; always the same object, so that what its pieces gave is remembered."""
        return self.change(REFERENCE)

    @cached_property
    def pieces(self) -> frozenset[str]:
        """The names of the pieces that are wrong."""
        wrong, right = vars(self.implementation), vars(REFERENCE)
        return frozenset(name for name in right if wrong[name] is not right[name])


def mutant(name: str, kind: str, what: str, source: str = "", /, **pieces: Callable[..., Any]) -> Mutant:
    """The mutant in which these pieces replace those of the reference."""
    return Mutant(name, kind, what, source, lambda by: replace(by, **pieces))


def returned_as(*names: str) -> Callable[[Callable[[Array, Case], Array]], Pieces]:
    """Another array for these outputs of attention: `value(array, case)`."""

    def decorated(value: Callable[[Array, Case], Array]) -> Pieces:
        def finish(name: str, array: Array, case: Case, rank: int | None) -> Array:
            return value(array, case) if name in names and case.operation != "merge" else array

        return {"finish": finish}

    return decorated


def rows_of_output(name: str, case: Case, rank: int | None) -> IntArray:
    """The rows of its buffer that an output of one rank stands for; rank None: all of them."""
    if rank is None:
        return np.arange(case.layout_of(name).total_tokens)
    rows: IntArray = once(partition_indices, case.layout, case.policy, case.cp_size, rank)
    return rows
