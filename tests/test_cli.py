"""The `thdcp` command: what it prints, what it refuses, and with which status it ends."""

import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from refimpl.cli import main

SMALL = ["verify", "--lengths", "20,0,13,31", "--cp-size", "2", "--head-dim", "8", "--dtype", "float64,float32"]


@pytest.fixture
def thdcp(monkeypatch, capsys):
    """Run the command in this process, as if no MPI launcher had started it; (status, stdout, stderr)."""
    for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "THDCP_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


def test_verify_agrees_and_shows_a_table(thdcp):
    status, out, err = thdcp(*SMALL)
    assert status == 0
    assert err == ""
    for word in (
        "dual_chunk_swap",
        "packed_contiguous",
        "packed_dual_chunk_swap",
        "causal",
        "full",
        "max/mean",
        "steps",
    ):
        assert word in out
    assert "144 of 144 cases agree with the oracle" in out
    assert "…" not in out  # nothing cut off in a pipe


@pytest.mark.parametrize(
    "fault", ["wrong-alignment", "skipped-reduce", "all-zeros", "leaked-document", "swapped-chunks"]
)
def test_injected_faults_end_with_status_1(thdcp, fault):
    status, out, err = thdcp(*SMALL, "--heads", "2", "--inject", fault)
    assert status == 1
    assert f"FAULT {fault}" in out
    assert "differ" in out
    assert "x its bound" in out
    assert err == ""


def test_inject_rank_chooses_who_is_broken(thdcp):
    arguments = (
        *SMALL,
        "--heads",
        "1",
        "--policy",
        "packed_contiguous",
        "--dtype",
        "float64",
        "--inject",
        "swapped-chunks",
    )
    for rank in ("0", "1"):
        status, out, _ = thdcp(*arguments, "--inject-rank", rank)
        assert status == 1
        assert f"of rank {rank}," in out


def test_reports_hold_every_case(thdcp, tmp_path):
    folder = tmp_path / "new" / "reports"
    status, _, _ = thdcp(*SMALL, "--heads", "2", "--inject", "all-zeros", "--report", str(folder))
    assert status == 1
    assert sorted(path.name for path in folder.iterdir()) == ["verify.json", "verify.xml"]
    report = json.loads((folder / "verify.json").read_text())
    assert report["agrees"] is False
    assert report["cp_size"] == 2
    assert report["plan"]["lengths"] == [20, 0, 13, 31]
    assert len(report["cases"]) == 48
    case = report["cases"][0]
    assert set(case["errors"]) == set(case["bounds"]) == {"out", "lse", "dq", "dk", "dv"}
    assert case["errors"]["lse"] == "inf"
    suite = ElementTree.parse(folder / "verify.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("48", "48")
    failure = suite.find("testcase/failure")
    assert "out" in failure.get("message")
    assert "x its bound" in failure.text


def test_report_of_a_run_that_agrees(thdcp, tmp_path):
    status, _, _ = thdcp(*SMALL, "--heads", "2", "--policy", "packed_contiguous", "--report", str(tmp_path))
    assert status == 0
    assert json.loads((tmp_path / "verify.json").read_text())["agrees"] is True
    assert ElementTree.parse(tmp_path / "verify.xml").getroot().get("failures") == "0"


def test_options_select_what_runs(thdcp, tmp_path):
    arguments = ("--heads", "6", "--kv-heads", "3", "--window", "4,1", "--seed", "7", "--report", str(tmp_path))
    assert thdcp(*SMALL, *arguments)[0] == 0
    plan = json.loads((tmp_path / "verify.json").read_text())["plan"]
    assert plan["heads"] == [[6, 3]]
    assert plan["seed"] == 7
    assert [(mask["causal"], mask["window"]) for mask in plan["masks"]] == [
        (True, [-1, -1]),
        (True, [4, 1]),
        (False, [-1, -1]),
        (False, [4, 1]),
    ]


@pytest.mark.clause("P11")
def test_policy_from_the_environment(thdcp, monkeypatch):
    variable = "NVTE_EXPERIMENTAL_CP_AG_THD_PACKED_CONTIGUOUS"
    arguments = ("metadata", "--policy", "environment", "--cp-size", "2", "--rank", "0", "--lengths", "8,4")
    for value, policy in (("1", "packed_contiguous"), ("0", "dual_chunk_swap"), ("", "dual_chunk_swap")):
        monkeypatch.setenv(variable, value)
        status, out, _ = thdcp(*arguments)
        assert (status, json.loads(out)["policy"]) == (0, policy)
    monkeypatch.setenv(variable, "yes")
    status, _, err = thdcp(*arguments)
    assert status == 2
    assert variable in err


@pytest.mark.clause("R2", "R4")
def test_metadata_shows_the_worked_values(thdcp):
    status, out, _ = thdcp(
        "metadata", "--policy", "packed_contiguous", "--cp-size", "4", "--rank", "1", "--lengths", "5,7"
    )
    shown = json.loads(out)
    assert status == 0
    assert shown["indices"] == [3, 4, 5]
    assert shown["steps"][0]["cu_seqlens_q"] == [0, 2, 3]
    assert shown["steps"][0]["cu_seqlens_kv"] == [0, 5, 6]
    assert shown["kv_ranges"] == [[0, 6]]
    assert shown["visible_pairs"] == 4 + 5 + 1


METADATA = ["metadata", "--policy", "dual_chunk_swap", "--cp-size", "2", "--rank", "0", "--lengths", "8"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verify", "--lengths", "/no/such/file"], "No such file"),
        (["verify", "--lengths", "NOT_JSON"], "not JSON"),
        (["verify", "--lengths", "5,-3"], "entry 1 is -3"),
        (["verify", "--lengths", "0,0"], "no document has any token"),
        (["verify", "--lengths", "9999999999"], "more than"),
        (["verify", "--policy", "zigzag"], "unknown policy 'zigzag'"),
        (["verify", "--policy", ""], "unknown policy ''"),
        (["verify", "--heads", "5", "--kv-heads", "2"], "5 query heads are no multiple of 2"),
        (["verify", "--heads", "0"], "--heads"),
        (["verify", "--head-dim", "many"], "--head-dim"),
        (["verify", "--cp-size", "0"], "cp_size is 0"),
        (["verify", "--cp-size", "-4"], "cp_size is -4"),
        (["verify", "--cp-size", "2.5"], "--cp-size"),
        (["verify", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["verify", "--window", "5"], "expected 2 integers"),
        (["verify", "--window", "-2,0"], "window[0] is -2"),
        (["verify", "--seed", "-1"], "--seed"),
        (["verify", "--inject", "gremlin"], "unknown fault 'gremlin'"),
        (["verify", "--inject", "all-zeros", "--inject-rank", "4"], "cp_rank is 4"),
        (["verify", "--cp-size", "1", "--inject", "skipped-reduce"], "two or more"),
        (["verify", "--report", "/proc/no/such"], "--report"),
        (["verify", "--frobnicate"], "--frobnicate"),
        (["verify", "extra"], "extra"),
        (["frobnicate"], "frobnicate"),
        ([], "Missing command"),
        ([*METADATA, "--rank", "2"], "cp_rank is 2: expected 0 to 1"),
        ([*METADATA, "--rank", "-1"], "cp_rank is -1"),
        ([*METADATA, "--cp-size", "0"], "cp_size is 0"),
        ([*METADATA, "--lengths", "7"], "add 1 there"),
        ([*METADATA, "--policy", "packed_contiguous", "--lengths", "7"], "total_tokens=8"),
        ([*METADATA, "--total-tokens", "4"], "total_tokens is 4"),
        ([*METADATA, "--multiple-of", "0"], "multiple_of is 0"),
        ([*METADATA, "--policy", "all"], "unknown policy 'all'"),
        (["metadata"], "--policy"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gets_one_line_and_status_2(thdcp, tmp_path, arguments, says):
    (tmp_path / "broken.json").write_text("{")
    arguments = [str(tmp_path / "broken.json") if a == "NOT_JSON" else a for a in arguments]
    status, out, err = thdcp(*arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("thdcp: error: ")
    assert err.count("\n") == 1
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--backend", "tpu"), "'tpu' is not one of 'reference', 'host', 'cupy'"),
        (("--backend", "host", "--dtype", "float32,float64"), "--backend host has no float64"),
        (("--backend", "cupy", "--dtype", "float64"), "--backend cupy has no float64"),
    ],
)
def test_a_backend_that_cannot_is_refused(thdcp, options, says):
    status, out, err = thdcp("verify", *options)
    assert (status, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_the_gpu_backend_without_cupy_says_what_to_install(thdcp, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    status, out, err = thdcp("verify", "--backend", "cupy")
    assert (status, out) == (2, "")
    assert "the GPU backend needs CuPy: pip install 'thdcp[cupy]'" in err
    assert err.count("\n") == 1


def test_unreadable_folder_as_report_leaves_nothing(thdcp, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = thdcp(*SMALL, "--report", str(tmp_path / "file"))
    assert status == 2
    assert "--report" in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_internal_error_is_one_line_and_shows_its_traceback_on_request(thdcp, monkeypatch):
    def broken(*_):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("refimpl.cli.default_lengths", broken)
    status, _, err = thdcp("verify")
    assert status == 2
    assert err == "thdcp: error: RuntimeError: two lines (set THDCP_TRACEBACK=1 to see where)\n"
    monkeypatch.setenv("THDCP_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        main(["verify"])


def test_interrupt_ends_with_130(thdcp, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("refimpl.cli.default_lengths", interrupted)
    assert thdcp("verify")[0] == 130


def test_help_and_version(thdcp):
    for arguments, word in ((["--help"], "verify"), (["verify", "-h"], "--inject"), (["--version"], "thdcp 0.")):
        status, out, err = thdcp(*arguments)
        assert (status, err) == (0, "")
        assert word in out


def test_as_a_program_it_is_quiet_in_a_pipe():
    """No progress bar, no colour, nothing on standard error."""
    program = [sys.executable, "-m", "refimpl.cli", *SMALL, "--heads", "1", "--policy", "packed_contiguous"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert ended.returncode == 0
    assert ended.stderr == ""
    assert "\x1b" not in ended.stdout
