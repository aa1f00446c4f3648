"""A second opinion: the same answers from the English of specs/thd_cp.md, one row at a time.

Imports nothing of refimpl, and shares no formula with it. What refimpl derives from windows and clipped offsets is here
the outcome of asking every row which chunk it lies in, and every pair of rows whether it is visible.
"""

from itertools import pairwise

import numpy as np
from scipy.special import logsumexp, softmax


def rows(real, physical, total):
    """(document, position) of every physical row. [L1] [L4] [L6]"""
    pairs = []
    for row in range(total):
        owner = None
        for d in range(len(physical) - 1):
            if physical[d] <= row < physical[d + 1]:
                owner = d
        if owner is None:
            pairs.append((-1, row - physical[-1]))
        else:
            position = row - physical[owner]
            is_real = position < real[owner + 1] - real[owner]
            pairs.append((owner if is_real else -1, position))
    return pairs


def sees(query, key, causal, window):
    """Whether a query row sees a key row; both are (document, position). [K1] [K2] [K3]"""
    (document_q, position_q), (document_k, position_k) = query, key
    left, right = window
    if document_q < 0 or document_q != document_k:
        return False
    if causal and position_k > position_q:
        return False
    if right != -1 and position_k > position_q + right:
        return False
    return left == -1 or position_k >= position_q - left


def visible_pairs(pairs, causal, window):
    """Every (query row, key row) that is visible, in ascending order."""
    count = len(pairs)
    return [(i, j) for i in range(count) for j in range(count) if sees(pairs[i], pairs[j], causal, window)]


def deal(physical, total, policy, cp_size):
    """(rank, step) of every physical row. [P2] [P3] [P4] [P5]"""
    dealt = []
    for row in range(total):
        if policy == "dual_chunk_swap":
            first, size = 0, 0
            for start, end in zip(physical, [*physical[1:], total], strict=True):
                if start <= row < end:
                    first, size = start, end - start
            chunk = (row - first) // (size // (2 * cp_size))
        elif policy == "packed_contiguous":
            chunk = row // (total // cp_size)
        elif policy == "packed_dual_chunk_swap":
            chunk = row // (total // (2 * cp_size))
        else:
            raise AssertionError(f"the witness does not know {policy}: add its rule here, from the spec")
        # Chunks 0 to cp - 1 go out in order, the second half comes back in reverse.
        dealt.append((chunk, 0) if chunk < cp_size else (2 * cp_size - 1 - chunk, 1))
    return dealt


def steps_of(policy):
    """Attention steps of a rank. [R1]"""
    return {"dual_chunk_swap": 2, "packed_contiguous": 1, "packed_dual_chunk_swap": 2}[policy]


def is_divisible(physical, total, policy, cp_size):
    """Whether the policy can cut the layout evenly."""
    if policy == "dual_chunk_swap":
        extents = [*physical, total]
        return all((b - a) % (2 * cp_size) == 0 for a, b in pairwise(extents))
    return total % (cp_size if policy == "packed_contiguous" else 2 * cp_size) == 0


def step_pairs(cu_q, q_stored, cu_k, k_stored, causal, window, first_query=None):
    """(query row, key row) of one kernel call, by the rule of FlashAttention's documentation. [K4] [K5] [R5]

    With seqlen_k keys and seqlen_q queries, query i is at i + seqlen_k - seqlen_q, and sees the keys from that place
    minus the left bound to that place plus the right bound.
    """
    found = []
    for d in range(len(cu_q) - 1):
        seqlen_q, seqlen_k = cu_q[d + 1] - cu_q[d], cu_k[d + 1] - cu_k[d]
        for i in range(seqlen_q):
            place = i + seqlen_k - seqlen_q if first_query is None else first_query[d] + i
            lowest = 0 if window[0] == -1 else place - window[0]
            highest = seqlen_k - 1 if window[1] == -1 else place + window[1]
            if causal:
                highest = place
            found += [(q_stored[d] + i, k_stored[d] + j) for j in range(seqlen_k) if lowest <= j <= highest]
    return found


def keys_of(pairs, num_queries):
    """The keys of every query row, ascending, from (query, key) pairs."""
    keys = [[] for _ in range(num_queries)]
    for i, j in sorted(pairs):
        keys[i].append(j)
    return keys


def attention(q, k, v, keys, scale):
    """out and lse row by row with SciPy; `keys[i]` are the rows that query i sees. [A1] [A2] [A3] [A4] [A6]"""
    num_queries, heads = q.shape[:2]
    out = np.zeros((num_queries, heads, v.shape[2]))
    lse = np.full((heads, num_queries), -np.inf)
    for h in range(heads):
        shared_by = heads // k.shape[1]
        g = 0
        while (g + 1) * shared_by <= h:  # heads 0 .. shared_by - 1 read K/V head 0, the next ones head 1
            g += 1
        for i in range(num_queries):
            if keys[i]:
                scores = [scale * sum(q[i, h, c] * k[j, g, c] for c in range(q.shape[2])) for j in keys[i]]
                out[i, h] = sum(p * v[j, g] for p, j in zip(softmax(scores), keys[i], strict=True))
                lse[h, i] = logsumexp(scores)
    return out, lse


def loss(q, k, v, dout, keys, scale):
    """sum(dout * out) in whatever number type the inputs are: complex for a derivative, long double for digits.

    Padding rows of dout must hold 0. Heads of a group read the same K/V head by repeating it.
    """
    shared_by = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, shared_by, axis=1), np.repeat(v, shared_by, axis=1)
    total = q.dtype.type(0)
    for i in range(len(q)):
        if keys[i]:
            scores = np.einsum("hc,jhc->hj", q[i], k[keys[i]]) * scale
            weights = np.exp(scores - scores.real.max(axis=1, keepdims=True))
            out = np.einsum("hj,jhc->hc", weights, v[keys[i]]) / weights.sum(axis=1)[:, None]
            total += (out * dout[i]).sum()
    return total


def gradients(q, k, v, dout, keys, scale):
    """dq, dk, dv by complex steps: Im f(x + ih) / h is exact to rounding, as nothing is subtracted. [B1] [B3]

    Squire and Trapp 1998, "Using complex variables to estimate derivatives of real functions".
    """
    step = 1e-30
    tensors = [x.astype(np.complex128) for x in (q, k, v)]
    results = []
    for x in tensors:
        gradient = np.zeros(x.shape)
        for index in np.ndindex(x.shape):
            x[index] += 1j * step
            gradient[index] = loss(*tensors, dout, keys, scale).imag / step
            x[index] = x[index].real
        results.append(gradient)
    return results
