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
    told = [result for result in checked.results if result.verdict in ("pass", "fail", "error")]
    items = [
        (vector.case, vector.expected, _answer(result), result.dtype)
        for result in told
        if result.id not in checked.known and (vector := checked.vectors.get(result.id)) is not None
    ]
    if not any(result.verdict == "fail" for result in checked.failing) or not items:
        return checked
    from refimpl.conformance.diagnose import diagnose  # a hundred faults, of no use to who is right

    return replace(checked, diagnosis=diagnose(items))


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
        where += f" with {finding.scope}" if finding.scope else ""
        line = f"looks like: {finding.mutant}{where} ({finding.what.rstrip('.')}) - reproduces "
        line += f"{finding.reproduced} of {finding.failed} failing cases"
        line += f"; {finding.rows}" if finding.rows else ""
        line += f"; seen in {finding.source}" if finding.source else ""
        line += f"; or: {', '.join(finding.twins)}" if finding.twins else ""
        lines.append(line)
    return [*(lines or ["no known fault gives these numbers"]), str(diagnosis.observation)]
