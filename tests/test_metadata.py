"""What a rank tells its kernel: worked by hand, then every described pair against the global predicate."""

import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import witness
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import POLICIES, cases, layouts, masks, parts_of, repeat_tail
from support import refused

from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import (
    SequsedForm,
    StepMetadata,
    from_seqused,
    rank_metadata,
    to_padded,
    to_seqused,
    to_sliced,
)

CAUSAL, FULL = AttentionMask(), AttentionMask(causal=False)
VECTORS = ("cu_seqlens_q", "cu_seqlens_q_padded", "cu_seqlens_kv", "cu_seqlens_kv_padded")


def vectors(step):
    return [getattr(step, name).tolist() for name in VECTORS]


def offsets(lengths):
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def described(rank, mask):
    """Physical (query, key) pairs of every step of a rank, expanded from its offsets alone; as a multiset."""
    pairs = Counter()
    for step, step_rows in zip(rank.steps, rank.step_rows, strict=True):
        first_query = None if step.first_query is None else step.first_query.tolist()
        for i, key in witness.step_pairs(*vectors(step), mask.causal, mask.window, first_query):
            pairs[int(rank.indices[step_rows[i]]), key] += 1
    return pairs


# (layout, policy, cp, rank, mask) -> for each step: cu_q, cu_q_padded, cu_kv, cu_kv_padded, first_query
WORKED = [
    # Rows 3 to 5 of documents of 5 and 7.
    (
        ([0, 5, 12],), "packed_contiguous", 4, 1, CAUSAL,
        [([0, 2, 3], [0, 2, 3], [0, 5, 6], [0, 5, 12], None)],
    ),
    # Rank 1 starts in the padding of document 0.
    (
        ([0, 6, 10], [0, 8, 12]), "packed_contiguous", 2, 1, CAUSAL,
        [([0, 0, 4], [0, 2, 6], [0, 6, 10], [0, 8, 12], None)],
    ),
    # Rank 0 ends in the middle of document 0: document 1 begins behind it and has no keys there.
    (
        ([0, 6, 10], [0, 8, 12]), "packed_contiguous", 2, 0, CAUSAL,
        [([0, 6, 6], [0, 6, 6], [0, 6, 6], [0, 8, 12], None)],
    ),
    # Without a causal mask every key of a document that has begun is visible.
    (
        ([0, 5, 12],), "packed_contiguous", 4, 1, FULL,
        [([0, 2, 3], [0, 2, 3], [0, 5, 12], [0, 5, 12], None)],
    ),
    # A document that begins behind the rank has none, whatever the mask.
    (
        ([0, 5, 12],), "packed_contiguous", 4, 0, FULL,
        [([0, 3, 3], [0, 3, 3], [0, 5, 5], [0, 5, 12], None)],
    ),
    (
        ([0, 6, 12],), "packed_contiguous", 2, 0, FULL,
        [([0, 6, 6], [0, 6, 6], [0, 6, 6], [0, 6, 12], None)],
    ),
    (
        ([0, 6, 12],), "packed_contiguous", 2, 0, CAUSAL,
        [([0, 6, 6], [0, 6, 6], [0, 6, 6], [0, 6, 12], None)],
    ),
    (
        ([0, 6, 12],), "packed_contiguous", 2, 0, AttentionMask(False, (-1, 2)),
        [([0, 6, 6], [0, 6, 6], [0, 6, 6], [0, 6, 12], [0, 0])],
    ),
    # Chunks 0 and 3, then 1 and 2, of two documents of 8.
    (
        ([0, 8, 16],), "dual_chunk_swap", 2, 0, CAUSAL,
        [
            ([0, 2, 4], [0, 2, 4], [0, 2, 4], [0, 8, 16], None),
            ([0, 2, 4], [0, 2, 4], [0, 8, 16], [0, 8, 16], None),
        ],
    ),
    (
        ([0, 8, 16],), "dual_chunk_swap", 2, 1, CAUSAL,
        [
            ([0, 2, 4], [0, 2, 4], [0, 4, 8], [0, 8, 16], None),
            ([0, 2, 4], [0, 2, 4], [0, 6, 12], [0, 8, 16], None),
        ],
    ),
    # Five real tokens in eight rows: of the last chunk, rows 6 and 7, none queries.
    (
        ([0, 5], [0, 8]), "dual_chunk_swap", 2, 0, CAUSAL,
        [([0, 2], [0, 2], [0, 2], [0, 8], None), ([0, 0], [0, 2], [0, 5], [0, 8], None)],
    ),
    (
        ([0, 5], [0, 8]), "dual_chunk_swap", 2, 1, CAUSAL,
        [([0, 2], [0, 2], [0, 4], [0, 8], None), ([0, 1], [0, 2], [0, 5], [0, 8], None)],
    ),
    # Documents of 8 and 4 cut as one buffer: rows 0 to 2 and 9 to 11.
    (
        ([0, 8, 12],), "packed_dual_chunk_swap", 2, 0, CAUSAL,
        [
            ([0, 3, 3], [0, 3, 3], [0, 3, 3], [0, 8, 12], None),
            ([0, 0, 3], [0, 0, 3], [0, 8, 12], [0, 8, 12], None),
        ],
    ),
    # A window to both sides on rows 2 and 3 of 6: keys 0 to 4, the first query at 2.
    (
        ([0, 6],), "packed_contiguous", 3, 1, AttentionMask(False, (1, 1)),
        [([0, 2], [0, 2], [0, 5], [0, 6], [2])],
    ),
    # A window to the left alone, not causal: keys run on to the end.
    (
        ([0, 6],), "packed_contiguous", 3, 1, AttentionMask(False, (1, -1)),
        [([0, 2], [0, 2], [0, 6], [0, 6], [2])],
    ),
    # A causal window needs no first query.
    (
        ([0, 6],), "packed_contiguous", 3, 1, AttentionMask(True, (1, 5)),
        [([0, 2], [0, 2], [0, 4], [0, 6], None)],
    ),
    (
        ([0, 6],), "packed_contiguous", 3, 1, AttentionMask(False, (1, 0)),
        [([0, 2], [0, 2], [0, 4], [0, 6], None)],
    ),
    # A rank without a real token, behind all documents.
    (
        ([0, 3], None, 8), "packed_contiguous", 2, 1, CAUSAL,
        [([0, 0], [0, 0], [0, 3], [0, 3], None)],
    ),
]  # fmt: skip


@pytest.mark.clause("R1", "R2", "R3", "R4", "R5")
@pytest.mark.parametrize(("layout", "policy", "cp_size", "rank", "mask", "steps"), WORKED)
def test_worked_steps(layout, policy, cp_size, rank, mask, steps):
    metadata = rank_metadata(PackedLayout(*layout), policy, cp_size, rank, mask)
    found = [(*vectors(x), None if x.first_query is None else x.first_query.tolist()) for x in metadata.steps]
    assert found == steps
    for step in metadata.steps:
        for name in VECTORS:
            assert getattr(step, name).dtype == np.int32
            with pytest.raises(ValueError, match="read-only"):
                getattr(step, name)[0] = 1


@pytest.mark.clause("R6")
def test_worked_maxima():
    (step,) = rank_metadata(PackedLayout([0, 5, 12]), "packed_contiguous", 4, 1).steps
    assert (step.max_seqlen_q, step.max_seqlen_kv) == (2, 5)
    assert [type(step.max_seqlen_q), type(step.max_seqlen_kv)] == [int, int]
    (step,) = rank_metadata(PackedLayout([0]), "packed_contiguous", 2, 0).steps
    assert (step.max_seqlen_q, step.max_seqlen_kv) == (0, 0)


@pytest.mark.clause("R8")
@pytest.mark.parametrize(
    ("layout", "policy", "cp_size", "rank", "mask", "ranges"),
    [
        (([0, 5, 12],), "packed_contiguous", 4, 1, CAUSAL, [[0, 6]]),
        (([0, 5, 12],), "packed_contiguous", 4, 2, CAUSAL, [[5, 9]]),
        (([0, 5, 12],), "packed_contiguous", 4, 2, FULL, [[5, 12]]),
        (([0, 5, 12],), "packed_contiguous", 4, 2, AttentionMask(True, (1, 0)), [[5, 9]]),
        (([0, 6, 10], [0, 8, 12]), "packed_contiguous", 2, 1, CAUSAL, [[8, 12]]),
        (([0, 5, 8], [0, 6, 10]), "packed_contiguous", 1, 0, CAUSAL, [[0, 5], [6, 9]]),
        (([0, 6],), "packed_contiguous", 3, 1, AttentionMask(False, (1, 1)), [[1, 5]]),
        (([0, 8, 16],), "dual_chunk_swap", 2, 0, CAUSAL, [[0, 16]]),
        (([0, 8, 16],), "dual_chunk_swap", 2, 1, CAUSAL, [[0, 6], [8, 14]]),
        (([0, 16],), "dual_chunk_swap", 2, 0, AttentionMask(True, (1, 0)), [[0, 4], [11, 16]]),
        (([0, 3], None, 8), "packed_contiguous", 2, 1, CAUSAL, []),
        (([0],), "dual_chunk_swap", 2, 0, CAUSAL, []),
    ],
)
def test_worked_rows_of_keys_needed(layout, policy, cp_size, rank, mask, ranges):
    metadata = rank_metadata(PackedLayout(*layout), policy, cp_size, rank, mask)
    assert metadata.kv_ranges.tolist() == ranges
    assert metadata.kv_ranges.shape == (len(ranges), 2)
    assert metadata.kv_ranges.dtype == np.int64
    assert metadata.kv_rows_needed == sum(b - a for a, b in ranges)


@pytest.mark.clause("C5", "R2", "R4", "R5", "K1", "K4")
@settings(max_examples=150)
@given(cases(), masks())
def test_the_steps_of_all_ranks_describe_every_visible_pair_exactly_once(case, mask):
    """The central theorem, on integers."""
    layout, policy, cp_size = case
    real, physical, total = parts_of(layout)
    visible = witness.visible_pairs(witness.rows(real, physical, total), mask.causal, mask.window)
    dealt = witness.deal(physical, total, policy, cp_size)
    everything = Counter()
    for rank in range(cp_size):
        pairs = described(rank_metadata(layout, policy, cp_size, rank, mask), mask)
        assert pairs == Counter((i, j) for i, j in visible if dealt[i][0] == rank)
        everything += pairs
    assert everything == Counter(visible)


@pytest.mark.clause("R1", "R2", "R3", "R4", "R6")
@settings(max_examples=150)
@given(cases(), masks())
def test_offsets_equal_counting_row_by_row(case, mask):
    layout, policy, cp_size = case
    real, physical, total = parts_of(layout)
    pairs = witness.rows(real, physical, total)
    dealt = witness.deal(physical, total, policy, cp_size)
    documents = range(len(real) - 1)
    for rank in range(cp_size):
        metadata = rank_metadata(layout, policy, cp_size, rank, mask)
        local = [row for row in range(total) if dealt[row][0] == rank]
        assert metadata.indices.tolist() == local
        assert len(metadata.steps) == len(metadata.step_rows) == witness.steps_of(policy)
        for s, (step, step_rows) in enumerate(zip(metadata.steps, metadata.step_rows, strict=True)):
            held = [row for row in local if dealt[row] == (rank, s)]
            assert [local[i] for i in step_rows.tolist()] == held
            owned = [[row for row in held if physical[d] <= row < physical[d + 1]] for d in documents]
            queries = [sum(pairs[row][0] == d for row in owned[d]) for d in documents]
            keys = [keys_described(layout, policy, cp_size, rank, s, d, mask) for d in documents]
            assert vectors(step) == [offsets(queries), offsets([len(x) for x in owned]), offsets(keys), physical]
            assert step.seqlens_q.tolist() == queries
            assert step.seqlens_kv.tolist() == keys
            assert step.max_seqlen_q == max(queries, default=0)
            assert step.max_seqlen_kv == max(keys, default=0)
            # Where the step's own rows are stored, the queries of each document stand first, in order.
            for d in documents:
                start = int(step.cu_seqlens_q_padded[d])
                assert [pairs[held[start + i]] for i in range(queries[d])] == [
                    pairs[row] for row in owned[d] if pairs[row][0] == d
                ]


def keys_described(layout, policy, cp_size, rank, step, d, mask):
    """Keys of document d in a step, by clause R4, with the end of the rank's chunk in place of a clipped one."""
    real, physical, total = parts_of(layout)
    length, start = real[d + 1] - real[d], physical[d]
    chunks = cp_size if policy == "packed_contiguous" else 2 * cp_size
    chunk = rank if step == 0 else 2 * cp_size - 1 - rank
    if policy == "dual_chunk_swap":
        end = start + (chunk + 1) * (physical[d + 1] - start) // chunks
    else:
        end = (chunk + 1) * total // chunks
    if end <= start:
        return 0
    right = 0 if mask.causal else mask.window[1]
    return length if right == -1 else min(length, end - start + right)


@pytest.mark.clause("R2", "R3", "R4")
@given(cases(policy="packed_contiguous"))
def test_packed_contiguous_equals_the_published_formulas(case):
    """fragments [clip(s, lo, hi), clip(s + n, lo, hi)), keys min(n, max(0, hi - s)), storage clip(padded) - lo."""
    layout, policy, cp_size = case
    real, physical, total = parts_of(layout)
    for rank in range(cp_size):
        lo, hi = rank * total // cp_size, (rank + 1) * total // cp_size
        queries, keys = [], []
        for d, s in enumerate(physical[:-1]):
            n = real[d + 1] - real[d]
            queries.append(min(max(s + n, lo), hi) - min(max(s, lo), hi))
            keys.append(min(n, max(0, hi - s)))
        stored = [min(max(x, lo), hi) - lo for x in physical]
        (step,) = rank_metadata(layout, policy, cp_size, rank).steps
        assert vectors(step) == [offsets(queries), stored, offsets(keys), physical]


@pytest.mark.clause("R5")
@given(cases(), masks())
def test_alignment_is_bottom_right_unless_a_first_query_is_given(case, mask):
    layout, policy, cp_size = case
    pairs = witness.rows(*parts_of(layout))
    right = 0 if mask.causal else mask.window[1]
    needs_first_query = right > 0 or (right == -1 and mask.window[0] >= 0)
    for rank in range(cp_size):
        metadata = rank_metadata(layout, policy, cp_size, rank, mask)
        for step, step_rows in zip(metadata.steps, metadata.step_rows, strict=True):
            assert (step.first_query is not None) == needs_first_query
            if right == -1 and not needs_first_query:
                continue  # nothing limits what is seen, so the place of a query says nothing
            for d in np.flatnonzero(step.seqlens_q):
                row = metadata.indices[step_rows[step.cu_seqlens_q_padded[d]]]
                assert step.first_query_positions[d] == pairs[row][1]


@pytest.mark.clause("R8")
@settings(max_examples=100)
@given(cases(), masks())
def test_kv_ranges_equal_the_union_of_visible_keys(case, mask):
    layout, policy, cp_size = case
    real, physical, total = parts_of(layout)
    dealt = witness.deal(physical, total, policy, cp_size)
    visible = witness.visible_pairs(witness.rows(real, physical, total), mask.causal, mask.window)
    for rank in range(cp_size):
        metadata = rank_metadata(layout, policy, cp_size, rank, mask)
        ranges = metadata.kv_ranges.tolist()
        needed = sorted({j for i, j in visible if dealt[i][0] == rank})
        assert [row for first, last in ranges for row in range(first, last)] == needed
        assert all(first < last for first, last in ranges)
        assert all(a[1] < b[0] for a, b in pairwise(ranges)), "disjoint, with a gap between"
        assert metadata.kv_rows_needed == len(needed)


@pytest.mark.clause("L5", "R2", "R4")
@given(cases(), masks(), st.integers(1, 3))
def test_a_repeated_tail_only_adds_documents_of_length_zero(case, mask, times):
    layout, policy, cp_size = case
    for rank in range(cp_size):
        before = rank_metadata(layout, policy, cp_size, rank, mask)
        after = rank_metadata(repeat_tail(layout, times), policy, cp_size, rank, mask)
        assert after.indices.tolist() == before.indices.tolist()
        assert after.kv_ranges.tolist() == before.kv_ranges.tolist()
        for old, new in zip(before.steps, after.steps, strict=True):
            assert vectors(new) == [x + x[-1:] * times for x in vectors(old)]
            assert (new.max_seqlen_q, new.max_seqlen_kv) == (old.max_seqlen_q, old.max_seqlen_kv)


@pytest.mark.clause("P6", "R1")
def test_refuses_what_partitioning_refuses():
    layout = PackedLayout([0, 5, 12])
    with refused("not_divisible", "document 0 has 5 rows"):
        rank_metadata(layout, "dual_chunk_swap", 2, 0)
    with refused("policy"):
        rank_metadata(layout, "zigzag", 2, 0)
    with refused("cp_size"):
        rank_metadata(layout, "packed_contiguous", 0, 0)
    with refused("cp_rank"):
        rank_metadata(layout, "packed_contiguous", 2, 2)


@pytest.mark.clause("R1")
def test_the_mask_is_causal_unless_told_otherwise():
    layout = PackedLayout([0, 6])
    for policy in POLICIES:
        default, causal = (rank_metadata(layout, policy, 3, 0, *mask) for mask in ((), (CAUSAL,)))
        assert [vectors(step) for step in default.steps] == [vectors(step) for step in causal.steps]


# int32


@pytest.mark.clause("R7", "N3")
def test_offsets_beyond_int32_are_refused_by_name_and_index():
    last = 2**31 - 2**20
    fits = PackedLayout([0, 4, last])
    (step,) = rank_metadata(fits, "packed_contiguous", 2**20, 2**20 - 1).steps
    assert step.cu_seqlens_kv.tolist() == step.cu_seqlens_kv_padded.tolist() == [0, 4, last]
    assert step.cu_seqlens_q.tolist() == [0, 0, last // 2**20]
    # Real tokens fit, storage does not: the wrapped offset would be negative.
    with refused("int32_overflow", "cu_seqlens_kv_padded[2] is 2147483648"):
        rank_metadata(PackedLayout([0, 4, 8], [0, 8, 2**31]), "packed_contiguous", 2**20, 0)
    with refused("int32_overflow", "cu_seqlens_kv_padded[3] is 4294967296"):
        rank_metadata(PackedLayout([0, 0, 0, 0], [0, 8, 16, 2**32]), "packed_contiguous", 2**20, 7)
    with refused("int32_overflow", "cu_seqlens_kv", "2147483648"):
        rank_metadata(PackedLayout([0, 2**31]), "packed_contiguous", 2**20, 2**20 - 1, FULL)


@pytest.mark.clause("R7", "N3", "L4")
def test_rows_past_the_last_offset_may_pass_int32():
    """No offset names them, so a buffer of 2**33 rows is fine: rank 2**20 - 1 holds the last 2**13."""
    layout = PackedLayout([0, 5], [0, 8], 2**33)
    metadata = rank_metadata(layout, "packed_contiguous", 2**20, 2**20 - 1)
    assert metadata.indices.tolist() == list(range(2**33 - 2**13, 2**33))
    assert vectors(metadata.steps[0]) == [[0, 0], [0, 0], [0, 5], [0, 8]]
    assert metadata.kv_ranges.tolist() == []
    swapped = rank_metadata(layout, "packed_dual_chunk_swap", 2**20, 0)
    assert swapped.indices[[0, -1]].tolist() == [0, 2**33 - 1]
    assert [step.cu_seqlens_q.tolist() for step in swapped.steps] == [[0, 5], [0, 0]]


@pytest.mark.clause("R7")
@pytest.mark.parametrize("name", VECTORS)
def test_from_offsets_refuses_each_vector_beyond_int32(name):
    small, large = [0, 1], [0, 2**31]
    arguments = {"cu_seqlens_q": small, "cu_seqlens_kv": small, name: large}
    if not name.endswith("padded"):
        arguments[name + "_padded"] = large
    with refused("int32_overflow", f"{name}[1] is 2147483648"):
        StepMetadata.from_offsets(**arguments)
    arguments[name] = [0, 2**31 - 1]
    if not name.endswith("padded"):
        arguments[name + "_padded"] = [0, 2**31 - 1]
    assert getattr(StepMetadata.from_offsets(**arguments), name).tolist() == [0, 2**31 - 1]
    with refused("int32_overflow", "first_query[1] is -2147483648"):
        StepMetadata.from_offsets([0, 1, 2], [0, 1, 2], first_query=[0, -(2**31)])


@pytest.mark.clause("P9", "R1")
def test_one_rank_of_64_needs_no_array_of_the_whole_buffer():
    documents, cp_size, length = 10**5, 64, 1024
    layout = PackedLayout.from_lengths(np.full(documents, length))
    share = layout.total_tokens // cp_size
    tracemalloc.start()
    try:
        rank_metadata(layout, "dual_chunk_swap", cp_size, 37)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * (share + documents) * 8


# Steps from elsewhere


@pytest.mark.clause("R3", "R5", "R6")
def test_from_offsets_derives_what_is_not_given():
    step = StepMetadata.from_offsets([0, 2, 5], np.array([0, 7, 8], np.int32))
    assert vectors(step) == [[0, 2, 5], [0, 2, 5], [0, 7, 8], [0, 7, 8]]
    assert (step.max_seqlen_q, step.max_seqlen_kv) == (3, 7)
    assert step.first_query is None
    assert step.first_query_positions.tolist() == [5, -2]
    step = StepMetadata.from_offsets([0, 2], [0, 7], [0, 4], [0, 9], [3])
    assert vectors(step) == [[0, 2], [0, 4], [0, 7], [0, 9]]
    assert step.first_query_positions.tolist() == [3]


@pytest.mark.clause("L2", "L3", "R3")
@pytest.mark.parametrize(
    ("arguments", "code", "fragments"),
    [
        (([0, 2], [0, 1, 2]), "offsets_count", ("cu_seqlens_q has 2", "cu_seqlens_kv has 3")),
        (([0, 2], [0, 2], [0, 1, 2]), "offsets_count", ("cu_seqlens_q_padded has 3",)),
        (([0, 2], [0, 2], None, [0]), "offsets_count", ("cu_seqlens_kv_padded has 1",)),
        (([0, 2], [0, 2], None, None, [0, 0]), "offsets_count", ("first_query has 2",)),
        (([0, 3], [0, 2], [0, 2]), "real_exceeds_physical", ("cu_seqlens_q_padded",)),
        (([0, 3], [0, 5], None, [0, 4]), "real_exceeds_physical", ("cu_seqlens_kv_padded",)),
        (([1, 3], [0, 5]), "offsets_start", ("cu_seqlens_q[0] is 1",)),
        (([0, 3], [0, 5, 4]), "offsets_decreasing", ("cu_seqlens_kv[2] is 4",)),
        (([0, 3], [0, 5], [0, 4, 3]), "offsets_decreasing", ("cu_seqlens_q_padded[2] is 3",)),
        (([0, 3], [0.0, 5.0]), "offsets_type", ("cu_seqlens_kv[0]",)),
        (([0, 3], [0, 5], None, None, [0.5]), "offsets_type", ("first_query[0]",)),
        (([], [0]), "offsets_shape", ("cu_seqlens_q",)),
    ],
)
def test_from_offsets_refuses(arguments, code, fragments):
    with refused(code, *fragments):
        StepMetadata.from_offsets(*arguments)


@pytest.mark.clause("R2", "R4")
@given(layouts(), masks())
def test_the_whole_buffer_as_one_step(layout, mask):
    real, physical, total = parts_of(layout)
    step = StepMetadata.of_layout(layout)
    assert vectors(step) == [real, physical, real, physical]
    pairs = witness.step_pairs(*vectors(step), mask.causal, mask.window)
    assert sorted(pairs) == witness.visible_pairs(witness.rows(real, physical, total), mask.causal, mask.window)


# Forms that kernels take


def is_bottom_right(step):
    return all(
        first == keys - queries
        for first, keys, queries in zip(
            step.first_query_positions.tolist(), step.seqlens_kv.tolist(), step.seqlens_q.tolist(), strict=True
        )
        if queries
    )


@pytest.mark.clause("R9", "R5")
@given(cases(), masks())
def test_the_padded_form_keeps_the_four_vectors_or_refuses(case, mask):
    layout, policy, cp_size = case
    for rank in range(cp_size):
        for step in rank_metadata(layout, policy, cp_size, rank, mask).steps:
            if is_bottom_right(step):
                form = to_padded(step)
                assert [getattr(form, name).tolist() for name in VECTORS] == vectors(step)
                assert {getattr(form, name).dtype for name in VECTORS} == {np.dtype(np.int32)}
            else:
                with refused("mask", "bottom right", "document"):
                    to_padded(step)


@pytest.mark.clause("R9", "R5")
@given(cases(), masks())
def test_seqused_keeps_queries_keys_and_alignment_or_refuses(case, mask):
    layout, policy, cp_size = case
    for rank in range(cp_size):
        for step in rank_metadata(layout, policy, cp_size, rank, mask).steps:
            if not is_bottom_right(step):
                with refused("mask", "bottom right", "document"):
                    to_seqused(step)
                continue
            form = to_seqused(step)
            assert form.cu_seqlens_q.tolist() == step.cu_seqlens_q_padded.tolist()
            assert form.cu_seqlens_k.tolist() == step.cu_seqlens_kv_padded.tolist()
            assert form.seqused_q.tolist() == step.seqlens_q.tolist()
            assert form.seqused_k.tolist() == step.seqlens_kv.tolist()
            for name in ("cu_seqlens_q", "seqused_q", "cu_seqlens_k", "seqused_k"):
                assert getattr(form, name).dtype == np.int32
            back = from_seqused(form)
            assert vectors(back) == vectors(step)
            assert (back.max_seqlen_q, back.max_seqlen_kv) == (step.max_seqlen_q, step.max_seqlen_kv)
            first_query = None if step.first_query is None else step.first_query.tolist()
            assert witness.step_pairs(*vectors(back), mask.causal, mask.window) == witness.step_pairs(
                *vectors(step), mask.causal, mask.window, first_query
            )


@pytest.mark.clause("R9")
def test_seqused_worked():
    (step,) = rank_metadata(PackedLayout([0, 6, 10], [0, 8, 12]), "packed_contiguous", 2, 1).steps
    form = to_seqused(step)
    assert form.cu_seqlens_q.tolist() == [0, 2, 6]
    assert form.seqused_q.tolist() == [0, 4]
    assert form.cu_seqlens_k.tolist() == [0, 8, 12]
    assert form.seqused_k.tolist() == [6, 4]


@pytest.mark.clause("R9", "L3")
def test_from_seqused_reads_lists_and_refuses_nonsense():
    step = from_seqused(SequsedForm([0, 4, 8], [3, 0], [0, 8, 8], [5, 0]))
    assert vectors(step) == [[0, 3, 3], [0, 4, 8], [0, 5, 5], [0, 8, 8]]
    with refused("real_exceeds_physical", "document 0"):
        from_seqused(SequsedForm([0, 4], [5], [0, 8], [5]))
    with refused("offsets_count"):
        from_seqused(SequsedForm([0, 4], [1, 1], [0, 8], [5]))
    with refused("offsets_type", "seqused_k"):
        from_seqused(SequsedForm([0, 4], [1], [0, 8], [5.0]))


@pytest.mark.clause("R9", "R5")
def test_a_window_to_the_right_is_refused_only_where_it_reaches_behind_the_rank():
    mask = AttentionMask(False, (1, 1))
    last = rank_metadata(PackedLayout([0, 6]), "packed_contiguous", 3, 2, mask).steps[0]
    assert to_seqused(last).seqused_k.tolist() == [6]
    assert to_sliced(last).kv_slice == slice(0, 6)
    middle = rank_metadata(PackedLayout([0, 6]), "packed_contiguous", 3, 1, mask).steps[0]
    for convert in (to_padded, to_seqused, to_sliced):
        with refused("mask", "document 0", "starts at key 2"):
            convert(middle)


def sliced_by_definition(real, cp_size, rank, causal):
    """llama3_flash_attn_prepare_cu_seqlens of ring-flash-attention, said in words of rows.

    The documents that overlap the rank; their queries from the rank's first row on; their keys from the first
    of these documents on, up to the rank's last row if causal, else to the end of the last of them.
    """
    rows_per_rank = real[-1] // cp_size
    lo, hi = rank * rows_per_rank, (rank + 1) * rows_per_rank
    overlapping = [d for d in range(len(real) - 1) if max(real[d], lo) < min(real[d + 1], hi)]
    first, last = overlapping[0], overlapping[-1]
    queries, keys = [0], [0]
    for d in range(first, last + 1):
        queries.append(min(real[d + 1], hi) - lo)
        keys.append((min(real[d + 1], hi) if causal else real[d + 1]) - real[first])
    return queries, keys, slice(real[first], real[first] + keys[-1])


@pytest.mark.clause("R9")
@pytest.mark.parametrize(
    ("real", "cp_size", "rank", "causal", "expected"),
    [
        ([0, 5, 12], 4, 1, True, ([0, 2, 3], [0, 5, 6], slice(0, 6))),
        ([0, 5, 12], 4, 1, False, ([0, 2, 3], [0, 5, 12], slice(0, 12))),
        ([0, 5, 12], 4, 2, True, ([0, 3], [0, 4], slice(5, 9))),
        ([0, 5, 12], 4, 3, True, ([0, 3], [0, 7], slice(5, 12))),
        ([0, 4, 8], 2, 1, True, ([0, 4], [0, 4], slice(4, 8))),
        ([0, 3, 3, 8], 2, 0, True, ([0, 3, 3, 4], [0, 3, 3, 4], slice(0, 4))),  # between: stays
        ([0, 0, 4, 4, 8, 8], 2, 1, True, ([0, 4], [0, 4], slice(4, 8))),  # at the ends: dropped
        ([0, 1, 2, 3, 12], 2, 0, True, ([0, 1, 2, 3, 6], [0, 1, 2, 3, 6], slice(0, 6))),
    ],
)
def test_sliced_worked(real, cp_size, rank, causal, expected):
    assert sliced_by_definition(real, cp_size, rank, causal) == expected
    (step,) = rank_metadata(PackedLayout(real), "packed_contiguous", cp_size, rank, AttentionMask(causal)).steps
    form = to_sliced(step)
    assert (form.cu_seqlens_q.tolist(), form.cu_seqlens_k.tolist(), form.kv_slice) == expected
    assert form.cu_seqlens_q.dtype == form.cu_seqlens_k.dtype == np.int32
    assert form.max_seqlen_q == max(b - a for a, b in zip(expected[0], expected[0][1:], strict=False))
    assert form.max_seqlen_k == max(b - a for a, b in zip(expected[1], expected[1][1:], strict=False))


@pytest.mark.clause("R9")
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 8), st.booleans())
def test_sliced_equals_its_definition_without_padding(lengths, cp_size, causal):
    lengths[-1] += -sum(lengths) % cp_size
    lengths[0] += cp_size if sum(lengths) == 0 else 0
    real = offsets(lengths)
    for rank in range(cp_size):
        (step,) = rank_metadata(PackedLayout(real), "packed_contiguous", cp_size, rank, AttentionMask(causal)).steps
        form = to_sliced(step)
        assert (
            form.cu_seqlens_q.tolist(),
            form.cu_seqlens_k.tolist(),
            form.kv_slice,
        ) == sliced_by_definition(real, cp_size, rank, causal)


@pytest.mark.clause("R9")
@given(cases(), masks())
def test_sliced_keeps_queries_keys_and_alignment_or_refuses(case, mask):
    layout, policy, cp_size = case
    for rank in range(cp_size):
        for step in rank_metadata(layout, policy, cp_size, rank, mask).steps:
            first_query = None if step.first_query is None else step.first_query.tolist()
            pairs = witness.step_pairs(*vectors(step), mask.causal, mask.window, first_query)
            try:
                form = to_sliced(step)
            except ValueError as error:
                assert error.code == ("padding_unsupported" if is_bottom_right(step) else "mask")  # noqa: PT017
                continue
            q, k = form.cu_seqlens_q.tolist(), form.cu_seqlens_k.tolist()
            shifted = [
                (i, j + form.kv_slice.start) for i, j in witness.step_pairs(q, q, k, k, mask.causal, mask.window)
            ]
            assert shifted == pairs
            assert form.max_seqlen_q == step.max_seqlen_q


@pytest.mark.clause("R9", "A5")
@pytest.mark.parametrize(
    ("layout", "policy", "cp_size", "rank", "document"),
    [
        (([0, 3, 5], [0, 4, 6]), "packed_contiguous", 1, 0, 1),  # queries and keys of document 1 behind a gap
        (([0, 6, 10], [0, 8, 12]), "packed_contiguous", 2, 1, 1),  # the rank opens with padding
        (([0, 8, 16],), "dual_chunk_swap", 2, 0, 1),  # keys of document 0 end before document 1 begins
    ],
)
def test_sliced_has_no_room_for_padding(layout, policy, cp_size, rank, document):
    step = rank_metadata(PackedLayout(*layout), policy, cp_size, rank).steps[0]
    with refused("padding_unsupported", f"document {document} "):
        to_sliced(step)


@pytest.mark.clause("R9")
def test_sliced_takes_padding_that_no_kernel_sees():
    """Behind the last query, and one document alone under dual_chunk_swap."""
    (step,) = rank_metadata(PackedLayout([0, 3], [0, 4], 8), "packed_contiguous", 2, 0).steps
    assert to_sliced(step).cu_seqlens_q.tolist() == [0, 3]
    (empty,) = rank_metadata(PackedLayout([0, 3], [0, 4], 8), "packed_contiguous", 2, 1).steps
    form = to_sliced(empty)
    assert (form.cu_seqlens_q.tolist(), form.cu_seqlens_k.tolist()) == ([0], [0])
    assert (form.max_seqlen_q, form.max_seqlen_k, form.kv_slice) == (0, 0, slice(0, 0))
    early, late = rank_metadata(PackedLayout([0, 8]), "dual_chunk_swap", 2, 1).steps
    assert [to_sliced(step).cu_seqlens_k.tolist() for step in (early, late)] == [[0, 4], [0, 6]]
