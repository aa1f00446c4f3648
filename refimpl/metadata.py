"""What one rank tells its attention kernel: offsets, lengths and alignment, one set for each attention step.

Defines `StepMetadata`, `RankMetadata`, `rank_metadata`, and the forms of the same facts that kernels take. All of it
follows from the windows of `partition.step_windows` by four formulas, the same for every policy.

For document d, with physical start s, real length n, and the step's window [a, b) on it:

    local queries     [clip(s, a, b), clip(s + n, a, b))            physical rows; padding never queries
    visible keys      min(n, max(0, b - s + right))                 from the document's first; n when right = -1
    storage           cumsum(b - a)                                 where the window lies in the step's query buffer
    first query       clip(s, a, b) - s                             its position; where there are queries and right = 0,
                                                                    visible keys - local queries: the bottom right
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import SpecError
from refimpl.layout import (
    IntArray,
    IntVectorLike,
    PackedLayout,
    check_real_fits_physical,
    checked_offsets,
    checked_vector,
    offsets_of,
)
from refimpl.mask import AttentionMask
from refimpl.partition import Policy, Window, as_policy, step_windows, window_indices

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class StepMetadata:
    """One call of a variable-length attention kernel, in the field's own names; all int32.

    Document d has `cu_seqlens_q[d + 1] - cu_seqlens_q[d]` queries, the first of them at row `cu_seqlens_q_padded[d]` of
    the step's query buffer, and `cu_seqlens_kv[d + 1] - cu_seqlens_kv[d]` keys, the first at row
    `cu_seqlens_kv_padded[d]` of the gathered K/V, which is in sequence order.

    `first_query` [n] is the position, counted in the document's keys, of its first query. It is the one fact beyond
    what kernels take. None means bottom right, (keys - queries): the last query sees the last key. Causal attention,
    with or without a window, and attention without a mask need no more. A non-causal window does: its keys may go on
    behind the last local query.

    [R2] [R3] [R4] [R5] [R6] [R7]
    """

    cu_seqlens_q: Int32Array
    cu_seqlens_q_padded: Int32Array
    cu_seqlens_kv: Int32Array
    cu_seqlens_kv_padded: Int32Array
    max_seqlen_q: int
    max_seqlen_kv: int
    first_query: Int32Array | None = None

    @classmethod
    def from_offsets(
        cls,
        cu_seqlens_q: IntVectorLike,
        cu_seqlens_kv: IntVectorLike,
        cu_seqlens_q_padded: IntVectorLike | None = None,
        cu_seqlens_kv_padded: IntVectorLike | None = None,
        first_query: IntVectorLike | None = None,
    ) -> "StepMetadata":
        """Check offsets that come from outside, and derive the maxima.

        Args:
            cu_seqlens_q, cu_seqlens_kv: int [n + 1], cumulative numbers of queries and of keys.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: int [n + 1], where they are stored; None: without gaps.
            first_query: int [n], see the class; None: bottom right.

        Raises:
            SpecError: those of PackedLayout, and int32_overflow. [R5] [R6] [R7]
        """
        q = checked_offsets(cu_seqlens_q, "cu_seqlens_q")
        kv = checked_offsets(cu_seqlens_kv, "cu_seqlens_kv")
        q_padded = q if cu_seqlens_q_padded is None else checked_offsets(cu_seqlens_q_padded, "cu_seqlens_q_padded")
        kv_padded = (
            kv if cu_seqlens_kv_padded is None else checked_offsets(cu_seqlens_kv_padded, "cu_seqlens_kv_padded")
        )
        if len(q) != len(kv):
            raise SpecError(
                "offsets_count", f"cu_seqlens_q has {len(q)} entries but cu_seqlens_kv has {len(kv)}: n + 1 each"
            )
        check_real_fits_physical(q, q_padded, "cu_seqlens_q", "cu_seqlens_q_padded")
        check_real_fits_physical(kv, kv_padded, "cu_seqlens_kv", "cu_seqlens_kv_padded")
        first = None if first_query is None else checked_vector(first_query, "first_query")
        if first is not None and len(first) != len(q) - 1:
            raise SpecError("offsets_count", f"first_query has {len(first)} entries for {len(q) - 1} documents")
        return cls(
            _int32(q, "cu_seqlens_q"),
            _int32(q_padded, "cu_seqlens_q_padded"),
            _int32(kv, "cu_seqlens_kv"),
            _int32(kv_padded, "cu_seqlens_kv_padded"),
            max_seqlen_q=int(np.diff(q).max(initial=0)),
            max_seqlen_kv=int(np.diff(kv).max(initial=0)),
            first_query=None if first is None else _int32(first, "first_query"),
        )

    @classmethod
    def of_layout(cls, layout: PackedLayout) -> "StepMetadata":
        """The whole buffer as one step: every document queries all of its own keys."""
        return cls.from_offsets(
            layout.cu_seqlens, layout.cu_seqlens, layout.cu_seqlens_padded, layout.cu_seqlens_padded
        )

    @property
    def seqlens_q(self) -> IntArray:
        """Queries of each document: int64 [n]."""
        return self.cu_seqlens_q[1:].astype(np.int64) - self.cu_seqlens_q[:-1]

    @property
    def seqlens_kv(self) -> IntArray:
        """Visible keys of each document: int64 [n]."""
        return self.cu_seqlens_kv[1:].astype(np.int64) - self.cu_seqlens_kv[:-1]

    @property
    def first_query_positions(self) -> IntArray:
        """Position of each document's first query in its keys, bottom right unless told otherwise: int64 [n]. [R5]"""
        if self.first_query is None:
            return self.seqlens_kv - self.seqlens_q
        return self.first_query.astype(np.int64)


@dataclass(frozen=True, eq=False)
class RankMetadata:
    """Everything that one rank needs to know of a layout.

    - `indices` int64 [T / cp]: the physical rows it holds, in the order it holds them.
    - `steps`: one StepMetadata for each attention step, earlier rows first.
    - `step_rows`: for each step, the rows of the local buffer that make up its query buffer, int64.
    - `kv_ranges` int64 [m, 2]: the physical rows `[first, last)` of K and V that it reads, disjoint and ascending.

    [R1] [R8]
    """

    indices: IntArray
    steps: tuple[StepMetadata, ...]
    step_rows: tuple[IntArray, ...]
    kv_ranges: IntArray

    @property
    def kv_rows_needed(self) -> int:
        """Rows of K and V that the rank reads; it gathers all T unless it exchanges by need. [R8]"""
        return int((self.kv_ranges[:, 1] - self.kv_ranges[:, 0]).sum())


def rank_metadata(
    layout: PackedLayout,
    policy: Policy | str,
    cp_size: int,
    cp_rank: int,
    mask: AttentionMask = AttentionMask(),
) -> RankMetadata:
    """The metadata of one rank, for any policy, mask and padding.

    Raises:
        SpecError: policy, cp_size, cp_rank, not_divisible, int32_overflow.

    [R1] [R2] [R3] [R4] [R5] [R6] [R7] [R8]
    """
    policy = as_policy(policy)
    windows = step_windows(layout, policy, cp_size, cp_rank)
    indices = window_indices(windows)
    return RankMetadata(
        indices,
        steps=tuple(step_metadata(layout, window, mask) for window in windows),
        step_rows=tuple(np.searchsorted(indices, window_indices([window])) for window in windows),
        kv_ranges=merged_ranges([_needed(layout, window, mask) for window in windows]),
    )


def step_metadata(layout: PackedLayout, window: Window, mask: AttentionMask) -> StepMetadata:
    """The offsets of one attention step from its window, by the formulas above. [R2] [R3] [R4] [R5]"""
    start, real = layout.cu_seqlens_padded[:-1], layout.seqlens
    a, b = window.start[:-1], window.end[:-1]
    first, last = np.clip(start, a, b), np.clip(start + real, a, b)
    if mask.right < 0:
        visible = np.where(b > start, real, 0)
    else:
        visible = np.where(b > start, np.minimum(real, b - start + mask.right), 0)
    bottom_right = mask.right == 0 or (mask.right < 0 and mask.left < 0)
    return StepMetadata.from_offsets(
        cu_seqlens_q=offsets_of(last - first),
        cu_seqlens_q_padded=offsets_of(b - a),
        cu_seqlens_kv=offsets_of(visible),
        cu_seqlens_kv_padded=layout.cu_seqlens_padded,
        first_query=None if bottom_right else first - start,
    )


def _needed(layout: PackedLayout, window: Window, mask: AttentionMask) -> IntArray:
    """Physical K/V rows `[first, last)` that the window's real queries see, for documents that have any: [m, 2]."""
    start, real = layout.cu_seqlens_padded[:-1], layout.seqlens
    a, b = window.start[:-1], window.end[:-1]
    first, last = np.clip(start, a, b), np.clip(start + real, a, b)
    queries = last > first
    start, real, first, last = start[queries], real[queries], first[queries], last[queries]
    first_key, _ = mask.key_range(first - start, real)
    _, last_key = mask.key_range(last - 1 - start, real)
    return np.stack([start + first_key, start + last_key], axis=1)


def merged_ranges(parts: list[IntArray]) -> IntArray:
    """The union of ranges as disjoint ascending ranges: int64 [m, 2]."""
    ranges = np.concatenate(parts)
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    if len(ranges) == 0:
        return ranges
    reach = np.maximum.accumulate(ranges[:, 1])
    opens = np.append(True, ranges[1:, 0] > reach[:-1])
    return np.stack([ranges[opens, 0], reach[np.append(opens[1:], True)]], axis=1)


def _int32(values: IntArray, name: str) -> Int32Array:
    """The int32 that kernels take, or SpecError `int32_overflow`. [R7]"""
    too_large = np.flatnonzero(np.abs(values) > np.iinfo(np.int32).max)
    if len(too_large):
        i = int(too_large[0])
        raise SpecError(
            "int32_overflow",
            f"{name}[{i}] is {values[i]}, beyond int32: kernels take int32 offsets, so pack fewer rows into one buffer",
        )
    result = values.astype(np.int32)
    result.flags.writeable = False
    return result


@dataclass(frozen=True, eq=False)
class PaddedForm:
    """Cumulative lengths beside storage offsets: what Transformer Engine and cuDNN take; all int32 [n + 1]. [R9]"""

    cu_seqlens_q: Int32Array
    cu_seqlens_kv: Int32Array
    cu_seqlens_q_padded: Int32Array
    cu_seqlens_kv_padded: Int32Array


def to_padded(step: StepMetadata) -> PaddedForm:
    """The step as (cu_seqlens, cu_seqlens_padded). [R9]

    Raises:
        SpecError: mask, when the step is not aligned to the bottom right, which this form cannot say.
    """
    check_bottom_right(step)
    return PaddedForm(step.cu_seqlens_q, step.cu_seqlens_kv, step.cu_seqlens_q_padded, step.cu_seqlens_kv_padded)


@dataclass(frozen=True, eq=False)
class SequsedForm:
    """Storage offsets and used lengths: what FlashAttention 3 and paged kernels take. [R9]

    `cu_seqlens_q`, `cu_seqlens_k` int32 [n + 1] are *storage* offsets, `seqused_q`, `seqused_k` int32 [n] lengths.
    """

    cu_seqlens_q: Int32Array
    seqused_q: Int32Array
    cu_seqlens_k: Int32Array
    seqused_k: Int32Array


def to_seqused(step: StepMetadata) -> SequsedForm:
    """The step as (cu_seqlens_padded, seqused). [R9]

    Raises:
        SpecError: mask, when the step is not aligned to the bottom right, which this form cannot say.
    """
    check_bottom_right(step)
    return SequsedForm(
        step.cu_seqlens_q_padded,
        step.seqlens_q.astype(np.int32),
        step.cu_seqlens_kv_padded,
        step.seqlens_kv.astype(np.int32),
    )


def from_seqused(form: SequsedForm) -> StepMetadata:
    """The step that a (cu_seqlens_padded, seqused) quadruple describes: the inverse of `to_seqused`. [R9]"""
    return StepMetadata.from_offsets(
        offsets_of(checked_vector(form.seqused_q, "seqused_q")),
        offsets_of(checked_vector(form.seqused_k, "seqused_k")),
        form.cu_seqlens_q,
        form.cu_seqlens_k,
    )


@dataclass(frozen=True, eq=False)
class SlicedForm:
    """What ring-flash-attention's `llama3_flash_attn_prepare_cu_seqlens` returns. [R9]

    Offsets of the documents that have queries on this rank alone, queries from the rank's first row, keys from
    `kv_slice.start`; `kv_slice` is the part of the gathered K/V, in sequence order, that the kernel is handed.
    """

    cu_seqlens_q: Int32Array
    cu_seqlens_k: Int32Array
    max_seqlen_q: int
    max_seqlen_k: int
    kv_slice: slice


def to_sliced(step: StepMetadata) -> SlicedForm:
    """The step as documents without gaps over one slice of K/V: the form of ring-flash-attention. [R9]

    Documents before the first and behind the last one with queries are dropped; those between stay, also of length 0.

    Raises:
        SpecError: padding_unsupported when the queries or the keys of the slice have gaps; mask when the step is not
            aligned to the bottom right. This form can say neither.
    """
    check_bottom_right(step)
    queries = np.flatnonzero(step.seqlens_q)
    if len(queries) == 0:
        return SlicedForm(np.zeros(1, np.int32), np.zeros(1, np.int32), 0, 0, slice(0, 0))
    documents = slice(int(queries[0]), int(queries[-1]) + 1)
    q = offsets_of(step.seqlens_q[documents])
    k = offsets_of(step.seqlens_kv[documents])
    q_stored = step.cu_seqlens_q_padded[documents]
    k_stored = step.cu_seqlens_kv_padded[documents]
    gaps = (q_stored != q[:-1]) | (k_stored - k_stored[0] != k[:-1])
    if gaps.any():
        raise SpecError(
            "padding_unsupported",
            f"document {documents.start + int(np.flatnonzero(gaps)[0])} is stored behind a gap: "
            f"the sliced form has no room for padding, pack without it or use (cu_seqlens, cu_seqlens_padded)",
        )
    start = int(k_stored[0])
    return SlicedForm(
        _int32(q, "cu_seqlens_q"),
        _int32(k, "cu_seqlens_k"),
        int(np.diff(q).max()),
        int(np.diff(k).max()),
        slice(start, start + int(k[-1])),
    )


def check_bottom_right(step: StepMetadata) -> None:
    """Refuse, with SpecError `mask`, a step that a kernel aligned to the bottom right would answer wrongly. [R5]"""
    if step.first_query is None:
        return
    off = np.flatnonzero((step.first_query_positions != step.seqlens_kv - step.seqlens_q) & (step.seqlens_q > 0))
    if len(off):
        raise SpecError(
            "mask",
            f"document {off[0]} starts at key {step.first_query_positions[off[0]]}, not at the bottom right: a window "
            f"that looks right has keys behind the rank's last query, which this form cannot say",
        )
