"""thdcp: the exact semantics of packed (THD) context-parallel attention, in NumPy.

The names below are the public interface; each module opens with what it defines. Read them in this order: `layout`,
`partition`, `mask`, `metadata`, `attention`, `collectives`, `context_parallel`.
"""

from refimpl.attention import (
    attention_backward,
    attention_forward,
    varlen_attention_backward,
    varlen_attention_forward,
)
from refimpl.collectives import AgreedError, Collectives, MpiCollectives, run_ranks
from refimpl.context_parallel import (
    RankResult,
    context_parallel_backward,
    context_parallel_forward,
    run_context_parallel,
)
from refimpl.environment import policy_from_environment
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.lse import lse_from, lse_to, merge_partials
from refimpl.mask import AttentionMask
from refimpl.metadata import (
    PaddedForm,
    RankMetadata,
    SequsedForm,
    SlicedForm,
    StepMetadata,
    from_seqused,
    rank_metadata,
    to_padded,
    to_seqused,
    to_sliced,
)
from refimpl.partition import (
    Padding,
    Policy,
    inverse_indices,
    next_token_labels,
    pad_rows,
    padded_for,
    padding_needed,
    partition,
    partition_indices,
    position_ids,
    unpartition,
)

__all__ = [
    "AgreedError",
    "AttentionMask",
    "Collectives",
    "MpiCollectives",
    "PackedLayout",
    "PaddedForm",
    "Padding",
    "Policy",
    "RankMetadata",
    "RankResult",
    "SequsedForm",
    "SlicedForm",
    "SpecError",
    "StepMetadata",
    "attention_backward",
    "attention_forward",
    "context_parallel_backward",
    "context_parallel_forward",
    "from_seqused",
    "inverse_indices",
    "lse_from",
    "lse_to",
    "merge_partials",
    "next_token_labels",
    "pad_rows",
    "padded_for",
    "padding_needed",
    "partition",
    "partition_indices",
    "policy_from_environment",
    "position_ids",
    "rank_metadata",
    "run_context_parallel",
    "run_ranks",
    "to_padded",
    "to_seqused",
    "to_sliced",
    "unpartition",
    "varlen_attention_backward",
    "varlen_attention_forward",
]
