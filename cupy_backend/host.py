"""Run the CUDA kernels of `kernels_cu` on the CPU: for tests without a GPU, and to step through one in a debugger.

Defines `HostModule`, a kernel source built by g++ against the shim in `kernels_cu/host`, and `HostKernel`, which
launches on NumPy arrays. A fault that a GPU would leave to chance (a barrier that some threads miss, a lane that a mask
does not name, a write past a shared array) is a `KernelError` that names the block, the thread and the line. Needs g++
and nothing else; imports without CuPy.

    module = HostModule("partition")
    statistics = module.kernel("rank_rows")(grid=4, block=128, args=[offsets, rows, 7], schedule="random", seed=3)

What a schedule and a completion are: `kernels_cu/host/block.h`.
"""

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cupy_backend.cache import cache_folder, digest, one_builder, workshop
from refimpl.errors import SpecError

Schedule = Literal["in_order", "reverse", "random", "priority"]
Completion = Literal["eager", "lazy", "random"]
Variant = Literal["plain", "debug", "address", "thread"]

SOURCES = Path(__file__).resolve().parent.parent / "kernels_cu"
"""The folder of the kernels, beside the package both in a checkout and in a wheel."""

SHIM = ("fiber", "block", "warp", "launch")

_COMMON = ("-std=c++17", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique", "-fvisibility=hidden", "-U_FORTIFY_SOURCE")
_KERNEL_FLAGS: dict[Variant, tuple[str, ...]] = {
    "plain": ("-O2",),
    "debug": ("-O0", "-g"),
    "address": ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-O1", "-g", "-fsanitize=thread"),
}
_SHIM_FLAGS: dict[Variant, tuple[str, ...]] = {
    "plain": (),
    "debug": ("-g",),
    "address": ("-g", "-DTHDCP_ASAN"),
    "thread": ("-g", "-DTHDCP_TSAN"),
}
_LINK_FLAGS: dict[Variant, tuple[str, ...]] = {
    "plain": (),
    "debug": (),
    "address": ("-fsanitize=address,undefined",),
    "thread": ("-fsanitize=thread",),
}
_RUNTIME: dict[Variant, str] = {"address": "libasan.so", "thread": "libtsan.so"}

# What a parameter of this type takes: the NumPy types of an array that it points to. None: any.
_POINTEES: dict[str, tuple[str, ...] | None] = {
    "int32": ("int32",),
    "uint32": ("uint32",),
    "int64": ("int64",),
    "uint64": ("uint64",),
    "uint16": ("uint16",),
    "uint8": ("uint8", "bool"),
    "bool": ("bool",),
    "float": ("float32",),
    "double": ("float64",),
    "bf16": ("bfloat16", "uint16"),
    "fp16": ("float16", "uint16"),
    "Vec16": None,
    "void": None,
}
_SCALARS: dict[str, Any] = {
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "uint16": ctypes.c_uint16,
    "uint8": ctypes.c_uint8,
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


class KernelError(RuntimeError):
    """A kernel that does not compile, was launched wrongly, or did what no kernel may do."""


class _Launch(ctypes.Structure):
    """`thdcp::host::Launch` of block.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("schedule", ctypes.c_int32),
        ("completion", ctypes.c_int32),
        ("os_threads", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("matrix_loads", ctypes.c_uint64),
        ("bank_conflicts", ctypes.c_uint64),
        ("matrix_products", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class LaunchStatistics:
    """What a launch did, over all blocks: barriers passed, and a warp's ldmatrix and mma.

    `bank_conflicts` counts the passes over shared memory beyond the first that the ldmatrix cost: 0 in a tuned kernel.
    """

    barriers: int
    matrix_loads: int
    bank_conflicts: int
    matrix_products: int


class HostKernel:
    """One kernel of a module, launched like cuLaunchKernel. `parameters` are its C++ types, in order."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        try:
            self._entry = ctypes.cast(library[name], ctypes.c_void_p)
        except AttributeError:
            raise KernelError(f"{name}: the module has no such kernel") from None
        self.name = name
        self.max_threads = int(library[f"{name}_max_threads"]())
        self.parameters = tuple(_text(library, f"{name}_types").split(", "))
        self._names = tuple(
            written.split()[-1].lstrip("*&") for written in _text(library, f"{name}_parameters").split(",")
        )
        self._launch = library.thdcp_launch

    def __call__(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        shared_bytes: int = 0,
        *,
        schedule: Schedule = "in_order",
        seed: int = 0,
        cp_async: Completion = "eager",
        os_threads: int | None = None,
    ) -> LaunchStatistics:
        """Run the grid to its end.

        Args:
            grid, block: 1 to 3 sizes.
            args: one for each parameter: a C-contiguous NumPy array, or None (a null pointer), for a pointer, a number
                for a number. Arrays are used in place.
            shared_bytes: dynamic shared memory of a block.
            schedule, seed: the order in which threads and blocks run; the same seed is the same order.
            cp_async: when asynchronous copies are done.
            os_threads: how many blocks run at once; None: one for each processor.

        Raises:
            KernelError: wrong arguments, or a fault of the kernel, with its block, thread and line.
        """
        launch = _Launch()
        launch.grid[:] = _sizes(grid, f"{self.name}: grid")
        launch.block[:] = _sizes(block, f"{self.name}: block")
        threads = int(np.prod(launch.block[:]))
        if threads > self.max_threads:
            raise KernelError(f"{self.name}: a block of {threads} threads, but its launch bound is {self.max_threads}")
        launch.shared_bytes = shared_bytes
        launch.schedule = _choice(schedule, Schedule, "schedule")
        launch.completion = _choice(cp_async, Completion, "cp_async")
        launch.os_threads = len(os.sched_getaffinity(0)) if os_threads is None else os_threads
        launch.seed = seed
        values = self._values(args)  # Alive until the launch is over.
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        message = ctypes.create_string_buffer(2000)
        failed = self._launch(self._entry, ctypes.byref(launch), pointers, message, ctypes.c_size_t(len(message)))
        if failed:
            raise KernelError(f"{self.name}: {message.value.decode(errors='replace')}")
        return LaunchStatistics(launch.barriers, launch.matrix_loads, launch.bank_conflicts, launch.matrix_products)

    def _values(self, args: Sequence[Any]) -> list[Any]:
        """The arguments as the C values that the kernel's parameters are read from."""
        if len(args) != len(self.parameters):
            raise KernelError(f"{self.name} takes {len(self.parameters)} arguments, not {len(args)}")
        values = []
        for arg, kind, name in zip(args, self.parameters, self._names, strict=True):
            where = f"{self.name}: argument {name}"
            if kind.endswith("*"):
                values.append(ctypes.c_void_p(_pointer(arg, kind, where)))
            elif isinstance(arg, np.ndarray) or arg is None:
                raise KernelError(f"{where} is {type(arg).__name__}: expected a number, {kind}")
            else:
                value = _SCALARS[kind](arg)
                if kind not in ("float", "double") and value.value != arg:
                    raise KernelError(f"{where} is {arg}, which {kind} does not hold")
                values.append(value)
        return values


class HostModule:
    """A kernel source built for this machine's CPU.

    Args:
        source: the name of a file in `kernels_cu` without its suffix, or the path of any .cu file.
        defines: macros, as NAME=VALUE.
        variant: how it is built. `plain`; `debug` for a debugger; `address`: with AddressSanitizer and UBSan; `thread`:
            with ThreadSanitizer, every CUDA thread a thread to it. A process loads the last two only when it was
            started with `sanitizer_environment`. None: what THDCP_HOST_VARIANT says, else `plain`.

    Raises:
        SpecError: missing_package when there is no g++, file when the cache folder cannot be written.
        KernelError: the source does not compile.
    """

    def __init__(self, source: str | Path, defines: Sequence[str] = (), variant: Variant | None = None) -> None:
        chosen: Any = variant or os.environ.get("THDCP_HOST_VARIANT") or "plain"
        _choice(chosen, Variant, "variant")
        self.path = build(source, tuple(defines), chosen)
        self._library = ctypes.CDLL(str(self.path))
        self._kernels: dict[str, HostKernel] = {}

    def kernel(self, name: str) -> HostKernel:
        """The kernel of this name, or KernelError."""
        if name not in self._kernels:
            self._kernels[name] = HostKernel(self._library, name)
        return self._kernels[name]


def build(source: str | Path, defines: tuple[str, ...] = (), variant: Variant = "plain") -> Path:
    """The shared library of a kernel source, built unless the cache has it.

    Raises: see `HostModule`.
    """
    path = Path(source)
    if path.suffix != ".cu":
        path = SOURCES / f"{source}.cu"
    if not path.is_file():
        raise KernelError(f"{path}: no such kernel source")
    compiler = _compiler()
    flags = [f"-D{define}" for define in defines]
    headers = sorted([*path.parent.glob("*.cuh"), *SOURCES.glob("*.cuh"), *(SOURCES / "host").glob("*.h")])
    shim = _shim(compiler, variant)
    key = digest([*_fingerprint(compiler, variant), *flags, *shim], [path, *headers])
    library = cache_folder() / f"{path.stem}-{variant}-{key}.so"
    with one_builder(library) as missing:
        if missing:
            kernel = [*_COMMON, *_KERNEL_FLAGS[variant], "-Wall", "-Wno-unknown-pragmas", *flags, f"-I{SOURCES}"]
            with workshop() as folder:
                _run([*compiler, *kernel, "-x", "c++", "-c", str(path), "-o", f"{folder}/kernel.o"], path.name)
                link = [*compiler, "-shared", "-pthread", "-Wl,-Bsymbolic", *_LINK_FLAGS[variant]]
                _run([*link, f"{folder}/kernel.o", *shim, "-o", f"{folder}/library.so"], path.name)
                Path(folder, "library.so").replace(library)
    return library


def sanitizer_environment(variant: Variant) -> dict[str, str]:
    """What a Python process needs in its environment to load kernels of this variant, all of them by default.

    A report ends the process: with exit status 1 (address) or 66 (thread).
    """
    runtime = _run([*_compiler(), f"-print-file-name={_RUNTIME[variant]}"], "g++").strip()
    return {
        "LD_PRELOAD": runtime,
        "THDCP_HOST_VARIANT": variant,
        "PYTHONMALLOC": "malloc",
        "OPENBLAS_NUM_THREADS": "1",
        # Python leaks on purpose; a fiber's stack is not one that ASan knows of.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0",
    }


def _shim(compiler: tuple[str, ...], variant: Variant) -> list[str]:
    """The object files of the shim, never instrumented: a fiber switch is not what a sanitizer takes it for."""
    sources = [SOURCES / "host" / f"{name}.cpp" for name in SHIM]
    headers = [SOURCES / "primitives.cuh", *sorted((SOURCES / "host").glob("*.h"))]
    key = digest(_fingerprint(compiler, variant), [*sources, *headers])
    objects = [cache_folder() / f"{path.stem}-{variant}-{key}.o" for path in sources]
    for path, result in zip(sources, objects, strict=True):
        with one_builder(result) as missing:
            if missing:
                with workshop() as folder:
                    command = [*compiler, *_COMMON, "-O3", *_SHIM_FLAGS[variant], f"-I{SOURCES}", "-c", str(path)]
                    _run([*command, "-o", f"{folder}/shim.o"], path.name)
                    Path(folder, "shim.o").replace(result)
    return [str(path) for path in objects]


@cache
def _compiler() -> tuple[str, ...]:
    """The compiler's command: CXX when it is set, else g++."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(command[0]) is None:
        raise SpecError(
            "missing_package",
            f"{command[0]} was not found: running kernels on the CPU needs a C++ compiler, so install g++ "
            f"(apt install g++, dnf install gcc-c++) or name one with CXX=",
        )
    return tuple(command)


@cache
def _compiler_version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"], compiler[0])


def _fingerprint(compiler: tuple[str, ...], variant: Variant) -> list[str]:
    """What a result depends on besides the sources."""
    flags = [*_COMMON, *_KERNEL_FLAGS[variant], *_SHIM_FLAGS[variant], *_LINK_FLAGS[variant]]
    return [*compiler, _compiler_version(compiler), platform.machine(), *flags]


def _run(command: Sequence[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise KernelError(f"{what} does not compile:\n{done.stderr.strip()}\n{shlex.join(command)}")
    return done.stdout


def _text(library: ctypes.CDLL, name: str) -> str:
    function = library[name]
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode()


def _sizes(sizes: int | Sequence[int], what: str) -> list[int]:
    """One to three sizes, the missing ones 1."""
    listed = [sizes] if isinstance(sizes, int) else list(sizes)
    if not 1 <= len(listed) <= 3 or any(not 1 <= size < 2**31 for size in listed):
        raise KernelError(f"{what} is {sizes}: expected one to three sizes of 1 or more")
    return listed + [1] * (3 - len(listed))


def _choice(value: str, among: Any, what: str) -> int:
    choices = get_args(among)
    if value not in choices:
        raise KernelError(f"{what} is {value!r}: expected one of {', '.join(choices)}")
    return int(choices.index(value))


def _pointer(arg: NDArray[Any] | None, kind: str, where: str) -> int | None:
    """The address of an array that a parameter of type `kind` may point to."""
    if arg is None:
        return None
    if not isinstance(arg, np.ndarray):
        raise KernelError(f"{where} is {type(arg).__name__}: expected a NumPy array, {kind}")
    dtypes = _POINTEES[kind.removeprefix("const ").removesuffix("*")]
    if dtypes is not None and arg.dtype.name not in dtypes:
        raise KernelError(f"{where} has dtype {arg.dtype}: expected {dtypes[0]}, {kind}")
    if not arg.flags.c_contiguous:
        raise KernelError(f"{where} is not C-contiguous")
    if not kind.startswith("const ") and not arg.flags.writeable:
        raise KernelError(f"{where} is read-only, but the kernel may write to it, {kind}")
    return int(arg.ctypes.data)
