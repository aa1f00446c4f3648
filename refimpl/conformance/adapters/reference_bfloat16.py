"""The reference as an implementation that computes in bfloat16; see `reference`."""

from typing import Any

from numpy.typing import NDArray

from refimpl.conformance.adapters.reference import answer
from refimpl.conformance.cases import Case

DECLARATION = {"name": "thdcp reference in bfloat16", "dtype": "bfloat16", "lacks": []}


def run(case: Case) -> dict[str, NDArray[Any]]:
    """The answer in bfloat16."""
    return answer(case, "bfloat16")
