"""All-gather context-parallel attention: what each rank does, forward and backward.

Defines `context_parallel_forward` and `context_parallel_backward`, one rank's work over a group of ranks; `Parts`, the
pieces of it that another implementation (or a deliberate fault) may replace; and `run_context_parallel`, which runs all
ranks in this process.

    forward                                              backward
    1  agree on layout, policy, mask, shapes             1  agree again
    2  all-gather K and V, in rank order                 2  all-gather K and V, in rank order
    3  reorder rank order -> sequence order              3  reorder rank order -> sequence order
    4  each step: attend for its rows                    4  each step: dq of its rows; add up dk, dv of all rows
                                                         5  reorder sequence order -> rank order
                                                         6  reduce-scatter dk and dv; cast once
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from refimpl import tiled
from refimpl.attention import check_attention_inputs, is_float
from refimpl.collectives import Collectives, fingerprint, run_ranks
from refimpl.errors import SpecError
from refimpl.layout import IntArray, PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import RankMetadata, rank_metadata
from refimpl.partition import (
    Policy,
    as_policy,
    check_divisible,
    check_ranks,
    partition,
    rank_order_is_sequence_order,
    unpartition,
)

Array = NDArray[Any]
Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class Parts:
    """The pieces of context-parallel attention that can be replaced one by one; signatures as in `refimpl`."""

    rank_metadata: Callable[..., RankMetadata] = rank_metadata
    varlen_attention_forward: Callable[..., tuple[Array, Array]] = tiled.varlen_attention_forward
    varlen_attention_backward: Callable[..., tuple[Array, Array, Array]] = tiled.varlen_attention_backward


REFERENCE = Parts()


@dataclass(frozen=True, eq=False)
class Saved:
    """What the forward keeps for the backward: its inputs, results, and every decision that led to them. [B4]"""

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    layout: PackedLayout
    policy: Policy
    mask: AttentionMask
    softmax_scale: float
    metadata: RankMetadata
    facts: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class RankResult:
    """One rank's results: out [T/cp, Hq, Dv], lse [Hq, T/cp], and the gradients of its shards (None: forward only).

    `indices` int64 [T/cp] are the physical rows that the local rows stand for.
    """

    indices: IntArray
    out: Array
    lse: Array
    dq: Array | None
    dk: Array | None
    dv: Array | None


def context_parallel_forward(
    q: Array,
    k: Array,
    v: Array,
    layout: PackedLayout,
    policy: Policy | str,
    group: Collectives,
    mask: AttentionMask = AttentionMask(),
    softmax_scale: float | None = None,
    parts: Parts = REFERENCE,
) -> tuple[Array, Array, Saved]:
    """Attention for the queries that this rank holds.

    Args:
        q, k, v: this rank's shards [T / cp, heads, head_dim], as `partition` cuts them; equal dtypes.
        layout: of the whole buffer, the same on all ranks, like policy, mask and softmax_scale.
        group: the cp ranks.

    Returns:
        out [T / cp, Hq, Dv] in q's dtype; lse [Hq, T / cp] in float32 or wider; what the backward needs.

    Raises:
        SpecError: on every rank alike, before any tensor is exchanged, when a rank refuses its inputs (any code of
            `check_attention_inputs`, `rank_metadata` and the layout) or ranks differ (ranks_disagree).

    [C1] [C3] [C5] [C6] [A3] [A4] [A5]
    """

    def checked() -> tuple[Mapping[str, str], tuple[float, RankMetadata]]:
        facts, scale = check_forward(q, k, v, layout, policy, group.size, mask, softmax_scale)
        return facts, (scale, parts.rank_metadata(layout, policy, group.size, group.rank, mask))

    facts, (scale, metadata) = agreed(group, checked)
    k_all = to_sequence_order(group.all_gather(k), layout, policy)
    v_all = to_sequence_order(group.all_gather(v), layout, policy)
    out = np.zeros((len(q), q.shape[1], v.shape[2]), q.dtype)
    lse = np.full((q.shape[1], len(q)), -np.inf, accumulation_dtype(q.dtype))
    for step, rows in zip(metadata.steps, metadata.step_rows, strict=True):
        out[rows], lse[:, rows] = parts.varlen_attention_forward(q[rows], k_all, v_all, step, mask, scale)
    return out, lse, Saved(q, k, v, out, lse, layout, as_policy(policy), mask, scale, metadata, facts)


def context_parallel_backward(
    dout: Array, saved: Saved, group: Collectives, parts: Parts = REFERENCE
) -> tuple[Array, Array, Array]:
    """Gradients of this rank's shards.

    Args:
        dout: [T / cp, Hq, Dv], the gradient of this rank's `out`; same dtype as q.
        saved: from the forward on this rank, whose decisions are used again, never made anew.

    Returns:
        dq, dk, dv in the shapes and dtypes of this rank's q, k, v. dk and dv hold the contributions of all ranks.

    Raises:
        SpecError: on every rank alike: shape, dtype, ranks_disagree.

    [B1] [B2] [B3] [B4] [C1] [C2] [C3] [C5] [N1]
    """
    agreed(group, lambda: (check_backward(dout, saved), None))
    layout, policy = saved.layout, saved.policy
    k_all = to_sequence_order(group.all_gather(saved.k), layout, policy)
    v_all = to_sequence_order(group.all_gather(saved.v), layout, policy)
    accumulate = accumulation_dtype(saved.q.dtype)
    dq = np.zeros(saved.q.shape, saved.q.dtype)
    dk_all, dv_all = np.zeros(k_all.shape, accumulate), np.zeros(v_all.shape, accumulate)
    for step, rows in zip(saved.metadata.steps, saved.metadata.step_rows, strict=True):
        dq[rows], dk_step, dv_step = parts.varlen_attention_backward(
            dout[rows],
            saved.q[rows],
            k_all,
            v_all,
            saved.out[rows],
            saved.lse[:, rows],
            step,
            saved.mask,
            saved.softmax_scale,
        )
        dk_all += dk_step
        dv_all += dv_step
    dk = group.reduce_scatter_sum(to_rank_order(dk_all, layout, policy, group.size))
    dv = group.reduce_scatter_sum(to_rank_order(dv_all, layout, policy, group.size))
    return dq, dk.astype(saved.k.dtype), dv.astype(saved.v.dtype)


def run_context_parallel(
    q: Any,
    k: Any,
    v: Any,
    dout: Any | None,
    layout: PackedLayout,
    policy: Policy | str,
    cp_size: int,
    mask: AttentionMask = AttentionMask(),
    softmax_scale: float | None = None,
) -> list[RankResult]:
    """Partition whole tensors, run every rank in this process, and return what each computed.

    Args:
        q: [T, Hq, Dqk]. k: [T, Hkv, Dqk]. v: [T, Hkv, Dv]. dout: [T, Hq, Dv], or None for the forward alone; all of
            one float dtype. float16 and bfloat16 are computed in float32.

    Returns:
        One RankResult a rank; `unpartition([r.out for r in results], layout, policy)` is the whole output.

    Raises:
        SpecError: whatever a rank refuses. [C5]
    """
    check_ranks(cp_size)
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    check_attention_inputs(q, k, v, layout.total_tokens, layout.total_tokens, softmax_scale)
    if dout is not None:
        check_dout(dout, (*q.shape[:2], v.shape[2]))
    douts = [None] * cp_size if dout is None else partition(dout, layout, policy, cp_size)
    shards = list(zip(*(partition(x, layout, policy, cp_size) for x in (q, k, v)), douts, strict=True))

    def rank(group: Collectives) -> RankResult:
        q_local, k_local, v_local, dout_local = shards[group.rank]
        out, lse, saved = context_parallel_forward(
            q_local, k_local, v_local, layout, policy, group, mask, softmax_scale
        )
        gradients = (None,) * 3 if dout_local is None else context_parallel_backward(dout_local, saved, group)
        return RankResult(saved.metadata.indices, out, lse, *gradients)

    return run_ranks(cp_size, rank)


def to_sequence_order(gathered: Array, layout: PackedLayout, policy: Policy | str) -> Array:
    """All-gathered shards [cp, T / cp, ...] as the buffer [T, ...]; no copy where rank order is sequence order. [C1]"""
    if rank_order_is_sequence_order(policy):
        return gathered.reshape(-1, *gathered.shape[2:])
    return unpartition(list(gathered), layout, policy)


def to_rank_order(x: Array, layout: PackedLayout, policy: Policy | str, cp_size: int) -> Array:
    """The buffer [T, ...] as one part a rank [cp, T / cp, ...]: the inverse of `to_sequence_order`. [C2]"""
    if rank_order_is_sequence_order(policy):
        return x.reshape(cp_size, -1, *x.shape[1:])
    return np.stack(partition(x, layout, policy, cp_size))


def accumulation_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype of sums over keys, steps and ranks: float64 for float64, else float32. [N1]"""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def describe_layout(layout: PackedLayout) -> str:
    """A layout as a fact for `all_agree`: sizes for a person, a digest of every offset for the comparison."""
    digest = fingerprint(layout.cu_seqlens, layout.cu_seqlens_padded)
    return f"{layout.num_documents} documents in {layout.total_tokens} rows (offsets {digest})"


def check_same_dtype(**tensors: Any) -> None:
    """All tensors have one float dtype that a rank computes in; else SpecError `dtype`. [A8]"""
    (first_name, first), *others = tensors.items()
    for name, x in ((first_name, first), *others):
        dtype = _dtype_of(x)
        if not is_float(dtype) or dtype.itemsize > 8:
            raise SpecError("dtype", f"{name} has dtype {dtype}: expected float16, bfloat16, float32 or float64")
        if dtype != _dtype_of(first):
            raise SpecError("dtype", f"{name} is {dtype} but {first_name} is {_dtype_of(first)}: expected one dtype")


def _dtype_of(x: Any) -> np.dtype[Any]:
    """The dtype of an array, of NumPy or of a device."""
    return np.dtype(x.dtype) if hasattr(x, "dtype") else np.asarray(x).dtype


def check_dout(dout: Any, shape: tuple[int, ...]) -> None:
    """The gradient of an output has the output's shape; else SpecError `shape`. [A8]"""
    if np.shape(dout) != shape:
        raise SpecError("shape", f"dout has shape {list(np.shape(dout))}: expected {list(shape)}, that of out")


def check_forward(
    q: Any,
    k: Any,
    v: Any,
    layout: PackedLayout,
    policy: Policy | str,
    cp_size: int,
    mask: AttentionMask,
    softmax_scale: float | None,
) -> tuple[Mapping[str, str], float]:
    """What a rank states to the others before a forward, and the scale to use; SpecError for what it refuses. [C3]"""
    check_divisible(layout, policy, cp_size)
    rows = layout.total_tokens // cp_size
    scale = check_attention_inputs(q, k, v, rows, rows, softmax_scale)
    check_same_dtype(q=q, k=k, v=v)
    facts = {
        "operation": "forward",
        "policy": str(as_policy(policy)),
        "layout": describe_layout(layout),
        "mask": f"left {mask.left}, right {mask.right}",
        "softmax_scale": repr(scale),
        **{name: f"{x.dtype}{list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v))},
    }
    return facts, scale


def check_backward(dout: Any, saved: Saved) -> Mapping[str, str]:
    """What a rank states to the others before a backward; SpecError for what it refuses. [C3] [B4]"""
    check_dout(dout, saved.out.shape)
    check_same_dtype(q=saved.q, dout=dout)
    return {**saved.facts, "operation": "backward"}


def agreed(
    group: Collectives, checked: Callable[[], tuple[Mapping[str, str], Prepared]]
) -> tuple[Mapping[str, str], Prepared]:
    """Prepare this rank's work and state its facts, or its refusal, to all others; raise alike if they do not match.

    Whatever a rank may refuse is done in `checked`, before any rank waits for another. [C3]
    """
    facts: Mapping[str, str] = {}
    prepared: Prepared | None = None
    refusal: SpecError | None = None
    try:
        facts, prepared = checked()
    except SpecError as error:
        refusal = error
    group.all_agree(facts, refusal)
    return facts, cast(Prepared, prepared)
