"""Hypothesis strategies: layouts that a policy can cut, masks, head layouts."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.partition import Policy

POLICIES = [str(policy) for policy in Policy]


class Case(NamedTuple):
    """A layout that `policy` can cut over `cp_size` ranks."""

    layout: PackedLayout
    policy: str
    cp_size: int


class Heads(NamedTuple):
    """Head layout of one attention call."""

    heads_q: int
    heads_kv: int
    dim_qk: int
    dim_v: int


def layout_of(real, physical, tail=0):
    """A layout from real and physical lengths, plus `tail` rows past the last offset."""
    cu, padded = [0], [0]
    for tokens, size in zip(real, physical, strict=True):
        cu.append(cu[-1] + tokens)
        padded.append(padded[-1] + size)
    return PackedLayout(cu, padded, padded[-1] + tail)


def parts_of(layout):
    """(cu_seqlens, cu_seqlens_padded, total_tokens) as plain lists and an int: what the witness takes."""
    return layout.cu_seqlens.tolist(), layout.cu_seqlens_padded.tolist(), layout.total_tokens


def repeat_tail(layout, times):
    """The same layout with its last offset repeated: documents of length zero at the end."""
    cu, padded, total = parts_of(layout)
    return PackedLayout(cu + cu[-1:] * times, padded + padded[-1:] * times, total)


def some(*values):
    """One of these values. Hypothesis tries the first most often, so it is one that exercises something."""
    return st.sampled_from(values)


def lengths(max_length):
    """Document lengths: the longer half first, 0 last, so that an average document holds something."""
    half = max_length // 2
    return some(*range(half + 1, max_length + 1), *range(1, half + 1), 0)


@st.composite
def layouts(draw, policy=None, cp_size=1, max_documents=5, max_length=9):
    """Layouts, and if a policy is given, such as it can cut over `cp_size` ranks.

    Documents of length zero anywhere, padding between documents or none, rows past the last offset, repeated tails,
    documents over several ranks, ranks without a real token. What must be divisible is made so in one of three ways:
    real tokens, padding of a document, rows past the last offset.
    """
    count = min(draw(some(3, 2, 5, 1, 4, 0)), max_documents)
    real = [draw(lengths(max_length)) for _ in range(count)]
    gaps = [0] * count
    tail = 0
    if draw(st.booleans()):
        gaps = [draw(some(1, 0, 2, 3)) for _ in range(count)]
        tail = draw(some(1, 0, 4, 2))
    physical = [tokens + gap for tokens, gap in zip(real, gaps, strict=True)]

    def fill(d, missing, with_tokens):
        real[d] += missing if with_tokens else 0
        physical[d] += missing

    if policy == "dual_chunk_swap":
        with_tokens = draw(st.booleans())
        for d, size in enumerate(physical):
            fill(d, -size % (2 * cp_size), with_tokens and size > 0)
        tail += -tail % (2 * cp_size)
    elif policy is not None:
        missing = -(sum(physical) + tail) % (cp_size if policy == "packed_contiguous" else 2 * cp_size)
        where = draw(some("tokens", "document", "tail"))
        if real and where != "tail":
            fill(draw(st.integers(0, count - 1)), missing, where == "tokens")
        else:
            tail += missing
    repeats = draw(some(0, 1, 2))
    return layout_of(real + [0] * repeats, physical + [0] * repeats, tail)


@st.composite
def cases(draw, policy=None, **sizes):
    """A policy, a cp_size from 1 to 8, and a layout for them."""
    name = policy or draw(some(*POLICIES))
    cp_size = draw(some(2, 3, 4, 1, 8, 5, 6, 7))
    return Case(draw(layouts(name, cp_size, **sizes)), name, cp_size)


def masks():
    """Causal or not, with a window on either side, both or none; bounds from 0 to beyond any document."""
    bounds = some(1, -1, 2, 0, -1, 3, 5, 1000)
    return st.builds(AttentionMask, causal=some(False, True, False), window=st.tuples(bounds, bounds))


def head_layouts():
    """MHA, GQA and MQA, with value heads as wide as key heads, wider, or narrower."""
    counts = some((4, 2), (2, 2), (3, 1), (6, 2), (1, 1))
    return st.builds(lambda count, dim_qk, dim_v: Heads(*count, dim_qk, dim_v), counts, some(3, 2, 1, 4), some(2, 1, 4))


def tensors(rng, rows_q, rows_kv, heads):
    """q, k, v, dout of standard normal numbers, float64."""
    return (
        rng.standard_normal((rows_q, heads.heads_q, heads.dim_qk)),
        rng.standard_normal((rows_kv, heads.heads_kv, heads.dim_qk)),
        rng.standard_normal((rows_kv, heads.heads_kv, heads.dim_v)),
        rng.standard_normal((rows_q, heads.heads_q, heads.dim_v)),
    )


def poison(x, rows, rng, axis=0):
    """A copy of x with NaN, infinities and huge numbers in these rows."""
    x = np.moveaxis(x.copy(), axis, 0)
    x[rows] = rng.choice([np.nan, np.inf, -np.inf, 1e300], size=x[rows].shape)
    return np.moveaxis(x, 0, axis)
