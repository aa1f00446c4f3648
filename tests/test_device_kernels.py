"""Compiling kernels for a GPU through CuPy's NVRTC: a stand-in for it, and the real one where CuPy is installed."""

import importlib.util
import json
import subprocess
import sys
import types

import numpy as np
import pytest

from cupy_backend import kernels
from cupy_backend.host import KernelError
from refimpl.errors import SpecError

PTX = """
.visible .entry scale_rows(
	.param .u64 scale_rows_param_0,
	.param .u64 .ptr .align 1 scale_rows_param_1,
	.param .align 8 .b8 scale_rows_param_2[16],
	.param .f32 scale_rows_param_3
)
.maxntid 128
{ ret; }
.visible .entry nothing()
{ ret; }
"""


def test_types_of_parameters_are_read_from_ptx():
    assert kernels.parameters_in(PTX) == {"scale_rows": ["u64", "u64", "b8", "f32"], "nothing": []}


class FakeNvrtc(types.ModuleType):
    """Notes what it is asked to compile."""

    class NVRTCError(RuntimeError):
        pass

    def __init__(self, archs=(80, 90, 100, 103, 120)):
        super().__init__("cupy.cuda.nvrtc")
        self.archs, self.compiled, self.destroyed = list(archs), [], 0
        self.fails = False

    def getVersion(self):
        return (12, 9)

    def getSupportedArchs(self):
        return self.archs

    def createProgram(self, text, name, headers, names):
        return text, name

    def compileProgram(self, program, options):
        self.compiled.append((program[1], options))
        if self.fails:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def getProgramLog(self, program):
        return "metadata.cu(3): error: no such thing"

    def getPTX(self, program):
        return PTX.encode()

    def getCUBIN(self, program):
        return b"machine code"

    def destroyProgram(self, program):
        self.destroyed += 1


@pytest.fixture
def nvrtc(monkeypatch, tmp_path):
    fake = FakeNvrtc()
    monkeypatch.setenv("THDCP_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "_nvrtc", lambda: fake)
    return fake


def test_a_source_is_compiled_once_for_each_architecture_and_build(nvrtc, tmp_path):
    first = kernels.build("metadata", "sm_90")
    assert first.path.read_bytes() == b"machine code\0"
    assert first.parameters["scale_rows"] == ("u64", "u64", "b8", "f32")
    assert kernels.build("metadata", "sm_90") == first
    assert len(nvrtc.compiled) == nvrtc.destroyed == 1
    others = [kernels.build("metadata", "sm_80"), kernels.build("metadata", "sm_90", ("N=1",))]
    assert len({first.path, *(other.path for other in others)}) == 3
    _, options = nvrtc.compiled[-1]
    assert options[0] == "--gpu-architecture=sm_90"
    assert options[-1] == "--define-macro=N=1"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("build-")]
    first.path.with_suffix(".json").unlink()  # as a process that was killed between the two files leaves it
    assert kernels.build("metadata", "sm_90") == first
    assert json.loads(first.path.with_suffix(".json").read_text())["nothing"] == []


def test_a_changed_source_is_compiled_anew(nvrtc, tmp_path):
    source = tmp_path / "mine.cu"
    source.write_text("int x;")
    one = kernels.build(source, "sm_90")
    source.write_text("int y;")
    assert kernels.build(source, "sm_90").path != one.path


def test_what_does_not_compile_says_why_and_leaves_nothing(nvrtc, tmp_path):
    nvrtc.fails = True
    with pytest.raises(
        KernelError, match=r"metadata.cu does not compile \(--gpu-architecture=sm_90\):\nmetadata.cu\(3\)"
    ):
        kernels.build("metadata", "sm_90")
    assert nvrtc.destroyed == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KernelError, match="no such kernel source"):
        kernels.build("nowhere", "sm_90")


@pytest.mark.parametrize(
    ("capability", "architecture"), [("80", "80"), ("89", "80"), ("90", "90"), ("101", "100"), ("103", "103")]
)
def test_the_newest_architecture_of_a_generation_is_taken(nvrtc, capability, architecture):
    assert kernels.architecture_for(capability) == f"sm_{architecture}"


def test_a_gpu_that_nvrtc_does_not_know_is_refused(nvrtc):
    with pytest.raises(KernelError, match=r"NVRTC 12.9 builds nothing for a GPU of compute capability 110: update it"):
        kernels.architecture_for("110")


class OnDevice:
    """An array of a device, as far as an argument is looked at."""

    __cuda_array_interface__ = None

    def __init__(self, contiguous=True):
        self.flags = types.SimpleNamespace(c_contiguous=contiguous)


@pytest.mark.parametrize(
    ("arg", "kind", "value"),
    [
        (3, "u32", np.uint32(3)),
        (-1, "u32", np.uint32(2**32 - 1)),
        (-1, "u64", np.uint64(2**64 - 1)),
        (2**40, "u64", np.uint64(2**40)),
        (0.5, "f32", np.float32(0.5)),
        (1, "f64", np.float64(1)),
        (True, "u8", np.uint8(1)),
        (None, "u64", np.uint64(0)),
        (np.int64(7), "s32", np.uint32(7)),
    ],
)
def test_numbers_are_passed_as_the_kernel_declares_them(arg, kind, value):
    got = kernels._value(arg, kind, "k: argument 0")
    assert got == value
    assert got.dtype == value.dtype


def test_arrays_are_passed_as_they_are():
    x = OnDevice()
    assert kernels._value(x, "u64", "k: argument 0") is x


@pytest.mark.parametrize(
    ("arg", "kind", "says"),
    [
        (2**32, "u32", "is 4294967296, which u32 does not hold"),
        (0.5, "u32", "is 0.5, which u32 does not hold"),
        (OnDevice(), "u32", "expected a number, u32"),
        (None, "f32", "is NoneType: expected a number, f32"),
        (OnDevice(contiguous=False), "u64", "is not C-contiguous"),
        (np.zeros(3), "u64", "is an array of the host"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arg, kind, says):
    with pytest.raises(KernelError, match=f"^k: argument 0 {says}" if not says.startswith("exp") else says):
        kernels._value(arg, kind, "k: argument 0")


def test_without_cupy_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    kernels._nvrtc.cache_clear()
    with pytest.raises(SpecError, match=r"needs CuPy and NVRTC: pip install 'thdcp\[cupy\]'") as error:
        kernels.build("metadata", "sm_90")
    assert error.value.code == "missing_package"


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_every_source_compiles_with_cupy(monkeypatch, tmp_path):
    from cupy_backend.gate import builds, sources

    monkeypatch.setenv("THDCP_CACHE", str(tmp_path))
    kernels._nvrtc.cache_clear()
    for source in sources():
        for defines in builds(source)[:1]:
            built = kernels.build(source, "sm_90", defines)
            assert built.path.read_bytes().startswith(b"\x7fELF")
            assert all(kinds for kinds in built.parameters.values())


def test_of_processes_that_start_together_one_builds(tmp_path):
    """Each holds the lock while it builds, so the second finds what the first made."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom cupy_backend.cache import one_builder\n"
        "result = Path(sys.argv[1])\n"
        "with one_builder(result) as missing:\n"
        "    print('ready' if missing else 'found', flush=True)\n"
        "    if missing:\n        time.sleep(1.0)\n        result.write_text('made')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "kernel.so")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = sorted(process.communicate(timeout=60)[0].strip() for process in started)
    assert said == ["found", "found", "ready"]
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.so"]
