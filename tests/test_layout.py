"""Layouts: (document, position) of every row, every way to build one, and every reason to refuse one."""

import tracemalloc

import numpy as np
import pytest
import witness
from hypothesis import given
from hypothesis import strategies as st
from strategies import layouts, parts_of, repeat_tail
from support import refused

from refimpl.layout import PackedLayout

WORKED = {
    "one document": (([0, 3],), [0, 0, 0], [0, 1, 2]),
    "no document": (([0],), [], []),
    "no document, only tail": (([0], None, 3), [-1, -1, -1], [0, 1, 2]),
    "padding between and behind": (
        ([0, 3, 5], [0, 4, 6], 7),
        [0, 0, 0, -1, 1, 1, -1],
        [0, 1, 2, 3, 0, 1, 0],
    ),
    "zero-length documents at both ends and inside": (
        ([0, 0, 2, 2, 3, 3],),
        [1, 1, 3],
        [0, 1, 0],
    ),
    "documents of padding alone": (
        ([0, 0, 1, 1], [0, 2, 3, 5]),
        [-1, -1, 1, -1, -1],
        [0, 1, 0, 0, 1],
    ),
    "tail padding without padding between": (([0, 2, 3], None, 6), [0, 0, 1, -1, -1, -1], [0, 1, 0, 0, 1, 2]),
    "padding of the last document is not tail": (([0, 2], [0, 4], 6), [0, 0, -1, -1, -1, -1], [0, 1, 2, 3, 0, 1]),
}


@pytest.mark.clause("L1", "L4", "L5", "L6")
@pytest.mark.parametrize("name", WORKED)
def test_worked_documents_and_positions(name):
    arguments, document_ids, positions = WORKED[name]
    layout = PackedLayout(*arguments)
    assert layout.document_ids.tolist() == document_ids
    assert layout.positions.tolist() == positions
    assert layout.document_ids.dtype == layout.positions.dtype == np.int64
    assert layout.total_tokens == len(document_ids)
    assert type(layout.total_tokens) is int


@pytest.mark.clause("L1", "L4", "L5", "L6")
@given(layouts())
def test_documents_and_positions_equal_a_plain_loop(layout):
    expected = witness.rows(*parts_of(layout))
    assert list(zip(layout.document_ids.tolist(), layout.positions.tolist(), strict=True)) == expected


@pytest.mark.clause("L1", "L5")
@given(layouts())
def test_lengths_and_rows_of_documents(layout):
    real, physical, total = parts_of(layout)
    pairs = witness.rows(real, physical, total)
    documents = range(len(real) - 1)
    assert layout.num_documents == len(documents)
    assert layout.seqlens.tolist() == [sum(pair[0] == d for pair in pairs) for d in documents]
    assert layout.seqlens_padded.tolist() == [physical[d + 1] - physical[d] for d in documents]
    listed = [(d, list(range(rows.start, rows.stop))) for d, rows in layout.document_rows()]
    assert listed == [(d, rows) for d in documents if (rows := [i for i, pair in enumerate(pairs) if pair[0] == d])]


@pytest.mark.clause("L5")
@given(layouts(), st.integers(0, 4))
def test_a_repeated_tail_changes_no_row(layout, times):
    repeated = repeat_tail(layout, times)
    assert repeated.num_documents == layout.num_documents + times
    assert repeated.total_tokens == layout.total_tokens
    assert repeated.document_ids.tolist() == layout.document_ids.tolist()
    assert repeated.positions.tolist() == layout.positions.tolist()
    assert repeated.has_padding == layout.has_padding
    assert list(repeated.document_rows()) == list(layout.document_rows())


@pytest.mark.clause("L5", "L6")
@given(layouts(), st.data())
def test_a_zero_length_document_anywhere_only_renumbers(layout, data):
    real, physical, total = parts_of(layout)
    at = data.draw(st.integers(0, len(real) - 1))
    more = PackedLayout(real[: at + 1] + real[at:], physical[: at + 1] + physical[at:], total)
    assert more.positions.tolist() == layout.positions.tolist()
    assert more.document_ids.tolist() == [d + 1 if d >= at else d for d in layout.document_ids.tolist()]


@pytest.mark.clause("L10")
def test_padding_is_seen_by_value():
    assert not PackedLayout([0, 3, 5]).has_padding
    assert not PackedLayout([0, 3, 5], [0, 3, 5]).has_padding
    assert not PackedLayout([0, 3, 5], np.array([0, 3, 5]), 5).has_padding
    assert not PackedLayout([0], [0], 0).has_padding
    assert PackedLayout([0, 3, 5], [0, 4, 6]).has_padding
    assert PackedLayout([0, 3, 5], [0, 3, 6]).has_padding  # behind the last document alone
    assert PackedLayout([0, 3, 5], total_tokens=6).has_padding  # past the last offset alone
    assert PackedLayout([0, 0], [0, 2]).has_padding


@pytest.mark.clause("L10")
@given(layouts())
def test_padding_is_there_exactly_if_a_row_has_no_document(layout):
    assert layout.has_padding == any(d < 0 for d, _ in witness.rows(*parts_of(layout)))


class ArrayOnly:
    """An object that knows `__array__` and nothing else."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype=dtype)


class DlpackOnly:
    """An object that knows DLPack and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnDevice:
    """What an array in another memory answers."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("can't convert cuda:0 device type tensor to numpy.\nUse Tensor.cpu() first.")


class DlpackOnDevice:
    """The same through DLPack."""

    def __dlpack__(self, **options):
        raise BufferError("memory of cuda:0")

    def __dlpack_device__(self):
        return (2, 0)


OFFSETS = [0, 3, 3, 7]
FORMS = {
    "list": list,
    "tuple": tuple,
    "list of NumPy integers": lambda x: [np.int32(x[0]), np.int64(x[1]), *x[2:]],
    "range": lambda x: range(0, 8, 7) if x == [0, 7] else range(0),
    "int32": lambda x: np.array(x, np.int32),
    "int64": lambda x: np.array(x, np.int64),
    "big-endian int32": lambda x: np.array(x, ">i4"),
    "big-endian int64": lambda x: np.array(x, ">i8"),
    "little-endian int32": lambda x: np.array(x, "<i4"),
    "strided": lambda x: np.repeat(np.array(x, np.int64), 3)[::3],
    "read-only": lambda x: np.frombuffer(np.array(x, np.int32).tobytes(), np.int32),
    "__array__": lambda x: ArrayOnly(np.array(x, np.int32)),
    "__dlpack__ int32": lambda x: DlpackOnly(np.array(x, np.int32)),
    "__dlpack__ int64": lambda x: DlpackOnly(np.array(x, np.int64)),
}


@pytest.mark.clause("L2")
@pytest.mark.parametrize("form", [name for name in FORMS if name != "range"])
def test_offsets_come_in_many_forms(form):
    layout = PackedLayout(FORMS[form](OFFSETS), FORMS[form]([0, 4, 5, 9]))
    assert layout == PackedLayout(OFFSETS, [0, 4, 5, 9])
    for offsets, expected in ((layout.cu_seqlens, OFFSETS), (layout.cu_seqlens_padded, [0, 4, 5, 9])):
        assert offsets.tolist() == expected
        assert offsets.dtype == np.int64
        assert offsets.dtype.isnative


@pytest.mark.clause("L2")
def test_offsets_come_as_a_range():
    assert PackedLayout(range(0, 8, 7)) == PackedLayout([0, 7])


INT = "expected int32 or int64"
BAD_OFFSETS = {
    "a float": ([0, 4.0], "offsets_type", ("cu_seqlens[1]", "4.0")),
    "a bool in a list": ([0, True], "offsets_type", ("cu_seqlens[1]", "True")),
    "a NumPy bool in a list": ([np.False_, 1], "offsets_type", ("cu_seqlens[0]", "False")),
    "a string in a list": ([0, "4"], "offsets_type", ("cu_seqlens[1]", "'4'")),
    "None in a list": ([0, None], "offsets_type", ("cu_seqlens[1]", "None")),
    "float64": (np.array([0.0, 4.0]), "offsets_type", ("cu_seqlens", "float64", INT)),
    "float32": (np.array([0, 4], np.float32), "offsets_type", ("cu_seqlens", "float32", INT)),
    "bool array": (np.array([False, True]), "offsets_type", ("cu_seqlens", "bool", INT)),
    "int8": (np.array([0, 4], np.int8), "offsets_type", ("cu_seqlens", "int8", INT)),
    "int16": (np.array([0, 4], np.int16), "offsets_type", ("cu_seqlens", "int16", INT)),
    "uint8": (np.array([0, 4], np.uint8), "offsets_type", ("cu_seqlens", "uint8", INT)),
    "uint32": (np.array([0, 4], np.uint32), "offsets_type", ("cu_seqlens", "uint32", INT)),
    "uint64": (np.array([0, 4], np.uint64), "offsets_type", ("cu_seqlens", "uint64", INT)),
    "complex": (np.array([0, 4], complex), "offsets_type", ("cu_seqlens", "complex128", INT)),
    "object array": (np.array([0, 4], object), "offsets_type", ("cu_seqlens", "object", INT)),
    "durations": (np.array([0, 4], "m8[s]"), "offsets_type", ("cu_seqlens", "timedelta64", INT)),
    "None": (None, "offsets_type", ("cu_seqlens",)),
    "a string": ("04", "offsets_type", ("cu_seqlens",)),
    "a dict": ({0: 0, 1: 4}, "offsets_type", ("cu_seqlens",)),
    "float behind __array__": (ArrayOnly(np.array([0.0, 4.0])), "offsets_type", ("cu_seqlens", "float64")),
    "float behind DLPack": (DlpackOnly(np.array([0.0, 4.0])), "offsets_type", ("cu_seqlens", "float64")),
    "a device array": (OnDevice(), "offsets_type", ("cu_seqlens", "OnDevice", "copy it", "cuda:0")),
    "a device array behind DLPack": (DlpackOnDevice(), "offsets_type", ("cu_seqlens", "DlpackOnDevice", "copy it")),
    "a huge integer": ([0, 2**63], "offsets_type", ("cu_seqlens[1]", str(2**63))),
    "a hugely negative integer": ([0, 5, -(2**63) - 1], "offsets_type", ("cu_seqlens[2]", str(-(2**63) - 1))),
    "two dimensions": (np.zeros((2, 2), np.int32), "offsets_shape", ("cu_seqlens", "(2, 2)", "one dimension")),
    "one row": (np.zeros((1, 3), np.int64), "offsets_shape", ("cu_seqlens", "(1, 3)")),
    "nested lists": ([[0, 4]], "offsets_shape", ("cu_seqlens[0]",)),
    "an array in a list": ([0, np.array([4, 5])], "offsets_shape", ("cu_seqlens[1]",)),
    "a scalar": (4, "offsets_shape", ("cu_seqlens",)),
    "nothing": ([], "offsets_shape", ("cu_seqlens", "empty")),
    "an empty array": (np.zeros(0, np.int32), "offsets_shape", ("cu_seqlens", "empty")),
    "not from 0": ([1, 4], "offsets_start", ("cu_seqlens[0] is 1",)),
    "lengths for offsets": (np.array([3, 4, 2], np.int32), "offsets_start", ("cu_seqlens[0] is 3",)),
    "from -1": ([-1, 4], "offsets_start", ("cu_seqlens[0] is -1",)),
    "decreasing": ([0, 4, 3, 9], "offsets_decreasing", ("cu_seqlens[2] is 3", "cu_seqlens[1] = 4")),
    "the first of two falls": ([0, 5, 4, 6, 2], "offsets_decreasing", ("cu_seqlens[2] is 4",)),
    "negative": ([0, -2], "offsets_decreasing", ("cu_seqlens[1] is -2", "cu_seqlens[0] = 0")),
    "a tail of -1": (
        [0, 4, 6, -1, -1],
        "offsets_decreasing",
        ("cu_seqlens[3] is -1", "cu_seqlens[2] = 6", "pass cu_seqlens[:3] or repeat the last offset"),
    ),
    "a tail of 0": ([0, 4, 0, 0], "offsets_decreasing", ("cu_seqlens[2] is 0", "cu_seqlens[:2]")),
}


@pytest.mark.clause("L2")
@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_bad_offsets_are_refused_with_index_and_value(name):
    offsets, code, fragments = BAD_OFFSETS[name]
    with refused(code, *fragments):
        PackedLayout(offsets)
    # The same in the other vector, under its own name.
    with refused(code, *(fragment.replace("cu_seqlens", "cu_seqlens_padded") for fragment in fragments)):
        PackedLayout([0, 0], offsets if offsets is not None else [None])


@pytest.mark.clause("L3")
@pytest.mark.parametrize(
    ("real", "physical", "fragments"),
    [
        ([0, 5], [0, 4], ("document 0", "5 real tokens", "4 physical rows")),
        ([0, 2, 7], [0, 4, 8], ("document 1", "5 real tokens", "4 physical rows", "[2, 7]", "[4, 8]")),
        ([0, 2, 2, 3], [0, 2, 4, 4], ("document 2", "1 real tokens", "0 physical rows")),
        ([0, 4, 8], [0, 3, 6], ("document 0",)),  # the two vectors in the wrong order
    ],
)
def test_more_real_tokens_than_rows_is_refused(real, physical, fragments):
    with refused("real_exceeds_physical", *fragments):
        PackedLayout(real, physical)


@pytest.mark.clause("L2", "L3")
@pytest.mark.parametrize(("real", "physical"), [([0, 2], [0, 2, 4]), ([0, 2, 4], [0, 4]), ([0], [0, 4])])
def test_offsets_of_unequal_size_are_refused(real, physical):
    with refused("offsets_count", f"{len(real)} entries", f"{len(physical)}", "cu_seqlens_padded"):
        PackedLayout(real, physical)


@pytest.mark.clause("L4")
@pytest.mark.parametrize("total", [5, 0, -1, True, 6.0, "6", 2**63, 2**70, np.float64(8), np.array([8])])
def test_total_tokens_is_an_integer_no_smaller_than_the_last_offset(total):
    with refused("total_tokens", str(total)):
        PackedLayout([0, 5], [0, 6], total)


@pytest.mark.clause("L4")
def test_total_tokens_in_both_numbers_of_the_refusal():
    with refused("total_tokens", "total_tokens is 5", "the last physical offset is 6"):
        PackedLayout([0, 4], [0, 6], 5)
    assert PackedLayout([0, 4], [0, 6], 6).total_tokens == 6
    assert PackedLayout([0, 4], [0, 6], np.int32(9)).total_tokens == 9


@pytest.mark.clause("L1", "L2")
def test_a_layout_cannot_change():
    given_offsets = np.array([0, 3, 5])
    layout = PackedLayout(given_offsets, total_tokens=6)
    given_offsets[1] = 4
    assert layout.cu_seqlens.tolist() == [0, 3, 5]
    for array in (layout.cu_seqlens, layout.cu_seqlens_padded, layout.document_ids, layout.positions):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        layout.total_tokens = 9
    with pytest.raises(AttributeError):
        layout.cu_seqlens = given_offsets
    lengths = layout.seqlens
    lengths[0] = 9
    assert layout.seqlens.tolist() == [3, 2]


@pytest.mark.clause("L1", "L2")
def test_what_came_through_array_or_dlpack_is_a_copy():
    for form in (ArrayOnly, DlpackOnly):
        offsets = np.array([0, 3, 5])
        layout = PackedLayout(form(offsets))
        offsets[:] = 0
        assert layout.cu_seqlens.tolist() == [0, 3, 5]
        assert offsets.flags.writeable


@pytest.mark.clause("L1")
def test_equal_by_value():
    layout = PackedLayout([0, 3, 5])
    same = PackedLayout(np.array([0, 3, 5], np.int32), (0, 3, 5), 5)
    assert layout == same
    assert hash(layout) == hash(same)
    others = [PackedLayout([0, 2, 5]), PackedLayout([0, 3, 5], total_tokens=6), PackedLayout([0, 3, 5], [0, 4, 6], 6)]
    others += [PackedLayout([0, 3, 5, 5]), PackedLayout([0, 3, 5], [0, 3, 6], 6), PackedLayout([0, 2, 4], [0, 3, 6])]
    others += [PackedLayout([0, 2, 5], [0, 3, 6])]
    for i, one in enumerate([layout, *others]):
        for j, other in enumerate([layout, *others]):
            assert (one == other) == (i == j)
    assert layout != "[0, 3, 5]"
    assert eval(repr(others[2])) == others[2]
    assert eval(repr(others[1])) == others[1]


# Constructors


@pytest.mark.clause("L1")
@pytest.mark.parametrize(
    ("arguments", "real", "physical", "total"),
    [
        ({"lengths": []}, [0], [0], 0),
        ({"lengths": [5, 0, 3]}, [0, 5, 5, 8], [0, 5, 5, 8], 8),
        ({"lengths": [5, 0, 3], "multiple_of": 4}, [0, 5, 5, 8], [0, 8, 8, 12], 12),
        ({"lengths": [4, 8], "multiple_of": 4}, [0, 4, 12], [0, 4, 12], 12),
        ({"lengths": (5, 3), "padded_lengths": [6, 3]}, [0, 5, 8], [0, 6, 9], 9),
        ({"lengths": [5, 3], "padded_lengths": [6, 9], "multiple_of": 4}, [0, 5, 8], [0, 8, 20], 20),
        ({"lengths": np.array([5], np.int32), "total_tokens": 9}, [0, 5], [0, 5], 9),
        ({"lengths": [5], "multiple_of": 8, "total_tokens": 24}, [0, 5], [0, 8], 24),
        ({"lengths": [0, 0], "padded_lengths": [0, 2], "multiple_of": 3}, [0, 0, 0], [0, 0, 3], 3),
    ],
)
def test_from_lengths_worked(arguments, real, physical, total):
    assert parts_of(PackedLayout.from_lengths(**arguments)) == (real, physical, total)


@pytest.mark.clause("L1")
@given(st.lists(st.integers(0, 30), max_size=6), st.integers(1, 16))
def test_from_lengths_pads_each_document_least(lengths, multiple):
    layout = PackedLayout.from_lengths(lengths, multiple)
    assert layout.seqlens.tolist() == lengths
    for tokens, size in zip(lengths, layout.seqlens_padded.tolist(), strict=True):
        assert size == next(n for n in range(tokens, tokens + multiple) if n % multiple == 0)
    assert layout.total_tokens == layout.cu_seqlens_padded[-1]


@pytest.mark.clause("L2", "L3", "L4")
@pytest.mark.parametrize(
    ("arguments", "code", "fragments"),
    [
        ({"lengths": [3, -1]}, "lengths", ("lengths[1] is -1",)),
        ({"lengths": [3], "padded_lengths": [-4]}, "lengths", ("padded_lengths[0] is -4",)),
        ({"lengths": [3, 2.5]}, "offsets_type", ("lengths[1]", "2.5")),
        ({"lengths": [3, True]}, "offsets_type", ("lengths[1]", "True")),
        ({"lengths": np.array([3.0])}, "offsets_type", ("lengths", "float64")),
        ({"lengths": np.ones((2, 2), int)}, "offsets_shape", ("lengths",)),
        ({"lengths": [3], "multiple_of": 0}, "multiple_of", ("multiple_of is 0",)),
        ({"lengths": [3], "multiple_of": -4}, "multiple_of", ("multiple_of is -4",)),
        ({"lengths": [3], "multiple_of": True}, "multiple_of", ("True",)),
        ({"lengths": [3], "multiple_of": 4.0}, "multiple_of", ("4.0",)),
        ({"lengths": [3, 4], "padded_lengths": [4]}, "offsets_count", ("2 entries", "padded_lengths has 1")),
        ({"lengths": [3, 4], "padded_lengths": [3, 3]}, "real_exceeds_physical", ("document 1",)),
        ({"lengths": [3, 4], "total_tokens": 6}, "total_tokens", ("6", "7")),
        ({"lengths": [2**62, 2**62]}, "lengths", ("lengths",)),
        ({"lengths": [1, 1], "padded_lengths": [2**62, 2**62]}, "lengths", ("padded_lengths",)),
    ],
)
def test_from_lengths_refuses(arguments, code, fragments):
    with refused(code, *fragments):
        PackedLayout.from_lengths(**arguments)


@pytest.mark.clause("L1")
@pytest.mark.parametrize("multiple", [2**62, 2**63, 2**70])
def test_from_lengths_refuses_a_multiple_that_overflows(multiple):
    with refused("multiple_of", f"multiple_of is {multiple}"):
        PackedLayout.from_lengths([5, 5], multiple)


@pytest.mark.clause("L8")
@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        ([], [0]),
        ([0], [0, 1]),
        ([0, 0, 0], [0, 1, 2, 3]),  # one-token documents survive
        ([0, 1, 2, 0, 0, 1], [0, 3, 4, 6]),
        ([0, 1, 0], [0, 2, 3]),
    ],
)
def test_from_position_ids_worked(ids, offsets):
    for form in (list, tuple, lambda x: np.array(x, np.int32), lambda x: DlpackOnly(np.array(x, np.int64))):
        assert parts_of(PackedLayout.from_position_ids(form(ids))) == (offsets, offsets, len(ids))


@pytest.mark.clause("L8")
@pytest.mark.parametrize(
    ("ids", "fragments"),
    [
        ([1, 2, 3], ("position_ids[0] is 1", "expected 0")),
        ([-1], ("position_ids[0] is -1",)),
        ([1024, 1025], ("position_ids[0] is 1024",)),  # the shard of a later rank
        ([0, 1, 3], ("position_ids[2] is 3", "2")),
        ([0, 1, 1], ("position_ids[2] is 1", "2")),
        ([0, 1, 2, 1], ("position_ids[3] is 1", "3")),
        ([0, 0, 2, 9], ("position_ids[2] is 2", "1")),
        ([0, 1, -1], ("position_ids[2] is -1",)),
    ],
)
def test_from_position_ids_refuses_gaps_with_the_index(ids, fragments):
    with refused("position_ids", *fragments):
        PackedLayout.from_position_ids(ids)


@pytest.mark.clause("L8")
@pytest.mark.parametrize("ids", [[0, 1.0], np.array([0.0]), [False, True]])
def test_from_position_ids_refuses_what_is_no_integer(ids):
    with refused("offsets_type", "position_ids"):
        PackedLayout.from_position_ids(ids)


@pytest.mark.clause("L8", "L6")
@given(st.lists(st.integers(1, 5), max_size=8))
def test_position_ids_of_documents_without_padding_come_back(lengths):
    layout = PackedLayout.from_lengths(lengths)
    assert PackedLayout.from_position_ids(layout.positions) == layout
    assert PackedLayout.from_position_ids([i for n in lengths for i in range(n)]) == layout


@pytest.mark.clause("L9")
@pytest.mark.parametrize(
    ("ids", "padding_id", "real", "physical"),
    [
        ([], -1, [0], [0]),
        ([4], -1, [0, 1], [0, 1]),
        ([7, 7, 3, 9, 9], -1, [0, 2, 3, 5], [0, 2, 3, 5]),  # neither sorted nor consecutive
        ([0, 0, 1, -1, -1, 2, -1], -1, [0, 2, 3, 4], [0, 2, 5, 7]),
        ([1, 1, 0, 2, 0, 0], 0, [0, 2, 3], [0, 3, 6]),  # JAX: 0 is padding
        ([0, 0, 5, 5], 0, [0, 0, 2], [0, 2, 4]),  # leading padding: of a document of no tokens
        ([-1, -1], -1, [0, 0], [0, 2]),
        ([-1, -1, 0], None, [0, 2, 3], [0, 2, 3]),  # every id is a document
        ([0, 0, 1], 0, [0, 0, 1], [0, 2, 3]),
        ([0, 0, 1], -1, [0, 2, 3], [0, 2, 3]),
    ],
)
def test_from_segment_ids_worked(ids, padding_id, real, physical):
    for form in (list, lambda x: np.array(x, np.int32)):
        layout = PackedLayout.from_segment_ids(form(ids), padding_id)
        assert parts_of(layout) == (real, physical, len(ids))


@pytest.mark.clause("L9")
@pytest.mark.parametrize(
    ("ids", "padding_id", "fragments"),
    [
        ([1, 1, 2, 1], -1, ("segment_ids[3] is 1",)),
        ([1, -1, 1], -1, ("segment_ids[2] is 1",)),  # behind padding is no continuation
        ([3, 0, 0, 5, 5, 3, 5], 0, ("segment_ids[5] is 3",)),
        ([-1, 0, -1], None, ("segment_ids[2] is -1",)),
        ([2, 1, 1, 2, 1], -1, ("segment_ids[3] is 2",)),
    ],
)
def test_from_segment_ids_refuses_an_id_that_returns(ids, padding_id, fragments):
    with refused("segment_ids", *fragments):
        PackedLayout.from_segment_ids(ids, padding_id)


@pytest.mark.clause("L9")
def test_from_segment_ids_refuses_what_is_no_integer():
    with refused("offsets_type", "segment_ids[1]"):
        PackedLayout.from_segment_ids([0, 0.5])
    with refused("offsets_shape", "segment_ids"):
        PackedLayout.from_segment_ids(np.zeros((2, 2), np.int32))


@pytest.mark.clause("L9", "L6")
@given(layouts())
def test_document_ids_come_back_as_segment_ids(layout):
    ids = layout.document_ids.tolist()
    read = PackedLayout.from_segment_ids(layout.document_ids)
    # Documents of no tokens leave no id behind, so the others get new numbers in the same order.
    names = {d: n for n, d in enumerate(dict.fromkeys(d for d in ids if d >= 0))}
    shift = int(bool(ids) and ids[0] < 0)
    assert read.document_ids.tolist() == [names[d] + shift if d >= 0 else -1 for d in ids]
    assert read.total_tokens == len(ids)
    real = layout.document_ids >= 0
    assert read.positions[real].tolist() == layout.positions[real].tolist()


@pytest.mark.clause("L9")
@given(st.lists(st.integers(0, 2), max_size=9), st.sampled_from([0, 1, None, 7]))
def test_from_segment_ids_equals_a_plain_reading(ids, padding_id):
    runs = []
    for i, name in enumerate(ids):
        if i == 0 or ids[i - 1] != name:
            runs.append([name, 0])
        runs[-1][1] += 1
    seen = [name for name, _ in runs if padding_id is None or name != padding_id]
    if len(seen) != len(set(seen)):
        with refused("segment_ids"):
            PackedLayout.from_segment_ids(ids, padding_id)
        return
    documents = []
    for name, size in runs:
        if padding_id is not None and name == padding_id:
            documents = documents or [[0, 0]]
            documents[-1][1] += size
        else:
            documents.append([size, size])
    layout = PackedLayout.from_segment_ids(ids, padding_id)
    assert layout.seqlens.tolist() == [tokens for tokens, _ in documents]
    assert layout.seqlens_padded.tolist() == [size for _, size in documents]


@pytest.mark.clause("L6")
@pytest.mark.slow
def test_documents_and_positions_of_a_hundred_million_rows():
    rows, documents = 10**8, 10**5
    length = rows // documents
    layout = PackedLayout.from_lengths(np.full(documents, length - 3), padded_lengths=np.full(documents, length))
    tracemalloc.start()
    try:
        document_ids = layout.document_ids
        positions = layout.positions
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3.5 * 8 * rows  # the two results and at most one array more at a time
    for row in (0, length - 4, length - 3, length - 1, length, rows // 2 + 7, rows - 4, rows - 1):
        d, position = divmod(row, length)
        assert (document_ids[row], positions[row]) == (d if position < length - 3 else -1, position)
    assert int((document_ids < 0).sum()) == 3 * documents
