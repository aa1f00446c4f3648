"""Context parallelism of the backend on the host device: its exchanges and slices, with the reference's attention.

The kernels' own attention is tested elsewhere; here it must not matter, so that a fault shows where it is.
"""

from functools import partial

import numpy as np
import pytest
from support import refused

from cupy_backend import metadata
from cupy_backend.attention import varlen_attention_forward
from cupy_backend.collectives import HostStaged
from cupy_backend.context_parallel import context_parallel_backward, context_parallel_forward, needed_rows, within
from cupy_backend.device import HOST
from refimpl import tiled
from refimpl.collectives import run_ranks
from refimpl.context_parallel import Parts, run_context_parallel
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import rank_metadata
from refimpl.partition import Policy, padded_for
from refimpl.partition import partition as cut

REFERENCE = Parts(
    metadata.rank_metadata,
    partial(tiled.varlen_attention_forward, workers=1),
    partial(tiled.varlen_attention_backward, workers=1),
)
MASKS = [AttentionMask(), AttentionMask(False), AttentionMask(window=(6, 0)), AttentionMask(False, (4, 3))]
LENGTHS = [5, 0, 21, 3, 1, 17]
PADDED = [8, 2, 21, 7, 1, 20]


def case(policy, cp_size, dtype=np.float32, heads=(4, 2)):
    """A layout, and q, k, v, dout with NaN in all padding."""
    layout = padded_for(PackedLayout.from_lengths(LENGTHS, padded_lengths=PADDED), policy, cp_size)
    rng, total = np.random.default_rng(3), layout.total_tokens
    shapes = [(heads[0], 8), (heads[1], 8), (heads[1], 4), (heads[0], 4)]
    tensors = [rng.standard_normal((total, *shape)).astype(dtype) for shape in shapes]
    for x in tensors:
        x[layout.document_ids < 0] = np.nan
    return layout, tensors


def run(layout, tensors, policy, cp_size, mask, parts=REFERENCE, wrap=lambda group: group, **options):
    shards = list(zip(*(cut(x, layout, policy, cp_size) for x in tensors), strict=True))

    def rank(group):
        group = wrap(group)
        q, k, v, dout = shards[group.rank]
        out, lse, saved = context_parallel_forward(q, k, v, layout, policy, group, mask, parts=parts, **options)
        return out, lse, *context_parallel_backward(dout, saved, group, parts)

    return run_ranks(cp_size, rank)


def expected(layout, tensors, policy, cp_size, mask):
    results = run_context_parallel(*tensors, layout, policy, cp_size, mask)
    return [(r.out, r.lse, r.dq, r.dk, r.dv) for r in results]


def close(got, wanted, bound=2e-6):
    for rank, (a, b) in enumerate(zip(got, wanted, strict=True)):
        for name, mine, theirs in zip(("out", "lse", "dq", "dk", "dv"), a, b, strict=True):
            assert mine.dtype == theirs.dtype, (rank, name)
            x, y = mine.astype(np.float64), theirs.astype(np.float64)
            assert np.array_equal(np.isinf(x), np.isinf(y)), (rank, name)
            finite = np.isfinite(y)
            assert np.abs(x[finite] - y[finite]).max(initial=0) <= bound, (rank, name)


@pytest.mark.clause("C1", "C2", "C5", "A5")
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("policy", Policy)
def test_ranks_do_what_the_reference_does(policy, cp_size, mask):
    layout, tensors = case(policy, cp_size)
    close(run(layout, tensors, policy, cp_size, mask), expected(layout, tensors, policy, cp_size, mask))


@pytest.mark.clause("C5", "N1")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_is_cast_once(dtype):
    import ml_dtypes

    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    policy = Policy.DUAL_CHUNK_SWAP
    layout, tensors = case(policy, 3, dtype)
    close(run(layout, tensors, policy, 3, AttentionMask()), expected(layout, tensors, policy, 3, AttentionMask()), 0.04)


@pytest.mark.clause("C1", "C2", "C5")
@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("slices", [2, 4])
def test_slices_of_heads_change_no_bit_forward(policy, slices):
    layout, tensors = case(policy, 2, heads=(8, 4))
    whole = run(layout, tensors, policy, 2, AttentionMask())
    sliced = run(layout, tensors, policy, 2, AttentionMask(), head_slices=slices)
    close(sliced, whole)


class Recorded(HostStaged):
    """A group that notes when exchanges start and when they are waited for."""

    def __init__(self, group):
        super().__init__(group, HOST)
        self.events = []

    def start_gather(self, arrays):
        number = sum(event.startswith("start") for event in self.events)
        self.events.append(f"start {number}")
        pending = super().start_gather(arrays)

        def wait():
            self.events.append(f"wait {number}")
            return pending()

        return wait


def test_the_next_slice_travels_while_the_last_is_attended_to():
    layout, (q, k, v, _) = case(Policy.PACKED_CONTIGUOUS, 1, heads=(6, 3))

    def rank(group):
        recorded = Recorded(group)

        def forward(*args):
            recorded.events.append("attend")
            return REFERENCE.varlen_attention_forward(*args)

        parts = Parts(REFERENCE.rank_metadata, forward, None)
        context_parallel_forward(q, k, v, layout, "packed_contiguous", recorded, parts=parts, head_slices=3)
        return recorded.events

    (events,) = run_ranks(1, rank)
    assert events == [
        *("start 0", "wait 0", "start 1", "attend"),
        *("wait 1", "start 2", "attend"),
        *("wait 2", "attend"),
    ]


@pytest.mark.clause("R8", "C5", "N1")
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 5])
def test_exchange_by_need_is_the_same_attention(cp_size, mask):
    policy = Policy.PACKED_CONTIGUOUS
    layout, tensors = case(policy, cp_size)
    got = run(layout, tensors, policy, cp_size, mask, by_need=True, head_slices=2)
    close(got, expected(layout, tensors, policy, cp_size, mask))


@pytest.mark.clause("R8")
def test_what_is_needed_by_hand():
    """Documents of 5 and 7 rows over 4 ranks of 3: rows 0-2, 3-5, 6-8, 9-11."""
    layout = PackedLayout([0, 5, 12])
    steps = [rank_metadata(layout, "packed_contiguous", 4, r, AttentionMask()).steps[0] for r in range(4)]
    assert [needed_rows(step) for step in steps] == [(0, 3), (0, 6), (5, 9), (5, 12)]
    third = within(steps[2], 5, 9)
    assert third.cu_seqlens_kv.tolist() == [0, 0, 4]
    assert third.cu_seqlens_kv_padded.tolist() == [0, 0, 4]
    assert third.max_seqlen_kv == 4
    only_padding = PackedLayout([0, 2], [0, 2], 12)
    step = rank_metadata(only_padding, "packed_contiguous", 4, 2, AttentionMask()).steps[0]
    assert needed_rows(step) == (0, 0)


@pytest.mark.clause("R8")
def test_by_need_moves_no_other_row():
    """Rows that nobody needs may hold anything, and are never sent."""
    policy, cp_size = Policy.PACKED_CONTIGUOUS, 4
    layout, tensors = case(policy, cp_size)
    sent = []

    class Counted(HostStaged):
        def start_exchange(self, messages):
            sent.append((self.rank, sum(len(part) for part in messages[0][0])))
            return super().start_exchange(messages)

    wanted = []
    for rank in range(cp_size):
        step = rank_metadata(layout, policy, cp_size, rank, AttentionMask()).steps[0]
        first, last = needed_rows(step)
        wanted.append(last - first)
    shards = [cut(x, layout, policy, cp_size) for x in tensors[:3]]

    def rank(group):
        q, k, v = (x[group.rank] for x in shards)
        context_parallel_forward(q, k, v, layout, policy, Counted(group, HOST), parts=REFERENCE, by_need=True)

    run_ranks(cp_size, rank)
    assert sum(rows for _, rows in sent) == sum(wanted) < cp_size * layout.total_tokens


@pytest.mark.clause("C3", "C6")
def test_refusals_reach_every_rank():
    layout, (q, k, v, dout) = case(Policy.DUAL_CHUNK_SWAP, 2)
    shards = [cut(x, layout, "dual_chunk_swap", 2) for x in (q, k, v, dout)]

    def all_ranks(change, **options):
        def rank(group):
            own = [x[group.rank] for x in shards[:3]]
            policy = options.get("policy", "dual_chunk_swap")
            chosen = {name: value for name, value in options.items() if name != "policy"}
            if callable(options.get("head_slices")):
                chosen["head_slices"] = options["head_slices"](group.rank)
            try:
                context_parallel_forward(*change(own, group.rank), layout, policy, group, parts=REFERENCE, **chosen)
            except SpecError as error:
                return error
            return None

        errors = run_ranks(2, rank)
        assert errors[0] is not None
        assert errors[0].message == errors[1].message
        raise errors[0]

    with refused("dtype", "q has dtype float64: the kernels compute in float32, float16, bfloat16"):
        all_ranks(lambda x, _: [a.astype(np.float64) for a in x])
    with refused("shape", "rank 1: k has"):
        all_ranks(lambda x, r: [x[0], x[1][:-r] if r else x[1], x[2]])
    with refused("heads", "head_slices is 3: expected a divisor of the 2 K/V heads"):
        all_ranks(lambda x, _: x, head_slices=3)
    with refused("usage", "by_need is for packed_contiguous, not dual_chunk_swap"):
        all_ranks(lambda x, _: x, by_need=True)
    with refused("ranks_disagree", "ranks disagree on exchange"):
        all_ranks(lambda x, _: x, head_slices=lambda rank: rank + 1)


@pytest.mark.clause("B4", "C3")
def test_a_gradient_of_another_shape_is_refused():
    layout, (q, k, v, dout) = case(Policy.PACKED_CONTIGUOUS, 1)

    def rank(group):
        _, _, saved = context_parallel_forward(q, k, v, layout, "packed_contiguous", group, parts=REFERENCE)
        context_parallel_backward(dout[1:], saved, group, REFERENCE)

    with refused("shape", "dout has shape"):
        run_ranks(1, rank)


def test_a_group_that_exchanges_nothing_by_need_says_so():
    class Only:
        rank, size = 0, 1

    with refused("usage", "Only exchanges nothing by need: gather instead"):
        HostStaged(Only(), HOST).start_exchange([([np.zeros(2)], [(2,)])])


@pytest.mark.clause("L5", "R2", "R3", "R5")
@pytest.mark.parametrize("policy", Policy)
def test_offsets_that_never_leave_the_device(policy):
    """A static number of documents, some of them unused, and attention told by the device's own metadata."""
    layout = padded_for(PackedLayout.from_lengths([40, 0, 23]), policy, 2)
    tail = [layout.cu_seqlens[-1]] * 5, [layout.cu_seqlens_padded[-1]] * 5
    cu, padded = (
        np.concatenate([x, y]).astype(np.int32)
        for x, y in zip((layout.cu_seqlens, layout.cu_seqlens_padded), tail, strict=True)
    )
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((layout.total_tokens, 2, 32)).astype(np.float32) for _ in range(3))
    whole, _ = tiled.attention_forward(q, k, v, layout, AttentionMask())
    for rank in range(2):
        made = metadata.device_metadata(cu, padded, layout.total_tokens, policy, 2, rank)
        out = np.full((len(made.indices), 2, 32), np.nan, np.float32)
        for step in made.steps:
            queries = np.ascontiguousarray(q[made.indices][step.rows])
            out[step.rows], _ = varlen_attention_forward(queries, k, v, step, AttentionMask())
        assert np.abs(out - whole[made.indices]).max() < 1e-5
