"""`thdcp check --capture`: a verdict on every tensor that a real step gave.

Defines `check_capture`. What is judged by rows: `out`, `lse` and dq of queries, dk and dv of keys. By default those
rows that `sample` chooses, each against all the rows that it sees, in float64; with `full` all of them. Looked
at in all rows, whatever the sample: that padding is written, and that nothing is NaN or infinite.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl import tiled
from refimpl.conformance.capture.file import GRADIENTS, Capture, read_capture
from refimpl.conformance.capture.pattern import diagnosis_of, patterns
from refimpl.conformance.capture.rows import Advance, Rows, Source, key_rows, query_rows, scores_of, seen_by
from refimpl.conformance.capture.sample import Sample, sample_rows
from refimpl.conformance.capture.verdict import Looked, by_row, errors_of, judge_tensor
from refimpl.conformance.check import Checked, Result, note
from refimpl.conformance.declaration import Declaration
from refimpl.layout import IntArray

Array = NDArray[Any]
OnShare = Callable[[float], None]

FULL_SCORES = 1 << 30
"""Scores of all heads up to which `full` means the sample's way with every row; beyond, `tiled` computes what is
expected."""
LSE_ERROR = {"float64": 1e-11, "float32": 1e-5, "float16": 1e-4, "bfloat16": 1e-3}
"""How far a captured lse may be off to be used for dk and dv: what one kept in float32 (float64) is, and more."""
WORST_ROWS = 512
"""Rows with the largest errors, which the plain implementation is asked for beside the sample."""


@dataclass(frozen=True, eq=False)
class Found:
    """What was looked at, by tensor, and remarks on how."""

    looked: Mapping[str, Looked]
    notes: tuple[str, ...]


def check_capture(paths: Sequence[Path], full: bool = False, on_share: OnShare = lambda _: None) -> Checked:
    """Judge one step.

    Args:
        paths: of its files. full: every row instead of a sample. on_share: told the share of the work that is done.

    Raises:
        SpecError: those of `read_capture`. [V12] [V13] [N2] [A5] [B2]
    """
    capture = read_capture(paths)
    sample = sample_rows(capture)
    total = _scores(capture, np.flatnonzero(capture.layout.document_ids >= 0))
    if full and total <= FULL_SCORES:
        sample = sample_rows(capture, capture.layout.total_tokens, 1 << 62)
    if full and not sample.is_all:
        found = _expected_in_full(capture, sample, _progress(1, on_share))
    else:
        found = _expected_of_sample(capture, sample, _progress(_scores(capture, sample.rows), on_share))
    results = [judge_tensor(capture, name, looked) for name, looked in found.looked.items()]
    notes = [*found.notes]
    wrong = {result.id for result in results if result.failed}
    diagnosis = None
    if wrong:
        seen = patterns(capture, found.looked, wrong)
        results = [_with_pattern(result, seen.get(result.id, ())) for result in results]
        notes += seen.get("", ())
        diagnosis, remark = diagnosis_of(capture, found.looked)
        notes += [remark] if remark else []
    subject = f"capture {', '.join(note(path) for path in paths[:3])}{' and others' if len(paths) > 3 else ''}"
    checked = Checked(subject, Declaration(dtype=capture.dtype), tuple(results), {}, notes=tuple(notes))
    return replace(checked, diagnosis=diagnosis, unit="tensors")


def _with_pattern(result: Result, sentences: Sequence[str]) -> Result:
    return replace(result, message="; ".join([result.message, *sentences]))


def _progress(total: int, on_share: OnShare) -> Advance:
    done = 0

    def advance(scores: int) -> None:
        nonlocal done
        done += scores
        on_share(min(1.0, done / max(1, total)))

    return advance


def _scores(capture: Capture, rows: IntArray) -> int:
    """Scores of all heads that rows cost, as queries and as keys."""
    scores = int(scores_of(capture.layout, capture.mask, rows).sum())
    if capture.dout is not None:
        scores += int(scores_of(capture.layout, seen_by(capture.mask), rows).sum())
    return scores * capture.heads


def _plain_rows(rows: Rows, name: str) -> Array:
    """The length of the plain implementation's error in each row [n]; 0 in float64."""
    exact = by_row(name, rows.exact[name])
    if rows.plain is None:
        return np.zeros(len(exact))
    lengths: Array = np.sqrt(((by_row(name, rows.plain[name]) - exact) ** 2).sum(axis=(1, 2)))
    return lengths


def _yardsticks(rows: Rows) -> dict[str, float]:
    """The largest error of the plain implementation, by tensor; 0 in float64."""
    if rows.plain is None:
        return dict.fromkeys(rows.exact, 0.0)
    return {name: float(np.abs(x - rows.exact[name]).max(initial=0.0)) for name, x in rows.plain.items()}


# A sample, or every row in the same way


def _expected_of_sample(capture: Capture, sample: Sample, advance: Advance) -> Found:
    queries = query_rows(capture, sample.rows, advance)
    yardsticks = _yardsticks(queries)
    looked = {
        name: Looked(sample.rows, queries.exact[name], yardsticks[name], sample.is_all, _plain_rows(queries, name))
        for name in ("out", "lse", "dq")
        if name in capture.outputs
    }
    notes = [str(sample)]
    if {"dk", "dv"} & set(capture.outputs):
        source, remark = _source(capture, sample, queries.exact, looked)
        keys = key_rows(capture, sample.rows, source, advance)
        yardsticks = _yardsticks(keys)
        for name in ("dk", "dv"):
            if name in capture.outputs:
                slack = keys.slack[name] if source.lse_error or source.delta_error else None
                looked[name] = Looked(
                    sample.rows, keys.exact[name], yardsticks[name], sample.is_all, _plain_rows(keys, name), slack
                )
        notes += [remark] if remark else []
    return Found(looked, tuple(notes))


def _source(
    capture: Capture, sample: Sample, exact: Mapping[str, Array], looked: Mapping[str, Looked]
) -> tuple[Source, str]:
    """lse and out of every query, and in words where they come from.

    Exact, if all rows are in the sample; else as captured, if they are right in the sample; else computed anew.
    """
    layout, rows = capture.layout, sample.rows
    if sample.is_all:
        lse = np.full((capture.heads, layout.total_tokens), -np.inf)
        out = np.zeros((layout.total_tokens, *exact["out"].shape[1:]))
        lse[:, rows], out[rows] = exact["lse"], exact["out"]
        return Source(lse, out), ""
    are_there = {"out", "lse"} <= looked.keys()
    are_right = are_there and not any(judge_tensor(capture, x, looked[x]).failed for x in ("out", "lse"))
    if are_right and errors_of("lse", looked["lse"], capture.outputs["lse"]).max() <= LSE_ERROR[capture.dtype]:
        lse, out = capture.outputs["lse"], capture.outputs["out"]
        origin = "the captured out and lse, which are right where looked at"
    else:
        dtype = np.float64 if capture.dtype in ("float64", "float32") else np.float32
        q, k, v = (x.astype(dtype, copy=False) for x in (capture.q, capture.k, capture.v))
        out, lse = tiled.attention_forward(q, k, v, layout, capture.mask, capture.softmax_scale)
        why = "not captured" if not are_there else "coarse" if are_right else "wrong"
        origin = f"out and lse computed anew in {np.dtype(dtype)}, since those of the step are {why}"
    lse_error = float(np.abs(lse[:, rows].astype(np.float64) - exact["lse"]).max(initial=0.0))
    assert capture.dout is not None
    difference = out[rows].astype(np.float64) - exact["out"]
    delta_error = float(np.abs((capture.dout[rows] * difference).sum(axis=2)).max(initial=0.0))
    remark = f"dk and dv were computed from {origin} (lse to {lse_error:.1e}, dout * out to {delta_error:.1e}); their "
    return Source(lse, out, lse_error, delta_error), remark + "tolerance is wider by what that can make"


# Every row of a large buffer


def _expected_in_full(capture: Capture, sample: Sample, advance: Advance) -> Found:
    """Expected values by `tiled` in float64; the plain implementation on the sample and where errors are largest."""
    layout, mask, scale = capture.layout, capture.mask, capture.softmax_scale
    q, k, v = (x.astype(np.float64, copy=False) for x in (capture.q, capture.k, capture.v))
    out, lse = tiled.attention_forward(q, k, v, layout, mask, scale)
    expected = {"out": out, "lse": lse}
    if not capture.outputs.keys().isdisjoint(GRADIENTS):
        assert capture.dout is not None
        dout = capture.dout.astype(np.float64, copy=False)
        gradients = tiled.attention_backward(dout, q, k, v, out, lse, layout, mask, scale)
        expected |= dict(zip(GRADIENTS, gradients, strict=True))
    advance(1)
    real = np.flatnonzero(layout.document_ids >= 0)
    rows = _with_worst(capture, expected, sample.rows, real)
    found = _plainly(capture, rows, expected, lambda _: None)
    plain, places = _yardsticks(found), np.searchsorted(real, rows)
    looked = {}
    for name in capture.outputs:
        values = expected[name][:, real] if name == "lse" else expected[name][real]
        plain_rows = np.full(len(real), np.inf)
        plain_rows[places] = _plain_rows(found, name)
        looked[name] = Looked(real, values, plain[name], True, plain_rows)
    told = f"all {len(real)} rows of real tokens were looked at; the plain implementation that sets the tolerance was "
    return Found(looked, (f"{told}computed for {len(rows)} of them, those with the largest errors included",))


def _with_worst(capture: Capture, expected: Mapping[str, Array], rows: IntArray, real: IntArray) -> IntArray:
    """The sample, and the rows in which some tensor has its largest errors."""
    chosen = [rows]
    for name, got in capture.outputs.items():
        axes = (0,) if name == "lse" else (1, 2)
        with np.errstate(invalid="ignore"):
            errors = np.abs(got - expected[name]).max(axis=axes)[real]
        errors = np.where(np.isfinite(errors), errors, 0.0)
        largest = np.abs(expected[name]).max(axis=axes)[real]
        count = min(WORST_ROWS // (2 * len(capture.outputs)), len(real))
        sizes = (errors, errors / np.maximum(largest, 1e-30))
        chosen += [real[np.argsort(-size, kind="stable")[:count]] for size in sizes]
    return np.unique(np.concatenate(chosen))


def _plainly(capture: Capture, rows: IntArray, expected: Mapping[str, Array], advance: Advance) -> Rows:
    """Plain results of some rows of all kinds, beside the expected ones."""
    names = [name for name in expected if name in capture.outputs]
    exact = {name: expected[name][:, rows] if name == "lse" else expected[name][rows] for name in names}
    queries = query_rows(capture, rows, advance, exact=False)
    if queries.plain is None:
        return Rows(exact, None, {})
    plain = dict(queries.plain)
    if {"dk", "dv"} & set(names):
        keys = key_rows(capture, rows, Source(expected["lse"], expected["out"]), advance)
        plain |= keys.plain or {}
    return Rows(exact, {name: plain[name] for name in names}, {})
