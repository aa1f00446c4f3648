"""Deliberately wrong implementations: the suite kills each of them, by name and by a margin that is no luck."""

import re
from pathlib import Path

import numpy as np
import pytest
from random_cases import Layouts

from refimpl.conformance import margins, vectors
from refimpl.conformance.cases import Case, Expected, Vector
from refimpl.conformance.faults.mutant import KINDS, Mutant, mutant
from refimpl.conformance.implementation import REFERENCE, Implementation, answer
from refimpl.conformance.judge import Difference, differences
from refimpl.conformance.mutants import BY_NAME, MUTANTS, excess, failing, margin, touches
from refimpl.errors import SpecError

ROOT = Path(__file__).parent.parent

LEAST_MARGIN = {"float64": 10.0, "bfloat16": 4.0}
"""Of the best vector. In float64 all that claim a kill have it; bounds of a low precision are coarse."""

LOST_IN_BFLOAT16 = {"bfloat16-accumulation", "bfloat16-reduction"}
"""Mutants that may pass, or fail by less than that, where an implementation computes in bfloat16 itself."""

LEAST = {
    "ownership": 10,
    "offsets": 10,
    "mask": 10,
    "lse": 8,
    "backward": 10,
    "heads": 3,
    "numerics": 6,
    "collectives": 6,
    "zeros": 3,
}
"""How many mutants of a kind there are at least."""


@pytest.fixture(scope="module")
def suite():
    return vectors.load()


@pytest.fixture(scope="module")
def killers(suite):
    """The vectors that claim to kill each mutant, small ones first."""
    by_name = {each.name: [] for each in MUTANTS}
    for vector in sorted(suite, key=lambda vector: sum(x.size for x in vector.expected.arrays.values())):
        for name in vector.kills:
            by_name[name].append(vector)
    return by_name


def outcome(case, by, only_rank=None):
    """An answer, or the code of the refusal, or the exception of a crash."""
    try:
        return answer(case, by, only_rank)
    except SpecError as error:
        return error.code
    except Exception as error:
        return type(error).__name__


def same(a, b):
    return a == b if isinstance(a, str) else a.keys() == b.keys() and all(np.array_equal(a[x], b[x], True) for x in a)


def attention_case(layout, **inputs):
    """Attention forward on random numbers, two heads."""
    rng = np.random.default_rng(0)
    total = layout["total_tokens"]
    tensors = {name: (rng.integers(-32, 32, (total, 2, 4)) / 16).astype(np.float32) for name in ("q", "k", "v")}
    inputs = {**layout, "causal": True, "window": [-1, -1], "softmax_scale": None} | inputs
    return Case("attention", "attention_forward", "", (), (), inputs, tensors)


WITH_PADDING = {"cu_seqlens": [0, 5, 7], "cu_seqlens_padded": [0, 6, 8], "total_tokens": 8}


# --- what there is --------------------------------------------------------------------------------------------------


@pytest.mark.clause("V7")
def test_the_mutants_cover_every_kind():
    assert len(MUTANTS) >= 60
    assert len(BY_NAME) == len(MUTANTS), "two mutants of one name"
    kinds = [each.kind for each in MUTANTS]
    assert set(kinds) == set(KINDS)
    assert {kind: kinds.count(kind) for kind in LEAST if kinds.count(kind) < LEAST[kind]} == {}


@pytest.mark.clause("V7")
def test_mutants_are_described_and_replace_something():
    for each in MUTANTS:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", each.name)
        assert each.what[0].islower(), each.name
        assert not each.what.endswith("."), each.name
        assert each.pieces, each.name
        assert each.implementation is each.implementation, "made anew, it would be replayed anew"


@pytest.mark.clause("V7")
def test_sources_are_those_of_the_specification():
    """A source names a repository as the specification does, and a number or a place in it."""
    table = (ROOT / "specs" / "thd_cp.md").read_text().split("## Sources")[1]
    prefixes = {name for row in re.findall(r"^\| ([\w ,.-]+) \|", table, re.MULTILINE) for name in row.split(", ")}
    known = prefixes | {"Megatron-Bridge"}
    for each in MUTANTS:
        if each.source:
            prefix, place = re.fullmatch(r"([\w.-]+)[# ](.+)", each.source).groups()
            assert prefix in known, f"{each.name}: {prefix} is not among {sorted(known)}"
            assert place
    assert sum(bool(each.source) for each in MUTANTS) >= 40


# --- how failing is decided -----------------------------------------------------------------------------------------


@pytest.mark.clause("V7")
def test_the_excess_of_a_difference():
    assert excess(Difference("out", "value", (0,), 1, 1.0, 0.0, error=3e-12, bound=1e-12)) == pytest.approx(3.0)
    assert excess(Difference("out", "exact", (0,), 1, 1.0, 0.0, error=1e-30, bound=1e-12)) == np.inf
    assert excess(Difference("x", "value", (0,), 1, 1.0, 0.0, error=1e-30, bound=0.0)) == np.inf
    assert excess(Difference("out", "missing")) == np.inf


def off_by(error, rows):
    """A mutant that adds `error` to these rows of out."""

    def finish(name, array, case, rank):
        array = array.copy()
        if name == "out":
            array[rows] += error
        return array

    return mutant("wrong-by-some", "numerics", "is wrong", finish=finish)


@pytest.mark.clause("V7")
def test_the_margin_is_the_error_over_the_bound():
    case = attention_case(WITH_PADDING)
    expected = Expected(
        answer(case), None, {"float64": {"out": 1e-3, "lse": 1e-3}, "bfloat16": {"out": 0.1, "lse": 0.1}}
    )
    token, padding = [0], [5]
    assert margin(case, expected, off_by(5e-3, token)) == pytest.approx(5.0)
    assert margin(case, expected, off_by(0.5, token), "bfloat16") == pytest.approx(5.0)
    assert margin(case, expected, off_by(1e-9, padding)) == np.inf
    assert margin(case, expected, off_by(np.nan, token)) == np.inf
    assert failing(case, expected, off_by(1.1e-3, token))
    assert not failing(case, expected, off_by(0.9e-3, token))


@pytest.mark.clause("V7")
@pytest.mark.parametrize(
    ("raised", "wanted", "expected_margin"),
    [
        (SpecError("heads", "no"), "heads", 0.0),
        (SpecError("heads", "no"), "shape", np.inf),
        (SpecError("heads", "no"), None, np.inf),
        (ZeroDivisionError(), None, np.inf),
        (ZeroDivisionError(), "heads", np.inf),
        (None, "heads", np.inf),
        (None, None, 0.0),
    ],
)
def test_refusing_and_crashing_are_wrong_unless_asked_for(raised, wanted, expected_margin):
    case = attention_case(WITH_PADDING)
    expected = Expected(answer(case), None, {}) if wanted is None else Expected({}, wanted)

    def scale(case):
        if raised is not None:
            raise raised
        return case.softmax_scale

    assert margin(case, expected, mutant("raising-mutant", "numerics", "raises", scale=scale)) == expected_margin


@pytest.mark.clause("V7")
def test_a_mutant_that_a_case_does_not_touch_answers_as_the_reference_does():
    """`touches` is what lets most replays be skipped, so it must never say no wrongly."""
    battery = Layouts(2).battery()
    untouched = 0
    for case, _ in battery:
        right = outcome(case, REFERENCE)
        for each in MUTANTS[::3]:
            if not touches(each, case):
                untouched += 1
                assert same(outcome(case, each.implementation), right), (each.name, case.operation)
    assert untouched > len(battery)


@pytest.mark.clause("V7")
def test_a_fault_on_one_rank_leaves_the_others_outputs_alone():
    battery = Layouts(0).battery()
    case = next(case for case, _ in battery if case.operation == "context_parallel_forward")
    right, everywhere = answer(case), outcome(case, BY_NAME["top-left-alignment"].implementation)
    on_one = outcome(case, BY_NAME["top-left-alignment"].implementation, 1)
    for name in right:
        assert np.array_equal(on_one[name], (everywhere if name.endswith(".1") else right)[name]), name
    assert not same(right, on_one)


@pytest.mark.clause("V7")
def test_mutants_leave_no_trace():
    """Replays in another order, or twice, give the same numbers, and the reference is as it was."""
    battery = [item for item in Layouts(5).battery() if item[0].operation != "refuse"][::3]
    first = {(each.name, case.id): outcome(case, each.implementation) for each in MUTANTS for case, _ in battery}
    for case, expected in battery:
        assert differences(case, expected, answer(case)) == []
    for each in reversed(MUTANTS):
        for case, _ in battery[::-1]:
            assert same(outcome(case, each.implementation), first[each.name, case.id]), (each.name, case.id)
    assert Implementation() == REFERENCE


# --- the suite ------------------------------------------------------------------------------------------------------


@pytest.mark.clause("V7")
@pytest.mark.parametrize("each", MUTANTS, ids=lambda each: each.name)
def test_the_suite_kills_it_by_a_margin(each, killers):
    """One vector at least that names it fails it in float64 and, where the fault can show there, in bfloat16."""
    claimed = killers[each.name]
    assert claimed, f"no vector kills {each.name}"
    assert failing(claimed[0].case, claimed[0].expected, each)
    for dtype, least in LEAST_MARGIN.items():
        if dtype == "float64" or each.name not in LOST_IN_BFLOAT16:
            margins = (margin(vector.case, vector.expected, each, dtype) for vector in claimed)
            assert any(found >= least for found in margins), dtype


def assert_kills(vector):
    margins = {each.name: margin(vector.case, vector.expected, each) for each in MUTANTS}
    assert list(vector.kills) == [name for name, found in margins.items() if found > 1], vector.case.id
    narrow = {name: found for name, found in margins.items() if 1e-3 < found < LEAST_MARGIN["float64"]}
    assert narrow == {}, vector.case.id


@pytest.mark.clause("V7")
def test_kills_of_small_vectors_are_exact(suite):
    """Those of integers, and some of the others; the rest is slow."""
    small = [
        vector
        for i, vector in enumerate(suite)
        if vector.case.operation not in ("context_parallel_forward", "context_parallel_backward", "metadata")
        or i % 10 == 0
    ]
    for vector in small:
        assert_kills(vector)


@pytest.mark.slow
@pytest.mark.clause("V7")
def test_kills_are_exact(suite):
    for vector in suite:
        assert_kills(vector)


@pytest.mark.clause("V7")
def test_margins_are_told_and_luck_is_marked(capsys, monkeypatch):
    """Two vectors, one of which finds the same error by three bounds and one by five; and a third, by exactness."""
    case, token, padding = attention_case(WITH_PADDING), [0], [5]

    def vector(bound):
        allowed = {dtype: {"out": x, "lse": 1.0} for dtype, x in (("float64", bound), ("bfloat16", 2 * bound))}
        return Vector(case, Expected(answer(case), None, allowed), ("wrong-by-some",))

    few = [vector(1e-3), vector(6e-4)]
    found = margins.kills(few, off_by(3e-3, token), "float64")
    assert found.margins == pytest.approx((3.0, 5.0))
    assert (found.exact, found.finite[0], found.best) == (0, pytest.approx(3.0), pytest.approx(5.0))
    assert margins.kills(few, off_by(3e-3, padding), "float64").exact == 2
    ((line, by_luck),) = margins.table(few, [off_by(3e-3, token)])
    assert by_luck
    assert " ".join(line.split()) == "numerics wrong-by-some 2 0 3.0e+00 5.0e+00 2 0 1.5e+00 2.5e+00 by luck"
    ((line, by_luck),) = margins.table(few, [off_by(3e-2, token)])
    assert not by_luck
    assert "luck" not in line
    ((_, by_luck),) = margins.table([], [off_by(3e-2, token)])
    assert by_luck, "nothing kills it"
    monkeypatch.setattr(margins, "MUTANTS", (off_by(3e-3, token),))
    monkeypatch.setattr(margins, "table", lambda suite: [("a line", True)])
    assert margins.main([]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "a line",
        "1 mutants, 304 vectors; 1 killed by less than 10 bounds".replace("304", str(len(vectors.load()))),
    ]


@pytest.mark.slow
@pytest.mark.clause("V7")
def test_no_mutant_dies_by_luck(capsys):
    assert margins.main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(MUTANTS) + 3


ATTENTION = ("attention", "context_parallel", "step_attention")


@pytest.mark.clause("V7")
@pytest.mark.parametrize("name", ["zeros-everywhere", "returned-inputs"])
def test_what_does_not_attend_fails_every_attention_vector(suite, name):
    """But for gradients that are 0, as those of padding alone, where zeros are right."""
    for vector in suite:
        if vector.case.operation.startswith(ATTENTION):
            zero_is_right = all(not x.any() for x in vector.expected.arrays.values())
            fails = failing(vector.case, vector.expected, BY_NAME[name])
            assert fails or (zero_is_right and name == "zeros-everywhere"), vector.case.id


@pytest.mark.clause("V7")
@pytest.mark.parametrize(("lengths", "fails"), [((4, 4, 4), False), ((4, 5, 3), True), ((6, 6), False), ((0, 6), True)])
def test_equal_document_lengths_hide_a_fault(lengths, fails):
    offsets = np.cumsum([0, *lengths]).tolist()
    case = attention_case({"cu_seqlens": offsets, "cu_seqlens_padded": offsets, "total_tokens": offsets[-1]})
    expected = Expected(answer(case), None, {"float64": {"out": 1e-12, "lse": 1e-12}})
    assert failing(case, expected, BY_NAME["equal-document-lengths"]) == fails


@pytest.mark.clause("V7")
def test_a_mutant_is_found_by_what_it_changes():
    changed = Mutant(
        "other-scale", "numerics", "scales by one half", "", lambda by: Implementation(scale=lambda case: 0.5)
    )
    assert changed.pieces == {"scale"}
