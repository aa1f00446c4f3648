"""All-gather context-parallel attention on a device: `refimpl.context_parallel` with the backend's kernels.

Defines `context_parallel_forward` and `context_parallel_backward`, one rank's work over a group of ranks, with the
signatures and the meaning of refimpl, and `kernels`, the pieces that they are made of.

Two things may be asked for beyond the reference, neither of which changes a result beyond its rounding:

    head_slices   K and V are gathered some heads at a time, so that the next slice travels while the heads of the last
                  are attended to. Attention treats heads apart from each other, so nothing else changes.
    by_need       under packed_contiguous a rank gets only the rows of K and V that it reads, from the ranks that hold
                  them: those from the start of the first document that it has queries of to its last visible key.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from cupy_backend.attention import DTYPES, stand_in, varlen_attention_forward
from cupy_backend.attention_backward import varlen_attention_backward
from cupy_backend.collectives import DeviceCollectives, on_device
from cupy_backend.device import Array, Device, device_of
from cupy_backend.partition import gather_rows, rank_order, scatter_rows
from refimpl.collectives import Collectives
from refimpl.context_parallel import (
    Parts,
    Saved,
    accumulation_dtype,
    agreed,
    check_backward,
    check_forward,
)
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import RankMetadata, StepMetadata, rank_metadata
from refimpl.partition import Policy, as_policy, rank_order_is_sequence_order


def kernels(device: Device | None = None) -> Parts:
    """The backend's pieces for arrays of a device; None: the device that the arrays lie on."""

    def forward(*args: Any) -> Any:
        return varlen_attention_forward(*args, device=device)

    def backward(*args: Any) -> Any:
        return varlen_attention_backward(*args, device=device)

    return Parts(rank_metadata, forward, backward)


@dataclass(frozen=True, eq=False)
class DeviceSaved(Saved):
    """What the forward keeps for the backward; see refimpl. [B4]"""

    head_slices: int
    by_need: bool
    device: Device


def context_parallel_forward(
    q: Any,
    k: Any,
    v: Any,
    layout: PackedLayout,
    policy: Policy | str,
    group: Collectives | DeviceCollectives,
    mask: AttentionMask = AttentionMask(),
    softmax_scale: float | None = None,
    parts: Parts | None = None,
    *,
    head_slices: int = 1,
    by_need: bool = False,
    device: Device | None = None,
) -> tuple[Array, Array, DeviceSaved]:
    """Attention for the queries that this rank holds.

    Args:
        q, k, v: this rank's shards [T / cp, heads, head_dim] on one device, of one dtype of `DTYPES`.
        layout: of the whole buffer, on the host, the same on all ranks, like everything behind it.
        group: the cp ranks: NCCL, or any group of refimpl, which then exchanges through host memory.
        parts: the pieces; None: `kernels(device)`.
        head_slices: into how many slices K/V heads are cut; it divides their number.
        by_need: exchange only the rows that are read; packed_contiguous alone.

    Returns:
        out [T / cp, Hq, Dv] in q's dtype; lse [Hq, T / cp] float32; what the backward needs.

    Raises:
        SpecError: on every rank alike, before any tensor is exchanged: see refimpl, and usage, dtype, heads for what
            this backend does not take.

    [C1] [C3] [C5] [C6] [A3] [A4] [A5]
    """

    def checked() -> tuple[Mapping[str, str], tuple[float, RankMetadata, Device, list[Array], Parts]]:
        place = device or device_of(q, k, v)
        arrays = [place.as_array(x) for x in (q, k, v)]
        queries, keys, values = (stand_in(x) for x in arrays)
        facts, scale = check_forward(queries, keys, values, layout, policy, group.size, mask, softmax_scale)
        _check_dtype(arrays[0])
        _check_options(arrays[1], policy, head_slices, by_need)
        facts = {**facts, "exchange": f"{head_slices} slices of heads{', by need' if by_need else ''}"}
        pieces = parts or kernels(place)
        return facts, (scale, pieces.rank_metadata(layout, policy, group.size, group.rank, mask), place, arrays, pieces)

    facts, (scale, metadata, place, (q, k, v), pieces) = agreed(cast(Collectives, group), checked)
    exchange = _exchange_of(on_device(group, place), layout, policy, mask, metadata, by_need, place)
    out = place.empty((len(q), q.shape[1], v.shape[2]), q.dtype)
    lse = place.empty((q.shape[1], len(q)), accumulation_dtype(q.dtype))
    rows = [_step_rows(x, place) for x in metadata.step_rows]
    for heads_q, _, (k_all, v_all) in _sliced(exchange, k, v, q.shape[1], head_slices, place):
        q_slice = _heads(q, heads_q, place)
        for step, local in zip(exchange.steps, rows, strict=True):
            out_step, lse_step = pieces.varlen_attention_forward(local.of(q_slice), k_all, v_all, step, mask, scale)
            local.put(_here(out_step, place), out, heads_q)
            lse[heads_q, local.index] = _here(lse_step, place)
    saved = DeviceSaved(
        q, k, v, out, lse, layout, as_policy(policy), mask, scale, metadata, facts, head_slices, by_need, place
    )
    return out, lse, saved


def context_parallel_backward(
    dout: Any, saved: DeviceSaved, group: Collectives | DeviceCollectives, parts: Parts | None = None
) -> tuple[Array, Array, Array]:
    """Gradients of this rank's shards, on their device; see refimpl.

    Raises:
        SpecError: on every rank alike: shape, dtype, usage, ranks_disagree.

    [B1] [B2] [B3] [B4] [C1] [C2] [C3] [C5] [N1]
    """
    place = saved.device

    def checked() -> tuple[Mapping[str, str], Array]:
        array = place.as_array(dout)
        return check_backward(stand_in(array), saved), array

    _, dout = agreed(cast(Collectives, group), checked)
    pieces = parts or kernels(place)
    q, k, v = saved.q, saved.k, saved.v
    exchange = _exchange_of(
        on_device(group, place), saved.layout, saved.policy, saved.mask, saved.metadata, saved.by_need, place
    )
    accumulate = accumulation_dtype(q.dtype)
    dq, dk, dv = (place.empty(x.shape, x.dtype) for x in (q, k, v))
    rows = [_step_rows(x, place) for x in saved.metadata.step_rows]
    for heads_q, heads_kv, (k_all, v_all) in _sliced(exchange, k, v, q.shape[1], saved.head_slices, place):
        q_slice, dout_slice, out_slice = (_heads(x, heads_q, place) for x in (q, dout, saved.out))
        sums: list[Array] = []
        for step, local in zip(exchange.steps, rows, strict=True):
            dq_step, dk_step, dv_step = pieces.varlen_attention_backward(
                local.of(dout_slice),
                local.of(q_slice),
                k_all,
                v_all,
                local.of(out_slice),
                place.as_array(saved.lse[heads_q, local.index]),
                step,
                saved.mask,
                saved.softmax_scale,
            )
            local.put(_here(dq_step, place), dq, heads_q)
            found = [_here(x, place).astype(accumulate, copy=False) for x in (dk_step, dv_step)]
            sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
        dk[:, heads_kv], dv[:, heads_kv] = (exchange.reduce(x).astype(k.dtype) for x in sums)
    return dq, dk, dv


@dataclass(frozen=True)
class _Rows:
    """The rows of the local buffer that make up one step's query buffer: a slice, or int64 on the device."""

    index: Any
    device: Device

    def of(self, x: Array) -> Array:
        """The step's rows of a local buffer, contiguous."""
        if isinstance(self.index, slice):
            return self.device.as_array(x[self.index])
        return gather_rows(x, self.index, self.device)

    def put(self, step: Array, x: Array, heads: slice) -> None:
        """The step's rows of some heads back into a local buffer [rows, all heads, ...]."""
        if isinstance(self.index, slice):
            x[self.index, heads] = step
        elif step.shape[1:] == x.shape[1:]:
            scatter_rows(self.device.as_array(step.astype(x.dtype, copy=False)), self.index, x, self.device)
        else:
            x[self.index, heads] = step


def _step_rows(rows: Array, device: Device) -> _Rows:
    if len(rows) == 0:
        return _Rows(slice(0, 0), device)
    first, last = int(rows[0]), int(rows[-1]) + 1
    neighbours = last - first == len(rows)  # they ascend
    return _Rows(slice(first, last) if neighbours else device.to_device(np.ascontiguousarray(rows)), device)


class _Gather:
    """K and V of all ranks, in sequence order; dK and dV back to the ranks."""

    def __init__(
        self,
        group: DeviceCollectives,
        layout: PackedLayout,
        policy: Policy | str,
        metadata: RankMetadata,
        device: Device,
    ) -> None:
        self.steps: Sequence[StepMetadata] = metadata.steps
        self._group = group
        self._device = device
        self._order = None if rank_order_is_sequence_order(policy) else rank_order(layout, policy, group.size, device)

    def start(self, k: Array, v: Array) -> Callable[[], list[Array]]:
        """Start the exchange of shards; what is returned waits, and puts rows in sequence order. [C1]"""
        pending = self._group.start_gather([k, v])

        def wait() -> list[Array]:
            return [self._in_sequence_order(x) for x in pending()]

        return wait

    def _in_sequence_order(self, gathered: Array) -> Array:
        flat = gathered.reshape(-1, *gathered.shape[2:])
        if self._order is None:
            return flat
        whole = self._device.empty(flat.shape, flat.dtype)
        scatter_rows(self._device.as_array(flat), self._order, whole, self._device)
        return whole

    def reduce(self, x: Array) -> Array:
        """The sum over ranks of this rank's rows of [T, ...]. [C2]"""
        ordered = x if self._order is None else gather_rows(x, self._order, self._device)
        return self._group.reduce_scatter_sum(ordered.reshape(self._group.size, -1, *x.shape[1:]))


class _Need:
    """Under packed_contiguous: only the rows of K and V that a rank reads, and their dK and dV back to their owners.

    All ranks work out what each needs, so none has to ask.
    """

    def __init__(
        self,
        group: DeviceCollectives,
        layout: PackedLayout,
        mask: AttentionMask,
        metadata: RankMetadata,
        device: Device,
    ) -> None:
        self._group = group
        self._device = device
        self._share = layout.total_tokens // group.size
        policy = Policy.PACKED_CONTIGUOUS
        needs = [
            needed_rows(rank_metadata(layout, policy, group.size, rank, mask).steps[0]) for rank in range(group.size)
        ]
        self._first, self._last = needs[group.rank]
        self.steps: Sequence[StepMetadata] = [within(step, self._first, self._last) for step in metadata.steps]
        self._owned = [self._overlap(*need, group.rank) for need in needs]  # of mine, what each rank reads
        self._read = [self._overlap(self._first, self._last, owner) for owner in range(group.size)]

    def _overlap(self, first: int, last: int, owner: int) -> tuple[int, int]:
        """Physical rows `[first, last)` that `owner` holds."""
        low, high = max(first, owner * self._share), min(last, (owner + 1) * self._share)
        return low, max(low, high)

    def start(self, k: Array, v: Array) -> Callable[[], list[Array]]:
        """Start the exchange of shards; what is returned waits: rows [last - first, ...]. [C1]"""
        mine = self._group.rank * self._share
        messages = [
            (
                [self._device.as_array(x[low - mine : high - mine]) for low, high in self._local(self._owned)],
                [(high - low, *x.shape[1:]) for low, high in self._read],
            )
            for x in (k, v)
        ]
        pending = self._group.start_exchange(messages)

        def wait() -> list[Array]:
            return [self._joined(parts) for parts in pending()]

        return wait

    def _local(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Spans of no rows moved to where a slice of this rank's shard can begin."""
        mine = self._group.rank * self._share
        return [(low, high) if high > low else (mine, mine) for low, high in spans]

    def _joined(self, parts: list[Array]) -> Array:
        whole = self._device.empty((self._last - self._first, *parts[0].shape[1:]), parts[0].dtype)
        for part, (low, high) in zip(parts, self._read, strict=True):
            if high > low:
                whole[low - self._first : high - self._first] = part
        return whole

    def reduce(self, x: Array) -> Array:
        """The sum over ranks, in rank order, of what each found for this rank's rows. [C2] [N1]"""
        parts = [
            self._device.as_array(x[low - self._first : high - self._first] if high > low else x[:0])
            for low, high in self._read
        ]
        shapes = [(high - low, *x.shape[1:]) for low, high in self._owned]
        (received,) = self._group.start_exchange([(parts, shapes)])()
        total, mine = self._device.zeros((self._share, *x.shape[1:]), x.dtype), self._group.rank * self._share
        for part, (low, high) in zip(received, self._owned, strict=True):
            if high > low:
                total[low - mine : high - mine] += part
        return total


def needed_rows(step: StepMetadata) -> tuple[int, int]:
    """The physical rows `[first, last)` from the start of the first document with queries to the last visible key."""
    asking = np.flatnonzero((step.seqlens_q > 0) & (step.seqlens_kv > 0))
    if len(asking) == 0:
        return 0, 0
    start = step.cu_seqlens_kv_padded[:-1].astype(np.int64)[asking]
    return int(start[0]), int((start + step.seqlens_kv[asking]).max())


def within(step: StepMetadata, first: int, last: int) -> StepMetadata:
    """The step over K and V that hold the rows `[first, last)` alone; documents without queries have no keys."""
    keys = np.where(step.seqlens_q > 0, step.seqlens_kv, 0)
    padded = np.clip(step.cu_seqlens_kv_padded.astype(np.int64), first, max(first, last)) - first
    cu = np.concatenate([[0], np.cumsum(keys)])
    return replace(
        step,
        cu_seqlens_kv=cu.astype(np.int32),
        cu_seqlens_kv_padded=padded.astype(np.int32),
        max_seqlen_kv=int(keys.max(initial=0)),
    )


def _exchange_of(
    group: DeviceCollectives,
    layout: PackedLayout,
    policy: Policy | str,
    mask: AttentionMask,
    metadata: RankMetadata,
    by_need: bool,
    device: Device,
) -> _Gather | _Need:
    if by_need:
        return _Need(group, layout, mask, metadata, device)
    return _Gather(group, layout, policy, metadata, device)


def _sliced(exchange: _Gather | _Need, k: Array, v: Array, heads_q: int, slices: int, device: Device) -> Any:
    """For each slice of heads: the query heads, the K/V heads, and K and V; the next slice is under way meanwhile."""
    size, group = k.shape[1] // slices, heads_q // k.shape[1]
    heads = [slice(i * size, (i + 1) * size) for i in range(slices)]

    def start(heads_kv: slice) -> Callable[[], list[Array]]:
        return exchange.start(_heads(k, heads_kv, device), _heads(v, heads_kv, device))

    pending = start(heads[0])
    for i, heads_kv in enumerate(heads):
        arrived = pending()
        if i + 1 < slices:
            pending = start(heads[i + 1])
        yield slice(heads_kv.start * group, heads_kv.stop * group), heads_kv, arrived


def _heads(x: Array, heads: slice, device: Device) -> Array:
    return x if heads.stop - heads.start == x.shape[1] else device.as_array(x[:, heads])


def _here(x: Array, device: Device) -> Array:
    """What a piece returned; a piece that stands in for a kernel may work with NumPy."""
    return device.to_device(x) if isinstance(x, np.ndarray) else x


def _check_dtype(q: Array) -> None:
    if np.dtype(q.dtype).name not in DTYPES:
        raise SpecError("dtype", f"q has dtype {q.dtype}: the kernels compute in {', '.join(DTYPES)}")


def _check_options(k: Array, policy: Policy | str, head_slices: int, by_need: bool) -> None:
    if head_slices < 1 or k.shape[1] % head_slices:
        raise SpecError("heads", f"head_slices is {head_slices}: expected a divisor of the {k.shape[1]} K/V heads")
    if by_need and not rank_order_is_sequence_order(policy):
        raise SpecError("usage", f"by_need is for packed_contiguous, not {as_policy(policy)}: leave it out")
