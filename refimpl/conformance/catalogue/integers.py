"""Questions about rows, ranks, offsets and masks, which have integers for answers."""

from collections.abc import Iterator

from refimpl.conformance.cases import Case
from refimpl.conformance.catalogue.building import (
    ALL_PADDING,
    DCS,
    DCS_2,
    DCS_3,
    DCS_4,
    DCS_8,
    LONG_MIDDLE,
    ONE_TOKEN,
    PC,
    PDCS,
    REPEATED_TAIL,
    UNEVEN,
    ZERO_LENGTH,
    from_position_ids,
    from_segment_ids,
    labels,
    mask,
    metadata,
    needed_rows,
    offsets,
    packed,
    partition,
    positions,
    step_mask,
    unpartition,
)

# fmt: off
# Two lines a case: what is asked, then why.


def positions_cases() -> Iterator[Case]:
    """Every row as (document, position)."""
    yield positions("plain", packed(5, 3, 4), "L1 L6",
        why="Positions restart in every document: torchtitan#2559 never set them.")
    yield positions("padding", packed((3, 4), (2, 6), (4, 5)), "L1 L6",
        why="Padding has no document, and positions run on through it, so they need the physical offsets alone.")
    yield positions("tail", packed((3, 4), 5, rows=16), "L4 L6",
        why="Rows past the last offset are padding and count from it: TE#3205 read offsets beyond the last there.")
    yield positions("all-padding", ALL_PADDING, "L4 L5 L6",
        why="A buffer may hold no token at all.")
    yield positions("no-documents", offsets([0], rows=6), "L4 L6",
        why="Without documents every row lies past the last offset.")
    yield positions("zero-length", ZERO_LENGTH, "L5 L6",
        why="Documents without tokens keep their number, so that later ones do not move up.")
    yield positions("repeated-tail", REPEATED_TAIL, "L5",
        why="Offsets of static shape repeat the last one, and no row belongs to a repeat.")
    yield positions("one-token", ONE_TOKEN, "L1 L6",
        why="A document of one token is a document: both its ends are the same row.")


def labels_cases() -> Iterator[Case]:
    """The next token of the same document."""
    yield labels("plain", packed(5, 3, 4),
        why="A loss knows no documents, so the last token of one would learn the first of the next (bionemo#1449).")
    yield labels("padding", packed((3, 4), (2, 6), (4, 4)),
        why="The token after the last real one is padding, not a label.")
    yield labels("tail", packed((3, 4), 5, rows=16),
        why="Past the last offset no row has a label, nor is one there a label.")
    yield labels("one-token", ONE_TOKEN,
        why="A document of one token predicts nothing.")
    yield labels("zero-length", ZERO_LENGTH,
        why="An empty document between two must not join them.")
    yield labels("repeated-tail", REPEATED_TAIL,
        why="A tail of repeated offsets changes no label.")
    yield labels("all-padding", ALL_PADDING,
        why="Padding alone has no label.")


def ids_cases() -> Iterator[Case]:
    """Ids of rows read as a layout."""
    yield from_position_ids("plain", [0, 1, 2, 0, 1, 0, 1, 2, 3],
        why="Every 0 opens a document, which goes on to the next 0.")
    yield from_position_ids("one-document", [0, 1, 2, 3, 4, 5],
        why="Ids that never restart are one document.")
    yield from_position_ids("one-token", [0, 0, 0, 1, 0],
        why="A 0 behind a 0 opens a document too: where only a fall counts, documents of one token vanish.")
    yield from_position_ids("zeros-behind", [0, 1, 2, 0, 0, 0],
        why="verl writes 0 into padding: read alone, such ids are documents of one token, which no other one sees.")
    yield from_position_ids("no-rows", [],
        why="No rows are no documents.")
    yield from_segment_ids("plain", [1, 1, 1, 2, 2, 3], 0,
        why="Every run of one id is a document.")
    yield from_segment_ids("padding", [1, 1, 0, 2, 2, 2, 0, 0], 0,
        why="0 is padding in TE-JAX: a run of it belongs to the document before, and is none of its tokens.")
    yield from_segment_ids("minus-one", [0, 0, -1, 1, 1, 1, -1], -1,
        why="Where -1 marks padding, 0 is a document like any other.")
    yield from_segment_ids("padding-first", [0, 0, 5, 5, 7], 0,
        why="Padding ahead of the first document belongs to one of no tokens, or all rows would move.")
    yield from_segment_ids("not-ascending", [7, 7, 2, 9, 9, 9, 4], 0,
        why="Ids need not ascend or follow each other: they are names.")
    yield from_segment_ids("not-ascending-padding", [8, 8, 8, 3, 0, 5, 5, 0], 0,
        why="Counted id by id and taken in ascending order, rows and padding go to other documents.")
    yield from_segment_ids("no-padding-id", [0, 0, 1, 1, 1, 2], None,
        why="Without a padding id every id is a document, 0 included.")
    yield from_segment_ids("all-padding", [0, 0, 0, 0], 0,
        why="Padding alone is the padding of one document without tokens.")


def partition_cases() -> Iterator[Case]:
    """The rows that each rank holds."""
    yield partition("cp1", PC, 1, UNEVEN, "P1 P3 P8",
        why="One rank holds the buffer as it is.")
    yield partition("cp2-two-documents", PC, 2, packed(8, 4), "P1 P3",
        why="'Contiguous' has meant halves of every document too, rows 0-3, 8, 9: critical in Megatron#3282.")
    yield partition("cp3", PC, 3, UNEVEN, "P1 P3",
        why="Three ranks: cuts that are no powers of two.")
    yield partition("cp4-spec", PC, 4, packed(5, 7), "P1 P3",
        why="The worked example of documents of 5 and 7 rows.")
    yield partition("cp8", PC, 8, LONG_MIDDLE, "P1 P3",
        why="A document over eight ranks and two beside it.")
    yield partition("odd-documents", PC, 2, packed(3, 1, 7, 5), "P1 P3 P6",
        why="Only the buffer must be divisible: no document here is, which is why the policy exists.")
    yield partition("tail", PC, 4, packed((5, 6), 3, rows=16), "P3 L4",
        why="The tail is cut like everything else, and one rank holds nothing else.")
    yield partition("zero-length", PC, 4, packed(0, 7, 0, 9, 0), "P3 L5",
        why="Documents without tokens hold no rows and shift no cut.")
    yield partition("all-padding", PC, 2, ALL_PADDING, "P1 P3",
        why="Padding is dealt like tokens.")
    yield partition("cp1", DCS, 1, packed(8, 2, 6), "P1 P2 P8",
        why="One rank holds both chunks, which are the document.")
    yield partition("cp2-two-documents", DCS, 2, packed(8, 4), "P1 P2",
        why="The worked example of documents of 8 and 4 rows.")
    yield partition("cp2-chunk-of-one", DCS, 2, packed(4, 12, 4), "P2 P8",
        why="Chunks of one row: neighbours on one rank come from two chunks.")
    yield partition("cp3", DCS, 3, DCS_3, "P1 P2",
        why="Mirror chunks for a number of ranks that is no power of two.")
    yield partition("cp4", DCS, 4, DCS_4, "P1 P2",
        why="Physical lengths are cut, not real ones: 13 of 16 rows are tokens.")
    yield partition("cp8", DCS, 8, DCS_8, "P1 P2",
        why="Sixteen chunks of every document.")
    yield partition("tail", DCS, 2, packed(8, (3, 4), rows=24), "P1 P5",
        why="Rows past the last offset are cut like one more document, so that every rank holds as many.")
    yield partition("tail-alone", DCS, 2, packed(0, 0, rows=8), "P5",
        why="Only the tail has rows.")
    yield partition("zero-length", DCS, 2, packed(0, 8, 0, 0, (0, 4), 12, 0), "P2 L5",
        why="Documents without rows in front, between and behind.")
    yield partition("all-padding", DCS, 2, ALL_PADDING, "P2",
        why="A document of padding is cut like any other.")
    yield partition("cp1", PDCS, 1, UNEVEN, "P1 P4 P8",
        why="One rank holds both halves.")
    yield partition("cp2-two-documents", PDCS, 2, packed(8, 4), "P1 P4",
        why="Both policies are called zigzag, and NeMo-RL#3380 documented this one for the other.")
    yield partition("cp3", PDCS, 3, UNEVEN, "P1 P4",
        why="Six chunks of the buffer, whatever the documents.")
    yield partition("cp4", PDCS, 4, LONG_MIDDLE, "P1 P4",
        why="A rank's two chunks may both lie in one document.")
    yield partition("cp8", PDCS, 8, packed(14, 19, 15), "P1 P4",
        why="Sixteen chunks of the buffer.")
    yield partition("tail", PDCS, 2, packed((5, 6), 3, rows=16), "P4 L4",
        why="The tail belongs to the buffer that is cut.")


def unpartition_cases() -> Iterator[Case]:
    """Shards back in buffer order."""
    yield unpartition("cp2", PC, 2, packed(8, 4),
        why="Contiguous shards put back in zigzag order gave every token another's logits (ms-swift#10071).")
    yield unpartition("cp3", PC, 3, UNEVEN,
        why="Three contiguous shards.")
    yield unpartition("cp8-tail", PC, 8, packed((9, 10), 7, rows=24),
        why="Eight shards, of which the last two hold the tail alone.")
    yield unpartition("cp1", DCS, 1, packed(2, 6, 4),
        why="One shard is the buffer.")
    yield unpartition("cp2", DCS, 2, packed(8, 4),
        why="Chunks go back document by document.")
    yield unpartition("cp3-padding", DCS, 3, DCS_3,
        why="Padding goes back to its place too.")
    yield unpartition("cp4", DCS, 4, DCS_4,
        why="Three documents of unequal length.")
    yield unpartition("cp2-tail-zero-length", DCS, 2, packed(0, 8, 0, (3, 4), 0, rows=20),
        why="The tail is one more document, empty ones are none.")
    yield unpartition("cp2", PDCS, 2, packed(8, 4),
        why="The whole buffer in zigzag, for the same documents as the other policies.")
    yield unpartition("cp3", PDCS, 3, UNEVEN,
        why="Six chunks go back to three pairs of places.")
    yield unpartition("cp4", PDCS, 4, LONG_MIDDLE,
        why="The second chunks come back in reverse.")


def metadata_cases() -> Iterator[Case]:
    """What a rank tells its kernel."""
    yield metadata("cp4-spec", PC, 4, packed(5, 7), "R1 R2 R3 R4 R6",
        why="The worked example: rank 1 holds the end of one document and the start of the next.")
    yield metadata("cp2-padding-spec", PC, 2, packed((6, 8), 4), "R2 R3 R4",
        why="The worked example with padding: rank 1 starts in the padding of a document.")
    yield metadata("cp1", PC, 1, packed((5, 6), 3, (2, 3), rows=14), "R1 R3 R4",
        why="On one rank the metadata are the offsets themselves.")
    yield metadata("cp3", PC, 3, UNEVEN, "R3 R4",
        why="Offsets divided by cp are wrong for lengths that do not divide: TE#3331 dropped real keys.")
    yield metadata("cp4-long", PC, 4, LONG_MIDDLE, "R3 R4 R6",
        why="A document over four ranks: each sees what came before, none what comes after.")
    yield metadata("cp8", PC, 8, LONG_MIDDLE, "R2 R3 R4",
        why="Ranks in the middle of a document have one fragment, those at its ends two.")
    yield metadata("cp4-tail", PC, 4, packed((5, 6), 3, rows=16), "R2 R3 L4 L10",
        why="Rows past the last offset never query, and one rank has no query at all.")
    yield metadata("cp4-padding-across", PC, 4, packed((3, 14), (5, 6), 4), "R2 R3 R4",
        why="Padding over a cut: a rank starts in it and another holds nothing else.")
    yield metadata("cp4-zero-length", PC, 4, packed(0, 7, (0, 4), 0, 8, (3, 5), 0), "R3 R4 L5",
        why="Empty documents keep an entry of every vector, first, in the middle and last.")
    yield metadata("cp2-repeated-tail", PC, 2, REPEATED_TAIL, "R3 R4 L5",
        why="Repeated offsets stay repeated, whichever rank they fall to.")
    yield metadata("cp3-one-token", PC, 3, packed(1, 1, 6, 1, 1, 4, 1), "R2 R3 R4",
        why="Documents of one token at the edges of chunks.")
    yield metadata("cp2-all-padding", PC, 2, ALL_PADDING, "R2 R4 R6",
        why="Without tokens there are no queries, no keys, and both maxima are 0.")
    yield metadata("cp4-cut-at-document", PC, 4, packed(8, 4, 4, 16), "R3 R4",
        why="A cut that falls on a document's end gives the next rank none of its keys.")
    yield metadata("cp3-non-causal", PC, 3, UNEVEN, "R4", causal=False,
        why="Without a causal mask a document shows all its keys to every rank that it has begun on.")
    yield metadata("cp3-right-window", PC, 3, UNEVEN, "R4 R5", causal=False, window=(3, 2),
        why="Keys go on behind the last local query by the right bound, and end with the document.")
    yield metadata("cp3-causal-forces-right", PC, 3, UNEVEN, "K2 R4", window=(-1, 2),
        why="Under a causal mask keys end with the last local query, whatever the window's right bound says.")
    yield metadata("cp4-window", PC, 4, LONG_MIDDLE, "R4", window=(4, 0),
        why="A causal window shortens nothing here: keys count from the document's start.")
    yield metadata("cp4-right-window-padding", PC, 4, packed((3, 14), (5, 6), 4), "R4", causal=False, window=(-1, 3),
        why="The right bound reaches over padding but never into it.")
    yield metadata("cp2-spec", DCS, 2, packed(8, 8), "R1 R3 R4",
        why="The worked example: two steps, the early chunk and the late one.")
    yield metadata("cp2-padding", DCS, 2, DCS_2, "R1 R2 R3 R4",
        why="A late chunk that holds padding has fewer queries than rows.")
    yield metadata("cp1", DCS, 1, packed(8, (3, 6)), "R1 R3 R4",
        why="One rank has two steps too.")
    yield metadata("cp3", DCS, 3, DCS_3, "R3 R4",
        why="Query offsets count from the step's own buffer, not from the rank's (TE#2829).")
    yield metadata("cp4", DCS, 4, DCS_4, "R2 R3 R4 R6",
        why="A document of 3 tokens in 8 rows: most chunks of it are padding.")
    yield metadata("cp8", DCS, 8, DCS_8, "R2 R4 R6",
        why="A document of 2 tokens in 16 chunks: all ranks but two have no query of it.")
    yield metadata("cp2-tail", DCS, 2, packed(8, (3, 4), rows=24), "R2 R3 P5",
        why="The tail is dealt but belongs to no document.")
    yield metadata("cp2-zero-length", DCS, 2, packed(0, 8, (0, 4), 0, 12, 0), "R3 R4 L5",
        why="Empty documents with and without rows of their own.")
    yield metadata("cp2-right-window", DCS, 2, DCS_2, "R4 R5", causal=False, window=(2, 1),
        why="The early chunk sees into the next one, which another rank holds.")
    yield metadata("cp2-causal-forces-right", DCS, 2, DCS_2, "K2 R4", window=(2, 5),
        why="The early chunk must not see the next one for the sake of a right bound that causality overrules.")
    yield metadata("cp2-non-causal", DCS, 2, DCS_2, "R4", causal=False,
        why="Both steps see the whole document.")
    yield metadata("cp2", PDCS, 2, packed(8, 4), "R1 R2 R3 R4",
        why="A rank's two chunks of the buffer lie in different documents.")
    yield metadata("cp3-padding", PDCS, 3, packed((5, 8), (2, 4), (9, 12)), "R2 R3 R4",
        why="Chunks start and end in padding.")
    yield metadata("cp4", PDCS, 4, LONG_MIDDLE, "R3 R4",
        why="One document over nearly all chunks.")
    yield metadata("cp3-non-causal", PDCS, 3, UNEVEN, "R4", causal=False,
        why="A document that begins behind a chunk shows it no keys, also without a causal mask.")
    yield metadata("cp2-right-window", PDCS, 2, UNEVEN, "R4", causal=False, window=(0, 3),
        why="The right bound at the end of a chunk of the buffer.")
    long = packed(100_000, 70_000, 92_144)
    for policy, whose in ((PC, "chunk of the buffer"), (DCS, "chunk of each document"), (PDCS, "pair of chunks")):
        yield metadata("large-offsets", policy, 2, long, "N3 R3 R4 R7",
            why=f"With 128 heads of 128 the element index of a row passes 2**31: a {whose} must not wrap (FA#2611).")


def needed_rows_cases() -> Iterator[Case]:
    """The rows of K and V that a rank's queries see."""
    yield needed_rows("cp4", PC, 4, LONG_MIDDLE, "R8",
        why="From the start of the document that contains the rank's first row, and no earlier.")
    yield needed_rows("cp4-padding", PC, 4, packed((3, 6), (7, 8), (8, 10)), "R8",
        why="Padding is no key: the rows needed have gaps.")
    yield needed_rows("cp4-window", PC, 4, LONG_MIDDLE, "R8 K3", window=(3, 0),
        why="A window of three before the first query, not the whole document.")
    yield needed_rows("cp3-right-window", PC, 3, UNEVEN, "R8", causal=False, window=(1, 2),
        why="Rows behind the rank's last query, up to the end of the document.")
    yield needed_rows("cp3-non-causal", PC, 3, UNEVEN, "R8", causal=False,
        why="Whole documents.")
    yield needed_rows("cp2", DCS, 2, DCS_2, "R8",
        why="Two chunks of every document, and all that came before the later one.")
    yield needed_rows("cp2-window", DCS, 2, packed(20, 4), "R8 K3", window=(2, 0),
        why="Two windows a document, which leave rows between them unseen.")
    yield needed_rows("cp2-tail", PC, 2, packed(5, (2, 3), rows=16), "R8 L4",
        why="A rank that holds the tail alone needs nothing.")
    yield needed_rows("cp2-window", PDCS, 2, UNEVEN, "R8", window=(2, 0),
        why="Chunks of the buffer with a window at each.")


def mask_cases() -> Iterator[Case]:
    """The exact set of keys of each row."""
    yield mask("causal", packed(5, 3, 4),
        why="A query sees its own document up to itself.")
    yield mask("non-causal", packed(5, 3, 4), causal=False,
        why="A query sees all of its own document, and nothing else.")
    yield mask("padding", packed((3, 5), (4, 4), (1, 3), rows=14), causal=False,
        why="Padding neither sees nor is seen, not even by itself.")
    yield mask("padding-causal", packed((3, 5), (4, 4), (1, 3), rows=14),
        why="Padding lies behind the last token, but a causal mask alone would let it look back.")
    yield mask("window", packed(7, 5), window=(2, 0),
        why="(2, 0) sees three keys; transformers#39408 passed the size of the window and saw one too many.")
    yield mask("window-zero", packed(4, 3), window=(0, 0),
        why="(0, 0) sees itself.")
    yield mask("window-longer-than-document", packed(4, 6, 3), window=(9, 0),
        why="A window longer than a document ends at its start: miles#2038 went on into the one before.")
    yield mask("window-longer-than-buffer", packed(4, 6, 3), window=(1000, 0),
        why="A bound beyond every position is no bound.")
    yield mask("causal-forces-right", packed(6, 4), window=(2, 3),
        why="A causal mask sees nothing ahead, whatever the window's right bound says.")
    yield mask("causal-forces-right-alone", packed((5, 6), 7), window=(-1, 1),
        why="A right bound alone, under a causal mask, is none.")
    yield mask("right-window", packed(7, 5), causal=False, window=(1, 2),
        why="Both bounds count, each inclusive.")
    yield mask("right-only", packed(7, 5), causal=False, window=(-1, 1),
        why="An unlimited left bound with a limited right one.")
    yield mask("left-only", packed(7, 5), causal=False, window=(2, -1),
        why="A limited left bound with an unlimited right one.")
    yield mask("zero-length", ZERO_LENGTH, causal=False,
        why="Documents that lie beside an empty one do not become one.")
    yield mask("one-token", ONE_TOKEN, causal=False,
        why="A document of one token sees itself alone.")


def step_mask_cases() -> Iterator[Case]:
    """Who sees whom in one call of a kernel, from its offsets alone."""
    yield step_mask("more-keys", packed(2), packed(5), "K4",
        why="Two queries on five keys: FlashAttention 2.0 and torch SDPA gave the first query one key (FA#951).")
    yield step_mask("more-queries", packed(5), packed(2), "K4",
        why="Five queries on two keys: the first three stand before the first key and see nothing.")
    yield step_mask("unequal-documents", packed(2, 5, 1, 3), packed(6, 3, 1, 7), "K4",
        why="Every document has its own diagonal; one for the whole call is right for the first of them.")
    yield step_mask("padding", packed((2, 3), (3, 5), (1, 1)), packed((4, 4), (3, 6), (2, 5)), "K4",
        why="Queries and keys are stored with gaps, each with their own.")
    yield step_mask("window", packed(2, 4), packed(6, 4), "K3 K4", window=(1, 0),
        why="The window hangs on the aligned position, not on the query's number.")
    yield step_mask("window-more-queries", packed(5, 2), packed(3, 6), "K3 K4", window=(2, 0),
        why="Queries before the first key have no window, those behind it a full one.")
    yield step_mask("right-of-the-keys", packed(5), packed(2), "K3 K4 K5", causal=False, window=(-1, 2),
        why="A right bound as long as the keys is no unlimited one: the first query stands three before the first key.")
    yield step_mask("right-of-all-keys", packed((7, 9), 3, (4, 4)), packed((2, 4), (3, 3), (1, 2)), "K3 K4 K5",
        causal=False, window=(1, 4),
        why="A right bound beyond the keys of every document: with padding, and a left bound that stays as it is.")
    yield step_mask("right-beyond-one", packed(6, 2), packed(3, 8), "K3 K4 K5", causal=False, window=(4, 4),
        why="Bounds longer than one document's keys and shorter than the other's.")
    yield step_mask("non-causal", packed(2, 3), packed(5, 1), "K4", causal=False,
        why="Without a bound alignment does not matter: all see all of their document.")
    yield step_mask("without-queries-or-keys", packed(0, 3, 2, 0, 1), packed(4, 0, 3, 0, 2), "K4 L5",
        why="Documents that have only keys, only queries, or neither, as a rank in the middle of a buffer is told.")
