"""The reference in small pieces that can be replaced one by one, and how it answers a case.

Defines `Implementation`, `REFERENCE`, `answer` and `pieces_used`. Buffers of a case are tiny, so attention is dense
here: one boolean matrix says who sees whom. A mutant replaces one or two pieces; everything else stays right. Pieces
are pure functions, and those of integers alone are computed once for each set of arguments.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.attention import check_attention_inputs
from refimpl.conformance.cases import Case
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
    """Who sees whom in one attention step, from its offsets alone: bool [rows_q, rows_kv].

    As in a kernel, what lies beyond the maxima is not computed, and offsets may be wrong: they may point out of the
    buffers, and documents may overlap.
    """
    visible = np.zeros((rows_q, rows_kv), bool)
    seqlens_q, seqlens_kv = (
        np.minimum(step.seqlens_q, step.max_seqlen_q),
        np.minimum(step.seqlens_kv, step.max_seqlen_kv),
    )
    for d in np.flatnonzero(seqlens_q > 0):
        queries, keys = np.arange(seqlens_q[d]), np.arange(seqlens_kv[d])
        block = mask.visible(0, step.first_query_positions[d] + queries, 0, keys)
        q_start, k_start = int(step.cu_seqlens_q_padded[d]), int(step.cu_seqlens_kv_padded[d])
        place = visible[q_start : q_start + len(queries), k_start : k_start + len(keys)]
        place |= block[: place.shape[0], : place.shape[1]]
    return visible


def rank_order(layout: PackedLayout, policy: Policy, cp_size: int) -> IntArray:
    """The buffer's rows in the order of the ranks' shards, one behind the other: int64 [T]."""
    return np.concatenate([partition_indices(layout, policy, cp_size, r) for r in range(cp_size)])


def to_sequence_order(gathered: Array, layout: PackedLayout, policy: Policy) -> Array:
    """All-gathered shards [cp, T / cp, ...] as the buffer [T, ...]."""
    buffer = np.empty((layout.total_tokens, *gathered.shape[2:]), gathered.dtype)
    buffer[once(rank_order, layout, policy, len(gathered))] = gathered.reshape(buffer.shape)
    return buffer


def to_rank_order(x: Array, layout: PackedLayout, policy: Policy, cp_size: int) -> Array:
    """The buffer [T, ...] as one part a rank [cp, T / cp, ...]."""
    parts: Array = x[once(rank_order, layout, policy, cp_size)].reshape(cp_size, -1, *x.shape[1:])
    return parts


def kv_head(head: int, q_heads: int, kv_heads: int) -> int:
    """The K/V head that a query head reads."""
    return head // (q_heads // kv_heads)


def softmax(s: Array, visible: Bools) -> tuple[Array, Array]:
    """p [H, Tq, Tk] and lse [H, Tq] of scores [H, Tq, Tk]; `visible` [Tq, Tk] decides, never the scores."""
    sees = visible.any(axis=1)
    s = np.where(visible, s, -np.inf)
    largest = np.where(sees, s.max(axis=2, initial=-np.inf), 0.0)
    e = np.exp(s - largest[:, :, None])
    total = np.where(sees, e.sum(axis=2), 1.0)
    return e / total[:, :, None], np.where(sees, largest + np.log(total), -np.inf)


def weighted_sum(weights: Array, x: Array) -> Array:
    """sum_j weights_ij x_j for every head: [H, I, J] and [H, J, D] give [H, I, D]."""
    total: Array = weights @ x
    return total


def delta(dout: Array, out: Array) -> Array:
    """dout_i . out_i for every head and row: [H, Tq] of [H, Tq, Dv]."""
    product: Array = (dout * out).sum(axis=2)
    return product


def sum_heads(x: Array, heads: Sequence[int], kv_heads: int) -> Array:
    """Gradients of each query head [Hq, Tk, D] added up in the K/V head that it reads: [Hkv, Tk, D]."""
    total = np.zeros((kv_heads, *x.shape[1:]))
    for part, head in zip(x, heads, strict=True):
        total[head] += part
    return total


@dataclass(frozen=True)
class Implementation:
    """Every piece that a fault can sit in. Signatures are those of the default.

    - `gather(shards [cp, T / cp, ...], rank)`: what that rank's all-gather gives it.
    - `kv_for_backward(buffer [T, ...], held, rank)`: what a rank's backward reads where its forward read the gathered
      K or V in sequence order; `held` are the rows of every rank.
    - `backward_mask`: the mask of the backward, from that of the forward.
    - `add_steps(total, step)`: dk or dv after one more step. `reduce_sum(parts, rank)`: what a rank's reduce-scatter
      gives it of the ranks' contributions to its rows.
    - `finish(name, array, case, rank)` has the last word on every float array that is returned; `rank` is None for
      operations on a whole buffer.
    """

    make_layout: Callable[..., PackedLayout] = PackedLayout
    make_mask: Callable[[bool, tuple[int, int]], AttentionMask] = AttentionMask
    document_ids: Callable[[PackedLayout], IntArray] = lambda layout: layout.document_ids
    positions: Callable[[PackedLayout], IntArray] = position_ids
    labels: Callable[[Array, PackedLayout], Array] = next_token_labels
    from_position_ids: Callable[[Sequence[int]], PackedLayout] = PackedLayout.from_position_ids
    from_segment_ids: Callable[[Sequence[int], int | None], PackedLayout] = PackedLayout.from_segment_ids
    check_tensors: Callable[..., float] = check_attention_inputs
    indices: Callable[[PackedLayout, Policy, int, int], IntArray] = partition_indices
    unpartition: Callable[[Sequence[Array], PackedLayout, Policy], Array] = unpartition
    rank_metadata: Callable[[PackedLayout, Policy, int, int, AttentionMask], RankMetadata] = rank_metadata
    layout_visible: Callable[[PackedLayout, AttentionMask], Bools] = layout_visible
    step_visible: Callable[[StepMetadata, AttentionMask, int, int], Bools] = step_visible
    kv_head: Callable[[int, int, int], int] = kv_head
    scale: Callable[[Case], float] = lambda case: case.softmax_scale
    softmax: Callable[[Array, Bools], tuple[Array, Array]] = softmax
    weighted_sum: Callable[[Array, Array], Array] = weighted_sum
    delta: Callable[[Array, Array], Array] = delta
    sum_heads: Callable[[Array, Sequence[int], int], Array] = sum_heads
    gather: Callable[[Array, int], Array] = lambda shards, rank: shards
    sequence_order: Callable[[Array, PackedLayout, Policy], Array] = to_sequence_order
    kv_for_backward: Callable[[Array, Sequence[IntArray], int], Array] = lambda buffer, held, rank: buffer
    backward_mask: Callable[[AttentionMask], AttentionMask] = lambda mask: mask
    add_steps: Callable[[Array, Array], Array] = lambda total, step: total + step
    rank_order: Callable[[Array, PackedLayout, Policy, int], Array] = to_rank_order
    reduce_sum: Callable[[Array, int], Array] = lambda parts, rank: parts.sum(axis=0)
    merge: Callable[[Sequence[Array], Sequence[Array]], tuple[Array, Array]] = merge_partials
    finish: Callable[[str, Array, Case, int | None], Array] = lambda name, array, case, rank: array


REFERENCE = Implementation()


def answer(case: Case, by: Implementation = REFERENCE, only_rank: int | None = None) -> dict[str, Array]:
    """What an implementation answers to a case: arrays by name (see `cases`), which may be read-only.

    Args:
        only_rank: the one rank that `by` runs on, while REFERENCE runs on all others; None: it runs everywhere. Rank 0
            answers where the operation has no ranks.

    Raises:
        SpecError: where it refuses.
    """
    with np.errstate(all="ignore"):
        return _answer(case, lambda rank: by if only_rank in (None, rank) else REFERENCE)


def pieces_used(case: Case) -> frozenset[str]:
    """The pieces that a case asks for: an implementation that replaces none of them answers as the reference does."""
    used: set[str] = set()

    def spied(name: str) -> Callable[..., Any]:
        piece = getattr(REFERENCE, name)

        def spy(*args: Any) -> Any:
            used.add(name)
            return piece(*args)

        return spy

    with suppress(SpecError):
        answer(case, Implementation(**{field.name: spied(field.name) for field in fields(Implementation)}))
    return frozenset(used)


At = Callable[[int], Implementation]
"""The implementation that runs on a rank."""


def _answer(case: Case, at: At) -> dict[str, Array]:
    by = at(0)
    match case.operation:
        case "merge":
            return _finished(dict(zip(("out", "lse"), by.merge(*_parts(case)), strict=True)), case, by)
        case "step_mask":
            return {"visible": by.step_visible(case.step, _mask(case, by), *_step_rows(case))}
        case "step_attention_forward" | "step_attention_backward":
            return _finished(_step_attention(case, by), case, by)
        case "from_position_ids":
            return _offsets(by.from_position_ids(case.inputs["ids"]))
        case "from_segment_ids":
            return _offsets(by.from_segment_ids(case.inputs["ids"], case.inputs["padding_id"]))
        case "refuse":
            return _refuse(case, by)
    layout = _layout(case, by)
    ranks = range(case.cp_size)
    match case.operation:
        case "positions":
            return {"positions": by.positions(layout), "document_ids": by.document_ids(layout)}
        case "labels":
            return {"labels": by.labels(np.asarray(case.inputs["ids"]), layout)}
        case "mask":
            return {"visible": once(by.layout_visible, layout, _mask(case, by))}
        case "attention_forward":
            out, logs = _whole_forward(case, layout, by)
            return _finished({"out": out, "lse": logs}, case, by)
        case "attention_backward":
            return _finished(_whole_backward(case, layout, by), case, by)
        case "partition":
            return {f"indices.{r}": once(at(r).indices, layout, case.policy, case.cp_size, r) for r in ranks}
        case "unpartition":
            shards = [_float64(case.tensors[f"x.{r}"]) for r in ranks]
            return _finished({"x": by.unpartition(shards, layout, case.policy)}, case, by)
        case "metadata":
            return _metadata(case, layout, at)
        case "needed_rows":
            return {f"kv_rows.{r}": _rows_of(_rank(case, layout, at(r), r).kv_ranges) for r in ranks}
        case "context_parallel_forward":
            return _finished_ranks(_context_parallel(case, layout, at, gradients=False), case, at)
        case "context_parallel_backward":
            return _finished_ranks(_context_parallel(case, layout, at, gradients=True), case, at)
    raise KeyError(case.operation)


def _call(piece: Callable[..., Any], *args: Hashable) -> Any:
    result = piece(*args)
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
    return result


_of_small_layouts = lru_cache(maxsize=1 << 13)(_call)
_of_large_layouts = lru_cache(maxsize=1 << 4)(_call)


def once(piece: Callable[..., Any], *args: Any) -> Any:
    """The result of a pure piece, remembered for the next time; arrays are read-only."""
    large = isinstance(args[0], PackedLayout) and args[0].total_tokens > 1 << 12
    return (_of_large_layouts if large else _of_small_layouts)(piece, *args)


def _float64(x: Array) -> Array:
    return np.asarray(x).astype(np.float64)


def _parts(case: Case) -> tuple[list[Array], list[Array]]:
    """The outs and the lses of a merge."""
    parts = range(sum(name.startswith("out.") for name in case.tensors))
    return [_float64(case.tensors[f"out.{p}"]) for p in parts], [_float64(case.tensors[f"lse.{p}"]) for p in parts]


def _layout(case: Case, by: Implementation) -> PackedLayout:
    if by.make_layout is PackedLayout:
        return case.layout  # the same object every time, so that what was made of it is found again at once
    inputs = case.inputs
    return by.make_layout(inputs["cu_seqlens"], inputs.get("cu_seqlens_padded"), inputs.get("total_tokens"))


def _offsets(layout: PackedLayout) -> dict[str, Array]:
    return {name: np.asarray(getattr(layout, name)) for name in ("cu_seqlens", "cu_seqlens_padded", "total_tokens")}


def _mask(case: Case, by: Implementation) -> AttentionMask:
    return by.make_mask(case.inputs["causal"], tuple(case.inputs["window"]))


def _finished(arrays: dict[str, Array], case: Case, by: Implementation) -> dict[str, Array]:
    return {name: by.finish(name, array, case, None) for name, array in arrays.items()}


def _finished_ranks(ranks: list[dict[str, Array]], case: Case, at: At) -> dict[str, Array]:
    return {
        f"{name}.{r}": at(r).finish(name, array, case, r)
        for r, rank in enumerate(ranks)
        for name, array in rank.items()
    }


def _rank(case: Case, layout: PackedLayout, by: Implementation, rank: int) -> RankMetadata:
    metadata: RankMetadata = once(by.rank_metadata, layout, case.policy, case.cp_size, rank, _mask(case, by))
    return metadata


def _rows_of(ranges: IntArray) -> IntArray:
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(first, last) for first, last in ranges)])


def _metadata(case: Case, layout: PackedLayout, at: At) -> dict[str, Array]:
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
        for s, step in enumerate(_rank(case, layout, at(r), r).steps)
        for name in names
    }


def _forward(q: Array, k: Array, v: Array, visible: Bools, scale: float, by: Implementation) -> tuple[Array, Array]:
    """out [Tq, Hq, Dv] and lse [Hq, Tq] in float64. Rows that see nothing and keys unseen are taken for 0."""
    heads = [by.kv_head(h, q.shape[1], k.shape[1]) for h in range(q.shape[1])]
    keys = np.flatnonzero(visible.any(axis=0))
    q, k, v = _seeing(q, visible).transpose(1, 0, 2), _of_heads(k[keys], heads), _of_heads(v[keys], heads)
    p, logs = by.softmax(scale * (q @ k.transpose(0, 2, 1)), visible[:, keys])
    return by.weighted_sum(p, v).transpose(1, 0, 2), logs


def _backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    logs: Array,
    visible: Bools,
    scale: float,
    by: Implementation,
) -> tuple[Array, Array, Array]:
    """dq, dk, dv of `_forward`, float64."""
    kv_heads = k.shape[1]
    heads = [by.kv_head(h, q.shape[1], kv_heads) for h in range(q.shape[1])]
    keys = np.flatnonzero(visible.any(axis=0))
    dk, dv = np.zeros(k.shape), np.zeros(v.shape)
    dout, q, out = (_seeing(x, visible).transpose(1, 0, 2) for x in (dout, q, out))
    k, v = _of_heads(k[keys], heads), _of_heads(v[keys], heads)
    s = scale * (q @ k.transpose(0, 2, 1))
    logs = np.where(visible.any(axis=1), logs, 0.0)
    p = np.where(visible[:, keys], np.exp(s - logs[:, :, None]), 0.0)
    ds = p * (dout @ v.transpose(0, 2, 1) - by.delta(dout, out)[:, :, None])
    dq = scale * by.weighted_sum(ds, k)
    dk_of_heads = scale * by.weighted_sum(ds.transpose(0, 2, 1), q)
    dv_of_heads = by.weighted_sum(p.transpose(0, 2, 1), dout)
    dk[keys] = by.sum_heads(dk_of_heads, heads, kv_heads).transpose(1, 0, 2)
    dv[keys] = by.sum_heads(dv_of_heads, heads, kv_heads).transpose(1, 0, 2)
    return dq.transpose(1, 0, 2), dk, dv


def _seeing(x: Array, visible: Bools) -> Array:
    """x with 0 in rows that see nothing: whatever stands there is never read."""
    return np.where(np.any(visible, axis=1)[:, None, None], x, 0.0)


def _of_heads(x: Array, heads: Sequence[int]) -> Array:
    """K or V [Tk, Hkv, D] as every query head reads it: [Hq, Tk, D]."""
    return x[:, heads].transpose(1, 0, 2)


def _whole_forward(case: Case, layout: PackedLayout, by: Implementation) -> tuple[Array, Array]:
    q, k, v = (_float64(case.tensors[name]) for name in ("q", "k", "v"))
    visible = once(by.layout_visible, layout, _mask(case, by))
    return _forward(q, k, v, visible, by.scale(case), by)


def _whole_backward(case: Case, layout: PackedLayout, by: Implementation) -> dict[str, Array]:
    q, k, v = (_float64(case.tensors[name]) for name in ("q", "k", "v"))
    out, logs = _whole_forward(case, layout, by)
    visible = once(by.layout_visible, layout, by.backward_mask(_mask(case, by)))
    gradients = _backward(_float64(case.tensors["dout"]), q, k, v, out, logs, visible, by.scale(case), by)
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def _step_rows(case: Case) -> tuple[int, int]:
    return case.layout_of("q").total_tokens, case.layout_of("k").total_tokens


def _step_attention(case: Case, by: Implementation) -> dict[str, Array]:
    q, k, v = (_float64(case.tensors[name]) for name in ("q", "k", "v"))
    mask, scale, rows = _mask(case, by), by.scale(case), _step_rows(case)
    out, logs = _forward(q, k, v, by.step_visible(case.step, mask, *rows), scale, by)
    if case.operation == "step_attention_forward":
        return {"out": out, "lse": logs}
    visible = by.step_visible(case.step, by.backward_mask(mask), *rows)
    gradients = _backward(_float64(case.tensors["dout"]), q, k, v, out, logs, visible, scale, by)
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def _context_parallel(case: Case, layout: PackedLayout, at: At, gradients: bool) -> list[dict[str, Array]]:
    """Every rank's results, the ranks in turn: the same steps as `refimpl.context_parallel`."""
    policy, cp_size, total = case.policy, case.cp_size, layout.total_tokens
    q, k, v = (_float64(case.tensors[name]) for name in ("q", "k", "v"))
    held = [once(at(r).indices, layout, policy, cp_size, r) for r in range(cp_size)]
    shards = [np.stack([x[rows] for rows in held]) for x in (k, v)]
    results: list[dict[str, Array]] = []
    to_reduce: list[list[Array]] = []
    for r in range(cp_size):
        by = at(r)
        meta, mask, scale = _rank(case, layout, by, r), _mask(case, by), by.scale(case)
        k_all, v_all = (by.sequence_order(by.gather(x, r), layout, policy) for x in shards)
        q_local = q[held[r]]
        out, logs = np.zeros((*q_local.shape[:2], v.shape[2])), np.full((q.shape[1], len(q_local)), -np.inf)
        for step, rows in zip(meta.steps, meta.step_rows, strict=True):
            visible = once(by.step_visible, step, mask, len(rows), total)
            out[rows], logs[:, rows] = _forward(q_local[rows], k_all, v_all, visible, scale, by)
        if not gradients:
            results.append({"out": out, "lse": logs})
            continue
        dout_local = _float64(case.tensors["dout"])[held[r]]
        k_all, v_all = (by.kv_for_backward(x, held, r) for x in (k_all, v_all))
        dq, dk, dv = np.zeros(q_local.shape), np.zeros(k.shape), np.zeros(v.shape)
        for step, rows in zip(meta.steps, meta.step_rows, strict=True):
            visible = once(by.step_visible, step, by.backward_mask(mask), len(rows), total)
            dq[rows], dk_step, dv_step = _backward(
                dout_local[rows], q_local[rows], k_all, v_all, out[rows], logs[:, rows], visible, scale, by
            )
            dk, dv = by.add_steps(dk, dk_step), by.add_steps(dv, dv_step)
        results.append({"dq": dq})
        to_reduce.append([by.rank_order(x, layout, policy, cp_size) for x in (dk, dv)])
    for r, result in enumerate(results if gradients else []):
        for i, name in enumerate(("dk", "dv")):
            result[name] = at(r).reduce_sum(np.stack([parts[i][r] for parts in to_reduce]), r)
    return results


def _refuse(case: Case, by: Implementation) -> dict[str, Array]:
    """Carry out `call` of a must-refuse case; what it returns, if it does not refuse, is of no interest."""
    inputs = case.inputs
    match inputs["call"]:
        case "from_position_ids":
            by.from_position_ids(inputs["ids"])
            return {}
        case "from_segment_ids":
            by.from_segment_ids(inputs["ids"], inputs["padding_id"])
            return {}
    layout = _layout(case, by)
    match inputs["call"]:
        case "attention":
            q, k, v = (np.zeros(inputs["shapes"][name], inputs["dtypes"][name]) for name in ("q", "k", "v"))
            by.check_tensors(q, k, v, layout.total_tokens, layout.total_tokens, inputs["softmax_scale"])
        case "partition":
            by.indices(layout, inputs["policy"], inputs["cp_size"], inputs.get("cp_rank", 0))
        case "metadata":
            by.rank_metadata(layout, inputs["policy"], inputs["cp_size"], inputs.get("cp_rank", 0), _mask(case, by))
        case "layout":
            pass
        case other:
            raise SpecError("usage", f"case {case.id}: unknown call {other!r}")
    return {}
