"""Every rank runs these tests, in step: under plain pytest a group of one, under `mpirun -n N` a group of N.

Nothing random may differ between ranks but what a test gives them by rank, or they would part ways.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from refimpl.attention import attention_backward, attention_forward
from refimpl.collectives import AgreedError, Collectives, MpiCollectives, run_ranks
from refimpl.context_parallel import (
    RankResult,
    context_parallel_backward,
    context_parallel_forward,
    run_context_parallel,
)
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.partition import Policy, pad_rows, padded_for, partition_indices

Array = np.ndarray
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.float64, np.float32, np.float16, BFLOAT16, np.longdouble, np.int64, np.int32, np.uint8, np.bool_]
VIEWS: dict[str, Callable[[Array], Array]] = {
    "contiguous": lambda x: x,
    "strided": lambda x: x[:, ::2],
    "reversed": lambda x: x[::-1, ::-1],
    "transposed": lambda x: x.T,
    "stride-0": lambda x: np.broadcast_to(x[:1], (7, 6)),
    "empty": lambda x: x[:0],
    "0-d": lambda x: x[0, 0],
}


def own(rank: int, shape: tuple[int, ...], dtype: Any = np.float64) -> Array:
    """What a rank brings: exact in every dtype, other numbers on every rank."""
    return np.random.default_rng(rank).integers(0, 120, shape).astype(dtype)


def same_bits(got: Array, expected: Array) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if got.dtype == np.longdouble:  # of whose 16 bytes some mean nothing
        np.testing.assert_array_equal(got, expected)
    else:
        assert got.tobytes() == expected.tobytes()


# Collectives


@pytest.mark.clause("C1")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("view", VIEWS)
def test_all_gather(group: MpiCollectives, view: str, dtype: Any) -> None:
    def rank(member: Collectives) -> Array:
        return member.all_gather(VIEWS[view](own(member.rank, (4, 6), dtype)))

    expected = np.stack([VIEWS[view](own(r, (4, 6), dtype)) for r in range(group.size)])
    same_bits(rank(group), expected)
    same_bits(run_ranks(group.size, rank)[group.rank], expected)


@pytest.mark.clause("C1")
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.uint8])
def test_all_to_all(group: MpiCollectives, dtype: Any) -> None:
    """Rank s sends rank r its own rows, s + 2 r of them: none from rank 0 to itself."""

    def rank(member: Collectives) -> list[Array]:
        parts = [own(member.rank, (member.rank + 2 * r, 3), dtype) for r in range(member.size)]
        shapes = [(s + 2 * member.rank, 3) for s in range(member.size)]
        return member.all_to_all(parts, shapes)

    for s, (mine, in_process) in enumerate(zip(rank(group), run_ranks(group.size, rank)[group.rank], strict=True)):
        same_bits(mine, own(s, (s + 2 * group.rank, 3), dtype))
        same_bits(in_process, mine)


@pytest.mark.clause("C2")
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.longdouble, np.int64, np.int32])
@pytest.mark.parametrize("transposed", [False, True])
def test_reduce_scatter_sum(group: MpiCollectives, transposed: bool, dtype: Any) -> None:
    """Values of very different size, so that only the sum in rank order has these bits."""

    def of(rank: int) -> Array:
        random = np.random.default_rng(rank)
        x = random.standard_normal((group.size, 5, 3)) * 10.0 ** random.integers(0, 9, (group.size, 5, 3))
        return (x.transpose(0, 2, 1) if transposed else x).astype(dtype, order="K")

    expected = of(0)[group.rank]
    for r in range(1, group.size):
        expected = expected + of(r)[group.rank]
    same_bits(group.reduce_scatter_sum(of(group.rank)), expected)
    same_bits(run_ranks(group.size, lambda member: member.reduce_scatter_sum(of(member.rank)))[group.rank], expected)


@pytest.mark.clause("C1", "C2")
@pytest.mark.parametrize("rows", [1, 4095, 262_144])
def test_buffers_of_any_size(group: MpiCollectives, rows: int) -> None:
    """Up to 2 MiB a rank, far beyond what MPI sends without a handshake."""
    gathered = group.all_gather(own(group.rank, (rows,)))
    for r in range(group.size):
        np.testing.assert_array_equal(gathered[r], own(r, (rows,)))
    each = -(-rows // group.size)
    total = group.reduce_scatter_sum(own(group.rank, (group.size, each)))
    np.testing.assert_array_equal(total, sum(own(r, (group.size, each))[group.rank] for r in range(group.size)))


@pytest.mark.clause("N1")
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.bool_, np.complex64], ids=lambda d: np.dtype(d).name)
def test_no_sum_in_a_narrow_dtype(group: MpiCollectives, dtype: Any) -> None:
    with pytest.raises(SpecError, match="float32 or wider") as raised:
        group.reduce_scatter_sum(np.zeros((group.size, 2), dtype))
    assert raised.value.code == "dtype"


@pytest.mark.clause("C2")
def test_reducing_needs_one_part_a_rank(group: MpiCollectives) -> None:
    with pytest.raises(SpecError, match="one part a rank") as raised:
        group.reduce_scatter_sum(np.zeros((group.size + 1, 2)))
    assert raised.value.code == "shape"


@pytest.mark.clause("C1", "C2")
def test_inputs_stay_as_they_are_and_results_are_copies(group: MpiCollectives) -> None:
    x = own(group.rank, (group.size, 4))
    before = x.copy()
    gathered, total = group.all_gather(x), group.reduce_scatter_sum(x)
    gathered[:] = total[:] = -1.0
    np.testing.assert_array_equal(x, before)


# Agreement


def refusal_of(group: Collectives, call: Callable[[Collectives], object]) -> tuple[str, str]:
    """Code and message of the AgreedError that `call` must raise on every rank alike; the group works on after it."""
    recorded = Recorded(group)
    with pytest.raises(AgreedError) as raised:
        call(recorded)
    error = raised.value
    assert recorded.calls == ["all_agree"], "tensors were exchanged before the refusal"
    group.all_agree({"code": error.code, "message": error.message})
    np.testing.assert_array_equal(group.all_gather(np.array(group.rank)), np.arange(group.size))
    return error.code, error.message


@dataclass
class Recorded:
    """A group that remembers what was called."""

    group: Collectives

    def __post_init__(self) -> None:
        self.rank, self.size = self.group.rank, self.group.size
        self.calls: list[str] = []

    def all_gather(self, x: Array) -> Array:
        self.calls.append("all_gather")
        return self.group.all_gather(x)

    def reduce_scatter_sum(self, x: Array) -> Array:
        self.calls.append("reduce_scatter_sum")
        return self.group.reduce_scatter_sum(x)

    def all_agree(self, facts: Mapping[str, str], error: SpecError | None = None) -> None:
        self.calls.append("all_agree")
        self.group.all_agree(facts, error)


@pytest.fixture
def pair(group: MpiCollectives) -> MpiCollectives:
    if group.size == 1:
        pytest.skip("one rank agrees with itself")
    return group


@pytest.mark.clause("C3")
def test_ranks_that_state_the_same_agree(group: MpiCollectives) -> None:
    group.all_agree({})
    group.all_agree({"policy": "p" * 5000, "layout": 'ü "quoted"\n'})


@pytest.mark.clause("C3")
def test_statements_of_different_length_are_told_in_full(pair: MpiCollectives) -> None:
    last = pair.size - 1
    code, message = refusal_of(pair, lambda g: g.all_agree({"a": "x" * 300 if g.rank == last else "é"}))
    assert code == "ranks_disagree"
    assert message.startswith(f"ranks disagree on a: rank 0 has é, rank {last} has {'x' * 300};")


@pytest.mark.clause("C3")
def test_a_refusal_of_any_rank_reaches_all(group: MpiCollectives) -> None:
    for odd in range(group.size):
        error = SpecError("heads", "three on two") if group.rank == odd else None
        code, message = refusal_of(group, lambda g, error=error: g.all_agree({"a": "1"}, error))
        assert code == "heads"
        assert message == ("three on two" if group.size == 1 else f"rank {odd}: three on two")


def shard(size: int, change: Mapping[str, Any]) -> tuple[tuple[Array, Array, Array], tuple[Any, ...], float | None]:
    """One rank's tensors, (layout, policy, mask) and scale: 8 rows a rank, with something changed."""
    request = {
        "layout": PackedLayout([0, 8 * size]),
        "policy": "packed_contiguous",
        "mask": AttentionMask(),
        "scale": None,
        "dtype": np.float64,
        "heads": (2, 1),
        "rows": 8,
        "dim": 4,
    } | dict(change)
    rows, (q_heads, kv_heads), dim, dtype = (request[name] for name in ("rows", "heads", "dim", "dtype"))
    tensors = tuple(np.ones((rows, heads, dim), dtype) for heads in (q_heads, kv_heads, kv_heads))
    return tensors, (request["layout"], request["policy"], request["mask"]), request["scale"]


def forward(group: Collectives, change: Mapping[str, Any]) -> tuple[Array, Any]:
    (q, k, v), (layout, policy, mask), scale = shard(group.size, change)
    out, _, saved = context_parallel_forward(q, k, v, layout, policy, group, mask, scale)
    return out, saved


DIFFERENCES: dict[str, Callable[[int], dict[str, Any]]] = {
    "layout": lambda size: {"layout": PackedLayout([0, 3, 8 * size])},
    "policy": lambda size: {"policy": "dual_chunk_swap"},
    "mask": lambda size: {"mask": AttentionMask(causal=False, window=(2, 1))},
    "softmax_scale": lambda size: {"scale": 0.25},
    "q": lambda size: {"dtype": np.float32},
    "k": lambda size: {"heads": (2, 2)},
    "v": lambda size: {"dtype": BFLOAT16},
}


@pytest.mark.clause("C3")
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_refused_on_every_rank(pair: MpiCollectives, name: str) -> None:
    for odd in (0, pair.size - 1):
        change = DIFFERENCES[name](pair.size) if pair.rank == odd else {}
        if name == "v" and pair.rank == odd:  # only v differs, which this rank finds out by itself
            (q, k, v), (layout, policy, mask), _ = shard(pair.size, {})
            call = (q, k, v.astype(BFLOAT16), layout, policy)
            code, message = refusal_of(pair, lambda g, call=call, mask=mask: context_parallel_forward(*call, g, mask))
        else:
            code, message = refusal_of(pair, lambda g, change=change: forward(g, change))
        if name == "v":
            assert (code, message) == ("dtype", f"rank {odd}: v is bfloat16 but q is float64: expected one dtype")
        else:
            assert code == "ranks_disagree"
            assert message.startswith(f"ranks disagree on {name}: rank 0 has ")
            assert f", rank {max(odd, 1)} has " in message


@pytest.mark.clause("C3", "C6")
@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("shape", {"rows": 7}),
        ("heads", {"heads": (3, 2)}),
        ("dtype", {"dtype": np.int64}),
        ("softmax_scale", {"scale": float("nan")}),
        ("policy", {"policy": "contiguous"}),
        ("shape", {"dim": 0}),
    ],
)
def test_one_ranks_own_refusal_reaches_all(group: MpiCollectives, code: str, change: dict[str, Any]) -> None:
    last = group.size - 1
    found, message = refusal_of(group, lambda g: forward(g, change if g.rank == last else {}))
    assert found == code
    assert message.startswith(f"rank {last}: ") == (group.size > 1)


@pytest.mark.clause("P6", "C3")
def test_a_layout_that_does_not_divide_is_refused_on_every_rank(group: MpiCollectives) -> None:
    layout = PackedLayout([0, 2 * group.size, 4 * group.size + 1])
    change = {"layout": layout, "policy": "dual_chunk_swap"}
    code, message = refusal_of(group, lambda g: forward(g, change))
    assert code == "not_divisible"
    assert message.startswith(f"dual_chunk_swap at cp_size {group.size} needs every physical length divisible by ")
    assert f"document 1 has {2 * group.size + 1} rows: add {2 * group.size - 1} there" in message


@pytest.mark.clause("C3", "B4")
def test_a_wrong_dout_on_one_rank_is_refused_on_every_rank(group: MpiCollectives) -> None:
    out, saved = forward(group, {})
    last = group.size - 1
    for code, wrong in (("shape", out[:, :1]), ("dtype", out.astype(np.float32))):
        dout = wrong if group.rank == last else out
        found, message = refusal_of(group, lambda g, dout=dout: context_parallel_backward(dout, saved, g))
        assert found == code
        assert "dout" in message


# The theorem

MASKS = [
    AttentionMask(),
    AttentionMask(causal=False),
    AttentionMask(window=(5, -1)),
    AttentionMask(causal=False, window=(4, 2)),
    AttentionMask(causal=False, window=(-1, 3)),
]
HEADS = [((2, 2), (4, 4)), ((4, 2), (4, 3)), ((3, 1), (3, 5))]
LENGTHS = [0, 37, 1, 0, 0, 22, 16]
GAPS = {"tight": [0] * 7, "spread": [3, 5, 0, 0, 7, 4, 1]}
OUTPUTS = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, eq=False)
class Case:
    """A layout for any number of ranks, inputs with poison in the padding, and the oracle's word, in buffer order."""

    layout: PackedLayout
    inputs: dict[str, Array]
    expected: dict[str, Array]


def case_of(
    size: int,
    policy: Policy,
    mask: AttentionMask,
    padding: str,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: Any,
) -> Case:
    """The oracle attends over the documents packed tightly, so it cannot share a mistake about padding."""
    tail = 0 if padding == "tight" else 6
    physical = [length + gap for length, gap in zip(LENGTHS, GAPS[padding], strict=True)]
    spread = PackedLayout.from_lengths(LENGTHS, padded_lengths=physical, total_tokens=sum(physical) + tail)
    layout = padded_for(spread, policy, size)
    tight = PackedLayout(layout.cu_seqlens)
    random = np.random.default_rng(7)
    shapes = {
        "q": (heads[0], dims[0]),
        "k": (heads[1], dims[0]),
        "v": (heads[1], dims[1]),
        "dout": (heads[0], dims[1]),
    }
    tokens = {name: random.standard_normal((sum(LENGTHS), *shape)).astype(dtype) for name, shape in shapes.items()}
    q, k, v, dout = (tokens[name].astype(np.float64) for name in shapes)
    out, lse = attention_forward(q, k, v, tight, mask)
    results = (out, lse.T, *attention_backward(dout, q, k, v, out, lse, tight, mask))
    return Case(
        layout,
        {name: pad_rows(x, tight, layout, np.nan if name in "qv" else np.inf) for name, x in tokens.items()},
        {
            name: pad_rows(x, tight, layout, -np.inf if name == "lse" else 0.0)
            for name, x in zip(OUTPUTS, results, strict=True)
        },
    )


def rank_result(group: Collectives, case: Case, policy: Policy, mask: AttentionMask) -> RankResult:
    rows = partition_indices(case.layout, policy, group.size, group.rank)
    q, k, v, dout = (case.inputs[name][rows] for name in ("q", "k", "v", "dout"))
    out, lse, saved = context_parallel_forward(q, k, v, case.layout, policy, group, mask)
    return RankResult(saved.metadata.indices, out, lse, *context_parallel_backward(dout, saved, group))


def check(result: RankResult, case: Case, tolerance: float) -> None:
    padding = case.layout.document_ids[result.indices] < 0
    for name in OUTPUTS:
        got = getattr(result, name).astype(np.float64)
        got = got.T if name == "lse" else got
        expected = case.expected[name][result.indices]
        np.testing.assert_array_equal(got[padding], expected[padding], err_msg=f"{name} of padding")
        got, expected = got[~padding], expected[~padding]
        assert np.isfinite(got).all(), name
        error = np.abs(got - expected) / np.maximum(1.0, np.abs(expected))
        assert error.max(initial=0.0) <= tolerance, name


@pytest.mark.clause("C5", "C1", "C2", "B2", "B3", "A5")
@pytest.mark.parametrize(
    ("policy", "mask", "padding", "heads"),
    list(product(Policy, MASKS, GAPS, HEADS)),
    ids=lambda x: str(x).replace("AttentionMask", ""),
)
def test_every_rank_equals_the_oracle(
    group: MpiCollectives,
    policy: Policy,
    mask: AttentionMask,
    padding: str,
    heads: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    case = case_of(group.size, policy, mask, padding, *heads, np.float64)
    check(rank_result(group, case, policy, mask), case, 1e-12)


@pytest.mark.clause("C5", "N1", "N2")
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float32, 2e-5), (np.float16, 1e-2), (BFLOAT16, 6e-2)], ids=["f32", "f16", "bf16"]
)
def test_narrow_dtypes(group: MpiCollectives, policy: Policy, dtype: Any, tolerance: float) -> None:
    """Some ten epsilons of the dtype; `test_context_parallel` has the bounds that are argued for."""
    mask = AttentionMask()
    case = case_of(group.size, policy, mask, "spread", (4, 2), (4, 3), dtype)
    result = rank_result(group, case, policy, mask)
    assert {x.dtype for x in (result.out, result.dq, result.dk, result.dv)} == {np.dtype(dtype)}
    assert result.lse.dtype == np.float32
    check(result, case, tolerance)


@pytest.mark.clause("C5", "C2")
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("dtype", [np.float64, np.float32, BFLOAT16], ids=["f64", "f32", "bf16"])
def test_the_same_bits_as_in_one_process_and_again(group: MpiCollectives, policy: Policy, dtype: Any) -> None:
    mask = AttentionMask(causal=False, window=(20, 3))
    case = case_of(group.size, policy, mask, "spread", (4, 2), (4, 3), dtype)
    x = case.inputs
    threads = run_context_parallel(x["q"], x["k"], x["v"], x["dout"], case.layout, policy, group.size, mask)
    for _ in range(2):
        result = rank_result(group, case, policy, mask)
        same_bits(result.indices, threads[group.rank].indices)
        for name in OUTPUTS:
            same_bits(getattr(result, name), getattr(threads[group.rank], name))
