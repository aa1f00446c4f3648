"""Faults to inject into one rank, so that a check can show that it fails when it should.

Defines `FAULTS` and `inject`. Each is modelled on a fault that real frameworks have shipped; the full catalogue belongs
to the conformance kit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.collectives import Collectives
from refimpl.context_parallel import Parts
from refimpl.errors import SpecError
from refimpl.metadata import RankMetadata, StepMetadata

Array = NDArray[Any]

FAULTS = {
    "wrong-alignment": "one rank aligns causal attention to the top left of its queries and keys",
    "skipped-reduce": "one rank keeps its own contribution to dK and dV and adds nobody else's",
    "all-zeros": "every rank returns zeros, so that comparing ranks with each other finds nothing",
    "leaked-document": "one rank lets each of its documents see the document before",
    "swapped-chunks": "one rank takes its own gathered K and V and the next rank's for each other",
}


def check_fault(fault: str | None, size: int) -> None:
    """Refuse, with SpecError `usage`, a fault that there is not, or that is none on a single rank; None is no fault."""
    if fault is not None and fault not in FAULTS:
        raise SpecError("usage", f"unknown fault {fault!r}: expected one of {', '.join(FAULTS)}")
    if size == 1 and fault in ("skipped-reduce", "swapped-chunks"):
        raise SpecError("usage", f"{fault} is no fault on a single rank: use two or more")


def inject(fault: str, rank: int, group: Collectives, parts: Parts) -> tuple[Collectives, Parts]:
    """The group and the parts that this rank works with when `fault` strikes on rank `rank`.

    Raises:
        SpecError: usage, see `check_fault`.
    """
    check_fault(fault, group.size)
    if fault == "all-zeros":
        return group, replace(parts, varlen_attention_forward=_zero_forward, varlen_attention_backward=_zero_backward)
    if group.rank != rank:
        return group, parts
    match fault:
        case "wrong-alignment":
            return group, replace(parts, rank_metadata=_with_steps(parts, _top_left))
        case "leaked-document":
            return group, replace(parts, rank_metadata=_with_steps(parts, _seeing_the_document_before))
        case "skipped-reduce":
            return _SkippedReduce(group), parts
        case _:
            return _SwappedChunks(group), parts


def _with_steps(parts: Parts, change: Any) -> Any:
    def changed(*args: Any) -> RankMetadata:
        meta = parts.rank_metadata(*args)
        return replace(meta, steps=tuple(change(step) for step in meta.steps))

    return changed


def _top_left(step: StepMetadata) -> StepMetadata:
    return replace(step, first_query=np.zeros(len(step.cu_seqlens_q) - 1, np.int32))


def _seeing_the_document_before(step: StepMetadata) -> StepMetadata:
    """Every document's keys begin where those of the document before do; bottom right keeps the queries in place."""
    kv_start = step.cu_seqlens_kv_padded.copy()
    kv_start[1:-1] = step.cu_seqlens_kv_padded[:-2]
    lengths = step.seqlens_kv + (step.cu_seqlens_kv_padded[:-1] - kv_start[:-1])
    lengths[step.seqlens_kv == 0] = 0
    first_query = step.first_query_positions + (lengths - step.seqlens_kv)
    return replace(
        step,
        cu_seqlens_kv=np.append(0, np.cumsum(lengths)).astype(np.int32),
        cu_seqlens_kv_padded=kv_start,
        first_query=first_query.astype(np.int32),
    )


def _zero_forward(q: Array, k: Array, v: Array, *_: Any) -> tuple[Array, Array]:
    return np.zeros((*q.shape[:2], v.shape[2])), np.zeros((q.shape[1], len(q)))


def _zero_backward(dout: Array, q: Array, k: Array, v: Array, *_: Any) -> tuple[Array, Array, Array]:
    return np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)


@dataclass
class _Wrapped:
    """A group that does what the one inside does, but for what a subclass gets wrong."""

    group: Collectives

    def __post_init__(self) -> None:
        self.rank, self.size = self.group.rank, self.group.size

    def all_gather(self, x: Array) -> Array:
        return self.group.all_gather(x)

    def reduce_scatter_sum(self, x: Array) -> Array:
        return self.group.reduce_scatter_sum(x)

    def all_agree(self, facts: Mapping[str, str], error: SpecError | None = None) -> None:
        self.group.all_agree(facts, error)


class _SkippedReduce(_Wrapped):
    def reduce_scatter_sum(self, x: Array) -> Array:
        self.group.reduce_scatter_sum(x)  # takes part, so that the others do not wait
        own: Array = x[self.rank]
        return own


class _SwappedChunks(_Wrapped):
    def all_gather(self, x: Array) -> Array:
        gathered = self.group.all_gather(x)
        pair = [self.rank, (self.rank + 1) % self.size]
        gathered[pair] = gathered[pair[::-1]]
        return gathered
