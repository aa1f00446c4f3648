"""Requests that everyone refuses."""

from collections.abc import Iterator

from refimpl.conformance.cases import Case
from refimpl.conformance.catalogue.building import (
    DCS,
    PDCS,
    offsets,
    refuse,
)

# fmt: off
# Two lines a case: what is asked, then why.


def refuse_layout_cases() -> Iterator[Case]:
    """Offsets that describe no layout."""
    yield refuse("offsets-type-fraction", offsets([0, 2.5, 8]), "L2",
        why="Half a token: offsets divided by cp as floats.")
    yield refuse("offsets-type-fraction-padded", offsets([0, 4], [0, 4.5], 6), "L2",
        why="The physical offsets are checked like the real ones.")
    yield refuse("offsets-shape-nested", offsets([[0, 4], [0, 6]], [[0, 4], [0, 6]], 6), "L2",
        why="One row a sequence of a batch: a batch axis has no place here.")
    yield refuse("offsets-shape-empty", offsets([], [], 4), "L2",
        why="No documents need the offset 0, not none.")
    yield refuse("offsets-start", offsets([4, 9]), "L2",
        why="Offsets cut out of a longer vector do not start at 0.")
    yield refuse("offsets-start-padded", offsets([0, 3], [4, 8]), "L2",
        why="The physical offsets of the second half of a batch.")
    yield refuse("offsets-start-sentinel", offsets([-1, 0, 4], [0, 1, 5]), "L2",
        why="-1 for an unused first entry, as TE-JAX marks them.")
    yield refuse("offsets-decreasing", offsets([0, 5, 3], [0, 5, 8]), "L2",
        why="Offsets of two batches, one behind the other.")
    yield refuse("offsets-decreasing-sentinel", offsets([0, 4, 7, -1, -1], [0, 4, 7, 7, 7]), "L2",
        why="-1 for unused entries: read as offsets, they are documents of negative length.")
    yield refuse("offsets-decreasing-sentinel-1000", offsets([0, 4, 7, -1000], [0, 4, 7, 7]), "L2",
        why="-1000 for unused entries, as in Automodel.")
    yield refuse("offsets-decreasing-padded", offsets([0, 4, 7, 7], [0, 4, 8, -1], 8), "L2",
        why="Sentinels in the physical offsets, where an argmin finds the first of them.")
    yield refuse("offsets-count", offsets([0, 4, 7], [0, 8]), "L1",
        why="Two vectors of different numbers of documents.")
    yield refuse("real-exceeds-physical", offsets([0, 5, 8], [0, 4, 12]), "L3",
        why="More tokens than rows: the last one would be the first of the next document.")
    yield refuse("real-exceeds-physical-swapped", offsets([0, 8, 12], [0, 6, 10]), "L3",
        why="The two vectors in the wrong order.")
    yield refuse("total-tokens-too-few", offsets([0, 5, 7], rows=6), "L4",
        why="A buffer shorter than its documents: cut to a multiple of cp, for instance.")
    yield refuse("total-tokens-fraction", offsets([0, 4], rows=6.5), "L4",
        why="A capacity that is no integer.")


def refuse_rank_cases() -> Iterator[Case]:
    """Requests that no rank can carry out."""
    eight = offsets([0, 8])
    yield refuse("policy-contiguous", eight, "P3", "partition", policy="contiguous",
        why="A name with two meanings is none.")
    yield refuse("policy-zigzag", eight, "P2 P4", "metadata", policy="zigzag",
        why="Two policies are called zigzag, and they need different padding.")
    yield refuse("cp-size-zero", eight, "P1", "partition", cp_size=0,
        why="No ranks.")
    yield refuse("cp-size-negative", eight, "P1", "metadata", cp_size=-2,
        why="Fewer than no ranks.")
    yield refuse("cp-rank-too-large", eight, "P1", "partition", cp_rank=2,
        why="Ranks count from 0.")
    yield refuse("cp-rank-negative", eight, "P1", "metadata", cp_rank=-1,
        why="-1 is no rank, not the last one.")
    yield refuse("not-divisible-contiguous", offsets([0, 5, 12]), "P6", "partition", cp_size=5,
        why="12 rows on 5 ranks.")
    yield refuse("not-divisible-contiguous-tail", offsets([0, 8], rows=9), "P6 L4", "metadata", cp_size=4,
        why="The tail counts: 9 rows, 8 of them tokens.")
    yield refuse("not-divisible-truncated", offsets([0, 7]), "P6", "metadata", policy=DCS,
        why="TE#1930 took a document of 7 tokens on two ranks for one of 6 and dropped the last.")
    yield refuse("not-divisible-one-document", offsets([0, 5, 12]), "P6", "partition", policy=DCS,
        why="12 rows divide by 4, but documents of 5 and 7 do not.")
    yield refuse("not-divisible-by-cp-only", offsets([0, 4, 10, 16]), "P6", "metadata", policy=DCS,
        why="A document of 6 rows divides by cp 2 and not by its 4 chunks.")
    yield refuse("not-divisible-real-lengths", offsets([0, 4, 8], [0, 5, 10]), "P6", "partition", policy=DCS,
        why="Real lengths divide, physical ones do not.")
    yield refuse("not-divisible-tail", offsets([0, 8], rows=11), "P5 P6", "partition", policy=DCS,
        why="The tail is one more document, and 3 rows are not 4.")
    yield refuse("not-divisible-three-ranks", offsets([0, 8]), "P6", "metadata", policy=DCS, cp_size=3,
        why="A multiple of 2 * cp for two ranks is none for three.")
    yield refuse("not-divisible-buffer", offsets([0, 6, 14]), "P6", "partition", policy=PDCS,
        why="14 rows divide by 2 ranks and not by 4 chunks.")
    yield refuse("not-divisible-last-rank", offsets([0, 5, 13]), "P6", "metadata", cp_size=4, cp_rank=3,
        why="Every rank refuses, the last one too.")
    yield refuse("mask-left", eight, "K3", "metadata", window=[-2, 0],
        why="A left bound of -2 is not unlimited.")
    yield refuse("mask-right", eight, "K3", "metadata", causal=False, window=[2, -5],
        why="Nor is a right bound of -5.")
    yield refuse("int32-overflow-real", offsets([0, 2**31]), "R7", "metadata", cp_size=2**20,
        why="One row more than an int32 counts.")
    yield refuse("int32-overflow-physical", offsets([0, 100, 200], [0, 2**20, 2**32]), "R7 N3", "metadata",
        cp_size=2**21, cp_rank=2**21 - 1,
        why="Few tokens in a buffer whose physical offsets pass int32; on the last rank.")
