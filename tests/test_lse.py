"""Log-sum-exp: partial results merge into attention over the union of keys, and conventions translate."""

import numpy as np
import pytest
import witness
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from strategies import Heads, head_layouts, tensors
from support import refused

from refimpl.lse import lse_from, lse_to, merge_partials


def one(*values, dtype=float):
    """Out [n, 1, 1] or, transposed, lse [1, n]."""
    return np.array(values, dtype).reshape(-1, 1, 1)


def lse_of(*values, dtype=float):
    return np.array(values, dtype).reshape(1, -1)


@pytest.mark.clause("A7")
@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=5),
    st.integers(1, 4),
    head_layouts(),
    st.integers(0, 2**32 - 1),
)
def test_merged_parts_equal_attention_over_the_union(deal, parts, heads, seed):
    """Query i's key j belongs to part deal[i][j]; a part of 4 or beyond the number of parts drops the key."""
    rng = np.random.default_rng(seed)
    num_keys = 6
    q, k, v, _ = tensors(rng, len(deal), num_keys, heads)
    scale = heads.dim_qk**-0.5
    keys = [[j for j, part in enumerate(row) if part < parts] for row in deal]
    expected = witness.attention(q, k, v, keys, scale)
    outs, lses = [], []
    for part in range(parts):
        mine = [[j for j, owner in enumerate(row) if owner == part] for row in deal]
        out, lse = witness.attention(q, k, v, mine, scale)
        out[[not row for row in mine]] = np.nan  # what an empty part's out holds does not count
        outs.append(out)
        lses.append(lse)
    out, lse = merge_partials(outs, lses)
    np.testing.assert_allclose(out, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-12, atol=1e-12)
    blind = [not row for row in keys]
    assert (out[blind] == 0).all()
    assert (lse[:, blind] == -np.inf).all()


@pytest.mark.clause("A7")
def test_worked():
    out, lse = merge_partials([one(8, 8, 8), one(4, 4, 4)], [np.log(lse_of(1, 3, 1)), np.log(lse_of(3, 1, 1))])
    np.testing.assert_allclose(out.ravel(), [5, 7, 6], rtol=1e-15)
    np.testing.assert_allclose(np.exp(lse), [[4, 4, 2]], rtol=1e-15)


@pytest.mark.clause("A7")
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e300])
def test_a_part_without_keys_adds_nothing(junk):
    out, lse = merge_partials([one(junk, 7), one(3, junk)], [lse_of(-np.inf, 2.5), lse_of(1.25, -np.inf)])
    assert out.ravel().tolist() == [3, 7]
    assert lse.tolist() == [[1.25, 2.5]]
    out, lse = merge_partials([one(junk), one(junk)], [lse_of(-np.inf)] * 2)
    assert (out.tolist(), lse.tolist()) == ([[[0.0]]], [[-np.inf]])
    out, lse = merge_partials([one(junk)], [lse_of(-np.inf)])
    assert (out.tolist(), lse.tolist()) == ([[[0.0]]], [[-np.inf]])


@pytest.mark.clause("A7")
def test_one_part_comes_back_as_it_is():
    rng = np.random.default_rng(0)
    out, lse = rng.standard_normal((4, 2, 3)), rng.standard_normal((2, 4))
    merged_out, merged_lse = merge_partials([out], [lse])
    assert merged_out.tolist() == out.tolist()
    assert merged_lse.tolist() == lse.tolist()
    merged_out[:] = 0
    assert out.any()


@pytest.mark.clause("A7")
@pytest.mark.parametrize("size", [-1e5, 1e5, -750.0, 750.0, -1e300, 1e300])
def test_scores_far_beyond_the_range_of_exp(size):
    parts = [one(1.0), one(3.0)]
    out, lse = merge_partials(parts, [lse_of(size), lse_of(size)])
    assert out.tolist() == [[[2.0]]]
    assert lse[0, 0] == pytest.approx(size + np.log(2), rel=1e-15)
    out, lse = merge_partials(parts, [lse_of(size), lse_of(-size)])
    assert out.tolist() == [[[1.0 if size > 0 else 3.0]]]
    assert lse.tolist() == [[abs(size)]]
    out, lse = merge_partials(parts, [lse_of(size), lse_of(-np.inf)])
    assert (out.tolist(), lse.tolist()) == ([[[1.0]]], [[size]])


@pytest.mark.clause("A7")
@pytest.mark.parametrize("size", [1e30, 3e38])
def test_the_same_in_float32(size):
    """Up to the largest number: the distance of +-3e38 is beyond float32, and still no more than "far away"."""
    parts = [one(1, dtype=np.float32), one(3, dtype=np.float32)]
    high, low = lse_of(size, dtype=np.float32), lse_of(-size, dtype=np.float32)
    for lses, expected in (((high, low), (1.0, high)), ((low, high), (3.0, high)), ((low, low), (2.0, low))):
        out, lse = merge_partials(parts, lses)
        assert out.dtype == lse.dtype == np.float32
        assert out.tolist() == [[[expected[0]]]]
        assert lse.tolist() == expected[1].tolist()


@pytest.mark.clause("A7")
@given(st.lists(st.floats(-50, 50), min_size=2, max_size=4), st.floats(-1e4, 1e4))
def test_a_shift_of_all_parts_shifts_lse_alone(lses, shift):
    outs = [one(float(i)) for i in range(len(lses))]
    out, lse = merge_partials(outs, [lse_of(x) for x in lses])
    shifted_out, shifted_lse = merge_partials(outs, [lse_of(x + shift) for x in lses])
    np.testing.assert_allclose(shifted_out, out, atol=1e-10)
    np.testing.assert_allclose(shifted_lse, lse + shift, rtol=1e-12, atol=1e-11)
    assert lse[0, 0] == pytest.approx(logsumexp(lses), abs=1e-12)


@pytest.mark.clause("A7")
@given(st.permutations(range(4)), st.integers(0, 2**32 - 1))
def test_the_order_of_parts_and_merging_in_turns_do_not_matter(order, seed):
    rng = np.random.default_rng(seed)
    outs, lses = rng.standard_normal((4, 3, 2, 2)), 5 * rng.standard_normal((4, 2, 3))
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    expected = merge_partials(list(outs), list(lses))
    turns = outs[order[0]], lses[order[0]]
    for i in order[1:]:
        turns = merge_partials([turns[0], outs[i]], [turns[1], lses[i]])
    for got, want in zip(turns, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.clause("A7")
def test_nan_is_not_hidden():
    """A NaN in an lse, or in the out of a part that did see keys, is the caller's and stays visible."""
    out, lse = merge_partials([one(1.0), one(2.0)], [lse_of(np.nan), lse_of(0.0)])
    assert np.isnan(out).all()
    assert np.isnan(lse).all()
    out, lse = merge_partials([one(np.nan), one(2.0)], [lse_of(0.0), lse_of(0.0)])
    assert np.isnan(out).all()
    assert np.isfinite(lse).all()


@pytest.mark.clause("A7", "N1")
@pytest.mark.parametrize(
    ("out_dtypes", "lse_dtypes", "expected"),
    [
        (["float16"], ["float16"], "float32"),
        (["float32", "float16"], ["float32", "float32"], "float32"),
        (["float32"], ["float64"], "float64"),
        (["float64", "float32"], ["float32", "float32"], "float64"),
        (["longdouble"], ["float32"], "longdouble"),
        (["bfloat16"], ["float32"], "float32"),
        (["bfloat16", "bfloat16"], ["bfloat16", "bfloat16"], "float32"),
        (["bfloat16", "float16"], ["float32", "float32"], "float32"),
    ],
)
def test_computes_in_float32_or_the_widest_input(out_dtypes, lse_dtypes, expected, require):
    def dtype_of(name):
        return require("ml_dtypes").bfloat16 if name == "bfloat16" else np.dtype(name)

    outs = [np.full((2, 1, 1), 0.5, dtype_of(name)) for name in out_dtypes]
    lses = [np.full((1, 2), 0.25, dtype_of(name)) for name in lse_dtypes]
    out, lse = merge_partials(outs, lses)
    assert out.dtype == lse.dtype == np.dtype(expected)
    assert out.tolist() == [[[0.5]]] * 2
    np.testing.assert_allclose(lse.astype(float), 0.25 + np.log(len(outs)), rtol=1e-6)


@pytest.mark.clause("A7", "A8")
@pytest.mark.parametrize(
    ("outs", "lses", "fragments"),
    [
        ([], [], ("0 outs",)),
        ([one(1)], [], ("1 outs and 0 lses",)),
        ([one(1)], [lse_of(1)] * 2, ("1 outs and 2 lses",)),
        ([one(1), one(1, 2)], [lse_of(1), lse_of(1, 2)], ("outs[1] has shape [2, 1, 1]",)),
        ([np.zeros((2, 3))], [np.zeros((3, 2))], ("outs[0] has shape [2, 3]",)),
        ([np.zeros((2, 3, 1))], [np.zeros((2, 3))], ("lses[0]", "[2, 3]", "[H, Tq]")),
        ([np.zeros((2, 3, 1))], [np.zeros((3, 2, 1))], ("lses[0]",)),
        ([np.zeros((2, 3, 1)), np.zeros((2, 3, 2))], [np.zeros((3, 2))] * 2, ("outs[1] has shape [2, 3, 2]",)),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(outs, lses, fragments):
    with refused("shape", *fragments):
        merge_partials(outs, lses)


@pytest.mark.clause("A7", "A6")
def test_plus_infinity_is_refused_with_the_way_out():
    with refused("lse", "lses[1] holds +inf", "lse_from(empty=inf)"):
        merge_partials([one(1), one(2)], [lse_of(0.0), lse_of(np.inf)])
    converted = lse_from(lse_of(np.inf), empty=np.inf)
    assert merge_partials([one(1), one(np.nan)], [lse_of(0.0), converted])[0].tolist() == [[[1.0]]]


INF, NAN = np.inf, np.nan
WEIGHTS = np.array([[1.0, 8.0, 0.5], [2.0, NAN, 16.0]])  # of two heads in three rows, one without a key


def marked(logarithms, mark):
    return np.where(np.isnan(WEIGHTS), mark, logarithms)


NATURAL = marked(np.log(WEIGHTS), -INF)
CONVENTIONS = {
    "natural": ({}, NATURAL),
    "base 2": ({"base": 2}, np.array([[0, 3, -1], [1, -INF, 4]])),
    "base 10": ({"base": 10.0}, marked(np.log10(WEIGHTS), -INF)),
    "+inf for empty rows": ({"empty": INF}, marked(NATURAL, INF)),
    "NaN for empty rows": ({"empty": NAN}, marked(NATURAL, NAN)),
    "a number for empty rows": ({"empty": -5e4}, marked(NATURAL, -5e4)),
    "heads last": ({"heads_last": True}, NATURAL.T),
    "all at once": ({"base": 2, "empty": INF, "heads_last": True}, np.array([[0, 1], [3, INF], [-1, 4]])),
}


@pytest.mark.clause("A6")
@pytest.mark.parametrize("name", CONVENTIONS)
def test_conventions_there_and_back(name):
    options, expected = CONVENTIONS[name]
    written = lse_to(NATURAL, **options)
    np.testing.assert_allclose(written, expected, rtol=1e-15, atol=1e-15)
    read = lse_from(written, **options)
    np.testing.assert_allclose(read, NATURAL, rtol=1e-15, atol=1e-15)
    assert read[1, 1] == -np.inf
    assert NATURAL[1, 1] == -np.inf  # the input stays


@pytest.mark.clause("A6")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "longdouble"])
def test_conversions_keep_dtype_and_are_contiguous(dtype, require):
    dtype = require("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    lse = np.array([[1.0, -np.inf, 2.0], [0.5, 0.25, -1.0]]).astype(dtype)
    written = lse_to(lse, base=2, empty=np.inf, heads_last=True)
    assert written.dtype == dtype
    assert written.shape == (3, 2)
    assert written.flags.c_contiguous
    assert written[1, 0] == np.inf
    read = lse_from(written, base=2, empty=np.inf, heads_last=True)
    assert read.dtype == dtype
    assert read.shape == (2, 3)
    assert read[0, 1] == -np.inf
    np.testing.assert_allclose(read.astype(float), lse.astype(float), rtol=float(2.0**-6))


@pytest.mark.clause("A6")
def test_both_infinities_are_read_as_empty_where_plus_infinity_marks():
    """FlashAttention 2 writes +inf, and -inf when it splits: both mean no key."""
    assert lse_from([[np.inf, -np.inf, 1.0]], empty=np.inf).tolist() == [[-np.inf, -np.inf, 1.0]]


@pytest.mark.clause("A6")
@pytest.mark.parametrize("lse", [np.zeros((1, 2), int), [[1, 2]], np.zeros((1, 2), complex)])
def test_conversions_refuse_what_is_no_float(lse):
    for convert in (lse_to, lse_from):
        with refused("dtype", "lse has dtype"):
            convert(lse)


@pytest.mark.clause("A6", "A7")
@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_parts_in_a_foreign_convention_merge_after_conversion(seed):
    rng = np.random.default_rng(seed)
    heads = Heads(2, 1, 2, 3)
    q, k, v, _ = tensors(rng, 3, 4, heads)
    halves = [[0, 1], []], [[2, 3], [1, 2]]
    parts = [witness.attention(q[:2], k, v, keys, 1.0) for keys in halves]
    foreign = lse_to(parts[0][1], base=2, empty=np.inf, heads_last=True)
    lses = [lse_from(foreign, base=2, empty=np.inf, heads_last=True), parts[1][1]]
    out, lse = merge_partials([parts[0][0], parts[1][0]], lses)
    expected = witness.attention(q[:2], k, v, [[0, 1, 2, 3], [1, 2]], 1.0)
    np.testing.assert_allclose(out, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-12, atol=1e-12)
