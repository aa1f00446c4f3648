"""The diagnosis of a check: what of the results it is asked about, and what not."""

import re
from functools import cache

import pytest
from faulty_answers import answer_of, right_answer
from random_cases import Layouts

from refimpl.conformance.cases import Vector, base_name
from refimpl.conformance.check import Answered, Checked, Crashed, Refused, Result, Skipped, Split, judge
from refimpl.conformance.declaration import Declaration
from refimpl.conformance.hint import diagnosed, diagnosis_lines
from refimpl.conformance.mutants import BY_NAME

DEFAULT = Declaration()
LACKS_LSE = Declaration(lacks=("lse",))


@cache
def battery():
    return [Vector(*item) for item in Layouts(7).battery()]


def outcome(given):
    return Refused(given) if isinstance(given, str) else Answered(given)


def faulty(vector, name):
    """What an implementation with this fault does."""
    given = answer_of(vector.case, vector.expected, BY_NAME[name].implementation)
    return Crashed("boom") if given == "crash" else outcome(given)


def right(vector):
    return outcome(right_answer(vector.expected))


def checked(outcome_of, declaration=DEFAULT, **more):
    results = tuple(judge(vector, outcome_of(vector), declaration) for vector in battery())
    return Checked("it", declaration, results, {vector.case.id: vector for vector in battery()}, **more)


def without_lse(answered):
    if isinstance(answered, Answered):
        return Answered({name: x for name, x in answered.arrays.items() if base_name(name) != "lse"})
    return answered


def named(found):
    return [finding.mutant for finding in found.diagnosis.findings]


@pytest.mark.clause("V11")
def test_a_fault_is_told_with_what_it_explains():
    found = diagnosed(checked(lambda vector: faulty(vector, "top-left-alignment")))
    assert named(found) == ["top-left-alignment"]
    line = diagnosis_lines(found)[0]
    assert line.startswith("looks like: top-left-alignment (aligns ")
    assert "failing cases; row" in line
    assert re.search(r"match top-left-alignment \(step_attention_forward-7-\d+\); seen in FA#951$", line)


@pytest.mark.clause("V8")
@pytest.mark.clause("V11")
def test_who_lacks_lse_is_diagnosed_without_it():
    """lse is not judged: neither its absence nor what stands in its place is a fault, or speaks against one."""
    found = diagnosed(checked(lambda vector: without_lse(faulty(vector, "top-left-alignment")), LACKS_LSE))
    assert named(found) == ["top-left-alignment"]
    assert found.diagnosis.findings[0].confidence == 1.0
    assert "lse" not in found.diagnosis.observation.outputs

    def scaled(vector):
        given = faulty(vector, "top-left-alignment")
        if isinstance(given, Answered):
            return Answered({name: 2 * x if base_name(name) == "lse" else x for name, x in given.arrays.items()})
        return given

    assert named(diagnosed(checked(scaled, LACKS_LSE))) == ["top-left-alignment"]


@pytest.mark.clause("V11")
@pytest.mark.parametrize(
    "done", [Split("ranks differ: rank 0 answered, rank 1 refused"), Skipped("gqa"), Skipped("no such feature"), None]
)
def test_who_did_not_answer_is_not_diagnosed(done):
    """Ranks that differ, skips that were not declared, and silence are failures in which there are no numbers."""
    found = checked(lambda vector: done)
    assert any(result.failed for result in found.results)
    assert diagnosed(found).diagnosis is None


@pytest.mark.clause("V11")
def test_a_skip_is_no_acceptance_of_what_must_be_refused():
    """Skipped refusals beside a fault: they fail, but the fault that accepts everything is not what is wrong."""

    def skipping(vector):
        return Skipped("refuse") if vector.case.operation == "refuse" else faulty(vector, "base-2-lse")

    assert named(diagnosed(checked(skipping))) == ["base-2-lse"]
    accepting = diagnosed(checked(lambda v: Answered({}) if v.case.operation == "refuse" else right(v)))
    assert {finding.kind for finding in accepting.diagnosis.findings} == {"refusal"}


@pytest.mark.clause("V9")
@pytest.mark.clause("V11")
def test_declared_skips_and_expected_failures_take_no_part():
    def refusing(vector):
        return Refused("mask") if "mask" in vector.case.features else faulty(vector, "base-2-lse")

    found = diagnosed(checked(refusing, Declaration(lacks=("mask",))))
    assert any(result.verdict == "skip" and result.refused for result in found.results)
    assert named(found) == ["base-2-lse"]
    assert found.diagnosis.findings[0].failed == len(found.failing)
    every = frozenset(vector.case.id for vector in battery())
    assert diagnosed(checked(lambda vector: faulty(vector, "base-2-lse"), known=every)).diagnosis is None


def test_there_is_nothing_to_say_of_right_answers_and_crashes():
    for found in (checked(right), checked(lambda vector: Crashed("boom"))):
        assert diagnosis_lines(diagnosed(found)) == []
    captured = Result("dq", "fail", "dq is wrong")
    assert diagnosed(Checked("a capture", Declaration(), (captured,), {})).diagnosis is None
