"""Attention over packed documents in memory linear in T: the results of `attention`, fast.

Defines `attention_forward`, `attention_backward`, `varlen_attention_forward` and `varlen_attention_backward`. No array
here is larger than an input, or than one tile of scores.

**Forward, online softmax** (Milakov & Gimelshein 2018; Rabe & Staats 2021; Dao et al. 2022, FlashAttention). A block of
queries walks over tiles of keys and carries, for every query, the largest score so far m, the sum l of exp(s - m), and
the sum acc of exp(s - m) v. A tile may raise m; what was summed before is then rescaled once:

    m' = max(m, max_j s_j)        (acc', l') = exp(m - m') (acc, l) + sum_j exp(s_j - m') (v_j, 1)
    out = acc / l                 lse = m + log l

**Backward, recomputation** (Dao et al. 2023, FlashAttention-2, algorithm 2). The probabilities are not stored but computed
again, tile by tile, from the saved lse: p = exp(s - lse); the formulas are those of `attention`.

**Tiles.** The keys that a query sees are neighbours, `[first, last)`, and both bounds rise from query to query. So of a
block of queries and a tile of keys it is known beforehand which queries see any key of the tile, and which of them see
all. Tiles are wide where every query of the block sees every key, narrow where the mask's edge passes; queries that see
nothing of a tile are left out, and only those that the edge crosses are masked.

**Groups.** The query heads that read one K/V head are rows of one matrix product: in the order of q [T, Hq, D] itself,
row `position * group + head`. Documents of one shape, and the K/V heads of a short document, share NumPy calls in
batches; each is still a matrix product of its own, so a result does not depend on what it was batched with.
"""

import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from refimpl.attention import Array, check_attention_inputs, check_backward_inputs, step_rows_needed
from refimpl.layout import IntArray, PackedLayout, checked_int
from refimpl.mask import AttentionMask
from refimpl.metadata import StepMetadata

TILE_ROWS = 1024
"""Rows of one matrix product: queries of a block times heads of a group, and of a batch of short documents."""
TILE_KEYS = 384
"""Keys of a tile that no edge of the mask crosses."""
EDGE_KEYS = 64
"""Keys of a tile that the mask's edge may cross: narrow, as what it hides is computed in vain."""


def attention_forward(
    q: Any,
    k: Any,
    v: Any,
    layout: PackedLayout,
    mask: AttentionMask,
    softmax_scale: float | None = None,
    *,
    workers: int | None = None,
) -> tuple[Array, Array]:
    """Attention of every row to the visible rows of its own document, as `attention.attention_forward`.

    Args:
        q: [T, Hq, Dqk] of any float dtype. k: [T, Hkv, Dqk]. v: [T, Hkv, Dv]. Query head h reads K/V head
            h // (Hq // Hkv).
        softmax_scale: factor of the scores; None: 1 / sqrt(Dqk).
        workers: threads to compute with; None: OMP_NUM_THREADS if set, else the CPUs this process may use. The result
            does not depend on it.

    Returns:
        out [T, Hq, Dv] and lse [Hq, T] (natural logarithm): float64 if any input is, else float32.

    Raises:
        SpecError: shape, dtype, heads, softmax_scale; int32_overflow for a layout beyond int32.

    [A3] [A4] [A5] [N3]
    """
    scale = check_attention_inputs(q, k, v, layout.total_tokens, layout.total_tokens, softmax_scale)
    return _forward(q, k, v, StepMetadata.of_layout(layout), mask, scale, workers)


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    layout: PackedLayout,
    mask: AttentionMask,
    softmax_scale: float | None = None,
    *,
    workers: int | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of `attention_forward`, given its own `out` and `lse`; the same bits on every call.

    Args:
        dout, out: [T, Hq, Dv]. lse: [Hq, T]. The others as in the forward.

    Returns:
        dq, dk, dv in the shapes of q, k, v; float64 if any input is, else float32.

    Raises:
        SpecError: shape, dtype, heads, softmax_scale; int32_overflow for a layout beyond int32.

    [B1] [B2] [B3] [N3]
    """
    scale = check_attention_inputs(q, k, v, layout.total_tokens, layout.total_tokens, softmax_scale)
    check_backward_inputs(dout, q, v, out, lse)
    return _backward(dout, q, k, v, out, lse, StepMetadata.of_layout(layout), mask, scale, workers)


def varlen_attention_forward(
    q: Any,
    k: Any,
    v: Any,
    step: StepMetadata,
    mask: AttentionMask,
    softmax_scale: float | None = None,
    *,
    workers: int | None = None,
) -> tuple[Array, Array]:
    """Attention of one step's query buffer to gathered K/V, from offsets alone, aligned to the bottom right.

    Args:
        q: [Tq, Hq, Dqk]. k: [Tk, Hkv, Dqk]. v: [Tk, Hkv, Dv]; Tq and Tk reach at least to the last storage offset.
        workers: as in `attention_forward`.

    Returns:
        out [Tq, Hq, Dv] and lse [Hq, Tq], float64 if any input is, else float32; rows that no document claims are
        padding.

    Raises:
        SpecError: shape, dtype, heads, softmax_scale. [A3] [A4] [A5] [N3]
    """
    scale = check_attention_inputs(q, k, v, *step_rows_needed(step), softmax_scale, exact=False)
    return _forward(q, k, v, step, mask, scale, workers)


def varlen_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    step: StepMetadata,
    mask: AttentionMask,
    softmax_scale: float | None = None,
    *,
    workers: int | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of `varlen_attention_forward`; dk and dv are this step's contributions, to be summed over steps and ranks.

    Raises:
        SpecError: shape, dtype, heads, softmax_scale. [B1] [B2] [B3] [N3]
    """
    scale = check_attention_inputs(q, k, v, *step_rows_needed(step), softmax_scale, exact=False)
    check_backward_inputs(dout, q, v, out, lse)
    return _backward(dout, q, k, v, out, lse, step, mask, scale, workers)


@dataclass(frozen=True, eq=False)
class _Task:
    """Documents of one shape, and the K/V heads `[heads]` of them: what one worker computes without asking others.

    `q_starts`, `k_starts` [n]: the row of each document's first query and of its first key. Query i of a document sees
    its keys `[first[i], last[i])`, at least one of them.
    """

    q_starts: IntArray
    k_starts: IntArray
    heads: slice
    first: IntArray
    last: IntArray

    @property
    def batch(self) -> int:
        return len(self.q_starts) * (self.heads.stop - self.heads.start)

    @property
    def work(self) -> int:
        return self.batch * int((self.last - self.first).sum())


def _tasks(step: StepMetadata, mask: AttentionMask, kv_heads: int, group: int) -> list[_Task]:
    """The whole step as independent tasks, largest first, so that no worker starts on a long one last."""
    shapes: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    lengths = zip(step.seqlens_q.tolist(), step.seqlens_kv.tolist(), step.first_query_positions.tolist(), strict=True)
    for d, shape in enumerate(lengths):
        shapes[shape].append(d)
    tasks = []
    for (num_q, num_k, first_query), documents in shapes.items():
        first, last = mask.key_range(first_query + np.arange(num_q), num_k)
        sees = np.flatnonzero(first < last)
        if len(sees) == 0:
            continue
        # Queries that see no key, and keys that no query sees, lie at the ends of a document.
        first, last = first[sees], last[sees]
        q_starts = step.cu_seqlens_q_padded[documents].astype(np.int64) + sees[0]
        k_starts = step.cu_seqlens_kv_padded[documents].astype(np.int64) + first[0]
        heads = min(kv_heads, max(1, TILE_ROWS // (group * len(sees))))
        many = max(1, TILE_ROWS // (group * len(sees) * heads))
        for n in range(0, len(documents), many):
            for h in range(0, kv_heads, heads):
                of_task = slice(h, min(h + heads, kv_heads))
                tasks.append(
                    _Task(q_starts[n : n + many], k_starts[n : n + many], of_task, first - first[0], last - first[0])
                )
    return sorted(tasks, key=lambda task: -task.work)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Keys, and the queries of a block that see any of them.

    The mask's right edge (`last`) crosses the queries `[queries.start, ahead)`, its left edge (`first`) the queries
    `[behind, queries.stop)`.
    """

    keys: slice
    queries: slice
    ahead: int
    behind: int


def _tiles(first: IntArray, last: IntArray) -> Iterator[_Tile]:
    """The tiles of a block of queries that see the keys `[first[i], last[i])`; both bounds never fall. [A5]"""
    start, stop = int(first[0]), int(last[-1])
    all_see, none_miss = int(first[-1]), int(last[0])
    if all_see >= none_miss:
        all_see = none_miss = stop
    cuts = [
        *range(start, all_see, EDGE_KEYS),
        *range(all_see, none_miss, TILE_KEYS),
        *range(none_miss, stop, EDGE_KEYS),
        stop,
    ]
    for j, j_end in pairwise(cuts):
        queries = slice(int(last.searchsorted(j, "right")), int(first.searchsorted(j_end, "left")))
        ahead, behind = int(last.searchsorted(j_end, "left")), int(first.searchsorted(j, "right"))
        yield _Tile(slice(j, j_end), queries, ahead, behind)


class _Scratch:
    """Arrays that one worker uses again and again: fresh ones cost more than the arithmetic on short documents."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._memory: dict[str, Array] = {}

    def __call__(self, name: str, *shape: int) -> Array:
        """An array of this shape with anything in it, valid until the name is asked for again."""
        size = int(np.prod(shape))
        if name not in self._memory or self._memory[name].size < size:
            self._memory[name] = np.empty(size, self.dtype)
        return self._memory[name][:size].reshape(shape)


def _forward(
    q: Any, k: Any, v: Any, step: StepMetadata, mask: AttentionMask, scale: float, workers: int | None
) -> tuple[Array, Array]:
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    dtype = _compute_dtype(q, k, v)
    num_rows, heads = q.shape[:2]
    kv_heads = k.shape[1]
    out = np.zeros((num_rows, heads, v.shape[2]), dtype)
    lse = np.full((heads, num_rows), -np.inf, dtype)
    grouped = [_grouped(x, kv_heads) for x in (q, k, v, out, lse.T[:, :, None])]

    def run(task: _Task, scratch: _Scratch) -> None:
        _forward_task(task, *grouped, scale, scratch)

    _run(run, _tasks(step, mask, kv_heads, heads // kv_heads), dtype, workers)
    return out, lse


def _backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    step: StepMetadata,
    mask: AttentionMask,
    scale: float,
    workers: int | None,
) -> tuple[Array, Array, Array]:
    dout, q, k, v, out, lse = (np.asarray(x) for x in (dout, q, k, v, out, lse))
    dtype = _compute_dtype(dout, q, k, v, out, lse)
    kv_heads = k.shape[1]
    gradients = np.zeros(q.shape, dtype), np.zeros(k.shape, dtype), np.zeros(v.shape, dtype)
    grouped = [_grouped(x, kv_heads) for x in (dout, q, k, v, out, lse.T[:, :, None], *gradients)]

    def run(task: _Task, scratch: _Scratch) -> None:
        _backward_task(task, *grouped, scale, scratch)

    _run(run, _tasks(step, mask, kv_heads, q.shape[1] // kv_heads), dtype, workers)
    return gradients


def _forward_task(
    task: _Task, q: Array, k: Array, v: Array, out: Array, lse: Array, scale: float, scratch: _Scratch
) -> None:
    """out and lse of one task; all arrays are [rows, Hkv, group, D], D = 1 for lse. [A3] [A4]"""
    batch, num_k, group, dim_v = task.batch, int(task.last[-1]), q.shape[2], v.shape[3]
    keys = _gather(k, task.k_starts, num_k, task.heads, scratch("k", batch, num_k, k.shape[3]))
    values = _gather(v, task.k_starts, num_k, task.heads, scratch("v", batch, num_k, dim_v + 1), last_column=1)
    for block in _blocks(task, group):
        first, last = task.first[block], task.last[block]
        rows = len(first) * group
        starts = task.q_starts + block.start
        queries = _gather(q, starts, len(first), task.heads, scratch("q", batch, rows, q.shape[3]))
        queries *= scale
        largest = scratch("m", batch, rows, 1)
        largest.fill(-np.inf)
        total = scratch("acc", batch, rows, dim_v + 1)  # the last column sums the exponentials
        total.fill(0)
        for tile in _tiles(first, last):
            at = slice(tile.queries.start * group, tile.queries.stop * group)
            s = _scores(queries, keys, first, last, tile, group, scratch)
            m = np.maximum(largest[:, at], s.max(axis=2, keepdims=True))
            s -= m
            np.exp(s, out=s)
            total[:, at] *= np.exp(largest[:, at] - m)
            total[:, at] += np.matmul(s, values[:, tile.keys], out=scratch("pv", *s.shape[:2], dim_v + 1))
            largest[:, at] = m
        sums = total[:, :, dim_v:]
        total[:, :, :dim_v] /= sums
        _scatter(total[:, :, :dim_v], out, starts, task.heads)
        _scatter(largest + np.log(sums), lse, starts, task.heads)


def _backward_task(
    task: _Task,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    scale: float,
    scratch: _Scratch,
) -> None:
    """dq, dk and dv of one task; all arrays are [rows, Hkv, group, D], D = 1 for lse. [B1] [B2]"""
    batch, num_k, group, dim, dim_v = task.batch, int(task.last[-1]), q.shape[2], k.shape[3], v.shape[3]
    keys = _gather(k, task.k_starts, num_k, task.heads, scratch("k", batch, num_k, dim))
    values = _gather(v, task.k_starts, num_k, task.heads, scratch("v", batch, num_k, dim_v + 1), last_column=1)
    dkeys, dvalues = scratch("dk", batch, num_k, dim), scratch("dv", batch, num_k, dim_v)
    dkeys.fill(0)
    dvalues.fill(0)
    for block in _blocks(task, group):
        first, last = task.first[block], task.last[block]
        rows = len(first) * group
        starts = task.q_starts + block.start
        queries = _gather(q, starts, len(first), task.heads, scratch("q", batch, rows, dim))
        queries *= scale
        logsum = _gather(lse, starts, len(first), task.heads, scratch("lse", batch, rows, 1))
        # dp - delta is one product: delta is the last column of dout, and that of the values is 1.
        grads = _gather(dout, starts, len(first), task.heads, scratch("dout", batch, rows, dim_v + 1))
        outs = _gather(out, starts, len(first), task.heads, scratch("out", batch, rows, dim_v))
        np.negative(np.vecdot(grads[:, :, :dim_v], outs), out=grads[:, :, dim_v])
        dqueries = scratch("dq", batch, rows, dim)
        dqueries.fill(0)
        # s - lse is never above 0, except by the rounding of an lse so large that it is known to no better than 1.
        coarse = np.abs(logsum).max() * np.finfo(scratch.dtype).eps > 1
        for tile in _tiles(first, last):
            at = slice(tile.queries.start * group, tile.queries.stop * group)
            width = tile.keys.stop - tile.keys.start
            p = _scores(queries, keys, first, last, tile, group, scratch)
            p -= logsum[:, at]
            if coarse:
                np.minimum(p, 0, out=p)
            np.exp(p, out=p)
            dvalues[:, tile.keys] += np.matmul(
                p.swapaxes(1, 2), grads[:, at, :dim_v], out=scratch("dv tile", batch, width, dim_v)
            )
            ds = np.matmul(grads[:, at], values[:, tile.keys].swapaxes(1, 2), out=scratch("ds", *p.shape))
            ds *= p
            dqueries[:, at] += np.matmul(ds, keys[:, tile.keys], out=scratch("dq tile", *p.shape[:2], dim))
            dkeys[:, tile.keys] += np.matmul(
                ds.swapaxes(1, 2), queries[:, at], out=scratch("dk tile", batch, width, dim)
            )
        dqueries *= scale
        _scatter(dqueries, dq, starts, task.heads)
    _scatter(dkeys, dk, task.k_starts, task.heads)  # the queries carried the scale
    _scatter(dvalues, dv, task.k_starts, task.heads)


def _blocks(task: _Task, group: int) -> Iterator[slice]:
    """The queries of each document of a task, so many at a time that the group's heads of them fill a tile's rows."""
    size = max(1, TILE_ROWS // group)
    for i in range(0, len(task.first), size):
        yield slice(i, min(i + size, len(task.first)))


def _scores(
    queries: Array, keys: Array, first: IntArray, last: IntArray, tile: _Tile, group: int, scratch: _Scratch
) -> Array:
    """Scores [batch, rows, keys] of a tile, -inf where the mask hides the key. [A5]"""
    i, i_end, j, j_end = tile.queries.start, tile.queries.stop, tile.keys.start, tile.keys.stop
    out = scratch("s", len(queries), (i_end - i) * group, j_end - j)
    s = np.matmul(queries[:, i * group : i_end * group], keys[:, j:j_end].swapaxes(1, 2), out=out)
    position = np.arange(j, j_end)
    by_query = s.reshape(len(s), i_end - i, group, j_end - j)
    if tile.ahead > i:
        hidden = position >= last[i : tile.ahead, None]
        np.copyto(by_query[:, : tile.ahead - i], -np.inf, where=hidden[:, None])
    if tile.behind < i_end:
        hidden = position < first[tile.behind : i_end, None]
        np.copyto(by_query[:, tile.behind - i :], -np.inf, where=hidden[:, None])
    return s


def _compute_dtype(*arrays: Array) -> np.dtype[Any]:
    return np.dtype(np.float64 if any(x.dtype.itemsize >= 8 for x in arrays) else np.float32)


def _grouped(x: Array, kv_heads: int) -> Array:
    """A view of x [rows, heads, D] as [rows, Hkv, group, D]."""
    return x.reshape(len(x), kv_heads, x.shape[1] // kv_heads, x.shape[2])


def _gather(
    x: Array, starts: IntArray, length: int, heads: slice, into: Array, last_column: float | None = None
) -> Array:
    """Copy the rows `[start, start + length)` of x [rows, Hkv, group, D] into `into` [batch, length * group, D or D + 1].

    Real rows alone are ever read. A batch runs over documents, then heads.
    """
    _, _, group, dim = x.shape
    by_document = into[:, :, :dim].reshape(len(starts), -1, length, group, dim)
    for document, start in zip(by_document, starts.tolist(), strict=True):
        document[...] = x[start : start + length, heads].swapaxes(0, 1)
    if last_column is not None:
        into[:, :, dim] = last_column
    return into


def _scatter(block: Array, into: Array, starts: IntArray, heads: slice) -> None:
    """The inverse of `_gather`: write `block` [batch, length * group, D] to rows of `into` [rows, Hkv, group, D]."""
    group, dim = into.shape[2:]
    by_document = block.reshape(len(starts), -1, block.shape[1] // group, group, dim)
    for document, start in zip(by_document, starts.tolist(), strict=True):
        into[start : start + document.shape[1], heads] = document.swapaxes(0, 1)


def _run(run: Callable[[_Task, _Scratch], None], tasks: list[_Task], dtype: np.dtype[Any], workers: int | None) -> None:
    """Run every task, on threads that take the next one as they finish: the order in time changes no result. [B3]"""
    wanted = default_workers() if workers is None else checked_int(workers, "workers", "usage", minimum=1)
    waiting = deque(tasks)

    def work() -> None:
        scratch = _Scratch(dtype)
        with np.errstate(all="ignore"):  # exponentials underflow, and huge scores overflow to what they should
            while True:
                try:
                    task = waiting.popleft()
                except IndexError:
                    return
                run(task, scratch)

    with _one_blas_thread() as limited:
        threads = min(wanted, len(tasks)) if limited else 1
        if threads <= 1:
            work()
            return
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(work) for _ in range(threads)]:
                done.result()


def default_workers() -> int:
    """OMP_NUM_THREADS if it is a positive number, else the CPUs that this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_blas_lock = threading.Lock()
_blas_users = 0
_blas_limit: Any = None


@cache
def _blas_controller() -> Any:
    """What sets the threads of the BLAS behind NumPy; None without threadpoolctl."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController()


@contextmanager
def _one_blas_thread() -> Iterator[bool]:
    """Hold BLAS at one thread a call; yields whether that could be done.

    The limit is one for the whole process, and ranks may be threads of one: the first in sets it, the last out restores
    what was.
    """
    global _blas_users, _blas_limit
    controller = _blas_controller()
    if controller is None:
        yield False
        return
    with _blas_lock:
        if _blas_users == 0:
            _blas_limit = controller.limit(limits=1, user_api="blas")
        _blas_users += 1
    try:
        yield True
    finally:
        with _blas_lock:
            _blas_users -= 1
            if _blas_users == 0:
                _blas_limit.restore_original_limits()
                _blas_limit = None
