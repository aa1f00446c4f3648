"""Verdicts over what an implementation answers.

Defines the outcomes of asking it (`Answered`, `Refused`, `Skipped`, `Crashed`, `Split`, or None: no answer at all);
`judge`, which makes a `Result` of an outcome; `judge_results` for a folder of files that anyone may have written;
`run_adapter` for a Python callable (on several ranks: see `ranks`); and `Checked`, all that one check found.

    verdict   when
    pass      the answer, or the code of the refusal, is right
    skip      left out, or refused, for a feature that the declaration lists and the case needs; or too few ranks
    fail      anything else that was answered, refused or left out
    error     the implementation crashed, or its file cannot be read
    missing   nobody answered; counts as a failure
"""

import os
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.collectives import describe
from refimpl.conformance import reading
from refimpl.conformance.adapters import Adapter, Skip
from refimpl.conformance.cases import FEATURES, Case, Vector, base_name
from refimpl.conformance.declaration import Declaration, as_declaration
from refimpl.conformance.judge import Difference, differences
from refimpl.conformance.locate import first_difference, in_words
from refimpl.conformance.patience import End, limit
from refimpl.conformance.strides import all_with_strides
from refimpl.errors import SpecError

Array = NDArray[Any]

VERDICTS = ("pass", "fail", "error", "missing", "skip")
FAILURES = ("fail", "error", "missing")
"""Verdicts that make a check fail."""

DECLARATION_FILE = "declaration.json"
MAX_JSON_BYTES = 2**16
"""Of one file of a results folder: a refusal, a skip or the declaration."""
MAX_NPZ_BYTES = 2**22
"""Of one answer, and of what it inflates to: the largest right one takes a few kilobytes."""

_NOTE = re.compile(r"[^\x20-\x7e]+")
MAX_NOTE = 300


@dataclass(frozen=True, eq=False)
class Answered:
    """Arrays by name; only those that the case asks for."""

    arrays: Mapping[str, Array]


@dataclass(frozen=True)
class Refused:
    """A refusal with a code of `refimpl.errors.CODES`."""

    code: str
    message: str = ""


@dataclass(frozen=True)
class Skipped:
    """The implementation says that it lacks this feature."""

    feature: str


@dataclass(frozen=True)
class Crashed:
    """Any other end: an exception, a file that cannot be read."""

    message: str


@dataclass(frozen=True)
class Split:
    """Ranks of one group that do not answer alike."""

    message: str


Outcome = Answered | Refused | Skipped | Crashed | Split


@dataclass(frozen=True, eq=False)
class Result:
    """The verdict on one case.

    - `id`: of the case, or the name of a captured tensor. `verdict`: one of VERDICTS.
    - `message`: one line, empty for pass: what is wrong and where, or why it was skipped.
    - `differences`: every array that is wrong. `dtype`: the one whose bounds were used.
    - `arrays`: the answer, as far as the case asks for it; `answered`: whether there was one, however empty.
    - `refused`: the code of a refusal, or "". `details`: figures and places for machines, of captured tensors.
    """

    id: str
    verdict: str
    message: str = ""
    differences: tuple[Difference, ...] = ()
    dtype: str = "float64"
    arrays: Mapping[str, Array] = field(default_factory=dict)
    answered: bool = False
    refused: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether the verdict makes a check fail."""
        return self.verdict in FAILURES


@dataclass(frozen=True, eq=False)
class Checked:
    """Everything that one check found.

    - `subject`: what was judged, in words. `vectors`: by the id of the results.
    - `known`: ids that are expected to fail. `notes`: remarks that change no verdict.
    - `diagnosis`: of `diagnose.diagnose`, if something failed. `unit`: what the results are about.
    """

    subject: str
    declaration: Declaration
    results: tuple[Result, ...]
    vectors: Mapping[str, Vector]
    known: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    diagnosis: Any = None
    unit: str = "cases"

    @property
    def failing(self) -> list[Result]:
        """Failures that nobody expected."""
        return [result for result in self.results if result.failed and result.id not in self.known]

    @property
    def known_failing(self) -> list[Result]:
        """Failures that were expected."""
        return [result for result in self.results if result.failed and result.id in self.known]

    @property
    def mended(self) -> list[Result]:
        """Expected failures that pass: the list is out of date, which is an error too. [V10]"""
        return [result for result in self.results if result.verdict == "pass" and result.id in self.known]

    @property
    def passed(self) -> bool:
        """Whether something passed and nothing is other than expected."""
        return not self.failing and not self.mended and any(result.verdict == "pass" for result in self.results)

    def counts(self, results: Iterable[Result] | None = None) -> dict[str, int]:
        """How many results have each verdict."""
        verdicts = [result.verdict for result in (self.results if results is None else results)]
        return {verdict: verdicts.count(verdict) for verdict in VERDICTS}

    def by_clause(self) -> dict[str, list[Result]]:
        """Results by the clauses that their cases witness, in the order of the spec."""
        grouped = self._grouped(lambda case: case.clauses)
        return dict(sorted(grouped.items(), key=lambda item: _clause_order(item[0])))

    def by_feature(self) -> dict[str, list[Result]]:
        """Results by the features that their cases need, in the order of FEATURES."""
        grouped = self._grouped(lambda case: case.features)
        return {feature: grouped[feature] for feature in FEATURES if feature in grouped}

    def _grouped(self, keys: Callable[[Case], Iterable[str]]) -> dict[str, list[Result]]:
        grouped: dict[str, list[Result]] = {}
        for result in self.results:
            if result.id in self.vectors:
                for key in keys(self.vectors[result.id].case):
                    grouped.setdefault(key, []).append(result)
        return grouped


def _clause_order(clause: str) -> tuple[int, str, int]:
    letter, number = clause[:1], clause[1:]
    return "LPRKABCNV".find(letter), letter, int(number) if number.isdigit() else 0


def judge(vector: Vector, outcome: Outcome | None, declaration: Declaration) -> Result:
    """The verdict on one answer.

    A wrong answer fails; a refusal that was declared is a skip and never a pass. Who lacks `lse` is judged without it,
    and where it is the point, not at all. [C6] [V8] [V9]
    """
    case, expected, dtype = vector.case, vector.expected, declaration.dtype
    lacked = [feature for feature in case.features if feature in declaration.lacks]

    def result(verdict: str, message: str, **more: Any) -> Result:
        return Result(case.id, verdict, message, dtype=dtype, **more)

    match outcome:
        case None:
            return result("missing", "no answer")
        case Crashed(message):
            return result("error", message)
        case Split(message):
            return result("fail", message)
        case Skipped(feature):
            return _judge_skip(case, feature, declaration)
        case Refused(code, message):
            told = f"refused with {code}" + (f": {message}" if message else "")
            if code == expected.error:
                return result("pass", "", refused=code)
            if lacked:
                return result("skip", f"lacks {lacked[0]}: {told}", refused=code)
            return result("fail", f"{told}; expected {expected.error or 'an answer'}", refused=code)
        case Answered(arrays):
            if expected.error is not None:
                return result("fail", f"answered; expected a refusal with {expected.error}", answered=True)
            try:
                wrong = tuple(differences(case, expected, arrays, dtype))
            except (TypeError, ValueError) as error:
                return result("error", f"the answer cannot be compared: {note(describe_plainly(error))}")
            if "lse" in declaration.lacks:
                wrong = tuple(difference for difference in wrong if base_name(difference.name) != "lse")
            if not wrong:
                return result(
                    "skip" if "lse" in lacked else "pass", "lacks lse" if "lse" in lacked else "", arrays=arrays
                )
            message = in_words(vector, first_difference(wrong), arrays)
            return result("fail", message, differences=wrong, arrays=arrays, answered=True)


def _judge_skip(case: Case, feature: str, declaration: Declaration) -> Result:
    verdict, message = "skip", f"lacks {feature}"
    if feature not in declaration.lacks:
        verdict, message = "fail", f"skipped for {note(feature)!r}, which the declaration does not list under lacks"
    elif feature not in case.features:
        verdict, message = "fail", f"skipped for {feature}, which this case does not need"
    return Result(case.id, verdict, message, dtype=declaration.dtype)


def note(text: object) -> str:
    """Foreign text as one short line of printable ASCII: it goes to terminals, XML and HTML."""
    line = _NOTE.sub(" ", " ".join(str(text).split()))
    return line if len(line) <= MAX_NOTE else line[: MAX_NOTE - 3] + "..."


def describe_plainly(error: BaseException) -> str:
    """An exception by type and text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# A folder of results


def judge_results(
    vectors: Sequence[Vector],
    folder: Path,
    declaration: Declaration,
    on_result: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Judge the files `<id>.npz` and `<id>.json` of a folder, which may hold anything.

    Nothing in a file is executed and nothing is written. A file that is unreadable, unsafe or larger than an answer can
    be gives its case the verdict error; others are not affected.
    """
    results = []
    for vector in vectors:
        results.append(judge(vector, read_outcome(vector, folder), declaration))
        on_result(results[-1])
    return results


def read_declaration(folder: Path) -> Declaration:
    """The folder's declaration; the default one if there is none.

    Raises:
        SpecError: file, usage: the folder or the declaration is not usable.
    """
    if not folder.is_dir():
        raise SpecError("usage", f"{note(folder)}: no such folder of results")
    path = folder / DECLARATION_FILE
    if not path.exists():
        return Declaration()
    return as_declaration(
        reading.read_json(reading.inside(folder, DECLARATION_FILE), MAX_JSON_BYTES), source=note(path)
    )


def read_outcome(vector: Vector, folder: Path) -> Outcome | None:
    """What the folder holds for a case; None: nothing."""
    names = [f"{vector.case.id}{suffix}" for suffix in (".npz", ".json")]
    found = [name for name in names if (folder / name).exists() or (folder / name).is_symlink()]
    if len(found) > 1:
        return Crashed(f"both {found[0]} and {found[1]} are there: an answer is one of them")
    if not found:
        return None
    try:
        path = reading.inside(folder, found[0])
        if path.suffix == ".json":
            return _outcome_of_json(reading.read_json(path, MAX_JSON_BYTES))
        wanted = vector.expected.arrays
        most = 4 * sum(array.size for array in wanted.values()) + 4096
        return Answered(plain_arrays(reading.read_npz(path, MAX_NPZ_BYTES, most, set(wanted)), wanted))
    except SpecError as error:
        return Crashed(note(describe(error)))
    except (OSError, TypeError, ValueError) as error:
        return Crashed(f"{found[0]}: {note(describe_plainly(error))}")


def _outcome_of_json(content: Any) -> Outcome:
    if isinstance(content, dict):
        for key, make in (("error", Refused), ("skipped", Skipped), ("crashed", Crashed)):
            if isinstance(content.get(key), str):
                more = [note(content["message"])] if key == "error" and "message" in content else []
                return make(note(content[key]), *more)
    return Crashed('expected {"error": CODE, "message": ...}, {"skipped": FEATURE} or {"crashed": ...}')


def strangers(vectors: Sequence[Vector], folder: Path) -> list[str]:
    """Names of files that look like answers but belong to no case: a spelling that nobody would otherwise notice."""
    known = {DECLARATION_FILE, *(f"{vector.case.id}{suffix}" for vector in vectors for suffix in (".npz", ".json"))}
    return sorted(
        note(path.name) for path in folder.iterdir() if path.suffix in (".npz", ".json") and path.name not in known
    )


# An adapter


def ask(adapter: Adapter, vector: Vector) -> Outcome:
    """Put one case to an adapter. It gets a copy of the inputs, so that what it writes into them stays its own.

    With THDCP_TRACEBACK in the environment the traceback of an exception goes to standard error.
    """
    wanted = vector.expected.arrays
    try:
        answer = adapter.run(copied(vector.case))
        if not isinstance(answer, Mapping):
            return Crashed(f"the adapter returned {type(answer).__name__}: expected a mapping of names to arrays")
        return Answered(plain_arrays(answer, wanted))
    except Skip as skip:
        return Skipped(note(skip.feature))
    except SpecError as error:
        return Refused(error.code, note(error.message))
    except (Exception, SystemExit) as error:
        if os.environ.get("THDCP_TRACEBACK"):
            traceback.print_exc()
        return Crashed(note(describe_plainly(error)))


def run_adapter(
    vectors: Sequence[Vector],
    adapter: Adapter,
    on_result: Callable[[Result], None] = lambda _: None,
    timeout: float = 0.0,
    end: End = lambda _: None,
) -> list[Result]:
    """Put every case to an adapter in this process, which answers for all ranks of a case.

    Args:
        timeout, end: of one case, see `patience.limit`.
    """
    results = []
    for vector in vectors:
        with limit(timeout, late(vector.case, timeout), end):
            outcome = ask(adapter, vector)
        results.append(judge(vector, outcome, adapter.declaration))
        on_result(results[-1])
    return results


def late(case: Case, timeout: float) -> str:
    """What to say of an adapter that does not come back."""
    return f"case {case.id}: the adapter has not answered for {timeout:g} s"


def plain_arrays(answer: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Array]:
    """The wanted arrays of an answer as NumPy's own dtypes; bfloat16 and its like as float32, which is exact.

    Raises:
        TypeError, ValueError: something there is no array of numbers, with its name.
    """
    arrays = {}
    for name in wanted:
        if name not in answer:
            continue
        try:
            array = np.asarray(answer[name])
            if array.dtype.isbuiltin == 2:  # a dtype that another package brings
                array = array.astype(np.float32)
        except Exception as error:
            raise TypeError(f"{name} is no NumPy array and does not become one ({describe_plainly(error)})") from error
        if array.dtype.kind not in "biuf":
            raise TypeError(f"{name} has dtype {array.dtype}: expected integers, bools or floats (bfloat16 as float32)")
        arrays[name] = array
    return arrays


def copied(case: Case) -> Case:
    """A case whose inputs may be written to; arrays lie in memory as the case says."""
    tensors = {name: x.copy() for name, x in case.tensors.items()}
    return replace(
        case, inputs=deepcopy(case.inputs), tensors=all_with_strides(tensors, case.inputs.get("strides", {}))
    )
