"""How far a result may lie from the right one, for each dtype that an implementation may compute in.

Defines `bounds`. The rule is that of `refimpl.tolerance`: twice the error of the same formulas computed plainly in that
dtype, every intermediate rounded to it, plus an absolute term. Two things differ, so that a bound is the same number on
every machine: products are summed in the order of their indices instead of by a BLAS, and exponentials and logarithms
are taken in float64 before they are rounded. And there are two plain implementations, of which the worse one counts:
the second computes as kernels do, with powers of 2, and in the backward from the lse. Where scores are large, that is
most of their error.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.cases import OF_KEYS, Case, base_name
from refimpl.conformance.witness import held_by, keys_of, scale_of
from refimpl.tolerance import Tolerance, largest_error, largest_finite

Array = NDArray[Any]
Round = Callable[[Array], Array]

DTYPES = ("float64", "float32", "float16", "bfloat16")


def bounds(case: Case, expected: Mapping[str, Array]) -> dict[str, dict[str, float]]:
    """The largest error of every float output, by dtype and base name; {} if the answer holds no floats. [N2] [V6]"""
    if case.operation == "unpartition":
        return {dtype: {"x": 0.0} for dtype in DTYPES}
    floats = {name: x for name, x in expected.items() if x.dtype.kind == "f"}
    largest: dict[str, float] = {}
    for name, x in floats.items():
        largest[base_name(name)] = max(largest.get(base_name(name), 0.0), largest_finite(x))
    if not floats:
        return {}
    found = {"float64": {name: Tolerance.of(np.dtype(np.float64), 0.0, m).bound for name, m in largest.items()}}
    for dtype, rounded in ROUNDING.items():
        errors = dict.fromkeys(largest, 0.0)
        for plain in _plain_answers(case, rounded):
            for name, x in floats.items():
                errors[base_name(name)] = max(errors[base_name(name)], largest_error(plain[name], x))
        found[dtype] = {name: Tolerance.of(named_dtype(dtype), errors[name], m).bound for name, m in largest.items()}
    return found


def to_bfloat16(x: Array) -> Array:
    """Float32 numbers rounded to those of bfloat16, half to even; float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded: Array = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), rounded)


def to_float16(x: Array) -> Array:
    """Float32 numbers rounded to those of float16; float32."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)


def to_float32(x: Array) -> Array:
    """Numbers rounded to float32."""
    return np.asarray(x, np.float32)


ROUNDING: dict[str, Round] = {"float32": to_float32, "float16": to_float16, "bfloat16": to_bfloat16}


class _BFloat16:
    """What `Tolerance` asks of a dtype, for one that NumPy does not know."""

    name = "bfloat16"


def named_dtype(name: str) -> Any:
    """What `Tolerance` needs to know of a dtype, without the package that brings bfloat16."""
    return _BFloat16() if name == "bfloat16" else np.dtype(name)


def product(a: Array, b: Array, descending: bool = False) -> Array:
    """The matrix product a @ b in float32, summed in the ascending or descending order of the inner index."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for c in range(a.shape[1])[:: -1 if descending else 1]:
        total += a[:, c, None] * b[None, c, :]
    return total


def _in_float64(function: Callable[[Array], Array], x: Array) -> Array:
    """A function of float32 numbers, rounded to float32: the same on every machine, which np.exp of float32 is not."""
    return function(x.astype(np.float64)).astype(np.float32)


def _plain_answers(case: Case, rounded: Round) -> Iterator[dict[str, Array]]:
    """What plain implementations answer, by the names of the answer."""
    if case.operation == "merge":
        yield _plain_merge(case, rounded)
        return
    for second in (False, True):
        whole = _plain(case, rounded, second)
        if "cp_size" not in case.inputs:
            yield whole
        else:
            yield {
                f"{name}.{r}": x[:, rows] if name == "lse" else x[rows]
                for r, rows in enumerate(held_by(case))
                for name, x in whole.items()
            }


def _plain(case: Case, rounded: Round, second: bool) -> dict[str, Array]:
    """The formulas of attention, forward and (if there is a dout) backward, on the whole buffer or one step.

    Args:
        second: as kernels do it. Weights are powers of 2, of scores times log2(e) in float32; the backward takes them
            from an lse that is stored in float32 and one unit in the last place off; sums run in descending order.
    """

    def times(a: Array, b: Array) -> Array:
        return product(a, b, descending=second)

    sizes = {name: len(case.tensors["k" if name in OF_KEYS else "q"]) for name in ("out", "lse", "dq", "dk", "dv")}
    visible = np.array([[j in seen for j in range(sizes["dk"])] for seen in keys_of(case)])
    rows, seen = np.flatnonzero(visible.any(axis=1)), np.flatnonzero(visible.any(axis=0))
    visible = visible[np.ix_(rows, seen)]  # results of all others are 0 and -inf
    q, k, v = (np.asarray(case.tensors[x], np.float32)[rows if x == "q" else seen] for x in ("q", "k", "v"))
    dout = np.asarray(case.tensors["dout"], np.float32)[rows] if "dout" in case.tensors else None
    scale, ones = np.float32(float(scale_of(case))), np.ones((len(seen), 1), np.float32)
    out, lse = np.zeros((*q.shape[:2], v.shape[2]), np.float32), np.zeros((q.shape[1], len(rows)), np.float32)
    dq, dk, dv = (np.zeros(x.shape, np.float32) for x in (q, k, v))
    for h in range(q.shape[1]):
        g = h // (q.shape[1] // k.shape[1])
        s = np.where(visible, rounded(rounded(times(q[:, h], k[:, g].T)) * scale), np.float32(-np.inf))
        power, base = (np.exp2, np.float32(np.log2(np.e))) if second else (np.exp, np.float32(1))
        largest = (s * base).max(axis=1, keepdims=True, initial=-np.inf)
        e = rounded(_in_float64(power, s * base - largest))
        total = rounded(times(e, ones))
        p = rounded(e / total)
        out[:, h] = rounded(times(p, v[:, g]))
        stored = largest / base + _in_float64(np.log, total)  # in float32, whatever the dtype
        lse[h] = rounded(stored)[:, 0]
        if dout is None:
            continue
        if second:
            p = rounded(_in_float64(power, s * base - np.nextafter(stored, np.float32(np.inf)) * base))
        products = dout[:, h] * out[:, h]
        delta = rounded(times(rounded(products) if second else products, np.ones((v.shape[2], 1), np.float32)))
        ds = rounded(p * rounded(rounded(times(dout[:, h], v[:, g].T)) - delta))
        dq[:, h] = rounded(scale * times(ds, k[:, g]))
        dk[:, g] += rounded(scale * times(ds.T, q[:, h]))
        dv[:, g] += rounded(times(p.T, dout[:, h]))
    results = {"out": out, "lse": lse.T, "dq": dq, "dk": rounded(dk), "dv": rounded(dv)}
    whole = {}
    for name, x in results.items():
        whole[name] = np.full((sizes[name], *x.shape[1:]), -np.inf if name == "lse" else 0.0, np.float32)
        whole[name][seen if name in OF_KEYS else rows] = x
    whole["lse"] = whole["lse"].T
    return whole


def _plain_merge(case: Case, rounded: Round) -> dict[str, Array]:
    """The formula of merging, every intermediate rounded."""
    count = len(case.tensors) // 2
    outs = [np.asarray(case.tensors[f"out.{p}"], np.float32) for p in range(count)]
    lses = np.stack([np.asarray(case.tensors[f"lse.{p}"], np.float32) for p in range(count)])
    largest = lses.max(axis=0)
    some = np.isfinite(largest)
    e = rounded(
        _in_float64(
            np.exp, rounded(np.where(np.isfinite(lses), lses, np.float32(-np.inf)) - np.where(some, largest, 0))
        )
    )
    total = np.zeros_like(largest)
    for part in e:
        total += part
    total = rounded(total)
    safe = np.where(some, total, 1)
    out = np.zeros_like(outs[0])
    for part, weight in zip(outs, rounded(e / safe), strict=True):
        out += np.where(weight.T[..., None] > 0, part, 0) * weight.T[..., None]
    return {"out": rounded(out), "lse": np.where(some, rounded(largest + rounded(_in_float64(np.log, safe))), -np.inf)}
