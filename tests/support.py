"""Assertions that many tests share."""

from contextlib import contextmanager

import pytest

from refimpl.errors import SpecError


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
