"""`bench/gpu_check.py` where there is no GPU: what it says, and those of its parts that need none."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupy_backend import partition
from cupy_backend.device import HOST
from refimpl.attention import attention_backward, attention_forward
from refimpl.layout import PackedLayout
from refimpl.partition import Policy

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def timing():
    spec = importlib.util.spec_from_file_location("gpu_timing", ROOT / "bench" / "gpu_timing.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_timing"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_timing"]


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('no CuPy, on purpose')")
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'bench')!r}]\n"]
    command[-1] += "sys.argv = ['gpu_check.py', '--folder', sys.path[0] + '/out']\nimport gpu_check\n"
    command[-1] += "sys.exit(gpu_check.main())"
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "gpu-check: the GPU backend needs CuPy" in done.stderr
    assert "no CuPy, on purpose" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_packed_batch_is_one_that_both_policies_cut(timing):
    layout = timing.packed_layout(65536)
    assert layout.total_tokens == 65536
    assert layout.num_documents > 20
    assert (layout.seqlens_padded % 8 == 0).all()
    assert layout.seqlens.sum() > 0.95 * 65536
    for policy in (Policy.PACKED_CONTIGUOUS, Policy.DUAL_CHUNK_SWAP):
        assert len(partition.partition_indices(layout, policy, timing.CP_SIZE, 0)) == 65536 // timing.CP_SIZE


def test_work_by_hand(timing):
    layout = PackedLayout([0, 3, 5])  # 6 and 3 pairs
    assert timing.pairs(layout) == 9
    assert timing.flops(layout, "forward") == 9 * 2 * 2 * 2048
    assert timing.flops(layout, "backward") == 9 * 5 * 2 * 2048


@pytest.mark.parametrize("policy", [Policy.PACKED_CONTIGUOUS, Policy.DUAL_CHUNK_SWAP])
def test_what_is_timed_of_a_policy_is_its_attention(timing, policy):
    """A rank alone, with K and V of all ranks at hand, computes what it would compute among them."""
    layout = PackedLayout.from_lengths([40, 20], 8)
    rng = np.random.default_rng(0)
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    whole = [rng.standard_normal((layout.total_tokens, 2, 32)).astype(bfloat16) for _ in range(4)]
    shards = [partition.partition(x, layout, policy, timing.CP_SIZE) for x in whole]
    wide = [x.astype(np.float64) for x in whole]
    out, lse = attention_forward(*wide[:3], layout, timing.CAUSAL)
    dq, _, _ = attention_backward(wide[3], *wide[:3], out, lse, layout, timing.CAUSAL)
    for rank in (0, timing.CP_SIZE - 1):
        calls = timing._rank_calls(rank, layout, policy, shards, HOST)
        rows = partition.partition_indices(layout, policy, timing.CP_SIZE, rank)
        got_out, _, _ = calls["forward"]()
        got_dq, _, _ = calls["backward"]()
        assert np.abs(got_out.astype(np.float64) - out[rows]).max() < 0.03
        assert np.abs(got_dq.astype(np.float64) - dq[rows]).max() < 0.05
