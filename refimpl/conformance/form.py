"""The form of a vector's JSON: what `specs/vectors/schema.json` says, without a package that reads schemas.

Defines `check_vector`, and `Checker`, which other readers of JSON use too.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from refimpl.conformance.cases import FEATURES, OPERATIONS, PER_RANK
from refimpl.errors import CODES, SpecError
from refimpl.partition import Policy

FORMAT = 1
MAX_ROWS = 1 << 20
MAX_RANKS = 64

ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
CLAUSE = re.compile(r"[A-Z][1-9][0-9]*")
ARRAY_NAME = re.compile(r"[a-z_]+(\.[0-9]+){0,2}")
DTYPES = ("float64", "float32", "float16", "bfloat16")
OUTPUTS = ("out", "lse", "dq", "dk", "dv", "x")
KEYS = (
    "format",
    "id",
    "operation",
    "why",
    "clauses",
    "features",
    "inputs",
    "tensors",
    "expected",
    "expected_tensors",
    "error",
    "bounds",
    "kills",
)

LAYOUT = ("cu_seqlens", "cu_seqlens_padded", "total_tokens")
MASK = ("causal", "window")
RANKS = ("policy", "cp_size")
STEP = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
INPUTS = {
    "positions": LAYOUT,
    "labels": (*LAYOUT, "ids"),
    "from_position_ids": ("ids",),
    "from_segment_ids": ("ids", "padding_id"),
    "partition": (*LAYOUT, *RANKS),
    "unpartition": (*LAYOUT, *RANKS),
    "metadata": (*LAYOUT, *RANKS, *MASK),
    "needed_rows": (*LAYOUT, *RANKS, *MASK),
    "mask": (*LAYOUT, *MASK),
    "step_mask": (*STEP, *MASK),
    "step_attention_forward": (*STEP, *MASK, "softmax_scale"),
    "step_attention_backward": (*STEP, *MASK, "softmax_scale"),
    "merge": (),
    "attention_forward": (*LAYOUT, *MASK, "softmax_scale"),
    "attention_backward": (*LAYOUT, *MASK, "softmax_scale"),
    "context_parallel_forward": (*LAYOUT, *RANKS, *MASK, "softmax_scale"),
    "context_parallel_backward": (*LAYOUT, *RANKS, *MASK, "softmax_scale"),
}
"""The inputs that a case of each operation has, all of them; `strides` may stand beside q, k, v and dout."""

REFUSED_INPUTS = {
    "layout": (*LAYOUT, "call"),
    "partition": (*LAYOUT, "call", *RANKS, "cp_rank"),
    "metadata": (*LAYOUT, "call", *RANKS, "cp_rank", *MASK),
    "from_position_ids": ("call", "ids"),
    "from_segment_ids": ("call", "ids", "padding_id"),
    "attention": (*LAYOUT, "call", *MASK, "softmax_scale", "shapes", "dtypes"),
}

REFUSED_DTYPES = ("float64", "float32", "float16", "int32", "int64", "bool")
"""The dtypes of tensors in a request that is to be refused."""

ANSWERS = {
    "positions": {"positions", "document_ids"},
    "labels": {"labels"},
    "from_position_ids": set(LAYOUT),
    "from_segment_ids": set(LAYOUT),
    "partition": {"indices"},
    "unpartition": {"x"},
    "metadata": {
        "cu_seqlens_q",
        "cu_seqlens_q_padded",
        "cu_seqlens_kv",
        "cu_seqlens_kv_padded",
        "max_seqlen_q",
        "max_seqlen_kv",
    },
    "needed_rows": {"kv_rows"},
    "mask": {"visible"},
    "step_mask": {"visible"},
    "step_attention_forward": {"out", "lse"},
    "step_attention_backward": {"dq", "dk", "dv"},
    "merge": {"out", "lse"},
    "attention_forward": {"out", "lse"},
    "attention_backward": {"dq", "dk", "dv"},
    "context_parallel_forward": {"out", "lse"},
    "context_parallel_backward": {"dq", "dk", "dv"},
    "refuse": set(),
}
"""The base names of the arrays that each operation is answered with."""


class Checker:
    """Refuses a file, by name, for the first thing that is not as it should be."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def that(self, is_so: bool, complaint: str) -> None:
        """Refuse with SpecError `file` and this complaint, unless it is so."""
        if not is_so:
            raise SpecError("file", f"{self.path}: {complaint}")

    def keys(self, value: Any, expected: Iterable[str], what: str) -> None:
        """An object with just these keys."""
        self.that(isinstance(value, dict), f"{what}: expected an object")
        for key in expected:
            self.that(key in value, f"{what}: {key!r} is missing")
        for key in value:
            self.that(key in expected, f"{what}: unknown key {key!r}")

    def integer(self, value: Any, what: str, least: int, most: int) -> None:
        """An integer, which no bool is, within these bounds."""
        is_one = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        self.that(is_one, f"{what}: expected an integer from {least} to {most}")

    def text(self, value: Any, pattern: re.Pattern[str], what: str) -> None:
        """A string that matches the pattern as a whole."""
        is_one = isinstance(value, str) and pattern.fullmatch(value) is not None
        self.that(is_one, f"{what}: expected text of the form {pattern.pattern}")

    def words(self, value: Any, is_known: Callable[[str], bool], what: str, least: int = 0) -> None:
        """A list of different strings that are known."""
        is_list = isinstance(value, list) and len(value) >= least and all(isinstance(word, str) for word in value)
        self.that(is_list, f"{what}: expected a list of strings" + (", at least one" if least else ""))
        for word in value:
            self.that(is_known(word), f"{what}: unknown {word!r}")
        self.that(len(set(value)) == len(value), f"{what}: a string stands there twice")

    def shapes(self, value: Any, what: str) -> None:
        """Names of arrays and their shapes."""
        self.that(isinstance(value, dict), f"{what}: expected an object")
        for name, shape in value.items():
            self.text(name, ARRAY_NAME, f"{what}: name of an array")
            is_shape = isinstance(shape, list) and len(shape) <= 3
            self.that(is_shape, f"{what}: {name}: expected a shape of at most three axes")
            for size in shape:
                self.integer(size, f"{what}: {name}", 0, MAX_ROWS)


def check_vector(vector: Any, path: Path) -> None:
    """Refuse what is no vector, with SpecError `file`; the same rules as schema.json, but for the arrays. [V3]"""
    check = Checker(path)
    check.keys(vector, KEYS, "vector")
    check.integer(vector["format"], "format", FORMAT, FORMAT)
    check.text(vector["id"], ID, "id")
    check.that(vector["operation"] in OPERATIONS, f"operation: unknown {vector['operation']!r}")
    is_sentence = isinstance(vector["why"], str) and 0 < len(vector["why"]) <= 400 and "\n" not in vector["why"]
    check.that(is_sentence, "why: expected a sentence on one line")
    check.words(vector["clauses"], lambda clause: CLAUSE.fullmatch(clause) is not None, "clauses", 1)
    check.words(vector["features"], FEATURES.__contains__, "features", 1)
    check.words(vector["kills"], lambda name: ID.fullmatch(name) is not None, "kills")
    check.shapes(vector["tensors"], "tensors")
    check.shapes(vector["expected_tensors"], "expected_tensors")
    check.that(isinstance(vector["expected"], dict), "expected: expected an object")
    for name, values in vector["expected"].items():
        check.text(name, ARRAY_NAME, "expected: name of an array")
        check.that(name not in vector["expected_tensors"], f"expected: {name!r} is among the tensors too")
        _check_values(name, values, check)
    is_refusal = vector["operation"] == "refuse"
    is_code = vector["error"] in CODES if isinstance(vector["error"], str) else vector["error"] is None
    check.that(is_code, f"error: unknown code {vector['error']!r}")
    has_code = vector["error"] is not None
    check.that(is_refusal == has_code, "error: a code for cases that must be refused, and for no others")
    _check_bounds(vector["bounds"], check)
    if is_refusal:
        _check_refused_inputs(vector["inputs"], check)
    else:
        _check_inputs(vector["operation"], vector["inputs"], check)
    _check_answer(vector, check)


def _check_answer(vector: dict[str, Any], check: Checker) -> None:
    """The arrays that the operation is answered with, every rank's part of them, and no others. [V8]"""
    names = [*vector["expected"], *vector["expected_tensors"]]
    wanted = ANSWERS[vector["operation"]]
    check.that({name.split(".")[0] for name in names} == wanted, f"expected: expected arrays {sorted(wanted)}")
    if vector["operation"] in PER_RANK:
        ranks = {name.partition(".")[2].split(".")[0] for name in names}
        wanted = {str(rank) for rank in range(vector["inputs"]["cp_size"])}
        check.that(ranks == wanted, f"expected: expected parts for ranks 0 to {len(wanted) - 1}, and no others")


def _check_values(name: str, values: Any, check: Checker) -> None:
    """Integers, alone or in a list, or the rows of `visible`."""
    if name == "visible":
        rows = as_list(values, "expected: visible", check)
        is_matrix = all(
            isinstance(row, str) and re.fullmatch("[01]+", row) and len(row) == len(rows[0]) for row in rows
        )
        check.that(is_matrix, "expected: visible: expected rows of 0 and 1, all of one length")
        return
    for number in as_list(values if isinstance(values, list) else [values], f"expected: {name}", check):
        check.integer(number, f"expected: {name}", -(2**63), 2**63 - 1)


def _check_bounds(bounds: Any, check: Checker) -> None:
    check.that(isinstance(bounds, dict), "bounds: expected an object")
    for dtype, outputs in bounds.items():
        check.that(dtype in DTYPES, f"bounds: unknown dtype {dtype!r}")
        check.that(isinstance(outputs, dict), f"bounds: {dtype}: expected an object")
        for name, bound in outputs.items():
            check.that(name in OUTPUTS, f"bounds: {dtype}: unknown output {name!r}")
            check.that(_is_number(bound) and bound >= 0, f"bounds: {dtype}: {name}: expected a number, 0 or more")


def _check_inputs(operation: str, inputs: Any, check: Checker) -> None:
    has_strides = isinstance(inputs, dict) and "strides" in inputs and "softmax_scale" in INPUTS[operation]
    check.keys(inputs, (*INPUTS[operation], *(["strides"] if has_strides else [])), "inputs")
    for name in INPUTS[operation]:
        if name.startswith("cu_seqlens") or name == "ids":
            for value in as_list(inputs[name], f"inputs: {name}", check):
                check.integer(value, f"inputs: {name}", -(2**31) if "padding_id" in inputs else 0, 2**31 - 1)
    if inputs.get("padding_id") is not None:
        check.integer(inputs["padding_id"], "inputs: padding_id", -(2**31), 2**31 - 1)
    if "total_tokens" in inputs:
        check.integer(inputs["total_tokens"], "inputs: total_tokens", 0, MAX_ROWS)
    if "policy" in inputs:
        check.that(inputs["policy"] in list(Policy), f"inputs: policy: unknown {inputs['policy']!r}")
        check.integer(inputs["cp_size"], "inputs: cp_size", 1, MAX_RANKS)
    if "causal" in inputs:
        check.that(isinstance(inputs["causal"], bool), "inputs: causal: expected true or false")
        window = as_list(inputs["window"], "inputs: window", check)
        check.that(len(window) == 2, "inputs: window: expected two bounds")
        for bound in window:
            check.integer(bound, "inputs: window", -1, 2**31 - 1)
    scale = inputs.get("softmax_scale")
    check.that(scale is None or _is_number(scale), "inputs: softmax_scale: expected a number or null")
    if has_strides:
        check.that(isinstance(inputs["strides"], dict), "inputs: strides: expected an object")
        for name, strides in inputs["strides"].items():
            check.that(name in ("q", "k", "v", "dout"), f"inputs: strides: unknown array {name!r}")
            has_three = len(as_list(strides, f"inputs: strides: {name}", check)) == 3
            check.that(has_three, f"inputs: strides: {name}: expected three")
            for stride in strides:
                check.integer(stride, f"inputs: strides: {name}", 0, MAX_ROWS)


def _check_refused_inputs(inputs: Any, check: Checker) -> None:
    """The values of a must-refuse case are wrong on purpose: only their names and sizes are checked."""
    check.that(isinstance(inputs, dict) and inputs.get("call") in list(REFUSED_INPUTS), "inputs: call: unknown")
    check.keys(inputs, REFUSED_INPUTS[inputs["call"]], "inputs")
    for name in ("cu_seqlens", "cu_seqlens_padded", "ids"):
        if name in inputs:
            as_list(inputs[name], f"inputs: {name}", check)
    if inputs["call"] == "attention":
        for name in ("shapes", "dtypes"):
            check.keys(inputs[name], ("q", "k", "v"), f"inputs: {name}")
        for name, shape in inputs["shapes"].items():
            check.that(len(as_list(shape, f"inputs: shapes: {name}", check)) <= 4, f"inputs: shapes: {name}: too long")
            for size in shape:
                check.integer(size, f"inputs: shapes: {name}", 0, 64)
            is_known = inputs["dtypes"][name] in REFUSED_DTYPES
            check.that(is_known, f"inputs: dtypes: {name}: expected one of {', '.join(REFUSED_DTYPES)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def as_list(value: Any, what: str, check: Checker) -> list[Any]:
    """A list of a bounded length."""
    check.that(isinstance(value, list) and len(value) <= MAX_ROWS, f"{what}: expected a list")
    found: list[Any] = value
    return found
