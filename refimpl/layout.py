"""What lies where in a packed (THD) token buffer.

Defines `PackedLayout`: real and physical offsets, checked once, and the two integers that every row reduces to,
`(document, position)`. Nothing here knows of ranks, policies or masks.

    document   0       0       0      -1       1       1      -1
    position   0       1       2       3       0       1       0
    row        0       1       2       3       4       5       6
               |- document 0: 3 real, 4 physical -|- doc. 1 -|- past the last offset

The layout above is `PackedLayout([0, 3, 5], [0, 4, 6], total_tokens=7)`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import SpecError

IntArray = NDArray[np.int64]
MAX_ROWS = 1 << 62
"""Rows and offsets stay below this, so that no sum of two of them overflows int64."""
IntVectorLike = Any
"""A list, a NumPy array, or any host object with `__array__` or `__dlpack__`, of int32 or int64."""


@dataclass(frozen=True, init=False, eq=False, repr=False)
class PackedLayout:
    """Documents packed one after another, without a batch axis, into `total_tokens` physical rows.

    Document d owns the physical rows `[cu_seqlens_padded[d], cu_seqlens_padded[d + 1])`; its real tokens are the
    first `cu_seqlens[d + 1] - cu_seqlens[d]` of them. Rows from the last physical offset on are padding of no
    document. Documents of length zero may stand anywhere; a tail of repeated offsets is just that.

    Args:
        cu_seqlens: int32 or int64 [n + 1], cumulative real lengths, from 0.
        cu_seqlens_padded: int32 or int64 [n + 1], physical offsets; None: no padding between documents.
        total_tokens: physical rows T of the buffer; None: the last physical offset.

    Attributes hold read-only int64 copies, whatever came in, so that no later product of an offset overflows.

    Raises:
        SpecError: offsets_type, offsets_shape, offsets_start, offsets_decreasing, offsets_count,
            real_exceeds_physical, total_tokens.

    [L1] [L2] [L3] [L4] [L5]
    """

    cu_seqlens: IntArray
    cu_seqlens_padded: IntArray
    total_tokens: int

    def __init__(
        self,
        cu_seqlens: IntVectorLike,
        cu_seqlens_padded: IntVectorLike | None = None,
        total_tokens: int | None = None,
    ) -> None:
        real = checked_offsets(cu_seqlens, "cu_seqlens")
        physical = real if cu_seqlens_padded is None else checked_offsets(cu_seqlens_padded, "cu_seqlens_padded")
        check_real_fits_physical(real, physical, "cu_seqlens", "cu_seqlens_padded")
        last = int(physical[-1])
        total = last if total_tokens is None else checked_int(total_tokens, "total_tokens", "total_tokens")
        if total < last:
            raise SpecError(
                "total_tokens",
                f"total_tokens is {total} but the last physical offset is {last}: "
                f"a buffer holds at least the rows its documents own",
            )
        if total >= MAX_ROWS:
            raise SpecError("total_tokens", f"total_tokens is {total}: expected less than 2**62")
        object.__setattr__(self, "cu_seqlens", real)
        object.__setattr__(self, "cu_seqlens_padded", physical)
        object.__setattr__(self, "total_tokens", total)

    @classmethod
    def from_lengths(
        cls,
        lengths: IntVectorLike,
        multiple_of: int = 1,
        *,
        padded_lengths: IntVectorLike | None = None,
        total_tokens: int | None = None,
    ) -> "PackedLayout":
        """Pack documents of these real lengths in order.

        Args:
            lengths: int [n], real tokens of each document; zero is allowed.
            multiple_of: every document's physical length is rounded up to a multiple of this (2 * cp_size is what
                dual_chunk_swap needs).
            padded_lengths: int [n], physical lengths before that rounding; None: the real lengths.
            total_tokens: as in the class.

        Raises:
            SpecError: lengths, multiple_of, offsets_count, and those of the class. [L1]
        """
        real = checked_lengths(lengths, "lengths")
        physical = real if padded_lengths is None else checked_lengths(padded_lengths, "padded_lengths")
        multiple = checked_int(multiple_of, "multiple_of", "multiple_of", minimum=1)
        if int(physical.sum()) + multiple * len(physical) >= MAX_ROWS:
            raise SpecError(
                "multiple_of", f"multiple_of is {multiple}: the padded lengths add up to 2**62 rows or more"
            )
        if len(physical) != len(real):
            raise SpecError(
                "offsets_count", f"lengths has {len(real)} entries but padded_lengths has {len(physical)}: one each"
            )
        return cls(offsets_of(real), offsets_of(-(-physical // multiple) * multiple), total_tokens)

    @classmethod
    def from_position_ids(cls, position_ids: IntVectorLike) -> "PackedLayout":
        """Read the documents off position ids that restart: every 0 opens a document, also right after another 0.

        Position ids alone cannot tell padding from text, so the layout has none: a framework that writes 0 into
        padding rows gets one document of one token for each of them, which no real token sees.

        Args:
            position_ids: int [T], in buffer order.

        Raises:
            SpecError: position_ids, with the index, where an id is neither 0 nor one more than its predecessor. [L8]
        """
        ids = checked_vector(position_ids, "position_ids")
        expected = np.concatenate(([0], ids[:-1] + 1))[: len(ids)]
        wrong = np.flatnonzero((ids != 0) & (ids != expected))
        if len(wrong):
            i = int(wrong[0])
            raise SpecError(
                "position_ids",
                f"position_ids[{i}] is {ids[i]}: expected 0 (a new document) or {expected[i]} (the next token)",
            )
        return cls(np.append(np.flatnonzero(ids == 0), len(ids)))

    @classmethod
    def from_segment_ids(cls, segment_ids: IntVectorLike, padding_id: int | None = -1) -> "PackedLayout":
        """Read the documents off segment ids: each run of one id is a document.

        Rows that hold `padding_id` become padding of the document before them; padding ahead of the first document
        becomes the padding of a document of no tokens. JAX writes 0 for padding (`padding_id=0`), this project's
        own `document_ids` write -1; None means that every id is a document.

        Args:
            segment_ids: int [T], in buffer order; ids need not be consecutive or sorted.
            padding_id: the id of padding rows, or None.

        Raises:
            SpecError: segment_ids, with the index, where an id comes back after another one or after padding. [L9]
        """
        ids = checked_vector(segment_ids, "segment_ids")
        starts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1]))[: len(ids)])
        lengths = np.diff(np.append(starts, len(ids)))
        is_padding = np.zeros(len(starts), bool) if padding_id is None else ids[starts] == padding_id
        run_ids = ids[starts[~is_padding]]
        _, first_run, run_to_id = np.unique(run_ids, return_index=True, return_inverse=True)
        again = np.flatnonzero(first_run[run_to_id] != np.arange(len(run_ids)))
        if len(again):
            row = int(starts[~is_padding][again[0]])
            raise SpecError(
                "segment_ids",
                f"segment_ids[{row}] is {ids[row]}, a segment that already ended: a document is one run of rows",
            )
        opens_with_padding = len(starts) > 0 and bool(is_padding[0])
        document_starts = starts[~is_padding]
        real = lengths[~is_padding]
        if opens_with_padding:
            document_starts, real = np.append(0, document_starts), np.append(0, real)
        return cls(offsets_of(real), np.append(document_starts, len(ids)) if len(starts) else [0])

    @property
    def num_documents(self) -> int:
        """Documents, those of length zero included."""
        return len(self.cu_seqlens) - 1

    @property
    def seqlens(self) -> IntArray:
        """Real tokens of each document: int64 [n]."""
        return np.diff(self.cu_seqlens)

    @property
    def seqlens_padded(self) -> IntArray:
        """Physical rows of each document: int64 [n]."""
        return np.diff(self.cu_seqlens_padded)

    @property
    def has_padding(self) -> bool:
        """Whether any row of the buffer holds no real token; by value, not by identity of arrays. [L10]"""
        return int(self.cu_seqlens[-1]) != self.total_tokens

    @cached_property
    def document_ids(self) -> IntArray:
        """The document of every row, -1 where the row is padding: int64 [T], read-only. [L6]"""
        kinds = np.stack([np.arange(self.num_documents), np.full(self.num_documents, -1)], axis=1).ravel()
        counts = np.stack([self.seqlens, self.seqlens_padded - self.seqlens], axis=1).ravel()
        tail = self.total_tokens - int(self.cu_seqlens_padded[-1])
        return _read_only(np.repeat(np.append(kinds, -1), np.append(counts, tail)))

    @cached_property
    def positions(self) -> IntArray:
        """The position of every row in its document: int64 [T], read-only.

        Positions count from the document's first row and run on through its padding. Rows past the last offset
        count from that offset, as if one more document of no tokens owned them; a repeated tail of offsets
        therefore changes nothing. [L6]
        """
        counts = np.append(self.seqlens_padded, self.total_tokens - self.cu_seqlens_padded[-1])
        positions = np.arange(self.total_tokens, dtype=np.int64)
        positions -= np.repeat(self.cu_seqlens_padded, counts)
        return _read_only(positions)

    def document_rows(self) -> Iterator[tuple[int, slice]]:
        """Each document that has real tokens, in order, with the slice of physical rows that hold them."""
        ends = self.cu_seqlens_padded[:-1] + self.seqlens
        for d in np.flatnonzero(self.seqlens):
            yield int(d), slice(int(self.cu_seqlens_padded[d]), int(ends[d]))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PackedLayout)
            and self.total_tokens == other.total_tokens
            and np.array_equal(self.cu_seqlens, other.cu_seqlens)
            and np.array_equal(self.cu_seqlens_padded, other.cu_seqlens_padded)
        )

    def __hash__(self) -> int:
        return hash((self.total_tokens, self.cu_seqlens.tobytes(), self.cu_seqlens_padded.tobytes()))

    def __repr__(self) -> str:
        padded = "" if self.cu_seqlens is self.cu_seqlens_padded else f", {self.cu_seqlens_padded.tolist()}"
        return f"PackedLayout({self.cu_seqlens.tolist()}{padded}, total_tokens={self.total_tokens})"


def offsets_of(lengths: IntArray) -> IntArray:
    """Offsets [n + 1] from lengths [n]: 0 and the running sums."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))


def checked_int(value: Any, name: str, code: str, minimum: int | None = None) -> int:
    """An honest integer (bools and floats are not), at least `minimum`; else a SpecError with `code`."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise SpecError(code, f"{name} is {value!r}: expected an integer")
    if minimum is not None and value < minimum:
        raise SpecError(code, f"{name} is {value}: expected {minimum} or more")
    return int(value)


def checked_vector(values: IntVectorLike, name: str) -> IntArray:
    """A read-only int64 copy of a vector of int32 or int64 from anywhere on the host. [L2]"""
    if isinstance(values, list | tuple):
        for i, value in enumerate(values):
            if np.ndim(value) > 0:
                raise SpecError("offsets_shape", f"{name}[{i}] is a sequence itself: expected one dimension")
            if not -(2**63) <= checked_int(value, f"{name}[{i}]", "offsets_type") < 2**63:
                raise SpecError("offsets_type", f"{name}[{i}] is {value}, beyond int64")
        values = np.array(values, dtype=np.int64)
    elif not isinstance(values, np.ndarray):
        values = _host_array(values, name)
    if values.dtype.kind != "i" or values.dtype.itemsize not in (4, 8):
        raise SpecError("offsets_type", f"{name} has dtype {values.dtype}: expected int32 or int64")
    if values.ndim != 1:
        raise SpecError("offsets_shape", f"{name} has shape {values.shape}: expected one dimension")
    return _read_only(values.astype(np.int64, copy=True))


def checked_offsets(values: IntVectorLike, name: str) -> IntArray:
    """A vector of offsets: at least one entry, from 0, never decreasing. [L2]"""
    offsets = checked_vector(values, name)
    if len(offsets) == 0:
        raise SpecError("offsets_shape", f"{name} is empty: n documents need n + 1 offsets, none need [0]")
    if offsets[0] != 0:
        raise SpecError("offsets_start", f"{name}[0] is {offsets[0]}: offsets start at 0")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        i = int(falls[0]) + 1
        raise SpecError(
            "offsets_decreasing",
            f"{name}[{i}] is {offsets[i]}, less than {name}[{i - 1}] = {offsets[i - 1]}: offsets never decrease "
            f"(if the entries from {i} on are unused capacity, pass {name}[:{i}] or repeat the last offset)",
        )
    return offsets


def checked_lengths(values: IntVectorLike, name: str) -> IntArray:
    """A vector of document lengths: none negative, and a sum that fits int64."""
    lengths = checked_vector(values, name)
    negative = np.flatnonzero(lengths < 0)
    if len(negative):
        i = int(negative[0])
        raise SpecError("lengths", f"{name}[{i}] is {lengths[i]}: a document has 0 or more tokens")
    if float(lengths.sum(dtype=np.float64)) >= MAX_ROWS:
        raise SpecError("lengths", f"{name} sum to more than 2**62 tokens")
    return lengths


def check_real_fits_physical(real: IntArray, physical: IntArray, real_name: str, physical_name: str) -> None:
    """Both vectors describe the same documents, none of them longer than its rows. [L3]"""
    if len(real) != len(physical):
        raise SpecError(
            "offsets_count",
            f"{real_name} has {len(real)} entries but {physical_name} has {len(physical)}: n + 1 each",
        )
    too_long = np.flatnonzero(np.diff(real) > np.diff(physical))
    if len(too_long):
        d = int(too_long[0])
        raise SpecError(
            "real_exceeds_physical",
            f"document {d} has {real[d + 1] - real[d]} real tokens ({real_name}[{d}:{d + 2}] = "
            f"{real[d : d + 2].tolist()}) in {physical[d + 1] - physical[d]} physical rows "
            f"({physical_name}[{d}:{d + 2}] = {physical[d : d + 2].tolist()})",
        )


def _host_array(values: Any, name: str) -> NDArray[Any]:
    """Read an object through `__array__` or DLPack; what lives on a device is refused, never copied silently."""
    try:
        if hasattr(values, "__array__") or not hasattr(values, "__dlpack__"):
            return np.asarray(values)
        return np.from_dlpack(values)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecError(
            "offsets_type",
            f"{name} ({type(values).__name__}) cannot be read on the host; copy it there first: {reason}",
        ) from error


def _read_only(array: IntArray) -> IntArray:
    array.flags.writeable = False
    return array
