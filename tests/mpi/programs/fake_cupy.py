"""As much of CuPy as NcclCollectives asks for, without a GPU: arrays of NumPy, and an NCCL that is MPI.

Every call is noted in `calls`. The communicator reads and writes memory by address, as NCCL does, once its group ends,
so that wrong counts, types or orders give wrong numbers. `install` plants a fault by name.
"""

import ctypes
import sys
import time
import types

import numpy as np
from mpi4py import MPI

calls = []


class Array(np.ndarray):
    """An array whose `data.ptr` is its address."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)


class NcclError(RuntimeError):
    pass


class CUDARuntimeError(RuntimeError):
    pass


class Event:
    stuck = False

    @property
    def done(self):
        return not Event.stuck


class Stream:
    def __init__(self, non_blocking=False, name="exchange"):
        self.ptr = 7 if non_blocking else 0
        self.name = name

    def wait_event(self, event):
        calls.append(f"{self.name} waits")

    def record(self):
        calls.append(f"record {self.name}")
        return Event()

    def synchronize(self):
        calls.append(f"synchronize {self.name}")


class Device:
    current = 0

    def __init__(self, ordinal=None):
        self.id = Device.current if ordinal is None else ordinal

    def use(self):
        Device.current = self.id


def memory(pointer, nbytes):
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), np.uint8)


class Communicator:
    """NCCL's calls by MPI; what is called between groupStart and groupEnd happens at groupEnd."""

    fault = None
    waiting = ()

    def __init__(self, size, unique, rank):
        calls.append("init")
        assert unique == b"\x01" * 128
        if self.fault == "init" and rank == 1:
            raise NcclError("NCCL_ERROR_SYSTEM_ERROR:\nunhandled")
        self.comm = MPI.COMM_WORLD.Dup()
        self.started = time.monotonic()

    def check_async_error(self):
        if self.fault == "async" and self.comm.rank == 1 and time.monotonic() > self.started + 0.5:
            raise NcclError("NCCL_ERROR_REMOTE_ERROR: a peer is gone")

    def destroy(self):
        calls.append("destroy")

    def allGather(self, send, receive, count, kind, stream):
        calls.append(f"allGather {count} {kind} on {stream}")
        Communicator.waiting.append(
            lambda: self.comm.Allgather(memory(send, count), memory(receive, count * self.comm.size))
        )

    def reduceScatter(self, send, receive, count, kind, operation, stream):
        calls.append(f"reduceScatter {count} {kind} on {stream}")
        dtype = np.dtype(kind)
        whole = memory(send, count * dtype.itemsize * self.comm.size).view(dtype)
        part = memory(receive, count * dtype.itemsize).view(dtype)
        Communicator.waiting.append(lambda: self.comm.Reduce_scatter_block(whole, part))

    def send(self, pointer, count, kind, peer, stream):
        calls.append(f"send {count} {kind} to {peer}")
        Communicator.waiting.append(lambda: self.comm.Isend(memory(pointer, count), peer))

    def recv(self, pointer, count, kind, peer, stream):
        calls.append(f"recv {count} {kind} from {peer}")
        Communicator.waiting.append(lambda: self.comm.Irecv(memory(pointer, count), peer))


def group_start():
    calls.append("groupStart")
    Communicator.waiting = []


def group_end():
    calls.append("groupEnd")
    requests = [action() for action in Communicator.waiting]
    MPI.Request.Waitall([request for request in requests if request is not None])


def install(fault=None, gpus=8):
    """Put this in CuPy's place, on this rank; faults: id, init, async, stuck, no gpu."""
    rank = MPI.COMM_WORLD.rank
    Communicator.fault = fault

    def get_unique_id():
        calls.append("get_unique_id")
        if fault == "id":
            raise NcclError("NCCL_ERROR_INTERNAL_ERROR")
        return b"\x01" * 128

    def get_device_count():
        if fault == "no gpu" and rank == 1:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device")
        return gpus

    Event.stuck = fault == "stuck" and rank == 1
    current = Stream(name="current")
    nccl = types.SimpleNamespace(
        available=True,
        NcclError=NcclError,
        NcclCommunicator=Communicator,
        get_unique_id=get_unique_id,
        groupStart=group_start,
        groupEnd=group_end,
        NCCL_UINT8="uint8",
        NCCL_FLOAT32="float32",
        NCCL_FLOAT64="float64",
        NCCL_INT32="int32",
        NCCL_INT64="int64",
        NCCL_SUM="sum",
    )
    runtime = types.SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=get_device_count,
        deviceGetPCIBusId=lambda ordinal: f"0000:{ordinal:02x}:00.0",
    )
    cuda = types.SimpleNamespace(runtime=runtime, Device=Device, Stream=Stream, get_current_stream=lambda: current)
    sys.modules["cupy.cuda.nccl"] = nccl
    sys.modules["cupy"] = types.SimpleNamespace(
        cuda=cuda,
        ndarray=Array,
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Array),
        ascontiguousarray=lambda x: np.ascontiguousarray(x).view(Array),
    )
