"""What is said of wrong answers without naming a fault: where they differ first, and what they look like."""

from dataclasses import replace

import numpy as np
import pytest
from faulty_answers import small_case
from random_cases import Layouts, expected_of

from refimpl.conformance.diagnose import diagnose
from refimpl.conformance.implementation import answer


def observed(change, operation="attention_forward", **options):
    """The patterns of an answer that was right but for `change(arrays)`."""
    case, expected = small_case(operation, **options)
    arrays = {name: x.copy() for name, x in answer(case).items()}
    change(arrays)
    return diagnose([(case, expected, arrays, "float64")]).observation


def set_item(name, value):
    def change(arrays):
        arrays[name] = value(arrays[name]) if callable(value) else value

    return change


@pytest.mark.clause("V11")
@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (set_item("out", np.zeros_like), "every wrong array is zero throughout"),
        (set_item("out", lambda x: x * 3), "out is 3 times the right value"),
        (set_item("out", lambda x: np.where(x > 0, np.nan, x)), "NaN or infinity in every wrong element"),
        (set_item("out", lambda x: np.roll(x, -2, axis=0)), "rows are shifted: row i holds what belongs in row i + 2"),
        (
            set_item("out", lambda x: x[[1, 0, *range(2, 12)]]),
            "rows are right but permuted: out of small-attention_forward holds the rows "
            "[1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]",
        ),
    ],
)
def test_patterns(change, pattern):
    assert pattern in observed(change).patterns


@pytest.mark.clause("V11")
def test_a_square_transpose_is_seen():
    """As many heads as rows: the shape is right, so only the numbers tell."""
    case, _ = small_case("attention_forward", lengths=(2, 4))
    tensors = {
        name: np.repeat(x, 3, axis=1) * np.arange(1, 7, dtype=np.float32)[None, :, None]
        for name, x in case.tensors.items()
    }
    case = replace(case, tensors=tensors)
    arrays = answer(case)
    diagnosis = diagnose([(case, expected_of(case), arrays | {"lse": arrays["lse"].T.copy()}, "float64")])
    assert "every wrong array is the transpose of the right one" in diagnosis.observation.patterns
    assert "transposed-lse" in (diagnosis.findings[0].mutant, *diagnosis.findings[0].twins)


@pytest.mark.clause("V11")
def test_a_rank_with_another_ranks_part_is_seen():
    def swap(arrays):
        arrays["out.0"], arrays["out.1"] = arrays["out.1"], arrays["out.0"]
        arrays["lse.0"], arrays["lse.1"] = arrays["lse.1"], arrays["lse.0"]

    seen = observed(swap, "context_parallel_forward")
    assert "rank 0 returns what belongs to rank 1" in seen.patterns
    assert not any("only rank" in pattern for pattern in seen.patterns)


@pytest.mark.clause("V11")
@pytest.mark.parametrize(
    ("change", "problem", "told"),
    [
        (lambda arrays: arrays.pop("lse"), "missing", "lse is missing"),
        (set_item("lse", lambda x: x[:, :3]), "form", "lse has another shape or dtype than expected"),
        (set_item("lse", lambda x: x.astype(np.int64)), "form", "lse has another shape or dtype than expected"),
    ],
)
def test_arrays_of_the_wrong_form(change, problem, told):
    seen = observed(change)
    assert seen.problem == problem
    assert told in str(seen)


@pytest.mark.clause("V11")
def test_operations_without_a_layout_are_described():
    rng = np.random.default_rng(0)
    merge = Layouts(3).merge()
    expected = expected_of(merge)
    out = expected.arrays["out"] + rng.normal(0, 1, expected.arrays["out"].shape)
    assert "out" in str(diagnose([(merge, expected, {**expected.arrays, "out": out}, "float64")]).observation)
    step = Layouts(3).step_mask()
    expected = expected_of(step)
    visible = expected.arrays["visible"].copy()
    visible[1, 2] ^= True
    seen = diagnose([(step, expected, {"visible": visible}, "float64")]).observation
    assert (seen.place.row, seen.place.key) == (1, 2)
