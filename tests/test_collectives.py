"""The in-process group, and what the MPI group shares with it: order, sums, agreement, and how a failure ends all."""

import pickle
import sys
import threading
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from refimpl.collectives import (
    AgreedError,
    Collectives,
    MpiCollectives,
    describe,
    fingerprint,
    launched,
    run_ranks,
    say,
)
from refimpl.errors import SpecError

SIZES = [1, 2, 3, 5, 8]
DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.uint8, np.bool_, np.complex64]
PROMPT = 5.0
"""Seconds within which ranks must end after a failure; their timeout is far longer, so they do not end by it."""


def own(rank: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """What one rank brings: small integers, exact in every dtype, other ones on every rank."""
    return np.random.default_rng(rank).integers(0, 120, shape).astype(dtype)


def bits(x: np.ndarray) -> bytes:
    return x.tobytes()


# Gathering and reducing


@pytest.mark.clause("C1")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_all_gather_is_in_rank_order_for_every_dtype(size: int, dtype: type) -> None:
    expected = [own(rank, (3, 2), dtype) for rank in range(size)]
    for gathered in run_ranks(size, lambda group: group.all_gather(own(group.rank, (3, 2), dtype))):
        assert gathered.shape == (size, 3, 2)
        assert gathered.dtype == dtype
        assert [bits(part) for part in gathered] == [bits(part) for part in expected]


@pytest.mark.clause("C1")
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::2],
        lambda x: x[::-1, ::-1],
        lambda x: x.T,
        lambda x: np.broadcast_to(x[:1], (7, 6)),
        lambda x: x[:0],
        lambda x: x[0, 0],
    ],
    ids=["strided", "reversed", "transposed", "stride-0", "empty", "0-d"],
)
def test_all_gather_takes_any_strides_and_shapes(view: Callable[[np.ndarray], np.ndarray]) -> None:
    expected = np.stack([view(own(rank, (4, 6), np.float32)) for rank in range(3)])
    for gathered in run_ranks(3, lambda group: group.all_gather(view(own(group.rank, (4, 6), np.float32)))):
        np.testing.assert_array_equal(gathered, expected, strict=True)


@pytest.mark.clause("C1")
def test_what_was_gathered_is_a_copy() -> None:
    def rank(group: Collectives) -> np.ndarray:
        x = np.full(4, float(group.rank))
        gathered = group.all_gather(x)
        gathered_by_all = group.all_gather(x)
        x[:] = -1.0
        gathered[:] = -2.0
        group.all_gather(x)
        return gathered_by_all

    for result in run_ranks(3, rank):
        np.testing.assert_array_equal(result, np.repeat([[0.0], [1.0], [2.0]], 4, axis=1))


@pytest.mark.clause("C2")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.longdouble, np.int64, np.int32])
def test_each_rank_receives_the_sum_of_its_part(size: int, dtype: type) -> None:
    everything = np.stack([own(rank, (size, 4, 3), dtype) for rank in range(size)])
    results = run_ranks(size, lambda group: group.reduce_scatter_sum(own(group.rank, (size, 4, 3), dtype)))
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, everything[:, rank].sum(axis=0, dtype=dtype), strict=True)


@pytest.mark.clause("C2")
@pytest.mark.parametrize("last", range(4))
def test_the_sum_is_taken_in_rank_order_whoever_arrives_last(last: int) -> None:
    # 1e8 + 1 is 1e8 in float32, so every order but that of the ranks gives another sum.
    values = np.array([1e8, 1.0, -1e8, 1.0], np.float32)

    def rank(group: Collectives) -> np.ndarray:
        if group.rank == last:
            time.sleep(0.05)
        return group.reduce_scatter_sum(np.full((4, 2), values[group.rank]))

    for result in run_ranks(4, rank):
        np.testing.assert_array_equal(result, np.ones(2, np.float32), strict=True)


@pytest.mark.clause("C2")
def test_reducing_leaves_the_input_alone() -> None:
    def rank(group: Collectives) -> np.ndarray:
        x = np.full((2, 3), float(group.rank + 1))
        result = group.reduce_scatter_sum(x)
        result[:] = 9.0
        return x

    for r, x in enumerate(run_ranks(2, rank)):
        np.testing.assert_array_equal(x, np.full((2, 3), r + 1.0))


@pytest.mark.clause("N1")
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.bool_, np.uint8, np.complex64])
def test_no_sum_over_ranks_in_a_narrow_dtype(dtype: type) -> None:
    with pytest.raises(SpecError, match="float32 or wider") as raised:
        run_ranks(2, lambda group: group.reduce_scatter_sum(np.zeros((2, 3), dtype)))
    assert raised.value.code == "dtype"


@pytest.mark.clause("C2")
@pytest.mark.parametrize("shape", [(), (3,), (1, 4)])
def test_reducing_needs_one_part_a_rank(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="one part a rank") as raised:
        run_ranks(2, lambda group: group.reduce_scatter_sum(np.zeros(shape)))
    assert raised.value.code == "shape"


# Agreement


def statements(size: int, of: Callable[[int], tuple[dict[str, str], SpecError | None]]) -> list[SpecError | None]:
    """What all_agree raises on each rank, None where nothing; the group must remain usable."""

    def rank(group: Collectives) -> SpecError | None:
        raised = None
        try:
            group.all_agree(*of(group.rank))
        except AgreedError as error:
            raised = error
        np.testing.assert_array_equal(group.all_gather(np.array(group.rank)), np.arange(group.size))
        return raised

    return run_ranks(size, rank)


@pytest.mark.clause("C3")
@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_state_the_same_agree(size: int) -> None:
    assert statements(size, lambda _: ({"policy": "zigzag", "layout": "ü, \n"}, None)) == [None] * size


@pytest.mark.clause("C3")
@pytest.mark.parametrize("odd", range(4))
def test_all_ranks_learn_who_differs_in_what(odd: int) -> None:
    errors = statements(4, lambda rank: ({"a": "same", "b": "two" if rank == odd else "one"}, None))
    assert {(error.code, error.message) for error in errors} == {
        (
            "ranks_disagree",
            f"ranks disagree on b: rank 0 has {'two' if odd == 0 else 'one'}, rank {max(odd, 1)} has "
            f"{'one' if odd == 0 else 'two'}; give all ranks the same (nothing was computed)",
        )
    }


@pytest.mark.clause("C3")
@pytest.mark.parametrize("odd", range(3))
def test_a_fact_that_one_rank_lacks_or_adds_is_a_disagreement(odd: int) -> None:
    for facts in ({}, {"a": "1", "b": "2"}):
        errors = statements(3, lambda rank, facts=facts: (facts if rank == odd else {"a": "1"}, None))
        assert {error.code for error in errors} == {"ranks_disagree"}
        assert len({error.message for error in errors}) == 1
        assert "nothing;" in errors[0].message or "has nothing," in errors[0].message


@pytest.mark.clause("C3")
@pytest.mark.parametrize("odd", range(3))
def test_the_refusal_of_one_rank_reaches_all(odd: int) -> None:
    errors = statements(3, lambda rank: ({"a": "1"}, SpecError("heads", "three on two") if rank == odd else None))
    assert {(error.code, error.message) for error in errors} == {("heads", f"rank {odd}: three on two")}


@pytest.mark.clause("C3")
def test_a_refusal_that_all_share_is_told_without_a_rank() -> None:
    errors = statements(3, lambda _: ({}, SpecError("cp_size", "0 ranks")))
    assert {(error.code, error.message) for error in errors} == {("cp_size", "0 ranks")}


@pytest.mark.clause("C3")
def test_of_different_refusals_the_lowest_ranks_is_told() -> None:
    errors = statements(3, lambda rank: ({}, SpecError("shape", f"of {rank}") if rank else None))
    assert {(error.code, error.message) for error in errors} == {("shape", "rank 1: of 1")}


@pytest.mark.clause("C3")
def test_a_fingerprint_tells_offsets_apart() -> None:
    real, padded = np.array([0, 5, 12]), np.array([0, 8, 16])
    assert fingerprint(real, padded) == fingerprint(real.copy(), padded.copy())
    assert fingerprint(real, padded) == fingerprint(np.repeat(real, 2)[::2], padded)
    assert len({fingerprint(real, padded), fingerprint(padded, real), fingerprint(real, real)}) == 3


# Failure


def ended(function: Callable[[Collectives], object], size: int = 4) -> tuple[BaseException, float, list[str]]:
    """Run ranks that must fail: what run_ranks raises, after how long, and what each rank saw."""
    seen = ["finished"] * size

    def rank(group: Collectives) -> object:
        try:
            return function(group)
        except BaseException as error:
            seen[group.rank] = f"{type(error).__name__}: {error}"
            raise

    before = threading.active_count()
    started = time.monotonic()
    with pytest.raises(BaseException) as raised:  # noqa: PT011 - the caller looks at what it is
        run_ranks(size, rank)
    assert threading.active_count() == before
    return raised.value, time.monotonic() - started, seen


def work(group: Collectives, fail: Callable[[str], None]) -> None:
    """A forward in small: collectives, and places between them where a rank can fail."""
    fail("before")
    group.all_agree({"operation": "forward"})
    fail("between")
    gathered = group.all_gather(np.ones(3))
    fail("between later ones")
    group.reduce_scatter_sum(gathered)
    fail("after")


PLACES = ["before", "between", "between later ones", "after"]


@pytest.mark.clause("C4")
@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("place", PLACES)
def test_a_failing_thread_ends_the_others_and_its_error_is_raised(place: str, failing: int) -> None:
    def rank(group: Collectives) -> None:
        def fail(here: str) -> None:
            if here == place and group.rank == failing:
                time.sleep(0.05)  # the others wait already
                raise ZeroDivisionError("mine")

        work(group, fail)

    error, seconds, seen = ended(rank)
    assert isinstance(error, ZeroDivisionError)
    assert str(error) == "mine"
    assert seconds < PROMPT
    others = [text for r, text in enumerate(seen) if r != failing]
    if place == "after":
        assert set(others) == {"finished"}
    else:
        assert others == [f"SpecError: rank {r} stops: rank {failing} has failed" for r in range(4) if r != failing]


@pytest.mark.clause("C4")
def test_the_own_error_is_raised_when_a_rank_fails_inside_a_reduction() -> None:
    # Rank 2 hands over what cannot be summed, and notices before it meets the others.
    error, seconds, _ = ended(lambda group: group.reduce_scatter_sum(np.ones((4 if group.rank != 2 else 3, 2))))
    assert isinstance(error, SpecError)
    assert error.code == "shape"
    assert seconds < PROMPT


@pytest.mark.clause("C4")
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, MemoryError])
def test_whatever_ends_a_thread_is_raised(kind: type[BaseException]) -> None:
    def rank(group: Collectives) -> None:
        if group.rank == 1:
            raise kind("enough")
        group.all_gather(np.ones(1))

    error, seconds, _ = ended(rank)
    assert type(error) is kind
    assert seconds < PROMPT


@pytest.mark.clause("C4")
@pytest.mark.parametrize("leaving", range(4))
def test_a_thread_that_returns_early_ends_the_others(leaving: int) -> None:
    def rank(group: Collectives) -> None:
        group.all_gather(np.ones(1))
        if group.rank != leaving:
            group.all_gather(np.ones(1))

    error, seconds, seen = ended(rank)
    assert isinstance(error, SpecError)
    assert error.code == "rank_failed"
    assert f"rank {leaving} has returned" in error.message
    assert seconds < PROMPT
    assert seen[leaving] == "finished"
    assert sum("stops" in text for text in seen) == 3


@pytest.mark.clause("C4")
def test_a_thread_that_never_arrives_is_waited_for_a_bounded_time() -> None:
    done = threading.Event()

    def rank(group: Collectives) -> None:
        if group.rank == 1:
            done.wait(PROMPT)
        try:
            group.all_gather(np.ones(1))
        finally:
            done.set()

    started = time.monotonic()
    with pytest.raises(SpecError, match=r"a rank has not arrived for 0\.2 s") as raised:
        run_ranks(3, rank, timeout=0.2)
    assert raised.value.code == "rank_failed"
    assert 0.2 <= time.monotonic() - started < PROMPT


@pytest.mark.clause("C4")
def test_a_rank_that_holds_on_after_a_failure_cannot_go_on() -> None:
    def rank(group: Collectives) -> None:
        if group.rank == 0:
            raise ZeroDivisionError
        for _ in range(3):
            with pytest.raises(SpecError, match="rank 0 has failed"):
                group.all_gather(np.ones(1))

    error, seconds, seen = ended(rank)
    assert isinstance(error, ZeroDivisionError)
    assert seconds < PROMPT
    assert seen[1:] == ["finished"] * 3


@pytest.mark.clause("C4")
def test_a_rank_that_is_done_first_disturbs_nobody() -> None:
    # Who leaves right after the last exchange must not be taken for one that is missing from it.
    for _ in range(100):
        results = run_ranks(4, lambda group: group.all_gather(np.array(group.rank)).sum())
        assert results == [6] * 4


@pytest.mark.clause("C1", "C2")
def test_many_rounds_at_different_paces_never_mix() -> None:
    def rank(group: Collectives) -> None:
        random = np.random.default_rng(group.rank)
        for i in range(150):
            if random.random() < 0.2:
                time.sleep(random.random() * 1e-3)
            gathered = group.all_gather(np.array([i, group.rank]))
            np.testing.assert_array_equal(gathered[:, 0], i)
            total = group.reduce_scatter_sum(np.full((group.size, 1), i * (group.rank + 1)))
            assert total[0] == i * 15

    run_ranks(5, rank)


@pytest.mark.clause("C4")
def test_results_come_in_rank_order() -> None:
    def rank(group: Collectives) -> tuple[int, int]:
        time.sleep(0.02 * (3 - group.rank))
        return group.rank, group.size

    assert run_ranks(4, rank) == [(r, 4) for r in range(4)]


# Words and environment


@pytest.mark.clause("C4")
def test_every_error_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    say(describe(ValueError("one\n  two\tthree")))
    say(describe(SpecError("shape", "too\nlong")))
    assert capsys.readouterr().err.splitlines() == [
        "thdcp: error: ValueError: one two three (set THDCP_TRACEBACK=1 to see where)",
        "thdcp: error: too long [shape]",
    ]


@pytest.mark.clause("C3")
def test_an_agreed_error_is_a_refusal_like_others() -> None:
    error = AgreedError("heads", "three on two")
    assert isinstance(error, SpecError)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.code, copy.message) == ("heads", "three on two")


@pytest.mark.clause("C4")
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, (1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, (0, 2)),
        ({"PMI_SIZE": "4"}, None),
        ({"PMI_RANK": "", "PMI_SIZE": "many"}, None),
    ],
)
def test_what_a_launcher_tells(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[int, int] | None
) -> None:
    for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched() == expected


@pytest.mark.clause("C4")
def test_without_mpi4py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(SpecError, match=r"thdcp\[mpi\]") as raised:
        MpiCollectives()
    assert raised.value.code == "missing_package"
