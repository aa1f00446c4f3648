"""The diagnosis of a check, in words.

Defines `diagnosed`, which asks `diagnose` about all answers together, and `diagnosis_lines`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from refimpl.conformance.check import Checked, Result


def diagnosed(checked: Checked) -> Checked:
    """With the diagnosis of the wrong answers, if there are any that nobody expected.

    Right answers take part: they tell which faults it cannot be.
    """
    told = [
        (vector, result)
        for result in checked.results
        if result.id not in checked.known and (vector := checked.vectors.get(result.id)) and _told(result)
    ]
    if not any(result.verdict == "fail" for _, result in told):
        return checked
    from refimpl.conformance.diagnose import diagnose  # a hundred faults, of no use to who is right

    items = [(vector.case, vector.expected, _answer(result), result.dtype) for vector, result in told]
    ignored = frozenset({"lse"} & set(checked.declaration.lacks))
    return replace(checked, diagnosis=diagnose(items, ignored))


def _told(result: Result) -> bool:
    """Whether the implementation answered, refused or crashed: not if it skipped, or its ranks went different ways."""
    if result.verdict == "fail":
        return result.answered or bool(result.refused)
    return result.verdict in ("pass", "error")


def _answer(result: Result) -> Mapping[str, NDArray[Any]] | str:
    if result.verdict == "error":
        return "crash"
    return result.refused or result.arrays


def diagnosis_lines(checked: Checked) -> list[str]:
    """The diagnosis in words, the fault that explains most first, what is known without one last; [] without one."""
    diagnosis = checked.diagnosis
    if diagnosis is None:
        return []
    lines = []
    for finding in diagnosis.findings:
        where = f" on rank {finding.rank}" if finding.rank is not None else ""
        where += f" {finding.scope}" if finding.scope else ""
        line = f"looks like: {finding.mutant}{where} ({finding.what.rstrip('.')}) - reproduces "
        line += f"{finding.reproduced} of {finding.failed} failing cases"
        line += f"; {finding.rows}" if finding.rows else ""
        line += f"; seen in {finding.source}" if finding.source else ""
        line += f"; or: {', '.join(finding.twins)}" if finding.twins else ""
        lines.append(line)
    return [*(lines or ["no known fault gives these numbers"]), str(diagnosis.observation)]
