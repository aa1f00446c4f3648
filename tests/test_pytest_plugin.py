"""`pytest --thdcp-adapter=...`: one test a case, in a run of pytest's own."""

import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

REFERENCE = "refimpl.conformance.adapters.reference:run"
FEW = "--thdcp-only=partition-packed-contiguous-*"


@pytest.fixture
def run(tmp_path):
    """Run pytest in an empty folder, with an adapter `mine` of these lines."""

    def start(*arguments, adapter="", **environment):
        (tmp_path / "mine.py").write_text(adapter)
        told = ("PMI_", "OMPI_COMM_WORLD_", "PYTEST_", "THDCP_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(told)}
        kept |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200", **environment}
        command = [sys.executable, "-m", "pytest", "--color=no", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=240, check=False)

    return start


WRONG = """
from refimpl.conformance.adapters import Skip, reference
DECLARATION = {"name": "mine", "dtype": "float64", "lacks": ["cp8"]}
def run(case):
    if "cp8" in case.features:
        raise Skip("cp8")
    if "cp3" in case.features:
        raise ValueError("on purpose")
    answer = dict(reference.run(case))
    if case.id == "partition-packed-contiguous-cp1":
        answer["indices.0"] = answer["indices.0"][::-1]
    return answer
"""


@pytest.mark.clause("C5")
def test_the_reference_passes_one_test_a_case(run):
    ended = run("-q", f"--thdcp-adapter={REFERENCE}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^\d{3} passed in ", ended.stdout, re.MULTILINE)


@pytest.mark.clause("V9")
def test_failures_errors_and_skips(run, tmp_path):
    ended = run("-rs", "-v", "--thdcp-adapter=mine:run", FEW, "--junitxml=report.xml", adapter=WRONG)
    out = ended.stdout
    assert ended.returncode == 1, out + ended.stderr
    assert "thdcp::partition-packed-contiguous-cp2-two-documents PASSED" in out
    assert "thdcp::partition-packed-contiguous-cp1 FAILED" in out
    assert "thdcp::partition-packed-contiguous-cp3 FAILED" in out
    assert "thdcp::partition-packed-contiguous-cp8 SKIPPED (lacks cp8)" in out
    assert "fail: indices.0 at rank 0, entry 0: got 23, expected 0 exactly; 24 of 24 elements wrong" in out
    assert "error: ValueError: on purpose" in out
    assert "clauses P1 P3 P8; features partition, packed_contiguous, cp1" in out
    assert "thdcp: mine:run" in out
    assert re.search(r"^(looks like: |no known fault)", out, re.MULTILINE)
    assert "Traceback" not in out
    suite = next(ElementTree.parse(tmp_path / "report.xml").iter("testsuite"))
    assert (suite.get("failures"), suite.get("skipped")) == ("2", "1")
    properties = {item.get("value") for item in suite.iter("property") if item.get("name") == "clauses"}
    assert "P1 P3 P8" in properties


@pytest.mark.clause("V10")
def test_known_failures_are_strict_both_ways(run, tmp_path):
    known = tmp_path / "known"
    failing = ["partition-packed-contiguous-cp1", "partition-packed-contiguous-cp3"]
    known.write_text("\n".join(failing))
    ended = run("-q", "--thdcp-adapter=mine:run", FEW, "--thdcp-known=known", adapter=WRONG)
    assert ended.returncode == 0, ended.stdout
    assert "2 xfailed" in ended.stdout
    assert "looks like" not in ended.stdout
    known.write_text("\n".join([*failing, "partition-packed-contiguous-tail"]))
    ended = run("-q", "--thdcp-adapter=mine:run", FEW, "--thdcp-known=known", adapter=WRONG)
    assert ended.returncode == 1
    assert "[XPASS(strict)] known failure" in ended.stdout


def test_tests_are_chosen_by_id_clause_feature_and_mark(run, tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own(): pass")
    adapter = f"--thdcp-adapter={REFERENCE}"

    def names(*arguments):
        listed = run("-q", "--collect-only", adapter, *arguments).stdout
        return [line for line in listed.splitlines() if "::" in line]

    everything = names()
    assert len(everything) > 150
    assert set(everything) - set(names("-m", "thdcp")) == {"test_own.py::test_own"}
    assert names("-k", "partition-packed-contiguous-tail") == ["thdcp::partition-packed-contiguous-tail"]
    by_clause = names("-k", "R8 and packed_contiguous")
    assert by_clause
    assert all(name.startswith("thdcp::needed-rows-packed-contiguous") for name in by_clause)


def test_the_declared_dtype_can_be_overridden(run):
    adapter = "--thdcp-adapter=refimpl.conformance.adapters.reference_float32:run"
    some = "--thdcp-only=attention-forward-causal"
    assert run("-q", adapter, some).returncode == 0
    assert run("-q", adapter, some, "--thdcp-dtype=float64").returncode == 1
    assert "dtype is 'fp8'" in run("-q", adapter, some, "--thdcp-dtype=fp8").stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--thdcp-adapter=nowhere:run"], "no module nowhere"),
        (["--thdcp-adapter=nowhere"], "expected package.module:callable"),
        (["--thdcp-adapter=mine:run"], "the module has no run"),
        ([f"--thdcp-adapter={REFERENCE}", "--thdcp-only=nothing"], "'nothing' matches no case"),
        ([f"--thdcp-adapter={REFERENCE}", "--thdcp-known=no/such"], "No such file"),
    ],
)
def test_bad_options_are_one_line(run, arguments, says):
    ended = run("-q", *arguments)
    assert ended.returncode == 4
    assert ended.stderr.startswith("ERROR: thdcp: ")
    assert says in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_ranks_are_sent_to_the_command(run):
    ended = run("-q", f"--thdcp-adapter={REFERENCE}", PMI_RANK="0", PMI_SIZE="2")
    assert ended.returncode == 4
    assert "use `thdcp check --adapter` under MPI" in ended.stderr


def test_a_run_without_the_option_is_as_if_there_were_no_plugin(run, tmp_path):
    """The same tests, the same markers, and nothing imported."""
    (tmp_path / "test_own.py").write_text(
        "import sys\n"
        "def test_own():\n"
        "    assert 'thdcp_pytest' in sys.modules\n"
        "    assert not {'refimpl', 'numpy', 'scipy', 'click', 'rich'} & set(sys.modules)\n"
    )
    ended = run("-v", "--strict-markers")
    assert ended.returncode == 0, ended.stdout
    assert "1 passed" in ended.stdout
    assert "thdcp::" not in ended.stdout
    assert "thdcp" not in run("--markers").stdout.split("@pytest.mark.filterwarnings")[0]
