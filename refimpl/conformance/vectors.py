"""Vectors: cases and their right answers as files.

Defines `load`, which takes nothing on trust, and `encode` and `manifest`, with which `generate` writes. A vector is
`<id>.json`, and `<id>.npz` beside it if it has float arrays: inputs as `input.<name>` in float32, answers as
`expected.<name>` in float64. Integers, codes and bounds stand in the JSON. `manifest.json` lists every file with its
size and sha256. The same vector is the same bytes, whatever wrote it.
"""

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance import reading
from refimpl.conformance.cases import Case, Expected, Vector
from refimpl.conformance.form import FORMAT, ID, Checker, check_vector
from refimpl.conformance.strides import all_with_strides
from refimpl.errors import SpecError

Array = NDArray[Any]

FOLDER = Path(__file__).resolve().parents[2] / "specs" / "vectors"
"""The vectors that come with the package; a wheel has them at the same place as the checkout."""

MANIFEST = "manifest.json"
MAX_FILES = 4096
MAX_BYTES = 4 << 20
"""No file of a vector is larger, so nothing large is read before its size is known."""

SHA256 = re.compile(r"[0-9a-f]{64}")


def load(folder: Path | None = None) -> tuple[Vector, ...]:
    """Every vector of a folder, in the order of its manifest.

    Args:
        folder: None: the vectors that come with this package.

    Raises:
        SpecError: file, in one line, for whatever is not exactly as `generate` writes it. [V3]
    """
    folder = FOLDER if folder is None else folder
    listed = _listed(folder)
    stems = [name.removesuffix(".json") for name in listed if name.endswith(".json")]
    for name in listed:
        if name.endswith(".npz") and name.removesuffix(".npz") not in stems:
            raise SpecError("file", f"{folder / MANIFEST}: {name} has no {name.removesuffix('.npz')}.json beside it")
    for name, entry in listed.items():
        _check_digest(reading.inside(folder, name), entry)
    return tuple(_load_one(folder, stem, f"{stem}.npz" in listed) for stem in stems)


def _listed(folder: Path) -> dict[str, Any]:
    """The files of the manifest, its form checked, and nothing else of a vector's kind in the folder."""
    path = folder / MANIFEST
    manifest = reading.read_json(path, MAX_BYTES)
    check = Checker(path)
    check.keys(manifest, ("format", "files"), "manifest")
    check.integer(manifest["format"], "format", FORMAT, FORMAT)
    files: dict[str, Any] = manifest["files"]
    check.that(isinstance(files, dict) and 0 < len(files) <= MAX_FILES, "files: expected an object that lists files")
    for name, entry in files.items():
        stem, dot, suffix = name.rpartition(".")
        is_ours = bool(dot) and ID.fullmatch(stem) is not None and suffix in ("json", "npz")
        check.that(is_ours, f"files: {name!r} is no name of a vector's file")
        check.keys(entry, ("bytes", "sha256"), f"files: {name}")
        check.integer(entry["bytes"], f"files: {name}: bytes", 1, MAX_BYTES)
        check.text(entry["sha256"], SHA256, f"files: {name}: sha256")
    for found in sorted(folder.iterdir()):
        if found.suffix in (".json", ".npz") and found.name not in (MANIFEST, "schema.json", *files):
            raise SpecError("file", f"{found}: not in the manifest; remove it, or generate the vectors anew")
    return files


def _check_digest(path: Path, entry: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise SpecError("file", f"{path}: no such file, but the manifest lists it")
    with path.open("rb") as file:
        content = file.read(entry["bytes"] + 1)
    if len(content) != entry["bytes"] or hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise SpecError("file", f"{path}: not the file that the manifest lists; vectors are generated, never edited")


def _load_one(folder: Path, stem: str, has_arrays: bool) -> Vector:
    path = reading.inside(folder, f"{stem}.json")
    vector = reading.read_json(path, MAX_BYTES)
    check_vector(vector, path)
    check = Checker(path)
    check.that(vector["id"] == stem, f"id is {vector['id']!r}: expected the name of the file")
    shapes = {f"input.{name}": shape for name, shape in vector["tensors"].items()}
    shapes |= {f"expected.{name}": shape for name, shape in vector["expected_tensors"].items()}
    check.that(has_arrays == bool(shapes), f"arrays are declared, or {stem}.npz is there, but not both")
    arrays: dict[str, Array] = {}
    if has_arrays:
        arrays = reading.read_npz(reading.inside(folder, f"{stem}.npz"), max_bytes=MAX_BYTES)
    for name in (*shapes, *arrays):
        check.that(name in shapes and name in arrays, f"{name} is declared, or it is in {stem}.npz, but not both")
    for name, shape in shapes.items():
        dtype = np.dtype(np.float32 if name.startswith("input.") else np.float64)
        is_as_declared = arrays[name].dtype == dtype and list(arrays[name].shape) == shape
        check.that(is_as_declared, f"{name} is {arrays[name].dtype}{list(arrays[name].shape)}: expected {dtype}{shape}")
    tensors = {name: arrays[f"input.{name}"] for name in vector["tensors"]}
    case = Case(
        id=vector["id"],
        operation=vector["operation"],
        why=vector["why"],
        clauses=tuple(vector["clauses"]),
        features=tuple(vector["features"]),
        inputs=vector["inputs"],
        tensors=all_with_strides(tensors, vector["inputs"].get("strides", {})),
    )
    _check_layout(case, check)
    answer = {name: _from_json(values, name) for name, values in vector["expected"].items()}
    answer |= {name: arrays[f"expected.{name}"] for name in vector["expected_tensors"]}
    return Vector(case, Expected(answer, vector["error"], vector["bounds"]), tuple(vector["kills"]))


def _check_layout(case: Case, check: Checker) -> None:
    """A case that is to be answered has a layout, or a step, that can be."""
    if case.operation == "refuse" or not (case.is_step or "cu_seqlens" in case.inputs):
        return
    try:
        rows = {name: case.layout_of(name).total_tokens for name in ("q", "k", "v", "dout")}
        if case.is_step:
            _ = case.step
    except SpecError as error:
        raise SpecError("file", f"{check.path}: inputs: {error.message}") from None
    for name, count in rows.items():
        check.that(name not in case.tensors or len(case.tensors[name]) == count, f"{name}: expected {count} rows")


def _from_json(values: Any, name: str) -> Array:
    """An array of integers from numbers, or of bools from rows of 0 and 1."""
    if name == "visible":
        return np.array([[mark == "1" for mark in row] for row in values], bool)
    return np.array(values, np.int64)


def encode(vector: Vector) -> dict[str, bytes]:
    """The files of a vector by name; the same bytes for the same vector. [V2]"""
    case, expected = vector.case, vector.expected
    floats = {name: x for name, x in expected.arrays.items() if x.dtype.kind == "f"}
    described = {
        "format": FORMAT,
        "id": case.id,
        "operation": case.operation,
        "why": case.why,
        "clauses": list(case.clauses),
        "features": list(case.features),
        "inputs": case.inputs,
        "tensors": {name: list(x.shape) for name, x in case.tensors.items()},
        "expected": {name: _to_json(x) for name, x in expected.arrays.items() if name not in floats},
        "expected_tensors": {name: list(x.shape) for name, x in floats.items()},
        "error": expected.error,
        "bounds": expected.bounds,
        "kills": list(vector.kills),
    }
    files = {f"{case.id}.json": (_pretty(described) + "\n").encode()}
    arrays = {f"input.{name}": x.astype("<f4") for name, x in case.tensors.items()}
    arrays |= {f"expected.{name}": x.astype("<f8") for name, x in floats.items()}
    return files | ({f"{case.id}.npz": _npz(arrays)} if arrays else {})


def manifest(files: Mapping[str, bytes]) -> bytes:
    """The manifest of these files. [V2]"""
    listed = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    }
    return (_pretty({"format": FORMAT, "files": listed}) + "\n").encode()


def _to_json(x: Array) -> Any:
    if x.dtype.kind == "b":
        return ["".join("1" if seen else "0" for seen in row) for row in x]
    return x.tolist()


def _pretty(value: Any, indent: str = "") -> str:
    """JSON with a line for every key, but objects without objects or lists inside, and lists, on one line."""
    inner = list(value.values()) if isinstance(value, dict) else []
    if not any(isinstance(x, dict | list) for x in inner):
        return json.dumps(value)
    lines = (f"{indent}  {json.dumps(key)}: {_pretty(x, indent + '  ')}" for key, x in value.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _npz(arrays: Mapping[str, Array]) -> bytes:
    """An uncompressed npz without dates, users or versions of anything."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, x in arrays.items():
            array = io.BytesIO()
            np.lib.format.write_array(array, np.ascontiguousarray(x), version=(1, 0), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            archive.writestr(entry, array.getvalue())
    return packed.getvalue()
