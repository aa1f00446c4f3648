"""Tests that run as ranks: a failure on one rank ends all of them, and only rank 0 and ranks that fail are heard.

Without an MPI launcher nothing here acts, and the group has one rank.
"""

import os
import sys
import time

import pytest

from refimpl.collectives import MpiCollectives, launched
from refimpl.errors import SpecError

RANK, SIZE = launched() or (0, 1)
HEARD = sys.stdout


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Let the terminal reporter, which is made next, write to nowhere, on every rank but the first."""
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the reporter keeps it to the end


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart() -> None:
    sys.stdout = HEARD


def pytest_report_header() -> str:
    return f"ranks: {SIZE}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        end_all(f"{report.nodeid} ({report.when})", report.longreprtext)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        end_all(f"collecting {report.nodeid}", report.longreprtext)


def pytest_internalerror(excrepr: object) -> None:
    end_all("pytest", str(excrepr))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus: int) -> None:
    """A rank that stops early for another reason (no such test, an interrupt) is not waited for either."""
    if exitstatus:
        end_all("pytest", f"exit status {int(exitstatus)}")


def end_all(what: str, why: str) -> None:
    """Say what failed on this rank, then end every rank: the others may wait for this one in a collective.

    What fails on all ranks at once is said by the first of them.
    """
    if SIZE == 1:
        return
    time.sleep(min(0.5 * RANK, 4.0))
    sys.stderr.write(f"rank {RANK} of {SIZE} failed: {what}\n{why}\n")
    sys.stderr.flush()
    time.sleep(0.2)  # a launcher drops what it has not yet passed on
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init()
    MPI.COMM_WORLD.Abort(1)
    os._exit(1)  # Abort may return while the launcher ends the job


@pytest.fixture(scope="session")
def group() -> MpiCollectives:
    """All ranks. Without MPI the tests are skipped, but in CI, where it must be there, they fail."""
    try:
        return MpiCollectives()
    except SpecError as error:
        if error.code != "missing_package" or os.environ.get("CI", "").lower() in ("1", "true"):
            raise
        pytest.skip(error.message)
