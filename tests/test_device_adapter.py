"""The backend as an adapter of the conformance kit: every case that it does not decline, by kernels run on the CPU."""

import pytest

from cupy_backend.adapter import DEVICE, answer
from cupy_backend.device import HostDevice
from refimpl.conformance import check, vectors
from refimpl.conformance.adapters import Adapter, load
from refimpl.conformance.declaration import Declaration

LACKS = ("merge",)


def judged(adapter, cases):
    return [(r.id, r.verdict, r.message) for r in check.run_adapter(cases, adapter) if r.verdict != "pass"]


@pytest.mark.clause("C5", "C6", "N2")
def test_every_case_passes_but_those_declined():
    adapter = load("cupy_backend.adapter:run")
    assert adapter.declaration.lacks == LACKS
    others = judged(adapter, vectors.load())
    assert {verdict for _, verdict, _ in others} == {"skip"}
    declined = {vector.case.id for vector in vectors.load() if "merge" in vector.case.features}
    assert {case_id for case_id, _, _ in others} == declined


@pytest.mark.clause("C5", "N2")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "device", [DEVICE, HostDevice("random", 9, "random", 1), HostDevice("reverse", cp_async="lazy")], ids=str
)
def test_attention_in_low_precision_and_other_orders(dtype, device):
    cases = [v for v in vectors.load() if {"attention", "context_parallel"} & set(v.case.features)][::3]
    adapter = Adapter("kernels", lambda case: answer(case, dtype, device), Declaration("kernels", dtype, LACKS))
    assert judged(adapter, cases) == []
