"""One test for each conformance case, for an implementation's own continuous integration.

Defines `register`, which `thdcp_pytest` calls when `pytest --thdcp-adapter=package.module:run` is given. The tests come
beside whatever else pytest collects; `-m thdcp` selects them alone, `-k` goes by ids, clauses and features.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refimpl.collectives import launched
from refimpl.conformance import vectors
from refimpl.conformance.adapters import Adapter, load
from refimpl.conformance.cases import Vector
from refimpl.conformance.check import Checked, Result, ask, judge
from refimpl.conformance.declaration import as_declaration
from refimpl.conformance.hint import diagnosed, diagnosis_lines
from refimpl.conformance.locate import in_words
from refimpl.conformance.selection import read_known, select
from refimpl.errors import SpecError

PREFIX = "thdcp"
"""What the tests' ids start with: thdcp::partition-packed-contiguous-cp2."""


def register(config: pytest.Config) -> None:
    """Load the adapter and the cases, and have them collected.

    Raises:
        pytest.UsageError: in one line, whatever is wrong with the options.
    """
    try:
        told = launched()
        if told is not None and told[1] > 1:
            raise SpecError(
                "usage", f"pytest asks in one process, not {told[1]}: use `thdcp check --adapter` under MPI"
            )
        everything = vectors.load()
        chosen = select(everything, config.getoption("--thdcp-only") or ())
        known = config.getoption("--thdcp-known")
        expected_to_fail = read_known(Path(known), everything) if known else frozenset()
        adapter = load(config.getoption("--thdcp-adapter"))
        if dtype := config.getoption("--thdcp-dtype"):
            declared = as_declaration({"dtype": dtype}, "--thdcp-dtype")
            adapter = replace(adapter, declaration=replace(adapter.declaration, dtype=declared.dtype))
    except SpecError as error:
        raise pytest.UsageError(f"thdcp: {error}") from None
    config.addinivalue_line("markers", "thdcp: a conformance case of thdcp")
    config.pluginmanager.register(_Cases(adapter, chosen, expected_to_fail), "thdcp-cases")


class _Cases:
    """Adds the tests to a session, and says at its end what their failures have in common."""

    def __init__(self, adapter: Adapter, chosen: Sequence[Vector], known: frozenset[str]) -> None:
        self.adapter = adapter
        self.chosen = chosen
        self.known = known
        self.results: list[Result] = []

    @pytest.hookimpl(tryfirst=True)  # before -k and -m leave tests out
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Append a test for each case."""
        parent = _Collector.from_parent(session, name=PREFIX, nodeid=PREFIX, cases=self)
        items.extend(parent.collect())

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Name the fault, if a known one gives the numbers that failed."""
        by_id = {vector.case.id: vector for vector in self.chosen}
        checked = Checked(self.adapter.spec, self.adapter.declaration, tuple(self.results), by_id, self.known)
        if lines := diagnosis_lines(diagnosed(checked)):
            terminalreporter.section(f"thdcp: {self.adapter.spec}")
            for line in lines:
                terminalreporter.line(line)


class _Collector(pytest.Collector):
    """The parent of the tests."""

    def __init__(self, *, cases: _Cases, **more: Any) -> None:
        super().__init__(**more)
        self.cases = cases

    def collect(self) -> Iterable["_Test"]:
        """One test for each case."""
        for vector in self.cases.chosen:
            yield _Test.from_parent(self, name=vector.case.id, vector=vector, cases=self.cases)


class NotConforming(AssertionError):
    """An answer that is wrong, or none."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.message)
        self.result = result


class _Test(pytest.Item):
    """One case."""

    def __init__(self, *, vector: Vector, cases: _Cases, **more: Any) -> None:
        super().__init__(**more)
        self.vector = vector
        self.cases = cases
        case = vector.case
        self.add_marker(pytest.mark.thdcp)
        self.extra_keyword_matches |= {case.operation, *case.clauses, *case.features}
        self.user_properties.append(("clauses", " ".join(case.clauses)))
        if case.id in cases.known:
            self.add_marker(pytest.mark.xfail(reason="known failure", strict=True))

    def runtest(self) -> None:
        """Ask the adapter and judge what it answers."""
        adapter = self.cases.adapter
        result = judge(self.vector, ask(adapter, self.vector), adapter.declaration)
        self.cases.results.append(result)
        if result.verdict == "skip":
            pytest.skip(result.message)
        if result.failed:
            raise NotConforming(result)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What is wrong and where, instead of a traceback through this file."""
        if not isinstance(excinfo.value, NotConforming):
            return super().repr_failure(excinfo, style)
        return "\n".join(explanation(self.vector, excinfo.value.result))

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Where the test is, for pytest: nowhere, but it has a name."""
        return PREFIX, None, f"{PREFIX} {self.name}"


def explanation(vector: Vector, result: Result) -> list[str]:
    """Why a case failed, for a person, in lines."""
    case, inputs = vector.case, vector.case.inputs
    lines = [f"{result.verdict}: {result.message}", f"why this case: {case.why}"]
    lines += [in_words(vector, difference, result.arrays) for difference in result.differences[:8]]
    about = [f"{name} {inputs[name]}" for name in ("policy", "cp_size", "causal", "window") if name in inputs]
    lines.append(", ".join([case.operation, *about]))
    lines += [f"{name} {str(inputs[name])[:200]}" for name in ("cu_seqlens", "cu_seqlens_padded") if name in inputs]
    lines.append(f"clauses {' '.join(case.clauses)}; features {', '.join(case.features)}")
    if result.verdict == "error":
        lines.append("THDCP_TRACEBACK=1 shows where it was raised")
    return lines
