"""Which fault gives just these wrong numbers.

Defines `diagnose`, `Diagnosis` and `Finding`. Every mutant is replayed on failing cases and compared, element by
element, with what the implementation answered. A mutant is named if it predicts all wrong and all right elements of at
least one failing case, and of no case that passes a wrong one: it is then the fault, or one that nobody can tell from
it by these cases. Numbers agree within the bounds of the implementation's dtype. Agreement that chance could bring
about (few elements, coarse dtypes) names nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from refimpl.conformance.cases import FEATURES, OF_KEYS, PER_RANK, Case, Expected, base_name
from refimpl.conformance.comparison import (
    CRASH,
    Answer,
    Bools,
    Floats,
    Item,
    alike,
    matches,
    reference_is_right,
    replay,
    tolerance,
)
from refimpl.conformance.faults.mutant import Mutant
from refimpl.conformance.mutants import MUTANTS
from refimpl.conformance.observation import Observation, observe, only_rank, rows_in_buffer, wrong_arrays
from refimpl.layout import PackedLayout
from refimpl.partition import Policy

MOST_CASES = 24
"""Failing cases on which all mutants are replayed; those that predict one of these are replayed on all the others."""

MOST_CASES_OF_A_RANK = 6
"""The same where a fault may be that of one rank, for there are many ranks to ask."""

EVIDENCE = 10.0
"""Bits of agreement that chance hardly brings about."""
BITS_OF_AN_INTEGER = 7.0
"""Of its value, and of infinity; the place of an integer among all others counts too."""
BITS_OF_NAN = 2.0
BITS_AT_MOST = 40.0
"""Of a float that agrees, however close it is."""

OWN_CODE = ("context_parallel", "attention", *map(str, Policy))
"""Features for which implementations have code of their own, in which a fault of all other code may be absent."""

CONSISTENT = 0.2
"""Share of the failing cases that a mutant fails too, of which it must predict the numbers; two faults may overlap."""

ALMOST_ALL = 0.98
"""Share of a case's elements that a replay must predict in a low precision; in float64 all of them."""


@dataclass(frozen=True)
class Finding:
    """A fault that gives the same wrong numbers.

    - `mutant`, `kind`, `what`, `source`: see `mutants`. `twins`: other mutants that predict the same numbers on the
      cases that this one explains.
    - `confidence`: the share of all failing cases that it predicts in full: `reproduced` of `failed`.
    - `elements`: the share of all wrong elements that it predicts.
    - `rows`: which rows, in words. `rank`: the one rank that has the fault, None if all have it.
    - `scope`: where alone the fault shows, although the mutant has it elsewhere too: "with" or "without" a feature; ""
      if it shows everywhere.
    """

    mutant: str
    kind: str
    what: str
    source: str
    twins: tuple[str, ...]
    confidence: float
    reproduced: int
    failed: int
    elements: float
    rows: str
    rank: int | None
    scope: str

    def __str__(self) -> str:
        where = f" on rank {self.rank}" if self.rank is not None else ""
        where += f", only {self.scope}" if self.scope else ""
        told = [f"{self.mutant}{where}: {self.what}" + (f" ({self.source})" if self.source else "")]
        told.append(f"predicts {self.reproduced} of {self.failed} failing cases, {self.elements:.0%} of wrong elements")
        told += [self.rows] if self.rows else []
        told += [f"cannot be told here from {', '.join(self.twins)}"] if self.twins else []
        return "; ".join(told)


@dataclass(frozen=True)
class Diagnosis:
    """The faults that explain the failures, the one that explains most first; and what is known without them."""

    findings: tuple[Finding, ...]
    observation: Observation

    def lines(self) -> list[str]:
        """In words, one finding a line, the observation last."""
        named = [f"looks like {finding}" for finding in self.findings]
        return [*(named or ["no known fault gives these numbers"]), str(self.observation)]


@dataclass(frozen=True, eq=False)
class Match:
    """How well a mutant predicts one item. `wrong` elements are wrong in the answer, `predicted` of them predicted."""

    full: bool
    wrong: int
    predicted: int
    bits: float


@dataclass(frozen=True, eq=False)
class Candidate:
    """A mutant that predicts something, on all ranks or on one; items by their place among all."""

    mutant: Mutant
    rank: int | None
    explained: frozenset[int]
    bits: dict[int, float]
    elements: float
    scope: str = ""


def diagnose(items: Iterable[tuple[Case, Expected, Answer, str]], ignored: frozenset[str] = frozenset()) -> Diagnosis:
    """Name the faults behind wrong answers.

    Args:
        items: case, right answer, what the implementation answered, and the dtype that it computes in. Passing ones
            belong to it: they tell which faults it does not have. An answer is arrays by name, or the code of a
            refusal, or "crash".
        ignored: base names of arrays that are not judged, wrong or missing as they may be.

    Raises:
        ValueError: if no item fails. [V11]
    """
    every = [Item(*item, ignored) for item in items]
    failing, passing = [x for x in every if x.failed], [x for x in every if not x.failed]
    if not failing:
        raise ValueError("nothing to diagnose: no answer is wrong")
    candidates = _candidates(failing, passing, None)
    for rank in _suspects(failing):
        if any(len(candidate.explained) == len(failing) and not candidate.scope for candidate in candidates):
            break
        candidates += _candidates(failing, passing, rank)
    findings = tuple(_finding(candidate, twins, failing) for candidate, twins in _explaining(candidates, len(failing)))
    return Diagnosis(findings, observe(failing, passing))


def _candidates(failing: Sequence[Item], passing: Sequence[Item], rank: int | None) -> list[Candidate]:
    """Mutants that predict at least one failing case in full and contradict no passing one, at least within a scope."""
    looked_at = _varied(failing, MOST_CASES if rank is None else MOST_CASES_OF_A_RANK)
    found = []
    for mutant in MUTANTS:
        if not any(match_of(failing[i], mutant, rank).full for i in looked_at):
            continue
        told = {i: match_of(item, mutant, rank) for i, item in enumerate(failing)}
        explained = frozenset(i for i, match in told.items() if match.full)
        concerned = sum(replay(item.target, mutant, rank) is not None for item in failing)
        if len(explained) < CONSISTENT * concerned:
            continue
        denied = [item for item in passing if contradicted(item, mutant, rank)]
        scope = _scope([failing[i] for i in explained], denied)
        if denied and not scope:
            continue
        share = sum(match.predicted for match in told.values()) / max(1, sum(match.wrong for match in told.values()))
        found.append(Candidate(mutant, rank, explained, {i: told[i].bits for i in explained}, share, scope))
    return found


def _suspects(failing: Sequence[Item]) -> list[int]:
    """Ranks that may have a fault alone: the one that is wrong alone; or any, for what a rank sends reaches others.

    Rank 0 also answers where there are no ranks, so no other rank is at fault there.
    """
    rank = only_rank(failing)
    if rank is not None:
        return [rank]
    sizes = [item.case.cp_size if item.case.operation in PER_RANK else 1 for item in failing]
    return list(range(max(sizes) if min(sizes) > 1 else min(1, max(sizes) - 1)))


def _varied(failing: Sequence[Item], most: int) -> list[int]:
    """At most `most` of the failing items, of every operation in turn, small ones first."""
    by_operation: dict[str, list[int]] = {}
    for i in sorted(range(len(failing)), key=lambda i: len(failing[i].target.values)):
        by_operation.setdefault(failing[i].case.operation, []).append(i)
    in_turn = (i for turn in zip_longest(*by_operation.values()) for i in turn if i is not None)
    return [i for i, _ in zip(in_turn, range(most), strict=False)]


def _scope(explained: Sequence[Item], denied: Sequence[Item]) -> str:
    """With a feature that all explained cases need and no contradicting one does, or the reverse; "" if there is none.

    Nothing denied needs no scope.
    """
    for word, features, inside, outside in (
        ("with", FEATURES, explained, denied),
        ("without", OWN_CODE, denied, explained),
    ):
        for feature in features if denied else ():
            needed = all(feature in item.case.features for item in inside)
            if needed and not any(feature in item.case.features for item in outside):
                return f"{word} {feature}"
    return ""


def _explaining(candidates: Sequence[Candidate], count: int) -> list[tuple[Candidate, tuple[str, ...]]]:
    """The fewest candidates that explain most, each with its twins: always the one that explains most of the rest."""
    left = set(range(count))
    chosen = []
    for scoped in (False, True):
        pool = [candidate for candidate in candidates if bool(candidate.scope) == scoped]
        while pool:
            best = max(pool, key=lambda candidate: (len(candidate.explained & left), candidate.elements))
            new = best.explained & left
            if sum(best.bits[i] for i in new) < EVIDENCE:
                pool.remove(best)
                continue
            twins = [other for other in pool if other is not best and other.explained == best.explained]
            names = dict.fromkeys(twin.mutant.name for twin in twins if twin.mutant is not best.mutant)
            chosen.append((best, tuple(names)))
            left -= new
            pool = [other for other in pool if other is not best and other not in twins]
    return chosen


def match_of(item: Item, mutant: Mutant, rank: int | None = None) -> Match:
    """How well a mutant predicts a failing item.

    Where padding holds NaN and a fault lets it in, it depends on the order of operations how far NaN spreads. So finite
    numbers are enough there, if they agree wherever both have one.
    """
    told = replay(item.target, mutant, rank)
    wrong = max(1, int(item.wrong.sum()))
    none = Match(False, wrong, 0, 0.0)
    if told is None or not reference_is_right(item.target):
        return none
    if item.wrong_outcome or told.error:
        if not item.wrong_outcome or told.error != item.reply.error:
            return none
        return Match(True, wrong, wrong, EVIDENCE if told.error != CRASH else 0.0)
    some = item.sample
    given_some, told_some = item.reply.values[some], told.values[some]
    same = alike(given_some, told_some, tolerance(item.target, told, item.dtype, some))
    if len(some) and np.mean(same | (item.poisoned & (np.isfinite(given_some) != np.isfinite(told_some)))) < 0.9:
        return none
    limits = tolerance(item.target, told, item.dtype)
    same = matches(item.target, item.reply, told, limits)
    concerned = item.wrong | told.wrong(item.target, item.dtype)
    predicted = same & item.wrong
    count = int(predicted.sum())
    if _all(item, same, concerned):
        return Match(count > 0, wrong, count, _bits(item, predicted, limits))
    finite = np.isfinite(item.reply.values) & np.isfinite(told.values)
    bits = _bits(item, predicted & finite, limits)
    return Match(item.poisoned and _all(item, same, concerned & finite) and bits >= EVIDENCE, wrong, count, bits)


def _all(item: Item, same: Bools, concerned: Bools) -> bool:
    """Whether all concerned elements are the same, or in a low precision nearly all."""
    needed = 1.0 if item.dtype == "float64" else ALMOST_ALL
    return bool((same & concerned).sum() >= needed * concerned.sum())


def _bits(item: Item, predicted: Bools, limits: Floats) -> float:
    """How unlikely it is that chance predicted these elements: log2 of error over tolerance, or a constant."""
    got, right = item.reply.values[predicted], item.target.values[predicted]
    allowed = limits[predicted]
    with np.errstate(invalid="ignore", divide="ignore"):
        bits = np.clip(np.log2(np.abs(got - right) / allowed), 0.0, BITS_AT_MOST)
    bits = np.where(allowed == 0, BITS_OF_AN_INTEGER + np.log2(len(limits)), bits)
    exact = ~np.isfinite(right) | np.isinf(got) | item.reply.in_odd(item.target)[predicted]
    return float(np.where(exact, BITS_OF_AN_INTEGER, np.where(np.isnan(got), BITS_OF_NAN, bits)).sum())


def contradicted(item: Item, mutant: Mutant, rank: int | None = None) -> bool:
    """Whether the mutant would fail an item that passes."""
    told = replay(item.target, mutant, rank)
    if told is None:
        return False
    if told.error or item.reply.error:
        return told.error != item.reply.error
    wrong = told.wrong(item.target, item.dtype)
    limits = tolerance(item.target, told, item.dtype)
    return bool((wrong & ~matches(item.target, item.reply, told, limits)).any())


def _finding(candidate: Candidate, twins: tuple[str, ...], failing: Sequence[Item]) -> Finding:
    mutant = candidate.mutant
    return Finding(
        mutant.name,
        mutant.kind,
        mutant.what,
        mutant.source,
        twins,
        len(candidate.explained) / len(failing),
        len(candidate.explained),
        len(failing),
        candidate.elements,
        _rows_in_words(candidate, failing),
        candidate.rank,
        candidate.scope,
    )


def _rows_in_words(candidate: Candidate, failing: Sequence[Item]) -> str:
    """Which rows of the smallest case that has any match the mutant: rows 5, 6 of document 1 match ..."""
    name = candidate.mutant.name
    explained = sorted((failing[i] for i in candidate.explained), key=lambda item: len(item.target.values))
    for item in explained:
        rows: dict[str, set[int]] = {}
        for found in wrong_arrays(item):
            held = rows_in_buffer(item.case, found.name)
            if held is not None:
                wrong = np.moveaxis(found.wrong, found.axis, 0).reshape(len(held), -1).any(axis=1)
                of_keys = item.case.is_step and base_name(found.name) in OF_KEYS
                rows.setdefault("k" if of_keys else "q", set()).update(held[wrong].tolist())
        if rows:
            buffer, own = max(rows.items())  # queries, if any of them is wrong
            match = "matches" if len(own) == 1 else "match"
            told = _by_document(item.case.layout_of(buffer), sorted(own))
            return f"{'keys: ' if buffer == 'k' else ''}{told} {match} {name} ({item.case.id})"
    for item in explained:
        wrong_names = dict.fromkeys(base_name(found.name) for found in wrong_arrays(item))
        if wrong_names:
            match = "matches" if len(wrong_names) == 1 else "match"
            return f"{', '.join(wrong_names)} {match} {name} ({item.case.id})"
    return ""


def _by_document(layout: PackedLayout, rows: Sequence[int]) -> str:
    """rows 5, 6 of document 1 and padding rows 8-11."""
    documents: dict[int, list[int]] = {}
    for row in rows:
        documents.setdefault(int(layout.document_ids[row]), []).append(row)
    told = []
    for d, own in sorted(documents.items(), key=lambda pair: pair[1][0]):
        numbers = f"row{'s' if len(own) > 1 else ''} {_ranges(own)}"
        told.append(f"{numbers} of document {d}" if d >= 0 else f"padding {numbers}")
    return " and ".join(told[:3]) + (" and others" if len(told) > 3 else "")


def _ranges(rows: Sequence[int]) -> str:
    """5, 6, 9-12."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][-1] + 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
