"""Compile the CUDA kernels for the GPU at hand, and launch them: the only file that touches RawModule and NVRTC.

Defines `build`, which needs CuPy and NVRTC but no GPU, and `launch`. A source is compiled once for each architecture
and build and kept in the cache folder by a hash of all that it is made of; a process loads it on its first launch.

A kernel's parameter types are read from the PTX of the same compilation, so that a Python number is passed as the C++
type that the kernel declares.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cupy_backend.cache import cache_folder, digest, one_builder, workshop
from cupy_backend.host import SOURCES, KernelError
from refimpl.errors import SpecError

OPTIONS = ("--std=c++17", f"--include-path={SOURCES}")
_FLOATS: dict[str, Any] = {"f32": np.float32, "f64": np.float64}
_SMALL_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory beyond this must be asked for."""


@dataclass(frozen=True)
class Build:
    """A compiled source: its machine code, and the PTX types of each kernel's parameters, such as u64 and f32."""

    path: Path
    parameters: Mapping[str, tuple[str, ...]]


def architecture_for(capability: str) -> str:
    """What to compile for a GPU of this compute capability, "90": the newest of its generation that NVRTC knows.

    Raises:
        KernelError: NVRTC knows none.
    """
    nvrtc = _nvrtc()
    same = [a for a in nvrtc.getSupportedArchs() if a // 10 == int(capability) // 10 and a <= int(capability)]
    if not same:
        version = ".".join(str(part) for part in nvrtc.getVersion())
        raise KernelError(f"NVRTC {version} builds nothing for a GPU of compute capability {capability}: update it")
    return f"sm_{max(same)}"


def build(source: str | Path, architecture: str, defines: tuple[str, ...] = ()) -> Build:
    """A source compiled for an architecture, unless the cache has it.

    Args:
        source: the name of a file in `kernels_cu` without its suffix, or the path of any .cu file.
        defines: macros, as NAME=VALUE.

    Raises:
        SpecError: missing_package without CuPy or NVRTC; file when the cache folder cannot be written.
        KernelError: the source does not compile.
    """
    path = Path(source)
    if path.suffix != ".cu":
        path = SOURCES / f"{source}.cu"
    if not path.is_file():
        raise KernelError(f"{path}: no such kernel source")
    nvrtc = _nvrtc()
    options = (f"--gpu-architecture={architecture}", *OPTIONS, *(f"--define-macro={define}" for define in defines))
    headers = sorted(SOURCES.glob("*.cuh"))
    key = digest([str(nvrtc.getVersion()), architecture, *OPTIONS[:-1], *defines], [path, *headers])
    code = cache_folder() / f"{path.stem}-{architecture}-{key}.cubin"
    types = code.with_suffix(".json")
    with one_builder(types) as missing:  # it comes last
        if missing:
            cubin, ptx = _compiled(path, options)
            with workshop() as folder:
                Path(folder, "code").write_bytes(cubin)
                Path(folder, "types").write_text(json.dumps(parameters_in(ptx)))
                Path(folder, "code").replace(code)
                Path(folder, "types").replace(types)
    parameters = json.loads(types.read_text())
    return Build(code, {name: tuple(kinds) for name, kinds in parameters.items()})


def parameters_in(ptx: str) -> dict[str, list[str]]:
    """The types of the parameters of every kernel in a PTX text, in order."""
    kernels = re.findall(r"\.entry\s+(\w+)\s*\(([^)]*)\)", ptx)
    return {name: re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", listed) for name, listed in kernels}


def launch(
    source: str,
    kernel: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    shared_bytes: int,
    defines: tuple[str, ...],
) -> None:
    """Run a kernel on CuPy's current device and stream; returns before it has run.

    Raises:
        KernelError: arguments that do not fit, or a launch that CUDA refuses.
    """
    cupy = _cupy()
    device = cupy.cuda.Device()
    function, kinds = _function(source, kernel, architecture_for(device.compute_capability), defines, int(device.id))
    if len(args) != len(kinds):
        raise KernelError(f"{kernel} takes {len(kinds)} arguments, not {len(args)}")
    values = [
        _value(arg, kind, f"{kernel}: argument {i}") for i, (arg, kind) in enumerate(zip(args, kinds, strict=True))
    ]
    if shared_bytes > max(_SMALL_SHARED_BYTES, function.max_dynamic_shared_size_bytes):
        function.max_dynamic_shared_size_bytes = shared_bytes
    try:
        function(_sizes(grid), _sizes(block), tuple(values), shared_mem=shared_bytes)
    except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError) as error:
        raise KernelError(f"{kernel}: {error} (grid {grid}, block {block}, {shared_bytes} bytes shared)") from error


@cache
def _function(
    source: str, kernel: str, architecture: str, defines: tuple[str, ...], ordinal: int
) -> tuple[Any, tuple[str, ...]]:
    """A loaded kernel and its parameter types; one for each device, which limits its shared memory by itself."""
    built = build(source, architecture, defines)
    if kernel not in built.parameters:
        raise KernelError(f"{kernel}: the module has no such kernel")
    return _cupy().RawModule(path=str(built.path)).get_function(kernel), built.parameters[kernel]


def _compiled(path: Path, options: tuple[str, ...]) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(path.read_text(), path.name, (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise KernelError(f"{path.name} does not compile ({options[0]}):\n{str(log).strip()}") from error
        ptx = nvrtc.getPTX(program)
        return nvrtc.getCUBIN(program) + b"\0", bytes(ptx).decode()  # CuPy drops the last byte of a CUBIN, which is 0
    finally:
        nvrtc.destroyProgram(program)


def _value(arg: Any, kind: str, where: str) -> Any:
    """One argument as CuPy passes it: an array, or a NumPy scalar of the parameter's size."""
    if arg is None or hasattr(arg, "__cuda_array_interface__"):
        if kind not in ("u64", "b64"):
            raise KernelError(f"{where} is {type(arg).__name__}: expected a number, {kind}")
        if arg is None:
            return np.uint64(0)
        if not arg.flags.c_contiguous:
            raise KernelError(f"{where} is not C-contiguous")
        return arg
    if isinstance(arg, np.ndarray):
        raise KernelError(f"{where} is an array of the host")
    if kind in _FLOATS:
        return _FLOATS[kind](arg)
    bits = int(kind[1:])
    if int(arg) != arg or not -(2 ** (bits - 1)) <= arg < 2**bits:
        raise KernelError(f"{where} is {arg}, which {kind} does not hold")
    return np.dtype(f"u{bits // 8}").type(int(arg) % 2**bits)


def _sizes(sizes: int | Sequence[int]) -> tuple[int, ...]:
    return (sizes,) if isinstance(sizes, int) else tuple(sizes)


def _cupy() -> Any:
    from cupy_backend.device import import_cupy

    return import_cupy()


@cache
def _nvrtc() -> Any:
    """CuPy's NVRTC, which compiles without a GPU; SpecError missing_package when it or CuPy is not there."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise SpecError(
            "missing_package", f"compiling kernels for a GPU needs CuPy and NVRTC: pip install 'thdcp[cupy]' ({reason})"
        ) from None
    return nvrtc
