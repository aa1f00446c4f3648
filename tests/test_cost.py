"""What a policy costs: work by brute force, balance and needed rows where they are known exactly."""

from typing import Any

import numpy as np
import pytest
import witness
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import Case, cases, masks, parts_of
from support import refused

from refimpl.cost import balance, kv_bytes, rank_cost, visible_pairs
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import rank_metadata
from refimpl.partition import Policy

CAUSAL = AttentionMask()
FULL = AttentionMask(causal=False)


def seen(position: int, num_keys: int, mask: AttentionMask) -> int:
    """Keys that one query sees, one by one."""
    return sum(witness.sees((0, position), (0, key), mask.causal, mask.window) for key in range(num_keys))


# Work


@pytest.mark.clause("N5", "K1", "K2", "K3")
@given(
    documents=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 12)), max_size=4),
    mask=masks(),
)
@example([(0, 9, 9)], CAUSAL)
@example([(3, 9, 5)], AttentionMask(causal=False, window=(2, 1)))
def test_pairs_in_closed_form_equal_a_count(documents: list[tuple[int, int, int]], mask: AttentionMask) -> None:
    """Queries [first, first + count) of documents of some keys; queries may stand behind the last key."""
    first, count, keys = np.array(documents, np.int64).reshape(-1, 3).T
    clipped = np.minimum(first + count, np.maximum(keys, first))  # a query stands on a key of its own
    expected = sum(
        seen(position, int(n), mask) for a, b, n in zip(first, clipped, keys, strict=True) for position in range(a, b)
    )
    assert visible_pairs(first, clipped, keys, mask) == expected


@pytest.mark.clause("N5", "R8")
@given(case=cases(max_length=12), mask=masks())
def test_the_cost_of_every_rank_equals_a_count(case: Case, mask: AttentionMask) -> None:
    """The witness knows no metadata: it asks which rank holds a query, and which keys that query sees."""
    layout, policy, cp_size = case
    real, physical, total = parts_of(layout)
    rows = witness.rows(real, physical, total)
    pairs = witness.visible_pairs(rows, mask.causal, mask.window)
    holder = [rank for rank, _ in witness.deal(physical, total, policy, cp_size)]
    is_real = [document >= 0 for document, _ in rows]
    for rank in range(cp_size):
        cost = rank_cost(layout, policy, cp_size, rank, mask)
        mine = [(i, j) for i, j in pairs if holder[i] == rank]
        assert cost.visible_pairs == len(mine)
        assert cost.kv_rows_needed == len({j for _, j in mine})
        assert cost.kv_rows_gathered == total
        assert cost.rows == total // cp_size
        assert cost.real_rows == sum(holder[row] == rank and is_real[row] for row in range(total))
        assert cost.steps == (1 if policy == "packed_contiguous" else 2)


@pytest.mark.clause("N5", "C5")
@given(case=cases(max_length=200), mask=masks())
def test_ranks_together_do_the_work_of_one(case: Case, mask: AttentionMask) -> None:
    layout, policy, cp_size = case
    costs = [rank_cost(layout, policy, cp_size, rank, mask) for rank in range(cp_size)]
    alone = rank_cost(layout, "packed_contiguous", 1, 0, mask)
    assert sum(cost.visible_pairs for cost in costs) == alone.visible_pairs
    assert sum(cost.real_rows for cost in costs) == alone.real_rows == int(layout.seqlens.sum())
    assert sum(cost.rows for cost in costs) == alone.rows == layout.total_tokens


@pytest.mark.clause("N5")
def test_pairs_of_whole_documents() -> None:
    layout = PackedLayout([0, 5, 5, 12], [0, 8, 8, 16])
    for mask, expected in (
        (CAUSAL, 15 + 28),
        (FULL, 25 + 49),
        (AttentionMask(window=(0, 0)), 12),
        (AttentionMask(window=(1, -1)), 9 + 13),
        (AttentionMask(causal=False, window=(1, 1)), 13 + 19),
    ):
        assert rank_cost(layout, "packed_contiguous", 1, 0, mask).visible_pairs == expected


@pytest.mark.clause("N5", "N3")
def test_work_beyond_32_bits() -> None:
    n = 2**20
    assert rank_cost(PackedLayout([0, n]), "packed_contiguous", 1, 0).visible_pairs == n * (n + 1) // 2
    assert rank_cost(PackedLayout([0, n]), "packed_contiguous", 1, 0, FULL).visible_pairs == n * n
    assert kv_bytes(2**31, 8, 128, 128, 2) == 2**31 * 8 * 256 * 2


@pytest.mark.clause("N5")
def test_metadata_that_is_there_is_used() -> None:
    layout = PackedLayout([0, 16])
    other = rank_metadata(layout, "packed_contiguous", 2, 1)
    assert rank_cost(layout, "packed_contiguous", 2, 0, metadata=other) == rank_cost(layout, "packed_contiguous", 2, 1)


@pytest.mark.clause("N5", "P6")
def test_a_layout_that_does_not_divide_has_no_cost() -> None:
    with refused("not_divisible", "total_tokens divisible by 2, not 7"):
        rank_cost(PackedLayout([0, 7]), "packed_contiguous", 2, 0)


# Balance and needed rows


def work(layout: PackedLayout, policy: str, cp_size: int, mask: AttentionMask = CAUSAL) -> list[int]:
    return [rank_cost(layout, policy, cp_size, rank, mask).visible_pairs for rank in range(cp_size)]


@pytest.mark.clause("N5")
@pytest.mark.parametrize("cp_size", [1, 2, 4, 8, 32])
def test_balance_of_one_document(cp_size: int) -> None:
    """Rank r of a causal document in `cp` pieces of m rows has m (r m) + m (m + 1) / 2 pairs.

    The last one has (2 cp - 1) / cp of the mean for long pieces: 1.875 at cp 8. Pairs of mirrored chunks are equal.
    """
    tokens = 131_072
    layout = PackedLayout([0, tokens])
    m = tokens // cp_size
    contiguous = work(layout, "packed_contiguous", cp_size)
    assert contiguous == [m * r * m + m * (m + 1) // 2 for r in range(cp_size)]
    assert balance(contiguous) == pytest.approx((2 * cp_size - 1) / cp_size, abs=2 * cp_size / tokens)
    for policy in (Policy.DUAL_CHUNK_SWAP, Policy.PACKED_DUAL_CHUNK_SWAP):
        dual = work(layout, policy, cp_size)
        assert len(set(dual)) == 1
        assert balance(dual) == 1.0


@pytest.mark.clause("N5")
def test_balance_of_many_documents() -> None:
    """Each by itself is even under dual_chunk_swap; whole-buffer zigzag pairs rows that have nothing in common."""
    layout = PackedLayout.from_lengths([7 * 16 * 16, *[16] * 40, 16 * 30], multiple_of=16)
    assert balance(work(layout, "dual_chunk_swap", 8)) == 1.0
    assert balance(work(layout, "packed_dual_chunk_swap", 8)) > 1.2
    assert balance(work(layout, "packed_contiguous", 8)) > 1.2
    equal = PackedLayout.from_lengths([512] * 8)
    assert balance(work(equal, "packed_contiguous", 8)) == 1.0


@pytest.mark.clause("N5")
def test_a_full_mask_is_even_however_it_is_cut() -> None:
    layout = PackedLayout([0, 4096])
    for policy in Policy:
        assert work(layout, policy, 8, FULL) == [512 * 4096] * 8


@pytest.mark.clause("N5")
@pytest.mark.parametrize(
    ("ranks", "expected"), [([], 1.0), ([0, 0], 1.0), ([5], 1.0), ([4, 0], 2.0), ([1, 2, 3], 1.5), ([0, 0, 0, 7], 4.0)]
)
def test_balance_is_the_largest_over_the_mean(ranks: list[int], expected: float) -> None:
    assert balance(ranks) == expected


@pytest.mark.clause("N5", "R8")
def test_rows_needed_of_one_document() -> None:
    """Rank r of a causal document reads (r + 1) / cp of the rows: 0.5625 on average at cp 8, where all gather 1."""
    tokens = 4096
    costs = [rank_cost(PackedLayout([0, tokens]), "packed_contiguous", 8, rank) for rank in range(8)]
    assert [cost.kv_rows_needed for cost in costs] == [(rank + 1) * tokens // 8 for rank in range(8)]
    share = sum(cost.kv_rows_needed for cost in costs) / sum(cost.kv_rows_gathered for cost in costs)
    assert share == 0.5625
    dual = [rank_cost(PackedLayout([0, tokens]), "dual_chunk_swap", 8, rank).kv_rows_needed for rank in range(8)]
    assert dual == [(16 - rank) * tokens // 16 for rank in range(8)]


@pytest.mark.clause("N5", "R8")
def test_rows_needed_with_a_window_and_with_short_documents() -> None:
    window = AttentionMask(window=(10, -1))
    needed = [rank_cost(PackedLayout([0, 400]), "packed_contiguous", 4, r, window).kv_rows_needed for r in range(4)]
    assert needed == [100, 110, 110, 110]
    short = PackedLayout.from_lengths([25] * 16)
    assert [rank_cost(short, "packed_contiguous", 4, r).kv_rows_needed for r in range(4)] == [100] * 4


@pytest.mark.clause("N5")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((16, 2, 128, 64, 2), 12288),
        ((0, 8, 128, 128, 2), 0),
        ((1, 1, 1, 1, 8), 16),
        ((1000, 8, 192, 128, 4), 10_240_000),
    ],
)
def test_bytes_of_k_and_v(arguments: tuple[Any, ...], expected: int) -> None:
    assert kv_bytes(*arguments) == expected
