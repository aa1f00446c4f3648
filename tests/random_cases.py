"""Cases on random layouts, every operation on each: what a diagnosis has to go on when no vector was seen before."""

import numpy as np

from refimpl.conformance import yardstick
from refimpl.conformance.cases import Case, Expected
from refimpl.conformance.implementation import answer
from refimpl.errors import SpecError
from refimpl.partition import Policy

HEADS = [(2, 2, 4, 4), (4, 2, 4, 4), (4, 2, 3, 5), (6, 2, 4, 3), (3, 1, 5, 4), (6, 3, 4, 6)]
"""Query heads, K/V heads, Dqk, Dv."""

STEP = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def expected_of(case, dtypes=("float64",)):
    """The reference's answer, with bounds by the kit's own rule for low precisions."""
    try:
        arrays = answer(case)
    except SpecError as error:
        return Expected({}, error.code)
    if dtypes == ("float64",):
        largest = {}
        for name, x in arrays.items():
            if x.dtype.kind == "f":
                finite = np.abs(x[np.isfinite(x)]).max(initial=0)
                largest[name.split(".")[0]] = max(1.0, finite, largest.get(name.split(".")[0], 0.0))
        exact = case.operation == "unpartition"
        return Expected(arrays, None, {"float64": {name: 0.0 if exact else 1e-12 * m for name, m in largest.items()}})
    return Expected(arrays, None, yardstick.bounds(case, arrays))


class Layouts:
    """Random layouts and what is asked about them, from one seed."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.seed = seed
        self.count = 0

    def pick(self, values):
        return values[int(self.rng.integers(len(values)))]

    def chance(self, p):
        return bool(self.rng.random() < p)

    def tensor(self, *shape):
        """Multiples of 1/16 in [-2, 2): exact in every float."""
        return (self.rng.integers(-32, 32, shape) / 16).astype(np.float32)

    def layout(self, policy, cp_size):
        """2 to 5 documents of unequal lengths, some without tokens, with padding or without, in at most 48 rows."""
        chunks = cp_size * (1 if policy == "packed_contiguous" else 2)
        padding = self.pick(["none", "all", "all", "last"])
        while True:
            real = [
                0 if self.chance(0.25) else int(self.rng.integers(1, 15)) for _ in range(int(self.rng.integers(2, 7)))
            ]
            gaps = [self.pick([0, 0, 1, 3]) if padding == "all" else 0 for _ in real]
            gaps[-1] += 2 if padding == "last" else 0
            physical = [a + b for a, b in zip(real, gaps, strict=True)]
            if policy == "dual_chunk_swap":
                physical = [-(-x // chunks) * chunks for x in physical]
            rows = sum(physical) + (self.pick([1, 2, 5]) if self.chance(0.4) else 0)
            rows = (
                sum(physical) + -(-(rows - sum(physical)) // chunks) * chunks if policy == "dual_chunk_swap" else rows
            )
            rows = -(-rows // chunks) * chunks
            if rows <= 48 and sum(x > 1 for x in real) >= 2 and len(set(real)) > 1:
                return {
                    "cu_seqlens": np.cumsum([0, *real]).tolist(),
                    "cu_seqlens_padded": np.cumsum([0, *physical]).tolist(),
                    "total_tokens": int(rows),
                }

    def case(self, operation, inputs, tensors=None, features=()):
        self.count += 1
        return Case(
            f"{operation}-{self.seed}-{self.count}", operation, "", (), (operation, *features), inputs, tensors or {}
        )

    def attention(self, layout, heads, poison):
        total, (q_heads, kv_heads, dim, dim_v) = layout["total_tokens"], heads
        shapes = {"q": (q_heads, dim), "k": (kv_heads, dim), "v": (kv_heads, dim_v), "dout": (q_heads, dim_v)}
        tensors = {name: self.tensor(total, *shape) for name, shape in shapes.items()}
        if poison:
            probe = Case("", "positions", "", (), (), layout)
            for x in tensors.values():
                x[probe.layout.document_ids < 0] = self.pick([np.nan, np.inf, -np.inf])
        return tensors

    def mask(self, kind):
        if kind == "window":
            return {"causal": True, "window": [self.pick([0, 1, 2, 3, 5, 9]), self.pick([-1, 0, 2])]}
        if kind == "right_window":
            return {"causal": False, "window": [self.pick([-1, 0, 1, 3]), self.pick([1, 2, 4])]}
        if kind == "non_causal":
            return {"causal": False, "window": [-1, -1]}
        return {"causal": True, "window": [-1, self.pick([-1, 0, 2])]}

    def battery(self, policy=None, dtypes=("float64",)):
        """(case, expected) of every operation on one random layout, and of requests to refuse that are like it."""
        policy = policy or [str(p) for p in Policy][self.seed // 3 % 3]
        cp_size = self.pick([2, 3, 4])
        layout = self.layout(policy, cp_size)
        ranks = {**layout, "policy": policy, "cp_size": cp_size}
        total = layout["total_tokens"]
        cases = [
            self.case("positions", layout),
            self.case("labels", {**layout, "ids": self.rng.permutation(total * 3)[:total].tolist()}),
            self.case("partition", ranks),
            self.case("unpartition", ranks, {f"x.{r}": self.tensor(total // cp_size, 3) for r in range(cp_size)}),
            self.merge(),
            self.step_mask(),
            self.large_offsets(),
        ]
        for kind in ("causal", ("window", "non_causal", "right_window")[self.seed % 3]):
            mask = self.mask(kind)
            heads = self.pick(HEADS) if kind == "causal" else HEADS[self.seed % len(HEADS)]
            tensors = self.attention(layout, heads, poison=self.chance(0.5))
            scale = {"softmax_scale": self.pick([None, None, 0.75])}
            forward = {name: x for name, x in tensors.items() if name != "dout"}
            cases += [self.case(operation, ranks | mask) for operation in ("metadata", "needed_rows")]
            cases.append(self.case("mask", layout | mask))
            for family, inputs in (("attention", layout), ("context_parallel", ranks)):
                cases.append(self.case(f"{family}_forward", inputs | mask | scale, forward))
                cases.append(self.case(f"{family}_backward", inputs | mask | scale, tensors))
        cases.append(self.extreme(ranks))
        cases += self.refusals(layout, cp_size)
        cases += self.step_attention()
        cases += self.ids()
        cases += self.tensors_to_refuse()
        return [(case, expected_of(case, dtypes)) for case in cases]

    def merge(self):
        """Two to four parts, with rows that some or all of them saw nothing of."""
        parts = int(self.rng.integers(2, 5))
        base = self.pick([0.0, 0.0, 4096.0])
        lses = [self.tensor(2, 6) * 2 + np.float32(base) for _ in range(parts)]
        for p, row in enumerate(self.rng.permutation(6)[:2]):
            for lse in lses if p == 0 else lses[:1]:
                lse[:, row] = -np.inf
        tensors = {}
        for p, lse in enumerate(lses):
            out = self.tensor(6, 2, 3)
            out[np.isneginf(lse).T] = np.nan
            tensors |= {f"out.{p}": out, f"lse.{p}": lse}
        return self.case("merge", {}, tensors)

    def ids(self):
        """Position and segment ids, and some that tell no layout."""
        lengths = [1, 1, *(int(n) for n in self.rng.integers(1, 6, 3))]
        positions = [i for n in lengths for i in range(n)]
        padding = self.pick([0, -1])
        names = [int(name) for name in self.rng.permutation([x for x in range(5) if x != padding])]
        segments = [padding] * int(self.rng.integers(1, 3)) if self.chance(0.5) else []
        for name in names:
            segments += [name] * int(self.rng.integers(1, 5)) + [padding] * int(self.rng.integers(0, 3))
        segments += [padding]
        refused = [
            {"call": "from_position_ids", "ids": [7, 8, *positions]},
            {"call": "from_position_ids", "ids": [*positions, positions[-1] + 2]},
            {"call": "from_segment_ids", "ids": [*segments, names[0]], "padding_id": padding},
        ]
        return [
            self.case("from_position_ids", {"ids": positions}),
            self.case("from_segment_ids", {"ids": segments, "padding_id": padding}),
            *(self.case("refuse", inputs) for inputs in refused),
        ]

    def tensors_to_refuse(self):
        """One request for each kind of tensors that attention refuses."""
        rows = int(self.rng.integers(4, 9))
        layout = {"cu_seqlens": [0, 3, rows], "cu_seqlens_padded": [0, 3, rows], "total_tokens": rows}
        inputs = layout | {"call": "attention", "causal": True, "window": [-1, -1], "softmax_scale": None}
        given = [
            ([[rows, 4, 4], [rows, 3, 4], [rows, 3, 4]], "float32"),
            ([[rows + 1, 2, 4]] * 3, "float32"),
            ([[rows, 2, 4]] * 3, "int32"),
        ]
        told = [{"shapes": dict(zip("qkv", x, strict=True)), "dtypes": dict.fromkeys("qkv", y)} for x, y in given]
        return [self.case("refuse", inputs | tensors) for tensors in told]

    def step_attention(self):
        """One step on which some documents have more queries than keys, forward and backward."""
        lengths = [self.rng.integers(1, 8, 3) for _ in range(2)]
        lengths[0][0], lengths[1][0] = lengths[1][0] + 2, lengths[0][0]
        stored = [x + self.rng.integers(0, 3, 3) for x in lengths]
        offsets = [np.cumsum([0, *x]).tolist() for x in (*lengths, *stored)]
        inputs = dict(zip(STEP, offsets, strict=True)) | self.mask(self.pick(["causal", "window"]))
        heads, kv_heads, dim, dim_v = self.pick(HEADS)
        rows_q, rows_k = offsets[2][-1], offsets[3][-1]
        tensors = {"q": self.tensor(rows_q, heads, dim), "k": self.tensor(rows_k, kv_heads, dim)}
        tensors |= {"v": self.tensor(rows_k, kv_heads, dim_v), "dout": self.tensor(rows_q, heads, dim_v)}
        forward = {name: x for name, x in tensors.items() if name != "dout"}
        inputs["softmax_scale"] = None
        return [
            self.case("step_attention_forward", inputs, forward),
            self.case("step_attention_backward", inputs, tensors),
        ]

    def step_mask(self):
        """Documents with more queries than keys and the reverse."""
        queries, keys = self.rng.integers(0, 12, 3), self.rng.integers(0, 8, 3)
        stored_q, stored_k = (np.asarray(x) + self.rng.integers(0, 3, 3) for x in (queries, keys))
        offsets = [np.cumsum([0, *x]).tolist() for x in (queries, keys, stored_q, stored_k)]
        mask = {"causal": False, "window": [-1, int(keys.max())]} if self.chance(0.5) else self.mask("window")
        return self.case("step_mask", dict(zip(STEP, offsets, strict=True)) | mask)

    def large_offsets(self):
        """Offsets whose element index passes 2**31."""
        first = int(self.rng.integers(60_000, 120_000))
        layout = {"cu_seqlens": [0, first, 140_000, 160_000], "cu_seqlens_padded": [0, first, 140_000, 160_000]}
        inputs = layout | {"total_tokens": 160_000, "policy": "packed_contiguous", "cp_size": 2}
        return self.case("metadata", inputs | {"causal": True, "window": [-1, -1]}, features=["large_offsets"])

    def extreme(self, ranks):
        """Scores far beyond the range of exp, on one side or the other."""
        tensors = self.attention(ranks, (2, 2, 4, 4), poison=False)
        del tensors["dout"]
        tensors["q"][...] = tensors["k"][...] = 0
        tensors["q"][..., 0] = self.pick([32, -256])
        tensors["k"][..., 0] = self.rng.integers(224, 232, tensors["k"].shape[:2])
        inputs = ranks | {"causal": True, "window": [-1, -1], "softmax_scale": 1.0}
        return self.case("context_parallel_forward", inputs, tensors, ["extreme"])

    def refusals(self, layout, cp_size):
        """One request to refuse for each code that a mutant gets wrong."""
        cu, padded, total = (layout[name] for name in ("cu_seqlens", "cu_seqlens_padded", "total_tokens"))
        cut = {"policy": "packed_contiguous", "cp_size": cp_size, "cp_rank": 0, "causal": True, "window": [-1, -1]}
        no_padding = {"cu_seqlens": padded, "cu_seqlens_padded": padded, "total_tokens": total}
        odd = total + 1 + (cp_size == 1)
        wanted = [
            {**no_padding, "total_tokens": odd, "call": "metadata", **cut, "cp_size": total},
            {
                **layout,
                "cu_seqlens": [*cu[:-1], cu[-1], -1],
                "cu_seqlens_padded": [*padded, padded[-1]],
                "call": "layout",
            },
            {**no_padding, "cu_seqlens": [x + 2 for x in padded], "cu_seqlens_padded": [x + 2 for x in padded]}
            | {"total_tokens": total + 2, "call": "layout"},
            {**layout, "cu_seqlens": [0.0, *cu[1:]], "call": "layout"},
            {**layout, "cu_seqlens": [0, padded[1] + 1, *[x + padded[-1] for x in padded[2:]]], "call": "layout"},
            {**layout, "total_tokens": padded[-1] - 1, "call": "layout"},
            {**layout, "call": "partition", **cut, "policy": "contiguous"},
            {**layout, "call": "partition", **cut, "cp_rank": -1},
            {**layout, "call": "metadata", **cut, "window": [-2, 0]},
            {"cu_seqlens": [0, 5, 2**31], "cu_seqlens_padded": [0, 5, 2**31], "total_tokens": 2**31}
            | {"call": "metadata", **cut, "cp_size": 2**21},
        ]
        return [self.case("refuse", inputs) for inputs in wanted]
