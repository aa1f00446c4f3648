"""Questions about one attention step: the call of a kernel, told by its offsets alone."""

from collections.abc import Iterator

from refimpl.conformance.cases import Case
from refimpl.conformance.catalogue.building import attend_step, dout_of_a_sum, packed, scores

# fmt: off
# Two lines a case: what is asked, then why.


def step_attention_cases() -> Iterator[Case]:
    """Queries on more keys, on fewer, and on none."""
    yield from attend_step("more-keys", packed(2, 3), packed(7, 4), "K4",
        why="A rank's queries are the last of their documents: the first of them sees all keys but one (FA#951).")
    yield from attend_step("more-queries", packed(5, 4), packed(2, 4), "A4 B2 K4",
        why="Three queries stand before the first key: out 0, lse -inf and dq 0, where a plain softmax gives NaN.")
    yield from attend_step("padding", packed((2, 3), (6, 8), (1, 1)), packed((4, 4), (3, 6), (2, 5)), "A4 A5 B2 K4",
        poison=True,
        why="Gaps full of poison among queries and keys, and between them queries that see nothing.")
    yield from attend_step("without-queries-or-keys", packed(0, 3, 2, 0, 2), packed(4, 0, 3, 0, 3), "A4 B2 L5",
        why="A document of queries alone, and one of keys alone, whose dk and dv are 0.")
    yield from attend_step("no-document-has-enough-keys", packed((7, 8), 9), packed((1, 2), (2, 6)), "A4 B2 K4",
        poison=True,
        why="Most rows of the step see nothing: what a row that does sees is not the mean of all keys.")
    yield from attend_step("window", packed(2, 4), packed(6, 4), "K3 K4", window=(1, 0),
        why="The window of two keys hangs on the aligned position.")
    yield from attend_step("window-more-queries", packed((6, 7), 2), packed((3, 5), 6), "A4 B2 K3 K4", poison=True,
        window=(1, 0),
        why="Rows before the first key see nothing, and those behind it have a window that fills up.")
    yield from attend_step("right-of-the-keys", packed((7, 8), 4), packed((2, 4), 4), "A4 K3 K5", causal=False,
        window=(-1, 4), poison=True,
        why="A right bound as long as the keys is no unlimited one: the first query stands five before the first key.")
    yield from attend_step("left-of-the-keys", packed(3, 6), packed(9, 3), "A4 K3 K4", causal=False, window=(2, 1),
        why="Both bounds, with more keys than queries in one document and fewer in the other.")
    yield from attend_step("non-causal", packed(4, 2), packed(2, 5), "A3 K4", causal=False,
        why="Without a bound more queries than keys are no matter: each sees all keys.")
    yield from attend_step("gqa", packed(5, 3), packed(3, 6), "A2 A4 B3", heads=(4, 2, 4, 4),
        why="Heads of a group add up in dk and dv, and rows without keys add nothing.")
    yield from attend_step("mqa-dv", packed((4, 6), 3), packed(6, (2, 3)), "A1 A2 A4 B3", heads=(3, 1, 5, 3),
        scale=0.75, poison=True,
        why="One K/V head, values narrower than keys, and a scale.")
    yield from attend_step("scores-high", packed(6, 3), packed(3, 5), "A3 A4", change=scores([32], [64, 64, 63.5, 64]),
        features=["extreme"],
        why="exp(1024) overflows float64: the largest score is subtracted, and a row without keys has none.")
    yield from attend_step("dout-of-a-sum", packed(5, (3, 4)), packed(3, 4), "A4 B2", strides={"dout": [0, 0, 0]},
        change=dout_of_a_sum,
        why="The gradient of out.sum() has strides of 0, and it is not 0 in rows that see nothing: their dq is.")
