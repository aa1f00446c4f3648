"""Assertions that many tests share."""

from contextlib import contextmanager

import numpy as np
import pytest

from refimpl.errors import SpecError
from refimpl.metadata import StepMetadata
from refimpl.tolerance import OUTPUTS


@contextmanager
def refused(code, *fragments):
    """The block raises a SpecError with this code; its message is one line and holds every fragment."""
    with pytest.raises(SpecError) as caught:
        yield
    message = str(caught.value)
    assert caught.value.code == code, f"{caught.value.code}: {message}"
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def run(module, q, k, v, dout, where, mask, scale=None, **options):
    """out, lse, dq, dk, dv of a module, forward and backward, of a PackedLayout or a StepMetadata."""
    prefix = "varlen_" if isinstance(where, StepMetadata) else ""
    forward, backward = (getattr(module, f"{prefix}attention_{way}") for way in ("forward", "backward"))
    out, lse = forward(q, k, v, where, mask, scale, **options)
    return out, lse, *backward(dout, q, k, v, out, lse, where, mask, scale, **options)


def assert_close(actual, expected, bound=1e-12):
    """Within `bound` of the largest expected value, or of 1; -inf, and the zeros where lse is -inf, are exact."""
    for name, a, b in zip(OUTPUTS, actual, expected, strict=True):
        assert a.shape == b.shape, name
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b), name)
        finite = np.isfinite(b)
        largest = np.abs(b[finite]).max(initial=1.0)
        np.testing.assert_allclose(a[finite], b[finite], rtol=0, atol=bound * largest, err_msg=name)
    empty = np.isneginf(expected[1]).T
    assert not actual[0][empty].any()
    assert not actual[2][empty].any()
