"""What a capture declares beside its tensors: offsets, policy, ranks, mask, scale, and the conventions of its lse.

Defines `Settings` and `as_settings`. A setting is an array of no dimension, a short vector, or a string; in the
metadata of safetensors everything is a string, such as "8", "true" or "[0, 5, 12]".
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from refimpl.conformance.declaration import DTYPES
from refimpl.conformance.reading import Entry, refuse
from refimpl.errors import SpecError
from refimpl.layout import PackedLayout
from refimpl.mask import AttentionMask
from refimpl.partition import Policy, as_policy, check_ranks

SETTINGS = (
    "cu_seqlens",
    "cu_seqlens_padded",
    "total_tokens",
    "policy",
    "cp_size",
    "cp_rank",
    "causal",
    "window",
    "softmax_scale",
    "dtype",
    "lse_base",
    "lse_layout",
    "lse_empty",
)
VECTORS = ("cu_seqlens", "cu_seqlens_padded")
MAX_OFFSETS = 1 << 20
MAX_RANKS = 1 << 16


@dataclass(frozen=True)
class Settings:
    """Checked declarations; `dtype` and `softmax_scale` are None where the default holds."""

    layout: PackedLayout
    policy: Policy
    cp_size: int
    mask: AttentionMask
    softmax_scale: float | None
    dtype: str | None
    lse_base: float
    lse_heads_last: bool
    lse_empty: float


def readable(path: Path, entries: Mapping[str, Entry]) -> int:
    """The most elements of a setting, after a look at what is declared of each: only offsets may be long."""
    for name, entry in entries.items():
        count = int(np.prod(entry.shape, dtype=object)) if entry.shape else 1
        most = MAX_OFFSETS if name in VECTORS else 2
        if count > most:
            refuse(path, f"{name} declares {count} elements, more than the {most} that are taken")
    return MAX_OFFSETS


def as_settings(found: Mapping[str, Any], source: str) -> Settings:
    """Check what was found, by name.

    Args:
        found: arrays or strings. source: the file, for complaints.

    Raises:
        SpecError: file for what is missing or of the wrong kind, and the codes of layouts, masks, policies and ranks;
            each with `source` in front.
    """
    try:
        return _as_settings({name: _plain(name, value) for name, value in found.items()})
    except SpecError as error:
        raise SpecError(error.code, f"{source}: {error.message}") from None


def _as_settings(found: Mapping[str, Any]) -> Settings:
    for name in ("cu_seqlens", "cp_size", "causal"):
        if name not in found:
            raise SpecError("file", f"{name} is missing")
    cp_size = _integer(found, "cp_size")
    if cp_size > MAX_RANKS:
        raise SpecError("cp_size", f"cp_size is {cp_size}: {MAX_RANKS} are taken at most")
    check_ranks(cp_size)
    if "policy" not in found and cp_size > 1:
        raise SpecError("file", f"policy is missing: expected one of {', '.join(Policy)}")
    total = _integer(found, "total_tokens") if "total_tokens" in found else None
    layout = PackedLayout(found["cu_seqlens"], found.get("cu_seqlens_padded"), total)
    causal = found["causal"]
    if not isinstance(causal, bool):
        raise SpecError("mask", f"causal is {causal!r}: expected true or false")
    window = found.get("window", [-1, -1])
    if not isinstance(window, list) or len(window) != 2 or not all(type(bound) is int for bound in window):
        raise SpecError("mask", f"window is {str(window)[:60]}: expected two integers")
    dtype = _word(found, "dtype", DTYPES) if "dtype" in found else None
    return Settings(
        layout,
        as_policy(str(found.get("policy", Policy.PACKED_CONTIGUOUS))[:60]),
        cp_size,
        AttentionMask(causal, (window[0], window[1])),
        found.get("softmax_scale"),
        dtype,
        float(np.e if _word(found, "lse_base", ("e", "2", 2), "e") == "e" else 2.0),
        _word(found, "lse_layout", ("HT", "TH"), "HT") == "TH",
        float(str(_word(found, "lse_empty", ("-inf", "inf", float("inf"), float("-inf")), "-inf"))),
    )


def _plain(name: str, value: Any) -> Any:
    """A value in Python's own types: integers, floats, bools, strings and lists of these."""
    if isinstance(value, str):
        return _from_text(name, value)
    if value.dtype.kind == "U":
        return _from_text(name, str(value))
    if value.ndim > 1:
        raise SpecError("file", f"{name} has shape {list(value.shape)}: expected a number or a vector")
    if name in VECTORS:
        return value
    plain = value.tolist()
    return plain[0] if isinstance(plain, list) and len(plain) == 1 and name != "window" else plain


WORDS = ("policy", "dtype", "lse_base", "lse_layout", "lse_empty")


def _from_text(name: str, text: str) -> Any:
    """The value of a string: itself for words, else what it is in JSON; Python's True and False will do."""
    if name in WORDS:
        return text.strip()
    try:
        value = json.loads(text.replace("(", "[").replace(")", "]").lower()) if len(text) < 1 << 20 else None
    except (ValueError, RecursionError):
        value = None
    if value is None or isinstance(value, dict | str):
        raise SpecError("file", f"{name} is {text[:60]!r}: expected a number, true, false or a list of numbers")
    return value


def _integer(found: Mapping[str, Any], name: str) -> int:
    value = found[name]
    if type(value) is not int:
        raise SpecError("cp_size" if name == "cp_size" else name, f"{name} is {str(value)[:60]}: expected an integer")
    return value


def _word(found: Mapping[str, Any], name: str, words: tuple[Any, ...], default: Any = None) -> Any:
    value = found.get(name, default)
    if isinstance(value, list) or value not in words:
        shown = ", ".join(dict.fromkeys(str(word) for word in words))
        raise SpecError("file", f"{name} is {str(value)[:60]!r}: expected one of {shown}")
    return value
