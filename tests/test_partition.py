"""Which rows a rank holds: worked by hand, asked row by row, and put back again."""

import tracemalloc

import numpy as np
import pytest
import witness
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import POLICIES, cases, layout_of, layouts, parts_of, repeat_tail
from support import refused

from refimpl.layout import PackedLayout
from refimpl.partition import (
    Policy,
    inverse_indices,
    next_token_labels,
    pad_rows,
    padded_for,
    padding_needed,
    partition,
    partition_indices,
    position_ids,
    rank_order_is_sequence_order,
    unpartition,
)


def ranks(layout, policy, cp_size):
    return [partition_indices(layout, policy, cp_size, rank).tolist() for rank in range(cp_size)]


WORKED = [
    # Documents of 8 and 8, then of 8 and 4, on two ranks.
    ("dual_chunk_swap", [0, 8, 16], None, [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]),
    ("dual_chunk_swap", [0, 8, 12], None, [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]),
    ("packed_contiguous", [0, 8, 12], None, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
    ("packed_dual_chunk_swap", [0, 8, 12], None, [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]),
    # The buffer is cut wherever the documents end; documents without rows own nothing.
    ("packed_contiguous", [0, 5, 12], None, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]),
    ("packed_dual_chunk_swap", [0, 0, 1, 12, 12], None, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
    ("dual_chunk_swap", [0, 0, 6, 6, 12, 12], None, [[0, 5, 6, 11], [1, 4, 7, 10], [2, 3, 8, 9]]),
    # Rows past the last offset: cut like one more document, or with the buffer.
    ("dual_chunk_swap", [0, 4], 12, [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]),
    ("dual_chunk_swap", [0], 4, [[0, 3], [1, 2]]),
    ("packed_contiguous", [0, 1], 6, [[0, 1, 2], [3, 4, 5]]),
    ("packed_dual_chunk_swap", [0, 1], 8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
    # One rank holds everything, nobody holds nothing.
    ("dual_chunk_swap", [0, 2, 6], None, [[0, 1, 2, 3, 4, 5]]),
    ("packed_contiguous", [0, 3], None, [[0, 1, 2]]),
    ("packed_dual_chunk_swap", [0, 2], None, [[0, 1]]),
    ("dual_chunk_swap", [0], None, [[], []]),
    ("packed_contiguous", [0, 0], None, [[], [], []]),
]


@pytest.mark.clause("P1", "P2", "P3", "P4", "P5", "P8")
@pytest.mark.parametrize(("policy", "offsets", "total", "expected"), WORKED)
def test_worked_rows(policy, offsets, total, expected):
    layout = PackedLayout(offsets, total_tokens=total)
    assert ranks(layout, policy, len(expected)) == expected
    assert ranks(layout, Policy(policy), len(expected)) == expected


@pytest.mark.clause("P2")
def test_the_physical_rows_of_a_document_are_cut_not_the_real_ones():
    layout = PackedLayout([0, 5, 6], [0, 8, 12])
    assert ranks(layout, "dual_chunk_swap", 2) == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


@pytest.mark.clause("P1", "P2", "P3", "P4", "P5", "P8")
@settings(max_examples=150)
@given(cases())
def test_rows_equal_asking_every_row(case):
    layout, policy, cp_size = case
    _, physical, total = parts_of(layout)
    dealt = witness.deal(physical, total, policy, cp_size)
    for rank in range(cp_size):
        indices = partition_indices(layout, policy, cp_size, rank)
        assert indices.dtype == np.int64
        assert indices.tolist() == [row for row in range(total) if dealt[row][0] == rank]
        assert len(indices) == total // cp_size


@pytest.mark.clause("P1", "P7")
@given(cases())
def test_ranks_cover_every_row_once_and_the_inverse_leads_back(case):
    layout, policy, cp_size = case
    rank_order = [row for rows in ranks(layout, policy, cp_size) for row in rows]
    assert sorted(rank_order) == list(range(layout.total_tokens))
    inverse = inverse_indices(layout, policy, cp_size)
    assert inverse.dtype == np.int64
    assert [rank_order[place] for place in inverse.tolist()] == list(range(layout.total_tokens))


@pytest.mark.clause("C1", "P3")
@given(cases())
def test_whether_rank_order_is_sequence_order(case):
    layout, policy, cp_size = case
    rank_order = [row for rows in ranks(layout, policy, cp_size) for row in rows]
    if rank_order_is_sequence_order(policy):
        assert rank_order == list(range(layout.total_tokens))
    assert rank_order_is_sequence_order(policy) == (policy == "packed_contiguous")


@pytest.mark.clause("P1", "L5")
@given(cases(), st.integers(1, 3))
def test_a_repeated_tail_moves_no_row(case, times):
    layout, policy, cp_size = case
    assert ranks(repeat_tail(layout, times), policy, cp_size) == ranks(layout, policy, cp_size)


DTYPES = [
    "bool", "int8", "uint16", ">i4", "int64", "float16", "float32", ">f8", "longdouble", "complex64", "U3", "S2",
    "M8[s]", "object", [("id", "i4"), ("weight", ">f8")], "bfloat16",
]  # fmt: skip


def values_of(dtype, shape, require):
    """Distinct values of any dtype, and the dtype."""
    count = int(np.prod(shape))
    if dtype == "bfloat16":
        dtype = require("ml_dtypes").bfloat16
    if dtype == "object":
        x = np.empty(count, object)
        x[:] = [(i,) for i in range(count)]
    elif isinstance(dtype, list):
        x = np.zeros(count, dtype)
        x["id"] = np.arange(count)
        x["weight"] = -np.arange(count)
    elif dtype == "bool":
        x = np.arange(count) % 3 == 0
    elif dtype in ("U3", "S2"):
        x = np.array([f"{i % 100}" for i in range(count)]).astype(dtype)
    elif dtype == "M8[s]":
        x = np.arange(count).astype(dtype)
    else:
        x = np.arange(count).astype(dtype)
    return x.reshape(shape)


@pytest.mark.clause("P1", "P7")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_any_dtype_is_cut_and_put_back(dtype, policy, require):
    layout = PackedLayout([0, 5, 5, 12], [0, 8, 8, 16], 20)
    x = values_of(dtype, (20, 2), require)
    shards = partition(x, layout, policy, 2)
    dealt = witness.deal([0, 8, 8, 16], 20, policy, 2)
    for rank, shard in enumerate(shards):
        assert shard.dtype == x.dtype
        assert shard.tolist() == [x[row].tolist() for row in range(20) if dealt[row][0] == rank]
    whole = unpartition(shards, layout, policy)
    assert whole.dtype == x.dtype
    assert whole.tolist() == x.tolist()


@pytest.mark.clause("P1", "P7")
@settings(max_examples=40)
@given(cases(max_documents=3), st.lists(st.integers(0, 3), max_size=3), st.data())
def test_any_axis_and_trailing_shape(case, shape, data):
    layout, policy, cp_size = case
    axis = data.draw(st.integers(0, len(shape)))
    negative = data.draw(st.booleans())
    shape.insert(axis, layout.total_tokens)
    token_axis = axis - len(shape) if negative else axis
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    shards = partition(x, layout, policy, cp_size, axis=token_axis)
    for rank, shard in enumerate(shards):
        rows = partition_indices(layout, policy, cp_size, rank).tolist()
        assert shard.shape == (*shape[:axis], len(rows), *shape[axis + 1 :])
        for place, row in enumerate(rows):
            assert np.array_equal(np.moveaxis(shard, axis, 0)[place], np.moveaxis(x, axis, 0)[row])
    assert np.array_equal(unpartition(shards, layout, policy, axis=token_axis), x)


@pytest.mark.clause("P1", "P7")
def test_shards_are_copies_also_of_lists_and_views():
    layout = PackedLayout([0, 4])
    x = np.arange(8.0)[::2]
    shards = partition(x, layout, "packed_contiguous", 2)
    shards[0][0] = 99
    assert x.tolist() == [0, 2, 4, 6]
    whole = unpartition([[1, 2], [3, 4]], layout, "packed_contiguous")
    assert whole.tolist() == [1, 2, 3, 4]
    assert [shard.tolist() for shard in partition([1, 2, 3, 4], layout, "dual_chunk_swap", 2)] == [[1, 4], [2, 3]]
    one = partition(x, layout, "packed_contiguous", 1)[0]
    one[0] = 99
    assert x[0] == 0


FOUR = PackedLayout([0, 4])
CALLS = {
    "partition_indices": lambda policy, cp_size: partition_indices(FOUR, policy, cp_size, 0),
    "inverse_indices": lambda policy, cp_size: inverse_indices(FOUR, policy, cp_size),
    "partition": lambda policy, cp_size: partition(np.zeros(4), FOUR, policy, cp_size),
    "padding_needed": lambda policy, cp_size: padding_needed(FOUR, policy, cp_size),
    "padded_for": lambda policy, cp_size: padded_for(FOUR, policy, cp_size),
}


@pytest.mark.clause("P1")
@pytest.mark.parametrize("call", CALLS)
def test_bad_cp_size_and_policy_are_refused_everywhere(call):
    for cp_size in (0, -1, -2, 2.0, "2", None, True):
        with refused("cp_size", "cp_size is"):
            CALLS[call]("dual_chunk_swap", cp_size)
    for policy in ("contiguous", "zigzag", "DUAL_CHUNK_SWAP", "", None, 3, []):
        with refused("policy", repr(str(policy)), *POLICIES):
            CALLS[call](policy, 2)


@pytest.mark.clause("P1")
@pytest.mark.parametrize("rank", [2, 3, -1, 0.0, None, "0", False])
def test_bad_ranks_are_refused(rank):
    with refused("cp_rank", f"cp_rank is {rank!r}"):
        partition_indices(FOUR, "dual_chunk_swap", 2, rank)
    assert partition_indices(FOUR, "dual_chunk_swap", np.int64(2), np.int32(1)).tolist() == [1, 2]


@pytest.mark.clause("P1")
def test_tensors_of_another_length_are_refused():
    for x, axis in ((np.zeros(5), 0), (np.zeros((4, 5)), 1), (np.zeros((4, 5)), -1), (np.zeros(()), 0)):
        with refused("shape", "x has shape", "expected 4 (total_tokens)", f"axis {axis}"):
            partition(x, FOUR, "dual_chunk_swap", 2, axis=axis)
    for axis in (1, -2, 0.0, None, True):
        with refused("shape", "axis"):
            partition(np.zeros(4), FOUR, "dual_chunk_swap", 2, axis=axis)


@pytest.mark.clause("P7")
@pytest.mark.parametrize(
    ("shards", "code", "fragments"),
    [
        ([], "cp_size", ("cp_size is 0",)),
        ([np.zeros(2)] * 3, "not_divisible", ("divisible by 3, not 4",)),
        ([np.zeros(2), np.zeros(3)], "shape", ("shards[1] has shape [3]", "expected 2")),
        ([np.zeros(4), np.zeros(4)], "shape", ("shards[0] has shape [4]",)),
        ([np.zeros((2, 1)), np.zeros((2, 2))], "shape", ("shards[1] is float64[2, 2]", "float64[2, 1]")),
        ([np.zeros((2, 1)), np.zeros(2)], "shape", ("shards[1]",)),
        ([np.zeros(2), np.zeros(2, np.float32)], "dtype", ("shards[1] is float32[2]", "float64[2]")),
        ([np.zeros(2), np.zeros(2, int)], "dtype", ("shards[1] is int64[2]",)),
        ([np.zeros(()), np.zeros(())], "shape", ("shards[0] has shape []",)),
    ],
)
def test_shards_that_do_not_belong_together_are_refused(shards, code, fragments):
    with refused(code, *fragments):
        unpartition(shards, FOUR, "packed_contiguous")


@pytest.mark.clause("P6")
@pytest.mark.parametrize(
    ("arguments", "policy", "cp_size", "fragments"),
    [
        (([0, 5, 12],), "dual_chunk_swap", 2, ("divisible by 4", "document 0 has 5 rows", "add 3 there, 4 in all")),
        (([0, 4, 9],), "dual_chunk_swap", 2, ("document 1 has 5 rows", "add 3 there, 3 in all", "multiple_of=4")),
        (([0, 3], [0, 6]), "dual_chunk_swap", 2, ("document 0 has 6 rows", "add 2 there")),
        (([0, 4], None, 7), "dual_chunk_swap", 2, ("3 rows lie past the last offset", "add 1 there")),
        (([0, 5], None, 7), "dual_chunk_swap", 2, ("document 0 has 5 rows", "add 3 there, 5 in all")),
        (([0, 5, 12],), "packed_contiguous", 5, ("divisible by 5, not 12", "add 3 rows", "total_tokens=15")),
        (([0, 6],), "packed_dual_chunk_swap", 2, ("divisible by 4, not 6", "add 2 rows", "total_tokens=8")),
    ],
)
def test_what_cannot_be_cut_evenly_is_refused_with_the_least_padding(arguments, policy, cp_size, fragments):
    layout = PackedLayout(*arguments)
    for rank in range(cp_size):
        with refused("not_divisible", policy, f"cp_size {cp_size}", *fragments):
            partition_indices(layout, policy, cp_size, rank)
    for call in (inverse_indices, lambda *a: partition(np.zeros(layout.total_tokens), *a)):
        with refused("not_divisible", *fragments):
            call(layout, policy, cp_size)


@pytest.mark.clause("P6")
@given(layouts(), st.sampled_from(POLICIES), st.integers(1, 8))
def test_padding_needed_makes_a_layout_divisible_and_less_would_not(layout, policy, cp_size):
    real, physical, total = parts_of(layout)
    padding = padding_needed(layout, policy, cp_size)
    added = padding.document_rows.tolist()
    assert len(added) == layout.num_documents
    assert min([*added, padding.tail_rows]) >= 0
    assert padding.total == sum(added) + padding.tail_rows
    padded = padded_for(layout, policy, cp_size)
    assert padded.cu_seqlens.tolist() == real
    assert [b - a for a, b in zip(layout.seqlens_padded.tolist(), padded.seqlens_padded.tolist(), strict=True)] == added
    assert padded.total_tokens == total + padding.total
    assert witness.is_divisible(padded.cu_seqlens_padded.tolist(), padded.total_tokens, policy, cp_size)
    assert (padding.total == 0) == witness.is_divisible(physical, total, policy, cp_size)
    assert padding_needed(padded, policy, cp_size).total == 0
    assert (padded == layout) == (padding.total == 0)
    # Each extent is padded by itself, so the whole is least exactly if no extent can do with fewer rows.
    for d, rows in enumerate([*added, padding.tail_rows]):
        for fewer in range(rows):
            sizes = [*padded.seqlens_padded.tolist(), padded.total_tokens - int(padded.cu_seqlens_padded[-1])]
            sizes[d] -= rows - fewer
            offsets = [sum(sizes[:i]) for i in range(len(sizes))]
            assert not witness.is_divisible(offsets, sum(sizes), policy, cp_size)


def splittings(rows, places):
    """All ways to put `rows` rows in `places` places."""
    if places == 1:
        yield (rows,)
        return
    for first in range(rows + 1):
        for rest in splittings(rows - first, places - 1):
            yield (first, *rest)


@pytest.mark.clause("P6")
@pytest.mark.parametrize("policy", POLICIES)
def test_no_smaller_padding_exists(policy):
    """Over every way to add fewer rows, anywhere: none makes the layout divisible."""
    for physical, tail in (([3, 4], 1), ([5, 0, 1], 0), ([2, 2], 3), ([4, 8], 0)):
        for cp_size in (1, 2, 3):
            layout = layout_of(physical, physical, tail)
            needed = padding_needed(layout, policy, cp_size).total
            for fewer in range(min(needed, 6)):
                for added in splittings(fewer, len(physical) + 1):
                    sizes = [size + more for size, more in zip([*physical, tail], added, strict=True)]
                    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
                    assert not witness.is_divisible(offsets, sum(sizes), policy, cp_size)


@pytest.mark.clause("P9")
@pytest.mark.parametrize("policy", POLICIES)
def test_one_rank_of_64_needs_no_array_of_the_whole_buffer(policy):
    rows, documents, cp_size = 10**8, 10**5, 64
    length = 1024
    real = np.full(documents, length)
    real[::2] -= 51
    layout = PackedLayout.from_lengths(real, padded_lengths=np.full(documents, length))
    assert layout.total_tokens == 102_400_000 > rows
    tracemalloc.start()
    try:
        indices = partition_indices(layout, policy, cp_size, 37)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    share = layout.total_tokens // cp_size
    assert len(indices) == share
    assert peak < 6 * (share + documents) * 8
    assert not {"document_ids", "positions"} & set(vars(layout)), "arrays of length T were made and kept"
    if policy == "packed_contiguous":
        expected = [37 * share, 38 * share - 1]
    elif policy == "packed_dual_chunk_swap":
        expected = [37 * share // 2, (2 * cp_size - 37) * share // 2 - 1]
    else:
        expected = [37 * 8, (documents - 1) * length + (2 * cp_size - 37) * 8 - 1]
    assert [indices[0], indices[-1]] == expected
    assert (np.diff(indices) > 0).all()


# What a data loader prepares


@pytest.mark.clause("P10", "L6")
@given(layouts())
def test_position_ids_restart_and_run_on_through_padding(layout):
    ids = position_ids(layout)
    assert ids.tolist() == [position for _, position in witness.rows(*parts_of(layout))]


@pytest.mark.clause("L7", "P10")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (([0, 3, 5], [0, 4, 6], 7), [11, 12, -100, -100, 15, -100, -100]),
        (([0, 4],), [11, 12, 13, -100]),
        (([0, 1, 1, 3],), [-100, 12, -100]),
        (([0, 1],), [-100]),
        (([0],), []),
        (([0, 2], [0, 2], 4), [11, -100, -100, -100]),
    ],
)
def test_labels_worked(arguments, expected):
    layout = PackedLayout(*arguments)
    ids = np.arange(10, 10 + layout.total_tokens)
    for form in (ids, ids.tolist() if len(ids) else ids, ids.astype(np.int32)):
        assert next_token_labels(form, layout).tolist() == expected


@pytest.mark.clause("L7")
@given(layouts(), st.sampled_from([-100, -1, 7]))
def test_labels_equal_a_plain_loop(layout, ignore_index):
    ids = [1000 + row for row in range(layout.total_tokens)]
    pairs = witness.rows(*parts_of(layout))
    expected = []
    for row, (d, position) in enumerate(pairs):
        follower = [other for other, pair in enumerate(pairs) if d >= 0 and pair == (d, position + 1)]
        expected.append(ids[follower[0]] if follower else ignore_index)
        assert not follower or follower[0] == row + 1
    assert next_token_labels(np.array(ids, np.int64), layout, ignore_index).tolist() == expected


@pytest.mark.clause("L7")
def test_labels_keep_dtype_and_trailing_shape():
    ids = np.arange(8, dtype=np.int32).reshape(4, 2)
    labels = next_token_labels(ids, FOUR)
    assert labels.dtype == np.int32
    assert labels.tolist() == [[2, 3], [4, 5], [6, 7], [-100, -100]]
    assert ids[0, 0] == 0
    assert next_token_labels(np.arange(4, dtype=np.uint8), FOUR, 255).tolist() == [1, 2, 3, 255]


@pytest.mark.clause("L7", "P10")
@pytest.mark.parametrize(
    ("ids", "ignore_index", "code", "fragments"),
    [
        (np.arange(5), -100, "shape", ("ids", "[5]", "expected 4")),
        (np.zeros((2, 4), int), -100, "shape", ("ids",)),
        (np.arange(4.0), -100, "dtype", ("ids", "float64")),
        (np.zeros(4, bool), -100, "dtype", ("ids", "bool")),
        (np.arange(4, dtype=np.uint8), -100, "dtype", ("-100", "uint8")),
        (np.arange(4, dtype=np.int8), -1000, "dtype", ("-1000", "int8")),
    ],
)
def test_labels_refuse(ids, ignore_index, code, fragments):
    with refused(code, *fragments):
        next_token_labels(ids, FOUR, ignore_index)


@pytest.mark.clause("P10", "L7")
@given(cases())
def test_labels_made_first_and_partitioned_are_right_on_every_rank(case):
    layout, policy, cp_size = case
    pairs = witness.rows(*parts_of(layout))
    ids = np.arange(layout.total_tokens) * 3
    shards = partition(next_token_labels(ids, layout), layout, policy, cp_size)
    for rank, shard in enumerate(shards):
        for row, label in zip(partition_indices(layout, policy, cp_size, rank), shard, strict=True):
            d, position = pairs[row]
            has_next = d >= 0 and row + 1 < len(pairs) and pairs[row + 1] == (d, position + 1)
            assert label == (3 * (row + 1) if has_next else -100)


@pytest.mark.clause("P10")
@given(layouts(), st.sampled_from(POLICIES), st.integers(1, 5))
def test_pad_rows_moves_tokens_and_fills_the_rest(layout, policy, cp_size):
    padded = padded_for(layout, policy, cp_size)
    before, after = witness.rows(*parts_of(layout)), witness.rows(*parts_of(padded))
    x = np.arange(2 * layout.total_tokens).reshape(-1, 2)
    place = {pair: row for row, pair in enumerate(before) if pair[0] >= 0}
    expected = [x[place[pair]].tolist() if pair[0] >= 0 else [-7, -7] for pair in after]
    assert pad_rows(x, layout, padded, -7).tolist() == expected
    assert pad_rows(x, layout, padded, fill=-7).dtype == x.dtype


@pytest.mark.clause("P10")
def test_pad_rows_worked_and_both_ways():
    tight, loose = PackedLayout.from_lengths([3, 0, 1]), PackedLayout.from_lengths([3, 0, 0, 1], 4)
    ids = np.array([5, 6, 7, 8])
    assert pad_rows(ids, tight, loose, 0).tolist() == [5, 6, 7, 0, 8, 0, 0, 0]
    assert pad_rows(ids, tight, loose, -100).tolist() == [5, 6, 7, -100, 8, -100, -100, -100]
    assert pad_rows([5, 6, 7, 9, 8, 9, 9, 9], loose, tight, 0).tolist() == [5, 6, 7, 8]
    x = np.array([[1.0], [np.nan], [3.0], [4.0]])
    assert np.isnan(pad_rows(x, tight, loose, 0.0)[1, 0])


@pytest.mark.clause("P10")
def test_pad_rows_refuses_other_documents():
    tight = PackedLayout.from_lengths([3, 1])
    for other in (PackedLayout.from_lengths([1, 3]), PackedLayout.from_lengths([4]), PackedLayout.from_lengths([3])):
        with refused("offsets_count", "real lengths differ"):
            pad_rows(np.zeros(4), tight, other, 0)
    with refused("shape", "x has shape [5]", "expected 4"):
        pad_rows(np.zeros(5), tight, tight, 0)
