"""Attention on a device: `refimpl.attention` by the kernels attention_*.cu.

Defines `attention_forward` and `varlen_attention_forward`, with the signatures of refimpl, and what forward and
backward share: the checks, the arguments of a step, and which build of a kernel takes which head dims.

Inputs are float32, float16 or bfloat16, one dtype for all; `out` has it too, `lse` is float32. Sums are float32. Head
dims up to 256 in steps of 8 have tuned kernels; any other head dim is computed by the plain one, which is slow.

Nothing here waits for a device.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cupy_backend.device import Array, Device, device_of
from cupy_backend.gate import builds
from cupy_backend.host import SOURCES
from cupy_backend.metadata import DeviceStep
from refimpl.attention import check_attention_inputs, step_rows_needed
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import StepMetadata

DTYPES = ("float32", "float16", "bfloat16")
"""What the kernels compute in; names that end the kernels' names."""

PLAIN_THREADS = 128
MULTIPLE = 8
"""Head dims that are a multiple of this have rows of whole 16-byte chunks."""


@dataclass(frozen=True, eq=False)
class StepArguments:
    """The parameters of `THDCP_STEP_PARAMETERS` (attention.cuh) for one call, and the sizes that launches need."""

    offsets: tuple[Array, Array, Array, Array, Array]
    documents: int
    rows_q: int
    rows_k: int
    heads_q: int
    heads_kv: int
    dim_qk: int
    dim_v: int
    left: int
    right: int
    scale: float

    def listed(self) -> list[Any]:
        """In the order of the parameters."""
        sizes = [self.documents, self.rows_q, self.rows_k, self.heads_q, self.heads_kv, self.dim_qk, self.dim_v]
        return [*self.offsets, *sizes, self.left, self.right, self.scale]


def attention_forward(
    q: Any,
    k: Any,
    v: Any,
    layout: PackedLayout,
    mask: AttentionMask,
    softmax_scale: float | None = None,
    *,
    device: Device | None = None,
) -> tuple[Array, Array]:
    """Attention of every row to the visible rows of its own document.

    Args:
        q: [T, Hq, Dqk]. k: [T, Hkv, Dqk]. v: [T, Hkv, Dv].
        device: None: the one that q, k and v lie on.

    Returns:
        out [T, Hq, Dv] in the dtype of q, and lse [Hq, T], float32, on the device.

    Raises:
        SpecError: shape, dtype, heads, softmax_scale, int32_overflow, usage.

    [A1] [A2] [A3] [A4] [A5] [A6] [N3]
    """
    place, (q, k, v) = on_device(device, q, k, v)
    rows = layout.total_tokens
    check_attention_inputs(stand_in(q), stand_in(k), stand_in(v), rows, rows, softmax_scale)
    return varlen_attention_forward(q, k, v, StepMetadata.of_layout(layout), mask, softmax_scale, device=place)


def varlen_attention_forward(
    q: Any,
    k: Any,
    v: Any,
    step: StepMetadata | DeviceStep,
    mask: AttentionMask,
    softmax_scale: float | None = None,
    *,
    device: Device | None = None,
) -> tuple[Array, Array]:
    """Attention of one step's query buffer to gathered K/V.

    Args:
        q: [Tq, Hq, Dqk]. k: [Tk, Hkv, Dqk]. v: [Tk, Hkv, Dv].
        step: offsets on the host, or on the device, which then must fit the tensors: nobody looks at them.

    Returns, Raises: see `attention_forward`.

    [A3] [A4] [A5] [K4] [K5] [R5] [N3]
    """
    place, (q, k, v) = on_device(device, q, k, v)
    arguments = step_arguments(q, k, v, step, mask, softmax_scale, place)
    out = place.empty((*q.shape[:2], v.shape[2]), q.dtype)
    lse = place.empty((q.shape[1], len(q)), np.float32)
    args = [q, k, v, *arguments.listed(), out, lse]
    build = build_for("attention_forward" if q.dtype.itemsize == 2 else "attention_forward_float32", arguments)
    if build is None:
        blocks = -(-arguments.rows_q * arguments.heads_q // PLAIN_THREADS)
        place.launch("attention_plain", f"attention_plain_{q.dtype.name}", blocks, PLAIN_THREADS, args)
        return out, lse
    grid = (tile_slots(arguments.rows_q, arguments.documents, build.macros["TILE_Q"]), arguments.heads_q)
    kernel = f"attention_forward_{q.dtype.name}"
    place.launch(build.source, kernel, grid, _threads(build), args, _shared_bytes(build), build.defines)
    return out, lse


def on_device(device: Device | None, *arrays: Any) -> tuple[Device, tuple[Array, ...]]:
    """Arrays as those of one device, None: of the one they lie on; all of one dtype that the kernels take.

    Raises:
        SpecError: dtype, usage.
    """
    place = device or device_of(*arrays)
    taken = tuple(place.as_array(x) for x in arrays)
    names = [x.dtype.name for x in taken]
    if len(set(names)) > 1 or names[0] not in DTYPES:
        raise SpecError("dtype", f"inputs have dtypes {', '.join(names)}: expected one of {', '.join(DTYPES)} for all")
    return place, taken


def stand_in(x: Array) -> Any:
    """An array of NumPy with the shape and dtype of one of any device, and no memory: what the checks look at."""
    return np.broadcast_to(np.empty((), np.dtype(x.dtype)), x.shape)


def step_arguments(
    q: Array,
    k: Array,
    v: Array,
    step: StepMetadata | DeviceStep,
    mask: AttentionMask,
    softmax_scale: float | None,
    device: Device,
) -> StepArguments:
    """Check tensors of one device against a step and put together what the kernels are told.

    Raises:
        SpecError: shape, dtype, heads, softmax_scale. [A1] [A2] [A8]
    """
    rows_q, rows_k = (0, 0) if isinstance(step, DeviceStep) else step_rows_needed(step)
    scale = check_attention_inputs(stand_in(q), stand_in(k), stand_in(v), rows_q, rows_k, softmax_scale, exact=False)
    if not abs(scale) <= float(np.finfo(np.float32).max):
        raise SpecError("softmax_scale", f"softmax_scale is {scale}: the kernels take what float32 holds")
    if isinstance(step, DeviceStep):
        offsets = (
            step.cu_seqlens_q,
            step.cu_seqlens_q_padded,
            step.cu_seqlens_kv,
            step.cu_seqlens_kv_padded,
            step.first_query,
        )
    else:
        offsets = _offsets(step, device)
    return StepArguments(
        offsets,
        documents=len(offsets[0]) - 1,
        rows_q=len(q),
        rows_k=len(k),
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        dim_qk=q.shape[2],
        dim_v=v.shape[2],
        left=mask.left,
        right=mask.right,
        scale=scale,
    )


def _offsets(step: StepMetadata, device: Device) -> tuple[Array, Array, Array, Array, Array]:
    """The offsets of a step and its first queries, int32 on the device, moved there at once."""
    n = len(step.cu_seqlens_q) - 1
    first_query = step.first_query_positions.astype(np.int32)
    packed = np.concatenate(
        [
            step.cu_seqlens_q,
            step.cu_seqlens_q_padded,
            step.cu_seqlens_kv,
            step.cu_seqlens_kv_padded,
            first_query,
        ]
    )
    moved = device.to_device(packed)
    cu_q, cu_q_padded, cu_kv, cu_kv_padded = (moved[i * (n + 1) : (i + 1) * (n + 1)] for i in range(4))
    return cu_q, cu_q_padded, cu_kv, cu_kv_padded, moved[4 * (n + 1) :]


@dataclass(frozen=True)
class Build:
    """One build of a kernel source, a line `// build:` in it."""

    source: str
    defines: tuple[str, ...]

    @property
    def macros(self) -> dict[str, int]:
        """Their values by name."""
        return {name: int(value) for name, value in (define.split("=") for define in self.defines)}


def build_for(source: str, arguments: StepArguments) -> Build | None:
    """The smallest build of a source that holds the head dims; None when there is none."""
    return _build_for(source, arguments.dim_qk, arguments.dim_v)


@cache
def _build_for(source: str, dim_qk: int, dim_v: int) -> Build | None:
    if dim_qk % MULTIPLE or dim_v % MULTIPLE:
        return None
    found = [Build(source, defines) for defines in builds(SOURCES / f"{source}.cu")]
    fitting = [b for b in found if b.macros["DIM_QK"] >= dim_qk and b.macros["DIM_V"] >= dim_v]
    return min(fitting, key=lambda b: b.macros["DIM_QK"] + b.macros["DIM_V"], default=None)


def tile_slots(rows: int, documents: int, tile: int) -> int:
    """`tile_slots` of attention.cuh: slots of a launch that cuts `rows` rows into tiles."""
    return rows // tile + documents + 1


def _threads(build: Build) -> int:
    return 256 if build.source == "attention_forward_float32" else 128


def _shared_bytes(build: Build) -> int:
    """The dynamic shared memory of a forward kernel; see the head of its source."""
    m = build.macros
    if build.source == "attention_forward_float32":
        padded_qk, padded_p = m["DIM_QK"] + 4, m["TILE_K"] + 4
        floats = (m["TILE_Q"] + m["TILE_K"]) * padded_qk + m["TILE_K"] * m["DIM_V"] + m["TILE_Q"] * padded_p
        return 4 * floats
    return 2 * (m["TILE_Q"] * m["DIM_QK"] + m["STAGES"] * m["TILE_K"] * (m["DIM_QK"] + m["DIM_V"]))
