"""The options of `pytest --thdcp-adapter=package.module:run`, which puts the conformance cases to an implementation.

pytest imports this file in every run, so it imports nothing itself. What the options do is in
`refimpl.conformance.pytest_plugin`.
"""

from typing import Any


def pytest_addoption(parser: Any) -> None:
    """Add the options; without --thdcp-adapter they change nothing."""
    group = parser.getgroup("thdcp", "conformance of packed context-parallel attention")
    group.addoption("--thdcp-adapter", metavar="MODULE:CALLABLE", help="an implementation: one test a case")
    group.addoption("--thdcp-known", metavar="FILE", help="ids of cases that must fail, a line each")
    group.addoption("--thdcp-only", metavar="PATTERN", action="append", help="cases whose id matches, 'partition-*'")
    group.addoption("--thdcp-dtype", metavar="DTYPE", help="judge by this precision instead of the declared one")


def pytest_configure(config: Any) -> None:
    """Hand over to the plugin if an implementation is named."""
    if config.getoption("--thdcp-adapter"):
        from refimpl.conformance.pytest_plugin import register

        register(config)
