"""Reading safetensors files that may be broken or hostile, under the rules of `reading`.

Defines `safetensors_entries` and `read_safetensors`. Such a file is 8 bytes that hold the length of a header, the
header in JSON, and the data. The header gives dtype, shape and range of bytes of every tensor; the ranges fill the data
without gaps, and strings by name may stand under `__metadata__`.
"""

import struct
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.reading import (
    MAX_BYTES,
    MAX_MEMBERS,
    NAME,
    Entry,
    bfloat16_bits_to_float32,
    count_of,
    open_file,
    refuse,
    strict_json,
)

Array = NDArray[Any]

MAX_HEADER_BYTES = 1 << 20
METADATA = "__metadata__"

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "BF16": "bfloat16",
}


@dataclass(frozen=True)
class _Range:
    name: str
    first: int
    last: int
    entry: Entry


def safetensors_entries(path: Path, max_bytes: int = MAX_BYTES) -> tuple[dict[str, Entry], dict[str, str]]:
    """What the header declares of each tensor, and the strings of its metadata.

    Raises:
        SpecError: file, for a header that is not as the format says, ranges that overlap, leave gaps or reach beyond
            the file, and dtypes other than those of DTYPES.
    """
    file, size = open_file(path, max_bytes)
    with file:
        ranges, metadata = _header(path, file, size)
    return {tensor.name: tensor.entry for tensor in ranges}, metadata


def read_safetensors(path: Path, max_bytes: int = MAX_BYTES, names: Container[str] | None = None) -> dict[str, Array]:
    """The tensors by name; bfloat16 comes as float32, exactly.

    Args:
        max_bytes: of the file. names: the tensors to read, others are passed over; None: all.

    Raises:
        SpecError: file, as `safetensors_entries`.
    """
    arrays = {}
    file, size = open_file(path, max_bytes)
    with file:
        ranges, _ = _header(path, file, size)
        start = file.tell()
        for tensor in ranges:
            if names is None or tensor.name in names:
                file.seek(start + tensor.first)
                data = file.read(tensor.last - tensor.first)
                if len(data) != tensor.last - tensor.first:
                    refuse(path, f"{tensor.name} is cut off")
                arrays[tensor.name] = _from_bytes(path, tensor, data)
    return arrays


def _header(path: Path, file: IO[bytes], size: int) -> tuple[list[_Range], dict[str, str]]:
    """The ranges, which fill the data from end to end, and the metadata; the file stands at the data then."""
    prefix = file.read(8)
    if len(prefix) < 8:
        refuse(path, "not a safetensors file: shorter than its header's length")
    (header_bytes,) = struct.unpack("<Q", prefix)
    if header_bytes > min(MAX_HEADER_BYTES, size - 8):
        refuse(path, f"not a safetensors file: a header of {header_bytes} bytes in a file of {size}")
    header = strict_json(path, file.read(header_bytes), "its header is ")
    if not isinstance(header, dict):
        refuse(path, "its header is no JSON object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        refuse(path, f"{METADATA} holds something other than strings")
    if len(header) > MAX_MEMBERS:
        refuse(path, f"{len(header)} tensors, more than {MAX_MEMBERS}")
    ranges = sorted((_range(path, *item) for item in header.items()), key=lambda tensor: (tensor.first, tensor.last))
    end, length = 0, size - 8 - header_bytes
    for tensor in ranges:
        if tensor.first != end or tensor.last > length:
            where = f"bytes {tensor.first} to {tensor.last} of {length}"
            refuse(path, f"{tensor.name} lies at {where}, expected to begin at {end} and to end within")
        end = tensor.last
    if end != length:
        refuse(path, f"{length - end} bytes behind the last tensor")
    return ranges, metadata


def _range(path: Path, name: str, declared: Any) -> _Range:
    """One tensor of the header; dtype, shape and bytes are checked against each other."""
    if NAME.fullmatch(name) is None:
        refuse(path, f"{name[:100]!r} is no name of a tensor (letters, digits, . _ -)")
    if not isinstance(declared, dict) or set(declared) != {"dtype", "shape", "data_offsets"}:
        refuse(path, f"{name} has other entries than dtype, shape and data_offsets")
    dtype = DTYPES.get(declared["dtype"]) if isinstance(declared["dtype"], str) else None
    if dtype is None:
        refuse(path, f"{name} has dtype {str(declared['dtype'])[:50]!r}: expected one of {', '.join(DTYPES)}")
    count = count_of(path, name, declared["shape"], None)
    offsets = declared["data_offsets"]
    is_range = isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int and n >= 0 for n in offsets)
    itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    if not is_range or offsets[1] - offsets[0] != count * itemsize:
        refuse(path, f"{name} has data_offsets {str(offsets)[:60]}: expected the bytes of {count} elements of {dtype}")
    return _Range(name, offsets[0], offsets[1], Entry(tuple(declared["shape"]), dtype))


def _from_bytes(path: Path, tensor: _Range, data: bytes) -> Array:
    shape, dtype = tensor.entry.shape, tensor.entry.dtype
    if dtype == "bfloat16":
        return bfloat16_bits_to_float32(np.frombuffer(data, "<u2")).reshape(shape)
    if dtype == "bool":
        bits = np.frombuffer(data, np.uint8)
        if bits.max(initial=0) > 1:
            refuse(path, f"{tensor.name} holds bools that are neither 0 nor 1")
        return bits.astype(bool).reshape(shape)
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype).reshape(shape)
