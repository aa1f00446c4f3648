"""Mutants whose numbers are wrong while their rows and masks are right.

Defines `ZEROS` and `MUTANTS`. The functions above it are the wrong pieces; signatures are those of `implementation`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.cases import Case
from refimpl.conformance.implementation import once, rank_order, softmax
from refimpl.conformance.mutant import Mutant, mutant
from refimpl.conformance.yardstick import to_bfloat16
from refimpl.layout import IntArray, PackedLayout
from refimpl.lse import merge_partials
from refimpl.mask import AttentionMask
from refimpl.partition import Policy, partition_indices, rank_order_is_sequence_order, step_windows, window_indices

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Pieces = dict[str, Callable[..., Any]]

# --- one number for all ---------------------------------------------------------------------------------------------


def returned_as(*names: str) -> Callable[[Callable[[Array, Case], Array]], Pieces]:
    """Another array for these outputs of attention: `value(array, case)`."""

    def decorated(value: Callable[[Array, Case], Array]) -> Pieces:
        def finish(name: str, array: Array, case: Case, rank: int | None) -> Array:
            return value(array, case) if name in names and case.operation != "merge" else array

        return {"finish": finish}

    return decorated


def zeros(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """Zeros."""
    return np.zeros_like(array)


def zeros_on_later_ranks(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """Zeros but on rank 0."""
    return np.zeros_like(array) if rank else array


def inputs_again(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """The input of the same shape: v for out, q for dq, the shards in a row; zeros for lse."""
    if name == "lse":
        return np.zeros_like(array)
    if name == "x":
        return np.concatenate([np.asarray(case.tensors[f"x.{r}"], np.float64) for r in range(case.cp_size)])
    if case.operation == "merge":
        return np.asarray(case.tensors["out.0"], np.float64)
    source = {"out": "v", "dq": "q", "dk": "k", "dv": "v"}[name]
    x = np.asarray(case.tensors[source], np.float64)
    if rank is not None:
        x = x[once(partition_indices, case.layout, case.policy, case.cp_size, rank)]
    return np.repeat(x, array.shape[1] // x.shape[1], axis=1)


# --- scores and weights ---------------------------------------------------------------------------------------------


def without_maximum(s: Array, visible: Bools) -> tuple[Array, Array]:
    """exp of the scores themselves."""
    e = np.exp(np.where(visible, s, -np.inf))
    total = e.sum(axis=2)
    sees = np.any(visible, axis=1)
    return np.where(sees[:, None], e / total[:, :, None], 0.0), np.where(sees, np.log(total), -np.inf)


def finite_sentinel(s: Array, visible: Bools) -> tuple[Array, Array]:
    """Masked scores are -50000, and take part."""
    return softmax(np.where(visible, s, -50000.0), np.ones_like(visible))


def softmax_in_base_2(s: Array, visible: Bools) -> tuple[Array, Array]:
    """Powers of 2 of scores that were never multiplied by log2(e)."""
    p, lse = softmax(s * np.log(2), visible)
    return p, lse


def lse_without_maximum(s: Array, visible: Bools) -> tuple[Array, Array]:
    """The largest score is subtracted and never added to the lse; the backward meets the same."""
    p, lse = softmax(s, visible)
    largest = np.where(visible, s, -np.inf).max(axis=2, initial=-np.inf)
    return p, np.where(np.isfinite(largest), lse - largest, lse)


def bfloat16(x: Array) -> Array:
    """Rounded to bfloat16."""
    return to_bfloat16(x.astype(np.float32)).astype(np.float64)


def sum_in_bfloat16(parts: Sequence[Array] | Array) -> Array:
    """One part after the other, every partial sum rounded."""
    total = np.zeros_like(parts[0])
    for part in parts:
        total = bfloat16(total + bfloat16(part))
    return total


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


# --- lse and merging ------------------------------------------------------------------------------------------------


def lse_in_wrong_slot(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """Documents with tokens stored in slots that count them alone, and read by their numbers among all."""
    if name != "lse" or case.operation == "merge":
        return array
    layout = case.layout
    rows = np.arange(layout.total_tokens)
    if rank is not None:
        rows = once(partition_indices, layout, case.policy, case.cp_size, rank)
    documents = layout.document_ids[rows]
    stored = [np.flatnonzero(documents == d) for d in np.flatnonzero(layout.seqlens)]
    wrong = np.full_like(array, -np.inf)
    for d in np.flatnonzero(layout.seqlens):
        own, read = np.flatnonzero(documents == d), stored[d] if d < len(stored) else np.zeros(0, np.int64)
        count = min(len(own), len(read))
        wrong[:, own[:count]] = array[:, read[:count]]
    return wrong


def plus_infinity_if_empty(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """+inf marks a row without keys, in whatever holds one."""
    return np.where(np.isneginf(array), np.inf, array) if name == "lse" else array


def merge_in_base_2(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Every lse read as a logarithm to the base 2, and written as one."""
    out, lse = merge_partials(outs, [x * np.log(2) for x in lses])
    return out, lse / np.log(2)


def merge_without_care(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """The formula as it stands, with the largest lse subtracted: -inf - -inf where all are empty."""
    stacked = np.stack(lses)
    e = np.exp(stacked - stacked.max(axis=0))
    out = sum((np.where(w > 0, x.transpose(2, 1, 0), 0) * w for x, w in zip(outs, e / e.sum(axis=0), strict=True)))
    return np.asarray(out).transpose(2, 1, 0), stacked.max(axis=0) + np.log(e.sum(axis=0))


def merge_reading_empty_parts(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """What a part without keys holds is multiplied by a weight of 0."""
    out, lse = merge_partials(outs, lses)
    for part, weight in zip(outs, lses, strict=True):
        out = out + np.where(np.isneginf(weight).T[:, :, None], 0.0 * part, 0.0)
    return out, lse


def merge_without_maximum(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """exp of the lse themselves."""
    e = np.exp(np.stack(lses))
    total = e.sum(axis=0)
    weights = np.where(total > 0, e / total, 0.0)
    out = sum((np.where(np.isnan(x), 0, x) * w.T[:, :, None] for x, w in zip(outs, weights, strict=True)))
    return np.asarray(out), np.log(total)


def merge_of_equals(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """The mean of the parts that saw a key."""
    sees = np.stack([np.isfinite(x).T[:, :, None] for x in lses])
    out = np.where(sees, np.stack(outs), 0.0).sum(axis=0) / np.maximum(sees.sum(axis=0), 1)
    return out, merge_partials(outs, lses)[1]


# --- heads and gradients --------------------------------------------------------------------------------------------


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
    layout = case.layout
    rows = np.arange(layout.total_tokens)
    if rank is not None:
        rows = once(partition_indices, layout, case.policy, case.cp_size, rank)
    array = array.copy()
    for i in np.flatnonzero(layout.document_ids[rows] < 0):
        if i:
            array[i] = array[i - 1]
    return array


def values_beyond_key_dim(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """Zeros in the columns of out and dv beyond the width of keys."""
    if name not in ("out", "dv") or case.operation == "merge":
        return array
    array = array.copy()
    array[:, :, case.tensors["q"].shape[2] :] = 0
    return array


# --- collectives ----------------------------------------------------------------------------------------------------


def late_chunks_not_mirrored(gathered: Array, layout: PackedLayout, policy: Policy) -> Array:
    """The late chunk of rank r is put at chunk cp + r, not at 2cp - 1 - r."""
    cp_size = len(gathered)
    order = once(rank_order, layout, policy, cp_size)
    if not rank_order_is_sequence_order(policy):
        windows = [step_windows(layout, policy, cp_size, r) for r in range(cp_size)]
        order = np.concatenate([window_indices([windows[r][0], windows[-1 - r][1]]) for r in range(cp_size)])
    buffer = np.zeros((layout.total_tokens, *gathered.shape[2:]))
    buffer[order] = gathered.reshape(len(order), *gathered.shape[2:])
    return buffer


def swapped_with_next(shards: Array, rank: int) -> Array:
    """A rank's own shard and the next rank's in each other's place."""
    order = list(range(len(shards)))
    following = (rank + 1) % len(shards)
    order[rank], order[following] = order[following], order[rank]
    swapped: Array = shards[order]
    return swapped


def last_rank_alone(shards: Array, rank: int) -> Array:
    """The last rank sees zeros for what the others hold."""
    if rank < len(shards) - 1 or rank == 0:
        return shards
    alone = np.zeros_like(shards)
    alone[rank] = shards[rank]
    return alone


def parts_of_next_rank(x: Array, layout: PackedLayout, policy: Policy, cp_size: int) -> Array:
    """Every rank gets the sums of the next one's rows."""
    parts: Array = x[once(rank_order, layout, policy, cp_size)].reshape(cp_size, -1, *x.shape[1:])
    return np.roll(parts, -1, axis=0)


def own_shard_everywhere(buffer: Array, held: Sequence[IntArray], rank: int) -> Array:
    """A rank's own shard in place of all."""
    return np.tile(buffer[held[rank]], (len(held), 1, 1))


def still_in_rank_order(buffer: Array, held: Sequence[IntArray], rank: int) -> Array:
    """What the ranks hold, one behind the other."""
    in_rank_order: Array = buffer[np.concatenate(list(held))]
    return in_rank_order


ZEROS: tuple[Mutant, ...] = (
    mutant("zeros-everywhere", "zeros", "returns zeros", "TE#3536", finish=zeros),
    mutant(
        "zero-gradients",
        "zeros",
        "returns zeros for the gradients",
        "TE#3528",
        **returned_as("dq", "dk", "dv")(lambda array, case: np.zeros_like(array)),
    ),
    mutant("zeros-on-later-ranks", "zeros", "returns zeros on every rank but the first", finish=zeros_on_later_ranks),
    mutant("returned-inputs", "zeros", "returns its inputs", finish=inputs_again),
)
"""Answers that do not depend on attention."""

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
    mutant(
        "finite-sentinel",
        "lse",
        "marks masked scores with -50000, so that lower ones vanish and rows without keys have an lse",
        "FlashInfer#4401",
        softmax=finite_sentinel,
    ),
    mutant(
        "base-2-lse",
        "lse",
        "returns lse as a logarithm to the base 2",
        "sglang#40903",
        **returned_as("lse")(lambda array, case: array / np.log(2)),
    ),
    mutant(
        "lse-without-maximum",
        "lse",
        "subtracts the largest score and does not add it to lse again",
        softmax=lse_without_maximum,
    ),
    mutant(
        "transposed-lse",
        "lse",
        "returns lse as [T, H]",
        "pytorch varlen_attn documentation",
        **returned_as("lse")(lambda array, case: array.T.copy()),
    ),
    mutant(
        "lse-in-wrong-slot",
        "lse",
        "stores lse in slots that leave empty documents out",
        finish=lse_in_wrong_slot,
    ),
    mutant(
        "plus-infinity-for-empty-rows",
        "lse",
        "returns an lse of +inf for rows without keys",
        "vLLM#15492",
        finish=plus_infinity_if_empty,
    ),
    mutant("merge-in-base-2", "lse", "reads a natural lse as one to the base 2", "sglang#40903", merge=merge_in_base_2),
    mutant(
        "nan-from-empty-parts",
        "lse",
        "subtracts -inf from -inf where no part saw a key",
        "FlashInfer#4051",
        merge=merge_without_care,
    ),
    mutant(
        "merge-of-empty-parts",
        "lse",
        "multiplies what a part without keys holds by 0",
        "vLLM#39148",
        merge=merge_reading_empty_parts,
    ),
    mutant("merge-without-maximum", "lse", "takes exp of the lse themselves", merge=merge_without_maximum),
    mutant("merge-of-equals", "lse", "takes the mean of the parts", merge=merge_of_equals),
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
        "rank-order-for-buffer-order",
        "collectives",
        "reads gathered K and V as they come, the ranks one behind the other",
        sequence_order=lambda gathered, layout, policy: gathered.reshape(-1, *gathered.shape[2:]),
    ),
    mutant(
        "buffer-order-for-rank-order",
        "collectives",
        "reduces dk and dv without putting them in the order of the ranks",
        rank_order=lambda x, layout, policy, cp_size: x.reshape(cp_size, -1, *x.shape[1:]),
    ),
    mutant(
        "gathering-from-own-rank",
        "collectives",
        "gathers the shards beginning with its own",
        gather=lambda shards, rank: np.roll(shards, -rank, axis=0),
    ),
    mutant(
        "swapped-shards",
        "collectives",
        "takes its own gathered K and V and the next rank's for each other",
        gather=swapped_with_next,
    ),
    mutant(
        "late-chunks-not-mirrored",
        "collectives",
        "puts the late chunks of gathered K and V in the order of the ranks",
        sequence_order=late_chunks_not_mirrored,
    ),
    mutant(
        "gather-skipped-by-last-rank",
        "collectives",
        "lets the last rank attend to its own keys and to zeros",
        gather=last_rank_alone,
    ),
    mutant(
        "reduction-skipped-by-last-rank",
        "collectives",
        "leaves the last rank's contribution out of dk and dv",
        reduce_sum=lambda parts, rank: parts[: max(len(parts) - 1, 1)].sum(axis=0),
    ),
    mutant(
        "reduction-for-next-rank",
        "collectives",
        "gives every rank the sums of the next one's rows",
        rank_order=parts_of_next_rank,
    ),
)
"""In the order of `mutants.MUTANTS`."""
