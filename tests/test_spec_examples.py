"""The specification keeps its own rules, and its examples are true. Who cites it: test_traceability.py."""

import doctest
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.traceability import CITATION, CLAUSE, WITHDRAWN

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "specs" / "thd_cp.md"
TEXT = SPEC.read_text(encoding="utf-8")

FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Clause:
    """One clause: its id, the paragraph that binds, and the quote that says why."""

    id: str
    text: str
    reason: str


@dataclass(frozen=True)
class Example:
    """One fenced block, where it stands, and the clauses that the line ahead of it names."""

    code: str
    line: int
    clauses: tuple[str, ...]


def read_clauses(text: str) -> list[Clause]:
    paragraphs = text.split("\n\n")
    return [
        Clause(found[1], paragraph, after if after.startswith(">") else "")
        for paragraph, after in zip(paragraphs, [*paragraphs[1:], ""], strict=True)
        if (found := CLAUSE.match(paragraph))
    ]


def read_examples(text: str) -> list[Example]:
    examples = []
    for fence in FENCE.finditer(text):
        introduction = text[: fence.start()].rstrip().rsplit("\n\n", 1)[-1]
        clauses = CITATION.findall(introduction) if introduction.startswith("*Example*") else []
        examples.append(Example(fence[1], text.count("\n", 0, fence.start()) + 1, tuple(clauses)))
    return examples


CLAUSES = read_clauses(TEXT)
IDS = {clause.id for clause in CLAUSES}
PREAMBLE, *EXAMPLES = read_examples(TEXT)


def run(example: Example, names: dict[str, object]) -> str:
    """Run a block with these names in scope, to which it adds its own; returns doctest's complaints, or nothing."""
    test = doctest.DocTestParser().get_doctest(example.code, names, SPEC.name, str(SPEC), example.line)
    complaints: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=complaints.append, clear_globs=False)
    names.update(test.globs)
    return "".join(complaints)


@pytest.fixture
def names() -> dict[str, object]:
    """What the preamble defines: every example has a copy of its own, so each stands by itself."""
    scope: dict[str, object] = {}
    assert run(PREAMBLE, scope) == ""
    return scope


@pytest.mark.parametrize(
    "example",
    [pytest.param(e, id=f"line-{e.line}", marks=pytest.mark.clause(*e.clauses)) for e in EXAMPLES],
)
def test_example_is_true(example: Example, names: dict[str, object]) -> None:
    assert run(example, names) == ""


def test_no_example_escapes() -> None:
    """A mistyped fence would hide a block from the test above."""
    inside = sum(e.code.count(">>> ") for e in (PREAMBLE, *EXAMPLES))
    assert TEXT.count(">>> ") == inside
    assert TEXT.count("\n```") == 2 * (1 + len(EXAMPLES))
    assert all(e.clauses for e in EXAMPLES), "an example says which clauses it shows"


def test_ids_are_unique_and_none_is_used_again() -> None:
    ids = [clause.id for clause in CLAUSES]
    assert [i for i, count in Counter(ids).items() if count > 1] == []
    withdrawn = WITHDRAWN.search(TEXT)
    assert withdrawn is not None
    assert IDS.isdisjoint(re.findall(r"\b[A-Z]\d+\b", withdrawn[1]))


def test_ids_stand_in_their_section_in_order() -> None:
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        numbers = [int(clause.id[1:]) for clause in read_clauses(section)]
        assert {clause.id[0] for clause in read_clauses(section)} <= {section[0]}, section.split("\n")[0]
        assert numbers == sorted(numbers), section.split("\n")[0]


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.id)
def test_clause_has_one_must_and_a_reason(clause: Clause) -> None:
    assert clause.text.count("MUST") == 1
    assert clause.reason, "the reason stands in a quote under the clause"
    assert "MUST" not in clause.reason


def test_every_area_has_clauses() -> None:
    assert {clause.id[0] for clause in CLAUSES} == set("LPRKABCNV")


def test_must_stands_in_clauses_alone() -> None:
    """Outside them only the sentence that explains the word has it."""
    assert TEXT.count("MUST") == len(CLAUSES) + 1


def test_spec_cites_clauses_that_exist() -> None:
    assert set(CITATION.findall(TEXT)) - IDS == set()


def test_spec_names_codes_and_files_that_exist() -> None:
    from refimpl.errors import CODES

    table = TEXT.split("\n## Refusals\n")[1].split("\n## ")[0]
    first_cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    named = set(re.findall(r"`(\w+)`", " ".join(first_cells)))
    assert named - set(CODES) == set()
    assert named >= set(CODES) - {"usage", "missing_package", "file"}, "a refusal without a clause"
    for path in re.findall(r"`(refimpl/[\w./]*)`", TEXT):
        assert (ROOT / path).exists(), path


def test_sources_name_every_repository() -> None:
    known = TEXT.split("\n## Sources\n")[1]
    cited = set(re.findall(r"([\w-]+)#\d+", TEXT))
    assert [prefix for prefix in sorted(cited) if not re.search(rf"^\|[^|]*\b{prefix}\b", known, re.MULTILINE)] == []
