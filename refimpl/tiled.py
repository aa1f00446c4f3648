"""Attention over packed documents in memory linear in T: the results of `attention`, fast.

Defines `attention_forward`, `attention_backward`, `varlen_attention_forward` and `varlen_attention_backward`. Beyond
its results it needs copies of one K/V head of one document, and tiles of scores, for every worker.

**Forward: online softmax** (Milakov & Gimelshein 2018; Rabe & Staats 2021; Dao et al. 2022, FlashAttention). A block of
queries walks over tiles of keys. Scores s are in base 2: the keys carry scale * log2(e), because powers of 2 are the
cheaper ones. Every query carries a reference score r and two sums over the keys so far:

    l = sum_j 2^(s_j - r)        acc = sum_j 2^(s_j - r) v_j        so that out = acc / l and lse = (r + log2 l) log(2)

No score of a query passes |q| max_j |k_j| (Cauchy-Schwarz). Where that is at most CALM, r is 0, and no maximum is ever
looked for. Otherwise r is the largest score of the query's first tile; where a later tile passes it by more than
HEADROOM, r becomes the largest score there, and both sums are scaled by 2^(r_old - r). So no power overflows.
(FlashAttention rescales at every new maximum; FlashAttention-4 seldom, as here.) Subtracting r costs nothing: it rides
along in the matrix product, as a column of the queries that holds -r and one of the keys, 1.

**Backward: recomputation** (Dao et al. 2023, FlashAttention-2, algorithm 2). Probabilities are not stored but computed
again, tile by tile, from the saved lse: p = exp(s - lse), in base 2 too. The formulas are those of `attention`.

**Tiles.** The keys that a query sees are neighbours, `[first, last)`, and neither bound falls from one query to the
next. So it is known beforehand which queries of a block see any key of a tile, and which see all. Tiles are wide where
every query sees every key, narrow where the mask's edge passes; queries that see nothing of a tile are left out, and
only those that the edge crosses are masked.

**Groups and batches.** The query heads that read one K/V head are rows of one matrix product, in the order of q itself:
row `query * group + head`. Documents of one shape, and the K/V heads of a short document, form a batch: one NumPy call,
but a matrix product each, so that none touches another's numbers. Under a causal mask a document's last rows hide
nothing from its others, so short documents count as one shape if they are filled up to one multiple of FILL rows.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from refimpl.attention import Array, check_attention_inputs, check_backward_inputs, step_rows_needed
from refimpl.layout import IntArray, PackedLayout, checked_int
from refimpl.mask import AttentionMask
from refimpl.metadata import StepMetadata
from refimpl.threads import default_workers, run_on_threads

TILE_ROWS = 1024
"""Rows of scores at a time: queries of a block times heads of a group, or of all documents in a batch."""
TILE_KEYS = 384
"""Keys of a tile that no edge of the mask crosses."""
EDGE_KEYS = 128
"""Keys of a tile that an edge may cross: few, because what the edge hides is computed in vain."""
BATCH_SIZE = 2 * TILE_ROWS * TILE_KEYS
"""Scores of a batch of short documents."""
FILL = 8
"""Documents longer than this, if short, are filled up with rows of zeros to a multiple of it."""
SHORT = 256
"""Queries of a document that counts as short."""
HEADROOM = 12.0
"""How far scores may pass the reference: 2^12 is 4096, and float32 holds sums of 10**34 such terms."""
CALM = 30.0
"""Scores that need no reference: float32 holds 10**29 terms of 2^30, and keeps the digits of values down to 10**-29."""
LOG2_E = float(np.log2(np.e))


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


@dataclass(frozen=True, eq=False)
class _Task:
    """Documents of one shape, and some K/V heads of them: what one worker computes without asking others.

    `q_starts`, `k_starts` [n] are the rows of each document's first query and first key, `q_counts`, `k_counts` [n] how
    many there are of them; zeros fill them up. Query i of a document sees its keys `[first[i], last[i])`, at least one.
    """

    q_starts: IntArray
    q_counts: IntArray
    k_starts: IntArray
    k_counts: IntArray
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

    def rows(self, block: slice) -> tuple[IntArray, IntArray]:
        """Where the block's queries start in each document, and how many of them it has."""
        return self.q_starts + block.start, np.clip(self.q_counts - block.start, 0, block.stop - block.start)


def _tasks(step: StepMetadata, mask: AttentionMask, kv_heads: int, group: int) -> list[_Task]:
    """A whole step, as tasks that share no row of a result; the largest first, so that none is left for the end."""
    shapes = defaultdict(list)
    for d, shape in enumerate(zip(*(x.tolist() for x in _shapes(step, mask)), strict=True)):
        shapes[shape].append(d)
    tasks = []
    for (num_q, num_k, first_query), documents in shapes.items():
        first, last = mask.key_range(first_query + np.arange(num_q), num_k)
        # Queries that see no key lie at the ends of a document, and so do keys that no query sees: leave both out.
        sees = np.flatnonzero(first < last)
        if len(sees) == 0:
            continue
        first, last = first[sees], last[sees]
        q_counts = np.minimum(step.seqlens_q[documents] - sees[0], len(sees))
        q_starts = step.cu_seqlens_q_padded[documents].astype(np.int64) + sees[0]
        k_counts = np.minimum(step.seqlens_kv[documents], last[-1]) - first[0]
        k_starts = step.cu_seqlens_kv_padded[documents].astype(np.int64) + first[0]
        first, last = first - first[0], last - first[0]
        fit = max(1, BATCH_SIZE // (group * len(first) * max(int(last[-1]), EDGE_KEYS)))
        heads = min(fit, kv_heads)
        for n in range(0, len(documents), fit // heads):
            some = slice(n, n + fit // heads)
            ranges = q_starts[some], q_counts[some], k_starts[some], k_counts[some]
            some_heads = (slice(h, min(h + heads, kv_heads)) for h in range(0, kv_heads, heads))
            tasks += [_Task(*ranges, of_heads, first, last) for of_heads in some_heads]
    return sorted(tasks, key=lambda task: -task.batch * int((task.last - task.first).sum()))


def _shapes(step: StepMetadata, mask: AttentionMask) -> tuple[IntArray, IntArray, IntArray]:
    """Queries, keys, and the position of the first query of every document, short ones filled up where that is right.

    It is where a query sees no key behind itself: then rows behind the last one change nothing for those before.
    """
    num_q, num_k, first_query = step.seqlens_q, step.seqlens_kv, step.first_query_positions
    behind = first_query + num_q
    fills = (num_q > FILL) & (num_q <= SHORT) & (behind > 0) & (behind <= num_k) & (mask.right == 0)
    extra = np.where(fills, -num_q % FILL, 0)
    return num_q + extra, num_k + extra, first_query


class _Tile(NamedTuple):
    """Some keys, and the queries of a block that see any of them.

    `hidden` bool [cut, 1, keys] says which keys the queries `cut` do not see; all others see all. None: all see all.
    """

    keys: slice
    queries: slice
    cut: slice
    hidden: NDArray[np.bool_] | None


def _tiles(first: IntArray, last: IntArray) -> list[_Tile]:
    """The tiles of a block of queries that see the keys `[first[i], last[i])`, keys ascending."""
    start, stop = int(first[0]), int(last[-1])
    inner, outer = int(first[-1]), int(last[0])  # every query sees every key between
    if inner >= outer:
        inner = outer = stop
    everyone, nobody = slice(0, len(first)), slice(0, 0)
    between = pairwise([*range(inner, outer, TILE_KEYS), outer])
    whole = [_Tile(slice(*keys), everyone, nobody, None) for keys in between]
    return [*_edge(first, last, start, inner), *whole, *_edge(first, last, outer, stop)]


def _edge(first: IntArray, last: IntArray, begin: int, end: int) -> list[_Tile]:
    """The tiles of the keys `[begin, end)`, which not every query of the block sees."""
    if begin == end:
        return []
    tiles = _edge_tiles(*(np.clip(x - begin, 0, end - begin).tobytes() for x in (first, last)), EDGE_KEYS)
    return [tile._replace(keys=slice(begin + tile.keys.start, begin + tile.keys.stop)) for tile in tiles]


@lru_cache(maxsize=64)
def _edge_tiles(first: bytes, last: bytes, width: int) -> tuple[_Tile, ...]:
    """The same, keys counted from 0; `first` and `last` are int64, as bytes. Blocks of one shape share the tiles."""
    starts, stops = np.frombuffer(first, np.int64), np.frombuffer(last, np.int64)
    count = int(stops[-1])
    keys = np.arange(count)
    hidden = (keys < starts[:, None]) | (keys >= stops[:, None])
    tiles = []
    for begin in range(0, count, width):
        end = min(begin + width, count)
        queries = slice(int(stops.searchsorted(begin, "right")), int(starts.searchsorted(end)))
        of_tile = hidden[queries, begin:end]
        cut = np.flatnonzero(of_tile.any(axis=1))
        some = slice(int(cut[0]), int(cut[-1]) + 1) if len(cut) else slice(0, 0)
        tiles.append(_Tile(slice(begin, end), queries, some, of_tile[some, None].copy()))
    return tuple(tiles)


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
    longest_key = _squares(keys[:, :, :dim]).max(axis=1, keepdims=True)
    for block in _blocks(task, group):
        first, last = task.first[block], task.last[block]
        rows = task.rows(block)
        num_rows = len(first) * group
        queries = _gather(q, *rows, task.heads, scratch("q", batch, num_rows, dim + 1))
        minus_r = queries[:, :, dim:]
        minus_r.fill(0)
        sums = scratch("sums", batch, num_rows, dim_v + 1)  # acc, and l in the last column
        sums.fill(0)
        is_calm = _squares(queries[:, :, :dim]) * longest_key <= CALM**2
        all_calm, begun = bool(is_calm.all()), 0
        for tile in _tiles(first, last):
            at = slice(tile.queries.start * group, tile.queries.stop * group)
            s = _scores(queries, keys, tile, group, scratch)
            if not all_calm:
                _hide(s, -np.inf, tile, group)
            if not all_calm and (at.stop > begun or not s.max() <= HEADROOM):
                rise = s.max(axis=2, keepdims=True)
                of_begun = rise[:, : max(0, begun - at.start)]
                of_begun[~(of_begun > HEADROOM)] = 0
                rise[is_calm[:, at]] = 0
                begun = at.stop
                s -= rise
                minus_r[:, at] -= rise
                sums[:, at] *= np.exp2(np.minimum(-rise, 0))  # a first r may be below 0; its sums are 0
            np.exp2(s, out=s)
            _hide(s, 0, tile, group)  # now too: powers of -inf are slow
            sums[:, at] += np.matmul(s, values[:, tile.keys], out=scratch("product", *s.shape[:2], dim_v + 1))
        acc, total = sums[:, :, :dim_v], sums[:, :, dim_v:]
        _scatter(np.divide(acc, total, out=scratch("out", *acc.shape)), out, *rows, task.heads)
        _scatter((np.log2(total) - minus_r) / LOG2_E, lse, *rows, task.heads)


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
        rows = task.rows(block)
        num_rows = len(first) * group
        queries = _gather(q, *rows, task.heads, scratch("q", batch, num_rows, dim + 1))
        logsum = _gather(lse, *rows, task.heads, scratch("lse", batch, num_rows, 1))
        logsum *= LOG2_E
        np.negative(logsum, out=queries[:, :, dim:])
        # The same trick again: with -delta beside dout, and 1 beside the values, one product gives dp - delta.
        douts = _gather(dout, *rows, task.heads, scratch("dout", batch, num_rows, dim_v + 1))
        outs = _gather(out, *rows, task.heads, scratch("out", batch, num_rows, dim_v))
        np.negative(np.vecdot(douts[:, :, :dim_v], outs), out=douts[:, :, dim_v])
        dqueries = scratch("dq", batch, num_rows, dim)
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
            p = _scores(queries, keys, tile, group, scratch)
            if any_coarse:
                p -= logsum[:, at]
                np.minimum(p, 0, out=p, where=is_coarse[:, at])
            np.exp2(p, out=p)
            _hide(p, 0, tile, group)
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
        dqueries /= LOG2_E  # the keys carry scale * log2(e)
        _scatter(dqueries, dq, *rows, task.heads)
    dkeys *= scale
    _scatter(dkeys, dk, task.k_starts, task.k_counts, task.heads)
    _scatter(dvalues, dv, task.k_starts, task.k_counts, task.heads)


def _blocks(task: _Task, group: int) -> Iterator[slice]:
    """The queries of each document of a task, so many at a time that with their heads they fill a tile's rows."""
    size = max(1, TILE_ROWS // group)
    for i in range(0, len(task.first), size):
        yield slice(i, min(i + size, len(task.first)))


def _scores(queries: Array, keys: Array, tile: _Tile, group: int, scratch: _Scratch) -> Array:
    """Scores [batch, rows, keys] of a tile, of hidden keys too."""
    rows, columns = queries[:, tile.queries.start * group : tile.queries.stop * group], keys[:, tile.keys]
    return np.matmul(rows, columns.swapaxes(1, 2), out=scratch("s", *rows.shape[:2], columns.shape[1]))


def _hide(s: Array, value: float, tile: _Tile, group: int) -> None:
    """Write a value wherever the mask hides the key, into scores or probabilities [batch, rows, keys]."""
    if tile.hidden is not None:
        by_query = s.reshape(len(s), -1, group, s.shape[2])
        np.copyto(by_query[:, tile.cut], value, where=tile.hidden)


def _compute_dtype(*arrays: Array) -> np.dtype[Any]:
    return np.dtype(np.float64 if any(x.dtype.itemsize >= 8 for x in arrays) else np.float32)


def _grouped(x: Array, kv_heads: int) -> Array:
    """A view of x [rows, heads, D] as [rows, Hkv, group, D]."""
    return x.reshape(len(x), kv_heads, x.shape[1] // kv_heads, x.shape[2])


def _squares(x: Array) -> Array:
    """Squared lengths of the vectors of x [batch, rows, D]: [batch, rows]."""
    squares: Array = np.vecdot(x, x)
    return squares


def _gather(x: Array, starts: IntArray, counts: IntArray, heads: slice, into: Array) -> Array:
    """Copy rows `[start, start + count)` of x [rows, Hkv, group, D] into `into` [batch, length * group, D or more].

    Zeros fill what is left of a length. This alone reads inputs, and only rows of queries that see a key and of keys
    that are seen. [A5]
    """
    for document, start, count in zip(
        _by_document(into, len(starts), x), starts.tolist(), counts.tolist(), strict=True
    ):
        document[:, :count] = x[start : start + count, heads].swapaxes(0, 1)
        document[:, count:] = 0
    return into


def _gather_keys(task: _Task, scale: float, scratch: _Scratch, k: Array, v: Array) -> tuple[Array, Array]:
    """The task's keys, times scale * log2(e), and its values; both [batch, num_keys, D + 1], 1 in the last column."""
    shape, rows = (task.batch, task.num_keys), (task.k_starts, task.k_counts, task.heads)
    keys = _gather(k, *rows, scratch("k", *shape, k.shape[3] + 1))
    keys *= scale * LOG2_E
    values = _gather(v, *rows, scratch("v", *shape, v.shape[3] + 1))
    keys[:, :, -1] = values[:, :, -1] = 1
    return keys, values


def _scatter(block: Array, into: Array, starts: IntArray, counts: IntArray, heads: slice) -> None:
    """The inverse of `_gather`: write block [batch, length * group, D] to rows of `into` [rows, Hkv, group, D]."""
    documents = _by_document(block, len(starts), into)
    for document, start, count in zip(documents, starts.tolist(), counts.tolist(), strict=True):
        into[start : start + count, heads] = document[:, :count].swapaxes(0, 1)


def _by_document(block: Array, documents: int, x: Array) -> Array:
    """A view of block [batch, length * group, D or more] as [documents, heads, length, group, D], group and D of x."""
    group, dim = x.shape[2:]
    return block[:, :, :dim].reshape(documents, len(block) // documents, -1, group, dim)


def _run(
    compute: Callable[[_Task, _Scratch], None], tasks: list[_Task], dtype: np.dtype[Any], workers: int | None
) -> None:
    """Compute every task, on threads that take the next one as they finish."""
    wanted = default_workers() if workers is None else checked_int(workers, "workers", "usage", minimum=1)
    waiting = deque(tasks)

    def work() -> None:
        scratch = _Scratch(dtype)
        with np.errstate(all="ignore"):  # powers underflow by design, and NaN among real rows is the caller's
            while True:
                try:
                    task = waiting.popleft()
                except IndexError:
                    return
                compute(task, scratch)

    run_on_threads(work, min(wanted, len(tasks)))
