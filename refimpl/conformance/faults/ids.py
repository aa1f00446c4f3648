"""Mutants that read a layout off position or segment ids wrongly.

Defines `MUTANTS`. The functions above it are the wrong pieces; signatures are those of `implementation`. Ids are whole
lists of integers, and what should be refused is refused unless a mutant is about that.
"""

from collections.abc import Sequence

import numpy as np

from refimpl.conformance.faults.mutant import Mutant, mutant
from refimpl.errors import SpecError
from refimpl.layout import IntArray, PackedLayout, offsets_of

Ids = Sequence[int]


def _cut_at(starts: Ids | IntArray, rows: int) -> PackedLayout:
    """Documents without padding that begin in these rows, the first of which is 0."""
    return PackedLayout([*starts, rows] if rows else [0])


def falling_position_ids(ids: Ids) -> PackedLayout:
    """A document begins where ids fall, and a 0 behind a 0 is no fall."""
    PackedLayout.from_position_ids(ids)
    return _cut_at([0, *np.flatnonzero(np.diff(ids) < 0) + 1], len(ids))


def any_first_position(ids: Ids) -> PackedLayout:
    """Ids may begin anywhere; what comes first is a document."""
    shift = next((row for row, own in enumerate(ids) if own == 0), len(ids))
    if not np.array_equal(np.diff(ids[:shift]), np.ones(max(shift - 1, 0))):
        return PackedLayout.from_position_ids(ids)
    return PackedLayout.from_position_ids([*range(shift), *ids[shift:]])


def zeros_alone(ids: Ids) -> PackedLayout:
    """A document for every 0, whatever stands between."""
    return _cut_at([row for row, own in enumerate(ids) if own == 0 or row == 0], len(ids))


def _runs(ids: Ids) -> list[int]:
    """The rows in which runs of one id begin."""
    return [row for row, own in enumerate(ids) if row == 0 or own != ids[row - 1]]


def padding_runs_as_documents(ids: Ids, padding_id: int | None) -> PackedLayout:
    """A run of the padding id is a document."""
    PackedLayout.from_segment_ids(ids, padding_id)
    return _cut_at(_runs(ids), len(ids))


def without_leading_padding(ids: Ids, padding_id: int | None) -> PackedLayout:
    """Padding ahead of the first document is cut off."""
    PackedLayout.from_segment_ids(ids, padding_id)
    first = next((row for row, own in enumerate(ids) if own != padding_id), len(ids))
    return PackedLayout.from_segment_ids(ids[first:], padding_id)


def zero_is_padding(ids: Ids, padding_id: int | None) -> PackedLayout:
    """The id 0 is padding, whatever is said."""
    return PackedLayout.from_segment_ids(ids, 0)


def counted_by_id(ids: Ids, padding_id: int | None) -> PackedLayout:
    """Rows are counted for each id, and the counts taken in the order of the ids."""
    layout = PackedLayout.from_segment_ids(ids, padding_id)
    names = [ids[start] for start in layout.cu_seqlens_padded[:-1]]
    order = sorted(range(len(names)), key=lambda d: (names[d] != padding_id, names[d]))
    return PackedLayout(offsets_of(layout.seqlens[order]), offsets_of(layout.seqlens_padded[order]))


def returning_segments(ids: Ids, padding_id: int | None) -> PackedLayout:
    """Neighbours are compared and nothing else: an id that comes back is one more document."""
    try:
        return PackedLayout.from_segment_ids(ids, padding_id)
    except SpecError:
        return _cut_at(_runs(ids), len(ids))


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "lost-one-token-documents",
        "offsets",
        "opens a document only where position ids fall, so that one of a single token joins the next",
        from_position_ids=falling_position_ids,
    ),
    mutant(
        "padding-segments-as-documents",
        "offsets",
        "takes the padding id for the id of a document",
        from_segment_ids=padding_runs_as_documents,
    ),
    mutant(
        "leading-padding-dropped",
        "offsets",
        "drops padding ahead of the first segment, so that all rows move",
        from_segment_ids=without_leading_padding,
    ),
    mutant(
        "segment-zero-as-padding",
        "offsets",
        "takes segment 0 for padding, whatever the padding id is",
        from_segment_ids=zero_is_padding,
    ),
    mutant(
        "segments-counted-by-id",
        "offsets",
        "counts the rows of each segment id and takes the counts in ascending order of ids",
        from_segment_ids=counted_by_id,
    ),
    mutant(
        "positions-of-a-later-rank",
        "refusal",
        "takes position ids that begin in the middle of a document",
        "prime-rl#2392",
        from_position_ids=any_first_position,
    ),
    mutant(
        "unchecked-position-ids",
        "refusal",
        "looks for zeros among position ids and at nothing between them",
        from_position_ids=zeros_alone,
    ),
    mutant(
        "returning-segments",
        "refusal",
        "takes a segment id that comes back for another document",
        from_segment_ids=returning_segments,
    ),
)
"""In the order of `mutants.MUTANTS`."""
