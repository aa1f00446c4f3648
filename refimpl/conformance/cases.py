"""What a conformance case is: a question with exactly one right answer.

Defines `Case`, `Expected`, `Vector`, the operations and what each must answer, and the features that an implementation
may declare to lack.

An answer is a set of named arrays. Names are those of the table; a part for one rank ends in `.RANK`, a part for one
attention step of it in `.RANK.STEP`, both counted from 0.

    operation                 inputs beside the layout                  answer
    positions                                                           positions, document_ids  int [T]
    labels                    ids [T]                                   labels  int [T]
    from_position_ids         ids [T] (no layout)                       cu_seqlens, cu_seqlens_padded  int [n + 1];
                                                                        total_tokens  int
    from_segment_ids          ids [T], padding_id (no layout)           the same
    partition                 policy, cp_size                           indices.R  int [T/cp]
    unpartition               policy, cp_size, x.R                      x [T, ...]
    metadata                  policy, cp_size, mask                     cu_seqlens_q.R.S, cu_seqlens_q_padded.R.S,
                                                                        cu_seqlens_kv.R.S, cu_seqlens_kv_padded.R.S
                                                                        [n + 1]; max_seqlen_q.R.S, max_seqlen_kv.R.S
    needed_rows               policy, cp_size, mask                     kv_rows.R  int: rows of K/V that the rank reads
    mask                      mask                                      visible  bool [T, T], query by key
    step_mask                 mask, offsets of one step (no layout)     visible  bool [Tq, Tk]
    step_attention_forward    the same, and q, k, v                     out [Tq, Hq, Dv], lse [Hq, Tq]
    step_attention_backward   the same, and q, k, v, dout               dq, dk, dv
    merge                     out.P, lse.P for parts P (no layout)      out, lse
    attention_forward         mask, q, k, v                             out [T, Hq, Dv], lse [Hq, T]
    attention_backward        mask, q, k, v, dout                       dq, dk, dv
    context_parallel_forward  policy, cp_size, mask, q, k, v            out.R, lse.R
    context_parallel_backward policy, cp_size, mask, q, k, v, dout      dq.R, dk.R, dv.R
    refuse                    `call` and its arguments                  no arrays: the error's code

The offsets of a step are cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded and cu_seqlens_kv_padded; Tq and Tk are the
last of the padded ones.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.metadata import StepMetadata
from refimpl.partition import Policy

Array = NDArray[Any]

OF_KEYS = ("k", "v", "dk", "dv")
"""Tensors and outputs whose rows are those of keys; all others have a row for each query."""

OPERATIONS = (
    "positions",
    "labels",
    "from_position_ids",
    "from_segment_ids",
    "partition",
    "unpartition",
    "metadata",
    "needed_rows",
    "mask",
    "step_mask",
    "step_attention_forward",
    "step_attention_backward",
    "merge",
    "attention_forward",
    "attention_backward",
    "context_parallel_forward",
    "context_parallel_backward",
    "refuse",
)
PER_RANK = ("partition", "metadata", "needed_rows", "context_parallel_forward", "context_parallel_backward")
"""Operations whose answer has a part for every rank, which that rank of a real group can give by itself."""

FEATURES = {
    "positions": "position and document ids",
    "labels": "next-token labels",
    "from_position_ids": "offsets from position ids",
    "from_segment_ids": "offsets from segment ids",
    "partition": "the row indices of each rank",
    "unpartition": "putting shards back into sequence order",
    "metadata": "offsets for kernels",
    "needed_rows": "the K/V rows that a rank reads",
    "mask": "the visible keys of each row",
    "step_mask": "the visible keys of one attention step, from its offsets",
    "step_attention": "one attention step, from its offsets",
    "merge": "merging partial results by their lse",
    "attention": "attention of a whole buffer on one device",
    "context_parallel": "attention over cp ranks",
    "backward": "gradients",
    "lse": "returning the log-sum-exp",
    "refuse": "refusals with an error code",
    "dual_chunk_swap": "that policy",
    "packed_contiguous": "that policy",
    "packed_dual_chunk_swap": "that policy",
    "cp1": "a group of one rank",
    "cp3": "three ranks, or another number that is no power of two",
    "cp8": "eight ranks",
    "non_causal": "attention without a causal mask",
    "window": "a causal sliding window",
    "right_window": "a window that is not causal",
    "padding": "padding behind documents",
    "tail_padding": "rows past the last offset",
    "zero_length": "documents of no tokens",
    "gqa": "fewer K/V heads than query heads",
    "mqa": "a single K/V head",
    "dv": "value heads of another size than key heads",
    "scale": "a softmax scale that is not the default",
    "poison": "NaN and infinity in padding rows",
    "extreme": "scores far beyond the range of exp",
    "strides": "inputs that are not contiguous, or broadcast",
    "large_offsets": "offsets whose element index passes 2**31",
}
"""What a case may exercise. A declaration lists those that an implementation lacks: its skips are legal only there."""


@dataclass(frozen=True, eq=False)
class Case:
    """One question.

    - `id`: lower case, digits, hyphens; names the files.
    - `why`: the reason that the case exists, in one sentence.
    - `clauses`: ids of the spec that the answer witnesses. `features`: keys of FEATURES that it needs.
    - `inputs`: integers and strings: cu_seqlens, cu_seqlens_padded, total_tokens, policy, cp_size, causal, window,
      softmax_scale (None: the default), and what the operation adds.
    - `tensors`: float inputs by name, exact in float32, float16 and bfloat16 (but for NaN and infinity in padding).
    """

    id: str
    operation: str
    why: str
    clauses: tuple[str, ...]
    features: tuple[str, ...]
    inputs: dict[str, Any]
    tensors: dict[str, Array] = field(default_factory=dict)

    @cached_property
    def layout(self) -> PackedLayout:
        """The layout that the inputs describe."""
        return PackedLayout(
            self.inputs["cu_seqlens"], self.inputs.get("cu_seqlens_padded"), self.inputs.get("total_tokens")
        )

    @property
    def is_step(self) -> bool:
        """Whether it asks about one attention step, whose queries and keys are stored each in their own way."""
        return "cu_seqlens_q" in self.inputs

    @cached_property
    def step(self) -> StepMetadata:
        """The step that the inputs describe."""
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        return StepMetadata.from_offsets(*(self.inputs[name] for name in names))

    @cached_property
    def _layouts_of_step(self) -> tuple[PackedLayout, PackedLayout]:
        inputs = self.inputs
        queries, keys = (PackedLayout(inputs[f"cu_seqlens_{x}"], inputs[f"cu_seqlens_{x}_padded"]) for x in ("q", "kv"))
        return queries, keys

    def layout_of(self, name: str) -> PackedLayout:
        """The layout of the buffer that an array lies in: a step has one of its queries and one of its keys."""
        return self._layouts_of_step[base_name(name) in OF_KEYS] if self.is_step else self.layout

    @property
    def mask(self) -> AttentionMask:
        """The mask that the inputs describe."""
        return AttentionMask(self.inputs["causal"], tuple(self.inputs["window"]))

    @property
    def policy(self) -> Policy:
        """The policy."""
        return Policy(self.inputs["policy"])

    @property
    def cp_size(self) -> int:
        """The number of ranks; 1 for operations without ranks."""
        return int(self.inputs.get("cp_size", 1))

    @property
    def softmax_scale(self) -> float:
        """The scale to use: the one given, else 1 / sqrt(Dqk)."""
        given = self.inputs.get("softmax_scale")
        return 1.0 / float(np.sqrt(self.tensors["q"].shape[2])) if given is None else float(given)


@dataclass(frozen=True, eq=False)
class Expected:
    """The right answer: arrays (integers, bools or float64), or the code of the refusal.

    `bounds`: for each float dtype that an implementation may compute in, the largest absolute error of each output
    (by base name: out, lse, dq, dk, dv, x). Integers, bools, zeros of padding and -inf are exact.
    """

    arrays: dict[str, Array]
    error: str | None = None
    bounds: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Vector:
    """A case, its right answer, and the mutants that fail it (by name, see `mutants`)."""

    case: Case
    expected: Expected
    kills: tuple[str, ...] = ()


def base_name(name: str) -> str:
    """The output that an answer's array belongs to: `out` for out.3."""
    return name.split(".", maxsplit=1)[0]
