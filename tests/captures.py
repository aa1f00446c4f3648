"""Captured steps for tests: right ones, as a step in some dtype would give them, and the files they come in."""

import json
import struct
from dataclasses import dataclass, field

import numpy as np

from refimpl import AttentionMask, PackedLayout, partition, partition_indices
from refimpl.attention import attention_backward, attention_forward
from refimpl.conformance.yardstick import ROUNDING

CAUSAL = AttentionMask()
PADDED = PackedLayout([0, 13, 13, 43, 60], [0, 16, 16, 48, 72], total_tokens=80)
"""80 rows: padding behind documents and at the end, a document of no tokens; divisible for every policy at cp 4."""
NAMES = ("q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv")


@dataclass
class Step:
    """A step, whole tensors in buffer order; float32 holds what is bfloat16."""

    layout: PackedLayout
    mask: AttentionMask
    dtype: str
    tensors: dict
    policy: str = "dual_chunk_swap"
    cp_size: int = 4
    more: dict = field(default_factory=dict)

    @property
    def settings(self):
        return {
            "cu_seqlens": self.layout.cu_seqlens,
            "cu_seqlens_padded": self.layout.cu_seqlens_padded,
            "total_tokens": self.layout.total_tokens,
            "policy": self.policy,
            "cp_size": self.cp_size,
            "causal": self.mask.causal,
            "window": self.mask.window,
        } | self.more

    def indices(self, rank):
        """The rows that a rank holds."""
        return partition_indices(self.layout, self.policy, self.cp_size, rank)

    def parts(self, name, policy=None):
        """The ranks' parts of a tensor."""
        axis = 1 if name == "lse" else 0
        return partition(self.tensors[name], self.layout, policy or self.policy, self.cp_size, axis)


def rounded(x, dtype):
    """Float numbers rounded to the dtype; bfloat16 in float32."""
    return ROUNDING[dtype](x) if dtype == "bfloat16" else x.astype(dtype)


def step(
    layout=PADDED, dtype="float32", mask=CAUSAL, heads=(4, 2), dims=(8, 6), seed=0, scale=None, padding=np.nan, **more
):
    """A right step: computed in float64 from rounded inputs, rounded at the end. Padding inputs hold `padding`."""
    random = np.random.default_rng(seed)
    (heads_q, heads_k), (dim, dim_v), rows = heads, dims, layout.total_tokens
    shapes = {"q": (heads_q, dim), "k": (heads_k, dim), "v": (heads_k, dim_v), "dout": (heads_q, dim_v)}
    x = {name: rounded(random.standard_normal((rows, *shape)), dtype) for name, shape in shapes.items()}
    for tensor in x.values():
        tensor[layout.document_ids < 0] = padding
    out, lse = attention_forward(x["q"], x["k"], x["v"], layout, mask, scale)
    gradients = attention_backward(x["dout"], x["q"], x["k"], x["v"], out, lse, layout, mask, scale)
    x |= {name: rounded(y, dtype) for name, y in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True)}
    x["lse"] = lse.astype(np.float64 if dtype == "float64" else np.float32)  # as kernels keep it
    return Step(layout, mask, dtype, x, **more)


def for_npz(x, dtype):
    """What np.savez takes: bfloat16 as ml_dtypes has it, if it is there, else as its bits."""
    if dtype != "bfloat16" or x.dtype == np.float64:
        return x
    import ml_dtypes

    return x.astype(ml_dtypes.bfloat16)


def save_npz(path, step, tensors=None):
    """One npz file; lse keeps its own dtype."""
    tensors = step.tensors if tensors is None else tensors
    stored = {n: x if n.startswith("lse") else for_npz(x, step.dtype) for n, x in tensors.items()}
    np.savez(path, **stored, **step.settings)
    return path


def safetensors_bytes(tensors, metadata=None, header=None):
    """A safetensors file written by hand. tensors: name -> (dtype in the format's words, shape, bytes)."""
    entries, data = {} if metadata is None else {"__metadata__": metadata}, b""
    for name, (dtype, shape, content) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(entries if header is None else header).encode()
    return struct.pack("<Q", len(text)) + text + data


def save_torch(path, step, tensors=None):
    """One safetensors file by the package of that name, from torch tensors, settings as metadata."""
    import torch
    from safetensors.torch import save_file

    tensors = step.tensors if tensors is None else tensors
    as_torch = {n: torch.from_numpy(np.ascontiguousarray(x)) for n, x in tensors.items()}
    if step.dtype == "bfloat16":
        as_torch = {n: x if n.startswith("lse") else x.to(torch.bfloat16) for n, x in as_torch.items()}
    metadata = {n: str(x.tolist() if isinstance(x, np.ndarray) else x) for n, x in step.settings.items()}
    save_file(as_torch, path, metadata)
    return path
