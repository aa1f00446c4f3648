"""attention_backward.cu, its float32 and plain companions, and cast.cu, run on the CPU, against the oracle."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import ORDERS, Recorder, real_lengths

from cupy_backend import attention_backward as backward
from cupy_backend.attention_backward import attention_backward, rounded, varlen_attention_backward
from cupy_backend.device import HostDevice
from refimpl import attention as oracle
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import StepMetadata, rank_metadata
from refimpl.partition import Policy, padded_for
from refimpl.tolerance import Tolerance, epsilon, largest_error, largest_finite, plain_attention

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
MASKS = [
    AttentionMask(),
    AttentionMask(causal=False),
    AttentionMask(window=(20, 0)),
    AttentionMask(causal=False, window=(9, 30)),
    AttentionMask(causal=False, window=(-1, 0)),
    AttentionMask(causal=False, window=(0, 70)),
]
LENGTHS = [5, 0, 150, 33, 1]
LAYOUTS = {
    "no padding": PackedLayout.from_lengths(LENGTHS),
    "behind documents": PackedLayout.from_lengths(LENGTHS, padded_lengths=[70, 0, 151, 40, 8]),
    "everywhere": PackedLayout.from_lengths([0, 20, 0, 100, 0], padded_lengths=[3, 20, 140, 101, 9], total_tokens=400),
    "multiples of 16": PackedLayout.from_lengths(LENGTHS, multiple_of=16),
    "only padding": PackedLayout([0, 0, 0], [0, 30, 50], 64),
    "no documents": PackedLayout([0], total_tokens=40),
    "one token": PackedLayout([0, 1]),
}
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """What a backward is given, its padding poisoned, and what it must answer: by name the oracle's, and the bounds."""

    inputs: tuple[Any, ...]  # dout, q, k, v, out, lse
    scale: float
    expected: dict[str, Any]
    bound: dict[str, float]


def case(layout, mask, dtype, heads=(2, 1), dims=(32, 32), scale=None, seed=0, poison=np.nan, change=None):
    rng = np.random.default_rng(seed)
    total = layout.total_tokens
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1])]
    q, k, v, dout = (rng.normal(size=(total, *shape)).astype(dtype) for shape in shapes)
    if change:
        change(q, k)
    scale = dims[0] ** -0.5 if scale is None else scale
    out, lse = oracle.attention_forward(q, k, v, layout, mask, scale)
    gradients = oracle.attention_backward(dout, q, k, v, out, lse, layout, mask, scale)
    expected = dict(zip(GRADIENTS, gradients, strict=True))
    plain = plain_attention(q, k, v, dout, layout, mask, scale)
    bound = {
        name: Tolerance.of(q.dtype, largest_error(plain[name], x), largest_finite(x)).bound
        for name, x in expected.items()
    }
    inputs = (dout, q, k, v, out.astype(dtype), lse.T.astype(np.float32))
    for x in inputs:
        x[layout.document_ids < 0] = poison
    return Case((*inputs[:5], np.ascontiguousarray(inputs[5].T)), scale, expected, bound)


def hold(results, wanted, layout=None):
    """Results within the bounds, padding exactly 0."""
    for name, x in zip(GRADIENTS, results, strict=True):
        assert largest_error(x, wanted.expected[name]) <= wanted.bound[name], name
        if layout is not None:
            assert not np.asarray(x)[layout.document_ids < 0].astype(np.float32).any(), name


def compare(layout, mask, dtype, device=None, **options):
    """Run one layout as a whole and hold it to the tolerance; returns dq, dk and dv, the latter two in float32."""
    wanted = case(layout, mask, dtype, **options)
    step = StepMetadata.of_layout(layout)
    results = varlen_attention_backward(*wanted.inputs, step, mask, wanted.scale, device=device or HostDevice())
    assert [x.dtype for x in results] == [dtype, np.float32, np.float32]
    hold(results, wanted, layout)
    return results


@pytest.fixture(params=DTYPES)
def dtype(request):
    return DTYPES[request.param]


@pytest.mark.clause("B1", "B2", "L1", "L4", "L5")
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_of_padding(layout, dtype, poison):
    compare(LAYOUTS[layout], AttentionMask(), dtype, poison=poison)


@pytest.mark.clause("B1", "B2", "K1", "K2", "K3", "K5")
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_mask(mask, dtype):
    compare(LAYOUTS["behind documents"], mask, dtype)


@pytest.mark.clause("A2", "B3")
@pytest.mark.parametrize("heads", [(4, 1), (8, 2), (8, 1), (3, 3)])
def test_heads_that_share_keys(heads, dtype):
    compare(PackedLayout.from_lengths([40, 70]), AttentionMask(), dtype, heads=heads)


@pytest.mark.clause("B1")
@pytest.mark.parametrize(
    "dims", [(32, 32), (40, 40), (64, 64), (128, 128), (256, 256), (192, 128), (32, 64), (160, 40)], ids=str
)
def test_head_dims(dims, dtype):
    device = Recorder()
    compare(LAYOUTS["everywhere"], AttentionMask(), dtype, device, dims=dims, heads=(2, 1))
    is_float32 = dtype == np.float32
    assert {source for source, _, _ in device.launches} == {f"attention_backward{'_float32' if is_float32 else ''}"}
    for _, kernel, statistics in device.launches:
        assert statistics.bank_conflicts == 0
        assert (statistics.matrix_products > 0) == (not is_float32 and not kernel.startswith("delta"))


@pytest.mark.parametrize("dims", [(5, 3), (36, 32), (264, 16)], ids=str)
def test_head_dims_that_only_the_plain_kernels_take(dims, dtype):
    device = Recorder()
    compare(PackedLayout.from_lengths([30, 0, 12], multiple_of=4), AttentionMask(), dtype, device, dims=dims)
    assert {source for source, _, _ in device.launches} == {"attention_backward_plain"}


@pytest.mark.clause("B1", "B2", "B3")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plain_kernels(layout, dtype, monkeypatch):
    monkeypatch.setattr(backward, "build_for", lambda source, arguments: None)
    for mask in MASKS:
        compare(LAYOUTS[layout], mask, dtype, heads=(4, 2), dims=(16, 40))


@pytest.mark.clause("A1", "B1")
@pytest.mark.parametrize("scale", [0.0, -0.3, 0.7])
def test_scales(scale, dtype):
    compare(PackedLayout.from_lengths([40, 70], multiple_of=16), AttentionMask(window=(30, 0)), dtype, scale=scale)


@pytest.mark.clause("B1")
@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_scores_far_from_zero(shift, dtype):
    # p of a hidden pair overflows to infinity: it must be dropped, not multiplied by 0.
    layout, mask = PackedLayout.from_lengths([90]), AttentionMask(window=(20, 0))

    def change(q, k):
        q[:, :, 0], k[:, :, 0] = 16, shift / 16 * np.sqrt(32)
        k[80:, :, 0] = 200

    wanted = case(layout, mask, dtype, change=change)
    results = varlen_attention_backward(*wanted.inputs, StepMetadata.of_layout(layout), mask)
    for name, x in zip(GRADIENTS, results, strict=True):
        # An lse of 500 in float32 is off by 2**-16, and so is p: dp and delta no longer cancel as in the yardstick.
        slack = 0.05 * max(1.0, largest_finite(wanted.expected[name]))
        assert largest_error(x, wanted.expected[name]) <= wanted.bound[name] + slack, name


@pytest.mark.clause("B2", "K4", "R5")
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(causal=False, window=(5, 2))], ids=str)
def test_more_queries_than_keys_and_fewer(mask, dtype):
    # Bottom right: of the first document the first 60 queries see nothing under a causal mask.
    step = StepMetadata.from_offsets([0, 90, 120, 130, 130], [0, 30, 150, 150, 160])
    rng = np.random.default_rng(3)
    q, k, v, dout = (rng.normal(size=(rows, heads, 64)) for rows, heads in [(130, 4), (160, 1), (160, 1), (130, 4)])
    q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
    out, lse = oracle.varlen_attention_forward(q, k, v, step, mask)
    expected = oracle.varlen_attention_backward(dout, q, k, v, out, lse, step, mask)
    given = (dout, q, k, v, out.astype(dtype), lse.astype(np.float32))
    results = varlen_attention_backward(*given, step, mask)
    for name, x, wanted in zip(GRADIENTS, results, expected, strict=True):
        yardstick = 2 * epsilon(dtype)  # no layout says what such a step says, so plain_attention cannot
        assert largest_error(x, wanted) <= Tolerance.of(dtype, yardstick, largest_finite(wanted)).bound, name
    if mask.causal:
        assert np.isneginf(lse[:, :60]).all()
        assert not results[0][:60].astype(np.float32).any()
    assert not any(x[150:].any() for x in results[1:])  # keys of a document without queries


@pytest.mark.clause("B1", "B3", "R1", "R2", "R3", "R4", "R5", "C5", "N1")
@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 5, 8])
def test_steps_of_ranks(policy, cp_size, dtype):
    """The steps of all ranks, dq put together and dk and dv added up, are the whole buffer's gradients.

    Rows of K and V that a rank does not need hold NaN: under an exchange by need nobody brings them.
    """
    lengths = PackedLayout.from_lengths([40, 0, 90, 11], padded_lengths=[45, 2, 90, 20])
    layout = padded_for(lengths, policy, cp_size)
    mask = MASKS[cp_size % len(MASKS)]
    wanted = case(layout, mask, dtype, heads=(2, 2))
    dout, q, k, v, out, lse = wanted.inputs
    dq = np.zeros(q.shape, dtype)
    dk, dv = np.zeros(k.shape, np.float32), np.zeros(v.shape, np.float32)
    for rank in range(cp_size):
        metadata = rank_metadata(layout, policy, cp_size, rank, mask)
        needed = np.zeros(len(k), bool)
        for first, last in metadata.kv_ranges:
            needed[first:last] = True
        k_rank, v_rank = (np.where(needed[:, None, None], x, np.array(np.nan, dtype)) for x in (k, v))
        for step, rows in zip(metadata.steps, metadata.step_rows, strict=True):
            own = metadata.indices[rows]
            given = (dout[own], q[own], k_rank, v_rank, out[own], np.ascontiguousarray(lse[:, own]))
            dq[own], dk_step, dv_step = varlen_attention_backward(*given, step, mask)
            dk += dk_step
            dv += dv_step
    hold((dq, dk, dv), wanted, layout)


@pytest.mark.clause("B1")
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (192, 128)], ids=str)
def test_order_of_threads_changes_no_bit(order, dims, dtype):
    layout = PackedLayout.from_lengths([3, 170], padded_lengths=[7, 170])
    mask = AttentionMask(window=(130, 0))
    usual = compare(layout, mask, dtype, dims=dims, heads=(2, 1))
    other = compare(layout, mask, dtype, HostDevice(**order), dims=dims, heads=(2, 1))
    for a, b in zip(usual, other, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.clause("L5")
def test_a_longer_tail_of_repeated_offsets_changes_no_bit(dtype):
    layout = PackedLayout.from_lengths([30, 70])
    longer = PackedLayout(np.append(layout.cu_seqlens, [100] * 50))
    given = case(layout, AttentionMask(), dtype).inputs
    results = [varlen_attention_backward(*given, StepMetadata.of_layout(x), AttentionMask()) for x in (layout, longer)]
    for a, b in zip(*results, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.clause("B2")
def test_infinities_of_one_document_reach_neither_padding_nor_another(dtype):
    # As when a scaled loss overflows. In the padding's own tile 0 times infinity is NaN.
    layout = PackedLayout.from_lengths([30, 50, 20], padded_lengths=[30, 60, 25])
    given = case(layout, AttentionMask(causal=False), dtype).inputs
    usual = varlen_attention_backward(*given, StepMetadata.of_layout(layout), AttentionMask(causal=False))
    dout, q, k, v, out, lse = (x.copy() for x in given)
    dout[40], k[50] = np.inf, np.nan
    given = (dout, q, k, v, out, lse)
    results = varlen_attention_backward(*given, StepMetadata.of_layout(layout), AttentionMask(causal=False))
    for name, a, b in zip(GRADIENTS, results, usual, strict=True):
        others = layout.document_ids != 1
        assert (a[others] == b[others]).all(), name
        assert not np.isfinite(a[~others].astype(np.float32)).all(), name


@pytest.mark.parametrize("kernel", ["dq", "dk_dv"])
def test_tiles_that_no_row_meets_are_skipped(kernel):
    layout = PackedLayout.from_lengths([1024])
    counts = []
    for mask in (AttentionMask(causal=False), AttentionMask(), AttentionMask(window=(64, 0))):
        device = Recorder()
        given = [np.zeros((1024, 1, 64), np.float16)] * 5
        lse = np.zeros((1, 1024), np.float32)
        varlen_attention_backward(*given, lse, StepMetadata.of_layout(layout), mask, device=device)
        counts += [s.matrix_products for _, name, s in device.launches if name == f"{kernel}_float16"]
    assert counts[1] < 0.6 * counts[0]
    assert counts[2] < 0.2 * counts[0]


@pytest.mark.clause("N1")
@pytest.mark.parametrize("count", [0, 1, 3, 4, 1023, 1024, 4099])
def test_sums_are_rounded_once(count, dtype):
    device = HostDevice()
    x = device.empty((count + 8,), np.float32)
    x[...] = 1
    x = x[:count]
    x[...] = np.random.default_rng(count).normal(size=count) * 3
    if count > 3:
        x[:4] = 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, np.inf  # halfway between two of bfloat16, of float16
    assert rounded(x, dtype, device).tobytes() == x.astype(dtype).tobytes()
    if dtype != np.float32 and count > 0:
        longer = device.zeros((count + 8,), dtype)
        device.launch("cast", f"cast_{dtype.name}", -(-count // 1024), 256, [x, count, longer])
        assert not longer[count:].astype(np.float32).any()
    total, more = device.empty((count,), np.float32), x * 7
    total[...] = x
    device.launch("cast", "add_floats", -(-count // 1024), 256, [device.as_array(more), count, total])
    assert (total == x + more).all()


def test_a_whole_layout_comes_back_in_its_own_dtype(dtype):
    layout = LAYOUTS["everywhere"]
    wanted = case(layout, AttentionMask(), dtype)
    results = attention_backward(*wanted.inputs, layout, AttentionMask())
    assert [x.dtype for x in results] == [dtype] * 3
    hold(results, wanted, layout)


@pytest.mark.clause("A8", "B4")
def test_what_is_refused():
    layout, mask = PackedLayout.from_lengths([8]), AttentionMask()
    dout, q, k, v, out, lse = case(layout, mask, DTYPES["float32"]).inputs
    for wrong, code in [
        ((dout.astype(np.float16), q, k, v, out, lse), "dtype"),
        ((dout[:7], q, k, v, out, lse), "shape"),
        ((dout, q, k, v, out, lse.T), "shape"),
        ((dout, q, k, v, out[:, :1], lse), "shape"),
        ((dout, q[:7], k, v, out, lse), "shape"),
    ]:
        with pytest.raises(SpecError) as caught:
            attention_backward(*wrong, layout, mask)
        assert caught.value.code == code


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
def test_real_documents(dims, mask, dtype):
    layout = PackedLayout.from_lengths(real_lengths(10, longest=500), multiple_of=16)
    compare(layout, mask, dtype, heads=(8, 2), dims=dims)
