"""The README's Python runs as it stands, and does what it says; what it says that is printed, is printed."""

import contextlib
import io
import re
import sys
import types
from pathlib import Path

import pytest

from refimpl import cli
from refimpl.conformance import vectors
from refimpl.conformance.implementation import answer
from refimpl.conformance.mutants import MUTANTS

README = Path(__file__).parent.parent / "README.md"


def _blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def _run_python_blocks():
    blocks = _blocks("python")
    assert len(blocks) == 2
    printed = io.StringIO()
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(block, names)
    return printed.getvalue().splitlines()


@pytest.mark.clause("C5")
def test_readme_examples():
    *errors, offsets = _run_python_blocks()
    assert [line.split()[0] for line in errors] == ["out", "dq", "dk", "dv"]
    assert all(float(line.split()[1]) < 1e-12 for line in errors)
    assert offsets == "[0 2 3] [0 5 6]"


@pytest.mark.clause("V11")
def test_what_check_says_of_a_wrong_implementation(monkeypatch, capsys):
    """The adapter with the fault that the README names prints the README's lines."""
    top_left = next(mutant for mutant in MUTANTS if mutant.name == "top-left-alignment").implementation
    module = types.ModuleType("my_package")
    module.run = lambda case: answer(case, top_left)
    module.DECLARATION = {"name": "my framework"}
    monkeypatch.setitem(sys.modules, "my_package", module)
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "--adapter", "my_package:run"])
    assert ended.value.code == 1
    printed = " ".join(capsys.readouterr().out.split())
    (block,) = _blocks("text")
    for part in " ".join(block.split()).split(" ... "):
        assert part in printed


def test_the_numbers_of_vectors_and_faults():
    text = README.read_text(encoding="utf-8")
    assert f"{len(vectors.load())} questions with one right answer" in text
    assert f"It knows {len(MUTANTS)} faults, {sum(mutant.source != '' for mutant in MUTANTS)} of them from" in text
