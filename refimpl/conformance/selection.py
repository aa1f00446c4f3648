"""Which cases, and which of them are expected to fail.

Defines `select` and `read_known`.
"""

import difflib
import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path

from refimpl.conformance.cases import Vector
from refimpl.conformance.check import note
from refimpl.errors import SpecError

MAX_KNOWN_BYTES = 2**20


def read_known(path: Path, everything: Sequence[Vector]) -> frozenset[str]:
    """Ids from a JSON list, or one a line with `#` for remarks.

    Raises:
        SpecError: usage: unreadable, or an id that no case has.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_KNOWN_BYTES + 1)
        if len(raw) > MAX_KNOWN_BYTES:
            raise SpecError("usage", f"{path}: more than {MAX_KNOWN_BYTES} bytes")
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("usage", f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    if text.lstrip().startswith("["):
        try:
            ids = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError("usage", f"{path}: not JSON ({note(error)})") from error
    else:
        ids = [line.partition("#")[0].strip() for line in text.splitlines()]
        ids = [line for line in ids if line]
    possible = [vector.case.id for vector in everything]
    for name in ids:
        if name not in possible:
            near = difflib.get_close_matches(str(name)[:100], possible, n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise SpecError("usage", f"{path}: no case has the id {note(name)[:100]!r}{hint}")
    return frozenset(ids)


def select(everything: Sequence[Vector], patterns: Sequence[str]) -> list[Vector]:
    """The vectors whose ids match any of the patterns; all without one. SpecError usage if none does."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(vector.case.id, pattern) for vector in everything):
            raise SpecError(
                "usage", f"{pattern!r} matches no case: see `thdcp check --list`, and write 'part*' for a beginning"
            )
    return [
        vector
        for vector in everything
        if not patterns or any(fnmatch.fnmatchcase(vector.case.id, pattern) for pattern in patterns)
    ]
