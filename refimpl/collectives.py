"""How ranks exchange arrays: a protocol of three calls, and two groups that speak it.

Defines `Collectives`; `run_ranks`, which runs every rank as a thread of this process; and `MpiCollectives`, which
speaks MPI through mpi4py with plain buffers (arrays are never pickled). An NCCL group can stand in their place.

A failure of one rank must end all of them, soon and with its own message. Threads: the failing rank breaks the
barrier that the others wait at. MPI: an exception that nobody catches aborts the job, and a rank that never arrives
is waited for `timeout` seconds only.
"""

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import SpecError

Array = NDArray[Any]
Result = TypeVar("Result")

TIMEOUT_SECONDS = 300.0
"""How long a collective waits for a rank that neither fails nor arrives."""


_MATCH_MPI = "set MPIEXEC to the launcher of mpi4py's MPI, or install mpi4py for yours"


class AgreedError(SpecError):
    """A SpecError that every rank of the group raises, in the same words: one of them should print it."""


class Collectives(Protocol):
    """What context parallelism needs of a group of `size` ranks. All ranks make the same calls in the same order."""

    rank: int
    size: int

    def all_gather(self, x: Array) -> Array:
        """Every rank's x, in rank order: [size, *x.shape]. Shapes and dtypes are equal on all ranks. [C1]"""

    def reduce_scatter_sum(self, x: Array) -> Array:
        """The sum over ranks of part `rank` of x [size, ...]: [...], added in rank order in x's dtype. [C2]

        Raises:
            SpecError: dtype for a float narrower than float32, in which sums would lose what they add. [N1]
        """

    def all_agree(self, facts: Mapping[str, str], error: SpecError | None = None) -> None:
        """Return if all ranks state the same facts and none brings an error; else all raise the same AgreedError. [C3]

        Args:
            facts: name to text, what this rank is about to do.
            error: why this rank cannot take part.
        """


def _statement(facts: Mapping[str, str], error: SpecError | None) -> str:
    return json.dumps({"facts": dict(facts), "error": None if error is None else [error.code, error.message]})


def _judge(statements: list[str]) -> None:
    """Raise one AgreedError if the ranks' statements differ or hold an error; the same on every rank. [C3]"""
    ranks = [json.loads(statement) for statement in statements]
    errors = [tuple(rank["error"]) if rank["error"] else None for rank in ranks]
    for r, error in enumerate(errors):
        if error is not None:
            code, message = error
            raise AgreedError(code, message if len(set(errors)) == 1 else f"rank {r}: {message}")
    names = dict.fromkeys(name for rank in ranks for name in rank["facts"])
    for name in names:
        values = [rank["facts"].get(name, "nothing") for rank in ranks]
        for r, value in enumerate(values):
            if value != values[0]:
                raise AgreedError(
                    "ranks_disagree",
                    f"ranks disagree on {name}: rank 0 has {values[0]}, rank {r} has {value}; "
                    f"give all ranks the same (nothing was computed)",
                )


def fingerprint(*arrays: Array) -> str:
    """A short digest of arrays, for facts too long to exchange whole."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _check_reducible(x: Array, size: int) -> None:
    if x.ndim == 0 or x.shape[0] != size:
        raise SpecError("shape", f"reduce_scatter_sum takes one part a rank: [{size}, ...], not {list(x.shape)}")
    if x.dtype.kind != "i" and (x.dtype.kind != "f" or x.dtype.itemsize < 4):
        raise SpecError("dtype", f"sums over ranks are taken in float32 or wider, not in {x.dtype}")


def _check_received(got: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]]) -> None:
    for r, (sent, wanted) in enumerate(zip(got, expected, strict=True)):
        if sent != wanted:
            raise SpecError("shape", f"all_to_all: rank {r} sent {list(sent)}, but {list(wanted)} was expected")


def _sum_in_rank_order(parts: Array) -> Array:
    """A sum whose order, and so its last bit, does not depend on which rank arrives first."""
    total: Array = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


class _Meeting:
    """What the threads of one in-process group share: a place for each rank, filled anew in every round."""

    def __init__(self, size: int, timeout: float) -> None:
        self._timeout = timeout
        self._changed = threading.Condition()
        self._arrived: dict[int, Any] = {}
        self._round = 0
        self._values: list[Any] = []
        self._absence: str | None = None
        self._size = size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, in rank order, once all have come. A complete round stays so, whatever follows."""
        with self._changed:
            this_round = self._round
            self._arrived[rank] = value
            if len(self._arrived) == self._size:
                self._values = [self._arrived[r] for r in range(self._size)]
                self._arrived = {}
                self._round += 1
                self._changed.notify_all()
            else:
                self._changed.wait_for(lambda: self._round > this_round or self._absence is not None, self._timeout)
            if self._round == this_round:
                self._absence = self._absence or f"a rank has not arrived for {self._timeout:g} s"
                self._changed.notify_all()
                raise SpecError("rank_failed", f"rank {rank} stops: {self._absence}")
            return self._values  # the next round cannot be complete, and replace them, before this rank is in it

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Let nobody wait for a rank that will not come again."""
        with self._changed:
            self._absence = self._absence or f"rank {rank} has {'returned' if error is None else 'failed'}"
            self._changed.notify_all()


class InProcessCollectives:
    """One rank of a group whose ranks are threads of this process."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = size

    def all_gather(self, x: Array) -> Array:
        """See Collectives. [C1]"""
        return np.stack(self._meeting.exchange(self.rank, x.copy()))

    def reduce_scatter_sum(self, x: Array) -> Array:
        """See Collectives. [C2] [N1]"""
        _check_reducible(x, self.size)
        parts = self._meeting.exchange(self.rank, x.copy())
        return _sum_in_rank_order(np.stack([part[self.rank] for part in parts]))

    def all_to_all(self, parts: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """Part r goes to rank r; what each rank sent here, whose shapes both sides know. For an exchange by need."""
        rows = self._meeting.exchange(self.rank, [part.copy() for part in parts])
        received = [row[self.rank] for row in rows]
        _check_received([x.shape for x in received], shapes)
        return received

    def all_agree(self, facts: Mapping[str, str], error: SpecError | None = None) -> None:
        """See Collectives. [C3]"""
        _judge(self._meeting.exchange(self.rank, _statement(facts, error)))


def run_ranks(size: int, function: Callable[[Collectives], Result], timeout: float = TIMEOUT_SECONDS) -> list[Result]:
    """Run `function` on every rank of an in-process group, one thread each; the results in rank order.

    If a rank raises, the others stop at their next collective and the first rank's own error is raised here.
    A rank that returns while others wait for it stops them too. [C4]
    """
    meeting = _Meeting(size, timeout)

    def run(rank: int) -> Result:
        error: BaseException | None = None
        try:
            return function(InProcessCollectives(meeting, rank, size))
        except BaseException as raised:
            error = raised
            raise
        finally:
            meeting.leave(rank, error)

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    causes = [e for e in errors if not (isinstance(e, SpecError) and e.code == "rank_failed")]
    if errors:
        raise (causes or errors)[0]
    return [future.result() for future in futures]


class MpiCollectives:
    """One rank of an MPI communicator; collectives on plain buffers, any dtype.

    Constructing it is collective. On a communicator of more than one rank it also makes sure that an exception which
    nobody catches on this rank ends all ranks.

    Args:
        comm: an mpi4py communicator; None: MPI.COMM_WORLD.
        timeout: seconds to wait in a collective for a rank that does not arrive.

    Raises:
        SpecError: missing_package without mpi4py; rank_failed when the launcher's MPI is not mpi4py's.

    [C1] [C2] [C3] [C4]
    """

    def __init__(self, comm: Any = None, timeout: float = TIMEOUT_SECONDS) -> None:
        self._mpi = _import_mpi()
        self._comm = (self._mpi.COMM_WORLD if comm is None else comm).Dup()
        self._timeout = timeout
        self.rank = int(self._comm.Get_rank())
        self.size = int(self._comm.Get_size())
        told = launched()
        if comm is None and told is not None and told[1] != self.size:
            raise SpecError(
                "rank_failed",
                f"the launcher started {told[1]} ranks but MPI sees {self.size}: mpi4py loads another MPI than the "
                f"launcher's; {_MATCH_MPI}",
            )
        if self.size > 1:
            self._end_all_on_uncaught()

    def all_gather(self, x: Array) -> Array:
        """See Collectives. [C1]"""
        x = np.asarray(x, order="C")
        gathered = np.empty((self.size, *x.shape), x.dtype)
        self._wait(self._comm.Iallgather(self._bytes(x), self._bytes(gathered)), "all_gather")
        return gathered

    def reduce_scatter_sum(self, x: Array) -> Array:
        """See Collectives: an all-to-all, then a sum in rank order, so that a repeated run gives the same bits. [C2]"""
        _check_reducible(x, self.size)
        x = np.asarray(x, order="C")
        parts = np.empty_like(x)
        self._wait(self._comm.Ialltoall(self._bytes(x), self._bytes(parts)), "reduce_scatter_sum")
        return _sum_in_rank_order(parts)

    def all_to_all(self, parts: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """Part r goes to rank r; what each rank sent here, whose shapes both sides know. For an exchange by need."""
        dtype = parts[0].dtype
        received = [np.empty(shape, dtype) for shape in shapes]
        flat = np.concatenate([np.asarray(part, order="C").reshape(-1) for part in parts])
        buffer = np.empty(sum(x.size for x in received), dtype)
        counts = [[x.nbytes for x in arrays] for arrays in (parts, received)]
        starts = [np.cumsum([0, *sizes[:-1]]).tolist() for sizes in counts]
        sent, got = ([x.view(np.uint8), (counts[i], starts[i]), self._mpi.BYTE] for i, x in enumerate((flat, buffer)))
        self._wait(self._comm.Ialltoallv(sent, got), "all_to_all")
        ends = np.cumsum([x.size for x in received]).tolist()
        return [buffer[end - x.size : end].reshape(x.shape) for x, end in zip(received, ends, strict=True)]

    def all_agree(self, facts: Mapping[str, str], error: SpecError | None = None) -> None:
        """See Collectives. [C3]"""
        text = np.frombuffer(_statement(facts, error).encode(), np.uint8)
        lengths = self.all_gather(np.array([len(text)]))[:, 0]
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: len(text)] = text
        statements = self.all_gather(padded)
        _judge([row[:length].tobytes().decode() for row, length in zip(statements, lengths, strict=True)])

    def abort(self, error: BaseException, status: int = 1) -> None:
        """End every rank of the job with one line that names this rank and its error. [C4]

        Ranks that fail together, as when all have waited for the same late one, come here one after the other, so that
        the first to speak ends the rest. A launcher may drop what it has not yet passed on when a job is aborted.
        """
        time.sleep(min(0.5 * self.rank, 4.0))
        say(f"rank {self.rank}: {describe(error)}")
        time.sleep(0.2)
        self._comm.Abort(status)
        os._exit(status)  # MPICH now and then returns from Abort while the launcher ends the job

    def _bytes(self, x: Array) -> list[Any]:
        return [x.reshape(-1).view(np.uint8), self._mpi.BYTE]

    def _wait(self, request: Any, what: str) -> None:
        """Wait without spinning: with more ranks than cores, a rank that spins keeps the late one from arriving."""
        deadline = time.monotonic() + self._timeout
        pause = 0.0
        while not request.Test():
            if time.monotonic() > deadline:
                raise SpecError("rank_failed", f"{what}: a rank has not arrived for {self._timeout:g} s")
            time.sleep(pause)
            pause = min(pause + 2e-5, 1e-3)

    def _end_all_on_uncaught(self) -> None:
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, AgreedError):  # all ranks are here, and leave by themselves
                if self.rank == 0:
                    say(describe(error))
                return
            if os.environ.get("THDCP_TRACEBACK"):
                previous(kind, error, trace)
            self.abort(error)

        sys.excepthook = hook


def describe(error: BaseException) -> str:
    """An error in one line: a refusal by its message, anything else by its type too."""
    text = " ".join(str(error).split())
    if isinstance(error, SpecError):
        return f"{text} [{error.code}]"
    return f"{type(error).__name__}: {text} (set THDCP_TRACEBACK=1 to see where)"


def say(line: str) -> None:
    """Print an error, as one line, on standard error."""
    sys.stdout.flush()
    sys.stderr.write(f"thdcp: error: {line}\n")
    sys.stderr.flush()


def launched() -> tuple[int, int] | None:
    """This process's rank and the number of ranks, as an MPI launcher tells them; None: started by none."""
    for rank, size in (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if os.environ.get(rank, "").isdigit() and os.environ.get(size, "").isdigit():
            return int(os.environ[rank]), int(os.environ[size])
    return None


def _import_mpi() -> Any:
    """mpi4py's MPI, initialised; a launcher that it cannot work with is found out before MPI_Init ends the process."""
    try:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # at exit
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise SpecError(
            "missing_package",
            f"MPI ranks need mpi4py and an MPI library: pip install 'thdcp[mpi]', and 'thdcp[mpich]' on a machine "
            f"without MPI ({reason})",
        ) from error
    if not MPI.Is_initialized():
        library = MPI.get_vendor()[0]
        if "OMPI_COMM_WORLD_SIZE" in os.environ and library != "Open MPI":
            raise SpecError("rank_failed", f"the launcher is Open MPI's but mpi4py loads {library}; {_MATCH_MPI}")
        MPI.Init_thread()
    return MPI
