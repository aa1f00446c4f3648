"""Files of captures that are broken, hostile or wrong: one line that names the file, nothing executed, no memory."""

import os
import pickle
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support import refused

from refimpl.cli import main
from refimpl.conformance.capture import file as capture_file
from refimpl.conformance.capture.check import check_capture
from refimpl.conformance.capture.file import read_capture
from refimpl.conformance.capture.safetensors_file import read_safetensors, safetensors_entries
from refimpl.lse import lse_to
from tests.captures import NAMES, safetensors_bytes, save_npz, step

CAPTURE_MD = Path(__file__).resolve().parent.parent / "specs" / "capture.md"


@pytest.fixture
def right():
    return step(policy="packed_contiguous")


def saved(path, right, **changed):
    """The step as npz with entries replaced, added or (None) left out."""
    entries = {**right.tensors, **right.settings, **changed}
    np.savez(path, **{name: x for name, x in entries.items() if x is not None})
    return path


# What is refused


NAN = float("nan")


@pytest.mark.clause("V12", "A8")
@pytest.mark.parametrize(
    ("changed", "code", "says"),
    [
        ({"q": None}, "file", "q is missing"),
        ({"cu_seqlens": None}, "file", "cu_seqlens is missing"),
        ({"causal": None}, "file", "causal is missing"),
        ({"policy": None}, "file", "policy is missing"),
        ({"policy": "contiguous"}, "policy", "unknown policy 'contiguous'"),
        ({"policy": "x" * 200}, "policy", "unknown policy"),
        ({"cp_size": 3}, "not_divisible", "cp_size 3"),
        ({"cp_size": 0}, "cp_size", "cp_size is 0"),
        ({"cp_size": 1 << 40}, "cp_size", "65536 are taken at most"),
        ({"cp_size": 2.0}, "cp_size", "expected an integer"),
        ({"causal": 1}, "mask", "causal is 1"),
        ({"window": [-5, 0]}, "mask", "window[0] is -5"),
        ({"window": [1, 2, 3]}, "file", "window declares 3 elements"),
        ({"softmax_scale": NAN}, "softmax_scale", "finite"),
        ({"softmax_scales": 1.0}, "file", "unknown entry 'softmax_scales'"),
        ({"softmax_scale": np.array(None)}, "file", "leave out what is None"),
        ({"dtype": "fp8"}, "file", "dtype is 'fp8'"),
        ({"dtype": "float64"}, "file", "cannot have computed in more"),
        ({"dtype": "bfloat16"}, "file", "a number that bfloat16 has not"),
        ({"lse_base": "10"}, "file", "lse_base is"),
        ({"cu_seqlens": [0, 5, 3]}, "offsets_decreasing", "cu_seqlens[2]"),
        ({"cu_seqlens": [0.0, 5.0]}, "offsets_type", "float64"),
        ({"total_tokens": 10**9}, "file", "declares 1000000000 rows"),
        ({"total_tokens": 2**62}, "total_tokens", "2**62"),
        ({"cu_seqlens": [0, 10**9], "cu_seqlens_padded": None, "total_tokens": None}, "file", "1000000000 rows"),
        ({"out": np.zeros((80, 4, 7), "f4")}, "file", "out has shape [80, 4, 7]: expected [80, 4, 6] for all rows"),
        ({"k": np.zeros((80, 3, 8), "f4")}, "heads", "no multiple of 3"),
        ({"q": np.zeros((80, 8), "f4")}, "file", "q has shape [80, 8]"),
        ({"lse": np.zeros((80, 4), "f4")}, "file", "declare lse_layout TH"),
        ({"out": np.zeros((80, 4, 6), int)}, "file", "out has dtype int64"),
        ({"out": np.zeros((80, 4, 6), np.uint16)}, "file", "need the setting dtype bfloat16"),
        ({"out": np.zeros((80, 4, 6), complex)}, "file", "complex128"),
        ({"dout": None}, "file", "without dout"),
        (dict.fromkeys(("out", "lse", "dq", "dk", "dv")), "file", "nothing to judge"),
        ({"out.0": np.zeros((20, 4, 6), "f4")}, "file", "out is there whole and in parts"),
        ({"out.9": np.zeros((20, 4, 6), "f4")}, "file", "belongs to rank 9"),
        ({"out": None, "out.0": np.zeros((20, 4, 6), "f4")}, "file", "the part of out of rank 1 is missing"),
        ({"cp_rank": -1}, "file", "cp_rank is '-1'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value)[:30],
)
def test_what_makes_no_sense_is_refused(tmp_path, right, changed, code, says):
    path = saved(tmp_path / "run.npz", right, **changed)
    with refused(code, "run.npz", says):
        read_capture([path])


@pytest.mark.clause("V12")
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_inputs_are_finite_in_real_rows(tmp_path, right, name, value):
    right.tensors[name][20, 1, 3] = value
    with refused("file", f"{name} at row 20, head 1, column 3: NaN or infinity"):
        read_capture([save_npz(tmp_path / "run.npz", right)])


@pytest.mark.clause("V12")
def test_files_of_one_step_agree(tmp_path, right):
    paths = []
    for rank in range(4):
        right.more = {"cp_rank": rank}
        paths.append(save_npz(tmp_path / f"{rank}.npz", right, {n: right.parts(n)[rank] for n in NAMES}))
    read_capture(paths)
    with refused("file", "the part of q of rank 3 is missing"):
        read_capture(paths[:3])
    with refused("file", "1.npz: q is in", "1.npz too"):
        read_capture([*paths, paths[1]])
    right.more = {"cp_rank": 3, "causal": False}
    save_npz(paths[3], right, {n: right.parts(n)[3] for n in NAMES})
    with refused("file", "3.npz: causal differs from the one in", "0.npz"):
        read_capture(paths)


# Hostile files


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


def big_npz(path, right, name, shape):
    """A member whose header declares a shape that its few bytes do not have."""
    saved(path, right, **{name: None})
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())


def bomb(path, right):
    """Tensors of as many zeros as 1e6 rows take, in few bytes."""
    entries = {**right.settings, "cu_seqlens": np.array([0, 1 << 22]), "cu_seqlens_padded": np.array([0, 1 << 22])}
    zeros = np.zeros(16 << 20, np.float32)
    np.savez_compressed(
        path, **{n: x for n, x in entries.items() if n != "total_tokens"}, q=zeros, k=zeros, v=zeros, out=zeros
    )


HOSTILE = {
    "pickle": (lambda p, r: saved(p, r, out=np.array([Trap()], dtype=object)), "leave out what is None"),
    "no npz": (lambda p, r: p.write_bytes(pickle.dumps(Trap())), "not a whole npz file"),
    "empty": (lambda p, r: p.write_bytes(b""), "not a whole npz file"),
    "cut off": (lambda p, r: p.write_bytes(saved(p, r).read_bytes()[:-1000]), "not a whole npz file"),
    "1e9 rows": (lambda p, r: big_npz(p, r, "out", (10**9, 4, 6)), "out has shape [1000000000, 4, 6]"),
    "shape of 1e30": (lambda p, r: big_npz(p, r, "out", (10**15, 10**15, 6)), "out has shape"),
    "empty member": (lambda p, r: big_npz(p, r, "out", (80, 4, 6)), "out declares 1920 elements"),
    "zip bomb": (bomb, "q has shape [16777216]"),
    "traversal": (lambda p, r: zip_with(p, "../../x.npy"), "no name of an array"),
    "offsets of 1e9": (lambda p, r: big_npz(p, r, "cu_seqlens", (10**9,)), "cu_seqlens declares 1000000000 elements"),
}


def zip_with(path, name):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, b"")


@pytest.mark.clause("V12")
@pytest.mark.parametrize("kind", list(HOSTILE))
def test_hostile_npz(tmp_path, monkeypatch, capsys, right, kind):
    monkeypatch.chdir(tmp_path)
    make, says = HOSTILE[kind]
    path = tmp_path / "run.npz"
    make(path, right)
    before = sorted(tmp_path.iterdir())
    tracemalloc.start()
    with pytest.raises(SystemExit) as end:
        main(["check", "--capture", str(path)])
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert "run.npz" in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.clause("V12")
def test_more_than_the_machine_holds_is_refused_before_it_is_read(tmp_path, monkeypatch, right):
    path = saved(tmp_path / "run.npz", right)
    size = sum(x.nbytes for x in right.tensors.values())
    monkeypatch.setattr(capture_file, "_most_bytes", lambda: max(size, path.stat().st_size))
    read_capture([path])
    np.savez_compressed(path, **{name: np.zeros_like(x) for name, x in right.tensors.items()}, **right.settings)
    assert path.stat().st_size < size // 2
    monkeypatch.setattr(capture_file, "_most_bytes", lambda: size - 1)
    with refused("file", "more than half of this machine's memory"):
        read_capture([path])


X = ("F32", (2, 2), b"\0" * 16)
HEADERS = [
    ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 16]}}, "expected the bytes of 2 elements"),
    ({"x": {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]}}, "expected to begin at 0"),
    ({"x": {"dtype": "F32", "shape": [4], "data_offsets": [-4, 12]}}, "data_offsets"),
    ({"x": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}, "bytes 0 to 32 of 16"),
    ({"x": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4 * 10**18]}}, "of 16"),
    ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "8 bytes behind the last tensor"),
    ({n: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for n in "ab"}, "expected to begin at 16"),
    ({"x": {"dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16]}}, "'F8_E4M3'"),
    ({"x": {"dtype": "F32", "shape": [True, 4], "data_offsets": [0, 16]}}, "shape"),
    ({"x": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}}, "shape"),
    ({"x": {"dtype": "F32", "shape": [4]}}, "other entries"),
    ({"../x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "no name of a tensor"),
    ({"__metadata__": {"a": 1}}, "other than strings"),
    ([1], "no JSON object"),
]


@pytest.mark.clause("V12")
@pytest.mark.parametrize(("header", "says"), HEADERS, ids=[says for _, says in HEADERS])
def test_lying_safetensors(tmp_path, header, says):
    path = tmp_path / "run.safetensors"
    path.write_bytes(safetensors_bytes({"x": X}, header=header))
    with refused("file", "run.safetensors", says):
        read_safetensors(path)
    with refused("file", "run.safetensors"):
        read_capture([path])


@pytest.mark.clause("V12")
def test_safetensors_by_hand(tmp_path):
    path = tmp_path / "run.safetensors"
    tensors = {
        "half": ("BF16", (2,), struct.pack("<HH", 0x3F80, 0xC040)),
        "none": ("F32", (0, 3), b""),
        "n": ("I64", (), struct.pack("<q", -7)),
        "flags": ("BOOL", (2,), b"\0\1"),
    }
    content = safetensors_bytes(tensors, {"format": "pt"})
    path.write_bytes(content)
    found = read_safetensors(path)
    assert found["half"].tolist() == [1.0, -3.0]
    assert (found["none"].shape, found["n"].item(), found["flags"].tolist()) == ((0, 3), -7, [False, True])
    entries, metadata = safetensors_entries(path)
    assert (entries["half"].dtype, entries["half"].shape, metadata) == ("bfloat16", (2,), {"format": "pt"})
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with refused("file", "run.safetensors"):
            read_safetensors(path)
    for length in (0, 7, 10**6, 2**63):
        path.write_bytes(struct.pack("<Q", length) + content[8:])
        with refused("file", "run.safetensors"):
            read_safetensors(path)
    path.write_bytes(safetensors_bytes({"flags": ("BOOL", (1,), b"\2")}))
    with refused("file", "neither 0 nor 1"):
        read_safetensors(path)
    for header in (b"{", b"\xff\xff", b"[" * 5000, b'{"a": 1, "a": 2}'):
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        with refused("file", "its header is not JSON"):
            read_safetensors(path)
    with refused("file", "ends in .npz or .safetensors"):
        read_capture([tmp_path / "run.pt"])


# Forms that are taken


@pytest.mark.clause("A6")
@pytest.mark.parametrize(("base", "layout", "empty"), [(2, "TH", np.inf), (np.e, "TH", -np.inf), (2, "HT", np.inf)])
@pytest.mark.parametrize("in_parts", [False, True])
def test_lse_conventions(tmp_path, right, base, layout, empty, in_parts):
    tensors = dict(right.tensors)
    wanted = tensors["lse"]
    tensors["lse"] = lse_to(wanted, base=base, empty=empty, heads_last=layout == "TH")
    if in_parts:
        axis = 0 if layout == "TH" else 1
        tensors |= {f"lse.{r}": tensors["lse"].take(right.indices(r), axis=axis) for r in range(4)}
        del tensors["lse"]
    right.more = {"lse_base": "e" if base == np.e else 2, "lse_layout": layout, "lse_empty": str(empty)}
    path = save_npz(tmp_path / "run.npz", right, tensors)
    assert np.allclose(read_capture([path]).outputs["lse"], wanted, rtol=1e-6, atol=0)
    assert check_capture([path]).passed


@pytest.mark.clause("N2")
def test_bfloat16_in_other_clothes(tmp_path, require):
    """As bits, and in float32: under the setting `dtype` both are judged as bfloat16."""
    right = step(dtype="bfloat16", policy="packed_contiguous", more={"dtype": "bfloat16"})
    bits = {
        name: x if name == "lse" else (x.view(np.uint32) >> 16).astype(np.uint16) for name, x in right.tensors.items()
    }
    as_bits = saved(tmp_path / "bits.npz", right, **bits)
    as_float32 = saved(tmp_path / "float32.npz", right)
    for path in (as_bits, as_float32):
        capture = read_capture([path])
        assert (capture.dtype, set(capture.dtypes.values())) == ("bfloat16", {"bfloat16"})
        assert np.array_equal(capture.outputs["dk"], right.tensors["dk"])
        assert check_capture([path]).passed
    right.more = {}
    undeclared = check_capture([saved(tmp_path / "float32.npz", right)])
    assert not undeclared.passed  # rounded to bfloat16, held to the tolerance of float32


@pytest.mark.clause("N2")
def test_a_coarser_output_is_judged_by_its_own_dtype(tmp_path, right):
    right.tensors["out"] = right.tensors["out"].astype(np.float16)
    checked = check_capture([save_npz(tmp_path / "run.npz", right)])
    assert checked.passed
    assert {r.id: r.dtype for r in checked.results} == {
        "out": "float16",
        "lse": "float32",
        "dq": "float32",
        "dk": "float32",
        "dv": "float32",
    }


def test_safetensors_settings_as_tensors(tmp_path, require):
    torch = require("torch")
    save_file = require("safetensors.torch").save_file
    right = step(policy="packed_contiguous")
    tensors = {name: torch.from_numpy(x) for name, x in right.tensors.items()}
    offsets = {n: torch.tensor(right.settings[n], dtype=torch.int32) for n in ("cu_seqlens", "cu_seqlens_padded")}
    numbers = {"cp_size": torch.tensor(4), "total_tokens": torch.tensor([80]), "causal": torch.tensor(True)}
    path = tmp_path / "run.safetensors"
    save_file(tensors | offsets | numbers, path, {"policy": "packed_contiguous", "window": "(-1, -1)", "format": "pt"})
    assert check_capture([path]).passed
    save_file(tensors | offsets | numbers, path, {"policy": "packed_contiguous", "cp_size": "4"})
    with refused("file", "cp_size stands among the tensors and in __metadata__"):
        read_capture([path])
    for text in ("4 ranks", "[4]x", '{"a": 4}', "9" * 5000, "[" * 5000):
        save_file(tensors | offsets, path, {"policy": "packed_contiguous", "causal": "True", "cp_size": text})
        with refused("file", "cp_size is"):
            read_capture([path])


# The page


def blocks():
    return re.findall(r"^```python\n(.*?)^```$", CAPTURE_MD.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.clause("V12")
@pytest.mark.parametrize("framework", [0, 1], ids=["transformer-engine", "ring-flash-attention"])
def test_the_lines_of_the_page_dump_a_step(tmp_path, monkeypatch, require, framework):
    """Executed for each of four ranks; the frameworks' own functions are stand-ins that give a right step's parts."""
    torch = require("torch")
    monkeypatch.chdir(tmp_path)
    right = step(dtype="bfloat16", policy="dual_chunk_swap" if framework == 0 else "packed_contiguous")
    if framework == 1:  # whose functions know no padding
        right = step(type(right.layout)([0, 13, 13, 80]), "bfloat16", policy="packed_contiguous")
    tensors = {name: right.parts(name) for name in NAMES}

    def as_torch(name, rank):
        x = torch.from_numpy(np.ascontiguousarray(tensors[name][rank]))
        return x if name == "lse" else x.to(torch.bfloat16)

    for rank in range(4):
        mine = {name: as_torch(name, rank) for name in NAMES}

        class Attention(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k, v, mine=mine):
                assert all(torch.equal(a, mine[n]) for a, n in ((q, "q"), (k, "k"), (v, "v")) if not a.isnan().any())
                return mine["out"].clone()

            @staticmethod
            def backward(ctx, dout, mine=mine):
                return mine["dq"], mine["dk"], mine["dv"], None

        def transformer_engine(q, k, v, run=Attention, **options):
            assert set(options) == {
                "qkv_format",
                "attn_mask_type",
                "cu_seqlens_q",
                "cu_seqlens_kv",
                "cu_seqlens_q_padded",
                "cu_seqlens_kv_padded",
            }
            out = run.apply(q, k, v)
            return out.view(len(out), -1)

        def llama3(q, k, v, *args, run=Attention, lse=mine["lse"], **options):
            assert len(args) == 4
            assert options.pop("return_attn_probs")
            assert set(options) == {"heads_k_stride", "local_k_slice", "causal"}
            return run.apply(q, k, v), lse, None

        names = {name: mine[name] for name in ("q", "k", "v", "dout")} | {
            "torch": torch,
            "save_file": require("safetensors.torch").save_file,
            "cp_size": 4,
            "cp_rank": rank,
            "cu_seqlens": torch.tensor(right.layout.cu_seqlens),
            "real": torch.tensor(right.layout.cu_seqlens),
            "padded": torch.tensor(right.layout.cu_seqlens_padded),
            "attention": transformer_engine,
            "llama3_flash_attn_varlen_func": llama3,
            "llama3_flash_attn_prepare_cu_seqlens": lambda cu, causal, rank, size: (cu, cu, 80, 80, slice(0, 80)),
        }
        exec(blocks()[framework], names)
    paths = sorted(tmp_path.glob("run.*.safetensors"))
    assert len(paths) == 4
    assert check_capture(paths).passed
