"""What an implementation says of itself.

Defines `Declaration` and `as_declaration`, which reads one from a module or a JSON file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from refimpl.conformance.cases import FEATURES
from refimpl.errors import SpecError

DTYPES = ("float64", "float32", "float16", "bfloat16")
"""What an implementation may compute in: results are held to the bounds of this dtype."""


@dataclass(frozen=True)
class Declaration:
    """- `name`: for reports. `dtype`: one of DTYPES. `lacks`: features (see `cases.FEATURES`) that may be skipped."""

    name: str = ""
    dtype: str = "float64"
    lacks: tuple[str, ...] = ()


def as_declaration(value: Any, source: str) -> Declaration:
    """Read {"name": ..., "dtype": ..., "lacks": [...]}; every key may be left out, none may be unknown.

    Raises:
        SpecError: usage, with `source` in front.
    """
    if not isinstance(value, Mapping):
        raise SpecError("usage", f"{source}: a declaration is a mapping, not {type(value).__name__}")
    unknown = sorted(repr(key)[:40] for key in value if key not in ("name", "dtype", "lacks"))
    if unknown:
        raise SpecError("usage", f"{source}: unknown key {unknown[0]}: expected name, dtype or lacks")
    name, dtype, lacks = value.get("name", ""), value.get("dtype", "float64"), value.get("lacks", [])
    if not isinstance(name, str) or len(name) > 200 or not name.isprintable():
        raise SpecError("usage", f"{source}: name is not one short line of text")
    if dtype not in DTYPES:
        raise SpecError("usage", f"{source}: dtype is {_shown(dtype)}: expected one of {', '.join(DTYPES)}")
    if not isinstance(lacks, list | tuple) or any(not isinstance(feature, str) for feature in lacks):
        raise SpecError("usage", f"{source}: lacks is not a list of features")
    for feature in lacks:
        if feature not in FEATURES:
            raise SpecError("usage", f"{source}: lacks names no feature {_shown(feature)}: see `thdcp check --list`")
    return Declaration(name, dtype, tuple(dict.fromkeys(lacks)))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
