"""Which keys a query sees.

Defines `AttentionMask` and its predicate. A row is a pair `(document, position)`; visibility is decided on two such
pairs and knows nothing of ranks, policies or padding layouts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import SpecError
from refimpl.layout import MAX_ROWS, IntArray, checked_int


@dataclass(frozen=True)
class AttentionMask:
    """Causality and a sliding window, inside each document.

    Args:
        causal: no query sees a later position. Forces the right bound to 0, whatever `window` says. [K2]
        window: (left, right), how many positions before and behind its own a query sees, bounds included; -1 is
            unlimited. (W, 0) sees W + 1 keys, as in FlashAttention. [K3]

    Raises:
        SpecError: mask.
    """

    causal: bool = True
    window: tuple[int, int] = (-1, -1)

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool | np.bool_):
            raise SpecError("mask", f"causal is {self.causal!r}: expected True or False")
        if not isinstance(self.window, tuple | list) or len(self.window) != 2:
            raise SpecError("mask", f"window is {self.window!r}: expected (left, right)")
        left, right = (checked_int(bound, f"window[{i}]", "mask", minimum=-1) for i, bound in enumerate(self.window))
        if max(left, right) >= MAX_ROWS:
            raise SpecError("mask", f"window is ({left}, {right}): write -1 for unlimited, not a huge number")
        object.__setattr__(self, "causal", bool(self.causal))
        object.__setattr__(self, "window", (left, right))

    @property
    def left(self) -> int:
        """Positions before its own that a query sees; -1: all."""
        return self.window[0]

    @property
    def right(self) -> int:
        """Positions behind its own that a query sees; -1: all; 0 under a causal mask. [K2]"""
        return 0 if self.causal else self.window[1]

    def visible(
        self, document_q: Any, position_q: IntArray, document_k: Any, position_k: IntArray
    ) -> NDArray[np.bool_]:
        """The predicate, for every query against every key: bool [Lq, Lk].

        Args:
            document_q, position_q: [Lq] of the queries, or a scalar document.
            document_k, position_k: [Lk] of the keys, or a scalar document.

        [K1] [K2] [K3]
        """
        query = np.reshape(document_q, (-1, 1))
        ahead = position_k[None, :] - position_q[:, None]
        seen = np.broadcast_to((query == np.reshape(document_k, (1, -1))) & (query >= 0), ahead.shape)
        if self.right >= 0:
            seen = seen & (ahead <= self.right)
        if self.left >= 0:
            seen = seen & (-ahead <= self.left)
        return seen

    def key_range(self, position_q: IntArray, num_keys: IntArray | int) -> tuple[IntArray, IntArray]:
        """The keys `[first, last)` that queries see among positions 0 to num_keys - 1: the predicate, solved.

        All keys of one document that a query sees are neighbours, so two integers a query say it all; first == last
        where it sees none. Arguments broadcast. [K1] [K3]
        """
        limit = np.asarray(num_keys, np.int64)
        last = limit if self.right < 0 else np.clip(position_q + self.right + 1, 0, limit)
        first = np.zeros_like(position_q) if self.left < 0 else np.clip(position_q - self.left, 0, limit)
        first, last = np.broadcast_arrays(first, last)
        return np.minimum(first, last), last
