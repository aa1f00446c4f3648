"""Mutants that go wrong by rows that hold no token.

Defines `MUTANTS`. The functions above it are the wrong pieces; signatures are those of `implementation`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from refimpl.conformance.cases import Case
from refimpl.conformance.faults.masks import also_of_whole_buffer
from refimpl.conformance.faults.mutant import Array, Bools, Mutant, Pieces, mutant, rows_of_output
from refimpl.conformance.implementation import step_visible
from refimpl.conformance.judge import sees_keys
from refimpl.layout import IntArray
from refimpl.mask import AttentionMask
from refimpl.metadata import StepMetadata

STALE = 1000.0
"""What memory held before, where nothing is written: any number will do."""


def padding_keys(step: StepMetadata, mask: AttentionMask, rows_q: int, rows_kv: int) -> Bools:
    """Padding of a document are keys of it."""
    seen = step_visible(step, mask, rows_q, rows_kv)
    starts = step.cu_seqlens_kv_padded
    for d in np.flatnonzero(step.seqlens_q):
        queries, keys = np.arange(step.seqlens_q[d]), np.arange(starts[d + 1] - starts[d])
        block = mask.visible(0, step.first_query_positions[d] + queries, 0, keys)
        seen[step.cu_seqlens_q_padded[d] + queries, starts[d] : starts[d + 1]] = block
    return seen


def in_padding(*names: str) -> Callable[[Callable[[str, Array, Case, IntArray], Any]], Pieces]:
    """Other values in padding rows of these outputs: `value(name, array, case, rows)`, rows counted in the buffer."""

    def decorated(value: Callable[[str, Array, Case, IntArray], Any]) -> Pieces:
        def finish(name: str, array: Array, case: Case, rank: int | None) -> Array:
            if name not in names or case.operation == "merge":
                return array
            rows = rows_of_output(name, case, rank)
            local = np.flatnonzero(case.layout_of(name).document_ids[rows] < 0)
            array = array.copy()
            array[(slice(None), local) if name == "lse" else local] = value(name, array, case, rows[local])
            return array

        return {"finish": finish}

    return decorated


def of_itself_alone(name: str, array: Array, case: Case, rows: IntArray) -> Any:
    """What a row that attends to itself alone has for results; a query of a step has no row of its own among keys."""
    if case.is_step:
        return -np.inf if name == "lse" else 0.0
    q, k, v = (np.asarray(case.tensors[x], np.float64)[rows] for x in ("q", "k", "v"))
    heads = np.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    if name == "out":
        return v[:, heads]
    if name == "lse":
        lse: Array = case.softmax_scale * (q * k[:, heads]).sum(axis=2).T
        return lse
    dout = np.asarray(case.tensors["dout"], np.float64)[rows]
    dv: Array = dout.reshape(len(rows), k.shape[1], q.shape[1] // k.shape[1], dout.shape[2]).sum(axis=2)
    return dv


def zero_times_input(name: str, array: Array, case: Case, rows: IntArray) -> Array:
    """Zeros, made by multiplication with 0 of a sum over the row's input."""
    x = np.asarray(case.tensors[{"out": "q", "dq": "q", "dk": "k", "dv": "v"}[name]], np.float64)[rows]
    with np.errstate(invalid="ignore"):
        product: Array = 0.0 * x.sum(axis=(1, 2))
    return product[:, None, None]


def nan_without_keys(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """NaN for out and lse of every row that sees no key, token or padding."""
    if name not in ("out", "lse") or case.operation == "merge":
        return array
    empty = ~sees_keys(case)[rows_of_output(name, case, rank)]
    return np.where(empty[None, :] if name == "lse" else empty[:, None, None], np.nan, array)


def masked_times_zero(name: str, array: Array, case: Case, rank: int | None) -> Array:
    """Padding of a document takes part in the sums of its tokens, with a weight of 0."""
    source = {"out": "v", "dq": "k", "dk": "q", "dv": "dout"}.get(name)
    if source is None or case.operation == "merge":
        return array
    x = np.asarray(case.tensors[source], np.float64)
    with np.errstate(invalid="ignore"):
        product = _of_width(0.0 * x, array.shape[1])
    layout, array = case.layout_of(source), array.copy()
    documents = case.layout_of(name).document_ids[rows_of_output(name, case, rank)]
    for d, (start, n) in enumerate(zip(layout.cu_seqlens_padded, layout.seqlens, strict=False)):
        array[documents == d] += product[start + n : layout.cu_seqlens_padded[d + 1]].sum(axis=0)
    return array


def _of_width(x: Array, heads: int) -> Array:
    """K/V heads repeated for their query heads, or query heads added up in their K/V head."""
    if x.shape[1] <= heads:
        return np.repeat(x, heads // x.shape[1], axis=1)
    summed: Array = x.reshape(x.shape[0], heads, -1, x.shape[2]).sum(axis=2)
    return summed


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "padding-as-keys",
        "padding",
        "shows a document's queries its padding, unless a causal mask hides it",
        **also_of_whole_buffer(padding_keys),
    ),
    mutant(
        "padding-attending-to-itself",
        "padding",
        "lets padding rows attend to themselves",
        "Automodel components/distributed/blockdiag_cp.py",
        **in_padding("out", "lse", "dv")(of_itself_alone),
    ),
    mutant(
        "unwritten-output-in-padding",
        "padding",
        "leaves padding rows of out and lse as it found them",
        "TE#3205",
        **in_padding("out", "lse")(lambda *_: STALE),
    ),
    mutant(
        "unwritten-gradients-in-padding",
        "backward",
        "leaves padding rows of the gradients as it found them",
        "TE#2829",
        **in_padding("dq", "dk", "dv")(lambda *_: STALE),
    ),
    mutant(
        "padding-times-zero",
        "padding",
        "multiplies padding by 0 in place of writing 0, which keeps NaN",
        **in_padding("out", "dq", "dk", "dv")(zero_times_input),
    ),
    mutant(
        "masked-rows-times-zero",
        "padding",
        "multiplies masked keys by weights of 0 in place of leaving them out, so that NaN in padding reaches tokens",
        "FA#1745",
        finish=masked_times_zero,
    ),
    mutant(
        "nan-for-rows-without-keys",
        "padding",
        "takes the softmax of rows that see no key, which is NaN",
        "pytorch#103963",
        finish=nan_without_keys,
    ),
)
"""In the order of `mutants.MUTANTS`."""
