"""Arrays and launches on the host device, with torch tensors too; and what is said where there is no GPU or no CuPy."""

import subprocess
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from support import refused

from cupy_backend.device import HOST, HostDevice, device_of
from cupy_backend.host import KernelError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def invert(device, rows):
    inverse = device.zeros(rows.shape, np.int64)
    device.launch("partition", "invert_rows", 1, 256, [device.as_array(rows), len(rows), inverse])
    return device.to_host(inverse)


@pytest.mark.parametrize("device", [HOST, HostDevice("random", 3, "random", 1), HostDevice("reverse", cp_async="lazy")])
def test_a_kernel_runs_on_arrays_of_the_device(device):
    rows = np.random.default_rng(0).permutation(200)
    inverse = invert(device, rows)
    assert (inverse[rows] == np.arange(200)).all()


def test_a_launch_passes_its_options_on():
    with pytest.raises(KernelError, match="schedule is 'sideways'"):
        invert(HostDevice("sideways"), np.arange(4))
    offsets, status = np.zeros(1, np.int32), np.zeros(2, np.int32)
    statistics = HOST.launch("metadata", "check_offsets", 1, 256, [offsets, offsets, 0, 8, 0, 1, 2, status])
    assert statistics.barriers > 0


def test_a_grid_without_blocks_runs_nothing():
    assert HOST.launch("no such source", "no such kernel", 0, 256, []) is None
    assert HOST.launch("no such source", "no such kernel", (3, 0), 256, []) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, np.int64, np.uint8])
@pytest.mark.parametrize("shape", [(3, 5, 7), (0, 4), (1,), ()])
def test_new_arrays_start_where_wide_accesses_may(shape, dtype):
    for make in (HOST.empty, HOST.zeros):
        x = make(shape, dtype)
        assert x.shape == shape
        assert x.dtype == dtype
        assert x.flags.c_contiguous
        assert x.flags.writeable
        assert x.ctypes.data % 16 == 0
    assert not x.astype(np.float32).any()


def test_an_array_is_copied_only_when_it_must_be():
    x = HOST.empty((4, 6), np.float32)
    x[:] = np.arange(24).reshape(4, 6)
    assert HOST.as_array(x) is x
    for view in (x[:, ::2], x.T, x.reshape(-1)[1:]):
        copy = HOST.as_array(view)
        assert not np.shares_memory(copy, x)
        assert (copy == view).all()
        assert copy.flags.c_contiguous
        assert copy.ctypes.data % 16 == 0
    assert HOST.as_array([1, 2]).tolist() == [1, 2]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "int32"])
def test_torch_tensors_share_their_memory(require, dtype):
    torch = require("torch")
    tensor = torch.arange(64).to(getattr(torch, dtype)).reshape(8, 8)
    if dtype.startswith(("float", "bf")):
        tensor.requires_grad_()
    x = HOST.as_array(tensor)
    assert x.dtype.name == dtype
    assert (x.astype(np.float32) == np.arange(64).reshape(8, 8)).all()
    assert x.ctypes.data == tensor.data_ptr()
    with torch.no_grad():
        tensor[0, 0] = 5
    assert float(x[0, 0]) == 5.0


def test_a_tensor_that_numpy_has_no_type_for_is_refused(require):
    torch = require("torch")
    with refused("dtype", "torch.float8_e5m2"):
        HOST.as_array(torch.zeros(4, dtype=torch.float8_e5m2))


class Elsewhere:
    """An array of a device that is not here."""

    def __init__(self, kind, number=0):
        self.place = (kind, number)

    def __dlpack_device__(self):
        return self.place


def test_where_arrays_lie(require):
    torch = require("torch")
    assert device_of() is HOST
    assert device_of(None, np.zeros(3), [1.0], torch.zeros(2)) is HOST
    assert device_of(Elsewhere(3)) is HOST  # pinned
    with refused("usage", "arrays lie on cuda:1 and host"):
        device_of(np.zeros(3), Elsewhere(2, 1))
    with refused("usage", "arrays lie on cuda:0 and cuda:1"):
        device_of(Elsewhere(2, 0), Elsewhere(2, 1))
    with refused("usage", "a device of DLPack type 10"):
        device_of(Elsewhere(10))
    with refused("usage", "an array lies on cuda:1, not on host"):
        HOST.as_array(Elsewhere(2, 1))


# Without a GPU, without CuPy


def test_importing_the_backend_needs_neither_cupy_nor_a_compiler():
    code = (
        "import sys, cupy_backend.device, cupy_backend.kernels\n"
        "print(*(name for name in ('cupy', 'torch', 'mpi4py') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_without_cupy_it_is_said_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with refused("missing_package", "the GPU backend needs CuPy: pip install 'thdcp[cupy]'"):
        device_of(Elsewhere(2))


def fake_cupy(count):
    """As much of CuPy as the search for a GPU needs; `count` may be an error."""

    class CUDARuntimeError(RuntimeError):
        pass

    def get_device_count():
        if isinstance(count, str):
            raise CUDARuntimeError(count)
        return count

    runtime = types.SimpleNamespace(CUDARuntimeError=CUDARuntimeError, getDeviceCount=get_device_count)
    return types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))


@pytest.mark.parametrize(
    ("count", "reason"),
    [("cudaErrorInsufficientDriver: no\ndriver", "cudaErrorInsufficientDriver: no driver"), (0, "shows none")],
)
def test_without_a_gpu_it_is_said_in_one_line(monkeypatch, count, reason):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(count))
    with refused("missing_package", "the GPU backend needs an NVIDIA GPU with its driver (", reason, "host backend"):
        device_of(Elsewhere(2))


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(2))
    assert device_of(Elsewhere(2, 1)).name == "cuda:1"
    with refused("usage", "there is no GPU 2: the GPUs are 0 to 1"):
        device_of(Elsewhere(2, 2))
