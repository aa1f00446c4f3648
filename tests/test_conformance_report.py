"""What a check tells: where an answer is wrong, the terminal, JSON, JUnit, the page and its pictures."""

import io
import json
import re
from functools import cache
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from refimpl.conformance import vectors
from refimpl.conformance.adapters import load
from refimpl.conformance.cases import Case, Expected, Vector
from refimpl.conformance.check import Answered, Checked, Crashed, Result, Skipped, judge, run_adapter
from refimpl.conformance.declaration import Declaration
from refimpl.conformance.hint import diagnosed, diagnosis_lines
from refimpl.conformance.implementation import answer
from refimpl.conformance.locate import Place, place_of, wrong_elements, wrong_rows
from refimpl.conformance.page import as_html
from refimpl.conformance.pictures import mask_picture, ownership_picture
from refimpl.conformance.report import as_json, as_junit, show, summary, versions, write_reports

loaded = cache(vectors.load)

LAYOUT = {"cu_seqlens": [0, 5, 8], "cu_seqlens_padded": [0, 5, 9], "total_tokens": 10}
MASK = {"causal": True, "window": [-1, -1], "softmax_scale": None}
RANKS = {"policy": "packed_contiguous", "cp_size": 2}


def make(operation, inputs, tensors=None, name=None, why="Because."):
    case = Case(
        name or operation.replace("_", "-"), operation, why, ("A3", "L10", "L2"), ("padding",), inputs, tensors or {}
    )
    bounds = {"float64": dict.fromkeys(("out", "lse", "dq", "dk", "dv", "x"), 1e-12)}
    return Vector(case, Expected({n: np.asarray(x) for n, x in answer(case).items()}, None, bounds))


def tensors():
    rng = np.random.default_rng(1)
    return {name: rng.integers(-8, 8, (10, 2, 3)) / 4.0 for name in ("q", "k", "v", "dout")}


FORWARD = make("context_parallel_forward", LAYOUT | MASK | RANKS, tensors())
BACKWARD = make("context_parallel_backward", LAYOUT | MASK | RANKS, tensors())
METADATA = make("metadata", LAYOUT | MASK | RANKS)
VISIBLE = make("mask", LAYOUT | MASK)
UNPARTITION = make("unpartition", LAYOUT | RANKS, {f"x.{r}": np.arange(10.0).reshape(5, 2) + 10 * r for r in range(2)})
MERGE = make("merge", {}, {"out.0": np.ones((3, 2, 2)), "lse.0": np.zeros((2, 3))})


def wrong(vector, **changes):
    """The result of an answer that is right but for some elements: name_with_underscores_for_dots = (index, value)."""
    arrays = {name: x.copy() for name, x in vector.expected.arrays.items()}
    for name, (index, value) in changes.items():
        arrays[re.sub(r"_(?=\d)", ".", name)][index] = value
    return judge(vector, Answered(arrays), Declaration())


# Places


@pytest.mark.parametrize(
    ("vector", "name", "index", "place", "words"),
    [
        (
            FORWARD,
            "out.1",
            (2, 1, 0),
            Place(1, None, 2, 7, 1, 2, 1, 0),
            "rank 1, row 7 (document 1, position 2), head 1, column 0",
        ),
        (FORWARD, "lse.1", (1, 0), Place(1, None, 0, 5, 1, 0, 1), "rank 1, row 5 (document 1, position 0), head 1"),
        (FORWARD, "out.1", (4, 0, 0), Place(1, None, 4, 9, -1, 0, 0, 0), "rank 1, row 9 (padding), head 0, column 0"),
        (
            BACKWARD,
            "dk.0",
            (0, 1, 2),
            Place(0, None, 0, 0, 0, 0, 1, 2),
            "rank 0, row 0 (document 0, position 0), head 1, column 2",
        ),
        (METADATA, "cu_seqlens_q.1.0", (2,), Place(1, 0, entry=2), "rank 1, step 0, entry 2"),
        (METADATA, "max_seqlen_q.1.0", (), Place(1, 0), "rank 1, step 0"),
        (VISIBLE, "visible", (6, 5), Place(None, None, 6, 6, 1, 1, key=5), "row 6 (document 1, position 1), key 5"),
        (UNPARTITION, "x", (3, 1), Place(None, None, 3, 3, 0, 3, column=1), "row 3 (document 0, position 3), column 1"),
        (MERGE, "out", (2, 1, 0), Place(None, None, 2, None, None, None, 1, 0), "local row 2, head 1, column 0"),
        (MERGE, "lse", (1, 2), Place(None, None, 2, None, None, None, 1), "local row 2, head 1"),
    ],
)
def test_places(vector, name, index, place, words):
    assert place_of(vector.case, name, index) == place
    assert str(place) == words


def test_wrong_rows_are_those_of_the_judge():
    result = wrong(FORWARD, out_1=((2, 1, 0), np.nan), lse_0=((0, 1), 5.0))
    assert [difference.name for difference in result.differences] == ["lse.0", "out.1"] or len(result.differences) == 2
    for difference in result.differences:
        elements = wrong_elements(FORWARD, difference, result.arrays[difference.name])
        assert int(elements.sum()) == difference.wrong
        assert np.argwhere(elements)[0].tolist() == list(difference.index)
    by_name = {difference.name: difference for difference in result.differences}
    assert wrong_rows(FORWARD, by_name["out.1"], result.arrays["out.1"]) == [7]
    assert wrong_rows(FORWARD, by_name["lse.0"], result.arrays["lse.0"]) == [1]


@pytest.mark.clause("A5")
def test_a_padding_row_that_is_almost_zero_is_wrong():
    result = wrong(FORWARD, out_1=((4, 0, 0), 1e-300))
    assert wrong_rows(FORWARD, result.differences[0], result.arrays["out.1"]) == [9]


def test_integers_have_no_rows_unless_they_are_rows():
    result = wrong(METADATA, cu_seqlens_q_1_0=(1, 99))
    assert wrong_rows(METADATA, result.differences[0], result.arrays["cu_seqlens_q.1.0"]) == []
    result = wrong(VISIBLE, visible=((6, 5), False))
    assert wrong_rows(VISIBLE, result.differences[0], result.arrays["visible"]) == [6]


# Reports


def checked(*pairs, **more):
    """A check of these (vector, result)."""
    results = tuple(result for _, result in pairs)
    return Checked("here:run", Declaration("somebody"), results, {v.case.id: v for v, _ in pairs}, **more)


def example(**more):
    right = Result(METADATA.case.id, "pass")
    skipped = judge(VISIBLE, Skipped("padding"), Declaration(lacks=("padding",)))
    crashed = judge(UNPARTITION, Crashed("ValueError: <b>bold</b> & [red]red[/red]"), Declaration())
    failed = wrong(FORWARD, out_1=((2, 1, 0), np.nan), lse_0=((0, 1), 5.0))
    return checked((METADATA, right), (VISIBLE, skipped), (UNPARTITION, crashed), (FORWARD, failed), **more)


def shown(found):
    text = io.StringIO()
    show(found, Console(file=text, width=140))
    return text.getvalue()


def test_the_terminal_shows_what_matters():
    text = shown(example(notes=("a note",)))
    lines = text.splitlines()
    assert lines[0] == "here:run (somebody): 4 cases in float64"
    assert "error: unpartition: ValueError: <b>bold</b> & [red]red[/red]" in text
    assert (
        "fail: context-parallel-forward: lse.0 at rank 0, row 1 (document 0, position 1), head 0: got 5, expected"
        in text
    )
    assert "note: a note" in text
    assert lines[-1] == "1 of 4 cases pass, 1 fail, 1 end in an error, 1 skipped (lacks padding: 1)"
    assert re.search(r"L2 +1 +1 +1 +- +1", text), "clauses with counts in the order of VERDICTS"
    assert text.index("L2 ") < text.index("L10 ") < text.index("A3 ")


def test_a_check_without_failures_is_short():
    text = shown(checked((METADATA, Result(METADATA.case.id, "pass"))))
    assert text.splitlines() == ["here:run (somebody): 1 cases in float64", "1 of 1 cases pass"]


def test_nothing_checked_is_said():
    assert "nothing was checked" in summary(checked((METADATA, Result(METADATA.case.id, "skip", "lacks metadata"))))


def test_many_failures_are_shown_by_operation_first():
    many = [make("mask", LAYOUT | MASK, name=f"mask-{i}") for i in range(20)]
    pairs = [(vector, wrong(vector, visible=((6, 5), False))) for vector in many]
    text = shown(checked(*pairs, (FORWARD, wrong(FORWARD, out_1=((2, 1, 0), np.nan)))))
    assert "fail: mask-0: " in text
    assert "fail: context-parallel-forward: " in text
    assert "... and 13 more (--report DIR writes all of them)" in text


def test_json_holds_everything():
    found = json.loads(as_json(example(known=frozenset(["unpartition"]), notes=("a note",))))
    assert found["passed"] is False
    assert found["counts"] == {"pass": 1, "fail": 1, "error": 1, "missing": 0, "skip": 1}
    assert list(found["clauses"]) == ["L2", "L10", "A3"]
    assert found["features"]["padding"]["skip"] == 1
    assert found["declaration"] == {"name": "somebody", "dtype": "float64", "lacks": []}
    assert (found["known"], found["notes"]) == (["unpartition"], ["a note"])
    by_id = {case["id"]: case for case in found["cases"]}
    assert by_id["unpartition"]["known"] is True
    failed = by_id["context-parallel-forward"]
    assert (failed["verdict"], failed["operation"], failed["cp_size"]) == ("fail", "context_parallel_forward", 2)
    nan = next(difference for difference in failed["differences"] if difference["name"] == "out.1")
    assert (nan["index"], nan["got"], nan["error"]) == ([2, 1, 0], "nan", "inf")


def test_junit_counts_and_names():
    suite = ElementTree.fromstring(as_junit(example()))
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["4", "1", "1", "1"]
    by_name = {case.get("name"): case for case in suite}
    assert by_name["metadata"].get("classname") == "thdcp.check.metadata"
    assert len(by_name["metadata"]) == 0
    assert by_name["mask"].find("skipped").get("message") == "lacks padding"
    assert "<b>bold</b>" in by_name["unpartition"].find("error").get("message")
    assert "rank 0, row 1" in by_name["context-parallel-forward"].find("failure").text


def test_junit_of_known_failures():
    found = example(known=frozenset(["unpartition", "metadata"]))
    suite = ElementTree.fromstring(as_junit(found))
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["4", "2", "0", "2"]
    by_name = {case.get("name"): case for case in suite}
    assert by_name["unpartition"].find("skipped").get("message").startswith("known: ")
    assert "listed as a known failure" in by_name["metadata"].find("failure").get("message")


def test_reports_are_written_whole(tmp_path):
    write_reports(tmp_path, example())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check.html", "check.json", "check.xml"]
    write_reports(tmp_path, example())
    assert len(list(tmp_path.iterdir())) == 3


def test_a_diagnosis_is_told_first_and_everywhere():
    some = {vector.case.id: vector for vector in loaded() if vector.case.id.startswith("cp-forward-dual")}
    results = run_adapter(tuple(some.values()), load("refimpl.conformance.adapters.zeros:run"))
    found = diagnosed(Checked("zeros", Declaration(), tuple(results), some))
    first = diagnosis_lines(found)[0]
    assert re.match(r"looks like: zeros[a-z-]* \(.+\) - reproduces (\d+) of \1 failing cases", first)
    assert shown(found).splitlines()[1] == first
    assert first.split("(")[0] in page(found)
    assert json.loads(as_json(found))["diagnosis"]["findings"][0]["kind"] == "zeros"


def test_there_is_no_diagnosis_of_what_is_right_or_crashed():
    assert diagnosis_lines(diagnosed(checked((METADATA, Result("metadata", "pass"))))) == []
    assert diagnosis_lines(diagnosed(checked((METADATA, Result("metadata", "error", "boom"))))) == []


# The page


def page(found):
    return as_html(found, diagnosis_lines(found), summary(found), versions())


class Reader(HTMLParser):
    """Checks that elements are nested, and keeps what a page refers to and says."""

    VOID = ("meta", "rect", "path", "br", "!doctype")

    def __init__(self):
        super().__init__()
        self.open, self.references, self.text, self.tags, self.bad = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data")]
        self.bad += [name for name, _ in attrs if name.startswith("on")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.text.append(data)


def read(html):
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_needs_nothing_else_and_runs_nothing():
    reader = read(page(example()))
    assert reader.references == []
    assert reader.bad == []
    assert not {"script", "iframe", "object", "link", "img", "form"} & set(reader.tags)
    assert "url(" not in page(example())
    assert "http" not in page(example()).replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in page(example())


def test_the_page_escapes_what_it_is_told():
    evil = '"><script>alert(1)</script><b a="'
    vector = make("mask", LAYOUT | MASK, why=evil)
    found = Checked(
        evil, Declaration(evil), (judge(vector, Crashed(evil), Declaration()),), {vector.case.id: vector}, notes=(evil,)
    )
    html = as_html(found, [evil], evil, {"x": evil})
    reader = read(html)
    assert "script" not in reader.tags
    assert sum(evil in text for text in reader.text) >= 6


def test_the_page_shows_a_failing_case():
    text = " ".join(read(page(example())).text)
    for words in (
        "1 of 4 cases pass, 1 fail, 1 end in an error, 1 skipped",
        "Failing cases (2)",
        "context-parallel-forward",
        "lse.0, rank 0, head 0",
        "Who holds which row",
        "Who sees which key",
        "By clause: 3 of 3 have failures",
    ):
        assert words in text
    html = page(example())
    assert html.count("<svg") == 2
    assert html.count('<tr class="first">') == 1


@pytest.mark.parametrize("name", ["zeros", "identity"])
def test_a_page_of_many_failures_opens(name):
    by_id = {vector.case.id: vector for vector in loaded()}
    results = run_adapter(tuple(by_id.values()), load(f"refimpl.conformance.adapters.{name}:run"))
    html = page(Checked(name, Declaration(), tuple(results), by_id))
    assert read(html).tags.count("svg") > 50
    assert len(html) < 3_000_000


def test_shapes_and_missing_arrays_have_no_numbers_to_show():
    result = judge(FORWARD, Answered({"out.0": np.zeros((2, 2))}), Declaration())
    text = " ".join(read(page(checked((FORWARD, result)))).text)
    assert "out.0 has shape [2, 2], expected [5, 2, 3]" in text
    assert "lse.0 (missing)" in text


# Pictures


def titles(svg):
    return re.findall(r"<title>(.*?)</title>", svg)


def test_the_picture_of_owners():
    svg = ownership_picture(FORWARD, wrong(FORWARD, out_1=((2, 1, 0), np.nan)))
    assert titles(svg) == [
        "rows 0-4: document 0",
        "rows 5-7: document 1",
        "rows 8-9: padding",
        "rows 0-4: rank 0",
        "rows 5-9: rank 1",
        "rows 7-7: wrong",
    ]


def test_the_picture_of_owners_under_zigzag():
    layout = {"cu_seqlens": [0, 8, 12, 16], "cu_seqlens_padded": [0, 8, 12, 16], "total_tokens": 16}
    vector = make("partition", {**layout, **RANKS, "policy": "dual_chunk_swap"})
    assert titles(ownership_picture(vector, Result("partition", "fail"))) == [
        "rows 0-7: document 0",
        "rows 8-11: document 1",
        "rows 12-15: document 2",
        "rows 0-1: rank 0",
        "rows 2-5: rank 1",
        "rows 6-8: rank 0",
        "rows 9-10: rank 1",
        "rows 11-12: rank 0",
        "rows 13-14: rank 1",
        "rows 15-15: rank 0",
    ]


def cells(svg, look, size):
    """The cells that a path of the picture fills, as (row, column), from its rectangles."""
    path = re.search(rf'class="{look}" d="(.*?)"', svg)
    found = set()
    for x, y, width, height in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", path.group(1) if path else ""):
        assert int(height) == size
        found |= {(int(y) // size, column) for column in range(int(x) // size, (int(x) + int(width)) // size)}
    return found


def test_the_picture_of_the_mask():
    result = wrong(VISIBLE, visible=((slice(6, 7), slice(5, 9)), [False, True, True, False]))
    svg = mask_picture(VISIBLE, result)
    size = 12
    assert cells(svg, "cell", size) == set(map(tuple, np.argwhere(VISIBLE.expected.arrays["visible"]).tolist()))
    assert cells(svg, "extra", size) == {(6, 7)}
    assert cells(svg, "missed", size) == {(6, 5)}
    assert "1 seen too many (red), 1 too few (orange)" in svg
    assert titles(svg) == ["rows 6-6: wrong"]


def test_wrong_gradients_of_keys_mark_columns():
    svg = mask_picture(BACKWARD, wrong(BACKWARD, dk_0=((3, 0, 0), 9.0), dq_1=((1, 0, 0), 9.0)))
    assert titles(svg) == ["rows 6-6: wrong", "keys 3-3: wrong gradients"]


def test_the_picture_of_a_step_has_its_own_queries_and_keys():
    """Five queries of the first document on two keys: rows 0 to 2 see nothing, and key 4 is the second document's."""
    queries, keys = [0, 5, 9], [0, 2, 6]
    inputs = {"cu_seqlens_q": queries, "cu_seqlens_q_padded": queries, "cu_seqlens_kv": keys}
    inputs |= {"cu_seqlens_kv_padded": keys, **MASK, "softmax_scale": None}
    rng = np.random.default_rng(0)
    tensors = {x: rng.normal(size=(6 if x in "kv" else 9, 2, 4)) for x in ("q", "k", "v", "dout")}
    step = make("step_attention_backward", inputs, tensors)
    svg = mask_picture(step, wrong(step, dk=((4, 0, 0), 9.0), dq=((1, 0, 0), 9.0)))
    seen = {(3, 0), (4, 0), (4, 1), *((5 + i, 2 + j) for i in range(4) for j in range(i + 1))}
    assert cells(svg, "cell", 12) == seen
    assert titles(svg) == ["rows 1-1: wrong", "keys 4-4: wrong gradients"]
    assert ownership_picture(step, Result(step.case.id, "fail")) == ""
    assert str(place_of(step.case, "dk", (4, 1, 0))) == "row 4 (document 1, position 2), head 1, column 0"


def test_what_cannot_be_drawn_is_not():
    assert mask_picture(MERGE, Result("merge", "fail")) == ""
    assert ownership_picture(MERGE, Result("merge", "fail")) == ""
    large = make(
        "metadata", {"cu_seqlens": [0, 1000], "cu_seqlens_padded": [0, 1000], "total_tokens": 1000, **MASK, **RANKS}
    )
    assert ownership_picture(large, Result("metadata", "fail")) == ""
    partition = make("partition", LAYOUT | RANKS)
    assert mask_picture(partition, Result("partition", "fail")) == ""
