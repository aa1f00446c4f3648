"""What tests of kernels share: orders to run them in, and layouts of real documents with every kind of padding."""

import numpy as np

from cupy_backend.device import HostDevice
from refimpl.layout import PackedLayout
from refimpl.lengths import document_sets
from refimpl.partition import Policy, padded_for

ORDERS = [
    {"schedule": "in_order"},
    *({"schedule": "random", "seed": seed, "cp_async": "random"} for seed in (1, 2)),
    *({"schedule": "priority", "seed": seed, "cp_async": "random"} for seed in (1, 2)),
    {"schedule": "reverse", "cp_async": "lazy"},
]
"""In order, four random orders with copies done at random moments, and the reverse with copies done late."""

CUTS = {
    Policy.DUAL_CHUNK_SWAP: (1, 2),
    Policy.PACKED_CONTIGUOUS: (0, 1),
    Policy.PACKED_DUAL_CHUNK_SWAP: (0, 2),
}
"""A policy as kernels take it: per_document, chunks_per_rank."""


def real_lengths(count, longest=2000):
    """Real documents, those of each shipped set in turn."""
    sets = [[n for n in lengths if n <= longest] for lengths in document_sets().values()]
    return [sets[i % len(sets)][i // len(sets)] for i in range(count)]


def layouts():
    """Name and layout: every kind of padding, and documents of no tokens at each place."""
    rng = np.random.default_rng(7)
    lengths = real_lengths(12)
    gaps = rng.integers(0, 40, len(lengths))
    yield "no padding", PackedLayout.from_lengths(lengths)
    yield "behind documents", PackedLayout.from_lengths(lengths, padded_lengths=np.array(lengths) + gaps)
    yield "multiples of 16", PackedLayout.from_lengths(lengths, multiple_of=16)
    yield "past the last offset", PackedLayout.from_lengths(lengths, total_tokens=sum(lengths) + 1000)
    with_empty = [0, 0, *lengths[:4], 0, *lengths[4:8], 0, 0, 0]
    yield "empty documents", PackedLayout.from_lengths(with_empty)
    all_kinds = np.array(with_empty) + rng.integers(0, 9, len(with_empty))
    yield (
        "empty documents and gaps",
        PackedLayout.from_lengths(with_empty, padded_lengths=all_kinds, total_tokens=int(all_kinds.sum()) + 77),
    )
    yield "only padding", PackedLayout([0, 0, 0], [0, 30, 50], 64)
    yield "no documents", PackedLayout([0], total_tokens=48)
    yield "one document", PackedLayout([0, 4096])
    yield "many documents", PackedLayout.from_lengths(rng.integers(0, 9, 700))


def divisible_layouts(policy, cp_size):
    """The same with the least padding that the policy needs."""
    for name, layout in layouts():
        yield name, padded_for(layout, policy, cp_size)


def device_offsets(layout):
    """cu_seqlens and cu_seqlens_padded as kernels take them."""
    return layout.cu_seqlens.astype(np.int32), layout.cu_seqlens_padded.astype(np.int32)


def blocks(count, threads=256):
    return max(1, -(-count // threads))


class Recorder:
    """A host device, with what its launches did."""

    def __init__(self, **order):
        self._device = HostDevice(**order)
        self.launches = []

    def __getattr__(self, name):
        return getattr(self._device, name)

    def launch(self, source, kernel, *args, **kwargs):
        statistics = self._device.launch(source, kernel, *args, **kwargs)
        self.launches.append((source, kernel, statistics))
        return statistics
