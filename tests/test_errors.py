"""The one error: closed codes, messages for people, and a trip through pickle (ranks send errors to each other)."""

import ast
import copy
import pickle
from pathlib import Path

import pytest
from support import refused

import refimpl
from refimpl.errors import CODES, SpecError

PUBLISHED = {
    "offsets_type", "offsets_shape", "offsets_start", "offsets_decreasing", "offsets_count", "real_exceeds_physical",
    "total_tokens", "lengths", "multiple_of", "position_ids", "segment_ids", "policy", "policy_retired", "environment",
    "cp_size", "cp_rank", "not_divisible", "mask", "int32_overflow", "padding_unsupported", "shape", "dtype", "heads",
    "softmax_scale", "lse", "ranks_disagree", "rank_failed", "missing_package", "usage",
}  # fmt: skip
"""Codes that others compare with. A code is never renamed, so this set only grows."""


@pytest.mark.clause("C6")
def test_published_codes_stay():
    assert set(CODES) >= PUBLISHED
    assert all(meaning and "\n" not in meaning for meaning in CODES.values())


@pytest.mark.clause("L2", "C6")
def test_is_a_value_error_with_code_and_message():
    with pytest.raises(ValueError, match="a message") as caught:
        raise SpecError("mask", "a message")
    assert caught.value.code == "mask"
    assert caught.value.message == str(caught.value) == "a message"


@pytest.mark.clause("C6")
def test_a_code_off_the_list_is_a_fault_of_the_caller():
    with pytest.raises(KeyError, match="nonsense"):
        SpecError("nonsense", "a message")


@pytest.mark.clause("C4")
@pytest.mark.parametrize("travel", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_survives_a_trip_between_ranks(travel):
    error = travel(SpecError("cp_rank", "rank 3 of 2"))
    assert type(error) is SpecError
    assert (error.code, error.message, str(error)) == ("cp_rank", "rank 3 of 2", "rank 3 of 2")


@pytest.mark.clause("C6")
def test_every_code_in_the_sources_is_on_the_list_and_every_listed_code_is_used():
    sources = [path for path in Path(refimpl.__file__).parent.rglob("*.py") if path.name != "errors.py"]
    words, raised = set(), set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "SpecError":
                raised |= {word.value for word in ast.walk(node.args[0]) if isinstance(word, ast.Constant)}
    codes = {word for word in raised if isinstance(word, str) and word.isidentifier()}
    assert codes, "the scan found no raise at all"
    assert codes <= set(CODES)
    assert set(CODES) <= words, "a code that nothing raises"


@pytest.mark.clause("C6")
def test_refused_itself_can_fail():
    with pytest.raises(AssertionError, match="shape"), refused("mask"):
        raise SpecError("shape", "another code")
    with pytest.raises(AssertionError), refused("mask", "row 7"):
        raise SpecError("mask", "row 8")
    with pytest.raises(AssertionError), refused("mask"):
        raise SpecError("mask", "two\nlines")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), refused("mask"):
        pass
