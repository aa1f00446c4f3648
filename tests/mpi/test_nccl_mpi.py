"""NcclCollectives without a GPU, under mpirun: the order of its calls, its numbers, and how faults end all ranks."""

import pytest
import test_launch
from test_launch import HERE, RANKS, fault, launch, only_line

launcher = test_launch.launcher


@pytest.mark.clause("C1", "C2", "C3")
@pytest.mark.parametrize("ranks", [1, 3])
def test_exchanges(launcher: list[str], ranks: int) -> None:
    ended = launch(launcher, ranks, str(HERE / "programs" / "nccl.py"), "nothing")
    assert ended.status == 0, ended.output
    assert ended.output.count("finished") == ranks


@pytest.mark.clause("C3", "C4")
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("id", "rank 0: NCCL does not start: NcclError: NCCL_ERROR_INTERNAL_ERROR [rank_failed]"),
        ("init", "rank 1: NCCL does not start: NcclError: NCCL_ERROR_SYSTEM_ERROR: unhandled [rank_failed]"),
        ("no gpu", "rank 1: the GPU backend needs an NVIDIA GPU with its driver (cudaErrorNoDevice: "),
        ("shared", "ranks 0 and 1 both use GPU 0 of one machine, and NCCL takes one rank a GPU: start one rank a GPU"),
        ("async", "rank 1: NCCL reports that an exchange failed: NCCL_ERROR_REMOTE_ERROR: a peer is gone"),
        ("stuck", "rank 1: an exchange of NCCL is not done after 2 s [rank_failed]"),
    ],
)
def test_a_fault_of_one_rank_ends_all_with_one_line(launcher: list[str], what: str, says: str) -> None:
    assert says in only_line(fault(launcher, "nccl.py", what, ranks=RANKS))
