"""Read keys and patterns of kernel choices from the text that the log shows."""

import re

from vllm_rocm_ops.vllm.selection.key import Baseline, Decode, Key, Pattern

OF_ATTENTION = re.compile(r"((\S+)\b.*?)( to e4m3(?: by \d+)?)? page (\d+)(?: (\d+) rows)? (\d+) of (\d+) keys")


def key(text: str) -> Key:
    op, _, rest = text.partition(" ")
    shape, _, last = rest.rpartition(" ")
    words, decode = last.split("-"), None
    scope = words.pop() if words[-1] in ("compiled", "eager") else ""
    is_fused = words[-1:] == ["fused"]
    if found := OF_ATTENTION.fullmatch(shape):
        shape, heads, quantized, *numbers = found.groups()
        decode = Decode(heads, quantized or "", *(int(number or 1) for number in numbers))
    made = Key(op, shape, Baseline("-".join(words[: len(words) - is_fused]), is_fused, scope), decode)
    assert str(made) == text
    return made


def pattern(text: str) -> Pattern:
    """Return the pattern of a norm or an activation with this text."""
    op, columns, *traits = text.split()
    shape = text.removeprefix(f"{op} ")
    return Pattern(op, shape, int(columns), "residual" in traits, "column-major" in traits)


def keyed(shapes: dict) -> dict:
    """Return the values of a dictionary of texts, by key."""
    return {key(text): value for text, value in shapes.items()}
