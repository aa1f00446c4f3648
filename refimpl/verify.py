"""The check behind `thdcp verify`: every policy against the oracle, forward and backward, on every rank.

Defines `Plan`, `Case`, `CaseResult`; `Backend`, what is held to the oracle; and `verify_rank`, which runs on each rank
of any group.

The ranks never compare themselves with each other. The oracle attends over the documents packed without any padding, on
one device; the ranks get the same tokens spread by a padding pattern, with NaN in every padding row. The oracle's work
is shared: each rank computes it for some of the documents.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl import tiled
from refimpl.attention import attention_backward, attention_forward
from refimpl.collectives import Collectives
from refimpl.context_parallel import Parts, context_parallel_backward, context_parallel_forward
from refimpl.cost import balance, kv_bytes, rank_cost
from refimpl.faults import inject
from refimpl.layout import IntArray, PackedLayout, offsets_of
from refimpl.mask import AttentionMask
from refimpl.partition import Policy, pad_rows, padded_for, partition_indices
from refimpl.tolerance import OUTPUTS, Tolerance, as_dtype, largest_error, largest_finite, plain_attention

Array = NDArray[Any]
PADDINGS = ("tight", "spread")
"""tight: the least that the policy needs. spread: gaps of random size behind documents, empty documents first, in the
middle and last, a repeated tail of offsets, and capacity past the last offset."""


@dataclass(frozen=True)
class Plan:
    """What to verify: the product of policies, masks, heads, paddings and dtypes over one list of documents.

    `heads` are pairs (query heads, K/V heads). K and Q have `head_dim` columns; V has as many, but half of them with
    grouped heads, so that Dv != Dqk is covered.
    """

    lengths: tuple[int, ...]
    policies: tuple[Policy, ...]
    masks: tuple[AttentionMask, ...]
    heads: tuple[tuple[int, int], ...]
    head_dim: int
    dtypes: tuple[str, ...]
    paddings: tuple[str, ...] = PADDINGS
    seed: int = 0
    fault: str | None = None
    fault_rank: int = 0
    backend: str = "reference"

    @property
    def num_cases(self) -> int:
        """Cases in the plan."""
        axes = (self.policies, self.masks, self.heads, self.paddings, self.dtypes)
        return int(np.prod([len(axis) for axis in axes]))


@dataclass(frozen=True)
class Case:
    """One combination of a plan."""

    policy: Policy
    mask: AttentionMask
    heads: tuple[int, int]
    padding: str
    dtype: str


@dataclass(frozen=True)
class CaseResult:
    """What all ranks together found: largest errors and what they may be, by output; costs; the verdict.

    `poisoned` counts rows of padding that hold anything but 0 (-inf in lse); `first_wrong` says where the largest
    excess lies.
    """

    case: Case
    errors: dict[str, float]
    bounds: dict[str, float]
    poisoned: int
    rows: int
    steps: int
    kv_bytes_gathered: int
    kv_bytes_needed: int
    balance: float
    first_wrong: str = field(default="")

    @property
    def agrees(self) -> bool:
        """Whether every output of every rank lies within its bound and all padding is clean."""
        return self.poisoned == 0 and all(self.errors[name] <= self.bounds[name] for name in OUTPUTS)


@dataclass(frozen=True)
class Expected:
    """The oracle's results for the packed documents, and the errors of plain low precision against them."""

    inputs: dict[str, Array]
    results: dict[str, Array]
    yardsticks: dict[str, dict[str, float]]


def one_thread_parts() -> Parts:
    """The reference with one thread: ranks that share a machine are parallel enough."""
    return Parts(
        varlen_attention_forward=partial(tiled.varlen_attention_forward, workers=1),
        varlen_attention_backward=partial(tiled.varlen_attention_backward, workers=1),
    )


@dataclass(frozen=True)
class Backend:
    """An implementation of context parallelism: the calls of `refimpl.context_parallel`, and where their arrays lie.

    `forward` and `backward` take and return arrays of the backend; `parts` are the pieces that a fault may replace.
    `group` turns a group of ranks into the one that carries tensors, on every rank and before all other calls; it is
    told whether a fault sits in the group of some rank. `note` is a line for people.
    """

    name: str = "reference"
    forward: Callable[..., tuple[Any, Any, Any]] = context_parallel_forward
    backward: Callable[..., tuple[Any, Any, Any]] = context_parallel_backward
    parts: Parts = field(default_factory=one_thread_parts)
    from_host: Callable[[Array], Any] = lambda x: x
    to_host: Callable[[Any], Array] = lambda x: x
    group: Callable[[Collectives, bool], Any] = lambda group, faulty: group
    note: str = ""


def verify_rank(
    group: Collectives,
    plan: Plan,
    parts: Parts | None = None,
    on_result: Callable[[CaseResult], None] = lambda _: None,
    backend: Backend | None = None,
) -> list[CaseResult]:
    """Run a plan as one rank of `group`; every rank returns the same results.

    Args:
        parts: in place of the backend's own.
        on_result: called after each case.
        backend: what is held to the oracle; None: the reference, with one thread a rank.

    Raises:
        SpecError: whatever the plan's layouts, heads or dtypes are refused for, on all ranks.

    [C5] [N2] [A5]
    """
    backend = backend or Backend()
    implementation = backend.parts if parts is None else parts
    group_used = group
    if plan.fault is not None:
        group_used, implementation = inject(plan.fault, plan.fault_rank, group, implementation)
    tensors_by = backend.group(group_used, plan.fault is not None)
    documents = PackedLayout.from_lengths(plan.lengths)
    results = []
    for mask in plan.masks:
        for heads in plan.heads:
            expected = expected_results(group, plan, documents, mask, heads)
            for case in _cases(plan, mask, heads):
                result = run_case(group, tensors_by, backend, implementation, plan, documents, case, expected)
                results.append(result)
                on_result(result)
    return results


def _cases(plan: Plan, mask: AttentionMask, heads: tuple[int, int]) -> Iterator[Case]:
    for dtype in plan.dtypes:
        for padding in plan.paddings:
            for policy in plan.policies:
                yield Case(policy, mask, heads, padding, dtype)


def spread_layout(lengths: tuple[int, ...], multiple: int, seed: int) -> PackedLayout:
    """The same documents under the padding pattern "spread", every extent a multiple of `multiple`."""
    rng = np.random.default_rng(seed)
    real = np.array([0, *lengths, 0, 0])
    gaps = rng.integers(0, 3, len(real)) * multiple
    physical = -(-real // multiple) * multiple + np.where(real > 0, gaps, 0)
    physical[0] = multiple  # a document of no tokens that owns rows
    return PackedLayout(offsets_of(real), offsets_of(physical), int(physical.sum()) + 2 * multiple)


def case_layout(plan: Plan, case: Case, documents: PackedLayout, cp_size: int) -> PackedLayout:
    """Where the tokens of the plan's documents lie in this case."""
    if case.padding == "tight":
        return padded_for(documents, case.policy, cp_size)
    return spread_layout(plan.lengths, 2 * cp_size, plan.seed)


def expected_results(
    group: Collectives, plan: Plan, documents: PackedLayout, mask: AttentionMask, heads: tuple[int, int]
) -> Expected:
    """Draw inputs and compute what all cases of this mask and these heads are held to.

    Inputs are standard normal, rounded to multiples of 1/32 in [-4, 4): exact in every dtype, so that one oracle
    serves all. Each rank works on its share of the documents; the others are documents of length zero to it.
    """
    q_heads, kv_heads = heads
    dim_v = plan.head_dim if q_heads == kv_heads else max(1, plan.head_dim // 2)
    rng = np.random.default_rng(plan.seed)
    shapes = {
        "q": (q_heads, plan.head_dim),
        "k": (kv_heads, plan.head_dim),
        "v": (kv_heads, dim_v),
        "dout": (q_heads, dim_v),
    }
    inputs = {
        name: np.clip(np.round(rng.standard_normal((documents.total_tokens, *shape)) * 32) / 32, -4, 3.96875)
        for name, shape in shapes.items()
    }
    mine = PackedLayout(
        offsets_of(np.where(_share(documents.seqlens, group.size) == group.rank, documents.seqlens, 0)),
        documents.cu_seqlens_padded,
    )
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    out, lse = attention_forward(q, k, v, mine, mask)
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, mine, mask)
    local = dict(zip(OUTPUTS, (out, lse, dq, dk, dv), strict=True))
    yardsticks = {
        name: _yardstick(group, local, inputs, mine, mask, as_dtype(name)) for name in plan.dtypes if name != "float64"
    }
    results = {
        name: group.all_gather(x).max(axis=0) if name == "lse" else group.all_gather(x).sum(axis=0)
        for name, x in local.items()
    }
    return Expected(inputs, results, yardsticks)


def _share(lengths: IntArray, size: int) -> IntArray:
    """Which rank computes the oracle for each document: the longest go first, to the rank with the least work."""
    work, owner = np.zeros(size), np.zeros(len(lengths), np.int64)
    for d in np.argsort(-lengths, kind="stable"):
        owner[d] = int(work.argmin())
        work[owner[d]] += float(lengths[d]) ** 2
    return owner


def _yardstick(
    group: Collectives,
    oracle: dict[str, Array],
    inputs: dict[str, Array],
    mine: PackedLayout,
    mask: AttentionMask,
    dtype: np.dtype[Any],
) -> dict[str, float]:
    """The largest error, over all ranks, of plain attention in `dtype` against the oracle, by output."""
    q, k, v, dout = (inputs[name].astype(dtype) for name in ("q", "k", "v", "dout"))
    plain = plain_attention(q, k, v, dout, mine, mask, 1 / float(np.sqrt(q.shape[2])))
    errors = np.array([largest_error(plain[name], oracle[name]) for name in OUTPUTS])
    return dict(zip(OUTPUTS, group.all_gather(errors).max(axis=0).tolist(), strict=True))


def run_case(
    group: Collectives,
    tensors_by: Any,
    backend: Backend,
    parts: Parts,
    plan: Plan,
    documents: PackedLayout,
    case: Case,
    expected: Expected,
) -> CaseResult:
    """Run one case on this rank and put together what all ranks found.

    `group` carries the verdicts; `tensors_by`, which may be at fault, is what the implementation works with.
    """
    layout = case_layout(plan, case, documents, group.size)
    dtype = as_dtype(case.dtype)
    rows = partition_indices(layout, case.policy, group.size, group.rank)
    source = pad_rows(np.arange(documents.total_tokens), documents, layout, -1)[rows]
    is_padding = source < 0

    def local(whole: Array, fill: float) -> Array:
        """This rank's rows of an array over the packed documents; padding rows hold `fill`."""
        mine: Array = whole[np.maximum(source, 0)]
        mine[is_padding] = fill
        return mine

    q, k, v, dout = (local(expected.inputs[name], np.nan).astype(dtype) for name in ("q", "k", "v", "dout"))
    shards = (backend.from_host(x) for x in (q, k, v))
    out, lse, saved = backend.forward(*shards, layout, case.policy, tensors_by, case.mask, parts=parts)
    gradients = backend.backward(backend.from_host(dout), saved, tensors_by, parts)
    results = (backend.to_host(x) for x in (out, lse.T, *gradients))
    got = dict(zip(OUTPUTS, results, strict=True))

    errors, bounds, poisoned, worst = {}, {}, 0, _Worst()
    for name in OUTPUTS:
        whole = expected.results[name].T if name == "lse" else expected.results[name]
        empty = -np.inf if name == "lse" else 0.0
        wanted = local(whole, empty)
        actual = got[name].astype(np.float64)
        poisoned += int((actual[is_padding] != empty).any(axis=tuple(range(1, actual.ndim))).sum())
        errors[name] = largest_error(actual, wanted)
        yardstick = 0.0 if case.dtype == "float64" else expected.yardsticks[case.dtype][name]
        bounds[name] = Tolerance.of(dtype, yardstick, largest_finite(whole)).bound
        worst = max(worst, _worst_of(name, actual, wanted, bounds[name], rows), key=lambda w: w.excess)
    cost = rank_cost(layout, case.policy, group.size, group.rank, case.mask, saved.metadata)
    found = [*errors.values(), poisoned, *worst.numbers(), cost.visible_pairs, cost.kv_rows_needed]
    by_rank = group.all_gather(np.array(found, np.float64))
    row_bytes = kv_bytes(1, k.shape[1], k.shape[2], v.shape[2], k.itemsize)
    return CaseResult(
        case,
        errors=dict(zip(OUTPUTS, by_rank[:, :5].max(axis=0).tolist(), strict=True)),
        bounds=bounds,
        poisoned=int(by_rank[:, 5].sum()),
        rows=cost.rows,
        steps=cost.steps,
        kv_bytes_gathered=cost.kv_rows_gathered * row_bytes,
        kv_bytes_needed=int(by_rank[:, 11].max()) * row_bytes,
        balance=balance(by_rank[:, 10].tolist()),
        first_wrong=_describe_worst(by_rank[:, 6:10], layout),
    )


@dataclass(frozen=True)
class _Worst:
    """Where an output lies furthest beyond its bound: how many times the bound, and which element."""

    excess: float = 0.0
    output: int = 0
    row: int = 0
    head: int = 0

    def numbers(self) -> tuple[float, int, int, int]:
        return self.excess, self.output, self.row, self.head


def _worst_of(name: str, actual: Array, wanted: Array, bound: float, rows: IntArray) -> _Worst:
    """The first element of an output [rows, heads, ...] that is furthest from what is wanted, in physical rows."""
    if actual.size == 0:
        return _Worst()
    with np.errstate(invalid="ignore"):
        errors = np.where(actual == wanted, 0.0, np.abs(actual - wanted))
    errors = np.where(np.isnan(errors), np.inf, errors)
    row, head = np.unravel_index(int(errors.argmax()), errors.shape)[:2]
    return _Worst(float(errors.max()) / bound, OUTPUTS.index(name), int(rows[row]), int(head))


def _describe_worst(by_rank: Array, layout: PackedLayout) -> str:
    """The largest excess of all ranks in words, or nothing if no rank exceeds a bound."""
    rank = int(by_rank[:, 0].argmax())
    excess, output, row, head = by_rank[rank].tolist()
    if excess <= 1.0:
        return ""
    document, position = layout.document_ids[int(row)], layout.positions[int(row)]
    where = f"document {document}, position {position}" if document >= 0 else "padding"
    return (
        f"{OUTPUTS[int(output)]} of rank {rank}, row {int(row)} ({where}), head {int(head)}: {excess:.3g} x its bound"
    )
