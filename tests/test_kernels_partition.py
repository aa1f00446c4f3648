"""partition.cu, run on the CPU, against the reference."""

import numpy as np
import pytest
from kernel_cases import CUTS, ORDERS, blocks, device_offsets, divisible_layouts

from cupy_backend.host import HostModule
from refimpl.layout import PackedLayout
from refimpl.partition import Policy, inverse_indices, padded_for, partition_indices

RNG = np.random.default_rng(11)
UNITS = {16: np.uint8, 8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}


@pytest.fixture(scope="module")
def module():
    return HostModule("partition")


def rank_rows(module, layout, policy, cp_size, first, count, **order):
    _, padded = device_offsets(layout)
    rows = np.full(count + 1, -7, np.int64)
    args = [padded, layout.num_documents, layout.total_tokens, *CUTS[policy], cp_size, first, count, rows]
    module.kernel("rank_rows")(blocks(count), 256, args, **order)
    assert rows[count] == -7
    return rows[:count]


@pytest.mark.clause("P1", "P2", "P3", "P4", "P5", "P8")
@pytest.mark.parametrize("cp_size", range(1, 9))
@pytest.mark.parametrize("policy", Policy)
def test_rank_rows_are_those_of_the_reference(module, policy, cp_size):
    for name, layout in divisible_layouts(policy, cp_size):
        share = layout.total_tokens // cp_size
        expected = [partition_indices(layout, policy, cp_size, rank) for rank in range(cp_size)]
        whole = rank_rows(module, layout, policy, cp_size, 0, layout.total_tokens)
        assert (whole == np.concatenate(expected)).all(), name
        rank = cp_size - 1
        assert (rank_rows(module, layout, policy, cp_size, rank * share, share) == expected[rank]).all(), name


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("policy", Policy)
def test_order_of_threads_changes_nothing(module, policy, order):
    layout = padded_for(PackedLayout.from_lengths([5, 0, 300, 17]), policy, 4)
    whole = rank_rows(module, layout, policy, 4, 0, layout.total_tokens, **order)
    expected = [partition_indices(layout, policy, 4, rank) for rank in range(4)]
    assert (whole == np.concatenate(expected)).all()


@pytest.mark.clause("P2", "P3", "P4")
def test_rank_rows_by_hand(module):
    # PEERS' example: documents of 8 and 4 rows over two ranks.
    layout = PackedLayout([0, 8, 12])
    expected = {
        Policy.DUAL_CHUNK_SWAP: [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10],
        Policy.PACKED_CONTIGUOUS: list(range(12)),
        Policy.PACKED_DUAL_CHUNK_SWAP: [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8],
    }
    for policy, rows in expected.items():
        assert rank_rows(module, layout, policy, 2, 0, 12).tolist() == rows


@pytest.mark.clause("N3")
def test_rows_near_the_end_of_int32(module):
    layout = PackedLayout([0, 5, 2**31 - 16], None, 2**31 - 16)
    total, cp_size = layout.total_tokens, 8
    rows = rank_rows(module, layout, Policy.PACKED_DUAL_CHUNK_SWAP, cp_size, total - 40, 40)
    size = total // 16
    assert rows.tolist() == list(range(9 * size - 40, 9 * size))


def test_offsets_that_cannot_be_cut_give_no_row_outside(module):
    layout = PackedLayout([0, 3, 10], [0, 3, 11], 11)
    for policy in Policy:
        rows = rank_rows(module, layout, policy, 3, 0, 9)
        assert ((rows >= 0) & (rows < 11)).all()


@pytest.mark.clause("P7")
@pytest.mark.parametrize("policy", Policy)
def test_inverse(module, policy):
    for name, layout in divisible_layouts(policy, 4):
        rows = rank_rows(module, layout, policy, 4, 0, layout.total_tokens)
        inverse = np.zeros_like(rows)
        module.kernel("invert_rows")(blocks(len(rows)), 256, [rows, len(rows), inverse])
        assert (inverse == inverse_indices(layout, policy, 4)).all(), name


def move(module, kind, x, rows, y, unit, threads_per_row, **order):
    """Move whole rows; x and y are uint8 [rows, bytes]."""
    pointers = [a.view(UNITS[unit]) for a in (x, y)]
    units = x.shape[1] // unit
    grid = blocks(len(rows), 256 // threads_per_row)
    args = [pointers[0], rows, pointers[1], len(rows), units, threads_per_row]
    module.kernel(f"{kind}_rows_{unit}")(grid, 256, args, **order)


def aligned(rows, row_bytes):
    """uint8 [rows, row_bytes] at a multiple of 16 bytes."""
    memory = np.zeros(rows * row_bytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + rows * row_bytes].reshape(rows, row_bytes)


@pytest.mark.clause("P7", "C1", "C2")
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(
    ("row_bytes", "unit", "threads_per_row"),
    [(256, 16, 16), (1024, 16, 8), (2048, 16, 128), (80, 16, 1), (24, 8, 4), (12, 4, 256), (6, 2, 2), (7, 1, 8)],
)
def test_rows_go_to_sequence_order_and_back(module, row_bytes, unit, threads_per_row, order):
    layout = padded_for(PackedLayout.from_lengths([5, 0, 100, 17]), Policy.DUAL_CHUNK_SWAP, 2)
    total = layout.total_tokens
    rows = np.concatenate([partition_indices(layout, Policy.DUAL_CHUNK_SWAP, 2, rank) for rank in range(2)])
    x, shards, back = (aligned(total, row_bytes) for _ in range(3))
    x[:] = RNG.integers(0, 256, x.shape)
    move(module, "gather", x, rows, shards, unit, threads_per_row, **order)
    assert (shards == x[rows]).all()
    move(module, "scatter", shards, rows, back, unit, threads_per_row, **order)
    assert (back == x).all()


@pytest.mark.clause("P7")
@pytest.mark.parametrize("kind", ["gather", "scatter"])
@pytest.mark.parametrize("threads_per_row", [1, 2, 8, 256])
def test_any_number_of_accesses_a_row(module, kind, threads_per_row):
    # Around multiples of what is in flight at once; a row more or less would show in the neighbours.
    rows = RNG.permutation(9)
    for units in [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33]:
        x, y = aligned(9, 16 * units), aligned(9, 16 * units)
        x[:] = RNG.integers(0, 256, x.shape)
        move(module, kind, x, rows[:7], y, 16, threads_per_row)
        expected = np.zeros_like(x)
        if kind == "gather":
            expected[:7] = x[rows[:7]]
        else:
            expected[rows[:7]] = x[:7]
        assert (y == expected).all(), units


@pytest.mark.clause("N3")
def test_rows_beyond_2_32_accesses(module):
    # One row far out in 4 GB, of which a page is touched.
    row_bytes, far = 4096, 2**20 + 3
    big = np.zeros((far + 1, row_bytes), np.uint8)
    x = aligned(1, row_bytes)
    x[:] = RNG.integers(1, 256, x.shape)
    move(module, "scatter", x, np.array([far]), big, 1, 256)
    assert (big[far] == x[0]).all()
    back = aligned(1, row_bytes)
    move(module, "gather", big, np.array([far]), back, 1, 256)
    assert (back == x).all()
