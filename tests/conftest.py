"""How the tests run: hypothesis profiles, and packages that may be missing."""

import importlib
import os
import sys

import pytest
from hypothesis import HealthCheck, settings

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")

# No deadline and no complaint about slow data: a shared machine is slow for reasons of its own.
settings.register_profile(
    "default", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if IN_CI else "default")


@pytest.fixture(scope="session")
def require():
    """Import an optional package. Without it the test is skipped; in CI, where the extra `test` brings it, it fails.

    torch is part of that extra up to Python 3.11 alone: one interpreter is enough for a witness.
    """

    def import_or_skip(name):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            if IN_CI and (name != "torch" or sys.version_info < (3, 12)):
                pytest.fail(f"{name} is not installed, and CI must not lose a witness unnoticed: {error}")
            pytest.skip(f"{name} is not installed: pip install 'thdcp[test]' (torch: on Python 3.11)")

    return import_or_skip
