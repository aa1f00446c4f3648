"""Verdicts on answers, on folders of answers that anyone may have written, and the command `thdcp check`."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support import refused

from refimpl.cli import main
from refimpl.conformance import check, vectors
from refimpl.conformance.adapters import Adapter, Skip, reference
from refimpl.conformance.cases import FEATURES, Case, Expected, Vector
from refimpl.conformance.check import Answered, Checked, Crashed, Refused, Result, Skipped, Split, judge
from refimpl.conformance.declaration import Declaration, as_declaration
from refimpl.conformance.selection import read_known, select
from refimpl.errors import SpecError

loaded = cache(vectors.load)

LAYOUT = {"cu_seqlens": [0, 3, 5], "cu_seqlens_padded": [0, 4, 6], "total_tokens": 6}
MASK = {"causal": True, "window": [-1, -1], "softmax_scale": None}


def integers(name="partition-two", features=("partition", "packed_contiguous")):
    inputs = {**LAYOUT, "policy": "packed_contiguous", "cp_size": 2}
    answer = {f"indices.{r}": np.arange(3 * r, 3 * r + 3) for r in range(2)}
    return Vector(Case(name, "partition", "Two halves.", ("P1", "P3"), features, inputs), Expected(answer))


def attention(name="attention-one-head", features=("attention", "padding")):
    """Six rows, one head of one column; every value looks at itself alone, so that out is v."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.integers(-8, 8, (6, 1, 1)) / 4.0 for _ in range(3))
    out, lse = v.copy(), (q * k)[:, :, 0].T.copy()
    out[[3]], lse[:, [3]] = 0.0, -np.inf
    inputs = {**LAYOUT, **MASK, "causal": False, "window": [0, 0]}
    bounds = {"float64": {"out": 1e-12, "lse": 1e-12}, "float32": {"out": 1e-5, "lse": 1e-5}}
    case = Case(name, "attention_forward", "Itself.", ("A3", "K3"), features, inputs, {"q": q, "k": k, "v": v})
    return Vector(case, Expected({"out": out, "lse": lse}, None, bounds))


def refusal(name="refuse-contiguous", features=("refuse", "partition")):
    inputs = {**LAYOUT, "call": "partition", "policy": "contiguous", "cp_size": 2, "cp_rank": 0}
    return Vector(Case(name, "refuse", "Two meanings.", ("P3",), features, inputs), Expected({}, "policy"))


PARTITION, ATTENTION, REFUSAL = integers(), attention(), refusal()
ALL = [PARTITION, ATTENTION, REFUSAL]
LACKS_PADDING = Declaration(lacks=("padding", "gqa"))


def changed(vector, name, index, value):
    arrays = {key: x.copy() for key, x in vector.expected.arrays.items()}
    arrays[name][index] = value
    return Answered(arrays)


# Verdicts


@pytest.mark.clause("N2", "C6", "V8", "V9")
@pytest.mark.parametrize(
    ("vector", "outcome", "declaration", "verdict", "says"),
    [
        (PARTITION, Answered(PARTITION.expected.arrays), Declaration(), "pass", ""),
        (PARTITION, changed(PARTITION, "indices.1", 2, 0), Declaration(), "fail", "rank 1, entry 2: got 0, expected 5"),
        (PARTITION, Answered({}), Declaration(), "fail", "indices.0 is missing"),
        (
            PARTITION,
            Answered({"indices.0": np.zeros((3, 2), int)}),
            Declaration(),
            "fail",
            "shape [3, 2], expected [3]",
        ),
        (PARTITION, Answered({"indices.0": np.zeros(3)}), Declaration(), "fail", "dtype float64, expected integers"),
        (PARTITION, None, Declaration(), "missing", "no answer"),
        (PARTITION, Crashed("boom"), Declaration(), "error", "boom"),
        (PARTITION, Split("ranks differ"), Declaration(), "fail", "ranks differ"),
        (PARTITION, Refused("policy", "no"), Declaration(), "fail", "refused with policy: no; expected an answer"),
        (PARTITION, Refused("policy", "no"), LACKS_PADDING, "fail", "expected an answer"),
        (ATTENTION, Refused("mask"), LACKS_PADDING, "skip", "lacks padding: refused with mask"),
        (ATTENTION, Skipped("padding"), LACKS_PADDING, "skip", "lacks padding"),
        (ATTENTION, Skipped("gqa"), LACKS_PADDING, "fail", "skipped for gqa, which this case does not need"),
        (ATTENTION, Skipped("attention"), LACKS_PADDING, "fail", "which the declaration does not list"),
        (ATTENTION, Skipped("nonsense"), LACKS_PADDING, "fail", "which the declaration does not list"),
        (ATTENTION, Crashed("boom"), LACKS_PADDING, "error", "boom"),
        (ATTENTION, None, LACKS_PADDING, "missing", "no answer"),
        (ATTENTION, Answered(ATTENTION.expected.arrays), LACKS_PADDING, "pass", ""),
        (ATTENTION, changed(ATTENTION, "out", (3, 0, 0), 1e-300), Declaration(), "fail", "row 3 (padding), head 0"),
        (ATTENTION, changed(ATTENTION, "out", (4, 0, 0), np.nan), Declaration(), "fail", "got nan"),
        (ATTENTION, changed(ATTENTION, "lse", (0, 3), 0), Declaration(), "fail", "expected -inf exactly"),
        (REFUSAL, Refused("policy"), Declaration(), "pass", ""),
        (REFUSAL, Refused("cp_size", "no"), Declaration(), "fail", "refused with cp_size: no; expected policy"),
        (REFUSAL, Refused("cp_size"), Declaration(lacks=("partition",)), "skip", "lacks partition"),
        (REFUSAL, Answered({}), Declaration(), "fail", "answered; expected a refusal with policy"),
        (REFUSAL, Answered({}), Declaration(lacks=("refuse",)), "fail", "answered; expected a refusal"),
        (REFUSAL, Skipped("refuse"), Declaration(lacks=("refuse",)), "skip", "lacks refuse"),
    ],
)
def test_verdicts(vector, outcome, declaration, verdict, says):
    result = judge(vector, outcome, declaration)
    assert (result.id, result.verdict) == (vector.case.id, verdict)
    assert says in result.message
    assert "\n" not in result.message
    assert result.failed == (verdict in ("fail", "error", "missing"))


@pytest.mark.clause("V8", "V9")
def test_who_lacks_lse_is_judged_without_it():
    lacks = Declaration(lacks=("lse",))
    without = Answered({"out": ATTENTION.expected.arrays["out"]})
    assert judge(ATTENTION, without, lacks).verdict == "pass"
    assert judge(ATTENTION, without, Declaration()).message == "lse is missing from the answer"
    assert judge(ATTENTION, changed(ATTENTION, "lse", (0, 0), 7.0), lacks).verdict == "pass"
    assert judge(ATTENTION, changed(ATTENTION, "out", (0, 0, 0), 7.0), lacks).verdict == "fail"
    about_lse = attention(features=("attention", "lse"))
    assert judge(about_lse, without, lacks).verdict == "skip"
    assert judge(about_lse, changed(ATTENTION, "out", (0, 0, 0), 7.0), lacks).verdict == "fail"


@pytest.mark.clause("N2")
def test_the_declared_dtype_chooses_the_bound():
    answer = changed(ATTENTION, "out", (4, 0, 0), ATTENTION.expected.arrays["out"][4, 0, 0] + 1e-6)
    assert judge(ATTENTION, answer, Declaration()).verdict == "fail"
    assert judge(ATTENTION, answer, Declaration(dtype="float32")).verdict == "pass"


def test_the_lowest_rank_is_named_first():
    arrays = {name: x + 1 for name, x in reversed(PARTITION.expected.arrays.items())}
    vector = replace(PARTITION, expected=Expected(dict(reversed(PARTITION.expected.arrays.items()))))
    assert "indices.0 at rank 0, entry 0" in judge(vector, Answered(arrays), Declaration()).message


# An adapter


def asked(run, vector=ATTENTION, **declared):
    return check.run_adapter([vector], Adapter("here:run", run, Declaration(**declared)))[0]


def raising(error):
    def run(_):
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "verdict", "says"),
    [
        (raising(Skip("padding")), "skip", "lacks padding"),
        (raising(SpecError("mask", "no windows")), "skip", "lacks padding: refused with mask: no windows"),
        (raising(ValueError("two\nlines \x1b[31m")), "error", "ValueError: two lines  [31m"),
        (raising(SystemExit(3)), "error", "SystemExit: 3"),
        (lambda _: None, "error", "returned NoneType: expected a mapping"),
        (lambda _: {"out": [[1, 2], [3]], "lse": 0}, "error", "out is no NumPy array"),
        (lambda _: {"out": np.array(["a"])}, "error", "out has dtype <U1"),
        (lambda _: {"out": np.zeros((6, 1, 1), complex)}, "error", "out has dtype complex128"),
        (lambda _: {"out": np.zeros((6, 1, 1), object)}, "error", "out has dtype object"),
        (lambda _: ATTENTION.expected.arrays | {"more": object()}, "pass", ""),
        (lambda _: {name: x.tolist() for name, x in ATTENTION.expected.arrays.items()}, "pass", ""),
    ],
)
def test_whatever_an_adapter_does_is_an_answer(run, verdict, says):
    result = asked(run, lacks=("padding",))
    assert result.verdict == verdict
    assert says in result.message


def test_an_interrupt_is_not_an_answer():
    with pytest.raises(KeyboardInterrupt):
        asked(raising(KeyboardInterrupt()))


def test_an_adapter_may_write_into_its_inputs():
    before = {name: x.copy() for name, x in ATTENTION.case.tensors.items()}

    def run(case):
        for x in case.tensors.values():
            x[...] = np.nan
        case.inputs["cu_seqlens"][:] = [0, 0, 0]
        return ATTENTION.expected.arrays

    assert asked(run).verdict == "pass"
    for name, x in ATTENTION.case.tensors.items():
        np.testing.assert_array_equal(x, before[name])


@pytest.mark.clause("N3")
def test_inputs_keep_their_place_in_memory():
    vector = next(vector for vector in loaded() if 0 in vector.case.inputs.get("strides", {}).get("dout", ()))
    copy = check.copied(vector.case).tensors["dout"]
    assert copy.strides == vector.case.tensors["dout"].strides
    assert not np.shares_memory(copy, vector.case.tensors["dout"])
    np.testing.assert_array_equal(copy, vector.case.tensors["dout"])


def test_low_precisions_of_other_packages_are_taken(require):
    ml_dtypes = require("ml_dtypes")
    arrays = {name: x.astype(ml_dtypes.bfloat16) for name, x in ATTENTION.expected.arrays.items()}
    assert check.plain_arrays(arrays, arrays)["out"].dtype == np.float32
    assert asked(lambda _: arrays).verdict == "pass"


# Declarations, selections, known failures


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "is a mapping, not list"),
        ({"names": "x"}, "unknown key 'names'"),
        ({"dtype": "fp8"}, "dtype is 'fp8': expected one of float64"),
        ({"dtype": ["float32"]}, "dtype is ['float32']"),
        ({"lacks": "window"}, "lacks is not a list"),
        ({"lacks": [1]}, "lacks is not a list"),
        ({"lacks": ["windows"]}, "lacks names no feature 'windows'"),
        ({"name": "a\nb"}, "name is not one short line"),
        ({"name": 3}, "name is not one short line"),
        ({"name": "x" * 1000}, "name is not one short line"),
    ],
)
def test_declarations_that_say_nothing_sensible_are_refused(value, says):
    with refused("usage", "here: ", says):
        as_declaration(value, "here")


def test_a_declaration_may_leave_everything_out():
    assert as_declaration({}, "here") == Declaration("", "float64", ())
    told = as_declaration({"name": "x", "dtype": "bfloat16", "lacks": list(FEATURES)}, "here")
    assert told == Declaration("x", "bfloat16", tuple(FEATURES))


def test_select():
    assert select(ALL, []) == ALL
    assert select(ALL, ["refuse-*", "partition-two"]) == [PARTITION, REFUSAL]
    with refused("usage", "'part' matches no case"):
        select(ALL, ["part"])


@pytest.mark.parametrize(
    "content", ["partition-two\n\n  # all of it\nrefuse-contiguous # why\n", '["partition-two", "refuse-contiguous"]']
)
def test_known_failures_are_lines_or_json(tmp_path, content):
    (tmp_path / "known").write_text(content)
    assert read_known(tmp_path / "known", ALL) == {"partition-two", "refuse-contiguous"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"partition-tow", "no case has the id 'partition-tow': did you mean partition-two?"),
        (b"../../etc/passwd", "no case has the id '../../etc/passwd'"),
        (b'["partition-two", 3]', "no case has the id '3'"),
        (b'["partition-two", ["x"]]', "no case has the id"),
        (b'{"partition-two": 1}', "no case has the id"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"x" * (2**20 + 1), "more than 1048576 bytes"),
        (None, "No such file"),
    ],
)
def test_known_failures_that_cannot_be_read_are_refused(tmp_path, content, says):
    if content is not None:
        (tmp_path / "known").write_bytes(content)
    with refused("usage", str(tmp_path / "known"), says):
        read_known(tmp_path / "known", ALL)


@pytest.mark.clause("V9", "V10")
def test_known_failures_are_strict_both_ways():
    results = [
        Result("a", "pass"),
        Result("b", "fail"),
        Result("c", "skip"),
        Result("d", "missing"),
        Result("e", "error"),
    ]

    def checked(*known, of=results):
        return Checked("x", Declaration(), tuple(of), {}, frozenset(known))

    assert [result.id for result in checked().failing] == ["b", "d", "e"]
    assert not checked().passed
    assert not checked("b", "d").passed
    assert checked("b", "d", "e").passed
    assert checked("b", "c", "d", "e").passed
    assert [result.id for result in checked("a", "b", "d", "e").mended] == ["a"]
    assert not checked("a", "b", "d", "e").passed
    assert not checked(of=[Result("c", "skip")]).passed, "skips alone are no success"
    assert not checked(of=[]).passed
    assert checked().counts() == {"pass": 1, "fail": 1, "error": 1, "missing": 1, "skip": 1}


# A folder of results


def write(folder, vector, arrays=None):
    np.savez(folder / f"{vector.case.id}.npz", **(vector.expected.arrays if arrays is None else arrays))


def judged(folder, *which):
    results = check.judge_results(which or ALL, folder, check.read_declaration(folder))
    return {result.id: (result.verdict, result.message) for result in results}


def test_a_folder_of_answers(tmp_path):
    write(tmp_path, PARTITION)
    write(tmp_path, ATTENTION, ATTENTION.expected.arrays | {"more": np.zeros(3)})
    (tmp_path / "refuse-contiguous.json").write_text('{"error": "policy", "message": "what is contiguous?"}')
    assert judged(tmp_path) == dict.fromkeys(("partition-two", "attention-one-head", "refuse-contiguous"), ("pass", ""))


def test_a_folder_with_a_declaration(tmp_path):
    (tmp_path / "declaration.json").write_text('{"name": "x", "dtype": "float32", "lacks": ["padding"]}')
    (tmp_path / "attention-one-head.json").write_text('{"skipped": "padding"}')
    (tmp_path / "partition-two.json").write_text('{"crashed": "Segmentation fault"}')
    found = judged(tmp_path)
    assert found["attention-one-head"] == ("skip", "lacks padding")
    assert found["partition-two"] == ("error", "Segmentation fault")
    assert found["refuse-contiguous"] == ("missing", "no answer")
    assert check.read_declaration(tmp_path).dtype == "float32"


@pytest.mark.parametrize("content", ["[]", "{}", '"error"', '{"error": 3}', '{"message": "x"}', "{"])
def test_json_that_is_no_outcome(tmp_path, content):
    (tmp_path / "partition-two.json").write_text(content)
    assert judged(tmp_path, PARTITION)["partition-two"][0] == "error"


def test_two_answers_are_none(tmp_path):
    write(tmp_path, PARTITION)
    (tmp_path / "partition-two.json").write_text('{"skipped": "partition"}')
    verdict, message = judged(tmp_path, PARTITION)["partition-two"]
    assert verdict == "error"
    assert "both partition-two.npz and partition-two.json" in message


def test_files_of_no_case_are_told(tmp_path):
    write(tmp_path, PARTITION)
    (tmp_path / "partition-tow.npz").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "declaration.json").write_text("{}")
    assert check.strangers(ALL, tmp_path) == ["partition-tow.npz"]


class Executed:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def npy(shape, dtype="<i8", data=b""):
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (64 - (10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


def zipped(members, compression=zipfile.ZIP_STORED):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return packed.getvalue()


def saved(arrays):
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    return packed.getvalue()


RIGHT = PARTITION.expected.arrays


def hostile(path):
    """Files as answers to PARTITION, by what is wrong with them. None may be taken, or do anything."""
    objects = np.array([Executed(path)] * 3, object)
    return {
        "pickled": saved({"indices.0": objects, "indices.1": RIGHT["indices.1"]}),
        "bare pickle": pickle.dumps(Executed(path)),
        "object header": zipped({"indices.0.npy": npy((3,), "|O", pickle.dumps(Executed(path)))}),
        "zip bomb": zipped({"indices.0.npy": npy((10**9,)) + bytes(30_000_000)}, zipfile.ZIP_DEFLATED),
        "many rows declared": zipped({"indices.0.npy": npy((10**9,))}),
        "many rows, whole": zipped({"indices.0.npy": npy((10**6,)) + bytes(8_000_000)}, zipfile.ZIP_DEFLATED),
        "more rows than asked": zipped({"indices.0.npy": npy((10**5,)) + bytes(800_000)}, zipfile.ZIP_DEFLATED),
        "negative rows": zipped({"indices.0.npy": npy((-3,))}),
        "huge header": zipped({"indices.0.npy": npy("(3,)" + " " * 60_000)}),
        "code in the header": zipped({"indices.0.npy": npy(f"(__import__('os').mkdir({str(path)!r}),)")}),
        "truncated": saved(RIGHT)[:-100],
        "half": saved(RIGHT)[: len(saved(RIGHT)) // 2],
        "too little data": zipped({"indices.0.npy": npy((3,), "<i8", bytes(8))}),
        "path in a member": zipped({"../../indices.0.npy": npy((3,), "<i8", bytes(24))}),
        "empty": b"",
        "text": b"indices.0 = 0 1 2",
        "not zip": b"PK\x03\x04" + bytes(200),
    }


@pytest.mark.parametrize("what", list(hostile("x")))
def test_hostile_files_are_an_error_of_their_case_alone(tmp_path, what):
    folder = tmp_path / "results"
    folder.mkdir()
    write(folder, ATTENTION)
    trap = tmp_path / "executed"
    (folder / "partition-two.npz").write_bytes(hostile(trap)[what])
    before = sorted(path.name for path in tmp_path.rglob("*"))
    found = judged(folder, PARTITION, ATTENTION)
    verdict, message = found["partition-two"]
    assert verdict == "error", message
    assert message
    assert "\n" not in message
    assert found["attention-one-head"] == ("pass", "")
    assert not trap.exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_arrays_beside_the_answer_are_not_read(tmp_path):
    """They are bounded too: a bomb beside a right answer costs nothing."""
    members = {f"{name}.npy": npy((3,), "<i8", x.tobytes()) for name, x in RIGHT.items()}
    bomb = npy((4_000_000,)) + bytes(32_000_000)
    (tmp_path / "partition-two.npz").write_bytes(zipped(members | {"bomb.npy": bomb}, zipfile.ZIP_DEFLATED))
    verdict, message = judged(tmp_path, PARTITION)["partition-two"]
    assert verdict in ("pass", "error"), message


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "results"
    outside.mkdir()
    folder.mkdir()
    write(outside, PARTITION)
    (folder / "partition-two.npz").symlink_to(outside / "partition-two.npz")
    assert judged(folder, PARTITION)["partition-two"][0] == "error"
    (folder / "partition-two.npz").unlink()
    (folder / "partition-two.npz").symlink_to("nowhere")
    assert judged(folder, PARTITION)["partition-two"][0] == "error"


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_what_is_no_file_is_an_error(tmp_path, kind):
    path = tmp_path / "partition-two.npz"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    assert judged(tmp_path, PARTITION)["partition-two"][0] == "error"


def test_wrong_shapes_and_values_fail(tmp_path):
    write(tmp_path, PARTITION, {"indices.0": np.zeros((3, 3), int), "indices.1": RIGHT["indices.1"]})
    assert judged(tmp_path, PARTITION)["partition-two"] == ("fail", "indices.0 has shape [3, 3], expected [3]")
    write(tmp_path, ATTENTION, {name: np.full(x.shape, np.nan) for name, x in ATTENTION.expected.arrays.items()})
    assert "got nan" in judged(tmp_path, ATTENTION)["attention-one-head"][1]


# The command


@pytest.fixture
def thdcp(monkeypatch, capsys):
    """Run `thdcp check` in this process, as if no MPI launcher had started it; (status, stdout, stderr)."""
    for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "THDCP_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["check", *map(str, arguments)])
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


REFERENCE = "refimpl.conformance.adapters.reference:run"
ZEROS = "refimpl.conformance.adapters.zeros:run"
FEW = ("--only", "partition-packed-contiguous-*")


@pytest.fixture(scope="module")
def all_answers(tmp_path_factory):
    """The reference's answers to all cases as files."""
    folder = tmp_path_factory.mktemp("answers")
    for vector in loaded():
        name = vector.case.id
        try:
            np.savez(folder / f"{name}.npz", **reference.run(vector.case))
        except SpecError as error:
            (folder / f"{name}.json").write_text(json.dumps({"error": error.code, "message": error.message}))
    (folder / "declaration.json").write_text('{"name": "from files"}')
    return folder


@pytest.fixture
def answers(all_answers, tmp_path):
    """A copy of them to spoil."""
    return Path(shutil.copytree(all_answers, tmp_path / "answers"))


def test_files_of_the_reference_pass(thdcp, answers):
    status, out, err = thdcp(answers)
    assert (status, err) == (0, "")
    count = len(loaded())
    assert f"results in {answers} (from files): {count} cases in float64" in out
    assert f"{count} of {count} cases pass" in out


@pytest.mark.clause("V8")
def test_files_that_are_wrong_or_missing_fail(thdcp, answers):
    names = sorted(path.name for path in answers.glob("partition-packed-contiguous-*.npz"))
    (answers / names[0]).unlink()
    (answers / names[1]).write_bytes(b"nothing")
    (answers / "typo.npz").write_bytes(b"")
    status, out, err = thdcp(answers, *FEW)
    assert (status, err) == (1, "")
    assert f"missing: {names[0].removesuffix('.npz')}: no answer" in out
    assert f"error: {names[1].removesuffix('.npz')}: " in out
    assert "1 end in an error, 1 have no answer" in out
    assert "note: 1 files belong to no case: typo.npz" in out


@pytest.mark.clause("V10")
def test_known_failures_of_the_command(thdcp, answers, tmp_path):
    names = sorted(path.stem for path in answers.glob("partition-packed-contiguous-*.npz"))
    (answers / f"{names[0]}.npz").unlink()
    known = tmp_path / "known"
    known.write_text(names[0])
    status, out, _ = thdcp(answers, *FEW, "--known", known)
    assert status == 0
    assert "1 of the failures are known" in out
    known.write_text("\n".join(names[:2]))
    status, out, _ = thdcp(answers, *FEW, "--known", known)
    assert status == 1
    assert f"passes: {names[1]}, though it is listed as a known failure" in out


def test_zeros_fail_with_the_fault_named_first(thdcp, tmp_path):
    status, out, err = thdcp("--adapter", ZEROS, "--only", "cp-forward-*cp2*", "--report", tmp_path)
    assert (status, err) == (1, "")
    assert "looks like: " in out.splitlines()[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check.html", "check.json", "check.xml"]


def test_dtype_overrides_the_declaration(thdcp):
    less_exact = "refimpl.conformance.adapters.reference_float32:run"
    only = ("--only", "attention-forward-*")
    assert thdcp("--adapter", less_exact, *only)[0] == 0
    status, out, _ = thdcp("--adapter", less_exact, *only, "--dtype", "float64")
    assert status == 1
    assert "cases in float64" in out


def test_list(thdcp):
    status, out, err = thdcp("--list", "--only", "partition-*")
    assert (status, err) == (0, "")
    chosen = select(loaded(), ["partition-*"])
    for vector in chosen:
        assert f"{vector.case.id}\n    partition; " in out
        assert vector.case.why in out
    assert out.count("\n") == 3 * len(chosen)


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m refimpl.cli check --list | head -1"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        command, shell=True, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert ended.stdout == f"{loaded()[0].case.id}\n"
    assert ended.stderr == ""


def test_export_holds_the_questions_and_no_answer(thdcp, tmp_path):
    folder = tmp_path / "new" / "cases"
    status, out, err = thdcp("--export", folder)
    assert (status, err) == (0, "")
    assert "README.md there says how to answer" in out
    for vector in loaded():
        case = vector.case
        content = json.loads((folder / f"{case.id}.json").read_text())
        assert not {"expected", "expected_tensors", "error", "bounds", "kills"} & set(content)
        assert content["inputs"] == case.inputs
        assert content["answer"] == sorted(vector.expected.arrays)
        if case.tensors:
            with np.load(folder / f"{case.id}.npz") as arrays:
                assert set(arrays.files) == {f"input.{name}" for name in case.tensors}
                for name, x in case.tensors.items():
                    np.testing.assert_array_equal(arrays[f"input.{name}"], x)
        else:
            assert not (folder / f"{case.id}.npz").exists()
    exported = json.loads((folder / "schema.json").read_text())["$defs"]["exported"]
    assert set(content) == set(exported["required"]) == set(exported["properties"])
    assert (folder / "README.md").read_text().startswith("# Vectors")


def test_export_replaces_its_own_files_alone(thdcp, tmp_path):
    assert thdcp("--export", tmp_path)[0] == 0
    (tmp_path / "results").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert thdcp("--export", tmp_path, *FEW)[0] == 0
    after = sorted(path.name for path in tmp_path.iterdir())
    assert set(before) > set(after) > {"results", "notes.txt", "export.json"}
    assert {name for name in after if "-" in name} == {
        f"{vector.case.id}.json" for vector in select(loaded(), [FEW[1]])
    }


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("thesis.tex", "years of work", "not empty and holds no earlier export"),
        ("export.json", "{}", "is none of an earlier export"),
        ("export.json", "{", "export.json"),
        ("export.json", '{"thdcp_export": 1, "files": "all"}', "is none of an earlier export"),
    ],
)
def test_export_overwrites_nothing_else(thdcp, tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    status, out, err = thdcp("--export", tmp_path)
    assert (status, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, content)]


def test_an_export_removes_only_names_of_its_own_making(thdcp, tmp_path):
    folder = tmp_path / "cases"
    folder.mkdir()
    (tmp_path / "precious.json").write_text("{}")
    (folder / "precious.txt").write_text("")
    listed = ["../precious.json", str(tmp_path / "precious.json"), "precious.txt", "old-case.json", 3]
    (folder / "export.json").write_text(json.dumps({"thdcp_export": 1, "files": listed}))
    (folder / "old-case.json").write_text("{}")
    assert thdcp("--export", folder, *FEW)[0] == 0
    assert (tmp_path / "precious.json").exists()
    assert (folder / "precious.txt").exists()
    assert not (folder / "old-case.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing to check: give a folder of results"),
        (["no/such/folder"], "no/such/folder: no such folder of results"),
        (["a", "b"], "one folder of results at a time"),
        (["a", "--list"], "--list and RESULTS exclude each other"),
        (["--list", "--adapter", REFERENCE], "--adapter and --list exclude each other"),
        (["--list", "--report", "x"], "--report has nothing to tell"),
        (["--list", "--full"], "--full goes with --capture"),
        (["--adapter", "nothing"], "expected package.module:callable"),
        (["--adapter", "no.such.module:run"], "no module no"),
        (["--adapter", REFERENCE, "--only", "nothing"], "'nothing' matches no case"),
        (["--adapter", REFERENCE, "--known", "no/such/file"], "No such file"),
        (["--adapter", REFERENCE, "--dtype", "fp8"], "--dtype"),
        (["--adapter", REFERENCE, "--timeout", "-1"], "--timeout"),
        (["--adapter", REFERENCE, "--report", "/proc/no/such"], "--report"),
        (["--capture", "x.npz", "--known", "y"], "--known and --only choose among cases"),
        (["--capture", "x.npz", "--dtype", "float32"], "--dtype is no choice with --capture"),
        (["--capture", "x.npz", "--list"], "--list and --capture exclude each other"),
        (["--capture", "x.npz"], "x.npz: cannot be read"),
        (["--frobnicate"], "--frobnicate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_requests_get_one_line_and_status_2(thdcp, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    status, out, err = thdcp(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("thdcp: error: ")
    assert err.count("\n") == 1
    assert says in err
    assert list(tmp_path.iterdir()) == []
