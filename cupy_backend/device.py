"""Where the backend's arrays lie and its kernels run: the CPU or a GPU, behind one set of calls.

Defines `Device`, what both worlds do; `HostDevice`, NumPy arrays and kernels run by `host`; `CudaDevice`, CuPy arrays
and kernels run by `kernels`; and `device_of`, which picks the one that arrays lie on.

    device = device_of(q, k, v)
    q = device.as_array(q)
    out = device.empty(q.shape, q.dtype)
    device.launch("attention_plain", "attention_plain_float32", grid, 128, [q, ..., out])

On a GPU every call uses CuPy's current stream, and only `to_host` waits for it. Scalars are Python numbers: a kernel's
own C++ types decide how they are passed. This module imports neither CuPy nor a compiler before it needs one.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cupy_backend.host import Completion, HostModule, LaunchStatistics, Schedule, Variant
from refimpl.errors import SpecError

Array = Any
"""A NumPy or a CuPy array."""

_CPU, _CUDA, _PINNED, _MANAGED = 1, 2, 3, 13
"""Device types of DLPack."""


class Device(Protocol):
    """What the backend asks of the place where its arrays lie."""

    @property
    def name(self) -> str:
        """For people: host, cuda:0."""

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """An array of this device whose content is undefined, C-contiguous."""

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        """An array of zeros."""

    def to_device(self, x: NDArray[Any]) -> Array:
        """A NumPy array on this device; on the host the same array."""

    def to_host(self, x: Array) -> NDArray[Any]:
        """An array of this device as a NumPy array; waits for the current stream."""

    def as_array(self, x: Any) -> Array:
        """Any array that lies on this device, C-contiguous; copied only when it is not so.

        Takes DLPack (torch tensors, bfloat16 too), `__cuda_array_interface__` on a GPU, and anything NumPy reads on the
        host.

        Raises:
            SpecError: usage for an array of another device, dtype for one that NumPy has no type for.
        """

    def launch(
        self,
        source: str,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        shared_bytes: int = 0,
        defines: Sequence[str] = (),
    ) -> LaunchStatistics | None:
        """Run a kernel of `kernels_cu/<source>.cu` on the current stream; a grid without blocks runs nothing.

        Args:
            args: one for each parameter: an array of this device or None for a pointer, a Python number for a number.
            defines: the macros of the build, as NAME=VALUE.

        Returns:
            What the launch did, on the host; None on a GPU.

        Raises:
            KernelError: wrong arguments or a fault. SpecError: missing_package.
        """


@dataclass(frozen=True)
class HostDevice:
    """NumPy arrays; kernels run on the CPU, in the order that `schedule` and `seed` say. See `host.HostKernel`."""

    schedule: Schedule = "in_order"
    seed: int = 0
    cp_async: Completion = "eager"
    os_threads: int | None = None
    variant: Variant | None = None

    @property
    def name(self) -> str:
        """See Device."""
        return "host"

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """See Device. Starts at a multiple of 16 bytes, as kernels with wide accesses need."""
        return _aligned(np.empty, shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        """See Device."""
        return _aligned(np.zeros, shape, dtype)

    def to_device(self, x: NDArray[Any]) -> Array:
        """See Device."""
        return self.as_array(x)

    def to_host(self, x: Array) -> NDArray[Any]:
        """See Device."""
        return np.asarray(x)

    def as_array(self, x: Any) -> Array:
        """See Device; an array that does not start at a multiple of 16 bytes is copied too."""
        array = _numpy_of(x)
        if array.flags.c_contiguous and array.ctypes.data % 16 == 0:
            return array
        result = self.empty(array.shape, array.dtype)
        result[...] = array
        return result

    def launch(
        self,
        source: str,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        shared_bytes: int = 0,
        defines: Sequence[str] = (),
    ) -> LaunchStatistics | None:
        """See Device."""
        if _runs_nothing(grid):
            return None
        return _host_module(source, tuple(defines), self.variant).kernel(kernel)(
            grid,
            block,
            args,
            shared_bytes,
            schedule=self.schedule,
            seed=self.seed,
            cp_async=self.cp_async,
            os_threads=self.os_threads,
        )


@dataclass(frozen=True)
class CudaDevice:
    """CuPy arrays on the GPU of number `ordinal`.

    Raises:
        SpecError: missing_package when there is no CuPy, or no GPU that it can use.
    """

    ordinal: int = 0
    _cupy: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_cupy", import_cupy())
        count = self._cupy.cuda.runtime.getDeviceCount()
        if not 0 <= self.ordinal < count:
            raise SpecError("usage", f"there is no GPU {self.ordinal}: the GPUs are 0 to {count - 1}")

    @property
    def name(self) -> str:
        """See Device."""
        return f"cuda:{self.ordinal}"

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """See Device."""
        with self._current():
            return self._cupy.empty(tuple(shape), self._cupy.dtype(dtype))

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        """See Device. Cleared as bytes: not every version of CuPy fills every dtype."""
        with self._current():
            result = self._cupy.empty(tuple(shape), self._cupy.dtype(dtype))
            result.data.memset_async(0, result.nbytes)
            return result

    def to_device(self, x: NDArray[Any]) -> Array:
        """See Device."""
        with self._current():
            return self._cupy.asarray(np.ascontiguousarray(x))

    def to_host(self, x: Array) -> NDArray[Any]:
        """See Device."""
        with self._current():
            result: NDArray[Any] = self._cupy.asnumpy(x)
            return result

    def as_array(self, x: Any) -> Array:
        """See Device. DLPack goes first: it orders the giver's stream before the current one without a wait."""
        place = _place(x)
        if place != (_CUDA, self.ordinal):
            raise SpecError("usage", f"an array lies on {_place_name(place)}, not on {self.name}: move it there first")
        with self._current():
            if isinstance(x, self._cupy.ndarray):
                array = x
            elif hasattr(x, "__dlpack__"):
                array = _through_dlpack(x, self._cupy)
            else:
                array = self._cupy.asarray(x)
            return self._cupy.ascontiguousarray(array)

    def launch(
        self,
        source: str,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        shared_bytes: int = 0,
        defines: Sequence[str] = (),
    ) -> LaunchStatistics | None:
        """See Device."""
        if _runs_nothing(grid):
            return None
        from cupy_backend.kernels import launch

        with self._current():
            launch(source, kernel, grid, block, args, shared_bytes, tuple(defines))
        return None

    def _current(self) -> Any:
        return self._cupy.cuda.Device(self.ordinal)


HOST = HostDevice()
"""The CPU, kernels in order."""


def device_of(*arrays: Any) -> Device:
    """The device that all arrays (None passed over) lie on; without any, HOST.

    Raises:
        SpecError: usage when they lie on several, or where no kernel runs; missing_package for a GPU without CuPy.
    """
    places = {_place(x) for x in arrays if x is not None}
    if len(places) > 1:
        names = " and ".join(sorted(_place_name(place) for place in places))
        raise SpecError("usage", f"arrays lie on {names}: move all of them to one device")
    kind, ordinal = places.pop() if places else (_CPU, 0)
    if kind == _CUDA:
        return CudaDevice(ordinal)
    if kind != _CPU:
        raise SpecError("usage", f"arrays lie on {_place_name((kind, ordinal))}: kernels run on the CPU or on CUDA")
    return HOST


def import_cupy() -> Any:
    """CuPy, on a machine with a GPU that it can use; else SpecError missing_package, in one line."""
    try:
        import cupy
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise SpecError(
            "missing_package",
            f"the GPU backend needs CuPy: pip install 'thdcp[cupy]' beside an NVIDIA driver ({reason})",
        ) from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        count, reason = 0, " ".join(str(error).split())
    else:
        reason = "the driver shows none"
    if count == 0:
        raise SpecError(
            "missing_package",
            f"the GPU backend needs an NVIDIA GPU with its driver ({reason}); without one, the host backend runs the "
            f"same kernels on the CPU",
        )
    return cupy


def _place(x: Any) -> tuple[int, int]:
    """Device type and number, as DLPack counts them; memory of the host that a GPU reads too counts as the host's."""
    if isinstance(x, np.ndarray | np.generic | list | tuple):
        return _CPU, 0
    if hasattr(x, "__dlpack_device__"):  # Before the other: torch refuses that for a tensor that requires a gradient.
        kind, number = x.__dlpack_device__()
        return (_CPU, 0) if int(kind) in (_CPU, _PINNED, _MANAGED) else (int(kind), int(number))
    if hasattr(x, "__cuda_array_interface__"):
        pointer = x.__cuda_array_interface__["data"][0]
        return _CUDA, int(import_cupy().cuda.runtime.pointerGetAttributes(pointer).device)
    return _CPU, 0


def _place_name(place: tuple[int, int]) -> str:
    kind, number = place
    return "host" if kind == _CPU else f"cuda:{number}" if kind == _CUDA else f"a device of DLPack type {kind}"


def _numpy_of(x: Any) -> NDArray[Any]:
    if isinstance(x, np.ndarray):
        return x
    if _place(x) != (_CPU, 0):
        raise SpecError("usage", f"an array lies on {_place_name(_place(x))}, not on host: move it there first")
    if hasattr(x, "__dlpack__"):
        result: NDArray[Any] = _through_dlpack(x, np)
        return result
    return np.asarray(x)


def _through_dlpack(x: Any, library: Any) -> Array:
    """A view of x as an array of NumPy or CuPy. torch's bfloat16, which neither takes everywhere, goes as integers."""
    if hasattr(x, "detach"):
        x = x.detach()
    is_bfloat16 = str(x.dtype) == "torch.bfloat16"
    if is_bfloat16:
        import torch

        x = x.view(torch.int16)
    try:
        array = library.from_dlpack(x)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise SpecError("dtype", f"an array of {type(x).__name__}, {x.dtype}, cannot be read: {error}") from error
    return array.view(bfloat16()) if is_bfloat16 else array


def bfloat16() -> np.dtype[Any]:
    """The dtype of ml_dtypes, which CuPy takes too; SpecError missing_package without it."""
    from refimpl.tolerance import as_dtype

    return as_dtype("bfloat16")


def _aligned(make: Callable[..., Any], shape: Sequence[int], dtype: Any) -> NDArray[Any]:
    dtype, size = np.dtype(dtype), int(np.prod(shape, dtype=np.int64))
    memory = make(size * dtype.itemsize + 16, np.uint8)
    start = -memory.ctypes.data % 16
    result: NDArray[Any] = memory[start : start + size * dtype.itemsize].view(dtype).reshape(tuple(shape))
    return result


def _runs_nothing(grid: int | Sequence[int]) -> bool:
    return 0 in ([grid] if isinstance(grid, int) else grid)


_building = threading.Lock()


def _host_module(source: str, defines: tuple[str, ...], variant: Variant | None) -> HostModule:
    """Built once: ranks that are threads ask for the same kernels at once."""
    with _building:
        return _built(source, defines, variant)


@cache
def _built(source: str, defines: tuple[str, ...], variant: Variant | None) -> HostModule:
    return HostModule(source, defines, variant)
