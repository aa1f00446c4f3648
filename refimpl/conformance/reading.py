"""Reading files that may be broken or hostile: JSON and npz, in bounded memory, executing nothing.

Defines `read_json`, `read_npz`, `npz_entries` and `inside`; safetensors are read by `capture.safetensors_file`. Every
size that a file declares is checked against what is really there, and against a limit, before anything of that size is
allocated. Objects (pickles) are never loaded. Whatever is wrong is one SpecError `file` that names the file, the fault
and the mend.
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
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
MAX_TEXT = 1000
"""Bytes of a string."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
"""Names of files and arrays that are taken: no separators, no control characters, no leading dot or dash."""


def refuse(path: Path | str, what: str) -> NoReturn:
    """Raise the SpecError `file` that says what is wrong with the file."""
    raise SpecError("file", f"{path}: {what}") from None


def inside(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`, which must be a plain name of a file that does not lead out of it.

    Raises:
        SpecError: file, for separators, odd characters, and links to somewhere else.
    """
    if NAME.fullmatch(name) is None or ".." in name:
        refuse(folder, f"{name!r} is no plain file name (letters, digits, . _ -)")
    path = folder / name
    try:
        is_within = path.resolve().parent == folder.resolve()
    except (OSError, RuntimeError):
        is_within = False
    if not is_within:
        refuse(path, "a link that leads out of its folder; copy the file itself there")
    return path


def open_file(path: Path, max_bytes: int) -> tuple[IO[bytes], int]:
    """A regular file of a size within the limit, opened; its size. Never waits at a pipe or a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        refuse(path, f"cannot be read ({getattr(error, 'strerror', None) or error})")
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        refuse(path, "not a regular file")
    if status.st_size > max_bytes:
        os.close(descriptor)
        refuse(path, f"{status.st_size} bytes, more than the {max_bytes} that are taken here")
    return os.fdopen(descriptor, "rb"), status.st_size


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """A JSON document without duplicate keys, NaN or infinities.

    Raises:
        SpecError: file, also for a document nested too deeply and integers of more than 300 digits.
    """
    file, _ = open_file(path, max_bytes)
    with file:
        content = file.read(max_bytes + 1)
    return strict_json(path, content)


def strict_json(path: Path, content: bytes, what: str = "") -> Any:
    """The JSON value that the bytes hold; see `read_json`. `what` stands in front of the complaint."""
    try:
        return json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_constant,
            parse_int=_bounded_int,
        )
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        refuse(path, f"{what}not JSON that is taken here ({' '.join(str(error).split())[:200]})")


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


@dataclass(frozen=True)
class Entry:
    """What a file declares of one array: shape, and dtype by name; `bfloat16` and `text` besides NumPy's own."""

    shape: tuple[int, ...]
    dtype: str


def read_npz(
    path: Path,
    max_bytes: int = MAX_BYTES,
    max_elements: int | None = None,
    names: Container[str] | None = None,
    *,
    max_inflated: int | None = None,
    extended: bool = False,
) -> dict[str, Array]:
    """The arrays of an npz file, by name.

    Args:
        max_bytes: of the file, and of all its arrays together once inflated.
        max_elements: of any one array; None: what max_bytes allows.
        names: the arrays to read, others are passed over; None: all.
        max_inflated: of all arrays together, where that is another limit than of the file.
        extended: take bfloat16 (as NumPy stores that of ml_dtypes, `V2`; comes as float32, exactly) and single strings.

    Raises:
        SpecError: file, for a file that is no npz, is cut off, encrypted, inflates beyond its declared sizes or the
            limit, or holds anything but plain numbers.
    """
    arrays: dict[str, Array] = {}
    left = max_bytes if max_inflated is None else max_inflated
    with _archive(path, max_bytes) as (archive, size):
        for name, member in _members(path, archive):
            if names is not None and name not in names:
                continue
            content = _inflated(path, archive, member, left, size)
            left -= len(content)
            arrays[name] = _npy(path, name, content, max_elements, extended)
    return arrays


def npz_entries(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Entry]:
    """What an npz file declares of its arrays, from their headers alone; extended kinds included.

    Raises:
        SpecError: file, as `read_npz`.
    """
    entries = {}
    with _archive(path, max_bytes) as (archive, _):
        for name, member in _members(path, archive):
            with archive.open(member) as stream:
                header = _header(path, name, io.BytesIO(stream.read(MAX_NPY_HEADER_BYTES + 16)), True)
            count_of(path, name, header.shape, None)
            entries[name] = Entry(header.shape, header.kind)
    return entries


@contextmanager
def _archive(path: Path, max_bytes: int) -> Iterator[tuple[zipfile.ZipFile, int]]:
    """The zip archive and the size of its file; whatever goes wrong within is one refusal."""
    file, size = open_file(path, max_bytes)
    with file:
        try:
            with zipfile.ZipFile(file) as archive:
                yield archive, size
        except (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError, OSError) as error:
            refuse(path, f"not a whole npz file ({' '.join(str(error).split())[:200]})")
        except (NotImplementedError, RuntimeError, struct.error, ValueError, OverflowError) as error:
            if isinstance(error, SpecError):
                raise
            refuse(path, f"an npz file of a kind that is not taken ({' '.join(str(error).split())[:200]})")


def _members(path: Path, archive: zipfile.ZipFile) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    """The members with the names of their arrays, each once."""
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        refuse(path, f"{len(members)} members, more than {MAX_MEMBERS}")
    seen = set()
    for member in members:
        name = _array_name(path, member)
        if name in seen:
            refuse(path, f"{name} stands twice")
        seen.add(name)
        yield name, member


def _array_name(path: Path, member: zipfile.ZipInfo) -> str:
    name = member.filename.removesuffix(".npy")
    if name == member.filename or NAME.fullmatch(name) is None:
        refuse(path, f"{member.filename[:100]!r} is no name of an array (letters, digits, . _ - and .npy)")
    if member.flag_bits & 0x1:
        refuse(path, f"{name} is encrypted")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        refuse(path, f"{name} is compressed by method {member.compress_type}: expected stored or deflated")
    return name


def _inflated(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, left: int, file_bytes: int) -> bytes:
    """The bytes of one member, refused from its header, and again while reading if the header lied."""
    if member.file_size > left:
        refuse(path, f"{member.filename} inflates to {member.file_size} bytes, beyond the limit")
    if member.compress_size > file_bytes:
        refuse(path, f"{member.filename} declares more bytes than the file has: it is cut off")
    with archive.open(member) as stream:
        content = stream.read(member.file_size + 1)
    if len(content) != member.file_size:
        refuse(path, f"{member.filename} holds other bytes than it declares: the file is damaged")
    return content


@dataclass(frozen=True, eq=False)
class _Header:
    """Of a .npy file. `kind`: the dtype by name, as in `Entry`."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]
    kind: str


def _header(path: Path, name: str, stream: io.BytesIO, extended: bool) -> _Header:
    """The header, parsed as a literal, and the stream behind it."""
    version = np.lib.format.read_magic(stream)
    read: Callable[..., Any] | None = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        refuse(path, f"{name} is .npy format {version}: expected 1.0 or 2.0")
    try:
        shape, fortran_order, dtype = read(stream, max_header_size=MAX_NPY_HEADER_BYTES)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, tokenize.TokenError) as error:
        refuse(path, f"{name} has no readable .npy header ({' '.join(str(error).split())[:200]})")
    if dtype.kind in "fiub" and not dtype.hasobject:
        return _Header(shape, fortran_order, dtype, dtype.newbyteorder("=").name)
    if extended and dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None and dtype.subdtype is None:
        return _Header(shape, fortran_order, np.dtype("<u2"), "bfloat16")
    if extended and dtype.kind == "U" and shape == () and dtype.itemsize <= MAX_TEXT:
        return _Header(shape, fortran_order, dtype, "text")
    more = " (leave out what is None)" if extended and dtype.hasobject else ""
    refuse(path, f"{name} has dtype {dtype}: expected floats, integers or bools{more}")


def _npy(path: Path, name: str, content: bytes, max_elements: int | None, extended: bool = False) -> Array:
    """An array from the bytes of a .npy file; its header is parsed as a literal, its data taken as plain numbers."""
    stream = io.BytesIO(content)
    header = _header(path, name, stream, extended)
    shape, dtype = header.shape, header.dtype
    count = count_of(path, name, shape, max_elements)
    data = memoryview(content)[stream.tell() :]
    if count * dtype.itemsize != len(data):
        refuse(path, f"{name} declares {count} elements of {dtype} but holds {len(data)} bytes")
    if header.kind == "text":
        order = "be" if dtype.str.startswith(">") else "le"
        return np.array(bytes(data).decode(f"utf-32-{order}").rstrip("\0"))
    array = np.frombuffer(data, dtype=dtype, count=count)
    if dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
        refuse(path, f"{name} holds bools that are neither 0 nor 1")
    ordered = array.reshape(shape[::-1]).T if header.fortran_order else array.reshape(shape)
    if header.kind == "bfloat16":
        return bfloat16_bits_to_float32(np.ascontiguousarray(ordered))
    return ordered.astype(dtype.newbyteorder("="), order="C", copy=True)


def bfloat16_bits_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 numbers from their 16 bits: the upper half of a float32, exactly."""
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def count_of(path: Path, name: str, shape: Any, max_elements: int | None) -> int:
    """The number of elements of a shape, in Python's own integers, within the limit."""
    is_shape = isinstance(shape, list | tuple) and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or len(shape) > MAX_DIMENSIONS:
        refuse(path, f"{name} has shape {str(shape)[:100]}: expected up to {MAX_DIMENSIONS} sizes")
    count = int(prod(shape))
    if max_elements is not None and count > max_elements:
        refuse(path, f"{name} declares {count} elements, more than the {max_elements} expected")
    return count
