"""The compile gate: every kernel builds for every architecture, none spills, and the table is as committed."""

import re

import pytest

from cupy_backend import gate
from cupy_backend.host import SOURCES, KernelError


@pytest.fixture(scope="module")
def nvrtc(require):
    return require("nvidia.cuda_nvrtc")


@pytest.fixture(scope="module")
def rows(nvrtc):
    return [row for source in gate.sources() for row in gate.measure(source)]


@pytest.mark.slow
def test_every_kernel_of_every_source_was_built(rows):
    assert {source.name for source in gate.sources()} == {row.source for row in rows}
    for source in gate.sources():
        written = set(re.findall(r"^THDCP_KERNEL\((\w+),", source.read_text(), re.MULTILINE))
        for architecture in gate.ARCHITECTURES:
            built = {row.kernel for row in rows if row.source == source.name and row.architecture == architecture}
            assert written <= built
            assert built


@pytest.mark.slow
def test_no_kernel_spills(rows):
    assert gate.complaints(rows) == []


@pytest.mark.slow
def test_the_table_is_what_the_compiler_says(rows):
    committed = gate.TABLE.read_text()
    if not gate.same_version(committed):
        pytest.skip(f"the table is of another NVRTC than {gate.version()}")
    assert committed == gate.table(rows), "look at it, then: python -m cupy_backend.gate --write"


def test_spills_and_too_much_shared_memory_are_complained_of():
    log = """ptxas info    : Compiling entry function 'big' for 'sm_90'
ptxas info    : Function properties for big
ptxas         .     24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 50000 bytes smem
ptxas info    : Compile time = 3 ms
ptxas info    : Compiling entry function 'small' for 'sm_90'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers, 380 bytes cmem[0]
"""
    big, small = gate.resources_in(log, "x.cu", "-", "sm_90")
    assert (big.registers, big.shared_bytes, big.stack_bytes, big.spill_bytes) == (255, 50000, 24, 20)
    assert (small.kernel, small.registers, small.shared_bytes, small.spill_bytes) == ("small", 16, 0, 0)
    assert gate.complaints([small]) == []
    assert [line.split(": ")[1] for line in gate.complaints([big])] == [
        "spills 20 bytes",
        "50000 bytes of static shared memory, more than 49152",
    ]


@pytest.mark.usefixtures("nvrtc")
def test_a_kernel_that_spills_is_seen(tmp_path):
    source = tmp_path / "spills.cu"
    source.write_text(
        '#include "primitives.cuh"\nusing namespace thdcp;\n// build: COUNT=8\n// build: COUNT=96\n'
        "THDCP_KERNEL(spills, 1024, 1, float* x) {\n  float held[COUNT];\n"
        "#pragma unroll\n  for (int i = 0; i < COUNT; i++) held[i] = x[i * 1024 + threadIdx.x];\n  barrier();\n"
        "#pragma unroll\n  for (int i = 0; i < COUNT; i++) x[(COUNT - i) * 1024 + threadIdx.x] = held[i];\n}\n"
    )
    spilled = {row.build: row.spill_bytes > 0 for row in gate.measure(source)}
    assert spilled == {"COUNT=8": False, "COUNT=96": True}


@pytest.mark.usefixtures("nvrtc")
def test_a_source_that_does_not_compile(tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text('#include "primitives.cuh"\nTHDCP_KERNEL(broken, 32, 1, int* x) { x[0] = absent; }\n')
    with pytest.raises(
        KernelError, match=r'(?s)broken\.cu does not compile for sm_80:.*identifier "absent" is undefined'
    ):
        gate.compile_source(source, "sm_80")


@pytest.mark.usefixtures("nvrtc")
def test_the_primitives_used_by_tests_alone_compile_too():
    for source in (SOURCES.parent / "tests" / "kernels").glob("primitives.cu"):
        for architecture in gate.ARCHITECTURES:
            code, _ = gate.compile_source(source, architecture)
            assert code[:4] == b"\x7fELF"


BANNED = re.compile(r"__shared__|__global__|__device__|\basm\b|<<<|__CUDACC__|__CUDA_ARCH__|__syncthreads|#include *<")


def code_of(path):
    """The text without its comments."""
    return re.sub(r"//[^\n]*", "", path.read_text())


def test_only_the_primitives_know_which_compiler_reads_them():
    kernels = [path for path in SOURCES.iterdir() if path.suffix in (".cu", ".cuh")]
    assert len(kernels) > 3
    knowing = {path.name for path in kernels if BANNED.search(code_of(path))}
    assert knowing == {"primitives.cuh"}


@pytest.mark.parametrize("source", gate.sources(), ids=lambda path: path.name)
def test_a_source_opens_with_purpose_launch_clauses_and_versions(source):
    opening = source.read_text().split("#include")[0]
    for heading in ("// Purpose: ", "// Launch", "// clauses: ", "// versions:\n//   1  "):
        assert heading in opening
