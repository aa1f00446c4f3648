"""The backend as an adapter of the conformance kit: every case, by kernels run on the CPU."""

import pytest

from cupy_backend.adapter import DEVICE, answer
from cupy_backend.device import HostDevice
from refimpl.conformance import check, vectors
from refimpl.conformance.adapters import Adapter, load
from refimpl.conformance.declaration import Declaration


def judged(adapter, cases):
    return [(r.id, r.verdict, r.message) for r in check.run_adapter(cases, adapter) if r.verdict != "pass"]


@pytest.mark.clause("C5", "C6", "N2")
def test_every_case_passes():
    adapter = load("cupy_backend.adapter:run")
    assert adapter.declaration.lacks == ()
    assert judged(adapter, vectors.load()) == []


@pytest.mark.clause("C5", "N2")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "device", [DEVICE, HostDevice("random", 9, "random", 1), HostDevice("reverse", cp_async="lazy")], ids=str
)
def test_attention_in_low_precision_and_other_orders(dtype, device):
    asked = {"attention", "context_parallel", "step_attention", "merge"}
    cases = [v for v in vectors.load() if asked & set(v.case.features)][::3]
    adapter = Adapter("kernels", lambda case: answer(case, dtype, device), Declaration("kernels", dtype))
    assert judged(adapter, cases) == []
