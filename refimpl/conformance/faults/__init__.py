"""The faults of `mutants`, one module a kind, each with its `MUTANTS`; `mutant` says what one is and makes it."""
