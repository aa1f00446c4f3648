"""How a case is built from a layout and a few options.

Defines the layouts that many cases share, and one builder for each kind of question.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.conformance.cases import FEATURES, Case
from refimpl.conformance.strides import all_with_strides

Array = NDArray[Any]
Inputs = dict[str, Any]
Tensors = dict[str, Array]
Heads = tuple[int, int, int, int]
"""Query heads, K/V heads, Dqk, Dv."""

DCS, PC, PDCS = POLICIES = "dual_chunk_swap", "packed_contiguous", "packed_dual_chunk_swap"
NO_WINDOW = (-1, -1)
FORWARD, BACKWARD = ("forward",), ("backward",)


def packed(*documents: int | tuple[int, int], rows: int | None = None) -> Inputs:
    """The layout of documents given as a length, or as (real, physical) length, in a buffer of `rows`."""
    lengths = [document if isinstance(document, tuple) else (document, document) for document in documents]
    real, physical = ([0, *np.cumsum(column, dtype=int).tolist()] for column in zip(*lengths, strict=True))
    return offsets(real, physical, rows)


def offsets(real: Any, physical: Any = None, rows: Any = None) -> Inputs:
    """A layout from its offsets, good or bad; `rows` is by default the last of the physical ones."""
    physical = real if physical is None else physical
    return {"cu_seqlens": real, "cu_seqlens_padded": physical, "total_tokens": physical[-1] if rows is None else rows}


UNEVEN = packed(5, 7, 1, 11)  # 24 rows: every policy that cuts the buffer takes them over 1, 2, 3 and 4 ranks
LONG_MIDDLE = packed(3, 26, 3)  # 32 rows: the long document lies on every one of 4 or 8 ranks
BOTH_PADDINGS = packed((5, 8), (2, 4), (9, 12), rows=32)
DCS_2 = packed((5, 8), (3, 4), (12, 12))  # for dual_chunk_swap: 24 rows, physical lengths divisible by 4,
DCS_3 = packed((11, 12), (5, 6), (6, 6))  # 24 rows, by 6,
DCS_4 = packed((13, 16), (3, 8), (8, 8))  # 32 rows, by 8,
DCS_8 = packed((21, 32), (16, 16), (2, 16))  # and 64 rows, by 16
ZERO_LENGTH = packed(0, 7, (0, 4), 0, 8, (3, 5), 0)  # 24 rows: first, middle and last, with rows of its own or none
REPEATED_TAIL = packed(5, 9, 2, 0, 0, 0, 0)  # 16 rows
ONE_TOKEN = packed(1, 1, 6, 1, 3, 1, 1, 1, 1)  # 16 rows
ALL_PADDING = packed((0, 4), (0, 8), rows=16)


def draw(seed: str, shape: Sequence[int], numerators: range = range(-32, 32)) -> Array:
    """Numbers `numerator / 16`, drawn evenly: float32."""
    random = Random(seed)
    values = [numerators[int(random.random() * len(numerators))] / 16 for _ in range(int(np.prod(shape)))]
    return np.array(values, np.float32).reshape(shape)


def features_of(inputs: Inputs, tensors: Tensors) -> set[str]:
    """What a case exercises, as far as its inputs show it: keys of FEATURES."""
    found: dict[str, bool] = {}
    if "policy" in inputs:
        found |= {inputs["policy"]: True} | {f"cp{size}": inputs["cp_size"] == size for size in (1, 3, 8)}
    if "causal" in inputs:
        left, right = inputs["window"]
        found["non_causal"] = not inputs["causal"]
        found["window"] = inputs["causal"] and left >= 0
        found["right_window"] = not inputs["causal"] and max(left, right) >= 0
    if "cu_seqlens" in inputs:
        real, physical = (np.diff(inputs[name]).tolist() for name in ("cu_seqlens", "cu_seqlens_padded"))
        found["padding"] = real != physical
        found["tail_padding"] = inputs["total_tokens"] != inputs["cu_seqlens_padded"][-1]
        found["zero_length"] = 0 in real
        found["large_offsets"] = inputs["total_tokens"] > 2**16
    if "cu_seqlens_q" in inputs:
        found["padding"] = any(inputs[f"cu_seqlens_{x}"] != inputs[f"cu_seqlens_{x}_padded"] for x in ("q", "kv"))
    if "q" in tensors:
        (_, heads, dim), (_, kv_heads, dim_v) = tensors["q"].shape, tensors["v"].shape
        found["gqa"] = 1 < kv_heads < heads
        found["mqa"] = 1 == kv_heads < heads
        found["dv"] = dim != dim_v
        found["scale"] = inputs["softmax_scale"] is not None
        found["strides"] = "strides" in inputs
    return {feature for feature, present in found.items() if present}


def make(
    name: str,
    operation: str,
    why: str,
    clauses: str,
    inputs: Inputs,
    features: Iterable[str],
    tensors: Tensors | None = None,
) -> Case:
    """A case with these features and those that its inputs show; clauses by spaces."""
    has = {*features, *features_of(inputs, tensors or {})}
    known = tuple(feature for feature in FEATURES if feature in has)
    return Case(name, operation, why, tuple(dict.fromkeys(clauses.split())), known, inputs, tensors or {})


def positions(name: str, layout: Inputs, clauses: str, *, why: str) -> Case:
    """Positions and document ids."""
    return make(f"positions-{name}", "positions", why, clauses, layout, ["positions"])


def labels(name: str, layout: Inputs, *, why: str) -> Case:
    """Labels of token ids that are all different, in padding too."""
    ids = [100 + 7 * row for row in range(layout["total_tokens"])]
    return make(f"labels-{name}", "labels", why, "L7 P10", {**layout, "ids": ids}, ["labels"])


def from_position_ids(name: str, ids: list[int], *, why: str) -> Case:
    """The documents that position ids tell."""
    return make(f"from-position-ids-{name}", "from_position_ids", why, "L8", {"ids": ids}, ["from_position_ids"])


def from_segment_ids(name: str, ids: list[int], padding_id: int | None, *, why: str) -> Case:
    """The documents and the padding that segment ids tell."""
    features = ["from_segment_ids", *(["padding"] if padding_id in ids else [])]
    inputs = {"ids": ids, "padding_id": padding_id}
    return make(f"from-segment-ids-{name}", "from_segment_ids", why, "L9", inputs, features)


def partition(name: str, policy: str, cp_size: int, layout: Inputs, clauses: str, *, why: str) -> Case:
    """The rows of every rank."""
    inputs = {**layout, "policy": policy, "cp_size": cp_size}
    return make(f"partition-{_dashed(policy)}-{name}", "partition", why, clauses, inputs, ["partition"])


def unpartition(name: str, policy: str, cp_size: int, layout: Inputs, *, why: str) -> Case:
    """Shards to be put back; the numbers say from which rank and local row they come."""
    inputs = {**layout, "policy": policy, "cp_size": cp_size}
    rows = np.arange(layout["total_tokens"] // cp_size)
    shards = {
        f"x.{r}": np.stack([np.full(len(rows), r), rows, rows * cp_size + r], axis=1).astype(np.float32)
        for r in range(cp_size)
    }
    name = f"unpartition-{_dashed(policy)}-{name}"
    return make(name, "unpartition", why, "P7", inputs, ["unpartition"], shards)


def _offsets_of_ranks(operation: str) -> Callable[..., Case]:
    """A builder for an operation on integers that has a policy and a mask."""

    def build(
        name: str,
        policy: str,
        cp_size: int,
        layout: Inputs,
        clauses: str,
        *,
        causal: bool = True,
        window: tuple[int, int] = NO_WINDOW,
        why: str,
    ) -> Case:
        inputs = {**layout, "policy": policy, "cp_size": cp_size, "causal": causal, "window": list(window)}
        name = f"{_dashed(operation)}-{_dashed(policy)}-{name}"
        return make(name, operation, why, clauses, inputs, [operation])

    return build


metadata = _offsets_of_ranks("metadata")
needed_rows = _offsets_of_ranks("needed_rows")


def mask(name: str, layout: Inputs, *, causal: bool = True, window: tuple[int, int] = NO_WINDOW, why: str) -> Case:
    """Who sees whom."""
    inputs = {**layout, "causal": causal, "window": list(window)}
    return make(f"mask-{name}", "mask", why, "K1 K2 K3" if causal else "K1 K3", inputs, ["mask"])


def step_mask(
    name: str,
    queries: Inputs,
    keys: Inputs,
    clauses: str,
    *,
    causal: bool = True,
    window: tuple[int, int] = NO_WINDOW,
    why: str,
) -> Case:
    """Who sees whom in one attention step, whose queries and keys are stored as these layouts say."""
    inputs = {**step_offsets(queries, keys), "causal": causal, "window": list(window)}
    return make(f"step-mask-{name}", "step_mask", why, clauses, inputs, ["step_mask"])


def step_offsets(queries: Inputs, keys: Inputs) -> Inputs:
    """The offsets of one attention step, whose queries and keys are stored as these layouts say."""
    return {
        "cu_seqlens_q": queries["cu_seqlens"],
        "cu_seqlens_kv": keys["cu_seqlens"],
        "cu_seqlens_q_padded": queries["cu_seqlens_padded"],
        "cu_seqlens_kv_padded": keys["cu_seqlens_padded"],
    }


def attend_step(
    name: str,
    queries: Inputs,
    keys: Inputs,
    clauses: str,
    *,
    heads: Heads = (2, 2, 4, 4),
    causal: bool = True,
    window: tuple[int, int] = NO_WINDOW,
    scale: float | None = None,
    poison: bool = False,
    strides: Mapping[str, Sequence[int]] | None = None,
    change: Callable[[Tensors], None] = lambda tensors: None,
    features: Iterable[str] = (),
    why: str,
) -> Iterator[Case]:
    """Forward and backward of one step, whose queries and keys are stored as these layouts say; options of `attend`."""
    q_heads, kv_heads, dim, dim_v = heads
    stored = {"q": (queries, q_heads, dim), "k": (keys, kv_heads, dim)}
    stored |= {"v": (keys, kv_heads, dim_v), "dout": (queries, q_heads, dim_v)}
    inputs = {**step_offsets(queries, keys), "causal": causal, "window": list(window), "softmax_scale": scale}
    has = ["step_attention", *(["poison"] if poison else []), *features]
    for backward in (False, True):
        tensors: Tensors = {}
        for x, (layout, *shape) in stored.items():
            tensors[x] = draw(f"step attention {name} {x}", (layout["total_tokens"], *shape))
            if poison:
                poison_padding(tensors[x], layout)
        change(tensors)
        if not backward:
            del tensors["dout"]
        own = {x: list(given) for x, given in (strides or {}).items() if x in tensors}
        yield make(
            f"step-attention-{'backward' if backward else 'forward'}-{name}",
            f"step_attention_{'backward' if backward else 'forward'}",
            why,
            f"{clauses} {'B1' if backward else 'A3'}",
            {**inputs, "strides": own} if own else inputs,
            [*has, "backward"] if backward else has,
            all_with_strides(tensors, own),
        )


def merge(
    name: str, lses: Callable[[str], Sequence[Array]], *, clauses: str = "A7", features: Iterable[str] = (), why: str
) -> Case:
    """Parts whose lse [H, T] are those that `lses` makes of the case's name; an out without keys holds NaN."""
    name = f"merge-{name}"
    tensors: Tensors = {}
    for p, lse in enumerate(lses(name)):
        out = draw(f"{name} out.{p}", (lse.shape[1], lse.shape[0], 4))
        out[np.isneginf(lse).T] = np.nan
        tensors |= {f"out.{p}": out, f"lse.{p}": lse}
    return make(name, "merge", why, clauses, {}, ["merge", *features], tensors)


def attend(
    name: str,
    layout: Inputs,
    clauses: str,
    *,
    heads: Heads = (2, 2, 4, 4),
    causal: bool = True,
    window: tuple[int, int] = NO_WINDOW,
    scale: float | None = None,
    poison: bool = False,
    strides: Mapping[str, Sequence[int]] | None = None,
    change: Callable[[Tensors], None] = lambda tensors: None,
    features: Iterable[str] = (),
    directions: Sequence[str] = FORWARD + BACKWARD,
    why: str,
    over: tuple[str, int] | None = None,
) -> Iterator[Case]:
    """Forward and backward of one question; `over` ranks if it names a policy and their number.

    Args:
        poison: NaN and infinity in all padding rows.
        strides: how tensors lie in memory, see `strides`.
        change: edits the tensors, once they are drawn.
    """
    total, (q_heads, kv_heads, dim, dim_v) = layout["total_tokens"], heads
    shapes = {"q": (q_heads, dim), "k": (kv_heads, dim), "v": (kv_heads, dim_v), "dout": (q_heads, dim_v)}
    inputs = {**layout, "causal": causal, "window": list(window), "softmax_scale": scale}
    family, prefix = "attention", "attention"
    if over is not None:
        family, prefix = "context_parallel", "cp"
        inputs |= {"policy": over[0], "cp_size": over[1]}
        name = f"{_dashed(over[0])}-{name}"
    for direction in directions:
        backward = direction == "backward"
        tensors = {x: draw(f"{family} {name} {x}", (total, *shape)) for x, shape in shapes.items()}
        if poison:
            for x in tensors.values():
                poison_padding(x, layout)
        change(tensors)
        if not backward:
            del tensors["dout"]
        own = {x: list(given) for x, given in (strides or {}).items() if x in tensors}
        yield make(
            f"{prefix}-{direction}-{name}",
            f"{family}_{direction}",
            why,
            f"{clauses} {'B1' if backward else 'A3'}{'' if over is None else ' C5'}",
            {**inputs, "strides": own} if own else inputs,
            [family, *(["backward"] if backward else []), *(["poison"] if poison else []), *features],
            all_with_strides(tensors, own),
        )


def attend_over(
    name: str, policy: str, cp_size: int, layout: Inputs, clauses: str, *, why: str, **options: Any
) -> Iterator[Case]:
    """`attend` over the ranks of a policy."""
    return attend(name, layout, clauses, why=why, over=(policy, cp_size), **options)


def poison_padding(x: Array, layout: Inputs) -> None:
    """Write NaN and both infinities over the padding rows of x."""
    real, physical = layout["cu_seqlens"], layout["cu_seqlens_padded"]
    is_padding = np.ones(len(x), bool)
    for d in range(len(physical) - 1):
        is_padding[physical[d] : physical[d] + real[d + 1] - real[d]] = False
    bad = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), x[is_padding].size)
    x[is_padding] = bad.reshape(x[is_padding].shape)


def scores(q: Sequence[float], k: Sequence[float]) -> Callable[[Tensors], None]:
    """Change q and k so that a score is the product of one number of `q` and one of `k`, times the scale.

    Rows and heads take the numbers in turn. Such scores are exact in every float, however large.
    """

    def change(tensors: Tensors) -> None:
        for name, factors in (("q", q), ("k", k)):
            x = tensors[name]
            x[...] = 0
            x[..., 0] = np.resize(np.array(factors, np.float32), x.shape[:2])

    return change


def one_large_chunk(name: str, rows: int, value: float, others: float) -> Callable[[Tensors], None]:
    """Change q to 0, so that all weights are equal, and v (or dout) so that the first rows outweigh all others.

    In a buffer of 64 rows the first ones add `rows * value / 64` to out (or dv), and every later chunk of as many less
    than half a step of bfloat16: added one by one to a bfloat16 sum, it is lost, and all of it together is not.
    """

    def change(tensors: Tensors) -> None:
        tensors["q"][...] = 0
        tensors[name][...] = others
        tensors[name][:rows] = value

    return change


def lost_beside(
    large: float, chunks: Sequence[slice], small: Sequence[slice], value: float
) -> Callable[[Tensors], None]:
    """Change k to 0, so that all weights are equal, and dout so that what is large cancels and what is small is left.

    The rows of `chunks` have `large` and its negative in turn, those of `small` have `value`, others 0. If one of each
    meet in a bfloat16 sum, the small one is lost there, and once the large ones are gone nothing is right.
    """

    def change(tensors: Tensors) -> None:
        tensors["q"][...] = 1
        tensors["k"][...] = 0
        tensors["dout"][...] = 0
        for rows in small:
            tensors["dout"][rows] = value
        for sign, rows in zip((1, -1) * len(chunks), chunks, strict=False):
            tensors["dout"][rows] = sign * large

    return change


def one_large_head(tensors: Tensors) -> None:
    """The same, with the first query head for the first rows."""
    tensors["q"][...] = 0
    tensors["dout"][...] = 15 / 16
    tensors["dout"][:, 0] = 256


def dout_of_a_sum(tensors: Tensors) -> None:
    """Change dout to one number everywhere, padding included: the gradient of a sum."""
    tensors["dout"][...] = 1.25


def dout_of_rows(tensors: Tensors) -> None:
    """Change dout to one number a row."""
    tensors["dout"][...] = tensors["dout"][:, :1, :1].copy()


def refuse(name: str, layout: Inputs, clauses: str, call: str = "layout", *, why: str, **arguments: Any) -> Case:
    """A request that everyone refuses; the name opens with the code."""
    inputs = {**layout, "call": call}
    if call != "layout":
        inputs |= {"policy": PC, "cp_size": 2, "cp_rank": 0} | arguments
    if call == "metadata":
        inputs = {"causal": True, "window": list(NO_WINDOW)} | inputs
    has = {"refuse", call, inputs.get("policy"), "large_offsets" if layout["total_tokens"] > 2**16 else ""}
    features = tuple(feature for feature in FEATURES if feature in has)
    return Case(f"refuse-{name}", "refuse", why, tuple(clauses.split()), features, inputs)


def refuse_ids(name: str, clauses: str, ids: list[int], *, why: str, **padding: int | None) -> Case:
    """Ids that are no layout: segment ids if `padding_id` is given, else position ids."""
    call = "from_segment_ids" if padding else "from_position_ids"
    inputs = {"call": call, "ids": ids, **padding}
    return make(f"refuse-{name}", "refuse", why, clauses, inputs, ["refuse", call])


def refuse_tensors(
    name: str, *shapes: Sequence[int], dtypes: Sequence[str] = ("float32",) * 3, why: str, rows: int = 8
) -> Case:
    """q, k and v of these shapes and dtypes, on a good layout of two documents."""
    inputs = {**packed(rows - 3, 3), "call": "attention", "causal": True, "window": list(NO_WINDOW)}
    inputs |= {"softmax_scale": None, "shapes": dict(zip("qkv", map(list, shapes), strict=True))}
    inputs |= {"dtypes": dict(zip("qkv", dtypes, strict=True))}
    return make(f"refuse-{name}", "refuse", why, "A8", inputs, ["refuse", "attention"])


def _dashed(name: str) -> str:
    return name.replace("_", "-")
