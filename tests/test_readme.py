"""The README's Python runs as it stands, and does what it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def _run_python_blocks():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
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
