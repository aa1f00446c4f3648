"""Write the vectors, or check that those on disk are what would be written: `python -m refimpl.conformance.generate`.

The only writer of `specs/vectors`. Expected values are the witness's. The reference, whole and in pieces, must give the
same within the bounds that the vector states, or nothing is written. Every file is compared and written byte by byte:
no value depends on the machine, on NumPy's version or on a BLAS.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from refimpl.conformance import vectors, witness, yardstick
from refimpl.conformance.cases import Case, Expected, Vector
from refimpl.conformance.catalogue import CASES
from refimpl.conformance.implementation import answer
from refimpl.conformance.judge import differences
from refimpl.errors import SpecError

Answer = Callable[[Case], Mapping[str, object]]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if the vectors are up to date; 1 if `--check` finds them otherwise; 2 if they cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m refimpl.conformance.generate", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say what differs")
    check = parser.parse_args(arguments).check
    try:
        files = build(CASES)
        changed = stale(files, vectors.FOLDER)
    except (SpecError, OSError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    if check and changed:
        print(f"generate --check: {len(changed)} files differ, the first of them {changed[0]}", file=sys.stderr)
        return 1
    if not check:
        write(files, vectors.FOLDER)
    size = sum(map(len, files.values()))
    print(f"{len(CASES)} vectors in {len(files)} files, {size / 2**20:.1f} MiB; {len(changed)} changed")
    return 0


def build(cases: Sequence[Case]) -> dict[str, bytes]:
    """Every file of the folder but README.md and schema.json, by name, the manifest last. [V2]"""
    files: dict[str, bytes] = {}
    for i, case in enumerate(cases):
        _progress(i, len(cases), case.id)
        files |= vectors.encode(vector_of(case))
    _progress(len(cases), len(cases), "")
    return files | {vectors.MANIFEST: vectors.manifest(files)}


def vector_of(case: Case) -> Vector:
    """The case with its right answer, bounds, and the mutants that fail it.

    Raises:
        SpecError: usage, when the reference answers otherwise than the witness. [V4] [V6] [V7]
    """
    expected = expected_of(case)
    for name, run in answers().items():
        _agree(case, expected, name, run)
    return Vector(case, expected, kills_of(case, expected))


def expected_of(case: Case) -> Expected:
    """The right answer by the witness alone. [V4]"""
    if case.operation != "refuse":
        arrays = witness.expected(case)
        bounds = yardstick.bounds(case, arrays)
        if not np.isfinite([bound for outputs in bounds.values() for bound in outputs.values()]).all():
            raise SpecError("usage", f"{case.id}: a plain implementation overflows in one of {', '.join(bounds)}")
        return Expected(arrays, None, bounds)
    codes = witness.faults(case)
    if len(codes) != 1:
        raise SpecError("usage", f"{case.id}: one fault is needed, not {sorted(codes)}: which code is right?")
    return Expected({}, codes.pop())


def answers() -> dict[str, Answer]:
    """The ways in which the reference answers, by name."""
    from refimpl.conformance.adapters import reference

    return {"implementation": answer, "the public reference": reference.run}


def _agree(case: Case, expected: Expected, name: str, run: Answer) -> None:
    try:
        found = run(case)
        code = None
    except SpecError as error:
        found, code = {}, error.code
    if code != expected.error:
        raise SpecError("usage", f"{case.id}: {name} refuses with {code}, the witness with {expected.error}")
    wrong = differences(case, expected, found)
    if wrong:
        raise SpecError("usage", f"{case.id}: {name} and the witness differ: {wrong[0]}")


def kills_of(case: Case, expected: Expected) -> tuple[str, ...]:
    """The mutants that fail the case, by name. [V7]"""
    from refimpl.conformance.mutants import MUTANTS, failing

    return tuple(mutant.name for mutant in MUTANTS if failing(case, expected, mutant))


def stale(files: Mapping[str, bytes], folder: Path) -> list[str]:
    """What on disk is not as it should be, each as the name of a file and what is wrong with it."""
    complaints = []
    for name, content in files.items():
        path = folder / name
        if not path.exists():
            complaints.append(f"{name}: missing")
        elif path.read_bytes() != content:
            complaints.append(f"{name}: {_first_difference(path.read_bytes(), content)}")
    known = {*files, "schema.json"}
    if folder.exists():
        found = (path.name for path in sorted(folder.iterdir()) if path.suffix in (".json", ".npz"))
        complaints += [f"{name}: no case has it" for name in found if name not in known]
    return complaints


def _first_difference(found: bytes, wanted: bytes) -> str:
    lines = [] if found.startswith(b"PK") else zip(found.splitlines(), wanted.splitlines(), strict=False)
    for number, (line, other) in enumerate(lines, 1):
        if line != other:
            told = (text.decode(errors="replace").strip()[:60] for text in (line, other))
            return "line {} is {!r}, not {!r}".format(number, *told)
    return f"{len(found)} bytes that differ from the {len(wanted)} generated"


def write(files: Mapping[str, bytes], folder: Path) -> None:
    """Make the folder hold these files, and none of its old ones that no case has."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.suffix in (".json", ".npz") and path.name not in (*files, "schema.json"):
            path.unlink()
    for name, content in files.items():
        if not (folder / name).exists() or (folder / name).read_bytes() != content:
            (folder / name).write_bytes(content)


def _progress(done: int, of: int, what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{done}/{of} {what}" if what else "\r\033[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
