"""attention_forward.cu, attention_forward_float32.cu and attention_plain.cu, run on the CPU, against the oracle."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import ORDERS, Recorder, real_lengths

from cupy_backend import attention
from cupy_backend.attention import attention_forward, build_for, varlen_attention_forward
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


def layouts():
    yield "no padding", PackedLayout.from_lengths(LENGTHS)
    yield "behind documents", PackedLayout.from_lengths(LENGTHS, padded_lengths=[70, 0, 151, 40, 8])
    yield (
        "everywhere",
        PackedLayout.from_lengths([0, 20, 0, 100, 0], padded_lengths=[3, 20, 140, 101, 9], total_tokens=400),
    )
    yield "multiples of 16", PackedLayout.from_lengths(LENGTHS, multiple_of=16)
    yield "only padding", PackedLayout([0, 0, 0], [0, 30, 50], 64)
    yield "no documents", PackedLayout([0], total_tokens=40)
    yield "one token", PackedLayout([0, 1])


LAYOUTS = dict(layouts())


def tensors(layout, dtype, heads=(2, 1), dims=(32, 32), seed=0, poison=np.nan):
    """q, k and v, their padding poisoned."""
    rng = np.random.default_rng(seed)
    total = layout.total_tokens
    shapes = [(total, heads[0], dims[0]), (total, heads[1], dims[0]), (total, heads[1], dims[1])]
    result = []
    for shape in shapes:
        x = rng.normal(size=shape).astype(dtype)
        x[layout.document_ids < 0] = poison
        result.append(x)
    return result


def bounds(q, k, v, layout, mask, scale):
    """The tolerance of out and lse, from the yardstick, and the oracle's results."""
    dout = np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
    expected = dict(zip(("out", "lse"), oracle.attention_forward(q, k, v, layout, mask, scale), strict=True))
    with np.errstate(all="ignore"):
        plain = plain_attention(q, k, v, dout, layout, mask, scale)
    found = {}
    for name, x in expected.items():
        found[name] = Tolerance.of(q.dtype, largest_error(plain[name], x), largest_finite(x)).bound
    return expected, found


def compare(layout, mask, dtype, device=None, scale=None, **sizes):
    """Run one layout as a whole and hold it to the tolerance; returns out and lse."""
    device = device or HostDevice()
    q, k, v = tensors(layout, dtype, **sizes)
    out, lse = attention_forward(q, k, v, layout, mask, scale, device=device)
    used = scale if scale is not None else 1 / np.sqrt(q.shape[2])
    expected, bound = bounds(q, k, v, layout, mask, used)
    assert out.dtype == dtype
    assert lse.dtype == np.float32
    assert largest_error(out, expected["out"]) <= bound["out"]
    assert largest_error(lse, expected["lse"]) <= bound["lse"]
    empty = np.isneginf(expected["lse"])
    assert (np.isneginf(lse) == empty).all()
    assert not out.astype(np.float32)[empty.T].any()
    return out, lse


@pytest.fixture(params=DTYPES)
def dtype(request):
    return DTYPES[request.param]


@pytest.mark.clause("A3", "A4", "A5", "A6", "L1", "L4", "L5")
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_of_padding(layout, dtype, poison):
    compare(LAYOUTS[layout], AttentionMask(), dtype, poison=poison)


@pytest.mark.clause("K1", "K2", "K3", "K5", "A4")
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_mask(mask, dtype):
    compare(LAYOUTS["behind documents"], mask, dtype)


@pytest.mark.clause("A2")
@pytest.mark.parametrize("heads", [(4, 1), (8, 2), (8, 1), (3, 3)])
def test_heads_that_share_keys(heads, dtype):
    compare(PackedLayout.from_lengths([40, 70]), AttentionMask(), dtype, heads=heads)


@pytest.mark.clause("A1", "A3")
@pytest.mark.parametrize(
    "dims",
    [(32, 32), (40, 40), (64, 64), (72, 72), (96, 96), (128, 128), (256, 256), (192, 128), (32, 64), (160, 40), (8, 8)],
    ids=str,
)
def test_head_dims(dims, dtype):
    device = Recorder()
    compare(LAYOUTS["behind documents"], AttentionMask(), dtype, device, dims=dims, heads=(2, 1))
    ((source, _, statistics),) = device.launches
    assert source == ("attention_forward_float32" if dtype == np.float32 else "attention_forward")
    assert statistics.bank_conflicts == 0
    assert (statistics.matrix_products > 0) == (dtype != np.float32)


@pytest.mark.parametrize("dims", [(5, 3), (36, 32), (264, 16)], ids=str)
def test_head_dims_that_only_the_plain_kernel_takes(dims, dtype):
    device = Recorder()
    compare(PackedLayout.from_lengths([30, 0, 12], multiple_of=4), AttentionMask(), dtype, device, dims=dims)
    assert [source for source, _, _ in device.launches] == ["attention_plain"]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plain_kernel(layout, mask, dtype, monkeypatch):
    monkeypatch.setattr(attention, "build_for", lambda source, arguments: None)
    device = Recorder()
    compare(LAYOUTS[layout], mask, dtype, device, heads=(4, 2), dims=(16, 40))
    assert {source for source, _, _ in device.launches} <= {"attention_plain"}


@pytest.mark.clause("A1")
@pytest.mark.parametrize("scale", [0.0, -0.3, 0.7, 1e-30])
def test_scales(scale, dtype):
    compare(PackedLayout.from_lengths([40, 70], multiple_of=16), AttentionMask(window=(30, 0)), dtype, scale=scale)


@pytest.mark.clause("A3", "A4")
@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_scores_far_from_zero(shift, dtype):
    # Every score is near the shift: a masked score that is a finite number, or a largest that starts at 0, shows.
    layout, mask = PackedLayout.from_lengths([90]), AttentionMask(window=(20, 0))
    q, k, v = tensors(layout, dtype)
    q[:, :, 0], k[:, :, 0] = 16, shift / 16 * np.sqrt(32)
    out, lse = attention_forward(q, k, v, layout, mask)
    expected, bound = bounds(q, k, v, layout, mask, 1 / np.sqrt(32))
    assert largest_error(out, expected["out"]) <= bound["out"]
    assert largest_error(lse, expected["lse"]) <= bound["lse"]


@pytest.mark.clause("K4", "A4", "R5")
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(causal=False, window=(5, 2))], ids=str)
def test_more_queries_than_keys_and_fewer(mask, dtype):
    # Bottom right: of the first document the first 60 queries see nothing.
    step = StepMetadata.from_offsets([0, 90, 120, 130, 130], [0, 30, 150, 150, 160])
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(rows, heads, 64)).astype(dtype) for rows, heads in [(130, 4), (160, 1), (160, 1)])
    out, lse = varlen_attention_forward(q, k, v, step, mask)
    expected_out, expected_lse = oracle.varlen_attention_forward(q, k, v, step, mask)
    assert np.isneginf(lse[:, :60]).all() == mask.causal
    yardstick = 2 * epsilon(dtype)  # no layout says what such a step says, so plain_attention cannot
    assert largest_error(out, expected_out) <= Tolerance.of(dtype, yardstick, largest_finite(expected_out)).bound
    assert largest_error(lse, expected_lse) <= 1e-5


@pytest.mark.clause("R1", "R2", "R3", "R4", "R5", "C5")
@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 5, 8])
def test_steps_of_ranks(policy, cp_size, dtype):
    """Every rank's steps, put together, are the whole buffer's attention."""
    lengths = PackedLayout.from_lengths([40, 0, 90, 11], padded_lengths=[45, 2, 90, 20])
    layout = padded_for(lengths, policy, cp_size)
    mask = MASKS[cp_size % len(MASKS)]
    q, k, v = tensors(layout, dtype, heads=(2, 2))
    expected, bound = bounds(q, k, v, layout, mask, 1 / np.sqrt(32))
    for rank in range(cp_size):
        metadata = rank_metadata(layout, policy, cp_size, rank, mask)
        for step, rows in zip(metadata.steps, metadata.step_rows, strict=True):
            physical = metadata.indices[rows]
            out, lse = varlen_attention_forward(q[physical], k, v, step, mask)
            assert largest_error(out, expected["out"][physical]) <= bound["out"]
            assert largest_error(lse, expected["lse"][:, physical]) <= bound["lse"]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (192, 128)], ids=str)
def test_order_of_threads_changes_no_bit(order, dims, dtype):
    layout = PackedLayout.from_lengths([3, 170], padded_lengths=[7, 170])
    mask = AttentionMask(window=(130, 0))
    usual = compare(layout, mask, dtype, dims=dims, heads=(1, 1))
    other = compare(layout, mask, dtype, HostDevice(**order), dims=dims, heads=(1, 1))
    for a, b in zip(usual, other, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.clause("L5")
def test_a_longer_tail_of_repeated_offsets_changes_no_bit(dtype):
    layout = PackedLayout.from_lengths([30, 70])
    longer = PackedLayout(np.append(layout.cu_seqlens, [100] * 50))
    q, k, v = tensors(layout, dtype)
    for a, b in zip(*(attention_forward(q, k, v, x, AttentionMask()) for x in (layout, longer)), strict=True):
        assert a.tobytes() == b.tobytes()


def test_tiles_that_no_row_sees_are_skipped():
    # 64 keys a tile and a window of 64: two or three tiles a block of 128 queries instead of up to 16.
    layout = PackedLayout.from_lengths([1024])
    q, k, v = tensors(layout, DTYPES["float16"], heads=(1, 1), dims=(64, 64))
    counts = []
    for mask in (AttentionMask(causal=False), AttentionMask(), AttentionMask(window=(64, 0))):
        device = Recorder()
        attention_forward(q, k, v, layout, mask, device=device)
        counts.append(device.launches[0][2].matrix_products)
    assert counts[1] < 0.6 * counts[0]
    assert counts[2] < 0.2 * counts[0]


@pytest.mark.clause("A8")
def test_what_is_refused():
    layout = PackedLayout.from_lengths([8])
    q, k, v = tensors(layout, DTYPES["float32"])
    for wrong, code in [
        ((q.astype(np.float64), k.astype(np.float64), v.astype(np.float64)), "dtype"),
        ((q.astype(np.float16), k, v), "dtype"),
        ((q[:7], k, v), "shape"),
        ((q, k[:, :, :16], v), "shape"),
        ((q[:, [0, 1, 1]], np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)), "heads"),
    ]:
        with pytest.raises(SpecError) as caught:
            attention_forward(*wrong, layout, AttentionMask())
        assert caught.value.code == code
    with pytest.raises(SpecError) as caught:
        attention_forward(q, k, v, layout, AttentionMask(), 1e200)
    assert caught.value.code == "softmax_scale"


def test_the_smallest_build_is_chosen():
    step = StepMetadata.from_offsets([0, 8], [0, 8])
    inputs = tensors(PackedLayout([0, 8]), np.float16)
    arguments = attention.step_arguments(*inputs, step, AttentionMask(), None, HostDevice())
    for dims, expected in [
        ((32, 32), (32, 32)),
        ((40, 8), (64, 64)),
        ((136, 128), (192, 128)),
        ((128, 136), (192, 192)),
        ((8, 256), (256, 256)),
    ]:
        macros = build_for("attention_forward", replace(arguments, dim_qk=dims[0], dim_v=dims[1])).macros
        assert (macros["DIM_QK"], macros["DIM_V"]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
def test_real_documents(dims, mask, dtype):
    layout = PackedLayout.from_lengths(real_lengths(10, longest=500), multiple_of=16)
    compare(layout, mask, dtype, heads=(8, 2), dims=dims)
