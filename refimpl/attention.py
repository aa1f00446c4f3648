"""The oracle: masked attention over packed documents, forward and backward, in float64.

Defines `attention_forward` and `attention_backward`, which see the whole buffer and decide everything from
`(document, position)`, and `varlen_attention_forward` and `varlen_attention_backward`, which see what one rank sees:
its queries, the gathered K/V, and a `StepMetadata`. Both lead to the same dense formulas for one block of rows and one
head, `forward_block` and `backward_block`; they are written to be read, not to be fast (`tiled` is fast).

For one query i, with s_ij = softmax_scale * q_i . k_j over its visible keys j (Vaswani et al. 2017, section 3.2.1):

    lse_i = log sum_j exp(s_ij)        p_ij = exp(s_ij - lse_i)        out_i = sum_j p_ij v_j

and for the gradient dout of a loss with respect to out (Dao et al. 2022, FlashAttention, appendix B.2):

    delta_i = dout_i . out_i           ds_ij = p_ij (dout_i . v_j - delta_i)
    dv_j = sum_i p_ij dout_i           dq_i = scale sum_j ds_ij k_j           dk_j = scale sum_i ds_ij q_i

A row that sees no key has out 0, lse -inf and gradient 0. Rows that hold no real token are never read, so whatever lies
there, NaN included, reaches no result; their results are 0, and their lse is -inf.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import StepMetadata

Array = NDArray[Any]
Float64Array = NDArray[np.float64]


@dataclass(frozen=True)
class Block:
    """Queries and keys that belong together: rows of the query buffer, rows of K/V, and who sees whom [Lq, Lk]."""

    queries: slice
    keys: slice
    visible: NDArray[np.bool_]


def attention_forward(
    q: Any, k: Any, v: Any, layout: PackedLayout, mask: AttentionMask, softmax_scale: float | None = None
) -> tuple[Float64Array, Float64Array]:
    """Attention of every row to the visible rows of its own document.

    Args:
        q: [T, Hq, Dqk] of any float dtype. k: [T, Hkv, Dqk]. v: [T, Hkv, Dv]. Query head h reads K/V head
            h // (Hq // Hkv).
        softmax_scale: factor of the scores; None: 1 / sqrt(Dqk).

    Returns:
        out [T, Hq, Dv] and lse [Hq, T] (natural logarithm), float64.

    Raises:
        SpecError: shape, dtype, heads, softmax_scale.

    [A1] [A2] [A3] [A4] [A5] [A6] [N4]
    """
    scale = check_attention_inputs(q, k, v, layout.total_tokens, layout.total_tokens, softmax_scale)
    return _forward(q, k, v, layout_blocks(layout, mask), scale)


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    layout: PackedLayout,
    mask: AttentionMask,
    softmax_scale: float | None = None,
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Gradients of `attention_forward`, given its own `out` and `lse`.

    Args:
        dout, out: [T, Hq, Dv]. lse: [Hq, T]. The others as in the forward.

    Returns:
        dq, dk, dv, float64, in the shapes of q, k, v; the heads of a group add up in dk and dv.

    Raises:
        SpecError: shape, dtype, heads, softmax_scale.

    [B1] [B2] [B3] [B4]
    """
    scale = check_attention_inputs(q, k, v, layout.total_tokens, layout.total_tokens, softmax_scale)
    check_backward_inputs(dout, q, v, out, lse)
    return _backward(dout, q, k, v, out, lse, layout_blocks(layout, mask), scale)


def varlen_attention_forward(
    q: Any, k: Any, v: Any, step: StepMetadata, mask: AttentionMask, softmax_scale: float | None = None
) -> tuple[Float64Array, Float64Array]:
    """Attention of one step's query buffer to gathered K/V, from offsets alone, aligned to the bottom right.

    Args:
        q: [Tq, Hq, Dqk]. k: [Tk, Hkv, Dqk]. v: [Tk, Hkv, Dv]; Tq and Tk reach at least to the last storage offset.

    Returns:
        out [Tq, Hq, Dv] and lse [Hq, Tq], float64; rows that no document claims are padding.

    Raises:
        SpecError: shape, dtype, heads, softmax_scale. [A3] [A4] [A5] [K4] [K5] [R5]
    """
    scale = check_attention_inputs(q, k, v, *step_rows_needed(step), softmax_scale, exact=False)
    return _forward(q, k, v, _step_blocks(step, mask), scale)


def varlen_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    step: StepMetadata,
    mask: AttentionMask,
    softmax_scale: float | None = None,
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Gradients of `varlen_attention_forward`; dk and dv are this step's share, to be summed over steps and ranks.

    Raises:
        SpecError: shape, dtype, heads, softmax_scale. [B1] [B2] [B3] [B4]
    """
    scale = check_attention_inputs(q, k, v, *step_rows_needed(step), softmax_scale, exact=False)
    check_backward_inputs(dout, q, v, out, lse)
    return _backward(dout, q, k, v, out, lse, _step_blocks(step, mask), scale)


def layout_blocks(layout: PackedLayout, mask: AttentionMask) -> Iterator[Block]:
    """One block a document, its mask from `(document, position)`: rows of different documents never see each other."""
    for _, rows in layout.document_rows():
        document, position = layout.document_ids[rows], layout.positions[rows]
        yield Block(rows, rows, mask.visible(document, position, document, position))


def _step_blocks(step: StepMetadata, mask: AttentionMask) -> Iterator[Block]:
    """One block a document of the step, its mask from the step's lengths and alignment."""
    seqlens_q, seqlens_kv, first_query = step.seqlens_q, step.seqlens_kv, step.first_query_positions
    for d in np.flatnonzero(seqlens_q):
        queries, keys = np.arange(seqlens_q[d]), np.arange(seqlens_kv[d])
        q_start, k_start = int(step.cu_seqlens_q_padded[d]), int(step.cu_seqlens_kv_padded[d])
        yield Block(
            slice(q_start, q_start + len(queries)),
            slice(k_start, k_start + len(keys)),
            mask.visible(d, first_query[d] + queries, d, keys),
        )


def _forward(q: Any, k: Any, v: Any, blocks: Iterator[Block], scale: float) -> tuple[Float64Array, Float64Array]:
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    num_rows, heads = q.shape[:2]
    out = np.zeros((num_rows, heads, v.shape[2]))
    lse = np.full((heads, num_rows), -np.inf)
    for block in blocks:
        for h in range(heads):
            g = h // (heads // k.shape[1])
            out[block.queries, h], lse[h, block.queries] = forward_block(
                _float64(q[block.queries, h]),
                _float64(k[block.keys, g]),
                _float64(v[block.keys, g]),
                block.visible,
                scale,
            )
    return out, lse


def _backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, blocks: Iterator[Block], scale: float
) -> tuple[Float64Array, Float64Array, Float64Array]:
    dout, q, k, v, out, lse = (np.asarray(x) for x in (dout, q, k, v, out, lse))
    heads = q.shape[1]
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for block in blocks:
        for h in range(heads):
            g = h // (heads // k.shape[1])
            dq_block, dk_block, dv_block = backward_block(
                _float64(dout[block.queries, h]),
                _float64(q[block.queries, h]),
                _float64(k[block.keys, g]),
                _float64(v[block.keys, g]),
                _float64(out[block.queries, h]),
                _float64(lse[h, block.queries]),
                block.visible,
                scale,
            )
            dq[block.queries, h] = dq_block
            dk[block.keys, g] += dk_block
            dv[block.keys, g] += dv_block
    return dq, dk, dv


def forward_block(
    q: Float64Array, k: Float64Array, v: Float64Array, visible: NDArray[np.bool_], scale: float
) -> tuple[Float64Array, Float64Array]:
    """out [Lq, Dv] and lse [Lq] of one head: q [Lq, Dqk], k [Lk, Dqk], v [Lk, Dv], visible [Lq, Lk]. [A3] [A4]"""
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    sees = visible.any(axis=1)  # decided from the mask: a row whose scores are all -inf does see keys
    s = np.where(visible, scale * (q @ k.T), -np.inf)[sees]
    largest = s.max(axis=1, keepdims=True, initial=-np.inf)
    e = np.exp(s - largest)
    total = e.sum(axis=1, keepdims=True)
    out[sees] = (e / total) @ v
    lse[sees] = (largest + np.log(total))[:, 0]
    return out, lse


def backward_block(
    dout: Float64Array,
    q: Float64Array,
    k: Float64Array,
    v: Float64Array,
    out: Float64Array,
    lse: Float64Array,
    visible: NDArray[np.bool_],
    scale: float,
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """dq, dk, dv of one head, in the shapes of q, k, v; out [Lq, Dv] and lse [Lq] are the forward's. [B1] [B2]"""
    dq = np.zeros(q.shape)
    sees = visible.any(axis=1)
    dout, q, out, lse, visible = dout[sees], q[sees], out[sees], lse[sees], visible[sees]
    p = np.where(visible, np.exp(np.where(visible, scale * (q @ k.T) - lse[:, None], -np.inf)), 0.0)
    delta = (dout * out).sum(axis=1, keepdims=True)
    ds = np.where(visible, p * (dout @ v.T - delta), 0.0)
    dq[sees] = scale * (ds @ k)
    return dq, scale * (ds.T @ q), p.T @ dout


def _float64(x: Array) -> Float64Array:
    return x.astype(np.float64)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether attention takes the dtype: NumPy's floats, and bfloat16 (of ml_dtypes), which NumPy does not know."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def check_attention_inputs(
    q: Any, k: Any, v: Any, rows_q: int, rows_k: int, softmax_scale: float | None, exact: bool = True
) -> float:
    """Refuse what attention cannot take; returns the scale to use.

    Args:
        rows_q, rows_k: rows that q, and k and v, must have: just so many if `exact`, else at least.

    Raises:
        SpecError: shape, dtype, heads, softmax_scale. [A1] [A2] [A8]
    """
    for name, x, rows in (("q", q, rows_q), ("k", k, rows_k), ("v", v, rows_k)):
        shape, dtype = np.shape(x), np.asarray(x).dtype
        if not is_float(dtype):
            raise SpecError("dtype", f"{name} has dtype {dtype}: expected a float dtype")
        if len(shape) != 3 or 0 in shape[1:]:
            raise SpecError("shape", f"{name} has shape {list(shape)}: expected [tokens, heads, head_dim]")
        if shape[0] != rows if exact else shape[0] < rows:
            more = "" if exact else " or more"
            raise SpecError("shape", f"{name} has {shape[0]} rows: the layout has {rows}{more}")
    (_, heads_q, dim_q), (num_keys, heads_k, dim_k), (num_values, heads_v, _) = np.shape(q), np.shape(k), np.shape(v)
    if dim_q != dim_k:
        raise SpecError("shape", f"q has head_dim {dim_q} but k has {dim_k}: scores need equal ones")
    if heads_k != heads_v or num_keys != num_values:
        raise SpecError(
            "shape", f"k has shape {list(np.shape(k))} but v has {list(np.shape(v))}: rows and heads differ"
        )
    if heads_q % heads_k:
        raise SpecError("heads", f"{heads_q} query heads are no multiple of {heads_k} K/V heads")
    return checked_scale(softmax_scale, dim_q)


def checked_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The scale to use: 1 / sqrt(head_dim) for None, else a finite number. [A1]"""
    if softmax_scale is None:
        return 1.0 / float(np.sqrt(head_dim))
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, int | float | np.integer | np.floating):
        raise SpecError("softmax_scale", f"softmax_scale is {softmax_scale!r}: expected a number")
    try:
        scale = float(softmax_scale)
    except OverflowError:
        scale = float("inf")
    if not np.isfinite(scale):
        raise SpecError("softmax_scale", f"softmax_scale is {scale}: expected a finite number")
    return scale


def check_backward_inputs(dout: Any, q: Any, v: Any, out: Any, lse: Any) -> None:
    """Refuse gradients and saved results that do not fit the forward's inputs. SpecError: shape, dtype. [A8] [B4]"""
    rows, heads = np.shape(q)[:2]
    expected = {"dout": (rows, heads, np.shape(v)[2]), "out": (rows, heads, np.shape(v)[2]), "lse": (heads, rows)}
    for name, x in (("dout", dout), ("out", out), ("lse", lse)):
        if np.shape(x) != expected[name]:
            raise SpecError("shape", f"{name} has shape {list(np.shape(x))}: expected {list(expected[name])}")
        if not is_float(np.asarray(x).dtype):
            raise SpecError("dtype", f"{name} has dtype {np.asarray(x).dtype}: expected a float dtype")


def step_rows_needed(step: StepMetadata) -> tuple[int, int]:
    """Rows that a step's query buffer and its K/V must have at least."""
    return int(step.cu_seqlens_q_padded[-1]), int(step.cu_seqlens_kv_padded[-1])
