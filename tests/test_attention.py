"""The oracle against four witnesses: fractions by hand, SciPy row by row, complex steps, finite differences.

(A fifth, PyTorch, is in test_torch_witness.py.) Expected values come from clean tensors; the oracle is handed the same
numbers with NaN, infinities and huge numbers in every row that holds no token.
"""

import numpy as np
import pytest
import witness
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import Heads, cases, head_layouts, layouts, masks, parts_of, poison, repeat_tail, tensors
from support import refused

from refimpl.attention import (
    attention_backward,
    attention_forward,
    varlen_attention_backward,
    varlen_attention_forward,
)
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import StepMetadata, rank_metadata

CAUSAL, FULL = AttentionMask(), AttentionMask(causal=False)
SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.sampled_from([None, 1.0, 0.3, 2.0, -0.7, 0.0])


def keys_of(layout, mask):
    """The rows that every row sees, by the witness."""
    pairs = witness.rows(*parts_of(layout))
    return witness.keys_of(witness.visible_pairs(pairs, mask.causal, mask.window), len(pairs))


def close(got, expected, tolerance=1e-12):
    assert got.shape == expected.shape
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * max(1.0, finite_peak(expected)))


def finite_peak(x):
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def exactly(got, expected):
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


# By hand


@pytest.mark.clause("A1", "A3", "A6", "B1")
def test_fractions_by_hand():
    """Scores 0, log 2, log 4: weights 1 : 2 : 4, so out = 1, 5/3, 3 and exp(lse) = 1, 3, 7."""
    layout = PackedLayout([0, 3])
    two = np.log(2.0)
    q = np.full((3, 1, 1), 2 * two)  # the scale of 1/2 makes it log 2
    k = np.array([0.0, 1.0, 2.0]).reshape(3, 1, 1)
    v = np.array([1.0, 2.0, 4.0]).reshape(3, 1, 1)
    out, lse = attention_forward(q, k, v, layout, CAUSAL, 0.5)
    close(out, np.array([1, 5 / 3, 3]).reshape(3, 1, 1), 1e-15)
    close(lse, np.log([[1.0, 3.0, 7.0]]), 1e-15)
    # Of the last row alone: p = 1/7, 2/7, 4/7, delta = 3, ds = p (v - 3) = -2/7, -2/7, 4/7.
    dout = np.array([0.0, 0.0, 1.0]).reshape(3, 1, 1)
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, layout, CAUSAL, 0.5)
    close(dv.ravel(), np.array([1, 2, 4]) / 7, 1e-15)
    close(dq.ravel(), np.array([0, 0, 0.5 * (-2 * 1 + 4 * 2) / 7]), 1e-15)
    close(dk.ravel(), two * np.array([-2, -2, 4]) / 7, 1e-15)


@pytest.mark.clause("A1")
@pytest.mark.parametrize(("dim_qk", "dim_v", "score"), [(4, 1, 2.0), (16, 3, 4.0), (1, 9, 1.0)])
def test_the_default_scale_is_that_of_the_key_heads(dim_qk, dim_v, score):
    """q . k = Dqk, over the root of Dqk: the lse of one key is its score."""
    ones = [np.ones((1, 1, width)) for width in (dim_qk, dim_qk, dim_v)]
    _, lse = attention_forward(*ones, PackedLayout([0, 1]), CAUSAL)
    assert lse.tolist() == [[score]]
    _, lse = varlen_attention_forward(*ones, StepMetadata.from_offsets([0, 1], [0, 1]), CAUSAL)
    assert lse.tolist() == [[score]]


@pytest.mark.clause("A2", "B3")
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(6, 2), (6, 3), (4, 1), (4, 4)])
def test_head_map_is_blocked_not_interleaved(heads_q, heads_kv):
    """Each K/V head holds its own number, so out tells which one was read."""
    v = np.arange(heads_kv, dtype=float).reshape(1, heads_kv, 1)
    q, k = np.zeros((1, heads_q, 2)), np.zeros((1, heads_kv, 2))
    layout = PackedLayout([0, 1])
    out, lse = attention_forward(q, k, v, layout, CAUSAL)
    expected = [g for g in range(heads_kv) for _ in range(heads_q // heads_kv)]
    assert out.ravel().tolist() == expected
    dout = 10.0 ** np.arange(heads_q).reshape(1, heads_q, 1)
    _, _, dv = attention_backward(dout, q, k, v, out, lse, layout, CAUSAL)
    group = heads_q // heads_kv
    assert dv.ravel().tolist() == [sum(10**h for h in range(g * group, (g + 1) * group)) for g in range(heads_kv)]


@pytest.mark.clause("A4", "B2", "K4")
def test_queries_before_the_first_key_see_nothing():
    step = StepMetadata.from_offsets([0, 3, 5, 6], [0, 2, 2, 3])
    rng = np.random.default_rng(0)
    q, k, v, dout = tensors(rng, 6, 3, Heads(2, 1, 3, 2))
    out, lse = varlen_attention_forward(q, k, v, step, CAUSAL)
    empty = [0, 3, 4]  # the first of three on two keys, and both on none
    assert (out[empty] == 0).all()
    assert (lse[:, empty] == -np.inf).all()
    assert np.isfinite(lse[:, [1, 2, 5]]).all()
    close(out[[1, 5]], v[[0, 2]].repeat(2, axis=1))
    dq, dk, dv = varlen_attention_backward(dout, q, k, v, out, lse, step, CAUSAL)
    assert (dq[empty] == 0).all()
    assert (dq[2] != 0).all()
    assert np.isfinite(dk).all()
    close(dv[2, 0], dout[5].sum(axis=0))


@pytest.mark.clause("A4")
@pytest.mark.parametrize("score", [-5e4, -1e9, -1e300])
def test_a_row_of_very_low_scores_is_not_empty(score):
    layout = PackedLayout([0, 2])
    q, k, v = np.full((2, 1, 1), score), np.ones((2, 1, 1)), np.array([1.0, 3.0]).reshape(2, 1, 1)
    out, lse = attention_forward(q, k, v, layout, CAUSAL, 1.0)
    assert out.ravel().tolist() == [1.0, 2.0]
    close(lse, np.array([[score, score + np.log(2)]]))


@pytest.mark.clause("A4")
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
def test_a_row_whose_scores_overflow_to_minus_infinity_is_not_taken_for_empty():
    q, k, v = np.full((1, 1, 1), -1e200), np.full((1, 1, 1), 1e200), np.ones((1, 1, 1))
    out, _ = attention_forward(q, k, v, PackedLayout([0, 1]), CAUSAL, 1.0)
    assert out.ravel().tolist() != [0.0]


# SciPy, row by row


@pytest.mark.clause("A1", "A2", "A3", "A5", "A6", "K1")
@settings(max_examples=80)
@given(layouts(max_documents=4, max_length=6), masks(), head_layouts(), SCALES, SEEDS)
def test_forward_equals_scipy_row_by_row(layout, mask, heads, scale, seed):
    rng = np.random.default_rng(seed)
    q, k, v, _ = tensors(rng, layout.total_tokens, layout.total_tokens, heads)
    expected = witness.attention(q, k, v, keys_of(layout, mask), heads.dim_qk**-0.5 if scale is None else scale)
    padding = [row for row, (d, _) in enumerate(witness.rows(*parts_of(layout))) if d < 0]
    dirty = [poison(x, padding, rng) for x in (q, k, v)]
    kept = [x.copy() for x in dirty]
    out, lse = attention_forward(*dirty, layout, mask, scale)
    close(out, expected[0])
    close(lse, expected[1])
    assert (out[padding] == 0).all()
    assert (lse[:, padding] == -np.inf).all()
    exactly(dirty, kept)  # inputs stay as they were


@st.composite
def steps(draw):
    """Steps of any shape: more queries than keys, no keys, no queries, gaps, and a first query or none."""
    lengths = st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 2), st.integers(0, 2))
    documents = draw(st.lists(lengths, max_size=4))
    cu = [[0], [0], [0], [0]]
    for queries, keys, gap_q, gap_k in documents:
        for offsets, size in zip(cu, (queries, queries + gap_q, keys, keys + gap_k), strict=True):
            offsets.append(offsets[-1] + size)
    first = st.lists(st.integers(-3, 6), min_size=len(documents), max_size=len(documents))
    first_query = draw(st.one_of(st.none(), first))
    return StepMetadata.from_offsets(cu[0], cu[2], cu[1], cu[3], first_query)


def vectors(step):
    names = ("cu_seqlens_q", "cu_seqlens_q_padded", "cu_seqlens_kv", "cu_seqlens_kv_padded")
    return [getattr(step, name).tolist() for name in names]


@pytest.mark.clause("A3", "A4", "A5", "K3", "K4", "K5", "R5", "B1", "B2")
@settings(max_examples=80)
@given(steps(), masks(), head_layouts(), st.integers(0, 2), SEEDS)
@example(StepMetadata.from_offsets([0, 5], [0, 2]), AttentionMask(False, (-1, 2)), Heads(1, 1, 1, 1), 0, 0)  # K5
@example(StepMetadata.from_offsets([0, 5], [0, 2]), AttentionMask(False, (3, -1)), Heads(1, 1, 1, 1), 0, 0)
@example(StepMetadata.from_offsets([0, 2], [0, 5]), AttentionMask(True, (1, 0)), Heads(2, 1, 2, 1), 0, 0)
def test_one_step_equals_scipy_and_complex_steps(step, mask, heads, spare, seed):
    rng = np.random.default_rng(seed)
    rows_q, rows_kv = vectors(step)[1][-1] + spare, vectors(step)[3][-1] + spare
    q, k, v, dout = tensors(rng, rows_q, rows_kv, heads)
    first_query = None if step.first_query is None else step.first_query.tolist()
    pairs = witness.step_pairs(*vectors(step), mask.causal, mask.window, first_query)
    keys = witness.keys_of(pairs, rows_q)
    expected = witness.attention(q, k, v, keys, heads.dim_qk**-0.5)
    padding_q = rows_outside(vectors(step)[0], vectors(step)[1], rows_q)
    padding_kv = rows_outside(vectors(step)[2], vectors(step)[3], rows_kv)
    dirty = [poison(q, padding_q, rng), poison(k, padding_kv, rng), poison(v, padding_kv, rng)]
    out, lse = varlen_attention_forward(*dirty, step, mask)
    close(out, expected[0])
    close(lse, expected[1])
    saved = poison(dout, padding_q, rng), *dirty, poison(out, padding_q, rng), poison(lse, padding_q, rng, axis=1)
    gradients = varlen_attention_backward(*saved, step, mask)
    blind = [i for i in range(rows_q) if not keys[i]]
    assert (gradients[0][blind] == 0).all()
    small = np.prod(q.shape) + np.prod(k.shape) + np.prod(v.shape) < 200
    if small:
        seen = np.where([[[bool(x)]] for x in keys], dout, 0) if rows_q else dout
        for got, want in zip(gradients, witness.gradients(q, k, v, seen, keys, heads.dim_qk**-0.5), strict=True):
            close(got, want)


def rows_outside(cu, stored, count):
    """Rows of a buffer that no document claims."""
    claimed = {stored[d] + i for d in range(len(cu) - 1) for i in range(cu[d + 1] - cu[d])}
    return [row for row in range(count) if row not in claimed]


# The backward


@pytest.mark.clause("B1", "B2", "B3", "A2", "A5")
@settings(max_examples=40)
@given(layouts(max_documents=3, max_length=4), masks(), head_layouts(), SCALES, SEEDS)
def test_backward_equals_complex_steps(layout, mask, heads, scale, seed):
    rng = np.random.default_rng(seed)
    heads = heads._replace(heads_q=min(heads.heads_q, 4), heads_kv=min(heads.heads_kv, 2), dim_qk=2)
    if heads.heads_q % heads.heads_kv:
        heads = heads._replace(heads_q=2 * heads.heads_kv)
    q, k, v, dout = tensors(rng, layout.total_tokens, layout.total_tokens, heads)
    padding = [row for row, (d, _) in enumerate(witness.rows(*parts_of(layout))) if d < 0]
    keys = keys_of(layout, mask)
    clean = dout.copy()
    clean[padding] = 0
    expected = witness.gradients(q, k, v, clean, keys, heads.dim_qk**-0.5 if scale is None else scale)
    dirty = [poison(x, padding, rng) for x in (q, k, v)]
    out, lse = attention_forward(*dirty, layout, mask, scale)
    saved = poison(dout, padding, rng), *dirty, poison(out, padding, rng), poison(lse, padding, rng, axis=1)
    kept = [x.copy() for x in saved]
    got = attention_backward(*saved, layout, mask, scale)
    for gradient, want in zip(got, expected, strict=True):
        close(gradient, want)
        assert (gradient[padding] == 0).all()
    exactly(saved, kept)


@pytest.mark.clause("B1", "B3")
@settings(max_examples=40)
@given(layouts(max_documents=4, max_length=8), masks(), head_layouts(), SEEDS)
def test_backward_is_the_slope_of_the_forward(layout, mask, heads, seed):
    """Central differences of `attention_forward` itself along a random direction: error of the order of h squared."""
    rng = np.random.default_rng(seed)
    tokens = layout.total_tokens
    q, k, v, dout = tensors(rng, tokens, tokens, heads)
    out, lse = attention_forward(q, k, v, layout, mask)
    gradients = attention_backward(dout, q, k, v, out, lse, layout, mask)
    h = 1e-5
    for which in range(3):
        direction = rng.standard_normal((q, k, v)[which].shape)
        losses = []
        for sign in (1, -1):
            moved = [q, k, v]
            moved[which] = moved[which] + sign * h * direction
            losses.append(float((attention_forward(*moved, layout, mask)[0] * dout).sum()))
        slope = (losses[0] - losses[1]) / (2 * h)
        assert abs(slope - float((gradients[which] * direction).sum())) < 1e-6 * (1 + np.abs(gradients[which]).sum())


@pytest.mark.clause("B1", "A3")
def test_long_double_agrees_to_the_last_digits():
    """The same loss in 64 bits of mantissa, by differences small enough to check float64 beyond 1e-9."""
    rng = np.random.default_rng(3)
    layout, mask = PackedLayout([0, 4, 9]), AttentionMask(window=(2, 0))
    heads = Heads(4, 2, 3, 2)
    q, k, v, dout = tensors(rng, 9, 9, heads)
    out, lse = attention_forward(q, k, v, layout, mask)
    gradients = attention_backward(dout, q, k, v, out, lse, layout, mask)
    keys = keys_of(layout, mask)
    scale = np.longdouble(1) / np.sqrt(np.longdouble(3))
    exact = [x.astype(np.longdouble) for x in (q, k, v, dout)]
    assert abs(witness.loss(*exact, keys, scale) - (out * dout).sum()) < 1e-13
    h = np.longdouble(2.0**-20)
    for which, index in [
        (0, (3, 1, 2)),
        (0, (8, 3, 0)),
        (1, (0, 0, 1)),
        (1, (5, 1, 2)),
        (2, (2, 1, 0)),
        (2, (8, 0, 1)),
    ]:
        sides = []
        for sign in (1, -1):
            moved = [x.copy() for x in exact]
            moved[which][index] += sign * h
            sides.append(witness.loss(*moved, keys, scale))
        assert abs((sides[0] - sides[1]) / (2 * h) - gradients[which][index]) < 1e-11


# What must not matter


@pytest.mark.clause("C5", "R2", "R3", "R4", "R5", "K4", "B3", "A5")
@settings(max_examples=60)
@given(cases(max_documents=4, max_length=7), masks(), head_layouts(), SEEDS)
def test_the_steps_of_all_ranks_give_the_whole(case, mask, heads, seed):
    """The metadata, driven through attention: forward, dq, and dk and dv added up over steps and ranks."""
    layout, policy, cp_size = case
    rng = np.random.default_rng(seed)
    tokens = layout.total_tokens
    q, k, v, dout = tensors(rng, tokens, tokens, heads)
    padding = [row for row, (d, _) in enumerate(witness.rows(*parts_of(layout))) if d < 0]
    q, k, v, dout = (poison(x, padding, rng) for x in (q, k, v, dout))
    out, lse = attention_forward(q, k, v, layout, mask)
    expected = [out, lse, *attention_backward(dout, q, k, v, out, lse, layout, mask)]
    got = [np.full(x.shape, np.nan) for x in expected[:3]] + [np.zeros(x.shape) for x in expected[3:]]
    for rank in range(cp_size):
        metadata = rank_metadata(layout, policy, cp_size, rank, mask)
        for step, step_rows in zip(metadata.steps, metadata.step_rows, strict=True):
            rows = metadata.indices[step_rows]
            step_out, step_lse = varlen_attention_forward(q[rows], k, v, step, mask)
            dq, dk, dv = varlen_attention_backward(dout[rows], q[rows], k, v, step_out, step_lse, step, mask)
            got[0][rows], got[1][:, rows], got[2][rows] = step_out, step_lse, dq
            got[3] += dk
            got[4] += dv
    for x, want in zip(got, expected, strict=True):
        close(x, want)


@pytest.mark.clause("L5")
@settings(max_examples=30)
@given(layouts(max_documents=3), masks(), head_layouts(), st.integers(1, 3), st.data(), SEEDS)
def test_documents_of_length_zero_change_no_bit(layout, mask, heads, times, data, seed):
    rng = np.random.default_rng(seed)
    tokens = layout.total_tokens
    q, k, v, dout = tensors(rng, tokens, tokens, heads)
    real, physical, total = parts_of(layout)
    at = data.draw(st.integers(0, len(real) - 1))
    inside = PackedLayout(real[: at + 1] + real[at:], physical[: at + 1] + physical[at:], total)
    results = []
    for same in (layout, repeat_tail(layout, times), inside):
        out, lse = attention_forward(q, k, v, same, mask)
        results.append((out, lse, *attention_backward(dout, q, k, v, out, lse, same, mask)))
    exactly(results[1], results[0])
    exactly(results[2], results[0])


@pytest.mark.clause("L1", "L4", "A5")
def test_where_padding_lies_changes_no_bit():
    rng = np.random.default_rng(5)
    tight = PackedLayout([0, 4, 4, 7])
    loose = PackedLayout([0, 4, 4, 7], [0, 6, 7, 12], 15)
    real = loose.document_ids >= 0
    q, k, v, dout = tensors(rng, 7, 7, Heads(4, 2, 3, 5))

    def spread(x):
        wide = np.full((15, *x.shape[1:]), np.nan)
        wide[real] = x
        return wide

    mask = AttentionMask(False, (2, 1))
    out, lse = attention_forward(q, k, v, tight, mask)
    tight_results = [out, lse.T, *attention_backward(dout, q, k, v, out, lse, tight, mask)]
    wide = [spread(x) for x in (q, k, v)]
    out, lse = attention_forward(*wide, loose, mask)
    loose_results = [out, lse.T, *attention_backward(spread(dout), *wide, out, lse, loose, mask)]
    exactly([x[real] for x in loose_results], tight_results)
    for x, blank in zip(loose_results, (0, -np.inf, 0, 0, 0), strict=True):
        assert (x[~real] == blank).all()


@pytest.mark.clause("A3", "K1")
def test_other_documents_change_no_bit():
    rng = np.random.default_rng(6)
    layout = PackedLayout([0, 3, 8])
    q, k, v, dout = tensors(rng, 8, 8, Heads(2, 2, 3, 3))
    out, lse = attention_forward(q, k, v, layout, FULL)
    gradients = attention_backward(dout, q, k, v, out, lse, layout, FULL)
    for x in (q, k, v, dout):
        x[:3] = rng.standard_normal(x[:3].shape)
    changed_out, changed_lse = attention_forward(q, k, v, layout, FULL)
    changed = attention_backward(dout, q, k, v, changed_out, changed_lse, layout, FULL)
    exactly([changed_out[3:], changed_lse[:, 3:]], [out[3:], lse[:, 3:]])
    exactly([x[3:] for x in changed], [x[3:] for x in gradients])
    assert (changed_out[:3] != out[:3]).all()


# Numbers of every size


@pytest.mark.clause("A3", "A6", "B1")
@pytest.mark.parametrize("size", [1.0, 50.0, 700.0, 1e5, 1e15])
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=["causal", "full"])
def test_extreme_scores_against_long_double(size, mask):
    """Scores up to +-size, exact in float64, so that no rounding of theirs hides an error of exp or log."""
    layout = PackedLayout([0, 4, 9])
    rng = np.random.default_rng(7)
    q = rng.choice([-1.0, -0.5, 0.25, 1.0], (9, 1, 1)) * size
    k = rng.choice([-1.0, -0.25, 0.5, 1.0], (9, 1, 1))
    v, dout = rng.standard_normal((9, 1, 2)), rng.standard_normal((9, 1, 2))
    out, lse = attention_forward(q, k, v, layout, mask, 1.0)
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, layout, mask, 1.0)
    keys = keys_of(layout, mask)
    exact = [x.astype(np.longdouble) for x in (q, k, v, dout)]
    want_dv, want_ds = np.zeros((9, 2), np.longdouble), np.zeros((9, 9), np.longdouble)
    for i in range(9):
        s = np.array([exact[0][i, 0, 0] * exact[1][j, 0, 0] for j in keys[i]])
        e = np.exp(s - s.max())
        p = e / e.sum()
        row = (p[:, None] * exact[2][keys[i], 0]).sum(axis=0)
        close(out[i, 0], row.astype(float), 1e-14)
        assert abs(lse[0, i] - (s.max() + np.log(e.sum()))) <= 4 * np.spacing(max(1.0, size))
        want_dv[keys[i]] += p[:, None] * exact[3][i, 0]
        want_ds[i, keys[i]] = p * ((exact[2][keys[i], 0] - row) @ exact[3][i, 0])
    # The saved lse is rounded once, so p carries a relative error of half its spacing.
    rounding = max(1e-13, float(np.spacing(size)))
    close(dv[:, 0], want_dv.astype(float), rounding)
    close(dq[:, 0, 0], (want_ds @ exact[1][:, 0, 0]).astype(float), rounding)
    close(dk[:, 0, 0], (want_ds.T @ exact[0][:, 0, 0]).astype(float), rounding)


@pytest.mark.clause("A3")
@pytest.mark.parametrize("shift", [700.0, -700.0, 2.0**17, -(2.0**17), 2.0**40])
def test_a_shift_of_all_scores_shifts_lse_and_nothing_else(shift):
    rng = np.random.default_rng(8)
    layout = PackedLayout([0, 3, 7])
    # Multiples of 2**-8 below 16: the shifted scores are exact too.
    q, k = (np.round(rng.standard_normal((7, 2, 1)) * 16) / 16 for _ in range(2))
    v = rng.standard_normal((7, 2, 3))
    q = np.concatenate((q, np.ones_like(q)), axis=2)
    k0, k1 = (np.concatenate((k, np.full_like(k, c)), axis=2) for c in (0.0, shift))
    out, lse = attention_forward(q, k0, v, layout, CAUSAL, 1.0)
    shifted_out, shifted_lse = attention_forward(q, k1, v, layout, CAUSAL, 1.0)
    close(shifted_out, out, 1e-14)
    assert np.abs(shifted_lse - shift - lse).max() <= 2 * np.spacing(abs(shift))


@pytest.mark.clause("N4")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", ">f4", "longdouble"])
def test_inputs_convert_exactly_and_results_are_float64(dtype, require):
    rng = np.random.default_rng(9)
    dtype = require("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    layout, mask = PackedLayout([0, 4, 6], [0, 5, 8]), AttentionMask(window=(2, 0))
    low = [x.astype(dtype) for x in tensors(rng, 8, 8, Heads(4, 2, 3, 5))]
    high = [x.astype(np.float64) for x in low]
    results = []
    for q, k, v, dout in (low, high):
        out, lse = attention_forward(q, k, v, layout, mask)
        results.append((out, lse, *attention_backward(dout, q, k, v, out, lse, layout, mask)))
    exactly(results[0], results[1])
    assert {x.dtype for x in results[0]} == {np.dtype(np.float64)}
    step = StepMetadata.of_layout(layout)
    exactly(varlen_attention_forward(*low[:3], step, mask), varlen_attention_forward(*high[:3], step, mask))


@pytest.mark.clause("N4", "B4")
def test_backward_takes_out_and_lse_of_other_precisions():
    """Saved results may be narrower than float64; they are used as they are."""
    rng = np.random.default_rng(10)
    layout = PackedLayout([0, 5])
    q, k, v, dout = tensors(rng, 5, 5, Heads(2, 1, 3, 2))
    out, lse = attention_forward(q, k, v, layout, CAUSAL)
    exact = attention_backward(dout, q, k, v, out, lse, layout, CAUSAL)
    narrow = out.astype(np.float32), lse.astype(np.float32)
    rounded = attention_backward(dout, q, k, v, *narrow, layout, CAUSAL)
    widened = attention_backward(dout, q, k, v, *(x.astype(np.float64) for x in narrow), layout, CAUSAL)
    exactly(rounded, widened)
    for x, y in zip(rounded, exact, strict=True):
        assert 0 < np.abs(x - y).max() < 1e-5


@pytest.mark.clause("B4")
def test_backward_takes_the_saved_lse_and_out_and_does_not_decide_anew():
    rng = np.random.default_rng(11)
    layout = PackedLayout([0, 4])
    q, k, v, dout = tensors(rng, 4, 4, Heads(1, 1, 2, 2))
    out, lse = attention_forward(q, k, v, layout, CAUSAL)
    _, _, dv = attention_backward(dout, q, k, v, out, lse, layout, CAUSAL)
    dq, _, halved = attention_backward(dout, q, k, v, out, lse + np.log(2), layout, CAUSAL)
    close(halved, dv / 2)
    more_dq, _, same_dv = attention_backward(dout, q, k, v, out + 1, lse + np.log(2), layout, CAUSAL)
    exactly([same_dv], [halved])
    assert (more_dq != dq).any()


@pytest.mark.clause("A1")
@pytest.mark.parametrize("scale", [1, np.float32(0.5), np.int64(2), 0, -1.5])
def test_scales_of_many_types(scale):
    layout = PackedLayout([0, 1])
    x = np.full((1, 1, 1), 3.0)
    assert attention_forward(x, x, x, layout, CAUSAL, scale)[1].tolist() == [[9.0 * float(scale)]]


@pytest.mark.clause("A8")
def test_lists_of_numbers_will_do():
    x = [[[1.0, 2.0]], [[0.5, 1.0]]]
    layout = PackedLayout([0, 2])
    out, lse = attention_forward(x, x, x, layout, CAUSAL)
    exactly((out, lse), attention_forward(*[np.array(x)] * 3, layout, CAUSAL))
    dq, _, _ = attention_backward(x, x, x, x, out.tolist(), lse.tolist(), layout, CAUSAL)
    assert dq.shape == (2, 1, 2)


@pytest.mark.clause("A5", "L4")
def test_buffers_without_a_token():
    for layout in (PackedLayout([0]), PackedLayout([0, 0], [0, 3]), PackedLayout([0], total_tokens=2)):
        tokens = layout.total_tokens
        x = np.full((tokens, 2, 3), np.nan)
        out, lse = attention_forward(x, x, x, layout, CAUSAL)
        assert out.tolist() == np.zeros((tokens, 2, 3)).tolist()
        assert lse.tolist() == np.full((2, tokens), -np.inf).tolist()
        for gradient in attention_backward(x, x, x, x, out, lse, layout, CAUSAL):
            assert gradient.tolist() == np.zeros((tokens, 2, 3)).tolist()


# Refusals


def shaped(*shape, dtype=float):
    return np.zeros(shape, dtype)


QKV = (shaped(5, 4, 3), shaped(5, 2, 3), shaped(5, 2, 6))
BAD_INPUTS = {
    "an integer query": (0, shaped(5, 4, 3, dtype=int), "dtype", ("q has dtype int64",)),
    "a complex key": (1, shaped(5, 2, 3, dtype=complex), "dtype", ("k has dtype complex128",)),
    "a bool value": (2, shaped(5, 2, 6, dtype=bool), "dtype", ("v has dtype bool",)),
    "an object": (2, shaped(5, 2, 6, dtype=object), "dtype", ("v has dtype object",)),
    "two dimensions": (0, shaped(5, 12), "shape", ("q has shape [5, 12]", "[tokens, heads, head_dim]")),
    "a batch axis": (1, shaped(1, 5, 2, 3), "shape", ("k has shape [1, 5, 2, 3]",)),
    "no heads": (1, shaped(5, 0, 3), "shape", ("k has shape [5, 0, 3]",)),
    "no query heads": (0, shaped(5, 0, 3), "shape", ("q has shape [5, 0, 3]",)),
    "no head dimension": (2, shaped(5, 2, 0), "shape", ("v has shape [5, 2, 0]",)),
    "another head dimension": (1, shaped(5, 2, 4), "shape", ("q has head_dim 3 but k has 4",)),
    "other heads in v": (2, shaped(5, 4, 6), "shape", ("k has shape [5, 2, 3] but v has [5, 4, 6]",)),
    "heads that do not divide": (0, shaped(5, 3, 3), "heads", ("3 query heads", "2 K/V heads")),
    "fewer query heads": (0, shaped(5, 1, 3), "heads", ("1 query heads",)),
}


@pytest.mark.clause("A8")
@pytest.mark.parametrize("name", BAD_INPUTS)
@pytest.mark.parametrize("form", ["layout", "step"])
def test_bad_inputs_are_refused_forward_and_backward(name, form):
    which, bad, code, fragments = BAD_INPUTS[name]
    inputs = [bad if i == which else x for i, x in enumerate(QKV)]
    saved = shaped(5, 4, 6), shaped(4, 5)
    layout = PackedLayout([0, 3, 5])
    if form == "layout":
        forward, backward, last = attention_forward, attention_backward, layout
    else:
        forward, backward, last = varlen_attention_forward, varlen_attention_backward, StepMetadata.of_layout(layout)
    with refused(code, *fragments):
        forward(*inputs, last, CAUSAL)
    with refused(code, *fragments):
        backward(saved[0], *inputs, *saved, last, CAUSAL)


@pytest.mark.clause("A8", "L4")
@pytest.mark.parametrize(("which", "name"), [(0, "q"), (1, "k"), (2, "v")])
@pytest.mark.parametrize("rows", [4, 6])
def test_the_layout_form_takes_exactly_the_rows_of_the_layout(which, name, rows):
    inputs = [shaped(rows, *x.shape[1:]) if i == which else x for i, x in enumerate(QKV)]
    with refused("shape", f"{name} has {rows} rows", "5"):
        attention_forward(*inputs, PackedLayout([0, 3], total_tokens=5), CAUSAL)


@pytest.mark.clause("A8")
def test_the_step_form_takes_at_least_the_rows_of_the_step():
    step = StepMetadata.from_offsets([0, 2], [0, 4], [0, 3], [0, 5])
    out, lse = varlen_attention_forward(shaped(4, 4, 3), shaped(6, 2, 3), shaped(6, 2, 6), step, CAUSAL)
    assert (out.shape, lse.shape) == ((4, 4, 6), (4, 4))
    for q, k, v, name, need in ((2, 5, 5, "q", 3), (3, 4, 5, "k", 5), (3, 5, 4, "v", 5)):
        with refused("shape", f"{name} has", f"{need} or more"):
            varlen_attention_forward(shaped(q, 4, 3), shaped(k, 2, 3), shaped(v, 2, 6), step, CAUSAL)
    with refused("shape", "k has shape [6, 2, 3] but v has [5, 2, 6]"):
        varlen_attention_forward(shaped(3, 4, 3), shaped(6, 2, 3), shaped(5, 2, 6), step, CAUSAL)


@pytest.mark.clause("A8", "B4")
@pytest.mark.parametrize(
    ("which", "bad", "code", "fragments"),
    [
        (0, shaped(5, 4, 3), "shape", ("dout has shape [5, 4, 3]", "[5, 4, 6]")),
        (0, shaped(5, 2, 6), "shape", ("dout",)),
        (1, shaped(4, 4, 6), "shape", ("out has shape [4, 4, 6]",)),
        (2, shaped(5, 4), "shape", ("lse has shape [5, 4]", "[4, 5]")),
        (2, shaped(4, 5, 1), "shape", ("lse",)),
        (0, shaped(5, 4, 6, dtype=int), "dtype", ("dout has dtype int64",)),
        (1, shaped(5, 4, 6, dtype=complex), "dtype", ("out has dtype complex128",)),
        (2, shaped(4, 5, dtype=int), "dtype", ("lse has dtype int64",)),
    ],
)
def test_bad_saved_results_are_refused(which, bad, code, fragments):
    dout, out, lse = (bad if i == which else x for i, x in enumerate((shaped(5, 4, 6), shaped(5, 4, 6), shaped(4, 5))))
    layout = PackedLayout([0, 5])
    for backward, last in ((attention_backward, layout), (varlen_attention_backward, StepMetadata.of_layout(layout))):
        with refused(code, *fragments):
            backward(dout, *QKV, out, lse, last, CAUSAL)


@pytest.mark.clause("A1")
@pytest.mark.parametrize(
    "scale", [np.nan, np.inf, -np.inf, "1", True, 1j, [1.0], np.array(0.5), 10**400], ids=lambda x: repr(x)[:9]
)
def test_a_scale_that_is_no_finite_number_is_refused(scale):
    layout = PackedLayout([0, 5])
    with refused("softmax_scale", "softmax_scale is"):
        attention_forward(*QKV, layout, CAUSAL, scale)
    with refused("softmax_scale", "softmax_scale is"):
        attention_backward(shaped(5, 4, 6), *QKV, shaped(5, 4, 6), shaped(4, 5), layout, CAUSAL, scale)
