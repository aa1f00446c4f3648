"""The compile gate: build every kernel for every GPU architecture with NVRTC, and write down what each takes.

Defines `compile_source`, which needs the NVRTC wheel and no GPU, and the table `kernels_cu/resources.txt`:

    python -m cupy_backend.gate            compare the table with what the compiler says; exit 1 when it differs
    python -m cupy_backend.gate --write    write it anew

A kernel that spills registers, or takes more static shared memory than a block may have, fails the gate and is never
written. The table belongs to one version of NVRTC, which it names; another version compiles everything but compares
nothing.
"""

import argparse
import ctypes
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from cupy_backend.host import SOURCES, KernelError
from refimpl.errors import SpecError

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
STATIC_SHARED_LIMIT = 48 * 1024
"""Bytes of static shared memory that a kernel may declare on every architecture."""
TABLE = SOURCES / "resources.txt"
OPTIONS = ("--std=c++17", "--ptxas-options=-v", f"--include-path={SOURCES}")


@dataclass(frozen=True, order=True)
class Resources:
    """What one kernel takes on one architecture: registers a thread, bytes of static shared memory and of spills."""

    source: str
    build: str
    kernel: str
    architecture: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def builds(source: Path) -> tuple[tuple[str, ...], ...]:
    """The macros of each build of a source: its lines `// build: NAME=VALUE ...`, or one build without any."""
    lines = re.findall(r"^// build: *(.*)$", source.read_text(), re.MULTILINE)
    return tuple(tuple(line.split()) for line in lines) or ((),)


def compile_source(source: Path, architecture: str, defines: Sequence[str] = ()) -> tuple[bytes, str]:
    """The machine code of a source, and what the compiler said.

    Raises:
        SpecError: missing_package when there is no NVRTC.
        KernelError: the source does not compile.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    text, name = source.read_bytes(), source.name.encode()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None), "nvrtcCreateProgram")
    try:
        options = [f"--gpu-architecture={architecture}", *OPTIONS, *(f"--define-macro={define}" for define in defines)]
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
        if failed:
            raise KernelError(f"{source.name} does not compile for {architecture}:\n{log.strip()}")
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def resources_in(log: str, source: str, build: str, architecture: str) -> Iterator[Resources]:
    """The lines of `ptxas -v`, which tells of one kernel after another."""
    pattern = (
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)"
    )
    for kernel, stack, stores, loads, registers, rest in re.findall(pattern, log, re.DOTALL):
        shared = re.search(r"(\d+) bytes smem", rest)
        yield Resources(
            source,
            build,
            kernel,
            architecture,
            int(registers),
            int(shared[1]) if shared else 0,
            int(stack),
            int(stores) + int(loads),
        )


def measure(source: Path) -> list[Resources]:
    """Every kernel of a source on every architecture, sorted.

    Raises: see `compile_source`; KernelError too when the compiler told of no kernel.
    """
    found: set[Resources] = set()
    for architecture in ARCHITECTURES:
        for defines in builds(source):
            _, log = compile_source(source, architecture, defines)
            kernels = list(resources_in(log, source.name, ",".join(defines) or "-", architecture))
            if not kernels:
                raise KernelError(f"{source.name}: the compiler told of no kernel for {architecture}:\n{log}")
            found.update(kernels)
    return sorted(found)


def complaints(rows: Sequence[Resources]) -> list[str]:
    """What no kernel may do, one line for each that does."""
    wrong = []
    for row in rows:
        where = f"{row.source} {row.build} {row.kernel} {row.architecture}"
        if row.spill_bytes:
            wrong.append(f"{where}: spills {row.spill_bytes} bytes")
        if row.shared_bytes > STATIC_SHARED_LIMIT:
            wrong.append(f"{where}: {row.shared_bytes} bytes of static shared memory, more than {STATIC_SHARED_LIMIT}")
    return wrong


def table(rows: Sequence[Resources]) -> str:
    """The text of the committed table."""
    header = ("source", "build", "kernel", "arch", "registers", "shared", "stack", "spills")
    cells = [
        header,
        *(
            (r.source, r.build, r.kernel, r.architecture, r.registers, r.shared_bytes, r.stack_bytes, r.spill_bytes)
            for r in rows
        ),
    ]
    widths = [max(len(str(row[i])) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    ]
    return "\n".join([f"# NVRTC {version()}; written by python -m cupy_backend.gate --write", *lines]) + "\n"


def version() -> str:
    """NVRTC's major and minor version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


def same_version(committed: str) -> bool:
    """Whether a table is of the NVRTC at hand, so that it can be compared."""
    return committed.startswith(f"# NVRTC {version()};")


def sources() -> list[Path]:
    """Every kernel source."""
    return sorted(SOURCES.glob("*.cu"))


@cache
def _nvrtc() -> ctypes.CDLL:
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for library in Path(folder, "cuda_nvrtc", "lib").glob("libnvrtc.so.*"):
            return ctypes.CDLL(str(library))
    raise SpecError("missing_package", "NVRTC was not found: pip install 'thdcp[nvrtc]' (nvidia-cuda-nvrtc-cu12)")


def _check(result: int, call: str) -> None:
    if result:
        raise KernelError(f"{call} returned {result}")


def _read(size_call: "ctypes._NamedFuncPointer", call: "ctypes._NamedFuncPointer", program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_call(program, ctypes.byref(size)), "nvrtc size")
    buffer = ctypes.create_string_buffer(size.value)
    _check(call(program, buffer), "nvrtc read")
    return buffer.raw


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 when all compiles, nothing is complained of, and the table is as committed."""
    parser = argparse.ArgumentParser(prog="python -m cupy_backend.gate", description="The compile gate of the kernels.")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name} anew")
    write = parser.parse_args(arguments).write
    try:
        rows = [row for source in sources() for row in measure(source)]
        text = table(rows)
    except (SpecError, KernelError) as error:
        print(error, file=sys.stderr)
        return 2
    wrong = complaints(rows)
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        return 1
    if write:
        TABLE.write_text(text)
    elif not TABLE.exists() or (same_version(TABLE.read_text()) and TABLE.read_text() != text):
        print(f"{TABLE.name} differs from what the compiler says: run with --write and look at it", file=sys.stderr)
        return 1
    print(f"{len(rows)} kernels compiled, none spills")
    return 0


if __name__ == "__main__":
    sys.exit(main())
