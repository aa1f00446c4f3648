"""Cases as plain files for frameworks that are not written in Python.

Defines `export`. A case is `<id>.json` and, if it has tensors, `<id>.npz` with one array `input.<name>` each; the right
answers stay behind. README.md in the same folder says what to do with them.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from refimpl.conformance import reading
from refimpl.conformance.cases import Expected, Vector
from refimpl.conformance.vectors import FOLDER, encode
from refimpl.errors import SpecError

MARKER = "export.json"
"""The file that tells a folder for an earlier export: its files may be replaced."""

KEPT = ("id", "operation", "why", "clauses", "features", "inputs", "tensors")
"""What is handed out of a vector."""

MAX_MARKER_BYTES = 2**20
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\.(json|npz)")


def export(vectors: Sequence[Vector], folder: Path) -> int:
    """Write the cases without their answers; the number of files.

    An earlier export in the folder is replaced: its files are removed, and nothing else is.

    Raises:
        SpecError: usage: the folder cannot be written to, or holds something that no export has put there.
    """
    old = _old_files(folder)
    files = {MARKER: b""}  # first, so that an interrupted export is known as one
    for vector in vectors:
        files |= _without_answer(vector)
    files |= {name: (FOLDER / name).read_bytes() for name in ("README.md", "schema.json")}
    files[MARKER] = json.dumps({"thdcp_export": 1, "files": sorted(set(files) - {MARKER})}, indent=1).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in old - set(files):
            (folder / name).unlink(missing_ok=True)
        for name, content in files.items():
            part = folder / f".{name}.part"
            part.write_bytes(content)
            part.replace(folder / name)  # replaces a link too, instead of following it
    except OSError as error:
        raise SpecError("usage", f"--export {folder}: {error.strerror or error}") from error
    return len(files)


def _old_files(folder: Path) -> set[str]:
    """The files of an earlier export in this folder."""
    try:
        if folder.is_symlink() or not folder.exists() or not any(folder.iterdir()):
            return set()
        if not (folder / MARKER).is_file():
            raise SpecError(
                "usage", f"--export {folder}: the folder is not empty and holds no earlier export: name another"
            )
        content = reading.read_json(folder / MARKER, MAX_MARKER_BYTES)
    except OSError as error:
        raise SpecError("usage", f"--export {folder}: {error.strerror or error}") from error
    listed = content.get("files") if isinstance(content, dict) else None
    if not isinstance(listed, list) or content.get("thdcp_export") != 1:
        raise SpecError("usage", f"--export {folder}: {MARKER} there is none of an earlier export: name another folder")
    return {name for name in listed if isinstance(name, str) and _NAME.fullmatch(name)}


def _without_answer(vector: Vector) -> dict[str, bytes]:
    """The files of a vector as `vectors.encode` writes them, without what only a judge may know."""
    bare = Vector(vector.case, Expected({}, None, {}), ())
    files = encode(bare)
    name = f"{vector.case.id}.json"
    content = {key: value for key, value in json.loads(files[name]).items() if key in KEPT}
    content["answer"] = sorted(vector.expected.arrays)
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    return files | {name: f"{{\n{lines}\n}}\n".encode()}
