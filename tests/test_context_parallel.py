"""The central theorem: the ranks' results, put back into buffer order, are those of the oracle on one device.

The oracle never sees the padding: it attends over the documents packed tightly. The ranks get the same tokens spread by
the layout, with NaN and infinities in every row that holds none.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from strategies import Case, Heads, cases, head_layouts, masks
from support import refused

from refimpl import tiled
from refimpl.attention import attention_backward, attention_forward
from refimpl.collectives import AgreedError, Collectives, run_ranks
from refimpl.context_parallel import (
    REFERENCE,
    Parts,
    RankResult,
    accumulation_dtype,
    context_parallel_backward,
    context_parallel_forward,
    run_context_parallel,
    to_rank_order,
    to_sequence_order,
)
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import RankMetadata, StepMetadata, rank_metadata
from refimpl.partition import Policy, padded_for, partition, partition_indices, unpartition
from refimpl.tolerance import Tolerance, largest_error, largest_finite, plain_attention

Array = np.ndarray
OUTPUTS = ("out", "lse", "dq", "dk", "dv")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CAUSAL = AttentionMask()
FULL = AttentionMask(causal=False)
MASKS = [
    CAUSAL,
    FULL,
    AttentionMask(window=(3, -1)),
    AttentionMask(window=(2, 5)),
    AttentionMask(causal=False, window=(0, 0)),
    AttentionMask(causal=False, window=(2, 1)),
    AttentionMask(causal=False, window=(-1, 2)),
    AttentionMask(causal=False, window=(3, -1)),
]
POISON = np.array([np.nan, np.inf, -np.inf, 1e300])

LAYOUTS = {
    "one document over all ranks": PackedLayout([0, 45], [0, 48]),
    "no padding": PackedLayout([0, 16, 32, 48]),
    "interior and tail padding": PackedLayout([0, 5, 12, 13], [0, 8, 20, 30], total_tokens=48),
    "zero-length documents": PackedLayout([0, 0, 0, 7, 7, 20, 20], [0, 0, 3, 11, 11, 24, 24]),
    "ranks without a token": PackedLayout([0, 3, 5], [0, 3, 40], total_tokens=64),
    "padding ahead of everything": PackedLayout([0, 0, 9], [0, 16, 25]),
    "no token at all": PackedLayout([0, 0, 0], [0, 4, 8], total_tokens=16),
    "no rows": PackedLayout([0, 0]),
    "no document": PackedLayout([0], total_tokens=16),
    "documents of one token": PackedLayout(list(range(20))),
    "longer than a tile": PackedLayout([0, 420, 450], [0, 430, 480]),
}


@dataclass(frozen=True, eq=False)
class Problem:
    """Inputs spread by a layout, padding poisoned, and what the oracle says of them: by name, in buffer order."""

    layout: PackedLayout
    mask: AttentionMask
    scale: float | None
    inputs: dict[str, Array]
    expected: dict[str, Array]
    real: Array = field(repr=False)


def real_rows(layout: PackedLayout) -> Array:
    """The rows that hold a token, from the offsets alone."""
    starts, lengths = layout.cu_seqlens_padded[:-1], np.diff(layout.cu_seqlens)
    rows = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return np.concatenate([np.zeros(0, np.int64), *rows])


def spread(tight: Array, layout: PackedLayout, fill: Any) -> Array:
    """Tokens [real, ...] to the rows of the layout that hold them; `fill` [values] in turn everywhere else."""
    values = np.asarray(fill, np.float64)
    whole = np.resize(values, (layout.total_tokens, *tight.shape[1:])).astype(tight.dtype)
    whole[real_rows(layout)] = tight
    return whole


def problem(
    layout: PackedLayout,
    mask: AttentionMask,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (4, 4),
    dtype: Any = np.float64,
    scale: float | None = None,
    seed: int = 0,
) -> Problem:
    """A problem with random tokens; `dims` are Dqk and Dv. The oracle gets the tokens as they are after rounding."""
    random = np.random.default_rng(seed)
    tight = PackedLayout(layout.cu_seqlens)
    shapes = {
        "q": (heads[0], dims[0]),
        "k": (heads[1], dims[0]),
        "v": (heads[1], dims[1]),
        "dout": (heads[0], dims[1]),
    }
    tokens = {
        name: random.standard_normal((tight.total_tokens, *shape)).astype(dtype) for name, shape in shapes.items()
    }
    q, k, v, dout = (tokens[name].astype(np.float64) for name in ("q", "k", "v", "dout"))
    out, lse = attention_forward(q, k, v, tight, mask, scale)
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, tight, mask, scale)
    results = {"out": out, "lse": lse.T, "dq": dq, "dk": dk, "dv": dv}
    with np.errstate(over="ignore"):
        inputs = {name: spread(x, layout, POISON) for name, x in tokens.items()}
    expected = {name: spread(x, layout, -np.inf if name == "lse" else 0.0) for name, x in results.items()}
    return Problem(layout, mask, scale, inputs, expected, real_rows(layout))


def run(given: Problem, policy: Policy | str, cp_size: int) -> list[RankResult]:
    x = given.inputs
    return run_context_parallel(
        x["q"], x["k"], x["v"], x["dout"], given.layout, policy, cp_size, given.mask, given.scale
    )


def whole(results: list[RankResult], layout: PackedLayout, policy: Policy | str) -> dict[str, Array]:
    """The ranks' results in buffer order, by the rows that each rank says it holds; lse as [T, Hq]."""
    rows = np.concatenate([result.indices for result in results])
    np.testing.assert_array_equal(np.sort(rows), np.arange(layout.total_tokens))
    together = {}
    for name in OUTPUTS:
        parts = [getattr(r, name).T if name == "lse" else getattr(r, name) for r in results]
        together[name] = np.empty((layout.total_tokens, *parts[0].shape[1:]), parts[0].dtype)
        together[name][rows] = np.concatenate(parts)
    return together


def check(got: Mapping[str, Array], given: Problem, tolerance: float = 1e-12) -> None:
    """Real rows within `tolerance` of the oracle, relative to max(1, |expected|); padding exactly 0 or -inf."""
    padding = np.setdiff1d(np.arange(given.layout.total_tokens), given.real)
    for name in OUTPUTS:
        actual, expected = got[name].astype(np.float64), given.expected[name]
        assert actual.shape == expected.shape
        np.testing.assert_array_equal(actual[padding], expected[padding], err_msg=f"{name} of padding")
        expected, actual = expected[given.real], actual[given.real]
        assert np.isfinite(expected).all()
        error = np.abs(actual - expected) / np.maximum(1.0, np.abs(expected))
        assert not (error > tolerance).any(), f"{name}: {error.max()}"
        assert not np.isnan(error).any(), name


def same_bits(a: Mapping[str, Array], b: Mapping[str, Array]) -> None:
    for name in OUTPUTS:
        assert a[name].dtype == b[name].dtype
        assert a[name].shape == b[name].shape
        assert a[name].tobytes() == b[name].tobytes(), name


# The theorem


@pytest.mark.clause("C5", "C1", "C2", "P1", "A5", "B2", "B3", "L4")
@settings(max_examples=150)
@given(
    case=cases(max_length=24),
    mask=masks(),
    heads=head_layouts(),
    scale=st.sampled_from([None, None, 1.0, 0.3, -0.5]),
    seed=st.integers(0, 2**32 - 1),
)
@example(Case(PackedLayout([0, 23], total_tokens=28), "packed_contiguous", 7), FULL, Heads(3, 1, 3, 5), None, 1)
@example(Case(PackedLayout([0, 1, 1], [0, 16, 32]), "dual_chunk_swap", 8), CAUSAL, Heads(4, 2, 4, 3), None, 2)
def test_ranks_together_equal_the_oracle(
    case: Case, mask: AttentionMask, heads: Heads, scale: float | None, seed: int
) -> None:
    layout, policy, cp_size = case
    this = problem(layout, mask, (heads.heads_q, heads.heads_kv), (heads.dim_qk, heads.dim_v), scale=scale, seed=seed)
    results = run(this, policy, cp_size)
    tokens = [int(np.isin(result.indices, this.real).sum()) for result in results]
    event("some ranks hold no token" if 0 in tokens and any(tokens) else "all ranks are alike")
    check(whole(results, layout, policy), this)


@pytest.mark.clause("C5", "A5", "B2")
@pytest.mark.parametrize("cp_size", [1, 3, 8])
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kind_of_layout(name: str, policy: Policy, cp_size: int) -> None:
    layout = padded_for(LAYOUTS[name], policy, cp_size)
    for mask in (CAUSAL, AttentionMask(causal=False, window=(2, 1))):
        this = problem(layout, mask, heads=(2, 1), dims=(3, 2))
        check(whole(run(this, policy, cp_size), layout, policy), this)


@pytest.mark.clause("C5", "K1", "K2", "K3", "R5")
@pytest.mark.parametrize("cp_size", [2, 5])
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_kind_of_mask(mask: AttentionMask, policy: Policy, cp_size: int) -> None:
    layout = padded_for(PackedLayout([0, 27, 28, 40], [0, 30, 33, 45], total_tokens=50), policy, cp_size)
    this = problem(layout, mask, heads=(4, 2), dims=(5, 3))
    check(whole(run(this, policy, cp_size), layout, policy), this)


@pytest.mark.clause("C5", "A2", "B3")
@pytest.mark.parametrize("dims", [(4, 4), (3, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 2), (8, 2), (6, 3), (5, 1)], ids=str)
@pytest.mark.parametrize("policy", list(Policy))
def test_every_kind_of_heads(policy: Policy, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    layout = padded_for(PackedLayout([0, 17, 30], [0, 20, 36]), policy, 3)
    this = problem(layout, CAUSAL, heads, dims)
    check(whole(run(this, policy, 3), layout, policy), this)


@pytest.mark.clause("C5")
def test_ranks_that_return_zeros_are_found() -> None:
    this = problem(padded_for(LAYOUTS["no padding"], "dual_chunk_swap", 2), CAUSAL)
    results = whole(run(this, "dual_chunk_swap", 2), this.layout, "dual_chunk_swap")
    for name in OUTPUTS:
        with pytest.raises(AssertionError):
            check({**results, name: np.zeros_like(results[name])}, this)


@pytest.mark.clause("C5", "P1")
@pytest.mark.parametrize("policy", list(Policy))
def test_each_rank_says_which_rows_it_holds(policy: Policy) -> None:
    this = problem(padded_for(LAYOUTS["interior and tail padding"], policy, 4), CAUSAL)
    layout = this.layout
    results = run(this, policy, 4)
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result.indices, partition_indices(layout, policy, 4, rank))
        rows = layout.total_tokens // 4
        assert result.out.shape == result.dq.shape == (rows, 2, 4)
        assert result.lse.shape == (2, rows)
        assert result.dk.shape == result.dv.shape == (rows, 1, 4)
    check({name: unpartition_named(results, name, layout, policy) for name in OUTPUTS}, this)


def unpartition_named(results: list[RankResult], name: str, layout: PackedLayout, policy: Policy) -> Array:
    x = unpartition([getattr(r, name) for r in results], layout, policy, axis=1 if name == "lse" else 0)
    return x.T if name == "lse" else x


@pytest.mark.clause("L5", "C5")
@settings(max_examples=40)
@given(
    case=cases(max_length=20),
    mask=masks(),
    repeats=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    dtype=st.sampled_from([np.float64, np.float32]),
)
def test_repeated_offsets_change_no_bit(case: Case, mask: AttentionMask, repeats: list[int], dtype: Any) -> None:
    """A static tail of repeats, and repeats anywhere else."""
    layout, policy, cp_size = case
    plain = problem(layout, mask, (2, 1), (3, 2), dtype)
    expected = whole(run(plain, policy, cp_size), layout, policy)
    n = layout.num_documents
    tail = np.full(len(repeats), n)
    for at in (tail, np.sort(np.minimum(repeats, n))):
        real, physical = (np.insert(x, at, x[at]) for x in (layout.cu_seqlens, layout.cu_seqlens_padded))
        repeated = replace(plain, layout=PackedLayout(real, physical, layout.total_tokens))
        same_bits(whole(run(repeated, policy, cp_size), repeated.layout, policy), expected)


@pytest.mark.clause("C5", "C2")
@pytest.mark.parametrize("policy", list(Policy))
def test_two_runs_give_the_same_bits(policy: Policy) -> None:
    this = problem(padded_for(LAYOUTS["longer than a tile"], policy, 4), FULL, (4, 2), (8, 8), np.float32)
    first, second = (whole(run(this, policy, 4), this.layout, policy) for _ in range(2))
    same_bits(first, second)


@pytest.mark.clause("C5")
@pytest.mark.parametrize("policy", list(Policy))
def test_without_dout_only_the_forward_runs(policy: Policy) -> None:
    this = problem(padded_for(LAYOUTS["no padding"], policy, 2), CAUSAL)
    x = this.inputs
    forward_only = run_context_parallel(x["q"], x["k"], x["v"], None, this.layout, policy, 2)
    for only, both in zip(forward_only, run(this, policy, 2), strict=True):
        assert only.dq is only.dk is only.dv is None
        assert only.out.tobytes() == both.out.tobytes()
        assert only.lse.tobytes() == both.lse.tobytes()


# Dtypes


@pytest.mark.clause("N2", "C5")
@pytest.mark.parametrize("cp_size", [1, 4])
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=["float32", "float16", "bfloat16"])
def test_narrow_dtypes(dtype: Any, policy: Policy, cp_size: int) -> None:
    """Every output against the float64 oracle on the same inputs.

    All narrow dtypes are computed in float32 and rounded once, at the end. So out, a mean of values, and dv, a sum of
    dout weighted by probabilities, are off by half an epsilon of the dtype, and by what float32 loses of the amounts
    that they add up: some ten roundings in the scores, which are of the order of 10, and one for each of 100 terms. dq
    and dk also hold the rounding of the saved out, through delta, and are judged like any implementation [N2].
    """
    dtype = np.dtype(dtype)
    layout = padded_for(PackedLayout([0, 61, 100], [0, 64, 110]), policy, cp_size)
    tight = PackedLayout(layout.cu_seqlens)
    this = problem(layout, CAUSAL, (4, 2), (16, 8), dtype)
    results = run(this, policy, cp_size)
    for result in results:
        assert result.out.dtype == result.dq.dtype == result.dk.dtype == result.dv.dtype == dtype
        assert result.lse.dtype == np.float32
    got = whole(results, layout, policy)
    padding = np.setdiff1d(np.arange(layout.total_tokens), this.real)
    for name in OUTPUTS:
        np.testing.assert_array_equal(got[name][padding].astype(np.float64), this.expected[name][padding])

    tokens = [this.inputs[name][this.real] for name in ("q", "k", "v", "dout")]
    q, k, v, dout = (x.astype(np.float64) for x in tokens)
    amount_of_out, lse = attention_forward(q, k, np.abs(v), tight, CAUSAL)
    _, _, amount_of_dv = attention_backward(np.abs(dout), q, k, v, np.zeros_like(dout), lse, tight, CAUSAL)
    for name, amount in (("out", amount_of_out), ("dv", amount_of_dv), ("lse", np.full(lse.T.shape, 10.0))):
        expected = this.expected[name][this.real]
        half_epsilon = float(np.finfo(np.float32).eps if name == "lse" else ml_dtypes.finfo(dtype).eps) / 2
        error = np.abs(got[name][this.real].astype(np.float64) - expected)
        assert (error <= half_epsilon * np.abs(expected) + 200 * 2.0**-24 * amount).all(), name

    plain = plain_attention(*tokens, tight, CAUSAL, 0.25)
    for name in OUTPUTS:
        expected = this.expected[name][this.real]
        yardstick = largest_error(plain[name].T if name == "lse" else plain[name], expected)
        bound = Tolerance.of(dtype, yardstick, largest_finite(expected)).bound
        assert largest_error(got[name][this.real], expected) <= bound, name


@pytest.mark.clause("N1")
def test_what_sums_are_taken_in() -> None:
    assert accumulation_dtype(np.float64) == np.float64
    for dtype in (np.float32, np.float16, BFLOAT16):
        assert accumulation_dtype(dtype) == np.float32


def run_ranks_of(
    this: Problem,
    policy: Policy | str,
    cp_size: int,
    *,
    parts: Parts = REFERENCE,
    group_of: Callable[[Collectives], Collectives] = lambda group: group,
    shape_of: Callable[[Array], Array] = lambda x: x,
    between: Callable[[Collectives], None] = lambda group: None,
) -> list[RankResult]:
    """`run_context_parallel` by hand: with other parts or collectives, other views of shards, or a break in between."""
    shards = {name: partition(x, this.layout, policy, cp_size) for name, x in this.inputs.items()}

    def rank(group: Collectives) -> RankResult:
        q, k, v, dout = (shape_of(shards[name][group.rank]) for name in ("q", "k", "v", "dout"))
        used = group_of(group)
        out, lse, saved = context_parallel_forward(q, k, v, this.layout, policy, used, this.mask, this.scale, parts)
        between(group)
        return RankResult(saved.metadata.indices, out, lse, *context_parallel_backward(dout, saved, used, parts))

    return run_ranks(cp_size, rank)


@dataclass
class Wrapped:
    """A group that does what the one inside does, and keeps a record of its calls."""

    group: Collectives
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank, self.size = self.group.rank, self.group.size

    def all_gather(self, x: Array) -> Array:
        self.calls.append("all_gather")
        return self.group.all_gather(x)

    def reduce_scatter_sum(self, x: Array) -> Array:
        self.calls.append("reduce_scatter_sum")
        return self.group.reduce_scatter_sum(x)

    def all_agree(self, facts: Mapping[str, str], error: SpecError | None = None) -> None:
        self.calls.append("all_agree")
        self.group.all_agree(facts, error)


class SumsInBfloat16(Wrapped):
    """A deliberate fault: each addition over ranks is rounded to bfloat16."""

    def reduce_scatter_sum(self, x: Array) -> Array:
        parts = self.group.all_gather(x)[:, self.rank]
        total = parts[0].astype(BFLOAT16)
        for part in parts[1:]:
            total = (total + part.astype(BFLOAT16)).astype(BFLOAT16)
        return total.astype(np.float32)


def absorbing_problem() -> tuple[Problem, float]:
    """One document of 128 rows on 8 ranks: what its sixteenths add to dk and dv of key 0, one after the other.

    The first adds 135.625, each other one 128.375. Near 256 bfloat16 holds even numbers only, near 128 integers. So
    a sum rounded after a rank's two sixteenths, or for each rank, or after each rank's turn, is 264 + 7 * 256 = 2056 at
    most, which is 2048 in bfloat16; the true sum 264 + 7 * 256.75 = 2061.25 is 2064.
    """
    rows = 128
    first = [17.0] * 7 + [16.625]
    other = [16.125] * 3 + [16.0] * 5
    weight = np.array(first + other * 15)
    assert sum(first) == 135.625
    assert sum(other) == 128.375
    # All scores are 0, so p = 1 / rows, and dv_0 = sum dout / rows. With v = (1, 0, 0, ...) and dout = 1,
    # dk_0 = scale sum q (1 - 1 / rows) / rows.
    q, k, v, dout = (np.zeros((rows, 1, 1), BFLOAT16) for _ in range(4))
    q[:, 0, 0] = weight * rows
    v[0] = 1.0
    dout[:] = 1.0
    inputs = {"q": q, "k": k, "v": v, "dout": dout}
    return Problem(PackedLayout([0, rows]), FULL, rows / (rows - 1), inputs, {}, np.arange(rows)), float(weight.sum())


@pytest.mark.clause("N1", "B3")
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("name", ["dk", "dv"])
def test_small_contributions_to_dk_and_dv_are_not_lost_in_bfloat16(name: str, policy: Policy) -> None:
    this, total = absorbing_problem()
    if name == "dv":
        this.inputs["dout"][:] = this.inputs["q"]
    assert total == 2061.25
    assert np.float64(total).astype(BFLOAT16) == 2064

    def first_gradient(group_of: Callable[[Collectives], Collectives]) -> Any:
        results = run_ranks_of(this, policy, 8, group_of=group_of)
        assert getattr(results[0], name).dtype == BFLOAT16
        return whole(results, this.layout, policy)[name][0, 0, 0]

    assert first_gradient(lambda group: group) == 2064
    assert first_gradient(SumsInBfloat16) == 2048, "the case cannot tell a narrow sum from a wide one"


@pytest.mark.clause("N1")
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("policy", list(Policy))
def test_the_reduction_is_handed_wide_sums(policy: Policy, dtype: Any) -> None:
    handed = []

    class Spy(Wrapped):
        def reduce_scatter_sum(self, x: Array) -> Array:
            handed.append(x.dtype)
            return self.group.reduce_scatter_sum(x)

    this = problem(padded_for(LAYOUTS["no padding"], policy, 2), CAUSAL, dtype=dtype)
    run_ranks_of(this, policy, 2, group_of=Spy)
    assert handed == [accumulation_dtype(dtype)] * 4


# Views


def fortran(x: Array) -> Array:
    return np.asfortranarray(x)


def strided(x: Array) -> Array:
    """The same values as every second element of arrays twice as large along each axis."""
    doubled = np.full([2 * n for n in x.shape], np.nan, x.dtype)
    view = doubled[tuple(slice(None, None, 2) for _ in x.shape)]
    view[...] = x
    return view


def backwards(x: Array) -> Array:
    return np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]


def heads_first(x: Array) -> Array:
    return np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2)


@pytest.mark.clause("A8", "N3")
@pytest.mark.parametrize("shape_of", [fortran, strided, backwards, heads_first])
@pytest.mark.parametrize("policy", list(Policy))
def test_strides_change_no_bit(policy: Policy, shape_of: Callable[[Array], Array]) -> None:
    this = problem(padded_for(LAYOUTS["interior and tail padding"], policy, 2), CAUSAL, (4, 2), (3, 5))
    plain = whole(run(this, policy, 2), this.layout, policy)
    same_bits(whole(run_ranks_of(this, policy, 2, shape_of=shape_of), this.layout, policy), plain)


@pytest.mark.clause("B1", "N3")
@pytest.mark.parametrize("policy", list(Policy))
def test_a_dout_of_stride_0_is_like_a_full_one(policy: Policy) -> None:
    """What the gradient of a sum looks like in most frameworks: one number, expanded."""
    this = problem(padded_for(LAYOUTS["longer than a tile"], policy, 2), CAUSAL, (4, 2), (3, 5))
    this.inputs["dout"] = np.full_like(this.inputs["dout"], 0.7)
    expanded = replace(this, inputs=this.inputs | {"dout": np.broadcast_to(np.float64(0.7), this.inputs["dout"].shape)})
    plain = whole(run(this, policy, 2), this.layout, policy)
    same_bits(whole(run(expanded, policy, 2), this.layout, policy), plain)

    def expand(x: Array) -> Array:
        return np.broadcast_to(x.ravel()[0], x.shape) if x.shape[1:] == (4, 5) else x

    same_bits(whole(run_ranks_of(this, policy, 2, shape_of=expand), this.layout, policy), plain)


@pytest.mark.clause("C1", "C2", "P7")
@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("policy", list(Policy))
def test_the_two_orders_are_inverse(policy: Policy, cp_size: int) -> None:
    layout = padded_for(LAYOUTS["interior and tail padding"], policy, cp_size)
    x = np.random.default_rng(0).standard_normal((layout.total_tokens, 2, 3))
    gathered = np.stack([x[partition_indices(layout, policy, cp_size, rank)] for rank in range(cp_size)])
    np.testing.assert_array_equal(to_sequence_order(gathered, layout, policy), x)
    np.testing.assert_array_equal(to_rank_order(x, layout, policy, cp_size), gathered)


# What the backward uses, and what a rank reads


@pytest.mark.clause("B4", "P11")
@pytest.mark.parametrize("policy", list(Policy))
def test_the_backward_uses_what_the_forward_used(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    this = problem(padded_for(LAYOUTS["interior and tail padding"], policy, 2), CAUSAL)
    expected = whole(run(this, policy, 2), this.layout, policy)
    made: list[tuple[Any, ...]] = []
    steps: dict[str, list[StepMetadata]] = {"forward": [], "backward": []}

    def metadata(*args: Any) -> RankMetadata:
        made.append(args)
        return rank_metadata(*args)

    def forward(q: Array, k: Array, v: Array, step: StepMetadata, *rest: Any) -> tuple[Array, Array]:
        steps["forward"].append(step)
        return tiled.varlen_attention_forward(q, k, v, step, *rest)

    def backward(*args: Any) -> tuple[Array, Array, Array]:
        steps["backward"].append(args[6])
        return tiled.varlen_attention_backward(*args)

    def change_everything(group: Collectives) -> None:
        group.all_agree({})
        for variable in ("NVTE_EXPERIMENTAL_CP_AG_THD_PACKED_CONTIGUOUS", "THDCP_POLICY", "OMP_NUM_THREADS"):
            monkeypatch.setitem(os.environ, variable, "1")
        group.all_agree({})

    parts = Parts(metadata, forward, backward)
    results = run_ranks_of(this, policy, 2, parts=parts, between=change_everything)
    same_bits(whole(results, this.layout, policy), expected)
    assert len(made) == 2, "metadata is made once a rank, in the forward"
    assert {id(step) for step in steps["forward"]} == {id(step) for step in steps["backward"]}
    assert len(steps["forward"]) == len(steps["backward"]) == 2 * (1 if policy == Policy.PACKED_CONTIGUOUS else 2)


@pytest.mark.clause("B4")
def test_the_environment_chooses_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    this = problem(padded_for(LAYOUTS["no padding"], "dual_chunk_swap", 2), CAUSAL)
    expected = whole(run(this, "dual_chunk_swap", 2), this.layout, "dual_chunk_swap")
    monkeypatch.setenv("NVTE_EXPERIMENTAL_CP_AG_THD_PACKED_CONTIGUOUS", "1")
    same_bits(whole(run(this, "dual_chunk_swap", 2), this.layout, "dual_chunk_swap"), expected)


@pytest.mark.clause("R8", "A5", "C5")
@settings(max_examples=60)
@given(case=cases(max_length=24), mask=masks())
@example(Case(PackedLayout([0, 40]), "packed_contiguous", 4), AttentionMask(window=(3, 0)))
@example(Case(PackedLayout([0, 1500]), "packed_contiguous", 2), AttentionMask(causal=False, window=(100, 30)))
@example(Case(PackedLayout([0, 1500, 1600]), "dual_chunk_swap", 2), AttentionMask(window=(700, -1)))
def test_a_rank_reads_only_the_rows_it_says_it_needs(case: Case, mask: AttentionMask) -> None:
    """NaN in every gathered row outside `kv_ranges` reaches no result, and the gradients there are zero."""
    layout, policy, cp_size = case
    this = problem(layout, mask, (2, 1), (3, 2))
    expected = whole(run(this, policy, cp_size), layout, policy)

    def on_needed_rows_only(group: Collectives) -> Parts:
        needed = np.zeros(layout.total_tokens, bool)
        for first, last in rank_metadata(layout, policy, cp_size, group.rank, mask).kv_ranges:
            needed[first:last] = True

        def poisoned(x: Array) -> Array:
            return np.where(needed[:, None, None], x, np.nan)

        def forward(q: Array, k: Array, v: Array, *rest: Any) -> tuple[Array, Array]:
            return tiled.varlen_attention_forward(q, poisoned(k), poisoned(v), *rest)

        def backward(dout: Array, q: Array, k: Array, v: Array, *rest: Any) -> tuple[Array, Array, Array]:
            dq, dk, dv = tiled.varlen_attention_backward(dout, q, poisoned(k), poisoned(v), *rest)
            assert not dk[~needed].any()
            assert not dv[~needed].any()
            return dq, dk, dv

        return Parts(rank_metadata, forward, backward)

    shards = {name: partition(x, layout, policy, cp_size) for name, x in this.inputs.items()}

    def rank(group: Collectives) -> RankResult:
        q, k, v, dout = (shards[name][group.rank] for name in ("q", "k", "v", "dout"))
        parts = on_needed_rows_only(group)
        out, lse, saved = context_parallel_forward(q, k, v, layout, policy, group, mask, parts=parts)
        return RankResult(saved.metadata.indices, out, lse, *context_parallel_backward(dout, saved, group, parts))

    check(whole(run_ranks(cp_size, rank), layout, policy), this)
    same_bits(whole(run_ranks(cp_size, rank), layout, policy), expected)


# Refusals


def tensors(rows: int = 16, heads: tuple[int, int] = (2, 1), dtype: Any = np.float64) -> dict[str, Array]:
    return {
        "q": np.ones((rows, heads[0], 4), dtype),
        "k": np.ones((rows, heads[1], 4), dtype),
        "v": np.ones((rows, heads[1], 3), dtype),
        "dout": np.ones((rows, heads[0], 3), dtype),
    }


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("dtype", "k is float32 but q is float64", {"k": np.ones((16, 1, 4), np.float32)}),
    ("dtype", "v is float16 but q is float64", {"v": np.ones((16, 1, 3), np.float16)}),
    ("dtype", "dout is float32 but q is float64", {"dout": np.ones((16, 2, 3), np.float32)}),
    ("dtype", "expected a float dtype", {"q": np.ones((16, 2, 4), np.int64)}),
    ("dtype", "expected float16, bfloat16, float32 or float64", tensors(dtype=np.longdouble)),
    ("shape", "q has 15 rows: the layout has 16", {"q": np.ones((15, 2, 4))}),
    ("shape", "k has 17 rows: the layout has 16", {"k": np.ones((17, 1, 4))}),
    ("shape", "expected", {"q": np.ones((16, 8))}),
    ("shape", "head_dim", {"k": np.ones((16, 1, 5))}),
    ("shape", "rows and heads differ", {"v": np.ones((16, 2, 3))}),
    ("shape", "dout", {"dout": np.ones((16, 2, 4))}),
    ("shape", "dout", {"dout": np.ones((15, 2, 3))}),
    ("heads", "3 query heads are no multiple of 2", tensors(heads=(3, 2))),
    ("not_divisible", "add 1 rows at the end", {"cp_size": 17, "policy": "packed_contiguous"}),
    ("not_divisible", "document 0 has 16 rows: add 2 there", {"cp_size": 3, "policy": "dual_chunk_swap"}),
    ("not_divisible", "total_tokens=18", {"cp_size": 3, "policy": "packed_dual_chunk_swap"}),
    ("cp_size", "expected 1 or more", {"cp_size": 0}),
    ("cp_size", "expected 1 or more", {"cp_size": -2}),
    ("cp_size", "expected an integer", {"cp_size": 2.0}),
    ("cp_size", "expected an integer", {"cp_size": True}),
    ("policy", "packed_contiguous", {"policy": "contiguous"}),
    ("softmax_scale", "finite", {"softmax_scale": float("nan")}),
    ("softmax_scale", "expected a number", {"softmax_scale": "big"}),
]


@pytest.mark.clause("A8", "P6", "A1", "C6")
@pytest.mark.parametrize(("code", "words", "change"), REFUSED, ids=[f"{c}-{i}" for i, (c, *_) in enumerate(REFUSED)])
def test_bad_requests_are_refused(code: str, words: str, change: dict[str, Any]) -> None:
    request = tensors() | {"layout": PackedLayout([0, 16]), "policy": "packed_contiguous", "cp_size": 2} | change
    with refused(code, words):
        run_context_parallel(**request)


Change = dict[str, Any]
DIFFERENCES: list[tuple[str, Change]] = [
    ("layout", {"layout": PackedLayout([0, 9, 16])}),
    ("layout", {"layout": PackedLayout([0, 8, 15], [0, 8, 16])}),
    ("layout", {"layout": PackedLayout([0, 8, 15], total_tokens=16)}),
    ("policy", {"policy": "packed_dual_chunk_swap"}),
    ("mask", {"mask": FULL}),
    ("mask", {"mask": AttentionMask(window=(4, -1))}),
    ("softmax_scale", {"softmax_scale": 0.25}),
    ("q", {"dtype": np.float32}),
    ("q", {"heads": (4, 1)}),
    ("k", {"heads": (2, 2)}),
    ("v", {"dim_v": 5}),
]


def attempt(group: Collectives, change: Change, backward: Change | None = None) -> Wrapped:
    """One rank's forward on 16 / 4 rows, with something changed; then a backward if asked for."""
    settings_ = {
        "layout": PackedLayout([0, 8, 16]),
        "policy": "packed_contiguous",
        "mask": CAUSAL,
        "softmax_scale": None,
        "heads": (2, 1),
        "dtype": np.float64,
        "dim_v": 3,
    } | change
    x = tensors(change.get("rows", 4), settings_["heads"], settings_["dtype"])
    x["v"] = np.ones((len(x["v"]), settings_["heads"][1], settings_["dim_v"]), settings_["dtype"])
    recorded = Wrapped(group)
    arguments = (settings_["layout"], settings_["policy"], recorded, settings_["mask"], settings_["softmax_scale"])
    try:
        _, _, saved = context_parallel_forward(x["q"], x["k"], x["v"], *arguments)
        if backward is not None:
            recorded.calls.clear()
            context_parallel_backward(backward.get("dout", x["dout"]), saved, recorded)
    except AgreedError as error:
        recorded.calls.append(f"{error.code}: {error.message}")
    np.testing.assert_array_equal(group.all_gather(np.array(group.rank)), np.arange(group.size))
    return recorded


def outcomes(changes: Mapping[int, Change], backward: Mapping[int, Change] | None = None) -> list[list[str]]:
    """Four ranks, some with a change: what each called and, last, what it raised."""

    def rank(group: Collectives) -> list[str]:
        late = None if backward is None else backward.get(group.rank, {})
        return attempt(group, changes.get(group.rank, {}), late).calls

    return run_ranks(4, rank)


@pytest.mark.clause("C3")
def test_ranks_with_the_same_request_go_through() -> None:
    assert outcomes({}, {}) == [["all_agree", *["all_gather"] * 2, *["reduce_scatter_sum"] * 2]] * 4


@pytest.mark.clause("C3")
@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(("name", "change"), DIFFERENCES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(DIFFERENCES)])
def test_a_difference_is_refused_on_every_rank_before_any_tensor_moves(name: str, change: Change, odd: int) -> None:
    calls = outcomes({odd: change})
    assert calls == [calls[0]] * 4
    agree, raised = calls[0]
    assert agree == "all_agree"
    assert raised.startswith(f"ranks_disagree: ranks disagree on {name}: rank 0 has")


@pytest.mark.clause("C3", "C6", "P6")
@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("shape", {"rows": 5}),
        ("heads", {"heads": (3, 2)}),
        ("dtype", {"dtype": np.int32}),
        ("softmax_scale", {"softmax_scale": float("inf")}),
        ("policy", {"policy": "zigzag"}),
        ("not_divisible", {"policy": "dual_chunk_swap", "layout": PackedLayout([0, 7, 16])}),
    ],
)
def test_one_ranks_own_refusal_reaches_all(code: str, change: Change, odd: int) -> None:
    calls = outcomes({odd: change})
    assert calls == [calls[0]] * 4
    agree, raised = calls[0]
    assert agree == "all_agree"
    assert raised.startswith(f"{code}: rank {odd}: ")


@pytest.mark.clause("P6", "C3")
def test_a_layout_that_does_not_divide_is_refused_on_every_rank() -> None:
    calls = outcomes(dict.fromkeys(range(4), {"policy": "dual_chunk_swap"} | {"layout": PackedLayout([0, 16, 20])}))
    assert calls == [calls[0]] * 4
    agree, raised = calls[0]
    assert agree == "all_agree"
    assert raised.startswith("not_divisible: dual_chunk_swap at cp_size 4 needs")
    assert "add 4 there" in raised


@pytest.mark.clause("C3", "B4")
@pytest.mark.parametrize(
    ("code", "dout"), [("shape", np.ones((4, 2, 4))), ("dtype", np.ones((4, 2, 3), np.float32))], ids=str
)
def test_a_wrong_dout_on_one_rank_is_refused_on_all(code: str, dout: Array) -> None:
    calls = outcomes({}, {1: {"dout": dout}})
    assert calls == [calls[0]] * 4
    agree, raised = calls[0]
    assert agree == "all_agree"
    assert raised.startswith(f"{code}: rank 1: dout")


@pytest.mark.clause("C3")
def test_a_forward_does_not_meet_a_backward() -> None:
    def rank(group: Collectives) -> str:
        x = tensors(8)
        layout = PackedLayout([0, 16])
        _, _, saved = context_parallel_forward(x["q"], x["k"], x["v"], layout, "packed_contiguous", group)
        call = context_parallel_backward, (x["dout"], saved, group)
        if group.rank == 0:
            call = context_parallel_forward, (x["q"], x["k"], x["v"], layout, "packed_contiguous", group)
        with pytest.raises(AgreedError) as raised:
            call[0](*call[1])
        return raised.value.message

    first, second = run_ranks(2, rank)
    assert first == second
    assert first.startswith("ranks disagree on operation: rank 0 has forward, rank 1 has backward")


@pytest.mark.clause("C3", "B4")
@pytest.mark.parametrize("name", ["softmax_scale", "k"])
def test_backwards_of_different_forwards_do_not_meet(name: str) -> None:
    """All ranks agreed on both forwards; rank 1 goes back through the other one, with a dout of the same shape."""
    change = {"softmax_scale": (0.25, (2, 1)), "k": (None, (2, 2))}

    def rank(group: Collectives) -> tuple[str, list[str]]:
        saved = []
        for scale, heads in ((None, (2, 1)), change[name]):
            x = tensors(8, heads)
            request = (x["q"], x["k"], x["v"], PackedLayout([0, 16]), "packed_contiguous", group, CAUSAL, scale)
            saved.append(context_parallel_forward(*request)[2])
        recorded = Wrapped(group)
        with pytest.raises(AgreedError) as raised:
            context_parallel_backward(x["dout"], saved[group.rank], recorded)
        return raised.value.message, recorded.calls

    (message, calls), other = run_ranks(2, rank)
    assert other == (message, calls)
    assert calls == ["all_agree"]
    assert message.startswith(f"ranks disagree on {name}: rank 0 has")


@pytest.mark.clause("C3", "R7", "C6")
def test_metadata_that_one_rank_cannot_make_is_refused_on_all() -> None:
    def metadata(layout: PackedLayout, policy: Policy, cp_size: int, cp_rank: int, mask: AttentionMask) -> RankMetadata:
        if cp_rank == 1:
            raise SpecError("int32_overflow", "too many rows")
        return rank_metadata(layout, policy, cp_size, cp_rank, mask)

    def rank(group: Collectives) -> tuple[str, list[str]]:
        x = tensors(8)
        recorded = Wrapped(group)
        arguments = (PackedLayout([0, 16]), "packed_contiguous", recorded)
        with pytest.raises(AgreedError) as raised:
            context_parallel_forward(x["q"], x["k"], x["v"], *arguments, parts=Parts(rank_metadata=metadata))
        return raised.value.message, recorded.calls

    assert run_ranks(2, rank) == [("rank 1: too many rows", ["all_agree"])] * 2
