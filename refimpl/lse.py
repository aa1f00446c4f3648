"""Log-sum-exp: merging partial results, and the conventions of other frameworks.

Defines `merge_partials`, `lse_to` and `lse_from`. This project's convention is the natural logarithm, [H, T], and -inf
for a row that sees no key.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.attention import is_float
from refimpl.errors import SpecError

Array = NDArray[Any]


def merge_partials(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Array, Array]:
    """Combine attention over disjoint sets of keys into attention over their union.

        lse = log sum_i exp(lse_i)            out = sum_i exp(lse_i - lse) out_i

    A part that saw no key of a row (lse -inf) adds nothing to that row, whatever its `out` holds there; where no part
    saw any, out is 0 and lse -inf. The largest lse is subtracted first, so no exponential overflows.

    Args:
        outs: arrays [Tq, H, Dv]. lses: as many arrays [H, Tq], natural logarithms.

    Returns:
        out [Tq, H, Dv] and lse [H, Tq], in float32 or the widest dtype among the inputs, if wider.

    Raises:
        SpecError: shape, also when there is no part; lse when one is +inf (see `lse_from`). [A7]
    """
    check_parts([np.shape(x) for x in outs], [np.shape(x) for x in lses])
    dtypes = [np.asarray(x).dtype for x in (*outs, *lses)]
    dtype = np.result_type(np.float32, *(dtype for dtype in dtypes if dtype.itemsize > 4))
    parts = [np.asarray(x).astype(dtype) for x in outs]
    weights = [np.asarray(x).astype(dtype) for x in lses]
    for i, weight in enumerate(weights):
        if np.isposinf(weight).any():
            raise SpecError(
                "lse", f"lses[{i}] holds +inf: if it marks rows without keys, convert it with lse_from(empty=inf)"
            )
    lse_parts = np.stack(weights)
    largest = lse_parts.max(axis=0)
    empty = np.isneginf(largest)
    with np.errstate(over="ignore"):  # a difference beyond the largest float is -inf, and its exponential 0
        exponentials = np.exp(lse_parts - np.where(empty, 0, largest))
    total = exponentials.sum(axis=0)
    with np.errstate(divide="ignore"):
        lse = np.where(empty, -np.inf, largest + np.log(total)).astype(dtype)
    out = np.zeros_like(parts[0])
    for part, share in zip(parts, exponentials / np.where(empty, 1, total), strict=True):
        share_of_row = share.T[:, :, None]
        out += np.where(share_of_row > 0, part, 0) * share_of_row
    return np.where(np.isnan(lse).T[:, :, None], np.nan, out).astype(dtype), lse


def check_parts(outs: Sequence[tuple[int, ...]], lses: Sequence[tuple[int, ...]]) -> None:
    """Shapes that `merge_partials` takes.

    Raises:
        SpecError: shape.
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise SpecError("shape", f"{len(outs)} outs and {len(lses)} lses: expected one lse for each out, one or more")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if len(out) != 3 or out != outs[0] or lse != (out[1], out[0]):
            raise SpecError(
                "shape",
                f"outs[{i}] has shape {list(out)} and lses[{i}] {list(lse)}: expected [Tq, H, Dv], the same for all "
                f"parts, and [H, Tq]",
            )


def lse_to(lse: Any, *, base: float = np.e, empty: float = -np.inf, heads_last: bool = False) -> Array:
    """Write an lse in another convention.

    Args:
        lse: [H, T], natural, -inf for rows without keys.
        base: of the logarithm; 2 for kernels that work in powers of two.
        empty: the mark of a row without keys; +inf in FlashAttention 2.
        heads_last: [T, H] instead of [H, T].

    [A6]
    """
    lse = _floats(lse)
    converted = np.where(np.isneginf(lse), empty, lse / np.log(base)).astype(lse.dtype)
    return converted.T.copy() if heads_last else converted


def lse_from(lse: Any, *, base: float = np.e, empty: float = -np.inf, heads_last: bool = False) -> Array:
    """Read an lse of another convention: the inverse of `lse_to`. [A6]"""
    lse = _floats(lse)
    is_empty = np.isnan(lse) if np.isnan(empty) else lse == empty
    with np.errstate(invalid="ignore", over="ignore"):
        natural = np.where(is_empty, -np.inf, lse * np.log(base)).astype(lse.dtype)
    return natural.T.copy() if heads_last else natural


def _floats(lse: Any) -> Array:
    floats: Array = np.asarray(lse)
    if not is_float(floats.dtype):
        raise SpecError("dtype", f"lse has dtype {floats.dtype}: expected a float dtype")
    return floats
