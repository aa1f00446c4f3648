"""An adapter on several ranks: every rank answers for its own part, and all learn what became of each case.

Defines `load_on_ranks` and `run_adapter_on_ranks`, which every rank of a group calls alike.

After each case the ranks exchange what they did. An exception on every rank, or on one while the others come back, is
an answer like any other. But a rank that raised may have left the others waiting inside the adapter's own collective,
and nothing can call them back: if they have not come GRACE_SECONDS later, the whole job ends with one line that names
the case, the rank and its error. A rank that neither answers nor raises is waited for `timeout` seconds.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.collectives import Collectives, fingerprint
from refimpl.conformance.adapters import Adapter, load
from refimpl.conformance.cases import PER_RANK, Case, Expected, Vector
from refimpl.conformance.check import Answered, Crashed, Outcome, Refused, Result, Skipped, Split, ask, judge, late
from refimpl.conformance.patience import DEFAULT_TIMEOUT, End, limit
from refimpl.errors import SpecError

Array = NDArray[Any]

GRACE_SECONDS = 10.0
"""How long a rank whose case did not end in an answer waits for the others."""


def load_on_ranks(spec: str, group: Collectives, end: End) -> Adapter:
    """Import the adapter on every rank.

    Raises:
        SpecError: on every rank alike, whatever one of them cannot import.
    """
    adapter, error = None, None
    try:
        adapter = load(spec)
    except SpecError as refusal:
        error = refusal
    stuck = f"the adapter cannot be had ({error}), and other ranks are still importing it {GRACE_SECONDS:g} s later"
    with limit(GRACE_SECONDS if error else 0, stuck, end):
        group.all_agree({"adapter": spec, "declaration": str(adapter and adapter.declaration)}, error)
    assert adapter is not None  # else all_agree has raised
    return adapter


def run_adapter_on_ranks(
    vectors: Sequence[Vector],
    adapter: Adapter,
    group: Collectives,
    end: End,
    timeout: float = DEFAULT_TIMEOUT,
    on_result: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Put every case to the ranks; all return the same results.

    Operations with a part for every rank are asked of all ranks together if the case has as many; with another number
    it is a skip. Everything else is asked of rank 0 alone.

    Args:
        end: ends all ranks, see `limit`.
    """
    ids = np.frombuffer(" ".join(vector.case.id for vector in vectors).encode(), np.uint8)
    group.all_agree({"cases": f"{len(vectors)} cases ({fingerprint(ids)})"})
    results = []
    for vector in vectors:
        case = vector.case
        if case.operation in PER_RANK and case.cp_size != group.size:
            needed = f"needs {case.cp_size} rank{'s' if case.cp_size > 1 else ''}"
            results.append(Result(case.id, "skip", needed, dtype=adapter.declaration.dtype))
        else:
            outcome = _joint_outcome(vector, adapter, group, end, timeout)
            results.append(judge(vector, outcome, adapter.declaration))
        on_result(results[-1])
    return results


def _joint_outcome(vector: Vector, adapter: Adapter, group: Collectives, end: End, timeout: float) -> Outcome:
    case = vector.case
    asked = range(group.size) if case.operation in PER_RANK else range(1)
    own: Outcome | None = None
    if group.rank in asked:
        part = _part(vector, group.rank) if len(asked) > 1 else vector
        with limit(timeout, late(case, timeout), end):
            own = ask(adapter, part)
    grace = min(GRACE_SECONDS, timeout / 2) if timeout else GRACE_SECONDS  # before a waiting rank gives up
    stuck = (
        f"case {case.id}: {_in_words(own)}, and other ranks have not come back from it {grace:g} s later: they may "
        f"wait for this one"
    )
    with limit(0 if own is None or isinstance(own, Answered) else grace, stuck, end):
        packed = _exchange(group, pack(own, vector.expected))
    outcomes = [unpack(packed[rank]) for rank in asked]
    return combined(case, outcomes)


def _part(vector: Vector, rank: int) -> Vector:
    """The vector with the arrays that this rank answers for."""
    own = {name: x for name, x in vector.expected.arrays.items() if name.split(".")[1] == str(rank)}
    return Vector(vector.case, Expected(own, vector.expected.error, vector.expected.bounds), vector.kills)


def combined(case: Case, outcomes: Sequence[Outcome]) -> Outcome:
    """What the ranks together did: all their arrays, or what they all did alike."""
    first = outcomes[0]
    if all(isinstance(outcome, Answered) for outcome in outcomes):
        arrays = {
            name: x for outcome in outcomes if isinstance(outcome, Answered) for name, x in outcome.arrays.items()
        }
        return Answered(arrays)
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, Crashed):
            alone = len(outcomes) == 1
            return outcome if alone else Crashed(f"rank {rank}: {outcome.message}")
    for rank, outcome in enumerate(outcomes):
        if type(outcome) is not type(first) or _kind(outcome) != _kind(first):
            return Split(f"ranks differ: rank 0 {_in_words(first)}, rank {rank} {_in_words(outcome)}")
    return first


def _kind(outcome: Outcome) -> str:
    match outcome:
        case Refused(code, _):
            return code
        case Skipped(feature):
            return feature
        case _:
            return ""


def _in_words(outcome: Outcome | None) -> str:
    match outcome:
        case Refused(code, message):
            return f"refused with {code} ({message})"
        case Skipped(feature):
            return f"skipped it for {feature}"
        case Crashed(message) | Split(message):
            return f"raised {message}"
        case _:
            return "answered"


# What ranks send each other: a line of JSON, then the bytes of the arrays. Nothing is pickled.


def pack(outcome: Outcome | None, expected: Expected) -> bytes:
    """An outcome as bytes. Of an array whose shape is wrong only the shape is told."""
    data: list[bytes] = []
    if isinstance(outcome, Answered):
        arrays = []
        for name, x in outcome.arrays.items():
            sent = x.shape == expected.arrays[name].shape
            arrays.append([name, x.dtype.str, list(x.shape), sent])
            data.append(np.ascontiguousarray(x).tobytes() if sent else b"")
        head: dict[str, Any] = {"kind": "Answered", "arrays": arrays}
    else:
        head = {"kind": type(outcome).__name__, "fields": list(vars(outcome).values()) if outcome else []}
    return b"\n".join([json.dumps(head).encode(), b"".join(data)])


def unpack(packed: bytes) -> Outcome:
    """The outcome that `pack` was given."""
    line, _, data = packed.partition(b"\n")
    head = json.loads(line)
    if head["kind"] != "Answered":
        kinds: dict[str, Callable[..., Outcome]] = {kind.__name__: kind for kind in (Refused, Skipped, Crashed, Split)}
        return kinds[head["kind"]](*head["fields"])
    arrays, start = {}, 0
    for name, dtype, shape, sent in head["arrays"]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize if sent else 0
        values = np.frombuffer(data[start : start + size], dtype).reshape(shape) if sent else np.zeros((), dtype)
        arrays[name] = np.broadcast_to(values, shape)
        start += size
    return Answered(arrays)


def _exchange(group: Collectives, payload: bytes) -> list[bytes]:
    lengths = group.all_gather(np.array([len(payload)]))[:, 0]
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    gathered = group.all_gather(padded)
    return [row[:length].tobytes() for row, length in zip(gathered, lengths, strict=True)]
