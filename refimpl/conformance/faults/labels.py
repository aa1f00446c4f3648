"""Mutants that number rows or label tokens wrongly.

Defines `MUTANTS`. The functions above it are the wrong pieces; signatures are those of `implementation`.
"""

import numpy as np

from refimpl.conformance.faults.mutant import Array, Mutant, mutant
from refimpl.layout import IntArray, PackedLayout
from refimpl.partition import next_token_labels


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


MUTANTS: tuple[Mutant, ...] = (
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
)
"""In the order of `mutants.MUTANTS`."""
