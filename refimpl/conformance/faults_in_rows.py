"""Mutants whose integers are wrong: layouts, rows of ranks, offsets of steps, positions, labels, refusals.

Defines `MUTANTS`. The functions above it are the wrong pieces; signatures are those of `implementation`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.implementation import once, to_rank_order, to_sequence_order
from refimpl.conformance.mutant import Mutant, mutant
from refimpl.errors import SpecError
from refimpl.layout import IntArray, PackedLayout, offsets_of
from refimpl.mask import AttentionMask
from refimpl.metadata import RankMetadata, StepMetadata, rank_metadata
from refimpl.partition import (
    Policy,
    as_policy,
    next_token_labels,
    partition_indices,
    step_windows,
    unpartition,
    window_indices,
)

Array = NDArray[Any]
Pieces = dict[str, Callable[..., Any]]
Cut = tuple[PackedLayout, Any, int, int]
"""Layout, policy, cp_size and cp_rank."""
DCS, PC, PDCS = Policy

# --- ownership ------------------------------------------------------------------------------------------------------


def _cut_otherwise(
    policy_of: Callable[[Policy], Policy] = lambda policy: policy,
    rank_of: Callable[[Policy, int, int], int] = lambda policy, cp_size, rank: rank,
) -> Pieces:
    """All pieces with another policy, or with the ranks in another order, in agreement with each other."""

    def indices(layout: PackedLayout, policy: Any, cp_size: int, cp_rank: int) -> IntArray:
        partition_indices(layout, policy, cp_size, cp_rank)  # for its refusals
        policy = as_policy(policy)
        return partition_indices(layout, policy_of(policy), cp_size, rank_of(policy, cp_size, cp_rank))

    def metadata(layout: PackedLayout, policy: Any, cp_size: int, cp_rank: int, mask: AttentionMask) -> RankMetadata:
        once(rank_metadata, layout, policy, cp_size, cp_rank, mask)  # for its refusals
        policy = as_policy(policy)
        found: RankMetadata = once(
            rank_metadata, layout, policy_of(policy), cp_size, rank_of(policy, cp_size, cp_rank), mask
        )
        return found

    def order(policy: Policy, cp_size: int) -> list[int]:
        return [rank_of(policy, cp_size, r) for r in range(cp_size)]

    def back(shards: Sequence[Array], layout: PackedLayout, policy: Policy) -> Array:
        ranks = order(policy, len(shards))
        return unpartition([shards[ranks.index(r)] for r in range(len(shards))], layout, policy_of(policy))

    def sequence_order(gathered: Array, layout: PackedLayout, policy: Policy) -> Array:
        by_rank = np.empty_like(gathered)
        by_rank[order(policy, len(gathered))] = gathered
        return to_sequence_order(by_rank, layout, policy_of(policy))

    def rank_order(x: Array, layout: PackedLayout, policy: Policy, cp_size: int) -> Array:
        parts: Array = to_rank_order(x, layout, policy_of(policy), cp_size)[order(policy, cp_size)]
        return parts

    return {
        "indices": indices,
        "unpartition": back,
        "rank_metadata": metadata,
        "sequence_order": sequence_order,
        "rank_order": rank_order,
    }


def rows_one_late(layout: PackedLayout, policy: Policy, cp_size: int, cp_rank: int) -> IntArray:
    """Every chunk one row on; the last row is followed by the first."""
    return (partition_indices(layout, policy, cp_size, cp_rank) + 1) % max(layout.total_tokens, 1)


def document_contiguous(layout: PackedLayout, policy: Policy, cp_size: int, cp_rank: int) -> IntArray:
    """Chunk r of every document, where packed_contiguous asks for chunk r of the buffer."""
    rows = partition_indices(layout, policy, cp_size, cp_rank)
    if policy != PC:
        return rows
    extents = np.append(layout.cu_seqlens_padded, layout.total_tokens)
    starts, sizes = extents[:-1], np.diff(extents)
    parts = [
        np.arange(start + cp_rank * size // cp_size, start + (cp_rank + 1) * size // cp_size)
        for start, size in zip(starts, sizes, strict=True)
    ]
    return np.concatenate(parts)


def striped(layout: PackedLayout, policy: Policy, cp_size: int, cp_rank: int) -> IntArray:
    """Every cp-th row."""
    rows = partition_indices(layout, policy, cp_size, cp_rank)  # for its refusals
    return np.arange(cp_rank, layout.total_tokens, cp_size)[: len(rows)]


def even_numbered_chunks(policy: Policy, cp_size: int, rank: int) -> int:
    """The rank that holds chunks 2r and 2cp - 1 - 2r, which are r's by another numbering."""
    return rank if policy == PC else min(2 * rank, 2 * cp_size - 1 - 2 * rank)


def one_sided_switch(layout: PackedLayout, policy: Policy, cp_size: int, cp_rank: int) -> IntArray:
    """The rows of packed_contiguous for another policy, and those of packed_dual_chunk_swap for packed_contiguous."""
    partition_indices(layout, policy, cp_size, cp_rank)  # for its refusals
    if policy == PC and layout.total_tokens % (2 * cp_size) == 0:
        return partition_indices(layout, PDCS, cp_size, cp_rank)
    return partition_indices(layout, PC, cp_size, cp_rank)


def chunk_major_rows(layout: PackedLayout, policy: Policy, cp_size: int, cp_rank: int) -> IntArray:
    """All early chunks, then all late ones, in place of buffer order."""
    return np.concatenate([window_indices([w]) for w in step_windows(layout, policy, cp_size, cp_rank)])


def tail_rows_dropped(layout: PackedLayout, policy: Policy, cp_size: int, cp_rank: int) -> IntArray:
    """No row past the last offset."""
    rows = partition_indices(layout, policy, cp_size, cp_rank)
    kept: IntArray = rows[rows < layout.cu_seqlens_padded[-1]]
    return kept


def zigzag_unsharding(shards: Sequence[Array], layout: PackedLayout, policy: Policy) -> Array:
    """Contiguous shards put back as if each held a chunk and its mirror image."""
    if policy != PC:
        return unpartition(shards, layout, policy)
    half = len(shards[0]) // 2
    return np.concatenate([*(x[:half] for x in shards), *(x[half:] for x in reversed(shards))])


def contiguous_unsharding(shards: Sequence[Array], layout: PackedLayout, policy: Policy) -> Array:
    """Shards one behind the other, whatever the policy."""
    unpartition(shards, layout, policy)  # for its refusals
    return np.concatenate(list(shards))


def empty_documents_dropped(*arguments: Any) -> PackedLayout:
    """Documents without rows left out, so that later ones get their numbers."""
    layout = PackedLayout(*arguments)
    kept = layout.seqlens_padded > 0
    return PackedLayout(offsets_of(layout.seqlens[kept]), offsets_of(layout.seqlens_padded[kept]), layout.total_tokens)


def empty_documents_counted(*arguments: Any) -> PackedLayout:
    """One token for every empty document: a row of its own, or else the first of the next document."""
    layout = PackedLayout(*arguments)
    real, physical = layout.seqlens.copy(), layout.seqlens_padded.copy()
    for d in np.flatnonzero(real == 0):
        if physical[d] == 0 and d + 1 < len(real) and real[d + 1] > 0:
            physical[d : d + 2] += [1, -1]
            real[d + 1] -= 1
        real[d] = min(1, physical[d])
    return PackedLayout(offsets_of(real), offsets_of(physical), layout.total_tokens)


# --- offsets --------------------------------------------------------------------------------------------------------


def _in_steps(change: Callable[[StepMetadata, PackedLayout, RankMetadata, int], StepMetadata]) -> Pieces:
    """Metadata whose steps are changed by `change(step, layout, metadata, chunks of the policy)`."""

    def metadata(layout: PackedLayout, policy: Any, cp_size: int, cp_rank: int, mask: AttentionMask) -> RankMetadata:
        meta: RankMetadata = once(rank_metadata, layout, policy, cp_size, cp_rank, mask)
        chunks = cp_size * len(meta.steps)
        return replace(meta, steps=tuple(change(step, layout, meta, chunks) for step in meta.steps))

    return {"rank_metadata": metadata}


def _with_offsets(step: StepMetadata, **offsets: Any) -> StepMetadata:
    """The step with other offsets, as int32, and with the maxima that follow from them."""
    as_int32: dict[str, Any] = {name: np.asarray(x).astype(np.int32) for name, x in offsets.items()}
    step = replace(step, **as_int32)
    return replace(
        step,
        max_seqlen_q=int(step.seqlens_q.max(initial=0)),
        max_seqlen_kv=int(step.seqlens_kv.max(initial=0)),
    )


def query_offsets_divided(step: StepMetadata, layout: PackedLayout, meta: RankMetadata, chunks: int) -> StepMetadata:
    """Offsets of queries by integer division of the whole offsets."""
    return _with_offsets(
        step, cu_seqlens_q=layout.cu_seqlens // chunks, cu_seqlens_q_padded=layout.cu_seqlens_padded // chunks
    )


def key_lengths_truncated(step: StepMetadata, layout: PackedLayout, meta: RankMetadata, chunks: int) -> StepMetadata:
    """Numbers of keys divided by the number of chunks and multiplied back."""
    return _with_offsets(step, cu_seqlens_kv=offsets_of(step.seqlens_kv // chunks * chunks))


def queries_without_gaps(step: StepMetadata, layout: PackedLayout, meta: RankMetadata, chunks: int) -> StepMetadata:
    """Query offsets for storage too, as if no padding lay between."""
    return _with_offsets(step, cu_seqlens_q_padded=step.cu_seqlens_q)


def keys_without_gaps(step: StepMetadata, layout: PackedLayout, meta: RankMetadata, chunks: int) -> StepMetadata:
    """Real offsets for the storage of keys."""
    return _with_offsets(step, cu_seqlens_kv_padded=layout.cu_seqlens)


def queries_from_rank_start(step: StepMetadata, layout: PackedLayout, meta: RankMetadata, chunks: int) -> StepMetadata:
    """Storage of queries counted from the start of the rank's rows, not of the step's query buffer."""
    sizes = [np.diff(other.cu_seqlens_q_padded) for other in meta.steps]
    before = sum(sizes[: meta.steps.index(step)], np.zeros_like(sizes[0]))
    starts = offsets_of(np.sum(sizes, axis=0))
    return _with_offsets(step, cu_seqlens_q_padded=np.append(starts[:-1] + before, starts[-1]))


def queries_from_buffer_start(
    step: StepMetadata, layout: PackedLayout, meta: RankMetadata, chunks: int
) -> StepMetadata:
    """Storage of queries counted from the start of the whole buffer, for ranks with one run of rows."""
    first = int(meta.indices[0]) if len(meta.steps) == 1 and len(meta.indices) else 0
    return _with_offsets(step, cu_seqlens_q_padded=step.cu_seqlens_q_padded + first)


def maxima_of_a_shard(step: StepMetadata, layout: PackedLayout, meta: RankMetadata, chunks: int) -> StepMetadata:
    """The longest document divided by the number of chunks, as if every document were cut."""
    return replace(step, max_seqlen_q=int(layout.seqlens.max(initial=0)) // chunks)


def maxima_of_whole_documents(
    step: StepMetadata, layout: PackedLayout, meta: RankMetadata, chunks: int
) -> StepMetadata:
    """The longest document, whatever is here of it."""
    longest = int(layout.seqlens.max(initial=0))
    return replace(step, max_seqlen_q=longest, max_seqlen_kv=longest)


HEADS_TIMES_DIM = 128 * 128
"""Elements of a row in the largest models; an index of elements passes int32 at row 131072."""


def element_index_in_int32(step: StepMetadata, layout: PackedLayout, meta: RankMetadata, chunks: int) -> StepMetadata:
    """Storage offsets by way of an element index that has 32 bits."""

    def wrapped(offsets: Any) -> Any:
        return (offsets.astype(np.int64) * HEADS_TIMES_DIM).astype(np.int32) // HEADS_TIMES_DIM

    return _with_offsets(
        step,
        cu_seqlens_q_padded=wrapped(step.cu_seqlens_q_padded),
        cu_seqlens_kv_padded=wrapped(step.cu_seqlens_kv_padded),
    )


def metadata_of_first_rank(
    layout: PackedLayout, policy: Any, cp_size: int, cp_rank: int, mask: AttentionMask
) -> RankMetadata:
    """Rank 0's metadata on every rank."""
    once(rank_metadata, layout, policy, cp_size, cp_rank, mask)  # for its refusals
    first: RankMetadata = once(rank_metadata, layout, policy, cp_size, 0, mask)
    return first


def padded_as_real(*arguments: Any) -> PackedLayout:
    """Every physical row of a document a token."""
    layout = PackedLayout(*arguments)
    return PackedLayout(layout.cu_seqlens_padded, layout.cu_seqlens_padded, layout.total_tokens)


def real_as_padded(*arguments: Any) -> PackedLayout:
    """Documents one behind the other, and all padding at the end."""
    layout = PackedLayout(*arguments)
    return PackedLayout(layout.cu_seqlens, layout.cu_seqlens, layout.total_tokens)


def padding_by_identity(cu_seqlens: Any, cu_seqlens_padded: Any = None, total_tokens: Any = None) -> PackedLayout:
    """Padding wherever there is a second vector, for that is another object; a layout that has none is then refused."""
    layout = PackedLayout(cu_seqlens, cu_seqlens_padded, total_tokens)
    if cu_seqlens_padded is not None and not layout.has_padding:
        raise SpecError("padding_unsupported", "the offsets are two objects, so there must be padding")
    return layout


def last_padding_unseen(*arguments: Any) -> PackedLayout:
    """No padding where all offsets but the last agree, so that the rows behind the last token are tokens."""
    layout = PackedLayout(*arguments)
    if not np.array_equal(layout.cu_seqlens[:-1], layout.cu_seqlens_padded[:-1]) or layout.num_documents == 0:
        return layout
    return PackedLayout(layout.cu_seqlens_padded, layout.cu_seqlens_padded, layout.total_tokens)


def offsets_cut_at_argmin(*arguments: Any) -> PackedLayout:
    """Offsets up to the smallest one, where a sentinel of -1 would stand; without one, that is the first."""
    layout = PackedLayout(*arguments)
    kept = max(1, int(layout.cu_seqlens.argmin()))
    return PackedLayout(layout.cu_seqlens[:kept], layout.cu_seqlens_padded[:kept], layout.total_tokens)


def capacity_to_last_document(*arguments: Any) -> PackedLayout:
    """Rows past the last offset as tokens of the last document."""
    layout = PackedLayout(*arguments)
    real, physical = layout.seqlens.copy(), layout.seqlens_padded.copy()
    tail = layout.total_tokens - int(layout.cu_seqlens_padded[-1])
    if len(real) and tail:
        physical[-1] += tail
        real[-1] = physical[-1]
    return PackedLayout(offsets_of(real), offsets_of(physical), layout.total_tokens)


def equal_lengths(*arguments: Any) -> PackedLayout:
    """As many tokens in every document as in the mean of them, as far as it has rows."""
    layout = PackedLayout(*arguments)
    mean = int(layout.cu_seqlens[-1]) // max(1, layout.num_documents)
    real = np.minimum(layout.seqlens_padded, mean)
    return PackedLayout(offsets_of(real), layout.cu_seqlens_padded, layout.total_tokens)


# --- positions and labels -------------------------------------------------------------------------------------------


def positions_zero_in_padding(layout: PackedLayout) -> IntArray:
    """0 in padding rows."""
    return np.where(layout.document_ids < 0, 0, layout.positions)


def labels_across_documents(ids: Array, layout: PackedLayout) -> Array:
    """The next row's id for every token, whichever document it is of."""
    return np.where(layout.document_ids >= 0, np.append(ids[1:], -100), -100)


def labels_of_two_shards(ids: Array, layout: PackedLayout) -> Array:
    """Labels made after the buffer was cut in two: the last row of the first shard lost its own."""
    labels = next_token_labels(ids, layout)
    labels[len(ids) // 2 - 1 : len(ids) // 2] = -100
    return labels


def labels_from_padding(ids: Array, layout: PackedLayout) -> Array:
    """The last token of a document predicts the padding behind it."""
    labels = next_token_labels(ids, layout)
    last = (layout.cu_seqlens_padded[:-1] + layout.seqlens - 1)[
        (layout.seqlens > 0) & (layout.seqlens < layout.seqlens_padded)
    ]
    labels[last] = ids[last + 1]
    return labels


def labels_not_shifted(ids: Array, layout: PackedLayout) -> Array:
    """Every token predicts itself."""
    return np.where(layout.document_ids >= 0, ids, -100)


# --- refusals -------------------------------------------------------------------------------------------------------


def _accepting(code: str, mend: Callable[..., Sequence[Any]]) -> Pieces:
    """A layout that should be refused with `code` is mended in silence: `mend(cu, padded, total)` gives another."""

    def make_layout(cu_seqlens: Any, cu_seqlens_padded: Any = None, total_tokens: Any = None) -> PackedLayout:
        padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
        try:
            return PackedLayout(cu_seqlens, padded, total_tokens)
        except SpecError as error:
            if error.code != code:
                raise
            return PackedLayout(*mend(cu_seqlens, padded, total_tokens))

    return {"make_layout": make_layout}


def _running_maximum(cu: Any, padded: Any, total: Any) -> Sequence[Any]:
    return *(np.maximum.accumulate(np.asarray(x)) for x in (cu, padded)), total


def _rebased(cu: Any, padded: Any, total: Any) -> Sequence[Any]:
    return *(np.maximum(np.asarray(x) - x[0], 0) for x in (cu, padded)), total


def _cut_to_rows(cu: Any, padded: Any, total: Any) -> Sequence[Any]:
    return offsets_of(np.minimum(np.diff(cu), np.diff(padded))), padded, total


def _truncated(cu: Any, padded: Any, total: Any) -> Sequence[Any]:
    return *(np.asarray(x).astype(np.int64) for x in (cu, padded)), total


def _instead(code: str, mend: Callable[..., Cut]) -> Pieces:
    """A cut that should be refused with `code` is made of other arguments: `mend(layout, policy, cp_size, cp_rank)`."""

    def indices(*arguments: Any) -> IntArray:
        try:
            return partition_indices(*arguments)
        except SpecError as error:
            if error.code != code:
                raise
            return partition_indices(*mend(*arguments))

    def metadata(layout: PackedLayout, policy: Any, cp_size: int, cp_rank: int, mask: AttentionMask) -> RankMetadata:
        try:
            return rank_metadata(layout, policy, cp_size, cp_rank, mask)
        except SpecError as error:
            if error.code != code:
                raise
            return rank_metadata(*mend(layout, policy, cp_size, cp_rank), mask)

    return {"indices": indices, "rank_metadata": metadata}


def _remainder_dropped(layout: PackedLayout, policy: Any, cp_size: int, cp_rank: int) -> Cut:
    """The layout without the rows that do not divide: of every document, or at the end of the buffer."""
    chunks = cp_size * (1 if as_policy(policy) == PC else 2)
    extents = np.append(layout.cu_seqlens_padded, layout.total_tokens)
    if as_policy(policy) == DCS:
        extents = offsets_of(np.diff(extents) // chunks * chunks)
    else:
        extents = np.minimum(extents, extents[-1] // chunks * chunks)
    real = offsets_of(np.minimum(layout.seqlens, np.diff(extents[:-1])))
    return PackedLayout(real, extents[:-1], int(extents[-1])), policy, cp_size, cp_rank


def _saturated(layout: PackedLayout, policy: Any, cp_size: int, cp_rank: int) -> Cut:
    most = np.iinfo(np.int32).max
    real, physical = (np.minimum(x, most) for x in (layout.cu_seqlens, layout.cu_seqlens_padded))
    return PackedLayout(real, physical, layout.total_tokens), policy, cp_size, cp_rank


def _bounds_below_0_unlimited(causal: bool, window: tuple[int, int]) -> AttentionMask:
    return AttentionMask(causal, (max(window[0], -1), max(window[1], -1)))


def empty_documents_refused(*arguments: Any) -> PackedLayout:
    """Only documents of one token or more."""
    layout = PackedLayout(*arguments)
    if (layout.seqlens == 0).any():
        raise SpecError("lengths", "a document has no tokens")
    return layout


MUTANTS: tuple[Mutant, ...] = (
    mutant("rows-one-late", "ownership", "begins every chunk one row late", indices=rows_one_late),
    mutant(
        "document-contiguous-chunks",
        "ownership",
        "cuts every document into cp chunks where the buffer should be cut",
        "Megatron#3282",
        indices=document_contiguous,
    ),
    mutant("striped-rows", "ownership", "deals single rows to the ranks in turn", "TE#2379", indices=striped),
    mutant(
        "even-numbered-chunks",
        "ownership",
        "gives rank r of a dual-chunk policy the chunks 2r and 2cp - 2r - 1",
        "TE docs/developer/attention/context_parallel.rst at b993fe69",
        **_cut_otherwise(rank_of=even_numbered_chunks),
    ),
    mutant(
        "ranks-counted-from-one",
        "ownership",
        "gives every rank the rows of the next one",
        **_cut_otherwise(rank_of=lambda policy, cp_size, rank: (rank + 1) % cp_size),
    ),
    mutant(
        "buffer-zigzag",
        "ownership",
        "cuts the whole buffer in zigzag where every document should be",
        "NeMo-RL#3380",
        **_cut_otherwise(policy_of=lambda policy: PDCS if policy == DCS else policy),
    ),
    mutant(
        "document-zigzag",
        "ownership",
        "cuts every document in zigzag where the whole buffer should be",
        "NeMo-RL#3380",
        **_cut_otherwise(policy_of=lambda policy: DCS if policy == PDCS else policy),
    ),
    mutant(
        "one-sided-switch",
        "ownership",
        "partitions by another policy than the one that metadata and gathering follow",
        indices=one_sided_switch,
    ),
    mutant("chunk-major-rows", "ownership", "holds all early chunks before all late ones", indices=chunk_major_rows),
    mutant("dropped-tail-rows", "ownership", "deals no row past the last offset", indices=tail_rows_dropped),
    mutant(
        "zigzag-unsharding",
        "ownership",
        "puts contiguous shards back in zigzag order",
        "ms-swift#10071",
        unpartition=zigzag_unsharding,
    ),
    mutant(
        "contiguous-unsharding",
        "ownership",
        "puts zigzag shards back one behind the other",
        unpartition=contiguous_unsharding,
    ),
    mutant(
        "dropped-empty-documents",
        "ownership",
        "leaves documents without rows out, so that later ones get their numbers",
        "ring-flash-attention llama3_flash_attn_prepare_cu_seqlens",
        make_layout=empty_documents_dropped,
    ),
    mutant(
        "counted-empty-documents",
        "ownership",
        "gives a document of length zero one token, its own padding or the first of the next document",
        make_layout=empty_documents_counted,
    ),
    mutant(
        "divided-query-offsets",
        "offsets",
        "divides the offsets by the number of chunks to get those of a rank's queries",
        "Megatron-Lite#111",
        **_in_steps(query_offsets_divided),
    ),
    mutant(
        "truncated-key-lengths",
        "offsets",
        "divides numbers of keys by the number of chunks and multiplies back, so that real keys are dropped",
        "TE#3331",
        **_in_steps(key_lengths_truncated),
    ),
    mutant(
        "padded-offsets-as-real",
        "offsets",
        "takes the physical offsets for the real ones, so that padding is text",
        "verl preprocess_packed_seqs",
        make_layout=padded_as_real,
    ),
    mutant(
        "real-offsets-as-padded",
        "offsets",
        "takes the real offsets for the physical ones, so that documents move up",
        make_layout=real_as_padded,
    ),
    mutant(
        "padding-judged-by-identity",
        "offsets",
        "sees padding where the two offset vectors are not one object, and refuses it",
        "TE#3487",
        make_layout=padding_by_identity,
    ),
    mutant(
        "unseen-last-padding",
        "offsets",
        "compares all offsets but the last, and so misses the padding behind the last document",
        "TE#3331",
        make_layout=last_padding_unseen,
    ),
    mutant(
        "offsets-cut-at-argmin",
        "offsets",
        "cuts the offsets at their smallest entry, meant for a sentinel of -1, and keeps no document",
        "Megatron-Bridge#4400",
        make_layout=offsets_cut_at_argmin,
    ),
    mutant(
        "capacity-as-last-document",
        "offsets",
        "takes the rows past the last offset for tokens of the last document",
        "Megatron#5541",
        make_layout=capacity_to_last_document,
    ),
    mutant(
        "equal-document-lengths",
        "offsets",
        "is right only where all documents have equal length",
        make_layout=equal_lengths,
    ),
    mutant(
        "queries-without-gaps",
        "offsets",
        "stores a rank's queries as if no padding lay between documents",
        **_in_steps(queries_without_gaps),
    ),
    mutant(
        "keys-without-gaps",
        "offsets",
        "reads gathered keys at the real offsets, as if no padding lay between documents",
        **_in_steps(keys_without_gaps),
    ),
    mutant(
        "queries-from-rank-start",
        "offsets",
        "counts a step's queries from the start of the rank's rows, not of the step's own",
        "TE#2829",
        **_in_steps(queries_from_rank_start),
    ),
    mutant(
        "queries-from-buffer-start",
        "offsets",
        "counts a rank's queries from the start of the whole buffer",
        **_in_steps(queries_from_buffer_start),
    ),
    mutant(
        "maximum-of-a-shard",
        "offsets",
        "states the longest document divided by the number of chunks as the most queries, and drops those beyond",
        "sglang#30107",
        **_in_steps(maxima_of_a_shard),
    ),
    mutant(
        "maxima-of-whole-documents",
        "offsets",
        "states the longest document as the most queries and keys, whatever is on the rank",
        "TE#3221",
        **_in_steps(maxima_of_whole_documents),
    ),
    mutant(
        "metadata-of-first-rank",
        "offsets",
        "uses the metadata of rank 0 on every rank",
        rank_metadata=metadata_of_first_rank,
    ),
    mutant(
        "element-index-in-int32",
        "numerics",
        "multiplies offsets by strides in 32 bits, which wraps at row 131072 with 128 heads of 128",
        "FA#2611",
        **_in_steps(element_index_in_int32),
    ),
    mutant(
        "positions-of-the-buffer",
        "positions",
        "never restarts positions in a document",
        "torchtitan#2559",
        positions=lambda layout: np.arange(layout.total_tokens),
    ),
    mutant(
        "zero-positions-in-padding",
        "positions",
        "writes position 0 into padding",
        "verl preprocess_thd_engine",
        positions=positions_zero_in_padding,
    ),
    mutant(
        "documents-counted-from-one",
        "positions",
        "counts documents from 1 and marks padding with 0",
        "TE-JAX segment ids",
        document_ids=lambda layout: layout.document_ids + 1,
    ),
    mutant(
        "labels-across-documents",
        "labels",
        "labels a document's last token with the first of the next",
        "bionemo#1449",
        labels=labels_across_documents,
    ),
    mutant(
        "labels-of-shards",
        "labels",
        "shifts labels after the buffer was cut, so that a shard's last label is lost",
        "verl#4250",
        labels=labels_of_two_shards,
    ),
    mutant(
        "labels-from-padding",
        "labels",
        "labels a document's last token with the padding behind it",
        labels=labels_from_padding,
    ),
    mutant("unshifted-labels", "labels", "labels every token with itself", labels=labels_not_shifted),
    mutant(
        "dropped-remainder",
        "refusal",
        "drops the rows that do not divide in place of refusing the layout",
        "TE#1930",
        **_instead("not_divisible", _remainder_dropped),
    ),
    mutant(
        "sentinels-as-repeats",
        "refusal",
        "takes an offset below the one before for a repeat of it",
        "TE-JAX fused_attn_thd",
        **_accepting("offsets_decreasing", _running_maximum),
    ),
    mutant(
        "rebased-offsets",
        "refusal",
        "subtracts a first offset that is not 0",
        **_accepting("offsets_start", _rebased),
    ),
    mutant(
        "truncated-offsets",
        "refusal",
        "truncates offsets that are no integers",
        **_accepting("offsets_type", _truncated),
    ),
    mutant(
        "overlong-documents-cut",
        "refusal",
        "cuts a document with more tokens than rows",
        **_accepting("real_exceeds_physical", _cut_to_rows),
    ),
    mutant(
        "enlarged-buffer",
        "refusal",
        "takes a buffer shorter than its documents for one that holds them",
        **_accepting("total_tokens", lambda cu, padded, total: (cu, padded, padded[-1])),
    ),
    mutant(
        "unknown-policy-as-zigzag",
        "refusal",
        "takes an unknown policy for the default one",
        **_instead("policy", lambda layout, policy, cp_size, cp_rank: (layout, DCS, cp_size, cp_rank)),
    ),
    mutant(
        "wrapped-rank",
        "refusal",
        "takes the rank modulo the number of ranks",
        **_instead("cp_rank", lambda layout, policy, cp_size, cp_rank: (layout, policy, cp_size, cp_rank % cp_size)),
    ),
    mutant(
        "negative-bounds-as-unlimited",
        "refusal",
        "takes any negative window bound for an unlimited one",
        make_mask=_bounds_below_0_unlimited,
    ),
    mutant(
        "saturated-offsets",
        "refusal",
        "clips offsets that int32 does not hold",
        **_instead("int32_overflow", _saturated),
    ),
    mutant(
        "refused-empty-documents",
        "refusal",
        "refuses documents of length zero",
        "Megatron context_parallel_layout.py at 0565caab",
        make_layout=empty_documents_refused,
    ),
)
"""In the order of `mutants.MUTANTS`."""
