"""How firmly the vectors kill each mutant: `python -m refimpl.conformance.margins`.

A margin is an error over what is allowed (see `mutants.margin`). For each mutant: how many vectors name it, in how many
of these something is wrong that must be exact, and the smallest and largest margin of the others, for an
implementation in float64 and in bfloat16, the finest and the coarsest dtype. Mutants that die in float64 on tolerance
by luck, by less than LEAST_MARGIN, are marked, and the command ends with 1. The mark `weak`, for the same in bfloat16,
changes nothing: some faults hide in its rounding.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from refimpl.conformance import vectors
from refimpl.conformance.cases import Vector
from refimpl.conformance.faults.mutant import Mutant
from refimpl.conformance.mutants import LEAST_MARGIN, MUTANTS, margin
from refimpl.errors import SpecError


@dataclass(frozen=True)
class Kills:
    """The margins of one mutant over the vectors that name it, in one dtype; infinite where exactness decides."""

    margins: tuple[float, ...]

    @property
    def exact(self) -> int:
        """How many vectors find something wrong that must be exact."""
        return sum(np.isinf(self.margins).tolist())

    @property
    def finite(self) -> list[float]:
        """The margins of the other vectors that the mutant fails, in ascending order."""
        return sorted(x for x in self.margins if 1 < x < np.inf)

    @property
    def best(self) -> float:
        """The largest, 0 if no vector names the mutant."""
        return max(self.margins, default=0.0)

    def __str__(self) -> str:
        smallest, largest = (f"{x:.1e}" for x in (self.finite[0], self.finite[-1])) if self.finite else ("-", "-")
        return f"{len(self.finite) + self.exact:5d} {self.exact:5d} {smallest:>8s} {largest:>8s}"


def kills(suite: Sequence[Vector], mutant: Mutant, dtype: str) -> Kills:
    """The margins by which the vectors that name a mutant fail it, for an implementation in `dtype`. [V7]"""
    named = (vector for vector in suite if mutant.name in vector.kills)
    return Kills(tuple(margin(vector.case, vector.expected, mutant, dtype) for vector in named))


def table(suite: Sequence[Vector], mutants: Sequence[Mutant] = MUTANTS) -> Iterator[tuple[str, bool]]:
    """A line for each mutant, and whether it dies by no more than luck, or not at all."""
    for mutant in mutants:
        in_float64, in_bfloat16 = (kills(suite, mutant, dtype) for dtype in ("float64", "bfloat16"))
        by_luck = in_float64.best < LEAST_MARGIN
        mark = "  by luck" if by_luck else "  weak" if in_bfloat16.best < LEAST_MARGIN else ""
        yield f"{mutant.kind:12s} {mutant.name:32s} {in_float64}  {in_bfloat16}{mark}", by_luck


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every mutant dies by a margin; 1 if one does not; 2 if the vectors cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m refimpl.conformance.margins", description=__doc__.splitlines()[0])
    parser.parse_args(arguments)
    try:
        suite = vectors.load()
    except SpecError as error:
        print(f"margins: {error}", file=sys.stderr)
        return 2
    columns = f"{'kills':>5s} {'exact':>5s} {'smallest':>8s} {'largest':>8s}"
    print(f"{'':45s} {'float64':27s}    bfloat16\n{'kind':12s} {'mutant':32s} {columns}  {columns}")
    lucky = 0
    for line, by_luck in table(suite):
        print(line, flush=True)
        lucky += by_luck
    print(f"{len(MUTANTS)} mutants, {len(suite)} vectors; {lucky} killed by less than {LEAST_MARGIN:g} bounds")
    return 1 if lucky else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        sys.exit(2)
