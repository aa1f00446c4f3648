"""The one error that every refusal raises, and the closed list of reasons to refuse.

Defines `SpecError` and `CODES`. A conformance test compares codes, a person reads messages: a message names what
is wrong, where (index, rank, value) and how to mend it, on one line.
"""

CODES: dict[str, str] = {
    "offsets_type": "offsets are not a readable vector of int32 or int64",
    "offsets_shape": "offsets are not one-dimensional, or hold no entry at all",
    "offsets_start": "offsets do not start at 0",
    "offsets_decreasing": "an offset is smaller than the one before it, or negative",
    "offsets_count": "two vectors of offsets or lengths that belong together differ in size",
    "real_exceeds_physical": "a document has more real tokens than physical rows",
    "total_tokens": "total_tokens is no integer, or smaller than the last physical offset",
    "lengths": "a document length is negative",
    "multiple_of": "a padding multiple is not a positive integer",
    "position_ids": "position ids neither restart at 0 nor continue by 1",
    "segment_ids": "a segment id comes back after another document",
    "policy": "an unknown partition policy",
    "policy_retired": "a selector that upstream has retired",
    "environment": "an environment variable holds a value that has no meaning",
    "cp_size": "cp_size is not a positive integer",
    "cp_rank": "cp_rank is not an integer in [0, cp_size)",
    "not_divisible": "the layout cannot be cut evenly by this policy and cp_size",
    "mask": "a mask is not (bool, two window bounds of -1 or more)",
    "int32_overflow": "an offset does not fit the int32 that kernels take",
    "padding_unsupported": "a form that has no room for padding was asked of a layout with padding",
    "shape": "a tensor has the wrong shape",
    "dtype": "a tensor has a dtype that attention does not take",
    "heads": "the number of query heads is no multiple of the number of K/V heads",
    "lse": "a log-sum-exp holds +inf, which no sum of exponentials of finite scores has",
    "softmax_scale": "the softmax scale is not a finite number",
    "ranks_disagree": "ranks were given different layouts, policies, masks, shapes or dtypes",
    "rank_failed": "another rank failed, or never arrived",
    "missing_package": "an optional package is needed and not installed",
    "file": "a file of tensors, vectors or results is unreadable, unsafe, or not what it says it is",
    "usage": "a file, option or value on the command line is unusable",
}
"""Every code with its meaning. New refusals get a new code; a code is never renamed."""


class SpecError(ValueError):
    """A refusal: `code` is one of `CODES`, the message is one line for a person."""

    def __init__(self, code: str, message: str) -> None:
        if code not in CODES:
            raise KeyError(f"{code!r} is not in refimpl.errors.CODES")
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type["SpecError"], tuple[str, str]]:
        """Pickle by code and message: the default would call the class with the message alone."""
        return (SpecError, (self.code, self.message))
