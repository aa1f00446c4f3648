"""Mutants that answer what should be refused, or the reverse.

Defines `MUTANTS`. The functions above it are the wrong pieces; signatures are those of `implementation`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from refimpl.attention import check_attention_inputs
from refimpl.conformance.faults.mutant import Mutant, Pieces, mutant
from refimpl.errors import SpecError
from refimpl.layout import IntArray, PackedLayout, offsets_of
from refimpl.mask import AttentionMask
from refimpl.metadata import RankMetadata, rank_metadata
from refimpl.partition import Policy, as_policy, partition_indices

Cut = tuple[PackedLayout, Any, int, int]
"""Layout, policy, cp_size and cp_rank."""
DCS, PC, _ = Policy


def _accepting(code: str, mend: Callable[..., Sequence[Any]]) -> Pieces:
    """A layout that should be refused with `code` is mended in silence: `mend(cu, padded, total)` gives another."""

    def make_layout(cu_seqlens: Any, cu_seqlens_padded: Any = None, total_tokens: Any = None) -> PackedLayout:
        padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
        try:
            return PackedLayout(cu_seqlens, padded, total_tokens)
        except SpecError as error:
            if error.code != code:
                raise
            return PackedLayout(*mend(cu_seqlens, padded, total_tokens))

    return {"make_layout": make_layout}


def _running_maximum(cu: Any, padded: Any, total: Any) -> Sequence[Any]:
    return *(np.maximum.accumulate(np.asarray(x)) for x in (cu, padded)), total


def _rebased(cu: Any, padded: Any, total: Any) -> Sequence[Any]:
    return *(np.maximum(np.asarray(x) - x[0], 0) for x in (cu, padded)), total


def _cut_to_rows(cu: Any, padded: Any, total: Any) -> Sequence[Any]:
    return offsets_of(np.minimum(np.diff(cu), np.diff(padded))), padded, total


def _truncated(cu: Any, padded: Any, total: Any) -> Sequence[Any]:
    return *(np.asarray(x).astype(np.int64) for x in (cu, padded)), total


def _instead(code: str, mend: Callable[..., Cut]) -> Pieces:
    """A cut that should be refused with `code` is made of other arguments: `mend(layout, policy, cp_size, cp_rank)`."""

    def indices(*arguments: Any) -> IntArray:
        try:
            return partition_indices(*arguments)
        except SpecError as error:
            if error.code != code:
                raise
            return partition_indices(*mend(*arguments))

    def metadata(layout: PackedLayout, policy: Any, cp_size: int, cp_rank: int, mask: AttentionMask) -> RankMetadata:
        try:
            return rank_metadata(layout, policy, cp_size, cp_rank, mask)
        except SpecError as error:
            if error.code != code:
                raise
            return rank_metadata(*mend(layout, policy, cp_size, cp_rank), mask)

    return {"indices": indices, "rank_metadata": metadata}


def _remainder_dropped(layout: PackedLayout, policy: Any, cp_size: int, cp_rank: int) -> Cut:
    """The layout without the rows that do not divide: of every document, or at the end of the buffer."""
    chunks = cp_size * (1 if as_policy(policy) == PC else 2)
    extents = np.append(layout.cu_seqlens_padded, layout.total_tokens)
    if as_policy(policy) == DCS:
        extents = offsets_of(np.diff(extents) // chunks * chunks)
    else:
        extents = np.minimum(extents, extents[-1] // chunks * chunks)
    real = offsets_of(np.minimum(layout.seqlens, np.diff(extents[:-1])))
    return PackedLayout(real, extents[:-1], int(extents[-1])), policy, cp_size, cp_rank


def _saturated(layout: PackedLayout, policy: Any, cp_size: int, cp_rank: int) -> Cut:
    most = np.iinfo(np.int32).max
    real, physical = (np.minimum(x, most) for x in (layout.cu_seqlens, layout.cu_seqlens_padded))
    return PackedLayout(real, physical, layout.total_tokens), policy, cp_size, cp_rank


def _unchecked(code: str) -> Pieces:
    """Tensors that should be refused with `code` are taken."""

    def check(*arguments: Any) -> float:
        try:
            return check_attention_inputs(*arguments)
        except SpecError as error:
            if error.code != code:
                raise
            return 1.0

    return {"check_tensors": check}


def _bounds_below_0_unlimited(causal: bool, window: tuple[int, int]) -> AttentionMask:
    return AttentionMask(causal, (max(window[0], -1), max(window[1], -1)))


def empty_documents_refused(*arguments: Any) -> PackedLayout:
    """Only documents of one token or more."""
    layout = PackedLayout(*arguments)
    if (layout.seqlens == 0).any():
        raise SpecError("lengths", "a document has no tokens")
    return layout


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "dropped-remainder",
        "refusal",
        "drops the rows that do not divide in place of refusing the layout",
        "TE#1930",
        **_instead("not_divisible", _remainder_dropped),
    ),
    mutant(
        "sentinels-as-repeats",
        "refusal",
        "takes an offset below the one before for a repeat of it",
        "TE-JAX fused_attn_thd",
        **_accepting("offsets_decreasing", _running_maximum),
    ),
    mutant(
        "rebased-offsets",
        "refusal",
        "subtracts a first offset that is not 0",
        **_accepting("offsets_start", _rebased),
    ),
    mutant(
        "truncated-offsets",
        "refusal",
        "truncates offsets that are no integers",
        **_accepting("offsets_type", _truncated),
    ),
    mutant(
        "overlong-documents-cut",
        "refusal",
        "cuts a document with more tokens than rows",
        **_accepting("real_exceeds_physical", _cut_to_rows),
    ),
    mutant(
        "enlarged-buffer",
        "refusal",
        "takes a buffer shorter than its documents for one that holds them",
        **_accepting("total_tokens", lambda cu, padded, total: (cu, padded, padded[-1])),
    ),
    mutant(
        "unknown-policy-as-zigzag",
        "refusal",
        "takes an unknown policy for the default one",
        **_instead("policy", lambda layout, policy, cp_size, cp_rank: (layout, DCS, cp_size, cp_rank)),
    ),
    mutant(
        "wrapped-rank",
        "refusal",
        "takes the rank modulo the number of ranks",
        **_instead("cp_rank", lambda layout, policy, cp_size, cp_rank: (layout, policy, cp_size, cp_rank % cp_size)),
    ),
    mutant(
        "negative-bounds-as-unlimited",
        "refusal",
        "takes any negative window bound for an unlimited one",
        make_mask=_bounds_below_0_unlimited,
    ),
    mutant(
        "saturated-offsets",
        "refusal",
        "clips offsets that int32 does not hold",
        **_instead("int32_overflow", _saturated),
    ),
    mutant(
        "indivisible-heads",
        "refusal",
        "takes query heads that are no multiple of the K/V heads",
        **_unchecked("heads"),
    ),
    mutant("unchecked-shapes", "refusal", "takes tensors of any shape", **_unchecked("shape")),
    mutant("integers-as-floats", "refusal", "takes tensors of integers", **_unchecked("dtype")),
    mutant(
        "refused-empty-documents",
        "refusal",
        "refuses documents of length zero",
        "Megatron context_parallel_layout.py at 0565caab",
        make_layout=empty_documents_refused,
    ),
)
"""In the order of `mutants.MUTANTS`."""
