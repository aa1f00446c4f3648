"""Questions about attention over context-parallel ranks."""

from collections.abc import Iterator

from refimpl.conformance.cases import Case
from refimpl.conformance.catalogue.building import (
    ALL_PADDING,
    BACKWARD,
    BOTH_PADDINGS,
    DCS,
    DCS_2,
    DCS_3,
    DCS_4,
    DCS_8,
    FORWARD,
    LONG_MIDDLE,
    ONE_TOKEN,
    PC,
    PDCS,
    REPEATED_TAIL,
    UNEVEN,
    ZERO_LENGTH,
    attend_over,
    dout_of_a_sum,
    lost_beside,
    one_large_chunk,
    packed,
    scores,
)

# fmt: off
# Two lines a case: what is asked, then why.


def contiguous_cases() -> Iterator[Case]:
    """Context parallelism under packed_contiguous."""
    yield from attend_over("cp1", PC, 1, UNEVEN, "",
        why="One rank is the single device.")
    yield from attend_over("cp2-two-documents", PC, 2, packed(8, 4), "P3",
        why="Documents of 8 and 4, on which the two readings of 'contiguous' differ (Megatron#3282).")
    yield from attend_over("cp3", PC, 3, UNEVEN, "K4 R3",
        why="Cuts inside documents, at lengths that nothing divides.")
    yield from attend_over("cp4-long", PC, 4, LONG_MIDDLE, "K4 B3 C1 C2",
        why="A document over four ranks: queries see keys of all ranks before, and keys get gradients from all behind.")
    yield from attend_over("cp8", PC, 8, LONG_MIDDLE, "K4 B3",
        why="Eight ranks of four rows.")
    yield from attend_over("cp2-padding", PC, 2, packed((6, 8), (3, 4)), "A5 B2", poison=True,
        why="Padding between documents, poisoned; the second rank starts in it.")
    yield from attend_over("cp2-padding-behind-last", PC, 2, packed(5, (7, 11)), "A5 B2 L10", poison=True,
        why="Padding behind the last document alone: TE#3331 compared all offsets but the last.")
    yield from attend_over("cp4-tail", PC, 4, packed((5, 6), 3, rows=16), "A5 B2 L4 L10", poison=True,
        why="The tail fills the last ranks: they have nothing to attend for, and still take part.")
    yield from attend_over("cp4-padding-across", PC, 4, packed((3, 14), (5, 6), 4), "A5 B2", poison=True,
        why="Padding longer than a rank's chunk, poisoned.")
    yield from attend_over("cp2-padding-non-causal", PC, 2, packed((5, 8), (3, 5), 3), "L1 A5", causal=False,
        why="Plausible numbers in padding and no causal mask to hide them.")
    yield from attend_over("cp3-zero-length", PC, 3, ZERO_LENGTH, "L5", poison=True,
        why="Empty documents at every place.")
    yield from attend_over("cp2-repeated-tail", PC, 2, REPEATED_TAIL, "L5", directions=FORWARD,
        why="Offsets of static shape.")
    yield from attend_over("cp2-all-padding", PC, 2, ALL_PADDING, "A5", poison=True, directions=FORWARD,
        why="Every rank holds poison alone.")
    yield from attend_over("cp2-one-token-in-padding", PC, 2, packed((0, 4), (1, 8), rows=16), "A5 B2", poison=True,
        directions=BACKWARD,
        why="One rank holds a single token among poison, the other poison alone.")
    yield from attend_over("cp4-one-token", PC, 4, ONE_TOKEN, "K4", directions=BACKWARD,
        why="Documents of one token on either side of a cut.")
    yield from attend_over("cp4-window", PC, 4, LONG_MIDDLE, "K3", window=(3, 0),
        why="A window shorter than a rank's rows, over the cut.")
    yield from attend_over("cp4-window-longer-than-rank", PC, 4, LONG_MIDDLE, "K3 K5", window=(11, 0),
        why="A window longer than a rank's rows reaches over two cuts.")
    yield from attend_over("cp3-causal-forces-right", PC, 3, UNEVEN, "K2", window=(-1, 2), directions=BACKWARD,
        why="A causal mask with a right bound of 2: no rank sees ahead, not even into the next one's rows.")
    yield from attend_over("cp3-non-causal", PC, 3, UNEVEN, "K1 R4", causal=False,
        why="Keys of ranks behind count too.")
    yield from attend_over("cp3-right-window", PC, 3, UNEVEN, "K3 R5", causal=False, window=(2, 3),
        why="Keys behind the rank's last query: bottom right would shift the window by as many.")
    yield from attend_over("cp3-left-only", PC, 3, UNEVEN, "K3 R5", causal=False, window=(3, -1), directions=FORWARD,
        why="An unlimited right bound: every key counts, and the window still needs the first query's position.")
    yield from attend_over("cp2-gqa-dv", PC, 2, packed(9, 7), "A1 A2 B3", heads=(4, 2, 3, 5),
        why="Grouped heads, and values wider than keys.")
    yield from attend_over("cp4-mqa", PC, 4, UNEVEN, "A2 B3", heads=(3, 1, 4, 4), directions=BACKWARD,
        why="Three query heads on one, over four ranks.")
    yield from attend_over("cp2-scale", PC, 2, packed(9, 7), "A1", scale=0.75, directions=BACKWARD,
        why="The scale reaches every rank.")
    yield from attend_over("cp2-scores-high", PC, 2, packed(9, 7), "A3",
        change=scores([32], [64, 64, 63.5, 64, 63.5]), features=["extreme"],
        why="Scores beyond the range of exp, over a cut.")
    yield from attend_over("cp3-dout-of-a-sum", PC, 3, packed((5, 7), (8, 8)), "B1 B2", strides={"dout": [0, 0, 0]},
        change=dout_of_a_sum, directions=BACKWARD,
        why="A gradient with strides of 0 is cut like any other.")
    yield from attend_over("cp4-strides-heads-first", PC, 4, UNEVEN, "B1", heads=(4, 2, 4, 4),
        strides={name: [8, 24 * 8, 2] for name in ("q", "k", "v", "dout")}, directions=BACKWARD,
        why="A shard of a buffer in which heads come first is not one run of memory.")
    yield from attend_over("cp8-sum-over-ranks", PC, 8, packed(64), "B3 N1", heads=(1, 1, 4, 4), causal=False,
        change=one_large_chunk("dout", 8, 2048, 7), directions=BACKWARD,
        why="The first rank adds 256 to dv and the others less than 1: a bfloat16 sum forgets them (Megatron#6199).")
    yield from attend_over("cp4-sum-over-ranks-cancels", PC, 4, packed(64), "B3 N1", heads=(2, 1, 4, 4), causal=False,
        change=lost_beside(2048, [slice(0, 4), slice(16, 20)], [slice(4, 32)], 3.5), directions=BACKWARD,
        why="Two ranks' large shares of dK and dV cancel; rounded to bfloat16 before, they take the small ones along.")


def zigzag_cases() -> Iterator[Case]:
    """Context parallelism under the dual-chunk policies."""
    yield from attend_over("cp1", DCS, 1, packed(8, 2, 6), "R1",
        why="One rank, two steps.")
    yield from attend_over("cp2", DCS, 2, packed(8, 16), "C1 C2 P2",
        why="Gathered K and V are in rank order and must be put in buffer order; dK and dV go the other way.")
    yield from attend_over("cp2-padding", DCS, 2, DCS_2, "A5 B2 R2", poison=True,
        why="Padding inside late chunks, poisoned.")
    yield from attend_over("cp3", DCS, 3, DCS_3, "C1 C2",
        why="Mirror chunks for three ranks.")
    yield from attend_over("cp3-non-causal", DCS, 3, DCS_3, "K1 R4", causal=False,
        why="Both steps see whole documents.")
    yield from attend_over("cp4", DCS, 4, DCS_4, "C1 C2 R2", poison=True,
        why="A document of 3 tokens in 8 chunks: a step of a rank may have no query of it.")
    yield from attend_over("cp8", DCS, 8, DCS_8, "C1 C2 R2", heads=(2, 1, 4, 4), poison=True,
        why="Sixteen chunks a document; one of 2 tokens leaves most ranks without a query.")
    yield from attend_over("cp2-tail", DCS, 2, packed(8, (3, 4), rows=24), "P5 A5 B2", poison=True,
        why="The tail is dealt like one more document, poisoned.")
    yield from attend_over("cp2-zero-length", DCS, 2, packed(0, 8, (0, 4), 0, 12, 0), "L5", poison=True,
        why="Empty documents with and without rows.")
    yield from attend_over("cp2-window", DCS, 2, packed(20, 4), "K3", window=(3, 0),
        why="A window over the cuts between chunks.")
    yield from attend_over("cp2-window-longer-than-chunk", DCS, 2, packed(20, 4), "K3 K5", window=(8, 0),
        directions=FORWARD,
        why="A window longer than a chunk.")
    yield from attend_over("cp2-right-window", DCS, 2, DCS_2, "K3 R5", causal=False, window=(1, 2),
        why="The early chunk sees keys of the next one.")
    yield from attend_over("cp2-gqa-dv", DCS, 2, packed(12, 4), "A1 A2 B3", heads=(4, 2, 6, 2),
        why="Grouped heads, and values narrower than keys.")
    yield from attend_over("cp4-scale", DCS, 4, packed(8, 16), "A1", scale=0.75, directions=FORWARD,
        why="A given scale in both steps.")
    yield from attend_over("cp2-scores-low", DCS, 2, DCS_2, "A3 A4", scale=1.0, change=scores([-256], [224]),
        features=["extreme"], directions=FORWARD,
        why="Scores below every finite mark for masked ones, in both steps.")
    yield from attend_over("cp8-sum-over-ranks", DCS, 8, packed(64), "B3 N1", heads=(1, 1, 4, 4), causal=False,
        change=one_large_chunk("dout", 4, 4096, 7), directions=BACKWARD,
        why="Two steps on each of eight ranks add up in dv, the first of them 256 and all others less than 1.")
    yield from attend_over("cp2-sum-over-steps", DCS, 2, packed(64), "B3 N1", heads=(1, 1, 4, 4), causal=False,
        change=lost_beside(4096, [slice(0, 4), slice(16, 20)], [slice(32, 64)], 3.5), directions=BACKWARD,
        why="A rank's late step adds little to the much of its early one; summed in bfloat16 the little is lost.")
    yield from attend_over("cp2-causal-forces-right", DCS, 2, DCS_2, "K2", window=(-1, 3),
        why="A right bound of 3 under a causal mask: the early chunk has the next one's keys at hand and sees none.")
    yield from attend_over("cp2", PDCS, 2, packed(8, 4), "P4 C1 C2",
        why="The other zigzag, on the documents that tell them apart.")
    yield from attend_over("cp2-padding", PDCS, 2, BOTH_PADDINGS, "A5 B2", poison=True,
        why="Padding and tail, poisoned, over chunks of the buffer.")
    yield from attend_over("cp3-gqa", PDCS, 3, UNEVEN, "A2 B3 C1 C2", heads=(4, 2, 4, 4),
        why="Six chunks, grouped heads.")
    yield from attend_over("cp4-window", PDCS, 4, LONG_MIDDLE, "K3", window=(5, 0),
        why="One document over nearly all chunks, with a window.")
    yield from attend_over("cp8", PDCS, 8, packed(14, 19, 15), "C1 C2", directions=BACKWARD,
        why="Sixteen chunks of three rows.")
    yield from attend_over("cp2-right-window", PDCS, 2, UNEVEN, "K3 R5", causal=False, window=(1, 2),
        directions=FORWARD,
        why="The right bound at the ends of both chunks.")
    yield from attend_over("cp4-sum-over-steps", PDCS, 4, packed(0, 64), "B3 N1", heads=(2, 2, 4, 6), causal=False,
        change=lost_beside(4096, [slice(0, 2), slice(8, 10)], [slice(48, 64)], 3.5), directions=BACKWARD,
        why="Two of four ranks have much in their early step, which cancels over ranks, and little in the late one.")
