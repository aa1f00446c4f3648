"""All the cases: what is asked, and why.

Defines `CASES`. `building` turns a layout and a few options into a case; each other module holds the questions of one
kind. Numbers are drawn from the case's name by Python's own generator, the same in every version, as multiples of 1/16
between -2 and 2: exact in float32, float16 and bfloat16. Padding holds such numbers too, or NaN and infinity where a
case says `poison`, so that whatever reads it shows. Lengths are unequal and do not match chunks unless a case is about
that.
"""

from refimpl.conformance.cases import Case
from refimpl.conformance.catalogue.attention import attention_cases, merge_cases
from refimpl.conformance.catalogue.integers import (
    ids_cases,
    labels_cases,
    mask_cases,
    metadata_cases,
    needed_rows_cases,
    partition_cases,
    positions_cases,
    step_mask_cases,
    unpartition_cases,
)
from refimpl.conformance.catalogue.ranks import contiguous_cases, zigzag_cases
from refimpl.conformance.catalogue.refusals import (
    refuse_ids_cases,
    refuse_layout_cases,
    refuse_rank_cases,
    refuse_tensor_cases,
)
from refimpl.conformance.catalogue.steps import step_attention_cases

GROUPS = (
    positions_cases,
    labels_cases,
    ids_cases,
    partition_cases,
    unpartition_cases,
    metadata_cases,
    needed_rows_cases,
    mask_cases,
    step_mask_cases,
    step_attention_cases,
    merge_cases,
    attention_cases,
    contiguous_cases,
    zigzag_cases,
    refuse_layout_cases,
    refuse_ids_cases,
    refuse_rank_cases,
    refuse_tensor_cases,
)

CASES: tuple[Case, ...] = tuple(case for group in GROUPS for case in group())
"""Every case, in the order in which they are best read."""
