"""Answers of implementations with a fault, in the form in which a diagnosis takes them."""

import numpy as np
from random_cases import expected_of

from refimpl.conformance.cases import Case
from refimpl.conformance.comparison import CRASH, Item, Reply, replay, target_of, tolerance
from refimpl.conformance.implementation import REFERENCE, answer
from refimpl.conformance.mutants import BY_NAME
from refimpl.conformance.yardstick import ROUNDING
from refimpl.errors import SpecError

EVERY_DTYPE = "every dtype"
"""For `Layouts.battery`: bounds by the kit's own rule."""


def answer_of(case, expected, by, only_rank=None):
    """The answer of an implementation as a check hands it over: arrays, or what became of the request."""
    try:
        return answer(case, by, only_rank)
    except SpecError as error:
        return error.code
    except Exception:
        return CRASH


def right_answer(expected):
    return expected.arrays if expected.error is None else expected.error


def in_dtype(case, expected, given, dtype, rng):
    """The same answer as an implementation in `dtype` would give it: rounded, and off by some of what is allowed."""
    if isinstance(given, str):
        return given
    target = target_of(case, expected)
    allowed = 0.2 * tolerance(target, Reply.of(target, given), dtype)  # of which SLACK is one half
    rounded = {}
    for name, x in given.items():
        right = expected.arrays.get(name)
        if right is None or right.dtype.kind != "f" or right.shape != x.shape:
            rounded[name] = x
            continue
        off = rng.uniform(-1, 1, x.shape) * allowed[target.slices[name]].reshape(x.shape)
        with np.errstate(all="ignore"):
            rounded[name] = ROUNDING[dtype](np.where(np.isfinite(x) & (x != 0), x + off, x).astype(np.float32))
    return rounded


def items_of(battery, each, dtype="float64", rng=None):
    """What the mutant answers to all cases; None if it is right everywhere."""
    items, wrong = [], False
    for case, expected in battery:
        told = replay(target_of(case, expected), each)
        given = right_answer(expected) if told is None else told.error or _arrays(case, expected, told)
        wrong |= told is not None
        given = given if dtype == "float64" else in_dtype(case, expected, given, dtype, rng)
        items.append((case, expected, given, dtype))
    return items if wrong else None


def _arrays(case, expected, told):
    """The arrays of a replay, so that no mutant need be replayed twice."""
    target = target_of(case, expected)
    arrays = {}
    for name, right in expected.arrays.items():
        if name in told.odd:
            arrays |= {} if told.odd[name] is None else {name: told.odd[name]}
        else:
            arrays[name] = told.values[target.slices[name]].reshape(right.shape).astype(right.dtype)
    return arrays


def any_fails(items):
    return any(Item(*item).failed for item in items)


def small_case(operation, lengths=(5, 7), padded=None, **inputs):
    """Documents of these lengths on two ranks, contiguous; numbers as everywhere."""
    rng = np.random.default_rng(1)
    real, physical = (np.cumsum([0, *x]).tolist() for x in (lengths, padded or lengths))
    total = physical[-1]
    names = ("q", "k", "v", "dout") if operation.endswith("backward") else ("q", "k", "v")
    tensors = {name: (rng.integers(-32, 32, (total, 2, 4)) / 16).astype(np.float32) for name in names}
    layout = {"cu_seqlens": real, "cu_seqlens_padded": physical, "total_tokens": total}
    options = {"policy": "packed_contiguous", "cp_size": 2, "causal": True, "window": [-1, -1], "softmax_scale": None}
    case = Case(f"small-{operation}", operation, "", (), (), layout | options | inputs, tensors)
    return case, expected_of(case)


def answered(case, expected, *names, only_rank=None):
    """The item of an implementation that has these faults."""
    by = REFERENCE
    for name in names:
        by = BY_NAME[name].change(by)
    return case, expected, answer_of(case, expected, by, only_rank), "float64"
