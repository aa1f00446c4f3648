"""Requests that everyone refuses."""

from collections.abc import Iterator

from refimpl.conformance.cases import Case
from refimpl.conformance.catalogue.building import (
    DCS,
    PDCS,
    offsets,
    refuse,
    refuse_ids,
    refuse_tensors,
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


def refuse_ids_cases() -> Iterator[Case]:
    """Ids that are no layout."""
    yield refuse_ids("position-ids-of-a-rank", "L8", [1024, 1025, 0, 1],
        why="The ids of one rank, read as offsets in prime-rl#2392: its first document began on another.")
    yield refuse_ids("position-ids-from-one", "L8", [1, 2, 0, 1, 2],
        why="Positions that count from 1 in the first document, or whose first token is on another rank.")
    yield refuse_ids("position-ids-gap", "L8", [0, 1, 3, 4],
        why="A position is left out: tokens are missing, or documents joined.")
    yield refuse_ids("position-ids-standstill", "L8", [0, 1, 1, 2],
        why="The same position twice in a document.")
    yield refuse_ids("position-ids-negative", "L8", [0, 1, -1, -1],
        why="-1 marks padding, and positions have no mark for it.")
    yield refuse_ids("segment-ids-return", "L9", [1, 1, 2, 1], padding_id=0,
        why="Rows 0, 1 and 3 would be one document to whoever compares ids, and two to whoever compares neighbours.")
    yield refuse_ids("segment-ids-return-after-padding", "L9", [3, 3, 0, 3], padding_id=0,
        why="A document that goes on behind its padding.")


def refuse_tensor_cases() -> Iterator[Case]:
    """Tensors that are none of attention's; their numbers do not matter."""
    yield refuse_tensors("heads-no-multiple", (8, 4, 4), (8, 3, 4), (8, 3, 4),
        why="Four query heads on three: 4 // 3 is 1, and head 3 would read a K/V head that is not there.")
    yield refuse_tensors("heads-fewer-queries", (8, 2, 4), (8, 4, 4), (8, 4, 4),
        why="More K/V heads than query heads.")
    yield refuse_tensors("shape-rows", (6, 2, 4), (6, 2, 4), (6, 2, 4),
        why="Six rows in a layout of eight: a shard, where the buffer is asked for.")
    yield refuse_tensors("shape-rows-of-keys", (8, 2, 4), (16, 2, 4), (16, 2, 4),
        why="Keys of another buffer than the queries'.")
    yield refuse_tensors("shape-batch-axis", (1, 8, 2, 4), (1, 8, 2, 4), (1, 8, 2, 4),
        why="A batch axis: packed documents have none.")
    yield refuse_tensors("shape-flat-heads", (8, 8), (8, 8), (8, 8),
        why="Heads and their dimensions in one axis do not tell how many heads there are.")
    yield refuse_tensors("shape-head-dims", (8, 2, 4), (8, 2, 6), (8, 2, 4),
        why="Queries and keys of different head dimensions have no product; values may differ, keys may not.")
    yield refuse_tensors("shape-kv-heads", (8, 4, 4), (8, 2, 4), (8, 1, 4),
        why="Keys and values of different numbers of heads.")
    yield refuse_tensors("dtype-integers", (8, 2, 4), (8, 2, 4), (8, 2, 4), dtypes=("int32", "int32", "int32"),
        why="Token ids in place of what they stand for.")
    yield refuse_tensors("dtype-one-of-three", (8, 2, 4), (8, 2, 4), (8, 2, 4), dtypes=("float32", "float32", "int64"),
        why="Values are checked like queries.")


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
