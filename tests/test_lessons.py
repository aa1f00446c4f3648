"""The lessons' Python runs, and the lines of kernels that they stop at are those that they show."""

import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
STEP = (ROOT / "specs" / "lessons" / "step_through_a_kernel.md").read_text(encoding="utf-8")


def test_the_example_runs():
    (block,) = re.findall(r"```python\n(.*?)```", STEP, re.DOTALL)
    names: dict[str, object] = {}
    exec(block, names)
    assert np.isfinite(names["lse"]).all()
    np.testing.assert_array_equal(names["out"][[0, 20], 0], names["v"][[0, 20], 0])  # a first token sees itself alone


def test_the_breakpoint_is_where_the_lesson_says():
    source, stop = re.search(r"break (\w+\.cu):(\d+)", STEP).groups()
    lines = (ROOT / "kernels_cu" / source).read_text(encoding="utf-8").splitlines()
    shown = re.findall(r"^    (\d+)\t(.*)$", STEP, re.MULTILINE)
    assert shown[0][0] == stop
    for number, text in shown:
        assert lines[int(number) - 1].strip() == text.strip()
