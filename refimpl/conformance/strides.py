"""Arrays in unusual memory: transposed, with gaps, or broadcast.

Defines `with_strides`. Files hold plain arrays; a case that is about memory says in `inputs["strides"]` how an input
lies there, for frameworks hand such views to kernels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from refimpl.errors import SpecError

Array = NDArray[Any]


def all_with_strides(tensors: Mapping[str, Array], strides: Mapping[str, Sequence[int]]) -> dict[str, Array]:
    """The same arrays, those named in `strides` in memory of those strides."""
    return {name: with_strides(x, strides[name]) if name in strides else x for name, x in tensors.items()}


def with_strides(x: Array, strides: Sequence[int]) -> Array:
    """The values of x in a buffer of NaN where neighbours along axis a lie `strides[a]` elements apart.

    A stride of 0 broadcasts: all elements along that axis are one place in memory.

    Raises:
        SpecError: file, if the strides do not fit x: another number of axes, a negative one, more than 64 times the
            memory of x, or places that would have to hold two values.
    """
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=False))
    if len(strides) != x.ndim or min(strides, default=0) < 0 or not 0 <= reach < 64 * max(1, x.size):
        raise SpecError("file", f"strides {list(strides)} do not fit an array of shape {list(x.shape)}")
    buffer = np.full(reach + 1, np.nan, x.dtype)
    view = as_strided(buffer, x.shape, [stride * x.itemsize for stride in strides])
    view[...] = x
    if not np.array_equal(view, x, equal_nan=True):
        raise SpecError("file", f"strides {list(strides)} put two values of an array into one place")
    return view
