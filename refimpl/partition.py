"""Which rows of the buffer each context-parallel rank holds.

Defines `Policy`, `step_windows` (the whole difference between policies), `partition_indices`, `partition` and
`unpartition`, and what a data loader prepares before partitioning: position ids, labels, padding.

A policy hands every rank one or two *windows* on every document, one for each attention step: the physical rows
`[start[d], end[d])` of document d that this rank attends for in that step. The rows past the last offset are cut by the
same rule as the documents, so a window has n + 1 entries, the last for that tail. A rank's local buffer is the union of
its windows in buffer order. Everything else in the project, metadata included, is derived from the windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import SpecError
from refimpl.layout import IntArray, PackedLayout, checked_int, offsets_of

Array = NDArray[Any]


class Policy(StrEnum):
    """How rows are dealt to ranks. [P2] [P3] [P4]"""

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    PACKED_CONTIGUOUS = "packed_contiguous"
    PACKED_DUAL_CHUNK_SWAP = "packed_dual_chunk_swap"


@dataclass(frozen=True)
class Window:
    """Physical rows `[start[d], end[d])` of each document, and of the tail past the last offset: int64 [n + 1]."""

    start: IntArray
    end: IntArray


def as_policy(policy: Policy | str) -> Policy:
    """The policy of that name; SpecError `policy` lists the names there are."""
    try:
        return Policy(policy)
    except ValueError:
        names = ", ".join(Policy)
        raise SpecError("policy", f"unknown policy {str(policy)!r}: expected one of {names}") from None


def check_ranks(cp_size: int, cp_rank: int = 0) -> None:
    """cp_size is a positive integer and cp_rank one of its ranks; else SpecError `cp_size` or `cp_rank`."""
    checked_int(cp_size, "cp_size", "cp_size", minimum=1)
    checked_int(cp_rank, "cp_rank", "cp_rank")
    if not 0 <= cp_rank < cp_size:
        raise SpecError("cp_rank", f"cp_rank is {cp_rank}: expected 0 to {cp_size - 1} for cp_size {cp_size}")


@dataclass(frozen=True)
class Cut:
    """What a policy cuts evenly, each document or the whole buffer, and how many of the pieces a rank gets."""

    per_document: bool
    chunks_per_rank: int

    def mine(self, cp_size: int, cp_rank: int) -> tuple[int, ...]:
        """The chunks of one rank: r alone, or r and its mirror image, which evens out causal work."""
        mirror = 2 * cp_size - 1 - cp_rank
        return (cp_rank,) if self.chunks_per_rank == 1 else (cp_rank, mirror)


_CUTS = {
    Policy.DUAL_CHUNK_SWAP: Cut(per_document=True, chunks_per_rank=2),
    Policy.PACKED_CONTIGUOUS: Cut(per_document=False, chunks_per_rank=1),
    Policy.PACKED_DUAL_CHUNK_SWAP: Cut(per_document=False, chunks_per_rank=2),
}


def cut_of(policy: Policy | str) -> Cut:
    """How a policy cuts; SpecError `policy`."""
    return _CUTS[as_policy(policy)]


def step_windows(layout: PackedLayout, policy: Policy | str, cp_size: int, cp_rank: int) -> tuple[Window, ...]:
    """The windows of one rank, one for each attention step, earlier rows first.

    - dual_chunk_swap: every document is cut into 2 * cp chunks; rank r attends for chunk r, then for chunk
      2 * cp - 1 - r. (Transformer Engine `DUAL_CHUNK_SWAP`, "zigzag" per document.)
    - packed_contiguous: the buffer is cut into cp chunks, whatever the documents; rank r attends for chunk r.
      (Transformer Engine `NO_LOAD_BALANCE`.)
    - packed_dual_chunk_swap: the buffer is cut into 2 * cp chunks, dealt like those of one document.

    Raises:
        SpecError: policy, cp_size, cp_rank, not_divisible (with the smallest padding that would do).

    [P1] [P2] [P3] [P4] [P5]
    """
    check_divisible(layout, policy, cp_size)
    check_ranks(cp_size, cp_rank)
    cut = cut_of(policy)
    take = _document_chunk if cut.per_document else _buffer_chunk
    chunks = cut.chunks_per_rank * cp_size
    return tuple(take(layout, chunks, chunk) for chunk in cut.mine(cp_size, cp_rank))


def _document_chunk(layout: PackedLayout, chunks: int, chunk: int) -> Window:
    """Chunk `chunk` of every document cut into `chunks`."""
    start = _extents(layout)[:-1]
    size = np.diff(_extents(layout)) // chunks
    return Window(start + chunk * size, start + (chunk + 1) * size)


def _buffer_chunk(layout: PackedLayout, chunks: int, chunk: int) -> Window:
    """What chunk `chunk` of the buffer cut into `chunks` holds of every document."""
    size = layout.total_tokens // chunks
    clipped = np.clip(_extents(layout), chunk * size, (chunk + 1) * size)
    return Window(clipped[:-1], clipped[1:])


def _extents(layout: PackedLayout) -> IntArray:
    """`cu_seqlens_padded` with total_tokens behind it: the rows past the last offset as one more extent, [n + 2]."""
    return np.append(layout.cu_seqlens_padded, layout.total_tokens)


@dataclass(frozen=True)
class Padding:
    """The smallest padding that lets a policy cut a layout evenly.

    `document_rows` [n]: rows to add behind each document; `tail_rows`: rows to add at the end of the buffer.
    """

    document_rows: IntArray
    tail_rows: int

    @property
    def total(self) -> int:
        """Rows added in all; 0: the layout is divisible as it is."""
        return int(self.document_rows.sum()) + self.tail_rows


def padding_needed(layout: PackedLayout, policy: Policy | str, cp_size: int) -> Padding:
    """What must be added to `layout` before `policy` can cut it over `cp_size` ranks. [P6]"""
    check_ranks(cp_size)
    cut = cut_of(policy)
    chunks = cut.chunks_per_rank * cp_size
    if cut.per_document:
        rows = -np.diff(_extents(layout)) % chunks
        return Padding(rows[:-1], int(rows[-1]))
    return Padding(np.zeros(layout.num_documents, np.int64), -layout.total_tokens % chunks)


def padded_for(layout: PackedLayout, policy: Policy | str, cp_size: int) -> PackedLayout:
    """The same documents with the least padding that `policy` and `cp_size` need. [P6]"""
    padding = padding_needed(layout, policy, cp_size)
    return PackedLayout(
        layout.cu_seqlens,
        layout.cu_seqlens_padded + offsets_of(padding.document_rows),
        layout.total_tokens + padding.total,
    )


def check_divisible(layout: PackedLayout, policy: Policy | str, cp_size: int) -> None:
    """Refuse a layout that the policy cannot cut evenly, with SpecError `not_divisible`. [P6]"""
    padding = padding_needed(layout, policy, cp_size)
    if padding.total == 0:
        return
    policy = as_policy(policy)
    cut = cut_of(policy)
    chunks = cut.chunks_per_rank * cp_size
    total = layout.total_tokens
    short = np.flatnonzero(padding.document_rows)
    if not cut.per_document:
        needs = f"total_tokens divisible by {chunks}, not {total}"
        mend = f"add {padding.tail_rows} rows at the end (total_tokens={total + padding.tail_rows})"
    else:
        needs = f"every physical length divisible by {chunks}, but "
        if len(short):
            needs += f"document {short[0]} has {layout.seqlens_padded[short[0]]} rows"
            mend = f"add {padding.document_rows[short[0]]} there, {padding.total} in all"
        else:
            needs += f"{total - layout.cu_seqlens_padded[-1]} rows lie past the last offset"
            mend = f"add {padding.tail_rows} there"
        mend += f" (from_lengths(multiple_of={chunks}) or padded_for)"
    raise SpecError("not_divisible", f"{policy} at cp_size {cp_size} needs {needs}: {mend}")


def rank_order_is_sequence_order(policy: Policy | str) -> bool:
    """Whether the ranks' shards one behind the other are the buffer, so that gathered K/V need no reorder. [C1]"""
    cut = cut_of(policy)
    return not cut.per_document and cut.chunks_per_rank == 1


def window_indices(windows: Sequence[Window]) -> IntArray:
    """The physical rows of the windows, in buffer order: int64, as many as the windows hold.

    Windows of a policy never overlap and are ordered within each document, so taking them document by document is
    buffer order. Works in the memory of its result and the documents alone.
    """
    starts = np.stack([w.start for w in windows], axis=1).ravel()
    lengths = np.stack([w.end - w.start for w in windows], axis=1).ravel()
    filled = lengths > 0
    starts, lengths = starts[filled], lengths[filled]
    if len(starts) == 0:
        return np.zeros(0, np.int64)
    indices = np.ones(int(lengths.sum()), np.int64)  # Every step to the next row is 1, but from range to range,
    indices[0] = starts[0]
    indices[np.cumsum(lengths[:-1])] = starts[1:] - (starts[:-1] + lengths[:-1] - 1)  # where it is a jump.
    return np.cumsum(indices, out=indices)


def partition_indices(layout: PackedLayout, policy: Policy | str, cp_size: int, cp_rank: int) -> IntArray:
    """The physical rows that rank `cp_rank` holds, in the order it holds them: int64 [T / cp_size].

    The order is that of the buffer. Time and memory are O(T / cp_size + documents).

    Raises:
        SpecError: policy, cp_size, cp_rank, not_divisible. [P1] [P8] [P9]
    """
    return window_indices(step_windows(layout, policy, cp_size, cp_rank))


def inverse_indices(layout: PackedLayout, policy: Policy | str, cp_size: int) -> IntArray:
    """Where each physical row lies in the ranks' buffers, one behind the other: int64 [T].

    `concatenate(shards)[inverse_indices(...)]` is the buffer in sequence order. [P7]
    """
    check_divisible(layout, policy, cp_size)
    inverse = np.empty(layout.total_tokens, np.int64)
    rows = layout.total_tokens // cp_size
    for rank in range(cp_size):
        inverse[partition_indices(layout, policy, cp_size, rank)] = np.arange(rank * rows, (rank + 1) * rows)
    return inverse


def partition(x: Any, layout: PackedLayout, policy: Policy | str, cp_size: int, axis: int = 0) -> list[Array]:
    """Cut an array into the ranks' shards.

    Args:
        x: any array, of any dtype, whose `axis` has length T.
        axis: the token axis.

    Returns:
        cp_size arrays, their `axis` of length T / cp_size; copies.

    Raises:
        SpecError: shape, and those of `partition_indices`. [P1]
    """
    check_divisible(layout, policy, cp_size)
    x = np.asarray(x)
    check_axis(x, layout.total_tokens, axis, "x", "total_tokens")
    return [x.take(partition_indices(layout, policy, cp_size, rank), axis=axis) for rank in range(cp_size)]


def unpartition(shards: Sequence[Any], layout: PackedLayout, policy: Policy | str, axis: int = 0) -> Array:
    """Put the ranks' shards back into sequence order: the inverse of `partition`; cp_size is `len(shards)`.

    Raises:
        SpecError: shape, dtype (shards that differ), and those of `partition_indices`. [P7]
    """
    arrays = [np.asarray(shard) for shard in shards]
    check_shards(arrays, layout, policy, axis)
    axis %= arrays[0].ndim
    shape = list(arrays[0].shape)
    shape[axis] = layout.total_tokens
    whole = np.empty(shape, arrays[0].dtype)
    for rank, shard in enumerate(arrays):
        rows_of_rank = partition_indices(layout, policy, len(arrays), rank)
        whole[(slice(None),) * axis + (rows_of_rank,)] = shard
    return whole


def check_shards(shards: Sequence[Any], layout: PackedLayout, policy: Policy | str, axis: int) -> None:
    """Refuse arrays that are not the shards of one array; SpecError: see `unpartition`. [P7]"""
    check_divisible(layout, policy, len(shards))
    rows = layout.total_tokens // len(shards)
    for rank, shard in enumerate(shards):
        check_axis(shard, rows, axis, f"shards[{rank}]", "total_tokens / cp_size")
        if shard.shape != shards[0].shape or shard.dtype != shards[0].dtype:
            raise SpecError(
                "shape" if shard.shape != shards[0].shape else "dtype",
                f"shards[{rank}] is {shard.dtype}{list(shard.shape)} but shards[0] is "
                f"{shards[0].dtype}{list(shards[0].shape)}: all ranks hold alike shards",
            )


def check_axis(x: Any, length: int, axis: int, name: str, what: str) -> None:
    """Refuse, with SpecError `shape`, an array whose `axis` has another length."""
    checked_int(axis, "axis", "shape")
    if not -x.ndim <= axis < x.ndim or x.shape[axis] != length:
        raise SpecError("shape", f"{name} has shape {list(x.shape)}: expected {length} ({what}) along axis {axis}")


def position_ids(layout: PackedLayout) -> IntArray:
    """Positions for RoPE: restart in every document, run on through its padding; int64 [T], to be partitioned.

    [P10] [L6]
    """
    return layout.positions


def next_token_labels(ids: Any, layout: PackedLayout, ignore_index: int = -100) -> Array:
    """Labels for next-token prediction, shifted inside each document, to be partitioned like the ids.

    Shifting after partitioning would take a rank's last label from the wrong row, or lose it.

    Args:
        ids: integer [T] (or any trailing shape), token ids in buffer order.
        ignore_index: the label of padding rows and of each document's last real token.

    Raises:
        SpecError: shape, dtype. [L7] [P10]
    """
    ids = np.asarray(ids)
    check_axis(ids, layout.total_tokens, 0, "ids", "total_tokens")
    if ids.dtype.kind not in "iu":
        raise SpecError("dtype", f"ids has dtype {ids.dtype}: expected integers")
    if not np.iinfo(ids.dtype).min <= ignore_index <= np.iinfo(ids.dtype).max:
        raise SpecError("dtype", f"ignore_index {ignore_index} does not fit the dtype of ids, {ids.dtype}")
    labels: Array = np.full(ids.shape, ignore_index, ids.dtype)
    document = layout.document_ids
    has_next = np.flatnonzero((document[:-1] >= 0) & (document[:-1] == document[1:]))
    labels[has_next] = ids[has_next + 1]
    return labels


def pad_rows(x: Any, layout: PackedLayout, padded: PackedLayout, fill: Any) -> Array:
    """Move the real tokens of `layout` to where `padded` has them, and `fill` all other rows.

    The two layouts describe the same documents with different padding (documents of no tokens do not count); `padded`
    usually comes from `padded_for` or `from_lengths(multiple_of=...)`. Works for ids (fill 0), labels (fill -100) and
    tensors alike.

    Args:
        x: [T, ...] in the order of `layout`.

    Raises:
        SpecError: shape, offsets_count when the layouts do not hold the same documents. [P10]
    """
    x = np.asarray(x)
    check_axis(x, layout.total_tokens, 0, "x", "total_tokens")
    if not np.array_equal(layout.seqlens[layout.seqlens > 0], padded.seqlens[padded.seqlens > 0]):
        raise SpecError("offsets_count", "the two layouts do not hold the same documents: their real lengths differ")
    moved = np.full((padded.total_tokens, *x.shape[1:]), fill, dtype=x.dtype)
    moved[padded.document_ids >= 0] = x[layout.document_ids >= 0]
    return moved
