"""What the wrong tensors of a capture look like, and which known fault gives the same numbers.

Defines `patterns`, sentences about each wrong tensor and about the step as a whole, and `diagnosis_of`, which replays
the mutants where the buffer is small enough. A pattern is told only if it explains all that was looked at: a step that
is right under another policy, mask or scale than was declared is looked at again under that one.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.capture.file import GRADIENTS, OUTPUTS, Capture
from refimpl.conformance.capture.rows import query_rows
from refimpl.conformance.capture.verdict import Looked, by_row, errors_of, wrong_of
from refimpl.conformance.cases import Case, Expected
from refimpl.conformance.yardstick import named_dtype
from refimpl.layout import IntArray
from refimpl.partition import Policy, padding_needed, partition, partition_indices, unpartition
from refimpl.tolerance import Tolerance, largest_finite

Array = NDArray[Any]

MOST_MOVED = 4
"""Wrong rows that are looked for elsewhere."""
PROBE = 48
"""Rows that are looked at again under another declaration."""
DIAGNOSED_ROWS = 512
DIAGNOSED_SIZE = 1 << 23
"""Of the buffer that mutants are replayed on: rows, and scores of all heads; a hundred faults take a while."""


def patterns(capture: Capture, looked: Mapping[str, Looked], wrong: Set[str]) -> dict[str, list[str]]:
    """Sentences by the name of the tensor; those under "" are about the step."""
    found: dict[str, list[str]] = {}
    for name in OUTPUTS:
        if name in wrong:
            told = [_zeros(capture, name), _scaled(capture, name, looked[name]), _moved(capture, name, looked[name])]
            found[name] = [*(sentence for sentence in told[:1] if sentence)]
            if not found[name]:
                found[name] = [*(sentence for sentence in told[1:] if sentence), *_where(capture, name, looked[name])]
    found[""] = [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} right under {what}, which is not what was declared"
        for what, names in _right_under(capture, looked, wrong)
    ]
    return found


def _zeros(capture: Capture, name: str) -> str:
    real = capture.layout.document_ids >= 0
    return "zero throughout" if not by_row(name, capture.outputs[name])[real].any() else ""


def _scaled(capture: Capture, name: str, looked: Looked) -> str:
    """A constant times the right values."""
    exact = by_row(name, looked.exact)
    got = by_row(name, capture.outputs[name])[looked.rows].astype(np.float64)
    size = float((exact * exact).sum())
    if not np.isfinite(got).all() or size == 0:
        return ""
    factor = float((got * exact).sum()) / size
    if (
        abs(factor) < 1e-9
        or abs(factor - 1) < 0.01
        or np.abs(got - factor * exact).max() > looked.bound(capture.dtypes[name]) * max(1, factor)
    ):
        return ""
    base = " (the logarithm is to base 2: declare lse_base)" if name == "lse" and abs(factor - 1.442695) < 1e-3 else ""
    return f"{factor:.6g} times the right values{base}"


def _moved(capture: Capture, name: str, looked: Looked) -> str:
    """Rows that stand somewhere else."""
    bound = looked.bound(capture.dtypes[name])
    wrong = np.flatnonzero((errors_of(name, looked, capture.outputs[name]) > bound).any(axis=(1, 2)))
    got, exact = by_row(name, capture.outputs[name]), by_row(name, looked.exact)
    moves = []
    for i in wrong[:: max(1, len(wrong) // MOST_MOVED)][:MOST_MOVED]:
        near = np.flatnonzero(np.abs(got[:, 0, 0].astype(np.float64) - exact[i, 0, 0]) <= bound)
        rows = [int(row) for row in near if (np.abs(got[row] - exact[i]) <= bound).all()]
        if len(rows) != 1:
            return ""
        moves.append(f"what belongs in row {looked.rows[i]} stands in row {rows[0]}")
    return ", ".join(moves)


def _where(capture: Capture, name: str, looked: Looked) -> Iterator[str]:
    """The one rank, document or head that is wrong, if there are others that are right."""
    errors = errors_of(name, looked, capture.outputs[name])
    wrong = wrong_of(name, looked, errors, looked.bound(capture.dtypes[name]))
    rows: NDArray[np.bool_] = np.asarray(wrong.any(axis=(1, 2)))
    if rows.sum() < 2:
        return
    owner = np.zeros(capture.layout.total_tokens, np.int64)
    for rank in range(capture.cp_size):
        owner[partition_indices(capture.layout, capture.policy, capture.cp_size, rank)] = rank
    heads = np.tile(np.arange(wrong.shape[1]), (len(rows), 1))
    for what, of_all, of_wrong in (
        ("rank", owner[looked.rows], owner[looked.rows[rows]]),
        ("document", capture.layout.document_ids[looked.rows], capture.layout.document_ids[looked.rows[rows]]),
        ("head", heads, heads[wrong.any(axis=2)]),
    ):
        only = np.unique(of_wrong)
        if len(only) == 1 and len(np.unique(of_all)) > 1:
            yield f"only {what} {only[0]} is wrong"


# Right under another declaration


def _right_under(capture: Capture, looked: Mapping[str, Looked], wrong: Set[str]) -> Iterator[tuple[str, list[str]]]:
    """Declarations under which all wrong tensors of queries are right, and the names of these."""
    names = [name for name in ("out", "lse", "dq") if name in wrong]
    if not names:
        return
    rows = looked[names[0]].rows
    errors = np.maximum.reduce([errors_of(n, looked[n], capture.outputs[n]).max(axis=(1, 2)) for n in names])
    worst = rows[np.argsort(-errors, kind="stable")[: PROBE // 2]]
    probe = np.union1d(worst, rows[:: max(1, len(rows) // (PROBE // 2))])
    for what, other in _other_declarations(capture):
        found = query_rows(other, probe[other.layout.document_ids[probe] >= 0], lambda _: None)
        if all(_is_right(other, name, found.exact[name], found.plain, probe) for name in names):
            yield what, names


def _is_right(capture: Capture, name: str, exact: Array, plain: Mapping[str, Array] | None, rows: IntArray) -> bool:
    yardstick = 0.0 if plain is None else float(np.abs(plain[name] - exact).max(initial=0.0))
    dtype = named_dtype(capture.dtypes[name])
    got = by_row(name, capture.outputs[name])[rows]
    with np.errstate(invalid="ignore"):
        errors = np.abs(got - by_row(name, exact))
    return bool((errors <= Tolerance.of(dtype, yardstick, largest_finite(exact)).bound).all())


def _other_declarations(capture: Capture) -> Iterator[tuple[str, Capture]]:
    """The same numbers, told to be something else."""
    for policy in Policy if capture.per_rank else ():
        fits = padding_needed(capture.layout, policy, capture.cp_size).total == 0
        if policy != capture.policy and fits:
            yield f"policy {policy}", _reassembled(capture, policy)
    mask = capture.mask
    yield f"causal {not mask.causal}", replace(capture, mask=replace(mask, causal=not mask.causal))
    for left in (mask.left - 1, mask.left + 1) if mask.left > 0 else ():
        yield f"window ({left}, {mask.window[1]})", replace(capture, mask=replace(mask, window=(left, mask.window[1])))
    default = 1.0 / float(np.sqrt(capture.q.shape[2]))
    for scale in (1.0, default):
        if scale != capture.softmax_scale:
            yield f"softmax_scale {scale:.6g}", replace(capture, softmax_scale=scale)


def _reassembled(capture: Capture, policy: Policy) -> Capture:
    """What came in ranks' parts, put together by another policy."""

    def again(name: str, x: Array) -> Array:
        if name not in capture.per_rank:
            return x
        axis = 1 if name == "lse" else 0
        return unpartition(
            partition(x, capture.layout, capture.policy, capture.cp_size, axis), capture.layout, policy, axis
        )

    return replace(
        capture,
        policy=policy,
        q=again("q", capture.q),
        k=again("k", capture.k),
        v=again("v", capture.v),
        dout=None if capture.dout is None else again("dout", capture.dout),
        outputs={name: again(name, x) for name, x in capture.outputs.items()},
    )


# Mutants


def diagnosis_of(capture: Capture, looked: Mapping[str, Looked]) -> tuple[Any, str]:
    """The diagnosis of `diagnose`, or None and the reason why there is none."""
    rows = capture.layout.total_tokens
    if rows > DIAGNOSED_ROWS or rows * rows * capture.heads > DIAGNOSED_SIZE:
        return None, f"no known faults were tried: they are on up to {DIAGNOSED_ROWS} rows, not {rows}"
    from refimpl.conformance.diagnose import diagnose

    items = []
    for operation, names in (("context_parallel_forward", ("out", "lse")), ("context_parallel_backward", GRADIENTS)):
        if capture.outputs.keys() & set(names):
            case = _case(capture, operation)
            expected = {name: _whole(capture, name, looked[name]) for name in names if name in looked}
            bounds = {name: looked[name].bound(capture.dtypes[name]) for name in names if name in looked}
            answer = _parts(capture, {name: capture.outputs[name] for name in names if name in looked})
            right = Expected(_parts(capture, expected), None, {capture.dtype: bounds})
            items.append((case, right, answer, capture.dtype))
    ignored = frozenset(name for name in OUTPUTS if name not in capture.outputs)
    return diagnose(items, ignored), ""


def _case(capture: Capture, operation: str) -> Case:
    layout, mask = capture.layout, capture.mask
    inputs = {
        "cu_seqlens": layout.cu_seqlens.tolist(),
        "cu_seqlens_padded": layout.cu_seqlens_padded.tolist(),
        "total_tokens": layout.total_tokens,
        "policy": str(capture.policy),
        "cp_size": capture.cp_size,
        "causal": mask.causal,
        "window": list(mask.window),
        "softmax_scale": capture.softmax_scale,
    }
    tensors = {"q": capture.q, "k": capture.k, "v": capture.v}
    if operation.endswith("backward"):
        assert capture.dout is not None
        tensors["dout"] = capture.dout
    name = "capture-backward" if operation.endswith("backward") else "capture-forward"
    return Case(name, operation, "A captured step.", (), ("context_parallel",), inputs, tensors)


def _whole(capture: Capture, name: str, looked: Looked) -> Array:
    """All rows of a tensor as they should be; rows of real tokens were all looked at."""
    shape = capture.outputs[name].shape
    whole = np.full(shape, -np.inf if name == "lse" else 0.0)
    by_row(name, whole)[looked.rows] = by_row(name, looked.exact)
    return whole


def _parts(capture: Capture, tensors: Mapping[str, Array]) -> dict[str, Array]:
    return {
        f"{name}.{rank}": part
        for name, x in tensors.items()
        for rank, part in enumerate(
            partition(x, capture.layout, capture.policy, capture.cp_size, 1 if name == "lse" else 0)
        )
    }
