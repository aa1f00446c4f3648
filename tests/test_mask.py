"""The predicate: who sees whom."""

import sys

import numpy as np
import pytest
import witness
from hypothesis import given
from hypothesis import strategies as st
from strategies import layouts, masks, parts_of
from support import refused

from refimpl.mask import AttentionMask

# Five tokens of one document; rows are queries.
WORKED = {
    "causal": (True, (-1, -1), ["10000", "11000", "11100", "11110", "11111"]),
    "causal forces the right bound": (True, (-1, 3), ["10000", "11000", "11100", "11110", "11111"]),
    "full": (False, (-1, -1), ["11111"] * 5),
    "causal window (2, 0)": (True, (2, 0), ["10000", "11000", "11100", "01110", "00111"]),
    "causal window (2, -1)": (True, (2, -1), ["10000", "11000", "11100", "01110", "00111"]),
    "window (1, 2)": (False, (1, 2), ["11100", "11110", "01111", "00111", "00011"]),
    "window (0, 0)": (False, (0, 0), ["10000", "01000", "00100", "00010", "00001"]),
    "window (0, 1)": (False, (0, 1), ["11000", "01100", "00110", "00011", "00001"]),
    "left alone": (False, (1, -1), ["11111", "11111", "01111", "00111", "00011"]),
    "right alone": (False, (-1, 1), ["11000", "11100", "11110", "11111", "11111"]),
    "wider than the document": (False, (9, 9), ["11111"] * 5),
}


@pytest.mark.clause("K1", "K2", "K3")
@pytest.mark.parametrize("name", WORKED)
def test_worked_masks(name):
    causal, window, expected = WORKED[name]
    position = np.arange(5)
    visible = AttentionMask(causal, window).visible(0, position, 0, position)
    assert visible.dtype == bool
    assert ["".join(str(int(seen)) for seen in row) for row in visible] == expected


@pytest.mark.clause("K3")
def test_a_left_window_of_w_sees_w_plus_1_keys():
    position = np.arange(50)
    for w in (0, 1, 7):
        assert AttentionMask(window=(w, 0)).visible(0, position, 0, position)[-1].sum() == w + 1


@pytest.mark.clause("K1", "K2", "K3")
@given(layouts(), masks())
def test_visible_equals_the_predicate_pair_by_pair(layout, mask):
    pairs = witness.rows(*parts_of(layout))
    document, position = layout.document_ids, layout.positions
    visible = mask.visible(document, position, document, position)
    assert visible.shape == (len(pairs), len(pairs))
    assert list(zip(*(x.tolist() for x in np.nonzero(visible)), strict=True)) == witness.visible_pairs(
        pairs, mask.causal, mask.window
    )


@pytest.mark.clause("K1")
def test_padding_neither_sees_nor_is_seen_not_even_by_padding():
    document, position = np.array([-1, 0, -1]), np.array([0, 0, 0])
    visible = AttentionMask(causal=False).visible(document, position, document, position)
    assert visible.tolist() == [[False] * 3, [False, True, False], [False] * 3]


@pytest.mark.clause("K1")
def test_other_documents_are_invisible_at_any_position():
    visible = AttentionMask(causal=False).visible(np.array([0, 1]), np.array([3, 3]), np.array([1]), np.array([3]))
    assert visible.tolist() == [[False], [True]]


@pytest.mark.clause("K1", "K5")
@given(
    masks(),
    st.lists(st.integers(-6, 12), min_size=1, max_size=6),
    st.integers(0, 8),
)
def test_key_range_solves_the_predicate(mask, positions, num_keys):
    position_q = np.array(positions)
    first, last = mask.key_range(position_q, num_keys)
    visible = mask.visible(0, position_q, 0, np.arange(num_keys))
    for i in range(len(positions)):
        assert 0 <= first[i] <= last[i] <= num_keys
        assert list(range(first[i], last[i])) == np.flatnonzero(visible[i]).tolist()


@pytest.mark.clause("K1")
def test_key_range_broadcasts():
    first, last = AttentionMask(window=(1, 0)).key_range(np.array([0, 5, 5]), np.array([4, 6, 3]))
    assert first.tolist() == [0, 4, 3]
    assert last.tolist() == [1, 6, 3]
    first, last = AttentionMask(causal=False).key_range(np.array([2, 0]), 7)
    assert (first.tolist(), last.tolist()) == ([0, 0], [7, 7])


@pytest.mark.clause("K2", "K3")
def test_bounds():
    assert AttentionMask() == AttentionMask(causal=True, window=(-1, -1))
    mask = AttentionMask(np.True_, [np.int64(3), 5])
    assert (mask.causal, mask.window, mask.left, mask.right) == (True, (3, 5), 3, 0)
    assert [type(x) for x in (mask.causal, *mask.window)] == [bool, int, int]
    assert AttentionMask(False, (3, 5)).right == 5
    assert AttentionMask(False).right == -1
    assert len({AttentionMask(), AttentionMask(window=[-1, -1]), AttentionMask(False)}) == 2
    with pytest.raises(AttributeError):
        mask.causal = False


HUGE = [2**31 - 1, 2**31, 2**62, sys.maxsize, 2**63, 2**70]


@pytest.mark.clause("K3", "K5")
@pytest.mark.parametrize("bound", HUGE)
def test_a_huge_bound_is_as_good_as_none_or_refused(bound):
    """Some callers write "unlimited" as the largest integer they know: it must not wrap around."""
    position = np.arange(4)
    for window, unlimited in (((bound, -1), (-1, -1)), ((-1, bound), (-1, -1)), ((bound, bound), (-1, -1))):
        try:
            mask = AttentionMask(False, window)
        except ValueError as error:
            assert error.code == "mask"  # noqa: PT017 -- either answer will do
            assert bound > 2**31, "the largest int32 is what some write for unlimited"
            continue
        other = AttentionMask(False, unlimited)
        assert mask.visible(0, position, 0, position).tolist() == other.visible(0, position, 0, position).tolist()
        for bounds in zip(mask.key_range(position, 4), other.key_range(position, 4), strict=True):
            assert bounds[0].tolist() == bounds[1].tolist()


@pytest.mark.clause("K3")
@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ((True, (-2, 0)), ("window[0] is -2", "-1 or more")),
        ((True, (0, -5)), ("window[1] is -5",)),
        ((True, (1.0, 0)), ("window[0]", "1.0")),
        ((True, (0, None)), ("window[1]", "None")),
        ((True, (True, 0)), ("window[0]", "True")),
        ((True, (1,)), ("window", "(1,)")),
        ((True, (1, 2, 3)), ("window",)),
        ((True, 4), ("window is 4",)),
        ((True, None), ("window is None",)),
        ((True, "ab"), ("window",)),
        ((1,), ("causal is 1",)),
        ((None,), ("causal is None",)),
        (("True",), ("causal",)),
    ],
)
def test_what_is_no_mask_is_refused(arguments, fragments):
    with refused("mask", *fragments):
        AttentionMask(*arguments)
