"""The right answers by a second route, which shares no code with the reference.

Defines `expected` and `faults`. Imports nothing of refimpl but the type of a case, and works from its plain integers
and numbers. What the reference derives from windows and clipped offsets is here counted, one row and one pair of rows
at a time, from the English of the specification. What it computes in float64 is here computed with 50 decimal digits
and rounded once, so that expected values are the same bits on every machine.
"""

import decimal
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.cases import Case

Array = NDArray[Any]
Row = tuple[int, int]
"""(document, position) of a physical row."""

DIGITS = decimal.Context(prec=50, Emin=-(10**9), Emax=10**9)
ZERO = Decimal(0)
NOTHING = 1e-40
"""What is left of 0 after 50 digits, at most; also nothing beside any bound."""
IGNORE = -100
"""The label of rows that have none."""


def expected(case: Case) -> dict[str, Array]:
    """What the case must be answered, by name; no arrays for a case that must be refused. [V4]"""
    with decimal.localcontext(DIGITS):
        return {name: np.asarray(values) for name, values in _ANSWERS[case.operation](case).items()}


def rows_of(case: Case, name: str = "q") -> list[Row]:
    """(document, position) of every physical row of a tensor, document -1 for padding. [L1] [L4] [L6]

    In an attention step the position of a query is that among its document's keys: with Lq queries on Lk keys, query i
    stands at i + Lk - Lq, by the rule of FlashAttention's documentation. [K4]
    """
    inputs = case.inputs
    if "cu_seqlens_q" not in inputs:
        return _rows(inputs["cu_seqlens"], inputs["cu_seqlens_padded"], inputs["total_tokens"])
    queries, keys = inputs["cu_seqlens_q"], inputs["cu_seqlens_kv"]
    if name in ("k", "v"):
        return _rows(keys, inputs["cu_seqlens_kv_padded"], inputs["cu_seqlens_kv_padded"][-1])
    ahead = [(keys[d + 1] - keys[d]) - (queries[d + 1] - queries[d]) for d in range(len(queries) - 1)]
    rows = _rows(queries, inputs["cu_seqlens_q_padded"], inputs["cu_seqlens_q_padded"][-1])
    return [(d, position + ahead[d]) if d >= 0 else (d, position) for d, position in rows]


def _rows(real: Sequence[int], physical: Sequence[int], total: int) -> list[Row]:
    rows: list[Row] = []
    for d in range(len(physical) - 1):
        tokens = real[d + 1] - real[d]
        rows += [(d if position < tokens else -1, position) for position in range(physical[d + 1] - physical[d])]
    past_the_last_offset = total - physical[-1]
    return rows + [(-1, position) for position in range(past_the_last_offset)]


def sees(query: Row, key: Row, causal: bool, window: Sequence[int]) -> bool:
    """Whether a query row sees a key row. [K1] [K2] [K3]"""
    (document, position), (document_k, position_k) = query, key
    left, right = window
    if document != document_k or document < 0:
        return False
    if causal and position_k > position:
        return False
    if right != -1 and position_k - position > right:
        return False
    return left == -1 or position - position_k <= left


def keys_of(case: Case) -> list[list[int]]:
    """The rows of keys that each row of queries sees, ascending."""
    queries, keys, causal, window = rows_of(case, "q"), rows_of(case, "k"), case.inputs["causal"], case.inputs["window"]
    return [[j for j, key in enumerate(keys) if sees(query, key, causal, window)] for query in queries]


def chunks_of(case: Case) -> list[list[list[int]]]:
    """The rows that each rank holds for each of its attention steps: `[rank][step]`. [P2] [P3] [P4] [P5] [R1]"""
    policy, cp, total = case.inputs["policy"], case.inputs["cp_size"], case.inputs["total_tokens"]
    starts = case.inputs["cu_seqlens_padded"] if policy == "dual_chunk_swap" else [0]
    extents = list(zip(starts, [*starts[1:], total], strict=True))
    pieces = cp if policy == "packed_contiguous" else 2 * cp
    chunks: list[list[int]] = [[] for _ in range(pieces)]
    for first, last in extents:
        for row in range(first, last):
            chunks[(row - first) * pieces // (last - first)].append(row)
    if policy == "packed_contiguous":
        return [[chunk] for chunk in chunks]
    return [[chunks[r], chunks[-1 - r]] for r in range(cp)]


def held_by(case: Case) -> list[list[int]]:
    """The rows of each rank, in buffer order. [P8]"""
    return [sorted(row for chunk in chunks for row in chunk) for chunks in chunks_of(case)]


def _positions(case: Case) -> dict[str, Any]:
    documents, positions = zip(*rows_of(case), strict=True)
    return {"positions": positions, "document_ids": documents}


def _labels(case: Case) -> dict[str, Any]:
    rows, ids = rows_of(case), case.inputs["ids"]
    labels = [IGNORE] * len(rows)
    for i in range(len(rows) - 1):
        if rows[i][0] >= 0 and rows[i][0] == rows[i + 1][0]:
            labels[i] = ids[i + 1]
    return {"labels": labels}


def _from_position_ids(case: Case) -> dict[str, Any]:
    """A document for every 0, up to the next one. [L8]"""
    ids = case.inputs["ids"]
    starts = [row for row, position in enumerate(ids) if position == 0]
    offsets = [*starts, len(ids)]
    return {"cu_seqlens": offsets, "cu_seqlens_padded": offsets, "total_tokens": len(ids)}


def _from_segment_ids(case: Case) -> dict[str, Any]:
    """One row at a time: a token of the document before it, the first of a new one, or padding. [L9]"""
    ids, padding = case.inputs["ids"], case.inputs["padding_id"]
    real: list[int] = []
    physical: list[int] = []
    open_id = None
    for segment in ids:
        is_padding = padding is not None and segment == padding
        if not real or (not is_padding and segment != open_id):
            real, physical = [*real, 0], [*physical, 0]
        if not is_padding:
            real[-1] += 1
            open_id = segment
        physical[-1] += 1
    return {"cu_seqlens": _sums(real), "cu_seqlens_padded": _sums(physical), "total_tokens": len(ids)}


def _partition(case: Case) -> dict[str, Any]:
    return {f"indices.{r}": rows for r, rows in enumerate(held_by(case))}


def _unpartition(case: Case) -> dict[str, Any]:
    placed = {row: case.tensors[f"x.{r}"][i] for r, rows in enumerate(held_by(case)) for i, row in enumerate(rows)}
    return {"x": np.array([placed[row] for row in range(len(placed))], np.float64)}


def _metadata(case: Case) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    rows, total = rows_of(case), case.inputs["total_tokens"]
    real, physical = case.inputs["cu_seqlens"], case.inputs["cu_seqlens_padded"]
    right = 0 if case.inputs["causal"] else case.inputs["window"][1]
    documents = range(len(physical) - 1)
    for r, steps in enumerate(chunks_of(case)):
        for s, chunk in enumerate(steps):
            stored, queries, keys = [], [], []
            for d in documents:
                mine = [row for row in chunk if physical[d] <= row < physical[d + 1]]
                stored.append(len(mine))
                queries.append(sum(rows[row][0] == d for row in mine))
                # A document has keys here once it has begun before the chunk ends: the end of its own chunk if every
                # document is cut, of the buffer's chunk otherwise.
                cut = mine if case.inputs["policy"] == "dual_chunk_swap" else chunk
                last = max(cut, default=-1)
                reach = total if right == -1 else last + right
                began = last >= physical[d]
                keys.append(sum(began and physical[d] + i <= reach for i in range(real[d + 1] - real[d])))
            answer |= {
                f"cu_seqlens_q.{r}.{s}": _sums(queries),
                f"cu_seqlens_q_padded.{r}.{s}": _sums(stored),
                f"cu_seqlens_kv.{r}.{s}": _sums(keys),
                f"cu_seqlens_kv_padded.{r}.{s}": physical,
                f"max_seqlen_q.{r}.{s}": max(queries, default=0),
                f"max_seqlen_kv.{r}.{s}": max(keys, default=0),
            }
    return answer


def _sums(counts: list[int]) -> list[int]:
    return [sum(counts[:d]) for d in range(len(counts) + 1)]


def _needed_rows(case: Case) -> dict[str, Any]:
    keys = keys_of(case)
    needed = [sorted({j for i in rows for j in keys[i]}) for rows in held_by(case)]
    return {f"kv_rows.{r}": np.array(rows, np.int64) for r, rows in enumerate(needed)}


def _mask(case: Case) -> dict[str, Any]:
    num_keys = len(rows_of(case, "k"))
    return {"visible": [[j in seen for j in range(num_keys)] for seen in keys_of(case)]}


def scale_of(case: Case) -> Decimal:
    """The scale given, else 1 / sqrt(Dqk). [A1]"""
    given = case.inputs["softmax_scale"]
    return Decimal(1) / Decimal(case.tensors["q"].shape[2]).sqrt() if given is None else Decimal(given)


def numbers(x: Array) -> Any:
    """An array as nested lists of exact decimal numbers."""
    return [numbers(part) for part in x] if np.ndim(x) else Decimal(float(x))


def rounded(values: Any) -> Array:
    """Nested lists of decimal numbers as float64; 0 for what is smaller than the digits computed can tell from it."""
    exact = np.array(values, dtype=object)
    result: Array = np.where(abs(exact) < NOTHING, 0.0, exact).astype(np.float64)
    return result


def dot(x: Sequence[Decimal], y: Sequence[Decimal]) -> Decimal:
    """The inner product."""
    return sum((a * b for a, b in zip(x, y, strict=True)), ZERO)


def add(to: list[Decimal], factor: Decimal, x: Sequence[Decimal]) -> None:
    """`to += factor * x`."""
    for c, value in enumerate(x):
        to[c] += factor * value


def zeros(*shape: int) -> Any:
    """Nested lists of 0."""
    return [zeros(*shape[1:]) for _ in range(shape[0])] if shape else ZERO


def attention(case: Case) -> dict[str, Array]:
    """out, lse, and with a dout dq, dk, dv, of the whole buffer or of one step.

    [A1] [A2] [A3] [A4] [A5] [A6] [B1] [B2] [B3]
    """
    q, k, v = (numbers(case.tensors[name]) for name in ("q", "k", "v"))
    dout = numbers(case.tensors["dout"]) if "dout" in case.tensors else None
    (queries, heads, dim), (num_keys, kv_heads, dim_v) = case.tensors["q"].shape, case.tensors["v"].shape
    out, lse = zeros(queries, heads, dim_v), [[Decimal("-inf")] * queries for _ in range(heads)]
    dq, dk, dv = zeros(queries, heads, dim), zeros(num_keys, kv_heads, dim), zeros(num_keys, kv_heads, dim_v)
    scale = scale_of(case)
    reads = [g for g in range(kv_heads) for _ in range(heads // kv_heads)]
    for i, keys in enumerate(keys_of(case)):
        for h, g in enumerate(reads):
            if not keys:
                continue
            scores = [scale * dot(q[i][h], k[j][g]) for j in keys]
            largest = max(scores)
            weights = [(score - largest).exp() for score in scores]
            lse[h][i] = largest + sum(weights, ZERO).ln()
            p = [weight / sum(weights, ZERO) for weight in weights]
            for p_j, j in zip(p, keys, strict=True):
                add(out[i][h], p_j, v[j][g])
            if dout is None:
                continue
            delta = dot(dout[i][h], out[i][h])
            for p_j, j in zip(p, keys, strict=True):
                ds = p_j * (dot(dout[i][h], v[j][g]) - delta)
                add(dv[j][g], p_j, dout[i][h])
                add(dq[i][h], scale * ds, k[j][g])
                add(dk[j][g], scale * ds, q[i][h])
    results = {"out": out, "lse": lse} | ({} if dout is None else {"dq": dq, "dk": dk, "dv": dv})
    return {name: rounded(values) for name, values in results.items()}


def _attention(*names: str) -> Callable[[Case], dict[str, Any]]:
    def answer(case: Case) -> dict[str, Any]:
        whole = attention(case)
        return {name: whole[name] for name in names}

    return answer


def _context_parallel(*names: str) -> Callable[[Case], dict[str, Any]]:
    """The rows of the whole buffer's results that each rank holds: ranks change nothing. [C5]"""

    def answer(case: Case) -> dict[str, Any]:
        whole = attention(case)
        return {
            f"{name}.{r}": whole[name][:, rows] if name == "lse" else whole[name][rows]
            for r, rows in enumerate(held_by(case))
            for name in names
        }

    return answer


def _merge(case: Case) -> dict[str, Any]:
    """One softmax over the parts, for every row and head; a part of weight 0 is never read. [A7]"""
    count = len(case.tensors) // 2
    outs, lses = ([numbers(case.tensors[f"{name}.{p}"]) for p in range(count)] for name in ("out", "lse"))
    total, heads, dim = case.tensors["out.0"].shape
    out, lse = zeros(total, heads, dim), [[Decimal("-inf")] * total for _ in range(heads)]
    for i in range(total):
        for h in range(heads):
            parts = [p for p in range(count) if lses[p][h][i].is_finite()]
            if not parts:
                continue
            largest = max(lses[p][h][i] for p in parts)
            weights = [(lses[p][h][i] - largest).exp() for p in parts]
            lse[h][i] = largest + sum(weights, ZERO).ln()
            for p, weight in zip(parts, weights, strict=True):
                add(out[i][h], weight / sum(weights, ZERO), outs[p][i][h])
    return {"out": rounded(out), "lse": rounded(lse)}


_ANSWERS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "positions": _positions,
    "labels": _labels,
    "from_position_ids": _from_position_ids,
    "from_segment_ids": _from_segment_ids,
    "partition": _partition,
    "unpartition": _unpartition,
    "metadata": _metadata,
    "needed_rows": _needed_rows,
    "mask": _mask,
    "step_mask": _mask,
    "step_attention_forward": _attention("out", "lse"),
    "step_attention_backward": _attention("dq", "dk", "dv"),
    "merge": _merge,
    "attention_forward": _attention("out", "lse"),
    "attention_backward": _attention("dq", "dk", "dv"),
    "context_parallel_forward": _context_parallel("out", "lse"),
    "context_parallel_backward": _context_parallel("dq", "dk", "dv"),
    "refuse": lambda case: {},
}


def faults(case: Case) -> set[str]:
    """The code of everything that is wrong with a must-refuse case: one, or the case would have two right answers."""
    inputs = case.inputs
    if inputs["call"].startswith("from_"):
        return set(_id_faults(inputs))
    call_faults = _tensor_faults if inputs["call"] == "attention" else _rank_faults
    return set(_offset_faults(inputs)) or set(call_faults(inputs))


def _id_faults(inputs: dict[str, Any]) -> Iterator[str]:
    """What is wrong with position ids, or with segment ids. [L8] [L9]"""
    ids = inputs["ids"]
    if inputs["call"] == "from_position_ids":
        if any(own != 0 and own != before + 1 for before, own in zip([-1, *ids], ids, strict=False)):
            yield "position_ids"
        return
    runs = [own for before, own in zip([None, *ids], ids, strict=False) if own != before]
    opened = [segment for segment in runs if inputs["padding_id"] is None or segment != inputs["padding_id"]]
    if len(set(opened)) < len(opened):
        yield "segment_ids"


def _tensor_faults(inputs: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the tensors of attention on a good layout. [A8]"""
    shapes = inputs["shapes"]
    if not all(dtype.startswith("float") for dtype in inputs["dtypes"].values()):
        yield "dtype"
    if not all(len(shape) == 3 and min(shape[1:]) > 0 for shape in shapes.values()):
        yield "shape"
        return
    (rows, heads, dim), (rows_k, heads_k, dim_k), (rows_v, heads_v, _) = (shapes[name] for name in ("q", "k", "v"))
    if {rows, rows_k, rows_v} != {inputs["total_tokens"]} or dim != dim_k or heads_k != heads_v:
        yield "shape"
    elif heads % heads_k:
        yield "heads"


def _offset_faults(inputs: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the layout. [L2] [L3] [L4]"""
    vectors = [inputs["cu_seqlens"], inputs["cu_seqlens_padded"]]
    total = inputs["total_tokens"]
    for offsets in vectors:
        if len(offsets) == 0 or any(isinstance(offset, list) for offset in offsets):
            yield "offsets_shape"
            return
        if not all(isinstance(offset, int) and abs(offset) < 2**63 for offset in offsets):
            yield "offsets_type"
            return
        if offsets[0] != 0:
            yield "offsets_start"
        elif any(a > b for a, b in pairwise(offsets)):
            yield "offsets_decreasing"
    real, physical = ([b - a for a, b in pairwise(x)] for x in vectors)
    if len(real) != len(physical):
        yield "offsets_count"
    elif min(real + physical, default=0) >= 0 and any(a > b for a, b in zip(real, physical, strict=True)):
        yield "real_exceeds_physical"
    if not isinstance(total, int) or total < vectors[1][-1] or total >= 2**62:
        yield "total_tokens"


def _rank_faults(inputs: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a partition or a metadata call on a good layout. [P6] [R7]"""
    if inputs["call"] == "layout":
        return
    policy, cp, rank = inputs["policy"], inputs["cp_size"], inputs["cp_rank"]
    if policy not in ("dual_chunk_swap", "packed_contiguous", "packed_dual_chunk_swap"):
        yield "policy"
        return
    if cp < 1:
        yield "cp_size"
        return
    if not 0 <= rank < cp:
        yield "cp_rank"
    starts = inputs["cu_seqlens_padded"] if policy == "dual_chunk_swap" else [0]
    ends = [*starts[1:], inputs["total_tokens"]]
    pieces = cp if policy == "packed_contiguous" else 2 * cp
    if any((end - start) % pieces for start, end in zip(starts, ends, strict=True)):
        yield "not_divisible"
    if inputs["call"] == "metadata":
        if min(inputs["window"]) < -1:
            yield "mask"
        if inputs["cu_seqlens_padded"][-1] >= 2**31:
            yield "int32_overflow"
