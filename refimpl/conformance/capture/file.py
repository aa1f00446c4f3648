"""Captures: tensors of one real training step, in npz or safetensors files that anyone may have written.

Defines `Capture` and `read_capture`. specs/capture.md is the page for those who write such files. Before a tensor is
read, its name, shape and dtype are held against the offsets that the capture declares, and the bytes of all of them
against a limit; then whole tensors and the ranks' parts alike are brought into buffer order.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.attention import checked_scale
from refimpl.conformance.capture.safetensors_file import read_safetensors, safetensors_entries
from refimpl.conformance.capture.settings import SETTINGS, Settings, as_settings, readable
from refimpl.conformance.declaration import DTYPES
from refimpl.conformance.reading import Entry, npz_entries, read_npz, refuse
from refimpl.conformance.yardstick import ROUNDING
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.lse import lse_from
from refimpl.mask import AttentionMask
from refimpl.partition import Policy, check_divisible, unpartition

Array = NDArray[Any]

INPUTS = ("q", "k", "v", "dout")
OUTPUTS = ("out", "lse", "dq", "dk", "dv")
GRADIENTS = ("dq", "dk", "dv")

MAX_FILES = 1024
MAX_ROWS = 1 << 22
"""Rows of a buffer; 32 times of what a laptop judges in minutes."""
MAX_TENSOR_BYTES = 64 << 30
"""Of all tensors together, in any case; see `_most_bytes`."""


@dataclass(frozen=True, eq=False)
class Capture:
    """One step: what went in, what came out, and what was declared of both.

    - `q` [T, Hq, Dqk], `k` [T, Hkv, Dqk], `v` [T, Hkv, Dv], `dout` [T, Hq, Dv] or None, in buffer order. bfloat16 comes
      as float32. Real rows are finite.
    - `outputs`: those of OUTPUTS that were captured, in buffer order; lse [Hq, T] is a natural logarithm with -inf in
      rows without keys, whatever it was. `dtypes`: what each is judged as. `dtype`: what the step computed in.
    - `per_rank`: tensors that came in the ranks' parts.
    """

    layout: PackedLayout
    policy: Policy
    cp_size: int
    mask: AttentionMask
    softmax_scale: float
    dtype: str
    q: Array
    k: Array
    v: Array
    dout: Array | None
    outputs: Mapping[str, Array]
    dtypes: Mapping[str, str]
    per_rank: frozenset[str]

    @property
    def heads(self) -> int:
        """Query heads."""
        return int(self.q.shape[1])

    @property
    def group(self) -> int:
        """Query heads that read one K/V head."""
        return int(self.q.shape[1] // self.k.shape[1])


@dataclass(frozen=True, eq=False)
class _File:
    path: Path
    rank: int | None
    settings: dict[str, Any]
    tensors: dict[str, Entry]

    @property
    def is_npz(self) -> bool:
        return self.path.suffix == ".npz"


@dataclass(frozen=True)
class _Piece:
    """A tensor, or a rank's part of one (`rank` None: all rows), and where it is stored as what name."""

    name: str
    rank: int | None
    file: int
    stored: str


def read_capture(paths: Sequence[Path]) -> Capture:
    """A capture from one file, or from several, such as one a rank.

    Raises:
        SpecError: file or usage for what cannot be read, is unsafe, missing, not finite, or of the wrong shape; and the
            codes of layouts, masks, policies, heads and scales. Each names the file. [V12]
    """
    if not 0 < len(paths) <= MAX_FILES:
        raise SpecError("usage", f"{len(paths)} files of a capture: expected 1 to {MAX_FILES}")
    files = [_open(Path(path)) for path in paths]
    settings = as_settings(_merged(files), f"{files[0].path}")
    layout, cp_size = settings.layout, settings.cp_size
    if layout.total_tokens > MAX_ROWS:
        refuse(files[0].path, f"declares {layout.total_tokens} rows: {MAX_ROWS} are taken at most")
    try:
        check_divisible(layout, settings.policy, cp_size)
    except SpecError as error:
        raise SpecError(error.code, f"{files[0].path}: {error.message}") from None
    pieces = _pieces(files, settings)
    _check_sizes(files, pieces, layout, cp_size, settings)
    arrays, dtypes, per_rank = _load(files, pieces, settings)
    return _as_capture(files, settings, arrays, dtypes, per_rank)


def _open(path: Path) -> _File:
    """The settings of one file, and what it declares of its tensors."""
    most = _most_bytes()
    if path.suffix == ".npz":
        entries = npz_entries(path, most)
        _check_names(path, entries)
        settings = {name: entry for name, entry in entries.items() if name in SETTINGS}
        found: dict[str, Any] = dict(
            read_npz(path, most, readable(path, settings), settings.keys(), max_inflated=64 << 20, extended=True)
        )
    elif path.suffix == ".safetensors":
        entries, metadata = safetensors_entries(path, most)
        _check_names(path, entries)
        settings = {name: entry for name, entry in entries.items() if name in SETTINGS}
        readable(path, settings)
        found = dict(read_safetensors(path, most, settings.keys()))
        for name, text in metadata.items():
            if name in found:
                refuse(path, f"{name} stands among the tensors and in __metadata__")
            if name in SETTINGS:  # others are the framework's own, such as format: pt
                found[name] = text
    else:
        refuse(path, "expected a name that ends in .npz or .safetensors")
    rank = found.pop("cp_rank", None)
    tensors = {name: entry for name, entry in entries.items() if name not in SETTINGS}
    return _File(path, None if rank is None else _as_rank(path, rank), found, tensors)


def _as_rank(path: Path, value: Any) -> int:
    text = str(value.item() if isinstance(value, np.ndarray) and value.size == 1 else value)
    if not text.isdecimal() or len(text) > 6:
        refuse(path, f"cp_rank is {text[:40]!r}: expected an integer from 0")
    return int(text)


def _check_names(path: Path, names: Mapping[str, Entry]) -> None:
    """A setting that is misspelt would otherwise go unnoticed."""
    for name in names:
        base, dot, number = name.partition(".")
        is_part = dot and number.isdecimal() and base in (*INPUTS, *OUTPUTS)
        if name not in (*INPUTS, *OUTPUTS, *SETTINGS) and not is_part:
            known = ", ".join((*INPUTS, *OUTPUTS, *SETTINGS))
            refuse(path, f"unknown entry {name!r}: expected {known}, or a tensor with .RANK behind it")


def _most_bytes() -> int:
    """What may be read in all: half of the machine's memory."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        memory = 16 << 30
    return min(MAX_TENSOR_BYTES, memory // 2)


def _merged(files: Sequence[_File]) -> dict[str, Any]:
    """The settings of all files, which agree where they stand in several."""
    found: dict[str, Any] = {}
    first: dict[str, Path] = {}
    for file in files:
        for name, value in file.settings.items():
            if name in found and not np.array_equal(np.asarray(found[name]), np.asarray(value)):
                refuse(file.path, f"{name} differs from the one in {first[name]}")
            found.setdefault(name, value)
            first.setdefault(name, file.path)
    return found


def _pieces(files: Sequence[_File], settings: Settings) -> list[_Piece]:
    """Every tensor once: whole, or a part for every rank."""
    total, cp_size = settings.layout.total_tokens, settings.cp_size
    found: dict[tuple[str, int | None], _Piece] = {}
    for i, file in enumerate(files):
        for stored, entry in file.tensors.items():
            name, dot, number = stored.partition(".")
            rank = int(number) if dot else file.rank
            if not dot and rank is not None and cp_size > 1 and _rows(name, entry, settings) == total:
                rank = None  # a whole tensor in the file of one rank
            if rank is not None and rank >= cp_size:
                refuse(file.path, f"{stored} belongs to rank {rank}, but cp_size is {cp_size}")
            piece = _Piece(name, rank, i, stored)
            if (name, rank) in found:
                other = files[found[name, rank].file].path
                refuse(file.path, f"{stored} is in {other} too: each tensor stands once, or once for each rank")
            found[name, rank] = piece
    for name in dict.fromkeys(name for name, _ in found):
        ranks = [rank for other, rank in found if other == name]
        parts = {rank for rank in ranks if rank is not None}
        where = files[next(piece.file for (other, _), piece in found.items() if other == name)].path
        if parts and None in ranks:
            refuse(where, f"{name} is there whole and in parts")
        if parts and parts != set(range(cp_size)):
            missing = min(set(range(cp_size)) - parts)
            refuse(where, f"the part of {name} of rank {missing} is missing: expected one for each of {cp_size} ranks")
    names = {name for name, _ in found}
    for name in ("q", "k", "v"):
        if name not in names:
            refuse(files[0].path, f"{name} is missing: expected q, k, v and any of {', '.join(OUTPUTS)}")
    if names.isdisjoint(OUTPUTS):
        refuse(files[0].path, f"nothing to judge: expected any of {', '.join(OUTPUTS)}")
    if "dout" not in names and not names.isdisjoint(GRADIENTS):
        refuse(files[0].path, "dq, dk and dv cannot be judged without dout")
    return list(found.values())


def _rows(name: str, entry: Entry, settings: Settings) -> int:
    axis = 1 if name == "lse" and not settings.lse_heads_last else 0
    return entry.shape[axis] if len(entry.shape) > axis else -1


def _check_sizes(
    files: Sequence[_File], pieces: Sequence[_Piece], layout: PackedLayout, cp_size: int, settings: Settings
) -> None:
    """Shapes that fit the layout and each other, float dtypes, and no more bytes than the machine can hold."""
    shapes = {piece.name: files[piece.file].tensors[piece.stored].shape for piece in pieces}
    for name in ("q", "k", "v"):
        if len(shapes[name]) != 3 or 0 in shapes[name][1:]:
            refuse(files[0].path, f"{name} has shape {list(shapes[name])}: expected [tokens, heads, head_dim]")
    (_, heads, dim), (_, kv_heads, _), (_, _, dim_v) = (shapes[name] for name in ("q", "k", "v"))
    if heads % kv_heads:
        raise SpecError("heads", f"{files[0].path}: {heads} query heads are no multiple of {kv_heads} K/V heads")
    inner = dict.fromkeys(("q", "dq"), (heads, dim)) | dict.fromkeys(("k", "dk"), (kv_heads, dim))
    inner |= dict.fromkeys(("v", "dv"), (kv_heads, dim_v)) | dict.fromkeys(("out", "dout"), (heads, dim_v))
    size = 0
    for piece in pieces:
        path, entry = files[piece.file].path, files[piece.file].tensors[piece.stored]
        rows = layout.total_tokens if piece.rank is None else layout.total_tokens // cp_size
        wanted: tuple[int, ...] = (rows, heads) if settings.lse_heads_last else (heads, rows)
        if piece.name != "lse":
            wanted = (rows, *inner[piece.name])
        if entry.shape != wanted:
            whose = "all rows" if piece.rank is None else f"rank {piece.rank} of {cp_size}"
            hint = ""
            if piece.name == "lse" and entry.shape == wanted[::-1]:
                hint = "; declare lse_layout " + ("HT" if settings.lse_heads_last else "TH")
            refuse(path, f"{piece.stored} has shape {list(entry.shape)}: expected {list(wanted)} for {whose}{hint}")
        if _dtype(entry, settings) not in DTYPES:
            hint = " (bits of bfloat16 need the setting dtype bfloat16)" if entry.dtype == "uint16" else ""
            refuse(path, f"{piece.stored} has dtype {entry.dtype}: expected one of {', '.join(DTYPES)}{hint}")
        count = int(np.prod(wanted, dtype=object))
        size += count * (4 if entry.dtype in ("bfloat16", "uint16") else np.dtype(entry.dtype).itemsize)
    if size > _most_bytes():
        refuse(
            files[0].path,
            f"the tensors take {size >> 20} MiB, more than half of this machine's memory: capture fewer heads",
        )


def _dtype(entry: Entry, settings: Settings) -> str:
    """The dtype of what is stored: 16-bit integers are bits of bfloat16 where that was declared."""
    return "bfloat16" if entry.dtype == "uint16" and settings.dtype == "bfloat16" else entry.dtype


def _load(
    files: Sequence[_File], pieces: Sequence[_Piece], settings: Settings
) -> tuple[dict[str, Array], dict[str, str], frozenset[str]]:
    """Every tensor in buffer order, the coarsest dtype that it was stored in, and the names of those in parts."""
    parts: dict[str, dict[int | None, Array]] = {}
    dtypes: dict[str, str] = {}
    for i, file in enumerate(files):
        mine = {piece.stored: piece for piece in pieces if piece.file == i}
        if file.is_npz:
            read = read_npz(file.path, _most_bytes(), names=mine.keys(), extended=True)
        else:
            read = read_safetensors(file.path, _most_bytes(), names=mine.keys())
        for stored, piece in mine.items():
            entry, x = file.tensors[stored], read.pop(stored)
            dtype = _dtype(entry, settings)
            if x.shape != entry.shape:
                refuse(file.path, f"{stored} changed while it was read")
            if x.dtype == np.uint16:
                x = (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
            parts.setdefault(piece.name, {})[piece.rank] = x
            dtypes[piece.name] = coarsest(dtype, dtypes.get(piece.name, dtype))
    arrays: dict[str, Array] = {}
    for name in list(parts):
        pieces_of = parts.pop(name)
        if None in pieces_of:
            arrays[name] = pieces_of[None]
            continue
        axis = 1 if name == "lse" and not settings.lse_heads_last else 0
        in_turn = [pieces_of[rank] for rank in range(settings.cp_size)]
        arrays[name] = unpartition(in_turn, settings.layout, settings.policy, axis=axis)
    return arrays, dtypes, frozenset(piece.name for piece in pieces if piece.rank is not None)


def coarsest(*dtypes: str) -> str:
    """The last in the order of DTYPES, which runs from fine to coarse."""
    return max(dtypes, key=DTYPES.index)


def _as_capture(
    files: Sequence[_File],
    settings: Settings,
    arrays: dict[str, Array],
    dtypes: Mapping[str, str],
    per_rank: frozenset[str],
) -> Capture:
    """The checked whole: finite inputs that the declared dtype has, and lse in this project's convention."""
    path, layout = files[0].path, settings.layout
    given = coarsest(*(dtypes[name] for name in ("q", "k", "v")))
    dtype = given if settings.dtype is None else settings.dtype
    if DTYPES.index(dtype) < DTYPES.index(given):
        refuse(path, f"q, k or v is {given}, but dtype is declared as {dtype}: the step cannot have computed in more")
    is_real = layout.document_ids >= 0
    for name in INPUTS:
        if name in arrays:
            parted = f", or policy is not {settings.policy}" if name in per_rank else ""
            _check_input(path, name, arrays[name], is_real, dtype, parted)
    try:
        scale = checked_scale(settings.softmax_scale, arrays["q"].shape[2])
    except SpecError as error:
        raise SpecError(error.code, f"{path}: {error.message}") from None
    outputs = {name: arrays[name] for name in OUTPUTS if name in arrays}
    if "lse" in outputs:
        outputs["lse"] = lse_from(
            outputs["lse"], base=settings.lse_base, empty=settings.lse_empty, heads_last=settings.lse_heads_last
        )
    return Capture(
        layout,
        settings.policy,
        settings.cp_size,
        settings.mask,
        scale,
        dtype,
        arrays["q"],
        arrays["k"],
        arrays["v"],
        arrays.get("dout"),
        outputs,
        {name: coarsest(dtype, dtypes[name]) for name in outputs},
        per_rank,
    )


def _check_input(path: Path, name: str, x: Array, is_real: Array, dtype: str, parted: str) -> None:
    """Finite in rows of real tokens, and nothing that the dtype has not: the step would have read other numbers."""
    rounded = ROUNDING.get(dtype)
    for start in range(0, len(x), 4096):
        rows = np.flatnonzero(is_real[start : start + 4096]) + start
        some = x[rows]
        _check_rows(path, name, rows, np.isfinite(some), f"NaN or infinity in a row of a real token{parted}")
        if rounded is not None:
            as_float32 = some.astype(np.float32)
            same = (rounded(as_float32) == some) if dtype != "float32" else (as_float32 == some)
            _check_rows(path, name, rows, same, f"holds a number that {dtype} has not; dump what attention reads")


def _check_rows(path: Path, name: str, rows: Array, is_right: Array, complaint: str) -> None:
    if not is_right.all():
        row, head, column = (int(i) for i in np.argwhere(~is_right)[0])
        refuse(path, f"{name} at row {rows[row]}, head {head}, column {column}: {complaint}")
