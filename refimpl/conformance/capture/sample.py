"""Which rows of a capture are looked at, and what that can miss.

Defines `Sample` and `sample_rows`. Faults sit at edges: first and last rows of documents, of ranks and of their chunks,
and where a window begins to cut. These rows come first. The others are dealt into as many equal runs of neighbours as
there are rows to draw, and one is drawn from each: so no long run of wrong rows goes unseen, and scattered ones hardly.
"""

from dataclasses import dataclass

import numpy as np

from refimpl.conformance.capture.file import Capture
from refimpl.conformance.capture.rows import scores_of, seen_by
from refimpl.layout import IntArray
from refimpl.partition import step_windows

SEED = 0
MOST_ROWS = 2048
LEAST_ROWS = 512
SCORES = 1 << 28
"""Scores of all heads that a sample may cost; LEAST_ROWS are looked at whatever they cost."""


@dataclass(frozen=True, eq=False)
class Sample:
    """- `rows`: ascending rows of real tokens. `drawn`: how many of them were drawn, one from each `run` neighbours.

    - `real`: rows of real tokens in all. `edges`: how many rows are edges, of which `left_out` found no place.
    """

    rows: IntArray
    real: int
    drawn: int
    run: int
    edges: int
    left_out: int

    @property
    def is_all(self) -> bool:
        """Whether every row is looked at."""
        return len(self.rows) == self.real

    def __str__(self) -> str:
        if self.is_all:
            return f"all {self.real} rows of real tokens were looked at"
        share = (1 - 0.01 ** (1 / self.drawn)) * self.drawn * self.run / self.real
        told = f"{len(self.rows)} of {self.real} rows of real tokens were looked at: "
        told += f"{self.edges - self.left_out} at the edges of documents, ranks, chunks and windows"
        told += f" (of {self.edges})" if self.left_out else ""
        told += f", and {self.drawn} drawn at random (seed {SEED}), one from each {self.run} neighbours; "
        told += (
            f"a fault in {share:.2%} of all rows is missed with a probability of 1% at most, one in fewer rows with "
        )
        told += f"more (in one row alone: {1 - 1 / self.run:.0%}), one in {2 * self.run - 1} or more neighbours never"
        return told


def sample_rows(capture: Capture, most_rows: int = MOST_ROWS, scores: int = SCORES) -> Sample:
    """The rows to look at: all, if there are few enough. [V13]"""
    layout = capture.layout
    real = np.flatnonzero(layout.document_ids >= 0)
    seen = scores_of(layout, capture.mask, real) + scores_of(layout, seen_by(capture.mask), real)
    mean = max(1.0, float(seen.mean()) * capture.heads) if len(real) else 1.0
    wanted = min(most_rows, max(LEAST_ROWS, int(scores / mean)))
    if len(real) <= wanted:
        return Sample(real, len(real), 0, 1, 0, 0)
    edges = _edges(capture)
    random = np.random.default_rng(SEED)
    kept = edges if len(edges) <= wanted // 2 else np.sort(random.choice(edges, wanted // 2, replace=False))
    others = np.setdiff1d(real, kept, assume_unique=True)
    count = min(wanted - len(kept), len(others))
    bounds = np.linspace(0, len(others), count + 1).astype(np.int64)
    drawn = others[random.integers(bounds[:-1], bounds[1:])]
    run = int(np.diff(bounds).max())
    return Sample(np.union1d(kept, drawn), len(real), count, run, len(edges), len(edges) - len(kept))


def _edges(capture: Capture) -> IntArray:
    """Rows of real tokens at which something begins or ends."""
    layout, mask = capture.layout, capture.mask
    starts = layout.cu_seqlens_padded[:-1]
    ends = starts + layout.seqlens
    marks = [starts, ends]
    for rank in range(capture.cp_size):
        for window in step_windows(layout, capture.policy, capture.cp_size, rank):
            marks += [window.start, window.end]
    if mask.left >= 0:
        marks.append(starts + min(mask.left + 1, layout.total_tokens))
    if mask.right > 0:
        marks.append(ends - min(mask.right + 1, layout.total_tokens))
    begins = np.unique(np.concatenate(marks))
    rows = np.unique(np.concatenate([begins, begins - 1]))
    rows = rows[(rows >= 0) & (rows < layout.total_tokens)]
    real: IntArray = rows[layout.document_ids[rows] >= 0]
    return real
