"""Mutants that hold or return the wrong rows.

Defines `MUTANTS`. The functions above it are the wrong pieces; signatures are those of `implementation`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from refimpl.conformance.faults.mutant import Array, Mutant, Pieces, mutant
from refimpl.conformance.implementation import once, to_rank_order, to_sequence_order
from refimpl.layout import IntArray, PackedLayout, offsets_of
from refimpl.mask import AttentionMask
from refimpl.metadata import RankMetadata, rank_metadata
from refimpl.partition import Policy, as_policy, partition_indices, step_windows, unpartition, window_indices

DCS, PC, PDCS = Policy


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
)
"""In the order of `mutants.MUTANTS`."""
