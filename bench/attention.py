"""Time `refimpl.tiled` against PyTorch's scaled_dot_product_attention, document by document, on this machine's CPU.

    python bench/attention.py [--repeats N] [--documents 1,16,256,39] [--head-dim 64,128] [--workers N]
    python bench/attention.py --memory

Both sides get the same threads, and take turns in one process, so that a slow phase of the machine hits both. A ratio
is PyTorch's time over ours, the median over the turns: above 1, ours is faster. Both must agree before any timing.

PyTorch has no packed attention on a CPU, so it loops over the documents, as cheaply as it can: views from `torch.split`
(whose backward is one concatenation; slicing would add a whole gradient buffer for every document) and `enable_gqa`.

`--memory` runs forward and backward of 32768 tokens in a fresh process and prints its peak resident memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from refimpl import tiled
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask

HEADS, KV_HEADS = 8, 2
CAUSAL = AttentionMask()
LENGTHS_FILE = Path(tiled.__file__).parent / "data" / "document_lengths.json"


@dataclass(frozen=True)
class Workload:
    """A packed batch, and the lengths that `torch.split` cuts it into: every document, then the padding behind them."""

    name: str
    layout: PackedLayout

    @property
    def split_lengths(self) -> list[int]:
        """What `torch.split` is given."""
        return [*self.layout.seqlens.tolist(), self.layout.total_tokens - int(self.layout.cu_seqlens[-1])]


def workloads() -> dict[int, Workload]:
    """By number of documents: 8192 tokens in 1, 16 and 256 of random lengths, 32768 tokens in 39 real documents."""
    cases = {n: Workload(f"8192 tokens, {n} documents", random_layout(8192, n)) for n in (1, 16, 256)}
    cases[39] = Workload("32768 tokens, 39 real documents", real_layout(32768, longest=2000))
    return cases


def random_layout(tokens: int, documents: int) -> PackedLayout:
    """Documents of random lengths, each at least 1, none of padding."""
    cuts = np.random.default_rng(documents).choice(np.arange(1, tokens), documents - 1, replace=False)
    return PackedLayout.from_lengths(np.diff([0, *np.sort(cuts), tokens]))


def real_layout(tokens: int, longest: int) -> PackedLayout:
    """The first files of CPython's standard library, of at most `longest` bytes each, that fit; the rest is padding."""
    lengths = np.array(json.loads(LENGTHS_FILE.read_text())["sets"]["cpython311_stdlib"]["lengths"])
    lengths = lengths[(lengths > 0) & (lengths <= longest)]
    return PackedLayout.from_lengths(lengths[np.cumsum(lengths) <= tokens], total_tokens=tokens)


def inputs(tokens: int, dim: int) -> tuple[np.ndarray[Any, np.dtype[np.float32]], ...]:
    """q, k, v and dout, float32."""
    rng = np.random.default_rng(dim)
    return tuple(rng.standard_normal((tokens, h, dim), np.float32) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS))


def ours(workload: Workload, arrays: Any, workers: int) -> dict[str, Callable[[], Any]]:
    q, k, v, dout = arrays

    def forward() -> Any:
        return tiled.attention_forward(q, k, v, workload.layout, CAUSAL, workers=workers)

    def both() -> Any:
        out, lse = forward()
        return out, *tiled.attention_backward(dout, q, k, v, out, lse, workload.layout, CAUSAL, workers=workers)

    return {"forward": lambda: forward()[:1], "forward + backward": both}


def pytorch(workload: Workload, arrays: Any) -> dict[str, Callable[[], Any]]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v, dout = (torch.from_numpy(x) for x in arrays)
    lengths = workload.split_lengths
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def attend(q: Any, k: Any, v: Any) -> Any:
        outs = []
        *documents, padding = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        for document in documents:
            one = (x.transpose(0, 1)[None] for x in document)
            outs.append(scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat([*outs, torch.zeros_like(padding[0])])

    def forward() -> Any:
        with torch.no_grad():
            return (attend(q, k, v),)

    def both() -> Any:
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return {"forward": forward, "forward + backward": both}


def check_agreement(workload: Workload, mine: Any, theirs: Any) -> None:
    """Both within 2e-5 of the largest value, on real rows."""
    real = workload.layout.document_ids >= 0
    for name, ours, torchs in zip(("out", "dq", "dk", "dv"), mine, theirs, strict=False):
        a, b = np.asarray(ours)[real], np.asarray(torchs)[real]
        error = np.abs(a - b).max() / np.abs(b).max()
        if not error < 2e-5:
            sys.exit(f"{workload.name}: {name} differs from PyTorch's by {error:.1e} of its largest value")


def compare(repeats: int, documents: list[int], head_dims: list[int], workers: int) -> None:
    import torch

    torch.set_num_threads(workers)
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, {workers} threads, NumPy {np.__version__}, PyTorch {torch.__version__}, float32, ", end="")
    print(f"{HEADS} query heads, {KV_HEADS} K/V heads, causal, {repeats} turns; ratio: PyTorch's time / ours\n")
    print("| workload | head_dim | pass | ours ms | PyTorch ms | ratio | lowest | highest |")
    print("|---|---|---|---|---|---|---|---|")
    for n in documents:
        workload = workloads()[n]
        for dim in head_dims:
            arrays = inputs(workload.layout.total_tokens, dim)
            mine, theirs = ours(workload, arrays, workers), pytorch(workload, arrays)
            for name in mine:
                check_agreement(workload, mine[name](), theirs[name]())
                times = [in_turn(mine[name], theirs[name], ours_first=turn % 2 == 0) for turn in range(repeats)]
                ratios = [b / a for a, b in times]
                a, b = (statistics.median(side) * 1e3 for side in zip(*times, strict=True))
                print(
                    f"| {workload.name} | {dim} | {name} | {a:.1f} | {b:.1f} | {statistics.median(ratios):.2f} "
                    f"| {min(ratios):.2f} | {max(ratios):.2f} |",
                    flush=True,
                )


def in_turn(mine: Callable[[], Any], theirs: Callable[[], Any], ours_first: bool) -> tuple[float, float]:
    """Seconds of both, one right after the other."""
    seconds = {}
    for run in (mine, theirs) if ours_first else (theirs, mine):
        start = time.perf_counter()
        run()
        seconds[run] = time.perf_counter() - start
    return seconds[mine], seconds[theirs]


def measure_memory(tokens: int, heads: int, dim: int, documents: int, workers: int) -> None:
    """Run forward and backward, float32, and print the peak resident memory of this process in MiB."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((tokens, heads, dim), np.float32) for _ in range(4))
    layout = random_layout(tokens, documents)
    out, lse = tiled.attention_forward(q, k, v, layout, CAUSAL, workers=workers)
    results = tiled.attention_backward(dout, q, k, v, out, lse, layout, CAUSAL, workers=workers)
    arrays = sum(x.nbytes for x in (q, k, v, dout, out, lse, *results))
    with open("/proc/self/status") as status:  # ru_maxrss would count what the process was started from
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024
    print(f"{tokens} tokens, {documents} documents, {heads} heads, D {dim}, {workers} workers: ", end="")
    print(f"peak {peak:.0f} MiB, of which inputs and outputs {arrays / 2**20:.0f} MiB")


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="turns of each side, default 7")
    parser.add_argument("--documents", type=integers, default=list(workloads()), help="workloads, default 1,16,256,39")
    parser.add_argument("--head-dim", type=integers, default=[64, 128], help="default 64,128")
    parser.add_argument("--workers", type=int, default=tiled.default_workers(), help="threads of both sides")
    parser.add_argument("--memory", action="store_true", help="print peak memory instead")
    parser.add_argument("--memory-of", type=int, metavar="DOCUMENTS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        measure_memory(32768, HEADS, 64, args.memory_of, args.workers)
    elif args.memory:
        for documents in (1, 39, 1024):
            command = [sys.executable, __file__, "--memory-of", str(documents), "--workers", str(args.workers)]
            subprocess.run(command, check=True)
    else:
        compare(args.repeats, args.documents, args.head_dim, args.workers)


if __name__ == "__main__":
    main()
