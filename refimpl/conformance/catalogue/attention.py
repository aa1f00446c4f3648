"""Questions about attention of a whole buffer, and about partial results."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from refimpl.conformance.cases import Case
from refimpl.conformance.catalogue.building import (
    ALL_PADDING,
    BACKWARD,
    FORWARD,
    ONE_TOKEN,
    REPEATED_TAIL,
    UNEVEN,
    ZERO_LENGTH,
    Array,
    attend,
    dout_of_a_sum,
    dout_of_rows,
    draw,
    merge,
    one_large_chunk,
    one_large_head,
    packed,
    scores,
)


def parts(
    count: int,
    *,
    shape: tuple[int, int] = (3, 5),
    base: float = 0.0,
    step: float = 1.0,
    absent: Callable[[int], Sequence[int]] = lambda p: [],
) -> Callable[[str], list[Array]]:
    """The lse [H, T] of so many parts: `base` plus multiples of `step / 16`, -inf in the rows `absent(part)`."""

    def lses(name: str) -> list[Array]:
        found = [
            np.float32(base) + np.float32(step) * draw(f"{name} lse.{p}", shape, range(-48, 48)) for p in range(count)
        ]
        for p, lse in enumerate(found):
            lse[:, list(absent(p))] = -np.inf
        return found

    return lses


# fmt: off
# Two lines a case: what is asked, then why.


def merge_cases() -> Iterator[Case]:
    """Partial results put together by their lse."""
    yield merge("one-part", parts(1),
        why="A single part is the result, whatever its lse.")
    yield merge("two-parts", parts(2), clauses="A6 A7", features=["lse"],
        why="The lse is a natural logarithm: read in base 2, as FlashInfer writes it, the weights are others.")
    yield merge("eight-parts", parts(8),
        why="As many parts as ranks.")
    yield merge("part-without-keys", parts(3, absent=lambda p: range(5) if p == 1 else []),
        why="A part without keys adds nothing, and the NaN that its out holds is never read.")
    yield merge("rows-without-keys", parts(2, absent=lambda p: [1, 3]),
        why="Where no part saw a key, out is 0 and lse -inf: the difference of two infinities is NaN.")
    yield merge("rows-without-keys-of-eight", parts(8, absent=lambda p: [0, 4] if p % 2 else [0, 2, 4]),
        why="Ranks of which none has keys for the first and the last row, and half of them for another one.")
    yield merge("taking-turns", parts(3, absent=lambda p: [p, p + 1]),
        why="Row by row another part is the one without keys.")
    yield merge("high", parts(2, base=8192, step=1024), features=["extreme"],
        why="The largest lse is subtracted first: exp(8192) overflows every float.")
    yield merge("low", parts(3, base=-8192, step=1024), features=["extreme"],
        why="exp(-8192) is 0 in every float, and a sum of zeros has no logarithm.")
    yield merge("square", parts(2, shape=(4, 4)), clauses="A6 A7", features=["lse"],
        why="As many heads as rows: an lse read as [T, H] has the right shape.")


def attention_cases() -> Iterator[Case]:
    """The whole buffer on one device."""
    yield from attend("causal", UNEVEN, "K1 K2",
        why="The formulas, on unequal documents; a backend of zeros passes every comparison with itself (TE#3536).")
    yield from attend("non-causal", UNEVEN, "K1", causal=False,
        why="Without a causal mask every token of a document counts.")
    yield from attend("padding", packed((5, 8), (3, 4), (7, 7)), "A5 B2", poison=True,
        why="NaN and infinity in padding reach no result, and padding rows are written: FlashAttention 3 leaves them.")
    yield from attend("padding-non-causal", packed((5, 8), (3, 4), (7, 7)), "A5 L1", causal=False,
        why="Without a causal mask nothing but the real length hides padding keys; here they hold plausible numbers.")
    yield from attend("tail", packed(5, 8, rows=16), "A5 L4 L10", poison=True,
        why="Rows past the last offset, poisoned: TE#3331 asked all offsets but the last one whether there is padding.")
    yield from attend("all-padding", ALL_PADDING, "A4 A5", poison=True, directions=FORWARD,
        why="A buffer of poison has zeros for out and no lse.")
    yield from attend("one-token-in-padding", packed((0, 4), (1, 8), rows=16), "A5 B2", poison=True,
        directions=BACKWARD,
        why="A single token in a buffer of poison: all gradients are 0 but one row of dv.")
    yield from attend("zero-length", ZERO_LENGTH, "L5 A5", poison=True,
        why="Documents without tokens, first, in the middle and last: no neighbours are joined, no slot moves.")
    yield from attend("repeated-tail", REPEATED_TAIL, "L5", directions=BACKWARD,
        why="Repeated offsets change nothing.")
    yield from attend("one-token", ONE_TOKEN, "A3",
        why="A token alone in its document has weight 1: out is v, and dq and dk are 0.")
    yield from attend("window", packed(13, 7), "K3", window=(2, 0),
        why="A window of three keys.")
    yield from attend("window-longer-than-document", packed(4, 9, 3), "K1 K3", window=(6, 0),
        why="A window that reaches over a document's start must not see the one before (miles#2038).")
    yield from attend("causal-forces-right", packed(9, 7), "K2", window=(2, 3),
        why="A causal mask with a window that would look ahead by itself.")
    yield from attend("causal-forces-right-alone", UNEVEN, "K2", heads=(4, 2, 4, 4), window=(-1, 1),
        why="The same without a left bound: the only bound that is given must not count.")
    yield from attend("right-window", packed(9, 7), "K3", causal=False, window=(2, 1),
        why="Two keys behind, one ahead.")
    yield from attend("left-only", packed(9, 7), "K3", causal=False, window=(2, -1), directions=FORWARD,
        why="A limited left bound without a causal mask.")
    yield from attend("gqa", UNEVEN, "A2 B3", heads=(4, 2, 4, 4),
        why="Four query heads on two: h // 2, where h % 2 would read the other one, and dK, dV add up over a group.")
    yield from attend("gqa-six", packed(7, 5), "A2 B3", heads=(6, 3, 4, 4), directions=FORWARD,
        why="Six query heads on three.")
    yield from attend("mqa", UNEVEN, "A2 B3", heads=(3, 1, 4, 4),
        why="Three query heads on one.")
    yield from attend("dv-wide", packed(7, 5), "A1", heads=(2, 2, 3, 5),
        why="Values wider than keys; the scale is that of Dqk.")
    yield from attend("dv-narrow", packed(7, 5), "A1", heads=(2, 1, 6, 2),
        why="Values narrower than keys.")
    yield from attend("scale", packed(7, 5), "A1 B1", scale=0.75,
        why="A scale that is given is used once in the scores, dq and dk, and not in dv.")
    yield from attend("scale-zero", packed(7, 5), "A1 B1", scale=0.0,
        why="A scale of 0 is a scale, not a missing one: all weights are equal and dq and dk are 0.")
    yield from attend("lse-of-one-key", packed(1, 4, 1, 2), "A6", features=["lse"], directions=FORWARD,
        why="The first row of a document sees one key, so its lse is the score itself, whatever the base or the sum.")
    yield from attend("lse-square", packed(4, 2), "A6", heads=(6, 6, 4, 4), features=["lse"], directions=FORWARD,
        why="As many heads as rows: an lse written as [T, H] has the right shape.")
    yield from attend("scores-of-96", packed(9, 7), "A3 N2", change=scores([12], [16, 16, 15.75, 15.5, 16]),
        features=["extreme"],
        why="exp(96) overflows float32: the largest score must be subtracted, and here all scores are near it.")
    yield from attend("scores-high", packed(9, 7), "A3", change=scores([32], [64, 64, 63.5, 64, 63.5]),
        features=["extreme"],
        why="exp(1024) overflows float64 too.")
    yield from attend("scores-low", packed(5, (6, 7), rows=14), "A3 A4", scale=1.0, change=scores([-256], [224]),
        features=["extreme"], directions=FORWARD,
        why="Scores below every finite mark for masked ones: -50000 turned real rows to zeros in FlashInfer#4401.")
    yield from attend("scores-negative", packed(9, 7), "A3", change=scores([-32], [64, 64, 63.5, 64, 63.5]),
        features=["extreme"],
        why="exp(-1024) is 0 in every float: without its largest score subtracted a row has no weight at all.")
    yield from attend("scores-mixed", packed(9, 7), "A3", causal=False, change=scores([32, -32], [64, -64, 8, -16]),
        features=["extreme"],
        why="Scores from -1024 to 1024 in one row: one key has all the weight.")
    yield from attend("dout-of-a-sum", packed((5, 8), (7, 8)), "B1 B2", strides={"dout": [0, 0, 0]},
        change=dout_of_a_sum, directions=BACKWARD,
        why="The gradient of out.sum() is one number in memory with three strides of 0; padding rows have it too.")
    yield from attend("dout-of-rows", packed(7, 5), "B1", strides={"dout": [1, 0, 0]},
        change=dout_of_rows,
        directions=BACKWARD,
        why="One number for all heads and columns of a row: strides of 0 beside one that is not (FA#2611).")
    yield from attend("strides-fused", packed(7, 5), "A3",
        strides={name: [24, 12, 1] for name in ("q", "k", "v", "dout")},
        why="q, k, v and dout cut out of a larger buffer of all heads, as a fused projection leaves them.")
    yield from attend("strides-heads-first", packed(7, 5), "A3", heads=(4, 2, 4, 4),
        strides={name: [8, 12 * 8, 2] for name in ("q", "k", "v", "dout")},
        why="Memory in which heads come first and columns lie two apart.")
    yield from attend("sum-over-keys", packed(64), "N2", heads=(1, 1, 4, 4), causal=False,
        change=one_large_chunk("v", 1, 4096, 15.5), directions=FORWARD,
        why="The first of 64 terms of out is 64, the others are less than 1/4: a bfloat16 sum forgets them one by one.")
    yield from attend("sum-over-queries", packed(64), "N1 N2", heads=(1, 1, 4, 4), causal=False,
        change=one_large_chunk("dout", 1, 4096, 15.5), directions=BACKWARD,
        why="The same for the terms of dv.")
    yield from attend("sum-over-heads", packed(16), "B3 N1", heads=(8, 1, 4, 4), causal=False, change=one_large_head,
        directions=BACKWARD,
        why="Eight query heads add up in one K/V head; in bfloat16 the small ones are lost beside the first.")
