"""Benchmarks of `bench/gpu_check.py`: the kernels against PyTorch's attention, and the policies against each other.

Everything runs in one process on one GPU, on its default stream, and is timed by CUDA events. A spinning kernel goes
first, so that the host has enqueued a whole call before the clock starts: what is timed is the device alone, for all
sides alike. A row is the median of its repeats.
"""

import inspect
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupy_backend import partition
from cupy_backend.attention import attention_forward
from cupy_backend.context_parallel import context_parallel_backward, context_parallel_forward, kernels
from cupy_backend.device import CudaDevice, Device
from refimpl.cost import rank_cost
from refimpl.layout import PackedLayout
from refimpl.lengths import document_sets
from refimpl.mask import AttentionMask
from refimpl.metadata import rank_metadata
from refimpl.partition import Policy

WIDTH = 2048
"""Heads times head dim, of queries, keys and values alike."""
CP_SIZE = 4
SPIN_CYCLES = 20_000_000
CAUSAL = AttentionMask()
LENGTHS = (16384, 32768, 65536, 131072)
PACKED_TOKENS = 65536


@dataclass(frozen=True)
class Timing:
    """One row of the table: milliseconds, and TFLOP/s or GB/s; `note` says why there is none."""

    what: str
    who: str
    head_dim: int
    direction: str
    milliseconds: float | None
    rate: float | None
    unit: str
    note: str = ""


def device_milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """The median time of a call on the device, after one that does not count."""
    import torch

    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return statistics.median(times)


def packed_layout(tokens: int) -> PackedLayout:
    """Real documents of every shipped set in turn, each padded to what both policies cut, in `tokens` rows."""
    multiple = 2 * CP_SIZE
    sets = [lengths for _, lengths in sorted(document_sets().items())]
    longest = max(len(lengths) for lengths in sets)
    listed = [lengths[i] for i in range(longest) for lengths in sets if i < len(lengths) and lengths[i] > 0]
    taken, rows = [], 0
    for length in listed:
        if rows + -(-length // multiple) * multiple <= tokens:
            taken.append(length)
            rows += -(-length // multiple) * multiple
    return PackedLayout.from_lengths(taken, multiple, total_tokens=tokens)


def pairs(layout: PackedLayout) -> int:
    """Visible (query, key) pairs under a causal mask."""
    return rank_cost(layout, Policy.PACKED_CONTIGUOUS, 1, 0, CAUSAL).visible_pairs


def flops(layout: PackedLayout, direction: str) -> float:
    """Of two products forward and five backward, of the pairs that are seen."""
    return (4.0 if direction == "forward" else 10.0) * WIDTH * pairs(layout)


def tensors(tokens: int, head_dim: int) -> list[Any]:
    """q, k, v, dout: torch, bfloat16, [tokens, WIDTH / head_dim, head_dim]."""
    import torch

    shape = (tokens, WIDTH // head_dim, head_dim)
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def ours(layout: PackedLayout, head_dim: int, device: CudaDevice) -> dict[str, Callable[[], Any]]:
    """The whole buffer on one device."""
    q, k, v, dout = (device.as_array(x) for x in tensors(layout.total_tokens, head_dim))
    out, lse = attention_forward(q, k, v, layout, CAUSAL, device=device)
    backward = kernels(device).varlen_attention_backward
    step = rank_metadata(layout, Policy.PACKED_CONTIGUOUS, 1, 0, CAUSAL).steps[0]
    return {
        "forward": lambda: attention_forward(q, k, v, layout, CAUSAL, device=device),
        "backward": lambda: backward(dout, q, k, v, out, lse, step, CAUSAL, None),
    }


def _differentiated(forward: Callable[..., Any], inputs: list[Any], dout: Any) -> dict[str, Callable[[], Any]]:
    import torch

    leaves = [x.detach().requires_grad_() for x in inputs]
    out = forward(*leaves)
    return {
        "forward": lambda: forward(*inputs),
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
    }


def torch_sdpa(backend: str, tokens: int, head_dim: int) -> dict[str, Callable[[], Any]]:
    """scaled_dot_product_attention of one document by one of its backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    chosen = getattr(SDPBackend, backend)
    inputs = [x.transpose(0, 1)[None].contiguous() for x in tensors(tokens, head_dim)]

    def forward(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(chosen):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return _differentiated(forward, inputs[:3], inputs[3])


def torch_varlen(layout: PackedLayout, head_dim: int) -> dict[str, Callable[[], Any]]:
    """torch.nn.attention.varlen over the documents, without the padding between them, which it has no room for."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    lengths = layout.seqlens[layout.seqlens > 0]
    offsets = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device="cuda")
    *inputs, dout = tensors(int(lengths.sum()), head_dim)
    longest = int(lengths.max())
    known = inspect.signature(varlen_attn).parameters  # the switch has been renamed
    causal: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}

    def forward(q: Any, k: Any, v: Any) -> Any:
        return varlen_attn(q, k, v, offsets, offsets, longest, longest, **causal)

    return _differentiated(forward, inputs, dout)


def compare_attention(
    device: CudaDevice, head_dims: tuple[int, ...], has_time: Callable[[], bool], done: Callable[[Timing], None]
) -> None:
    """One document of each length, and packed real ones, by the kernels and by PyTorch."""
    batches = [(f"1 document of {n}", PackedLayout([0, n])) for n in LENGTHS]
    packed = packed_layout(PACKED_TOKENS)
    batches.append((f"{packed.num_documents} real documents in {PACKED_TOKENS}", packed))
    for head_dim in head_dims:
        for what, layout in batches:
            n = layout.total_tokens
            sides: dict[str, Callable[[], dict[str, Callable[[], Any]]]] = {
                "thdcp": lambda layout=layout, head_dim=head_dim: ours(layout, head_dim, device),
                "torch varlen": lambda layout=layout, head_dim=head_dim: torch_varlen(layout, head_dim),
            }
            if layout.num_documents == 1:
                for name, backend in (("flash", "FLASH_ATTENTION"), ("cuDNN", "CUDNN_ATTENTION")):
                    sides[f"torch SDPA {name}"] = lambda b=backend, n=n, d=head_dim: torch_sdpa(b, n, d)
            repeats = 10 if n <= 32768 else 3
            for who, make in sides.items():
                _time_side(what, who, head_dim, layout, make, repeats, has_time, done)


def _time_side(
    what: str,
    who: str,
    head_dim: int,
    layout: PackedLayout,
    make: Callable[[], dict[str, Callable[[], Any]]],
    repeats: int,
    has_time: Callable[[], bool],
    done: Callable[[Timing], None],
) -> None:
    if not has_time():
        done(Timing(what, who, head_dim, "both", None, None, "TFLOP/s", "left out: no time left"))
        return
    try:
        for direction, call in make().items():
            ms = device_milliseconds(call, repeats)
            done(Timing(what, who, head_dim, direction, ms, flops(layout, direction) / ms / 1e9, "TFLOP/s"))
    except Exception as error:  # A side that this PyTorch or GPU does not have leaves a row, and the others go on.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        done(Timing(what, who, head_dim, "both", None, None, "TFLOP/s", reason))


class Alone:
    """A rank of a group of which only this one is there: what the others would send is at hand, so nothing travels."""

    def __init__(self, rank: int, size: int, gathered: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._gathered = gathered

    def start_gather(self, arrays: Any) -> Callable[[], list[Any]]:
        """K and V of all ranks."""
        return lambda: self._gathered

    def reduce_scatter_sum(self, x: Any) -> Any:
        """This rank's own share of the sum."""
        return x[self.rank]

    def all_agree(self, facts: Any, error: Any = None) -> None:
        """Alone, it agrees."""
        if error is not None:
            raise error


def compare_policies(
    device: CudaDevice, head_dims: tuple[int, ...], has_time: Callable[[], bool], done: Callable[[Timing], None]
) -> None:
    """What each rank of a group computes, under both policies, for the same documents and the same tensors.

    The exchange is left out: it moves the same bytes under both. Reordering K and V and gathering a step's rows are in.
    The row of a policy is its slowest rank, which the others wait for; its rate is the share of work over that time.
    """
    layout = packed_layout(PACKED_TOKENS)
    for head_dim in head_dims:
        whole = [device.as_array(x) for x in tensors(PACKED_TOKENS, head_dim)]
        for policy in (Policy.PACKED_CONTIGUOUS, Policy.DUAL_CHUNK_SWAP):
            what = f"{layout.num_documents} real documents in {PACKED_TOKENS}, slowest of {CP_SIZE} ranks"
            if not has_time():
                done(Timing(what, str(policy), head_dim, "both", None, None, "TFLOP/s", "left out: no time left"))
                continue
            shards = [partition.partition(x, layout, policy, CP_SIZE, device=device) for x in whole]
            times: dict[str, list[float]] = {"forward": [], "backward": []}
            for rank in range(CP_SIZE):
                calls = _rank_calls(rank, layout, policy, shards, device)
                for direction, call in calls.items():
                    times[direction].append(device_milliseconds(call, 3))
            for direction, found in times.items():
                rate = flops(layout, direction) / CP_SIZE / max(found) / 1e9
                note = "ranks " + ", ".join(f"{ms:.2f}" for ms in found) + " ms"
                done(Timing(what, str(policy), head_dim, direction, max(found), rate, "TFLOP/s", note))


def _rank_calls(
    rank: int, layout: PackedLayout, policy: Policy, shards: list[list[Any]], device: Device
) -> dict[str, Callable[[], Any]]:
    """Forward and backward of one rank; its metadata is made once, as for all layers of a training step."""
    meta = rank_metadata(layout, policy, CP_SIZE, rank, CAUSAL)
    parts = replace(kernels(device), rank_metadata=lambda *_: meta)
    group = Alone(rank, CP_SIZE, [_stacked(shards[i], device) for i in (1, 2)])
    q, k, v, dout = (x[rank] for x in shards)

    def forward() -> Any:
        return context_parallel_forward(q, k, v, layout, policy, group, CAUSAL, parts=parts, device=device)

    _, _, saved = forward()
    return {"forward": forward, "backward": lambda: context_parallel_backward(dout, saved, group, parts)}


def _stacked(shards: list[Any], device: Device) -> Any:
    gathered = device.empty((len(shards), *shards[0].shape), shards[0].dtype)
    for rank, shard in enumerate(shards):
        gathered[rank] = shard
    return gathered


def bandwidth(device: CudaDevice, done: Callable[[Timing], None]) -> None:
    """Rows of 4 KB from rank order to sequence order and back, against a copy of as many bytes."""
    import cupy

    layout = packed_layout(PACKED_TOKENS)
    x = device.as_array(tensors(PACKED_TOKENS, 128)[0])
    result = device.empty(x.shape, x.dtype)
    rows = partition.rank_order(layout, Policy.DUAL_CHUNK_SWAP, CP_SIZE, device)
    calls = {
        "device copy": lambda: cupy.copyto(result, x),
        "scatter_rows": lambda: partition.scatter_rows(x, rows, result, device),
        "gather_rows": lambda: partition.gather_rows(x, rows, device),
    }
    for who, call in calls.items():
        ms = device_milliseconds(call, 20)
        done(Timing(f"{PACKED_TOKENS} rows", who, 128, "-", ms, 2 * x.nbytes / ms / 1e6, "GB/s"))
