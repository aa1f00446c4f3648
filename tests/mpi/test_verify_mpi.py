"""`thdcp verify` on MPI ranks: it agrees, it can fail, and what it cannot do it says once."""

import importlib.util
import json
from pathlib import Path

import pytest
import test_launch
from test_launch import Ended, launch, only_line

launcher = test_launch.launcher

SMALL = ("--lengths", "20,0,13,31", "--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--dtype", "float64")


def verify(launcher: list[str], ranks: int, *options: str) -> Ended:
    return launch(launcher, ranks, "-m", "refimpl.cli", "verify", *options, limit=120.0)


@pytest.mark.clause("C5")
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_agree_and_one_rank_speaks(launcher: list[str], ranks: int, tmp_path: Path) -> None:
    ended = verify(launcher, ranks, *SMALL, "--report", str(tmp_path))
    assert ended.status == 0, ended.output
    assert ended.output.count("24 of 24 cases agree with the oracle") == 1
    report = json.loads((tmp_path / "verify.json").read_text())
    assert (report["cp_size"], report["agrees"]) == (ranks, True)


@pytest.mark.clause("C5")
@pytest.mark.parametrize(
    "fault", ["wrong-alignment", "skipped-reduce", "all-zeros", "leaked-document", "swapped-chunks"]
)
def test_a_fault_on_one_rank_ends_all_with_a_verdict(launcher: list[str], fault: str) -> None:
    ended = verify(launcher, 3, *SMALL, "--inject", fault)
    assert ended.status != 0
    assert "x its bound" in ended.output
    assert not ended.lines, ended.output
    assert "Traceback" not in ended.output


@pytest.mark.clause("C3", "C4")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--cp-size", "5"), "the launcher started 3 ranks"),
        (("--lengths", "/no/such/file"), "No such file"),
        (("--heads", "5", "--kv-heads", "2"), "no multiple"),
        (("--policy", "zigzag"), "unknown policy"),
        (("--inject", "all-zeros", "--inject-rank", "3"), "cp_rank is 3"),
        (("--frobnicate",), "--frobnicate"),
    ],
)
def test_what_no_rank_can_do_is_told_once(launcher: list[str], options: tuple[str, ...], says: str) -> None:
    ended = verify(launcher, 3, *options)
    assert ended.status != 0
    assert says in only_line(ended)


@pytest.mark.clause("C5")
def test_kernels_on_the_host_agree_over_mpi(launcher: list[str]) -> None:
    options = ("--backend", "host", "--lengths", "20,0,13,31", "--heads", "2", "--kv-heads", "1", "--window", "4,2")
    ended = verify(launcher, 2, *options)
    assert ended.status == 0, ended.output
    assert "the CUDA kernels run on the CPU" in ended.output
    assert ended.output.count("48 of 48 cases agree with the oracle") == 1


def test_the_gpu_backend_without_a_gpu_is_refused_once(launcher: list[str]) -> None:
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed")
    ended = verify(launcher, 2, "--backend", "cupy")
    assert ended.status == 2
    assert "the GPU backend needs CuPy" in only_line(ended)
