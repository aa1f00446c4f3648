"""The backend as `thdcp verify --backend` runs it.

Defines `load`: `host`, the kernels run on the CPU, or `cupy`, on a GPU.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from cupy_backend.collectives import HostStaged, NcclCollectives, local_rank
from cupy_backend.context_parallel import context_parallel_backward, context_parallel_forward, kernels
from cupy_backend.device import CudaDevice, HostDevice, import_cupy
from cupy_backend.metadata import rank_metadata
from refimpl.collectives import Collectives, MpiCollectives, launched
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import RankMetadata
from refimpl.partition import Policy
from refimpl.verify import Backend


def load(name: str) -> Backend:
    """The backend of that name.

    Raises:
        SpecError: missing_package without what it needs; usage for another name.
    """
    match name:
        case "host":
            return on_host(HostDevice(os_threads=1))
        case "cupy":
            return on_gpu()
        case _:
            raise SpecError("usage", f"unknown backend {name!r}: expected host or cupy")


def on_host(device: HostDevice) -> Backend:
    """The kernels run on the CPU, those of metadata too."""
    return Backend(
        "host",
        partial(context_parallel_forward, device=device),
        context_parallel_backward,
        replace(kernels(device), rank_metadata=partial(rank_metadata, device=device)),
        device.to_device,
        device.to_host,
        lambda group, faulty: HostStaged(group, device),
        "the CUDA kernels run on the CPU, every CUDA thread a fiber: slow, so the default batch is small (--lengths)",
    )


def on_gpu() -> Backend:
    """The kernels on this rank's GPU. SpecError missing_package without CuPy or a GPU."""
    gpu = _OwnGpu()
    return Backend(
        "cupy",
        context_parallel_forward,
        context_parallel_backward,
        replace(kernels(), rank_metadata=gpu.rank_metadata),
        gpu.from_host,
        gpu.to_host,
        gpu.group,
        "tensors travel by NCCL where every rank is a process with a GPU of its own, else through host memory",
    )


class _OwnGpu:
    """The GPU of this process: ranks of one machine take its GPUs in turn, as NCCL's group does."""

    def __init__(self) -> None:
        self._device = CudaDevice(0)

    def group(self, group: Collectives, faulty: bool) -> Any:
        """Choose the GPU, then NCCL where it can be; a fault of one rank's group needs a group that it can sit in."""
        if launched() is not None:
            self._device = CudaDevice(local_rank() % import_cupy().cuda.runtime.getDeviceCount())
        if isinstance(group, MpiCollectives) and not faulty:
            try:
                return NcclCollectives(device_id=self._device.ordinal)
            except SpecError as error:  # the same on all ranks
                if error.code != "usage":
                    raise
        return HostStaged(group, self._device)

    def from_host(self, x: NDArray[Any]) -> Any:
        return self._device.to_device(x)

    def to_host(self, x: Any) -> NDArray[Any]:
        return self._device.to_host(x)

    def rank_metadata(
        self, layout: PackedLayout, policy: Policy | str, cp_size: int, cp_rank: int, mask: AttentionMask
    ) -> RankMetadata:
        return rank_metadata(layout, policy, cp_size, cp_rank, mask, self._device)
