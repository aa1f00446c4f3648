"""How ranks exchange arrays of a device: through host memory by any group of refimpl, or by NCCL from GPU to GPU.

Defines `DeviceCollectives`, what context parallelism asks of a group on a device; `HostStaged`, which carries arrays
through a group of `refimpl.collectives`; and `NcclCollectives`, which is such a group itself.

An exchange is started, then waited for, so that on a GPU it can go on, on a stream of its own, while the current stream
computes. Waiting makes the current stream wait, never the host.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np

from cupy_backend.device import Array, Device, import_cupy
from refimpl.collectives import TIMEOUT_SECONDS, Collectives, MpiCollectives
from refimpl.errors import SpecError

Shapes = Sequence[tuple[int, ...]]
Message = tuple[Sequence[Array], Shapes]
"""Part r goes to rank r; the shapes of what comes from each rank."""

STAGED = "exchange through host memory instead: cupy_backend.collectives.HostStaged(MpiCollectives(), device)"


class DeviceCollectives(Protocol):
    """What context parallelism needs of a group of `size` ranks. All ranks make the same calls in the same order."""

    rank: int
    size: int

    def start_gather(self, arrays: Sequence[Array]) -> Callable[[], list[Array]]:
        """Start gathering arrays together; calling what is returned waits: [size, *x.shape] for each x. [C1]"""

    def start_exchange(self, messages: Sequence[Message]) -> Callable[[], list[list[Array]]]:
        """Start sending parts to each rank; calling what is returned waits: for each message, a part a rank."""

    def reduce_scatter_sum(self, x: Array) -> Array:
        """The sum over ranks of part `rank` of x [size, ...]: [...], in x's dtype, float32 or wider. [C2] [N1]"""

    def all_agree(self, facts: Mapping[str, str], error: SpecError | None = None) -> None:
        """Return if all ranks state the same facts and none brings an error; else all raise the same. [C3]"""


class HostStaged:
    """A group of refimpl as a group on a device: every array goes through host memory.

    Correct everywhere, ranks that share a GPU included; on the host device nothing is copied.
    """

    def __init__(self, group: Collectives, device: Device) -> None:
        self._group = group
        self._device = device
        self.rank = group.rank
        self.size = group.size

    def start_gather(self, arrays: Sequence[Array]) -> Callable[[], list[Array]]:
        """See DeviceCollectives. [C1]"""
        gathered = [self._device.to_device(self._group.all_gather(self._device.to_host(x))) for x in arrays]
        return lambda: gathered

    def start_exchange(self, messages: Sequence[Message]) -> Callable[[], list[list[Array]]]:
        """See DeviceCollectives. SpecError usage for a group that cannot."""
        all_to_all = getattr(self._group, "all_to_all", None)
        if all_to_all is None:
            raise SpecError("usage", f"{type(self._group).__name__} exchanges nothing by need: gather instead")
        received = [
            [self._device.to_device(x) for x in all_to_all([self._device.to_host(part) for part in parts], shapes)]
            for parts, shapes in messages
        ]
        return lambda: received

    def reduce_scatter_sum(self, x: Array) -> Array:
        """See DeviceCollectives. [C2] [N1]"""
        return self._device.to_device(self._group.reduce_scatter_sum(self._device.to_host(x)))

    def all_agree(self, facts: Mapping[str, str], error: SpecError | None = None) -> None:
        """See DeviceCollectives. [C3]"""
        self._group.all_agree(facts, error)


def on_device(group: Collectives | DeviceCollectives, device: Device) -> DeviceCollectives:
    """The group itself if it exchanges arrays of a device, else through host memory."""
    return cast(DeviceCollectives, group) if hasattr(group, "start_gather") else HostStaged(group, device)


class NcclCollectives:
    """One rank of an NCCL communicator, one GPU a rank, on the stream that is current when a call is made.

    Constructing it is collective over an MPI communicator, which carries what is not a tensor: the choice of the GPU,
    the unique id, agreement, and failure. It makes this rank's GPU the current one.

    Args:
        comm: an mpi4py communicator; None: MPI.COMM_WORLD.
        device_id: this rank's GPU; None: its rank among the ranks of this machine, by MPI's shared-memory split.
        timeout: seconds that an exchange may take before the job is ended.

    Raises:
        SpecError: on every rank alike. missing_package without CuPy, a GPU or NCCL; usage when two ranks share a GPU,
            which NCCL does not take; rank_failed when a rank fails to start. [C1] [C2] [C3] [C4]
    """

    def __init__(self, comm: Any = None, device_id: int | None = None, timeout: float = TIMEOUT_SECONDS) -> None:
        self._mpi = MpiCollectives(comm, timeout)
        self.rank, self.size = self._mpi.rank, self._mpi.size
        own = local_rank(comm) if device_id is None else device_id
        chosen, place = self._attempt(lambda: _place(own))
        self._refuse_shared_gpus(place, chosen)
        self._cupy = import_cupy()
        self._nccl = import_module("cupy.cuda.nccl")
        self._cupy.cuda.Device(chosen).use()
        unique = self._attempt(lambda: self._nccl.get_unique_id() if self.rank == 0 else b"")
        unique = self._mpi.all_gather(np.frombuffer(bytes(unique).ljust(128, b"\0"), np.uint8))[0].tobytes()
        self._mpi.all_agree({})  # A barrier: every rank has the id, and begins at once.
        self._comm = self._connected(unique, timeout)
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._watch = _Watch(self._comm, self._cupy, timeout, self._fail)

    def all_gather(self, x: Array) -> Array:
        """Every rank's x, in rank order: [size, *x.shape]; any dtype, moved as bytes. [C1]"""
        return self.start_gather([x])()[0]

    def start_gather(self, arrays: Sequence[Array]) -> Callable[[], list[Array]]:
        """See DeviceCollectives: one NCCL group, on a stream of its own. [C1]"""
        sent = [self._cupy.ascontiguousarray(x) for x in arrays]
        gathered = [self._cupy.empty((self.size, *x.shape), x.dtype) for x in sent]

        def enqueue(stream: int) -> None:
            for x, result in zip(sent, gathered, strict=True):
                self._comm.allGather(x.data.ptr, result.data.ptr, x.nbytes, self._nccl.NCCL_UINT8, stream)

        return self._start(enqueue, sent, gathered)

    def start_exchange(self, messages: Sequence[Message]) -> Callable[[], list[list[Array]]]:
        """See DeviceCollectives: one NCCL group of sends and receives; parts of no bytes are not sent."""
        sent = [[self._cupy.ascontiguousarray(part) for part in parts] for parts, _ in messages]
        received = [[self._cupy.empty(shape, parts[0].dtype) for shape in shapes] for parts, shapes in messages]

        def enqueue(stream: int) -> None:
            for parts, results in zip(sent, received, strict=True):
                for r in range(self.size):
                    if parts[r].nbytes:
                        self._comm.send(parts[r].data.ptr, parts[r].nbytes, self._nccl.NCCL_UINT8, r, stream)
                    if results[r].nbytes:
                        self._comm.recv(results[r].data.ptr, results[r].nbytes, self._nccl.NCCL_UINT8, r, stream)

        return self._start(enqueue, sent, received)

    def reduce_scatter_sum(self, x: Array) -> Array:
        """See DeviceCollectives. NCCL chooses the order of the sum, the same in every run on one cluster. [C2] [N1]

        Raises:
            SpecError: shape, dtype.
        """
        if x.ndim == 0 or x.shape[0] != self.size:
            raise SpecError(
                "shape", f"reduce_scatter_sum takes one part a rank: [{self.size}, ...], not {list(x.shape)}"
            )
        kinds = {"float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64", "int32": "NCCL_INT32", "int64": "NCCL_INT64"}
        if x.dtype.name not in kinds:
            raise SpecError("dtype", f"sums over ranks are taken in float32 or wider, not in {x.dtype}")
        kind, sent = getattr(self._nccl, kinds[x.dtype.name]), self._cupy.ascontiguousarray(x)
        result = self._cupy.empty(x.shape[1:], x.dtype)

        def enqueue(stream: int) -> None:
            self._comm.reduceScatter(sent.data.ptr, result.data.ptr, result.size, kind, self._nccl.NCCL_SUM, stream)

        return self._start(enqueue, sent, result)()

    def all_agree(self, facts: Mapping[str, str], error: SpecError | None = None) -> None:
        """See DeviceCollectives; by MPI, whose words are no tensor. [C3]"""
        self._mpi.all_agree(facts, error)

    def check(self) -> None:
        """Raise SpecError rank_failed if NCCL has noticed that an exchange failed. Waits for nothing. [C4]"""
        self._watch.check()

    def close(self) -> None:
        """Wait for what was started and give the communicator back; all ranks."""
        self._stream.synchronize()
        self._watch.stop()
        self._comm.destroy()

    def _start(self, enqueue: Callable[[int], None], sent: Any, results: Any) -> Callable[[], Any]:
        """Enqueue one NCCL group behind the current stream's work; what is returned makes that stream wait for it."""
        self.check()
        current = self._cupy.cuda.get_current_stream()
        self._stream.wait_event(current.record())
        try:
            self._nccl.groupStart()
            try:
                enqueue(self._stream.ptr)
            finally:
                self._nccl.groupEnd()
        except self._nccl.NcclError as error:
            raise SpecError("rank_failed", f"NCCL refused an exchange: {_one_line(error)}") from error
        done = self._stream.record()
        self._watch.until(done)
        held = [sent]  # The exchange reads it until the current stream has been made to wait.

        def wait() -> Any:
            self._cupy.cuda.get_current_stream().wait_event(done)
            held.clear()
            return results

        return wait

    def _attempt(self, action: Callable[[], Any]) -> Any:
        """What `action` returns, if it succeeds on every rank; else all raise the refusal of the first. [C3]"""
        refusal: SpecError | None = None
        result: Any = None
        try:
            result = action()
        except SpecError as error:
            refusal = error
        except Exception as error:
            refusal = _not_started(error)
        self._mpi.all_agree({}, refusal)
        return result

    def _connected(self, unique: bytes, timeout: float) -> Any:
        """The communicator. It waits for all ranks, in C, so one that fails can tell the others only by ending them."""
        late = SpecError("rank_failed", f"NCCL has not started after {timeout:g} s: a rank is missing")
        timer = threading.Timer(timeout, self._fail, [late])
        timer.daemon = True
        timer.start()
        try:
            return self._nccl.NcclCommunicator(self.size, unique, self.rank)
        except self._nccl.NcclError as error:
            self._fail(_not_started(error))
            raise
        finally:
            timer.cancel()

    def _refuse_shared_gpus(self, place: str, chosen: int) -> None:
        """Two ranks on one GPU would make NCCL fail, or hang, so say it first."""
        text = np.frombuffer(place.encode().ljust(256, b"\0")[:256], np.uint8)
        places = [row.tobytes() for row in self._mpi.all_gather(text)]
        first = [places.index(found) for found in places]
        twice = next((r for r in range(self.size) if first[r] != r), None)
        if twice is None:
            return
        gpus = self._mpi.all_gather(np.array([chosen]))[:, 0].tolist()
        error = SpecError(
            "usage",
            f"ranks {first[twice]} and {twice} both use GPU {gpus[twice]} of one machine, and NCCL takes one rank a "
            f"GPU: start one rank a GPU, or {STAGED}",
        )
        self._mpi.all_agree({}, error)

    def _fail(self, error: SpecError) -> None:
        """End the job: this rank cannot leave a collective that others never enter. [C4]"""
        self._mpi.abort(error)


class _Watch:
    """A thread that looks whether NCCL has failed, or an exchange takes too long, and then ends the job.

    A rank that waits on the device for one that is gone never returns to Python, so that nobody else would notice.
    """

    def __init__(self, comm: Any, cupy: Any, timeout: float, fail: Callable[[SpecError], None]) -> None:
        self._comm = comm
        self._cupy = cupy
        self._timeout = timeout
        self._fail = fail
        self._pending: list[tuple[Any, float]] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._device = int(cupy.cuda.Device().id)
        self._thread = threading.Thread(target=self._run, name="nccl-watch", daemon=True)
        self._thread.start()

    def until(self, done: Any) -> None:
        """Watch an exchange until this event."""
        with self._lock:
            self._pending.append((done, time.monotonic()))

    def check(self) -> None:
        """Raise SpecError rank_failed if NCCL reports an error."""
        error = self._error()
        if error is not None:
            raise error

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _error(self) -> SpecError | None:
        try:
            self._comm.check_async_error()
        except Exception as error:
            return SpecError("rank_failed", f"NCCL reports that an exchange failed: {_one_line(error)}")
        with self._lock:
            self._pending = [(done, since) for done, since in self._pending if not done.done]
            late = [since for _, since in self._pending if time.monotonic() - since > self._timeout]
        if late:
            return SpecError("rank_failed", f"an exchange of NCCL is not done after {self._timeout:g} s")
        return None

    def _run(self) -> None:
        self._cupy.cuda.Device(self._device).use()
        while not self._stopped.wait(min(1.0, self._timeout / 4)):
            error = self._error()
            if error is not None:
                self._fail(error)
                return


def local_rank(comm: Any = None) -> int:
    """This rank's number among the ranks of its machine, by MPI's shared-memory split: a launcher's variables may lie.

    Collective over `comm`; None: MPI.COMM_WORLD. MPI must be initialised.
    """
    from mpi4py import MPI

    node = (MPI.COMM_WORLD if comm is None else comm).Split_type(MPI.COMM_TYPE_SHARED)
    rank = int(node.Get_rank())
    node.Free()
    return rank


def _place(device_id: int) -> tuple[int, str]:
    """A GPU of this machine, and a name for it that no other GPU of any machine has."""
    cupy = import_cupy()
    count = cupy.cuda.runtime.getDeviceCount()
    try:
        available = import_module("cupy.cuda.nccl").available
    except ImportError as error:
        raise SpecError("missing_package", f"NCCL is missing: pip install 'thdcp[cupy]' ({_one_line(error)})") from None
    if not available:
        raise SpecError("missing_package", "this CuPy was built without NCCL: pip install 'thdcp[cupy]'")
    chosen = device_id if device_id < count else device_id % count
    bus = cupy.cuda.runtime.deviceGetPCIBusId(chosen)
    return chosen, f"{os.uname().nodename} {bus}"


def _not_started(error: BaseException) -> SpecError:
    return SpecError("rank_failed", f"NCCL does not start: {type(error).__name__}: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
