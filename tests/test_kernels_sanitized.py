"""The kernels under sanitizers: a few tests of each in a process of their own, those that take every part of a kernel.

ThreadSanitizer takes every CUDA thread for a thread: it finds a missing barrier in whatever order the threads run, but
needs a third of a millisecond for each, so these tests are small ones.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_backend.host import sanitizer_environment

TESTS = Path(__file__).parent

CHOSEN = {
    "test_kernels_partition.py": "by_hand or (order_and_back and 7-1-8)",
    "test_kernels_metadata.py": "changes_nothing or by_hand or gravest or no_queries or repeated_offsets",
    "test_kernels_attention_backward.py": "more_queries or everywhere-nan or (only_the_plain and 5) or (dims and 40)",
    "test_kernels_attention_forward.py": "more_queries or everywhere-nan or (only_the_plain and 5) or (dims and 40)",
}
"""Which tests of a file, as pytest's -k."""


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["address", "thread"])
@pytest.mark.parametrize("file", CHOSEN)
def test_clean(file, variant):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:faulthandler", "-k", CHOSEN[file], str(TESTS / file)],
        env={**os.environ, **sanitizer_environment(variant)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " passed" in done.stdout
