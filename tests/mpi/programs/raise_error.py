"""Rank 1, or every rank, raises an exception that nobody catches: `raise_error.py WHERE`."""

import sys
from dataclasses import replace
from typing import Any, NoReturn

from small_case import now, work

from refimpl import collectives
from refimpl.collectives import MpiCollectives
from refimpl.context_parallel import REFERENCE

group = MpiCollectives()
where = sys.argv[1]
parts = REFERENCE


def fail(*_: Any) -> NoReturn:
    now()
    raise ZeroDivisionError("on purpose,\nin two lines")


work(group)
if where == "on every rank":
    fail()
if group.rank == 1:
    match where:
        case "before":
            fail()
        case "in the forward":
            parts = replace(parts, varlen_attention_forward=fail)
        case "in the backward":
            parts = replace(parts, varlen_attention_backward=fail)
        case "in a reduction":
            collectives._sum_in_rank_order = fail
work(group, parts)
if group.rank == 1 and where == "after":
    fail()
group.all_agree({})
print(f"rank {group.rank} finished")
