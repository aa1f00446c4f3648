"""Merging and conventions of lse on the host device, against the reference and numbers worked by hand."""

import inspect

import ml_dtypes
import numpy as np
import pytest
from support import refused

from cupy_backend import lse as device_lse
from cupy_backend.device import HostDevice
from refimpl import lse as reference

DEVICES = [HostDevice(os_threads=1), HostDevice("random", 3, "random"), HostDevice("reverse", cp_async="lazy")]


@pytest.mark.parametrize("name", ["merge_partials", "lse_to", "lse_from"])
def test_signatures_are_those_of_the_reference_and_a_device(name):
    expected = list(inspect.signature(getattr(reference, name)).parameters.values())
    got = list(inspect.signature(getattr(device_lse, name)).parameters.values())
    assert [(p.name, p.default) for p in got[:-1]] == [(p.name, p.default) for p in expected]
    assert got[-1].name == "device"


def parts_of(dtype, count=3, rows=37, heads=3, dim=45):
    """Parts of all sizes of lse, some rows without keys in one part or in all; what such a row's out holds is NaN."""
    rng = np.random.default_rng(count)
    outs = [rng.standard_normal((rows, heads, dim)).astype(dtype) for _ in range(count)]
    lses = [(rng.standard_normal((heads, rows)) * 10 ** rng.uniform(-1, 3)).astype(np.float32) for _ in range(count)]
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        lse[:, i::5] = -np.inf
        lse[:, -2:] = -np.inf
        out[np.isneginf(lse).T] = np.nan
    return outs, lses


@pytest.mark.clause("A7", "N2")
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_merging_is_the_reference_s(dtype, count, device):
    outs, lses = parts_of(dtype, count)
    expected, expected_lse = reference.merge_partials(
        *[[x.astype(np.float64) for x in parts] for parts in (outs, lses)]
    )
    out, lse = device_lse.merge_partials(outs, lses, device=device)
    assert out.dtype == lse.dtype == np.float32
    empty = np.isneginf(expected_lse)
    assert empty.any()
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    assert not out[empty.T].any()
    np.testing.assert_allclose(lse[~empty], expected_lse[~empty], rtol=1e-6, atol=1e-6)
    # exp of a difference of about 100 has an error of 100 roundings
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)


@pytest.mark.clause("A7")
def test_a_merge_worked_by_hand():
    """One key with value 8, three with mean 4: 5. A part without keys holds NaN."""
    outs = [np.full((1, 1, 1), x, np.float32) for x in (8, 4, np.nan)]
    lses = [np.full((1, 1), x, np.float32) for x in (0, np.log(3), -np.inf)]
    out, lse = device_lse.merge_partials(outs, lses, device=DEVICES[0])
    np.testing.assert_allclose([out.item(), np.exp(lse.item())], [5, 4], rtol=1e-6)


@pytest.mark.clause("A7")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_lse_that_is_no_number_makes_its_row_none(count, value):
    """And no other row: row 4 of head 1, whether or not other parts saw keys there."""
    outs, lses = parts_of(np.float32, count)
    expected = device_lse.merge_partials(outs, lses, device=DEVICES[0])
    lses[-1][1, 4] = value
    out, lse = device_lse.merge_partials(outs, lses, device=DEVICES[0])
    assert np.isnan(lse[1, 4])
    assert np.isnan(out[4, 1]).all()
    out[4, 1], lse[1, 4] = expected[0][4, 1], expected[1][1, 4]
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])


@pytest.mark.clause("A7")
def test_parts_that_do_not_fit_are_refused():
    outs, lses = parts_of(np.float32)
    for these in ([], lses[:2], [lses[0].T, *lses[1:]]):
        with refused("shape"):
            device_lse.merge_partials(outs, these, device=DEVICES[0])
    with refused("dtype"):
        device_lse.merge_partials([x.astype(np.float64) for x in outs], lses, device=DEVICES[0])


@pytest.mark.clause("A6")
@pytest.mark.parametrize("base", [np.e, 2.0])
@pytest.mark.parametrize("empty", [-np.inf, np.inf, np.nan, -1e30])
@pytest.mark.parametrize("heads_last", [False, True])
def test_conventions_are_the_reference_s_and_come_back(base, empty, heads_last):
    lse = np.random.default_rng(0).standard_normal((3, 301)).astype(np.float32) * 100
    lse[1, ::7] = -np.inf
    there = device_lse.lse_to(lse, base=base, empty=empty, heads_last=heads_last, device=DEVICES[0])
    expected = reference.lse_to(lse, base=base, empty=empty, heads_last=heads_last)
    assert there.shape == expected.shape == ((301, 3) if heads_last else (3, 301))
    np.testing.assert_allclose(there, expected, rtol=3e-7)
    back = device_lse.lse_from(there, base=base, empty=empty, heads_last=heads_last, device=DEVICES[1])
    np.testing.assert_allclose(back, lse, rtol=3e-7)
