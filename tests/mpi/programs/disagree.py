"""Rank 1 is given another layout, policy, dtype or shape than all others: `disagree.py WHAT`."""

import sys

import numpy as np
from small_case import now, work

from refimpl.collectives import MpiCollectives

group = MpiCollectives()
changes = {
    "nothing": {},
    "layout": {"lengths": [8, 16 * group.size - 8]},
    "policy": {"policy": "dual_chunk_swap"},
    "dtype": {"dtype": np.float64},
    "shape": {"heads": 4},
    "divisibility": {"lengths": [16 * group.size + 1]},
}
change = changes[sys.argv[1]]
work(group)
if group.rank == 1:
    now()
work(group, **(change if group.rank == 1 else {}))
print(f"rank {group.rank} finished")
