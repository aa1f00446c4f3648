"""Two pictures of a case, as inline SVG: which rank owns which row, and which query sees which key.

Defines `ownership_picture` and `mask_picture`. Rows in which an answer is wrong are marked in both. Runs of equal cells
are one shape each, so that a picture of 64 x 64 cells takes a few kilobytes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.cases import Case, Vector, base_name
from refimpl.conformance.check import Result
from refimpl.conformance.implementation import layout_visible, step_visible
from refimpl.conformance.locate import wrong_rows
from refimpl.partition import partition_indices

Array = NDArray[Any]

MAX_ROWS = 128
"""Of a buffer that is drawn; vectors hold 64 at most, but for those that are about large offsets."""

RANK_COLOURS = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#bbbbbb")
"""Told apart by most colour-blind eyes; ranks beyond the eighth start again."""

STRIP = 22


def drawable(case: Case) -> bool:
    """Whether a case has a layout, small enough to draw and not the very thing that is refused."""
    if case.operation == "refuse" or "cu_seqlens" not in case.inputs:
        return False
    return 0 < case.layout.total_tokens <= MAX_ROWS


def marked_rows(vector: Vector, result: Result, keys: bool | None = None) -> list[int]:
    """Rows of the buffer in which any array of the answer is wrong.

    Args:
        keys: only arrays that belong to keys (dk, dv), or only others; None: both.
    """
    rows: set[int] = set()
    for difference in result.differences:
        of_keys = base_name(difference.name) in ("dk", "dv")
        if difference.problem in ("exact", "value") and keys in (None, of_keys):
            rows |= set(wrong_rows(vector, difference, result.arrays[difference.name]))
    return sorted(rows)


def ownership_picture(vector: Vector, result: Result) -> str:
    """A strip of documents and, where a policy deals them out, a strip of ranks below; "" if neither can be drawn."""
    case = vector.case
    if not drawable(case):
        return ""
    layout, wrong = case.layout, marked_rows(vector, result)
    rows = layout.total_tokens
    cell = max(8, min(22, 1000 // rows))
    shapes = []
    for start, stop, document in _runs(layout.document_ids):
        what = "padding" if document < 0 else f"document {document}"
        kind = 'class="pad"' if document < 0 else f'class="cell" opacity="{0.9 if document % 2 else 0.55}"'
        shapes.append(_box(start, stop, 0, cell, kind, f"rows {start}-{stop - 1}: {what}"))
        shapes.append(_label(start, stop, 0, cell, "" if document < 0 else str(document)))
    shapes += [_line(int(edge) * cell, 0, int(edge) * cell, STRIP) for edge in layout.cu_seqlens_padded]
    strips = 1
    if "policy" in case.inputs:
        strips = 2
        owners = np.zeros(rows, np.int64)
        for rank in range(case.cp_size):
            owners[partition_indices(layout, case.policy, case.cp_size, rank)] = rank
        for start, stop, rank in _runs(owners):
            fill = f'fill="{RANK_COLOURS[rank % len(RANK_COLOURS)]}"'
            shapes.append(_box(start, stop, STRIP + 2, cell, fill, f"rows {start}-{stop - 1}: rank {rank}"))
            shapes.append(_label(start, stop, STRIP + 2, cell, str(rank)))
    bottom = strips * (STRIP + 2)
    for start, stop in _ranges(wrong):
        shapes.append(_box(start, stop, bottom, cell, 'class="mark"', f"rows {start}-{stop - 1}: wrong", height=6))
    words = f"{rows} rows: {'documents above, ranks below' if strips == 2 else 'documents'}"
    words += ", padding grey" if (layout.document_ids < 0).any() else ""
    words += ", wrong rows underlined" if wrong else ""
    return _svg(rows * cell, bottom + 22, shapes, words, text_at=bottom + 18)


def mask_picture(vector: Vector, result: Result) -> str:
    """Queries down, keys across, a filled cell where the query sees the key; "" if the case has no mask to draw.

    Where the mask itself was asked, cells that the answer has too many or too few are shown in colours of their own.
    """
    visible, query_edges, key_edges = _visible(vector)
    if visible is None:
        return ""
    cell = max(4, min(12, 440 // max(visible.shape)))
    height, width = (cell * size for size in visible.shape)
    shapes = [f'<rect width="{width}" height="{height}" class="grid"/>', _cells(visible, cell, "cell")]
    words = "queries down, keys across"
    got = np.asarray(result.arrays.get("visible", visible))
    if vector.case.operation in ("mask", "step_mask") and got.shape == visible.shape:
        extra, missed = got.astype(bool) & ~visible, visible & ~got.astype(bool)
        shapes += [_cells(extra, cell, "extra"), _cells(missed, cell, "missed")]
        words += f"; {int(extra.sum())} seen too many (red), {int(missed.sum())} too few (orange)"
    shapes += [_line(edge * cell, 0, edge * cell, height) for edge in key_edges]
    shapes += [_line(0, edge * cell, width, edge * cell) for edge in query_edges]
    queries, keys = (list(_ranges(marked_rows(vector, result, of_keys))) for of_keys in (False, True))
    for start, stop in queries:
        at = f'x="0" y="{start * cell}" width="{width}" height="{(stop - start) * cell}"'
        shapes.append(f'<rect {at} class="band"><title>rows {start}-{stop - 1}: wrong</title></rect>')
    for start, stop in keys:
        at = f'x="{start * cell}" y="0" width="{(stop - start) * cell}" height="{height}"'
        shapes.append(f'<rect {at} class="band"><title>keys {start}-{stop - 1}: wrong gradients</title></rect>')
    if queries or keys:
        words += "; wrong rows in red" + (", wrong dk or dv as columns" if keys else "")
    return _svg(width, height + 16, shapes, words, text_at=height + 12)


def _visible(vector: Vector) -> tuple[Array | None, list[int], list[int]]:
    """Who sees whom, with the offsets of documents among queries and among keys; None if a case has none to draw."""
    case = vector.case
    if case.is_step:
        edges = [case.layout_of(name).cu_seqlens_padded.tolist() for name in ("q", "k")]
        visible = step_visible(case.step, case.mask, edges[0][-1], edges[1][-1])
        return (visible if 0 < max(visible.shape) <= MAX_ROWS else None), edges[0], edges[1]
    if not drawable(case) or "causal" not in case.inputs:
        return None, [], []
    edges = [case.layout.cu_seqlens_padded.tolist()] * 2
    return layout_visible(case.layout, case.mask), edges[0], edges[1]


def _svg(width: int, height: int, shapes: Sequence[str], words: str, text_at: int) -> str:
    width = max(width, 7 * len(words))
    return (
        f'<svg width="{width + 2}" height="{height + 2}" viewBox="-1 -1 {width + 2} {height + 2}" role="img" '
        f'aria-label="{words}">{"".join(shapes)}<text x="0" y="{text_at}">{words}</text></svg>'
    )


def _box(start: int, stop: int, y: int, cell: int, look: str, title: str, height: int = STRIP) -> str:
    return (
        f'<rect x="{start * cell}" y="{y}" width="{(stop - start) * cell}" height="{height}" {look}>'
        f"<title>{title}</title></rect>"
    )


def _label(start: int, stop: int, y: int, cell: int, text: str) -> str:
    if not text or len(text) * 6 > (stop - start) * cell:
        return ""
    return f'<text x="{(start + stop) * cell / 2:g}" y="{y + 15}" text-anchor="middle" class="on">{text}</text>'


def _line(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<path d="M{x1} {y1}L{x2} {y2}" class="edge"/>'


def _cells(filled: Array, cell: int, look: str) -> str:
    """All filled cells as one path, a rectangle for each run in a row."""
    runs = [
        f"M{start * cell} {row * cell}h{(stop - start) * cell}v{cell}h{(start - stop) * cell}z"
        for row, line in enumerate(filled)
        for start, stop, value in _runs(line)
        if value
    ]
    return f'<path class="{look}" d="{"".join(runs)}"/>' if runs else ""


def _runs(values: Array) -> Iterator[tuple[int, int, int]]:
    """Maximal runs of equal values: start, stop, value."""
    edges = np.flatnonzero(np.diff(values.astype(np.int64), prepend=np.iinfo(np.int64).min))
    for start, stop in zip(edges, [*edges[1:], len(values)], strict=True):
        yield int(start), int(stop), int(values[start])


def _ranges(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive rows: start, stop."""
    start = None
    for i, row in enumerate(rows):
        start = row if start is None else start
        if i + 1 == len(rows) or rows[i + 1] != row + 1:
            yield start, row + 1
            start = None
