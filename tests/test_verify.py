"""The check behind `thdcp verify`: that it passes, that every injected fault fails it, and what it reports."""

from dataclasses import replace

import numpy as np
import pytest

from refimpl.attention import attention_backward, attention_forward
from refimpl.collectives import run_ranks
from refimpl.context_parallel import Parts
from refimpl.cost import visible_pairs
from refimpl.errors import SpecError
from refimpl.faults import FAULTS
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.partition import Policy
from refimpl.verify import (
    Case,
    Plan,
    _share,
    case_layout,
    expected_results,
    one_thread_parts,
    spread_layout,
    verify_rank,
)

PLAN = Plan(
    lengths=(30, 0, 16, 41, 6),
    policies=tuple(Policy),
    masks=(AttentionMask(), AttentionMask(False, (3, 2))),
    heads=((2, 2), (4, 2)),
    head_dim=8,
    dtypes=("float64", "float32", "float16"),
)


def _verify(plan, size=3, parts=None):
    return run_ranks(size, lambda group: verify_rank(group, plan, parts))


@pytest.mark.clause("C5", "N2", "A5")
def test_reference_agrees_in_every_case_and_every_rank_says_so():
    by_rank = _verify(PLAN)
    assert len(by_rank[0]) == PLAN.num_cases == 72
    assert all(result.agrees and not result.first_wrong for result in by_rank[0])
    assert by_rank[1] == by_rank[0] == by_rank[2]
    assert max(error for result in by_rank[0] for error in result.errors.values()) > 0


@pytest.mark.clause("C5")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found_under_every_policy(fault, size):
    plan = replace(PLAN, heads=((2, 1),), fault=fault, fault_rank=size - 1)
    results = _verify(plan, size)[0]
    for policy in Policy:
        wrong = [r for r in results if r.case.policy == policy and not r.agrees]
        assert wrong, policy
        assert all(r.first_wrong for r in wrong)


def test_all_zeros_fails_every_single_case():
    results = _verify(replace(PLAN, fault="all-zeros"))[0]
    assert not any(result.agrees for result in results)


def test_a_low_precision_implementation_fails_float64_only():
    """The bounds discriminate: float32 arithmetic is right in float32 and float16, and wrong in float64."""
    from refimpl import tiled

    def forward(q, k, v, *rest):
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
        return tiled.varlen_attention_forward(q, k, v, *rest)

    results = _verify(replace(PLAN, heads=((2, 2),)), parts=Parts(varlen_attention_forward=forward))[0]
    assert {result.case.dtype for result in results if not result.agrees} == {"float64"}


def test_first_wrong_names_the_row_that_was_broken():
    from refimpl import tiled

    def forward(*args):
        out, lse = tiled.varlen_attention_forward(*args)
        out[5, 1] += 1000
        return out, lse

    plan = replace(PLAN, policies=(Policy.PACKED_CONTIGUOUS,), heads=((2, 2),), dtypes=("float64",))
    plan = replace(plan, paddings=("tight",), masks=(AttentionMask(),))
    (result,) = _verify(plan, 1, Parts(varlen_attention_forward=forward))[0]
    assert result.first_wrong.startswith("out of rank 0, row 5 (document 0, position 5), head 1: ")
    assert not result.agrees


@pytest.mark.clause("A5")
def test_dirty_padding_is_counted_although_its_error_is_small():
    from refimpl import tiled

    def backward(*args):
        dq, dk, dv = tiled.varlen_attention_backward(*args)
        dk[dirty] = 1e-300
        return dq, dk, dv

    plan = replace(PLAN, policies=(Policy.PACKED_CONTIGUOUS,), heads=((2, 2),), dtypes=("float64",))
    plan = replace(plan, paddings=("spread",), masks=(AttentionMask(),))
    dirty = int(np.flatnonzero(spread_layout(plan.lengths, 4, 0).document_ids < 0)[-1])
    result = _verify(plan, 2, Parts(varlen_attention_backward=backward))[0][0]
    assert result.poisoned == 1
    assert not result.agrees
    assert max(result.errors.values()) < 1e-12


def test_spread_layout_has_every_kind_of_padding():
    lengths = (30, 0, 16, 41, 6)
    layout = spread_layout(lengths, 8, 0)
    seqlens, physical = layout.seqlens, layout.seqlens_padded
    assert seqlens.tolist() == [0, *lengths, 0, 0]
    assert (physical % 8 == 0).all()
    assert physical[0] > 0
    assert physical[-1] == physical[-2] == 0
    assert ((physical - seqlens) >= 8).any()
    assert layout.total_tokens > layout.cu_seqlens_padded[-1]


def test_tight_layout_is_the_least_that_each_policy_needs():
    documents = PackedLayout.from_lengths(PLAN.lengths)
    rows = {}
    for policy in Policy:
        case = Case(policy, AttentionMask(), (2, 2), "tight", "float64")
        rows[policy] = case_layout(PLAN, case, documents, 3).total_tokens
    assert rows == {  # 93 tokens: 30 + 0 + 18 + 42 + 6 by document, else up to a multiple of 3 or 6
        Policy.DUAL_CHUNK_SWAP: 96,
        Policy.PACKED_CONTIGUOUS: 93,
        Policy.PACKED_DUAL_CHUNK_SWAP: 96,
    }


def test_shared_oracle_is_the_oracle():
    documents = PackedLayout.from_lengths(PLAN.lengths)
    mask = AttentionMask(True, (5, 0))
    shared = run_ranks(3, lambda group: expected_results(group, PLAN, documents, mask, (4, 2)))
    q, k, v, dout = (shared[0].inputs[name] for name in ("q", "k", "v", "dout"))
    assert v.shape[2] == 4 != q.shape[2]
    out, lse = attention_forward(q, k, v, documents, mask)
    gradients = attention_backward(dout, q, k, v, out, lse, documents, mask)
    for expected in shared:
        for name, whole in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True):
            assert np.array_equal(expected.results[name], whole), name


def test_inputs_are_exact_in_every_dtype():
    import ml_dtypes

    documents = PackedLayout.from_lengths(PLAN.lengths)
    (expected,) = run_ranks(1, lambda group: expected_results(group, PLAN, documents, AttentionMask(), (2, 2)))
    for x in expected.inputs.values():
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            assert np.array_equal(x.astype(dtype).astype(np.float64), x)


def test_share_gives_every_document_to_one_rank_and_evens_the_work():
    lengths = np.array([100, 1, 50, 50, 50, 50, 0])
    owner = _share(lengths, 2)
    work = [int((lengths[owner == r] ** 2).sum()) for r in (0, 1)]
    assert sorted(work) == [10000, 10001]


@pytest.mark.clause("N5")
def test_reported_costs_of_one_document():
    """64 tokens on 4 ranks, causal: dual chunks balance exactly, contiguous waits for the last rank."""
    plan = Plan((64,), tuple(Policy), (AttentionMask(),), ((2, 1),), 8, ("float32",), paddings=("tight",))
    results = {result.case.policy: result for result in _verify(plan, 4)[0]}
    dual, contiguous = results[Policy.DUAL_CHUNK_SWAP], results[Policy.PACKED_CONTIGUOUS]
    row_bytes = 1 * (8 + 4) * 4
    assert (dual.rows, dual.steps, contiguous.rows, contiguous.steps) == (16, 2, 16, 1)
    assert dual.kv_bytes_gathered == contiguous.kv_bytes_gathered == 64 * row_bytes
    assert contiguous.kv_bytes_needed == 64 * row_bytes  # the last rank sees all of it
    assert dual.balance == 1.0
    last_rank = sum(range(49, 65))
    assert contiguous.balance == pytest.approx(last_rank / (64 * 65 / 2 / 4))
    first, last, keys = np.array([48]), np.array([64]), np.array([64])
    assert visible_pairs(first, last, keys, AttentionMask()) == last_rank


def test_unknown_fault_and_faults_that_need_company_are_refused():
    for fault, says in (("gremlin", "expected one of"), ("skipped-reduce", "two or more")):
        with pytest.raises(SpecError, match=says):
            _verify(replace(PLAN, fault=fault, fault_rank=0), 1)


# Backends


def _on_host(plan, size=2, parts=None):
    """The device's context parallelism on the host, with the reference's attention unless `parts` say otherwise."""
    from cupy_backend.backends import on_host
    from cupy_backend.device import HostDevice

    backend = on_host(HostDevice(os_threads=1))
    reference = replace(one_thread_parts(), rank_metadata=backend.parts.rank_metadata)
    return run_ranks(size, lambda group: verify_rank(group, plan, parts or reference, backend=backend))


SMALL = replace(PLAN, heads=((4, 2),), dtypes=("float32", "bfloat16"), backend="host")


@pytest.mark.clause("C5", "A5")
def test_context_parallelism_on_a_device_agrees_in_every_case():
    results = _on_host(SMALL)[0]
    assert len(results) == SMALL.num_cases == 24
    assert all(result.agrees for result in results)


@pytest.mark.clause("C5")
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found_on_a_device(fault):
    plan = replace(SMALL, dtypes=("float32",), paddings=("tight",), fault=fault, fault_rank=1)
    results = _on_host(plan)[0]
    for policy in Policy:
        assert any(not result.agrees for result in results if result.case.policy == policy), policy


def test_a_backend_of_another_name_is_refused():
    from cupy_backend.backends import load

    with pytest.raises(SpecError, match="unknown backend 'tpu': expected host or cupy"):
        load("tpu")


@pytest.mark.clause("C5", "A5", "N2")
@pytest.mark.parametrize("head_dim", [32, 20])
def test_the_kernels_agree_on_the_host(head_dim):
    """Head dim 20 is one that only the plain kernels take; 32 is the tuned ones'."""
    from cupy_backend.backends import load

    backend = load("host")
    plan = replace(SMALL, head_dim=head_dim, dtypes=("float32", "float16", "bfloat16"))
    results = run_ranks(2, lambda group: verify_rank(group, plan, backend=backend))[0]
    assert [result for result in results if not result.agrees] == []
