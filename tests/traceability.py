"""Which code, tests and vectors stand behind each clause: `python -m tests.traceability [--write]`.

Reads the checkout: clauses in specs/thd_cp.md, tags at the end of docstrings, `// clauses:` lines of kernels, marks of
tests, the `clauses` of vectors. Defines `Trace`, `read`, `complaints` and `render`. Nothing is imported or executed, so
that what cannot run on a machine, a kernel or a test of a GPU, counts there too. The matrix, specs/traceability.txt, is
written by this command alone; test_traceability.py compares.
"""

import argparse
import ast
import json
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MATRIX = "specs/traceability.txt"

CLAUSE = re.compile(r"\*\*([A-Z]\d+)\*\* (?=\S)")  # at the head of a paragraph
CITATION = re.compile(r"\[([A-Z]\d+)\]")
TAGS = re.compile(r"(?:\[[A-Z]\d+\]\s*)+\Z")
WITHDRAWN = re.compile(r"Withdrawn so far: (.*?)\.")
WITHOUT_VECTOR = re.compile(r"^### What no vector shows\n(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
KERNEL_LINE = re.compile(r"^//\s*clauses:(.*)$", re.MULTILINE)
KERNELS = (".cu", ".cuh", ".h")

Places = dict[str, list[str]]
"""Clause ids, and where each is claimed: `file: name`."""


@dataclass(frozen=True)
class Trace:
    """Everything that names a clause.

    - `clauses`: id and first words of each definition, in the order of the text, duplicates included.
    - `withdrawn`: ids that may not be used again. `unobservable`: ids that the spec says no vector shows.
    - `code`, `tests`, `vectors`: who claims to implement, to witness, to ask. `cited`: who mentions, in passing.
    """

    clauses: tuple[tuple[str, str], ...]
    withdrawn: frozenset[str]
    unobservable: tuple[str, ...]
    code: Places
    tests: Places
    vectors: Places
    cited: Places

    @property
    def ids(self) -> list[str]:
        """The clauses that bind, once each, in the order of the text."""
        return list(dict.fromkeys(id for id, _ in self.clauses))


def read(root: Path | None = None) -> Trace:
    """The trace of a checkout, by default this one."""
    root = root or ROOT
    text = (root / "specs" / "thd_cp.md").read_text(encoding="utf-8")
    withdrawn = WITHDRAWN.search(text)
    table = WITHOUT_VECTOR.search(text)
    code: Places = defaultdict(list)
    tests: Places = defaultdict(list)
    vectors: Places = defaultdict(list)
    cited: Places = defaultdict(list)
    for id in CITATION.findall(text):
        cited[id].append("specs/thd_cp.md")
    for folder in ("refimpl", "cupy_backend"):
        for path, tree in _parsed(root, folder):
            for name, docstring in docstrings(tree):
                place = f"{path}: {name}" if name else path
                _add(code, tags(docstring), place)
                _add(cited, CITATION.findall(docstring), place)
    for path in sorted(p for p in (root / "kernels_cu").rglob("*") if p.suffix in KERNELS):
        for line in KERNEL_LINE.findall(path.read_text(encoding="utf-8")):
            _add(code, line.split(), path.relative_to(root).as_posix())
    for path, tree in _parsed(root, "tests"):
        for name, ids in marks(tree):
            _add(tests, ids, f"{path}: {name}" if name else path)
    for path in sorted((root / "specs" / "vectors").glob("*.json")):
        _add(vectors, json.loads(path.read_bytes()).get("clauses", []), path.stem)
    return Trace(
        tuple(definitions(text)),
        frozenset(re.findall(r"\b[A-Z]\d+\b", withdrawn[1])) if withdrawn else frozenset(),
        tuple(CITATION.findall(table[1])) if table else (),
        *(dict(places) for places in (code, tests, vectors, cited)),
    )


def definitions(text: str) -> Iterator[tuple[str, str]]:
    """Id and paragraph, on one line, of every clause of the spec."""
    for paragraph in text.split("\n\n"):
        if found := CLAUSE.match(paragraph):
            yield found[1], " ".join(paragraph[found.end() :].split())


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The name and the text of each docstring: of the module (name ""), classes, functions and assigned names."""
    for name, node in _scopes(tree, ""):
        for before, statement in zip([None, *node.body], node.body, strict=False):
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            if isinstance(text := statement.value.value, str):
                yield ".".join(part for part in (name, _assigned(before)) if part), text


def tags(docstring: str) -> list[str]:
    """The clauses that a docstring claims: those in brackets at its very end."""
    found = TAGS.search(docstring.strip())
    return CITATION.findall(found[0]) if found else []


def marks(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Each `pytest.mark.clause(...)` that is written out: the test, class or module (name "") it marks, and its ids."""
    for name, node in _scopes(tree, ""):
        for part in _own(node):
            if isinstance(part, ast.Call) and _dotted(part.func).endswith("mark.clause"):
                yield name, [a.value for a in part.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]


Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _scopes(node: Scope, name: str) -> Iterator[tuple[str, Scope]]:
    """The node and every class and function in it, by dotted name."""
    yield name, node
    for part in _own(node):
        if part is not node and isinstance(part, Scope):
            yield from _scopes(part, f"{name}.{part.name}" if name else part.name)


def _own(node: Scope) -> Iterator[ast.AST]:
    """What belongs to a scope: its decorators and all in it but the insides of scopes within, which stand alone."""
    waiting: list[ast.AST] = list(ast.iter_child_nodes(node))
    while waiting:
        part = waiting.pop(0)
        yield part
        if not isinstance(part, Scope):
            waiting[:0] = ast.iter_child_nodes(part)


def _assigned(node: ast.stmt | None) -> str:
    """The name that a statement assigns to, if it is one that a docstring may follow."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return ", ".join(_dotted(target) for target in targets)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _parsed(root: Path, folder: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((root / folder).rglob("*.py")):
        yield path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def _add(places: Places, ids: list[str], place: str) -> None:
    for id in ids:
        if place not in places[id]:
            places[id].append(place)


def complaints(trace: Trace) -> list[str]:
    """Everything that is wrong, one line each."""
    known = set(trace.ids)
    wrong = [f"{id} is defined {n} times" for id, n in Counter(id for id, _ in trace.clauses).items() if n > 1]
    wrong += [f"{id} is defined and withdrawn" for id in trace.ids if id in trace.withdrawn]
    for places in (trace.code, trace.tests, trace.vectors, trace.cited):
        wrong += [f"{place} names {id}, which is no clause" for id in places if id not in known for place in places[id]]
    for id in trace.ids:
        code = trace.code.get(id, [])
        if id[0] != "V":  # what asks and judges does not implement what it asks about
            code = [place for place in code if not place.startswith("refimpl/conformance/")]
        wrong += [
            f"{id} has no {kind}" for kind, places in (("code", code), ("test", trace.tests.get(id))) if not places
        ]
        if id in trace.unobservable and id in trace.vectors:
            wrong.append(f"{id} has vectors, and the spec says that none shows it")
        elif id not in trace.unobservable and id not in trace.vectors:
            wrong.append(f"{id} has no vector, and the spec does not say why")
    return list(dict.fromkeys(wrong))


def render(trace: Trace) -> str:
    """The matrix as text, the same for the same trace."""
    lines = [
        "Which code, tests and vectors stand behind each clause of thd_cp.md.",
        "Written by `make traceability`; tests/test_traceability.py holds it to the files.",
    ]
    first_words = dict(trace.clauses)
    for id in trace.ids:
        count = len(trace.vectors.get(id, []))
        told = "none: no vector shows it" if id in trace.unobservable else str(count)
        lines += ["", f"{id}  {textwrap.shorten(first_words[id], 100, placeholder=' ...')}"]
        lines += _listed("code", trace.code.get(id, [])) + _listed("tests", trace.tests.get(id, []))
        lines.append(f"  vectors  {told}")
    return "\n".join(lines) + "\n"


def _listed(title: str, places: list[str]) -> list[str]:
    """One line a file: its names in the order of the alphabet."""
    names: dict[str, list[str]] = defaultdict(list)
    for place in places:
        path, _, name = place.partition(": ")
        names[path].append(name or "(the file)")
    rows = [f"{path}: {', '.join(sorted(names[path]))}" for path in sorted(names)] or ["NONE"]
    lines = [line for row in rows for line in textwrap.wrap(row, 109, subsequent_indent="  ", break_on_hyphens=False)]
    return [f"  {title if i == 0 else '':<7}  {line}" for i, line in enumerate(lines)]


def main(arguments: list[str] | None = None) -> int:
    """0 if every clause is held and the matrix is up to date, or has been written; else 1, with what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.traceability", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {MATRIX}")
    write = parser.parse_args(arguments).write
    trace = read()
    wrong = complaints(trace)
    path = ROOT / MATRIX
    if write:
        path.write_text(render(trace), encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != render(trace):
        wrong.append(f"{MATRIX} is out of date: make traceability")
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"{len(trace.ids)} clauses, {len(wrong)} complaints")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
