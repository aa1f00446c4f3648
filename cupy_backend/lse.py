"""Log-sum-exp on a device: `merge_partials` with the signature of `refimpl.lse`, by merge.cu."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_backend.device import Array, Device, HostDevice, device_of
from refimpl.errors import SpecError

DTYPES = ("float32", "float16", "bfloat16")
ROWS_OF_A_BLOCK = 8


def merge_partials(outs: Sequence[Any], lses: Sequence[Any], *, device: Device | None = None) -> tuple[Array, Array]:
    """Combine attention over disjoint sets of keys into attention over their union.

    Args:
        outs: arrays [Tq, H, Dv] of one of `DTYPES` each. lses: as many [H, Tq], float32, natural logarithms.
        device: None: the one that they lie on.

    Returns:
        out [Tq, H, Dv] and lse [H, Tq], float32, on the device.

    Raises:
        SpecError: shape, dtype, usage; lse when one is +inf, on the host. A GPU is not waited for: there such a row
            becomes NaN. [A7]
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise SpecError("shape", f"{len(outs)} outs and {len(lses)} lses: expected one lse for each out, one or more")
    place = device or device_of(*outs, *lses)
    parts, weights = [place.as_array(x) for x in outs], [place.as_array(x) for x in lses]
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        if part.dtype.name not in DTYPES or weight.dtype.name != "float32":
            raise SpecError(
                "dtype",
                f"outs[{i}] has dtype {part.dtype} and lses[{i}] {weight.dtype}: expected one of {', '.join(DTYPES)}, "
                f"and float32",
            )
        if part.ndim != 3 or part.shape != parts[0].shape or weight.shape != (part.shape[1], part.shape[0]):
            raise SpecError(
                "shape",
                f"outs[{i}] has shape {list(part.shape)} and lses[{i}] {list(weight.shape)}: expected [Tq, H, Dv], "
                f"the same for all parts, and [H, Tq]",
            )
        if isinstance(place, HostDevice) and np.isposinf(weight).any():
            raise SpecError(
                "lse", f"lses[{i}] holds +inf: if it marks rows without keys, convert it with lse_from(empty=inf)"
            )
    rows, heads, dim = parts[0].shape
    out, lse = place.empty((rows, heads, dim), np.float32), place.empty((heads, rows), np.float32)
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        args = [part, weight, rows, heads, dim, int(i == 0), out, lse]
        blocks = -(-rows * heads // ROWS_OF_A_BLOCK)
        place.launch("merge", f"merge_part_{part.dtype.name}", blocks, 256, args)
    return out, lse
