"""`thdcp check --capture`: right steps pass in every form, wrong ones are found and described."""

import numpy as np
import pytest

from refimpl import PackedLayout, Policy
from refimpl.cli import main
from refimpl.conformance.capture import check_capture
from tests.captures import save_npz, save_torch, step

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
