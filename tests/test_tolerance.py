"""The yardstick and the bound that results are held to."""

import numpy as np
import pytest

from refimpl.attention import attention_backward, attention_forward
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.tolerance import (
    OUTPUTS,
    Tolerance,
    as_dtype,
    epsilon,
    largest_error,
    largest_finite,
    plain_attention,
)

DTYPES = ["float16", "bfloat16", "float32"]


def _oracle_and_plain(dtype_name, mask):
    dtype = as_dtype(dtype_name)
    layout = PackedLayout([0, 9, 9, 40], [0, 12, 12, 44], total_tokens=48)
    rng = np.random.default_rng(3)
    shapes = [(4, 16), (2, 16), (2, 8), (4, 8)]
    q, k, v, dout = (rng.standard_normal((48, *shape)).astype(dtype) for shape in shapes)
    for x in (q, k, v, dout):
        x[layout.document_ids < 0] = np.nan
    out, lse = attention_forward(q, k, v, layout, mask)
    gradients = attention_backward(dout, q, k, v, out, lse, layout, mask)
    oracle = dict(zip(OUTPUTS, (out, lse, *gradients), strict=True))
    return oracle, plain_attention(q, k, v, dout, layout, mask, 0.25)


@pytest.mark.clause("N2")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(False, (3, 2)), AttentionMask(False)])
def test_plain_attention_errs_by_a_few_roundings(dtype, mask):
    """More than nothing, and not much: a yardstick that is off by orders would pass or fail everything."""
    oracle, plain = _oracle_and_plain(dtype, mask)
    unit = epsilon(as_dtype(dtype))
    for name in OUTPUTS:
        error = largest_error(plain[name], oracle[name])
        largest = max(1.0, largest_finite(oracle[name]))
        assert unit / 64 * largest < error < 8 * unit * largest, name


@pytest.mark.clause("N2")
def test_plain_attention_leaves_padding_zero_and_marks_rows_without_keys():
    _, plain = _oracle_and_plain("float32", AttentionMask())
    padding = PackedLayout([0, 9, 9, 40], [0, 12, 12, 44], total_tokens=48).document_ids < 0
    assert (plain["lse"][:, padding] == -np.inf).all()
    for name in ("out", "dq", "dk", "dv"):
        assert (plain[name][padding] == 0).all()


@pytest.mark.clause("N2")
def test_bound_is_twice_the_yardstick_and_a_stated_term():
    single, half = 2.0**-23, 2.0**-10
    assert Tolerance.of(np.dtype(np.float32), 1e-3, 0.5).bound == pytest.approx(2e-3 + 8.5 * single)
    assert Tolerance.of(np.dtype(np.float16), 0.0, 6.0).bound == pytest.approx(6 * (half / 2 + 8 * single))
    assert Tolerance.of(np.dtype(np.float64), 123.0, 0.5).bound == 1e-12
    assert Tolerance.of(np.dtype(np.float64), 0.0, 30.0).bound == pytest.approx(3e-11)


@pytest.mark.clause("N2")
def test_largest_error_counts_nan_shape_and_infinities_as_infinite():
    expected = np.array([0.0, -np.inf, 1.0])
    assert largest_error(np.array([0.5, -np.inf, 1.0]), expected) == 0.5
    assert largest_error(np.array([0.0, -np.inf, np.nan]), expected) == np.inf
    assert largest_error(np.array([0.0, 3.0, 1.0]), expected) == np.inf
    assert largest_error(np.array([0.0, np.inf, 1.0]), expected) == np.inf
    assert largest_error(np.array([-np.inf, -np.inf, 1.0]), expected) == np.inf
    assert largest_error(np.zeros(2), expected) == np.inf
    assert largest_error(np.zeros(0), np.zeros(0)) == 0.0


def test_largest_finite_ignores_infinities():
    assert largest_finite(np.array([-3.0, np.inf, 2.0, np.nan])) == 3.0
    assert largest_finite(np.array([-np.inf])) == 0.0


def test_dtypes_by_name():
    assert epsilon(as_dtype("bfloat16")) == 2.0**-7
    assert epsilon(as_dtype("float16")) == 2.0**-10
    with pytest.raises(SpecError, match="int8") as caught:
        as_dtype("int8")
    assert caught.value.code == "dtype"


def test_bfloat16_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(SpecError, match=r"thdcp\[bf16\]") as caught:
        as_dtype("bfloat16")
    assert caught.value.code == "missing_package"
