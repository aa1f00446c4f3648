"""How far a result may lie from the oracle.

Defines `plain_attention`, the yardstick, and `Tolerance`. The rule is that of FlashAttention's tests: an implementation
in a low precision is right if its error against float64 is at most twice that of the same formula computed plainly in
that precision, every intermediate rounded. An absolute term covers what the yardstick happens to get exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.attention import layout_blocks
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask

Array = NDArray[Any]
OUTPUTS = ("out", "lse", "dq", "dk", "dv")

FACTOR = 2.0
"""How much worse than the yardstick a result may be."""

FLOAT64_BOUND = 1e-12
"""Bound in float64, relative to the largest expected value or 1: there the yardstick is the oracle itself."""


def as_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name, bfloat16 through ml_dtypes.

    Raises:
        SpecError: dtype for a name that attention does not take, missing_package for bfloat16 without ml_dtypes.
    """
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise SpecError("missing_package", "bfloat16 needs ml_dtypes: pip install 'thdcp[bf16]'") from None
        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    if name not in ("float16", "float32", "float64"):
        raise SpecError("dtype", f"unknown dtype {name!r}: expected float16, bfloat16, float32 or float64")
    return np.dtype(name)


def epsilon(dtype: np.dtype[Any]) -> float:
    """The distance from 1 to the next number: 2**-7 for bfloat16."""
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


@dataclass(frozen=True)
class Tolerance:
    """The largest error an output may have anywhere: `factor * yardstick + absolute`. [N2]"""

    yardstick: float
    absolute: float

    @classmethod
    def of(cls, dtype: np.dtype[Any], yardstick: float, largest: float) -> "Tolerance":
        """From the yardstick's error and the largest expected value of an output.

        The absolute term, relative to that value (or to 1, if larger), is one rounding of the result, 2**-8 in
        bfloat16, and 8 * 2**-23 for scores of the order of 10 that accumulate in float32, whatever the dtype.
        """
        if dtype == np.float64:
            return cls(0.0, FLOAT64_BOUND * max(1.0, largest))
        relative = epsilon(dtype) / 2 + 8 * epsilon(np.dtype(np.float32))
        return cls(yardstick, relative * max(1.0, largest))

    @property
    def bound(self) -> float:
        """The largest error that passes."""
        return FACTOR * self.yardstick + self.absolute


def plain_attention(
    q: Array, k: Array, v: Array, dout: Array, layout: PackedLayout, mask: AttentionMask, scale: float
) -> dict[str, Array]:
    """The formulas of `attention`, every intermediate rounded to q's dtype; products accumulate in float32.

    Args:
        q, k, v, dout: whole tensors of one dtype, [T, heads, head_dim].

    Returns:
        out, lse, dq, dk, dv by name, float32; rows without a real token or a visible key hold 0, their lse -inf.

    [N2]
    """
    dtype = q.dtype

    def rounded(x: Array) -> Array:
        return x.astype(dtype).astype(np.float32)

    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    result: dict[str, Array] = {
        "out": np.zeros((*q.shape[:2], v.shape[2]), np.float32),
        "lse": np.full((heads, len(q)), -np.inf, np.float32),
        "dq": np.zeros(q.shape, np.float32),
        "dk": np.zeros(k.shape, np.float32),
        "dv": np.zeros(v.shape, np.float32),
    }
    for rows, visible in _seeing_rows(layout, mask):
        for h in range(heads):
            g = h // group
            q_h, dout_h = (x[rows.queries, h].astype(np.float32) for x in (q, dout))
            k_g, v_g = (x[rows.keys, g].astype(np.float32) for x in (k, v))
            s = np.where(visible, rounded(rounded(q_h @ k_g.T) * np.float32(scale)), -np.inf)
            largest = s.max(axis=1, keepdims=True)
            e = rounded(np.exp(s - largest))
            total = rounded(e.sum(axis=1, keepdims=True))
            p = rounded(e / total)
            out = rounded(p @ v_g)
            ds = rounded(p * rounded(rounded(dout_h @ v_g.T) - rounded((dout_h * out).sum(axis=1, keepdims=True))))
            result["out"][rows.queries, h] = out
            result["lse"][h, rows.queries] = rounded(largest + rounded(np.log(total)))[:, 0]
            result["dq"][rows.queries, h] = rounded(np.float32(scale) * (ds @ k_g))
            result["dk"][rows.keys, g] += rounded(np.float32(scale) * (ds.T @ q_h))
            result["dv"][rows.keys, g] += rounded(p.T @ dout_h)
    return {name: rounded(x) for name, x in result.items()}


@dataclass(frozen=True)
class _Rows:
    queries: Array
    keys: slice


def _seeing_rows(layout: PackedLayout, mask: AttentionMask) -> Iterator[tuple[_Rows, NDArray[np.bool_]]]:
    """The oracle's blocks without the queries that see nothing."""
    for block in layout_blocks(layout, mask):
        sees = block.visible.any(axis=1)
        queries = np.arange(block.queries.start, block.queries.stop)[sees]
        yield _Rows(queries, block.keys), block.visible[sees]


def largest_error(got: Array, expected: Array) -> float:
    """The largest |got - expected|; infinite where only one is finite or got is NaN. Equal infinities agree. [N2]"""
    got = np.asarray(got).astype(np.float64)
    if got.shape != expected.shape:
        return float("inf")
    same = got == expected
    with np.errstate(invalid="ignore"):
        errors = np.where(same, 0.0, np.abs(got - expected))
    return float(np.where(np.isnan(errors), np.inf, errors).max(initial=0.0))


def largest_finite(x: Array) -> float:
    """The largest finite magnitude in x, 0 if there is none."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
