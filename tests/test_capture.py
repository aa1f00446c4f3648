"""`thdcp check --capture`: right steps pass in every form, wrong ones are found and described."""

import json
import subprocess
import sys
import time
from xml.etree import ElementTree

import numpy as np
import pytest

from refimpl import AttentionMask, PackedLayout, Policy, tiled
from refimpl.attention import attention_backward, attention_forward
from refimpl.cli import main
from refimpl.conformance.capture import sample as capture_sample
from refimpl.conformance.capture.check import check_capture
from refimpl.conformance.capture.file import read_capture
from refimpl.conformance.capture.rows import Source, key_rows
from refimpl.conformance.yardstick import ROUNDING
from tests.captures import PADDED, Step, save_npz, save_torch, step

DTYPES = ("float64", "float32", "float16", "bfloat16")


@pytest.fixture
def thdcp(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main(["check", *map(str, arguments)])
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return run


def verdicts(checked):
    return {result.id: result.verdict for result in checked.results}


def message(checked, name):
    return next(result.message for result in checked.results if result.id == name)


# Right steps


@pytest.mark.clause("N2", "V12")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("form", ["npz whole", "npz parts", "npz ranks", "safetensors whole", "safetensors ranks"])
def test_right_steps_pass(tmp_path, require, dtype, policy, form):
    if dtype == "bfloat16":
        require("ml_dtypes")
    kind, shape = form.split()
    save = save_npz
    if kind == "safetensors":
        require("safetensors.torch")
        require("torch")
        save = save_torch
    right = step(dtype=dtype, policy=policy.value)
    if shape == "whole":
        paths = [save(tmp_path / f"run.{kind}", right)]
    elif shape == "parts":
        parts = {f"{name}.{r}": x for name in right.tensors for r, x in enumerate(right.parts(name))}
        paths = [save(tmp_path / f"run.{kind}", right, parts)]
    else:
        paths = []
        for rank in range(4):
            right.more = {"cp_rank": rank}
            parts = {name: right.parts(name)[rank] for name in right.tensors}
            paths.append(save(tmp_path / f"run.{rank}.{kind}", right, parts))
        paths.reverse()
    checked = check_capture(paths)
    assert checked.passed, [result.message for result in checked.results]
    assert verdicts(checked) == dict.fromkeys(("out", "lse", "dq", "dk", "dv"), "pass")
    assert {result.dtype for result in checked.results} == {dtype}
    assert checked.notes[0] == "all 60 rows of real tokens were looked at"


# Wrong steps


@pytest.mark.clause("V13")
@pytest.mark.parametrize("name", ["out", "dv", "dq", "dk"])
def test_small_rows_are_held_against_their_own_length(tmp_path, require, name):
    """Late rows of a long document are far below the bound that its first rows set."""
    require("ml_dtypes")
    even = {"scale": 0.05, "more": {"softmax_scale": 0.05}}
    wrong = step(PackedLayout([0, 1536]), "bfloat16", heads=(1, 1), dims=(16, 16), **even)
    bound = read(check_capture([save_npz(tmp_path / "right.npz", wrong)]), name)["tolerance"]
    some = wrong.tensors[name][1300:1400]
    lengths = np.sqrt((some**2).mean(axis=(1, 2), keepdims=True))
    off = 0.9 * np.minimum(lengths, bound) * np.random.default_rng(0).choice([-1, 1], some.shape)
    some += off
    assert np.abs(off).max() < bound
    found = check_capture([save_npz(tmp_path / "run.npz", wrong)])
    assert [n for n, verdict in verdicts(found).items() if verdict == "fail"] == [name]
    assert 80 <= read(found, name)["wrong"] <= 100
    assert f"{name} at rank" in message(found, name)


def read(checked, name):
    return next(result.details for result in checked.results if result.id == name)


def spoiled(name, right, tensors):
    """Faults of real frameworks, in one step; returns which tensors are wrong."""
    layout, t = right.layout, tensors
    real = layout.document_ids >= 0
    match name:
        case "one row":
            t["out"][20] += 0.5
            return {"out"}
        case "skipped reduce":  # rank 1 keeps what its own queries make of its keys
            held = right.indices(1)
            others = right.tensors["dout"].copy()
            others[np.setdiff1d(np.arange(len(others)), held)] = 0
            inputs = (t[x] for x in ("q", "k", "v"))
            dk, dv = attention_backward(others, *inputs, t["out"], t["lse"], layout, right.mask)[1:]
            t["dk"][held], t["dv"][held] = dk[held], dv[held]
            return {"dk", "dv"}
        case "top left":
            out, lse = top_left(right)
            t["out"], t["lse"] = out.astype(t["out"].dtype), lse.astype(t["lse"].dtype)
            return {"out", "lse"}
        case "base 2":
            t["lse"] = (t["lse"] / np.log(2)).astype(t["lse"].dtype)
            return {"lse"}
        case "zeros":
            t["out"] = np.zeros_like(t["out"])
            return {"out"}
        case "NaN":
            t["dq"][5, 1, 2] = np.nan
            return {"dq"}
        case "transposed":  # heads and rows of a square exchanged where they fit: [H, T] read as [T, H]
            t["lse"][:, real] = t["lse"][:, real].T.reshape(t["lse"][:, real].shape)
            return {"lse"}
        case "padding leaked":
            t["dk"][14] = 2.0**-20
            return {"dk"}
        case "unwritten padding":
            t["out"][70], t["lse"][:, 70] = np.nan, 0
            return {"out", "lse"}
    raise AssertionError(name)


def top_left(right):
    """Each rank's fragment of a document sees as many keys as it has rows, from the first on: another diagonal."""
    layout, t = right.layout, right.tensors
    out, lse = np.zeros(t["out"].shape), np.full(t["lse"].shape, -np.inf)
    for rank in range(right.cp_size):
        held = right.indices(rank)
        for d in np.unique(layout.document_ids[held]):
            if d >= 0:
                rows = held[layout.document_ids[held] == d]
                keys = np.arange(layout.cu_seqlens_padded[d], layout.cu_seqlens_padded[d] + len(rows))
                some = (t["q"][rows], t["k"][keys], t["v"][keys])
                out[rows], lse[:, rows] = attention_forward(*some, PackedLayout([0, len(rows)]), right.mask)
    return out, lse


SAYS = {
    "one row": "row 20 (document 2, position 4), head 0, column 0",
    "skipped reduce": "only rank 1 is wrong",
    "top left": "out at rank 1",
    "base 2": "the logarithm is to base 2: declare lse_base",
    "zeros": "zero throughout",
    "NaN": "row 5 (document 0, position 5), head 1, column 2: got nan",
    "transposed": "lse at rank 0",
    "padding leaked": "row 14 (padding), head 0, column 0: got 9.53674e-07, expected 0 exactly",
    "unwritten padding": "1 padding rows are not written as they must be",
}


@pytest.mark.clause("N2", "A5", "B2", "A6")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("fault", list(SAYS))
def test_faults_are_found(tmp_path, require, thdcp, fault, dtype):
    if dtype == "bfloat16":
        require("ml_dtypes")
    wrong = step(dtype=dtype, policy="packed_contiguous")
    expected = spoiled(fault, wrong, wrong.tensors)
    found = check_capture([save_npz(tmp_path / "run.npz", wrong)])
    assert not found.passed
    assert {name for name, verdict in verdicts(found).items() if verdict == "fail"} == expected
    assert any(SAYS[fault] in result.message for result in found.results)
    status, out, err = thdcp("--capture", tmp_path / "run.npz", "--report", tmp_path / "report")
    assert (status, err) == (1, "")
    assert f"{len(expected)} fail" in out
    told = json.loads((tmp_path / "report" / "check.json").read_text())
    assert told["passed"] is False
    assert {case["id"] for case in told["cases"] if case["verdict"] == "fail"} == expected
    suite = ElementTree.parse(tmp_path / "report" / "check.xml").getroot()
    assert int(suite.get("failures")) == len(expected)
    assert "rank" in (tmp_path / "report" / "check.html").read_text()


@pytest.mark.clause("V11")
def test_a_small_step_is_diagnosed(tmp_path):
    """Zeros are a known fault; one row of nonsense is not."""
    wrong = step(dtype="float64", policy="packed_contiguous")
    for name in ("out", "dq", "dk", "dv"):
        wrong.tensors[name][...] = 0
    wrong.tensors["lse"][...] = 0
    found = check_capture([save_npz(tmp_path / "run.npz", wrong)]).diagnosis
    assert found.findings
    assert "zero" in found.findings[0].mutant
    odd = step(dtype="float64", policy="packed_contiguous")
    spoiled("one row", odd, odd.tensors)
    assert check_capture([save_npz(tmp_path / "run.npz", odd)]).diagnosis.findings == ()


@pytest.mark.clause("P2", "P3", "V12")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_another_policy_or_mask_than_declared_is_named(tmp_path, require, dtype):
    if dtype == "bfloat16":
        require("ml_dtypes")
    right = step(dtype=dtype, policy="dual_chunk_swap", padding=0.0)
    parts = {f"{name}.{r}": x for name in right.tensors for r, x in enumerate(right.parts(name))}
    right.policy = "packed_contiguous"
    checked = check_capture([save_npz(tmp_path / "run.npz", right, parts)])
    assert not checked.passed
    assert "under policy dual_chunk_swap" in " ".join(checked.notes)
    right = step(dtype=dtype, mask=AttentionMask(True, (4, 0)), seed=3)
    right.mask = AttentionMask(True, (5, 0))
    checked = check_capture([save_npz(tmp_path / "run.npz", right)])
    assert not checked.passed
    assert "under window (4, 0)" in " ".join(checked.notes)


@pytest.mark.clause("V12")
@pytest.mark.parametrize("left_out", [(), ("out", "lse"), ("lse",)])
def test_a_sample_says_what_it_is(tmp_path, monkeypatch, left_out):
    monkeypatch.setattr(capture_sample.sample_rows, "__defaults__", (200, 1 << 28))
    layout = PackedLayout([0, 300, 1400], [0, 400, 1600])
    right = step(layout, policy="dual_chunk_swap", heads=(2, 1))
    for name in left_out:
        right.tensors.pop(name)
    path = save_npz(tmp_path / "run.npz", right)
    checked = check_capture([path])
    assert checked.passed, [result.message for result in checked.results]
    assert {result.details["rows"] for result in checked.results} == {200}
    assert "200 of 1400 rows" in checked.notes[0]
    assert ("captured out and lse" in checked.notes[1]) == (not left_out)
    assert ("computed anew" in checked.notes[1]) == bool(left_out)
    full = check_capture([path], full=True)
    assert full.passed
    assert {result.details["rows"] for result in full.results} == {1400}
    run = int(checked.notes[0].split("one from each ")[1].split()[0])
    real = np.flatnonzero(layout.document_ids >= 0)
    for start in (500, 777, 1100):  # so many neighbours never go unseen
        for name in ("dq", "dk"):
            wrong = step(layout, policy="dual_chunk_swap", heads=(2, 1))
            wrong.tensors[name][real[start : start + 2 * run - 1]] += 1
            found = check_capture([save_npz(tmp_path / "wrong.npz", wrong)])
            assert [n for n, verdict in verdicts(found).items() if verdict == "fail"] == [name]


@pytest.mark.clause("V12")
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_full_by_tiles_agrees_with_full_by_rows(tmp_path, monkeypatch, dtype):
    from refimpl.conformance.capture import check as capture

    monkeypatch.setattr(capture_sample.sample_rows, "__defaults__", (100, 1 << 28))
    monkeypatch.setattr(capture, "FULL_SCORES", 0)
    right = step(PackedLayout([0, 100, 400], [0, 200, 640]), dtype, policy="packed_contiguous")
    path = save_npz(tmp_path / "run.npz", right)
    checked = check_capture([path], full=True)
    assert checked.passed, [result.message for result in checked.results]
    assert "largest errors included" in checked.notes[0]
    monkeypatch.setattr(capture, "FULL_SCORES", 1 << 60)
    by_rows = check_capture([path], full=True)
    for one, other in zip(checked.results, by_rows.results, strict=True):
        assert one.details["error"] == pytest.approx(other.details["error"], rel=1e-2, abs=1e-13)
        assert one.details["tolerance"] <= other.details["tolerance"] * (1 + 1e-9)
    right.tensors["out"][333] += 1
    monkeypatch.setattr(capture, "FULL_SCORES", 0)
    found = check_capture([save_npz(tmp_path / "run.npz", right)], full=True)
    assert "row 333" in message(found, "out")


@pytest.mark.slow
@pytest.mark.clause("V12", "V13")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("documents", [8, 1])
def test_a_long_step_in_a_sample(tmp_path, require, documents):
    """T = 131072 in bfloat16: in time and memory that a laptop has, and a fault of some rows is found."""
    require("ml_dtypes")
    rows = 131072
    layout = PackedLayout.from_lengths([rows // documents] * documents)
    mask = AttentionMask()
    random = np.random.default_rng(0)
    q, k, v, dout = (
        ROUNDING["bfloat16"](random.standard_normal((rows, heads, 16), np.float32)) for heads in (2, 1, 1, 2)
    )
    out, lse = tiled.attention_forward(q, k, v, layout, mask)
    gradients = tiled.attention_backward(dout, q, k, v, out, lse, layout, mask)
    rounded = (ROUNDING["bfloat16"](x) for x in (out, *gradients))
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse} | dict(
        zip(("out", "dq", "dk", "dv"), rounded, strict=True)
    )
    right = Step(layout, mask, "bfloat16", tensors, cp_size=8)
    script = (
        "import resource, sys; from refimpl.cli import main; sys.argv = ['thdcp', 'check', '--capture', 'run.npz']\n"
    )
    script += "try: main()\nfinally: print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"

    def check():
        save_npz(tmp_path / "run.npz", right)
        start = time.monotonic()
        found = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        print(found.stdout, f"{time.monotonic() - start:.1f} s")
        return found

    found = check()
    assert found.returncode == 0, found.stdout + found.stderr
    assert int(found.stdout.split("peak ")[1]) < 1024
    held = right.indices(5)
    for name in ("dk", "dv"):  # one rank lacks what two of three queries behind its rows give
        tensors[name][held] *= 1 / 3
    tensors["out"][100_000:100_200] = tensors["out"][100_200:100_400]
    found = check()
    assert found.returncode == 1
    assert "2 of 5 tensors pass, 3 fail" in found.stdout
    assert found.stdout.count("only rank 5 is wrong") == 2


@pytest.mark.clause("K2", "K3", "N4")
@pytest.mark.parametrize(
    "mask", [(False, (-1, -1)), (True, (5, 0)), (False, (3, 7)), (False, (-1, 2)), (False, (0, 0))]
)
def test_right_steps_pass_under_every_mask(tmp_path, mask):
    right = step(dtype="float64", mask=AttentionMask(*mask))
    checked = check_capture([save_npz(tmp_path / "run.npz", right)])
    assert checked.passed, [result.message for result in checked.results]


@pytest.mark.clause("V12")
@pytest.mark.parametrize(("lse_off", "out_off"), [(1e-3, 0.0), (0.0, 1e-3), (1e-2, 1e-2)])
def test_the_slack_covers_what_an_inexact_source_makes(tmp_path, lse_off, out_off):
    """And no more than some twenty times of it: it is a bound, with all errors of one sign."""
    right = step(dtype="float64")
    capture = read_capture([save_npz(tmp_path / "run.npz", right)])
    lse, out = right.tensors["lse"], right.tensors["out"]
    real = np.flatnonzero(PADDED.document_ids >= 0)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], lse.shape)
    moved = out + out_off * signs.T[:, :, None]
    delta_error = np.abs((capture.dout[real] * (moved - out)[real]).sum(axis=2)).max()
    found = key_rows(capture, real, Source(lse + lse_off * signs, moved, lse_off, delta_error), lambda _: None)
    for name in ("dk", "dv"):
        off = np.abs(found.exact[name] - right.tensors[name][real])
        assert (off <= found.slack[name] + 1e-12).all()
        assert found.slack[name].max() < 20 * off.max() + 1e-12
        assert (off.max() > 1e-5) == (lse_off > 0 or name == "dk")
