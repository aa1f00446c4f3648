"""Diagnosis: every mutant is recognised on layouts it was never seen on, by name, and with the ranks that have it."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from faulty_answers import EVERY_DTYPE, answer_of, answered, any_fails, items_of, right_answer, small_case
from random_cases import Layouts, expected_of

from refimpl.collectives import run_ranks
from refimpl.conformance import vectors
from refimpl.conformance.cases import PER_RANK, Case, Expected
from refimpl.conformance.comparison import CRASH
from refimpl.conformance.diagnose import EVIDENCE, diagnose
from refimpl.conformance.implementation import answer
from refimpl.conformance.mutants import BY_NAME, MUTANTS
from refimpl.context_parallel import Parts, context_parallel_backward, context_parallel_forward
from refimpl.faults import FAULTS, inject
from refimpl.partition import partition


class Tally:
    """How often a mutant was seen, and how often it was named."""

    def __init__(self):
        self.seen, self.kind, self.name, self.instead = Counter(), Counter(), Counter(), Counter()

    def sweep(self, seeds, dtype="float64", layouts=None):
        """Every mutant on the layouts of these seeds; with `layouts`, until it was wrong on so many of them."""
        rng = np.random.default_rng(0)
        for seed in seeds:
            left = [each for each in MUTANTS if layouts is None or self.seen[each.name] < layouts]
            battery = Layouts(seed).battery(dtypes=("float64",) if dtype == "float64" else EVERY_DTYPE) if left else []
            for each in left:
                items = items_of(battery, each, dtype, rng)
                if items is not None and any_fails(items):
                    self.add(each, diagnose(items).findings)

    def add(self, each, findings):
        self.seen[each.name] += 1
        first = findings[0] if findings else None
        self.kind[each.name] += first is not None and first.kind == each.kind
        if first is not None and each.name in (first.mutant, *first.twins):
            self.name[each.name] += 1
        else:
            self.instead[each.name, first and first.mutant] += 1

    def check(self, least_seen, share=0.95):
        rare = {each.name: self.seen[each.name] for each in MUTANTS if self.seen[each.name] < least_seen}
        assert rare == {}, "too few layouts on which these show"
        missed = {name for name in self.seen if self.kind[name] < share * self.seen[name]}
        assert missed == set(), self.instead
        assert self.name.total() >= 0.99 * self.seen.total(), self.instead


@pytest.mark.clause("V11")
def test_mutants_are_recognised_on_a_few_layouts():
    tally = Tally()
    tally.sweep([501, 502, 503])
    tally.sweep([500], "bfloat16")
    assert tally.seen.total() > 3 * len(MUTANTS)
    tally.check(least_seen=0)


@pytest.mark.slow
@pytest.mark.clause("V11")
def test_mutants_are_recognised_on_twenty_layouts():
    """Each on twenty layouts on which it is wrong at all: many faults need padding, a window or one of the policies."""
    tally = Tally()
    tally.sweep(range(120), layouts=20)
    tally.check(least_seen=20)


@pytest.mark.slow
@pytest.mark.clause("V11")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_mutants_are_recognised_in_low_precision(dtype):
    """Faults as small as rounding may stay without a name, those of bfloat16 above all, but never get a wrong one."""
    tally = Tally()
    tally.sweep(range(100, 106), dtype)
    assert {told for _, told in tally.instead} <= {None}, tally.instead
    assert tally.kind.total() >= 0.98 * tally.seen.total(), tally.instead


def run_with(case, dtype, wrong):
    """A case answered by the public reference in `dtype`, with the group and the parts that `wrong(group)` gives."""
    tensors = {name: x.astype(dtype) for name, x in case.tensors.items()}
    layout, policy, cp_size = case.layout, case.policy, case.cp_size
    shards = {name: partition(x, layout, policy, cp_size) for name, x in tensors.items()}

    def rank(real_group):
        group, parts = wrong(real_group)
        q, k, v = (shards[name][group.rank] for name in ("q", "k", "v"))
        scale = case.inputs["softmax_scale"]
        out, lse, saved = context_parallel_forward(q, k, v, layout, policy, group, case.mask, scale, parts)
        if "dout" not in shards:
            return {"out": out, "lse": lse}
        return dict(
            zip(
                ("dq", "dk", "dv"),
                context_parallel_backward(shards["dout"][group.rank], saved, group, parts),
                strict=True,
            )
        )

    results = run_ranks(cp_size, rank)
    wide = np.float64 if dtype == np.float64 else np.float32
    return {f"{name}.{r}": np.asarray(x).astype(wide) for r, part in enumerate(results) for name, x in part.items()}


def top_left(parts):
    """Parts whose every step is aligned to the top left."""

    def metadata(*arguments):
        meta = parts.rank_metadata(*arguments)
        steps = (replace(step, first_query=np.zeros(len(step.cu_seqlens_q) - 1, np.int32)) for step in meta.steps)
        return replace(meta, steps=tuple(steps))

    return replace(parts, rank_metadata=metadata)


@cache
def ranks_only(seed):
    """Context-parallel cases of a random layout, without scores so large that rounding takes over."""
    battery = Layouts(seed).battery(dtypes=EVERY_DTYPE)
    return [
        (case, expected)
        for case, expected in battery
        if case.operation.startswith("context_parallel") and "extreme" not in case.features
    ]


def a_dtype(name, require):
    return require("ml_dtypes").bfloat16 if name == "bfloat16" else np.dtype(name)


@pytest.mark.clause("V11")
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_fault_of_another_implementation_is_named(dtype, require):
    """The tiled reference in its own precision, aligned to the top left on all ranks."""
    for seed in (0, 7):
        battery = ranks_only(seed)
        given = [
            run_with(case, a_dtype(dtype, require), lambda group: (group, top_left(Parts()))) for case, _ in battery
        ]
        diagnosis = diagnose([(*item, arrays, dtype) for item, arrays in zip(battery, given, strict=True)])
        first = diagnosis.findings[0]
        assert "top-left-alignment" in (first.mutant, *first.twins), diagnosis.lines()
        assert first.kind == "mask"
        assert first.rank is None
        assert first.reproduced == first.failed


@pytest.mark.clause("V11", "K4")
@pytest.mark.parametrize(
    ("name", "fault", "rows"),
    [
        ("forward-more-queries", "top-left-alignment", "rows 0-3 of document 0"),
        ("backward-gqa", "overwritten-heads", "keys: rows 0-2 of document 0 and rows 3-8 of document 1"),
        ("forward-more-queries", "nan-for-rows-without-keys", "rows 0-2 of document 0"),
    ],
)
def test_faults_of_a_step_are_named_with_its_own_rows(name, fault, rows):
    """Queries and keys of a step are counted each in their own buffer."""
    vector = next(vector for vector in vectors.load() if vector.case.id == f"step-attention-{name}")
    diagnosis = diagnose([answered(vector.case, vector.expected, fault)])
    first = diagnosis.findings[0]
    assert fault in (first.mutant, *first.twins)
    assert first.rows == f"{rows} match {first.mutant} ({vector.case.id})"
    assert diagnosis.observation.place.document == 0


NAMES_OF_FAULTS = {
    "wrong-alignment": "top-left-alignment",
    "skipped-reduce": "missing-reduction",
    "all-zeros": "zeros-everywhere",
    "leaked-document": "leak-from-document-before",
    "swapped-chunks": "swapped-shards",
}


@pytest.mark.clause("V11")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank_is_named_with_the_rank(fault, require):
    seed, rank = 0, 1
    battery = ranks_only(seed)
    dtype = np.dtype(np.float32)
    given = [run_with(case, dtype, lambda group: inject(fault, rank, group, Parts())) for case, _ in battery]
    diagnosis = diagnose([(*item, arrays, "float32") for item, arrays in zip(battery, given, strict=True)])
    first = diagnosis.findings[0]
    assert NAMES_OF_FAULTS[fault] in (first.mutant, *first.twins), diagnosis.lines()
    assert first.rank == (None if fault == "all-zeros" else rank)


PER_RANK_FAULTS = [
    "rows-one-late",
    "divided-query-offsets",
    "top-left-alignment",
    "overwritten-heads",
    "overwritten-steps",
    "buffer-order-for-rank-order",
    "reduction-for-next-rank",
]
"""Some that reach the results of other ranks: by the rows that they gather, or by what is reduced."""


@pytest.mark.clause("V11")
@pytest.mark.parametrize("name", PER_RANK_FAULTS)
def test_a_fault_of_one_rank_is_named_though_it_reaches_others(name):
    """A rank that reduces wrongly spoils dk and dv everywhere; the rank that has the fault is told all the same."""
    rank, named = 1, 0
    for seed in (1100, 1101, 1102):
        items = []
        for case, expected in Layouts(seed).battery():
            per_rank = case.operation in PER_RANK
            given = answer_of(case, expected, BY_NAME[name].implementation, rank) if per_rank else None
            items.append((case, expected, right_answer(expected) if given is None else given, "float64"))
        if any_fails(items):
            first = diagnose(items).findings[0]
            assert (name in (first.mutant, *first.twins), first.rank) == (True, rank), (seed, first)
            named += 1
    assert named


@pytest.mark.clause("V11")
def test_affected_rows_are_told_in_words():
    """Rank 1 holds rows 6 to 11 of document 1, which begins at row 5; its first query sees the first key alone."""
    diagnosis = diagnose([answered(*small_case("context_parallel_forward"), "top-left-alignment")])
    (finding,) = diagnosis.findings
    assert finding.rows == "rows 6-11 of document 1 match top-left-alignment (small-context_parallel_forward)"
    assert finding.kind == "mask"
    assert finding.source == "FA#951"
    assert finding.confidence == finding.elements == 1.0
    assert (finding.reproduced, finding.failed) == (1, 1)
    seen = diagnosis.observation
    assert (seen.case, seen.name, seen.problem, seen.outputs) == (
        "small-context_parallel_forward",
        "out.1",
        "value",
        ("out", "lse"),
    )
    assert (seen.place.rank, seen.place.row, seen.place.document, seen.place.head) == (1, 6, 1, 0)
    assert "only rank 1 is wrong" in seen.patterns
    lines = diagnosis.lines()
    assert lines[0].startswith("looks like top-left-alignment: ")
    assert "out.1 at rank 1, row 6 (document 1, position 1), head 0, column 0: got " in lines[1]
    assert not any("\n" in line for line in lines)


@pytest.mark.clause("V11")
def test_padding_and_single_rows_in_words():
    case, expected = small_case("attention_forward", lengths=(3, 4), padded=(4, 4))
    given = answer(case)
    given["out"] = given["out"].copy()
    given["out"][3] = 1000.0
    diagnosis = diagnose([(case, expected, given, "float64")])
    assert diagnosis.findings == ()
    assert "only padding rows are wrong" in diagnosis.observation.patterns
    both = diagnose([answered(case, expected, "unwritten-output-in-padding")])
    assert both.findings[0].rows == "padding row 3 matches unwritten-output-in-padding (small-attention_forward)"


@pytest.mark.clause("V11")
def test_twins_are_told_together_and_a_passing_case_parts_them():
    """On gradients alone, an implementation of zeros is one whose gradients are zeros."""
    backward = answered(*small_case("attention_backward"), "zero-gradients")
    together = diagnose([backward]).findings[0]
    assert (together.mutant, together.kind) == ("zeros-everywhere", "zeros")
    assert together.twins == ("zero-gradients", "offsets-cut-at-argmin")
    forward = answered(*small_case("attention_forward"))
    apart = diagnose([backward, forward]).findings[0]
    assert (apart.mutant, apart.twins) == ("zero-gradients", ())
    assert "only gradients are wrong" in diagnose([backward, forward]).observation.patterns


@pytest.mark.clause("V11")
def test_a_mutant_that_would_fail_a_passing_case_is_not_it():
    failing = answered(*small_case("context_parallel_forward"), "top-left-alignment")
    assert diagnose([failing]).findings != ()
    passing = small_case("context_parallel_forward", lengths=(3, 9))
    assert diagnose([failing, answered(*passing)]).findings == ()


@pytest.mark.clause("V11")
def test_a_fault_with_one_feature_alone_has_that_scope():
    """A fault that sits in one policy's code: the mutant has it in all, but the cases tell where it is not."""

    def item(policy, *faults):
        case, expected = small_case("context_parallel_forward", lengths=(8, 16), policy=policy)
        return answered(replace(case, features=("context_parallel", policy)), expected, *faults)

    policies = ("packed_contiguous", "packed_dual_chunk_swap", "dual_chunk_swap")
    diagnosis = diagnose([item(policies[0], "top-left-alignment"), *(item(policy) for policy in policies[1:])])
    assert diagnosis.findings[0].mutant == "top-left-alignment"
    assert diagnosis.findings[0].scope == "with packed_contiguous"
    assert "only with packed_contiguous" in diagnosis.lines()[0]
    assert "every case with packed_contiguous fails, and no other" in diagnosis.observation.patterns

    diagnosis = diagnose([item(policies[0]), *(item(policy, "top-left-alignment") for policy in policies[1:])])
    assert diagnosis.findings[0].mutant == "top-left-alignment"
    assert "only without packed_contiguous" in diagnosis.lines()[0]


@pytest.mark.clause("V11")
@pytest.mark.parametrize(
    "faults",
    [
        ("base-2-lse", "missing-reduction"),
        ("labels-across-documents", "missing-delta"),
        ("merge-of-equals", "wrapped-rank"),
    ],
)
def test_two_faults_are_both_named(faults):
    diagnosis = diagnose([answered(*item, *faults) for item in Layouts(0).battery()])
    assert {finding.mutant for finding in diagnosis.findings} == set(faults)
    assert sum(finding.reproduced for finding in diagnosis.findings) == diagnosis.findings[0].failed


@pytest.mark.clause("V11")
def test_refusals_and_crashes():
    case, expected = small_case("attention_forward")
    refused = diagnose([(case, expected, "lengths", "float64")])
    assert refused.findings == (), "no mutant refuses a layout without empty documents"
    assert "refused with lengths, expected to be answered" in str(refused.observation)
    crashed = diagnose([(case, expected, CRASH, "float64")])
    assert crashed.findings == ()

    empty, right = small_case("attention_forward", lengths=(5, 0, 7))
    assert diagnose([answered(empty, right, "refused-empty-documents")]).findings[0].mutant == "refused-empty-documents"

    inputs = {"cu_seqlens": [0, 7], "cu_seqlens_padded": [0, 7], "total_tokens": 7, "call": "partition"}
    inputs |= {"policy": "dual_chunk_swap", "cp_size": 2, "cp_rank": 0}
    refuse = Case("refuse", "refuse", "", (), (), inputs)
    accepted = diagnose([(refuse, Expected({}, "not_divisible"), {}, "float64")])
    assert accepted.findings[0].mutant == "dropped-remainder"
    assert accepted.observation.problem == "refusal"
    assert "answered, expected to be refused with not_divisible" in accepted.lines()[1]


@pytest.mark.clause("V11")
def test_nothing_is_told_by_a_reference_that_is_wrong_itself():
    """Mutants of a broken reference are wrong in two ways: here, NaN by its own fault is what every one would give."""
    case, expected = small_case("attention_forward")
    other = Expected({**expected.arrays, "out": expected.arrays["out"] + 1}, None, expected.bounds)
    diagnosis = diagnose([(case, other, answer_of(case, expected, BY_NAME["base-2-lse"].implementation), "float64")])
    assert diagnosis.findings == ()
    assert "the reference that faults are made from is itself wrong there" in diagnosis.lines()[-1]


@pytest.mark.clause("V11")
def test_there_must_be_something_to_diagnose():
    with pytest.raises(ValueError, match="nothing to diagnose"):
        diagnose([answered(*small_case("attention_forward"))])


@pytest.mark.clause("V11")
def test_a_suite_that_fails_everywhere_is_diagnosed_from_some_of_it():
    """Not every mutant is replayed on every failing case, but what is named is held against all of them."""
    suite = vectors.load()
    zeros = BY_NAME["zeros-everywhere"]
    items = [(v.case, v.expected, answer_of(v.case, v.expected, zeros.implementation), "float64") for v in suite]
    finding = diagnose(items).findings[0]
    assert finding.mutant == "zeros-everywhere"
    assert finding.reproduced == finding.failed > 100


@pytest.mark.clause("V11")
def test_little_evidence_names_nothing():
    """One wrong integer of a few says less than EVIDENCE; the same fault in more of them is named."""
    few = Case("few", "labels", "", (), (), {"cu_seqlens": [0, 4], "total_tokens": 4, "ids": [5, 6, 7, 8]})
    many = replace(few, id="many", inputs={"cu_seqlens": [0, 12], "total_tokens": 12, "ids": list(range(12))})
    items = [answered(case, expected_of(case), "labels-of-shards") for case in (few, many)]
    assert diagnose(items[:1]).findings == ()
    assert diagnose(items).findings[0].mutant == "labels-of-shards"
    assert EVIDENCE > 2 + 7
