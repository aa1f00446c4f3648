"""Not a test of this project: pytest runs it as ranks, to see what the failure of one of them does to all."""

import os

import pytest

from refimpl.collectives import MpiCollectives


@pytest.fixture(scope="session")
def failing() -> int:
    return int(os.environ["FAILING_RANK"])


def test_that_passes(group: MpiCollectives) -> None:
    group.all_agree({})


def test_that_one_rank_fails(group: MpiCollectives, failing: int) -> None:
    assert group.rank != failing, f"rank {group.rank} of {group.size} on purpose"
    group.all_agree({})
