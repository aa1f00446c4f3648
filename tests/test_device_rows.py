"""Partitioning, metadata, positions and labels on the host device, against the reference; the public signatures."""

import inspect
from dataclasses import fields
from importlib import import_module

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import divisible_layouts
from support import refused

from cupy_backend import metadata, partition
from cupy_backend.device import HOST, HostDevice
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.partition import Policy, padded_for

REF_PARTITION, REF_METADATA = (import_module(f"refimpl.{name}") for name in ("partition", "metadata"))
RANDOM = HostDevice("random", 5, "random")
MASKS = [AttentionMask(), AttentionMask(False), AttentionMask(window=(20, 0)), AttentionMask(False, (30, 9))]


def small_layout(policy, cp_size=2):
    return padded_for(PackedLayout.from_lengths([5, 0, 100, 17], padded_lengths=[9, 3, 100, 20]), policy, cp_size)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *((partition, name) for name in ("partition", "unpartition", "partition_indices")),
        *((metadata, name) for name in ("rank_metadata", "position_ids", "next_token_labels")),
    ],
)
def test_signatures_are_those_of_the_reference_and_a_device(module, name):
    of_reference = REF_METADATA if name == "rank_metadata" else REF_PARTITION
    expected = list(inspect.signature(getattr(of_reference, name)).parameters.values())
    got = list(inspect.signature(getattr(module, name)).parameters.values())
    assert [(p.name, p.default) for p in got[:-1]] == [(p.name, p.default) for p in expected]
    assert got[-1].name == "device"


@pytest.mark.clause("P1", "P7", "P8")
@pytest.mark.parametrize("cp_size", [1, 3, 4])
@pytest.mark.parametrize("policy", Policy)
def test_rows_are_those_of_the_reference(policy, cp_size):
    for name, layout in divisible_layouts(policy, cp_size):
        for rank in range(cp_size):
            got = partition.partition_indices(layout, policy, cp_size, rank)
            expected = REF_PARTITION.partition_indices(layout, policy, cp_size, rank)
            assert got.dtype == np.int64
            assert np.array_equal(got, expected), (name, rank)


@pytest.mark.clause("P1", "P7")
@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [
        ((), 0, np.int64),
        ((2, 8), 0, np.float16),
        ((3,), 0, np.uint8),
        ((2, 3), 1, ml_dtypes.bfloat16),
        ((2, 5), -1, np.float32),
        ((0, 4), 0, np.float32),
        ((6,), 0, np.complex128),
    ],
)
@pytest.mark.parametrize("policy", Policy)
def test_partition_and_back(policy, shape, axis, dtype):
    layout = small_layout(policy)
    whole = list(shape)
    whole.insert(axis % (len(shape) + 1), layout.total_tokens)
    x = np.random.default_rng(1).integers(0, 200, whole).astype(dtype)
    expected = REF_PARTITION.partition(x, layout, policy, 2, axis)
    for device in (None, RANDOM):
        shards = partition.partition(x, layout, policy, 2, axis, device)
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(shards, expected, strict=True))
        assert np.array_equal(partition.unpartition(shards, layout, policy, axis, device), x)


@pytest.mark.clause("P7")
def test_torch_tensors_are_partitioned(require):
    torch = require("torch")
    layout = small_layout(Policy.DUAL_CHUNK_SWAP)
    x = torch.arange(layout.total_tokens * 4).to(torch.bfloat16).reshape(-1, 4)
    shards = partition.partition(x, layout, "dual_chunk_swap", 2)
    rows = REF_PARTITION.partition_indices(layout, "dual_chunk_swap", 2, 1)
    assert (shards[1].astype(np.float32) == x[rows].float().numpy()).all()


@pytest.mark.clause("P6", "P7")
def test_what_the_reference_refuses_is_refused():
    layout = PackedLayout([0, 5, 12])
    x = np.zeros((12, 2))
    for call in (
        lambda m: m.partition(x, layout, "dual_chunk_swap", 2),
        lambda m: m.partition(x[:8], layout, "packed_contiguous", 2),
        lambda m: m.partition(x, layout, "packed_contiguous", 2, 1),
        lambda m: m.partition(x, layout, "zigzag", 2),
        lambda m: m.partition_indices(layout, "packed_contiguous", 2, 2),
        lambda m: m.partition_indices(layout, "packed_contiguous", 5, 0),
        lambda m: m.unpartition([x[:6], x[:5]], layout, "packed_contiguous"),
        lambda m: m.unpartition([x[:6], x[:6].astype(np.float32)], layout, "packed_contiguous"),
    ):
        with pytest.raises(SpecError) as expected:
            call(REF_PARTITION)
        with refused(expected.value.code, expected.value.message):
            call(partition)


@pytest.mark.clause("R1", "R2", "R3", "R4", "R5", "R6", "R8")
@pytest.mark.parametrize("cp_size", [1, 3, 4])
@pytest.mark.parametrize("policy", Policy)
def test_metadata_is_that_of_the_reference(policy, cp_size):
    for i, (name, layout) in enumerate(divisible_layouts(policy, cp_size)):
        mask = MASKS[i % len(MASKS)]
        for rank in {0, cp_size - 1}:
            expected = REF_METADATA.rank_metadata(layout, policy, cp_size, rank, mask)
            same_metadata(metadata.rank_metadata(layout, policy, cp_size, rank, mask), expected, name)


@pytest.mark.clause("R5", "R8")
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("policy", Policy)
def test_metadata_under_every_mask_in_random_order(policy, mask):
    layout = small_layout(policy, 4)
    for rank in range(4):
        expected = REF_METADATA.rank_metadata(layout, policy, 4, rank, mask)
        same_metadata(metadata.rank_metadata(layout, policy, 4, rank, mask, RANDOM), expected, rank)


def same_metadata(got, expected, where):
    assert np.array_equal(got.indices, expected.indices), where
    assert np.array_equal(got.kv_ranges, expected.kv_ranges), where
    for a, b in zip(got.step_rows, expected.step_rows, strict=True):
        assert np.array_equal(a, b), where
    for a, b in zip(got.steps, expected.steps, strict=True):
        for field in fields(b):
            x, y = getattr(a, field.name), getattr(b, field.name)
            assert (x is None) == (y is None), (where, field.name)
            assert y is None or np.array_equal(x, y), (where, field.name)
            assert getattr(x, "dtype", None) == getattr(y, "dtype", None), (where, field.name)


@pytest.mark.clause("L2", "P6")
def test_what_only_the_device_sees_is_raised_when_asked_for():
    cu, padded = np.array([0, 4, 3], np.int32), np.array([0, 4, 8], np.int32)
    made = metadata.device_metadata(cu, padded, 8, "packed_contiguous", 2, 0)
    with refused("offsets_decreasing", "offsets on host are refused at document 1"):
        made.check(HostDevice())
    metadata.device_metadata(padded, padded, 8, "packed_contiguous", 2, 0).check(HostDevice())


def test_offsets_of_another_kind_are_refused():
    cu = np.array([0, 4, 8], np.int32)
    with refused("dtype", "cu_seqlens_padded is int64[3]: expected int32 [n + 1]"):
        metadata.device_metadata(cu, cu.astype(np.int64), 8, "packed_contiguous", 2, 0)
    with refused("offsets_count", "cu_seqlens has 2 entries but cu_seqlens_padded has 3"):
        metadata.device_metadata(cu[:2], cu, 8, "packed_contiguous", 2, 0)
    with refused("cp_rank", "cp_rank is 2"):
        metadata.device_metadata(cu, cu, 8, "packed_contiguous", 2, 2)


@pytest.mark.clause("L6", "P10")
def test_positions():
    for name, layout in divisible_layouts(Policy.DUAL_CHUNK_SWAP, 2):
        assert np.array_equal(metadata.position_ids(layout), layout.positions), name
        assert np.array_equal(metadata.document_ids(layout), layout.document_ids), name


@pytest.mark.clause("L7", "P10")
@pytest.mark.parametrize("trailing", [(), (3,), (2, 2)])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint32, np.uint64, np.int16, np.uint8])
def test_labels(dtype, trailing):
    layout = PackedLayout.from_lengths([5, 0, 1, 9], padded_lengths=[7, 2, 1, 9], total_tokens=25)
    ids = np.random.default_rng(2).integers(0, 250, (25, *trailing)).astype(dtype)
    for ignore in (-100, 0, np.iinfo(dtype).max):
        if ignore < np.iinfo(dtype).min:
            with refused("dtype", "ignore_index -100 does not fit"):
                metadata.next_token_labels(ids, layout, ignore)
            continue
        got = metadata.next_token_labels(ids, layout, ignore)
        expected = REF_PARTITION.next_token_labels(ids, layout, ignore)
        assert got.dtype == expected.dtype
        assert np.array_equal(got, expected)


def test_labels_by_hand():
    layout = PackedLayout([0, 3, 5], [0, 4, 6], 7)
    ids = np.arange(10, 17)
    assert metadata.next_token_labels(ids, layout).tolist() == [11, 12, -100, -100, 15, -100, -100]
    with refused("shape", "expected 7"):
        metadata.next_token_labels(ids[:5], layout)
    with refused("dtype", "expected integers"):
        metadata.next_token_labels(ids.astype(float), layout)


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_rows_may_start_at_any_address(shift):
    """Accesses are as wide as both addresses allow; the host refuses wider ones, which would not be aligned."""
    x = HOST.zeros((16 * 9 + 16,), np.uint8)[shift : shift + 16 * 9].reshape(9, 16)
    x[:] = np.random.default_rng(4).integers(0, 256, x.shape)
    rows = np.array([3, 8, 0])
    assert np.array_equal(partition.gather_rows(x, rows, HOST), x[rows])
    back = HOST.zeros((16 * 9 + 16,), np.uint8)[shift : shift + 16 * 9].reshape(9, 16)
    partition.scatter_rows(np.ascontiguousarray(x[rows]), rows, back, HOST)
    assert np.array_equal(back[rows], x[rows])
    assert not np.delete(back, rows, axis=0).any()
