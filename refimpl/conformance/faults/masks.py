"""Mutants whose masks are wrong: who sees whom.

Defines `MUTANTS`. The functions above it are the wrong pieces; signatures are those of `implementation`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from refimpl.conformance.faults.mutant import Bools, Mutant, Pieces, mutant
from refimpl.conformance.implementation import layout_visible, step_visible
from refimpl.layout import IntArray, PackedLayout, offsets_of
from refimpl.mask import AttentionMask
from refimpl.metadata import StepMetadata


def _understood_as(change: Callable[[AttentionMask], AttentionMask]) -> Pieces:
    """Another mask than the one asked for, everywhere."""
    return {"make_mask": lambda causal, window: change(AttentionMask(causal, window))}


def one_key_too_many(mask: AttentionMask) -> AttentionMask:
    """The left bound one larger."""
    return replace(mask, window=(mask.left + 1, mask.window[1])) if mask.left >= 0 else mask


def one_key_too_few(mask: AttentionMask) -> AttentionMask:
    """The left bound as the size of the window, the query itself included."""
    return replace(mask, window=(max(mask.left - 1, 0), mask.window[1])) if mask.left >= 0 else mask


def one_key_ahead(mask: AttentionMask) -> AttentionMask:
    """A causal mask that shows the next token."""
    return AttentionMask(False, (mask.left, 1)) if mask.causal else mask


def one_key_too_many_ahead(mask: AttentionMask) -> AttentionMask:
    """The right bound one larger, where it is not causality's."""
    return replace(mask, window=(mask.window[0], mask.right + 1)) if not mask.causal and mask.right >= 0 else mask


def right_bound_kept(mask: AttentionMask) -> AttentionMask:
    """The right bound of the window, where causality should force it to 0."""
    return AttentionMask(False, mask.window) if mask.causal and mask.window[1] > 0 else mask


class DiagonalExcluded(AttentionMask):
    """A causal mask under which a token does not see itself."""

    def visible(self, document_q: Any, position_q: IntArray, document_k: Any, position_k: IntArray) -> Bools:
        """The predicate without the diagonal."""
        seen = super().visible(document_q, position_q, document_k, position_k)
        return seen & (position_k[None, :] != position_q[:, None]) if self.causal else seen


def top_left(step: StepMetadata, mask: AttentionMask, rows_q: int, rows_kv: int) -> Bools:
    """The first query at the first key."""
    return step_visible(replace(step, first_query=np.zeros_like(step.cu_seqlens_q[1:])), mask, rows_q, rows_kv)


def first_query_at_first_key_at_least(step: StepMetadata, mask: AttentionMask, rows_q: int, rows_kv: int) -> Bools:
    """No query before the first key: where there are more queries than keys, the first ones are aligned."""
    ahead = np.maximum(step.first_query_positions, 0)
    return step_visible(replace(step, first_query=ahead), mask, rows_q, rows_kv)


def bottom_right_always(step: StepMetadata, mask: AttentionMask, rows_q: int, rows_kv: int) -> Bools:
    """The last query at the last key, whatever the step says."""
    return step_visible(replace(step, first_query=None), mask, rows_q, rows_kv)


def one_diagonal(step: StepMetadata, mask: AttentionMask, rows_q: int, rows_kv: int) -> Bools:
    """The distance of the two maxima for the distance of keys and queries in every document."""
    shift = step.max_seqlen_kv - step.max_seqlen_q
    return step_visible(replace(step, first_query=np.full_like(step.cu_seqlens_q[1:], shift)), mask, rows_q, rows_kv)


def _clipped(mask: AttentionMask, left: int, right: int) -> AttentionMask:
    """The mask with its limited bounds at most `left` and `right`."""
    bounds = (min(mask.left, left), mask.window[1] if mask.causal else min(mask.right, right))
    return replace(mask, window=bounds)


def window_clipped_to_keys(step: StepMetadata, mask: AttentionMask, rows_q: int, rows_kv: int) -> Bools:
    """A bound that reaches the number of keys counts as unlimited."""
    most = step.max_seqlen_kv
    left, right = (-1 if bound >= most else bound for bound in mask.window)
    return step_visible(step, AttentionMask(mask.causal, (left, right)), rows_q, rows_kv)


def window_clipped_to_queries(step: StepMetadata, mask: AttentionMask, rows_q: int, rows_kv: int) -> Bools:
    """No bound larger than the number of local queries."""
    return step_visible(step, _clipped(mask, step.max_seqlen_q, step.max_seqlen_q), rows_q, rows_kv)


def window_in_local_order(step: StepMetadata, mask: AttentionMask, rows_q: int, rows_kv: int) -> Bools:
    """Causality by positions, the window by places among the step's queries."""
    without_left = replace(mask, window=(-1, mask.window[1]))
    seen = step_visible(step, without_left, rows_q, rows_kv)
    local = AttentionMask(False, (mask.left, -1))
    return seen & top_left(step, local, rows_q, rows_kv)


def _places(step: StepMetadata, rows_q: int, rows_kv: int) -> tuple[IntArray, IntArray, IntArray]:
    """Document of every row of the query buffer, its row in K/V, and document of every row of K/V; -1 for none."""
    document_q, row_q, document_k = (np.full(rows, -1) for rows in (rows_q, rows_q, rows_kv))
    for d in range(len(step.seqlens_q)):
        start, first_key = int(step.cu_seqlens_q_padded[d]), int(step.cu_seqlens_kv_padded[d])
        queries = np.arange(step.seqlens_q[d])
        document_q[start + queries] = d
        row_q[start + queries] = first_key + step.first_query_positions[d] + queries
        document_k[first_key : first_key + int(step.seqlens_kv[d])] = d
    return document_q, row_q, document_k


def _by_rows(sees: Callable[[IntArray, IntArray, Bools], Bools], only: Callable[[AttentionMask], bool]) -> Pieces:
    """Bounds on rows of the buffer in place of positions, for masks of which `only` is true.

    `sees(document_q, document_k, bounds)` combines documents, as a column and a row, with what the bounds allow.
    """

    def whole(layout: PackedLayout, mask: AttentionMask) -> Bools:
        rows, documents = np.arange(layout.total_tokens), layout.document_ids
        return combined(mask, documents, rows, documents) if only(mask) else layout_visible(layout, mask)

    def step(step: StepMetadata, mask: AttentionMask, rows_q: int, rows_kv: int) -> Bools:
        if not only(mask):
            return step_visible(step, mask, rows_q, rows_kv)
        return combined(mask, *_places(step, rows_q, rows_kv))

    def combined(mask: AttentionMask, document_q: IntArray, row_q: IntArray, document_k: IntArray) -> Bools:
        both_real = (document_q[:, None] >= 0) & (document_k[None, :] >= 0)
        bounds = mask.visible(0, row_q, 0, np.arange(len(document_k)))
        return both_real & sees(document_q[:, None], document_k[None, :], bounds)

    return {"layout_visible": whole, "step_visible": step}


def also_of_whole_buffer(sees: Callable[[StepMetadata, AttentionMask, int, int], Bools]) -> Pieces:
    """The mask of a step, and that of the whole buffer by the same fault, as one step of all queries and all keys."""

    def whole(layout: PackedLayout, mask: AttentionMask) -> Bools:
        return sees(StepMetadata.of_layout(layout), mask, layout.total_tokens, layout.total_tokens)

    return {"layout_visible": whole, "step_visible": sees}


def keys_from_document_before(step: StepMetadata, mask: AttentionMask, rows_q: int, rows_kv: int) -> Bools:
    """The keys of a document begin where those of the document before do, its padding included."""
    starts, lengths, first_query = step.cu_seqlens_kv_padded.copy(), step.seqlens_kv, step.first_query_positions
    starts[1:-1] = step.cu_seqlens_kv_padded[:-2]
    added = np.where(lengths > 0, step.cu_seqlens_kv_padded[:-1] - starts[:-1], 0)
    earlier = replace(
        step,
        cu_seqlens_kv=offsets_of(lengths + added).astype(np.int32),
        cu_seqlens_kv_padded=starts,
        max_seqlen_kv=int((lengths + added).max(initial=0)),
        first_query=(first_query + added).astype(np.int32),
    )
    return step_visible(earlier, mask, rows_q, rows_kv)


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "top-left-alignment",
        "mask",
        "aligns a step's first query with its first key in place of the last ones",
        "FA#951",
        step_visible=top_left,
    ),
    mutant(
        "no-query-before-the-keys",
        "mask",
        "aligns the first query with the first key where a step has more queries than keys",
        step_visible=first_query_at_first_key_at_least,
    ),
    mutant(
        "right-window-at-bottom-right",
        "mask",
        "aligns the last query with the last key where keys go on behind it",
        step_visible=bottom_right_always,
    ),
    mutant(
        "one-diagonal-for-all-documents",
        "mask",
        "shifts the diagonal of every document by the difference of the maxima",
        step_visible=one_diagonal,
    ),
    mutant(
        "window-one-too-many",
        "mask",
        "passes the size of a window as its left bound, so that it sees one key too many",
        "transformers#39408",
        **_understood_as(one_key_too_many),
    ),
    mutant(
        "window-one-too-few",
        "mask",
        "takes a left bound for the size of a window, so that it sees one key too few",
        "pytorch varlen_attn documentation",
        **_understood_as(one_key_too_few),
    ),
    mutant(
        "right-window-one-too-many",
        "mask",
        "passes the size of a window as its right bound, so that it sees one key too many ahead",
        **_understood_as(one_key_too_many_ahead),
    ),
    mutant(
        "excluded-diagonal",
        "mask",
        "hides a token from itself under a causal mask",
        make_mask=DiagonalExcluded,
    ),
    mutant("one-key-ahead", "mask", "shows the next token under a causal mask", **_understood_as(one_key_ahead)),
    mutant(
        "causality-overridden-by-window",
        "mask",
        "keeps the right bound of a window under a causal mask",
        **_understood_as(right_bound_kept),
    ),
    mutant(
        "dropped-window",
        "mask",
        "ignores the window",
        **_understood_as(lambda mask: AttentionMask(mask.causal)),
    ),
    mutant(
        "dropped-causality",
        "mask",
        "ignores that the mask is causal",
        **_understood_as(lambda mask: AttentionMask(False, (mask.left, -1 if mask.causal else mask.right))),
    ),
    mutant(
        "window-clamped-at-stream-start",
        "mask",
        "bounds a window at the start of the stream, so that it sees into the document before",
        "miles#2038",
        **_by_rows(lambda document_q, document_k, bounds: bounds & (document_q >= document_k), lambda m: m.left >= 0),
    ),
    mutant(
        "window-clipped-to-keys",
        "mask",
        "takes a window bound that reaches the number of keys for unlimited, before it aligns",
        "FA csrc/flash_attn/flash_api.cpp mha_varlen_fwd",
        step_visible=window_clipped_to_keys,
    ),
    mutant(
        "window-clipped-to-queries",
        "mask",
        "clips window bounds to the number of a rank's own queries",
        step_visible=window_clipped_to_queries,
    ),
    mutant(
        "window-in-local-order",
        "mask",
        "applies causality to positions and the window to places in the rank's own order",
        "maxtext#4298",
        step_visible=window_in_local_order,
    ),
    mutant(
        "leak-from-document-before",
        "mask",
        "begins the keys of a document at the start of the one before",
        **also_of_whole_buffer(keys_from_document_before),
    ),
    mutant(
        "no-document-boundaries",
        "mask",
        "takes the buffer for one document",
        "Megatron#6156",
        **_by_rows(lambda document_q, document_k, bounds: bounds, lambda mask: True),
    ),
)
"""In the order of `mutants.MUTANTS`."""
