"""Gradients of attention on a device: `refimpl.attention` by the kernels attention_backward*.cu.

Defines `varlen_attention_backward` and `attention_backward`, with the signatures of refimpl. dq has the dtype of q. dk
and dv of a step are float32, a share to be summed over steps and ranks; `rounded` gives them their dtype, once, at the
end.

No result is added up by more than one thread, so a repeated call gives the same bits. Head dims that have no tuned
kernels are computed by the plain ones. Nothing here waits for a device.
"""

from typing import Any

import numpy as np

from cupy_backend.attention import (
    PLAIN_THREADS,
    Build,
    StepArguments,
    build_for,
    on_device,
    stand_in,
    step_arguments,
    tile_slots,
)
from cupy_backend.device import Array, Device
from cupy_backend.metadata import DeviceStep
from cupy_backend.partition import blocks
from refimpl.attention import check_attention_inputs, check_backward_inputs
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import StepMetadata

Gradients = tuple[Array, Array, Array]


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    layout: PackedLayout,
    mask: AttentionMask,
    softmax_scale: float | None = None,
    *,
    device: Device | None = None,
) -> Gradients:
    """Gradients of `attention_forward`, given its own `out` and `lse`.

    Args:
        dout, out: [T, Hq, Dv] in the dtype of q. lse: [Hq, T]. The others as in the forward.

    Returns:
        dq, dk, dv in the shapes and dtype of q, k, v, on the device.

    Raises:
        SpecError: shape, dtype, heads, softmax_scale, int32_overflow, usage.

    [B1] [B2] [B3] [B4] [N1] [N3]
    """
    place, (q, k, v) = on_device(device, q, k, v)
    rows = layout.total_tokens
    check_attention_inputs(stand_in(q), stand_in(k), stand_in(v), rows, rows, softmax_scale)
    step = StepMetadata.of_layout(layout)
    dq, dk, dv = varlen_attention_backward(dout, q, k, v, out, lse, step, mask, softmax_scale, device=place)
    return dq, rounded(dk, k.dtype, place), rounded(dv, v.dtype, place)


def varlen_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    step: StepMetadata | DeviceStep,
    mask: AttentionMask,
    softmax_scale: float | None = None,
    *,
    device: Device | None = None,
) -> Gradients:
    """Gradients of `varlen_attention_forward`.

    Returns:
        dq in the dtype of q; dk and dv, this step's share, float32.

    Raises: see `attention_backward`.

    [B1] [B2] [B3] [B4] [N1] [N3]
    """
    place, (q, k, v, dout, out) = on_device(device, q, k, v, dout, out)
    lse = place.as_array(lse)
    arguments = step_arguments(q, k, v, step, mask, softmax_scale, place)
    check_backward_inputs(*(stand_in(x) for x in (dout, q, v, out, lse)))
    lse = place.as_array(lse.astype(np.float32, copy=False))
    delta = place.empty((q.shape[1], len(q)), np.float32)
    results = [place.empty(q.shape, q.dtype), place.empty(k.shape, np.float32), place.empty(v.shape, np.float32)]
    tensors = [dout, q, k, v, lse, delta]
    build = build_for("attention_backward" if q.dtype.itemsize == 2 else "attention_backward_float32", arguments)
    if build is None:
        _launch_plain(tensors, out, results, arguments, place)
    else:
        _launch_tuned(build, tensors, out, results, arguments, place)
    dq, dk, dv = results
    return dq, dk, dv


def rounded(x: Array, dtype: Any, device: Device) -> Array:
    """A float32 sum in the dtype of its tensor, rounded to nearest, ties to even. [N1]"""
    dtype = np.dtype(dtype)
    if dtype == np.float32:
        return x
    result = device.empty(x.shape, dtype)
    device.launch("cast", f"cast_{dtype.name}", blocks(x.size, 1024), 256, [x, x.size, result])
    return result


def _launch_plain(
    tensors: list[Array], out: Array, results: list[Array], arguments: StepArguments, device: Device
) -> None:
    dout, delta, listed = tensors[0], tensors[-1], arguments.listed()
    queries, keys = arguments.rows_q * arguments.heads_q, arguments.rows_k * arguments.heads_kv

    def launch(kernel: str, count: int, args: list[Any]) -> None:
        name = f"{kernel}_plain_{dout.dtype.name}"
        device.launch("attention_backward_plain", name, blocks(count, PLAIN_THREADS), PLAIN_THREADS, args)

    launch("delta", queries, [dout, out, *listed, delta])
    launch("dq", queries, [*tensors, *listed, results[0]])
    launch("dk_dv", keys, [*tensors, *listed, *results[1:]])


def _launch_tuned(
    build: Build, tensors: list[Array], out: Array, results: list[Array], arguments: StepArguments, device: Device
) -> None:
    dout, delta, listed = tensors[0], tensors[-1], arguments.listed()
    macros, is_float32 = build.macros, dout.dtype.itemsize == 4
    own_q, own_k, split = (32, 32, 1) if is_float32 else (macros[name] for name in ("OWN_Q", "OWN_K", "SPLIT"))
    threads = 256 if is_float32 else 128
    for_dq, for_dk_dv = _shared_bytes(macros, is_float32)

    def launch(kernel: str, grid: Any, block: int, args: list[Any], shared_bytes: int = 0) -> None:
        name = f"{kernel}_{dout.dtype.name}"
        device.launch(build.source, name, grid, block, args, shared_bytes, build.defines)

    a = arguments
    launch("delta", blocks(a.rows_q * a.heads_q, threads // 8), threads, [dout, out, *listed, delta])
    grid = (tile_slots(a.rows_q, a.documents, own_q), a.heads_q)
    launch("dq", grid, threads, [*tensors, *listed, results[0]], for_dq)
    grid = (tile_slots(a.rows_k, a.documents, own_k), a.heads_kv)
    launch("dk_dv", grid, threads * split, [*tensors, *listed, *results[1:]], for_dk_dv)


def _shared_bytes(macros: dict[str, int], is_float32: bool) -> tuple[int, int]:
    """The dynamic shared memory of dq, and of dk_dv; see the heads of their sources."""
    dims = macros["DIM_QK"] + macros["DIM_V"]
    if is_float32:
        return 256 * (dims + 8) + 4608, 256 * (dims + 8) + 9216
    for_dq = 2 * (macros["OWN_Q"] + 2 * macros["WALK_K"]) * dims
    return for_dq, 2 * (macros["OWN_K"] + 2 * macros["WALK_Q"]) * dims + 16 * macros["WALK_Q"]
