"""The reference in small pieces that can be replaced one by one, and how it answers a case.

Defines `Implementation`, `REFERENCE` and `answer`. Buffers of a case are tiny, so attention is dense here: one boolean
matrix says who sees whom. A mutant replaces one piece; everything else stays right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.attention import backward_block, forward_block
from refimpl.conformance.cases import Case
from refimpl.context_parallel import to_rank_order, to_sequence_order
from refimpl.errors import SpecError
from refimpl.layout import IntArray, PackedLayout
from refimpl.lse import merge_partials
from refimpl.mask import AttentionMask
from refimpl.metadata import RankMetadata, StepMetadata, rank_metadata
from refimpl.partition import Policy, next_token_labels, partition_indices, position_ids, unpartition

Array = NDArray[Any]
Bools = NDArray[np.bool_]


def layout_visible(layout: PackedLayout, mask: AttentionMask) -> Bools:
    """Who sees whom in the whole buffer: bool [T, T]."""
    return mask.visible(layout.document_ids, layout.positions, layout.document_ids, layout.positions)


def step_visible(step: StepMetadata, mask: AttentionMask, rows_q: int, rows_kv: int) -> Bools:
    """Who sees whom in one attention step, from its offsets alone: bool [rows of its query buffer, T]."""
    visible = np.zeros((rows_q, rows_kv), bool)
    seqlens_q, seqlens_kv, first_query = step.seqlens_q, step.seqlens_kv, step.first_query_positions
    for d in np.flatnonzero(seqlens_q):
        queries, keys = np.arange(seqlens_q[d]), np.arange(seqlens_kv[d])
        block = mask.visible(0, first_query[d] + queries, 0, keys)
        q_start, k_start = int(step.cu_seqlens_q_padded[d]), int(step.cu_seqlens_kv_padded[d])
        visible[q_start : q_start + len(queries), k_start : k_start + len(keys)] = block
    return visible


def kv_head(head: int, q_heads: int, kv_heads: int) -> int:
    """The K/V head that a query head reads."""
    return head // (q_heads // kv_heads)


def forward(
    q: Array, k: Array, v: Array, visible: Bools, scale: float, head_of: Callable[..., int]
) -> tuple[Array, Array]:
    """out [Tq, Hq, Dv] and lse [Hq, Tq] in float64; rows and keys that take no part are never read."""
    out, logs = np.zeros((*q.shape[:2], v.shape[2])), np.full((q.shape[1], len(q)), -np.inf)
    rows, keys = np.flatnonzero(visible.any(axis=1)), np.flatnonzero(visible.any(axis=0))
    seen = visible[np.ix_(rows, keys)]
    for h in range(q.shape[1]):
        g = head_of(h, q.shape[1], k.shape[1])
        out[rows, h], logs[h, rows] = forward_block(q[rows, h], k[keys, g], v[keys, g], seen, scale)
    return out, logs


def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    logs: Array,
    visible: Bools,
    scale: float,
    head_of: Callable[..., int],
) -> tuple[Array, Array, Array]:
    """dq, dk, dv of `forward`, float64."""
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    rows, keys = np.flatnonzero(visible.any(axis=1)), np.flatnonzero(visible.any(axis=0))
    seen = visible[np.ix_(rows, keys)]
    for h in range(q.shape[1]):
        g = head_of(h, q.shape[1], k.shape[1])
        dq[rows, h], dk_h, dv_h = backward_block(
            dout[rows, h], q[rows, h], k[keys, g], v[keys, g], out[rows, h], logs[h, rows], seen, scale
        )
        dk[keys, g] += dk_h
        dv[keys, g] += dv_h
    return dq, dk, dv


def reduce_sum(parts: Sequence[Array]) -> Array:
    """The ranks' contributions added up; float64."""
    total: Array = np.sum(np.stack(parts), axis=0)
    return total


@dataclass(frozen=True)
class Implementation:
    """Every piece that a fault can sit in. Signatures are those of the default.

    `finish(name, array, case, rank)` has the last word on every float array that is returned; `rank` is None for
    operations on a whole buffer.
    """

    make_layout: Callable[..., PackedLayout] = PackedLayout
    document_ids: Callable[[PackedLayout], IntArray] = lambda layout: layout.document_ids
    positions: Callable[[PackedLayout], IntArray] = position_ids
    labels: Callable[[Array, PackedLayout], Array] = next_token_labels
    indices: Callable[[PackedLayout, Policy, int, int], IntArray] = partition_indices
    unpartition: Callable[[Sequence[Array], PackedLayout, Policy], Array] = unpartition
    rank_metadata: Callable[..., RankMetadata] = rank_metadata
    layout_visible: Callable[[PackedLayout, AttentionMask], Bools] = layout_visible
    step_visible: Callable[[StepMetadata, AttentionMask, int, int], Bools] = step_visible
    kv_head: Callable[[int, int, int], int] = kv_head
    scale: Callable[[Case], float] = lambda case: case.softmax_scale
    forward: Callable[..., tuple[Array, Array]] = forward
    backward: Callable[..., tuple[Array, Array, Array]] = backward
    sequence_order: Callable[[Array, PackedLayout, Policy], Array] = to_sequence_order
    rank_order: Callable[[Array, PackedLayout, Policy, int], Array] = to_rank_order
    reduce_sum: Callable[[Sequence[Array]], Array] = reduce_sum
    merge: Callable[[Sequence[Array], Sequence[Array]], tuple[Array, Array]] = merge_partials
    finish: Callable[[str, Array, Case, int | None], Array] = lambda name, array, case, rank: array


REFERENCE = Implementation()


def answer(case: Case, by: Implementation = REFERENCE) -> dict[str, Array]:
    """What an implementation answers to a case: arrays by name (see `cases`).

    Raises:
        SpecError: where it refuses.
    """
    if case.operation == "merge":
        return _finished(dict(zip(("out", "lse"), by.merge(*_parts(case)), strict=True)), case, by)
    if case.operation == "refuse":
        return _refuse(case, by)
    layout = by.make_layout(
        case.inputs["cu_seqlens"], case.inputs.get("cu_seqlens_padded"), case.inputs.get("total_tokens")
    )
    match case.operation:
        case "positions":
            return {"positions": by.positions(layout), "document_ids": by.document_ids(layout)}
        case "labels":
            return {"labels": by.labels(np.asarray(case.inputs["ids"]), layout)}
        case "mask":
            return {"visible": by.layout_visible(layout, case.mask)}
        case "attention_forward":
            out, logs = _whole_forward(case, layout, by)
            return _finished({"out": out, "lse": logs}, case, by)
        case "attention_backward":
            q, k, v, dout = _inputs(case)
            out, logs = _whole_forward(case, layout, by)
            visible, scale = by.layout_visible(layout, case.mask), by.scale(case)
            gradients = by.backward(dout, q, k, v, out, logs, visible, scale, by.kv_head)
            return _finished(dict(zip(("dq", "dk", "dv"), gradients, strict=True)), case, by)
        case "partition":
            return {f"indices.{r}": by.indices(layout, case.policy, case.cp_size, r) for r in range(case.cp_size)}
        case "unpartition":
            shards = [_float64(case.tensors[f"x.{r}"]) for r in range(case.cp_size)]
            return _finished({"x": by.unpartition(shards, layout, case.policy)}, case, by)
        case "metadata":
            return _metadata(case, layout, by)
        case "needed_rows":
            return {f"kv_rows.{r}": _rows_of(_rank(case, layout, by, r).kv_ranges) for r in range(case.cp_size)}
        case "context_parallel_forward":
            return _finished_ranks(_context_parallel(case, layout, by, gradients=False), case, by)
        case "context_parallel_backward":
            return _finished_ranks(_context_parallel(case, layout, by, gradients=True), case, by)
    raise KeyError(case.operation)


def _float64(x: Array) -> Array:
    return np.asarray(x).astype(np.float64)


def _inputs(case: Case) -> tuple[Array, Array, Array, Array]:
    q, k, v = (_float64(case.tensors[name]) for name in ("q", "k", "v"))
    return q, k, v, _float64(case.tensors["dout"]) if "dout" in case.tensors else np.zeros(0)


def _parts(case: Case) -> tuple[list[Array], list[Array]]:
    """The outs and the lses of a merge."""
    parts = range(sum(name.startswith("out.") for name in case.tensors))
    return [_float64(case.tensors[f"out.{p}"]) for p in parts], [_float64(case.tensors[f"lse.{p}"]) for p in parts]


def _finished(arrays: dict[str, Array], case: Case, by: Implementation) -> dict[str, Array]:
    return {name: by.finish(name, array, case, None) for name, array in arrays.items()}


def _finished_ranks(ranks: list[dict[str, Array]], case: Case, by: Implementation) -> dict[str, Array]:
    return {
        f"{name}.{r}": by.finish(name, array, case, r) for r, rank in enumerate(ranks) for name, array in rank.items()
    }


def _whole_forward(case: Case, layout: PackedLayout, by: Implementation) -> tuple[Array, Array]:
    q, k, v, _ = _inputs(case)
    return by.forward(q, k, v, by.layout_visible(layout, case.mask), by.scale(case), by.kv_head)


def _rank(case: Case, layout: PackedLayout, by: Implementation, rank: int) -> RankMetadata:
    return by.rank_metadata(layout, case.policy, case.cp_size, rank, case.mask)


def _rows_of(ranges: IntArray) -> IntArray:
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(first, last) for first, last in ranges)])


def _metadata(case: Case, layout: PackedLayout, by: Implementation) -> dict[str, Array]:
    names = (
        "cu_seqlens_q",
        "cu_seqlens_q_padded",
        "cu_seqlens_kv",
        "cu_seqlens_kv_padded",
        "max_seqlen_q",
        "max_seqlen_kv",
    )
    return {
        f"{name}.{r}.{s}": np.asarray(getattr(step, name))
        for r in range(case.cp_size)
        for s, step in enumerate(_rank(case, layout, by, r).steps)
        for name in names
    }


def _context_parallel(case: Case, layout: PackedLayout, by: Implementation, gradients: bool) -> list[dict[str, Array]]:
    """Every rank's results, the ranks in turn: the same steps as `refimpl.context_parallel`."""
    q, k, v, dout = _inputs(case)
    ranks = range(case.cp_size)
    scale = by.scale(case)
    held = [by.indices(layout, case.policy, case.cp_size, r) for r in ranks]
    k_all, v_all = (by.sequence_order(np.stack([x[rows] for rows in held]), layout, case.policy) for x in (k, v))
    results: list[dict[str, Array]] = []
    to_reduce: list[list[Array]] = []
    for r in ranks:
        meta = _rank(case, layout, by, r)
        q_local = q[held[r]]
        out, logs = np.zeros((*q_local.shape[:2], v.shape[2])), np.full((q.shape[1], len(q_local)), -np.inf)
        dq, dk_all, dv_all = np.zeros(q_local.shape), np.zeros(k.shape), np.zeros(v.shape)
        for step, rows in zip(meta.steps, meta.step_rows, strict=True):
            visible = by.step_visible(step, case.mask, len(rows), layout.total_tokens)
            out[rows], logs[:, rows] = by.forward(q_local[rows], k_all, v_all, visible, scale, by.kv_head)
            if gradients:
                dq[rows], dk_step, dv_step = by.backward(
                    dout[held[r]][rows],
                    q_local[rows],
                    k_all,
                    v_all,
                    out[rows],
                    logs[:, rows],
                    visible,
                    scale,
                    by.kv_head,
                )
                dk_all += dk_step
                dv_all += dv_step
        results.append({"dq": dq} if gradients else {"out": out, "lse": logs})
        to_reduce.append([by.rank_order(x, layout, case.policy, case.cp_size) for x in (dk_all, dv_all)])
    if gradients:
        for r in ranks:
            results[r]["dk"] = by.reduce_sum([dk[r] for dk, _ in to_reduce])
            results[r]["dv"] = by.reduce_sum([dv[r] for _, dv in to_reduce])
    return results


def _refuse(case: Case, by: Implementation) -> dict[str, Array]:
    """Carry out `call` of a must-refuse case; what it returns, if it does not refuse, is of no interest."""
    inputs = case.inputs
    layout = by.make_layout(inputs["cu_seqlens"], inputs.get("cu_seqlens_padded"), inputs.get("total_tokens"))
    match inputs["call"]:
        case "partition":
            by.indices(layout, inputs["policy"], inputs["cp_size"], inputs.get("cp_rank", 0))
        case "metadata":
            by.rank_metadata(layout, inputs["policy"], inputs["cp_size"], inputs.get("cp_rank", 0), case.mask)
        case "layout":
            pass
        case other:
            raise SpecError("usage", f"case {case.id}: unknown call {other!r}")
    return {}
