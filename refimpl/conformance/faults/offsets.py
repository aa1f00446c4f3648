"""Mutants that state wrong offsets and lengths, of a layout or of a step.

Defines `MUTANTS`. The functions above it are the wrong pieces; signatures are those of `implementation`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from refimpl.conformance.faults.mutant import Mutant, Pieces, mutant
from refimpl.conformance.implementation import once
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout, offsets_of
from refimpl.mask import AttentionMask
from refimpl.metadata import RankMetadata, StepMetadata, rank_metadata

HEADS_TIMES_DIM = 128 * 128
"""Elements of a row in the largest models; an index of elements passes int32 at row 131072."""


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


MUTANTS: tuple[Mutant, ...] = (
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
)
"""In the order of `mutants.MUTANTS`."""
