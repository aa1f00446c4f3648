"""What a policy costs: work, balance, rows and bytes.

Defines `RankCost`, `rank_cost`, `balance` and `kv_bytes`. Work is counted in visible (query, key) pairs, exactly, in
closed form; time on a device also depends on tiles that are partly visible, which is not modelled here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refimpl.layout import IntArray, PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import RankMetadata, rank_metadata
from refimpl.partition import Policy


@dataclass(frozen=True)
class RankCost:
    """What one rank holds, computes and receives.

    `rows`: local rows. `real_rows`: those with a real token. `steps`: attention calls. `visible_pairs`: its work.
    `kv_rows_gathered`: rows of K and V in its memory after the all-gather. `kv_rows_needed`: those it reads. [N5]
    """

    rows: int
    real_rows: int
    steps: int
    visible_pairs: int
    kv_rows_gathered: int
    kv_rows_needed: int


def visible_pairs(first: IntArray, last: IntArray, num_keys: IntArray, mask: AttentionMask) -> int:
    """Keys seen by the queries at positions `[first, last)` of documents with `num_keys` tokens, all added up.

    Query p sees the keys from max(p - left, 0) to min(p + right + 1, n) - 1. Both bounds are a straight line with one
    bend, so their sums over p have a closed form; a loop over p, or over `key_range`, gives the same. [N5] [K1]
    """
    upper = num_keys * (last - first)
    if mask.right >= 0:
        bend = np.clip(num_keys - mask.right - 1, first, last)  # from here on the document's end is the bound
        upper = _sum_of_positions(first, bend) + (mask.right + 1) * (bend - first) + num_keys * (last - bend)
    lower = np.zeros_like(first)
    if mask.left >= 0:
        bend = np.clip(mask.left, first, last)  # up to here the document's start is the bound
        lower = _sum_of_positions(bend, last) - mask.left * (last - bend)
    return int((upper - lower).sum())


def _sum_of_positions(first: IntArray, last: IntArray) -> IntArray:
    """first + (first + 1) + ... + (last - 1)."""
    return (last - first) * (first + last - 1) // 2


def rank_cost(
    layout: PackedLayout,
    policy: Policy | str,
    cp_size: int,
    cp_rank: int,
    mask: AttentionMask = AttentionMask(),
    metadata: RankMetadata | None = None,
) -> RankCost:
    """The cost of one rank, from its metadata (made here unless given).

    Raises:
        SpecError: those of `rank_metadata`. [N5]
    """
    meta = rank_metadata(layout, policy, cp_size, cp_rank, mask) if metadata is None else metadata
    pairs = 0
    for step in meta.steps:
        first = step.first_query_positions
        has_queries = step.seqlens_q > 0
        pairs += visible_pairs(
            first[has_queries],
            (first + step.seqlens_q)[has_queries],
            step.seqlens_kv[has_queries],
            mask,
        )
    return RankCost(
        rows=len(meta.indices),
        real_rows=sum(int(step.seqlens_q.sum()) for step in meta.steps),
        steps=len(meta.steps),
        visible_pairs=pairs,
        kv_rows_gathered=layout.total_tokens,
        kv_rows_needed=meta.kv_rows_needed,
    )


def balance(work: Sequence[float]) -> float:
    """The largest rank's work over the mean, 1.0 when all are equal or none has any: the step waits for it.

    Args:
        work: `visible_pairs` of each rank. [N5]
    """
    return max(work) * len(work) / sum(work) if sum(work) else 1.0


def kv_bytes(rows: int, kv_heads: int, head_dim_qk: int, head_dim_v: int, itemsize: int) -> int:
    """Bytes of `rows` rows of K and V together. [N5]"""
    return rows * kv_heads * (head_dim_qk + head_dim_v) * itemsize
