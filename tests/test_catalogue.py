"""The cases: what they are asked with is what they claim, and together they cover what can go wrong."""

import functools
import inspect
import re
from collections import Counter, defaultdict

import numpy as np
import pytest

from refimpl.conformance import catalogue, witness
from refimpl.conformance.cases import FEATURES, OPERATIONS, PER_RANK
from refimpl.conformance.catalogue.building import draw, packed, scores
from refimpl.conformance.strides import with_strides
from tests.support import refused
from tests.witness import deal, rows, step_pairs

CASES = catalogue.CASES
POLICIES = ("dual_chunk_swap", "packed_contiguous", "packed_dual_chunk_swap")


def for_all_cases(test):
    """Run a test of one case on all of them, and name the one that fails."""

    @functools.wraps(test)
    def run(**fixtures):
        for case in CASES:
            try:
                test(case, **fixtures)
            except AssertionError as error:
                raise AssertionError(f"{case.id}: {error}") from error

    parameters = list(inspect.signature(test).parameters.values())[1:]
    run.__signature__ = inspect.Signature(parameters)
    return run


def with_layout():
    return [case for case in CASES if case.operation != "refuse" and "cu_seqlens" in case.inputs]


def pairs(case, name="q"):
    """(document, position) of every row of a tensor."""
    inputs = case.inputs
    if "cu_seqlens_q" in inputs:
        real, physical = (inputs[f"cu_seqlens_{'kv' if name in 'kv' else 'q'}{part}"] for part in ("", "_padded"))
        return rows(real, physical, physical[-1])
    return rows(inputs["cu_seqlens"], inputs["cu_seqlens_padded"], inputs["total_tokens"])


def real_lengths(case):
    return np.diff(case.inputs["cu_seqlens"]).tolist()


def held(case):
    """The rank of every row."""
    inputs = case.inputs
    dealt = deal(inputs["cu_seqlens_padded"], inputs["total_tokens"], inputs["policy"], inputs["cp_size"])
    return [rank for rank, _ in dealt]


@pytest.mark.clause("V5")
def test_ids_are_names_and_unique():
    assert [name for name, count in Counter(case.id for case in CASES).items() if count > 1] == []
    for case in CASES:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", case.id)


@pytest.mark.clause("V5")
def test_there_are_enough_of_every_kind():
    assert len(CASES) >= 150
    of = Counter(case.operation for case in CASES)
    assert {operation: of[operation] for operation in OPERATIONS if of[operation] < 5} == {}
    needing = Counter(feature for case in CASES for feature in case.features)
    assert {feature: needing[feature] for feature in FEATURES if needing[feature] < 3} == {}


@pytest.mark.clause("P1", "C5")
def test_every_policy_meets_every_number_of_ranks():
    met = defaultdict(set)
    for case in CASES:
        if case.operation in PER_RANK:
            family = case.operation.removesuffix("_forward").removesuffix("_backward")
            met[family, case.inputs["policy"]].add(case.cp_size)
    for policy in POLICIES:
        assert met["partition", policy] >= {1, 2, 3, 4, 8}
        assert met["context_parallel", policy] >= {2, 3, 4, 8}
        assert met["metadata", policy] >= {2, 3, 4}
    for family in ("metadata", "context_parallel"):
        assert met[family, "dual_chunk_swap"] >= {1, 2, 3, 4, 8}
        assert met[family, "packed_contiguous"] >= {1, 2, 3, 4, 8}


@pytest.mark.clause("V5")
def test_every_why_is_a_sentence_of_its_own():
    told = defaultdict(set)
    for case in CASES:
        assert re.fullmatch(r"[^\n]{8,130}[.]", case.why), case.id
        told[case.why].add(re.sub("forward|backward", "*", case.id))
    shared = {why: names for why, names in told.items() if len(names) > 1}
    assert shared == {}


@pytest.mark.clause("V1")
@for_all_cases
def test_inputs_are_small_and_exact(case, require):
    bfloat16 = require("ml_dtypes").bfloat16
    assert case.inputs.get("total_tokens", 0) <= 64 or not case.tensors
    for x in case.tensors.values():
        assert x.dtype == np.float32
        for dtype in (np.float16, bfloat16):
            assert np.array_equal(x.astype(dtype).astype(np.float32), x, equal_nan=True)


@pytest.mark.clause("V1")
@for_all_cases
def test_tokens_are_finite(case):
    """NaN and infinity stand in padding alone, or in parts without keys; a case says so."""
    if case.operation == "merge":
        for name, x in case.tensors.items():
            absent = np.isneginf(case.tensors[name.replace("out", "lse")])
            assert np.array_equal(np.isfinite(x), ~absent if "lse" in name else ~np.repeat(absent.T[..., None], 4, 2))
        return
    poisoned = {name for name, x in case.tensors.items() if not np.isfinite(x).all()}
    assert ("poison" in case.features) == bool(poisoned)
    if poisoned:
        assert poisoned == set(case.tensors)
        for name, x in case.tensors.items():
            is_padding = np.array([document < 0 for document, _ in pairs(case, name)])
            assert np.isfinite(x[~is_padding]).all()
            assert not np.isfinite(x[is_padding]).any()


@pytest.mark.clause("V9")
@for_all_cases
def test_features_are_what_the_case_needs(case):
    """Worked out again from rows, so that no skip is legal that should not be, and none is missing."""
    inputs, has = case.inputs, set(case.features)
    assert len(case.features) == len(has)
    assert has <= set(FEATURES)
    family = re.sub("_(forward|backward)$", "", case.operation)
    assert family in has
    assert ("backward" in has) == case.operation.endswith("_backward")
    assert {policy for policy in POLICIES if policy in has} == {inputs.get("policy")} & set(POLICIES)
    if case.operation == "refuse":
        assert has - {"refuse", "large_offsets", *POLICIES} == {inputs["call"]} - {"layout"}
        return
    cp_size = inputs.get("cp_size")
    assert {"cp1", "cp3", "cp8"} & has == {f"cp{cp_size}"} & {"cp1", "cp3", "cp8"}
    causal, (left, right) = inputs.get("causal", True), inputs.get("window", (-1, -1))
    assert ("non_causal" in has) == (not causal)
    assert ("window" in has) == (causal and left != -1)
    assert ("right_window" in has) == (not causal and (left, right) != (-1, -1))
    if "cu_seqlens" in inputs:
        end = inputs["cu_seqlens_padded"][-1]
        padding = [row for row, (document, _) in enumerate(pairs(case)) if document < 0]
        assert ("padding" in has) == any(row < end for row in padding)
        assert ("tail_padding" in has) == any(row >= end for row in padding)
        assert ("zero_length" in has) == (0 in real_lengths(case))
    if "cu_seqlens_q" in inputs:
        assert ("padding" in has) == any(document < 0 for x in ("q", "k") for document, _ in pairs(case, x))
    if "q" in case.tensors:
        (_, heads, dim), (_, kv_heads, dim_v) = case.tensors["q"].shape, case.tensors["v"].shape
        assert ("mqa" in has) == (kv_heads == 1 and heads > 1)
        assert ("gqa" in has) == (kv_heads not in (1, heads))
        assert ("dv" in has) == (dim != dim_v)
        assert ("scale" in has) == (inputs["softmax_scale"] is not None)


@pytest.mark.clause("L4", "L5", "P3", "K3")
@pytest.mark.parametrize("family", ["partition", "metadata", "context_parallel"])
def test_what_fields_have_shipped_is_asked_of(family):
    """Every arrangement of documents, padding and ranks that a fault was ever seen in, for each kind of question."""
    asked = [
        case for case in with_layout() if case.operation.startswith(family) and "large_offsets" not in case.features
    ]

    def some(is_such):
        assert any(is_such(case) for case in asked)

    def ranks_of(case, document):
        return {rank for rank, (d, _) in zip(held(case), pairs(case), strict=True) if d == document}

    some(lambda case: any(len(ranks_of(case, d)) == 3 for d in range(len(real_lengths(case)))))
    some(lambda case: any(len(ranks_of(case, d)) > 3 for d in range(len(real_lengths(case)))))
    some(lambda case: any(document < 0 for document, _ in pairs(case)[: case.inputs["cu_seqlens_padded"][-2]]))
    some(lambda case: real_lengths(case)[0] == 0)
    some(lambda case: real_lengths(case)[-1] == 0)
    some(lambda case: 0 in real_lengths(case)[1:-1])
    some(lambda case: len(case.inputs["cu_seqlens"]) > 2 and len(set(case.inputs["cu_seqlens_padded"][-2:])) == 1)
    some(lambda case: all(document < 0 for document, _ in pairs(case)))
    some(lambda case: case.inputs["total_tokens"] > case.inputs["cu_seqlens_padded"][-1])
    some(
        lambda case: (
            any(
                all(document < 0 for rank, (document, _) in zip(held(case), pairs(case), strict=True) if rank == r)
                for r in range(case.cp_size)
            )
            and any(document >= 0 for document, _ in pairs(case))
        )
    )
    if family != "partition":
        some(lambda case: 1 in real_lengths(case))
        per_rank = [case for case in asked if "window" in case.features]
        assert any(0 <= case.inputs["window"][0] < case.inputs["total_tokens"] / case.cp_size for case in per_rank)
    if family == "context_parallel":
        assert any(case.inputs["window"][0] > case.inputs["total_tokens"] / case.cp_size for case in per_rank)


@pytest.mark.clause("K1", "K3")
@pytest.mark.parametrize("operation", ["mask", "attention_forward", "attention_backward", "context_parallel_forward"])
def test_windows_are_shorter_and_longer_than_documents(operation):
    lefts = [
        (case.inputs["window"][0], max(real_lengths(case)), min(real_lengths(case)))
        for case in CASES
        if case.operation == operation and "window" in case.features
    ]
    assert any(0 <= left < longest - 1 for left, longest, _ in lefts)
    assert any(left >= shortest for left, _, shortest in lefts)


FLOATS = ("attention_forward", "attention_backward", "context_parallel_forward", "context_parallel_backward")


@pytest.mark.clause("A1", "A2", "A5", "B2", "B3", "K1", "K2")
@pytest.mark.parametrize("operation", FLOATS)
def test_what_attention_can_differ_in_is_asked_in_both_directions(operation):
    """Heads, masks and numbers, from the arrays themselves."""
    asked = [case for case in CASES if case.operation == operation]
    shapes = [(*case.tensors["q"].shape[1:], *case.tensors["v"].shape[1:]) for case in asked]
    assert any(1 < kv_heads < heads for heads, _, kv_heads, _ in shapes)
    assert any(1 == kv_heads < heads for heads, _, kv_heads, _ in shapes)
    assert any(dim < dim_v for _, dim, _, dim_v in shapes)
    assert any(dim > dim_v for _, dim, _, dim_v in shapes)
    masks = [(case.inputs["causal"], *case.inputs["window"]) for case in asked]
    assert (True, -1, -1) in masks
    assert (False, -1, -1) in masks
    assert any(causal and right > 0 for causal, _, right in masks), "a causal mask overrules the window"
    assert any(not causal and left >= 0 and right > 0 for causal, left, right in masks)
    assert any(case.inputs["softmax_scale"] not in (None, 1.0) for case in asked)
    for name in asked[0].tensors:
        special = np.concatenate([x[~np.isfinite(x)] for x in (case.tensors[name] for case in asked)])
        assert np.isnan(special).any()
        assert np.isposinf(special).any()
        assert np.isneginf(special).any()


@pytest.mark.clause("A3", "A7", "B1")
@pytest.mark.parametrize("operation", FLOATS)
def test_scores_pass_the_range_of_exp(operation):
    """Beyond 88.7 float32 has no exp, beyond 709.8 float64 has none; a row's largest score is among them."""
    largest = [
        float(np.abs(case.softmax_scale * np.einsum("ihc,jhc->hij", q, k)).max())
        for case in CASES
        if case.operation == operation and "extreme" in case.features
        for q, k in [(case.tensors["q"].astype(np.float64), case.tensors["k"].astype(np.float64))]
    ]
    assert max(largest) > 709.8


@pytest.mark.clause("B1")
@pytest.mark.parametrize("family", ["attention", "context_parallel"])
def test_gradients_lie_in_memory_in_every_way(family):
    douts = [case.tensors["dout"] for case in CASES if case.operation == f"{family}_backward"]
    strides = [(dout.strides, dout.flags.c_contiguous) for dout in douts]
    assert any(all(stride == 0 for stride in found) for found, _ in strides)
    assert any(all(stride > 0 for stride in found) and not contiguous for found, contiguous in strides)
    assert any(contiguous for _, contiguous in strides)


@pytest.mark.clause("A4", "A7")
def test_parts_without_keys_meet_in_every_way():
    """Rows of which one part, all but one, or no part saw a key; the last in two cases of different sizes."""
    sizes = set()
    counts = set()
    for case in CASES:
        if case.operation == "merge":
            absent = np.sum([np.isneginf(x) for name, x in case.tensors.items() if name.startswith("lse")], axis=0)
            parts = len(case.tensors) // 2
            counts |= {(parts, int(count)) for count in np.unique(absent)}
            sizes |= {parts} if (absent == parts).any() else set()
    assert len(sizes) >= 2
    assert {(3, 0), (3, 1), (3, 2)} <= counts


@pytest.mark.clause("K4", "K5")
def test_bounds_reach_the_keys_of_a_step_with_more_queries():
    """What a kernel that takes such a bound for unlimited gets wrong: twice, once with padding."""
    found = []
    for case in CASES:
        if case.operation != "step_mask" or case.inputs["causal"]:
            continue
        inputs, (_, right) = case.inputs, case.inputs["window"]
        queries, keys = (np.diff(inputs[f"cu_seqlens_{x}"]) for x in ("q", "kv"))
        if right >= keys.max() and (queries - keys > right).any():
            found.append("padding" in case.features)
    assert sorted(found) == [False, True]


@pytest.mark.clause("A4", "B2", "K4")
@pytest.mark.parametrize("operation", ["step_attention_forward", "step_attention_backward"])
def test_rows_of_a_step_that_see_nothing_meet_everything_else(operation):
    """In most cases some query sees no key: beside poison, groups of heads, windows, high scores, strides of dout."""
    asked = [case for case in CASES if case.operation == operation]
    with_empty = []
    for case in asked:
        inputs = case.inputs
        pairs_seen = step_pairs(*(inputs[f"cu_seqlens_{x}"] for x in STEP), inputs["causal"], inputs["window"])
        real = sum(document >= 0 for document, _ in pairs(case, "q"))
        with_empty += [case] if len({i for i, _ in pairs_seen}) < real else []
    assert 2 * len(with_empty) > len(asked)
    has = {feature for case in with_empty for feature in case.features}
    assert has >= {"padding", "poison", "gqa", "mqa", "dv", "scale", "window", "right_window", "extreme"}
    assert ("strides" in has) == operation.endswith("backward")
    assert any(not case.inputs["causal"] for case in with_empty)


STEP = ("q", "q_padded", "kv", "kv_padded")


@pytest.mark.clause("L2", "L3", "L8", "L9", "P6", "R7", "A8")
def test_every_refusal_that_a_layout_and_a_rank_can_earn_is_asked_for():
    codes = {code for case in CASES if case.operation == "refuse" for code in witness.faults(case)}
    wanted = "type shape start decreasing count"
    assert codes >= {f"offsets_{kind}" for kind in wanted.split()}
    wanted = "real_exceeds_physical total_tokens policy cp_size cp_rank not_divisible mask int32_overflow"
    wanted += " position_ids segment_ids shape dtype heads"
    assert codes >= set(wanted.split())


@pytest.mark.clause("N3", "R7")
def test_large_offsets_pass_an_int32_as_element_indices():
    """128 heads of 128: the element index of the last rows is beyond 2**31."""
    large = [case for case in CASES if "large_offsets" in case.features]
    assert {case.operation for case in large} == {"metadata", "refuse"}
    for case in large:
        assert case.inputs["total_tokens"] * 128 * 128 > 2**31
        assert not case.tensors


@pytest.mark.clause("N1")
def test_bfloat16_forgets_what_the_sums_are_about():
    """dv by equal weights, worked out from dout alone, beside what sums of ranks or of steps in bfloat16 give.

    Each kind of sum has two cases that share no numbers, and what is lost is beyond the bound of [N2], bfloat16's own.
    """
    lost_over = defaultdict(list)
    for case in CASES:
        if case.operation != "context_parallel_backward" or "N1" not in case.clauses:
            continue
        inputs, dout = case.inputs, case.tensors["dout"][:, 0, 0].astype(np.float64)
        dealt = deal(inputs["cu_seqlens_padded"], inputs["total_tokens"], inputs["policy"], inputs["cp_size"])
        assert not inputs["causal"]
        assert max(real_lengths(case)) == len(dout) == 64
        added = {part: sum(dout[i] / 64 for i in range(64) if dealt[i] == part) for part in sorted(set(dealt))}
        steps = [[added[part] for part in added if part[0] == rank] for rank in range(case.cp_size)]
        exact = dout.sum() / 64
        bound = 2**-8 * max(1, abs(exact))
        if abs(_sum_in_bfloat16([sum(own) for own in steps]) - exact) > 3 * bound:
            lost_over["ranks"].append(case.id)
        if abs(sum(_sum_in_bfloat16(own) for own in steps) - exact) > 3 * bound and len(steps[0]) == 2:
            lost_over["steps"].append(case.id)
        assert case.id in lost_over["ranks"] + lost_over["steps"]
    assert len(lost_over["ranks"]) >= 2
    assert len(lost_over["steps"]) >= 2


def _sum_in_bfloat16(parts):
    total = np.float32(0)
    for part in parts:
        total = _to_bfloat16(total + _to_bfloat16(part))
    return float(total)


def _to_bfloat16(x):
    bits = np.float32(x).view(np.uint32)
    return np.uint32((int(bits) + 0x7FFF + ((int(bits) >> 16) & 1)) & 0xFFFF0000).view(np.float32)


@pytest.mark.clause("V2")
def test_cases_are_the_same_every_time():
    again = [case for group in catalogue.GROUPS for case in group()]
    assert [case.id for case in again] == [case.id for case in CASES]
    for one, other in zip(again, CASES, strict=True):
        assert one.inputs == other.inputs
        assert all(np.array_equal(x, other.tensors[name], equal_nan=True) for name, x in one.tensors.items())


@pytest.mark.clause("V2")
def test_drawn_numbers_are_fixed():
    """Pinned: the stream of Python's own generator is promised not to change."""
    assert draw("a", (2, 3)).tolist() == [[-0.9375, -1.75, 0.375], [0.5625, -1.3125, 0.3125]]


@pytest.mark.clause("A3")
def test_extreme_scores_are_exact_and_as_large_as_claimed():
    for name, low, high in (
        ("scores-high", 1000, 1100),
        ("scores-of-96", 90, 100),
        ("scores-negative", -1100, -1000),
    ):
        case = next(case for case in CASES if case.id == f"attention-forward-{name}")
        q, k = (case.tensors[x][:, 0].astype(np.float64) for x in ("q", "k"))
        found = 0.5 * q @ k.T
        assert low < found.min() <= found.max() < high
        assert np.array_equal(found, found.astype(np.float16))
    tensors = {"q": np.ones((2, 1, 2), np.float32), "k": np.ones((2, 1, 2), np.float32)}
    scores([3], [5, 7])(tensors)
    assert np.einsum("ihc,jhc->ij", tensors["q"], tensors["k"]).tolist() == [[15, 21], [15, 21]]


@pytest.mark.clause("L1", "L4")
def test_packed_makes_offsets():
    assert packed(3, (2, 4), 0, rows=9) == {
        "cu_seqlens": [0, 3, 5, 5],
        "cu_seqlens_padded": [0, 3, 7, 7],
        "total_tokens": 9,
    }


class TestStrides:
    x = np.arange(24, dtype=np.float32).reshape(4, 3, 2)

    @pytest.mark.clause("V5")
    @pytest.mark.parametrize("strides", [(6, 2, 1), (2, 8, 1), (12, 4, 2), (1, 4, 12), (100, 30, 11)])
    def test_values_stay_and_memory_is_as_asked(self, strides):
        view = with_strides(self.x, strides)
        assert np.array_equal(view, self.x)
        assert view.strides == tuple(4 * stride for stride in strides)

    @pytest.mark.clause("V5")
    def test_broadcast(self):
        x = np.repeat(np.arange(4, dtype=np.float32), 6).reshape(4, 3, 2)
        view = with_strides(x, (1, 0, 0))
        assert np.array_equal(view, x)
        assert view.strides == (4, 0, 0)
        assert np.array_equal(with_strides(np.full((2, 2), np.nan), (0, 0)), np.full((2, 2), np.nan), equal_nan=True)

    @pytest.mark.clause("V3")
    @pytest.mark.parametrize(
        "strides", [(0, 0, 0), (6, 2, 0), (1, 1, 1), (6, 2), (6, 2, 1, 1), (-6, 2, 1), (10**9, 2, 1), (0, 2**62, 2**62)]
    )
    def test_what_does_not_fit_is_refused(self, strides):
        with refused("file", "strides"):
            with_strides(self.x, strides)
