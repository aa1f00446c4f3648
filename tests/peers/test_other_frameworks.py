"""Our metadata and ownership against the code that other frameworks ship.

Run by `make peers`, which installs them. ring-flash-attention imports its CUDA kernels when it is imported; they are
replaced by empty stand-ins, since only its offset arithmetic is called.
"""

import importlib
import importlib.util
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl import AttentionMask, PackedLayout, Policy, partition_indices, rank_metadata, to_sliced

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def prepare_cu_seqlens():
    """`llama3_flash_attn_prepare_cu_seqlens` of ring-flash-attention 0.1.8."""
    with pytest.MonkeyPatch.context() as patch:
        kernels = types.ModuleType("flash_attn.flash_attn_interface")
        for name in ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"):
            setattr(kernels, name, None)
        package = types.ModuleType("ring_flash_attn")  # its __init__ would import every kernel
        (location,) = importlib.util.find_spec("ring_flash_attn").submodule_search_locations
        package.__path__ = [location]
        patch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
        patch.setitem(sys.modules, "flash_attn.flash_attn_interface", kernels)
        patch.setitem(sys.modules, "ring_flash_attn", package)
        module = importlib.import_module("ring_flash_attn.llama3_flash_attn_varlen")
        yield module.llama3_flash_attn_prepare_cu_seqlens


@pytest.mark.clause("R2", "R3", "R4", "R6", "R9")
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_sliced_form_equals_ring_flash_attention(prepare_cu_seqlens, data):
    import torch

    cp_size = data.draw(st.integers(1, 8))
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=8))
    lengths.append(-sum(lengths) % cp_size + cp_size * data.draw(st.integers(1, 3)))
    layout = PackedLayout.from_lengths(data.draw(st.permutations(lengths)))
    causal = data.draw(st.booleans())
    for rank in range(cp_size):
        meta = rank_metadata(layout, Policy.PACKED_CONTIGUOUS, cp_size, rank, AttentionMask(causal))
        ours = to_sliced(meta.steps[0])
        offsets = torch.tensor(layout.cu_seqlens, dtype=torch.int32)
        q, k, max_q, max_k, kv_slice = prepare_cu_seqlens(offsets, causal, rank, cp_size)
        lengths_q, lengths_k = np.diff(q.numpy()), np.diff(k.numpy())
        asks = lengths_q > 0  # theirs keeps documents of length zero at the rank's edge, which ask for nothing
        ours_asks = np.diff(ours.cu_seqlens_q) > 0
        assert np.diff(ours.cu_seqlens_q)[ours_asks].tolist() == lengths_q[asks].tolist()
        assert np.diff(ours.cu_seqlens_k)[ours_asks].tolist() == lengths_k[asks].tolist()
        assert (ours.max_seqlen_q, ours.max_seqlen_k, ours.kv_slice) == (max_q, max_k, kv_slice)


@pytest.mark.clause("P4", "P7")
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_packed_dual_chunk_swap_is_the_head_tail_balancer_of_torch(cp_size):
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    layout = PackedLayout.from_lengths([7, 0, 30], total_tokens=48)
    dealt = _HeadTailLoadBalancer(48, cp_size, "cpu")._generate_indices()[0].reshape(cp_size, -1).numpy()
    for rank in range(cp_size):
        ours = partition_indices(layout, Policy.PACKED_DUAL_CHUNK_SWAP, cp_size, rank)
        assert sorted(dealt[rank].tolist()) == ours.tolist()
