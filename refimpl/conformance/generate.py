"""Write the vectors, or check that those on disk are what would be written: `python -m refimpl.conformance.generate`.

The only writer of `specs/vectors`. Expected values are the witness's. The reference, whole and in pieces, must give the
same within the bounds that the vector states, or nothing is written. Files are compared and written byte by byte: no
value depends on the machine, on NumPy's version or on a BLAS.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from refimpl.conformance import vectors, witness, yardstick
from refimpl.conformance.adapters import reference
from refimpl.conformance.cases import Case, Expected, Vector
from refimpl.conformance.catalogue import CASES
from refimpl.conformance.implementation import answer
from refimpl.conformance.judge import differences
from refimpl.conformance.mutants import LEAST_MARGIN, MUTANTS, margin
from refimpl.errors import SpecError

Answer = Callable[[Case], Mapping[str, object]]

ANSWERS: dict[str, Answer] = {"the reference in pieces": answer, "the public reference": reference.run}
"""The ways in which the reference answers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if the vectors are up to date; 1 if `--check` finds them otherwise; 2 if they cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m refimpl.conformance.generate", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say what differs")
    check = parser.parse_args(arguments).check
    try:
        made = make(CASES)
        check_kills(made)
        files = files_of(made)
        changed = stale(files, vectors.FOLDER)
        if not check:
            write(files, vectors.FOLDER)
    except (SpecError, OSError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    if check and changed:
        print(f"generate --check: {len(changed)} files differ, the first of them {changed[0]}", file=sys.stderr)
        return 1
    size = sum(map(len, files.values()))
    print(f"{len(made)} vectors in {len(files)} files, {size / 2**20:.1f} MiB; {len(changed)} changed")
    return 0


def make(cases: Sequence[Case]) -> list[Vector]:
    """The cases with their right answers, checked, with progress on a terminal."""
    made = []
    for i, case in enumerate(cases):
        _show(f"{i}/{len(cases)} {case.id}")
        made.append(vector_of(case))
    _show("")
    return made


def vector_of(case: Case) -> Vector:
    """The case with its right answer, bounds, and the mutants that fail it.

    Raises:
        SpecError: usage, when the reference answers otherwise than the witness, or any of the following complains.
            [V1] [V4] [V5] [V6] [V7]
    """
    check_inputs(case)
    expected = expected_of(case)
    for name, run in ANSWERS.items():
        _agree(case, expected, name, run)
    return Vector(case, expected, kills_of(case, expected))


def check_inputs(case: Case) -> None:
    """Numbers that are the same in every dtype, and finite in tokens; else SpecError `usage`. [V1]"""
    for name, x in case.tensors.items():
        finite = x[np.isfinite(x)]
        if not all(np.array_equal(rounded(finite), finite) for rounded in yardstick.ROUNDING.values()):
            raise SpecError("usage", f"{case.id}: {name} holds numbers that not every dtype has")
        if "q" in case.tensors:
            is_token = np.array([document >= 0 for document, _ in witness.rows_of(case, name)], bool)
            if not np.isfinite(x[is_token]).all():
                raise SpecError("usage", f"{case.id}: {name} holds NaN or infinity in a token")


def expected_of(case: Case) -> Expected:
    """The right answer by the witness alone, and how far another may lie from it.

    Raises:
        SpecError: usage, for a case without exactly one right answer. [V4] [V5] [V6]
    """
    if case.operation == "refuse":
        codes = witness.faults(case)
        if len(codes) != 1:
            raise SpecError("usage", f"{case.id}: expected one fault, not {sorted(codes)}: which code would be right?")
        return Expected({}, codes.pop())
    arrays = witness.expected(case)
    bounds = yardstick.bounds(case, arrays)
    if not np.isfinite([bound for outputs in bounds.values() for bound in outputs.values()]).all():
        raise SpecError("usage", f"{case.id}: a plain implementation overflows in one of {', '.join(bounds)}")
    return Expected(arrays, None, bounds)


def _agree(case: Case, expected: Expected, name: str, run: Answer) -> None:
    try:
        found, code = run(case), None
    except SpecError as error:
        found, code = {}, error.code
    if code != expected.error:
        raise SpecError("usage", f"{case.id}: {name} refuses with {code}, the witness with {expected.error}")
    wrong = differences(case, expected, found)
    if wrong:
        raise SpecError("usage", f"{case.id}: {name} and the witness differ: {wrong[0]}")


def kills_of(case: Case, expected: Expected) -> tuple[str, ...]:
    """The mutants that fail the case, by name.

    Raises:
        SpecError: usage, when one of them fails it by a narrow margin. [V7]
    """
    margins = {mutant.name: margin(case, expected, mutant) for mutant in MUTANTS}
    for name, times in margins.items():
        if 1 < times < LEAST_MARGIN:
            raise SpecError("usage", f"{case.id}: {name} fails by {times:.1f} bounds only: change the numbers")
    return tuple(name for name, times in margins.items() if times > 1)


def check_kills(made: Sequence[Vector]) -> None:
    """Every mutant fails some vector; else SpecError `usage`. [V7]"""
    killed = {name for vector in made for name in vector.kills}
    alive = [mutant.name for mutant in MUTANTS if mutant.name not in killed]
    if alive:
        raise SpecError("usage", f"no case finds {', '.join(alive)}: add one to the catalogue")


def files_of(made: Sequence[Vector]) -> dict[str, bytes]:
    """Every file of the folder but README.md and schema.json, by name, the manifest last. [V2]"""
    files = {name: content for vector in made for name, content in vectors.encode(vector).items()}
    return files | {vectors.MANIFEST: vectors.manifest(files)}


def stale(files: Mapping[str, bytes], folder: Path) -> list[str]:
    """What on disk is not as it should be: the name of each such file, and what is wrong with it. [V2]"""
    complaints = []
    for name, content in files.items():
        path = folder / name
        if not path.exists():
            complaints.append(f"{name}: missing")
        elif path.read_bytes() != content:
            complaints.append(f"{name}: {_first_difference(path.read_bytes(), content)}")
    return complaints + [f"{name}: no case has it" for name in _left_over(files, folder)]


def _left_over(files: Mapping[str, bytes], folder: Path) -> list[str]:
    """Files of a vector's kind that no case has."""
    found = sorted(path.name for path in folder.glob("*") if path.suffix in (".json", ".npz"))
    return [name for name in found if name not in files and name != "schema.json"]


def _first_difference(found: bytes, wanted: bytes) -> str:
    lines = [] if found.startswith(b"PK") else zip(found.splitlines(), wanted.splitlines(), strict=False)
    for number, (line, other) in enumerate(lines, 1):
        if line != other:
            at = next((i for i, (a, b) in enumerate(zip(line, other, strict=False)) if a != b), 0)
            told = (text[max(0, at - 30) : at + 30].decode(errors="replace").strip() for text in (line, other))
            return "line {} has {!r}, not {!r}".format(number, *told)
    return f"its {len(found)} bytes are not the {len(wanted)} generated"


def write(files: Mapping[str, bytes], folder: Path) -> None:
    """Make the folder hold these files, and no others of a vector's kind. [V2]"""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _left_over(files, folder):
        (folder / name).unlink()
    for name, content in files.items():
        if not (folder / name).exists() or (folder / name).read_bytes() != content:
            (folder / name).write_bytes(content)


def _show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
