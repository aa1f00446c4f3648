"""The report as one page of HTML that needs nothing else: no script, no font, no picture from elsewhere.

Defines `as_html`. Every text from outside is escaped. Failing cases come with the pictures of `pictures`.
"""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from refimpl.conformance.cases import Case, Vector
from refimpl.conformance.check import VERDICTS, Checked, Result
from refimpl.conformance.judge import TOKEN_AXIS, Difference
from refimpl.conformance.locate import first_difference, place_of, rows_of, wrong_elements
from refimpl.conformance.pictures import mask_picture, ownership_picture

MAX_DETAILS = 150
"""Failing cases shown with pictures; the others by a line each, so that the page stays small enough to open."""
OPEN_DETAILS = 3
NEIGHBOURS = 3
"""Rows shown to either side of the first wrong one."""
MAX_ENTRIES = 96
"""Entries shown of an array of integers."""

_STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1a1d21; --dim: #5b6470; --line: #d5dae1; --soft: #f3f5f8;
  --pass: #1a7f45; --fail: #c0262d; --error: #a2530a; --missing: #7a3fb0; --skip: #5b6470; --cell: #3d7dca;
  --pad: #e6e9ee; --mark: #c0262d; --missed: #e08a00; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --fg: #e4e7eb; --dim: #9aa4b1; --line: #353b44;
  --soft: #1d2127; --pass: #52c283; --fail: #ff6b70; --error: #f0a35a; --missing: #c293ee; --skip: #9aa4b1;
  --cell: #5b9be6; --pad: #2a2f37; --mark: #ff6b70; --missed: #f0b04a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; } h3 { font-size: 1rem; }
p { margin: .4rem 0; } .dim { color: var(--dim); } code, pre, .num { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; } th, td { padding: .2rem .7rem; text-align: right; font-weight: normal;
  border-bottom: 1px solid var(--line); } th:first-child, td:first-child { text-align: left; }
thead th { color: var(--dim); } tr.bad td:first-child { color: var(--fail); font-weight: 600; }
.pass { color: var(--pass); } .fail { color: var(--fail); } .error { color: var(--error); }
.missing { color: var(--missing); } .skip { color: var(--skip); } .zero { color: var(--line); }
.counts { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; }
.counts div { border: 1px solid var(--line); border-radius: .5rem; padding: .4rem 1rem; }
.counts b { display: block; font-size: 1.5rem; }
.says { border-left: 4px solid var(--fail); background: var(--soft); padding: .5rem 1rem; margin: .5rem 0;
  overflow-wrap: anywhere; }
.two { display: flex; flex-wrap: wrap; gap: 2.5rem; align-items: flex-start; }
details { border: 1px solid var(--line); border-radius: .5rem; margin: .5rem 0; padding: .5rem 1rem; }
summary { cursor: pointer; overflow-wrap: anywhere; } summary b { font-family: ui-monospace, monospace; }
.scroll { overflow-x: auto; } tr.first td { background: var(--soft); }
td.wrong { color: var(--fail); font-weight: 600; }
svg { display: block; max-width: none; } svg text { fill: var(--fg); font: 10px ui-monospace, monospace; }
svg text.on { fill: #111; }
svg .edge { stroke: var(--fg); stroke-width: 1; fill: none; } svg .cell { fill: var(--cell); }
svg .pad { fill: var(--pad); } svg .grid { fill: var(--soft); stroke: var(--line); } svg .mark { fill: var(--mark); }
svg .band { fill: var(--mark); opacity: .25; } svg .extra { fill: var(--mark); } svg .missed { fill: var(--missed); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .5rem 0; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
"""


def as_html(checked: Checked, diagnosis: Sequence[str], summary: str, versions: Mapping[str, str]) -> str:
    """The whole page.

    Args:
        diagnosis, summary: in words, as on a terminal. versions: of what the result may depend on.
    """
    title = f"thdcp check: {checked.subject}"
    declared = checked.declaration
    verdict = "pass" if checked.passed else "fail"
    known = f"; {len(checked.known)} known failures listed" if checked.known else ""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">{escape(declared.name or "no name declared")} · {escape(declared.dtype)} · lacks '
        f"{escape(', '.join(declared.lacks) or 'nothing')}{known}</p>",
        f'<p class="{verdict}"><b>{escape(summary)}</b></p>',
        _tiles(checked),
        *(f'<p class="says">{escape(line)}</p>' for line in diagnosis),
        *(f'<p class="dim">note: {escape(note)}</p>' for note in checked.notes),
        *_mended(checked),
        _table("By clause", checked.by_clause(), checked),
        _table("By feature", checked.by_feature(), checked),
        *_failing(checked),
        *_others(checked),
        f'<p class="dim">{escape(", ".join(f"{name} {version}" for name, version in versions.items()))}</p>',
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _tiles(checked: Checked) -> str:
    tiles = [
        f'<div class="{verdict if count else "dim"}"><b>{count}</b>{verdict}</div>'
        for verdict, count in checked.counts().items()
    ]
    return f'<div class="counts">{"".join(tiles)}</div>'


def _table(title: str, groups: Mapping[str, Sequence[Result]], checked: Checked) -> str:
    if not groups:
        return ""
    rows = []
    for key, group in groups.items():
        counts = checked.counts(group)
        cells = "".join(
            f'<td class="{verdict if counts[verdict] else "zero"}">{counts[verdict]}</td>' for verdict in VERDICTS
        )
        bad = ' class="bad"' if _fails(group) else ""
        rows.append(f"<tr{bad}><td>{escape(key)}</td>{cells}</tr>")
    heads = "".join(f"<th>{verdict}</th>" for verdict in VERDICTS)
    failing = sum(_fails(group) for group in groups.values())
    return (
        f"<details><summary>{title}: {failing} of {len(groups)} have failures</summary>"
        f"<table><thead><tr><th></th>{heads}</tr></thead>{''.join(rows)}</table></details>"
    )


def _fails(group: Sequence[Result]) -> bool:
    return any(result.failed for result in group)


def _mended(checked: Checked) -> list[str]:
    return [
        f'<p class="says">{escape(result.id)} passes, though it is listed as a known failure: take it off</p>'
        for result in checked.mended
    ]


def _failing(checked: Checked) -> list[str]:
    failing = checked.failing
    if not failing:
        return []
    parts = [f"<h2>Failing {checked.unit} ({len(failing)})</h2>"]
    for i, result in enumerate(failing):
        if i < MAX_DETAILS and result.id in checked.vectors:
            parts.append(_details(result, checked.vectors[result.id], is_open=i < OPEN_DETAILS))
        else:
            parts.append(f"<p><b>{escape(result.id)}</b> {_verdict(result)} {escape(result.message)}</p>")
    return parts


def _verdict(result: Result) -> str:
    return f'<span class="{result.verdict}">{result.verdict}</span>'


def _others(checked: Checked) -> list[str]:
    """What passed, was skipped or was known to fail, folded away."""
    parts = []
    for title, results in (
        ("Known failures", checked.known_failing),
        ("Skipped", [result for result in checked.results if result.verdict == "skip"]),
        ("Passed", [result for result in checked.results if result.verdict == "pass"]),
    ):
        if results:
            items = "".join(f"<li><code>{escape(r.id)}</code> {escape(r.message)}</li>" for r in results)
            parts.append(f"<details><summary>{title} ({len(results)})</summary><ul>{items}</ul></details>")
    return parts


# One failing case


def _details(result: Result, vector: Vector, is_open: bool) -> str:
    case = vector.case
    parts = [
        f"<details{' open' if is_open else ''}><summary>{_verdict(result)} <b>{escape(result.id)}</b> "
        f"{escape(result.message)}</summary>",
        f"<p>{escape(case.why)}</p>",
        _facts(case, result),
    ]
    if result.differences:
        first = first_difference(result.differences)
        parts += [_numbers(vector, first, result), '<div class="two">']
        parts += [
            f'<div class="scroll"><h3>{title}</h3>{picture}</div>'
            for title, picture in (
                ("Who holds which row", ownership_picture(vector, result)),
                ("Who sees which key", mask_picture(vector, result)),
            )
            if picture
        ]
        parts.append("</div>")
    return "\n".join([*parts, "</details>"])


def _facts(case: Case, result: Result) -> str:
    facts = {"operation": case.operation, "clauses": " ".join(case.clauses), "features": ", ".join(case.features)}
    facts |= {name: _short(value) for name, value in case.inputs.items() if value is not None}
    facts |= {name: "x".join(map(str, x.shape)) for name, x in case.tensors.items() if "." not in name}
    if result.differences:
        facts["wrong"] = "; ".join(_difference(difference) for difference in result.differences)
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()) + "</dl>"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:297]}..."


def _difference(difference: Difference) -> str:
    if difference.problem in ("missing", "shape", "dtype"):
        return f"{difference.name} ({difference.problem})"
    return (
        f"{difference.name} ({difference.wrong} elements, error {difference.error:.1e}, bound {difference.bound:.1e})"
    )


def _numbers(vector: Vector, difference: Difference, result: Result) -> str:
    """What was got and wanted around the first wrong element."""
    name, index = difference.name, difference.index
    if difference.problem in ("missing", "shape", "dtype"):
        return ""
    got, wanted = np.asarray(result.arrays[name]), vector.expected.arrays[name]
    wrong = wrong_elements(vector, difference, got)
    if name.split(".")[0] not in TOKEN_AXIS:
        return _entries(name, got, wanted, wrong) if got.ndim <= 1 else ""
    axis = TOKEN_AXIS[name.split(".")[0]]
    rows = rows_of(vector.case, name)
    lines = []
    for local in range(max(0, index[axis] - NEIGHBOURS), min(wanted.shape[axis], index[axis] + NEIGHBOURS + 1)):
        at = (*index[:axis], local, *index[axis + 1 :])
        place = place_of(vector.case, name, at)
        where = "" if rows is None else f"{place.row}</td><td>{'padding' if place.document == -1 else place.document}"
        where = where or "</td><td>"
        first = ' class="first"' if local == index[axis] else ""
        bad = ' class="num wrong"' if wrong[at] else ' class="num"'
        lines.append(
            f"<tr{first}><td>{local}</td><td>{where}</td><td class=num>{_value(wanted[at])}</td>"
            f"<td{bad}>{_value(got[at])}</td></tr>"
        )
    rank = place_of(vector.case, name, index)
    fixed = ", ".join(
        f"{label} {value}"
        for label, value in (("rank", rank.rank), ("head", rank.head), ("column", rank.column))
        if value is not None
    )
    heads = "<th>local row</th><th>row</th><th>document</th><th>expected</th><th>got</th>"
    return (
        f'<h3>{escape(name)}{", " + escape(fixed) if fixed else ""}</h3><div class="scroll"><table><thead><tr>{heads}'
        f"</tr></thead>{''.join(lines)}</table></div>"
    )


def _entries(name: str, got: np.ndarray, wanted: np.ndarray, wrong: np.ndarray) -> str:
    """Two short vectors of integers, one under the other."""
    got, wanted, wrong = (np.atleast_1d(x) for x in (got, wanted, wrong))
    start = max(0, int(wrong.argmax()) - MAX_ENTRIES // 2)
    part = slice(start, start + MAX_ENTRIES)
    cells = "".join(
        f'<td class="num{" wrong" if bad else ""}">{_value(x)}</td>'
        for x, bad in zip(got[part], wrong[part], strict=True)
    )
    right = "".join(f'<td class="num">{_value(x)}</td>' for x in wanted[part])
    where = f" from entry {start}" if start else ""
    return (
        f'<h3>{escape(name)}{where}</h3><div class="scroll"><table><tr><td>expected</td>{right}</tr>'
        f"<tr><td>got</td>{cells}</tr></table></div>"
    )


def _value(x: object) -> str:
    number = float(x)  # type: ignore[arg-type]
    return str(int(number)) if np.isfinite(number) and number == int(number) else f"{number:.8g}"
