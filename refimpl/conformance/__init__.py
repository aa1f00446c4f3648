"""The conformance kit: cases with known answers, deliberately wrong implementations, and a judge that names the fault.

- `cases`: what a case is, and the catalogue of all of them.
- `witness`: expected values by a second route that shares no code with `refimpl`.
- `vectors`: cases and expected values as files; strict loading. `generate` is their only writer.
- `implementation`: the reference in small replaceable pieces, and how it answers a case.
- `mutants`: the replacements, each modelled on a real fault; they are in `faults`, by kind.
- `check`: verdicts. `diagnose`: which mutant gives the same wrong numbers. `report`: what a person sees.
- `capture`: tensors from a real training step instead of cases.
"""
