"""Where built kernels are kept, for a CPU and for a GPU alike.

Defines `cache_folder`, `one_builder`, `workshop` and `digest`. A file's name holds a hash of everything that it is made
of, and it is made under another name and then renamed, so that processes that build at once do not see each other's
halves.
"""

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from refimpl.errors import SpecError


def digest(words: Sequence[str], files: Sequence[Path]) -> str:
    """A short hash of words, and of files by name and content."""
    found = hashlib.sha256("\0".join(words).encode())
    for file in files:
        content = file.read_bytes()
        found.update(f"\0{file.name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:24]


def cache_folder() -> Path:
    """THDCP_CACHE, else a folder of the user's cache; made when it is not there. SpecError file if it cannot be."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get("THDCP_CACHE") or Path(base, "thdcp")).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder


@contextmanager
def one_builder(result: Path) -> Iterator[bool]:
    """Whether a file of the cache is to be built; of ranks that start together, the first builds it for all.

    Where files cannot be locked, all build at once, which is slow and right too.
    """
    if result.exists():
        yield False
        return
    path = result.with_suffix(".lock")
    try:
        lock = path.open("w")
    except OSError as error:
        raise _unwritable(result.parent, error) from None
    with lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield not result.exists()
        finally:
            path.unlink(missing_ok=True)


def workshop() -> "tempfile.TemporaryDirectory[str]":
    """A folder to build in, on the file system of the cache. SpecError file if it cannot be made."""
    try:
        return tempfile.TemporaryDirectory(prefix="build-", dir=cache_folder())
    except OSError as error:
        raise _unwritable(cache_folder(), error) from None


def _unwritable(folder: Path, error: OSError) -> SpecError:
    return SpecError(
        "file",
        f"{folder}: cannot keep built kernels there ({error.strerror}): name a folder that can be written with "
        f"THDCP_CACHE=",
    )
