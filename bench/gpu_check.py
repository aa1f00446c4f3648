"""Check the GPU backend on a machine with a GPU, CuPy and PyTorch, and without a network: right first, then how fast.

    python bench/gpu_check.py [--folder build/gpu-check] [--seconds 290] [--no-bench]

1. every case of the conformance kit by the kernels, in each dtype, judged as `thdcp check` judges
2. `thdcp verify` with all ranks in turn on one GPU, tensors through host memory, at head dims 64 and 128
3. compute-sanitizer memcheck and racecheck over small cases, where it is found
4. `thdcp verify` over NCCL, one MPI rank a GPU, where there is an MPI launcher
5. the benchmarks of `bench/gpu_timing.py`, until the time is up

The table goes to standard output, and all of it as JSON into the folder. Ends with 0 when all is right, 1 when
something is wrong, 2 when this machine cannot run it.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gpu_timing
from gpu_timing import Timing

from cupy_backend.backends import on_gpu
from cupy_backend.device import CudaDevice
from refimpl.collectives import run_ranks
from refimpl.conformance import check, vectors
from refimpl.conformance.adapters import Adapter
from refimpl.conformance.declaration import Declaration
from refimpl.errors import SpecError
from refimpl.lengths import default_lengths
from refimpl.mask import AttentionMask
from refimpl.partition import Policy
from refimpl.verify import Plan, verify_rank

DTYPES = ("float32", "float16", "bfloat16")
SMALL_CASES = 60
"""Cases that a sanitizer, which slows kernels down a hundredfold, is given."""
ROOT = Path(__file__).resolve().parent.parent


def say(line: str) -> None:
    """Print at once: a check that hangs must be seen to."""
    print(line, flush=True)


def machine(device: CudaDevice) -> dict[str, Any]:
    """The GPU, its driver, and the versions of what runs."""
    import cupy
    import torch

    properties = cupy.cuda.runtime.getDeviceProperties(device.ordinal)
    return {
        "gpu": properties["name"].decode(),
        "gpus": cupy.cuda.runtime.getDeviceCount(),
        "compute_capability": cupy.cuda.Device(device.ordinal).compute_capability,
        "driver_cuda": cupy.cuda.runtime.driverGetVersion(),
        "driver": _driver(),
        "python": platform.python_version(),
        "cupy": cupy.__version__,
        "torch": torch.__version__,
        "thdcp": _own_version(),
    }


def _own_version() -> str:
    try:
        return version("thdcp")
    except PackageNotFoundError:
        return "a checkout"


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()


def conformance(device: CudaDevice, dtype: str, count: int | None = None) -> list[str]:
    """What is wrong in the kit's cases, a line each; `count`: so many cases, spread over all of them."""
    from cupy_backend.adapter import answer

    adapter = Adapter("gpu", lambda case: answer(case, dtype, device), Declaration(f"thdcp on {device.name}", dtype))
    every = vectors.load()
    chosen = every if count is None else every[:: max(1, len(every) // count)]
    results = check.run_adapter(chosen, adapter)
    wrong = [f"{result.id}: {result.message}" for result in results if result.verdict != "pass"]
    say(f"conformance, {dtype}: {len(results) - len(wrong)} of {len(results)} cases pass")
    return wrong


def ranks_in_turn(head_dim: int) -> list[str]:
    """What is wrong when four ranks, threads of this process, share the GPU and exchange through host memory."""
    plan = Plan(
        lengths=tuple(default_lengths(4096)),
        policies=tuple(Policy),
        masks=(AttentionMask(), AttentionMask(window=(64, 0)), AttentionMask(causal=False)),
        heads=((4, 1), (8, 1), (2, 2)),
        head_dim=head_dim,
        dtypes=DTYPES,
        backend="cupy",
    )
    backend = on_gpu()
    results = run_ranks(4, lambda group: verify_rank(group, plan, backend=backend))[0]
    wrong = [f"{r.case.policy}, {r.case.dtype}, heads {r.case.heads}: {r.first_wrong}" for r in results if not r.agrees]
    say(f"4 ranks in turn, head_dim {head_dim}: {len(results) - len(wrong)} of {len(results)} cases agree")
    return wrong


def sanitized() -> list[str]:
    """What compute-sanitizer finds in small cases."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        say("compute-sanitizer: not found, left out")
        return []
    wrong = []
    for kind in ("memcheck", "racecheck"):
        command = [tool, "--tool", kind, "--error-exitcode", "9", sys.executable, __file__, "--small"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
        except subprocess.TimeoutExpired:
            say(f"compute-sanitizer {kind}: not done after 90 s, nothing found so far")
            continue
        say(f"compute-sanitizer {kind}: {'clean' if done.returncode == 0 else 'FOUND SOMETHING'}")
        if done.returncode != 0:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            wrong += [f"{kind}: {line}" for line in lines[-20:]]
    return wrong


def over_nccl(gpus: int) -> list[str]:
    """What is wrong when every GPU is a rank of its own."""
    beside = Path(sys.executable).parent / "mpiexec"
    launcher = os.environ.get("MPIEXEC") or (str(beside) if beside.exists() else shutil.which("mpirun"))
    if launcher is None or importlib.util.find_spec("mpi4py") is None:
        say("NCCL: no MPI launcher or no mpi4py, left out")
        return []
    command = [*launcher.split(), "-n", str(gpus), sys.executable, "-m", "refimpl.cli", "verify", "--backend", "cupy"]
    try:
        options = ["--lengths", "300,0,170,41", "--head-dim", "64"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=90, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return [f"NCCL on {gpus} ranks: not done after 90 s"]
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    say(f"NCCL on {gpus} ranks: {lines[-1] if lines else 'no output'}")
    return [] if done.returncode == 0 else [f"NCCL on {gpus} ranks: {line}" for line in lines[-8:]]


def benchmarks(device: CudaDevice, has_time: Any) -> list[Timing]:
    """All rows, printed as they are found."""
    rows: list[Timing] = []
    say("\n| what | who | head_dim | direction | ms | rate | note |\n|---|---|---|---|---|---|---|")

    def done(row: Timing) -> None:
        rows.append(row)
        ms = "-" if row.milliseconds is None else f"{row.milliseconds:.3f}"
        rate = "-" if row.rate is None else f"{row.rate:.1f} {row.unit}"
        say(f"| {row.what} | {row.who} | {row.head_dim} | {row.direction} | {ms} | {rate} | {row.note} |")

    gpu_timing.bandwidth(device, done)
    gpu_timing.compare_policies(device, (128, 64), has_time, done)
    gpu_timing.compare_attention(device, (128, 64), has_time, done)
    return rows


def find_gpu() -> CudaDevice:
    """The first GPU. SpecError missing_package where there is none, or CuPy or PyTorch cannot use it."""
    device = CudaDevice(0)
    try:
        import torch

        usable = torch.cuda.is_available()
    except ImportError:
        usable = False
    if not usable:
        raise SpecError("missing_package", "gpu-check compares with PyTorch: install a build of torch for CUDA")
    return device


def main() -> int:
    """Run the checks; 0 all right, 1 something wrong, 2 this machine cannot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu-check", help="where the JSON goes")
    parser.add_argument("--seconds", type=float, default=290.0, help="no benchmark starts after as many")
    parser.add_argument("--no-bench", action="store_true", help="correctness alone")
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    started = time.monotonic()
    try:
        device = find_gpu()
    except SpecError as error:
        print(f"gpu-check: {error} [{error.code}]", file=sys.stderr)
        return 2
    if options.small:
        return 1 if any(conformance(device, dtype, SMALL_CASES) for dtype in ("float32", "bfloat16")) else 0
    about = machine(device)
    say(", ".join(f"{name} {value}" for name, value in about.items()))
    wrong = [line for dtype in DTYPES for line in conformance(device, dtype)]
    wrong += [line for head_dim in (64, 128) for line in ranks_in_turn(head_dim)]
    wrong += sanitized()
    wrong += over_nccl(about["gpus"])
    for line in wrong:
        say(f"WRONG {line}")
    rows = []
    if not options.no_bench:
        rows = benchmarks(device, lambda: time.monotonic() - started < options.seconds - 20)
    options.folder.mkdir(parents=True, exist_ok=True)
    found = {"machine": about, "wrong": wrong, "timings": [asdict(row) for row in rows]}
    (options.folder / "gpu_check.json").write_text(json.dumps(found, indent=1))
    say(f"\n{'something is WRONG' if wrong else 'all right'}; {time.monotonic() - started:.0f} s; {options.folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
