"""Log-sum-exp on a device: `refimpl.lse` by the kernels of lse.cu.

Defines `merge_partials`, `lse_to` and `lse_from`, with the signatures of refimpl, in float32. Nothing here waits for a
device, so nobody looks for an lse of +inf, which the reference refuses: it gives NaN.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_backend.attention import on_device
from cupy_backend.device import Array, Device, device_of
from refimpl.errors import SpecError
from refimpl.lse import check_parts

WARPS = 8
THREADS = 256


def merge_partials(outs: Sequence[Any], lses: Sequence[Any], *, device: Device | None = None) -> tuple[Array, Array]:
    """Combine attention over disjoint sets of keys into attention over their union.

    Args:
        outs: arrays [Tq, H, Dv], all float32, float16 or bfloat16. lses: as many arrays [H, Tq], natural logarithms.
        device: None: the one that the parts lie on.

    Returns:
        out [Tq, H, Dv] and lse [H, Tq], float32.

    Raises:
        SpecError: shape, also when there is no part; dtype; usage. [A7]
    """
    check_parts([tuple(np.shape(x)) for x in outs], [tuple(np.shape(x)) for x in lses])
    place, parts = on_device(device, *outs)
    weights = [place.as_array(lse) for lse in lses]
    rows, heads, dim = parts[0].shape
    stacked = _stacked(parts, parts[0].dtype, place), _stacked(weights, np.float32, place)
    out, lse = place.empty((rows, heads, dim), np.float32), place.empty((heads, rows), np.float32)
    args = [*stacked, len(parts), rows, heads, dim, out, lse]
    place.launch("lse", f"merge_{parts[0].dtype.name}", -(-rows * heads // WARPS), THREADS, args)
    return out, lse


def lse_to(
    lse: Any,
    *,
    base: float = math.e,
    empty: float = -math.inf,
    heads_last: bool = False,
    device: Device | None = None,
) -> Array:
    """Write an lse [H, T] in another convention, as `refimpl.lse.lse_to`; float32. [A6]"""
    return _convert(lse, 1 / math.log(base), (-math.inf, empty), heads_last, device)


def lse_from(
    lse: Any,
    *,
    base: float = math.e,
    empty: float = -math.inf,
    heads_last: bool = False,
    device: Device | None = None,
) -> Array:
    """Read an lse of another convention: the inverse of `lse_to`. [A6]"""
    return _convert(lse, math.log(base), (empty, -math.inf), heads_last, device)


def _convert(lse: Any, factor: float, empty: tuple[float, float], transposes: bool, device: Device | None) -> Array:
    place = device or device_of(lse)
    x = place.as_array(lse)
    if x.ndim != 2:
        raise SpecError("shape", f"lse has shape {list(x.shape)}: expected two axes, heads and rows")
    if x.dtype.name not in ("float32", "float64"):
        raise SpecError("dtype", f"lse has dtype {x.dtype.name}: expected float32")
    x = place.as_array(x.astype(np.float32, copy=False))
    result = place.empty(x.shape[::-1] if transposes else x.shape, np.float32)
    args = [x, x.size, result.shape[1], int(transposes), factor, *empty, result]
    place.launch("lse", "lse_convention", -(-x.size // THREADS), THREADS, args)
    return result


def _stacked(parts: Sequence[Array], dtype: Any, device: Device) -> Array:
    stacked = device.empty((len(parts), *parts[0].shape), dtype)
    for i, part in enumerate(parts):
        stacked[i] = part
    return stacked
