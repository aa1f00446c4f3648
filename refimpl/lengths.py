"""Where document lengths come from: real documents shipped with the package, a file, or a list.

Defines `document_sets`, `default_lengths` and `parse_lengths`.
"""

import json
from importlib import resources
from itertools import chain
from pathlib import Path

from refimpl.errors import SpecError

DATA = "data/document_lengths.json"
MAX_TOKENS = 1 << 24
"""The most tokens a list of lengths may add up to: far beyond what a check on this reference finishes."""


def document_sets() -> dict[str, list[int]]:
    """The real document lengths shipped with the package, by name; refimpl/data/README.md tells their origin."""
    text = resources.files("refimpl").joinpath(DATA).read_text(encoding="utf-8")
    return {name: entry["lengths"] for name, entry in json.loads(text)["sets"].items()}


def default_lengths(tokens: int = 8192, longest: int = 1280) -> list[int]:
    """Real documents, taken in turn from every set in file order, until they hold at least `tokens` tokens.

    Documents longer than `longest` are passed over, so that the dense oracle stays quick. A document of no tokens, of
    which the sets hold three, is put in the middle. The list is the same every time.
    """
    short = [[n for n in lengths if 0 < n <= longest] for lengths in document_sets().values()]
    taken: list[int] = []
    for length in chain.from_iterable(zip(*short, strict=False)):
        if sum(taken) >= tokens:
            break
        taken.append(length)
    return [*taken[: len(taken) // 2], 0, *taken[len(taken) // 2 :]]


def parse_lengths(text: str) -> list[int]:
    """Document lengths from the command line: the name of a shipped set, a list `100,200,0`, or a file.

    A file holds JSON: a list of integers, or an object with such a list under "lengths".

    Raises:
        SpecError: usage for an unreadable or malformed file or list, lengths for one that is negative.
    """
    shipped = document_sets()
    if text in shipped:
        return shipped[text]
    if text.replace(",", "").replace("-", "").replace(" ", "").isdigit():
        return _checked([int(part) for part in text.split(",") if part.strip()], "--lengths")
    try:
        content = json.loads(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(
            "usage",
            f"--lengths {text}: {error.strerror or error}; expected a file, a list such as 100,200,0, or one of "
            f"{', '.join(shipped)}",
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise SpecError("usage", f"--lengths {text}: not JSON ({' '.join(str(error).split())})") from error
    if isinstance(content, dict):
        content = content.get("lengths")
    if not isinstance(content, list):
        raise SpecError("usage", f'--lengths {text}: expected a JSON list of integers, or {{"lengths": [...]}}')
    return _checked(content, text)


def _checked(lengths: list[object], source: str) -> list[int]:
    for i, length in enumerate(lengths):
        if isinstance(length, bool) or not isinstance(length, int):
            raise SpecError("usage", f"{source}: entry {i} is {length!r}, expected an integer")
        if length < 0:
            raise SpecError("lengths", f"{source}: entry {i} is {length}, a document has 0 or more tokens")
    result = [length for length in lengths if isinstance(length, int)]
    if not result or sum(result) == 0:
        raise SpecError("usage", f"{source}: no document has any token")
    if sum(result) > MAX_TOKENS:
        raise SpecError("usage", f"{source}: {sum(result)} tokens, more than the {MAX_TOKENS} that this command takes")
    return result
