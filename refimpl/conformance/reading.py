"""Reading files that may be broken or hostile: JSON and npz, in bounded memory, executing nothing.

Defines `read_json`, `read_npz` and `inside`. Every size that a file declares is checked against
what is really there, and against a limit, before anything of that size is allocated. Objects (pickles) are never
loaded. Whatever is wrong is one SpecError `file` that names the file, the fault and the mend.
"""

import io
import json
import os
import re
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Container
from math import prod
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import SpecError

Array = NDArray[Any]

MAX_BYTES = 256 << 20
"""What a file may hold, unless the caller says otherwise."""
MAX_MEMBERS = 4096
"""Arrays in one npz file."""
MAX_NPY_HEADER_BYTES = 4096
MAX_DIMENSIONS = 8
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
"""Names of files and arrays that are taken: no separators, no control characters, no leading dot or dash."""


def _refuse(path: Path | str, what: str) -> NoReturn:
    raise SpecError("file", f"{path}: {what}") from None


def inside(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`, which must be a plain name of a file that does not lead out of it.

    Raises:
        SpecError: file, for separators, odd characters, and links to somewhere else.
    """
    if NAME.fullmatch(name) is None or ".." in name:
        _refuse(folder, f"{name!r} is no plain file name (letters, digits, . _ -)")
    path = folder / name
    try:
        is_within = path.resolve().parent == folder.resolve()
    except (OSError, RuntimeError):
        is_within = False
    if not is_within:
        _refuse(path, "a link that leads out of its folder; copy the file itself there")
    return path


def _open(path: Path, max_bytes: int) -> tuple[IO[bytes], int]:
    """A regular file of a size within the limit, opened; its size. Never waits at a pipe or a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        _refuse(path, f"cannot be read ({getattr(error, 'strerror', None) or error})")
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        _refuse(path, "not a regular file")
    if status.st_size > max_bytes:
        os.close(descriptor)
        _refuse(path, f"{status.st_size} bytes, more than the {max_bytes} that are taken here")
    return os.fdopen(descriptor, "rb"), status.st_size


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """A JSON document without duplicate keys, NaN or infinities.

    Raises:
        SpecError: file, also for a document nested too deeply and integers of more than 300 digits.
    """
    file, _ = _open(path, max_bytes)
    with file:
        content = file.read(max_bytes + 1)
    try:
        return json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_constant,
            parse_int=_bounded_int,
        )
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        _refuse(path, f"not JSON that is taken here ({' '.join(str(error).split())[:200]})")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _bounded_int(text: str) -> int:
    if len(text) > 300:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def read_npz(
    path: Path,
    max_bytes: int = MAX_BYTES,
    max_elements: int | None = None,
    names: Container[str] | None = None,
) -> dict[str, Array]:
    """The arrays of an npz file, by name.

    Args:
        max_bytes: of the file, and of all its arrays together once inflated.
        max_elements: of any one array; None: what max_bytes allows.
        names: the arrays to read, others are passed over; None: all.

    Raises:
        SpecError: file, for a file that is no npz, is cut off, encrypted, inflates beyond its declared sizes or the
            limit, or holds anything but plain numbers.
    """
    file, size = _open(path, max_bytes)
    with file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                if len(members) > MAX_MEMBERS:
                    _refuse(path, f"{len(members)} members, more than {MAX_MEMBERS}")
                arrays: dict[str, Array] = {}
                left = max_bytes
                for member in members:
                    name = _array_name(path, member)
                    if name in arrays:
                        _refuse(path, f"{name} stands twice")
                    if names is not None and name not in names:
                        continue
                    content = _inflated(path, archive, member, left, size)
                    left -= len(content)
                    arrays[name] = _npy(path, name, content, max_elements)
                return arrays
        except (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError, OSError) as error:
            _refuse(path, f"not a whole npz file ({' '.join(str(error).split())[:200]})")
        except (NotImplementedError, RuntimeError, struct.error, ValueError, OverflowError) as error:
            if isinstance(error, SpecError):
                raise
            _refuse(path, f"an npz file of a kind that is not taken ({' '.join(str(error).split())[:200]})")


def _array_name(path: Path, member: zipfile.ZipInfo) -> str:
    name = member.filename.removesuffix(".npy")
    if name == member.filename or NAME.fullmatch(name) is None:
        _refuse(path, f"{member.filename[:100]!r} is no name of an array (letters, digits, . _ - and .npy)")
    if member.flag_bits & 0x1:
        _refuse(path, f"{name} is encrypted")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        _refuse(path, f"{name} is compressed by method {member.compress_type}: expected stored or deflated")
    return name


def _inflated(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, left: int, file_bytes: int) -> bytes:
    """The bytes of one member, refused from its header, and again while reading if the header lied."""
    if member.file_size > left:
        _refuse(path, f"{member.filename} inflates to {member.file_size} bytes, beyond the limit")
    if member.compress_size > file_bytes:
        _refuse(path, f"{member.filename} declares more bytes than the file has: it is cut off")
    with archive.open(member) as stream:
        content = stream.read(member.file_size + 1)
    if len(content) != member.file_size:
        _refuse(path, f"{member.filename} holds other bytes than it declares: the file is damaged")
    return content


def _npy(path: Path, name: str, content: bytes, max_elements: int | None) -> Array:
    """An array from the bytes of a .npy file; its header is parsed as a literal, its data taken as plain numbers."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        _refuse(path, f"{name} is .npy format {version}: expected 1.0 or 2.0")
    try:
        shape, fortran_order, dtype = read(stream, max_header_size=MAX_NPY_HEADER_BYTES)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, tokenize.TokenError) as error:
        _refuse(path, f"{name} has no readable .npy header ({' '.join(str(error).split())[:200]})")
    if dtype.kind not in "fiub" or dtype.hasobject:
        _refuse(path, f"{name} has dtype {dtype}: expected floats, integers or bools")
    count = _count(path, name, shape, max_elements)
    data = content[stream.tell() :]
    if count * dtype.itemsize != len(data):
        _refuse(path, f"{name} declares {count} elements of {dtype} but holds {len(data)} bytes")
    array = np.frombuffer(data, dtype=dtype, count=count)
    if dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
        _refuse(path, f"{name} holds bools that are neither 0 nor 1")
    ordered = array.reshape(shape[::-1]).T if fortran_order else array.reshape(shape)
    return ordered.astype(dtype.newbyteorder("="), order="C", copy=True)


def _count(path: Path, name: str, shape: Any, max_elements: int | None) -> int:
    """The number of elements of a shape, in Python's own integers, within the limit."""
    is_shape = isinstance(shape, list | tuple) and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or len(shape) > MAX_DIMENSIONS:
        _refuse(path, f"{name} has shape {str(shape)[:100]}: expected up to {MAX_DIMENSIONS} sizes")
    count = int(prod(shape))
    if max_elements is not None and count > max_elements:
        _refuse(path, f"{name} declares {count} elements, more than the {max_elements} expected")
    return count
