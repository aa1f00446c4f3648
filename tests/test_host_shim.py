"""The shim that runs CUDA kernels on the CPU: every primitive by a formula of its own, every fault found and named."""

import os
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupy_backend import host
from cupy_backend.host import HostModule, KernelError
from refimpl.errors import SpecError

KERNELS = Path(__file__).parent / "kernels"
ORDERS = [("in_order", 0), ("reverse", 0), ("random", 1), ("random", 2), ("priority", 1), ("priority", 2)]
RNG = np.random.default_rng(4)


@pytest.fixture(scope="module")
def primitives():
    return HostModule(KERNELS / "primitives.cu", variant="plain")


@pytest.fixture(scope="module")
def faults():
    return HostModule(KERNELS / "faults.cu", variant="plain")


# Values


def test_rounding_to_16_bits_is_that_of_ml_dtypes_and_numpy(primitives):
    bits = RNG.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    every_half = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    below = (every_half.view(np.uint32) - np.uint32(1)).view(np.float32)
    halfway = ((np.arange(2**16, dtype=np.uint32) << 16) + 0x8000).view(np.float32)
    x = np.concatenate([bits.view(np.float32), every_half, halfway, below])
    x = np.concatenate([x, np.float32([65519.996, 65520, 2**-25, np.nextafter(np.float32(2**-25), np.float32(1))])])
    brain, half = np.zeros(len(x), ml_dtypes.bfloat16), np.zeros(len(x), np.float16)
    pairs = np.zeros((2, len(x)), np.uint32)
    primitives.kernel("from_floats")(1, 32, [x, brain, half, pairs[0], pairs[1], len(x)])
    number = ~np.isnan(x)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = {"brain": x.astype(ml_dtypes.bfloat16), "half": x.astype(np.float16)}
    for result, pair, name in [(brain, pairs[0], "brain"), (half, pairs[1], "half")]:
        bits16 = result.view(np.uint16)
        assert (bits16[number] == expected[name].view(np.uint16)[number]).all()
        assert (bits16[~number] == 0x7FFF).all()
        assert ((pair & 0xFFFF) == bits16).all()
        assert ((pair >> 16)[number] == (bits16 ^ 0x8000)[number]).all()


def test_16_bit_floats_widen_exactly(primitives):
    bits = np.arange(2**16, dtype=np.uint16)
    brain, half, brain_high, half_high = np.zeros((4, len(bits)), np.float32)
    primitives.kernel("to_floats")(1, 32, [bits, brain, half, brain_high, half_high, len(bits)])
    expected = bits.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(brain, bits.view(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(half, expected)
    np.testing.assert_array_equal(brain_high, brain)
    np.testing.assert_array_equal(half_high, expected)
    assert (np.signbit(half) == np.signbit(expected)).all()


def test_arithmetic(primitives):
    x = np.linspace(-3, 3, 32, dtype=np.float32)
    exponential, logarithm, special = np.zeros(32, np.float32), np.zeros(32, np.float32), np.zeros(4, np.float32)
    primitives.kernel("arithmetic")(1, 32, [x, exponential, logarithm, special])
    np.testing.assert_allclose(exponential, 2.0 ** x.astype(np.float64), rtol=1e-6)
    np.testing.assert_allclose(logarithm[x > 0], np.log2(x[x > 0].astype(np.float64)), rtol=1e-5)
    assert special.tolist() == [-np.inf, 1, 0, 17 + 100 + 2000]


# Warps


@pytest.mark.parametrize("operand", [1, 3, 31])
@pytest.mark.parametrize(("schedule", "seed"), ORDERS)
def test_shuffles_and_votes(primitives, schedule, seed, operand):
    x = RNG.integers(-(2**60), 2**60, 64)
    indexed, crossed, up, down = np.zeros((4, 64), np.int64)
    votes, floats = np.zeros(64, np.uint32), np.zeros(64, np.float32)
    kernel = primitives.kernel("shuffles")
    kernel(1, (8, 4, 2), [x, indexed, crossed, up, down, votes, floats, operand], schedule=schedule, seed=seed)
    lane, warp = np.arange(64) % 32, np.arange(64) // 32 * 32
    assert (indexed == x[warp + lane * operand % 32]).all()
    assert (crossed == x[warp + (lane ^ operand)]).all()
    assert (up == x[warp + np.where(lane >= operand, lane - operand, lane)]).all()
    assert (down == x[warp + np.where(lane + operand < 32, lane + operand, lane)]).all()
    assert votes.tolist() == [sum(1 << i for i in range(32) if x[w + i] % 3 == 0 or x[w + i] == 0) for w in warp]
    assert (floats == x[warp + (lane ^ 2)].astype(np.float32)).all()


def test_ldmatrix_layout_is_that_of_the_ptx_isa(primitives):
    # Four 8 x 8 matrices whose rows lie anywhere in shared memory. PTX ISA, ldmatrix: thread t holds, of each matrix,
    # the elements 2 * (t % 4) and the next of row t / 4; with .trans of the transposed matrix.
    memory = RNG.integers(0, 2**16, (64, 8)).astype(np.uint16)
    rows = RNG.permutation(64)[:32].astype(np.int32)
    straight, transposed = np.zeros((2, 32, 4), np.uint32)
    straight_pair, transposed_pair = np.zeros((2, 32, 2), np.uint32)
    args = [memory, rows, straight, transposed, straight_pair, transposed_pair]
    primitives.kernel("load_matrices")(1, 32, args, 1024, schedule="random")
    matrices = memory[rows].reshape(4, 8, 8)
    for thread in range(32):
        for m in range(4):
            row, column = divmod(thread, 4)
            low, high = matrices[m, row, 2 * column], matrices[m, row, 2 * column + 1]
            assert straight[thread, m] == int(low) + (int(high) << 16)
            low, high = matrices[m].T[row, 2 * column], matrices[m].T[row, 2 * column + 1]
            assert transposed[thread, m] == int(low) + (int(high) << 16)
    assert (straight_pair == straight[:, :2]).all()
    assert (transposed_pair == transposed[:, :2]).all()


@pytest.mark.parametrize(
    ("rows", "conflicts"),
    [
        (np.arange(32), 0),  # 16 bytes apart: all 32 banks once
        (np.arange(32) // 8 * 8, 0),  # eight times one address: one access
        (np.arange(32) % 8 * 8, 12 * 7),  # 128 bytes apart: the same banks, eight passes, in 4 + 4 + 2 + 2 matrices
        (np.arange(32) % 8 * 4, 12 * 3),  # 64 bytes apart: four rows on each half of the banks
        (np.arange(32) % 8 * 8 + (np.arange(32) % 8), 0),  # swizzled
    ],
)
def test_bank_conflicts_are_counted(primitives, rows, conflicts):
    results = [np.zeros((32, n), np.uint32) for n in (4, 4, 2, 2)]
    args = [np.zeros((64, 8), np.uint16), rows.astype(np.int32), *results]
    statistics = primitives.kernel("load_matrices")(1, 32, args, 1024)
    assert statistics.bank_conflicts == conflicts
    assert statistics.matrix_loads == 4


@pytest.mark.parametrize(("name", "dtype"), [("multiply_bf16", ml_dtypes.bfloat16), ("multiply_fp16", np.float16)])
def test_mma_layout_is_that_of_the_ptx_isa(primitives, name, dtype):
    # PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type", in its own words: groupID = lane >> 2,
    # threadID_in_group = lane % 4. Small integers: every sum is exact.
    a, b = RNG.integers(-4, 5, (16, 16)), RNG.integers(-4, 5, (16, 8))
    c = RNG.integers(-4, 5, (16, 8))
    a_fragments, b_fragments = np.zeros((32, 8), dtype), np.zeros((32, 4), dtype)
    c_fragments = np.zeros((32, 4), np.float32)
    for lane in range(32):
        group, member = lane >> 2, lane % 4
        for i in range(8):
            row = group if i in (0, 1, 4, 5) else group + 8
            column = member * 2 + (i & 1) if i < 4 else member * 2 + (i & 1) + 8
            a_fragments[lane, i] = a[row, column]
        for i in range(4):
            b_fragments[lane, i] = b[member * 2 + (i & 1) if i < 2 else member * 2 + (i & 1) + 8, group]
            c_fragments[lane, i] = c[group if i < 2 else group + 8, member * 2 + (i & 1)]
    result = c_fragments.copy()
    args = [a_fragments.view(np.uint32), b_fragments.view(np.uint32), result]
    statistics = primitives.kernel(name)(1, 32, args, schedule="random", seed=3)
    assert statistics.matrix_products == 1
    expected = a @ b + c
    for lane in range(32):
        group, member = lane >> 2, lane % 4
        for i in range(4):
            assert result[lane, i] == expected[group if i < 2 else group + 8, member * 2 + (i & 1)]


# Blocks


@pytest.mark.parametrize("os_threads", [1, 3])
@pytest.mark.parametrize(("schedule", "seed"), ORDERS)
def test_indices_and_static_arrays(primitives, schedule, seed, os_threads):
    out = np.zeros(3 * 2 * 5 * 64, np.int32)
    statistics = primitives.kernel("indices")(
        (3, 2, 5), (4, 8, 2), [out], schedule=schedule, seed=seed, os_threads=os_threads
    )
    block, thread = np.divmod(np.arange(len(out)), 64)
    assert (out == block * 10000 + 100 * 64 + 63 - thread).all()
    assert statistics.barriers == 30 * 2


@pytest.mark.parametrize("completion", ["eager", "lazy", "random"])
@pytest.mark.parametrize(("schedule", "seed"), ORDERS)
def test_asynchronous_copies(primitives, schedule, seed, completion):
    x = RNG.integers(0, 2**32, (5 * 64, 4)).astype(np.uint32)
    y = np.zeros_like(x)
    kernel = primitives.kernel("staged_copy")
    kernel(1, 64, [x, y, 5, 300], 2048, schedule=schedule, seed=seed, cp_async=completion)
    x[300:] = 0
    assert (y.reshape(5, 64, 4) == x.reshape(5, 64, 4)[:, ::-1]).all()


# Faults


@pytest.mark.parametrize(("schedule", "seed"), ORDERS)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("early_return", "barrier|left the kernel while .* wait in barrier at faults.cu"),
        (
            "divergent_barrier",
            r"barrier at faults.cu:.*: \d+ threads of the block wait in another one, barrier at faults",
        ),
        ("lane_not_named", r"ballot at faults.cu:.*: lane 31 calls it with mask 0x7fffffff, which does not name it"),
        ("lane_missing", r"lanes that left the kernel|left the kernel while lanes 0x\w+ wait for it in shuffle"),
        ("reads_unnamed_lane", "shuffle at faults.cu:.*: reads lane 16, which mask 0x0000ffff does not name"),
        (
            "divergent_collective",
            "shuffle at faults.cu:.*: mask 0xffffffff names lanes .*, which wait in shuffle at line",
        ),
        (
            "barrier_against_collective",
            "no thread can go on: .* waits in barrier at faults.cu:.* waits in warp_barrier",
        ),
        ("past_static", "shared array 'table' was written 1 bytes past its end"),
        ("before_carved", "shared array 'first' was written 253 bytes past its end"),
        ("too_little_shared", "'second' ends at byte 1028, but the launch gave 1024 bytes of dynamic shared memory"),
        ("misaligned", "store16 at faults.cu:.*: address .* is not a multiple of 16 bytes"),
        ("copy_to_global", "cp_async_16 at faults.cu:.*: address .* lies in no shared array of the block"),
        ("row_outside", "ldmatrix_x4 at faults.cu:.*: address .* lies in no shared array of the block"),
        ("endless_recursion", "touched address .*, which is not mapped"),
    ],
)
def test_a_fault_is_named(faults, name, message, schedule, seed):
    out = np.zeros(68, np.int32)
    out = out[-(out.ctypes.data // 4) % 4 :][:64]
    with pytest.raises(KernelError, match=message) as error:
        faults.kernel(name)(3, 64, [out], 1024, schedule=schedule, seed=seed)
    assert "\n" not in str(error.value)
    assert f"{name}: block (" in str(error.value)


def test_a_null_pointer_is_an_error_and_the_process_lives_on(faults):
    for _ in range(3):
        with pytest.raises(KernelError, match=r"block \(\d, 0, 0\) thread \(0, 0, 0\): touched address \(nil\)"):
            faults.kernel("null_pointer")(2, 64, [None])
    out = np.arange(64, dtype=np.int32)
    faults.kernel("correct_exchange")(1, 64, [out], 1024)
    assert (out == np.arange(64)[::-1]).all()


def test_a_small_block_has_no_lanes_beyond_its_end(faults):
    with pytest.raises(KernelError, match="mask 0xffffffff names lanes that the warp does not have"):
        faults.kernel("lane_missing")(1, 16, [np.zeros(64, np.int32)])


def exchange(faults, name, schedule, seed):
    out = np.arange(64, dtype=np.int32)
    faults.kernel(name)(1, 64, [out], 1024, schedule=schedule, seed=seed)
    return bool((out == np.arange(64)[::-1]).all())


def copied(faults, name, schedule, seed, completion):
    x = np.arange(256, dtype=np.uint32)
    y = np.zeros_like(x)
    faults.kernel(name)(1, 64, [x, y], 1024, schedule=schedule, seed=seed, cp_async=completion)
    return bool((y.reshape(64, 4) == x.reshape(64, 4)[::-1]).all())


RANDOM = [("random", seed) for seed in range(4)] + [("priority", seed) for seed in range(4)]


@pytest.mark.parametrize(("schedule", "seed"), RANDOM)
def test_random_orders_show_a_missing_barrier(faults, schedule, seed):
    assert exchange(faults, "correct_exchange", schedule, seed)
    assert not exchange(faults, "read_too_early", schedule, seed)
    assert not exchange(faults, "reused_too_early", schedule, seed)
    assert not copied(faults, "copy_without_barrier", schedule, seed, "eager")


@pytest.mark.parametrize("name", ["copy_waited_for_too_little", "copy_never_committed"])
def test_lazy_and_random_copies_show_a_wait_that_is_too_short(faults, name):
    assert copied(faults, name, "in_order", 0, "eager"), "an eager copy hides it"
    assert not copied(faults, name, "in_order", 0, "lazy")
    for seed in range(4):
        assert not copied(faults, name, "random", seed, "random")


def test_a_seed_is_one_order(faults):
    def result(seed, os_threads):
        out = np.arange(64, dtype=np.int32)
        faults.kernel("read_too_early")(1, 64, [out], 1024, schedule="random", seed=seed, os_threads=os_threads)
        return out.tolist()

    assert result(1, 1) == result(1, 4)
    assert result(1, 1) != result(2, 1)


# Launches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"args": []}, "correct_exchange takes 1 arguments, not 0"),
        ({"args": [np.zeros(64, np.int64)]}, "argument out has dtype int64: expected int32, int32*"),
        ({"args": [np.zeros((64, 2), np.int32)[:, 0]]}, "argument out is not C-contiguous"),
        ({"args": [[0] * 64]}, "argument out is list: expected a NumPy array"),
        ({"block": 65}, "a block of 65 threads, but its launch bound is 64"),
        ({"grid": 0}, "grid is 0: expected one to three sizes of 1 or more"),
        ({"grid": (1, 1, 1, 1)}, "grid is (1, 1, 1, 1): expected one to three sizes of 1 or more"),
        ({"schedule": "fifo"}, "schedule is 'fifo': expected one of in_order, reverse, random, priority"),
    ],
)
def test_a_wrong_launch_is_refused(faults, change, message):
    launch = {"grid": 1, "block": 64, "args": [np.zeros(64, np.int32)], "shared_bytes": 1024} | change
    with pytest.raises(KernelError) as error:
        faults.kernel("correct_exchange")(**launch)
    assert message in str(error.value)


def test_what_a_kernel_writes_must_be_writeable_and_numbers_must_fit(faults):
    out = np.zeros(64, np.int32)
    with pytest.raises(KernelError, match="argument length is 2147483648, which int32 does not hold"):
        faults.kernel("past_global")(1, 64, [out, 2**31])
    with pytest.raises(KernelError, match="argument length is ndarray: expected a number, int32"):
        faults.kernel("past_global")(1, 64, [out, out])
    out.flags.writeable = False
    with pytest.raises(KernelError, match="argument out is read-only"):
        faults.kernel("past_global")(1, 64, [out, 1])


def test_unknown_names(faults):
    with pytest.raises(KernelError, match="absent: the module has no such kernel"):
        faults.kernel("absent")
    with pytest.raises(KernelError, match=r"nowhere\.cu: no such kernel source"):
        HostModule("nowhere")
    with pytest.raises(KernelError, match="variant is 'fast': expected one of plain, debug, address, thread"):
        HostModule("partition", variant="fast")


# Builds


def test_a_build_is_cached_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("THDCP_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "one.cu"
    text = (
        '#include "primitives.cuh"\nusing namespace thdcp;\n'
        "THDCP_KERNEL(one, 32, 1, int* out) { out[thread_id()] = VALUE; }\n"
    )
    source.write_text(text)
    first = host.build(source, ("VALUE=1",))
    stamp = first.stat().st_mtime_ns
    assert host.build(source, ("VALUE=1",)) == first
    assert first.stat().st_mtime_ns == stamp
    assert host.build(source, ("VALUE=2",)) != first
    source.write_text(text.replace("VALUE;", "VALUE + 1;"))
    assert host.build(source, ("VALUE=1",)) != first
    assert not list((tmp_path / "cache").glob("build-*"))
    out = np.zeros(32, np.int32)
    HostModule(source, ["VALUE=6"], variant="plain").kernel("one")(1, 32, [out])
    assert (out == 7).all()


def test_builds_at_once_do_not_disturb_each_other(tmp_path):
    program = (
        "import numpy as np; from cupy_backend.host import HostModule; out = np.arange(64, dtype=np.int32);"
        f"HostModule({str(KERNELS / 'faults.cu')!r}, variant='plain').kernel('correct_exchange')(1, 64, [out], 1024);"
        "assert out[0] == 63"
    )
    environment = {**os.environ, "THDCP_CACHE": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"}
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert len(list(tmp_path.glob("faults-*.so"))) == 1


def test_a_source_that_does_not_compile(tmp_path, monkeypatch):
    monkeypatch.setenv("THDCP_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "broken.cu"
    source.write_text('#include "primitives.cuh"\nint f() { return absent; }\n')
    with pytest.raises(KernelError, match=r"(?s)broken.cu does not compile:.*broken.cu:2.*absent"):
        host.build(source)
    assert not list((tmp_path / "cache").glob("broken*"))


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    host._compiler.cache_clear()
    try:
        with pytest.raises(SpecError, match=r"no-such-compiler was not found: .* install g\+\+") as error:
            host.build(KERNELS / "primitives.cu")
        assert error.value.code == "missing_package"
    finally:
        host._compiler.cache_clear()


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("THDCP_CACHE", str(blocked / "cache"))
    with pytest.raises(SpecError, match=r"cannot keep built kernels there .*THDCP_CACHE=") as error:
        host.build(KERNELS / "primitives.cu")
    assert error.value.code == "file"


# Sanitizers, each in a process of its own

SANITIZED = """
import numpy as np, sys
from cupy_backend.host import HostModule
module, name = HostModule(sys.argv[1]), sys.argv[2]
args = [np.arange(64, dtype=np.int32)]
if name.startswith("copy"):
    args = [np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)]
if name == "past_global":
    args = [np.arange(2048, dtype=np.int32), 2048]
grid = 2 if name == "blocks_collide" else 1
for schedule in ["in_order", "random"]:
    module.kernel(name)(grid, 64, args, 1024, schedule=schedule, cp_async="random", os_threads=2)
print("went through")
"""


def sanitized(variant, name):
    return subprocess.run(
        [sys.executable, "-c", SANITIZED, str(KERNELS / "faults.cu"), name],
        env={**os.environ, **host.sanitizer_environment(variant)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("variant", "name", "report"),
    [
        ("thread", "correct_exchange", None),
        ("thread", "read_too_early", "data race"),
        ("thread", "reused_too_early", "data race"),
        ("thread", "copy_without_barrier", "data race"),
        ("thread", "blocks_collide", "data race"),
        ("address", "correct_exchange", None),
        ("address", "past_static", "index 63 out of bounds"),
        ("address", "before_carved", "use-after-poison"),
        ("address", "past_local", "stack-buffer-overflow|out of bounds"),
        ("address", "past_global", "heap-buffer-overflow"),
    ],
)
def test_sanitizers(variant, name, report):
    done = sanitized(variant, name)
    if report is None:
        assert done.returncode == 0, done.stderr[-3000:]
        assert "went through" in done.stdout
    else:
        assert done.returncode != 0
        assert "faults.cu" in done.stderr
        assert re.search(report, done.stderr), done.stderr[-3000:]


CLEAN = """
import numpy as np, sys
from cupy_backend.host import HostModule
module = HostModule(sys.argv[1])
for schedule in ["in_order", "random", "priority"]:
    def run(name, grid, args, shared_bytes=0):
        module.kernel(name)(grid, 64 if name in wide else 32, args, shared_bytes, schedule=schedule, cp_async="random")
    wide = ["shuffles", "staged_copy", "indices"]
    out = np.zeros(30 * 64, np.int32)
    run("indices", (3, 2, 5), [out])
    assert out[63] == 6400
    x = np.arange(5 * 64 * 4, dtype=np.uint32)
    y = np.zeros_like(x)
    run("staged_copy", 1, [x, y, 5, 300], 2048)
    assert y[3] == 255
    results = [*np.zeros((4, 64), np.int64), np.zeros(64, np.uint32), np.zeros(64, np.float32)]
    run("shuffles", 1, [np.arange(64), *results, 3])
    results = [np.zeros(32 * n, np.uint32) for n in (4, 4, 2, 2)]
    run("load_matrices", 1, [np.zeros(512, np.uint16), np.arange(32, dtype=np.int32), *results], 1024)
    run("multiply_bf16", 1, [np.zeros(128, np.uint32), np.zeros(64, np.uint32), np.zeros(128, np.float32)])
print("went through")
"""


@pytest.mark.parametrize("variant", ["thread", "address"])
def test_right_kernels_are_clean_under_sanitizers(variant):
    done = subprocess.run(
        [sys.executable, "-c", CLEAN, str(KERNELS / "primitives.cu")],
        env={**os.environ, **host.sanitizer_environment(variant)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "went through\n", done.stderr[-3000:]
