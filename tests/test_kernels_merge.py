"""merge.cu, run on the CPU, against the reference."""

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import ORDERS
from support import refused

from cupy_backend.attention import varlen_attention_forward
from cupy_backend.device import HostDevice
from cupy_backend.lse import merge_partials
from refimpl import attention, lse
from refimpl.mask import AttentionMask
from refimpl.metadata import StepMetadata

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
RNG = np.random.default_rng(8)


def parts(count, rows=37, heads=3, dim=40, dtype=np.float32):
    """Parts of which some rows saw nothing, in one of them or in all; there `out` holds NaN."""
    outs = [RNG.normal(size=(rows, heads, dim)).astype(dtype) for _ in range(count)]
    lses = [(RNG.normal(size=(heads, rows)) * 30).astype(np.float32) for _ in range(count)]
    for i, (out, weight) in enumerate(zip(outs, lses, strict=True)):
        empty = RNG.random((heads, rows)) < 0.3
        empty[:, [0, i + 1]] = True
        weight[empty] = -np.inf
        out[empty.T] = np.nan
    return outs, lses


@pytest.mark.clause("A7", "A6")
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_merge_as_in_the_reference(count, dtype, order):
    outs, lses = parts(count, dtype=dtype)
    out, total = merge_partials(outs, lses, device=HostDevice(**order))
    expected_out, expected_lse = lse.merge_partials([x.astype(np.float64) for x in outs], lses)
    assert out.dtype == np.float32
    assert total.dtype == np.float32
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=2e-6 * count)
    np.testing.assert_allclose(total, expected_lse, rtol=3e-7 * count, atol=1e-6)
    assert np.isneginf(total[:, 0]).all()
    assert not out[0].any()


@pytest.mark.clause("A7")
def test_large_lses_do_not_overflow():
    out, total = merge_partials([np.ones((1, 1, 2), np.float32)] * 2, [np.full((1, 1), 1e30, np.float32)] * 2)
    assert out.tolist() == [[[1, 1]]]
    assert total.tolist() == [[np.float32(1e30)]]


@pytest.mark.clause("A7")
def test_halves_of_the_keys_merge_to_the_whole():
    mask = AttentionMask(causal=False)
    q, k, v = (RNG.normal(size=(20, 2, 32)).astype(np.float32) for _ in range(3))
    halves = [
        varlen_attention_forward(q, k[rows], v[rows], StepMetadata.from_offsets([0, 20], [0, count]), mask)
        for rows, count in [(slice(0, 7), 7), (slice(7, 20), 13)]
    ]
    out, total = merge_partials(*zip(*halves, strict=True))
    whole = StepMetadata.from_offsets([0, 20], [0, 20])
    expected_out, expected_lse = attention.varlen_attention_forward(q, k, v, whole, mask)
    np.testing.assert_allclose(out, expected_out, atol=2e-6)
    np.testing.assert_allclose(total, expected_lse, atol=2e-6)


@pytest.mark.clause("A7")
def test_what_is_refused():
    outs, lses = parts(2)
    with refused("shape", "1 outs and 2 lses"):
        merge_partials(outs[:1], lses)
    with refused("shape", "0 outs"):
        merge_partials([], [])
    with refused("shape", "outs[1]"):
        merge_partials([outs[0], outs[1][:5]], lses)
    with refused("dtype", "float64"):
        merge_partials([x.astype(np.float64) for x in outs], lses)
    lses[1][2, 3] = np.inf
    with refused("lse", "lses[1]", "lse_from"):
        merge_partials(outs, lses)


def test_an_lse_that_cannot_be_refused_is_no_answer():
    class Elsewhere:
        """The host, taken for a device that is not waited for."""

        def __getattr__(self, name):
            return getattr(HostDevice(), name)

    outs, lses = parts(2)
    lses[0][0, 5], lses[1][1, 6] = np.inf, np.nan
    out, total = merge_partials(outs, lses, device=Elsewhere())
    for row, head in [(5, 0), (6, 1)]:
        assert np.isnan(out[row, head]).all()
        assert np.isnan(total[head, row])
    assert np.isnan(total).sum() == 2
