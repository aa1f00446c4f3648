"""The reference as an implementation that computes in float32; see `reference`."""

from typing import Any

from numpy.typing import NDArray

from refimpl.conformance.adapters.reference import answer
from refimpl.conformance.cases import Case

DECLARATION = {"name": "thdcp reference in float32", "dtype": "float32", "lacks": []}


def run(case: Case) -> dict[str, NDArray[Any]]:
    """The answer in float32."""
    return answer(case, "float32")
