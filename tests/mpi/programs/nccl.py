"""Exchanges of NcclCollectives over a CuPy that is none: `nccl.py WHAT`, right or with a fault of one rank."""

import sys
import time

import fake_cupy
import ml_dtypes
import numpy as np
import pytest

from cupy_backend.collectives import NcclCollectives
from refimpl.collectives import MpiCollectives
from refimpl.errors import SpecError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def own(rank, shape, dtype):
    return np.random.default_rng(rank).integers(0, 100, shape).astype(dtype).view(fake_cupy.Array)


def check_exchanges(group):
    """Every exchange gives what its definition says, with one NCCL group each."""
    ranks, calls = range(group.size), fake_cupy.calls
    for dtype in (BFLOAT16, np.uint8, np.float32, np.int64, np.float16):
        gathered = group.all_gather(own(group.rank, (5, 3), dtype))
        assert gathered.dtype == dtype
        assert np.array_equal(gathered, np.stack([own(r, (5, 3), dtype) for r in ranks]))
    calls.clear()
    k, v = own(group.rank, (4, 2, 8), BFLOAT16), own(group.rank, (4, 2, 6), BFLOAT16)
    pending = group.start_gather([k, v[:, ::-1]])
    assert calls == [
        *("record current", "exchange waits", "groupStart"),
        *(f"allGather {4 * 2 * 8 * 2} uint8 on 7", f"allGather {4 * 2 * 6 * 2} uint8 on 7"),
        *("groupEnd", "record exchange"),
    ]
    calls.clear()
    k_all, v_all = pending()
    assert calls == ["current waits"], "waiting is the current stream's"
    assert np.array_equal(k_all, np.stack([own(r, (4, 2, 8), BFLOAT16) for r in ranks]))
    assert np.array_equal(v_all, np.stack([own(r, (4, 2, 6), BFLOAT16)[:, ::-1] for r in ranks]))
    for dtype in (np.float32, np.float64, np.int32, np.int64):
        total = group.reduce_scatter_sum(own(group.rank, (group.size, 7), dtype))
        assert total.dtype == dtype
        assert np.array_equal(total, sum(own(r, (group.size, 7), dtype)[group.rank] for r in ranks))
    for wrong, code in ((np.zeros((group.size, 2), np.float16), "dtype"), (np.zeros((group.size + 1, 2)), "shape")):
        with pytest.raises(SpecError) as caught:
            group.reduce_scatter_sum(wrong)
        assert caught.value.code == code
    calls.clear()
    parts = [own(group.rank, (group.rank + 2 * r, 3), BFLOAT16) for r in ranks]
    (received,) = group.start_exchange([(parts, [(s + 2 * group.rank, 3) for s in ranks])])()
    assert calls.count("groupStart") == calls.count("groupEnd") == 1
    assert not any(" 0 uint8" in call for call in calls)
    for s in ranks:
        assert np.array_equal(received[s], own(s, (s + 2 * group.rank, 3), BFLOAT16))
    group.all_agree({"same": "same"})
    group.close()
    assert calls[-1] == "destroy"


def main():
    what = sys.argv[1]
    MpiCollectives()  # so that what fails before the group is there ends all ranks too
    fake_cupy.install(what, gpus=1 if what == "shared" else 8)
    started = time.time()
    if what not in ("nothing", "async", "stuck"):
        print("fault at", started, flush=True)
    group = NcclCollectives(timeout=2.0)
    assert fake_cupy.Device.current == group.rank
    assert fake_cupy.calls == (["get_unique_id"] if group.rank == 0 else []) + ["init"]
    if what in ("async", "stuck"):
        print("fault at", started, flush=True)
        pending = group.start_gather([own(group.rank, (4,), np.float32)])
        time.sleep(20)  # as a rank that waits on its device
        pending()
    check_exchanges(group)
    print(f"rank {group.rank} finished", flush=True)


main()
