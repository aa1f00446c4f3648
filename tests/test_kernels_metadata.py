"""metadata.cu, run on the CPU, against the reference."""

import numpy as np
import pytest
from kernel_cases import CUTS, ORDERS, blocks, device_offsets, divisible_layouts

from cupy_backend.host import HostModule
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import rank_metadata
from refimpl.partition import Policy, check_divisible, next_token_labels, padded_for, partition_indices

MASKS = [
    AttentionMask(),
    AttentionMask(causal=False),
    AttentionMask(window=(100, 0)),
    AttentionMask(causal=False, window=(-1, 60)),
    AttentionMask(causal=False, window=(30, -1)),
    AttentionMask(causal=False, window=(300, 200)),
]
CODES = ["fine", "offsets_start", "offsets_decreasing", "real_exceeds_physical", "total_tokens", "not_divisible"]
"""`Status` of metadata.cu."""
UNWRITTEN = -77


@pytest.fixture(scope="module")
def module():
    return HostModule("metadata")


def checked(module, cu, padded, total, policy, cp_size, **order):
    status = np.full(2, UNWRITTEN, np.int32)
    args = [cu, padded, len(cu) - 1, total, *CUTS[policy], cp_size, status]
    module.kernel("check_offsets")(1, 256, args, **order)
    return status


def metadata(module, layout, policy, cp_size, rank, mask, status=None, **order):
    """What step_metadata writes: a dict of arrays, one row a step."""
    cu, padded = device_offsets(layout)
    n, steps = layout.num_documents, CUTS[policy][1]
    sizes = {
        "cu_q": n + 1,
        "cu_q_padded": n + 1,
        "cu_kv": n + 1,
        "first_query": n,
        "local_start": n,
        "maxima": 2,
    }
    results = {name: np.full((steps, size), UNWRITTEN, np.int32) for name, size in sizes.items()}
    status = np.zeros(2, np.int32) if status is None else status
    args = [cu, padded, n, layout.total_tokens, *CUTS[policy], cp_size, rank, mask.left, mask.right, status]
    module.kernel("step_metadata")(steps, 256, [*args, *results.values()], **order)
    return results


def compare(module, layout, policy, cp_size, rank, mask, **order):
    results = metadata(module, layout, policy, cp_size, rank, mask, **order)
    expected = rank_metadata(layout, policy, cp_size, rank, mask)
    for i, (step, rows) in enumerate(zip(expected.steps, expected.step_rows, strict=True)):
        assert (results["cu_q"][i] == step.cu_seqlens_q).all()
        assert (results["cu_q_padded"][i] == step.cu_seqlens_q_padded).all()
        assert (results["cu_kv"][i] == step.cu_seqlens_kv).all()
        assert (results["first_query"][i] == step.first_query_positions).all()
        assert results["maxima"][i].tolist() == [step.max_seqlen_q, step.max_seqlen_kv]
        windows = np.flatnonzero(np.diff(step.cu_seqlens_q_padded))
        assert (results["local_start"][i][windows] == rows[step.cu_seqlens_q_padded[windows]]).all()
        assert (results["local_start"][i] != UNWRITTEN).all()


@pytest.mark.clause("R1", "R2", "R3", "R4", "R5", "R6", "K2", "L4", "L5")
@pytest.mark.parametrize("cp_size", range(1, 9))
@pytest.mark.parametrize("policy", Policy)
def test_steps_are_those_of_the_reference(module, policy, cp_size):
    for i, (_, layout) in enumerate(divisible_layouts(policy, cp_size)):
        for rank in {0, i % cp_size, cp_size - 1}:
            compare(module, layout, policy, cp_size, rank, MASKS[(i + rank) % len(MASKS)])


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("policy", Policy)
def test_every_mask(module, policy, mask):
    layout = padded_for(PackedLayout.from_lengths([5, 0, 700, 17, 260], padded_lengths=[9, 2, 700, 30, 260]), policy, 4)
    for rank in range(4):
        compare(module, layout, policy, 4, rank, mask)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("policy", Policy)
def test_order_of_threads_changes_nothing(module, policy, order):
    lengths = np.random.default_rng(5).integers(0, 30, 600)
    compare(module, padded_for(PackedLayout.from_lengths(lengths), policy, 2), policy, 2, 1, AttentionMask(), **order)


@pytest.mark.clause("R2", "R3", "R4")
def test_by_hand(module):
    # The worked values of the specification.
    results = metadata(module, PackedLayout([0, 5, 12]), Policy.PACKED_CONTIGUOUS, 4, 1, AttentionMask())
    assert results["cu_q"].tolist() == [[0, 2, 3]]
    assert results["cu_kv"].tolist() == [[0, 5, 6]]
    layout = PackedLayout([0, 6, 10], [0, 8, 12])
    results = metadata(module, layout, Policy.PACKED_CONTIGUOUS, 2, 1, AttentionMask())
    assert results["cu_q"].tolist() == [[0, 0, 4]]
    assert results["cu_q_padded"].tolist() == [[0, 2, 6]]
    assert results["cu_kv"].tolist() == [[0, 6, 10]]


@pytest.mark.clause("L2", "L3", "L4", "P5", "P6")
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(
    ("cu", "padded", "total", "policy", "code", "document"),
    [
        ([0, 4, 8], [0, 4, 8], 8, Policy.DUAL_CHUNK_SWAP, "fine", 0),
        ([0, 3, 9], [0, 3, 9], 10, Policy.PACKED_CONTIGUOUS, "fine", 0),
        ([1, 4, 8], [0, 4, 8], 8, Policy.DUAL_CHUNK_SWAP, "offsets_start", 0),
        ([0, 4, 8], [4, 4, 8], 8, Policy.DUAL_CHUNK_SWAP, "offsets_start", 0),
        ([0, 4, 3], [0, 4, 8], 8, Policy.DUAL_CHUNK_SWAP, "offsets_decreasing", 1),
        ([0, 4, 4, 8], [0, 8, 4, 12], 12, Policy.DUAL_CHUNK_SWAP, "offsets_decreasing", 1),
        ([0, 4, -1], [0, 4, -1], 4, Policy.DUAL_CHUNK_SWAP, "offsets_decreasing", 1),
        ([0, 4, 9], [0, 4, 8], 8, Policy.DUAL_CHUNK_SWAP, "real_exceeds_physical", 1),
        ([0, 4, 8], [0, 4, 8], 7, Policy.PACKED_CONTIGUOUS, "total_tokens", 2),
        ([0, 4, 8], [0, 6, 12], 12, Policy.DUAL_CHUNK_SWAP, "not_divisible", 0),
        ([0, 4, 8], [0, 4, 8], 10, Policy.DUAL_CHUNK_SWAP, "not_divisible", 2),
        ([0, 4, 8], [0, 4, 8], 9, Policy.PACKED_CONTIGUOUS, "not_divisible", 2),
        ([0, 4, 8], [0, 4, 8], 10, Policy.PACKED_DUAL_CHUNK_SWAP, "not_divisible", 2),
    ],
)
def test_what_is_refused(module, cu, padded, total, policy, code, document, order):
    cu, padded = np.array(cu, np.int32), np.array(padded, np.int32)
    status = checked(module, cu, padded, total, policy, 2, **order)
    assert (CODES[status[0]], status[1]) == (code, document)
    try:
        check_divisible(PackedLayout(cu, padded, total), policy, 2)
        expected = "fine"
    except SpecError as error:
        expected = error.code
    assert code == expected, "the reference refuses for another reason"


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_gravest_fault_of_many_documents_is_told(module, order):
    padded = np.arange(1001, dtype=np.int32) * 4
    cu = padded.copy()
    assert checked(module, cu, padded, 4000, Policy.DUAL_CHUNK_SWAP, 2, **order).tolist() == [0, 0]
    cu[900:] += 1
    assert checked(module, cu, padded, 4000, Policy.DUAL_CHUNK_SWAP, 2, **order).tolist() == [3, 899]
    cu[300] = 5000
    assert checked(module, cu, padded, 4000, Policy.DUAL_CHUNK_SWAP, 2, **order).tolist() == [2, 300]


def test_a_refused_layout_has_no_queries(module):
    layout = padded_for(PackedLayout.from_lengths([5, 9]), Policy.DUAL_CHUNK_SWAP, 2)
    status = np.array([5, 1], np.int32)
    results = metadata(module, layout, Policy.DUAL_CHUNK_SWAP, 2, 0, AttentionMask(), status)
    for name in ("cu_q", "cu_q_padded", "cu_kv", "maxima"):
        assert not results[name].any()


@pytest.mark.clause("L5")
def test_a_longer_tail_of_repeated_offsets_changes_nothing(module):
    # How a captured graph runs on batches of fewer documents.
    layout = padded_for(PackedLayout.from_lengths([50, 3, 90]), Policy.DUAL_CHUNK_SWAP, 2)
    cu, padded = (np.append(x, np.repeat(x[-1], 300)) for x in (layout.cu_seqlens, layout.cu_seqlens_padded))
    short = metadata(module, layout, Policy.DUAL_CHUNK_SWAP, 2, 1, AttentionMask())
    longer = metadata(module, PackedLayout(cu, padded), Policy.DUAL_CHUNK_SWAP, 2, 1, AttentionMask())
    for name in ("cu_q", "cu_q_padded", "cu_kv"):
        assert (longer[name][:, :4] == short[name]).all()
        assert (longer[name][:, 4:] == short[name][:, 3:]).all()
    assert (longer["maxima"] == short["maxima"]).all()


@pytest.mark.clause("L6", "L7", "P10")
@pytest.mark.parametrize("policy", Policy)
def test_positions_and_labels(module, policy):
    for name, layout in divisible_layouts(policy, 4):
        cu, padded = device_offsets(layout)
        total, n = layout.total_tokens, layout.num_documents
        ids = np.random.default_rng(3).integers(0, 50_000, total)
        rows = partition_indices(layout, policy, 4, 2)
        for chosen, take in [(None, slice(None)), (rows, rows)]:
            count = total if chosen is None else len(rows)
            document, position = np.full(count, UNWRITTEN, np.int32), np.full(count, UNWRITTEN, np.int64)
            args = [cu, padded, n, chosen, count, document, position]
            module.kernel("row_positions")(blocks(count), 256, args)
            assert (document == layout.document_ids[take]).all(), name
            assert (position == layout.positions[take]).all(), name
            for bits, dtype in [(32, np.int32), (64, np.int64)]:
                labels = np.full(count, UNWRITTEN, dtype)
                args = [cu, padded, n, ids.astype(dtype), chosen, count, -100, labels]
                module.kernel(f"row_labels_{bits}")(blocks(count), 256, args)
                assert (labels == next_token_labels(ids, layout)[take]).all(), name
