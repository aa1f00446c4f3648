"""Vectors as files: what is written is read back, and nothing else is taken."""

import copy
import hashlib
import io
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from refimpl.conformance import vectors
from refimpl.conformance.cases import OPERATIONS
from refimpl.conformance.catalogue import CASES
from refimpl.conformance.form import check_vector
from refimpl.conformance.generate import expected_of
from refimpl.conformance.vectors import MANIFEST, Vector, encode, load, manifest
from refimpl.errors import SpecError
from tests.support import refused

BY_ID = {case.id: case for case in CASES}

SOME = [
    "positions-padding",
    "metadata-dual-chunk-swap-cp2-right-window",
    "needed-rows-packed-contiguous-cp2-tail",
    "unpartition-dual-chunk-swap-cp3-padding",
    "step-mask-unequal-documents",
    "step-attention-forward-padding",
    "step-attention-backward-more-queries",
    "merge-taking-turns",
    "attention-forward-padding",
    "attention-backward-dout-of-rows",
    "attention-forward-strides-heads-first",
    "cp-forward-packed-dual-chunk-swap-cp2-right-window",
    "refuse-offsets-type-fraction",
    "refuse-not-divisible-truncated",
]
"""One of every shape that a vector can have."""


@pytest.fixture(scope="module")
def some():
    """These vectors, made anew, and their files."""
    made = [Vector(BY_ID[name], expected_of(BY_ID[name]), ("some-mutant",)) for name in SOME]
    files = {name: content for vector in made for name, content in encode(vector).items()}
    return made, files


@pytest.fixture
def folder(some, tmp_path):
    """A good folder, to be damaged."""
    _, files = some
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / MANIFEST).write_bytes(manifest(files))
    return tmp_path


def rewrite_manifest(folder):
    """A manifest that fits whatever lies in the folder: only the files' own form can give them away."""
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    (folder / MANIFEST).write_bytes(manifest({name: (folder / name).read_bytes() for name in names}))


def same(one, other):
    return (
        one.dtype.kind == other.dtype.kind and one.shape == other.shape and np.array_equal(one, other, equal_nan=True)
    )


class TestShipped:
    @pytest.mark.clause("V2", "V3")
    def test_they_are_the_catalogue(self, shipped):
        assert [vector.case.id for vector in shipped] == [case.id for case in CASES]
        for vector, case in zip(shipped, CASES, strict=True):
            assert (vector.case.operation, vector.case.why) == (case.operation, case.why)
            assert (vector.case.clauses, vector.case.features) == (case.clauses, case.features)
            assert vector.case.inputs == case.inputs
            assert vector.case.tensors.keys() == case.tensors.keys()
            for name, x in case.tensors.items():
                assert same(vector.case.tensors[name], x), case.id
                if name in case.inputs.get("strides", {}):
                    assert vector.case.tensors[name].strides == x.strides, case.id

    @pytest.mark.clause("V2")
    def test_they_are_small(self):
        sizes = [path.stat().st_size for path in vectors.FOLDER.iterdir()]
        assert sum(sizes) < 3 << 20
        assert max(sizes) < 128 << 10

    @pytest.mark.clause("V6")
    def test_every_float_output_has_a_bound_in_every_dtype(self, shipped):
        for vector in shipped:
            floats = {name.split(".")[0] for name, x in vector.expected.arrays.items() if x.dtype.kind == "f"}
            bounds = vector.expected.bounds
            assert set(bounds) == ({"float64", "float32", "float16", "bfloat16"} if floats else set()), vector.case.id
            assert all(set(outputs) == floats for outputs in bounds.values()), vector.case.id

    @pytest.mark.clause("A5", "B2")
    def test_padding_is_answered_with_zeros(self, shipped):
        """By rows: whatever the rest of an answer is, in padding it is 0, and -inf in lse."""
        for vector in shipped:
            case = vector.case
            if case.operation not in ("attention_forward", "attention_backward"):
                continue
            padding = case.layout.document_ids < 0
            for name, x in vector.expected.arrays.items():
                rows = x[:, padding] if name == "lse" else x[padding]
                assert (rows == (-np.inf if name == "lse" else 0)).all(), case.id
                assert np.isfinite(x[:, ~padding] if name == "lse" else x[~padding]).all(), case.id

    @pytest.mark.clause("A3", "V8")
    def test_zeros_are_right_nowhere(self, shipped):
        """A backend of zeros fails every question about attention."""
        for vector in shipped:
            if vector.case.operation.startswith(("attention", "context_parallel", "step_attention", "merge")):
                assert any((x != 0).any() for x in vector.expected.arrays.values()), vector.case.id

    @pytest.mark.clause("V3")
    def test_numpy_alone_reads_them(self):
        """What a consumer without this package does."""
        name = "cp-backward-dual-chunk-swap-cp3"
        described = json.loads((vectors.FOLDER / f"{name}.json").read_text())
        with np.load(vectors.FOLDER / f"{name}.npz", allow_pickle=False) as arrays:
            assert {key: list(arrays[f"input.{key}"].shape) for key in described["tensors"]} == described["tensors"]
            assert arrays["input.q"].dtype == np.float32
            assert arrays["expected.dq.0"].dtype == np.float64
            assert len(arrays.files) == len(described["tensors"]) + len(described["expected_tensors"])

    @pytest.mark.clause("V3")
    def test_the_schema_takes_them_all(self, valid):
        for path in vectors.FOLDER.glob("*.json"):
            if path.name not in (MANIFEST, "schema.json"):
                assert valid(json.loads(path.read_text())), path.name

    @pytest.mark.clause("V3")
    def test_the_readme_speaks_of_every_operation_and_key(self):
        page = (vectors.FOLDER / "README.md").read_text()
        described = json.loads((vectors.FOLDER / "attention-backward-causal.json").read_text())
        assert [operation for operation in OPERATIONS if f"`{operation}`" not in page] == []
        assert [key for key in described if f"`{key}`" not in page and key not in ("format", "id")] == []


@pytest.fixture(scope="module")
def shipped():
    return load()


@pytest.fixture(scope="module")
def valid(require):
    """Whether schema.json takes a document as a `vector`, or as `exported`."""
    jsonschema = require("jsonschema")
    schema = json.loads((vectors.FOLDER / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validators = {
        kind: jsonschema.Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": schema["$defs"]})
        for kind in ("vector", "exported")
    }
    return lambda document, kind="vector": validators[kind].is_valid(document)


class TestRoundTrip:
    @pytest.mark.clause("V2", "V3")
    def test_what_is_written_is_read(self, some, folder):
        made, _ = some
        for vector, read in zip(made, load(folder), strict=True):
            assert read.kills == vector.kills
            assert (read.case.id, read.case.inputs) == (vector.case.id, vector.case.inputs)
            assert read.expected.error == vector.expected.error
            assert read.expected.bounds == vector.expected.bounds
            assert read.expected.arrays.keys() == vector.expected.arrays.keys()
            for name, x in vector.expected.arrays.items():
                assert same(read.expected.arrays[name], x)

    @pytest.mark.clause("V2")
    def test_files_hold_nothing_of_the_day_or_the_machine(self, some):
        made, files = some
        assert all(encode(vector).items() <= files.items() for vector in made)
        with zipfile.ZipFile(io.BytesIO(files["attention-forward-padding.npz"])) as archive:
            for member in archive.infolist():
                assert member.date_time == (1980, 1, 1, 0, 0, 0)
                assert (member.create_system, member.compress_type) == (3, zipfile.ZIP_STORED)
        content = files["attention-forward-padding.npz"]
        assert (content.count(b"'<f4'"), content.count(b"'<f8'"), content.count(b"'>f")) == (3, 2, 0)
        big_endian = copy.deepcopy(made[SOME.index("attention-forward-padding")])
        for arrays in (big_endian.case.tensors, big_endian.expected.arrays):
            arrays |= {name: x.astype(x.dtype.newbyteorder(">")) for name, x in arrays.items()}
        assert encode(big_endian).items() <= files.items()

    @pytest.mark.clause("V3")
    def test_arrays_lie_in_memory_as_the_case_says(self, folder):
        by_id = {vector.case.id: vector.case for vector in load(folder)}
        assert by_id["attention-backward-dout-of-rows"].tensors["dout"].strides == (4, 0, 0)
        assert by_id["attention-forward-strides-heads-first"].tensors["q"].strides == (32, 384, 8)


class TestDamagedFolders:
    """Every refusal is one line that names the file."""

    @pytest.mark.clause("V3")
    def test_edited(self, folder):
        path = folder / "positions-padding.json"
        path.write_text(path.read_text().replace('"why": "P', '"why": "X'))
        with refused("file", "positions-padding.json", "not the file that the manifest lists"):
            load(folder)

    @pytest.mark.clause("V3")
    def test_one_number_changed(self, folder):
        path = folder / "merge-taking-turns.npz"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
        with refused("file", "merge-taking-turns.npz"):
            load(folder)

    @pytest.mark.clause("V3")
    def test_cut_short(self, folder):
        path = folder / "merge-taking-turns.npz"
        path.write_bytes(path.read_bytes()[:-7])
        with refused("file", "merge-taking-turns.npz"):
            load(folder)

    @pytest.mark.clause("V3")
    def test_missing(self, folder):
        (folder / "merge-taking-turns.npz").unlink()
        with refused("file", "merge-taking-turns.npz", "no such file"):
            load(folder)

    @pytest.mark.clause("V3")
    def test_a_folder_in_place_of_a_file(self, folder):
        (folder / "merge-taking-turns.npz").unlink()
        (folder / "merge-taking-turns.npz").mkdir()
        with refused("file", "merge-taking-turns.npz"):
            load(folder)

    @pytest.mark.clause("V3")
    @pytest.mark.parametrize("name", ["unlisted.json", "unlisted.npz"])
    def test_left_over(self, folder, name):
        (folder / name).write_bytes(b"{}")
        with refused("file", name, "not in the manifest"):
            load(folder)

    @pytest.mark.clause("V3")
    def test_no_folder(self, tmp_path):
        with refused("file", "manifest.json"):
            load(tmp_path / "nowhere")

    @pytest.mark.clause("V3")
    def test_answers_without_their_question(self, folder):
        (folder / "merge-taking-turns.json").unlink()
        rewrite_manifest(folder)
        with refused("file", "merge-taking-turns.npz has no merge-taking-turns.json"):
            load(folder)

    @pytest.mark.clause("V3")
    def test_renamed(self, folder):
        (folder / "positions-padding.json").rename(folder / "positions-other.json")
        rewrite_manifest(folder)
        with refused("file", "positions-other.json", "expected the name of the file"):
            load(folder)

    @pytest.mark.clause("V3")
    def test_a_link_out_of_the_folder(self, folder, tmp_path_factory):
        elsewhere = tmp_path_factory.mktemp("elsewhere") / "x.json"
        shutil.move(folder / "positions-padding.json", elsewhere)
        (folder / "positions-padding.json").symlink_to(elsewhere)
        with refused("file", "positions-padding.json"):
            load(folder)

    @pytest.mark.clause("V3")
    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            (lambda m: m.update(format=2), "format"),
            (lambda m: m.update(format=True), "format"),
            (lambda m: m.update(more=1), "unknown key 'more'"),
            (lambda m: m.pop("files"), "'files' is missing"),
            (lambda m: m.update(files={}), "files"),
            (lambda m: m.update(files=[]), "files"),
            (lambda m: m["files"].update({"../passwd.json": entry()}), "'../passwd.json' is no name"),
            (lambda m: m["files"].update({"/etc/passwd.json": entry()}), "no name"),
            (lambda m: m["files"].update({"a\\b.json": entry()}), "no name"),
            (lambda m: m["files"].update({"schema.py": entry()}), "no name"),
            (lambda m: m["files"].update({"A.json": entry()}), "no name"),
            (lambda m: m["files"].update({".json": entry()}), "no name"),
            (lambda m: m["files"].update({"absent.json": entry()}), "no such file"),
            (lambda m: m["files"].update({"absent.json": entry(bytes=10**12)}), "bytes"),
            (lambda m: m["files"].update({"absent.json": entry(bytes=-1)}), "bytes"),
            (lambda m: m["files"].update({"absent.json": entry(bytes=1.5)}), "bytes"),
            (lambda m: m["files"].update({"absent.json": entry(sha256="abc")}), "sha256"),
            (lambda m: m["files"].update({"absent.json": entry(sha256=7)}), "sha256"),
            (lambda m: m["files"].update({"absent.json": {"bytes": 1}}), "'sha256' is missing"),
            (lambda m: m["files"].update({"absent.json": "x"}), "expected an object"),
        ],
    )
    def test_manifest(self, folder, change, complaint):
        content = json.loads((folder / MANIFEST).read_text())
        change(content)
        (folder / MANIFEST).write_text(json.dumps(content))
        with refused("file", str(folder), complaint):
            load(folder)

    @pytest.mark.clause("V3")
    @pytest.mark.parametrize(
        "text", ["", "[", "[]", "null", "\xff", '{"format": 1, "format": 1, "files": {}}', "[" * 9999]
    )
    def test_manifest_that_is_none(self, folder, text):
        (folder / MANIFEST).write_text(text, encoding="latin-1")
        with refused("file", "manifest.json"):
            load(folder)


def entry(**changes):
    return {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()} | changes


class TestArrays:
    """An npz whose sha256 is right can still be wrong."""

    NAME = "attention-forward-padding"

    def rewrite(self, folder, change, save=np.savez):
        path = folder / f"{self.NAME}.npz"
        with np.load(path) as archive:
            arrays = {name: archive[name] for name in archive.files}
        change(arrays)
        save(path, **arrays)
        rewrite_manifest(folder)

    @pytest.mark.clause("V3")
    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_other_writers_are_read(self, folder, save):
        self.rewrite(folder, lambda arrays: None, save)
        assert len(load(folder)) == len(SOME)

    @pytest.mark.clause("V3")
    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            (lambda a: a.pop("input.q"), "input.q is declared"),
            (lambda a: a.pop("expected.lse"), "expected.lse is declared"),
            (lambda a: a.update(more=np.zeros(3)), "more is declared, or"),
            (lambda a: a.update({"input.q": a["input.q"].astype(np.float64)}), "input.q is float64"),
            (lambda a: a.update({"expected.out": a["expected.out"].astype(np.float32)}), "expected.out is float32"),
            (lambda a: a.update({"expected.out": a["expected.out"].astype(int)}), "expected.out is int64"),
            (lambda a: a.update({"input.q": a["input.q"][:-1]}), "input.q is float32[18, 2, 4]"),
            (lambda a: a.update({"input.q": a["input.q"].ravel()}), "input.q is float32[152]"),
            (lambda a: a.update({"input.q": np.array([{}], dtype=object)}), "input.q"),
        ],
    )
    def test_wrong_arrays(self, folder, change, complaint):
        self.rewrite(folder, change)
        with refused("file", f"{self.NAME}", complaint):
            load(folder)

    @pytest.mark.clause("V3")
    def test_arrays_for_a_case_without_any(self, folder):
        np.savez(folder / "positions-padding.npz", x=np.zeros(2))
        rewrite_manifest(folder)
        with refused("file", "positions-padding", "but not both"):
            load(folder)


GOOD = {
    "vector": "cp-backward-packed-contiguous-cp2-gqa-dv",
    "strides": "attention-backward-dout-of-rows",
    "integers": "metadata-packed-contiguous-cp4-spec",
    "mask": "mask-window",
    "refusal": "refuse-not-divisible-truncated",
    "position ids": "from-position-ids-plain",
    "segment ids": "from-segment-ids-padding",
    "refused ids": "refuse-segment-ids-return",
    "refused tensors": "refuse-heads-no-multiple",
    "step": "step-attention-backward-padding",
}

CHANGES = {
    "unknown key": ("vector", lambda v: v.update(more=1)),
    "missing key": ("vector", lambda v: v.pop("kills")),
    "format": ("vector", lambda v: v.update(format=2)),
    "format as bool": ("vector", lambda v: v.update(format=True)),
    "id": ("vector", lambda v: v.update(id="../x")),
    "operation": ("vector", lambda v: v.update(operation="attention")),
    "operation of another type": ("vector", lambda v: v.update(operation=["mask"])),
    "why": ("vector", lambda v: v.update(why="")),
    "why of two lines": ("vector", lambda v: v.update(why="a\nb")),
    "endless why": ("vector", lambda v: v.update(why="a" * 401)),
    "clauses": ("vector", lambda v: v.update(clauses=["p3"])),
    "no clauses": ("vector", lambda v: v.update(clauses=[])),
    "clause twice": ("vector", lambda v: v.update(clauses=["P3", "P3"])),
    "clauses as text": ("vector", lambda v: v.update(clauses="P3")),
    "feature": ("vector", lambda v: v["features"].append("speed")),
    "feature of another type": ("vector", lambda v: v["features"].append(3)),
    "kills": ("vector", lambda v: v.update(kills=["Bad Name"])),
    "shapes": ("vector", lambda v: v["tensors"].update(q=[2, 2, 2, 2])),
    "huge shape": ("vector", lambda v: v["tensors"].update(q=[10**9, 2, 2])),
    "negative shape": ("vector", lambda v: v["tensors"].update(q=[-1])),
    "name of an array": ("vector", lambda v: v["tensors"].update({"../q": [1]})),
    "error of an answer": ("vector", lambda v: v.update(error="policy")),
    "no answer": ("vector", lambda v: v.update(expected_tensors={})),
    "bounds": ("vector", lambda v: v["bounds"].update(int8={"dq": 1})),
    "bound of an input": ("vector", lambda v: v["bounds"]["float32"].update(q=1)),
    "negative bound": ("vector", lambda v: v["bounds"]["float32"].update(dq=-1)),
    "bound as text": ("vector", lambda v: v["bounds"]["float32"].update(dq="1")),
    "bound as bool": ("vector", lambda v: v["bounds"]["float32"].update(dq=True)),
    "unknown input": ("vector", lambda v: v["inputs"].update(cp_rank=0)),
    "missing input": ("vector", lambda v: v["inputs"].pop("causal")),
    "inputs as a list": ("vector", lambda v: v.update(inputs=[])),
    "policy": ("vector", lambda v: v["inputs"].update(policy="zigzag")),
    "policy of another type": ("vector", lambda v: v["inputs"].update(policy=["packed_contiguous"])),
    "cp_size": ("vector", lambda v: v["inputs"].update(cp_size=0)),
    "huge cp_size": ("vector", lambda v: v["inputs"].update(cp_size=10**9)),
    "total_tokens": ("vector", lambda v: v["inputs"].update(total_tokens=10**9)),
    "negative offset": ("vector", lambda v: v["inputs"].update(cu_seqlens=[0, -1])),
    "offset as float": ("vector", lambda v: v["inputs"].update(cu_seqlens=[0, 1.5])),
    "offset as bool": ("vector", lambda v: v["inputs"].update(cu_seqlens=[0, True])),
    "offsets as text": ("vector", lambda v: v["inputs"].update(cu_seqlens="0,5")),
    "causal": ("vector", lambda v: v["inputs"].update(causal=1)),
    "window": ("vector", lambda v: v["inputs"].update(window=[-2, 0])),
    "window of three": ("vector", lambda v: v["inputs"].update(window=[1, 1, 1])),
    "scale": ("vector", lambda v: v["inputs"].update(softmax_scale="1")),
    "scale as bool": ("vector", lambda v: v["inputs"].update(softmax_scale=True)),
    "strides of nothing": ("strides", lambda v: v["inputs"].update(strides={"out": [1, 1, 1]})),
    "strides of two axes": ("strides", lambda v: v["inputs"].update(strides={"q": [1, 1]})),
    "negative strides": ("strides", lambda v: v["inputs"].update(strides={"q": [-1, 1, 1]})),
    "strides of integers": ("integers", lambda v: v["inputs"].update(strides={})),
    "expected": ("integers", lambda v: v.update(expected=[])),
    "ids with a mask": ("mask", lambda v: v["inputs"].update(ids=[1])),
    "mark in a mask": ("mask", lambda v: v["expected"].update(visible=["012"])),
    "no code": ("refusal", lambda v: v.update(error=None)),
    "unknown code": ("refusal", lambda v: v.update(error="bad_luck")),
    "code of another type": ("refusal", lambda v: v.update(error=["policy"])),
    "answer to a refusal": ("refusal", lambda v: v.update(expected={"indices.0": [1]})),
    "call": ("refusal", lambda v: v["inputs"].update(call="delete")),
    "call of another type": ("refusal", lambda v: v["inputs"].update(call=["layout"])),
    "argument": ("refusal", lambda v: v["inputs"].update(x=1)),
    "missing argument": ("refusal", lambda v: v["inputs"].pop("cp_rank")),
    "offsets of a refusal": ("refusal", lambda v: v["inputs"].update(cu_seqlens=7)),
    "negative position id": ("position ids", lambda v: v["inputs"].update(ids=[0, -1])),
    "layout beside ids": ("position ids", lambda v: v["inputs"].update(total_tokens=3)),
    "padding id of positions": ("position ids", lambda v: v["inputs"].update(padding_id=0)),
    "padding id as text": ("segment ids", lambda v: v["inputs"].update(padding_id="0")),
    "padding id as bool": ("segment ids", lambda v: v["inputs"].update(padding_id=True)),
    "huge padding id": ("segment ids", lambda v: v["inputs"].update(padding_id=2**31)),
    "segment id as float": ("segment ids", lambda v: v["inputs"].update(ids=[1, 1.5])),
    "no padding id": ("segment ids", lambda v: v["inputs"].pop("padding_id")),
    "ids of a refusal": ("refused ids", lambda v: v["inputs"].update(ids=3)),
    "huge shape of a refusal": ("refused tensors", lambda v: v["inputs"]["shapes"].update(q=[10**9, 1, 1])),
    "shape of five axes": ("refused tensors", lambda v: v["inputs"]["shapes"].update(q=[1] * 5)),
    "shape of what is none": ("refused tensors", lambda v: v["inputs"]["shapes"].update(dout=[1])),
    "shapes as a list": ("refused tensors", lambda v: v["inputs"].update(shapes=[[1]] * 3)),
    "dtype of a refusal": ("refused tensors", lambda v: v["inputs"]["dtypes"].update(q="object")),
    "layout beside a step": ("step", lambda v: v["inputs"].update(total_tokens=3)),
    "step without keys' offsets": ("step", lambda v: v["inputs"].pop("cu_seqlens_kv_padded")),
    "step with a policy": ("step", lambda v: v["inputs"].update(policy="packed_contiguous")),
    "scale of a step": ("step", lambda v: v["inputs"].update(softmax_scale="0.5")),
    "missing dtype": ("refused tensors", lambda v: v["inputs"]["dtypes"].pop("v")),
}

DEEPER = {
    "id with a line break": ("vector", lambda v: v.update(id="x\n")),  # jsonschema's $ lets it pass, others' do not
    "answer of another operation": ("vector", lambda v: v["expected_tensors"].update({"out.0": [2, 2, 2]})),
    "missing rank": ("integers", lambda v: [v["expected"].pop(k) for k in list(v["expected"]) if ".3." in k]),
    "rank too many": ("vector", lambda v: v["expected_tensors"].update({"dq.2": [8, 4, 3]})),
    "array twice": ("vector", lambda v: v.update(expected={"dq.0": 1})),
}
"""What the schema cannot say."""


def changed(name):
    kind, change = (CHANGES | DEEPER)[name]
    vector = json.loads((vectors.FOLDER / f"{GOOD[kind]}.json").read_text())
    change(vector)
    return vector


class TestForm:
    @pytest.mark.clause("V3")
    @pytest.mark.parametrize("name", [*CHANGES, *DEEPER])
    def test_refused(self, name):
        with refused("file", "x.json: "):
            check_vector(changed(name), Path("x.json"))

    @pytest.mark.clause("V3")
    @pytest.mark.parametrize("name", CHANGES)
    def test_the_schema_agrees(self, name, valid):
        assert not valid(changed(name))

    @pytest.mark.clause("V3")
    @pytest.mark.parametrize("vector", [None, [], "x", 3, {}])
    def test_no_object_at_all(self, vector):
        with refused("file", "x.json: "):
            check_vector(vector, Path("x.json"))

    @pytest.mark.clause("V3")
    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("positions-padding", lambda v: v["inputs"].update(cu_seqlens=[0, 5, 3, 4])),
            ("positions-padding", lambda v: v["inputs"].update(total_tokens=3)),
            ("attention-forward-padding", lambda v: v["inputs"].update(total_tokens=20)),
            ("attention-backward-dout-of-rows", lambda v: v["inputs"].update(strides={"q": [0, 0, 0]})),
            ("step-mask-unequal-documents", lambda v: v["expected"].update(visible=["01", "1"])),
            ("step-mask-unequal-documents", lambda v: v["inputs"].update(cu_seqlens_q=[0, 5, 3, 4, 11])),
            ("step-attention-forward-padding", lambda v: v["inputs"].update(cu_seqlens_kv_padded=[0, 4, 10, 16])),
            ("step-attention-backward-more-queries", lambda v: v["inputs"].update(cu_seqlens_q=[0, 9])),
            ("positions-padding", lambda v: v["expected"].update(positions=[2**63])),
            ("positions-padding", lambda v: v["expected"].update(positions=["1"])),
        ],
    )
    def test_questions_that_contradict_themselves(self, folder, name, change):
        path = folder / f"{name}.json"
        vector = json.loads(path.read_text())
        change(vector)
        path.write_text(json.dumps(vector))
        rewrite_manifest(folder)
        with refused("file"):
            load(folder)

    @pytest.mark.clause("V3")
    def test_exported_cases_have_a_form_too(self, valid):
        vector = json.loads((vectors.FOLDER / "mask-window.json").read_text())
        kept = ("id", "operation", "why", "clauses", "features", "inputs", "tensors")
        exported = {key: vector[key] for key in kept} | {"answer": ["visible"]}
        assert valid(exported, "exported")
        assert not valid(exported | {"expected": {}}, "exported")


@pytest.mark.clause("V3")
def test_errors_are_spec_errors():
    """A reader catches one kind of error."""
    with pytest.raises(SpecError):
        check_vector({}, Path("x.json"))
