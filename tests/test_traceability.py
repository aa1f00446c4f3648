"""Every clause has code, a test and, unless the spec says that none can, a vector that shows it."""

import shutil

import pytest

from tests import traceability
from tests.traceability import MATRIX, ROOT, complaints, read, render, tags

SPEC = """# A spec

**L1** Rows MUST be owned [P3].

> Why.

**P3** The buffer MUST be cut.

**N5** Work MUST be counted.

Withdrawn so far: L2.

### What no vector shows

| [N5] | a model |

## More
"""

CODE = '''"""A module that mentions [P3]. [L1]"""

LIMIT = 3
"""An attribute. [N5]"""

class Cut:
    """A class.

    Raises:
        Error: never. [P3]
    """

    def rows(self):
        """A method. [L1] [P3]"""

        def inner():
            """Within it. [N5]"""
'''

TESTS = """
import pytest

pytestmark = pytest.mark.clause("N5")

@pytest.mark.clause("L1", "P3")
def test_rows():
    pass

class TestCut:
    @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.clause("P3"))])
    def test_one(self, x):
        pass
"""


@pytest.fixture(scope="module")
def trace():
    return read()


@pytest.fixture
def checkout(tmp_path):
    """A small project in which all is well."""
    files = {
        "specs/thd_cp.md": SPEC,
        "specs/vectors/partition-a.json": '{"clauses": ["L1", "P3"]}',
        "specs/vectors/partition-b.json": '{"clauses": ["P3"]}',
        "specs/vectors/manifest.json": "{}",
        "refimpl/cut.py": CODE,
        "tests/test_cut.py": TESTS,
        "kernels_cu/deep/cut.cu": "// Cuts.\n// clauses: P3\nint x;\n",
        "kernels_cu/README.md": "// clauses: Z1\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_every_clause_is_held(trace):
    assert complaints(trace) == []


def test_the_matrix_is_current(trace):
    """Written by `make traceability`."""
    committed = (ROOT / MATRIX).read_text(encoding="utf-8")
    assert committed.splitlines() == render(trace).splitlines()
    assert committed == render(trace)


def test_the_scan_finds_what_is_known_to_be_there(trace):
    """One place of each kind, so that a scan that finds nothing cannot pass for a project in which all is well."""
    assert trace.ids[0] == "L1"
    assert len(trace.ids) > 60
    assert "refimpl/partition.py: step_windows" in trace.code["P3"]
    assert "tests/test_partition.py" in {place.split(":")[0] for place in trace.tests["P3"]}
    assert "partition-packed-contiguous-cp2-two-documents" in trace.vectors["P3"]


def test_all_is_well_in_the_small_project(checkout):
    trace = read(checkout)
    assert complaints(trace) == []
    assert trace.code == {
        "L1": ["refimpl/cut.py", "refimpl/cut.py: Cut.rows"],
        "N5": ["refimpl/cut.py: LIMIT", "refimpl/cut.py: Cut.rows.inner"],
        "P3": ["refimpl/cut.py: Cut", "refimpl/cut.py: Cut.rows", "kernels_cu/deep/cut.cu"],
    }
    assert trace.tests == {
        "N5": ["tests/test_cut.py"],
        "L1": ["tests/test_cut.py: test_rows"],
        "P3": ["tests/test_cut.py: test_rows", "tests/test_cut.py: TestCut.test_one"],
    }
    assert trace.vectors == {"L1": ["partition-a"], "P3": ["partition-a", "partition-b"]}
    assert render(trace).endswith(
        "P3  The buffer MUST be cut.\n"
        "  code     kernels_cu/deep/cut.cu: (the file)\n"
        "           refimpl/cut.py: Cut, Cut.rows\n"
        "  tests    tests/test_cut.py: TestCut.test_one, test_rows\n"
        "  vectors  2\n"
        "\n"
        "N5  Work MUST be counted.\n"
        "  code     refimpl/cut.py: Cut.rows.inner, LIMIT\n"
        "  tests    tests/test_cut.py: (the file)\n"
        "  vectors  none: no vector shows it\n"
    )


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("specs/thd_cp.md", "**P3** The buffer MUST be cut.", "", "refimpl/cut.py: Cut names P3, which is no clause"),
        ("specs/thd_cp.md", "**P3**", "**P4**", "P4 has no code"),
        ("specs/thd_cp.md", "**P3**", "**L1**", "L1 is defined 2 times"),
        ("specs/thd_cp.md", "**P3**", "**L2**", "L2 is defined and withdrawn"),
        ("specs/thd_cp.md", "owned [P3]", "owned [P9]", "specs/thd_cp.md names P9, which is no clause"),
        ("specs/thd_cp.md", "[N5] |", "|", "N5 has no vector, and the spec does not say why"),
        ("specs/thd_cp.md", "[N5] |", "[N5] [L1] |", "L1 has vectors, and the spec says that none shows it"),
        ("specs/thd_cp.md", "[N5] |", "[N5] [P8] |", "specs/thd_cp.md names P8, which is no clause"),
        ("refimpl/cut.py", "module that mentions [P3]", "module [P7]", "refimpl/cut.py names P7, which is no clause"),
        ("refimpl/cut.py", "Within it. [N5]", "[Z1]", "refimpl/cut.py: Cut.rows.inner names Z1, which is no clause"),
        ("refimpl/cut.py", "[L1]", "", "L1 has no code"),
        ("tests/test_cut.py", '"L1", ', "", "L1 has no test"),
        ("tests/test_cut.py", '"N5"', '"N6"', "tests/test_cut.py names N6, which is no clause"),
        ("tests/test_cut.py", '"N5"', "*ids", "N5 has no test"),
        ("kernels_cu/deep/cut.cu", "P3", "P3 P33", "kernels_cu/deep/cut.cu names P33, which is no clause"),
        ("specs/vectors/partition-a.json", '"L1", ', "", "L1 has no vector, and the spec does not say why"),
        ("specs/vectors/partition-b.json", "P3", "L2", "partition-b names L2, which is no clause"),
    ],
)
def test_a_gap_is_found(checkout, file, old, new, complaint):
    path = checkout / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert complaint in complaints(read(checkout))


def test_code_that_judges_does_not_count_as_code_that_does(checkout):
    (checkout / "refimpl/conformance").mkdir()
    (checkout / "refimpl/cut.py").rename(checkout / "refimpl/conformance/witness.py")
    assert complaints(read(checkout)) == ["L1 has no code", "N5 has no code"]


def test_folders_may_be_empty_or_missing(checkout):
    shutil.rmtree(checkout / "kernels_cu")
    (checkout / "cupy_backend").mkdir()
    assert complaints(read(checkout)) == []


def test_a_tag_stands_at_the_end():
    assert tags("Rows of a rank, as [P3] says.") == []
    assert tags("Rows, as [P3] says. [P1] [P8]\n    ") == ["P1", "P8"]
    assert tags("Rows [T] and heads [H].") == []


def test_the_matrix_is_written_by_the_command(checkout, monkeypatch, capsys):
    monkeypatch.setattr(traceability, "ROOT", checkout)
    assert traceability.main([]) == 1
    assert "out of date" in capsys.readouterr().err
    assert traceability.main(["--write"]) == 0
    assert (checkout / MATRIX).read_text(encoding="utf-8") == render(read(checkout))
    assert traceability.main([]) == 0
    (checkout / "specs/vectors/partition-b.json").unlink()
    assert traceability.main([]) == 1
