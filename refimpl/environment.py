"""The upstream switch between policies, read once, at the edge, into a value.

Defines `policy_from_environment`. No other module reads it: a policy travels as an argument from here on, so that
forward and backward, and all ranks, use one and the same.
"""

import os
from collections.abc import Mapping

from refimpl.errors import SpecError
from refimpl.partition import Policy

VARIABLE = "NVTE_EXPERIMENTAL_CP_AG_THD_PACKED_CONTIGUOUS"
"""Transformer Engine pull request 3221, before it became `CPLoadBalancingStrategy.NO_LOAD_BALANCE`."""

RETIRED = "packed_super_sequence"
"""The same pull request's first name for packed_dual_chunk_swap; withdrawn there."""

FAMILY = "NVTE_EXPERIMENTAL_CP_AG_THD_"
"""The switch had other names on its way, such as NO_LOAD_BALANCE: one that is on must not be passed over."""


def policy_from_environment(environ: Mapping[str, str] | None = None) -> Policy:
    """The policy that the environment selects: packed_contiguous for "1", dual_chunk_swap for "0", "" and unset.

    Args:
        environ: the variables; None: those of this process.

    Raises:
        SpecError: environment for any other value; policy_retired for a withdrawn selector, as a value of the
            switch or as a switch of its own. [P11]
    """
    variables = os.environ if environ is None else environ
    value = variables.get(VARIABLE, "")
    for name in sorted(variables):
        is_another_name = (name.startswith(FAMILY) and name != VARIABLE) or RETIRED in name.lower()
        if is_another_name and variables[name] not in ("", "0"):
            raise SpecError("policy_retired", f"{name} is no switch any more: unset it, and {_MEND}")
    if value.lower() == RETIRED:
        raise SpecError("policy_retired", f"{VARIABLE}={value} selects a policy that upstream withdrew: {_MEND}")
    match value:
        case "1":
            return Policy.PACKED_CONTIGUOUS
        case "" | "0":
            return Policy.DUAL_CHUNK_SWAP
    raise SpecError("environment", f"{VARIABLE} is {value!r}: expected 1 (packed_contiguous), 0 or unset")


_MEND = f"set {VARIABLE}=1 for packed_contiguous or leave it unset for dual_chunk_swap"
