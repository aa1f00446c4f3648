"""Mutants whose ranks gather or reduce wrongly.

Defines `MUTANTS`. The functions above it are the wrong pieces; signatures are those of `implementation`.
"""

import numpy as np

from refimpl.conformance.faults.mutant import Array, Mutant, mutant
from refimpl.conformance.implementation import once, rank_order
from refimpl.layout import PackedLayout
from refimpl.partition import Policy, rank_order_is_sequence_order, step_windows, window_indices


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


MUTANTS: tuple[Mutant, ...] = (
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
