"""Mutants that pair heads wrongly, or go wrong in the arithmetic of scores and weights.

Defines `MUTANTS`. The functions above it are the wrong pieces; signatures are those of `implementation`.
"""

from collections.abc import Callable

import numpy as np

from refimpl.conformance.cases import Case
from refimpl.conformance.faults.mutant import Array, Bools, Mutant, Pieces, mutant
from refimpl.conformance.implementation import softmax
from refimpl.conformance.yardstick import to_bfloat16


def without_maximum(s: Array, visible: Bools) -> tuple[Array, Array]:
    """exp of the scores themselves."""
    e = np.exp(np.where(visible, s, -np.inf))
    total = e.sum(axis=2)
    sees = np.any(visible, axis=1)
    return np.where(sees[:, None], e / total[:, :, None], 0.0), np.where(sees, np.log(total), -np.inf)


def softmax_in_base_2(s: Array, visible: Bools) -> tuple[Array, Array]:
    """Powers of 2 of scores that were never multiplied by log2(e)."""
    p, lse = softmax(s * np.log(2), visible)
    return p, lse


def bfloat16(x: Array) -> Array:
    """Rounded to bfloat16."""
    return to_bfloat16(x.astype(np.float32)).astype(np.float64)


def weighted_sum_in_bfloat16(weights: Array, x: Array) -> Array:
    """Key by key, every partial sum rounded."""
    total = np.zeros((*weights.shape[:2], x.shape[2]))
    for j in range(x.shape[1]):
        total = bfloat16(total + weights[:, :, j, None] * x[:, None, j])
    return total


def scale_of_dim(dim: Callable[[Case], float]) -> Pieces:
    """1 / sqrt of another number, unless a scale is given."""

    def scale(case: Case) -> float:
        return case.softmax_scale if case.inputs.get("softmax_scale") is not None else float(1 / np.sqrt(dim(case)))

    return {"scale": scale}


def values_beyond_key_dim(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """Zeros in the columns of out and dv beyond the width of keys."""
    if name not in ("out", "dv") or case.operation == "merge":
        return array
    array = array.copy()
    array[:, :, case.tensors["q"].shape[2] :] = 0
    return array


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "interleaved-head-groups",
        "heads",
        "reads K/V head h modulo the number of K/V heads",
        kv_head=lambda head, q_heads, kv_heads: head % kv_heads,
    ),
    mutant(
        "first-kv-head",
        "heads",
        "reads the first K/V head for all query heads",
        kv_head=lambda head, q_heads, kv_heads: 0,
    ),
    mutant(
        "heads-divided-by-kv-heads",
        "heads",
        "reads K/V head h divided by the number of K/V heads in place of the size of a group",
        kv_head=lambda head, q_heads, kv_heads: min(head // kv_heads, kv_heads - 1),
    ),
    mutant(
        "values-cut-to-key-dim",
        "heads",
        "computes no more columns of values than keys have",
        finish=values_beyond_key_dim,
    ),
    mutant("missing-scale", "numerics", "does not scale the scores", scale=lambda case: 1.0),
    mutant("scale-applied-twice", "numerics", "scales the scores twice", scale=lambda case: case.softmax_scale**2),
    mutant(
        "default-scale-always",
        "numerics",
        "ignores a scale that is given",
        scale=lambda case: float(1 / np.sqrt(case.tensors["q"].shape[2])),
    ),
    mutant(
        "scale-of-value-dim",
        "numerics",
        "takes the scale from the width of values",
        **scale_of_dim(lambda case: case.tensors["v"].shape[2]),
    ),
    mutant(
        "scale-of-padded-dim",
        "numerics",
        "takes the scale from the width that a kernel pads keys to",
        **scale_of_dim(lambda case: -(-case.tensors["q"].shape[2] // 8) * 8),
    ),
    mutant("no-maximum-subtracted", "numerics", "takes exp of the scores themselves", softmax=without_maximum),
    mutant("softmax-in-base-2", "numerics", "takes powers of 2 of natural scores", softmax=softmax_in_base_2),
    mutant(
        "bfloat16-accumulation",
        "numerics",
        "rounds every partial sum over keys or queries to bfloat16",
        weighted_sum=weighted_sum_in_bfloat16,
    ),
)
"""In the order of `mutants.MUTANTS`."""
