"""Launches mpirun: the SPMD tests on several ranks, and one small program for each way in which a rank can fail.

Every fault must end every rank within 15 s, with a status that is not 0, without a traceback, and with one line of ours
that says what is wrong, whatever the launcher prints beside it.
"""

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMIT = 15.0
"""Seconds from the fault to the end of the job."""
START_UP = 30.0
"""Seconds that a loaded machine may need to start the ranks."""
RANKS = 3
"""One that fails, and one to either side of it."""


@dataclass(frozen=True)
class Ended:
    """How a job ended: its status, all that it printed, and the seconds since its fault."""

    status: int
    output: str
    since_fault: float

    @property
    def lines(self) -> list[str]:
        """The errors that this project printed."""
        return [line for line in self.output.splitlines() if "thdcp: error:" in line]


@pytest.fixture(scope="session")
def launcher() -> list[str]:
    """The command that starts ranks. Where there is none the tests are skipped, but in CI they fail."""
    command = find_launcher()
    reason = None
    if command is None:
        reason = "no MPI launcher: MPIEXEC is not set, and neither mpiexec nor mpirun is found"
    elif importlib.util.find_spec("mpi4py") is None:
        reason = "mpi4py is not installed"
    if reason is not None:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(reason)
        pytest.skip(reason)
    return command


def find_launcher() -> list[str] | None:
    """MPIEXEC, with its options; else the launcher beside this interpreter; else one on PATH."""
    if os.environ.get("MPIEXEC"):
        return shlex.split(os.environ["MPIEXEC"])
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpirun") or shutil.which("mpiexec")
    return None if found is None else [found]


def child_environment(**changes: str) -> dict[str, str]:
    """This environment without what a launcher, or MPI in this process, has told it, and with one thread a rank."""
    told = ("PMI_", "PMIX_", "HYDI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "THDCP_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path} | changes


def survivors(tag: str) -> list[int]:
    """Processes, by `ps`, that still carry the tag on their command line."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listing.splitlines() if tag in line]


def launch(
    launcher: list[str], ranks: int, *arguments: str, limit: float = LIMIT + START_UP, **environment: str
) -> Ended:
    """Run `python *arguments` on some ranks to the end. None outlives this call, and none may need to be killed."""
    tag = f"thdcp_{uuid.uuid4().hex}"  # as an -X option, which Python ignores and ps shows
    command = [*launcher, "-n", str(ranks), sys.executable, "-X", tag, *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=child_environment(**environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=limit)
        ended = time.time()
        patience = time.monotonic() + 2.0
        while survivors(tag) and time.monotonic() < patience:
            time.sleep(0.05)
        left = survivors(tag)
    except subprocess.TimeoutExpired:
        for pid in survivors(tag):
            kill(pid)
        output, _ = process.communicate()
        pytest.fail(f"still running after {limit:g} s: {' '.join(command)}\n{output}")
    for pid in left:
        kill(pid)
    assert not left, f"{len(left)} processes outlived their job\n{output}"
    faults = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("fault at ")]
    return Ended(process.returncode, output, ended - max(faults, default=ended))


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def fault(launcher: list[str], program: str, *arguments: str, ranks: int = RANKS, **environment: str) -> Ended:
    """Run a program whose ranks must all fail in time, and not finish."""
    ended = launch(launcher, ranks, str(HERE / "programs" / program), *arguments, **environment)
    assert "fault at" in ended.output, ended.output
    assert ended.since_fault <= LIMIT, ended.output
    assert ended.status != 0, ended.output
    return ended


def only_line(ended: Ended) -> str:
    """The one line that says what is wrong; no rank may have got through, nor shown a traceback."""
    assert "Traceback" not in ended.output, ended.output
    assert "finished" not in ended.output, ended.output
    assert len(ended.lines) == 1, ended.output
    return ended.lines[0]


# The SPMD tests


@pytest.mark.clause("C1", "C2", "C3", "C5")
@pytest.mark.parametrize("ranks", [2, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 5, 8))])
def test_the_spmd_tests_pass(launcher: list[str], ranks: int) -> None:
    pytest_of_ranks = ("-m", "pytest", "-p", "no:cacheprovider", "--timeout-method=thread", "--color=no")
    ended = launch(launcher, ranks, *pytest_of_ranks, str(HERE / "test_spmd.py"), limit=240.0)
    assert ended.status == 0, ended.output
    assert ended.output.count(f"ranks: {ranks}") == 1, "one rank, and only one, tells of all"
    assert ended.output.count(" passed") == 1
    assert ("skipped" in ended.output) == (ranks == 1), ended.output


@pytest.mark.clause("C4")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_test_that_fails_on_one_rank_ends_all_and_is_told_once(launcher: list[str], failing: int) -> None:
    pytest_of_ranks = ("-m", "pytest", "-p", "no:cacheprovider", "--color=no")
    started = time.monotonic()
    program = str(HERE / "programs" / "check_failing.py")
    ended = launch(launcher, RANKS, *pytest_of_ranks, program, FAILING_RANK=str(failing))
    assert time.monotonic() - started < LIMIT + START_UP
    assert ended.status != 0
    assert ended.output.count(f"rank {failing} of {RANKS} failed: ") == 1, ended.output
    assert f"AssertionError: rank {failing} of {RANKS} on purpose" in ended.output
    assert sum(f"rank {r} of {RANKS} on purpose" in ended.output for r in range(RANKS)) == 1


# Ranks that differ


@pytest.mark.clause("C3")
def test_the_program_of_these_tests_succeeds_without_a_fault(launcher: list[str]) -> None:
    ended = launch(launcher, RANKS, str(HERE / "programs" / "disagree.py"), "nothing")
    assert ended.status == 0, ended.output
    assert ended.lines == []
    # Launchers may run the lines of two ranks together.
    assert sorted(re.findall(r"rank (\d+) finished", ended.output)) == [str(rank) for rank in range(RANKS)]


@pytest.mark.clause("C3", "C4")
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("layout", ["ranks disagree on layout", "rank 0 has 1 documents", "rank 1 has 2 documents"]),
        ("policy", ["ranks disagree on policy", "rank 0 has packed_contiguous", "rank 1 has dual_chunk_swap"]),
        ("dtype", ["ranks disagree on q", "rank 0 has float32", "rank 1 has float64"]),
        ("shape", ["ranks disagree on q", "rank 0 has float32[16, 2, 4]", "rank 1 has float32[16, 4, 4]"]),
    ],
)
def test_one_rank_with_another_request_ends_all(launcher: list[str], what: str, says: list[str]) -> None:
    line = only_line(fault(launcher, "disagree.py", what))
    for words in (*says, "[ranks_disagree]"):
        assert words in line


@pytest.mark.clause("C3", "C4", "P6")
def test_one_rank_that_refuses_its_request_ends_all(launcher: list[str]) -> None:
    line = only_line(fault(launcher, "disagree.py", "divisibility"))
    assert f"rank 1: packed_contiguous at cp_size {RANKS} needs total_tokens divisible by {RANKS}" in line
    assert "[not_divisible]" in line


# Ranks that fail


@pytest.mark.clause("C4")
@pytest.mark.parametrize("where", ["before", "in the forward", "in the backward", "in a reduction", "after"])
def test_one_rank_that_raises_ends_all(launcher: list[str], where: str) -> None:
    line = only_line(fault(launcher, "raise_error.py", where))
    assert "thdcp: error: rank 1: ZeroDivisionError: on purpose, in two lines" in line


@pytest.mark.clause("C4")
def test_what_all_ranks_raise_is_told_once(launcher: list[str]) -> None:
    assert "ZeroDivisionError: on purpose" in only_line(fault(launcher, "raise_error.py", "on every rank"))


@pytest.mark.clause("C4")
def test_a_traceback_is_shown_on_request(launcher: list[str]) -> None:
    ended = fault(launcher, "raise_error.py", "before", THDCP_TRACEBACK="1")
    assert ended.output.count("Traceback") == 1
    assert "in fail" in ended.output
    assert len(ended.lines) == 1


@pytest.mark.clause("C4")
@pytest.mark.parametrize("how", ["exits", "exits with a status", "never arrives"])
def test_a_rank_that_does_not_arrive_is_waited_for_a_bounded_time(launcher: list[str], how: str) -> None:
    line = only_line(fault(launcher, "vanish.py", how))
    assert "a rank has not arrived for 2 s [rank_failed]" in line


@pytest.mark.clause("C4")
def test_one_rank_that_is_killed_ends_all(launcher: list[str]) -> None:
    """The launcher tells of it: the rank cannot, and the others are ended before they could notice."""
    ended = fault(launcher, "vanish.py", "is killed")
    assert "signal 9" in ended.output.lower() or "killed" in ended.output.lower()
    assert "Traceback" not in ended.output
    assert "finished" not in ended.output
    assert len(ended.lines) <= 1


# A launcher of another MPI


def start_alone(**environment: str) -> str:
    """What a process that no launcher of its MPI started, but that is told so, says when it makes its group."""
    program = (
        "from refimpl import MpiCollectives, SpecError\ntry: MpiCollectives()\nexcept SpecError as e: print(e.code, e)"
    )
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


@pytest.mark.clause("C4")
def test_ranks_that_do_not_see_each_other_say_so(launcher: list[str]) -> None:
    told = start_alone(PMI_RANK="2", PMI_SIZE="4")
    assert told.startswith("rank_failed the launcher started 4 ranks but MPI sees 1: mpi4py loads another MPI")
    assert "MPIEXEC" in told


@pytest.mark.clause("C4")
def test_the_launcher_of_open_mpi_is_not_mpichs(launcher: list[str]) -> None:
    from mpi4py import MPI

    vendor = MPI.get_vendor()[0]
    if vendor == "Open MPI":
        pytest.skip("mpi4py loads Open MPI")
    told = start_alone(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1")
    assert told.startswith(f"rank_failed the launcher is Open MPI's but mpi4py loads {vendor}; set MPIEXEC")
