"""PyTorch as a witness: its attention on each document by itself, and its tensors as offsets."""

import numpy as np
import pytest
import witness
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import head_layouts, layouts, masks, parts_of, poison, tensors
from support import refused

from refimpl.attention import attention_backward, attention_forward
from refimpl.layout import PackedLayout
from refimpl.partition import next_token_labels, partition, unpartition


@pytest.fixture(scope="module")
def torch(require):
    module = require("torch")
    module.set_num_threads(1)
    return module


def sdpa(torch, q, k, v, dout, mask, scale):
    """out, lse, dq, dk, dv of one document without padding: tensors [n, heads, head_dim] in, NumPy out."""
    n, heads = q.shape[:2]
    q, k, v, dout = (torch.from_numpy(x).transpose(0, 1) for x in (q, k, v, dout))
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    band = torch.ones(n, n, dtype=torch.bool)
    left, right = mask.window
    if right >= 0:
        band = band.tril(right)
    if mask.causal:
        band = band.tril()
    if left >= 0:
        band = band.triu(-left)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=band, scale=scale, enable_gqa=True)
    out.backward(dout)
    scores = torch.einsum("hic,hjc->hij", q.detach(), k.detach().repeat_interleave(heads // len(k), dim=0))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    lse = scores.masked_fill(~band, float("-inf")).logsumexp(dim=-1)
    tensors = (out.detach(), q.grad, k.grad, v.grad)
    out, dq, dk, dv = (x.transpose(0, 1).numpy() for x in tensors)
    return out, lse.numpy(), dq, dk, dv


@pytest.mark.clause("A1", "A2", "A3", "A5", "A6", "B1", "B2", "B3", "K1", "K2", "K3")
@settings(max_examples=60)
@given(
    layout=layouts(max_documents=4, max_length=12),
    mask=masks(),
    heads=head_layouts(),
    scale=st.sampled_from([None, 0.4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_oracle_equals_sdpa_document_by_document(torch, layout, mask, heads, scale, seed):
    rng = np.random.default_rng(seed)
    real, physical, total = parts_of(layout)
    clean = tensors(rng, total, total, heads)
    padding = [row for row, (d, _) in enumerate(witness.rows(real, physical, total)) if d < 0]
    q, k, v, dout = (poison(x, padding, rng) for x in clean)
    out, lse = attention_forward(q, k, v, layout, mask, scale)
    got = [out, lse.T, *attention_backward(dout, q, k, v, out, lse, layout, mask, scale)]
    expected = [np.zeros(x.shape) for x in got]
    expected[1][:] = -np.inf
    for d in range(len(real) - 1):
        rows = slice(physical[d], physical[d] + real[d + 1] - real[d])
        if rows.start < rows.stop:
            results = list(sdpa(torch, *(x[rows] for x in clean), mask, scale))
            results[1] = results[1].T
            for whole, part in zip(expected, results, strict=True):
                whole[rows] = part
    for x, want in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-12, atol=1e-12)


@pytest.mark.clause("L2")
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_tensors_are_offsets(torch, dtype):
    offsets = torch.tensor([0, 3, 3, 7], dtype=getattr(torch, dtype))
    layout = PackedLayout(offsets, torch.tensor([0, 4, 4, 9], dtype=torch.int32), 12)
    assert parts_of(layout) == ([0, 3, 3, 7], [0, 4, 4, 9], 12)
    offsets[1] = 5
    assert layout.cu_seqlens.tolist() == [0, 3, 3, 7]
    assert parts_of(PackedLayout.from_lengths(torch.tensor([3, 0, 4]), 4))[1] == [0, 4, 4, 8]
    assert PackedLayout.from_position_ids(torch.tensor([0, 1, 0], dtype=torch.int32)).seqlens.tolist() == [2, 1]
    assert PackedLayout.from_segment_ids(torch.tensor([4, 4, 2])).seqlens.tolist() == [2, 1]


@pytest.mark.clause("L2")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "bool", "int16", "uint8", "complex64"])
def test_tensors_of_other_dtypes_are_refused(torch, dtype):
    with refused("offsets_type", "cu_seqlens"):
        PackedLayout(torch.tensor([0, 1]).to(getattr(torch, dtype)))


@pytest.mark.clause("L2")
def test_tensors_in_another_memory_are_refused_not_copied(torch):
    with refused("offsets_type", "cu_seqlens (Tensor)", "copy it there first"):
        PackedLayout(torch.empty(3, dtype=torch.int32, device="meta"))


@pytest.mark.clause("L2")
def test_tensors_of_other_shapes_are_refused(torch):
    with refused("offsets_shape", "cu_seqlens"):
        PackedLayout(torch.zeros(2, 2, dtype=torch.int32))
    with refused("offsets_shape", "cu_seqlens"):
        PackedLayout(torch.tensor(0))


@pytest.mark.clause("P7", "P10")
def test_tensors_are_partitioned_and_labelled(torch):
    layout = PackedLayout([0, 4, 8])
    ids = torch.arange(8)
    shards = partition(ids, layout, "dual_chunk_swap", 2)
    assert [shard.tolist() for shard in shards] == [[0, 3, 4, 7], [1, 2, 5, 6]]
    whole = unpartition([torch.from_numpy(shard) for shard in shards], layout, "dual_chunk_swap")
    assert whole.tolist() == ids.tolist()
    assert next_token_labels(ids, layout).tolist() == [1, 2, 3, -100, 5, 6, 7, -100]
