"""What a check found, for a terminal and for machines.

Defines `show`, the table on a terminal; `as_json` and `as_junit`; and `write_reports`, which adds the page of `page`.
"""

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from rich import box
from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from refimpl.conformance.check import VERDICTS, Checked, Result
from refimpl.conformance.hint import diagnosis_lines
from refimpl.conformance.page import as_html

SHOWN_CASES = 8
"""Failing cases that a terminal shows one by one."""


def show(checked: Checked, console: Console) -> None:
    """Print the diagnosis, the clauses and features that fail, the first failing cases, and the counts."""
    declared = checked.declaration
    name = f" ({declared.name})" if declared.name else ""
    lacks = f", lacks {', '.join(declared.lacks)}" if declared.lacks else ""
    _line(console, f"{checked.subject}{name}: {len(checked.results)} {checked.unit} in {declared.dtype}{lacks}")
    for line in diagnosis_lines(checked):
        _line(console, line, style="bold")
    unexpected = {result.id for result in checked.failing}
    tables = []
    for title, groups in (("clause", checked.by_clause()), ("feature", checked.by_feature())):
        failing = {key: group for key, group in groups.items() if any(result.id in unexpected for result in group)}
        tables += [_table(title, failing, checked)] if failing else []
    if tables:
        console.print(Columns(tables, padding=(0, 6)))
    for result in _various(checked)[:SHOWN_CASES]:
        _line(console, f"{result.verdict}: {result.id}: {result.message}")
    if len(checked.failing) > SHOWN_CASES:
        _line(console, f"... and {len(checked.failing) - SHOWN_CASES} more (--report DIR writes all of them)")
    for result in checked.mended:
        _line(console, f"passes: {result.id}, though it is listed as a known failure: take it out of the list")
    for result in checked.results:
        if result.verdict == "pass" and result.message:
            _line(console, f"pass: {result.id}: {result.message}")
    for note in checked.notes:
        _line(console, f"note: {note}")
    _line(console, summary(checked), style="bold green" if checked.passed else "bold red")


def _various(checked: Checked) -> list[Result]:
    """The failures, the first of each operation in front."""
    first: dict[str, Result] = {}
    for result in checked.failing:
        vector = checked.vectors.get(result.id)
        first.setdefault(vector.case.operation if vector else "", result)
    ids = {result.id for result in first.values()}
    return [*first.values(), *(result for result in checked.failing if result.id not in ids)]


def _line(console: Console, text: str, style: str | None = None) -> None:
    console.print(escape(text), style=style, highlight=False, soft_wrap=True)


def _table(title: str, groups: Mapping[str, Sequence[Result]], checked: Checked) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    shown.add_column(title, no_wrap=True)
    for verdict in VERDICTS:
        shown.add_column(verdict, justify="right", no_wrap=True)
    for key, group in groups.items():
        counts = checked.counts(group)
        shown.add_row(key, *(str(counts[verdict]) if counts[verdict] else "-" for verdict in VERDICTS))
    return shown


def summary(checked: Checked) -> str:
    """One line: how many cases have each verdict, and why some were skipped."""
    counts = checked.counts()
    told = [f"{counts['pass']} of {len(checked.results)} {checked.unit} pass"]
    told += [f"{counts[verdict]} {word}" for verdict, word in _WORDS.items() if counts[verdict]]
    if counts["skip"]:
        reasons: dict[str, int] = {}
        for result in checked.results:
            if result.verdict == "skip":
                reason = result.message.split(":")[0]
                reasons[reason] = reasons.get(reason, 0) + 1
        told.append(f"{counts['skip']} skipped ({', '.join(f'{why}: {n}' for why, n in reasons.items())})")
    if checked.known:
        told.append(f"{len(checked.known_failing)} of the failures are known, {len(checked.mended)} known ones pass")
    if not counts["pass"] and not checked.failing:
        told.append("nothing was checked")
    return ", ".join(told)


_WORDS = {"fail": "fail", "error": "end in an error", "missing": "have no answer"}


# For machines


def as_json(checked: Checked) -> str:
    """Everything that was found, with the versions that it was found with."""
    content = {
        "command": "thdcp check",
        "subject": checked.subject,
        "declaration": asdict(checked.declaration),
        "passed": checked.passed,
        "counts": checked.counts(),
        "known": sorted(checked.known),
        "notes": list(checked.notes),
        "diagnosis": _plain(checked.diagnosis),
        "clauses": {key: checked.counts(group) for key, group in checked.by_clause().items()},
        "features": {key: checked.counts(group) for key, group in checked.by_feature().items()},
        "versions": versions(),
        "cases": [_case(result, checked) for result in checked.results],
    }
    return json.dumps(content, indent=1, allow_nan=False)


def versions() -> dict[str, str]:
    """What a result may depend on."""
    return {"thdcp": metadata.version("thdcp"), "python": platform.python_version(), "numpy": np.__version__}


def _case(result: Result, checked: Checked) -> dict[str, Any]:
    about: dict[str, Any] = {}
    if result.id in checked.vectors:
        case = checked.vectors[result.id].case
        about = {name: getattr(case, name) for name in ("operation", "cp_size", "clauses", "features", "why")}
    return {
        "id": result.id,
        "verdict": result.verdict,
        "known": result.id in checked.known,
        "message": result.message,
        "dtype": result.dtype,
        "differences": [_plain(difference) for difference in result.differences],
        **({"details": _plain(result.details)} if result.details else {}),
        **about,
    }


def _plain(value: Any) -> Any:
    """A value as JSON can hold it, which knows no NaN and no infinity."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def as_junit(checked: Checked) -> bytes:
    """One JUnit test case a case. A known failure shows as skipped, one that passes as failed."""
    mended = {result.id for result in checked.mended}
    failing, counts = {result.id for result in checked.failing}, checked.counts(checked.failing)
    suite = ElementTree.Element(
        "testsuite",
        name="thdcp check",
        tests=str(len(checked.results)),
        failures=str(counts["fail"] + counts["missing"] + len(mended)),
        errors=str(counts["error"]),
        skipped=str(checked.counts()["skip"] + len(checked.known_failing)),
    )
    for result in checked.results:
        vector = checked.vectors.get(result.id)
        operation = vector.case.operation if vector else "capture"
        element = ElementTree.SubElement(suite, "testcase", classname=f"thdcp.check.{operation}", name=result.id)
        if result.id in mended:
            ElementTree.SubElement(element, "failure", message="passes, but is listed as a known failure")
        elif result.id in failing:
            kind = "error" if result.verdict == "error" else "failure"
            ElementTree.SubElement(element, kind, message=result.message).text = result.message
        elif result.verdict != "pass":
            reason = f"known: {result.message}" if result.failed else result.message
            ElementTree.SubElement(element, "skipped", message=reason)
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


# Files


def write_reports(folder: Path, checked: Checked) -> None:
    """Write check.json, check.xml and check.html into `folder`, each whole or not at all."""
    contents = {
        "check.json": as_json(checked).encode(),
        "check.xml": as_junit(checked),
        "check.html": as_html(checked, diagnosis_lines(checked), summary(checked), versions()).encode(),
    }
    for name, content in contents.items():
        part = folder / f".{name}.{os.getpid()}.part"
        part.write_bytes(content)
        part.replace(folder / name)
