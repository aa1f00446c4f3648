"""The public interface of refimpl as an adapter: `thdcp check --adapter refimpl.conformance.adapters.reference:run`.

Defines `run` and `DECLARATION`, in float64, and `answer`, the same in any dtype. Alone, this process answers for all
ranks of a case; under an MPI launcher every process answers for its own rank, and they exchange K, V and gradients.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl import attention, tiled
from refimpl.collectives import MpiCollectives, launched
from refimpl.conformance.cases import Case
from refimpl.conformance.strides import all_with_strides
from refimpl.context_parallel import context_parallel_backward, context_parallel_forward, run_context_parallel
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.lse import merge_partials
from refimpl.metadata import RankMetadata, StepMetadata, rank_metadata
from refimpl.partition import next_token_labels, partition, partition_indices, position_ids, unpartition
from refimpl.tolerance import as_dtype

Array = NDArray[Any]

DECLARATION = {"name": "thdcp reference", "dtype": "float64", "lacks": []}

OFFSETS = ("cu_seqlens_q", "cu_seqlens_q_padded", "cu_seqlens_kv", "cu_seqlens_kv_padded")


def run(case: Case) -> dict[str, Array]:
    """The answer in float64."""
    return answer(case, "float64")


def answer(case: Case, dtype: str) -> dict[str, Array]:
    """The answer of an implementation that computes in `dtype`.

    Raises:
        SpecError: whatever refimpl refuses.
    """
    cast = {name: x.astype(as_dtype(dtype)) for name, x in case.tensors.items()}
    tensors = all_with_strides(cast, case.inputs.get("strides", {}))  # a cast lays arrays out anew
    scale = case.inputs.get("softmax_scale")
    match case.operation:
        case "refuse":
            return _refuse(case)
        case "merge":
            parts = [[tensors[f"{name}.{p}"] for p in range(len(tensors) // 2)] for name in ("out", "lse")]
            return dict(zip(("out", "lse"), merge_partials(*parts), strict=True))
        case "positions":
            return {"positions": position_ids(case.layout), "document_ids": case.layout.document_ids}
        case "labels":
            return {"labels": next_token_labels(np.asarray(case.inputs["ids"]), case.layout)}
        case "from_position_ids":
            return _layout_offsets(PackedLayout.from_position_ids(case.inputs["ids"]))
        case "from_segment_ids":
            return _layout_offsets(PackedLayout.from_segment_ids(case.inputs["ids"], case.inputs["padding_id"]))
        case "mask":
            ids, positions = case.layout.document_ids, case.layout.positions
            return {"visible": case.mask.visible(ids, positions, ids, positions)}
        case "step_mask":
            return {"visible": _step_mask(case)}
        case "unpartition":
            shards = [tensors[f"x.{r}"] for r in range(case.cp_size)]
            return {"x": unpartition(shards, case.layout, case.policy)}
        case "partition":
            return {
                f"indices.{r}": partition_indices(case.layout, case.policy, case.cp_size, r) for r in _own_ranks(case)
            }
        case "metadata":
            return {name: x for r in _own_ranks(case) for name, x in _offsets(r, _metadata(case, r)).items()}
        case "needed_rows":
            return {f"kv_rows.{r}": _rows_of(_metadata(case, r).kv_ranges) for r in _own_ranks(case)}
        case "step_attention_forward" | "step_attention_backward":
            return _step(case, tensors, scale)
        case "attention_forward" | "attention_backward":
            return _whole(case, tensors, scale)
        case "context_parallel_forward" | "context_parallel_backward":
            return _context_parallel(case, tensors, scale)
        case other:
            raise SpecError("usage", f"case {case.id}: unknown operation {other!r}")


@cache
def _group() -> MpiCollectives | None:
    """This process's rank of the launcher's group; made in the first case that all ranks are asked together."""
    return MpiCollectives() if launched() is not None else None


def _own_ranks(case: Case) -> range:
    """The ranks that this process answers for."""
    told = launched()
    return range(case.cp_size) if told is None else range(told[0], told[0] + 1)


def _metadata(case: Case, rank: int) -> RankMetadata:
    return rank_metadata(case.layout, case.policy, case.cp_size, rank, case.mask)


def _offsets(rank: int, metadata: RankMetadata) -> dict[str, Array]:
    return {
        f"{name}.{rank}.{s}": np.asarray(getattr(step, name))
        for s, step in enumerate(metadata.steps)
        for name in (*OFFSETS, "max_seqlen_q", "max_seqlen_kv")
    }


def _layout_offsets(layout: PackedLayout) -> dict[str, Array]:
    return {name: np.asarray(getattr(layout, name)) for name in ("cu_seqlens", "cu_seqlens_padded", "total_tokens")}


def _rows_of(ranges: Array) -> Array:
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(first, last) for first, last in ranges)])


def _step_mask(case: Case) -> Array:
    """Who sees whom, by attending with equal scores to values that are one key each."""
    rows_q, rows_kv = (case.inputs[f"cu_seqlens_{x}_padded"][-1] for x in ("q", "kv"))
    q, k, v = np.zeros((rows_q, 1, 1)), np.zeros((rows_kv, 1, 1)), np.eye(rows_kv)[:, None]
    out, _ = attention.varlen_attention_forward(q, k, v, _step_metadata(case), case.mask)
    return np.asarray(out[:, 0] > 0)


def _step_metadata(case: Case) -> StepMetadata:
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return StepMetadata.from_offsets(*(case.inputs[name] for name in names))


def _step(case: Case, tensors: dict[str, Array], scale: float | None) -> dict[str, Array]:
    """One step's out and lse, or gradients: by the oracle in float64, else by `tiled`."""
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    by, step = attention if q.dtype == np.float64 else tiled, _step_metadata(case)
    out, lse = by.varlen_attention_forward(q, k, v, step, case.mask, scale)
    out = out.astype(q.dtype)
    if case.operation == "step_attention_forward":
        return {"out": out, "lse": lse}
    gradients = by.varlen_attention_backward(tensors["dout"], q, k, v, out, lse, step, case.mask, scale)
    return {name: x.astype(q.dtype) for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)}


def _whole(case: Case, tensors: dict[str, Array], scale: float | None) -> dict[str, Array]:
    """out and lse, or the gradients, by the oracle in float64, else by what computes in the dtype of its inputs."""
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    by = attention if q.dtype == np.float64 else tiled
    out, lse = by.attention_forward(q, k, v, case.layout, case.mask, scale)
    out = out.astype(q.dtype)
    if case.operation == "attention_forward":
        return {"out": out, "lse": lse}
    gradients = by.attention_backward(tensors["dout"], q, k, v, out, lse, case.layout, case.mask, scale)
    return {name: x.astype(q.dtype) for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)}


def _context_parallel(case: Case, tensors: dict[str, Array], scale: float | None) -> dict[str, Array]:
    """out and lse, or the gradients, of the ranks that this process answers for."""
    backward = case.operation == "context_parallel_backward"
    names = ("dq", "dk", "dv") if backward else ("out", "lse")
    group = _group()
    if group is None:
        q, k, v, dout = (tensors.get(name) for name in ("q", "k", "v", "dout"))
        results = run_context_parallel(q, k, v, dout, case.layout, case.policy, case.cp_size, case.mask, scale)
        return {f"{name}.{r}": getattr(result, name) for r, result in enumerate(results) for name in names}
    own = {name: partition(x, case.layout, case.policy, case.cp_size)[group.rank] for name, x in tensors.items()}
    out, lse, saved = context_parallel_forward(
        own["q"], own["k"], own["v"], case.layout, case.policy, group, case.mask, scale
    )
    arrays = context_parallel_backward(own["dout"], saved, group) if backward else (out, lse)
    return {f"{name}.{group.rank}": array for name, array in zip(names, arrays, strict=True)}


def _refuse(case: Case) -> dict[str, Array]:
    """Make the call that must be refused; returning from it is the wrong answer."""
    inputs = case.inputs
    match inputs["call"]:
        case "from_position_ids":
            PackedLayout.from_position_ids(inputs["ids"])
            return {}
        case "from_segment_ids":
            PackedLayout.from_segment_ids(inputs["ids"], inputs["padding_id"])
            return {}
    layout = PackedLayout(inputs["cu_seqlens"], inputs.get("cu_seqlens_padded"), inputs.get("total_tokens"))
    match inputs["call"]:
        case "attention":
            q, k, v = (np.zeros(inputs["shapes"][name], inputs["dtypes"][name]) for name in ("q", "k", "v"))
            attention.attention_forward(q, k, v, layout, case.mask, inputs["softmax_scale"])
        case "layout":
            pass
        case "partition":
            partition_indices(layout, inputs["policy"], inputs["cp_size"], inputs.get("cp_rank", 0))
        case "metadata":
            rank_metadata(layout, inputs["policy"], inputs["cp_size"], inputs.get("cp_rank", 0), case.mask)
        case other:
            raise SpecError("usage", f"case {case.id}: unknown call {other!r}")
    return {}
