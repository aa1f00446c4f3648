"""Attention for some rows of a large buffer: exactly in float64, and plainly in the dtype that is judged.

Defines `query_rows` (out, lse and dq of some queries) and `key_rows` (dk and dv of some keys). A query is computed from
all the keys that it sees, in two passes over nothing but them, so its results are the oracle's. dk and dv of a key need
the lse and the delta of every query that sees it, n(n + 1)/2 scores more for a document of n; these come from a
`Source`, with what they may be off by. The formulas are those of `attention`; plainly computed, every intermediate is
rounded as in `tolerance.plain_attention`, but for p in `key_rows`, which is taken from the lse, as in clause V6.

The work is counted in scores, so many at a time that a block takes some ten megabytes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.capture.file import Capture
from refimpl.conformance.yardstick import ROUNDING
from refimpl.layout import IntArray, PackedLayout
from refimpl.mask import AttentionMask

Array = NDArray[Any]
Round = Callable[[Array], Array]
Advance = Callable[[int], None]

BLOCK_SCORES = 1 << 20
"""Scores at a time, of one head."""
WASTE = 3.0
"""How many times the scores that are seen a block may compute."""


@dataclass(frozen=True, eq=False)
class Source:
    """lse [Hq, T] and out [T, Hq, Dv] of every query, and how far they may be off.

    - `lse_error`: the largest error of an lse. `delta_error`: that of a delta, the sum over a row of dout * out.
    """

    lse: Array
    out: Array
    lse_error: float = 0.0
    delta_error: float = 0.0


@dataclass(frozen=True, eq=False)
class Rows:
    """Results of some rows, n of them, by name: exact in float64, and plain in float32 (None for float64).

    out [n, Hq, Dv], lse [Hq, n], dq [n, Hq, Dqk]; dk [n, Hkv, Dqk], dv [n, Hkv, Dv]. `slack`, of dk and dv: how far an
    element may be off through the error of the source.
    """

    exact: dict[str, Array]
    plain: dict[str, Array] | None
    slack: dict[str, Array]


@dataclass(frozen=True, eq=False)
class _Block:
    """Rows of one document, by their place among all that were asked for, and the rows that they see or are seen by."""

    places: slice
    rows: IntArray
    others: slice
    visible: NDArray[np.bool_]


def scores_of(layout: PackedLayout, mask: AttentionMask, rows: IntArray) -> IntArray:
    """How many keys each of these real rows sees: int64 [n]."""
    first, last = mask.key_range(layout.positions[rows], layout.seqlens[layout.document_ids[rows]])
    return last - first


def seen_by(mask: AttentionMask) -> AttentionMask:
    """The mask from the keys' side: whom a key is seen by."""
    return AttentionMask(False, (mask.right, mask.left))


def _blocks(layout: PackedLayout, mask: AttentionMask, rows: IntArray) -> Iterator[_Block]:
    """Ascending real rows in blocks of neighbours of one document that see much the same."""
    documents, positions = layout.document_ids[rows], layout.positions[rows]
    first, last = mask.key_range(positions, layout.seqlens[documents])
    begin = 0
    while begin < len(rows):
        end, seen = begin, 0
        while end < len(rows) and documents[end] == documents[begin]:
            seen += int(last[end] - first[end])
            computed = (end + 1 - begin) * int(last[end] - first[begin])  # neither bound falls from row to row
            if end > begin and (computed > BLOCK_SCORES or computed > WASTE * seen + 4096):
                break
            end += 1
        start = int(layout.cu_seqlens_padded[documents[begin]])
        position = np.arange(first[begin], last[end - 1])
        visible = (position >= first[begin:end, None]) & (position < last[begin:end, None])
        others = slice(start + int(first[begin]), start + int(last[end - 1]))
        yield _Block(slice(begin, end), rows[begin:end], others, visible)
        begin = end


def query_rows(capture: Capture, rows: IntArray, advance: Advance, plain: bool = True, exact: bool = True) -> Rows:
    """out, lse and, if there is a dout, dq of some queries.

    Args:
        rows: ascending rows of real tokens. plain, exact: what to compute.
        advance: told of the scores computed, as they are. [A3] [B1] [N2] [N4]
    """
    rounded = ROUNDING.get(capture.dtype) if plain else None
    results = [_new_queries(capture, len(rows), np.float64 if is_exact else np.float32) for is_exact in (True, False)]
    for block in _blocks(capture.layout, capture.mask, rows):
        for h in range(capture.heads):
            inputs = _inputs(capture, block.rows, block.others, h)
            if exact:
                _put_queries(results[0], block.places, h, _attend(inputs, block.visible, capture, np.float64, _same))
            if rounded is not None:
                found = _attend(inputs, block.visible, capture, np.float32, rounded)
                _put_queries(results[1], block.places, h, found)
        advance(block.visible.size * capture.heads)
    return Rows(results[0], results[1] if rounded is not None else None, {})


def _new_queries(capture: Capture, count: int, dtype: Any) -> dict[str, Array]:
    shapes = {"out": (count, capture.heads, capture.v.shape[2]), "lse": (capture.heads, count)}
    shapes |= {} if capture.dout is None else {"dq": (count, *capture.q.shape[1:])}
    return {name: np.zeros(shape, dtype) for name, shape in shapes.items()}


def _put_queries(into: dict[str, Array], places: slice, head: int, found: dict[str, Array]) -> None:
    for name, x in found.items():
        if name == "lse":
            into[name][head, places] = x
        else:
            into[name][places, head] = x


def _inputs(capture: Capture, queries: Any, keys: Any, head: int) -> list[Array | None]:
    """q, k, v and dout of some rows, as one query head reads them."""
    g = head // capture.group
    dout = None if capture.dout is None else capture.dout[queries, head]
    return [capture.q[queries, head], capture.k[keys, g], capture.v[keys, g], dout]


def _same(x: Array) -> Array:
    return x


def _attend(
    inputs: list[Array | None], visible: NDArray[np.bool_], capture: Capture, dtype: Any, rounded: Round
) -> dict[str, Array]:
    """One head of a block: out [n, Dv], lse [n] and dq [n, Dqk]."""
    q, k, v, dout = (None if x is None else x.astype(dtype) for x in inputs)
    assert q is not None
    assert k is not None
    assert v is not None
    scale = dtype(capture.softmax_scale)
    s = np.where(visible, rounded(rounded(q @ k.T) * scale), dtype(-np.inf))
    largest = s.max(axis=1, keepdims=True)
    e = rounded(np.exp(s - largest))
    total = rounded(e.sum(axis=1, keepdims=True))
    p = rounded(e / total)
    found = {"out": rounded(p @ v), "lse": rounded(largest + rounded(np.log(total)))[:, 0]}
    if dout is not None:
        delta = rounded((dout * found["out"]).sum(axis=1, keepdims=True))
        ds = rounded(p * rounded(rounded(dout @ v.T) - delta))
        found["dq"] = rounded(scale * (ds @ k))
    return found


def key_rows(capture: Capture, rows: IntArray, source: Source, advance: Advance, plain: bool = True) -> Rows:
    """dk and dv of some keys.

    Args:
        rows: ascending rows of real tokens. source: of every query that sees any of them.
        plain: whether to compute plainly too. advance: as in `query_rows`. [B1] [B3] [N2] [N4]
    """
    rounded = ROUNDING.get(capture.dtype) if plain else None
    kv_heads, shapes = capture.k.shape[1], {"dk": capture.k.shape[1:], "dv": capture.v.shape[1:]}
    exact, slack = ({name: np.zeros((len(rows), *shape)) for name, shape in shapes.items()} for _ in range(2))
    plainly = {name: np.zeros((len(rows), *shape), np.float32) for name, shape in shapes.items()}
    for block in _blocks(capture.layout, seen_by(capture.mask), rows):
        for h in range(capture.heads):
            g = h // (capture.heads // kv_heads)
            inputs = _inputs(capture, block.others, block.rows, h)
            lse, out = source.lse[h, block.others], source.out[block.others, h]
            found = _gather_gradients(inputs, lse, out, block.visible, capture, source)
            for name, x, off in found:
                exact[name][block.places, g] += x
                slack[name][block.places, g] += off
            if rounded is not None:
                for name, x in _plain_gradients(inputs, lse, out, block.visible, capture, rounded):
                    plainly[name][block.places, g] += x
        advance(block.visible.size * capture.heads)
    if rounded is not None:
        plainly = {name: rounded(x) for name, x in plainly.items()}
    return Rows(exact, plainly if rounded is not None else None, slack)


def _gather_gradients(
    inputs: list[Array | None], lse: Array, out: Array, visible: NDArray[np.bool_], capture: Capture, source: Source
) -> Iterator[tuple[str, Array, Array]]:
    """One query head's share of dk and dv [n, D], exact but for the source, and what that may make of it.

    An lse that is off by x makes p wrong by a factor of exp(x); a delta that is off by y adds p * y to ds.
    """
    q, k, v, dout = (np.asarray(x).astype(np.float64) for x in inputs)
    scale, lse = capture.softmax_scale, lse.astype(np.float64)
    delta = (dout * out.astype(np.float64)).sum(axis=1)
    p = np.exp(np.where(visible, scale * (k @ q.T) - lse, -np.inf))
    rise = v @ dout.T - delta
    yield "dk", scale * ((p * rise) @ q), _off(p, np.abs(rise), scale * q, source.lse_error, source.delta_error)
    yield "dv", p @ dout, _off(p, None, dout, source.lse_error, 0.0)


def _off(p: Array, factor: Array | None, x: Array, lse_error: float, delta_error: float) -> Any:
    """The most that `(p * factor) @ x` may be off by."""
    if lse_error == 0 and delta_error == 0:
        return 0.0
    share = float(np.expm1(min(lse_error, 1.0)))
    weights = p * share if factor is None else p * (share * factor + delta_error)
    return weights @ np.abs(x)


def _plain_gradients(
    inputs: list[Array | None], lse: Array, out: Array, visible: NDArray[np.bool_], capture: Capture, rounded: Round
) -> Iterator[tuple[str, Array]]:
    q, k, v, dout = (np.asarray(x).astype(np.float32) for x in inputs)
    scale, lse = np.float32(capture.softmax_scale), lse.astype(np.float32)
    delta = rounded((dout * rounded(out.astype(np.float32))).sum(axis=1))
    s = rounded(rounded(k @ q.T) * scale)
    p = rounded(np.exp(np.where(visible, s - lse, np.float32(-np.inf))))
    ds = rounded(p * rounded(rounded(v @ dout.T) - delta))
    yield "dk", rounded(scale * (ds @ q))
    yield "dv", rounded(p @ dout)
