"""Attention over packed documents in memory linear in T: the results of `attention`, fast.

Defines `attention_forward`, `attention_backward`, `varlen_attention_forward` and `varlen_attention_backward`. Beyond
its results it needs copies of one K/V head of one document, and tiles of scores, for every worker.

**Forward: online softmax** (Milakov & Gimelshein 2018; Rabe & Staats 2021; Dao et al. 2022, FlashAttention). A block of
queries walks over tiles of keys. Every query carries a reference score r and two sums over the keys so far:

    l = sum_j exp(s_j - r)        acc = sum_j exp(s_j - r) v_j        so that out = acc / l and lse = r + log l

r is the largest score of the query's first tile. Where a later tile passes it by more than HEADROOM, r becomes the
largest score there, and both sums are scaled by exp(r_old - r). So no exponential overflows, and none is smaller than
with the true maximum. (FlashAttention rescales at every new maximum; FlashAttention-4 seldom, as here.) Subtracting r
costs nothing: it rides along in the matrix product, as a column of the queries that holds -r and one of the keys, 1.

**Backward: recomputation** (Dao et al. 2023, FlashAttention-2, algorithm 2). Probabilities are not stored but computed
again, tile by tile, from the saved lse: p = exp(s - lse). The formulas are those of `attention`.

**Tiles.** The keys that a query sees are neighbours, `[first, last)`, and neither bound falls from one query to the
next. So it is known beforehand which queries of a block see any key of a tile, and which see all. Tiles are wide where
every query sees every key, narrow where the mask's edge passes; queries that see nothing of a tile are left out, and
only those that the edge crosses are masked.

**Groups and batches.** The query heads that read one K/V head are rows of one matrix product, in the order of q itself:
row `query * group + head`. Documents of one shape, and the K/V heads of a short document, form a batch: one NumPy call,
but a matrix product each, so that none touches another's numbers.
"""

import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from refimpl.attention import Array, check_attention_inputs, check_backward_inputs, step_rows_needed
from refimpl.layout import IntArray, PackedLayout, checked_int
from refimpl.mask import AttentionMask
from refimpl.metadata import StepMetadata

TILE_ROWS = 1024
"""Rows of scores at a time: queries of a block times heads of a group, or of all documents in a batch."""
TILE_KEYS = 384
"""Keys of a tile that no edge of the mask crosses."""
EDGE_KEYS = 64
"""Keys of a tile that an edge may cross: few, because what the edge hides is computed in vain."""
HEADROOM = 8.0
"""How far scores may pass the reference: exp(8) is 3000, and float32 holds sums of 10**30 such terms."""


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
        workers: threads to compute with; None: as many as `default_workers` says. No result depends on it.

    Returns:
        out [T, Hq, Dv] and lse [Hq, T] (natural logarithm): float64 if any input is, else float32.

    Raises:
        SpecError: shape, dtype, heads, softmax_scale; int32_overflow for a layout beyond int32; usage for workers.

    [A3] [A4] [A5] [N3]
    """
    check_attention_inputs(q, k, v, layout.total_tokens, layout.total_tokens, softmax_scale)
    step = StepMetadata.of_layout(layout)
    return varlen_attention_forward(q, k, v, step, mask, softmax_scale, workers=workers)


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
        dq, dk, dv in the shapes of q, k, v: float64 if any input is, else float32.

    Raises:
        SpecError: those of the forward.

    [B1] [B2] [B3] [N3]
    """
    check_attention_inputs(q, k, v, layout.total_tokens, layout.total_tokens, softmax_scale)
    step = StepMetadata.of_layout(layout)
    return varlen_attention_backward(dout, q, k, v, out, lse, step, mask, softmax_scale, workers=workers)


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

    Returns:
        out [Tq, Hq, Dv] and lse [Hq, Tq], float64 if any input is, else float32; rows that no document claims are
        padding.

    Raises:
        SpecError: shape, dtype, heads, softmax_scale; usage for workers. [A3] [A4] [A5] [N3]
    """
    scale = check_attention_inputs(q, k, v, *step_rows_needed(step), softmax_scale, exact=False)
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    dtype = _compute_dtype(q, k, v)
    (num_rows, heads, _), kv_heads = q.shape, k.shape[1]
    out, lse = np.zeros((num_rows, heads, v.shape[2]), dtype), np.full((heads, num_rows), -np.inf, dtype)
    views = [_grouped(x, kv_heads) for x in (q, k, v, out, lse.T[:, :, None])]

    def compute(task: _Task, scratch: _Scratch) -> None:
        _forward_task(task, scale, scratch, *views)

    _run(compute, _tasks(step, mask, kv_heads, heads // kv_heads), dtype, workers)
    return out, lse


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
    """Gradients of `varlen_attention_forward`; dk and dv are this step's share, to be summed over steps and ranks.

    Raises:
        SpecError: those of the forward. [B1] [B2] [B3] [N3]
    """
    scale = check_attention_inputs(q, k, v, *step_rows_needed(step), softmax_scale, exact=False)
    check_backward_inputs(dout, q, v, out, lse)
    dout, q, k, v, out, lse = (np.asarray(x) for x in (dout, q, k, v, out, lse))
    dtype, kv_heads = _compute_dtype(dout, q, k, v, out, lse), k.shape[1]
    gradients = np.zeros(q.shape, dtype), np.zeros(k.shape, dtype), np.zeros(v.shape, dtype)
    views = [_grouped(x, kv_heads) for x in (dout, q, k, v, out, lse.T[:, :, None], *gradients)]

    def compute(task: _Task, scratch: _Scratch) -> None:
        _backward_task(task, scale, scratch, *views)

    _run(compute, _tasks(step, mask, kv_heads, q.shape[1] // kv_heads), dtype, workers)
    return gradients


def default_workers() -> int:
    """OMP_NUM_THREADS if that is a positive number, else the CPUs that this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, eq=False)
class _Task:
    """Documents of one shape, and some K/V heads of them: what one worker computes without asking others.

    `q_starts`, `k_starts` [n] are the rows of each document's first query and first key. Query i of a document sees its
    keys `[first[i], last[i])`, at least one.
    """

    q_starts: IntArray
    k_starts: IntArray
    heads: slice
    first: IntArray
    last: IntArray

    @property
    def batch(self) -> int:
        """Matrix products that a NumPy call makes at once: over documents, then heads."""
        return len(self.q_starts) * int(self.heads.stop - self.heads.start)

    @property
    def num_keys(self) -> int:
        """Keys of each document that any query sees."""
        return int(self.last[-1])


def _tasks(step: StepMetadata, mask: AttentionMask, kv_heads: int, group: int) -> list[_Task]:
    """A whole step, as tasks that share no row of a result; the largest first, so that none is left for the end."""
    shapes = defaultdict(list)
    lengths = (step.seqlens_q, step.seqlens_kv, step.first_query_positions)
    for d, shape in enumerate(zip(*(x.tolist() for x in lengths), strict=True)):
        shapes[shape].append(d)
    tasks = []
    for (num_q, num_k, first_query), documents in shapes.items():
        first, last = mask.key_range(first_query + np.arange(num_q), num_k)
        # Queries that see no key lie at the ends of a document, and so do keys that no query sees: leave both out.
        sees = np.flatnonzero(first < last)
        if len(sees) == 0:
            continue
        first, last = first[sees], last[sees]
        q_starts = step.cu_seqlens_q_padded[documents].astype(np.int64) + sees[0]
        k_starts = step.cu_seqlens_kv_padded[documents].astype(np.int64) + first[0]
        first, last = first - first[0], last - first[0]
        fit = max(1, TILE_ROWS // max(group * len(first), int(last[-1])))
        heads = min(fit, kv_heads)
        for n in range(0, len(documents), fit // heads):
            members = slice(n, n + fit // heads)
            for h in range(0, kv_heads, heads):
                some = slice(h, min(h + heads, kv_heads))
                tasks.append(_Task(q_starts[members], k_starts[members], some, first, last))
    return sorted(tasks, key=lambda task: -task.batch * int((task.last - task.first).sum()))


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some keys, and the queries of a block that see any of them.

    `last` cuts the keys short for the queries `[queries.start, ahead)`, `first` for `[behind, queries.stop)`.
    """

    keys: slice
    queries: slice
    ahead: int
    behind: int


def _tiles(first: IntArray, last: IntArray) -> Iterator[_Tile]:
    """The tiles of a block of queries that see the keys `[first[i], last[i])`, keys ascending."""
    start, stop = int(first[0]), int(last[-1])
    inner, outer = int(first[-1]), int(last[0])  # every query sees every key between
    if inner >= outer:
        inner = outer = stop
    edges = *range(start, inner, EDGE_KEYS), *range(inner, outer, TILE_KEYS), *range(outer, stop, EDGE_KEYS), stop
    begins, ends = edges[:-1], edges[1:]
    bounds = last.searchsorted(begins, "right"), first.searchsorted(ends, "left"), last.searchsorted(ends, "left")
    for keys, *queries, ahead, behind in zip(
        pairwise(edges), *(x.tolist() for x in (*bounds, first.searchsorted(begins, "right"))), strict=True
    ):
        yield _Tile(slice(*keys), slice(*queries), ahead, behind)


class _Scratch:
    """Arrays that one worker uses again and again: on short documents, fresh ones cost more than the arithmetic."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._memory: dict[str, Array] = {}

    def __call__(self, name: str, *shape: int) -> Array:
        """An array of this shape with anything in it, good until the name is asked for again."""
        size = prod(shape)
        if name not in self._memory or self._memory[name].size < size:
            self._memory[name] = np.empty(size, self.dtype)
        return self._memory[name][:size].reshape(shape)


def _forward_task(
    task: _Task, scale: float, scratch: _Scratch, q: Array, k: Array, v: Array, out: Array, lse: Array
) -> None:
    """out and lse of one task; all arrays are [rows, Hkv, group, D], D = 1 for lse. [A3] [A5]"""
    batch, group, dim, dim_v = task.batch, q.shape[2], k.shape[3], v.shape[3]
    keys, values = _gather_keys(task, scale, scratch, k, v)
    for block in _blocks(task, group):
        first, last = task.first[block], task.last[block]
        num_q = len(first)
        starts = task.q_starts + block.start
        queries = _gather(q, starts, num_q, task.heads, scratch("q", batch, num_q * group, dim + 1))
        minus_r = queries[:, :, dim:]
        minus_r.fill(0)
        sums = scratch("sums", batch, num_q * group, dim_v + 1)  # acc, and l in the last column
        sums.fill(0)
        begun = 0
        for tile in _tiles(first, last):
            at = slice(tile.queries.start * group, tile.queries.stop * group)
            s = _scores(queries, keys, first, last, tile, scratch)
            if at.stop > begun or not s.max() <= HEADROOM:
                rise = s.max(axis=2, keepdims=True)
                of_begun = rise[:, : max(0, begun - at.start)]
                of_begun[~(of_begun > HEADROOM)] = 0
                begun = at.stop
                s -= rise
                minus_r[:, at] -= rise
                sums[:, at] *= np.exp(np.minimum(-rise, 0))  # a first r may be below 0; its sums are 0
            np.exp(s, out=s)
            sums[:, at] += np.matmul(s, values[:, tile.keys], out=scratch("product", *s.shape[:2], dim_v + 1))
        acc, total = sums[:, :, :dim_v], sums[:, :, dim_v:]
        _scatter(np.divide(acc, total, out=scratch("out", *acc.shape)), out, starts, task.heads)
        _scatter(np.log(total) - minus_r, lse, starts, task.heads)


def _backward_task(
    task: _Task,
    scale: float,
    scratch: _Scratch,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
) -> None:
    """dq, dk and dv of one task; all arrays are [rows, Hkv, group, D], D = 1 for lse. [B1] [B2] [B3]"""
    batch, group, dim, dim_v = task.batch, q.shape[2], k.shape[3], v.shape[3]
    keys, values = _gather_keys(task, scale, scratch, k, v)
    dkeys, dvalues = scratch("dk", batch, task.num_keys, dim), scratch("dv", batch, task.num_keys, dim_v)
    dkeys.fill(0)
    dvalues.fill(0)
    for block in _blocks(task, group):
        first, last = task.first[block], task.last[block]
        num_q, rows = len(first), len(first) * group
        starts = task.q_starts + block.start
        queries = _gather(q, starts, num_q, task.heads, scratch("q", batch, rows, dim + 1))
        logsum = _gather(lse, starts, num_q, task.heads, scratch("lse", batch, rows, 1))
        np.negative(logsum, out=queries[:, :, dim:])
        # The same trick again: with -delta beside dout, and 1 beside the values, one product gives dp - delta.
        douts = _gather(dout, starts, num_q, task.heads, scratch("dout", batch, rows, dim_v + 1))
        outs = _gather(out, starts, num_q, task.heads, scratch("out", batch, rows, dim_v))
        np.negative(np.vecdot(douts[:, :, :dim_v], outs), out=douts[:, :, dim_v])
        dqueries = scratch("dq", batch, rows, dim)
        dqueries.fill(0)
        # Rounding an lse as large as this moves p by a factor of e or more. Let a score so close count as reached.
        # Such queries alone are treated so: a document changes no bit of another in its batch.
        rounding = np.abs(logsum) * np.finfo(scratch.dtype).eps
        is_coarse = rounding > 1
        any_coarse = bool(is_coarse.any())
        if any_coarse:
            queries[:, :, dim:][is_coarse] = 0
            logsum = np.where(is_coarse, logsum - 4 * rounding, 0)
        for tile in _tiles(first, last):
            at = slice(tile.queries.start * group, tile.queries.stop * group)
            p = _scores(queries, keys, first, last, tile, scratch)
            if any_coarse:
                p -= logsum[:, at]
                np.minimum(p, 0, out=p, where=is_coarse[:, at])
            np.exp(p, out=p)
            width = p.shape[2]
            dvalues[:, tile.keys] += np.matmul(
                p.swapaxes(1, 2), douts[:, at, :dim_v], out=scratch("dv tile", batch, width, dim_v)
            )
            ds = np.matmul(douts[:, at], values[:, tile.keys].swapaxes(1, 2), out=scratch("ds", *p.shape))
            ds *= p
            dqueries[:, at] += np.matmul(ds, keys[:, tile.keys, :dim], out=scratch("dq tile", *p.shape[:2], dim))
            dkeys[:, tile.keys] += np.matmul(
                ds.swapaxes(1, 2), queries[:, at, :dim], out=scratch("dk tile", batch, width, dim)
            )
        _scatter(dqueries, dq, starts, task.heads)  # scaled already: the keys carry the scale
    dkeys *= scale
    _scatter(dkeys, dk, task.k_starts, task.heads)
    _scatter(dvalues, dv, task.k_starts, task.heads)


def _blocks(task: _Task, group: int) -> Iterator[slice]:
    """The queries of each document of a task, so many at a time that with their heads they fill a tile's rows."""
    size = max(1, TILE_ROWS // group)
    for i in range(0, len(task.first), size):
        yield slice(i, min(i + size, len(task.first)))


def _scores(queries: Array, keys: Array, first: IntArray, last: IntArray, tile: _Tile, scratch: _Scratch) -> Array:
    """Scores [batch, rows, keys] of a tile, -inf where the mask hides the key."""
    group = queries.shape[1] // len(first)
    begin, end = tile.queries.start, tile.queries.stop
    rows, columns = queries[:, begin * group : end * group], keys[:, tile.keys]
    s = np.matmul(rows, columns.swapaxes(1, 2), out=scratch("s", *rows.shape[:2], columns.shape[1]))
    by_query = s.reshape(len(s), end - begin, group, -1)
    position = np.arange(tile.keys.start, tile.keys.stop)
    if tile.ahead > begin:
        hidden = position >= last[begin : tile.ahead, None]
        np.copyto(by_query[:, : tile.ahead - begin], -np.inf, where=hidden[:, None])
    if tile.behind < end:
        hidden = position < first[tile.behind : end, None]
        np.copyto(by_query[:, tile.behind - begin :], -np.inf, where=hidden[:, None])
    return s


def _compute_dtype(*arrays: Array) -> np.dtype[Any]:
    return np.dtype(np.float64 if any(x.dtype.itemsize >= 8 for x in arrays) else np.float32)


def _grouped(x: Array, kv_heads: int) -> Array:
    """A view of x [rows, heads, D] as [rows, Hkv, group, D]."""
    return x.reshape(len(x), kv_heads, x.shape[1] // kv_heads, x.shape[2])


def _gather(x: Array, starts: IntArray, length: int, heads: slice, into: Array) -> Array:
    """Copy rows `[start, start + length)` of x [rows, Hkv, group, D] into `into` [batch, length * group, D or more].

    This alone reads inputs, and only rows of queries that see a key and of keys that are seen. [A5]
    """
    group, dim = x.shape[2:]
    by_document = into[:, :, :dim].reshape(len(starts), -1, length, group, dim)
    for document, start in zip(by_document, starts.tolist(), strict=True):
        document[...] = x[start : start + length, heads].swapaxes(0, 1)
    return into


def _gather_keys(task: _Task, scale: float, scratch: _Scratch, k: Array, v: Array) -> tuple[Array, Array]:
    """The task's keys, times scale, and its values; both [batch, num_keys, D + 1], 1 in the last column."""
    shape = task.batch, task.num_keys
    keys = _gather(k, task.k_starts, task.num_keys, task.heads, scratch("k", *shape, k.shape[3] + 1))
    keys *= scale
    values = _gather(v, task.k_starts, task.num_keys, task.heads, scratch("v", *shape, v.shape[3] + 1))
    keys[:, :, -1] = values[:, :, -1] = 1
    return keys, values


def _scatter(block: Array, into: Array, starts: IntArray, heads: slice) -> None:
    """The inverse of `_gather`: write block [batch, length * group, D] to rows of `into` [rows, Hkv, group, D]."""
    group, dim = into.shape[2:]
    by_document = block.reshape(len(starts), -1, block.shape[1] // group, group, dim)
    for document, start in zip(by_document, starts.tolist(), strict=True):
        into[start : start + document.shape[1], heads] = document.swapaxes(0, 1)


def _run(
    compute: Callable[[_Task, _Scratch], None], tasks: list[_Task], dtype: np.dtype[Any], workers: int | None
) -> None:
    """Compute every task, on threads that take the next one as they finish."""
    wanted = default_workers() if workers is None else checked_int(workers, "workers", "usage", minimum=1)
    waiting = deque(tasks)

    def work() -> None:
        scratch = _Scratch(dtype)
        with np.errstate(all="ignore"):  # exponentials underflow by design, and NaN among real rows is the caller's
            while True:
                try:
                    task = waiting.popleft()
                except IndexError:
                    return
                compute(task, scratch)

    with _one_blas_thread as limited:
        threads = min(wanted, len(tasks)) if limited else 1
        if threads <= 1:
            work()
            return
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(work) for _ in range(threads)]:
                done.result()


class _OneBlasThread:
    """Holds NumPy's BLAS at one thread a call while any caller is inside; entering says whether it is.

    The limit is one for the whole process, and ranks may be threads of one process. So the first in sets it, and the
    last out restores what was. Both do so from a thread that ends at once: to threadpoolctl 3.8 a thread that ever set
    a limit owns it while it lives, and the last out is not always the first in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: list[int] = []

    def __enter__(self) -> bool:
        libraries = _blas_libraries()
        with self._lock:
            if self._inside == 0:
                self._before = [library.num_threads for library in libraries]
                self._set([1] * len(libraries))
            self._inside += 1
        return len(libraries) > 0 and all(library.num_threads == 1 for library in libraries)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._set(self._before)

    def _set(self, threads: list[int]) -> None:
        def set_all() -> None:
            for library, number in zip(_blas_libraries(), threads, strict=True):
                library.set_num_threads(number)

        setter = threading.Thread(target=set_all)
        setter.start()
        setter.join()


_one_blas_thread = _OneBlasThread()


@cache
def _blas_libraries() -> list[Any]:
    """threadpoolctl's handles of the BLAS behind NumPy, and of any other that is loaded; none without threadpoolctl."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return []
    return list(ThreadpoolController().select(user_api="blas").lib_controllers)
