"""Which rows each rank holds, and moving rows, on a device: `refimpl.partition` by the kernels of partition.cu.

Defines `partition_indices`, `partition` and `unpartition` with the signatures of refimpl, their results arrays of the
device that their inputs lie on, or that is named; and what context parallelism is made of: `rank_order`, `gather_rows`,
`scatter_rows`.

Nothing here waits for a device. Layouts are checked on the host, where they are.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_backend.device import HOST, Array, Device, device_of
from refimpl.layout import PackedLayout
from refimpl.metadata import StepMetadata
from refimpl.partition import Policy, check_axis, check_divisible, check_ranks, check_shards, cut_of

THREADS = 256
UNITS = {16: np.uint8, 8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}
"""Bytes of an access, and the dtype in which its kernel is given arrays."""


def blocks(count: int, threads: int = THREADS) -> int:
    """Blocks of so many threads for `count` of them."""
    return -(-count // threads)


def device_offsets(layout: PackedLayout, device: Device) -> tuple[Array, Array]:
    """cu_seqlens and cu_seqlens_padded, int32 [n + 1], on a device. SpecError int32_overflow. [R7]"""
    step = StepMetadata.of_layout(layout)
    return device.to_device(step.cu_seqlens_q), device.to_device(step.cu_seqlens_q_padded)


def rank_rows(
    padded: Array, total: int, cut: tuple[bool, int], cp_size: int, first: int, count: int, device: Device
) -> Array:
    """Physical rows of rows `first` to `first + count - 1` of all ranks' buffers, one behind the other: int64 [count].

    Args:
        padded: int32 [n + 1] on the device.
        cut: per document or of the buffer, and the chunks of a rank.
    """
    rows = device.empty((count,), np.int64)
    args = [padded, len(padded) - 1, total, int(cut[0]), cut[1], cp_size, first, count, rows]
    device.launch("partition", "rank_rows", blocks(count), THREADS, args)
    return rows


def rank_order(
    layout: PackedLayout, policy: Policy | str, cp_size: int, device: Device, ranks: tuple[int, int] | None = None
) -> Array:
    """The physical rows of the buffers of ranks `[first, last)`, one behind the other; None: of all. int64. [P7]"""
    check_divisible(layout, policy, cp_size)
    first, last = ranks or (0, cp_size)
    cut, share = cut_of(policy), layout.total_tokens // cp_size
    _, padded = device_offsets(layout, device)
    kind = (cut.per_document, cut.chunks_per_rank)
    return rank_rows(padded, layout.total_tokens, kind, cp_size, first * share, (last - first) * share, device)


def partition_indices(
    layout: PackedLayout, policy: Policy | str, cp_size: int, cp_rank: int, device: Device = HOST
) -> Array:
    """The physical rows that rank `cp_rank` holds, in the order it holds them: int64 [T / cp_size] on the device.

    Raises:
        SpecError: policy, cp_size, cp_rank, not_divisible, int32_overflow. [P1] [P8] [P9]
    """
    check_ranks(cp_size, cp_rank)
    return rank_order(layout, policy, cp_size, device, (cp_rank, cp_rank + 1))


def partition(
    x: Any, layout: PackedLayout, policy: Policy | str, cp_size: int, axis: int = 0, device: Device | None = None
) -> list[Array]:
    """Cut an array into the ranks' shards, on the device that it lies on.

    Raises:
        SpecError: shape, and those of `partition_indices`. [P1]
    """
    device = device or device_of(x)
    x = device.as_array(x)
    check_divisible(layout, policy, cp_size)
    check_axis(x, layout.total_tokens, axis, "x", "total_tokens")
    rows_first = _axis_first(x, axis, device)
    rows = rank_order(layout, policy, cp_size, device)
    share = layout.total_tokens // cp_size
    shards = [gather_rows(rows_first, rows[r * share : (r + 1) * share], device) for r in range(cp_size)]
    return [_axis_back(shard, axis, device) for shard in shards]


def unpartition(
    shards: Sequence[Any], layout: PackedLayout, policy: Policy | str, axis: int = 0, device: Device | None = None
) -> Array:
    """Put the ranks' shards back into sequence order: the inverse of `partition`; cp_size is `len(shards)`.

    Raises:
        SpecError: shape, dtype (shards that differ), usage (shards on several devices), and those of
            `partition_indices`. [P7]
    """
    device = device or device_of(*shards)
    arrays = [device.as_array(shard) for shard in shards]
    check_shards(arrays, layout, policy, axis)
    rows_first = [_axis_first(array, axis, device) for array in arrays]
    rows = rank_order(layout, policy, len(arrays), device)
    share = layout.total_tokens // len(arrays)
    whole = device.empty((layout.total_tokens, *rows_first[0].shape[1:]), arrays[0].dtype)
    for rank, shard in enumerate(rows_first):
        scatter_rows(shard, rows[rank * share : (rank + 1) * share], whole, device)
    return _axis_back(whole, axis, device)


def gather_rows(x: Array, rows: Array, device: Device) -> Array:
    """x[rows]: rows int64 [n], x [m, ...] contiguous; a new array [n, ...]. [C2]"""
    result = device.empty((len(rows), *x.shape[1:]), x.dtype)
    _move("gather", x, rows, result, device)
    return result


def scatter_rows(x: Array, rows: Array, result: Array, device: Device) -> None:
    """result[rows] = x, in place: rows int64 [n], x [n, ...] and result [m, ...] contiguous. [C1]"""
    _move("scatter", x, rows, result, device)


def _move(kind: str, x: Array, rows: Array, result: Array, device: Device) -> None:
    """The widest accesses that the size of a row and both addresses allow, about one thread an access."""
    row_bytes = int(np.prod(x.shape[1:], dtype=np.int64)) * x.dtype.itemsize
    if row_bytes == 0 or len(rows) == 0 or x.shape[0] == 0:
        return
    unit = next(unit for unit in UNITS if not (row_bytes | _address(x) | _address(result)) % unit)
    units = row_bytes // unit
    threads_per_row = min(THREADS, 1 << (units - 1).bit_length())
    source, target = (a.reshape(-1).view(UNITS[unit]) for a in (x, result))
    args = [source, rows, target, len(rows), units, threads_per_row]
    grid = blocks(len(rows), THREADS // threads_per_row)
    device.launch("partition", f"{kind}_rows_{unit}", grid, THREADS, args)


def _address(x: Array) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr)


def _axis_first(x: Array, axis: int, device: Device) -> Array:
    """x with its token axis in front, contiguous."""
    axis %= x.ndim
    return x if axis == 0 else device.as_array(x.transpose(axis, *(i for i in range(x.ndim) if i != axis)))


def _axis_back(x: Array, axis: int, device: Device) -> Array:
    axis %= x.ndim
    return x if axis == 0 else device.as_array(x.transpose(*range(1, axis + 1), 0, *range(axis + 1, x.ndim)))
