"""The backend as an adapter of the conformance kit: `thdcp check --adapter cupy_backend.adapter:run`.

Defines `run` and `DECLARATION`: the kernels, run on the CPU, in float32; and `answer`, the same on any device and in
any dtype that kernels have. This process answers for all ranks of a case, which are threads of it. Layouts are read,
and refused, by refimpl: the backend rests on its `PackedLayout`, and has no other.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_backend import metadata, partition
from cupy_backend.attention import attention_forward, varlen_attention_forward
from cupy_backend.attention_backward import attention_backward
from cupy_backend.collectives import HostStaged
from cupy_backend.context_parallel import context_parallel_backward, context_parallel_forward, kernels
from cupy_backend.device import Device, HostDevice
from refimpl.collectives import Collectives, run_ranks
from refimpl.conformance.adapters import Skip, reference
from refimpl.conformance.cases import Case
from refimpl.conformance.strides import all_with_strides
from refimpl.context_parallel import Parts
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.metadata import RankMetadata, StepMetadata
from refimpl.partition import partition as cut
from refimpl.tolerance import as_dtype

Array = NDArray[Any]

DECLARATION = {"name": "thdcp CUDA kernels on the CPU", "dtype": "float32", "lacks": ["merge"]}

DEVICE = HostDevice(os_threads=1)


def run(case: Case) -> dict[str, Array]:
    """The answer of the kernels in float32."""
    return answer(case, "float32", DEVICE)


def answer(case: Case, dtype: str, device: Device) -> dict[str, Array]:
    """The answer of the kernels on a device.

    Raises:
        SpecError: whatever the backend refuses.
        Skip: for what it has no kernel for.
    """
    cast = {name: x.astype(as_dtype(dtype)) for name, x in case.tensors.items()}
    tensors = all_with_strides(cast, case.inputs.get("strides", {}))  # a cast lays arrays out anew
    if case.operation.startswith("context_parallel"):
        return _context_parallel(case, tensors, device)
    moved = {name: device.to_device(x) for name, x in tensors.items()}
    return {name: device.to_host(x) for name, x in _answer(case, moved, device).items()}


def _answer(case: Case, tensors: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """Arrays of the device, or of the host where the answer is integers."""
    match case.operation:
        case "from_position_ids" | "from_segment_ids":
            return reference.run(case)
        case "refuse":
            return _refuse(case, device)
        case "merge":
            raise Skip("merge")
        case "positions":
            ids = metadata.document_ids(case.layout, device), metadata.position_ids(case.layout, device)
            return dict(zip(("document_ids", "positions"), ids, strict=True))
        case "labels":
            ids = device.to_device(np.asarray(case.inputs["ids"]))
            return {"labels": metadata.next_token_labels(ids, case.layout, device=device)}
        case "mask":
            return {"visible": _visible(StepMetadata.of_layout(case.layout), case, case.layout.total_tokens, device)}
        case "step_mask":
            names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
            step = StepMetadata.from_offsets(*(case.inputs[name] for name in names))
            return {"visible": _visible(step, case, int(step.cu_seqlens_kv_padded[-1]), device)}
        case "unpartition":
            shards = [tensors[f"x.{r}"] for r in range(case.cp_size)]
            return {"x": partition.unpartition(shards, case.layout, case.policy, device=device)}
        case "partition":
            arguments = case.layout, case.policy, case.cp_size
            return {
                f"indices.{r}": partition.partition_indices(*arguments, r, device=device) for r in range(case.cp_size)
            }
        case "metadata":
            return {
                f"{name}.{r}.{s}": np.asarray(getattr(step, name))
                for r in range(case.cp_size)
                for s, step in enumerate(_metadata(case, r, device).steps)
                for name in (*reference.OFFSETS, "max_seqlen_q", "max_seqlen_kv")
            }
        case "needed_rows":
            return {f"kv_rows.{r}": _rows_of(_metadata(case, r, device).kv_ranges) for r in range(case.cp_size)}
        case "attention_forward" | "attention_backward":
            return _whole(case, tensors, device)
        case other:
            raise SpecError("usage", f"case {case.id}: unknown operation {other!r}")


def _metadata(case: Case, rank: int, device: Device) -> RankMetadata:
    return metadata.rank_metadata(case.layout, case.policy, case.cp_size, rank, case.mask, device)


def _rows_of(ranges: Array) -> Array:
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(first, last) for first, last in ranges)])


def _visible(step: StepMetadata, case: Case, rows_kv: int, device: Device) -> Any:
    """Who sees whom, by attending with equal scores to values that are one key each."""
    rows_q = max(int(step.cu_seqlens_q_padded[-1]), rows_kv if case.operation == "mask" else 0)
    if rows_kv == 0:
        return np.zeros((rows_q, 0), bool)
    shapes = (rows_q, 1, 1), (rows_kv, 1, 1)
    q, k = (device.zeros(shape, np.float32) for shape in shapes)
    v = device.to_device(np.eye(rows_kv, dtype=np.float32)[:, None])
    out, _ = varlen_attention_forward(q, k, v, step, case.mask, device=device)
    return out[:, 0] > 0


def _whole(case: Case, tensors: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """out and lse, or the gradients, of a whole buffer."""
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    rest = case.layout, case.mask, case.inputs.get("softmax_scale")
    out, lse = attention_forward(q, k, v, *rest, device=device)
    if case.operation == "attention_forward":
        return {"out": out, "lse": lse}
    gradients = attention_backward(tensors["dout"], q, k, v, out, lse, *rest, device=device)
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def _context_parallel(case: Case, tensors: Mapping[str, Array], device: Device) -> dict[str, Array]:
    """out and lse, or the gradients, of all ranks."""
    backward = case.operation == "context_parallel_backward"
    own = {name: cut(x, case.layout, case.policy, case.cp_size) for name, x in tensors.items()}
    parts = kernels(device)
    parts = Parts(
        partial(metadata.rank_metadata, device=device), parts.varlen_attention_forward, parts.varlen_attention_backward
    )

    def rank(group: Collectives) -> list[Array]:
        carrier = HostStaged(group, device)
        shards = {name: device.to_device(x[group.rank]) for name, x in own.items()}
        q, k, v = (shards[name] for name in ("q", "k", "v"))
        out, lse, saved = context_parallel_forward(
            q,
            k,
            v,
            case.layout,
            case.policy,
            carrier,
            case.mask,
            case.inputs.get("softmax_scale"),
            parts,
            device=device,
        )
        arrays = context_parallel_backward(shards["dout"], saved, carrier, parts) if backward else (out, lse)
        return [device.to_host(x) for x in arrays]

    names = ("dq", "dk", "dv") if backward else ("out", "lse")
    results = run_ranks(case.cp_size, rank)
    return {f"{name}.{r}": x for r, arrays in enumerate(results) for name, x in zip(names, arrays, strict=True)}


def _refuse(case: Case, device: Device) -> dict[str, Any]:
    """Make the call that must be refused; returning from it is the wrong answer."""
    inputs = case.inputs
    if inputs["call"] in ("layout", "from_position_ids", "from_segment_ids"):
        return reference.run(case)
    layout = PackedLayout(inputs["cu_seqlens"], inputs.get("cu_seqlens_padded"), inputs.get("total_tokens"))
    match inputs["call"]:
        case "attention":
            q, k, v = (device.zeros(inputs["shapes"][name], inputs["dtypes"][name]) for name in ("q", "k", "v"))
            attention_forward(q, k, v, layout, case.mask, inputs["softmax_scale"], device=device)
        case "partition":
            arguments = layout, inputs["policy"], inputs["cp_size"], inputs.get("cp_rank", 0)
            partition.partition_indices(*arguments, device=device)
        case "metadata":
            arguments = layout, inputs["policy"], inputs["cp_size"], inputs.get("cp_rank", 0)
            metadata.rank_metadata(*arguments, case.mask, device=device)
        case other:
            raise SpecError("usage", f"case {case.id}: unknown call {other!r}")
    return {}
