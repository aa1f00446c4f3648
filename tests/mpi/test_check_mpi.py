"""`thdcp check --adapter` under mpirun: ranks that answer together, and ranks that leave each other waiting."""

import json
import os
from pathlib import Path

import pytest
import test_launch
from test_launch import HERE, LIMIT, RANKS, ROOT, Ended, launch, only_line

launcher = test_launch.launcher  # the fixture
PROGRAMS = os.pathsep.join([str(ROOT), str(HERE / "programs")])


def slow(*values: object) -> object:
    """Values for a test that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def check(launcher: list[str], ranks: int, adapter: str, *options: str, **environment: str) -> Ended:
    path = os.pathsep.join(filter(None, [PROGRAMS, os.environ.get("PYTHONPATH")]))
    arguments = ("-m", "refimpl.cli", "check", "--adapter", adapter, *options)
    return launch(launcher, ranks, *arguments, limit=120.0, **{"PYTHONPATH": path, **environment})


def faulty(launcher: list[str], fault: str, *options: str) -> Ended:
    return check(launcher, RANKS, "faulty_adapter:run", *options, FAULT=fault)


def reported(folder: Path) -> dict[str, dict[str, str]]:
    """The cases of a report by id."""
    content = json.loads((folder / "check.json").read_text())
    return {case["id"]: case for case in content["cases"]}


FIRST = "cp-forward-packed-contiguous-cp3"
"""A case with a part for each of three ranks, and a collective inside."""

REFERENCE = "refimpl.conformance.adapters.reference:run"


@pytest.mark.clause("C5")
@pytest.mark.parametrize("ranks", [2, *(slow(n) for n in (1, 3, 4, 8))])
def test_the_reference_passes_on_its_ranks(launcher: list[str], ranks: int, tmp_path: Path) -> None:
    ended = check(launcher, ranks, REFERENCE, "--report", str(tmp_path))
    assert ended.status == 0, ended.output
    assert ended.output.count(f"{REFERENCE} on {ranks} ranks") == 1, "one rank speaks for all"
    cases = reported(tmp_path)
    assert {case["verdict"] for case in cases.values()} == {"pass", "skip"}
    for case in cases.values():
        per_rank = case["operation"].startswith(("partition", "metadata", "needed", "context_parallel"))
        asked = not per_rank or case["cp_size"] == ranks
        assert case["verdict"] == ("pass" if asked else "skip"), case["id"]
        assert asked or case["message"].startswith(f"needs {case['cp_size']} rank"), case["message"]


@pytest.mark.clause("C5")
def test_zeros_on_every_rank_fail_every_case_of_attention(launcher: list[str], tmp_path: Path) -> None:
    zeros = "refimpl.conformance.adapters.zeros:run"
    ended = check(launcher, 2, zeros, "--only", "cp-*", "--report", str(tmp_path))
    assert ended.status == 1, ended.output
    attention = {
        name: case
        for name, case in reported(tmp_path).items()
        if case["operation"].startswith("context_parallel") and case["cp_size"] == 2
    }
    assert len(attention) >= 10
    assert {name: case["verdict"] for name, case in attention.items()} == dict.fromkeys(attention, "fail")


@pytest.mark.clause("C4")
@pytest.mark.parametrize(
    ("fault", "verdict", "says"),
    [
        slow("every rank raises", "error", "rank 0: ZeroDivisionError: on purpose, in two lines"),
        ("one rank raises, none waits", "error", "rank 1: ZeroDivisionError: on purpose"),
        ("one rank refuses, none waits", "fail", "rank 0 answered, rank 1 refused with policy (not here)"),
        slow("one rank answers in another shape", "fail", "indices.1 has shape [3, 10000000], expected ["),
    ],
)
def test_an_exception_is_an_answer(
    launcher: list[str],
    fault: str,
    verdict: str,
    says: str,
    tmp_path: Path,
) -> None:
    ended = faulty(launcher, fault, "--only", f"partition-*cp{RANKS}*", "--report", str(tmp_path))
    assert ended.status == 1, ended.output
    assert ended.lines == []
    cases = reported(tmp_path)
    assert cases
    for case in cases.values():
        assert case["verdict"] == verdict
        assert says in case["message"]


@pytest.mark.clause("C6")
@pytest.mark.parametrize("fault", ["every rank skips", slow("every rank refuses")])
def test_what_all_ranks_lack_is_a_skip(launcher: list[str], fault: str, tmp_path: Path) -> None:
    ended = check(launcher, 2, "faulty_adapter:run", "--only", "cp-forward-*", "--report", str(tmp_path), FAULT=fault)
    assert ended.status == 0, ended.output
    asked = [case for case in reported(tmp_path).values() if case["cp_size"] == 2]
    assert {("gqa" in case["features"], case["verdict"]) for case in asked} == {(True, "skip"), (False, "pass")}


@pytest.mark.clause("C4")
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("one rank raises while others wait", "rank 1: case {id}: raised ZeroDivisionError: on purpose, in two lines"),
        slow(
            "one rank refuses while others wait", "rank 1: case {id}: refused with heads (not on this rank), and other"
        ),
        ("one rank hangs", "case {id}: the adapter has not answered for 6 s"),
        slow("one rank takes no part", "case {id}: the adapter has not answered for 6 s"),
        slow("import waits for a rank that raises", "rank 1: the adapter cannot be had (adapter faulty_adapter:run: "),
    ],
)
def test_a_rank_that_leaves_others_waiting_ends_all(launcher: list[str], fault: str, says: str) -> None:
    ended = faulty(launcher, fault, "--timeout", "6", "--only", f"{FIRST}*")
    assert ended.since_fault <= LIMIT, ended.output
    assert ended.status != 0
    assert says.format(id=FIRST) in only_line(ended)


@pytest.mark.clause("C4")
def test_a_rank_that_dies_ends_all(launcher: list[str]) -> None:
    """The launcher tells of it."""
    ended = faulty(launcher, "one rank dies", "--only", f"{FIRST}*")
    assert ended.since_fault <= LIMIT, ended.output
    assert ended.status != 0
    assert "Traceback" not in ended.output


@pytest.mark.clause("C4")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--adapter", "nowhere:run"), "adapter nowhere:run: no module nowhere"),
        (("--list",), "--list is the work of one process, but the launcher started 3"),
        slow(("--adapter", "faulty_adapter:run", "--only", "nothing"), "'nothing' matches no case"),
    ],
)
def test_what_no_rank_can_do_is_told_once(launcher: list[str], arguments: list[str], says: str) -> None:
    path = os.pathsep.join(filter(None, [PROGRAMS, os.environ.get("PYTHONPATH")]))
    ended = launch(launcher, RANKS, "-m", "refimpl.cli", "check", *arguments, PYTHONPATH=path)
    assert ended.status == 2
    assert says in only_line(ended)


@pytest.mark.clause("C4")
def test_an_import_that_fails_on_one_rank_is_told_once(launcher: list[str]) -> None:
    ended = faulty(launcher, "import raises")
    assert ended.status == 2
    line = only_line(ended)
    assert (
        "rank 1: adapter faulty_adapter:run: importing faulty_adapter failed with RuntimeError: no such device" in line
    )
