"""Tiled attention is the oracle's, whatever the tiles, threads and batches, in memory linear in T.

Small cases cross many tiles, because the tile sizes are made small too.
"""

import subprocess
import sys
import tracemalloc
from contextlib import contextmanager
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import Heads, cases, head_layouts, layout_of, layouts, masks, poison, repeat_tail, tensors
from support import assert_close, refused, run

from refimpl import attention, tiled
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import StepMetadata, rank_metadata
from refimpl.tolerance import OUTPUTS, Tolerance, plain_attention

CAUSAL = AttentionMask()
FULL = AttentionMask(causal=False)
SEEDS = st.integers(0, 2**32 - 1)


def tile_sizes():
    """(rows, keys, edge_keys, batch_size, fill): anything from single scores up; large batches hold documents."""
    rows, batch_size = st.sampled_from([1, 2, 5, 8, 24, 1024]), st.sampled_from([1, 60, 1000, 10**6])
    return st.tuples(rows, st.integers(1, 7), st.integers(1, 4), batch_size, st.integers(1, 6))


@contextmanager
def tiles(rows, keys, edge_keys, batch_size=1, fill=1):
    sizes = {"TILE_ROWS": rows, "TILE_KEYS": keys, "EDGE_KEYS": edge_keys, "BATCH_SIZE": batch_size, "FILL": fill}
    with mock.patch.multiple(tiled, **sizes):
        yield


def assert_same_bits(actual, expected):
    for name, a, b in zip(OUTPUTS, actual, expected, strict=True):
        assert a.dtype == b.dtype, name
        assert a.tobytes() == b.tobytes(), name


def padding(layout):
    return np.flatnonzero(layout.document_ids < 0)


@pytest.mark.clause("A2", "A3", "A4", "A5", "B1", "B2", "B3")
@settings(max_examples=120)
@given(layouts(max_length=20), masks(), head_layouts(), tile_sizes(), SEEDS)
def test_the_oracle_s_results_from_padding_full_of_poison(layout, mask, heads, sizes, seed):
    rng = np.random.default_rng(seed)
    arrays = tensors(rng, layout.total_tokens, layout.total_tokens, heads)
    expected = run(attention, *arrays, layout, mask)
    poisoned = [poison(x, padding(layout), rng) for x in arrays]
    with tiles(*sizes):
        actual = run(tiled, *poisoned, layout, mask)
    assert_close(actual, expected)
    assert not any(x[padding(layout)].any() for x in (actual[0], *actual[2:]))


@pytest.mark.clause("A5", "B2")
@given(layouts(), masks(), SEEDS)
def test_saved_results_are_not_read_in_padding_either(layout, mask, seed):
    rng = np.random.default_rng(seed)
    q, k, v, dout = tensors(rng, layout.total_tokens, layout.total_tokens, Heads(4, 2, 3, 2))
    out, lse, *gradients = run(tiled, q, k, v, dout, layout, mask)
    out, lse = poison(out, padding(layout), rng), poison(lse, padding(layout), rng, axis=1)
    again = tiled.attention_backward(dout, q, k, v, out, lse, layout, mask)
    assert_same_bits((out, lse, *again), (out, lse, *gradients))


@pytest.mark.clause("A3", "K4", "R5", "B1")
@settings(max_examples=60)
@given(cases(max_length=16), masks(), head_layouts(), tile_sizes(), SEEDS)
def test_every_step_of_every_rank_and_policy(case, mask, heads, sizes, seed):
    rng = np.random.default_rng(seed)
    q, k, v, dout = tensors(rng, case.layout.total_tokens, case.layout.total_tokens, heads)
    for rank in range(case.cp_size):
        metadata = rank_metadata(case.layout, case.policy, case.cp_size, rank, mask)
        for step, rows in zip(metadata.steps, metadata.step_rows, strict=True):
            mine = metadata.indices[rows]
            expected = run(attention, q[mine], k, v, dout[mine], step, mask)
            unread = np.setdiff1d(
                np.arange(len(k)), np.concatenate([np.arange(*r) for r in metadata.kv_ranges] or [[]])
            )
            with tiles(*sizes):
                actual = run(tiled, q[mine], poison(k, unread, rng), poison(v, unread, rng), dout[mine], step, mask)
            assert_close(actual, expected)


@st.composite
def steps(draw):
    """Queries and keys of any two lengths a document, stored with gaps, aligned to the bottom right or anywhere."""
    ranges = (0, 14), (0, 14), (0, 2), (0, 2), (-16, 16)
    documents = draw(st.lists(st.tuples(*[st.integers(*bounds) for bounds in ranges]), max_size=4))
    q, k, gap_q, gap_k, first_query = np.array(documents, np.int64).reshape(-1, len(ranges)).T
    cu = [np.append(0, np.cumsum(x)) for x in (q, k, q + gap_q, k + gap_k)]
    return StepMetadata.from_offsets(*cu, first_query=first_query if draw(st.booleans()) else None)


@pytest.mark.clause("A3", "A4", "A5", "K4", "K5", "B1", "B2")
@settings(max_examples=200)
@given(steps(), masks(), head_layouts(), tile_sizes(), SEEDS)
@example(StepMetadata.from_offsets([0, 9], [0, 2]), CAUSAL, Heads(2, 1, 2, 3), (4, 2, 1), 0)
@example(StepMetadata.from_offsets([0, 3], [0, 0]), FULL, Heads(1, 1, 2, 3), (4, 2, 1), 0)
def test_more_or_fewer_queries_than_keys_anywhere_in_longer_buffers(step, mask, heads, sizes, seed):
    rng = np.random.default_rng(seed)
    rows_q, rows_k = (n + 2 for n in attention.step_rows_needed(step))
    arrays = tensors(rng, rows_q, rows_k, heads)
    expected = run(attention, *arrays, step, mask)
    unclaimed = np.ones(rows_q, bool), np.ones(rows_k, bool)
    for rows, starts, lengths in zip(
        unclaimed,
        (step.cu_seqlens_q_padded, step.cu_seqlens_kv_padded),
        (step.seqlens_q, step.seqlens_kv),
        strict=True,
    ):
        for start, length in zip(starts[:-1], lengths, strict=True):
            rows[start : start + length] = False
    of_q, of_k = unclaimed
    poisoned = [poison(x, rows, rng) for x, rows in zip(arrays, (of_q, of_k, of_k, of_q), strict=True)]
    with tiles(*sizes):
        assert_close(run(tiled, *poisoned, step, mask), expected)


@pytest.mark.clause("A3", "B1", "N2")
@pytest.mark.parametrize(
    "mask", [CAUSAL, FULL, AttentionMask(window=(37, -1)), AttentionMask(False, (90, 50))], ids=str
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
def test_real_tile_sizes_and_float32_as_exact_as_a_plain_implementation(dtype, mask):
    """At most twice the error of the plain formulas in float32, and one rounding: the project's rule for any dtype."""
    layout = PackedLayout.from_lengths([700, 3, 0, 130, 3, 3], multiple_of=8, total_tokens=900)
    rng = np.random.default_rng(3)
    arrays = [x.astype(dtype) for x in tensors(rng, 900, 900, Heads(4, 2, 32, 16))]
    q, k, v, dout = arrays
    expected = run(attention, *arrays, layout, mask)
    actual = run(tiled, *arrays, layout, mask)
    if dtype == np.float64:
        assert_close(actual, expected)
        return
    plain = plain_attention(q, k, v, dout, layout, mask, 32**-0.5)
    for name, a, b in zip(OUTPUTS, actual, expected, strict=True):
        assert a.dtype == np.float32
        finite = np.isfinite(b)
        error = np.abs(a[finite] - b[finite]).max()
        yardstick = np.abs(plain[name][finite] - b[finite]).max()
        assert error <= Tolerance.of(np.dtype(dtype), yardstick, np.abs(b[finite]).max()).bound, name


@pytest.mark.clause("N1")
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ">f4"], ids=str)
def test_low_precision_inputs_are_computed_in_float32(dtype):
    layout = layout_of([5, 9], [6, 9])
    arrays = [x.astype(dtype) for x in tensors(np.random.default_rng(0), 15, 15, Heads(4, 2, 8, 8))]
    expected = run(tiled, *[x.astype(np.float32) for x in arrays], layout, CAUSAL)
    assert all(x.dtype == np.float32 for x in expected)
    assert_same_bits(run(tiled, *arrays, layout, CAUSAL), expected)


@pytest.mark.clause("N1")
@pytest.mark.parametrize("wide", range(6), ids=["dout", "q", "k", "v", "out", "lse"])
def test_one_float64_input_makes_the_results_float64(wide):
    layout = layout_of([5, 9], [6, 9])
    q, k, v, dout = (x.astype(np.float32) for x in tensors(np.random.default_rng(0), 15, 15, Heads(4, 2, 8, 8)))
    arrays = [dout, q, k, v, *tiled.attention_forward(q, k, v, layout, CAUSAL)]
    arrays[wide] = arrays[wide].astype(np.float64)
    assert {x.dtype for x in tiled.attention_backward(*arrays, layout, CAUSAL)} == {np.dtype(np.float64)}
    of_forward = {x.dtype for x in tiled.attention_forward(*arrays[1:4], layout, CAUSAL)}
    assert of_forward == {np.dtype(np.float64 if wide in (1, 2, 3) else np.float32)}


def scores_as_given(scores, dtype):
    """q, k with scale 1 whose score of query i and key j is exactly scores[j], and v, dout."""
    num = len(scores)
    rng = np.random.default_rng(0)
    q = np.ones((num, 1, 1), dtype)
    k = np.array(scores, dtype).reshape(num, 1, 1)
    return q, k, rng.standard_normal((num, 1, 3)).astype(dtype), rng.standard_normal((num, 1, 3)).astype(dtype)


@pytest.mark.clause("A3", "A4", "B1")
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(
    "scores",
    [
        [-1e30, 1e30] * 6,
        [1e30, -1e30] * 6,
        [-1e30] * 12,
        [1e30] * 12,
        [1e37, -1e37, 0.0] * 4,
        [100.0 * i for i in range(12)],
        [-100.0 * i for i in range(12)],
        [7.9 * i for i in range(12)],
        [8.1 * i for i in range(12)],
        [20.7, -20.7, 0.0, 20.9, -20.9, 0.0] * 2,  # CALM lies between
        [0.0] * 6 + [2000.0] + [0.0] * 5,
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", [CAUSAL, FULL, AttentionMask(window=(2, -1))], ids=str)
def test_scores_far_beyond_the_range_of_exp(scores, mask, dtype):
    arrays = scores_as_given(scores, dtype)
    layout = PackedLayout([0, len(scores)])
    expected = run(attention, *[x.astype(np.float64) for x in arrays], layout, mask, 1.0)
    for sizes in [(1024, 384, 64), (4, 2, 1), (3, 3, 2)]:
        with tiles(*sizes), np.errstate(all="raise"):
            actual = run(tiled, *arrays, layout, mask, 1.0)
        assert all(np.isfinite(x).all() for x in actual)  # a row whose scores are all -1e30 does see keys
        in_units_of_k = [np.ones(()), np.ones(()), np.maximum(1, np.abs(arrays[1]).max()), np.ones(()), np.ones(())]
        assert_close(
            [x / unit for x, unit in zip(actual, in_units_of_k, strict=True)],
            [x / unit for x, unit in zip(expected, in_units_of_k, strict=True)],
            1e-12 if dtype == np.float64 else 2e-4,
        )


@pytest.mark.clause("A3", "B1")
@pytest.mark.parametrize("score", [-20.7, 20.7, 20.9])
@pytest.mark.parametrize("magnitude", [1e-28, 1e-20, 1e25])
def test_values_of_any_magnitude_beside_the_largest_scores_without_a_reference(score, magnitude):
    """float32 neither overflows nor loses digits where powers of 2^30 and 2^-30 meet the values."""
    q, k, v, dout = scores_as_given([score, *[-abs(score)] * 199], np.float32)
    arrays = q, k, np.abs(v) * np.float32(magnitude), dout
    out, lse = tiled.attention_forward(*arrays[:3], PackedLayout([0, 200]), CAUSAL, 1.0)
    expected, expected_lse = attention.attention_forward(*arrays[:3], PackedLayout([0, 200]), CAUSAL, 1.0)
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


@pytest.mark.clause("A3", "B1")
@pytest.mark.parametrize("magnitude", [1e5, 1e8, 1e20, 1e30])
def test_one_key_outweighs_all_others_by_far_more_than_a_rounding(magnitude):
    """Generic numbers, whose huge scores are rounded: the winner's probability must still be 1, in both passes."""
    rng = np.random.default_rng(5)
    q = np.abs(rng.standard_normal((40, 2, 7))).astype(np.float32) + 1
    k = (rng.uniform(1, 2, (40, 1, 7)) * rng.permuted(np.arange(1, 41) * magnitude)[:, None, None]).astype(np.float32)
    v, dout = (rng.standard_normal((40, h, 3)).astype(np.float32) for h in (1, 2))
    layout = PackedLayout([0, 40])
    expected = run(attention, q, k, v, dout, layout, CAUSAL)
    for sizes in [(1024, 384, 64), (8, 5, 3)]:
        with tiles(*sizes):
            out, _, dq, _, dv = run(tiled, q, k, v, dout, layout, CAUSAL)
        np.testing.assert_allclose(out, expected[0], atol=1e-5)
        np.testing.assert_allclose(dv, expected[4], atol=1e-5)
        assert np.isfinite(dq).all()


@pytest.mark.clause("L5")
@settings(max_examples=50)
@given(layouts(max_length=20), masks(), st.integers(1, 3), tile_sizes(), SEEDS)
def test_a_repeated_tail_changes_no_bit(layout, mask, times, sizes, seed):
    arrays = tensors(np.random.default_rng(seed), layout.total_tokens, layout.total_tokens, Heads(4, 2, 4, 3))
    with tiles(*sizes):
        expected = run(tiled, *arrays, layout, mask)
        assert_same_bits(run(tiled, *arrays, repeat_tail(layout, times), mask), expected)


@pytest.mark.clause("N1", "B3")
@pytest.mark.parametrize("mask", [CAUSAL, AttentionMask(False, (40, 9))], ids=str)
def test_the_same_bits_on_every_call_and_with_any_number_of_workers(mask):
    lengths = np.random.default_rng(1).integers(0, 60, 40)
    lengths[7] = 900
    layout = PackedLayout.from_lengths(lengths)
    rows = layout.total_tokens
    arrays = [x.astype(np.float32) for x in tensors(np.random.default_rng(0), rows, rows, Heads(8, 4, 16, 16))]
    expected = run(tiled, *arrays, layout, mask, workers=1)
    for workers in (1, 2, 3, 8, None):
        assert_same_bits(run(tiled, *arrays, layout, mask, workers=workers), expected)


@pytest.mark.clause("A5")
@pytest.mark.parametrize("restless", [0, 40])
def test_documents_of_one_batch_do_not_touch_each_other(restless):
    """A document of NaN, or of huge scores, changes no bit of its neighbours: some calm, some not, or all calm."""
    layout = PackedLayout.from_lengths([10, 8, 9, 12, 11, 4])
    arrays = tensors(np.random.default_rng(0), 54, 54, Heads(4, 2, 4, 3))
    arrays[0][:restless] *= 1000
    with tiles(1024, 3, 2, batch_size=10**6, fill=4):
        assert sorted(task.batch for task in tiled._tasks(StepMetadata.of_layout(layout), CAUSAL, 2, 2)) == [2, 2, 8]
        expected = run(tiled, *arrays, layout, CAUSAL)
        for value in (np.nan, np.inf, 1e200):
            changed = [x.copy() for x in arrays]
            for x in changed[:3]:
                x[20:25] = value
            actual = run(tiled, *changed, layout, CAUSAL)
            others = [
                np.delete(x, np.s_[18:27], axis=int(name == "lse")) for name, x in zip(OUTPUTS, actual, strict=True)
            ]
            kept = [
                np.delete(x, np.s_[18:27], axis=int(name == "lse")) for name, x in zip(OUTPUTS, expected, strict=True)
            ]
            assert_same_bits(others, kept)


@pytest.mark.clause("A3", "B1")
def test_any_strides():
    layout = layout_of([5, 0, 30], [6, 0, 31])
    q, k, v, dout = tensors(np.random.default_rng(0), 37, 37, Heads(4, 2, 4, 3))
    dout = np.broadcast_to(dout[0, 0], dout.shape)
    expected = run(tiled, q, k, v, np.ascontiguousarray(dout), layout, CAUSAL)
    strided = [
        np.asfortranarray(q),
        np.repeat(k, 2, axis=2)[:, :, ::2],
        np.ascontiguousarray(v[::-1, ::-1, ::-1])[::-1, ::-1, ::-1],
        dout,
    ]
    for x in strided:
        x.flags.writeable = False
    assert not any(x.flags.c_contiguous for x in strided)
    assert_same_bits(run(tiled, *strided, layout, CAUSAL), expected)


@pytest.mark.clause("A3", "B2")
@pytest.mark.parametrize("layout", [PackedLayout([0]), PackedLayout([0], [0], 3), PackedLayout([0, 0, 0], [0, 2, 4])])
def test_nothing_to_attend_to(layout):
    rows = layout.total_tokens
    out, lse, *gradients = run(tiled, *tensors(np.random.default_rng(0), rows, rows, Heads(2, 1, 3, 2)), layout, CAUSAL)
    assert out.shape == (rows, 2, 2)
    assert lse.shape == (2, rows)
    assert np.isneginf(lse).all()
    assert not any(x.any() for x in (out, *gradients))


@pytest.mark.clause("A1", "A8")
def test_refuses_what_the_oracle_refuses():
    layout = PackedLayout([0, 4])
    q, k, v, dout = tensors(np.random.default_rng(0), 4, 4, Heads(4, 2, 3, 2))
    with refused("shape", "5 rows"):
        tiled.attention_forward(np.zeros((5, 4, 3)), k, v, layout, CAUSAL)
    with refused("dtype", "int64"):
        tiled.attention_forward(q.astype(np.int64), k, v, layout, CAUSAL)
    with refused("heads", "3", "2"):
        tiled.attention_forward(q[:, :3], k, v, layout, CAUSAL)
    with refused("softmax_scale"):
        tiled.varlen_attention_forward(q, k, v, StepMetadata.of_layout(layout), CAUSAL, np.nan)
    out, lse = tiled.attention_forward(q, k, v, layout, CAUSAL)
    with refused("shape", "lse"):
        tiled.attention_backward(dout, q, k, v, out, lse[:2], layout, CAUSAL)
    with refused("usage", "workers"):
        tiled.attention_forward(q, k, v, layout, CAUSAL, workers=0)


@pytest.mark.clause("N3")
def test_row_offsets_beyond_int32(tmp_path):
    """q and k of more than 2**31 numbers, in a file full of holes; the document lies behind them all."""
    rows, dim, num = 2**20 + 8, 2048, 8
    layout = PackedLayout([0, 0, num], [0, rows - num, rows])
    rng = np.random.default_rng(0)
    q, k = (np.memmap(tmp_path / name, np.float16, "w+", shape=(rows, 1, dim)) for name in "qk")
    v = np.zeros((rows, 1, 1), np.float16)
    for x in (q, k, v):
        x[-num:] = rng.standard_normal((num, 1, x.shape[2]))
    out, lse = tiled.attention_forward(q, k, v, layout, CAUSAL)
    expected = attention.attention_forward(q[-num:], k[-num:], v[-num:], PackedLayout([0, num]), CAUSAL)
    np.testing.assert_allclose(out[-num:], expected[0], atol=1e-5)
    np.testing.assert_allclose(lse[:, -num:], expected[1], atol=1e-5)
    assert not out[:-num].any()


@pytest.mark.clause("A5")
@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (FULL, 512 * 512),
        (CAUSAL, 512 * 513 // 2),
        (AttentionMask(window=(31, -1)), 512 * 32 - 32 * 31 // 2),
        (AttentionMask(False, (31, 0)), 512 * 32 - 32 * 31 // 2),
        (AttentionMask(False, (10, 21)), 512 * 32 - 10 * 11 // 2 - 21 * 22 // 2),
    ],
    ids=str,
)
def test_computes_few_scores_that_the_mask_hides(mask, visible):
    """At most EDGE_KEYS more a query, on each side where the mask has an edge."""
    counted = []

    def counting(*args):
        s = scores(*args)
        counted.append(s.size)
        return s

    scores = tiled._scores
    arrays = tensors(np.random.default_rng(0), 512, 512, Heads(1, 1, 4, 4))
    with tiles(64, 24, 8), mock.patch.object(tiled, "_scores", counting):
        tiled.attention_forward(*arrays[:3], PackedLayout([0, 512]), mask)
    sides = (mask.left >= 0) + (mask.right >= 0)
    assert visible <= sum(counted) <= visible + sides * 512 * 8


@pytest.mark.clause("N3")
@pytest.mark.parametrize("lengths", [[4096], [16] * 256, [1] * 4096], ids=["one", "short", "single tokens"])
def test_temporary_memory_is_linear_in_tokens(lengths):
    """4096 tokens: one score matrix would take 64 MiB."""
    layout = PackedLayout.from_lengths(lengths)
    arrays = [x.astype(np.float32) for x in tensors(np.random.default_rng(0), 4096, 4096, Heads(1, 1, 8, 8))]
    tracemalloc.start()
    try:
        run(tiled, *arrays, layout, CAUSAL, workers=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * 2**20


MEASURE_MEMORY = """
import sys
import numpy as np
from refimpl import tiled
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask

rng = np.random.default_rng(0)
q, k, v, dout = (rng.standard_normal((32768, 8, 64), np.float32) for _ in range(4))
layout, mask = PackedLayout.from_lengths(eval(sys.argv[1])), AttentionMask(window=(int(sys.argv[2]), -1))
out, lse = tiled.attention_forward(q, k, v, layout, mask)
dq, dk, dv = tiled.attention_backward(dout, q, k, v, out, lse, layout, mask)
with open("/proc/self/status") as status:  # ru_maxrss would count what the process was started from
    print(next(line.split()[1] for line in status if line.startswith("VmHWM:")))
"""


def peak_memory(lengths, left):
    """MiB of a fresh process that computes 32768 tokens, 8 heads, D 64, float32, forward and backward."""
    command = [sys.executable, "-c", MEASURE_MEMORY, lengths, str(left)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")


@needs_proc
@pytest.mark.clause("N3")
@pytest.mark.parametrize("lengths", ["[32768]", "[1] * 32768"])
def test_peak_memory_below_a_gibibyte_within_a_window(lengths):
    assert peak_memory(lengths, left=100) < 1024


@needs_proc
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.clause("N3")
def test_peak_memory_below_a_gibibyte_for_one_long_document():
    assert peak_memory("[32768]", left=-1) < 1024
