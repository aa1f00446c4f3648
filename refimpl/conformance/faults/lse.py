"""Mutants that return a wrong log-sum-exp, or merge wrongly by it.

Defines `MUTANTS`. The functions above it are the wrong pieces; signatures are those of `implementation`.
"""

from collections.abc import Sequence

import numpy as np

from refimpl.conformance.cases import Case
from refimpl.conformance.faults.mutant import Array, Bools, Mutant, mutant, returned_as, rows_of_output
from refimpl.conformance.implementation import softmax
from refimpl.lse import merge_partials


def finite_sentinel(s: Array, visible: Bools) -> tuple[Array, Array]:
    """Masked scores are -50000, and take part."""
    return softmax(np.where(visible, s, -50000.0), np.ones_like(visible))


def lse_without_maximum(s: Array, visible: Bools) -> tuple[Array, Array]:
    """The largest score is subtracted and never added to the lse; the backward meets the same."""
    p, lse = softmax(s, visible)
    largest = np.where(visible, s, -np.inf).max(axis=2, initial=-np.inf)
    return p, np.where(np.isfinite(largest), lse - largest, lse)


def base_2_in_backward(s: Array, visible: Bools) -> tuple[Array, Array]:
    """The lse is kept as a logarithm to the base 2, and the backward takes exp of scores less it."""
    p, lse = softmax(s, visible)
    return p, lse / np.log(2)


def lse_in_wrong_slot(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """Documents with tokens stored in slots that count them alone, and read by their numbers among all."""
    if name != "lse" or case.operation == "merge":
        return array
    layout = case.layout_of(name)
    documents = layout.document_ids[rows_of_output(name, case, rank)]
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


def merge_of_base_2(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Parts whose lse is a logarithm to the base 2 are merged as if it were natural; what is returned is converted."""
    out, lse = merge_partials(outs, [x / np.log(2) for x in lses])
    return out, lse * np.log(2)


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


MUTANTS: tuple[Mutant, ...] = (
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
        "natural-lse-converted",
        "lse",
        "multiplies a natural lse by ln 2, as if it were one to the base 2",
        "pytorch#181645",
        **returned_as("lse")(lambda array, case: array * np.log(2)),
    ),
    mutant(
        "base-2-lse-in-backward",
        "lse",
        "keeps lse as a logarithm to the base 2 and reads it as a natural one in the backward",
        softmax=base_2_in_backward,
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
        "merge-of-base-2-parts",
        "lse",
        "reads the lse of parts as natural where their attention gave one to the base 2",
        "vLLM#28840",
        merge=merge_of_base_2,
    ),
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
)
"""In the order of `mutants.MUTANTS`."""
