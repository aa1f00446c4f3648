"""How a Python implementation is found and asked: `package.module:run`.

Defines `Adapter`, `Skip` and `load`. An adapter is a callable `run(case) -> {name: array}` (names: see `cases`). It may
raise `refimpl.SpecError` to refuse, or `Skip(feature)` for a feature that its module's DECLARATION lists under `lacks`.
Beside this, `reference` is the adapter of refimpl's own public interface, and `zeros` and `identity` are wrong.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from refimpl.conformance.cases import Case
from refimpl.conformance.declaration import Declaration, as_declaration
from refimpl.errors import SpecError


class Skip(Exception):
    """The implementation lacks a feature, a key of `cases.FEATURES`, that the case needs."""

    def __init__(self, feature: str) -> None:
        super().__init__(feature)
        self.feature = feature


@dataclass(frozen=True)
class Adapter:
    """An implementation: `run` answers one case; `spec` is how it was named."""

    spec: str
    run: Callable[[Case], Mapping[str, Any]]
    declaration: Declaration


def check_spec(spec: str) -> tuple[str, str]:
    """Module and attribute of `package.module:run`; SpecError usage if it is not of that form. Imports nothing."""
    module, _, attribute = spec.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise SpecError("usage", f"adapter {spec!r}: expected package.module:callable")
    return module, attribute


def load(spec: str) -> Adapter:
    """Import an adapter. The current directory comes first in the search, as with `python -m`, and stays there.

    Raises:
        SpecError: usage: no such module, an error while it was imported, no such attribute, nothing callable, or a
            DECLARATION that cannot be read.
    """
    module_name, attribute = check_spec(spec)
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise SpecError("usage", f"adapter {spec}: {_why_not_imported(module_name, error, here)}") from error
    run = getattr(module, attribute, None)
    if run is None:
        raise SpecError("usage", f"adapter {spec}: the module has no {attribute} ({_origin(module)})")
    if not callable(run):
        raise SpecError("usage", f"adapter {spec}: {attribute} is no callable but {type(run).__name__}")
    declaration = as_declaration(getattr(module, "DECLARATION", {}), f"adapter {spec}: DECLARATION")
    return Adapter(spec, run, declaration)


def _why_not_imported(name: str, error: BaseException, here: str) -> str:
    missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and (name == missing or name.startswith(f"{missing}.")):
        return f"no module {missing} in {here} or on Python's path"
    text = " ".join(str(error).split())
    return f"importing {name} failed with {type(error).__name__}: {text[:300]}"


def _origin(module: Any) -> str:
    return str(getattr(module, "__file__", None) or "built in")
