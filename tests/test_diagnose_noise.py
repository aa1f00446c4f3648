"""Diagnosis: what no known fault gives is never taken for one, whatever it looks like, and costs little time."""

import time
from dataclasses import replace

import numpy as np
import pytest
from faulty_answers import EVERY_DTYPE, any_fails, items_of, right_answer
from random_cases import Layouts

from refimpl.conformance import vectors
from refimpl.conformance.cases import base_name
from refimpl.conformance.comparison import CRASH
from refimpl.conformance.diagnose import diagnose
from refimpl.conformance.implementation import answer
from refimpl.conformance.mutants import BY_NAME
from refimpl.errors import SpecError


def rows_first(name, x):
    return np.moveaxis(x, 1, 0) if name.startswith("lse") else x


def perturbed(rng, x, rows):
    x += rng.normal(0, rng.choice([1e-3, 0.1, 1.0]), x.shape)


def some_elements(rng, x, rows):
    i = rng.integers(x.size, size=max(1, x.size // 20))
    x.reshape(-1)[i] = rng.normal(0, 1, len(i))


def some_rows(rng, x, rows):
    rows[rng.integers(len(rows), size=2)] = rng.normal(0, 1, rows[:1].shape)


def scaled(rng, x, rows):
    x *= rng.uniform(0.3, 3)


def swapped_rows(rng, x, rows):
    i, j = rng.integers(len(rows), size=2)
    rows[[i, j]] = rows[[j, i]]


def reversed_sign(rng, x, rows):
    x *= -1


def not_numbers(rng, x, rows):
    x.reshape(-1)[rng.integers(x.size, size=1 + x.size // 10)] = np.nan


def moved(rng, x, rows):
    x += rng.normal()


def zero_rows(rng, x, rows):
    rows[rng.integers(len(rows), size=2)] = 0


def shuffled_columns(rng, x, rows):
    x[...] = rng.permuted(x, axis=-1)


def gaussian(rng, x, rows):
    x[...] = rng.normal(0, 1, x.shape)


def shuffled_rows(rng, x, rows):
    rows[...] = rng.permuted(rows, axis=0) if rows.ndim == 1 else rows[rng.permutation(len(rows))]


def one_element(rng, x, rows):
    i = rng.integers(x.size)
    x.reshape(-1)[i] = -x.reshape(-1)[i] if rng.random() < 0.5 else x.reshape(-1)[i] + rng.choice([-1, 1, 2])


def huge(rng, x, rows):
    x[...] = 1e300 * rng.choice([-1, 1], x.shape)


def ones(rng, x, rows):
    x[...] = 1


def beyond_bounds(times):
    """Right answers, off by about so many times what is allowed."""

    def wrong(rng, case, expected, dtype):
        arrays = {}
        for name, right in expected.arrays.items():
            off = rng.uniform(0.5, 1.5, right.shape) * rng.choice([-1, 1], right.shape)
            allowed = times * expected.bounds.get(dtype, {}).get(base_name(name), 0.0)
            arrays[name] = right + allowed * off if right.dtype.kind == "f" else right
        return arrays

    return wrong


barely_wrong, hundredfold_wrong = beyond_bounds(3), beyond_bounds(100)


def with_tensors(case, tensors):
    """The right answer to the question with other numbers in it."""
    try:
        return answer(replace(case, tensors=case.tensors | tensors))
    except SpecError as error:
        return error.code


def redrawn(rng, x):
    """Other numbers where x is finite."""
    return np.where(np.isfinite(x), (rng.integers(-32, 32, x.shape) / 16).astype(np.float32), x)


def of_other_tensors(rng, case, expected, dtype):
    return with_tensors(case, {name: redrawn(rng, x) for name, x in case.tensors.items()})


def of_other_first_tensor(rng, case, expected, dtype):
    return with_tensors(case, {name: redrawn(rng, x) for name, x in list(case.tensors.items())[:1]})


NOISES = [
    perturbed,
    some_elements,
    some_rows,
    scaled,
    swapped_rows,
    reversed_sign,
    not_numbers,
    moved,
    zero_rows,
    shuffled_columns,
    gaussian,
    shuffled_rows,
    one_element,
    huge,
    ones,
]
"""Noise in an array of floats, in place."""

ANSWERS = [barely_wrong, hundredfold_wrong, of_other_tensors, of_other_first_tensor]
"""Wrong answers made from the case: `(rng, case, expected, dtype)`."""


def spoilt(rng, noise, expected):
    """The right arrays with noise in them: floats as `noise` has it, integers off by a few in places."""
    arrays = {}
    for name, right in expected.arrays.items():
        x = np.ascontiguousarray(right).copy()
        if x.size and x.ndim and x.dtype.kind == "f":
            noise(rng, x, rows_first(name, x))
        elif x.size and x.ndim and x.dtype.kind == "b":
            x.reshape(-1)[rng.integers(x.size, size=3)] ^= True
        elif x.size and x.ndim:
            i = rng.integers(x.size, size=max(1, x.size // 10))
            x.reshape(-1)[i] += rng.integers(1, 9, len(i)) * rng.choice([-1, 1], len(i))
        arrays[name] = x
    return arrays


def named_in_noise(seeds, trials):
    """Diagnoses of noise that name a fault, and how many did not: noise in one case, one operation, or all."""
    named, unnamed = [], 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        battery = Layouts(seed).battery(dtypes=EVERY_DTYPE)
        operations = sorted({case.operation for case, _ in battery})
        for trial in range(trials):
            noise = (*NOISES, *ANSWERS)[trial % (len(NOISES) + len(ANSWERS))]
            dtype = str(rng.choice(["float64", "float32", "bfloat16"]))
            extent, one, operation = rng.integers(3), rng.integers(len(battery)), rng.choice(operations)
            items = []
            for i, (case, expected) in enumerate(battery):
                hit = extent == 0 or (extent == 1 and i == one) or (extent == 2 and case.operation == operation)
                spoil = hit and expected.error is None
                given = right_answer(expected)
                if spoil and noise in ANSWERS:
                    given = noise(rng, case, expected, dtype)
                elif spoil:
                    given = spoilt(rng, noise, expected)
                items.append((case, expected, given, dtype))
            if any_fails(items):
                found = diagnose(items).findings
                named += [(noise.__name__, dtype, int(extent), finding.mutant) for finding in found]
                unnamed += not found
    return named, unnamed


@pytest.mark.clause("V11")
def test_noise_is_never_named():
    named, unnamed = named_in_noise([900], trials=57)
    assert named == []
    assert unnamed > 25


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.clause("V11")
def test_much_noise_is_never_named():
    named, unnamed = named_in_noise(range(901, 913), trials=114)
    assert named == []
    assert unnamed > 800


def all_missing(expected):
    return {}


def one_missing(expected):
    return dict(list(expected.arrays.items())[1:])


def shorter(expected):
    return {name: x[..., :-1] if x.ndim else x for name, x in expected.arrays.items()}


def flat(expected):
    return {name: np.ravel(x)[None] for name, x in expected.arrays.items()}


def doubled(expected):
    return {name: np.concatenate([x, x]) if x.ndim else x for name, x in expected.arrays.items()}


def not_a_number(expected):
    return {name: np.full(x.shape, np.nan) if x.dtype.kind == "f" else x for name, x in expected.arrays.items()}


def infinite(expected):
    return {name: np.full(x.shape, np.inf) if x.dtype.kind == "f" else x for name, x in expected.arrays.items()}


def as_integers(expected):
    arrays = expected.arrays.items()
    return {name: np.nan_to_num(x, neginf=0).astype(np.int64) if x.dtype.kind == "f" else x for name, x in arrays}


def as_text(expected):
    return {name: x.astype(str) for name, x in expected.arrays.items()}


def crashed(expected):
    return CRASH


@pytest.mark.clause("V11")
@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (all_missing, "float64"),
        (one_missing, "bfloat16"),
        (shorter, "float64"),
        (flat, "bfloat16"),
        (doubled, "float64"),
        (not_a_number, "bfloat16"),
        (not_a_number, "float64"),
        (infinite, "bfloat16"),
        (as_integers, "float64"),
        (as_text, "bfloat16"),
        (crashed, "float64"),
    ],
)
def test_answers_of_the_wrong_form_name_nothing(given, dtype):
    """In one case, in one operation, and everywhere."""
    battery = [item for item in Layouts(910).battery(dtypes=EVERY_DTYPE) if item[1].error is None]
    forward = "context_parallel_forward"
    last = max(i for i, (case, _) in enumerate(battery) if case.operation == forward)
    for is_hit in (lambda i: i == last, lambda i: battery[i][0].operation == forward, lambda i: True):
        items = [(*item, given(item[1]) if is_hit(i) else item[1].arrays, dtype) for i, item in enumerate(battery)]
        assert any_fails(items)
        diagnosis = diagnose(items)
        assert diagnosis.findings == ()
        assert all(line.isprintable() for line in diagnosis.lines())


@pytest.mark.clause("V11")
def test_a_fault_beside_an_answer_of_the_wrong_form_is_still_named():
    """What is wrong in another way is not explained, and hides nothing."""
    battery = Layouts(0).battery()
    items = items_of(battery, BY_NAME["base-2-lse"])
    broken = next(i for i, item in enumerate(items) if item[0].operation == "attention_backward")
    case, expected, given, dtype = items[broken]
    items[broken] = (case, expected, {**given, "dq": given["dq"][:-1]}, dtype)
    (finding,) = diagnose(items).findings
    assert finding.mutant == "base-2-lse"
    assert finding.reproduced == finding.failed - 1


@pytest.mark.clause("V11")
@pytest.mark.parametrize("name", ["base-2-lse", "missing-delta", "no-document-boundaries"])
def test_a_fault_that_gives_nearly_these_numbers_is_not_named(name):
    """One element of each wrong array is off by a little more: the numbers are no longer those of the fault."""
    items = []
    for case, expected, given, dtype in items_of(Layouts(0).battery(), BY_NAME[name]):
        is_attention = not isinstance(given, str) and case.operation.endswith("ward")
        arrays = {array: x.copy() for array, x in given.items()} if is_attention else {}
        for array, x in arrays.items():
            is_wrong = np.isfinite(x) & ~np.isclose(x, expected.arrays[array])
            x.reshape(-1)[np.flatnonzero(is_wrong)[:1]] *= 1.001
        items.append((case, expected, arrays or given, dtype))
    told = [finding.rows for finding in diagnose(items).findings]
    assert not any("ward-0-" in rows for rows in told), told


def suite_with(given, only=""):
    """Items of all vectors, those of operations that begin with `only` as `given(expected)`."""
    return [
        (v.case, v.expected, right_answer(v.expected), "float64")
        if v.expected.error is not None or not v.case.operation.startswith(only)
        else (v.case, v.expected, given(v.expected), "float64")
        for v in vectors.load()
    ]


def zeros(expected):
    return {name: np.zeros_like(x) for name, x in expected.arrays.items()}


def half_as_much_again(expected):
    """Wrong alike on all ranks, and like no mutant: every rank is suspected alone."""
    return {name: 1.5 * x if x.dtype.kind == "f" else x for name, x in expected.arrays.items()}


@pytest.mark.clause("V11")
@pytest.mark.parametrize(("given", "only"), [(zeros, ""), (half_as_much_again, "context_parallel")])
def test_a_whole_suite_of_wrong_answers_takes_seconds(given, only):
    """A few on any machine; 20 would make people turn it off."""
    items = suite_with(given, only)
    start = time.process_time()
    diagnosis = diagnose(items)
    assert time.process_time() - start < 20
    assert [finding.mutant for finding in diagnosis.findings] == (["zeros-everywhere"] if given is zeros else [])
