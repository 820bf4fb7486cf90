"""Mutants of operators.py that no test can see, with the proof."""

EQUIVALENT: dict[str, str] = {
    "attention/mla.h:run:tail:1": "the loop inside has the same condition: a split without keys only loads ahead, as the last steps of others do",
}
