"""Mutants whose gradients are wrong while their forward is right.

Defines `MUTANTS`. The functions above it are the wrong pieces; signatures are those of `implementation`.
"""

from collections.abc import Sequence

import numpy as np

from refimpl.conformance.cases import Case
from refimpl.conformance.faults.mutant import Array, Mutant, mutant, returned_as, rows_of_output
from refimpl.conformance.faults.scores import bfloat16
from refimpl.conformance.judge import sees_keys
from refimpl.layout import IntArray
from refimpl.mask import AttentionMask


def sum_in_bfloat16(parts: Sequence[Array] | Array) -> Array:
    """One part after the other, every partial sum rounded."""
    total = np.zeros_like(parts[0])
    for part in parts:
        total = bfloat16(total + bfloat16(part))
    return total


def last_head_alone(x: Array, heads: Sequence[int], kv_heads: int) -> Array:
    """Every query head writes over what the others of its group wrote."""
    total = np.zeros((kv_heads, *x.shape[1:]))
    for part, head in zip(x, heads, strict=True):
        total[head] = part
    return total


def last_token_into_padding(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """Padding rows of dk and dv with the gradient of the row before."""
    if name not in ("dk", "dv"):
        return array
    array = array.copy()
    for i in np.flatnonzero(case.layout_of(name).document_ids[rows_of_output(name, case, rank)] < 0):
        if i:
            array[i] = array[i - 1]
    return array


def nan_where_nothing_is_seen(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """NaN for dq of every row that sees no key, of exp(-inf - -inf)."""
    if name != "dq":
        return array
    sees = sees_keys(case)[rows_of_output(name, case, rank)]
    return np.where(sees[:, None, None], array, np.nan)


def own_shard_everywhere(buffer: Array, held: Sequence[IntArray], rank: int) -> Array:
    """A rank's own shard in place of all."""
    return np.tile(buffer[held[rank]], (len(held), 1, 1))


def still_in_rank_order(buffer: Array, held: Sequence[IntArray], rank: int) -> Array:
    """What the ranks hold, one behind the other."""
    in_rank_order: Array = buffer[np.concatenate(list(held))]
    return in_rank_order


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "missing-reduction",
        "backward",
        "keeps a rank's own contribution to dk and dv and adds nobody else's",
        reduce_sum=lambda parts, rank: parts[rank],
    ),
    mutant(
        "averaged-gradients",
        "backward",
        "averages the contributions to dk and dv over the ranks",
        reduce_sum=lambda parts, rank: parts.mean(axis=0),
    ),
    mutant(
        "bfloat16-reduction",
        "backward",
        "adds up the ranks' contributions to dk and dv in bfloat16",
        "Megatron#6199",
        reduce_sum=lambda parts, rank: sum_in_bfloat16(parts),
    ),
    mutant(
        "overwritten-steps",
        "backward",
        "writes dk and dv of a step over those of the step before",
        add_steps=lambda total, step: step,
    ),
    mutant(
        "overwritten-heads",
        "backward",
        "writes dk and dv of a query head over those of others in its group",
        sum_heads=last_head_alone,
    ),
    mutant(
        "local-kv-in-backward",
        "backward",
        "reads the rank's own K and V where its backward needs the gathered ones",
        kv_for_backward=own_shard_everywhere,
    ),
    mutant(
        "rank-order-in-backward",
        "backward",
        "gathers K and V again for the backward and does not put them in buffer order",
        kv_for_backward=still_in_rank_order,
    ),
    mutant(
        "window-dropped-in-backward",
        "backward",
        "decides on the mask anew in the backward, without the window",
        backward_mask=lambda mask: AttentionMask(mask.causal),
    ),
    mutant(
        "missing-delta",
        "backward",
        "leaves the rows' delta out of the gradient of scores",
        delta=lambda dout, out: np.zeros(out.shape[:2]),
    ),
    mutant(
        "stale-delta",
        "backward",
        "uses the delta of the first head for all",
        delta=lambda dout, out: np.repeat((dout[:1] * out[:1]).sum(axis=2), len(out), axis=0),
    ),
    mutant(
        "unscaled-dq",
        "backward",
        "leaves the scale out of dq",
        **returned_as("dq")(lambda array, case: array / case.softmax_scale),
    ),
    mutant(
        "unscaled-dk",
        "backward",
        "leaves the scale out of dk",
        **returned_as("dk")(lambda array, case: array / case.softmax_scale),
    ),
    mutant(
        "scaled-dv",
        "backward",
        "multiplies dv by the scale",
        **returned_as("dv")(lambda array, case: array * case.softmax_scale),
    ),
    mutant(
        "gradient-of-padding-keys",
        "backward",
        "gives padding rows of dk and dv the gradient of the row before",
        finish=last_token_into_padding,
    ),
    mutant(
        "nan-gradients-without-keys",
        "backward",
        "takes the weights of rows that see no key from an lse of -inf, which gives NaN for their dq",
        finish=nan_where_nothing_is_seen,
    ),
)
"""In the order of `mutants.MUTANTS`."""
