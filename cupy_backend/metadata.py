"""What one rank tells its attention kernels, made on the device: `refimpl.metadata` by the kernels of metadata.cu.

Defines `device_metadata`, from offsets that lie on the device, without a wait for it and without a size that depends on
what they hold, so that a captured graph replays on other offsets; `rank_metadata`, `position_ids` and
`next_token_labels` with the signatures of refimpl.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_backend.device import HOST, Array, Device, device_of
from cupy_backend.partition import THREADS, blocks, device_offsets, rank_rows
from refimpl.errors import SpecError
from refimpl.layout import IntArray, PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import RankMetadata, StepMetadata, merged_ranges
from refimpl.partition import Policy, check_axis, check_divisible, check_ranks, cut_of

STATUS = ("", "offsets_start", "offsets_decreasing", "real_exceeds_physical", "total_tokens", "not_divisible")
"""`Status` of metadata.cu: the code of what is wrong."""


@dataclass(frozen=True, eq=False)
class DeviceStep:
    """One attention step: the fields of StepMetadata, int32 on a device.

    `first_query` is always there. `rows` are the rows of the local buffer that make up the step's query buffer: a slice
    where they are neighbours, else int64 on the device. `local_start` [n] is the first of them of each document;
    `maxima` [2] are max_seqlen_q and max_seqlen_kv.

    [R2] [R3] [R4] [R5]
    """

    cu_seqlens_q: Array
    cu_seqlens_q_padded: Array
    cu_seqlens_kv: Array
    cu_seqlens_kv_padded: Array
    first_query: Array
    rows: Any
    local_start: Array
    maxima: Array


@dataclass(frozen=True, eq=False)
class DeviceMetadata:
    """Everything that one rank needs to know of a layout, on a device; `status` int32 [2] tells what is wrong. [R1]"""

    indices: Array
    steps: tuple[DeviceStep, ...]
    status: Array

    def check(self, device: Device) -> None:
        """Wait for the device, and raise the refusal that its check of the offsets left: see `STATUS`. [L2] [P6]"""
        status, document = device.to_host(self.status).tolist()
        if status:
            raise SpecError(STATUS[status], f"offsets on {device.name} are refused at document {document}")


def device_metadata(
    cu_seqlens: Any,
    cu_seqlens_padded: Any,
    total_tokens: int,
    policy: Policy | str,
    cp_size: int,
    cp_rank: int,
    mask: AttentionMask = AttentionMask(),
    device: Device | None = None,
) -> DeviceMetadata:
    """The metadata of one rank, from offsets on a device.

    Args:
        cu_seqlens, cu_seqlens_padded: int32 [n + 1]. A batch of fewer documents repeats its last offset.
        total_tokens: a multiple of the chunks that the policy cuts.

    Raises:
        SpecError: policy, cp_size, cp_rank, dtype, offsets_count; what only the device sees is left in `status`.

    [R1] [R2] [R3] [R4] [R5] [L5]
    """
    check_ranks(cp_size, cp_rank)
    device = device or device_of(cu_seqlens, cu_seqlens_padded)
    cu, padded = device.as_array(cu_seqlens), device.as_array(cu_seqlens_padded)
    for name, offsets in (("cu_seqlens", cu), ("cu_seqlens_padded", padded)):
        if offsets.dtype != np.int32 or offsets.ndim != 1 or len(offsets) == 0:
            raise SpecError("dtype", f"{name} is {offsets.dtype}{list(offsets.shape)}: expected int32 [n + 1]")
    if len(cu) != len(padded):
        raise SpecError("offsets_count", f"cu_seqlens has {len(cu)} entries but cu_seqlens_padded has {len(padded)}")
    cut, n = cut_of(policy), len(cu) - 1
    kind = (cut.per_document, cut.chunks_per_rank)
    steps, share = cut.chunks_per_rank, total_tokens // cp_size
    status = device.empty((2,), np.int32)
    sized = [cu, padded, n, total_tokens, int(kind[0]), kind[1], cp_size]
    device.launch("metadata", "check_offsets", 1, THREADS, [*sized, status])
    offsets = [device.empty((steps, n + 1), np.int32) for _ in range(3)]
    entries = [device.empty((steps, size), np.int32) for size in (n, n, 2)]
    args = [*sized, cp_rank, mask.left, mask.right, status, *offsets, *entries]
    device.launch("metadata", "step_metadata", steps, THREADS, args)
    indices = rank_rows(padded, total_tokens, kind, cp_size, cp_rank * share, share, device)
    made = []
    for s in range(steps):
        cu_q, cu_q_padded, cu_kv = (array[s] for array in offsets)
        first, start, maxima = (array[s] for array in entries)
        rows = _step_rows(padded, kind, cp_size, share, s, device)
        made.append(DeviceStep(cu_q, cu_q_padded, cu_kv, padded, first, rows, start, maxima))
    return DeviceMetadata(indices, tuple(made), status)


def _step_rows(padded: Array, cut: tuple[bool, int], cp_size: int, share: int, step: int, device: Device) -> Any:
    """The rows of the local buffer [share] that one step attends for; each step attends for as many.

    A rank's buffer is a packed buffer of its own, whose documents are cp_size times shorter, and each step takes one
    half of every document: the rows that a rank of two would hold.
    """
    per_document, steps = cut
    count = share // steps
    if steps == 1 or not per_document:
        return slice(step * count, (step + 1) * count)
    return rank_rows(padded // np.int32(cp_size), share, (True, 1), steps, step * count, count, device)


def layout_metadata(
    layout: PackedLayout, policy: Policy | str, cp_size: int, cp_rank: int, mask: AttentionMask, device: Device
) -> DeviceMetadata:
    """`device_metadata` of a layout, which is checked on the host.

    Raises:
        SpecError: policy, cp_size, cp_rank, not_divisible, int32_overflow. [P6] [R7]
    """
    check_ranks(cp_size, cp_rank)
    check_divisible(layout, policy, cp_size)
    cu, padded = device_offsets(layout, device)
    return device_metadata(cu, padded, layout.total_tokens, policy, cp_size, cp_rank, mask, device)


def rank_metadata(
    layout: PackedLayout,
    policy: Policy | str,
    cp_size: int,
    cp_rank: int,
    mask: AttentionMask = AttentionMask(),
    device: Device = HOST,
) -> RankMetadata:
    """The metadata of one rank as refimpl returns it, on the host, from what the device made. Waits for the device.

    Raises:
        SpecError: policy, cp_size, cp_rank, not_divisible, int32_overflow.

    [R1] [R2] [R3] [R4] [R5] [R6] [R7] [R8]
    """
    made = layout_metadata(layout, policy, cp_size, cp_rank, mask, device)
    made.check(device)
    bottom_right = mask.right == 0 or (mask.right < 0 and mask.left < 0)
    share = layout.total_tokens // cp_size
    steps, step_rows, ranges = [], [], []
    for step in made.steps:
        first = device.to_host(step.first_query)
        most_queries, most_keys = device.to_host(step.maxima).tolist()
        steps.append(
            StepMetadata(
                device.to_host(step.cu_seqlens_q),
                device.to_host(step.cu_seqlens_q_padded),
                device.to_host(step.cu_seqlens_kv),
                device.to_host(step.cu_seqlens_kv_padded),
                most_queries,
                most_keys,
                None if bottom_right else first,
            )
        )
        is_slice = isinstance(step.rows, slice)
        step_rows.append(np.arange(share)[step.rows] if is_slice else device.to_host(step.rows))
        ranges.append(_keys_seen(steps[-1], first, mask))
    return RankMetadata(device.to_host(made.indices), tuple(steps), tuple(step_rows), merged_ranges(ranges))


def _keys_seen(step: StepMetadata, first_query: Array, mask: AttentionMask) -> IntArray:
    """Physical K/V rows `[first, last)` that the step's queries see, for documents that have any: [m, 2]. [R8]"""
    asking = step.seqlens_q > 0
    start = step.cu_seqlens_kv_padded[:-1].astype(np.int64)[asking]
    first, keys = first_query.astype(np.int64)[asking], step.seqlens_kv[asking]
    first_key, _ = mask.key_range(first, keys)
    _, last_key = mask.key_range(first + step.seqlens_q[asking] - 1, keys)
    return np.stack([start + first_key, start + last_key], axis=1)


def position_ids(layout: PackedLayout, device: Device = HOST) -> Array:
    """Positions for RoPE: restart in every document, run on through its padding; int64 [T], to be partitioned.

    [P10] [L6]
    """
    return _positions(layout, device)[1]


def document_ids(layout: PackedLayout, device: Device = HOST) -> Array:
    """The document of each physical row, -1 for padding: int32 [T]. [L6]"""
    return _positions(layout, device)[0]


def _positions(layout: PackedLayout, device: Device) -> tuple[Array, Array]:
    cu, padded = device_offsets(layout, device)
    total = layout.total_tokens
    document, position = device.empty((total,), np.int32), device.empty((total,), np.int64)
    args = [cu, padded, layout.num_documents, None, total, document, position]
    device.launch("metadata", "row_positions", blocks(total), THREADS, args)
    return document, position


def next_token_labels(ids: Any, layout: PackedLayout, ignore_index: int = -100, device: Device | None = None) -> Array:
    """Labels for next-token prediction, shifted inside each document, on the device of `ids`.

    Args:
        ids: integer [T] (or any trailing shape), token ids in buffer order.
        ignore_index: the label of padding rows and of each document's last real token.

    Raises:
        SpecError: shape, dtype, int32_overflow. [L7] [P10]
    """
    device = device or device_of(ids)
    ids = device.as_array(ids)
    check_axis(ids, layout.total_tokens, 0, "ids", "total_tokens")
    if ids.dtype.kind not in "iu":
        raise SpecError("dtype", f"ids has dtype {ids.dtype}: expected integers")
    if not np.iinfo(ids.dtype).min <= ignore_index <= np.iinfo(ids.dtype).max:
        raise SpecError("dtype", f"ignore_index {ignore_index} does not fit the dtype of ids, {ids.dtype}")
    bits = 64 if ids.dtype.itemsize == 8 else 32
    wide = device.as_array(ids.astype(f"{ids.dtype.kind}{bits // 8}").reshape(layout.total_tokens, -1).T)
    ignore = int(np.array([ignore_index], wide.dtype).view(f"i{bits // 8}")[0])
    labels = device.empty(wide.shape, np.dtype(f"i{bits // 8}"))
    cu, padded = device_offsets(layout, device)
    total = layout.total_tokens
    for column, result in zip(wide.view(labels.dtype), labels, strict=True):
        args = [cu, padded, layout.num_documents, column, None, total, ignore, result]
        device.launch("metadata", f"row_labels_{bits}", blocks(total), THREADS, args)
    return device.as_array(labels.view(wide.dtype).T.reshape(ids.shape).astype(ids.dtype))
