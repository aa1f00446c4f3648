"""Finding an adapter, and the adapters that come with the kit: the reference is right, the others are not."""

import os
import subprocess
import sys
from functools import cache

import pytest
from support import refused

from refimpl.conformance import check, vectors
from refimpl.conformance.adapters import check_spec, load
from refimpl.conformance.declaration import Declaration

loaded = cache(vectors.load)

HERE = "refimpl.conformance.adapters"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current directory, and Python's path and modules as they were afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_an_adapter_of_the_current_directory(folder):
    (folder / "package").mkdir()
    (folder / "package" / "beside.py").write_text("NAME = 'x'")
    program = "import package.beside\nDECLARATION = {'name': package.beside.NAME, 'lacks': ['gqa']}\n"
    (folder / "package" / "mine.py").write_text(program + "def answer(case): return {}")
    adapter = load("package.mine:answer")
    assert adapter.spec == "package.mine:answer"
    assert adapter.run(None) == {}
    assert adapter.declaration == Declaration("x", "float64", ("gqa",))


def test_an_adapter_may_be_any_callable_and_declare_nothing(folder):
    (folder / "class_adapter.py").write_text("class C:\n    def __call__(self, case): return {}\nrun = C()")
    assert load("class_adapter:run").declaration == Declaration()


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "module",
        "module:",
        ":run",
        "a/b:run",
        "../x:run",
        ".x:run",
        "x:run()",
        "x:a.b",
        "x y:run",
        "x:y:z",
    ],
)
def test_names_of_another_form_are_refused_before_any_import(spec):
    with refused("usage", f"adapter {spec!r}: expected package.module:callable"):
        check_spec(spec)


@pytest.mark.parametrize(
    ("program", "spec", "says"),
    [
        (None, "nowhere_at_all:run", "no module nowhere_at_all in "),
        ("", "broken.inner:run", "no module broken.inner in "),
        ("import nothing_there", "broken:run", "importing broken failed with ModuleNotFoundError: No module named"),
        ("raise ValueError('two\\nlines')", "broken:run", "importing broken failed with ValueError: two lines"),
        ("raise SystemExit(3)", "broken:run", "importing broken failed with SystemExit: 3"),
        ("def run(:", "broken:run", "importing broken failed with SyntaxError"),
        ("", "broken:run", "the module has no run ("),
        ("run = 3", "broken:run", "run is no callable but int"),
        ("def run(case): pass\nDECLARATION = 3", "broken:run", "DECLARATION: a declaration is a mapping, not int"),
        ("def run(case): pass\nDECLARATION = {'lacks': ['all']}", "broken:run", "lacks names no feature 'all'"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(folder, program, spec, says):
    if program is not None:
        (folder / "broken.py").write_text(program)
    with refused("usage", f"adapter {spec}", says):
        load(spec)


def test_loading_calls_nothing(folder):
    (folder / "trap.py").write_text("def run(case): raise AssertionError\ndef main(): raise AssertionError")
    load("trap:run")


@pytest.mark.parametrize("name", ["reference", "reference_float32", "reference_bfloat16"])
@pytest.mark.clause("C5", "N2")
def test_the_reference_passes_every_case(name, require):
    require("ml_dtypes")
    adapter = load(f"{HERE}.{name}:run")
    results = check.run_adapter(loaded(), adapter)
    assert {(result.id, result.message) for result in results if result.verdict != "pass"} == set()
    assert adapter.declaration.lacks == ()


@pytest.mark.parametrize("name", ["zeros", "identity"])
@pytest.mark.clause("A3", "A7", "B1", "C5")
def test_what_answers_nothing_of_its_own_fails_every_case_of_attention(name):
    kinds = ("attention_", "context_parallel_", "step_attention_", "merge")
    cases = [vector for vector in loaded() if vector.case.operation.startswith(kinds)]
    assert len(cases) > 150
    results = check.run_adapter(cases, load(f"{HERE}.{name}:run"))
    assert [result.id for result in results if result.verdict != "fail"] == []


@pytest.mark.parametrize("name", ["zeros", "identity"])
def test_it_does_not_fail_for_the_integers(name):
    """So what fails it is what it is an example of."""
    plain = ("positions", "labels", "partition", "metadata", "needed_rows", "mask", "refuse")
    cases = [vector for vector in loaded() if vector.case.operation in plain]
    results = check.run_adapter(cases, load(f"{HERE}.{name}:run"))
    assert {result.verdict for result in results} == {"pass"}


def test_under_a_launcher_the_reference_answers_for_its_own_rank():
    """Told by the environment alone: operations without an exchange need no MPI."""
    program = (
        "from refimpl.conformance import vectors\n"
        "from refimpl.conformance.adapters.reference import run\n"
        "case = next(v.case for v in vectors.load() if v.case.operation == 'partition' and v.case.cp_size == 2)\n"
        "print(*run(case))"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PMI_RANK": "1",
        "PMI_SIZE": "2",
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["indices.1"]
